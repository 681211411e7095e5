//! Computes the device nodes that the loaded kernel modules need, with the numbers, owners and modes that
//! `nvidia-modprobe` would set, and lists the existing nodes.
//!
//! The driver does not announce its devices to udev. Programs that need a node run `nvidia-modprobe` if it is
//! installed; without it, CUDA finds no `/dev/nvidia-uvm` after a boot. This module creates no nodes:
//! [`DeviceFiles`] is a value.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use crate::device_node::{CONTROL_MINOR, DeviceNode, MAJOR, MODESET_MINOR, device_node, majors, numbers};
use crate::error::NodeError;
use crate::folder;
use crate::gpu::pci_folders;
use crate::proc::{self, ProcError, number};
use crate::roots::Roots;

/// The device nodes that this boot's kernel modules need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFiles {
    /// Every node that should exist.
    pub nodes: Vec<DeviceFile>,
    /// Devices that GPUs need but that no kernel module has registered, so that their numbers are unknown.
    pub unregistered: Vec<Unregistered>,
}

/// A character device that is not in `/proc/devices`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unregistered {
    /// Its name in `/proc/devices`.
    pub name: &'static str,
    /// The kernel module that registers it.
    pub module: &'static str,
}

/// A device node that the driver needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFile {
    /// Path, numbers, mode and owner that it should have.
    pub node: DeviceNode,
    /// Whether it is a node of MIG, below `/dev/nvidia-caps`. Only a node in MIG mode needs those.
    pub is_of_mig: bool,
    /// False if the driver is configured not to manage its device files (`ModifyDeviceFiles: 0`). The
    /// administrator who set that creates them.
    pub modify: bool,
}

/// How an existing node differs from the expected one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileState {
    /// It does not differ.
    Right,
    /// Nothing exists at the path.
    Missing,
    /// Mode or owner differs.
    Rights,
    /// A character device with another number, from an earlier boot or of another driver.
    Number,
    /// Something other than a character device.
    Foreign,
}

/// Depth of the deepest file below a folder `mig`: `giN/ciN/access`.
const CAPABILITY_DEPTH: u32 = 3;

/// Owner and mode of device files, from the driver's files in `/proc`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rights {
    mode: u32,
    uid: u32,
    gid: u32,
    modify: bool,
}

impl Rights {
    /// Reads the driver's parameters. Every driver has all four. A missing one is an error and is not
    /// guessed: an empty file would otherwise open the nodes to everybody.
    fn of_parameters(text: &str) -> Result<Self, &'static str> {
        let want = |name: &'static str| number(text, name).ok_or(name);
        Ok(Self {
            mode: want("DeviceFileMode")? & 0o777,
            uid: want("DeviceFileUID")?,
            gid: want("DeviceFileGID")?,
            modify: want("ModifyDeviceFiles")? == 1,
        })
    }

    /// Reads one capability's file. It has no owner, so the node belongs to root.
    fn of_capability(text: &str) -> Result<Self, &'static str> {
        let mode = number(text, "DeviceFileMode").ok_or("DeviceFileMode")? & 0o777;
        let modify = number(text, "DeviceFileModify").is_none_or(|word| word == 1);
        Ok(Self { mode, uid: 0, gid: 0, modify })
    }
}

impl DeviceFiles {
    /// Reads the nodes that the kernel modules below `roots` need.
    ///
    /// # Errors
    /// When there is no driver, or one of its files is empty or unreadable. An unreadable file never just
    /// drops a node.
    pub fn read(roots: &Roots) -> Result<Self, NodeError> {
        let nvidia = roots.proc.join("proc/driver/nvidia");
        if !nvidia.join("version").exists() {
            return Err(NodeError::NoDriver { path: nvidia.join("version") });
        }
        let path = nvidia.join("params");
        let rights = Rights::of_parameters(&proc::read(&path)?);
        let rights = rights.map_err(|what| ProcError::Format { path, what })?;
        let majors = majors(&roots.proc)?;
        let mut files = Self { nodes: Vec::new(), unregistered: Vec::new() };
        let mut add = |name: &str, major: u32, minor: u32, rights: Rights| {
            files.nodes.push(DeviceFile::new(&roots.dev, name, (major, minor), rights));
        };
        add("nvidiactl", MAJOR, CONTROL_MINOR, rights);
        for minor in gpu_minors(&nvidia.join("gpus"))? {
            add(&format!("nvidia{minor}"), MAJOR, minor, rights);
        }
        if majors.contains_key("nvidia-modeset") || is_loaded(&roots.proc, "nvidia_modeset") {
            add("nvidia-modeset", MAJOR, MODESET_MINOR, rights);
        }
        if let Some(uvm) = majors.get("nvidia-uvm") {
            add("nvidia-uvm", *uvm, 0, rights);
            add("nvidia-uvm-tools", *uvm, 1, rights);
        }
        let Capabilities { of_all, of_instances } = Capabilities::read(&nvidia.join("capabilities"))?;
        if let Some(major) = majors.get("nvidia-caps") {
            for (minor, rights) in of_all.iter().chain(&of_instances) {
                add(&format!("nvidia-caps/nvidia-cap{minor}"), *major, *minor, *rights);
            }
        }
        let wanted = [
            (Unregistered { name: "nvidia-uvm", module: "nvidia-uvm" }, true),
            // There is no module `nvidia-caps`: the driver's main module registers the device.
            (Unregistered { name: "nvidia-caps", module: "nvidia" }, !of_instances.is_empty()),
        ];
        let missing = wanted.into_iter().filter(|(device, used)| *used && !majors.contains_key(device.name));
        files.unregistered.extend(missing.map(|(device, _)| device));
        Ok(files)
    }

    /// The existing NVIDIA nodes below `roots`: those with both a name and a major number of NVIDIA's.
    ///
    /// # Errors
    /// When `/proc/devices` cannot be read.
    pub fn existing(roots: &Roots) -> Result<Vec<DeviceNode>, NodeError> {
        let majors = majors(&roots.proc)?;
        let dev = roots.dev.join("dev");
        let mut names: Vec<String> = folder::names(&dev).filter(|name| name.starts_with("nvidia")).collect();
        for inner in ["nvidia-caps", "nvidia-caps-imex-channels"] {
            names.extend(folder::names(&dev.join(inner)).map(|name| format!("{inner}/{name}")));
        }
        names.sort();
        let nodes = names.iter().filter_map(|name| device_node(&roots.dev, name).ok());
        let is_nvidias =
            |major: u32| majors.iter().any(|(name, found)| *found == major && name.starts_with("nvidia"));
        Ok(nodes.filter(|node| node.major == MAJOR || is_nvidias(node.major)).collect())
    }
}

impl DeviceFile {
    fn new(dev_root: &Path, name: &str, (major, minor): (u32, u32), rights: Rights) -> Self {
        let Rights { mode, uid, gid, modify } = rights;
        let path = Path::new("/dev").join(name);
        let host_path = dev_root.join("dev").join(name);
        let is_of_mig = name.starts_with("nvidia-caps/");
        Self { node: DeviceNode { path, host_path, major, minor, mode, uid, gid }, is_of_mig, modify }
    }

    /// Compares the file at the node's path with the node.
    pub fn state(&self) -> FileState {
        let Ok(metadata) = fs::symlink_metadata(&self.node.host_path) else { return FileState::Missing };
        if !metadata.file_type().is_char_device() {
            return FileState::Foreign;
        }
        if numbers(metadata.rdev()) != (self.node.major, self.node.minor) {
            return FileState::Number;
        }
        let found = (metadata.mode() & 0o777, metadata.uid(), metadata.gid());
        if found == (self.node.mode, self.node.uid, self.node.gid) {
            FileState::Right
        } else {
            FileState::Rights
        }
    }
}

fn is_loaded(proc_root: &Path, module: &str) -> bool {
    let modules = fs::read_to_string(proc_root.join("proc/modules")).unwrap_or_default();
    modules.lines().any(|line| line.split(' ').next() == Some(module))
}

/// The minors of the GPUs that are in service, in order. A GPU whose file does not have its minor is skipped,
/// so that the others still get their nodes.
fn gpu_minors(folder: &Path) -> Result<Vec<u32>, NodeError> {
    let mut minors = Vec::new();
    for (_, path) in pci_folders(folder)? {
        let path = path.join("information");
        let Ok(text) = proc::read(&path) else { continue };
        let information = proc::information(&text);
        minors.extend(information.minor.filter(|_| !information.excluded));
    }
    minors.sort_unstable();
    Ok(minors)
}

/// The capabilities of MIG, each as minor number and rights. The driver has others, for example to manage the
/// fabric: no container needs that one, and the service that needs it creates the node itself.
struct Capabilities {
    /// Those to configure and to monitor MIG. The driver also shows them while MIG is off.
    of_all: BTreeMap<u32, Rights>,
    /// Those of instances.
    of_instances: BTreeMap<u32, Rights>,
}

impl Capabilities {
    /// Reads them from the driver's folder.
    fn read(folder: &Path) -> Result<Self, NodeError> {
        let of_all = capabilities(&folder.join("mig"), CAPABILITY_DEPTH)?;
        let mut of_instances = BTreeMap::new();
        for name in folder::names(folder).filter(|name| name.starts_with("gpu")) {
            of_instances.extend(capabilities(&folder.join(name).join("mig"), CAPABILITY_DEPTH)?);
        }
        Ok(Self { of_all, of_instances })
    }
}

/// Minor and rights of every capability below `folder`, at most `depth` folders deep.
fn capabilities(folder: &Path, depth: u32) -> Result<BTreeMap<u32, Rights>, NodeError> {
    let mut found = BTreeMap::new();
    for entry in folder::entries(folder).filter(|_| depth > 0) {
        let path = entry.path();
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.extend(capabilities(&path, depth - 1)?);
            continue;
        }
        let text = proc::read(&path)?;
        if let Some(minor) = number(&text, "DeviceFileMinor") {
            let rights = Rights::of_capability(&text);
            found.insert(minor, rights.map_err(|what| ProcError::Format { path, what })?);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    const PARAMS: &str = "ResmanDebugLevel: 4294967295\nModifyDeviceFiles: 1\nDeviceFileUID: 0\nDeviceFileGID: 44\n\
         DeviceFileMode: 432\nRegistryDwords: \"\"\n";

    const OPEN: Rights = Rights { mode: 0o666, uid: 0, gid: 0, modify: true };

    /// A root folder with these files below `proc`.
    fn roots(files: &[(&str, &str)]) -> (tempfile::TempDir, Roots) {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join("proc").join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let path = root.path().to_path_buf();
        let roots = Roots { proc: path.clone(), dev: path.clone(), ..Roots::default() };
        (root, roots)
    }

    const BASE: [(&str, &str); 4] = [
        ("driver/nvidia/version", "NVRM version: x"),
        ("driver/nvidia/params", PARAMS),
        ("driver/nvidia/gpus/0000:01:00.0/information", "Device Minor: \t 1\n"),
        ("driver/nvidia/gpus/0000:02:00.0/information", "Device Minor: \t 0\nGPU Excluded:\t No\n"),
    ];

    /// One node as path, major, minor, mode and group.
    type Row = (String, u32, u32, u32, u32);

    fn wanted(more: &[(&str, &str)]) -> (Vec<Row>, Vec<&'static str>) {
        let (_folder, roots) = roots(&[&BASE, more].concat());
        let files = DeviceFiles::read(&roots).unwrap();
        let nodes = files.nodes.iter().map(|file| {
            let DeviceNode { path, major, minor, mode, gid, .. } = &file.node;
            (path.display().to_string(), *major, *minor, *mode, *gid)
        });
        (nodes.collect(), files.unregistered.iter().map(|device| device.name).collect())
    }

    fn row(path: &str, major: u32, minor: u32) -> Row {
        (path.to_owned(), major, minor, 0o660, 44)
    }

    #[test]
    fn nodes_have_the_numbers_of_this_boot_and_the_rights_of_the_drivers_parameters() {
        let devices = "Character devices:\n  1 mem\n195 nvidia-frontend\n509 nvidia-uvm\n\nBlock devices:\n7 nvidia-uvm\n";
        let (nodes, missing) = wanted(&[("devices", devices)]);
        let want = [
            row("/dev/nvidiactl", 195, 255),
            row("/dev/nvidia0", 195, 0),
            row("/dev/nvidia1", 195, 1),
            row("/dev/nvidia-uvm", 509, 0),
            row("/dev/nvidia-uvm-tools", 509, 1),
        ];
        assert_eq!((nodes, missing), (want.to_vec(), vec![]));
    }

    #[test]
    fn a_module_that_is_not_loaded_is_named_and_a_longer_name_is_another() {
        let devices = "Character devices:\n195 nvidia\n195 nvidiactl\n508 nvidia-uvm-x\n507 nvidia-caps-imex-channels\n";
        let capability = |name| (name, "DeviceFileMinor: 1\nDeviceFileMode: 256\n");
        let config = capability("driver/nvidia/capabilities/mig/config");
        let instance = capability("driver/nvidia/capabilities/gpu1/mig/gi1/access");
        for (capability, want) in [(config, &["nvidia-uvm"][..]), (instance, &["nvidia-uvm", "nvidia-caps"])]
        {
            let (nodes, missing) = wanted(&[("devices", devices), capability]);
            assert_eq!(nodes.len(), 3, "{nodes:?}");
            assert_eq!(missing, want, "{}", capability.0);
        }
    }

    #[test]
    fn modeset_and_capabilities_are_there_where_the_driver_shows_them() {
        let devices = "Character devices:\n195 nvidia\n509 nvidia-uvm\n237 nvidia-caps\n";
        let (nodes, missing) = wanted(&[
            ("devices", devices),
            ("modules", "nvidia_modeset 1605632 1 - Live 0x0\nnvidia 1 1 - Live 0x0\n"),
            (
                "driver/nvidia/capabilities/mig/config",
                "DeviceFileMinor: 1\nDeviceFileMode: 256\nDeviceFileModify: 1\n",
            ),
            ("driver/nvidia/capabilities/gpu0/mig/gi1/access", "DeviceFileMinor: 30\nDeviceFileMode: 292\n"),
            (
                "driver/nvidia/capabilities/gpu0/mig/gi1/ci0/access",
                "DeviceFileMinor: 31\nDeviceFileMode: 292\n",
            ),
            ("driver/nvidia/capabilities/mig/other", "no number\n"),
            ("driver/nvidia/capabilities/fabric-imex-mgmt", "DeviceFileMinor: 4323\nDeviceFileMode: 256\n"),
        ]);
        assert_eq!(missing, [""; 0]);
        let cap = |minor, mode| (format!("/dev/nvidia-caps/nvidia-cap{minor}"), 237, minor, mode, 0);
        assert_eq!(nodes[3], row("/dev/nvidia-modeset", 195, 254));
        assert_eq!(nodes[6..], [cap(1, 0o400), cap(30, 0o444), cap(31, 0o444)]);
    }

    #[test]
    fn a_driver_that_leaves_device_files_alone_is_heard() {
        let without = PARAMS.replace("ModifyDeviceFiles: 1", "ModifyDeviceFiles: 0");
        for (rights, modify) in [
            (Rights::of_parameters(&without), false),
            (Rights::of_parameters(PARAMS), true),
            (Rights::of_capability("DeviceFileMode: 292\nDeviceFileModify: 0\n"), false),
            (Rights::of_capability("DeviceFileMode: 292\nDeviceFileModify: 1\n"), true),
            (Rights::of_capability("DeviceFileMode: 292\n"), true),
        ] {
            assert_eq!(rights.map(|rights| rights.modify), Ok(modify));
        }
        let all = Rights::of_capability("DeviceFileMode: 4294967295\n");
        assert_eq!(all.map(|rights| rights.mode), Ok(0o777));
    }

    #[test]
    fn a_parameter_that_is_not_told_is_an_error_and_opens_nothing() {
        for name in ["DeviceFileMode", "DeviceFileUID", "DeviceFileGID", "ModifyDeviceFiles"] {
            let text = PARAMS.replace(name, "Other");
            assert_eq!(Rights::of_parameters(&text), Err(name));
            let text = PARAMS.replace(&format!("{name}: "), &format!("{name}: x"));
            assert_eq!(Rights::of_parameters(&text), Err(name), "no number");
        }
        assert_eq!(Rights::of_capability("DeviceFileMinor: 1\n"), Err("DeviceFileMode"));
        let mut files = BASE.to_vec();
        files[1].1 = "";
        let (_folder, empty) = roots(&[&files[..], &[("devices", "Character devices:\n")]].concat());
        let error = DeviceFiles::read(&empty).unwrap_err();
        assert!(
            matches!(error, NodeError::Proc(ProcError::Format { what: "DeviceFileMode", .. })),
            "{error}"
        );
    }

    #[test]
    fn an_unknown_gpu_has_no_node_and_a_missing_driver_is_an_error() {
        let mut files = BASE.to_vec();
        files[2].1 = "";
        let (_folder, partial) = roots(&[&files[..], &[("devices", "Character devices:\n")]].concat());
        let names = |roots: &Roots| -> Vec<PathBuf> {
            DeviceFiles::read(roots).unwrap().nodes.into_iter().map(|file| file.node.path).collect()
        };
        let (_whole, whole) = roots(&[&BASE[..], &[("devices", "Character devices:\n")]].concat());
        let (partial, whole) = (names(&partial), names(&whole));
        assert!(
            partial.iter().all(|path| whole.contains(path)) && partial.len() + 1 == whole.len(),
            "{partial:?}"
        );
        assert!(partial.contains(&PathBuf::from("/dev/nvidiactl")), "{partial:?}");
        let (_folder, none) = roots(&[("devices", "")]);
        assert!(matches!(DeviceFiles::read(&none), Err(NodeError::NoDriver { .. })));
    }

    #[test]
    fn a_link_by_number_leads_to_the_node_from_its_own_folder() {
        let roots = Roots { dev: "/node".into(), ..Roots::default() };
        let file = |name, numbers| DeviceFile::new(&roots.dev, name, numbers, OPEN).node;
        for (node, link, target) in [
            (file("nvidiactl", (195, 255)), "/node/dev/char/195:255", "../nvidiactl"),
            (file("nvidia-caps/nvidia-cap1", (237, 1)), "/node/dev/char/237:1", "../nvidia-caps/nvidia-cap1"),
        ] {
            assert_eq!(node.char_link(&roots), (link.into(), target.into()));
        }
    }

    #[test]
    fn what_is_no_character_device_is_foreign() {
        let (folder, roots) = roots(&[]);
        let file = DeviceFile::new(&roots.dev, "nvidia0", (195, 0), OPEN);
        assert_eq!(file.state(), FileState::Missing);
        fs::create_dir(folder.path().join("dev")).unwrap();
        fs::write(folder.path().join("dev/nvidia0"), "").unwrap();
        assert_eq!(file.state(), FileState::Foreign);
        let null = DeviceFile::new(Path::new("/"), "null", (195, 0), OPEN);
        assert_eq!(null.state(), FileState::Number);
        let null = DeviceFile::new(Path::new("/"), "null", (1, 3), Rights { mode: 0, ..OPEN });
        assert_eq!(null.state(), FileState::Rights);
    }
}
