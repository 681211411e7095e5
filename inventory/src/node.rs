//! The node as a value: GPUs in the order users count them, with the device nodes that a container needs.

use std::ffi::OsStr;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::device_files::{self, CONTROL_MINOR, MAJOR, MODESET_MINOR};
use crate::driver::{Driver, DriverError};
use crate::memory::DeviceMemory;
use crate::proc::{self, ProcError};
use crate::totals::Totals;
use crate::uuid::GpuUuid;

/// Where the driver's files, device nodes and `/proc` tree begin. All are `/` on an ordinary node; a driver
/// container, NixOS or a simulated node has its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roots {
    /// Root of the driver's libraries and programs.
    pub driver: PathBuf,
    /// Root of the `/dev` tree.
    pub dev: PathBuf,
    /// Root of the `/proc` tree.
    pub proc: PathBuf,
    /// Folders below the driver root to look for libraries in before all others.
    pub library_folders: Vec<PathBuf>,
}

impl Default for Roots {
    fn default() -> Self {
        Self { driver: "/".into(), dev: "/".into(), proc: "/".into(), library_folders: Vec::new() }
    }
}

/// A character device of the host, as a container gets it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceNode {
    /// The path in the container, and on an ordinary host (`/dev/nvidia0`).
    pub path: PathBuf,
    /// The path on this host, below the dev root.
    pub host_path: PathBuf,
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// The index that users and NVML count by: PCI order.
    pub index: u32,
    /// The identity.
    pub uuid: GpuUuid,
    /// The N of `/dev/nvidiaN`.
    pub minor: u32,
    /// The model's name.
    pub model: String,
    /// The whole memory; `None` while nobody asked NVML.
    pub memory: Option<DeviceMemory>,
    /// The device node.
    pub node: DeviceNode,
}

/// A GPU that the driver shows and that cannot be given to a container. It keeps its index, so the others keep theirs.
#[derive(Debug)]
pub struct SickGpu {
    /// The index that users and NVML count by.
    pub index: u32,
    /// `DOMAIN:BUS:DEVICE.FUNCTION`, as the driver names its folder.
    pub address: String,
    /// What is wrong.
    pub why: NodeError,
}

/// GPUs, driver and control nodes of this host.
#[derive(Debug)]
pub struct Node {
    /// All usable GPUs, by index.
    pub gpus: Vec<Gpu>,
    /// The GPUs that cannot be given, by index.
    pub sick: Vec<SickGpu>,
    /// The driver's version and files.
    pub driver: Driver,
    /// `/dev/nvidiactl`, which every client needs.
    pub control: DeviceNode,
    /// `/dev/nvidia-uvm`, which CUDA needs.
    pub uvm: Option<DeviceNode>,
    /// `/dev/nvidia-modeset`, for graphics and display.
    pub modeset: Option<DeviceNode>,
    /// The nodes below `/dev/dri` by the GPU that they belong to, for graphics and display; none without nvidia-drm.
    pub render: Vec<(GpuUuid, DeviceNode)>,
    /// The major number of MIG's nodes below `/dev/nvidia-caps`; `None` while no module has it.
    pub capabilities_major: Option<u32>,
    /// What NVML told of driver and GPUs; `None` while nobody asked it.
    pub totals: Option<Totals>,
}

/// Why the node cannot give GPUs.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// The kernel module is not loaded.
    #[error(
        "this node has no NVIDIA driver ({path} is missing); install it and load the nvidia module, or set node.proc_root"
    )]
    NoDriver {
        /// The file that a loaded module shows.
        path: PathBuf,
    },
    /// The kernel module is there, a GPU is not.
    #[error("the NVIDIA driver shows no usable GPU below {path}; see the kernel log and `gpushare doctor`")]
    NoGpu {
        /// The folder with one entry per GPU.
        path: PathBuf,
    },
    /// There are GPUs, and none that could be given.
    #[error("no GPU of this node is in service: {}", told(.sick))]
    NoneInService {
        /// All of them.
        sick: Vec<SickGpu>,
    },
    /// A GPU's file is empty or partial, which the driver does when it could not wake the GPU.
    #[error(
        "{path} does not tell {what}; the GPU may have fallen off the bus: look for Xid in the kernel log (dmesg), and reset the \
         GPU (nvidia-smi -r) or reboot"
    )]
    UnknownGpu {
        /// The file.
        path: PathBuf,
        /// The label that is missing.
        what: &'static str,
    },
    /// A device node is missing or no character device.
    #[error("device node {path} is missing or of another kind; create it with `gpushare system nodes`")]
    NoDeviceNode {
        /// The node.
        path: PathBuf,
    },
    /// A device node of another boot's driver, or of no driver: it would give a container some other device.
    #[error("device node {path} has the number {found}, and the kernel says {wanted}; {remedy}")]
    Number {
        /// The node.
        path: PathBuf,
        /// `MAJOR:MINOR` as it is.
        found: String,
        /// `MAJOR:MINOR` as it should be.
        wanted: String,
        /// Who makes it anew.
        remedy: &'static str,
    },
    /// A `/proc` file could not be used.
    #[error(transparent)]
    Proc(#[from] ProcError),
    /// The driver's files could not be located.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

impl Node {
    /// Reads the node. GPU memory stays unknown until [`Node::with_totals`].
    ///
    /// # Errors
    /// When there is no driver, no GPU that could be given, or user-space files of another version.
    pub fn open(roots: &Roots) -> Result<Self, NodeError> {
        let nvidia = roots.proc.join("proc/driver/nvidia");
        let path = nvidia.join("version");
        let text = match proc::read(&path) {
            Err(ProcError::Read { source, .. }) if source.kind() == ErrorKind::NotFound => {
                return Err(NodeError::NoDriver { path });
            }
            other => other?,
        };
        let version =
            proc::driver_version(&text).ok_or(ProcError::Format { path, what: "the driver's version" })?;
        let majors = device_files::majors(&roots.proc)?;
        let control = nvidias_node(&roots.dev, "nvidiactl", (MAJOR, CONTROL_MINOR))?;
        let Gpus { whole, render, sick } = gpus(&nvidia.join("gpus"), roots)?;
        let driver = Driver::locate(roots, version)?;
        Ok(Self {
            gpus: whole,
            sick,
            driver,
            control,
            uvm: match majors.get("nvidia-uvm") {
                Some(major) => where_made(nvidias_node(&roots.dev, "nvidia-uvm", (*major, 0)))?,
                None => None, // without its module, a node of this name is of another boot
            },
            modeset: where_made(nvidias_node(&roots.dev, "nvidia-modeset", (MAJOR, MODESET_MINOR)))?,
            render,
            capabilities_major: majors.get("nvidia-caps").copied(),
            totals: None,
        })
    }

    /// The same node with what `totals` knows.
    #[must_use]
    pub fn with_totals(mut self, totals: &Totals) -> Self {
        for gpu in &mut self.gpus {
            gpu.memory = totals.memory(gpu);
        }
        self.totals = Some(totals.clone());
        self
    }
}

fn told(sick: &[SickGpu]) -> String {
    let one = |gpu: &SickGpu| format!("GPU {} at {}: {}", gpu.index, gpu.address, gpu.why);
    sick.iter().map(one).collect::<Vec<_>>().join("; ")
}

/// What stands below the driver's folder of GPUs.
struct Gpus {
    whole: Vec<Gpu>,
    render: Vec<(GpuUuid, DeviceNode)>,
    sick: Vec<SickGpu>,
}

/// All GPUs below `folder`, in PCI order. An excluded GPU has no index (NVML skips it); a sick one keeps its own, and fails
/// the node only where there is no other.
fn gpus(folder: &Path, roots: &Roots) -> Result<Gpus, NodeError> {
    let mut folders = pci_folders(folder)?;
    folders.sort_by_key(|(address, _)| *address);
    let mut found = Gpus { whole: Vec::new(), render: Vec::new(), sick: Vec::new() };
    let mut index = 0;
    for (address, path) in folders {
        let nodes = |gpu: Gpu| Ok::<_, NodeError>((render_nodes(roots, address)?, gpu));
        match gpu(index, &path, &roots.dev).and_then(|gpu| gpu.map(nodes).transpose()) {
            Ok(None) => continue,
            Ok(Some((nodes, gpu))) => {
                found.render.extend(nodes.into_iter().map(|node| (gpu.uuid, node)));
                found.whole.push(gpu);
            }
            Err(why) => {
                let address = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                found.sick.push(SickGpu { index, address, why });
            }
        }
        index += 1;
    }
    if found.whole.is_empty() {
        return Err(match found.sick.is_empty() {
            true => NodeError::NoGpu { path: folder.into() },
            false => NodeError::NoneInService { sick: found.sick },
        });
    }
    Ok(found)
}

/// The GPU of the folder `path`; `None` for one that is excluded.
fn gpu(index: u32, path: &Path, dev_root: &Path) -> Result<Option<Gpu>, NodeError> {
    let path = path.join("information");
    let information = proc::information(&proc::read(&path)?);
    if information.excluded {
        return Ok(None);
    }
    let unknown = |what| NodeError::UnknownGpu { path: path.clone(), what };
    let minor = information.minor.ok_or_else(|| unknown("Device Minor"))?;
    let uuid = information.uuid.ok_or_else(|| unknown("GPU UUID"))?;
    let model = information.model.unwrap_or_else(|| "unknown".to_owned());
    let node = nvidias_node(dev_root, &format!("nvidia{minor}"), (MAJOR, minor))?;
    Ok(Some(Gpu { index, uuid, minor, model, memory: None, node }))
}

/// Domain, bus, device and function.
pub(crate) type PciAddress = (u32, u8, u8, u8);
pub(crate) type PciFolder = (PciAddress, PathBuf);

/// The DRM nodes of the GPU at `address`, by the names and numbers that the kernel gave them.
fn render_nodes(
    roots: &Roots,
    (domain, bus, device, function): PciAddress,
) -> Result<Vec<DeviceNode>, NodeError> {
    let address = format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}");
    let folder = roots.proc.join("sys/bus/pci/devices").join(address).join("drm");
    let entries = fs::read_dir(&folder).into_iter().flatten().filter_map(Result::ok);
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.starts_with("card") || name.starts_with("renderD"))
        .collect();
    names.sort();
    let mut nodes = Vec::new();
    for name in names {
        let Some(node) = where_made(device_node(&roots.dev, &format!("dri/{name}")))? else { continue };
        let wanted = proc::read(&folder.join(&name).join("dev"))?;
        nodes.push(node.numbered(wanted.trim(), "remove it, and have udev make it anew (udevadm trigger)")?);
    }
    Ok(nodes)
}

/// No node is no error where not every node has it.
fn where_made(node: Result<DeviceNode, NodeError>) -> Result<Option<DeviceNode>, NodeError> {
    match node {
        Ok(node) => Ok(Some(node)),
        Err(NodeError::NoDeviceNode { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// A node of the driver's, which must have the numbers that this boot's driver has: a container gets a rule for them.
fn nvidias_node(dev_root: &Path, name: &str, (major, minor): (u32, u32)) -> Result<DeviceNode, NodeError> {
    let wanted = format!("{major}:{minor}");
    device_node(dev_root, name)?.numbered(&wanted, "make it anew with `gpushare system nodes`")
}

impl DeviceNode {
    /// The node, if its number is `wanted` (`MAJOR:MINOR`).
    fn numbered(self, wanted: &str, remedy: &'static str) -> Result<Self, NodeError> {
        let found = format!("{}:{}", self.major, self.minor);
        if found == wanted {
            return Ok(self);
        }
        Err(NodeError::Number { path: self.host_path, found, wanted: wanted.to_owned(), remedy })
    }
}

/// The folders of the GPUs below `folder`, in no order.
pub(crate) fn pci_folders(folder: &Path) -> Result<Vec<PciFolder>, NodeError> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(_) => return Err(NodeError::NoGpu { path: folder.into() }),
    };
    let named = entries.filter_map(Result::ok).filter_map(|entry| {
        let address = entry.file_name().to_str().and_then(proc::pci_address)?;
        Some((address, entry.path()))
    });
    Ok(named.collect())
}

pub(crate) fn device_node(dev_root: &Path, name: &str) -> Result<DeviceNode, NodeError> {
    let host_path = dev_root.join("dev").join(OsStr::new(name));
    let missing = || NodeError::NoDeviceNode { path: host_path.clone() };
    let metadata = fs::symlink_metadata(&host_path).map_err(|_| missing())?;
    if !metadata.file_type().is_char_device() {
        return Err(missing());
    }
    let (major, minor) = numbers(metadata.rdev());
    Ok(DeviceNode {
        path: Path::new("/dev").join(name),
        major,
        minor,
        mode: metadata.mode() & 0o7777,
        uid: metadata.uid(),
        gid: metadata.gid(),
        host_path,
    })
}

/// Major and minor of a device number.
pub(crate) fn numbers(device: u64) -> (u32, u32) {
    (major(device), minor(device))
}

/// The major number in Linux's 64-bit device number: bits 8 to 19, and 32 and above.
fn major(device: u64) -> u32 {
    let high = (device >> 32) & 0xffff_f000;
    let low = (device >> 8) & 0xfff;
    u32::try_from(high | low).unwrap_or(u32::MAX)
}

/// The minor number in Linux's 64-bit device number: bits 0 to 7, and 20 to 43.
fn minor(device: u64) -> u32 {
    let high = (device >> 12) & 0xffff_ff00;
    let low = device & 0xff;
    u32::try_from(high | low).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_without_the_module_says_so() {
        let empty = tempfile::tempdir().unwrap();
        let roots = Roots { proc: empty.path().into(), ..Roots::default() };
        let error = Node::open(&roots).unwrap_err();
        assert!(matches!(error, NodeError::NoDriver { .. }), "{error}");
    }

    /// A driver's folder with one GPU for each text of `information`.
    fn shown(texts: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (bus, text) in texts.iter().enumerate() {
            let gpu = root.path().join(format!("0000:{bus:02x}:00.0"));
            fs::create_dir(&gpu).unwrap();
            fs::write(gpu.join("information"), text).unwrap();
        }
        root
    }

    #[test]
    fn an_empty_information_file_is_an_unknown_gpu_not_no_gpu() {
        let root = shown(&[""]);
        let error = gpus(root.path(), &Roots::default()).err().unwrap();
        assert!(matches!(&error, NodeError::NoneInService { sick } if sick.len() == 1), "{error}");
        assert!(error.to_string().contains("Device Minor"), "{error}");
    }

    #[test]
    fn an_excluded_gpu_is_not_counted() {
        let root = shown(&["GPU Excluded: Yes\nDevice Minor: 0\n"]);
        let error = gpus(root.path(), &Roots::default()).err().unwrap();
        assert!(matches!(error, NodeError::NoGpu { .. }), "{error}");
    }

    #[test]
    fn a_node_has_the_number_that_the_kernel_says_or_is_none() {
        // Any character device that is everywhere: /dev/null is 1:3.
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("dev")).unwrap();
        let null = |wanted: &str| device_node(Path::new("/"), "null").unwrap().numbered(wanted, "do it");
        assert_eq!(null("1:3").unwrap().path, Path::new("/dev/null"));
        for wanted in ["195:3", "1:1", "", "1:3\n"] {
            let error = null(wanted).unwrap_err();
            assert!(matches!(error, NodeError::Number { .. }), "{wanted:?}: {error}");
            assert!(where_made(Err(error)).is_err(), "{wanted:?}");
        }
        let error = nvidias_node(Path::new("/"), "null", (195, 255)).unwrap_err().to_string();
        assert!(
            ["/dev/null", "1:3", "195:255", "system nodes"].iter().all(|part| error.contains(part)),
            "{error}"
        );
        assert_eq!(where_made(device_node(root.path(), "nvidia-uvm")).unwrap(), None);
    }

    #[test]
    fn device_numbers_split_as_the_kernel_packs_them() {
        assert_eq!((major(0xc3ff), minor(0xc3ff)), (195, 255));
        assert_eq!((major(0x0001_ff34), minor(0x0010_0034)), (511, 0x134));
    }
}
