//! Lists folders. An unreadable folder has no entries.

use std::fs::{self, DirEntry};
use std::path::{Path, PathBuf};

pub(crate) fn entries(folder: &Path) -> impl Iterator<Item = DirEntry> + use<> {
    fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok)
}

pub(crate) fn paths(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    entries(folder).map(|entry| entry.path())
}

/// The names in `folder` that are valid UTF-8.
pub(crate) fn names(folder: &Path) -> impl Iterator<Item = String> + use<> {
    entries(folder).filter_map(|entry| entry.file_name().into_string().ok())
}
