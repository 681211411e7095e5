//! GPUs behind the names of CDI devices, from the specification files in which engines look such names up
//! (Container Device Interface 1.1, SPEC.md: JSON or YAML, `/etc/cdi` and `/var/run/cdi`).
//!
//! Only who may write those folders decides what a name means; they are root's. A file that cannot be read or is no
//! specification counts for nothing, as it does for engines.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, OpenOptions};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;
use saphyr::{LoadableYamlNode, Scalar, Yaml};
use serde_json::Value;

/// What a specification says of one device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CdiDevice {
    /// The minor numbers of the GPUs whose nodes it brings, each once.
    pub minors: Vec<u32>,
    /// Whether it brings a part of a GPU: a MIG instance's node.
    pub is_part: bool,
}

/// A driver's own specification of eight GPUs has some 40 KB.
const MOST_BYTES: u64 = 4 << 20;
/// Files of a folder that are looked at. A claim of dynamic resource allocation has one of its own.
const MOST_FILES: usize = 4096;

/// The devices with NVIDIA nodes among `names` (`vendor/class=name`). What a later folder says replaces what an earlier
/// one does, and a name that two files of one folder give different GPUs means none, as for engines.
pub fn cdi_devices(folders: &[PathBuf], names: &BTreeSet<&str>) -> BTreeMap<String, CdiDevice> {
    let mut all = BTreeMap::new();
    for folder in folders {
        let mut of_folder: BTreeMap<String, Option<CdiDevice>> = BTreeMap::new();
        for file in specifications(folder) {
            for (name, device) in read(&file).into_iter().flat_map(|spec| devices(&spec)) {
                if names.contains(name.as_str()) {
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
    all.retain(|_, device| !device.minors.is_empty());
    all
}

fn specifications(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().take(MOST_FILES);
    let files = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let is_specification = |file: &PathBuf| {
        file.extension()
            .is_some_and(|extension| ["json", "yaml", "yml"].map(AsRef::as_ref).contains(&extension))
    };
    files.filter(is_specification).collect()
}

fn read(file: &Path) -> Option<Value> {
    let mut options = OpenOptions::new();
    let opened = options.read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(file).ok()?;
    let length = opened.metadata().ok().filter(|metadata| metadata.is_file())?.len();
    let mut text = String::new();
    opened.take(MOST_BYTES).read_to_string(&mut text).ok().filter(|_| length < MOST_BYTES)?;
    if file.extension()? == "json" {
        return serde_json::from_str(&text).ok();
    }
    match Yaml::load_from_str(&text).ok()?.as_slice() {
        [document] => Some(json(document)),
        _ => None,
    }
}

/// What JSON has of a YAML document: names of digits alone are texts here, whoever left out their quotes.
fn json(yaml: &Yaml) -> Value {
    let text = |yaml: &Yaml| match yaml {
        Yaml::Value(Scalar::String(text)) => Some(text.to_string()),
        Yaml::Value(Scalar::Integer(number)) => Some(number.to_string()),
        _ => None,
    };
    match yaml {
        Yaml::Sequence(items) => items.iter().map(json).collect(),
        Yaml::Mapping(entries) => {
            entries.iter().filter_map(|(key, value)| Some((text(key)?, json(value)))).collect()
        }
        scalar => text(scalar).map_or(Value::Null, Value::String),
    }
}

/// The devices of a specification, each with the nodes that all of its devices bring.
fn devices(spec: &Value) -> Vec<(String, CdiDevice)> {
    let Some(kind) = spec["kind"].as_str() else { return Vec::new() };
    let device = |device: &Value| {
        let paths = || nodes(device).chain(nodes(spec));
        let minors: BTreeSet<u32> = paths().filter_map(minor).collect();
        let is_part = paths().any(|path| path.contains("/nvidia-caps/nvidia-cap"));
        let name = format!("{kind}={}", device["name"].as_str()?);
        Some((name, CdiDevice { minors: minors.into_iter().collect(), is_part }))
    };
    spec["devices"].as_array().into_iter().flatten().filter_map(device).collect()
}

/// Where the nodes of a device, or of all, are on the host.
fn nodes(part: &Value) -> impl Iterator<Item = &str> {
    let nodes = part["containerEdits"]["deviceNodes"].as_array().into_iter().flatten();
    nodes.filter_map(|node| node["hostPath"].as_str().or(node["path"].as_str()))
}

/// The N of `/dev/nvidiaN`, below whichever root.
fn minor(path: &str) -> Option<u32> {
    let (folder, file) = path.rsplit_once('/')?;
    let number = file.strip_prefix("nvidia").filter(|_| folder.ends_with("/dev"))?;
    number.parse().ok().filter(|_| number.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The devices of two folders with these files, of the names that are asked for.
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
                {"path": "/dev/nvidia0"}, {"path": "/dev/nvidia-caps/nvidia-cap21"}]}}]}"#;
        let bare = "kind: nvidia.com/gpu\ndevices: [{name: 7, containerEdits: {deviceNodes: [{path: /dev/nvidia7}]}}]\n";
        let files = [("run/claim.yaml", CLAIM), ("etc/nvidia.json", json), ("etc/seven.yml", bare)];
        let gpu = |name: &str| format!("nvidia.com/gpu={name}");
        assert_eq!(
            found(
                &files,
                &[
                    "k8s.gpu.nvidia.com/claim=0b5c-gpu-1",
                    &gpu("mine"),
                    &gpu("nic"),
                    &gpu("half"),
                    &gpu("7"),
                    &gpu("no")
                ]
            ),
            [
                ("k8s.gpu.nvidia.com/claim=0b5c-gpu-1".to_owned(), vec![3], false),
                (gpu("7"), vec![7], false),
                (gpu("half"), vec![0], true),
                (gpu("mine"), vec![0, 1], false),
            ]
        );
    }

    #[test]
    fn later_folders_count_and_files_that_differ_or_cannot_be_read_mean_none() {
        let name = "k8s.gpu.nvidia.com/claim=0b5c-gpu-1";
        let other = CLAIM.replace("nvidia3", "nvidia2");
        let minors = |files: &[(&str, &str)]| {
            found(files, &[name]).into_iter().map(|(_, minors, _)| minors).collect::<Vec<_>>()
        };
        assert_eq!(minors(&[("etc/a.yaml", CLAIM), ("run/a.yaml", &other)]), [[2]]);
        assert_eq!(minors(&[("run/a.yaml", CLAIM), ("run/b.yaml", CLAIM)]), [[3]], "said twice");
        assert!(minors(&[("etc/a.yaml", CLAIM), ("run/a.yaml", CLAIM), ("run/b.yaml", &other)]).is_empty());
        assert!(minors(&[("run/a.conf", CLAIM)]).is_empty(), "no specification's name");
        let large = format!("{CLAIM}#{}", "x".repeat(4 << 20));
        for broken in ["", "a: [", "- 1", "kind: 1\ndevices: 2", "--- 1\n--- 2", "a: &a [*a, *a]", &large] {
            assert!(minors(&[("run/a.yaml", broken)]).is_empty(), "{:.20}", broken);
        }
    }
}
