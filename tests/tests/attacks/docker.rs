//! A8 to A11, A13 and A18 again, with a bundle that docker writes and a wrapper that docker calls.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use gpushare_tests::artifacts;
use gpushare_tests::docker::{Docker, NVIDIA_HOOK_RAN};
use gpushare_tests::image::static_only;
use gpushare_tests::leases::leases;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::runtime::LowLevel;
use gpushare_tests::scratch::Scratch;
use nix::mount::{MsFlags, mount};

use crate::image::{library, mounts, put_driver_data, put_programs};
use crate::{outside, tree};

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Docker, Need::Busybox];
const HOSTILE: &str = "localhost/gpushare-hostile:1";
const GREEDY: &str = "localhost/gpushare-greedy:1";
const CUDA: &str = "localhost/gpushare-cuda-like:1";

/// `docker run --runtime=gpushare FLAGS... IMAGE sleep`, in the background.
fn run(docker: &Docker, name: &str, flags: &[&str], image: &str) -> Result<(), String> {
    let first =
        ["run", "--network", "none", "--ipc", "none", "--runtime=gpushare", "--detach", "--name", name];
    let outcome = docker.call(&[&first[..], flags, &[image, "/bin/sleep", "1000"]].concat());
    if outcome.success() { Ok(()) } else { Err(outcome.stderr) }
}

fn remove(docker: &Docker, name: &str) {
    let _ = docker.call(&["rm", "--force", name]).expect_success("docker rm");
}

#[test]
#[ignore = "needs root, docker and a C compiler: starts a daemon"]
fn what_an_image_brings_reaches_no_host_through_docker() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let data = put_driver_data(&node);
    let config = node.config_with("docker", &LowLevel::Runc.settings());
    let docker = Docker::start(&artifacts::wrapper(), &config, false);
    let (outside, traps) = (outside(), Scratch::new("traps"));
    let marker = traps.path().join("marker");
    let x = library(&traps, &marker);
    let fill = |root: &Path| {
        static_only(root);
        put_programs(root, &marker, &x);
        fs::copy(&x, root.join("x.so")).expect("a file can be copied");
        for at in ["usr/share/nvidia", "usr/share/glvnd/egl_vendor.d"] {
            let path = root.join(at);
            fs::create_dir_all(path.parent().expect("it has one")).expect("a folder can be made");
            symlink(outside.path(), path).expect("a link can be made");
        }
    };
    let preload = ["LD_PRELOAD", "LD_AUDIT"].map(|name| format!("ENV {name}=/proc/self/cwd/x.so"));
    docker.import(HOSTILE, fill, &preload.each_ref().map(String::as_str));
    let volume = traps.folder("volume");
    let none: Option<&str> = None;
    mount(Some("tmpfs"), &volume, Some("tmpfs"), MsFlags::empty(), none).expect("a tmpfs can be mounted");
    mount(none, &volume, none, MsFlags::MS_SHARED, none).expect("it can be shared");

    let state = node.state();
    let foreign = |point: &String| {
        let point = Path::new(point);
        !point.starts_with(&state) && !point.starts_with(docker.folder())
    };
    let points = || mounts().into_iter().filter(foreign).collect::<Vec<_>>();
    let (before, untouched) = (points(), tree(outside.path()));
    let shared = format!("{}:/volume:rshared", volume.display());
    let over = format!("{}:/usr/lib64:rshared", volume.display());
    let share = ["-e", "GPUSHARE_MEMORY=4GiB", "-e", "GPUSHARE_CAPABILITIES=compute,utility,graphics"];
    run(&docker, "hostile", &[&share[..], &["-v", &shared]].concat(), HOSTILE).expect("it starts");
    assert!(!marker.exists(), "something of the image was run, or loaded, on the host");
    assert_eq!(points(), before, "while it runs");
    for name in data {
        let told = docker.call(&["exec", "hostile", "/bin/cat", &format!("/{name}")]);
        assert_eq!(told.stdout, "of the driver", "{name}: {told:?}");
    }
    remove(&docker, "hostile");
    let told = run(&docker, "over", &[&share[..], &["-v", &over]].concat(), HOSTILE).expect_err("a volume");
    assert!(told.contains("/usr/lib64"), "{told}");
    assert_eq!((points(), tree(outside.path())), (before, untouched), "afterwards");
    assert!(!marker.exists(), "at the end");
    assert_eq!(leases(&config), []);
}

#[test]
#[ignore = "needs root and docker: starts a daemon"]
fn an_image_and_a_flag_get_no_more_through_docker() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let settings = |request: &str| format!("{}\n[request]\n{request}", LowLevel::Runc.settings());
    let config = node.config_with("docker", &settings("strict = true"));
    let docker = Docker::start(&artifacts::wrapper(), &config, false);
    let asks = ["ENV NVIDIA_VISIBLE_DEVICES=all", "ENV GPUSHARE_MEMORY=60GiB", "ENV GPUSHARE_DEVICES=all"];
    docker.import(GREEDY, static_only, &asks);
    docker.import(HOSTILE, static_only, &[]);
    let told = run(&docker, "strict", &[], GREEDY).expect_err("nobody trusted asked");
    assert!(told.contains("request.strict"), "{told}");
    assert_eq!(leases(&config), []);

    // dockerd names one settings file, which is read at each call.
    let _ = node.config_with("docker", &settings("env = false\ndefault_memory = \"8GiB\""));
    let told = run(&docker, "unread", &[], GREEDY).expect_err("nobody reads its variables");
    assert!(told.contains("request.env"), "{told}");
    docker.import(CUDA, static_only, &asks[..1]);
    run(&docker, "deaf", &[], CUDA).expect("it gets what the node gives to all");
    assert_eq!(leases(&config)[0].memory, [8 << 30]);
    remove(&docker, "deaf");

    let _ = node.config_with("docker", &LowLevel::Runc.settings());
    let share = ["-e", "GPUSHARE_MEMORY=4GiB"];
    let rule = ["--device-cgroup-rule", "c 195:* rwm"];
    let told = run(&docker, "rule", &[&share[..], &rule].concat(), HOSTILE).expect_err("a rule for all");
    assert!(told.contains("GPUSHARE_DEVICES"), "{told}");
    run(&docker, "gpus", &[&share[..], &["--gpus", "all"]].concat(), HOSTILE).expect("it gets its share");
    assert!(!docker.folder().join(NVIDIA_HOOK_RAN).exists(), "NVIDIA's hook ran");
    assert_eq!(leases(&config)[0].memory, [4 << 30]);
    remove(&docker, "gpus");
    assert_eq!(leases(&config), []);
}
