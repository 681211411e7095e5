//! The state folder: store, inventory cache and regions live below it, and nobody but its owner may look inside.

use std::fs::{self, DirBuilder};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// A folder that was checked: a directory of this user, mode 0700.
#[derive(Clone, Debug)]
pub struct StateFolder(PathBuf);

/// Why the state folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// It could not be made or looked at.
    #[error("cannot use the state folder {path}; run as root, or set paths.state")]
    Io {
        /// The folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// It is the machine's root's, and this process is root in a user namespace only.
    #[error(
        "a rootless engine gets no share: the account of the GPUs in {path} is the machine's root's; run \
         the container by an engine of root"
    )]
    Rootless {
        /// The folder.
        path: PathBuf,
    },
    /// Somebody else could read or replace what is in it.
    #[error(
        "the state folder {path} must be a directory of root with mode 0700; move it away and let gpushare make it"
    )]
    Unsafe {
        /// The folder.
        path: PathBuf,
    },
}

impl StateFolder {
    /// Makes the folder if it is absent, and checks it.
    ///
    /// # Errors
    /// When it cannot be made, is a link, belongs to another user or is open to others.
    pub fn open(path: &Path) -> Result<Self, StateError> {
        let io = |source| StateError::Io { path: path.into(), source };
        let rootless = || StateError::Rootless { path: path.into() };
        match DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() == ErrorKind::PermissionDenied && is_rootless() => {
                return Err(rootless());
            }
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(io(error)),
            _ => {}
        }
        let metadata = fs::symlink_metadata(path).map_err(io)?;
        let this_user = fs::metadata("/proc/self").map_err(io)?.uid();
        if metadata.uid() != this_user && is_rootless() {
            return Err(rootless());
        }
        if !metadata.is_dir() || metadata.uid() != this_user || metadata.mode() & 0o077 != 0 {
            return Err(StateError::Unsafe { path: path.into() });
        }
        // SQLite refuses a path with links in it.
        fs::canonicalize(path).map(Self).map_err(io)
    }

    /// The folder's path, without links.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

/// Whether this process is in a user namespace in which the machine's root does not exist, as below a rootless engine. Files
/// of root belong to nobody there.
pub fn is_rootless() -> bool {
    fs::read_to_string("/proc/self/uid_map").is_ok_and(|map| !maps_root(&map))
}

/// Whether a `uid_map` (inside, outside, length) has the outer root in it.
fn maps_root(map: &str) -> bool {
    map.lines().any(|line| line.split_whitespace().nth(1) == Some("0"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_rootless_engine_is_told_by_its_uid_map() {
        for (map, root) in [
            ("         0          0 4294967295\n", true),
            ("         0       1000          1\n         1     200000      65536\n", false),
            ("         0     100000      65536\n", false),
            ("         0       1000          1\n         1          0          1\n", true),
        ] {
            assert_eq!(maps_root(map), root, "{map:?}");
        }
    }

    #[test]
    fn a_folder_is_made_private_and_any_other_is_refused() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("state");
        StateFolder::open(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
        StateFolder::open(&path).unwrap();
        let link = base.path().join("link");
        symlink(&path, &link).unwrap();
        assert!(matches!(StateFolder::open(&link), Err(StateError::Unsafe { .. })));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o750)).unwrap();
        assert!(matches!(StateFolder::open(&path), Err(StateError::Unsafe { .. })));
        assert!(matches!(StateFolder::open(&base.path().join("no/such")), Err(StateError::Io { .. })));
    }
}
