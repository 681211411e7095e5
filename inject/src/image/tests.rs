use std::fs;
use std::os::unix::fs::symlink;
use std::time::{Duration, Instant};

use serde_json::json;

use super::*;

fn image(folders: &[&str]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for folder in folders {
        fs::create_dir_all(root.path().join(folder)).unwrap();
    }
    root
}

fn look(root: &Path, bundle: &Path, json: &Value) -> Image {
    RootFolder::open(root, json).unwrap().look(bundle, json)
}

fn folder(root: &Path) -> PathBuf {
    look(root, root, &json!({})).library_folder
}

#[test]
fn the_folder_is_the_one_that_the_images_loader_searches() {
    for (folders, want) in [
        (&["usr/lib/x86_64-linux-gnu", "usr/lib64"][..], "/usr/lib/x86_64-linux-gnu"),
        (&["usr/lib64", "usr/lib"], "/usr/lib64"),
        (&["lib/x86_64-linux-gnu"], "/lib/x86_64-linux-gnu"),
        (&["usr/lib"], "/usr/lib"),
        (&["lib"], "/lib"),
        (&[], "/usr/lib"),
    ] {
        assert_eq!(folder(image(folders).path()), Path::new(want), "{folders:?}");
    }
}

#[test]
fn the_c_librarys_place_counts_more_than_folders_that_happen_to_exist() {
    for (libc, others, want) in [
        ("usr/lib64", &["usr/lib/x86_64-linux-gnu", "usr/lib"][..], "/usr/lib64"),
        ("lib64", &["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"], "/lib64"),
        ("lib/x86_64-linux-gnu", &["usr/lib64", "lib64", "usr/lib"], "/lib/x86_64-linux-gnu"),
        ("lib/x86_64-linux-gnu", &["usr/lib/x86_64-linux-gnu"], "/usr/lib/x86_64-linux-gnu"),
        ("usr/lib", &["usr/lib64"], "/usr/lib"),
    ] {
        let root = image(&[&[libc], others].concat());
        fs::write(root.path().join(libc).join("libc.so.6"), "").unwrap();
        assert_eq!(folder(root.path()), Path::new(want), "{libc} beside {others:?}");
    }
}

#[test]
fn a_volume_over_one_of_the_loaders_folders_leaves_the_others() {
    let root = image(&["usr/lib/x86_64-linux-gnu", "usr/lib64"]);
    symlink("usr/lib", root.path().join("lib")).unwrap();
    for (written, want) in [
        ("/usr/lib/x86_64-linux-gnu", "/usr/lib"),
        ("/lib/x86_64-linux-gnu/", "/usr/lib"),
        ("/usr/lib/x86_64-linux-gnu/sub", "/usr/lib/x86_64-linux-gnu"),
        ("/usr", "/usr/lib/x86_64-linux-gnu"), // no place is left, which `check` says
    ] {
        let json = json!({"mounts": [{"destination": written, "type": "bind", "source": "/x"}]});
        let image = look(root.path(), root.path(), &json);
        assert_eq!(image.library_folder, Path::new(want), "a volume at {written}");
    }
}

#[test]
fn eighty_thousand_volumes_are_looked_through_in_no_time() {
    let root = image(&["usr/lib"]);
    let volumes: Vec<Value> = (0..80_000)
        .map(|number| json!({"destination": format!("/data/{number}/x"), "type": "bind", "source": "/x"}))
        .collect();
    let json = json!({"mounts": volumes});
    let targets: Vec<PathBuf> = (0..400).map(|number| format!("/opt/{number}/libcuda.so.1").into()).collect();
    let volumes = Volumes::of(&open_root(root.path()).unwrap(), &json);
    let start = Instant::now();
    assert!(targets.iter().all(|target| volumes.over(target, target).is_none()));
    assert!(!targets.iter().any(|target| volumes.on_tmpfs(target)));
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

#[test]
fn a_driver_copy_below_a_volume_is_not_the_images() {
    let root = image(&["usr/local/cuda/compat", "usr/lib"]);
    fs::write(root.path().join("usr/local/cuda/compat/libcuda.so.1"), "").unwrap();
    for (written, want) in [("/usr/local/cuda", 0), ("/usr/local/", 0), ("/usr/local/cuda/lib", 1)] {
        let json = json!({"mounts": [{"destination": written, "type": "bind", "source": "/x"}]});
        let image = look(root.path(), root.path(), &json);
        assert_eq!(image.driver_copies.len(), want, "a volume at {written}: {:?}", image.driver_copies);
    }
}

#[test]
fn a_volume_with_a_driver_is_seen_where_a_loader_looks() {
    let root = image(&["usr/lib", "usr/local"]);
    let bundle = image(&["driver/lib64", "data", "links"]);
    fs::write(bundle.path().join("driver/lib64/libnvidia-ml.so.535.1"), "").unwrap();
    fs::write(bundle.path().join("data/libnvidia-ptxjitcompiler.so.1"), "").unwrap();
    symlink("../driver/lib64", bundle.path().join("links/out")).unwrap();
    symlink("/usr/local/nvidia", root.path().join("opt")).unwrap();
    let nvidia = Path::new("/usr/local/nvidia/lib64");
    let absolute = bundle.path().join("driver").to_str().unwrap().to_owned();
    for (mounts, want) in [
        (&[("driver/lib64", "/usr/local/nvidia/lib64")][..], Some(nvidia)),
        (&[("driver", "/usr/local/nvidia")], Some(nvidia)),
        (&[(&absolute, "/opt")], Some(nvidia)),
        (&[("driver/lib64", "/usr/local/nvidia/lib64/sub")], None),
        (&[("driver", "/usr/local/nvidia"), ("data", "/usr/local/nvidia/lib64")], None),
        (&[("data", "/usr/local/nvidia/lib64"), ("driver", "/usr/local/nvidia/")], Some(nvidia)),
        (&[("links/out", "/conf")], Some(Path::new("/conf"))),
        (&[("links", "/links")], None),
        (&[("none", "/conf")], None),
    ] {
        let mount = |(source, target): &(&str, &str)| json!({"destination": target, "type": "bind", "source": source, "options": ["rbind", "ro"]});
        let env = ["LD_LIBRARY_PATH=/conf:/links/out"];
        let json = json!({"mounts": mounts.iter().map(mount).collect::<Vec<_>>(), "process": {"env": env}});
        let image = look(root.path(), bundle.path(), &json);
        assert_eq!(image.driver_volume.as_deref(), want, "{mounts:?}");
    }
}

#[test]
fn links_are_followed_inside_the_root_and_kernel_trees_are_avoided() {
    let root = image(&["usr/lib", "data/libs"]);
    symlink("/data/libs", root.path().join("usr/lib64")).unwrap();
    assert_eq!(folder(root.path()), Path::new("/usr/lib64"));
    let root = image(&["usr/lib", "proc/self"]);
    symlink("/proc/self", root.path().join("usr/lib64")).unwrap();
    assert_eq!(folder(root.path()), Path::new("/usr/lib"));
    let root = image(&["usr"]);
    symlink("/usr/lib/x86_64-linux-gnu", root.path().join("usr/lib64")).unwrap();
    assert_eq!(folder(root.path()), Path::new("/usr/lib"), "a link to nowhere is no folder");
}

#[test]
fn a_file_is_lacking_where_neither_image_nor_mount_has_it() {
    let root = image(&["usr/lib64", "opt/libc"]);
    symlink("usr/lib64", root.path().join("lib64")).unwrap();
    fs::write(root.path().join("usr/lib64/ld.so"), "").unwrap();
    symlink("/data/ld.so", root.path().join("opt/libc/ld.so")).unwrap();
    let volume = |target: &str| json!({"mounts": [{"destination": target, "type": "bind", "source": "/x"}]});
    for (path, json, want) in [
        ("/lib64/ld.so", json!({}), false),
        ("/lib64", json!({}), true),
        ("/opt/libc/ld.so", json!({}), true),
        ("/opt/libc/ld.so", volume("/data"), false),
        ("/opt/nv/ld.so", json!({}), true),
        ("/opt/nv/ld.so", volume("/opt/nv"), false),
        ("/opt/nv/ld.so", volume("/opt/nv/ld.so"), false),
        ("/opt/nv/ld.so", volume("/opt/other"), true),
        ("/opt/nv/ld.so", json!({"mounts": [{"destination": "/opt", "type": "tmpfs"}]}), false),
    ] {
        let lacks = RootFolder::open(root.path(), &json).unwrap().lacks(Path::new(path));
        assert_eq!(lacks, want, "{path} with {json}");
    }
}

#[test]
fn targets_must_be_able_to_take_a_file() {
    let root = image(&["usr/lib", "proc"]);
    let target = Path::new("/usr/lib/libcuda.so.1");
    let check =
        |json: &Value| RootFolder::open(root.path(), json).unwrap().check([(target, false)].into_iter());
    check(&json!({})).unwrap();
    check(&json!({"mounts": [{"destination": "/usr/lib", "type": "tmpfs"}]})).unwrap();
    let volume = json!({"mounts": [{"destination": "/usr", "type": "bind", "source": "/x"}]});
    assert!(matches!(check(&volume), Err(ImageError::Hidden { .. })));
    let own = json!({"destination": "/usr/lib/libcuda.so.1", "options": ["rbind"]});
    check(&json!({"mounts": [own]})).unwrap();
    let over = json!({"destination": "/usr/lib/", "options": ["bind"]});
    assert!(matches!(check(&json!({"mounts": [own, over]})), Err(ImageError::Hidden { .. })));
    symlink("usr/lib", root.path().join("lib")).unwrap();
    for written in ["/lib", "/usr/lib/../lib", "/lib/."] {
        let volume = json!({"mounts": [{"destination": written, "type": "bind"}]});
        assert!(matches!(check(&volume), Err(ImageError::Hidden { .. })), "{written}");
    }
    fs::create_dir(root.path().join("usr/lib/libcuda.so.1")).unwrap();
    assert!(matches!(check(&json!({})), Err(ImageError::BadTarget { what: "a folder", .. })));
    fs::remove_dir(root.path().join("usr/lib/libcuda.so.1")).unwrap();
    fs::write(root.path().join("proc/environ"), "").unwrap();
    symlink("/proc/environ", root.path().join("usr/lib/libcuda.so.1")).unwrap();
    assert!(matches!(check(&json!({})), Err(ImageError::BadTarget { .. })));
    fs::remove_file(root.path().join("usr/lib/libcuda.so.1")).unwrap();
    // An image's /proc is empty: its links there lead somewhere only once the container has a /proc.
    for target in ["/proc/self/environ", "../../sys/kernel/x", "/dev/null"] {
        symlink(target, root.path().join("usr/lib/libcuda.so.1")).unwrap();
        assert!(matches!(check(&json!({})), Err(ImageError::BadTarget { .. })), "{target}");
        fs::remove_file(root.path().join("usr/lib/libcuda.so.1")).unwrap();
    }
    // A link into a volume leads nowhere before the volume is mounted.
    symlink("/data/libs/a", root.path().join("usr/lib/libcuda.so.1")).unwrap();
    let volume = json!({"mounts": [{"destination": "/data", "type": "bind"}]});
    assert!(matches!(check(&volume), Err(ImageError::Hidden { .. })));
    check(&json!({})).unwrap();
    fs::remove_file(root.path().join("usr/lib/libcuda.so.1")).unwrap();
    nix::unistd::mkfifo(&root.path().join("usr/lib/libcuda.so.1"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert!(matches!(check(&json!({})), Err(ImageError::BadTarget { .. })));
}
