//! Reads the whole node as a value: GPUs in the order of their user-visible numbers, and the device nodes
//! that containers need.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::device_node::{
    CONTROL_MINOR, DeviceNode, MAJOR, MODESET_MINOR, device_node, majors, nvidias_node, where_made,
};
use crate::driver::Driver;
use crate::error::{NodeError, SickGpu};
use crate::fault::Faults;
use crate::folder;
use crate::gpu::{Gpu, PciAddress, pci_folders};
use crate::memory::DeviceMemory;
use crate::mig::{self, Instance, Layout, Profile};
use crate::place::Place;
use crate::proc::{self, ProcError};
use crate::roots::Roots;
use crate::totals::{self, InstanceTotals, Totals};
use crate::uuid::GpuUuid;

/// The device nodes that do not belong to one GPU, and those of graphics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedNodes {
    /// `/dev/nvidiactl`, which every client needs.
    pub control: DeviceNode,
    /// `/dev/nvidia-uvm`, which CUDA needs; `None` without its kernel module or node.
    pub uvm: Option<DeviceNode>,
    /// `/dev/nvidia-modeset`, for graphics and display; `None` if it does not exist.
    pub modeset: Option<DeviceNode>,
    /// The nodes below `/dev/dri`, each with its GPU, for graphics and display; empty without nvidia-drm.
    pub render: Vec<(GpuUuid, DeviceNode)>,
    /// Major number of MIG's nodes below `/dev/nvidia-caps`; `None` if no module has registered it.
    pub capabilities_major: Option<u32>,
}

/// GPUs, driver and device nodes of this host.
#[derive(Debug)]
pub struct Node {
    /// The units that containers can have shares of, sorted by index: whole GPUs and, after
    /// [`Node::with_totals`], MIG instances instead of a divided GPU.
    pub gpus: Vec<Gpu>,
    /// The GPUs that are divided into MIG instances, sorted by index; empty before [`Node::with_totals`].
    pub divided: Vec<Gpu>,
    /// The GPUs that cannot be given to containers, sorted by index.
    pub sick: Vec<SickGpu>,
    /// The driver's version and files.
    pub driver: Driver,
    /// The device nodes other than the GPUs' own.
    pub nodes: SharedNodes,
    /// NVML's data about driver and GPUs; `None` before [`Node::with_totals`].
    pub totals: Option<Totals>,
    layouts: BTreeMap<GpuUuid, Vec<Layout>>,
    roots: Roots,
}

/// The version of the driver that the kernel has loaded; `None` without a driver, or if its file does not
/// have the driver's format.
pub fn loaded_driver(proc_root: &Path) -> Option<String> {
    let text = proc::read(&proc_root.join("proc/driver/nvidia/version")).ok()?;
    proc::driver_version(&text).map(str::to_owned)
}

impl Node {
    /// Reads the node. GPU memory stays unknown until [`Node::with_totals`].
    ///
    /// # Errors
    /// When there is no driver, no GPU in service, or only user-space files of another version.
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
        let majors = majors(&roots.proc)?;
        let control = nvidias_node(&roots.dev, "nvidiactl", (MAJOR, CONTROL_MINOR))?;
        let Gpus { whole, render, sick } = gpus(&nvidia.join("gpus"), roots)?;
        let driver = Driver::locate(roots, version)?;
        let layout = |gpu: &Gpu| Ok::<_, NodeError>((gpu.uuid, mig::layout(&roots.proc, gpu.minor)?));
        let layouts = whole.iter().map(layout).collect::<Result<_, _>>()?;
        Ok(Self {
            gpus: whole,
            divided: Vec::new(),
            layouts,
            roots: roots.clone(),
            sick,
            driver,
            nodes: SharedNodes {
                control,
                uvm: match majors.get("nvidia-uvm") {
                    Some(major) => where_made(nvidias_node(&roots.dev, "nvidia-uvm", (*major, 0)))?,
                    None => None, // without its module, a node with this name is from another boot
                },
                modeset: where_made(nvidias_node(&roots.dev, "nvidia-modeset", (MAJOR, MODESET_MINOR)))?,
                render,
                capabilities_major: majors.get("nvidia-caps").copied(),
            },
            totals: None,
        })
    }

    /// Adds the data of `totals`: the memory that programs can allocate, the NVLink groups, and MIG instances
    /// instead of the GPUs that are divided into them.
    #[must_use]
    pub fn with_totals(mut self, totals: &Totals) -> Self {
        for mut gpu in std::mem::take(&mut self.gpus) {
            let Some(told) = totals.of(&gpu) else {
                self.gpus.push(gpu);
                continue;
            };
            gpu.memory = self.capacity(told.memory_bytes, told.reserved_bytes);
            let is_whole = self.layouts.get(&gpu.uuid).is_none_or(Vec::is_empty);
            if !told.is_mig && told.instances.is_empty() && is_whole {
                gpu.place.nvlink_group.clone_from(&told.nvlink_group);
                self.gpus.push(gpu);
                continue;
            }
            self.divide(&gpu, &told.instances);
            self.divided.push(gpu);
        }
        // Out of service so far are whole GPUs with unreadable files, and divided ones.
        let are_all = self.gpus.iter().all(|gpu| gpu.instance.is_some())
            && self.sick.iter().all(|sick| self.divided.iter().any(|gpu| gpu.index == sick.index));
        for instance in self.gpus.iter_mut().filter_map(|gpu| gpu.instance.as_mut()) {
            instance.stands_for_gpu = are_all;
        }
        self.sick.sort_by_key(|sick| sick.index);
        self.totals = Some(totals.clone());
        self
    }

    /// Adds the instances of `gpu` in NVML's order. An instance that cannot be given to a container, or that
    /// only NVML or only `/proc` knows, is out of service. A divided GPU without instances is too.
    fn divide(&mut self, gpu: &Gpu, told: &[InstanceTotals]) {
        let mut told: Vec<&InstanceTotals> = told.iter().collect();
        told.sort_by_key(|one| one.position);
        let sick = |why| SickGpu { index: gpu.index, address: gpu.place.pci_bus_id.clone(), why };
        for told in &told {
            match self.instance(gpu, told) {
                Ok(instance) => self.gpus.push(instance),
                Err(why) => self.sick.push(sick(why)),
            }
        }
        let shown = self.layouts.get(&gpu.uuid).map_or(&[][..], Vec::as_slice);
        for id in shown.iter().map(|layout| layout.id).filter(|id| told.iter().all(|told| told.id() != *id)) {
            self.sick.push(sick(NodeError::UnknownInstance { gpu: gpu.uuid, id, name: String::new() }));
        }
        if told.is_empty() && shown.is_empty() {
            self.sick.push(sick(NodeError::NoInstance { gpu: gpu.uuid }));
        }
    }

    fn instance(&self, gpu: &Gpu, told: &InstanceTotals) -> Result<Gpu, NodeError> {
        let id = told.id();
        let unknown = || NodeError::UnknownInstance { gpu: gpu.uuid, id, name: told.name.clone() };
        let layout = self.layouts.get(&gpu.uuid).into_iter().flatten().find(|layout| layout.id == id);
        let layout = *layout.ok_or_else(unknown)?;
        let instance = Instance {
            card: gpu.uuid,
            id,
            position: told.position,
            profile: Profile::of_name(&told.name).map_err(|_| unknown())?,
            stands_for_gpu: false,
            nodes: mig::nodes(&self.roots, self.nodes.capabilities_major, layout)?,
        };
        Ok(Gpu {
            uuid: told.uuid.parse().ok().filter(|uuid: &GpuUuid| uuid.is_instance()).ok_or_else(unknown)?,
            model: told.name.clone(),
            memory: self.capacity(told.memory_bytes, told.reserved_bytes),
            instance: Some(instance),
            ..gpu.clone()
        })
    }

    fn capacity(&self, total: u64, reserved: u64) -> Option<DeviceMemory> {
        totals::capacity(total, reserved, self.roots.unusable_memory)
    }

    /// Whether a GPU is in MIG mode: NVML reported it, or `/proc` shows an instance.
    pub fn has_mig(&self) -> bool {
        !self.divided.is_empty() || self.layouts.values().any(|instances| !instances.is_empty())
    }

    /// The MIG instances that `/proc` shows on `gpu`, for [`GpuTotals::shown`](crate::GpuTotals::shown).
    pub fn instances_shown(&self, gpu: &Gpu) -> Vec<(u32, u32)> {
        let layouts = self.layouts.get(&gpu.uuid).into_iter().flatten();
        layouts.map(|layout| (layout.id.gpu, layout.id.compute)).collect()
    }
}

impl Node {
    /// Takes faulty GPUs out of service.
    ///
    /// # Errors
    /// When no other GPU is left.
    pub fn without_faulty(mut self, faults: &Faults) -> Result<Self, NodeError> {
        let why = |gpu: &Gpu| faults.of(gpu.card()).map(str::to_owned);
        let mut told = Vec::new();
        for (gpu, why) in self.gpus.iter().filter_map(|gpu| Some((gpu, why(gpu)?))) {
            let (index, address, card) = (gpu.index, gpu.place.pci_bus_id.clone(), gpu.card());
            if !told.contains(&card) {
                told.push(card);
                self.sick.push(SickGpu { index, address, why: NodeError::Faulty { gpu: card, why } });
            }
        }
        self.sick.sort_by_key(|sick| sick.index);
        self.gpus.retain(|gpu| faults.of(gpu.card()).is_none());
        if self.gpus.is_empty() {
            return Err(NodeError::NoneInService { sick: self.sick });
        }
        Ok(self)
    }
}

/// The GPUs that the driver shows.
struct Gpus {
    whole: Vec<Gpu>,
    render: Vec<(GpuUuid, DeviceNode)>,
    sick: Vec<SickGpu>,
}

/// All GPUs below `folder`, in the order of PCI addresses. An excluded GPU gets no index, since NVML skips
/// it. A GPU that is out of service keeps its index; it is an error only if there is no other GPU.
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
                found.whole.push(Gpu { place: place(roots, address), ..gpu });
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

/// The GPU of the folder `path`; `None` if the driver excludes it.
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
    Ok(Some(Gpu { index, uuid, minor, model, memory: None, node, place: Place::default(), instance: None }))
}

/// Formats a PCI address like the kernel.
fn bus_id((domain, bus, device, function): PciAddress) -> String {
    format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
}

/// The kernel's folder of the PCI device.
fn sysfs(roots: &Roots, address: PciAddress) -> PathBuf {
    roots.proc.join("sys/bus/pci/devices").join(bus_id(address))
}

fn place(roots: &Roots, address: PciAddress) -> Place {
    let folder = sysfs(roots, address);
    let numa = proc::read(&folder.join("numa_node")).ok();
    Place {
        pci_bus_id: bus_id(address),
        numa_node: numa.and_then(|text| text.trim().parse().ok()),
        bridges: fs::read_link(folder).map(|path| bridges(&path)).unwrap_or_default(),
        nvlink_group: String::new(),
    }
}

/// The bridges in the kernel's link to a PCI device, such as
/// `../../../devices/pci0000:00/0000:00:01.0/0000:01:00.0`: host bridge first, without the device itself.
fn bridges(link: &Path) -> Vec<String> {
    let names = link.iter().map(|name| name.to_string_lossy().into_owned());
    let mut names: Vec<String> = names.skip_while(|name| !name.starts_with("pci")).collect();
    names.pop();
    names
}

/// The DRM nodes of the GPU at `address`. Each must have the device number that the kernel assigned.
fn render_nodes(roots: &Roots, address: PciAddress) -> Result<Vec<DeviceNode>, NodeError> {
    let folder = sysfs(roots, address).join("drm");
    let is_drms = |name: &String| name.starts_with("card") || name.starts_with("renderD");
    let mut names: Vec<String> = folder::names(&folder).filter(is_drms).collect();
    names.sort();
    let mut nodes = Vec::new();
    for name in names {
        let Some(node) = where_made(device_node(&roots.dev, &format!("dri/{name}")))? else { continue };
        let wanted = proc::read(&folder.join(&name).join("dev"))?;
        nodes.push(node.numbered(wanted.trim(), "remove it, and have udev make it anew (udevadm trigger)")?);
    }
    Ok(nodes)
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

    #[test]
    fn bridges_are_those_in_the_link_to_the_device() {
        let root = tempfile::tempdir().unwrap();
        let devices = root.path().join("sys/bus/pci/devices");
        fs::create_dir_all(devices.join("0000:02:00.0")).unwrap();
        let link = "../../../devices/pci0000:00/0000:00:01.0/0000:01:00.0";
        std::os::unix::fs::symlink(link, devices.join("0000:01:00.0")).unwrap();
        let roots = Roots { proc: root.path().into(), ..Roots::default() };
        assert_eq!(place(&roots, (0, 1, 0, 0)).bridges, ["pci0000:00", "0000:00:01.0"]);
        assert!(place(&roots, (0, 2, 0, 0)).bridges.is_empty(), "a folder that is no link");
        assert!(place(&roots, (0, 3, 0, 0)).bridges.is_empty());
    }

    /// A folder like the driver's, with one GPU for each text of `information`.
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
}
