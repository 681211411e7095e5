//! Containers that ask for no share: whether one can open a GPU all the same.

use std::path::Path;

use gpushare_claims::lets_use;
use gpushare_inventory::{Roots, loaded_driver, nvidias_majors};
use serde_json::Value;

use crate::edit::is_nvidias_hook;
use crate::parts::{device_numbers, entries, is_block, text};
use crate::supervision::knows_driver;

/// Whether the driver's calls may fail in a container that asks for no share: the driver is one whose calls are
/// known, and the bundle gives the container no way to its devices.
pub fn is_bystander(json: &Value, roots: &Roots) -> bool {
    loaded_driver(&roots.proc).is_some_and(|version| knows_driver(&version)) && !may_open_gpus(json, roots)
}

/// Whether a bundle gives its container a way to a device of the driver's: a node, a device rule, a mount of
/// the host's nodes, or a hook of NVIDIA's. Monitors, whole GPUs and privileged agents have one. In doubt it has.
fn may_open_gpus(json: &Value, roots: &Roots) -> bool {
    let Ok(majors) = nvidias_majors(&roots.proc) else { return true };
    let is_nvidias = |major: u64| majors.contains(&major);
    let has_node = |device: &Value| !is_block(device) && device_numbers(device).0.is_some_and(is_nvidias);
    let may_use =
        |rule: &Value| lets_use(rule) && !is_block(rule) && device_numbers(rule).0.is_none_or(is_nvidias);
    entries(json, "/linux/devices").any(has_node)
        || entries(json, "/linux/resources/devices").any(may_use)
        || entries(json, "/mounts").any(|mount| brings_nodes(mount, &roots.dev.join("dev")))
        || json["hooks"]
            .as_object()
            .is_some_and(|stages| stages.values().filter_map(Value::as_array).flatten().any(is_nvidias_hook))
}

/// Whether a mount has the driver's nodes in `dev`, or folders with them.
fn brings_nodes(mount: &Value, dev: &Path) -> bool {
    let source = Path::new(text(mount, "source"));
    if !source.is_absolute() {
        return false; // a file system of its own
    }
    // A missing source has no nodes.
    let source = source.canonicalize().unwrap_or_else(|_| source.to_path_buf());
    let dev = dev.canonicalize().unwrap_or_else(|_| dev.to_path_buf());
    let below = source.strip_prefix(&dev).ok().and_then(|below| below.iter().next()?.to_str());
    dev.starts_with(&source) || below.is_some_and(|name| name == "dri" || name.starts_with("nvidia"))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;
    use tempfile::TempDir;

    use super::*;

    /// A host whose driver has majors 195, 234 (caps) and 510 (UVM).
    fn host() -> (TempDir, Roots) {
        let folder = TempDir::new().unwrap();
        fs::create_dir_all(folder.path().join("proc")).unwrap();
        fs::create_dir_all(folder.path().join("dev/dri")).unwrap();
        let devices = "Character devices:\n  1 mem\n195 nvidia-frontend\n234 nvidia-caps\n510 nvidia-uvm\n\n";
        fs::write(folder.path().join("proc/devices"), devices).unwrap();
        let roots = Roots { proc: folder.path().into(), dev: folder.path().into(), ..Roots::default() };
        (folder, roots)
    }

    #[test]
    fn of_real_engines_bundles_those_with_gpus_or_all_rights_have_a_way() {
        let (_folder, roots) = host();
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
        let bundles = fs::read_dir(fixtures).unwrap().map(|entry| entry.unwrap().path());
        let bundles = bundles.filter(|path| path.extension().is_some_and(|extension| extension == "json"));
        let with_a_way = bundles
            .filter(|path| may_open_gpus(&serde_json::from_slice(&fs::read(path).unwrap()).unwrap(), &roots));
        let mut names: Vec<String> =
            with_a_way.map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned()).collect();
        names.sort();
        let want = [
            "cri-container-privileged",
            "ctr-run-gpus0",
            "docker-device-cgroup-rule",
            "docker-gpus-2-caps",
            "docker-gpus-all",
            "docker-gpus-device",
            "docker-gpus-runc-env",
            "docker-privileged",
            "podman-privileged",
        ];
        assert_eq!(names, want);
    }

    #[test]
    fn a_node_a_rule_a_mount_or_a_hook_leads_to_a_gpu() {
        let (folder, roots) = host();
        let dev = |name: &str| folder.path().join("dev").join(name);
        std::os::unix::fs::symlink(dev(""), folder.path().join("link")).unwrap();
        let rule = |rule: Value| json!({"linux": {"resources": {"devices": [rule]}}});
        let node = |kind: &str, major: i64| json!({"linux": {"devices": [{"path": "/x", "type": kind, "major": major, "minor": 0}]}});
        let mount =
            |source: &Path| json!({"mounts": [{"destination": "/x", "type": "bind", "source": source}]});
        let hook =
            |path: &str, stage: &str| json!({"hooks": {stage: [{"path": path, "args": ["x", "hook", "y"]}]}});
        for (bundle, may) in [
            (json!({}), false),
            (node("c", 195), true),
            (node("c", 234), true),
            (node("c", 510), true),
            (node("b", 195), false),
            (node("c", 10), false),
            (rule(json!({"allow": true, "access": "rwm"})), true),
            (rule(json!({"allow": true, "type": "a", "access": "rwm"})), true),
            (rule(json!({"allow": true, "type": "c", "major": 510, "access": "r"})), true),
            (rule(json!({"allow": true, "type": "c", "major": -1, "access": "w"})), true),
            // Engines let containers make nodes of any kind, and use few of them.
            (rule(json!({"allow": true, "type": "c", "access": "m"})), false),
            (rule(json!({"allow": true, "type": "b", "access": "rwm"})), false),
            (rule(json!({"allow": true, "type": "c", "major": 136, "access": "rwm"})), false),
            (rule(json!({"allow": false, "access": "rwm"})), false),
            (mount(Path::new("/")), true),
            (mount(folder.path()), true),
            (mount(&dev("")), true),
            (mount(&dev("nvidiactl")), true),
            (mount(&dev("nvidia-caps/nvidia-cap1")), true),
            (mount(&dev("dri")), true),
            (mount(&folder.path().join("link")), true),
            (mount(&dev("shm")), false),
            (mount(&folder.path().join("proc")), false),
            (mount(Path::new("tmpfs")), false),
            (hook("/usr/bin/nvidia-container-runtime-hook", "prestart"), true),
            (hook("/usr/bin/nvidia-ctk", "createContainer"), true),
            (hook("/usr/bin/other", "prestart"), false),
        ] {
            assert_eq!(may_open_gpus(&bundle, &roots), may, "{bundle}");
        }
        for (version, is) in [("580.142", true), ("615.1", false), ("", false)] {
            let driver = folder.path().join("proc/driver/nvidia");
            fs::create_dir_all(&driver).unwrap();
            let text = format!("NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Tue\n");
            fs::write(driver.join("version"), text).unwrap();
            assert_eq!(is_bystander(&json!({}), &roots), is, "driver {version:?}");
            assert!(!is_bystander(&mount(Path::new("/")), &roots));
        }
        fs::remove_file(folder.path().join("proc/devices")).unwrap();
        assert!(may_open_gpus(&json!({}), &roots), "in doubt");
    }
}
