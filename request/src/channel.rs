//! Who may have written a word of the bundle, and how far it is believed.
//!
//! A bundle tells which annotations a device plugin wrote only by their names, and tells nothing at all of who wrote a
//! variable: the image's author, the user or the plugin. podman passes the annotations of an image, too, so below it no
//! annotation is worth more than a variable.

use crate::Policy;
use crate::container::{Container, Writer};

/// How far a word is believed; a later one is believed more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Trust {
    /// Anybody's, the image's author included.
    #[default]
    Environment,
    /// The pod author's.
    Pod,
    /// A device plugin's, or the engine's caller's.
    Granted,
}

impl Trust {
    /// Whether a word that is believed so far may grant, and not only lower what another granted.
    pub fn grants(self, policy: &Policy) -> bool {
        !policy.strict || self == Self::Granted || policy.ceilings.of(self).is_some()
    }

    /// How far the annotation `key` of `container` is believed.
    pub fn of_annotation(key: &str, container: &Container, policy: &Policy) -> Self {
        let listed = || policy.trusted_annotations.has(key);
        match container.writer() {
            Writer::Podman => Self::Environment,
            Writer::CriO if listed() && policy.crio && is_of_container(key, container) => Self::Granted,
            Writer::CriO => Self::Pod,
            Writer::Containerd | Writer::Other if listed() => Self::Granted,
            Writer::Containerd | Writer::Other => Self::Pod,
        }
    }
}

/// Whether kubelet wrote it for the container itself.
fn is_of_container(key: &str, container: &Container) -> bool {
    let own = container.cri_o_annotations().get(key);
    own.is_some_and(|value| container.annotations().get(key) == Some(value))
}

/// Patterns over the names of annotations, as containerd has them: `*` is any run of characters but `/`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyPatterns(Vec<String>);

impl KeyPatterns {
    /// What device plugins write; the same list stands in containerd's `container_annotations`.
    pub const SHIPPED: [&'static str; 4] = [
        "alloc.gpushare.io/*",
        "tencent.com/vcuda-core",
        "tencent.com/vcuda-memory",
        "tencent.com/vcuda-device",
    ];

    /// These patterns.
    pub fn new(patterns: Vec<String>) -> Self {
        Self(patterns)
    }

    fn has(&self, key: &str) -> bool {
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
    use serde_json::json;

    use super::*;

    fn trust(annotations: serde_json::Value, key: &str, crio: bool) -> Trust {
        let container = Container::from_json(&json!({ "annotations": annotations }));
        Trust::of_annotation(key, &container, &Policy { crio, ..Policy::default() })
    }

    #[test]
    fn an_annotation_is_believed_by_its_name_and_by_the_engine_that_passed_it() {
        let key = "alloc.gpushare.io/memory";
        let pod = json!({"io.kubernetes.cri.container-type": "container", key: "4GiB", "gpushare.io/memory": "4GiB"});
        assert_eq!(trust(pod.clone(), key, false), Trust::Granted);
        assert_eq!(trust(pod, "gpushare.io/memory", false), Trust::Pod);
        assert_eq!(trust(json!({key: "4GiB"}), key, false), Trust::Granted);
        // podman passes what the image's author wrote into the image's manifest, and marks its bundles last.
        let podman = json!({key: "80GiB", "io.container.manager": "libpod", "io.kubernetes.cri.container-type": "container"});
        assert_eq!(trust(podman, key, true), Trust::Environment);
    }

    #[test]
    fn cri_o_is_believed_in_what_it_says_of_the_container_alone() {
        let key = "alloc.gpushare.io/memory";
        let bundle = |own: &str| {
            json!({
                key: "4GiB", "io.kubernetes.cri-o.ContainerType": "container", "io.kubernetes.cri-o.Annotations": own,
            })
        };
        let own = r#"{"alloc.gpushare.io/memory":"4GiB"}"#;
        assert_eq!(trust(bundle(own), key, true), Trust::Granted);
        assert_eq!(trust(bundle(own), key, false), Trust::Pod, "the settings name another engine");
        assert_eq!(trust(bundle("{}"), key, true), Trust::Pod, "a pod's annotation");
        assert_eq!(
            trust(bundle(r#"{"alloc.gpushare.io/memory":"1GiB"}"#), key, true),
            Trust::Pod,
            "another value"
        );
    }

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
