//! The plan: what must change in a container, as OCI parts. It is a pure value, made of values: nothing here
//! reads the disk. Whoever uses the plan decides how to apply it.

mod cache_change;
mod told;

use std::collections::BTreeSet;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use gpushare_inventory::{Capability, DeviceNode, Extent, Gpu};
use gpushare_quota::{Enforcement, Lease};
use gpushare_region::path as inner;
use gpushare_request::{Kept, Request};
use oci_spec::runtime::{Hook, LinuxDevice, LinuxDeviceCgroup, LinuxDeviceType, Mount};
use serde::Serialize;

use crate::driver_limit::DriverLimiter;
use crate::edit::NVIDIA_MAJOR;
use crate::host_files::{HostFiles, LibraryKind};
use crate::image::{Image, LOADER_CACHE};
use crate::mps::MpsFolder;
use crate::outside_plan::OutsidePlan;
use crate::plan_parts::PlanParts;
use crate::region::Region;
use crate::settings::Programs;
use crate::supervision::{Budgets, Supervised, boards};

pub use cache_change::CacheChange;

/// The complete change for one container.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// Device nodes: the granted GPUs and the control nodes.
    pub devices: Vec<LinuxDevice>,
    /// The same nodes as bind mounts, for a container with a user namespace, where mknod is not allowed.
    pub device_mounts: Vec<Mount>,
    /// One rule per node: read and write, never mknod.
    pub device_rules: Vec<LinuxDeviceCgroup>,
    /// Driver files, the interception libraries, the region files, the administrator's own mounts.
    pub mounts: Vec<Mount>,
    /// Registers the container's init with the lease.
    pub prestart: Hook,
    /// Gives the lease back, where only the low-level runtime knows when the container has ended.
    pub poststop: Option<Hook>,
    /// Groups that may open a granted device node which not everybody may open.
    pub additional_gids: Vec<u32>,
    /// Environment variables of other systems' requests, with the value that each gets in the container.
    pub variables: Vec<(String, String)>,
    /// Environment variables that tell the container's programs what they have, in another system's words.
    pub told: Vec<(String, String)>,
    /// Whether the container may make no user namespaces.
    #[serde(skip)]
    pub denies_user_namespaces: bool,
    /// What the bundle keeps of NVIDIA's list of GPUs for a later run.
    #[serde(skip)]
    pub kept: Kept,
    /// Minor numbers of the GPUs that were handed to the bundle before an earlier start.
    #[serde(skip)]
    pub handed: BTreeSet<u64>,
    /// Minor numbers of the nodes of MIG instances that were handed to it then.
    #[serde(skip)]
    pub handed_capabilities: BTreeSet<u64>,
    /// The driver's programs that need an ELF interpreter: path of each in the container, and that of its
    /// interpreter, which the image must have.
    #[serde(skip)]
    pub interpreters: Vec<(PathBuf, PathBuf)>,
    /// Targets in `mounts` that are folders; all others are files.
    #[serde(skip)]
    pub folders: BTreeSet<PathBuf>,
    /// The change of the loader's cache. A mount of it is in `mounts`.
    #[serde(skip)]
    pub loader_cache: CacheChange,
    /// What sets the driver's own limit, once the container exists and before its program starts.
    #[serde(skip)]
    pub limiter: Option<DriverLimiter>,
    /// A supervisor to start, which holds the container's memory from outside.
    #[serde(skip)]
    pub supervised: Option<Supervised>,
    /// Parts of the node that the plan does not give.
    #[serde(skip)]
    pub outside: OutsidePlan,
}

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// A volume brings a driver of its own. Our files cannot be mounted over its files, which are the host's.
    #[error(
        "the volume over {folder} brings a driver of its own, which the container would find beside its share; mount it \
         elsewhere, or ask for the whole GPU with GPUSHARE_MODE=exclusive"
    )]
    DriverVolume {
        /// The folder in the container.
        folder: PathBuf,
    },
    /// CUDA needs a node that the driver has not made.
    #[error("/dev/nvidia-uvm is missing, which CUDA needs; create it with `gpushare system nodes`")]
    NoUvm,
    /// The lease names a GPU that the node does not have (any more).
    #[error("the granted GPU {0} is gone from this node; see the kernel log")]
    GpuGone(String),
}

impl Plan {
    /// Whether the plan has limits, which only an intercepted share has. Otherwise it gives whole GPUs, or
    /// leaves the limit to another system's library.
    pub(crate) fn is_share(&self) -> bool {
        self.mounts.iter().any(|mount| mount.destination().as_os_str().as_bytes() == inner::LIMITS.to_bytes())
    }

    /// Makes the plan of `lease` for a container with this image on this node.
    ///
    /// # Errors
    /// When a granted GPU or /dev/nvidia-uvm is missing, or a volume brings a driver of its own.
    pub fn new(request: &Request, lease: &Lease, parts: PlanParts) -> Result<Self, PlanError> {
        let PlanParts { files, image, programs, .. } = parts;
        let nodes = device_nodes(request, lease, parts)?;
        let terms = lease.enforcement_for(request).terms();
        let mut mounts = match terms.is_intercepted {
            true => interception(lease, programs, image, files)?,
            false => drivers_own(image, files),
        };
        mounts.extend(companions(terms.extent, image, files));
        let served = lease.grants.iter().filter(|_| lease.enforcement_for(request) == Enforcement::Mps);
        mounts.extend(served.flat_map(|grant| MpsFolder::of(programs.state, grant.gpu).mounts()));
        for (extra, _) in &files.extra_mounts {
            let access = if extra.writable { "rw" } else { "ro" };
            mounts.push(bind(&extra.source, &extra.destination, &[access, "nosuid", "nodev", "noexec"]));
        }
        let source = Region::of(programs.state, lease.id).loader_cache(&lease.member.key.container);
        let loader_cache = CacheChange::of(image.loader_cache.as_ref(), &listed(image, files), source);
        if let CacheChange::Mount { source, .. } = &loader_cache {
            mounts.push(read_only(source, Path::new(LOADER_CACHE)));
        }
        // An image that ran before may have our targets as copies of its own, which gives one target two
        // mounts: the first counts.
        let mut targets = BTreeSet::new();
        mounts.retain(|mount| targets.insert(mount.destination().clone()));
        let extra = files.extra_mounts.iter().filter(|(_, is_folder)| *is_folder);
        let extra = extra.map(|(extra, _)| extra.destination.clone());
        let folders = extra.chain(MpsFolder::folders()).filter(|path| targets.contains(path));
        Ok(Self {
            devices: nodes.iter().map(|node| device(node)).collect(),
            device_mounts: nodes.iter().map(|node| device_mount(node)).collect(),
            device_rules: nodes.iter().map(|node| rule(node)).collect(),
            mounts,
            prestart: hook("prestart", lease, parts, parts.limiter),
            poststop: parts.needs_poststop.then(|| hook("poststop", lease, parts, None)),
            loader_cache,
            limiter: parts.limiter.cloned(),
            supervised: supervised(request, lease, parts),
            additional_gids: groups(&nodes),
            variables: request.variables.clone(),
            told: told::variables(request, lease, parts.gpus),
            denies_user_namespaces: programs.denies_user_namespaces,
            kept: request.kept(),
            handed: request.handed.iter().map(|minor| u64::from(*minor)).collect(),
            handed_capabilities: request.handed_capabilities.iter().map(|minor| u64::from(*minor)).collect(),
            interpreters: interpreters(files),
            folders: folders.collect(),
            outside: OutsidePlan::of(lease, parts),
        })
    }

    /// The paths in the container where the plan mounts something, each with whether it is a folder.
    pub fn targets(&self) -> impl Iterator<Item = (&Path, bool)> {
        self.mounts
            .iter()
            .map(|mount| (mount.destination().as_path(), self.folders.contains(mount.destination())))
    }
}

/// The supervisor that the wrapper starts for a container, if one holds it.
fn supervised(request: &Request, lease: &Lease, parts: PlanParts) -> Option<Supervised> {
    let is_supervised = lease.enforcement_for(request).is_supervised();
    let control = &parts.nodes.control.host_path;
    let grants = lease.grants.iter();
    let gpus = grants.filter_map(|grant| parts.gpus.iter().find(|gpu| gpu.uuid == grant.gpu));
    is_supervised.then(|| Supervised {
        program: parts.programs.supervisor.program.into(),
        driver: parts.driver_version.to_owned(),
        control: control.clone(),
        uvm: control.with_file_name("nvidia-uvm"),
        gpus: gpus.map(|gpu| gpu.node.host_path.clone()).collect(),
        budget: Budgets::of(parts.programs.state).path(lease.id),
        limits: Region::of(parts.programs.state, lease.id).limits(),
        boards: boards(parts.programs.state),
    })
}

/// The nodes of the granted GPUs, in the lease's order, and those that every client or a capability needs.
fn device_nodes<'a>(
    request: &Request,
    lease: &Lease,
    parts: PlanParts<'a>,
) -> Result<Vec<&'a DeviceNode>, PlanError> {
    let (shared, mut nodes) = (parts.nodes, Vec::new());
    for grant in &lease.grants {
        let gpu: Option<&Gpu> = parts.gpus.iter().find(|gpu| gpu.uuid == grant.gpu);
        for node in gpu.ok_or_else(|| PlanError::GpuGone(grant.gpu.to_string()))?.nodes() {
            // Instances of one GPU have its node in common, and perhaps that of a GPU instance.
            if !nodes.contains(&node) {
                nodes.push(node);
            }
        }
    }
    nodes.push(&shared.control);
    if request.capabilities.has(Capability::Compute) {
        nodes.push(shared.uvm.as_ref().ok_or(PlanError::NoUvm)?);
    }
    let shows = [Capability::Graphics, Capability::Display].iter().any(|c| request.capabilities.has(*c));
    if shows {
        let granted = |uuid| lease.grants.iter().any(|grant| grant.gpu == uuid);
        nodes.extend(&shared.modeset);
        nodes.extend(shared.render.iter().filter(|(uuid, _)| granted(*uuid)).map(|(_, node)| node));
    }
    Ok(nodes)
}

/// The groups of the nodes that not everybody may open. Group 0 (root) is given to nobody, nor is a group
/// that may not read and write its node: then only the owner can open the node.
fn groups(nodes: &[&DeviceNode]) -> Vec<u32> {
    let mut groups = Vec::new();
    // A MIG instance's nodes are opened for reading alone.
    let needs = |node: &DeviceNode| if u64::from(node.major) == NVIDIA_MAJOR { 0o006 } else { 0o004 };
    for node in nodes.iter().filter(|node| node.mode & needs(node) != needs(node)) {
        if node.mode & 0o060 == 0o060 && node.gid != 0 {
            groups.push(node.gid);
        } else {
            let path = node.host_path.display();
            tracing::warn!(node = %path, "only its owner may open it: a container's other users cannot use the GPU");
        }
    }
    groups.sort_unstable();
    groups.dedup();
    groups
}

/// The mounts of an intercepted share: our libraries under every name of the driver's, the driver's own under
/// the private name, and the region files. Copies that the image brings are covered by ours too.
fn interception(
    lease: &Lease,
    programs: &Programs,
    image: &Image,
    files: &HostFiles,
) -> Result<Vec<Mount>, PlanError> {
    if let Some(folder) = &image.driver_volume {
        return Err(PlanError::DriverVolume { folder: folder.clone() });
    }
    let mut mounts = Vec::new();
    for library in &files.libraries {
        let Some(ours) = &library.fitted else { continue };
        mounts.push(read_only(&library.driver, Path::new(library.kind.private)));
        if library.requested {
            mounts.extend(under_its_names(ours, library.kind, image));
        }
        mounts.extend(covers(image, library.kind.stem, ours));
    }
    let region = Region::of(programs.state, lease.id);
    mounts.push(bind(&region.limits(), &c_path(inner::LIMITS), &["ro", "nosuid", "nodev", "noexec"]));
    mounts.push(bind(
        &region.staged(&lease.member.key.container),
        &c_path(inner::USAGE),
        &["rw", "nosuid", "nodev", "noexec"],
    ));
    Ok(mounts)
}

/// The driver's libraries under their own names, where nothing is intercepted.
fn drivers_own(image: &Image, files: &HostFiles) -> Vec<Mount> {
    files.libraries.iter().flat_map(|library| under_its_names(&library.driver, library.kind, image)).collect()
}

/// The driver's further libraries, programs and data files for the requested capabilities.
fn companions(extent: Extent, image: &Image, files: &HostFiles) -> Vec<Mount> {
    let mut mounts = Vec::new();
    for library in &files.companions {
        let in_folder = |name| read_only(&library.host_path, &image.library_folder.join(name));
        mounts.extend(library.names.iter().map(in_folder));
        // With a whole GPU the image may use a newer driver of its own (cuda-compat) and its companions:
        // those stay visible.
        let name = library.names.first().filter(|_| extent == Extent::Share);
        if let Some(stem) = name.and_then(|name| name.split(".so").next()) {
            mounts.extend(covers(image, stem, &library.host_path));
        }
    }
    mounts.extend(files.driver_files.iter().map(|file| read_only(&file.host_path, &file.container_path)));
    mounts
}

/// The paths in the container of the driver's libraries that an ldconfig lists: those whose names begin as
/// a library's, in the folder that it searches.
fn listed(image: &Image, files: &HostFiles) -> Vec<PathBuf> {
    let requested = files.libraries.iter().filter(|library| library.requested);
    let both = requested.flat_map(|library| names(library.kind));
    let names = both.chain(files.companions.iter().flat_map(|library| library.names.clone()));
    let is_listed = |name: &String| name.starts_with("lib") && !name.contains('/');
    names.filter(is_listed).map(|name| image.library_folder.join(name)).collect()
}

/// The driver's programs with their ELF interpreters.
fn interpreters(files: &HostFiles) -> Vec<(PathBuf, PathBuf)> {
    let programs = files.driver_files.iter();
    let needed = programs.filter_map(|file| Some((file.container_path.clone(), file.interpreter.clone()?)));
    needed.collect()
}

/// Mounts `file` over each copy of the library in the image, wherever the loader may find it first.
fn covers(image: &Image, stem: &str, file: &Path) -> Vec<Mount> {
    image.copies_of(stem).map(|copy| read_only(file, copy)).collect()
}

/// Mounts `file` under the names that programs open.
fn under_its_names(file: &Path, library: &LibraryKind, image: &Image) -> [Mount; 2] {
    names(library).map(|name| read_only(file, &image.library_folder.join(name)))
}

/// The names that programs open: the development name and the SONAME. A versioned name exists in a container
/// only if its image brings it; then [`covers`] handles it.
fn names(library: &LibraryKind) -> [String; 2] {
    [".so", ".so.1"].map(|end| format!("{}{end}", library.stem))
}

fn c_path(path: &std::ffi::CStr) -> PathBuf {
    PathBuf::from(path.to_string_lossy().into_owned())
}

/// Mount options of the driver's files and of ours. The last two belong to every mount of a plan.
pub(crate) const READ_ONLY: [&str; 5] = ["ro", "nosuid", "nodev", "rbind", "rprivate"];

fn read_only(source: &Path, destination: &Path) -> Mount {
    bind(source, destination, &READ_ONLY[..3])
}

pub(crate) fn bind(source: &Path, destination: &Path, options: &[&str]) -> Mount {
    let options = options.iter().chain(&READ_ONLY[3..]).map(|option| (*option).to_owned());
    let mut mount = Mount::default();
    mount.set_destination(destination.into()).set_source(Some(source.into()));
    mount.set_typ(Some("bind".into())).set_options(Some(options.collect()));
    mount
}

fn device(node: &DeviceNode) -> LinuxDevice {
    let mut device = LinuxDevice::default();
    device.set_path(node.path.clone()).set_typ(LinuxDeviceType::C);
    device.set_major(node.major.into()).set_minor(node.minor.into());
    device.set_file_mode(Some(node.mode)).set_uid(Some(node.uid)).set_gid(Some(node.gid));
    device
}

fn device_mount(node: &DeviceNode) -> Mount {
    bind(&node.host_path, &node.path, &["rw", "nosuid", "noexec"])
}

/// A rule allows to read and write, never mknod. Run as root, the driver's libraries make the nodes of every
/// GPU themselves where the container may. Such a node stays closed, because only the granted numbers have a
/// rule. A config.json cannot keep the libraries from making nodes. runc takes no mount over
/// `/proc/driver/nvidia/params` (crun does). A masked path reads as empty there, which means
/// `ModifyDeviceFiles: 1`. runc lets every container make any device node, and a config.json can make no
/// exception from that.
fn rule(node: &DeviceNode) -> LinuxDeviceCgroup {
    let mut rule = LinuxDeviceCgroup::default();
    rule.set_allow(true).set_typ(Some(LinuxDeviceType::C)).set_access(Some("rw".into()));
    rule.set_major(Some(node.major.into())).set_minor(Some(node.minor.into()));
    rule
}

/// A hook with a complete environment. Without one, low-level runtimes pass on their own environment, or the
/// image's.
fn hook(stage: &str, lease: &Lease, parts: PlanParts, limiter: Option<&DriverLimiter>) -> Hook {
    let PlanParts { programs, files, .. } = parts;
    let state = programs.state.to_string_lossy().into_owned();
    let key = &lease.member.key;
    let lease = lease.id.to_string();
    let arguments = [
        "gpushare-hook",
        stage,
        "--state",
        &state,
        "--lease",
        &lease,
        "--root",
        &key.root,
        "--id",
        &key.container,
    ];
    let mut hook = Hook::default();
    hook.set_path(files.hook.clone()).set_env(Some(HOOK_ENVIRONMENT.map(str::to_owned).into()));
    let limit = limiter.map(DriverLimiter::arguments).unwrap_or_default();
    hook.set_args(Some([&arguments.map(str::to_owned)[..], &programs.log, &limit].concat()));
    let timeout = if limiter.is_some() { LIMITER_TIMEOUT_SECONDS } else { HOOK_TIMEOUT_SECONDS };
    hook.set_timeout(Some(timeout));
    hook
}

/// The whole environment of the hook.
pub(crate) const HOOK_ENVIRONMENT: [&str; 2] = ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "GPUSHARE_HOOK=1"];
/// Longer than the quota store's own deadline.
const HOOK_TIMEOUT_SECONDS: i64 = 10;
/// The same where NVML is waited for, too.
const LIMITER_TIMEOUT_SECONDS: i64 = 35;

#[cfg(test)]
mod tests;
