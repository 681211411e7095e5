//! The loader's caches that are mounted into the containers of a lease, where the image's own cannot be
//! replaced: a file for each container, in a folder beside the region's.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use super::{REGIONS, Region, RegionError, make_private, new_file};

/// What follows a lease's id in the name of the folder of caches.
const CACHES: &str = "caches";

/// Whether `path` is that of a container's cache, of any lease.
pub(crate) fn is_loader_cache(path: &Path) -> bool {
    let Some(folder) = path.parent().filter(|folder| folder.extension().is_some_and(|end| end == CACHES))
    else {
        return false;
    };
    folder.parent().and_then(Path::file_name).is_some_and(|name| name == REGIONS)
}

impl Region {
    /// Path on the host of the cache for `container`.
    pub(crate) fn loader_cache(&self, container: &str) -> PathBuf {
        self.caches().join(container)
    }

    /// Writes the cache for `container`, which its users can only read.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(crate) fn write_loader_cache(&self, container: &str, bytes: &[u8]) -> Result<(), RegionError> {
        let write = || {
            make_private(&self.caches())?;
            // A creation that was killed and tried again has left one.
            self.remove_loader_cache(container);
            new_file(&self.loader_cache(container), 0o444)?.write_all(bytes)
        };
        write().map_err(|source| self.io(source))
    }

    /// Removes the cache of `container`, if it has one. A container that has it mounted keeps it.
    pub(super) fn remove_loader_cache(&self, container: &str) {
        if Path::new(container).file_name().is_some_and(|name| name == container) {
            let _ = fs::remove_file(self.loader_cache(container));
        }
    }

    /// Removes all caches and their folder.
    pub(super) fn remove_loader_caches(&self) {
        let names = fs::read_dir(self.caches()).into_iter().flatten().flatten();
        names.for_each(|entry| drop(fs::remove_file(entry.path())));
        let _ = fs::remove_dir(self.caches());
    }

    fn caches(&self) -> PathBuf {
        self.folder.with_file_name(format!("{}.{CACHES}", self.name))
    }
}
