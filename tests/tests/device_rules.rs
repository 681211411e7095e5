//! Which device nodes a container can open. The kernel tells it without a GPU. A node with the driver's major
//! number that the rules allow gives "no such device", since no driver is behind it. One that the rules deny
//! gives "not permitted".

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use gpushare_tests::bundle::Bundle;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::{MODEL, SimulatedNode};
use gpushare_tests::runtime::{Container, LowLevel, Runtime};
use gpushare_tests::scratch::Scratch;
use gpushare_tests::{command, namespace};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use serde_json::{Value, json};

const ALLOWED: &str = "No such device or address";
const DENIED: &str = "Operation not permitted";

fn opened(container: &Container<'_>, script: &str) -> String {
    container.exec(&["/bin/busybox", "sh", "-c", script]).stderr
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_container_opens_the_gpus_it_was_granted_and_no_other() {
    if !met(&[Need::Root, Need::Runc, Need::Crun, Need::Busybox]) {
        return;
    }
    for low_level in LowLevel::ALL {
        let node = SimulatedNode::create(2, MODEL, "80GiB");
        let runtime = Runtime::wrapped(low_level, &node);
        let bundle = Bundle::small().env("GPUSHARE_MEMORY", "4GiB").env("GPUSHARE_DEVICES", "0");
        let container = runtime.run(&bundle);
        for (script, want) in [
            ("cat /dev/nvidia0", ALLOWED),
            (": <>/dev/nvidia0", ALLOWED),
            ("cat /dev/nvidiactl", ALLOWED),
            ("cat /dev/nvidia-uvm", ALLOWED),
            ("cat /dev/nvidia1", "No such file or directory"),
            ("busybox mknod /tmp/other c 195 1 && cat /tmp/other", DENIED),
            ("busybox mknod /tmp/modeset c 195 254 && cat /tmp/modeset", DENIED),
        ] {
            let told = opened(&container, script);
            assert!(told.contains(want), "{low_level:?}: {script}: {told}");
        }
    }
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_container_without_a_request_opens_none() {
    if !met(&[Need::Root, Need::Runc, Need::Crun, Need::Busybox]) {
        return;
    }
    for low_level in LowLevel::ALL {
        let node = SimulatedNode::one_gpu();
        let runtime = Runtime::wrapped(low_level, &node);
        let bundle = Bundle::small();
        let container = runtime.run(&bundle);
        assert!(
            opened(&container, "cat /dev/nvidia0").contains("No such file or directory"),
            "{low_level:?}"
        );
        let told = opened(&container, "busybox mknod /tmp/gpu c 195 0 && cat /tmp/gpu");
        assert!(told.contains(DENIED), "{low_level:?}: {told}");
    }
}

/// What is mounted at `/sys/fs/cgroup`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cgroups {
    V1,
    V2,
}

impl Cgroups {
    /// The versions that this machine has for devices.
    fn all() -> Vec<Self> {
        if Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
            vec![Self::V2]
        } else {
            vec![Self::V1, Self::V2]
        }
    }

    /// Mounts this version for this mount namespace; otherwise every runtime is shown v1. On a machine where
    /// v1 has the controllers, v2 has none then; devices need none.
    fn show(self) {
        if self == Self::V2 && !Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
            let all = Path::new("/sys/fs/cgroup");
            umount2(all, MntFlags::MNT_DETACH).expect("cgroup v1 can be unmounted");
            mount(Some("none"), all, Some("cgroup2"), MsFlags::empty(), None::<&str>)
                .expect("cgroup v2 can be mounted");
        }
    }

    /// Resources that a container's update may name here.
    fn update(self) -> &'static str {
        match self {
            Self::V1 => r#"{"pids":{"limit":100}}"#,
            Self::V2 => "{}",
        }
    }
}

/// A library in which setting a limit always succeeds. On cgroup v2 crun wants to lock memory without a
/// limit, which takes a capability that roots of containers lack.
fn crun_without_a_limit(scratch: &Scratch) -> PathBuf {
    let source = scratch.file("setrlimit.c", "int setrlimit(int what, const void *limit) { return 0; }\n");
    let library = scratch.path().join("setrlimit.so");
    let mut cc = Command::new("cc");
    let _ = command::run(cc.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(source)).expect_success("cc");
    let script =
        format!("#!/bin/sh\nLD_PRELOAD='{}' exec {} \"$@\"\n", library.display(), LowLevel::Crun.program());
    let crun = scratch.file("crun", script);
    fs::set_permissions(&crun, Permissions::from_mode(0o755)).expect("a script can be made executable");
    crun
}

fn runtime_on(cgroups: Cgroups, low_level: LowLevel, node: &SimulatedNode, scratch: &Scratch) -> Runtime {
    if (cgroups, low_level) != (Cgroups::V2, LowLevel::Crun) {
        return Runtime::wrapped(low_level, node);
    }
    let crun = crun_without_a_limit(scratch);
    let settings = format!("[runtime]\ncandidates = [{:?}]", crun.to_string_lossy());
    Runtime::with_config(low_level, &node.config_with("crun-v2", &settings))
}

/// Lets the container make every node, as docker does. Then only the rules keep it from opening them.
fn allow_mknod(bundle: &Bundle) {
    let mut spec: Value = serde_json::from_slice(&bundle.write()).expect("config.json is JSON");
    spec["linux"]["resources"]["devices"] =
        json!([{"allow": false, "access": "rwm"}, {"allow": true, "type": "c", "access": "m"}]);
    fs::write(bundle.config_path(), spec.to_string()).expect("config.json can be written");
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn the_rules_outlive_an_update_of_the_container_on_either_cgroup_version() {
    if !met(&[Need::Root, Need::Runc, Need::Crun, Need::Busybox]) {
        return;
    }
    let cells =
        Cgroups::all().into_iter().flat_map(|cgroups| LowLevel::ALL.map(|low_level| (cgroups, low_level)));
    for (cgroups, low_level) in cells {
        namespace::private(|| {
            cgroups.show();
            let scratch = Scratch::new("rules");
            let node = SimulatedNode::create(2, MODEL, "80GiB");
            let runtime = runtime_on(cgroups, low_level, &node, &scratch);
            let bundle = Bundle::small().env("GPUSHARE_MEMORY", "4GiB").env("GPUSHARE_DEVICES", "0");
            allow_mknod(&bundle);
            let container = runtime.create_as_it_is(&bundle);
            let container =
                container.unwrap_or_else(|refusal| panic!("{cgroups:?}, {low_level:?}: {refusal:?}"));
            container.start();
            let check = |when: &str| {
                for (script, want) in [
                    ("cat /dev/nvidia0", ALLOWED),
                    (": <>/dev/nvidia0", ALLOWED),
                    ("cat /dev/nvidiactl", ALLOWED),
                    ("busybox mknod /tmp/mine c 195 0 && cat /tmp/mine", ALLOWED),
                    (
                        "busybox mknod /tmp/other c 195 1 && cat /tmp/other",
                        "can't open '/tmp/other': Operation not permitted",
                    ),
                ] {
                    let told = opened(&container, &format!("busybox rm -f /tmp/*; {script}"));
                    assert!(
                        told.contains(want),
                        "{cgroups:?}, {low_level:?}, {when} the update: {script}: {told}"
                    );
                }
            };
            check("before");
            let resources = scratch.file("resources.json", cgroups.update());
            let resources = resources.to_string_lossy().into_owned();
            let update = runtime.call(&["update", "--resources", &resources], container.id());
            let _ = update.expect_success("update");
            check("after");
        });
    }
}
