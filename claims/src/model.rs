//! Filters over a GPU's model name, such as `A100*,!*40GB*`.

/// Globs over model names; a filter without patterns accepts every model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelFilter {
    wanted: Vec<String>,
    unwanted: Vec<String>,
}

/// The text is not a model filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a model filter is a comma list of patterns with * and ?, each perhaps after !, as A100*,!*40GB*")]
pub struct ModelError;

impl std::str::FromStr for ModelFilter {
    type Err = ModelError;

    fn from_str(text: &str) -> Result<Self, ModelError> {
        let mut filter = Self::default();
        for item in text.split(',').map(str::trim) {
            let (list, pattern) = match item.strip_prefix('!') {
                Some(pattern) => (&mut filter.unwanted, pattern),
                None => (&mut filter.wanted, item),
            };
            if pattern.is_empty() || pattern.len() > 128 {
                return Err(ModelError);
            }
            list.push(pattern.to_owned());
        }
        Ok(filter)
    }
}

impl std::fmt::Display for ModelFilter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let unwanted = self.unwanted.iter().map(|pattern| format!("!{pattern}"));
        let patterns: Vec<String> = self.wanted.iter().cloned().chain(unwanted).collect();
        f.write_str(&patterns.join(","))
    }
}

impl ModelFilter {
    /// Whether `model` matches a wanted pattern, if there are any, and no unwanted pattern. Case is ignored,
    /// and a leading "NVIDIA " may be left out.
    pub fn takes(&self, model: &str) -> bool {
        let model = model.to_ascii_lowercase();
        let short = model.strip_prefix("nvidia ").unwrap_or(&model);
        let fits = |pattern: &String| {
            let pattern = pattern.to_ascii_lowercase();
            glob(pattern.as_bytes(), model.as_bytes()) || glob(pattern.as_bytes(), short.as_bytes())
        };
        (self.wanted.is_empty() || self.wanted.iter().any(fits)) && !self.unwanted.iter().any(fits)
    }
}

/// Glob match: `*` matches any run of characters, `?` any one. Each star costs at most time linear in the
/// text, so no pattern takes exponential time.
fn glob(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p, t));
                p += 1;
            }
            Some(&c) if c == b'?' || c == text[t] => {
                p += 1;
                t += 1;
            }
            _ => match star {
                Some((at, from)) => {
                    star = Some((at, from + 1));
                    p = at + 1;
                    t = from + 1;
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|&c| c == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_wants_and_excludes_by_glob() {
        for (filter, model, want) in [
            ("A100*", "NVIDIA A100-SXM4-80GB", true),
            ("a100*,!*40GB*", "NVIDIA A100-SXM4-40GB", false),
            ("NVIDIA A100*", "NVIDIA A100-SXM4-80GB", true),
            ("!*T4", "NVIDIA H100 80GB HBM3", true),
            ("!*T4", "Tesla T4", false),
            ("H?00*", "NVIDIA H200", true),
            ("H100", "NVIDIA H100 80GB HBM3", false),
        ] {
            assert_eq!(filter.parse::<ModelFilter>().unwrap().takes(model), want, "{filter} on {model}");
        }
        assert!(ModelFilter::default().takes("anything"));
        for filter in ["", "A100,,", "!"] {
            assert_eq!(filter.parse::<ModelFilter>(), Err(ModelError), "{filter:?}");
        }
    }
}
