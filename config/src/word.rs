//! Settings whose value is one of a few words.

use crate::error::{ConfigError, value};

/// The meaning of `word`; `None` if it is not `known`.
pub(crate) fn meaning<T: Copy>(word: &str, known: &[(&str, T)]) -> Option<T> {
    known.iter().find(|(name, _)| *name == word).map(|(_, meaning)| *meaning)
}

/// Like [`meaning`], for the value of `key`; the error lists the known words.
pub(crate) fn checked<T: Copy>(key: &'static str, word: &str, known: &[(&str, T)]) -> Result<T, ConfigError> {
    meaning(word, known).ok_or_else(|| {
        let mut names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
        let last = names.pop().unwrap_or_default();
        value(key, word, format!("must be {} or {last}", names.join(", ")))
    })
}
