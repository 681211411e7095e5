//! Tests on the files of a real machine with an H200 and driver 580, from `tests/fixtures/h200-580`. Its
//! driver is in a mount of its own, and a script in `/usr/bin` runs its nvidia-smi.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use crate::device_files::DeviceFiles;
use crate::driver::{Driver, Extent, LeftOut};
use crate::proc::{driver_version, information};
use crate::roots::Roots;

const VERSION: &str = "580.159.04";
/// The driver's folder on that machine.
const PREFIX: &str = "usr/local/nvidia";

fn fixture(name: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/h200-580");
    fs::read_to_string(folder.join(name)).unwrap()
}

fn put(path: &Path, bytes: impl AsRef<[u8]>, mode: u32) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, bytes).unwrap();
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

/// The first bytes of an ELF file for this machine.
fn elf_header() -> [u8; 20] {
    let mut header = [0; 20];
    header[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    header[18] = if cfg!(target_arch = "aarch64") { 183 } else { 62 };
    header
}

/// A root with the driver's files at `prefix`, and the script that the machine has in `/usr/bin`. The file
/// `driver-tree.txt` is the output of `ls -laR`; each file becomes the beginning of an ELF file.
fn machine(prefix: &str) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    let mut folder = PathBuf::new();
    for line in fixture("driver-tree.txt").lines() {
        if let Some(path) = line.strip_suffix(':') {
            folder = root.path().join(path.replace("/usr/local/nvidia", prefix));
            fs::create_dir_all(&folder).unwrap();
        }
        let fields: Vec<&str> = line.split_whitespace().collect();
        match fields[..] {
            [mode, .., link, "->", target] if mode.starts_with('l') => {
                symlink(target, folder.join(link)).unwrap();
            }
            [mode, .., file] if mode.starts_with("-r") => put(&folder.join(file), elf_header(), 0o755),
            _ => {}
        }
    }
    let script = format!("#!/bin/sh\nexec /{prefix}/bin/nvidia-smi \"$@\"\n");
    put(&root.path().join("usr/bin/nvidia-smi"), script, 0o755);
    root
}

fn locate(root: &Path) -> Driver {
    Driver::locate(&Roots { driver: root.into(), ..Roots::default() }, VERSION).unwrap()
}

/// The programs of a container, as path in the container and path below the driver root.
fn programs(driver: &Driver, root: &Path, extent: Extent) -> Vec<(String, String)> {
    let capabilities = "compute,utility".parse().unwrap();
    let files = driver.files(&capabilities, extent, LeftOut::default()).unwrap();
    let root = root.canonicalize().unwrap();
    let shown = |path: &Path| path.display().to_string();
    let files = files.iter();
    files
        .map(|file| (shown(&file.container_path), shown(file.host_path.strip_prefix(&root).unwrap())))
        .collect()
}

#[test]
fn the_programs_are_those_beside_the_libraries_and_a_script_is_none() {
    let root = machine(PREFIX);
    let driver = locate(root.path());
    let program = |name: &str| (format!("/usr/bin/{name}"), format!("{PREFIX}/bin/{name}"));
    assert_eq!(programs(&driver, root.path(), Extent::Share), [program("nvidia-smi")]);
    let all = [
        "nvidia-cuda-mps-control",
        "nvidia-cuda-mps-server",
        "nvidia-debugdump",
        "nvidia-persistenced",
        "nvidia-smi",
    ];
    assert_eq!(programs(&driver, root.path(), Extent::Whole), all.map(program));
    // Also with another driver's program in the usual place.
    put(&root.path().join("usr/bin/nvidia-smi"), elf_header(), 0o755);
    assert_eq!(programs(&driver, root.path(), Extent::Share), [program("nvidia-smi")]);
    // If the right program is missing, a script does not replace it, but a program elsewhere does.
    fs::remove_file(root.path().join(PREFIX).join("bin/nvidia-smi")).unwrap();
    let usual = ("/usr/bin/nvidia-smi".to_owned(), "usr/bin/nvidia-smi".to_owned());
    assert_eq!(programs(&driver, root.path(), Extent::Share), [usual]);
    for other in ["#!/bin/sh\n", "", "\x7fELF\x01\x01\x01 a program of 32 bits"] {
        put(&root.path().join("usr/bin/nvidia-smi"), other, 0o755);
        assert_eq!(programs(&driver, root.path(), Extent::Share), [], "{other:?}");
    }
}

#[test]
fn each_library_is_found_under_the_names_that_programs_open() {
    let root = machine(PREFIX);
    let driver = locate(root.path());
    let folder = root.path().canonicalize().unwrap().join(PREFIX).join("lib64");
    assert_eq!(driver.libcuda().unwrap(), folder.join(format!("libcuda.so.{VERSION}")));
    assert_eq!(driver.libnvidia_ml().unwrap(), folder.join(format!("libnvidia-ml.so.{VERSION}")));
    let full = |stem: &str| format!("{stem}.so.{VERSION}");
    let [gpucomp, pkcs11] = ["libnvidia-gpucomp", "libnvidia-pkcs11-openssl3"].map(full);
    let share =
        ["libnvidia-ptxjitcompiler.so.1", "libnvidia-nvvm.so.4", &*gpucomp, &*pkcs11, "libnvidia-cfg.so.1"];
    let names = |extent: Extent| -> BTreeSet<String> {
        let capabilities = "compute,utility".parse().unwrap();
        let found = driver.companions(&capabilities, extent, LeftOut::default()).unwrap();
        assert!(found.iter().all(|library| library.host_path.starts_with(&folder)), "{found:?}");
        found.into_iter().flat_map(|library| library.names).collect()
    };
    assert_eq!(names(Extent::Share), share.map(str::to_owned).into());
    let whole = ["libcudadebugger.so.1", "libnvidia-opencl.so.1", "libnvidia-allocator.so.1"];
    assert_eq!(names(Extent::Whole), share.iter().chain(&whole).map(|name| (*name).to_owned()).collect());
}

#[test]
fn links_to_the_libraries_elsewhere_do_not_change_what_is_found() {
    let root = machine(PREFIX);
    let usual = root.path().join("usr/lib");
    fs::create_dir_all(&usual).unwrap();
    symlink("usr/lib", root.path().join("lib")).unwrap();
    let listing = fixture("ld-cache.txt");
    let paths: Vec<&str> = listing.lines().filter_map(|line| Some(line.split_once("=> ")?.1)).collect();
    for path in paths.iter().filter(|path| path.starts_with("/lib/")) {
        let name = Path::new(path).file_name().unwrap();
        symlink(Path::new("/").join(PREFIX).join("lib64").join(name), usual.join(name)).unwrap();
    }
    let driver = locate(root.path());
    assert!(driver.libcuda().unwrap().ends_with(format!("{PREFIX}/lib64/libcuda.so.{VERSION}")));
    assert_eq!(programs(&driver, root.path(), Extent::Share)[0].1, format!("{PREFIX}/bin/nvidia-smi"));
}

#[test]
fn the_loaders_cache_leads_to_a_driver_at_an_unknown_place_and_to_its_programs() {
    let root = machine("opt/vendor");
    let listing = fixture("ld-cache.txt").replace("/usr/local/nvidia", "/opt/vendor");
    let paths: Vec<&str> = listing.lines().filter_map(|line| Some(line.split_once("=> ")?.1)).collect();
    put(&root.path().join("etc/ld.so.cache"), format!("\0{}\0", paths.join("\0")), 0o644);
    let driver = locate(root.path());
    assert!(driver.libcuda().unwrap().ends_with(format!("opt/vendor/lib64/libcuda.so.{VERSION}")));
    let smi = ("/usr/bin/nvidia-smi".to_owned(), "opt/vendor/bin/nvidia-smi".to_owned());
    assert_eq!(programs(&driver, root.path(), Extent::Share), [smi]);
    assert!(driver.sources().contains(&root.path().join("opt/vendor/bin")), "{:?}", driver.sources());
}

#[test]
fn proc_tells_driver_and_gpu() {
    assert_eq!(driver_version(&fixture("version")), Some(VERSION));
    let found = information(&fixture("information"));
    assert_eq!((found.model.as_deref(), found.minor, found.excluded), (Some("NVIDIA H200"), Some(0), false));
    assert_eq!(
        found.uuid.map(|uuid| uuid.to_string()).as_deref(),
        Some("GPU-6af8de03-0000-4000-8000-000000000001")
    );
}

/// The machine's `/proc`, with MIG off: the driver shows the files for MIG as a whole, and one for the
/// management of the fabric.
fn proc_tree() -> (tempfile::TempDir, Roots) {
    let root = tempfile::tempdir().unwrap();
    let nvidia = root.path().join("proc/driver/nvidia");
    for name in ["version", "params"] {
        put(&nvidia.join(name), fixture(name), 0o444);
    }
    put(&nvidia.join("gpus/0000:00:06.0/information"), fixture("information"), 0o444);
    put(&root.path().join("proc/devices"), fixture("devices"), 0o444);
    let capability = |minor: u32, mode: u32| {
        format!("DeviceFileMinor: {minor}\nDeviceFileMode: {mode}\nDeviceFileModify: 1\n")
    };
    for (name, minor, mode) in
        [("mig/config", 1, 256), ("mig/monitor", 2, 292), ("fabric-imex-mgmt", 4323, 256)]
    {
        put(&nvidia.join("capabilities").join(name), capability(minor, mode), 0o444);
    }
    let path = root.path().to_path_buf();
    (root, Roots { proc: path.clone(), dev: path, ..Roots::default() })
}

/// The nodes of the machine, as path, numbers and mode. The file `nodes.txt` is the output of `ls -la`.
fn nodes() -> BTreeSet<(String, u32, u32, u32)> {
    let number = |text: &str| text.trim_end_matches(',').parse::<u32>().unwrap();
    let bits = |mode: &str| mode.bytes().fold(0, |bits, letter| bits << 1 | u32::from(letter != b'-'));
    let text = fixture("nodes.txt");
    let lines = text.lines().filter(|line| line.starts_with("cr"));
    lines
        .map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let [mode, .., name] = fields[..] else { panic!("{line}") };
            let folder = if name.starts_with("nvidia-cap") { "/dev/nvidia-caps/" } else { "" };
            (format!("{folder}{name}"), number(fields[4]), number(fields[5]), bits(&mode[1..]))
        })
        .collect()
}

#[test]
fn the_wanted_nodes_are_those_that_the_machine_has() {
    let (_root, roots) = proc_tree();
    let files = DeviceFiles::read(&roots).unwrap();
    let wanted = files.nodes.iter().map(|file| &file.node);
    let wanted = wanted.map(|node| (node.path.display().to_string(), node.major, node.minor, node.mode));
    assert_eq!(wanted.collect::<BTreeSet<_>>(), nodes());
    assert!(files.unregistered.is_empty(), "{:?}", files.unregistered);
    let of_mig = files.nodes.iter().filter(|file| file.is_of_mig);
    let of_mig: Vec<u32> = of_mig.map(|file| file.node.minor).collect();
    assert_eq!(of_mig, [1, 2], "nobody needs them while MIG is off");
    // The list of MIG's minors has every number that MIG may ever use.
    let minors = fixture("mig-minors");
    let minors: BTreeSet<u32> =
        minors.lines().map(|line| line.rsplit_once(' ').unwrap().1.parse().unwrap()).collect();
    assert_eq!(minors, (1..=4322).collect(), "4323 is no node of MIG");
}
