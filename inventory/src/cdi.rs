//! Finds the GPUs behind the names of CDI devices, in the CDI files in which engines look such names up
//! (Container Device Interface 1.1, SPEC.md: JSON or YAML, `/etc/cdi` and `/var/run/cdi`).
//!
//! Those folders are root's, so only root decides the meaning of a name. Like engines, we ignore a file that
//! cannot be read or is not a CDI file.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::sys::stat::{major, minor};
use serde_json::Value;

use crate::file_lease::open_now;
use crate::folder;
use crate::yaml;

/// The data about one device in the CDI files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CdiDevice {
    /// Minors of the GPUs whose device nodes it adds, without duplicates, in the order of the file.
    pub minors: Vec<u32>,
    /// Whether it adds a MIG instance's own node.
    pub is_part: bool,
}

/// Limit on the size of a file. The driver's own CDI file for eight GPUs has about 40 KB.
const MOST_BYTES: u64 = 4 << 20;
/// The NVIDIA driver's major number (Linux, Documentation/admin-guide/devices.txt). Its minors from 254 up
/// are control nodes.
const MAJOR: u64 = 195;
const FIRST_CONTROL_MINOR: u64 = 254;

/// The devices with NVIDIA nodes among `names` (`vendor/class=name`). Like in engines, a later folder
/// overrides an earlier one, and a name for which two files of one folder differ is invalid. A name that no
/// file has is returned without GPUs if some file has GPUs under its kind (`vendor/class`).
pub fn cdi_devices(folders: &[PathBuf], names: &BTreeSet<&str>) -> BTreeMap<String, CdiDevice> {
    let mut all = BTreeMap::new();
    let (mut kinds, mut met) = (BTreeSet::new(), BTreeSet::new());
    for folder in folders {
        let mut of_folder: BTreeMap<String, Option<CdiDevice>> = BTreeMap::new();
        for file in specifications(folder) {
            for (name, device) in read(&file).into_iter().flat_map(|spec| devices(&spec)) {
                if !device.minors.is_empty() {
                    kinds.extend(name.split_once('=').map(|(kind, _)| kind.to_owned()));
                }
                if names.contains(name.as_str()) {
                    met.insert(name.clone());
                    let same = |known: &Option<CdiDevice>| known.as_ref() == Some(&device);
                    let known = of_folder.get(&name).is_none_or(same);
                    of_folder.insert(name, known.then_some(device));
                }
            }
        }
        for (name, device) in of_folder {
            all.remove(&name);
            all.extend(device.map(|device| (name, device)));
        }
    }
    all.retain(|_, device: &mut CdiDevice| !device.minors.is_empty() || device.is_part);
    let is_of_gpus = |name: &&&str| name.split_once('=').is_some_and(|(kind, _)| kinds.contains(kind));
    for name in names.iter().filter(|name| !met.contains(**name)).filter(is_of_gpus) {
        all.entry((*name).to_owned()).or_default();
    }
    all
}

fn specifications(folder: &Path) -> Vec<PathBuf> {
    let is_specification =
        |file: &PathBuf| file.extension().is_some_and(|extension| extension == "json" || extension == "yaml");
    folder::paths(folder).filter(is_specification).collect()
}

fn read(file: &Path) -> Option<Value> {
    let opened = open_now(file).ok()?;
    let length = opened.metadata().ok()?.len();
    let mut text = String::new();
    opened.take(MOST_BYTES).read_to_string(&mut text).ok().filter(|_| length < MOST_BYTES)?;
    // Engines parse JSON and YAML with the same YAML parser.
    serde_json::from_str(&text).ok().or_else(|| yaml::first_document(&text))
}

/// The devices of a CDI file. Each also has the nodes that the file adds to all of its devices.
fn devices(spec: &Value) -> Vec<(String, CdiDevice)> {
    let Some(kind) = spec["kind"].as_str() else { return Vec::new() };
    let device = |device: &Value| {
        let name = device["name"].as_str().map_or_else(|| device["name"].to_string(), str::to_owned);
        let mut minors = Vec::new();
        for minor in nodes(device).chain(nodes(spec)).filter_map(gpu_minor) {
            if !minors.contains(&minor) {
                minors.push(minor);
            }
        }
        let is_part =
            nodes(device).any(|node| host_path(node).is_some_and(|path| path.contains("/nvidia-caps/")));
        (format!("{kind}={name}"), CdiDevice { minors, is_part })
    };
    spec["devices"].as_array().into_iter().flatten().map(device).collect()
}

/// The device nodes of one device, or those of the whole file.
fn nodes(part: &Value) -> impl Iterator<Item = &Value> {
    part["containerEdits"]["deviceNodes"].as_array().into_iter().flatten()
}

/// A node's path on the host.
fn host_path(node: &Value) -> Option<&str> {
    node["hostPath"].as_str().filter(|path| !path.is_empty()).or(node["path"].as_str())
}

/// The minor of a GPU's node. Uses the number in the file if it has a major, else that of the node on the
/// host, else the number in the node's name. Writers in Go omit a minor of 0.
fn gpu_minor(node: &Value) -> Option<u32> {
    if let Some(stated) = number(&node["major"]).filter(|major| *major > 0) {
        return of_gpu(stated, number(&node["minor"]).unwrap_or(0));
    }
    let path = host_path(node)?;
    match fs::metadata(path) {
        Ok(found) if found.file_type().is_char_device() => of_gpu(major(found.rdev()), minor(found.rdev())),
        _ => named(path),
    }
}

/// A number, which is a JSON number or, from YAML, a string.
fn number(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| value.as_str()?.parse().ok())
}

fn of_gpu(major: u64, minor: u64) -> Option<u32> {
    u32::try_from(minor).ok().filter(|_| major == MAJOR && minor < FIRST_CONTROL_MINOR)
}

/// The N of `/dev/nvidiaN`, below any root.
fn named(path: &str) -> Option<u32> {
    let (folder, file) = path.rsplit_once('/')?;
    let number = file.strip_prefix("nvidia").filter(|_| folder.ends_with("/dev"))?;
    number.parse().ok().filter(|_| number.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes these files into two folders and looks up `names`.
    fn found(files: &[(&str, &str)], names: &[&str]) -> Vec<(String, Vec<u32>, bool)> {
        let root = tempfile::tempdir().unwrap();
        let folders = ["etc", "run"].map(|folder| root.path().join(folder));
        for (name, text) in files {
            let file = root.path().join(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }
        let devices = cdi_devices(&folders, &names.iter().copied().collect());
        devices.into_iter().map(|(name, device)| (name, device.minors, device.is_part)).collect()
    }

    const CLAIM: &str = "\
cdiVersion: 0.7.0
kind: k8s.gpu.nvidia.com/claim
devices:
- name: 0b5c-gpu-1
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia3
      hostPath: /run/nvidia/driver/dev/nvidia3
containerEdits:
  deviceNodes:
  - path: /dev/nvidiactl
  - path: /dev/nvidia-uvm
";

    #[test]
    fn a_name_is_the_gpus_whose_nodes_its_specification_brings() {
        let json = r#"{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [
            {"name": "mine", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia1"}, {"path": "/dev/nvidia0"}]}},
            {"name": "nic", "containerEdits": {"deviceNodes": [{"path": "/dev/infiniband/uverbs0"}]}},
            {"name": "half", "containerEdits": {"deviceNodes": [
                {"path": "/dev/nvidia0"}, {"path": "/dev/nvidia-caps/nvidia-cap21"}]}},
            {"name": "part", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia-caps/nvidia-cap21"}]}},
            {"name": "first", "containerEdits": {"deviceNodes": [{"path": "/dev/card", "hostPath": "", "major": 195}]}},
            {"name": "third", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia1", "major": 195, "minor": 3}]}}],
            "containerEdits": {"deviceNodes": [
                {"path": "/dev/nvidiactl", "major": 195, "minor": 255}, {"path": "/dev/nvidia-caps/nvidia-cap1"}]}}"#;
        let bare = "kind: nvidia.com/gpu\ndevices: [{name: 7, containerEdits: {deviceNodes: [{path: /dev/nvidia7}]}}]\n";
        let files = [("run/claim.yaml", CLAIM), ("etc/nvidia.json", json), ("etc/seven.yaml", bare)];
        let gpu = |name: &str| format!("nvidia.com/gpu={name}");
        assert_eq!(
            found(
                &files,
                &[
                    "k8s.gpu.nvidia.com/claim=0b5c-gpu-1",
                    &gpu("mine"),
                    &gpu("nic"),
                    &gpu("half"),
                    &gpu("part"),
                    &gpu("first"),
                    &gpu("third"),
                    &gpu("7"),
                    &gpu("no")
                ]
            ),
            [
                ("k8s.gpu.nvidia.com/claim=0b5c-gpu-1".to_owned(), vec![3], false),
                (gpu("7"), vec![7], false),
                (gpu("first"), vec![0], false),
                (gpu("half"), vec![0], true),
                (gpu("mine"), vec![1, 0], false),
                (gpu("no"), vec![], false),
                (gpu("part"), vec![], true),
                (gpu("third"), vec![3], false),
            ]
        );
    }

    #[test]
    fn later_folders_count_and_files_that_differ_or_cannot_be_read_mean_none() {
        let name = "k8s.gpu.nvidia.com/claim=0b5c-gpu-1";
        let other = CLAIM.replace("nvidia3", "nvidia2");
        let minors = |files: &[(&str, &str)]| {
            let found = found(files, &[name]).into_iter().map(|(_, minors, _)| minors);
            found.filter(|minors| !minors.is_empty()).collect::<Vec<_>>()
        };
        assert_eq!(minors(&[("etc/a.yaml", CLAIM), ("run/a.yaml", &other)]), [[2]]);
        assert_eq!(minors(&[("run/a.yaml", CLAIM), ("run/b.yaml", CLAIM)]), [[3]], "said twice");
        assert!(minors(&[("etc/a.yaml", CLAIM), ("run/a.yaml", CLAIM), ("run/b.yaml", &other)]).is_empty());
        assert!(minors(&[("run/a.conf", CLAIM)]).is_empty(), "no specification's name");
        let large = format!("{CLAIM}#{}", "x".repeat(4 << 20));
        for broken in ["", "a: [", "- 1", "kind: 1\ndevices: 2", "a: &a [*a, *a]", &large] {
            assert!(minors(&[("run/a.yaml", broken)]).is_empty(), "{:.20}", broken);
        }
    }
}
