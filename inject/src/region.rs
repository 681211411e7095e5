//! The two files of a container, `limits` and `usage`, on two file systems.
//!
//! A container may write `usage`: a tmpfs of its own bounds what it can take of the host's memory. All
//! `limits` files lie on one other tmpfs, so that nothing that a container may write is on a file system with
//! limits. Both files exist before the container does and go when its lease goes.

mod live;
mod mapped;
mod table;

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use gpushare_quota::{Lease, REGIONS};
use gpushare_region::{
    ComputePolicy, DeviceLimits, TooManyDevices, USAGE_LEN, empty_usage_header, encode_limits,
};
use gpushare_request as request;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

pub use live::UsageError;

/// The file, a page of slack, and the folder.
const SIZE: usize = USAGE_LEN + 2 * 4096;
/// The folder of all limits files, in the state folder.
pub(crate) const LIMITS: &str = "limits";

/// Where a container's two files are on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// Its folder, with `usage` in it. It is made first and goes last.
    folder: PathBuf,
    /// Its file among all limits files.
    limits: PathBuf,
}

/// Why a region cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// Folder, mount or file.
    #[error("cannot make the region folder {path}")]
    Io {
        /// The folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// More GPUs than the files have room for.
    #[error("a share spans at most {} GPUs", gpushare_region::MAX_DEVICES)]
    TooManyDevices,
}

impl Region {
    /// The region of a lease, whether it exists or not.
    pub fn of(state: &Path, lease_id: i64) -> Self {
        let name = lease_id.to_string();
        Self { folder: state.join(REGIONS).join(&name), limits: state.join(LIMITS).join(&name) }
    }

    /// The read-only file.
    pub fn limits(&self) -> PathBuf {
        self.limits.clone()
    }

    /// The file that the container may write.
    pub fn usage(&self) -> PathBuf {
        self.folder.join("usage")
    }

    /// Makes folder, tmpfs and both files for `lease`.
    ///
    /// # Errors
    /// When any of it cannot be made; nothing is left then.
    pub fn create(&self, lease: &Lease) -> Result<(), RegionError> {
        let limits = encode_limits(&limits(lease)).map_err(|TooManyDevices| RegionError::TooManyDevices)?;
        let io = |source| RegionError::Io { path: self.folder.clone(), source };
        // A folder that is there already is somebody else's: it is not taken away.
        self.make_folder().map_err(io)?;
        self.fill(&limits).map_err(|source| {
            self.remove();
            io(source)
        })
    }

    /// Makes the folder alone, for whole GPUs: it tells a quota store that was deleted of a container that
    /// runs.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn create_empty(&self) -> Result<(), RegionError> {
        self.make_folder().map_err(|source| RegionError::Io { path: self.folder.clone(), source })
    }

    fn make_folder(&self) -> std::io::Result<()> {
        if let Some(parent) = self.folder.parent() {
            match DirBuilder::new().mode(0o700).create(parent) {
                Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
        }
        DirBuilder::new().mode(0o700).create(&self.folder)
    }

    fn fill(&self, limits: &[u8]) -> std::io::Result<()> {
        if let Some(folder) = self.limits.parent() {
            table::ensure(folder)?;
        }
        new_file(&self.limits, 0o444)?.write_all(limits)?;
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        let options = format!("size={SIZE},nr_inodes=3,mode=0700");
        mount(Some("gpushare"), &self.folder, Some("tmpfs"), flags, Some(options.as_str()))?;
        let mut usage = new_file(&self.usage(), 0o666)?;
        usage.write_all(&empty_usage_header())?;
        usage.set_len(u64::try_from(USAGE_LEN).unwrap_or(u64::MAX))
    }

    /// Takes the region away; one that is not there is success. What cannot be removed is left for the next
    /// sweep, which finds it by its folder.
    pub fn remove(&self) {
        let _ = umount2(&self.folder, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW);
        match fs::remove_file(&self.limits) {
            Err(error) if error.kind() != ErrorKind::NotFound => {}
            _ => drop(fs::remove_dir(&self.folder)),
        }
    }

    /// The regions below the state folder, by their leases' ids. Ask this before asking for the living
    /// leases: a lease is written before its region is made, so a region of this list without a lease is
    /// nobody's.
    pub fn existing(state: &Path) -> Vec<i64> {
        let entries = fs::read_dir(state.join(REGIONS)).into_iter().flatten().filter_map(Result::ok);
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
    }
}

/// `mode` counts whatever the umask: container users of any id read `limits` and write `usage`.
fn new_file(path: &Path, mode: u32) -> std::io::Result<File> {
    let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
    file.set_permissions(fs::Permissions::from_mode(mode))?;
    Ok(file)
}

fn limits(lease: &Lease) -> Vec<DeviceLimits> {
    let limits = lease.grants.iter().map(|grant| DeviceLimits {
        uuid: grant.gpu.bytes(),
        memory_bytes: grant.memory.bytes(),
        cores_percent: grant.cores.map_or(100, |cores| u32::from(cores.percent())),
        policy: match lease.compute_policy {
            _ if grant.cores.is_none() => ComputePolicy::None,
            request::ComputePolicy::Fixed => ComputePolicy::Fixed,
            request::ComputePolicy::Burst => ComputePolicy::Burst,
            request::ComputePolicy::None => ComputePolicy::None,
        },
        priority: u32::from(lease.priority.level()),
        ceiling_percent: u32::from(lease.ceiling.max(grant.cores.unwrap_or(lease.ceiling)).percent()),
    });
    limits.collect()
}
