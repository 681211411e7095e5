//! `gpushare system`: the driver's device nodes and the links by number, made and mended. The doctor names
//! what is missing.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

use gpushare_tests::artifacts;
use gpushare_tests::command::{self, Outcome};
use gpushare_tests::leases::cli;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::{MODEL, SimulatedNode};
use serde_json::Value;

/// The state of each path, by the path's end, as `gpushare system ... --json` tells it.
fn states(outcome: &Outcome) -> Vec<(String, String)> {
    let told: Value = serde_json::from_str(&outcome.stdout).expect("gpushare system --json prints JSON");
    let text = |entry: &Value, field: &str| entry[field].as_str().unwrap_or_default().to_owned();
    let entries = told["items"].as_array().expect("a list").iter();
    entries
        .map(|entry| {
            let path = text(entry, "path");
            let (_, name) = path.rsplit_once("/dev/").expect("the path is below /dev");
            (name.to_owned(), text(entry, "state"))
        })
        .collect()
}

fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
    expected.iter().map(|(name, state)| ((*name).to_owned(), (*state).to_owned())).collect()
}

fn node_at(path: &Path, numbers: &str) {
    let _ = fs::remove_file(path);
    let mut mknod = Command::new("/bin/busybox");
    mknod.arg("mknod").arg(path).arg("c").args(numbers.split(':'));
    let _ = command::run(&mut mknod).expect_success("mknod");
}

/// Major, minor, mode, owner and group of a node.
fn rights(path: &Path) -> (u64, u64, u32, u32, u32) {
    let metadata = fs::symlink_metadata(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let number = metadata.rdev();
    (number >> 8, number & 0xff, metadata.mode() & 0o777, metadata.uid(), metadata.gid())
}

/// Changes a line of the driver's parameters.
fn set_parameter(node: &SimulatedNode, name: &str, value: u32) {
    let path = node.proc_driver().join("params");
    let text = fs::read_to_string(&path).expect("the parameters can be read");
    let lines = text.lines().map(|line| match line.split_once(':') {
        Some((found, _)) if found == name => format!("{name}: {value}\n"),
        _ => format!("{line}\n"),
    });
    fs::write(&path, lines.collect::<String>()).expect("the parameters can be written");
}

#[test]
#[ignore = "needs root: makes device nodes"]
fn nodes_are_made_as_the_driver_wants_them_and_then_left_alone() {
    if !met(&[Need::Root, Need::Busybox]) {
        return;
    }
    let node = SimulatedNode::create(2, MODEL, "80GiB");
    let dev = node.root().join("dev");
    set_parameter(&node, "DeviceFileMode", 0o660);
    set_parameter(&node, "DeviceFileGID", 44);
    fs::remove_file(dev.join("nvidia-uvm")).expect("a node can be removed");
    node_at(&dev.join("nvidiactl"), "195:7");
    let nodes = |flags: &[&str]| cli(node.config(), &[&["system", "nodes", "--json"], flags].concat());
    let todo = pairs(&[
        ("nvidiactl", "to do"),
        ("nvidia0", "to do"),
        ("nvidia1", "to do"),
        ("nvidia-uvm", "to do"),
        ("nvidia-uvm-tools", "to do"),
    ]);
    assert_eq!(states(&nodes(&["--dry-run"]).expect_success("a dry run")), todo);
    assert!(!dev.join("nvidia-uvm").exists() && rights(&dev.join("nvidiactl")).1 == 7, "a dry run acted");
    let done = pairs(&[
        ("nvidiactl", "mended"),
        ("nvidia0", "mended"),
        ("nvidia1", "mended"),
        ("nvidia-uvm", "made"),
        ("nvidia-uvm-tools", "mended"),
    ]);
    assert_eq!(states(&nodes(&[]).expect_success("gpushare system nodes")), done);
    for (name, major, minor) in [
        ("nvidiactl", 195, 255),
        ("nvidia0", 195, 0),
        ("nvidia1", 195, 1),
        ("nvidia-uvm", 511, 0),
        ("nvidia-uvm-tools", 511, 1),
    ] {
        assert_eq!(rights(&dev.join(name)), (major, minor, 0o660, 0, 44), "{name}");
    }
    let inodes =
        || ["nvidiactl", "nvidia-uvm"].map(|name| fs::metadata(dev.join(name)).expect("a node").ino());
    let before = inodes();
    let again = states(&nodes(&[]).expect_success("a second run"));
    assert!(again.iter().all(|(_, state)| state == "right"), "{again:?}");
    assert_eq!(inodes(), before, "a second run made nodes anew");
    let left = fs::read_dir(&dev).expect("/dev can be listed").flatten();
    assert_eq!(left.filter(|entry| entry.file_name().to_string_lossy().starts_with('.')).count(), 0);
}

#[test]
#[ignore = "needs root: makes device nodes"]
fn a_driver_that_leaves_its_nodes_alone_is_obeyed() {
    if !met(&[Need::Root, Need::Busybox]) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let dev = node.root().join("dev");
    set_parameter(&node, "ModifyDeviceFiles", 0);
    set_parameter(&node, "DeviceFileMode", 0o600);
    let nodes = || cli(node.config(), &["system", "nodes"]);
    let _ = nodes().expect_success("rights that differ are not ours to change");
    assert_eq!(rights(&dev.join("nvidia0")).2, 0o666);
    fs::remove_file(dev.join("nvidia-uvm")).expect("a node can be removed");
    let refused = nodes();
    assert!(!refused.success() && refused.stdout.contains("ModifyDeviceFiles: 0"), "{refused:?}");
    assert!(!dev.join("nvidia-uvm").exists());
}

#[test]
#[ignore = "needs root: makes device nodes"]
fn what_cannot_be_mended_is_named_and_the_rest_is_done() {
    if !met(&[Need::Root, Need::Busybox]) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let dev = node.root().join("dev");
    let devices = node.root().join("proc/devices");
    let text = fs::read_to_string(&devices).expect("the list of devices can be read");
    fs::write(&devices, text.replace("511 nvidia-uvm", "")).expect("it can be written");
    fs::remove_file(dev.join("nvidia0")).expect("a node can be removed");
    fs::write(dev.join("nvidia0"), "mine").expect("a file can be written");
    fs::remove_file(dev.join("nvidiactl")).expect("a node can be removed");
    let outcome = cli(node.config(), &["system", "nodes"]);
    assert!(!outcome.success());
    for part in ["modprobe nvidia-uvm", "no device node; remove it"] {
        assert!(outcome.stdout.contains(part), "no {part:?} in {}", outcome.stdout);
    }
    assert_eq!(rights(&dev.join("nvidiactl")), (195, 255, 0o666, 0, 0));
    assert_eq!(fs::read_to_string(dev.join("nvidia0")).expect("the file is there"), "mine");
}

#[test]
#[ignore = "needs root: makes device nodes"]
fn every_node_gets_its_link_by_number_and_wrong_links_are_mended() {
    if !met(&[Need::Root, Need::Busybox]) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let char = node.root().join("dev/char");
    // A file with a name of NVIDIA's and another number is left out, as where a test puts a null device
    // there.
    node_at(&node.root().join("dev/nvidia7"), "1:3");
    let run = |flags: &[&str]| cli(node.config(), &[&["system", "dev-char", "--json"], flags].concat());
    let every = |state: &'static str| {
        pairs(&[("char/511:0", state), ("char/511:1", state), ("char/195:0", state), ("char/195:255", state)])
    };
    assert_eq!(states(&run(&["--dry-run"]).expect_success("a dry run")), every("to do"));
    assert!(!char.exists(), "a dry run acted");
    assert_eq!(states(&run(&[]).expect_success("the first run")), every("made"));
    for (link, target) in [("195:255", "../nvidiactl"), ("195:0", "../nvidia0"), ("511:0", "../nvidia-uvm")] {
        assert_eq!(fs::read_link(char.join(link)).expect("a link"), Path::new(target));
        assert!(char.join(link).exists(), "{link} leads nowhere");
    }
    assert_eq!(states(&run(&[]).expect_success("the second run")), every("right"));
    fs::remove_file(char.join("195:0")).expect("a link can be removed");
    symlink("../nvidia1", char.join("195:0")).expect("a link can be made");
    fs::remove_file(char.join("511:0")).expect("a link can be removed");
    fs::write(char.join("511:0"), "").expect("a file can be written");
    let outcome = run(&[]);
    assert!(!outcome.success(), "{outcome:?}");
    let want = pairs(&[
        ("char/511:0", "failed"),
        ("char/511:1", "right"),
        ("char/195:0", "mended"),
        ("char/195:255", "right"),
    ]);
    assert_eq!(states(&outcome), want);
    assert_eq!(fs::read_link(char.join("195:0")).expect("a link"), Path::new("../nvidia0"));
    // systemd asks where a link leads, not how it is written. Two nodes of one number have one link.
    fs::remove_file(char.join("511:0")).expect("a file can be removed");
    fs::remove_file(char.join("195:0")).expect("a link can be removed");
    symlink(node.root().join("dev/nvidia0"), char.join("195:0")).expect("a link can be made");
    node_at(&node.root().join("dev/nvidia0-again"), "195:0");
    let _ = run(&[]).expect_success("a run with two nodes of one number");
    assert_eq!(states(&run(&[]).expect_success("the next run")), every("right"));
    assert_eq!(fs::read_link(char.join("195:0")).expect("a link"), node.root().join("dev/nvidia0"));
}

#[test]
#[ignore = "needs root: makes device nodes"]
fn runs_at_the_same_time_make_every_node_and_leave_nothing_else() {
    if !met(&[Need::Root]) {
        return;
    }
    let node = SimulatedNode::create(2, MODEL, "80GiB");
    let dev = node.root().join("dev");
    for round in 0..20 {
        for name in ["nvidiactl", "nvidia0", "nvidia1", "nvidia-uvm"] {
            fs::remove_file(dev.join(name)).expect("a node can be removed");
        }
        std::thread::scope(|scope| {
            for command in ["nodes", "dev-char", "nodes", "nodes"] {
                let config = node.config();
                scope.spawn(move || {
                    let outcome = cli(config, &["system", command]);
                    assert!(outcome.success(), "round {round}, {command}: {outcome:?}");
                });
            }
        });
        for name in ["nvidiactl", "nvidia0", "nvidia1", "nvidia-uvm"] {
            assert_eq!(rights(&dev.join(name)).2, 0o666, "round {round}: {name}");
        }
    }
}

#[test]
#[ignore = "needs root: makes device nodes"]
fn the_folder_of_capabilities_is_open_whatever_the_umask_is_or_was() {
    if !met(&[Need::Root]) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let devices = node.root().join("proc/devices");
    let text = fs::read_to_string(&devices).expect("the list of devices can be read");
    fs::write(&devices, text.replace("511 nvidia-uvm", "511 nvidia-uvm\n237 nvidia-caps"))
        .expect("it can be written");
    let capability = node.proc_driver().join("capabilities/mig/config");
    fs::create_dir_all(capability.parent().expect("a folder")).expect("a folder can be made");
    let text = "DeviceFileMinor: 1\nDeviceFileMode: 292\nDeviceFileModify: 1\n";
    fs::write(&capability, text).expect("a capability can be written");
    let folder = node.root().join("dev/nvidia-caps");
    let masked = || {
        let mut shell = Command::new("sh");
        shell.args(["-c", "umask 077; exec \"$0\" system nodes"]).arg(artifacts::cli());
        command::run(shell.env("GPUSHARE_CONFIG", node.config())).expect_success("gpushare system nodes")
    };
    let _ = masked();
    let mode = || fs::metadata(&folder).expect("the folder is there").mode() & 0o777;
    assert_eq!((mode(), rights(&folder.join("nvidia-cap1")).2), (0o755, 0o444));
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).expect("it can be closed");
    let _ = masked();
    assert_eq!(mode(), 0o755, "what an earlier version closed is opened");
    fs::write(node.proc_driver().join("params"), "").expect("the parameters can be written");
    let refused = cli(node.config(), &["system", "nodes"]);
    assert!(!refused.success() && refused.stderr.contains("DeviceFileMode"), "{refused:?}");
    assert_eq!(rights(&node.root().join("dev/nvidia0")).2, 0o666, "nothing is guessed");
}

#[test]
#[ignore = "needs root: makes device nodes"]
fn the_doctor_names_missing_nodes_and_links_with_the_remedy() {
    if !met(&[Need::Root, Need::Busybox]) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let finding = |check: &str| {
        let outcome = cli(node.config(), &["doctor"]);
        let line = outcome.stdout.lines().find(|line| line.contains(check)).map(str::to_owned);
        line.unwrap_or_else(|| panic!("no {check} in {}", outcome.stdout))
    };
    assert!(finding("device nodes").starts_with("ok"), "{}", finding("device nodes"));
    let links = finding("device links");
    assert!(links.starts_with("warning") && links.contains("dev/char/195:0 is missing"), "{links}");
    assert!(links.contains("gpushare system dev-char"), "{links}");
    fs::remove_file(node.root().join("dev/nvidia-uvm")).expect("a node can be removed");
    let nodes = finding("device nodes");
    assert!(nodes.starts_with("FAILURE") && nodes.contains("nvidia-uvm is missing"), "{nodes}");
    assert!(nodes.contains("gpushare system nodes"), "{nodes}");
    for command in ["nodes", "dev-char"] {
        let _ = cli(node.config(), &["system", command]).expect_success(command);
    }
    for check in ["device nodes", "device links"] {
        assert!(finding(check).starts_with("ok"), "{}", finding(check));
    }
}

#[test]
#[ignore = "needs root: makes device nodes"]
fn nodes_of_mig_are_asked_for_only_while_mig_is_on_and_those_of_the_fabric_never() {
    if !met(&[Need::Root]) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let write = |path: &Path, text: &str| {
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder can be made");
        fs::write(path, text).expect("a file can be written");
    };
    let devices = node.root().join("proc/devices");
    let text = fs::read_to_string(&devices).expect("the list of devices can be read");
    write(&devices, &text.replace("511 nvidia-uvm", "511 nvidia-uvm\n241 nvidia-caps"));
    // As a driver of an H200 shows it with MIG off.
    let capability = |name: &str, minor: u32| {
        let text = format!("DeviceFileMinor: {minor}\nDeviceFileMode: 256\nDeviceFileModify: 1\n");
        write(&node.proc_driver().join("capabilities").join(name), &text);
    };
    for (name, minor) in [("mig/config", 1), ("mig/monitor", 2), ("fabric-imex-mgmt", 4323)] {
        capability(name, minor);
    }
    let finding = |check: &str| {
        let outcome = cli(node.config(), &["doctor"]);
        let line = outcome.stdout.lines().find(|line| line.contains(check)).map(str::to_owned);
        line.unwrap_or_else(|| panic!("no {check} in {}", outcome.stdout))
    };
    let nodes = finding("device nodes");
    assert!(nodes.starts_with("ok"), "{nodes}");
    let made = cli(node.config(), &["system", "nodes"]).expect_success("gpushare system nodes").stdout;
    assert!(made.contains("nvidia-cap1") && !made.contains("nvidia-cap4323"), "{made}");
    assert!(!node.root().join("dev/nvidia-caps/nvidia-cap4323").exists());
    let links = finding("device links");
    assert!(links.contains("195:0 is missing") && !links.contains("241:"), "{links}");

    capability("gpu0/mig/gi1/access", 12);
    capability("gpu0/mig/gi1/ci0/access", 13);
    let nodes = finding("device nodes");
    assert!(nodes.starts_with("warning") && nodes.contains("nvidia-cap12 is missing"), "{nodes}");
    let _ = cli(node.config(), &["system", "nodes"]).expect_success("gpushare system nodes");
    let nodes = finding("device nodes");
    assert!(nodes.starts_with("ok"), "{nodes}");
    let links = finding("device links");
    assert!(links.contains("241:12 is missing"), "{links}");
}
