//! What an engine calls a container outside of a cluster.

use serde::{Deserialize, Serialize};

/// The longest name or image that is kept, in bytes. References of images have 255 at most, and a digest.
const LONGEST: usize = 400;

/// What an engine calls a container, and what it runs. For people and for looking it up, never its identity.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Called {
    /// The name that its user gave it, or that the engine made up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The image, as its user named it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// The compose project that it is a part of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub project: Option<String>,
}

impl Called {
    /// What is called so. A text that could not be printed as it is, and one of no engine's length, is left
    /// out.
    pub fn new(name: Option<&str>, image: Option<&str>, project: Option<&str>) -> Self {
        let plain = |text: &str| {
            let is_plain = (1..=LONGEST).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_graphic());
            is_plain.then(|| text.to_owned())
        };
        let kept = |text: Option<&str>| text.and_then(plain);
        Self { name: kept(name), image: kept(image), project: kept(project) }
    }

    /// Whether nothing is known.
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
