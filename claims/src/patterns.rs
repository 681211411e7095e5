//! Patterns over the names of annotations, in containerd's syntax.

/// A list of patterns in containerd's syntax: `*` matches any run of characters except `/`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyPatterns(Vec<String>);

impl KeyPatterns {
    /// The annotations that device plugins write. containerd's setting `container_annotations` needs the same
    /// list.
    pub const SHIPPED: [&'static str; 6] = [
        "alloc.gpushare.io/*",
        "cdi.k8s.io/nvidia-device-plugin_*",
        "nvidia.cdi.k8s.io/nvidia-device-plugin_*",
        "tencent.com/vcuda-core",
        "tencent.com/vcuda-memory",
        "tencent.com/vcuda-device",
    ];

    /// Makes a list of these patterns, without the shipped ones.
    pub fn new(patterns: Vec<String>) -> Self {
        Self(patterns)
    }

    /// Whether one of the patterns matches the whole `key`.
    pub fn has(&self, key: &str) -> bool {
        self.0.iter().any(|pattern| matches(pattern, key))
    }
}

impl Default for KeyPatterns {
    fn default() -> Self {
        Self(Self::SHIPPED.map(str::to_owned).to_vec())
    }
}

fn matches(pattern: &str, key: &str) -> bool {
    let Some((head, tail)) = pattern.split_once('*') else { return pattern == key };
    let Some(rest) = key.strip_prefix(head) else { return false };
    let run = rest.find('/').unwrap_or(rest.len());
    let ends = rest.char_indices().map(|(at, _)| at).chain([rest.len()]);
    ends.take_while(|at| *at <= run).any(|at| matches(tail, &rest[at..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stops_at_a_slash() {
        for (pattern, key, want) in [
            ("a/*", "a/b", true),
            ("a/*", "a/b/c", false),
            ("a/*", "a/", true),
            ("*/memory", "x.y/memory", true),
            ("a.*.b", "a.x.b", true),
            ("a.*.b", "a.x.bc", false),
            ("a", "a", true),
            ("a", "ab", false),
            ("a*", "aä", true),
        ] {
            assert_eq!(matches(pattern, key), want, "{pattern} on {key}");
        }
    }
}
