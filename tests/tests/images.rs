//! Every kind of image. The limit is seen wherever there is a glibc, every other image starts, and nothing
//! but mount targets is left behind.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use gpushare_tests::artifacts::Installed;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::distribution::{self, CLIENT, MULTIARCH};
use gpushare_tests::docker::Docker;
use gpushare_tests::image;
use gpushare_tests::leases::{cli, leases};
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::probe::{GIB, OUT_OF_MEMORY, Report, SUCCESS};
use gpushare_tests::runtime::{LowLevel, Runtime};
use nix::mount::{MsFlags, mount};
use serde_json::{Value, json};

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Busybox, Need::Images];
const SOON: Duration = Duration::from_secs(20);
/// One allocation above the limit of these tests, and one below it.
const PROBE: [&str; 7] = [CLIENT, "probe", "--json", "--allocate", "5GiB", "--allocate", "3GiB"];

type Fill = fn(&Path);

/// A bundle with a limit of 4 GiB whose one process is the CUDA client.
fn limited(fill: impl FnOnce(&Path)) -> Bundle {
    Bundle::of(fill).env("GPUSHARE_MEMORY", "4GiB").args(&PROBE)
}

/// Runs the bundle's client to its end, and asserts that it sees its limit and keeps to it.
fn assert_limited(runtime: &Runtime, bundle: &Bundle, what: &str) {
    let container = runtime.create(bundle).unwrap_or_else(|refusal| panic!("{what}: {}", refusal.line()));
    container.start();
    assert!(container.wait_stopped(SOON), "{what} goes on");
    assert_eq!(container.stderr(), "", "{what}");
    let report = Report::parse(&container.stdout());
    report.assert_size(4 * GIB);
    assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS], "{what}");
}

/// What is in an image: each path with its kind and the figures that a change would alter.
fn listing(root: &Path) -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder of the image can be read").flatten() {
            let metadata = entry.metadata().expect("a file of the image can be looked at");
            let text = match (metadata.is_dir(), metadata.is_file()) {
                (true, _) => "folder".to_owned(),
                (_, true) if metadata.len() == 0 => "empty".to_owned(),
                _ => format!(
                    "{:o} {} {}.{}",
                    metadata.mode(),
                    metadata.len(),
                    metadata.mtime(),
                    metadata.mtime_nsec()
                ),
            };
            folders.extend(metadata.is_dir().then(|| entry.path()));
            let inner = entry.path().strip_prefix(root).expect("it lies below the root").to_owned();
            found.insert(inner, text);
        }
    }
    found
}

/// The mount targets in the bundle's config.json as it is now.
fn targets(bundle: &Bundle) -> Vec<PathBuf> {
    let json: Value = serde_json::from_slice(&bundle.config_bytes()).expect("config.json is JSON");
    let mounts = json["mounts"].as_array().cloned().unwrap_or_default();
    mounts.iter().filter_map(|mount| mount["destination"].as_str()).map(PathBuf::from).collect()
}

/// Where `path` of the container lies in its image, as a path below the root.
fn in_image(root: &Path, path: &Path) -> PathBuf {
    let mut inner = PathBuf::new();
    for part in path.components().skip(1) {
        inner.push(part);
        // The links of these images are relative and lead from one folder to its neighbour.
        while let Ok(target) = fs::read_link(root.join(&inner)) {
            inner = inner.with_file_name(target);
        }
    }
    inner
}

/// Asserts that `after` has only what `before` has, and empty files or folders where something was mounted.
fn assert_only_targets(
    before: &BTreeMap<PathBuf, String>,
    after: &BTreeMap<PathBuf, String>,
    bundle: &Bundle,
    what: &str,
) {
    let targets: Vec<PathBuf> =
        targets(bundle).iter().map(|target| in_image(&bundle.root(), target)).collect();
    for (path, text) in before {
        assert_eq!(after.get(path), Some(text), "{what}: {} was changed", path.display());
    }
    for (path, text) in after.iter().filter(|(path, _)| !before.contains_key(*path)) {
        let needed = targets.iter().any(|target| target.starts_with(path));
        assert!(
            needed && (text == "empty" || text == "folder"),
            "{what}: {} was left, {text}",
            path.display()
        );
    }
}

const IMAGES: [(&str, Fill); 9] = [
    ("Debian", distribution::debian),
    ("Ubuntu, with a loader's cache", distribution::ubuntu),
    ("Debian before the merged /usr", distribution::debian_unmerged),
    ("distroless", distribution::distroless),
    ("Red Hat", distribution::red_hat),
    ("Red Hat, with a folder of Debian's", |root| {
        distribution::red_hat(root);
        fs::create_dir_all(root.join("usr/lib").join(MULTIARCH)).expect("a folder of the image can be made");
    }),
    ("everything in /usr/lib", distribution::plain),
    ("Debian without /etc", |root| {
        distribution::debian(root);
        fs::remove_dir_all(root.join("etc")).expect("/etc of the image can be removed");
    }),
    ("Debian with 32-bit libraries", |root| {
        distribution::debian(root);
        distribution::add_32_bit(root);
        distribution::cache(root);
    }),
];

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn every_image_with_a_glibc_sees_its_limit_and_keeps_only_mount_targets() {
    if !met(NEEDS) || !met(&[Need::Crun]) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    for low_level in LowLevel::ALL {
        let runtime = Runtime::wrapped(low_level, &node);
        for (name, fill) in IMAGES {
            let what = format!("{name} on {low_level:?}");
            let bundle = limited(fill);
            let before = listing(&bundle.root());
            assert_limited(&runtime, &bundle, &what);
            let after = listing(&bundle.root());
            assert_only_targets(&before, &after, &bundle, &what);
            assert_limited(&runtime, &bundle, &what);
            assert!(listing(&bundle.root()) == after, "{what}: the second start left more than the first");
            assert_eq!(leases(runtime.config()), [], "{what}");
        }
    }
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_read_only_root_is_no_obstacle() {
    if !met(NEEDS) || !met(&[Need::Crun]) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    for low_level in LowLevel::ALL {
        let runtime = Runtime::wrapped(low_level, &node);
        for (name, fill) in
            [("Debian", distribution::debian as Fill), ("distroless", distribution::distroless)]
        {
            assert_limited(&runtime, &limited(fill).read_only(), &format!("{name} on {low_level:?}"));
        }
    }
}

#[test]
#[ignore = "needs root and runc: mounts a file system read-only"]
fn a_root_on_a_read_only_file_system_is_refused_unless_the_targets_are_there() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let bundle = limited(distribution::debian);
    let root = bundle.root();
    let nothing = None::<&str>;
    mount(Some(&root), &root, nothing, MsFlags::MS_BIND, nothing).expect("the root can be bound on itself");
    let remount = |more: MsFlags| {
        let flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | more;
        mount(nothing, &root, nothing, flags, nothing).expect("the root can be mounted anew");
    };
    remount(MsFlags::MS_RDONLY);
    let written = bundle.write();
    let line = runtime.create(&bundle).map(drop).expect_err("the root is read-only").line();
    for part in ["read-only", "/usr/lib/", "gpushare plan"] {
        assert!(line.contains(part), "{part:?} is not in: {line}");
    }
    assert_eq!((bundle.config_bytes(), leases(runtime.config()).len()), (written, 0));
    remount(MsFlags::empty());
    assert_limited(&runtime, &bundle, "on the writable file system");
    remount(MsFlags::MS_RDONLY);
    assert_limited(&runtime, &bundle, "with targets from before");
}

#[test]
#[ignore = "needs root and runc: starts 100 containers"]
fn a_hundred_starts_leave_what_the_first_one_left() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let bundle = limited(distribution::debian);
    let before = listing(&bundle.root());
    assert_limited(&runtime, &bundle, "the first start");
    let first = listing(&bundle.root());
    assert_only_targets(&before, &first, &bundle, "the first start");
    for _ in 0..100 {
        let container = runtime.create(&bundle).unwrap_or_else(|refusal| panic!("{}", refusal.line()));
        container.start();
    }
    assert!(listing(&bundle.root()) == first);
    assert_eq!(leases(runtime.config()), []);
}

#[test]
#[ignore = "needs root, runc and a C compiler: runs containers"]
fn an_image_without_a_glibc_starts_and_never_meets_the_libraries() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let scratch: Fill = |root| distribution::copy(Path::new(image::BUSYBOX), &root.join("busybox"));
    let maps = ["cat", "/proc/self/maps"];
    for (name, fill, program, want) in [
        ("Alpine, musl", distribution::alpine as Fill, &["/bin/dynamic"][..], "musl\n"),
        ("Alpine, static", distribution::alpine, &["/bin/busybox", "echo", "static"], "static\n"),
        ("Alpine, its maps", distribution::alpine, &[&["/bin/busybox"], &maps[..]].concat(), ""),
        ("scratch", scratch, &["/busybox", "echo", "alone"], "alone\n"),
        ("scratch, its maps", scratch, &[&["/busybox"], &maps[..]].concat(), ""),
    ] {
        let bundle = Bundle::of(fill).env("GPUSHARE_MEMORY", "4GiB").args(program);
        let container = runtime.run(&bundle);
        assert!(container.wait_stopped(SOON), "{name} goes on");
        assert_eq!(container.stderr(), "", "{name}");
        let told = container.stdout();
        match want {
            "" => assert!(told.contains("[stack]") && !told.contains("cuda"), "{name}: {told}"),
            want => assert_eq!(told, want, "{name}"),
        }
    }
}

#[test]
#[ignore = "needs root and runc: runs a container"]
fn a_32_bit_program_runs_beside_the_64_bit_client() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let fill: Fill = |root| {
        distribution::debian(root);
        distribution::add_32_bit(root);
    };
    let bundle =
        Bundle::of(fill).env("GPUSHARE_MEMORY", "4GiB").args(&["/bin/bash", "-c", "read </dev/zero"]);
    let container = runtime.run(&bundle);
    let bits = container.exec(&["/usr/bin/getconf32", "LONG_BIT"]).expect_success("a 32-bit program");
    assert_eq!(bits.stdout, "32\n");
    let report = Report::parse(&container.exec(&PROBE).expect_success("the client").stdout);
    assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS]);
}

/// The image has the simulated driver's own libcuda, which knows no limit, where images keep a libcuda.
#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_libcuda_that_the_image_brings_along_is_covered() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let real = node.libraries().join("libcuda.so.1");
    let own = |root: &Path, path: &str| {
        distribution::copy(&real, &root.join(path));
        let nvml = path.replace("libcuda", "libnvidia-ml");
        distribution::copy(&node.libraries().join("libnvidia-ml.so.1"), &root.join(nvml));
    };
    let linked = |root: &Path, folder: &str, name: &str| {
        for stem in ["libcuda", "libnvidia-ml"] {
            let file = format!("{stem}.so.{name}");
            symlink(&file, root.join(folder).join(format!("{stem}.so.1")))
                .expect("a link of the image can be made");
        }
    };
    let compat = "usr/local/cuda-12.4/compat";
    let with_compat = |root: &Path| {
        distribution::debian(root);
        own(root, &format!("{compat}/libcuda.so.550.54.15"));
        linked(root, compat, "550.54.15");
        symlink("cuda-12.4", root.join("usr/local/cuda")).expect("a link of the image can be made");
    };
    let in_conf = |root: &Path, folder: &str| {
        let conf = root.join("etc/ld.so.conf.d");
        fs::create_dir_all(&conf).expect("a folder of the image can be made");
        fs::write(conf.join("000_own.conf"), format!("/{folder}\n"))
            .expect("a file of the image can be written");
    };
    let plain_file = limited(|root| {
        distribution::debian(root);
        own(root, &format!("usr/lib/{MULTIARCH}/libcuda.so.1"));
    });
    let chain = limited(|root| {
        distribution::debian(root);
        own(root, "opt/driver/libcuda.so.470.82.01");
        for stem in ["libcuda", "libnvidia-ml"] {
            let folder = root.join("usr/lib").join(MULTIARCH);
            let real = format!("/opt/driver/{stem}.so.470.82.01");
            symlink(real, folder.join(format!("{stem}.so.470.82.01")))
                .expect("a link of the image can be made");
        }
        linked(root, &format!("usr/lib/{MULTIARCH}"), "470.82.01");
    });
    let conf = limited(|root| {
        distribution::debian(root);
        own(root, "opt/own/libcuda.so.550.54.15");
        linked(root, "opt/own", "550.54.15");
        in_conf(root, "opt/own");
        distribution::cache(root);
    });
    let compat_by_cache = limited(|root| {
        with_compat(root);
        in_conf(root, "usr/local/cuda/compat");
        distribution::cache(root);
    });
    let compat_by_variable =
        limited(with_compat).env("LD_LIBRARY_PATH", "/usr/local/cuda/compat:/usr/local/nvidia/lib64");
    let nvidias_folder = limited(|root| {
        distribution::debian(root);
        own(root, "usr/local/nvidia/lib64/libcuda.so.1");
    })
    .env("LD_LIBRARY_PATH", "/usr/local/nvidia/lib:/usr/local/nvidia/lib64");
    let both = limited(|root| {
        distribution::debian(root);
        own(root, "opt/own/libcuda.so.1");
    })
    .env("LD_LIBRARY_PATH", "/opt/own");
    let [compute, utility] = ["compute", "utility"].map(|asked| {
        limited(|root| {
            distribution::debian(root);
            own(root, "opt/own/libcuda.so.1");
        })
        .env("LD_LIBRARY_PATH", "/opt/own")
        .env("GPUSHARE_CAPABILITIES", asked)
    });
    for (what, bundle) in [
        ("a folder of a variable", both),
        ("no capability for NVML", compute),
        ("no capability for CUDA", utility),
        ("a plain file", plain_file),
        ("a chain of links", chain),
        ("a folder of ld.so.conf", conf),
        ("cuda-compat by the loader's cache", compat_by_cache),
        ("cuda-compat by a variable", compat_by_variable),
        ("NVIDIA's own folder", nvidias_folder),
    ] {
        assert_limited(&runtime, &bundle, what);
    }
}

/// The folder of GKE's device plugin, which CUDA images name in LD_LIBRARY_PATH.
#[test]
#[ignore = "needs root and runc: would run containers"]
fn a_volume_with_the_driver_gives_way_to_a_share_and_fits_a_whole_gpu() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let copied = tempfile::tempdir().expect("a folder on the host can be made");
    for library in fs::read_dir(node.libraries()).expect("the node has libraries").flatten() {
        if library.path().is_file() {
            distribution::copy(&library.path(), &copied.path().join(library.file_name()));
        }
    }
    let with_volume = |name: &str, value: &str, source: &Path| {
        let bundle = Bundle::of(distribution::debian).env(name, value).args(&PROBE);
        bundle.env("LD_LIBRARY_PATH", "/usr/local/nvidia/lib:/usr/local/nvidia/lib64").mount(json!({
            "destination": "/usr/local/nvidia/lib64", "type": "bind", "source": source,
            "options": ["rbind", "ro"]
        }))
    };
    let share = with_volume("GPUSHARE_MEMORY", "4GiB", &node.libraries());
    assert_limited(&runtime, &share, "the node's own driver, which the share's takes the place of");
    let share = with_volume("GPUSHARE_MEMORY", "4GiB", copied.path());
    let refusal = runtime.create(&share).expect_err("the driver's own library knows no limit").line();
    let folder = share.path().to_str().expect("a path in UTF-8");
    let planned = cli(runtime.config(), &["plan", "--bundle", folder]);
    assert!(!planned.success(), "{planned:?}");
    for told in [refusal, planned.stderr] {
        assert!(told.contains("/usr/local/nvidia/lib64") && told.contains("GPUSHARE_MODE"), "{told}");
    }
    assert_eq!(leases(runtime.config()), []);
    let whole = with_volume("GPUSHARE_MODE", "exclusive", &node.libraries());
    let container = runtime.create(&whole).expect("a whole GPU has no limit");
    container.start();
    assert!(container.wait_stopped(SOON));
    Report::parse(&container.stdout()).assert_whole(80 * GIB);
}

/// A volume of the user covers the folder. A mount target made there would be an empty file on the host.
#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_users_volume_over_the_library_folder_stays_as_it_is() {
    if !met(NEEDS) || !met(&[Need::Crun]) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    for low_level in LowLevel::ALL {
        let runtime = Runtime::wrapped(low_level, &node);
        for (written, access) in [
            (format!("/usr/lib/{MULTIARCH}"), "rw"),
            (format!("/usr/lib/{MULTIARCH}"), "ro"),
            (format!("/lib/{MULTIARCH}/"), "rw"),
            (format!("/usr/bin/../lib/{MULTIARCH}"), "rw"),
        ] {
            let what = format!("{access} at {written} on {low_level:?}");
            let bundle = limited(distribution::debian);
            let folder = bundle.root().join("usr/lib").join(MULTIARCH);
            let volume = tempfile::tempdir().expect("a folder on the host can be made");
            for library in fs::read_dir(folder).expect("the image has a glibc").flatten() {
                if library.path().is_file() {
                    distribution::copy(&library.path(), &volume.path().join(library.file_name()));
                }
            }
            let before = listing(volume.path());
            let bundle = bundle.mount(json!({
                "destination": written, "type": "bind", "source": volume.path(), "options": ["rbind", access]
            }));
            assert_limited(&runtime, &bundle, &what);
            assert!(listing(volume.path()) == before, "{what}: the volume was changed");
        }
        let volume = tempfile::tempdir().expect("a folder on the host can be made");
        let bundle = limited(distribution::debian).mount(json!({
            "destination": "/usr/lib", "type": "bind", "source": volume.path(), "options": ["rbind", "rw"]
        }));
        let line = runtime.create(&bundle).map(drop).expect_err("no folder is left").line();
        assert!(line.contains("the volume mounted at /usr/lib hides"), "{line}");
        assert!(listing(volume.path()).is_empty());
        assert_eq!(leases(runtime.config()), []);
    }
}

#[test]
#[ignore = "needs root, runc and crun: would run containers"]
fn a_target_that_leads_to_the_kernels_files_or_out_of_the_image_harms_nothing() {
    if !met(NEEDS) || !met(&[Need::Crun]) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let outside = tempfile::tempdir().expect("a folder on the host can be made");
    let target = format!("usr/lib/{MULTIARCH}/libcuda.so.1");
    for low_level in LowLevel::ALL {
        let runtime = Runtime::wrapped(low_level, &node);
        for (link, part) in [
            ("/proc/self/environ", "link out of its file system"),
            ("/sys/x", "link out"),
            ("/dev/x", "link out"),
        ] {
            let bundle = limited(|root| {
                distribution::debian(root);
                if link.starts_with("/proc") {
                    fs::create_dir_all(root.join("proc/self")).expect("a folder of the image can be made");
                    fs::write(root.join("proc/self/environ"), "")
                        .expect("a file of the image can be written");
                } else {
                    fs::write(root.join(&link[1..]), "").expect("a file of the image can be written");
                }
                symlink(link, root.join(&target)).expect("a link of the image can be made");
            });
            let line = runtime.create(&bundle).map(drop).expect_err(link).line();
            assert!(line.contains(part) && line.contains("libcuda.so.1"), "{link} on {low_level:?}: {line}");
        }
        // Absolute links and `..` are resolved inside the container, whatever they name on the host.
        let bundle = limited(|root| {
            distribution::debian(root);
            symlink(outside.path().join("libcuda"), root.join(&target))
                .expect("a link of the image can be made");
        });
        let container = runtime.create(&bundle);
        let line = container.map(drop).map_or_else(|refusal| refusal.line(), |()| "created".to_owned());
        assert!(line == "created" || line.contains("cannot lease a GPU: "), "{line}");
        assert!(listing(outside.path()).is_empty(), "{low_level:?}: something was made on the host");
    }
}

/// What NVIDIA's CUDA images set, with no other flag than `--runtime=gpushare`.
#[test]
#[ignore = "needs root and docker: starts a daemon"]
fn a_cuda_image_runs_with_the_runtime_alone() {
    if !met(NEEDS) || !met(&[Need::Docker, Need::DriverLibraries]) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let settings = format!("{}\n[request]\ndefault_memory = \"4GiB\"", LowLevel::Runc.settings());
    let config = node.config_with("cuda", &settings);
    let installed = Installed::new();
    let docker = Docker::start(&installed.wrapper(), &config, false);
    let compat = "usr/local/cuda-12.4/compat";
    let fill = |root: &Path| {
        distribution::ubuntu(root);
        for stem in ["libcuda", "libnvidia-ml"] {
            let file = node.libraries().join(format!("{stem}.so.1"));
            distribution::copy(&file, &root.join(format!("{compat}/{stem}.so.550.54.15")));
            let link = root.join(compat).join(format!("{stem}.so.1"));
            symlink(format!("{stem}.so.550.54.15"), link).expect("a link of the image can be made");
        }
        symlink("cuda-12.4", root.join("usr/local/cuda")).expect("a link of the image can be made");
        let conf = root.join("etc/ld.so.conf.d");
        fs::write(conf.join("nvidia.conf"), "/usr/local/nvidia/lib\n/usr/local/nvidia/lib64\n")
            .expect("a file of the image can be written");
        fs::write(conf.join("000_cuda.conf"), "/usr/local/cuda/compat\n")
            .expect("a file of the image can be written");
        distribution::cache(root);
    };
    docker.import(
        "cuda:12.4.1-base",
        fill,
        &[
            "ENV PATH=/usr/local/nvidia/bin:/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "ENV NVARCH=x86_64",
            "ENV NVIDIA_REQUIRE_CUDA=\"cuda>=12.2 brand=tesla,driver>=470,driver<471 brand=unknown,driver>=535,driver<536\"",
            "ENV CUDA_VERSION=12.4.1",
            "ENV NVIDIA_VISIBLE_DEVICES=all",
            "ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility",
            "ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64",
        ],
    );
    let run = |args: &[&str]| {
        let words =
            [&["run", "--rm", "--network", "none", "--runtime=gpushare", "cuda:12.4.1-base"], args].concat();
        docker.call(&words).expect_success("docker run --runtime=gpushare")
    };
    let report = Report::parse(&run(&PROBE).stdout);
    report.assert_size(4 * GIB);
    assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS]);
    let told = run(&["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]);
    assert_eq!(told.stdout.trim(), "NVIDIA H100 80GB HBM3, 4096 MiB");
    assert_eq!(leases(&config), []);
}
