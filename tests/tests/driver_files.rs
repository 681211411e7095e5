//! Which of the driver's files a container gets, wherever the host has them: by the capabilities that it asks
//! for.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use gpushare_tests::bundle::Bundle;
use gpushare_tests::leases::{cli, leases};
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::{MODEL, SimulatedNode, driver_version};
use gpushare_tests::probe::{GIB, Report};
use gpushare_tests::runtime::{LowLevel, Runtime};
use gpushare_tests::scratch::Scratch;
use gpushare_tests::{artifacts, distribution};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use serde_json::{Value, json};

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Busybox];

/// A node whose driver has a file for every capability, and whose GPU has nodes below /dev/dri.
fn full_node() -> SimulatedNode {
    let node = SimulatedNode::one_gpu();
    let any_library = node.libraries().join("libcuda.so.1");
    let version = driver_version();
    for stem in [
        "libnvidia-ptxjitcompiler",
        "libnvidia-opencl",
        "libcudadebugger",
        "libnvcuvid",
        "libnvidia-encode",
        "libEGL_nvidia",
        "libnvidia-glcore",
        "libnvidia-ngx",
    ] {
        distribution::copy(&any_library, &node.libraries().join(format!("{stem}.so.{version}")));
    }
    let driver = node.root().join("driver");
    for program in ["nvidia-debugdump", "nvidia-cuda-mps-control"] {
        distribution::copy(&any_library, &driver.join("usr/bin").join(program));
    }
    for file in [
        "etc/OpenCL/vendors/nvidia.icd",
        "usr/share/glvnd/egl_vendor.d/10_nvidia.json",
        "etc/vulkan/icd.d/nvidia_icd.json",
    ] {
        distribution::copy(Path::new("/etc/hostname"), &driver.join(file));
    }
    let gpus = node.proc_driver().join("gpus");
    let gpu = fs::read_dir(gpus).expect("the node has GPUs").flatten().next().expect("the node has a GPU");
    let drm = node.root().join("sys/bus/pci/devices").join(gpu.file_name()).join("drm");
    fs::create_dir_all(node.root().join("dev/dri")).expect("a folder of the node can be made");
    for (name, minor, mine) in [("card0", 0, true), ("renderD128", 128, true), ("renderD129", 129, false)] {
        let path = node.root().join("dev/dri").join(name);
        mknod(&path, SFlag::S_IFCHR, Mode::from_bits_truncate(0o660), makedev(226, minor))
            .expect("a device node can be made");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o660)).expect("its mode can be set");
        if mine {
            fs::create_dir_all(drm.join(name)).expect("a folder of the node can be made");
            fs::write(drm.join(name).join("dev"), format!("226:{minor}\n")).expect("a file can be written");
        }
    }
    node
}

/// The paths below the driver's usual places that a created container's config.json names: libraries without
/// their version, programs, other files and nodes.
fn given(bundle: &Bundle) -> BTreeSet<String> {
    let json: Value = serde_json::from_slice(&bundle.config_bytes()).expect("config.json is JSON");
    let version = format!(".{}", driver_version());
    let list = |pointer: &str, field: &str| -> Vec<String> {
        let list = json.pointer(pointer).and_then(Value::as_array).cloned().unwrap_or_default();
        list.iter().filter_map(|entry| entry[field].as_str()).map(str::to_owned).collect()
    };
    let mounts = list("/mounts", "destination").into_iter().filter(|target| {
        ["/usr/lib", "/usr/bin", "/usr/share", "/etc"].iter().any(|folder| target.starts_with(folder))
            && !target.starts_with("/usr/lib/gpushare")
    });
    let short = |target: String| target.rsplit('/').next().unwrap_or_default().replace(&version, "");
    mounts.chain(list("/linux/devices", "path")).map(short).collect()
}

const SHARED_COMPUTE: [&str; 3] = ["libcuda.so", "libcuda.so.1", "libnvidia-ptxjitcompiler.so.1"];
const SHARED_UTILITY: [&str; 2] = ["libnvidia-ml.so", "libnvidia-ml.so.1"];
const CONTROL: [&str; 2] = ["nvidia0", "nvidiactl"];
const GRAPHICS: [&str; 6] =
    ["libEGL_nvidia.so.0", "libnvidia-glcore.so", "10_nvidia.json", "nvidia_icd.json", "card0", "renderD128"];
const VIDEO: [&str; 4] = ["libnvcuvid.so", "libnvcuvid.so.1", "libnvidia-encode.so", "libnvidia-encode.so.1"];

#[test]
#[ignore = "needs root and runc: creates containers"]
fn a_container_gets_the_files_and_nodes_of_the_capabilities_that_it_asks_for() {
    if !met(NEEDS) {
        return;
    }
    let node = full_node();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let smi: &[&str] = if artifacts::nvidia_smi().exists() { &["nvidia-smi"] } else { &[] };
    let uvm: &[&str] = &["nvidia-uvm"];
    let whole = ["libcudadebugger.so.1", "libnvidia-opencl.so.1", "nvidia-cuda-mps-control", "nvidia.icd"];
    let share: &[(&str, &str)] = &[("GPUSHARE_MEMORY", "4GiB")];
    let exclusive: &[(&str, &str)] = &[("GPUSHARE_MODE", "exclusive")];
    let named: &[(&str, &str)] = &[("NVIDIA_VISIBLE_DEVICES", "0")];
    for (requests, key, capabilities, want) in [
        (share, "GPUSHARE_CAPABILITIES", "", vec![&SHARED_COMPUTE[..], &SHARED_UTILITY, smi, uvm]),
        (share, "GPUSHARE_CAPABILITIES", "utility", vec![&SHARED_UTILITY, smi]),
        (share, "GPUSHARE_CAPABILITIES", "compute", vec![&SHARED_COMPUTE, uvm]),
        (share, "GPUSHARE_CAPABILITIES", "compute,video", vec![&SHARED_COMPUTE, uvm, &VIDEO]),
        (share, "GPUSHARE_CAPABILITIES", "graphics", vec![&GRAPHICS]),
        (share, "GPUSHARE_CAPABILITIES", "ngx", vec![&["libnvidia-ngx.so.1"]]),
        (named, "NVIDIA_DRIVER_CAPABILITIES", "compute", vec![&SHARED_COMPUTE, uvm]),
        (
            named,
            "NVIDIA_DRIVER_CAPABILITIES",
            "all",
            vec![&SHARED_COMPUTE, &SHARED_UTILITY, smi, uvm, &VIDEO, &GRAPHICS, &["libnvidia-ngx.so.1"]],
        ),
        (exclusive, "GPUSHARE_CAPABILITIES", "compute", vec![&SHARED_COMPUTE, uvm, &whole]),
        (exclusive, "GPUSHARE_CAPABILITIES", "utility", vec![&SHARED_UTILITY, smi, &["nvidia-debugdump"]]),
    ] {
        let what = format!("{requests:?} with {key}={capabilities}");
        let bundle = requests.iter().fold(Bundle::small(), |bundle, (key, value)| bundle.env(key, value));
        let bundle = if capabilities.is_empty() { bundle } else { bundle.env(key, capabilities) };
        let container =
            runtime.create(&bundle).unwrap_or_else(|refusal| panic!("{what}: {}", refusal.line()));
        let want: BTreeSet<String> =
            want.into_iter().chain([&CONTROL[..]]).flatten().map(|name| (*name).to_owned()).collect();
        assert_eq!(given(&bundle), want, "{what}");
        drop(container);
    }
}

#[test]
#[ignore = "needs root and runc: would run containers"]
fn a_capability_that_cannot_be_given_is_refused_in_one_line() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let settings =
        format!("{}\n[request]\ncapabilities = \"compute,utility,video\"", LowLevel::Runc.settings());
    let strict = Runtime::with_config(LowLevel::Runc, &node.config_with("fewer", &settings));
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    for (runtime, request, capabilities, parts) in [
        (&runtime, ("NVIDIA_VISIBLE_DEVICES", "all"), "compute,cuda", ["\"cuda\"", "utility"]),
        (&runtime, ("NVIDIA_VISIBLE_DEVICES", "all"), "compute,compat32", ["compat32", "leave it out"]),
        (
            &strict,
            ("NVIDIA_VISIBLE_DEVICES", "all"),
            "display,graphics",
            ["graphics", "request.capabilities"],
        ),
        (&strict, ("GPUSHARE_MEMORY", "1GiB"), "display", ["display", "request.capabilities"]),
    ] {
        let bundle =
            Bundle::small().env(request.0, request.1).env("NVIDIA_DRIVER_CAPABILITIES", capabilities);
        let line = runtime.create(&bundle).map(drop).expect_err(capabilities).line();
        for part in parts {
            assert!(line.contains(part), "{part:?} is not in: {line}");
        }
    }
    let bundle = Bundle::with_probe().env("GPUSHARE_MEMORY", "1GiB").env("NVIDIA_DRIVER_CAPABILITIES", "all");
    Report::of(&strict.run(&bundle), &[]).assert_size(GIB);
}

/// Name of the layout, folder of the libraries, folder of nvidia-smi; both below the driver root.
const LAYOUTS: [(&str, &str, &str); 6] = [
    ("Debian", "usr/lib/x86_64-linux-gnu/nvidia/current", "usr/lib/nvidia/current"),
    ("Ubuntu", "usr/lib/x86_64-linux-gnu", "usr/bin"),
    ("Red Hat", "usr/lib64", "usr/bin"),
    ("cloud images", "usr/local/nvidia/lib64", "usr/local/nvidia/bin"),
    ("Talos", "usr/local/glibc/usr/lib", "usr/local/bin"),
    ("a store behind links", "nix/store/0-nvidia-x11/lib", "run/current-system/sw/bin"),
];

/// The settings of `node`, with the driver's files in another root.
fn at(node: &SimulatedNode, name: &str, driver_root: &Path) -> PathBuf {
    let path = node.config_with(name, &LowLevel::Runc.settings());
    let text = fs::read_to_string(&path).expect("settings can be read");
    let lines = text.lines().map(|line| match line.starts_with("driver_root") {
        true => format!("driver_root = {driver_root:?}\n"),
        false => format!("{line}\n"),
    });
    fs::write(&path, lines.collect::<String>()).expect("settings can be written");
    path
}

/// Copies the libraries and nvidia-smi from two folders into a root of this layout.
fn lay_out(root: &Path, libraries: &Path, smi: &Path, folder: &str, programs: &str) {
    for library in fs::read_dir(libraries).expect("there are libraries").flatten() {
        let target = root.join(folder).join(library.file_name());
        fs::create_dir_all(root.join(folder)).expect("a folder can be made");
        match fs::read_link(library.path()) {
            Ok(link) => symlink(link, target).expect("a link can be made"),
            Err(_) => distribution::copy(&library.path(), &target),
        }
    }
    if smi.exists() {
        distribution::copy(smi, &root.join(programs).join("nvidia-smi"));
    }
    if folder.starts_with("nix") {
        let links = root.join("run/opengl-driver/lib");
        fs::create_dir_all(&links).expect("a folder can be made");
        for library in fs::read_dir(root.join(folder)).expect("it was made").flatten() {
            let target = Path::new("/").join(folder).join(library.file_name());
            symlink(target, links.join(library.file_name())).expect("a link can be made");
        }
    }
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn the_driver_is_found_in_every_layout() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let smi = node.root().join("driver/usr/bin/nvidia-smi");
    for (number, (system, folder, programs)) in LAYOUTS.into_iter().enumerate() {
        // The root is like that of a driver container. It lies below the node's folder, since the simulated
        // driver looks for its GPUs above itself.
        let root = node.root().join(format!("{number}/run/nvidia/driver"));
        lay_out(&root, &node.libraries(), &smi, folder, programs);
        let runtime = Runtime::with_config(LowLevel::Runc, &at(&node, "layout", &root));
        let bundle = Bundle::with_probe().env("GPUSHARE_MEMORY", "4GiB");
        let container =
            runtime.create(&bundle).unwrap_or_else(|refusal| panic!("{system}: {}", refusal.line()));
        container.start();
        Report::of(&container, &[]).assert_size(4 * GIB);
        if smi.exists() {
            let told = container.exec(&["/usr/bin/nvidia-smi", "-L"]).expect_success(system);
            assert!(told.stdout.starts_with("GPU 0: NVIDIA H100"), "{system}: {}", told.stdout);
        }
    }
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_driver_in_a_mount_of_its_own_gives_its_program_and_no_script() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::with(1, MODEL, "80GiB", &["--driver-mount", "--nvidia-smi-script"]);
    let script = fs::read(node.root().join("driver/usr/bin/nvidia-smi")).expect("the node has a script");
    assert!(script.starts_with(b"#!"));
    let log = node.root().join("log");
    let settings = format!("{}\n[log]\nfile = {log:?}\n", LowLevel::Runc.settings());
    let runtime = Runtime::with_config(LowLevel::Runc, &node.config_with("logged", &settings));
    let bundle = Bundle::with_probe().env("GPUSHARE_MEMORY", "4GiB");
    let container = runtime.run(&bundle);
    Report::of(&container, &[]).assert_size(4 * GIB);
    let program = node.root().join("driver/usr/local/nvidia/bin/nvidia-smi");
    assert_eq!(given(&bundle).contains("nvidia-smi"), program.exists());
    if !met(&[Need::DriverLibraries]) {
        return;
    }
    let told = container.exec(&["/usr/bin/nvidia-smi", "-L"]).expect_success("nvidia-smi -L");
    assert!(told.stdout.starts_with("GPU 0: NVIDIA H100"), "{}", told.stdout);
    let inside = Path::new("/proc").join(container.pid().to_string()).join("root/usr/bin/nvidia-smi");
    assert_eq!(fs::read(inside).expect("it is there"), fs::read(&program).expect("it is there"));

    // An image without a loader of glibc has the program and cannot run it, which harms nothing else.
    let plan = |bundle: &Bundle| {
        let path = bundle.path().to_string_lossy().into_owned();
        cli(runtime.config(), &["plan", "--bundle", &path]).expect_success("gpushare plan").stdout
    };
    let note =
        "/usr/bin/nvidia-smi will not start: the image lacks its ELF interpreter /lib64/ld-linux-x86-64.so.2";
    assert!(!plan(&bundle).contains("will not start"), "{}", plan(&bundle));
    let bare = Bundle::small().env("GPUSHARE_MEMORY", "4GiB");
    drop(bare.write());
    assert!(plan(&bare).contains(note), "{}", plan(&bare));
    let logged = || fs::read_to_string(&log).expect("there is a log");
    assert!(!logged().contains("will not start"), "{}", logged());
    drop(runtime.run(&bare));
    assert!(logged().contains(note), "{}", logged());
    // The bundle may bring the interpreter.
    const LOADER: &str = "/lib64/ld-linux-x86-64.so.2";
    let brings = Bundle::small()
        .env("GPUSHARE_MEMORY", "4GiB")
        .mount(json!({"destination": LOADER, "type": "bind", "source": LOADER, "options": ["rbind", "ro"]}));
    drop(brings.write());
    assert!(!plan(&brings).contains("will not start"), "{}", plan(&brings));
}

#[test]
#[ignore = "needs root and runc: would run containers"]
fn a_damaged_driver_is_refused_with_the_file_in_question() {
    if !met(NEEDS) {
        return;
    }
    type Damage = fn(&Path, &str);
    let damages: [(&str, Damage, &str, &str); 7] = [
        (
            "no libcuda",
            |folder, version| remove(&folder.join(format!("libcuda.so.{version}"))),
            "libcuda.so",
            "reinstall",
        ),
        (
            "no libnvidia-ml",
            |folder, version| remove(&folder.join(format!("libnvidia-ml.so.{version}"))),
            "libnvidia-ml.so",
            "reinstall",
        ),
        (
            "half an upgrade",
            |folder, _| {
                remove(&folder.join("libcuda.so.1"));
                distribution::copy(Path::new("/etc/hostname"), &folder.join("libcuda.so.550.54.15"));
                symlink("libcuda.so.550.54.15", folder.join("libcuda.so.1")).expect("a link can be made");
            },
            "550.54.15",
            "reinstall",
        ),
        (
            "a file that leads outside",
            |folder, version| {
                let file = folder.join(format!("libcuda.so.{version}"));
                let nvml = folder.join(format!("libnvidia-ml.so.{version}"));
                remove(&file);
                remove(&nvml);
                symlink("/usr/lib/os-release", file).expect("a link can be made");
            },
            "libcuda.so",
            "node.driver_root",
        ),
        (
            "a library that others may write",
            |folder, version| mode(&folder.join(format!("libcuda.so.{version}")), 0o666),
            "libcuda.so",
            "correct its owner and mode",
        ),
        (
            "a folder that others may write",
            |folder, _| mode(folder, 0o777),
            "x86_64-linux-gnu",
            "correct its owner",
        ),
        (
            "a root that others may write",
            |folder, _| mode(folder.ancestors().nth(3).expect("it lies in the driver root"), 0o777),
            "driver",
            "correct its owner",
        ),
    ];
    let version = driver_version();
    for (what, damage, file, remedy) in damages {
        let node = SimulatedNode::one_gpu();
        let runtime = Runtime::wrapped(LowLevel::Runc, &node);
        damage(&node.libraries(), &version);
        let bundle = Bundle::small().env("GPUSHARE_MEMORY", "4GiB");
        let line = runtime.create(&bundle).map(drop).expect_err(what).line();
        for part in [file, remedy] {
            assert!(line.contains(part), "{what}: {part:?} is not in: {line}");
        }
    }
}

fn remove(file: &Path) {
    fs::remove_file(file).expect("a file of the driver can be removed");
}

fn mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("a mode can be set");
}

/// NVIDIA's own files. No GPU answers behind them, so only finding and fitting them can be tested.
#[test]
#[ignore = "needs root and NVIDIA's libraries from Debian"]
fn nvidias_own_libraries_are_found_and_fitted_in_every_layout() {
    if !met(NEEDS) || !met(&[Need::DriverLibraries]) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    for (system, folder, programs) in LAYOUTS {
        let scratch = Scratch::new("driver");
        let root = scratch.folder("run/nvidia/driver");
        lay_out(&root, &artifacts::nvidia_libraries(), &artifacts::nvidia_smi(), folder, programs);
        let told = cli(&at(&node, "real", &root), &["doctor", "--json"]).stdout;
        let findings: Value = serde_json::from_str(&told).expect("doctor --json prints JSON");
        let texts = |check: &str| -> Vec<String> {
            let findings = findings["findings"].as_array().cloned().unwrap_or_default();
            let of_check = findings.into_iter().filter(|one| one["check"] == check && one["verdict"] == "ok");
            of_check.map(|one| one["text"].as_str().unwrap_or_default().to_owned()).collect()
        };
        let wanted = ["libcuda", "libnvidia-ml"].map(|stem| {
            root.join(folder).join(format!("{stem}.so.{}", driver_version())).display().to_string()
        });
        assert_eq!(texts("library"), wanted, "{system}: {told}");
        assert_eq!(texts("fitted libraries").len(), 1, "{system}: {told}");
    }
}

#[test]
#[ignore = "needs root and runc: creates containers"]
fn an_image_that_requires_another_driver_is_refused_with_both_versions() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let asks = |mode: (&str, &str), env: &[(&str, &str)]| {
        let bundle = Bundle::small().env(mode.0, mode.1);
        let bundle = env.iter().fold(bundle, |bundle, (key, value)| bundle.env(key, value));
        runtime.create(&bundle).map(drop).map_err(|refusal| refusal.line())
    };
    let share = ("GPUSHARE_MEMORY", "4GiB");
    let exclusive = ("GPUSHARE_MODE", "exclusive");
    let newer = "cuda>=99.0 brand=nvidia,driver>=400";
    for (mode, env, parts) in [
        (
            share,
            &[("NVIDIA_REQUIRE_CUDA", "cuda>=99.0")][..],
            &["cuda>=99.0", "CUDA 12.", "update the driver"][..],
        ),
        (share, &[("NVIDIA_REQUIRE_CUDA", newer)], &["forward compatibility", "GPUSHARE_MODE=exclusive"]),
        (share, &[("CUDA_VERSION", "99.1.0")], &["CUDA_VERSION", "99.1"]),
        (share, &[("NVIDIA_REQUIRE_ARCH", "arch<5.0")], &["arch<5.0", "architecture 9.0", "brand nvidia"]),
        (share, &[("NVIDIA_REQUIRE_OWN", "nonsense")], &["NVIDIA_REQUIRE_OWN", "NVIDIA_DISABLE_REQUIRE"]),
        (exclusive, &[("NVIDIA_REQUIRE_CUDA", newer)], &[]),
        (share, &[("NVIDIA_REQUIRE_CUDA", "cuda>=11.4,arch>=9.0")], &[]),
        (share, &[("NVIDIA_REQUIRE_CUDA", "cuda>=99.0"), ("NVIDIA_DISABLE_REQUIRE", "1")], &[]),
    ] {
        match asks(mode, env) {
            Ok(()) => assert!(parts.is_empty(), "{env:?} was created"),
            Err(line) => {
                let missing = parts.iter().find(|part| !line.contains(**part));
                assert!(!parts.is_empty() && missing.is_none(), "{env:?}: no {missing:?} in: {line}");
            }
        }
        assert_eq!(leases(runtime.config()), [], "{env:?}");
    }
}
