//! The name and image of a container outside of a cluster, as the engine reports them.

use serde::{Deserialize, Serialize};

/// Length limit of a recorded name or image, in bytes. Image references have at most 255, plus a digest.
const LONGEST: usize = 400;

/// The names of a container and of its image. For display and search only, never an identity.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Called {
    /// The name that its user or the engine gave it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The image, as named by its user.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// The compose project that it belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub project: Option<String>,
}

impl Called {
    /// Keeps the names that are safe to print and of a plausible length, and drops the others.
    pub fn new(name: Option<&str>, image: Option<&str>, project: Option<&str>) -> Self {
        let plain = |text: &str| {
            let is_plain = (1..=LONGEST).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_graphic());
            is_plain.then(|| text.to_owned())
        };
        let kept = |text: Option<&str>| text.and_then(plain);
        Self { name: kept(name), image: kept(image), project: kept(project) }
    }

    /// Whether all names are unknown.
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_may_be_printed_is_kept() {
        let called = Called::new(Some("web-1"), Some("ghcr.io/a/b:1@sha256:0f"), Some("shop"));
        assert_eq!(called.name.as_deref(), Some("web-1"));
        assert_eq!(called.image.as_deref(), Some("ghcr.io/a/b:1@sha256:0f"));
        for strange in ["", "a b", "a\n", "\u{1b}[2J", "\u{e9}", &"a".repeat(401)] {
            assert!(Called::new(Some(strange), Some(strange), Some(strange)).is_nothing(), "{strange:?}");
        }
    }
}
