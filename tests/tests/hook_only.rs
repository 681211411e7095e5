//! Hook-only mode: gpushare's hook in a bundle that a runtime creates by itself. The container gets what the
//! wrapper would give it, the kernel confirms that, and nothing is left behind.

use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::process::Command;
use std::time::Duration;

use gpushare_tests::artifacts;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::command::{self, eventually};
use gpushare_tests::hooked::{self, Cgroups};
use gpushare_tests::leases::{leases, sweep};
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::{MODEL, SimulatedNode};
use gpushare_tests::probe::{GIB, OUT_OF_MEMORY, Report, SUCCESS};
use gpushare_tests::regions;
use gpushare_tests::runtime::{Container, LowLevel, Runtime};
use gpushare_tests::scratch::Scratch;
use serde_json::json;

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Crun, Need::Busybox];
const ALLOWED: &str = "No such device or address";
const DENIED: &str = "Operation not permitted";

/// The bundle with gpushare's hooks in it, as hooks.d puts them there.
fn with_hooks(bundle: Bundle, node: &SimulatedNode) -> Bundle {
    let config = node.config().to_string_lossy().into_owned();
    let hook = artifacts::hook();
    bundle.hook("createRuntime", &hook, &["createRuntime", "--config", &config]).hook(
        "poststop",
        &hook,
        &["poststop", "--config", &config],
    )
}

fn cases() -> impl Iterator<Item = (LowLevel, Cgroups)> {
    LowLevel::ALL
        .into_iter()
        .flat_map(|low_level| Cgroups::versions().into_iter().map(move |cgroups| (low_level, cgroups)))
}

fn opened(container: &Container<'_>, script: &str) -> String {
    container.exec(&["/bin/busybox", "sh", "-c", script]).stderr
}

fn assert_rules(container: &Container<'_>, when: &str) {
    for (script, want) in [
        ("cat /dev/nvidia0", ALLOWED),
        (": <>/dev/nvidia0", ALLOWED),
        ("cat /dev/nvidiactl", ALLOWED),
        ("cat /dev/nvidia-uvm", ALLOWED),
        ("cat /dev/nvidia1", "No such file or directory"),
        ("busybox mknod /tmp/other$$ c 195 1 && cat /tmp/other$$", DENIED),
        ("busybox mknod /tmp/modeset$$ c 195 254 && cat /tmp/modeset$$", DENIED),
        ("busybox mknod /tmp/block$$ b 195 0 && cat /tmp/block$$", DENIED),
        ("busybox mknod /tmp/memory$$ c 1 1 && cat /tmp/memory$$", DENIED),
    ] {
        let told = opened(container, script);
        assert!(told.contains(want), "{when}: {script}: {told}");
    }
}

/// All mounts that this process sees, except those that other programs made in the temporary folder.
fn host_mounts() -> String {
    let all = std::fs::read_to_string("/proc/self/mountinfo").expect("the mount table can be read");
    let is_ours = |line: &&str| !line.contains(" /tmp/") || line.contains(" /tmp/gpushare-tests-");
    all.lines().filter(is_ours).collect::<Vec<_>>().join("\n")
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_container_gets_the_granted_nodes_and_no_other_and_keeps_them_over_an_update() {
    if !met(NEEDS) {
        return;
    }
    for (low_level, cgroups) in cases() {
        let node = SimulatedNode::create(2, MODEL, "80GiB");
        let runtime = hooked::runtime(low_level, &node, cgroups);
        let request = Bundle::small().env("GPUSHARE_MEMORY", "4GiB").env("GPUSHARE_DEVICES", "0");
        let bundle = with_hooks(request, &node);
        let container = runtime.run(&bundle);
        assert_rules(&container, &format!("{low_level:?} {cgroups:?}"));
        let resources = bundle.path().join("resources.json");
        std::fs::write(&resources, "{}").expect("a file can be written");
        let update = ["update", "--resources", resources.to_str().expect("the path is UTF-8")];
        let _ = runtime.call(&update, bundle.id()).expect_success("update");
        assert_rules(&container, &format!("{low_level:?} {cgroups:?}, after update"));
    }
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_program_sees_a_gpu_of_the_shares_size_and_nothing_is_left_behind() {
    if !met(NEEDS) {
        return;
    }
    for (low_level, cgroups) in cases() {
        let node = SimulatedNode::one_gpu();
        let runtime = hooked::runtime(low_level, &node, cgroups);
        let before = host_mounts();
        let bundle = with_hooks(Bundle::with_probe().annotation("gpushare.io/memory", "30GiB"), &node);
        let container = runtime.run(&bundle);
        let report = Report::of(&container, &["31GiB", "29GiB"]);
        report.assert_size(30 * GIB);
        assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS], "{low_level:?} {cgroups:?}");
        let held = leases(runtime.config());
        let pid = u64::try_from(container.pid()).ok();
        assert_eq!(
            (held.len(), held[0].state.as_str(), held[0].pid),
            (1, "active", pid),
            "{low_level:?} {cgroups:?}"
        );
        sweep(runtime.config());
        assert_eq!(leases(runtime.config()), held, "it runs, so the lease stands");
        container.stop();
        assert_eq!(leases(runtime.config()), [], "{low_level:?} {cgroups:?}");
        assert_eq!(host_mounts(), before, "{low_level:?} {cgroups:?}");
        let left = regions::left(&node.state());
        assert!(left.is_empty(), "{low_level:?} {cgroups:?}: {left:?}");
    }
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_program_without_privileges_uses_the_share_too() {
    if !met(NEEDS) {
        return;
    }
    for low_level in LowLevel::ALL {
        let node = SimulatedNode::one_gpu();
        let host_node = std::fs::metadata(node.root().join("dev/nvidia0")).expect("the node has a GPU");
        let runtime = hooked::runtime(low_level, &node, Cgroups::Machine);
        let bundle = Bundle::with_probe().env("GPUSHARE_MEMORY", "4GiB");
        let bundle = with_hooks(bundle.set("/process/user", json!({"uid": 1000, "gid": 1000})), &node);
        let container = runtime.run(&bundle);
        Report::of(&container, &[]).assert_size(4 * GIB);
        let told = container.exec(&["/bin/busybox", "stat", "-c", "%a %u %g", "/dev/nvidia0"]).stdout;
        let want = format!("{:o} {} {}", host_node.mode() & 0o7777, host_node.uid(), host_node.gid());
        assert_eq!(told.trim(), want, "{low_level:?}");
    }
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_container_with_a_user_namespace_gets_the_hosts_nodes() {
    if !met(NEEDS) {
        return;
    }
    const ROOT: u32 = 100_000;
    for low_level in LowLevel::ALL {
        let node = SimulatedNode::one_gpu();
        let runtime = hooked::runtime(low_level, &node, Cgroups::Machine);
        let mapping = json!([{"containerID": 0, "hostID": ROOT, "size": 65536}]);
        let namespaces = ["pid", "network", "ipc", "uts", "mount", "user"].map(|kind| json!({"type": kind}));
        let bundle = Bundle::small()
            .env("GPUSHARE_MEMORY", "4GiB")
            .set("/linux/namespaces", json!(namespaces))
            .set("/linux/uidMappings", mapping.clone())
            .set("/linux/gidMappings", mapping);
        let mut chown = Command::new("chown");
        let chown = chown.args(["-R", "-h", &format!("{ROOT}:{ROOT}")]).arg(bundle.root());
        let _ = command::run(chown).expect_success("chown of the root folder");
        // The root user of the container's user namespace must be able to enter the folder.
        std::fs::set_permissions(bundle.path(), Permissions::from_mode(0o755)).expect("the mode can be set");
        let bundle = with_hooks(bundle, &node);
        let container = runtime.run(&bundle);
        for (script, want) in [
            ("cat /dev/nvidia0", ALLOWED),
            ("cat /dev/nvidia-uvm", ALLOWED),
            ("cat /dev/nvidia1", "No such file or directory"),
            (": >>/usr/lib/gpushare/limits", "can't create"),
        ] {
            let told = opened(&container, script);
            assert!(told.contains(want), "{low_level:?}: {script}: {told}");
        }
        let made =
            std::fs::metadata(bundle.root().join("usr/lib/gpushare/limits")).expect("a target was made");
        assert_eq!(
            (made.uid(), made.gid()),
            (ROOT, ROOT),
            "{low_level:?}: it belongs to the container's root"
        );
        container.stop();
        assert_eq!(leases(runtime.config()), [], "{low_level:?}");
    }
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_container_without_a_request_is_left_alone() {
    if !met(NEEDS) {
        return;
    }
    for (low_level, cgroups) in cases() {
        let node = SimulatedNode::one_gpu();
        let runtime = hooked::runtime(low_level, &node, cgroups);
        let sandbox = Bundle::small()
            .annotation("io.kubernetes.cri.container-type", "sandbox")
            .annotation("gpushare.io/memory", "4GiB");
        for bundle in [Bundle::small(), sandbox] {
            let bundle = with_hooks(bundle, &node);
            let container = runtime.run(&bundle);
            assert!(
                opened(&container, "cat /dev/nvidia0").contains("No such file"),
                "{low_level:?} {cgroups:?}"
            );
            let told = opened(&container, "busybox mknod /tmp/gpu c 195 0 && cat /tmp/gpu");
            assert!(told.contains(DENIED), "{low_level:?} {cgroups:?}: {told}");
            assert!(!node.ledger().exists(), "the store was opened");
        }
    }
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_gpu_of_a_cdi_device_whose_request_is_not_read_is_refused() {
    if !met(NEEDS) {
        return;
    }
    for low_level in LowLevel::ALL {
        let node = SimulatedNode::one_gpu();
        let low_level_settings = low_level.settings();
        let no_env = node.config_with("no-env", &format!("[request]\nenv = false\n{low_level_settings}"));
        let env = node.config_with("env", &low_level_settings);
        let sandbox = ("io.kubernetes.cri.container-type", "sandbox");
        for (settings, (name, value)) in [(env, sandbox), (no_env, ("other", "x"))] {
            let config = settings.to_string_lossy().into_owned();
            let bundle = Bundle::small()
                .annotation(name, value)
                .env("GPUSHARE_CDI_GPU_0", "gpushare.io/gpu=0")
                .hook("createRuntime", &artifacts::hook(), &["createRuntime", "--cdi", "--config", &config]);
            for runtime in [
                hooked::runtime(low_level, &node, Cgroups::Machine),
                Runtime::with_config(low_level, &settings),
            ] {
                let refusal = runtime.create(&bundle).expect_err("no GPU stands without a lease");
                let told = format!("{refusal:?}"); // crun drops what a hook says
                assert!(low_level == LowLevel::Crun || told.contains("no request"), "{told}");
                runtime.delete_force(bundle.id());
            }
        }
    }
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_share_that_the_node_cannot_hold_fails_create_and_leaves_nothing() {
    if !met(NEEDS) {
        return;
    }
    for low_level in LowLevel::ALL {
        let node = SimulatedNode::one_gpu();
        let runtime = hooked::runtime(low_level, &node, Cgroups::Machine);
        for (value, word) in [("81GiB", "81 GiB"), ("4", "GiB"), ("4GiB,", "4GiB,")] {
            let bundle = with_hooks(Bundle::small().env("GPUSHARE_MEMORY", value), &node);
            let refusal = runtime.create(&bundle).expect_err("there is no such share");
            // crun drops what a hook says.
            let told = format!("{refusal:?}");
            assert!(low_level == LowLevel::Crun || told.contains(word), "{value}: {told}");
            runtime.delete_force(bundle.id());
            let gone = eventually(Duration::from_secs(5), || leases(runtime.config()).is_empty());
            assert!(gone, "{low_level:?}: {value}");
        }
    }
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn wrapper_and_hook_together_and_a_hook_configured_twice_grant_once() {
    if !met(NEEDS) {
        return;
    }
    for low_level in LowLevel::ALL {
        let node = SimulatedNode::one_gpu();
        let early = with_hooks(Bundle::with_probe().env("GPUSHARE_MEMORY", "4GiB"), &node);
        let config = node.config().to_string_lossy().into_owned();
        // An early hook also runs before the wrapper's own hook, while the lease still belongs to the
        // runtime.
        let both = early.hook("prestart", &artifacts::hook(), &["prestart", "--config", &config]);
        let wrapped = Runtime::with_config(low_level, &node.config_with("both", &low_level.settings()));
        for runtime in [wrapped, hooked::runtime(low_level, &node, Cgroups::Machine)] {
            let container = runtime.run(&both);
            Report::of(&container, &[]).assert_size(4 * GIB);
            let held = leases(runtime.config());
            assert_eq!((held.len(), &held[0].memory[..]), (1, &[4 * GIB][..]), "{low_level:?}");
            container.stop();
            assert_eq!(leases(runtime.config()), [], "{low_level:?}");
        }
    }
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn it_stands_in_for_nvidias_hook_under_dockers_gpus_flag() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let scratch = Scratch::new("stand-in");
    let stand_in = scratch.path().join("nvidia-container-runtime-hook");
    std::os::unix::fs::symlink(artifacts::hook(), &stand_in).expect("a link can be made");
    let etc = hooked::settings_in_place(&scratch, node.config());
    let runtime = hooked::runtime_behind(LowLevel::Runc, &node, Cgroups::Machine, &etc);
    let bundle = Bundle::with_probe()
        .env("NVIDIA_VISIBLE_DEVICES", "all")
        .env("GPUSHARE_MEMORY", "6GiB")
        .hook("prestart", &stand_in, &["prestart"]);
    let container = runtime.run(&bundle);
    Report::of(&container, &[]).assert_size(6 * GIB);
    assert_eq!(leases(runtime.config()).len(), 1);
    // docker runs no hook at a container's end, so the sweep collects the lease.
    container.stop();
    assert_eq!(leases(runtime.config()).len(), 1);
    sweep(runtime.config());
    assert_eq!(leases(runtime.config()), []);
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_container_that_is_started_again_gets_its_share_though_nothing_took_it_back() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let config = node.config().to_string_lossy().into_owned();
    let runtime = hooked::runtime(LowLevel::Runc, &node, Cgroups::Machine);
    // docker's --gpus gives only a prestart hook.
    let bundle = Bundle::with_probe().env("GPUSHARE_MEMORY", "60GiB").hook(
        "prestart",
        &artifacts::hook(),
        &["prestart", "--config", &config],
    );
    for life in 0..3 {
        let container = runtime.run(&bundle);
        Report::of(&container, &[]).assert_size(60 * GIB);
        assert_eq!(leases(runtime.config()).len(), 1, "life {life}");
        container.stop();
    }
}

/// Without a pid namespace of its own, a container's processes can outlive its first process.
#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_container_that_is_started_again_beside_processes_of_its_earlier_life_gets_no_second_share() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let config = node.config().to_string_lossy().into_owned();
    let earlier = hooked::runtime(LowLevel::Runc, &node, Cgroups::Machine);
    let bundle = Bundle::small()
        .env("GPUSHARE_MEMORY", "60GiB")
        .args(&["sh", "-c", "sleep 1000 & exec sleep 1000"])
        .hook("prestart", &artifacts::hook(), &["prestart", "--config", &config])
        .edit(|spec| {
            let namespaces = spec["linux"]["namespaces"].as_array_mut().expect("a list");
            namespaces.retain(|one| one["type"] != "pid");
        });
    let container = earlier.run(&bundle);
    assert!(eventually(Duration::from_secs(20), || bundle.processes() == 2), "it has no second process");
    container.kill_init();
    let another = hooked::runtime(LowLevel::Runc, &node, Cgroups::Machine);
    let refused = format!("{:?}", another.create(&bundle).map(drop).expect_err("its first life still runs"));
    assert!(refused.contains("holds a share"), "{refused}");
    assert_eq!(leases(node.config()).len(), 1);
    drop(container);
    bundle.kill_orphans();
}
