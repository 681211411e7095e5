//! What becomes of the loader's cache in a container: programs ask it for the driver's libraries
//! (`ldconfig -p`).

use std::path::PathBuf;

use crate::image::{CacheFile, LOADER_CACHE, RootFolder};
use crate::loader_cache::with_libraries;
use crate::region::{Region, RegionError};

/// The change of the loader's cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum CacheChange {
    /// None: the image has no cache, or lists the libraries already.
    #[default]
    None,
    /// The image's cache cannot take the libraries, because of this.
    Unusable(String),
    /// The file in the container's root gets these bytes.
    Replace(Vec<u8>),
    /// A file with these bytes is mounted over that in the container's root.
    Mount {
        /// What the file holds.
        bytes: Vec<u8>,
        /// Its path on the host.
        source: PathBuf,
    },
}

impl CacheChange {
    /// The change by which the image's `cache` lists `libraries`, which are paths in the container. `source`
    /// is the host's path of a file that can be mounted.
    pub(super) fn of(cache: Option<&CacheFile>, libraries: &[PathBuf], source: PathBuf) -> Self {
        let Some(cache) = cache else { return Self::None };
        let bytes = match &cache.bytes {
            Ok(bytes) => with_libraries(bytes, libraries).map_err(|error| error.to_string()),
            Err(why) => Err((*why).to_owned()),
        };
        match bytes {
            Err(why) => Self::Unusable(why),
            Ok(None) => Self::None,
            Ok(Some(bytes)) if cache.is_replaceable => Self::Replace(bytes),
            Ok(Some(bytes)) => Self::Mount { bytes, source },
        }
    }

    /// What a person should know of the change.
    pub fn note(&self) -> Option<String> {
        match self {
            Self::None => None,
            Self::Unusable(why) => Some(format!(
                "the image's {LOADER_CACHE} stays as it is, so that `ldconfig -p` does not list the driver: {why}; run \
                 ldconfig when the image is built"
            )),
            Self::Replace(_) => Some(format!(
                "{LOADER_CACHE} will list the driver's libraries; it is written into the container's own layer"
            )),
            Self::Mount { .. } => Some(format!(
                "a file that lists the driver's libraries is mounted over {LOADER_CACHE}, so that ldconfig in the container \
                 cannot replace it (the root is read-only, or not a layer that the engine made for this container)"
            )),
        }
    }

    /// Replaces the cache in `root`, or makes the file that is to be mounted. A cache that cannot be replaced
    /// keeps no container from its start: the loader finds the libraries without it.
    pub(crate) fn apply(
        &self,
        root: &RootFolder,
        region: &Region,
        container: &str,
    ) -> Result<(), RegionError> {
        match self {
            Self::None => {}
            Self::Unusable(_) => {
                let note = self.note();
                tracing::warn!(container, note, "loader cache");
            }
            Self::Mount { bytes, .. } => region.write_loader_cache(container, bytes)?,
            Self::Replace(bytes) => {
                if let Err(error) = root.write_loader_cache(bytes) {
                    tracing::warn!(container, %error, "the loader's cache cannot be written: ldconfig -p does not list the driver");
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_that_cannot_be_read_is_named_with_its_reason() {
        let file = |bytes| CacheFile { bytes, is_replaceable: true };
        for (bytes, want) in [
            (Err("it is no regular file"), "the driver: it is no regular file; run ldconfig"),
            (Ok(vec![0; 100]), "the driver: it is no cache of glibc's format 1.1; run ldconfig"),
        ] {
            let change = CacheChange::of(Some(&file(bytes)), &["/usr/lib/libcuda.so.1".into()], "/s".into());
            let note = change.note().unwrap();
            assert!(note.contains(want), "{note}");
        }
        assert_eq!(CacheChange::of(None, &[], "/s".into()).note(), None);
    }
}
