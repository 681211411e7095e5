//! One key of gpushare's own, as it was met: by its own name, or by the name of a CDI device that means it.

use std::borrow::Cow;
use std::fmt;

use gpushare_claims::{Rank, RequestError, ValueError, shortened};

/// One key as it was met.
#[derive(Clone, Debug)]
pub(crate) struct Entry<'a> {
    /// As the user wrote it.
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
    /// The value.
    pub fn parse<T>(&self) -> Result<T, RequestError>
    where
        T: std::str::FromStr,
        T::Err: Into<ValueError>,
    {
        self.value.parse().map_err(|error: T::Err| self.malformed(error))
    }

    /// The error of a value that is not in its key's grammar.
    pub fn malformed(&self, error: impl Into<ValueError>) -> RequestError {
        RequestError::Malformed {
            key: shortened(&self.key),
            value: shortened(&self.value),
            source: error.into(),
        }
    }
}
