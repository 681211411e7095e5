//! Tells what the bundle's mounts bring of the host.
//!
//! The links of a source are followed on the host, and the result is compared by device and inode: it may be
//! a link to `/`, or a folder that is bound elsewhere. Whoever can change a link of the source between this
//! look and the low-level runtime's own can change files of the host already.

use std::fs::{self, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use gpushare_quota::REGIONS;
use gpushare_region::path as inner;
use nix::sys::statfs::{
    CGROUP_SUPER_MAGIC, CGROUP2_SUPER_MAGIC, DEBUGFS_MAGIC, FsType, PROC_SUPER_MAGIC, SECURITYFS_MAGIC,
    SYSFS_MAGIC, TRACEFS_MAGIC, statfs,
};
use serde_json::Value;

use super::{devices, has_namespace_of_its_own};
use crate::image::is_bind;
use crate::parts::{entries, text, texts};
use crate::region::LIMITS;
use crate::settings::Programs;

/// What of the host a mount can reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    /// The state folder, anything in it, or a folder around it; writable.
    State,
    /// Programs, libraries and settings of gpushare; writable.
    Programs,
    /// The driver's files; writable.
    Driver,
    /// A socket whose owner takes orders. A read-only mount does not keep the container from connecting.
    Socket,
    /// The host's processes, or writable settings of its kernel.
    Proc,
    /// The kernel's devices and other file systems of its insides; writable.
    Sys,
    /// Cgroups above the container's own; writable.
    Cgroups,
    /// The host's device nodes; writable.
    Dev,
    /// Mounts below it appear on the host.
    Shared,
}

/// Sockets whose owners do what root on the host can do.
const SOCKETS: [&str; 10] = [
    "/run/docker.sock",
    "/run/containerd/containerd.sock",
    "/run/crio/crio.sock",
    "/run/podman/podman.sock",
    "/run/k3s/containerd/containerd.sock",
    "/run/cri-dockerd.sock",
    "/run/dockershim.sock",
    "/run/buildkit/buildkitd.sock",
    "/run/systemd/private",
    "/run/dbus/system_bus_socket",
];
/// Default folder of the settings.
const SETTINGS: &str = "/etc/gpushare";
/// File systems of the kernel's insides, as types of mounts and as the kernel numbers them.
const INSIDES: [&str; 5] = ["sysfs", "debugfs", "tracefs", "securityfs", "configfs"];
const INSIDES_MAGIC: [FsType; 5] =
    [SYSFS_MAGIC, DEBUGFS_MAGIC, TRACEFS_MAGIC, SECURITYFS_MAGIC, FsType(0x6265_6570)];
const CGROUPS_MAGIC: [FsType; 2] = [CGROUP_SUPER_MAGIC, CGROUP2_SUPER_MAGIC];

/// The mounts of a bundle, and the places of the host that they must not reach.
pub(super) struct Mounts<'a> {
    mounts: Vec<Mount<'a>>,
    state: Vec<Place>,
    programs: Vec<Place>,
    driver: Vec<Place>,
    sockets: Vec<Place>,
    cgroups: Vec<Place>,
    dev: Vec<Place>,
    has_cgroup_namespace: bool,
}

/// A file or folder of the host, with links followed.
struct Place {
    path: PathBuf,
    found: Option<Metadata>,
    /// Device and inode of itself and of every folder around it.
    around: Vec<Identity>,
}

type Identity = (u64, u64);

/// One mount of the bundle.
struct Mount<'a> {
    target: &'a str,
    kind: &'a str,
    options: Vec<&'a str>,
    /// What it brings of the host: a bind's source, or the folder that an overlay writes to.
    source: Option<Place>,
    /// Source of a mount that is no bind: perhaps a device.
    device: &'a str,
}

impl Place {
    /// Follows links as far as the path exists.
    fn at(path: &Path) -> Self {
        let real = fs::canonicalize(path).ok().or_else(|| {
            let parent = fs::canonicalize(path.parent()?).ok()?;
            Some(parent.join(path.file_name()?))
        });
        let path = real.unwrap_or_else(|| path.to_path_buf());
        let found = fs::metadata(&path).ok();
        let around =
            path.ancestors().filter_map(|folder| Some(identity(&fs::metadata(folder).ok()?))).collect();
        Self { path, found, around }
    }

    /// Whether `inside` is this or lies in it.
    fn holds(&self, inside: &Self) -> bool {
        self.found.as_ref().is_some_and(|own| inside.around.contains(&identity(own)))
    }

    fn file_system(&self) -> Option<FsType> {
        statfs(&self.path).ok().map(|system| system.filesystem_type())
    }
}

fn identity(found: &Metadata) -> Identity {
    (found.dev(), found.ino())
}

impl<'a> Mount<'a> {
    fn of(mount: &'a Value, bundle: &Path) -> Self {
        let options: Vec<&str> = texts(mount, "/options").collect();
        let upper = options.iter().find_map(|option| option.strip_prefix("upperdir="));
        let source = text(mount, "source");
        let (source, device) = if is_bind(mount) { (Some(source), "") } else { (upper, source) };
        // A relative source is relative to the bundle.
        let source = source.map(|source| Place::at(&bundle.join(source)));
        Self { target: text(mount, "destination"), kind: text(mount, "type"), options, source, device }
    }

    /// The mount's target, escaped for messages.
    fn name(&self) -> String {
        format!("mount {}", self.target.escape_debug())
    }

    fn has(&self, option: &str) -> bool {
        self.options.contains(&option)
    }

    /// Later options win.
    fn is_read_only(&self) -> bool {
        let last = self.options.iter().rfind(|option| matches!(**option, "ro" | "rw" | "rro"));
        last.is_some_and(|last| *last != "rw")
    }

    /// Whether mounts below the source come along and stay writable, now or later: `ro` covers the uppermost
    /// mount only.
    fn leaves_lower_mounts_writable(&self) -> bool {
        let is_recursive = self.has("rbind") || !self.has("bind");
        is_recursive && !self.has("rro") || self.has("slave") || self.has("rslave")
    }

    /// Whether the container can write `place`, which lies in `source`, through this mount.
    fn writes(&self, source: &Place, place: &Place) -> bool {
        let device = |place: &Place| place.found.as_ref().map(Metadata::dev);
        let is_below = device(source) != device(place);
        !self.is_read_only() || is_below && self.leaves_lower_mounts_writable()
    }

    fn writes_one_of(&self, places: &[Place]) -> bool {
        let writes =
            |source: &Place| places.iter().any(|place| source.holds(place) && self.writes(source, place));
        self.source.as_ref().is_some_and(writes)
    }

    /// Whether it can write one of the folders, anything in them, or a folder around them.
    fn writes_around(&self, places: &[Place]) -> bool {
        let lies_in = |source: &Place| places.iter().any(|place| place.holds(source));
        self.writes_one_of(places) || !self.is_read_only() && self.source.as_ref().is_some_and(lies_in)
    }

    /// Whether it lies on a file system of the kernel, and is writable.
    fn writes_kernels(&self, kinds: &[&str], systems: &[FsType]) -> bool {
        let system = self.source.as_ref().and_then(Place::file_system);
        let is_kernels = system.map_or(kinds.contains(&self.kind), |system| systems.contains(&system));
        is_kernels && !self.is_read_only()
    }

    /// Whether it is the mount of one of our two files that an earlier start of the same bundle left: the new
    /// plan replaces it.
    fn is_of_an_earlier_plan(&self, state: &Path) -> bool {
        let names = [(inner::LIMITS, "limits"), (inner::USAGE, "usage")];
        let Some(source) = &self.source else { return false };
        names.iter().any(|(target, name)| {
            // regions/LEASE.members/CONTAINER/usage; earlier versions had regions/LEASE/usage.
            let is_region =
                source.path.ancestors().skip(2).take(2).any(|folder| folder == state.join(REGIONS));
            target.to_str() == Ok(self.target)
                && (is_region && source.path.ends_with(name)
                    || source.path.parent() == Some(&*state.join(LIMITS)))
        })
    }
}

impl<'a> Mounts<'a> {
    pub(super) fn of(json: &'a Value, bundle: &Path, programs: &Programs, driver: &[PathBuf]) -> Self {
        let state = Place::at(programs.state);
        let mounts = entries(json, "/mounts").map(|mount| Mount::of(mount, bundle));
        let mounts = mounts.filter(|mount| !mount.is_of_an_earlier_plan(&state.path)).collect();
        let [limits, regions] = [LIMITS, REGIONS].map(|name| Place::at(&programs.state.join(name)));
        let us = Path::new("/proc/self/exe");
        let ours = [programs.hook, programs.libraries, programs.cache, us, Path::new(SETTINGS)];
        Self {
            mounts,
            state: [state, limits, regions].into(),
            programs: ours.map(Place::at).into(),
            driver: driver.iter().map(|path| Place::at(path)).collect(),
            sockets: SOCKETS.map(|socket| Place::at(socket.as_ref())).into(),
            cgroups: cgroups(),
            dev: [Place::at("/dev".as_ref())].into(),
            has_cgroup_namespace: has_namespace_of_its_own(json, "cgroup"),
        }
    }

    /// The first mount with this reach, as text.
    pub(super) fn reaching(&self, reach: Reach) -> Option<String> {
        self.mounts.iter().find(|mount| self.reaches(mount, reach)).map(Mount::name)
    }

    /// The first mount of a disk of the host, as text.
    pub(super) fn of_disk(&self) -> Option<String> {
        let is_disk =
            |mount: &&Mount| mount.device.starts_with('/') && devices::is_host_disk(mount.device.as_ref());
        self.mounts.iter().find(is_disk).map(Mount::name)
    }

    fn reaches(&self, mount: &Mount, reach: Reach) -> bool {
        let source = mount.source.as_ref();
        match reach {
            Reach::State => mount.writes_around(&self.state),
            Reach::Programs => mount.writes_around(&self.programs),
            Reach::Driver => mount.writes_one_of(&self.driver),
            Reach::Socket => source.is_some_and(|source| self.brings_socket(source)),
            Reach::Proc => source.is_some_and(|source| is_hosts_proc(mount, source)),
            Reach::Sys => mount.writes_kernels(&INSIDES, &INSIDES_MAGIC),
            Reach::Cgroups => self.writes_cgroups(mount),
            Reach::Dev => mount.writes_one_of(&self.dev) || mount.kind == "devtmpfs" && !mount.is_read_only(),
            Reach::Shared => mount.has("shared") || mount.has("rshared"),
        }
    }

    fn brings_socket(&self, source: &Place) -> bool {
        let is_socket = source.found.as_ref().is_some_and(|found| found.file_type().is_socket());
        let named = |socket: &Place| socket.path.file_name() == source.path.file_name();
        self.sockets.iter().any(|socket| source.holds(socket) || is_socket && named(socket))
    }

    /// In a cgroup namespace of its own, a mount that the runtime makes shows only the container's own
    /// cgroup.
    fn writes_cgroups(&self, mount: &Mount) -> bool {
        let is_own = mount.source.is_none() && self.has_cgroup_namespace;
        mount.writes_one_of(&self.cgroups)
            || !is_own && mount.writes_kernels(&["cgroup", "cgroup2"], &CGROUPS_MAGIC)
    }
}

/// The folders where the host has its cgroups mounted.
fn cgroups() -> Vec<Place> {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let of_cgroups = table.lines().filter(|line| line.contains(" - cgroup"));
    of_cgroups.filter_map(|line| line.split(' ').nth(4)).map(|point| Place::at(point.as_ref())).collect()
}

/// Whether the mount shows the host's processes, or settings that it can write. `/proc/PID/root` leads to
/// files of the host even on a read-only mount.
fn is_hosts_proc(mount: &Mount, source: &Place) -> bool {
    let shows_process = || ["self", "root"].iter().any(|link| source.path.join(link).is_symlink());
    source.file_system() == Some(PROC_SUPER_MAGIC) && (!mount.is_read_only() || shows_process())
}
