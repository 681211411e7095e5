//! One of gpushare's own keys with its value. It was written under its own name, or as a CDI device that
//! stands for it.

use std::borrow::Cow;
use std::fmt;

use gpushare_claims::{Rank, RequestError, ValueError, shortened};

/// One key with its value.
#[derive(Clone, Debug)]
pub(crate) struct Entry<'a> {
    /// The key as the user wrote it, for messages; for a CDI device its kind.
    pub key: String,
    pub name: &'static str,
    pub value: Cow<'a, str>,
    pub rank: Rank,
    pub is_variable: bool,
}

impl fmt::Display for Entry<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={:?}", shortened(&self.key), shortened(&self.value))
    }
}

impl Entry<'_> {
    /// Parses the value.
    pub fn parse<T>(&self) -> Result<T, RequestError>
    where
        T: std::str::FromStr,
        T::Err: Into<ValueError>,
    {
        self.value.parse().map_err(|error: T::Err| self.malformed(error))
    }

    /// The error for a value that the key does not accept.
    pub fn malformed(&self, error: impl Into<ValueError>) -> RequestError {
        RequestError::Malformed {
            key: shortened(&self.key),
            value: shortened(&self.value),
            source: error.into(),
        }
    }
}
