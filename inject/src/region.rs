//! A container's region: the two files `limits` and `usage`, which lie on two file systems.
//!
//! A container may write `usage`. Each `usage` file is on a tmpfs of its own, which bounds the host memory
//! that the container can take. These are mounted in a [`namespace`] of their own. All `limits` files are on
//! one other tmpfs, so that no file that a container may write is on a file system with limits. Both files
//! are made before the container and removed with its lease.
//!
//! From layout 3 on the file names carry the layout's number. Another version of gpushare may be installed in
//! place of this one while the container runs: it does not find files that it could only spoil.

mod live;
mod loader_cache;
mod mapped;
mod namespace;
mod shared;
mod stage;
mod table;

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use gpushare_inventory::NOBODYS;
use gpushare_quota::{Enforcement, Lease, REGIONS, lock_without_queue};
use gpushare_region::{
    ComputePolicy, DeviceLimits, LIMITS_LEN, LIMITS_VERSION, TooManyDevices, USAGE_LEN, USAGE_VERSION,
    empty_usage_header, encode_limits, set_supervised,
};
use gpushare_request as request;
use namespace::Namespace;
use nix::libc;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

pub use live::{Measuring, UsageError};
pub(crate) use loader_cache::is_loader_cache;

use crate::context_costs::ContextCosts;
use crate::supervision::Budgets;

// The names of both files carry this one number.
const _: () = assert!(LIMITS_VERSION == USAGE_VERSION);

/// Bytes of a `usage` file's tmpfs: the file, a page of slack, and the folder.
const SIZE: usize = USAGE_LEN + 2 * 4096;
/// Name of the folder of all limits files, in the state folder.
pub(crate) const LIMITS: &str = "limits";
/// Takes away a mount that some process may still use, and never where a link leads.
const AWAY: MntFlags = MntFlags::MNT_DETACH.union(MntFlags::UMOUNT_NOFOLLOW);

/// Where a container's two files are on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// The lease's own folder, which is made first and removed last. Earlier versions mounted the region
    /// there.
    folder: PathBuf,
    /// Path of its limits file, beside those of all other leases.
    limits: PathBuf,
    /// The lease's id, as text.
    name: String,
    /// Where it is mounted, below `/` and its name.
    namespace: Namespace,
    /// The budgets of all leases, by which supervisors go.
    budgets: Budgets,
    id: i64,
}

/// Why a region cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// The folder, the mount or a file cannot be made.
    #[error("cannot make the region folder {path}")]
    Io {
        /// The region's folder on the host.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The kernel has no mounts that are attached nowhere (open_tree(2), move_mount(2)).
    #[error("a share needs Linux 5.2 or newer: this kernel cannot copy a mount (open_tree)")]
    Kernel,
    /// Another container of the pod has the region, in a mount namespace that this process does not see.
    #[error(
        "the pod holds a share whose limits {path} cannot be seen from here: its engine runs in another mount \
         namespace than when it started the pod's first container; start the pod anew"
    )]
    Hidden {
        /// The region's folder on the host.
        path: PathBuf,
    },
    /// The pod's other containers were started by another version of gpushare.
    #[error(
        "the pod holds a share that another version of gpushare made ({path}), whose limits this one's libraries \
         cannot read; start the pod anew"
    )]
    Foreign {
        /// The region's folder on the host.
        path: PathBuf,
    },
    /// Another process held the lock on the regions for 5 seconds.
    #[error("another container is still making its region beside {path}; try again")]
    Busy {
        /// The region's folder on the host.
        path: PathBuf,
    },
    /// More GPUs than the files have room for.
    #[error("a share spans at most {} GPUs", gpushare_region::MAX_DEVICES)]
    TooManyDevices,
}

impl Region {
    /// The region of a lease, whether it exists or not.
    pub fn of(state: &Path, lease_id: i64) -> Self {
        let name = lease_id.to_string();
        let all_limits = state.join(LIMITS);
        let (limits, namespace) = (all_limits.join(of_layout(&name)), Namespace::beside(&all_limits));
        let budgets = Budgets::of(state);
        Self { folder: state.join(REGIONS).join(&name), limits, name, namespace, budgets, id: lease_id }
    }

    /// Whether its files have a layout that this version does not know. Such files are left as they are.
    pub fn is_foreign(&self) -> bool {
        self.limits.symlink_metadata().is_err() && !self.all_limits().is_empty()
    }

    /// Paths of its limits files, of any layout.
    fn all_limits(&self) -> Vec<PathBuf> {
        let folder = self.limits.parent().and_then(|folder| fs::read_dir(folder).ok());
        let names = folder.into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
        names.filter(|path| path.file_stem().is_some_and(|stem| stem == self.name.as_str())).collect()
    }

    /// Host path of `limits`, which the container can only read.
    pub fn limits(&self) -> PathBuf {
        self.limits.clone()
    }

    /// Makes folder, tmpfs and both files for `lease`, and shows `usage` to the low-level runtime. Whole GPUs
    /// have no limits and get the folder alone: it shows that a container runs, should somebody delete the
    /// quota store.
    ///
    /// # Errors
    /// When any of it cannot be made. Nothing is left then.
    pub fn make(&self, lease: &Lease) -> Result<(), RegionError> {
        let limits = encoded(lease).map_err(|TooManyDevices| RegionError::TooManyDevices)?;
        let io = |source| self.io(source);
        // A folder that is there already belongs to somebody else, so it is not removed here.
        self.make_folder().map_err(io)?;
        if !lease.enforcement.terms().has_region {
            return Ok(());
        }
        let made = if is_supervised(lease) { self.budgets.make(lease) } else { Ok(()) };
        made.and_then(|()| self.fill(&lease.member.key.container, &limits)).map_err(|source| {
            self.remove();
            io(source)
        })
    }

    /// Writes what contexts are charged as on the lease's GPUs, before any process of the container runs.
    ///
    /// # Errors
    /// When the file is not there or cannot be written.
    pub fn charge_contexts(&self, lease: &Lease, costs: &ContextCosts) -> Result<(), RegionError> {
        self.set_context_costs(lease, costs).map_err(|source| self.io(source))
    }

    fn io(&self, source: std::io::Error) -> RegionError {
        match source.raw_os_error() {
            Some(libc::ENOSYS) => RegionError::Kernel,
            _ => RegionError::Io { path: self.folder.clone(), source },
        }
    }

    fn make_folder(&self) -> std::io::Result<()> {
        self.folder.parent().map_or(Ok(()), make_private)?;
        DirBuilder::new().mode(0o700).create(&self.folder)
    }

    fn fill(&self, container: &str, limits: &[u8]) -> std::io::Result<()> {
        if let Some(folder) = self.limits.parent() {
            table::ensure(folder)?;
        }
        self.namespace.ensure()?;
        let tree = self.namespace.enter(|| {
            self.mount()?;
            self.copy()
        })?;
        // A region that has limits is complete.
        new_file(&self.limits, 0o444)?.write_all(limits)?;
        self.attach(&tree, container)
    }

    /// Where the region lies in the namespace of all regions.
    fn place(&self) -> PathBuf {
        Path::new("/").join(&self.name)
    }

    /// Mounts the tmpfs with `usage`, in the namespace of all regions.
    fn mount(&self) -> std::io::Result<()> {
        let place = self.place();
        DirBuilder::new().mode(0o700).create(&place)?;
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        let options = format!("size={SIZE},nr_inodes=3,mode=0700");
        mount(Some("gpushare"), &place, Some("tmpfs"), flags, Some(options.as_str()))?;
        let mut usage = new_file(&place.join(usage_name()), 0o666)?;
        usage.write_all(&empty_usage_header())?;
        usage.set_len(u64::try_from(USAGE_LEN).unwrap_or(u64::MAX))
    }

    /// Removes the region; succeeds also if there is none. What cannot be removed is left for the next sweep,
    /// which finds it by its folder.
    pub fn remove(&self) {
        self.leave_all();
        self.remove_loader_caches();
        self.budgets.remove(self.id);
        let _ = umount2(&self.folder, AWAY);
        match if_there(self.namespace.enter(|| self.unmount())) {
            Ok(_) => {}
            Err(_) => return,
        }
        match fs::remove_file(&self.limits) {
            Err(error) if error.kind() != ErrorKind::NotFound => return,
            Err(_) => self.all_limits().into_iter().for_each(|path| drop(fs::remove_file(path))),
            Ok(()) => {}
        }
        let _ = fs::remove_dir(&self.folder);
    }

    fn unmount(&self) -> std::io::Result<()> {
        let place = self.place();
        let _ = umount2(&place, AWAY);
        fs::remove_dir(place)
    }

    /// Lease ids of the regions below the state folder, and of what is left of one. Call this before reading
    /// the living leases: a lease is written before its region is made, so a region of this set without a
    /// lease is nobody's.
    pub fn existing(state: &Path) -> BTreeSet<i64> {
        let names_in = |folder: &Path| {
            let entries = fs::read_dir(folder).into_iter().flatten();
            entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect()
        };
        let mounted = Namespace::beside(&state.join(LIMITS)).enter(|| Ok(names_in(Path::new("/"))));
        let folders = [REGIONS, LIMITS].into_iter().map(|folder| names_in(&state.join(folder)));
        let budgets = names_in(Budgets::of(state).folder());
        let names = folders.chain(mounted).chain([budgets]).flat_map(|names: Vec<String>| names);
        // The number may be followed by a layout's, or by what else a region has.
        names.filter_map(|name| name.split('.').next()?.parse().ok()).collect()
    }
}

/// The name of a file in the layout that is compiled here. Names of layout 2, the first that ran, have no
/// number.
fn of_layout(name: &str) -> String {
    if LIMITS_VERSION == 2 { name.to_owned() } else { format!("{name}.{LIMITS_VERSION}") }
}

/// The name of the file that the container may write.
fn usage_name() -> String {
    of_layout("usage")
}

/// The state folder around the folder of limits files.
fn state(limits: &Path) -> std::io::Result<&Path> {
    limits.parent().ok_or_else(|| ErrorKind::InvalidInput.into())
}

/// Makes a folder that only its owner may open, if it is not there.
pub(crate) fn make_private(path: &Path) -> std::io::Result<()> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

/// Holds the lock of a folder, which only root can open, until the file is closed. `None` where others hold
/// it for seconds.
fn locked(folder: &Path) -> std::io::Result<Option<File>> {
    lock_without_queue(File::open(folder)?)
}

/// What was looked for; `None` where it does not exist.
fn if_there<T>(found: std::io::Result<T>) -> std::io::Result<Option<T>> {
    match found {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        found => found.map(Some),
    }
}

/// Makes a file with exactly `mode`, whatever the umask: container users of any id read `limits` and write
/// `usage`. No container's user owns it.
fn new_file(path: &Path, mode: u32) -> std::io::Result<File> {
    let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
    file.set_permissions(fs::Permissions::from_mode(mode))?;
    fchown(&file, Some(NOBODYS), Some(NOBODYS))?;
    Ok(file)
}

/// The limits file of a lease as it is made.
fn encoded(lease: &Lease) -> Result<[u8; LIMITS_LEN], TooManyDevices> {
    let mut file = encode_limits(&limits(lease), lease.host_memory.bytes())?;
    if is_supervised(lease) {
        set_supervised(&mut file);
    }
    Ok(file)
}

fn is_supervised(lease: &Lease) -> bool {
    lease.enforcement.is_supervised()
}

fn limits(lease: &Lease) -> Vec<DeviceLimits> {
    let limits = lease.grants.iter().map(|grant| DeviceLimits {
        uuid: grant.gpu.bytes(),
        memory_bytes: grant.memory.bytes(),
        cores_percent: grant.cores.map_or(100, |cores| u32::from(cores.percent())),
        policy: match lease.compute_policy {
            _ if lease.enforcement == Enforcement::Mps => ComputePolicy::Mps,
            // The card's own scheduler keeps it, set from outside.
            _ if lease.enforcement == Enforcement::Scheduled => ComputePolicy::None,
            _ if grant.cores.is_none() => ComputePolicy::None,
            request::ComputePolicy::Fixed => ComputePolicy::Fixed,
            // Libraries put nobody before others.
            request::ComputePolicy::Burst | request::ComputePolicy::Latency => ComputePolicy::Burst,
            request::ComputePolicy::None => ComputePolicy::None,
        },
        priority: u32::from(lease.priority.level()),
        ceiling_percent: u32::from(lease.ceiling.max(grant.cores.unwrap_or(lease.ceiling)).percent()),
        most_bytes: lease.elastic.map_or(0, |bounds| bounds.most.bytes()),
    });
    limits.collect()
}
