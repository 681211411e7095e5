//! The plan: what must change in a container, as OCI parts. A pure value; who consumes it decides how.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use gpushare_inventory::{Capability, DeviceNode, DriverError, Extent, Gpu, Node};
use gpushare_quota::Lease;
use gpushare_region::path as inner;
use gpushare_request::{InterceptorPolicy, Kept, Mode, Request};
use oci_spec::OciSpecError;
use oci_spec::runtime::{
    Hook, HookBuilder, LinuxDevice, LinuxDeviceBuilder, LinuxDeviceCgroup, LinuxDeviceCgroupBuilder,
    LinuxDeviceType, Mount, MountBuilder,
};
use serde::Serialize;

use crate::fitted;
use crate::image::Image;
use crate::outside_plan::OutsidePlan;
use crate::region::Region;

/// Everything that one container needs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// Device nodes: the granted GPUs and the control nodes.
    pub devices: Vec<LinuxDevice>,
    /// The same nodes as bind mounts, for a container with a user namespace, where mknod is not allowed.
    pub device_mounts: Vec<Mount>,
    /// One rule per node: read and write, never mknod.
    pub device_rules: Vec<LinuxDeviceCgroup>,
    /// Driver files, the interception libraries, the region files, the administrator's own.
    pub mounts: Vec<Mount>,
    /// Registers the container's init with the lease.
    pub prestart: Hook,
    /// Gives the lease back.
    pub poststop: Hook,
    /// Groups of device nodes that not everybody may open.
    pub additional_gids: Vec<u32>,
    /// Variables of other systems' requests, each as it stands once.
    pub variables: Vec<(String, String)>,
    /// Whether the container may make no user namespaces.
    #[serde(skip)]
    pub denies_user_namespaces: bool,
    /// What a bundle that is run again has for its list of GPUs.
    #[serde(skip)]
    pub kept: Kept,
    /// Minors of the GPUs that a bundle that is run again was handed.
    #[serde(skip)]
    pub handed: BTreeSet<u64>,
    /// What the plan leaves out.
    #[serde(skip)]
    pub outside: OutsidePlan,
}

/// Where our own programs and libraries are, and what they are told.
#[derive(Clone, Debug)]
pub struct Programs<'a> {
    /// The hook's binary.
    pub hook: &'a Path,
    /// The folder with the interception libraries.
    pub libraries: &'a Path,
    /// The folder with their copies for this driver.
    pub cache: &'a Path,
    /// The state folder.
    pub state: &'a Path,
    /// The administrator's own mounts.
    pub extra_mounts: &'a [ExtraMount],
    /// Whether containers with a share may make no user namespaces.
    pub denies_user_namespaces: bool,
    /// What the hooks are told of the log, as arguments.
    pub log: Vec<String>,
}

/// A mount that the administrator adds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExtraMount {
    /// On the host.
    pub source: PathBuf,
    /// In the container.
    pub destination: PathBuf,
    /// Whether the container may write there.
    pub writable: bool,
}

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// A driver file is missing or not to be trusted.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// A file of ours is not where it was installed.
    #[error("{path} is missing; install gpushare completely, or set paths.{key}")]
    NotInstalled {
        /// The file.
        path: PathBuf,
        /// The setting that names its folder.
        key: &'static str,
    },
    /// Our library was not fitted to this driver.
    #[error("{path} is not fitted to this node's driver; run `gpushare inventory refresh`")]
    NotFitted {
        /// Our library as it was built.
        path: PathBuf,
    },
    /// A file of ours that somebody else could change: root would run it, or every container would.
    #[error(
        "{path} must belong to root and be writable by nobody else; install gpushare with `make install` as root"
    )]
    Untrusted {
        /// The file.
        path: PathBuf,
    },
    /// A mount of the settings has no source.
    #[error("{path} is missing, which inject.mounts of the settings names; make it, or take the mount out")]
    NoSource {
        /// The source.
        path: PathBuf,
    },
    /// A volume with a driver: ours cannot lie over its files, which are the host's.
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
    /// A part that the OCI types refuse.
    #[error("the plan is no valid OCI configuration")]
    Oci(#[from] OciSpecError),
}

impl Plan {
    /// Whether it is one of a share, which has limits; else it gives whole cards, or leaves the limit to another system's
    /// library.
    pub(crate) fn is_share(&self) -> bool {
        self.mounts.iter().any(|mount| mount.destination().as_os_str().as_bytes() == inner::LIMITS.to_bytes())
    }

    /// What `lease` means for a container with this image on this node.
    ///
    /// # Errors
    /// When a driver file, a device node or a file of ours is missing.
    pub fn new(
        request: &Request,
        lease: &Lease,
        node: &Node,
        programs: &Programs,
        image: &Image,
    ) -> Result<Self, PlanError> {
        let nodes = device_nodes(request, lease, node)?;
        let extent = extent(lease.mode, request);
        let mut mounts = match extent {
            Extent::Share => interception(request, lease, node, programs, image)?,
            Extent::Whole => whole_card(request, node, image)?,
        };
        mounts.extend(companions(request, extent, node, image)?);
        for extra in programs.extra_mounts {
            if !extra.source.exists() {
                return Err(PlanError::NoSource { path: extra.source.clone() });
            }
            let access = if extra.writable { "rw" } else { "ro" };
            mounts.push(bind(&extra.source, &extra.destination, &[access, "nosuid", "nodev", "noexec"])?);
        }
        let mut targets: Vec<PathBuf> = Vec::new();
        mounts.retain(|mount| {
            // An image that ran before has our targets as copies of its own.
            let first = !targets.contains(mount.destination());
            targets.push(mount.destination().clone());
            first
        });
        Ok(Self {
            devices: nodes.iter().map(|node| device(node)).collect::<Result<_, _>>()?,
            device_mounts: nodes.iter().map(|node| device_mount(node)).collect::<Result<_, _>>()?,
            device_rules: nodes.iter().map(|node| rule(node)).collect::<Result<_, _>>()?,
            mounts,
            prestart: hook("prestart", lease, programs)?,
            poststop: hook("poststop", lease, programs)?,
            additional_gids: groups(&nodes),
            variables: request.variables.clone(),
            denies_user_namespaces: programs.denies_user_namespaces,
            kept: request.kept(),
            handed: request.handed.iter().map(|minor| u64::from(*minor)).collect(),
            outside: OutsidePlan::of(lease, node, [programs.cache, programs.state]),
        })
    }

    /// Where the plan puts something in the container, and whether that is a folder.
    pub fn targets(&self) -> impl Iterator<Item = (&Path, bool)> {
        self.mounts.iter().map(|mount| {
            let is_folder = mount.source().as_ref().is_some_and(|source| source.is_dir());
            (mount.destination().as_path(), is_folder)
        })
    }
}

/// How much of the driver the container gets. Another system's library holds the limit in our place only where the request
/// proved it to be there.
fn extent(mode: Mode, request: &Request) -> Extent {
    let theirs = matches!(request.interceptor, Some((_, InterceptorPolicy::StandDown)));
    if mode == Mode::Share && !theirs { Extent::Share } else { Extent::Whole }
}

/// The nodes of the granted GPUs, in the lease's order, and those that every client or a capability needs.
fn device_nodes<'a>(
    request: &Request,
    lease: &Lease,
    node: &'a Node,
) -> Result<Vec<&'a DeviceNode>, PlanError> {
    let mut nodes = Vec::new();
    for grant in &lease.grants {
        let gpu: Option<&Gpu> = node.gpus.iter().find(|gpu| gpu.uuid == grant.gpu);
        nodes.push(&gpu.ok_or_else(|| PlanError::GpuGone(grant.gpu.to_string()))?.node);
    }
    nodes.push(&node.control);
    if request.capabilities.has(Capability::Compute) {
        nodes.push(node.uvm.as_ref().ok_or(PlanError::NoUvm)?);
    }
    let shows = [Capability::Graphics, Capability::Display].iter().any(|c| request.capabilities.has(*c));
    if shows {
        let granted = |uuid| lease.grants.iter().any(|grant| grant.gpu == uuid);
        nodes.extend(&node.modeset);
        nodes.extend(node.render.iter().filter(|(uuid, _)| granted(*uuid)).map(|(_, node)| node));
    }
    Ok(nodes)
}

/// The groups by which nodes are opened that not everybody may open. Root's is given to nobody, nor one that the node
/// does not let in: such a node stays its owner's.
fn groups(nodes: &[&DeviceNode]) -> Vec<u32> {
    let mut groups = Vec::new();
    for node in nodes.iter().filter(|node| node.mode & 0o006 != 0o006) {
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

/// Our libraries under every name of the driver's, the driver's own under the private one, and the region files. A copy that
/// the image brings along is covered whatever was asked: it needs no capability to reach the nodes.
fn interception(
    request: &Request,
    lease: &Lease,
    node: &Node,
    programs: &Programs,
    image: &Image,
) -> Result<Vec<Mount>, PlanError> {
    if let Some(folder) = &image.driver_volume {
        return Err(PlanError::DriverVolume { folder: folder.clone() });
    }
    let mut mounts = Vec::new();
    for (capability, stem, private) in LIBRARIES {
        let asked = request.capabilities.has(capability);
        if !asked && copies(image, stem).next().is_none() {
            continue;
        }
        let real = real_library(node, capability)?;
        let ours = fitted_library(programs, stem, &real)?;
        mounts.push(read_only(&real, Path::new(private))?);
        for name in names(stem).iter().filter(|_| asked) {
            mounts.push(read_only(&ours, &image.library_folder.join(name))?);
        }
        mounts.extend(covers(image, stem, &ours)?);
    }
    let region = Region::of(programs.state, lease.id);
    mounts.push(bind(&region.limits(), &c_path(inner::LIMITS), &["ro", "nosuid", "nodev", "noexec"])?);
    mounts.push(bind(&region.usage(), &c_path(inner::USAGE), &["rw", "nosuid", "nodev", "noexec"])?);
    Ok(mounts)
}

/// What else of the driver the capabilities bring.
fn companions(
    request: &Request,
    extent: Extent,
    node: &Node,
    image: &Image,
) -> Result<Vec<Mount>, PlanError> {
    let mut mounts = Vec::new();
    for library in node.driver.companions(&request.capabilities, extent)? {
        for name in &library.names {
            mounts.push(read_only(&library.host_path, &image.library_folder.join(name))?);
        }
        // A whole card may be used by a newer driver of the image's own (cuda-compat), with its own companions.
        let name = library.names.first().filter(|_| extent == Extent::Share);
        let stem = name.and_then(|name| name.split(".so").next());
        mounts.extend(stem.map_or(Ok(Vec::new()), |stem| covers(image, stem, &library.host_path))?);
    }
    for file in node.driver.files(&request.capabilities, extent)? {
        mounts.push(read_only(&file.host_path, &file.container_path)?);
    }
    Ok(mounts)
}

/// Our library, as it was made for the driver's file `real`.
fn fitted_library(programs: &Programs, stem: &str, real: &Path) -> Result<PathBuf, PlanError> {
    let ours = installed(programs.libraries.join(format!("{stem}.so.1")), "libraries")?;
    let copy = fitted::copy_of(programs.cache, &ours, real).ok().filter(|copy| fitted::is_sound(copy));
    copy.ok_or(PlanError::NotFitted { path: ours })
}

/// `file` over each copy of the library that the image brings along, wherever its loader may look first.
fn covers(image: &Image, stem: &str, file: &Path) -> Result<Vec<Mount>, OciSpecError> {
    copies(image, stem).map(|copy| read_only(file, copy)).collect()
}

/// The image's own copies of one library.
fn copies<'a>(image: &'a Image, stem: &'a str) -> impl Iterator<Item = &'a PathBuf> {
    image.driver_copies.iter().filter(move |copy| {
        let name = copy.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.strip_prefix(stem).is_some_and(|rest| rest == ".so" || rest.starts_with(".so."))
    })
}

/// A whole card has nothing to intercept: the driver's libraries under their own names.
fn whole_card(request: &Request, node: &Node, image: &Image) -> Result<Vec<Mount>, PlanError> {
    let mut mounts = Vec::new();
    for (capability, stem, _) in LIBRARIES {
        if !request.capabilities.has(capability) {
            continue;
        }
        let real = real_library(node, capability)?;
        for name in names(stem) {
            mounts.push(read_only(&real, &image.library_folder.join(name))?);
        }
    }
    Ok(mounts)
}

const LIBRARIES: [(Capability, &str, &str); 2] = [
    (Capability::Compute, "libcuda", inner::DRIVER_CUDA),
    (Capability::Utility, "libnvidia-ml", inner::DRIVER_NVML),
];

fn real_library(node: &Node, capability: Capability) -> Result<PathBuf, DriverError> {
    match capability {
        Capability::Compute => node.driver.libcuda(),
        _ => node.driver.libnvidia_ml(),
    }
}

/// The names that programs open: the development name and the SONAME. A versioned one exists in a container only if
/// its image brought it along, and is covered then.
fn names(stem: &str) -> [String; 2] {
    [format!("{stem}.so"), format!("{stem}.so.1")]
}

fn c_path(path: &std::ffi::CStr) -> PathBuf {
    PathBuf::from(path.to_string_lossy().into_owned())
}

/// `path`, once it is known to be there and to be nobody's but root's.
pub(crate) fn installed(path: PathBuf, key: &'static str) -> Result<PathBuf, PlanError> {
    match fs::metadata(&path) {
        Ok(metadata) if metadata.uid() == 0 && metadata.mode() & 0o022 == 0 => Ok(path),
        Ok(_) => Err(PlanError::Untrusted { path }),
        Err(_) => Err(PlanError::NotInstalled { path, key }),
    }
}

/// How files of the driver's and ours are mounted.
pub(crate) const READ_ONLY: [&str; 5] = ["ro", "nosuid", "nodev", "rbind", "rprivate"];

fn read_only(source: &Path, destination: &Path) -> Result<Mount, OciSpecError> {
    bind(source, destination, &READ_ONLY[..3])
}

fn bind(source: &Path, destination: &Path, options: &[&str]) -> Result<Mount, OciSpecError> {
    let options = options.iter().chain(&READ_ONLY[3..]).map(|option| (*option).to_owned());
    MountBuilder::default()
        .destination(destination)
        .source(source)
        .typ("bind")
        .options(options.collect::<Vec<_>>())
        .build()
}

fn device(node: &DeviceNode) -> Result<LinuxDevice, OciSpecError> {
    LinuxDeviceBuilder::default()
        .path(&node.path)
        .typ(LinuxDeviceType::C)
        .major(i64::from(node.major))
        .minor(i64::from(node.minor))
        .file_mode(node.mode)
        .uid(node.uid)
        .gid(node.gid)
        .build()
}

fn device_mount(node: &DeviceNode) -> Result<Mount, OciSpecError> {
    bind(&node.host_path, &node.path, &["rw", "nosuid", "noexec"])
}

/// Read and write, never mknod. Run as root, the driver's libraries make the nodes of every GPU by themselves, where the
/// container may; such a node stays closed, since only the granted numbers have a rule. What would keep them from it is not
/// to be had in a config.json: runc takes no mount over `/proc/driver/nvidia/params` (crun does), a masked path reads as
/// empty there, which means `ModifyDeviceFiles: 1`, and runc makes no hole in the leave to make every node that it gives.
fn rule(node: &DeviceNode) -> Result<LinuxDeviceCgroup, OciSpecError> {
    LinuxDeviceCgroupBuilder::default()
        .allow(true)
        .typ(LinuxDeviceType::C)
        .major(i64::from(node.major))
        .minor(i64::from(node.minor))
        .access("rw")
        .build()
}

/// A hook with a complete environment: without one, low-level runtimes hand over their own, or the image's.
fn hook(stage: &str, lease: &Lease, programs: &Programs) -> Result<Hook, PlanError> {
    let path = installed(programs.hook.to_path_buf(), "hook")?;
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
    Ok(HookBuilder::default()
        .path(path)
        .args([&arguments.map(str::to_owned)[..], &programs.log].concat())
        .env(HOOK_ENVIRONMENT.map(str::to_owned).to_vec())
        .timeout(HOOK_TIMEOUT_SECONDS)
        .build()?)
}

/// What the hook expects to find, and nothing else.
pub(crate) const HOOK_ENVIRONMENT: [&str; 2] = ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "GPUSHARE_HOOK=1"];
/// Longer than the quota store's own deadline.
pub(crate) const HOOK_TIMEOUT_SECONDS: i64 = 10;

#[cfg(test)]
mod tests {
    use gpushare_inventory::{DeviceMemory, GpuUuid};
    use gpushare_request::{Container, Policy, read};
    use serde_json::json;

    use super::*;

    fn node(mode: u32, gid: u32) -> DeviceNode {
        DeviceNode {
            path: "/dev/nvidia0".into(),
            host_path: "/dev/nvidia0".into(),
            major: 195,
            minor: 0,
            mode,
            uid: 0,
            gid,
        }
    }

    #[test]
    fn a_group_is_given_where_it_opens_a_node_and_never_roots() {
        for (mode, gid, want) in [
            (0o666, 44, &[][..]),
            (0o660, 44, &[44]),
            (0o660, 0, &[]),
            (0o600, 44, &[]),
            (0o640, 44, &[]),
            (0o664, 44, &[44]),
        ] {
            assert_eq!(groups(&[&node(mode, gid)]), want, "mode {mode:o}, group {gid}");
        }
        assert_eq!(groups(&[&node(0o660, 44), &node(0o660, 7), &node(0o660, 44)]), [7, 44]);
    }

    #[test]
    fn the_whole_driver_is_only_for_a_whole_card_or_for_a_library_that_is_proved() {
        let gpu = Gpu {
            uuid: GpuUuid::from_bytes([1; 16]),
            index: 0,
            memory: Some(DeviceMemory::from_bytes(8 << 30)),
            model: String::new(),
            minor: 0,
            node: node(0o666, 0),
        };
        let library =
            json!({"source": "/usr/local/vgpu/libvgpu.so", "destination": "/usr/local/vgpu/libvgpu.so"});
        let file = json!({"source": "/usr/local/vgpu/ld.so.preload", "destination": "/etc/ld.so.preload"});
        let elsewhere = json!({"source": "/x/libvgpu.so", "destination": "/data/libvgpu.so"});
        for (mounts, mode, want) in [
            (json!([library, file]), Mode::Share, Extent::Whole),
            (json!([library]), Mode::Share, Extent::Share),
            (json!([elsewhere, file]), Mode::Share, Extent::Share),
            (json!([]), Mode::Share, Extent::Share),
            (json!([]), Mode::Exclusive, Extent::Whole),
        ] {
            let env = ["NVIDIA_VISIBLE_DEVICES=0", "CUDA_DEVICE_MEMORY_LIMIT=1g"];
            let mut json = json!({"mounts": mounts, "process": {"env": env}});
            let policy = Policy { interceptor: InterceptorPolicy::StandDown, ..Policy::default() };
            let container = Container::from_json(&json);
            let request = read(&container, &policy, std::slice::from_ref(&gpu)).unwrap().unwrap();
            assert_eq!(extent(mode, &request), want, "{mounts} {mode:?}");
            crate::grant::clear(&mut json, &request, false).unwrap();
            let stays = want == Extent::Whole;
            assert_eq!(json["mounts"] == mounts, stays || mounts == json!([]), "{json}");
        }
    }
}
