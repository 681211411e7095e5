//! The node's own driver in a bundle, as CDI, device plugins and users mount it.

use std::fs;
use std::path::{Path, PathBuf};

use gpushare_region::path as inner;
use oci_spec::runtime::MountBuilder;
use serde_json::{Value, json};

use super::{edited, plan};
use crate::edit::{EditError, check, take_out_driver};
use crate::plan::Plan;

const VERSION: &str = "535.309.01";

/// A node's driver below a folder: some libraries with their links, a program and a data file.
struct Driver(tempfile::TempDir);

impl Driver {
    fn new() -> Self {
        let node = Self(tempfile::tempdir().unwrap());
        for stem in ["libcuda", "libnvidia-ml", "libGLX_nvidia", "libnvoptix"] {
            node.file(&format!("lib64/{stem}.so.{VERSION}"));
        }
        std::os::unix::fs::symlink(format!("libcuda.so.{VERSION}"), node.path("lib64/libcuda.so.1")).unwrap();
        for file in
            ["bin/nvidia-smi", "bin/tool", "share/glvnd/egl_vendor.d/10_nvidia.json", "lib64/libssl.so.3"]
        {
            node.file(file);
        }
        node.file(&format!("firmware/nvidia/{VERSION}/gsp_ga10x.bin"));
        node
    }

    fn path(&self, name: &str) -> PathBuf {
        fs::canonicalize(self.0.path()).unwrap().join(name)
    }

    fn file(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, name).unwrap();
        path
    }

    fn folders(&self) -> Vec<PathBuf> {
        ["lib64", "bin", "share"].map(|folder| self.path(folder)).to_vec()
    }
}

fn mount(source: &Path, target: &str) -> Value {
    json!({"destination": target, "source": source, "options": ["ro", "nosuid", "nodev", "rbind", "rprivate"]})
}

/// The targets of these mounts that stay in a bundle.
fn left(driver: &Driver, mounts: &[Value]) -> Vec<String> {
    let mut json = json!({"mounts": mounts});
    take_out_driver(&mut json, &driver.folders());
    let target = |mount: &Value| mount["destination"].as_str().unwrap().to_owned();
    json["mounts"].as_array().unwrap().iter().map(target).collect()
}

#[test]
fn mounts_of_the_nodes_own_driver_go_and_everything_else_stays() {
    let driver = Driver::new();
    let elsewhere = driver.file(&format!("volume/libcuda.so.{VERSION}"));
    let linked = driver.path("libcuda-elsewhere.so");
    std::os::unix::fs::symlink("lib64/libcuda.so.1", &linked).unwrap();
    let own = |name: &str| driver.path(name);
    let library = own(&format!("lib64/libcuda.so.{VERSION}"));
    let gsp = format!("firmware/nvidia/{VERSION}/gsp_ga10x.bin");
    for (source, target, goes) in [
        (library.clone(), "/usr/lib/x86_64-linux-gnu/libcuda.so.535.309.01", true),
        (own("lib64/libcuda.so.1"), "/usr/lib/libcuda.so", true),
        (own(&format!("lib64/libGLX_nvidia.so.{VERSION}")), "/usr/lib/libGLX_nvidia.so.0", true),
        (own(&format!("lib64/libnvoptix.so.{VERSION}")), "/usr/lib/libnvoptix.so.1", true),
        (own("bin/nvidia-smi"), "/usr/bin/nvidia-smi", true),
        (
            own("share/glvnd/egl_vendor.d/10_nvidia.json"),
            "/usr/share/glvnd/egl_vendor.d/10_nvidia.json",
            true,
        ),
        // Under any name in the container it is the driver.
        (library.clone(), "/opt/other.so", true),
        (linked, "/usr/lib/libcuda.so.1", true),
        ("/driver/root/run/nvidia-persistenced/socket".into(), "/run/nvidia-persistenced/socket", true),
        (own("bin/tool"), "/usr/bin/tool", false),
        (own("lib64/libssl.so.3"), "/usr/lib/libssl.so.3", false),
        (own("lib64"), "/data", false),
        (elsewhere, "/usr/lib/libcuda.so.1", false),
        ("/x/socket".into(), "/run/nvidia-persistenced/socket", false),
        ("/x/nvidia-app.conf".into(), "/etc/nvidia-app.conf", false),
    ] {
        let stays = left(&driver, &[mount(&source, target)]);
        assert_eq!(stays.is_empty(), goes, "{} on {target}", source.display());
    }
    assert_eq!(left(&driver, &[mount(&own(&gsp), &format!("/{gsp}"))]), Vec::<String>::new());
}

#[test]
fn a_hard_link_of_a_driver_file_is_the_nodes_own() {
    let driver = Driver::new();
    let name = format!("libnvidia-ml.so.{VERSION}");
    fs::create_dir(driver.path("plugin")).unwrap();
    fs::hard_link(driver.path("lib64").join(&name), driver.path("plugin").join(&name)).unwrap();
    assert!(
        left(&driver, &[mount(&driver.path("plugin").join(&name), "/usr/lib/libnvidia-ml.so.1")]).is_empty()
    );
}

#[test]
fn a_drivers_tree_goes_where_each_library_in_it_is_the_nodes_own() {
    let driver = Driver::new();
    let tree = |source: &Path, target: &str| mount(source, target);
    let root = driver.path("");
    assert!(left(&driver, &[tree(&root, "/usr/local/nvidia")]).is_empty());
    assert!(left(&driver, &[tree(&driver.path("lib64"), "/usr/local/nvidia/lib64")]).is_empty());
    let vulkan = driver.file("vulkan/icd.d/nvidia_icd.json");
    let beside = [tree(vulkan.parent().unwrap(), "/etc/vulkan/icd.d"), tree(&root, "/usr/local/nvidia")];
    assert!(left(&driver, &beside).is_empty());
    assert_eq!(left(&driver, &beside[..1]), ["/etc/vulkan/icd.d"], "alone it is a user's");
    assert_eq!(left(&driver, &[tree(&root, "/host"), tree(&root, "/usr/local/nvidia")]), ["/host"]);
    driver.file("other/lib64/libcuda.so.470.82.01");
    for other in ["other", "other/lib64", "bin", "none"] {
        let stays = left(&driver, &[tree(&driver.path(other), "/usr/local/nvidia")]);
        assert_eq!(stays, ["/usr/local/nvidia"], "{other}");
    }
    driver.file("lib64/libcuda.so.470.82.01");
    fs::rename(driver.path("lib64/libcuda.so.470.82.01"), driver.path("libcuda.so.470.82.01")).unwrap();
    assert_eq!(left(&driver, &[tree(&root, "/usr/local/nvidia")]).len(), 1, "one library of another driver");
}

#[test]
fn words_that_lead_only_into_what_was_taken_out_go_with_it() {
    let driver = Driver::new();
    let library = format!("/usr/lib/libcuda.so.{VERSION}");
    let mounts = [
        mount(&driver.path(""), "/usr/local/nvidia"),
        mount(&driver.path(&format!("lib64/libcuda.so.{VERSION}")), &library),
    ];
    let environment = |env: &[&str], mounts: &[Value]| {
        let mut json = json!({"mounts": mounts, "process": {"env": env}});
        take_out_driver(&mut json, &driver.folders());
        json["process"]["env"].clone()
    };
    let preload = format!("LD_PRELOAD={library} /opt/mine.so");
    for (before, after) in [
        ("LD_LIBRARY_PATH=/usr/local/nvidia/lib64", None),
        (
            "LD_LIBRARY_PATH=/usr/local/nvidia/lib:/opt/lib:/usr/local/nvidia/lib64",
            Some("LD_LIBRARY_PATH=/opt/lib"),
        ),
        ("LD_LIBRARY_PATH=/usr/lib:/usr/local/nvidia2", Some("LD_LIBRARY_PATH=/usr/lib:/usr/local/nvidia2")),
        (&preload, Some("LD_PRELOAD=/opt/mine.so")),
        ("NVIDIA_CTK_LIBCUDA_DIR=/usr/lib/x86_64-linux-gnu", None),
        ("PATH=/usr/local/nvidia/bin:/bin", Some("PATH=/usr/local/nvidia/bin:/bin")),
    ] {
        assert_eq!(environment(&[before], &mounts), json!(after.into_iter().collect::<Vec<_>>()), "{before}");
    }
    let kept = ["LD_LIBRARY_PATH=/usr/local/nvidia/lib64"];
    assert_eq!(environment(&kept, &[]), json!(kept), "nothing was taken out");
}

/// A plan of a share, with our library where the loader looks.
fn share() -> Plan {
    let mut share = plan();
    let limits = inner::LIMITS.to_str().unwrap();
    share.mounts.push(MountBuilder::default().source("/l").destination(limits).build().unwrap());
    share
}

#[test]
fn another_driver_stays_and_is_refused() {
    let driver = Driver::new();
    let foreign = driver.file("volume/libcuda.so.1");
    let mut json = json!({"mounts": [mount(&foreign, "/opt/libcuda.so.1")]});
    take_out_driver(&mut json, &driver.folders());
    let refused = edited(&json.to_string(), &share());
    assert_eq!(refused, Err(EditError::Driver { target: "/opt/libcuda.so.1".to_owned() }));
}

#[test]
fn a_hook_takes_nothing_out_and_refuses_the_driver_and_nvidias_hook() {
    let driver = Driver::new();
    let bundle =
        json!({"mounts": [mount(&driver.path("lib64/libcuda.so.1"), "/usr/lib64/libcuda.so.535.309.01")]});
    assert!(matches!(check(&bundle, &share()), Err(EditError::Driver { .. })));
    let hook = |path: &str| json!({"hooks": {"prestart": [{"path": path, "args": ["x", "update-ldcache"]}]}});
    assert!(matches!(
        check(&hook("/usr/bin/nvidia-container-runtime-hook"), &plan()),
        Err(EditError::WholeGpus { .. })
    ));
    assert_eq!(check(&hook("/usr/bin/nvidia-cdi-hook"), &plan()), Ok(()), "it brings no GPU by itself");
}

#[test]
fn nvidias_hooks_are_taken_out_of_every_stage_and_others_stay() {
    let hook = |path: &str, args: &[&str]| json!({"path": path, "args": args});
    let kept = [
        hook("/proc/1/exe", &["libnetwork-setkey"]),
        hook("/usr/bin/nvidia-ctk", &["nvidia-ctk", "system", "create-dev-char-symlinks"]),
        hook("/opt/my-nvidia-cdi-hook", &["x", "update-ldcache"]),
    ];
    let gone = [
        hook("/usr/bin/nvidia-cdi-hook", &["nvidia-cdi-hook", "create-symlinks", "--link", "a::b"]),
        hook(
            "/usr/local/nvidia/toolkit/nvidia-cdi-hook",
            &["nvidia-cdi-hook", "disable-device-node-modification"],
        ),
        hook("/usr/bin/nvidia-ctk", &["nvidia-ctk", "hook", "update-ldcache", "--folder", "/usr/lib64"]),
        hook("/usr/bin/nvidia-ctk", &["nvidia-ctk", "--quiet", "hook", "chmod"]),
        hook("/usr/bin/nvidia-container-runtime-hook", &["x", "prestart"]),
        hook("/run/toolkit/nvidia-container-runtime-hook.real", &["x", "prestart"]),
        hook("/x/nvidia-container-toolkit", &[]),
        hook("/bin/containerd", &["containerd", "oci-hook", "--", "/x/nvidia-container-cli", "configure"]),
    ];
    for stage in ["prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"] {
        let list: Vec<&Value> = gone.iter().chain(&kept).collect();
        let after = edited(&json!({"hooks": {stage: list}}).to_string(), &plan()).unwrap();
        let stays: Vec<&Value> = after["hooks"][stage].as_array().unwrap().iter().take(kept.len()).collect();
        assert_eq!(stays, kept.iter().collect::<Vec<_>>(), "{stage}");
        let ours = usize::from(["prestart", "poststop"].contains(&stage));
        assert_eq!(after["hooks"][stage].as_array().unwrap().len(), kept.len() + ours, "{stage}");
    }
}
