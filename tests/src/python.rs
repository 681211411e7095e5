//! Python programs as users of a GPU write them, run in a container whose root is this machine's.

use std::path::PathBuf;

use crate::artifacts;

/// The interpreter of the environment that `tests/setup/python.sh` makes; it may be absent.
#[must_use]
pub fn interpreter() -> PathBuf {
    artifacts::checkout().join(".cache/python/bin/python")
}

/// A program of `tests/programs/` by its file name.
///
/// # Panics
/// When there is no such program.
#[must_use]
pub fn program(name: &str) -> PathBuf {
    let path = artifacts::checkout().join("tests/programs").join(name);
    assert!(path.exists(), "there is no {}", path.display());
    path
}
