//! The node that `create` makes, and the folders that it refuses.

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use support::{Node, program};

#[test]
fn a_node_has_the_files_of_a_driver() {
    let node = Node::new(&[
        "--gpus",
        "2",
        "--model",
        "NVIDIA A100-SXM4-40GB",
        "--memory",
        "40GiB",
        "--driver",
        "550.54.15",
    ]);
    let libraries = node.path("driver/usr/lib/x86_64-linux-gnu");
    for (link, target) in [
        ("libcuda.so", "libcuda.so.1"),
        ("libcuda.so.1", "libcuda.so.550.54.15"),
        ("libnvidia-ml.so", "libnvidia-ml.so.1"),
        ("libnvidia-ml.so.1", "libnvidia-ml.so.550.54.15"),
    ] {
        assert_eq!(fs::read_link(libraries.join(link)).expect("a link").to_str(), Some(target), "{link}");
    }
    for name in ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"] {
        assert!(node.path("dev").join(name).exists(), "{name}");
    }
    let read = |name: &str| fs::read_to_string(node.path(name)).expect("a readable file");
    assert!(
        read("proc/driver/nvidia/version")
            .starts_with("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  ")
    );
    assert!(read("proc/driver/nvidia/params").contains("DeviceFileMode: 438\n"));
    assert!(read("proc/devices").contains("\n195 nvidia\n195 nvidiactl\n"));
    let information = read("proc/driver/nvidia/gpus/0000:0f:00.0/information");
    assert!(
        information.contains("Model: \t\t NVIDIA A100-SXM4-40GB\n")
            && information.contains("Device Minor: \t 1\n")
    );
    let settings = read("gpushare.toml");
    assert!(settings.contains(&format!("source = \"{}\"", node.path("shared").display())), "{settings}");
}

#[test]
fn a_driver_in_a_folder_of_its_own_has_its_program_there_and_a_script_elsewhere() {
    let smi = ["--nvidia-smi", "/bin/echo", "--driver-mount", "--nvidia-smi-script"];
    let node = Node::new(&smi);
    let driver = node.path("driver/usr/local/nvidia");
    assert!(driver.join("lib64/libcuda.so.1").exists() && driver.join("lib64/libnvidia-ml.so.1").exists());
    let bytes = fs::read(driver.join("bin/nvidia-smi")).expect("the program is there");
    assert!(bytes.starts_with(b"\x7fELF"));
    assert!(!node.path("driver/usr/lib").exists());
    let script = Command::new(node.path("driver/usr/bin/nvidia-smi")).arg("it's run").output();
    assert_eq!(script.expect("the script runs").stdout, b"it's run\n");
    let told = Command::new(program()).args(["create", "/no/such", "--nvidia-smi-script"]).output();
    let told = String::from_utf8_lossy(&told.expect("the program runs").stderr).into_owned();
    assert!(told.contains("--driver-mount"), "{told}");
}

#[test]
#[ignore = "needs root: makes a mount and device nodes"]
fn a_driver_in_a_mount_of_its_own_is_read_only_and_goes_with_the_node() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let node = folder.path().join("node");
    let call = |verb: &str, more: &[&str]| {
        let mut command = Command::new(program());
        command.arg(verb).arg(&node).args(more).output().expect("the program runs")
    };
    let mounts = || {
        let table = fs::read_to_string("/proc/self/mountinfo").expect("the kernel tells its mounts");
        let points = table.lines().filter_map(|line| line.split(' ').nth(4)).map(str::to_owned);
        points.filter(|point| Path::new(point).starts_with(&node)).collect::<Vec<_>>()
    };
    let told = call("create", &["--driver-mount"]);
    assert!(told.status.success(), "{told:?}");
    let driver = node.join("driver/usr/local/nvidia");
    assert_eq!(mounts(), [driver.display().to_string()]);
    let written = fs::write(driver.join("lib64/mine"), "").expect_err("it is read-only");
    assert_eq!(written.raw_os_error(), Some(libc::EROFS));
    let told = call("remove", &[]);
    assert!(told.status.success() && !node.exists() && mounts().is_empty(), "{told:?} {:?}", mounts());
    fs::create_dir(&node).expect("a folder");
    let told = call("create", &["--driver-mount", "--mig", "9=1g.10gb"]);
    assert!(!told.status.success() && mounts().is_empty(), "{told:?} {:?}", mounts());
    assert_eq!(fs::read_dir(&node).expect("the folder is there").count(), 0);
}

#[test]
fn a_folder_that_holds_a_node_is_refused() {
    let node = Node::new(&[]);
    let output = Command::new(program()).arg("create").arg(node.path("")).output().expect("the program runs");
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("holds a node already"));
}

#[test]
fn a_node_is_removed_whole_and_what_is_no_node_or_not_of_it_stays() {
    let folder = tempfile::tempdir().expect("a folder");
    let call = |words: &[&str], dir: &Path| {
        Command::new(program()).args(words).arg(dir).output().expect("the program runs")
    };
    let node = folder.path().join("node");
    assert!(call(&["create", "--plain-nodes"], &node).status.success());
    fs::create_dir_all(node.join("run/limits")).expect("a folder of gpushare's state");
    fs::set_permissions(node.join("run"), fs::Permissions::from_mode(0o700)).expect("the mode can be set");
    let told = call(&["remove"], &node);
    assert!(told.status.success() && !node.exists(), "{told:?}");

    assert!(call(&["create", "--plain-nodes"], &node).status.success());
    fs::write(node.join("mine"), "").expect("a file");
    assert!(call(&["remove"], &node).status.success());
    assert_eq!(fs::read_dir(&node).expect("the folder is there").count(), 1);
    let theirs = folder.path().join("theirs");
    assert!(call(&["create", "--plain-nodes"], &theirs).status.success());
    fs::set_permissions(&theirs, fs::Permissions::from_mode(0o777)).expect("the mode can be set");
    let told = call(&["remove"], &theirs);
    assert!(
        !told.status.success() && theirs.join("driver").exists(),
        "others could put links there: {told:?}"
    );

    fs::create_dir_all(node.join("dev/mine")).expect("a folder");
    let told = call(&["remove"], &node);
    let errors = String::from_utf8_lossy(&told.stderr);
    assert!(errors.contains("is no simulated node: it has no driver"), "{errors}");
    assert!(!told.status.success() && node.join("dev/mine").exists());
}

#[test]
fn a_create_that_fails_leaves_nothing_and_can_be_tried_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let create = |dir: &Path, more: &[&str]| {
        let mut command = Command::new(program());
        command.arg("create").arg(dir).arg("--plain-nodes").args(more).output().expect("the program runs")
    };
    let node = folder.path().join("node");
    assert!(!create(&node, &["--nvidia-smi", "/no/such"]).status.success());
    assert!(!node.exists(), "a part of the node was left");
    // A folder that holds somebody else's file keeps it.
    fs::create_dir_all(node.join("mine")).expect("a folder");
    assert!(!create(&node, &["--nvidia-smi", "/no/such"]).status.success());
    assert_eq!(fs::read_dir(&node).expect("the folder is there").count(), 1);
    assert!(create(&node, &[]).status.success());
    let other = folder.path().join("other");
    fs::create_dir_all(other.join("dev/mine")).expect("a folder");
    assert!(!create(&other, &[]).status.success());
    assert!(other.join("dev/mine").exists() && fs::read_dir(&other).expect("a folder").count() == 1);
}

#[test]
#[ignore = "needs root: creates device nodes"]
fn device_nodes_have_the_drivers_numbers() {
    use std::os::unix::fs::{FileTypeExt, MetadataExt};
    let folder = tempfile::tempdir().expect("a temporary folder");
    let dir = folder.path().join("node");
    let status = Command::new(program()).arg("create").arg(&dir).args(["--gpus", "2"]).status();
    assert!(status.expect("the program runs").success());
    for (name, major, minor) in
        [("nvidia0", 195, 0), ("nvidia1", 195, 1), ("nvidiactl", 195, 255), ("nvidia-uvm", 511, 0)]
    {
        let data = fs::metadata(dir.join("dev").join(name)).expect("a node");
        assert!(data.file_type().is_char_device() && data.mode() & 0o777 == 0o666, "{name}");
        assert_eq!((libc::major(data.rdev()), libc::minor(data.rdev())), (major, minor), "{name}");
    }
}
