//! The state folder. Store, inventory cache and regions are below it, and only its owner can read it.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use nix::fcntl::OFlag;
use nix::sys::statfs::fstatfs;

use crate::{deeds, ended, found, refusals};

/// The folder in the state folder with one entry per lease, named by the lease's id. The entry is made before
/// the container starts. A new store is only created if there is no entry.
pub const REGIONS: &str = "regions";

/// The link in the state folder to the folder that outlives a boot.
pub(crate) const LASTING: &str = "lasting";

/// A checked state folder: a directory of this user, with mode 0700, on a disk or in the memory of this
/// machine.
#[derive(Clone, Debug)]
pub struct StateFolder(PathBuf);

/// Why the state folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The folder could not be created or read.
    #[error("cannot use the state folder {path}; run as root, or set paths.state")]
    Io {
        /// The state folder as configured.
        path: PathBuf,
        /// The error from the system.
        source: std::io::Error,
    },
    /// The parent folder is missing, for example after a simulated node was deleted but not its settings.
    #[error(
        "the state folder {path} cannot be made, since the folder around it does not exist; make that, or correct paths.state in \
         the settings (`gpushare config show`)"
    )]
    NoParent {
        /// The state folder as configured.
        path: PathBuf,
    },
    /// It belongs to the machine's root, and this process belongs to another user, or is root only in a user
    /// namespace.
    #[error(
        "a rootless engine gets no share: the account of the GPUs in {path} is the machine's root's; run \
         the container by an engine of root"
    )]
    Rootless {
        /// The state folder as configured.
        path: PathBuf,
    },
    /// Another machine or a program serves it and may share it with other machines, whose leases would mix
    /// with this node's.
    #[error(
        "the state folder {path} lies on {kind}, which is not this machine's own; set paths.state to a local folder"
    )]
    Remote {
        /// The state folder as configured.
        path: PathBuf,
        /// The kind of file system.
        kind: &'static str,
    },
    /// It is not a directory of this user with mode 0700, so others could read or replace its content.
    #[error(
        "the state folder {path} must be a directory of root with mode 0700; move it away and let gpushare make it"
    )]
    Unsafe {
        /// The state folder as configured.
        path: PathBuf,
    },
}

impl StateFolder {
    /// Creates the folder if it is absent, and checks it.
    ///
    /// # Errors
    /// When the folder cannot be created, is a link, is not on a local file system, belongs to another user
    /// or is open to others.
    pub fn open(path: &Path) -> Result<Self, StateError> {
        let io = |source| StateError::Io { path: path.into(), source };
        let rootless = || StateError::Rootless { path: path.into() };
        match DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() == ErrorKind::PermissionDenied && is_rootless() => {
                return Err(rootless());
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(StateError::NoParent { path: path.into() });
            }
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(io(error)),
            _ => {}
        }
        // O_PATH opens any file, including a link, and reads nothing.
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW;
        let folder = OpenOptions::new().read(true).custom_flags(flags.bits()).open(path).map_err(io)?;
        // Check this first, because a file server may refuse everything else.
        if let Some(kind) = remote(&folder).map_err(io)? {
            return Err(StateError::Remote { path: path.into(), kind });
        }
        let metadata = folder.metadata().map_err(io)?;
        let this_user = fs::metadata("/proc/self").map_err(io)?.uid();
        if metadata.uid() != this_user && (metadata.uid() == 0 || is_rootless()) {
            return Err(rootless());
        }
        if !metadata.is_dir() || metadata.uid() != this_user || metadata.mode() & 0o077 != 0 {
            return Err(StateError::Unsafe { path: path.into() });
        }
        // Resolve links in the parent path once, here.
        fs::canonicalize(path).map(Self).map_err(io)
    }

    /// Returns the folder's path, without links.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Creates the folder `lasting`, which outlives the boot, and keeps the history there. If that fails, the
    /// history stays in the state folder.
    pub fn keep_history_in(&self, lasting: &Path) {
        let link = self.0.join(LASTING);
        if fs::read_link(&link).is_ok_and(|found| found == lasting) && is_roots_alone(lasting).is_ok() {
            return;
        }
        let make = || -> std::io::Result<()> {
            DirBuilder::new().recursive(true).mode(0o700).create(lasting)?;
            is_roots_alone(lasting)?;
            // Create it under another name first: another process may be doing the same.
            let new = self.0.join(format!("{LASTING}.{}", std::process::id()));
            std::os::unix::fs::symlink(lasting, &new)?;
            fs::rename(&new, &link).inspect_err(|_| drop(fs::remove_file(&new)))
        };
        if let Err(error) = make() {
            // Otherwise a folder that others may write to would stay in use.
            let _ = fs::remove_file(&link);
            tracing::warn!(folder = %lasting.display(), %error, "the history ends with this boot");
        }
    }

    /// Removes history files that were last written before `limit`.
    pub fn forget_history_before(&self, limit: SystemTime) {
        refusals::journal(&self.0).forget_before(limit);
        ended::journal(&self.0).forget_before(limit);
        found::journal(&self.0).forget_before(limit);
        deeds::journal(&self.0).forget_before(limit);
    }
}

/// Fails if other users could write to the folder, or another machine serves it.
fn is_roots_alone(folder: &Path) -> std::io::Result<()> {
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits()).open(folder)?;
    if let Some(kind) = remote(&file)? {
        return Err(std::io::Error::other(format!("it lies on {kind}, which is not this machine's own")));
    }
    let (data, user) = (file.metadata()?, fs::metadata("/proc/self")?.uid());
    match data.is_dir() && data.uid() == user && data.mode() & 0o022 == 0 {
        true => Ok(()),
        false => {
            Err(std::io::Error::other("it must be a directory of root into which nobody else may write"))
        }
    }
}

/// The kind of file system of `file` if a network or a program serves it; `None` for a local one.
fn remote(file: &File) -> std::io::Result<Option<&'static str>> {
    let kind = fstatfs(file)?.filesystem_type().0;
    Ok(REMOTE.iter().find(|(number, _)| i64::from(*number) == kind).map(|(_, name)| *name))
}

/// File systems on which several machines may see the same files, or whose locks a program decides, by their
/// numbers in statfs(2). An unlisted file system counts as local: there are more local ones, and new ones
/// appear.
const REMOTE: [(u32, &str); 18] = [
    (0x6969, "NFS"),
    (0xff53_4d42, "CIFS"),
    (0xfe53_4d42, "SMB2"),
    (0x517b, "SMB"),
    (0x564c, "NCP"),
    (0x0102_1997, "9P"),
    (0x6573_5546, "FUSE"),
    (0x00c3_6400, "Ceph"),
    (0x5346_414f, "AFS"),
    (0x6b41_4653, "AFS"),
    (0x7375_7245, "Coda"),
    (0x0bd0_0bd0, "Lustre"),
    (0x4750_4653, "GPFS"),
    (0x0116_1970, "GFS2"),
    (0x7461_636f, "OCFS2"),
    (0x1983_0326, "BeeGFS"),
    (0xaad7_aaea, "PanFS"),
    (0x786f_4256, "a folder of VirtualBox"),
];

/// Whether this process is in a user namespace without the machine's root, as with a rootless engine. Files
/// of root belong to the user "nobody" there.
pub fn is_rootless() -> bool {
    fs::read_to_string("/proc/self/uid_map").is_ok_and(|map| !maps_root(&map))
}

/// Whether a `uid_map` (columns: inside, outside, length) maps the host's root.
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
    fn memory_and_disks_are_local_and_no_number_stands_twice() {
        for path in ["/proc/self", "/dev/shm", "/sys"] {
            let Ok(folder) = File::open(path) else { continue };
            assert_eq!(remote(&folder).unwrap(), None, "{path}");
        }
        let numbers: std::collections::BTreeSet<u32> = REMOTE.iter().map(|(number, _)| *number).collect();
        assert_eq!(numbers.len(), REMOTE.len());
    }

    #[test]
    fn a_folder_below_a_missing_one_is_told_apart_from_a_lack_of_rights() {
        let base = tempfile::tempdir().unwrap();
        let told = StateFolder::open(&base.path().join("gone/run")).unwrap_err();
        assert!(matches!(told, StateError::NoParent { .. }), "{told}");
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
        fs::write(base.path().join("file"), "").unwrap();
        assert!(matches!(StateFolder::open(&base.path().join("file/such")), Err(StateError::Io { .. })));
    }
}
