//! The containers of a pod hold one GPU share together: one limit for all of them, which ends with the last.

use std::fs;
use std::thread;
use std::time::Duration;

use gpushare_tests::artifacts;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::command::eventually;
use gpushare_tests::leases::{cli, leases, shares, sweep};
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::{MODEL, SimulatedNode};
use gpushare_tests::probe::{GIB, OUT_OF_MEMORY, Report, SUCCESS};
use gpushare_tests::regions;
use gpushare_tests::runtime::{Container, LowLevel, RUNC, Runtime};
use serde_json::{Value, json};

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Crun, Need::Busybox];

const HOLDER: [&str; 7] =
    ["/bin/gpushare-simulator", "probe", "--json", "--allocate", "5GiB", "--hold", "1000"];

/// A container of the pod `sandbox`, as containerd's CRI marks it.
fn in_pod(bundle: Bundle, sandbox: &str) -> Bundle {
    let bundle = bundle.annotation("io.kubernetes.cri.container-type", "container");
    bundle.annotation("io.kubernetes.cri.sandbox-id", sandbox)
}

/// A container that asks for the pod's share of 8 GiB.
fn sharing(bundle: Bundle, sandbox: &str) -> Bundle {
    in_pod(bundle, sandbox).annotation("gpushare.io/scope", "pod").annotation("gpushare.io/memory", "8GiB")
}

/// A container in the pid namespace of the container `target`, as `kubectl debug --target` makes it.
fn beside(target: &Container<'_>, bundle: Bundle) -> Bundle {
    let path = format!("/proc/{}/ns/pid", target.pid());
    bundle.edit(|spec| spec["linux"]["namespaces"][0] = json!({"type": "pid", "path": path}))
}

/// The runtime, with one mount namespace for all calls, as an engine has it.
fn runtime(low_level: LowLevel, node: &SimulatedNode) -> Runtime {
    Runtime::wrapped(low_level, node).in_view(low_level.view())
}

/// The containers of each lease, by id.
fn holders(runtime: &Runtime) -> Vec<Vec<String>> {
    let ids = |lease: &Value| {
        let containers = lease["containers"].as_array().expect("a lease has containers");
        let id = |one: &Value| one["id"].as_str().expect("a container has an id").to_owned();
        containers.iter().map(id).collect()
    };
    shares(runtime.config()).iter().map(ids).collect()
}

fn regions(node: &SimulatedNode) -> usize {
    regions::left(&node.state()).len()
}

fn wait_until_it_holds(container: &Container<'_>) {
    assert!(eventually(Duration::from_secs(20), || !container.stdout().is_empty()), "{}", container.stderr());
    assert_eq!(Report::parse(&container.stdout()).allocations(), [SUCCESS]);
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn two_containers_of_a_pod_together_cannot_pass_its_limit() {
    if !met(NEEDS) {
        return;
    }
    for low_level in LowLevel::ALL {
        let node = SimulatedNode::one_gpu();
        let runtime = runtime(low_level, &node);
        let holder = sharing(Bundle::with_probe(), "pod").args(&HOLDER);
        let other = in_pod(Bundle::with_probe(), "pod").annotation("gpushare.io/pod-memory", "8GiB");
        let (first, second) = (runtime.run(&holder), runtime.run(&other));
        wait_until_it_holds(&first);
        let report = Report::of(&second, &["3GiB", "1GiB"]);
        report.assert_size(8 * GIB);
        assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS], "{low_level:?}: 5 GiB of 8 are held");
        assert_eq!(Report::of(&first, &["3GiB", "1GiB"]).allocations(), [OUT_OF_MEMORY, SUCCESS]);
        assert!(report.number("nvml_used") >= 5 * GIB, "{report:?}");
        assert_eq!(holders(&runtime), [[holder.id(), other.id()]]);

        // Another pod has a share of its own. Two shares of 8 GiB leave 64 of 80 GiB.
        let neighbour = sharing(Bundle::with_probe(), "another pod");
        let neighbour = runtime.run(&neighbour);
        assert_eq!(Report::of(&neighbour, &["7GiB"]).allocations(), [SUCCESS]);
        let rest = Bundle::small().annotation("gpushare.io/memory", "64GiB");
        drop(runtime.run(&rest));

        first.stop();
        assert_eq!(holders(&runtime)[0], [other.id()], "{low_level:?}");
        let again = sharing(Bundle::with_probe(), "pod");
        let third = runtime.run(&again);
        assert_eq!(Report::of(&third, &["9GiB", "7GiB"]).allocations(), [OUT_OF_MEMORY, SUCCESS]);
        drop((neighbour, second));
        assert_eq!(holders(&runtime), [[again.id()]], "{low_level:?}");
        third.stop();
        assert_eq!((holders(&runtime).len(), regions(&node)), (0, 0), "{low_level:?}");
    }
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_container_that_is_killed_leaves_the_share_to_the_others_of_its_pod() {
    if !met(NEEDS) {
        return;
    }
    for low_level in LowLevel::ALL {
        let node = SimulatedNode::one_gpu();
        let runtime = runtime(low_level, &node);
        let holder = sharing(Bundle::with_probe(), "pod").args(&HOLDER);
        let other = sharing(Bundle::with_probe(), "pod");
        let (first, second) = (runtime.run(&holder), runtime.run(&other));
        wait_until_it_holds(&first);
        first.kill_init();
        // The others can use what it held at once, whoever tells the store that it has ended.
        assert_eq!(Report::of(&second, &["7GiB"]).allocations(), [SUCCESS], "{low_level:?}");
        sweep(runtime.config());
        assert_eq!(holders(&runtime), [[other.id()]], "{low_level:?}");
        assert_eq!(Report::of(&second, &["9GiB", "7GiB"]).allocations(), [OUT_OF_MEMORY, SUCCESS]);
        second.kill_init();
        sweep(runtime.config());
        assert_eq!((holders(&runtime).len(), regions(&node)), (0, 0), "{low_level:?}");
    }
}

#[test]
#[ignore = "needs root and runc: creates 20 containers at once"]
fn of_twenty_containers_of_a_pod_at_once_all_get_the_one_share() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = runtime(LowLevel::Runc, &node);
    let bundles: Vec<Bundle> = (0..20).map(|_| sharing(Bundle::with_probe(), "pod")).collect();
    let create = |bundle| runtime.create(bundle).unwrap_or_else(|refusal| panic!("{}", refusal.line()));
    let containers: Vec<Container<'_>> = thread::scope(|scope| {
        let creations: Vec<_> = bundles.iter().map(|bundle| scope.spawn(|| create(bundle))).collect();
        creations.into_iter().map(|one| one.join().expect("no thread panics")).collect()
    });
    let standing = leases(runtime.config());
    assert_eq!((standing.len(), &standing[0].memory[..]), (1, &[8 * GIB][..]));
    assert_eq!(holders(&runtime)[0].len(), 20);
    let (first, last) = (&containers[0], &containers[19]);
    first.start();
    last.start();
    assert_eq!(Report::of(first, &["7GiB"]).allocations(), [SUCCESS]);
    assert_eq!(Report::of(last, &["9GiB", "7GiB"]).allocations(), [OUT_OF_MEMORY, SUCCESS]);
    drop(containers);
    assert_eq!((holders(&runtime).len(), regions(&node)), (0, 0));
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_container_that_cannot_be_created_leaves_the_share_of_its_pod_intact() {
    if !met(NEEDS) {
        return;
    }
    for low_level in LowLevel::ALL {
        let node = SimulatedNode::one_gpu();
        let runtime = runtime(low_level, &node);
        let bundle = sharing(Bundle::with_probe(), "pod");
        let first = runtime.run(&bundle);
        let more = sharing(Bundle::with_probe(), "pod").annotation("gpushare.io/memory", "9GiB");
        let line = runtime.create(&more).expect_err("the pod holds 8 GiB").line();
        for part in ["8 GiB on 1 GPU", "9 GiB on 1 GPU", "write the same request"] {
            assert!(line.contains(part), "{part:?} is not in {line}");
        }
        // One container that we refuse after it has joined the lease, and one that the low-level runtime
        // cannot start.
        let volume =
            json!({"destination": "/usr", "type": "bind", "source": "/usr", "options": ["rbind", "ro"]});
        let ours = sharing(Bundle::with_probe(), "pod").mount(volume);
        let theirs = sharing(Bundle::with_probe(), "pod").args(&["/no/such/program"]);
        for failing in [&ours, &theirs] {
            assert!(runtime.create(failing).is_err());
            runtime.delete_force(failing.id());
            assert_eq!(holders(&runtime), [[bundle.id()]], "{low_level:?}");
        }
        let report = Report::of(&first, &["9GiB", "7GiB"]);
        report.assert_size(8 * GIB);
        assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS], "{low_level:?}");
        first.stop();
        assert_eq!((holders(&runtime).len(), regions(&node)), (0, 0), "{low_level:?}");
    }
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn an_update_or_a_release_by_any_container_of_a_pod_is_its_pods() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = runtime(LowLevel::Runc, &node);
    let bundles = [(); 2].map(|()| sharing(Bundle::with_probe(), "pod"));
    let [first, second] = [&bundles[0], &bundles[1]].map(|bundle| runtime.run(bundle));
    let done = cli(runtime.config(), &["update", second.id(), "--memory", "6GiB"]);
    let told = done.expect_success("gpushare update").stdout;
    assert!(told.contains(first.id()) && told.contains(second.id()), "{told}");
    for container in [&first, &second] {
        let report = Report::of(container, &["6GiB", "5GiB"]);
        report.assert_size(6 * GIB);
        assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS]);
    }
    // It asks again with the words of its pod, which are the same as before.
    second.stop();
    let again = sharing(Bundle::with_probe(), "pod");
    let third = runtime.run(&again);
    Report::of(&third, &[]).assert_size(6 * GIB);

    let release = |args: &[&str]| cli(runtime.config(), &[&["release"], args].concat());
    assert!(!release(&[first.id()]).success(), "it lives");
    let told = release(&[first.id(), "--force"]).expect_success("gpushare release").stdout;
    assert!(told.contains(&format!("left to {}", again.id())), "{told}");
    assert_eq!(holders(&runtime), [[again.id()]]);
    let table = cli(runtime.config(), &["ps"]).stdout;
    assert!(table.contains(again.id()) && !table.contains(first.id()), "{table}");
    third.stop();
    let history = cli(runtime.config(), &["history"]).stdout;
    let ids = [again.id(), second.id(), first.id()];
    assert!(ids.iter().all(|id| history.contains(id)) && history.lines().count() == 2, "{history}");
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_container_that_joins_another_ones_processes_uses_its_share() {
    if !met(NEEDS) {
        return;
    }
    for low_level in LowLevel::ALL {
        let node = SimulatedNode::one_gpu();
        let runtime = runtime(low_level, &node);
        let asking = |bundle| in_pod(bundle, "pod").annotation("gpushare.io/memory", "60GiB");
        let holder = ["/bin/gpushare-simulator", "probe", "--json", "--allocate", "50GiB", "--hold", "1000"];
        let bundle = asking(Bundle::with_probe()).args(&holder);
        let target = runtime.run(&bundle);
        wait_until_it_holds(&target);
        // The pod's annotations reach the debug container too, and 60 GiB more do not fit.
        let debugger = beside(&target, asking(Bundle::with_probe()));
        let container = runtime.run(&debugger);
        let report = Report::of(&container, &["11GiB", "8GiB"]);
        report.assert_size(60 * GIB);
        assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS], "{low_level:?}: 50 GiB of 60 are held");
        assert_eq!(holders(&runtime), [[bundle.id(), debugger.id()]], "{low_level:?}");

        // Nor does a request for whole GPUs get it more of them than the share has.
        let whole = in_pod(Bundle::with_probe(), "pod").annotation("gpushare.io/mode", "exclusive");
        let whole = beside(&target, whole);
        let report = Report::of(&runtime.run(&whole), &["11GiB", "8GiB"]);
        report.assert_size(60 * GIB);
        assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS], "{low_level:?}: it asked for whole GPUs");

        // Neither a sandbox's processes nor those of another pod give a share.
        let sandbox =
            in_pod(Bundle::small(), "pod").annotation("io.kubernetes.cri.container-type", "sandbox");
        let sandbox = runtime.run(&sandbox);
        let shared =
            beside(&sandbox, in_pod(Bundle::small(), "pod")).annotation("gpushare.io/memory", "1GiB");
        let foreign =
            beside(&target, in_pod(Bundle::small(), "other")).annotation("gpushare.io/memory", "1GiB");
        let others = [&shared, &foreign].map(|bundle| runtime.run(bundle));
        assert_eq!(holders(&runtime)[1..], [[shared.id()], [foreign.id()]], "{low_level:?}");
        drop(others);

        container.stop();
        assert_eq!(holders(&runtime), [[bundle.id()]], "{low_level:?}");
        target.stop();
        assert_eq!((holders(&runtime).len(), regions(&node)), (0, 0), "{low_level:?}");
    }
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn the_containers_of_a_pod_share_in_hook_only_mode_too() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let config = node.config().to_string_lossy().into_owned();
    let hooked = |bundle: Bundle| {
        ["createRuntime", "poststop"].iter().fold(bundle, |bundle, stage| {
            bundle.hook(stage, &artifacts::hook(), &[*stage, "--config", &config])
        })
    };
    let runtime = Runtime::through(RUNC.as_ref(), LowLevel::Runc, node.config());
    let holder = hooked(sharing(Bundle::with_probe(), "pod").args(&HOLDER));
    let first = runtime.run(&holder);
    wait_until_it_holds(&first);
    let other = hooked(sharing(Bundle::with_probe(), "pod"));
    let debugger = beside(&first, hooked(in_pod(Bundle::with_probe(), "pod")));
    let debugger = debugger.annotation("gpushare.io/memory", "80GiB");
    for bundle in [&other, &debugger] {
        let container = runtime.run(bundle);
        let report = Report::of(&container, &["3GiB", "1GiB"]);
        report.assert_size(8 * GIB);
        assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS]);
        assert_eq!(holders(&runtime), [[holder.id(), bundle.id()]]);
    }
    first.stop();
    assert_eq!((holders(&runtime).len(), regions(&node)), (0, 0));
}

#[test]
#[ignore = "needs root and runc: deletes the quota store under containers"]
fn a_deleted_store_is_not_made_anew_while_a_container_of_a_pod_lives() {
    if !met(NEEDS) {
        return;
    }
    for order in [[0, 1], [1, 0]] {
        let node = SimulatedNode::one_gpu();
        let runtime = runtime(LowLevel::Runc, &node);
        let bundles = [(); 2].map(|()| sharing(Bundle::small(), "pod"));
        let containers = [&bundles[0], &bundles[1]].map(|bundle| runtime.run(bundle));
        fs::remove_file(node.ledger()).expect("the store is there");
        let other = Bundle::small().annotation("gpushare.io/memory", "80GiB");
        for at in order {
            let line = runtime.create(&other).expect_err("a container lives").line();
            assert!(
                line.contains(&format!("{} is gone", node.ledger().display())),
                "{order:?}, before {at}: {line}"
            );
            containers[at].stop();
        }
        drop(runtime.run(&other));
        assert_eq!(regions(&node), 0, "{order:?}");
    }
}

#[test]
#[ignore = "needs root and runc: asks for containers"]
fn only_an_engine_says_which_pod_a_container_is_of() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = runtime(LowLevel::Runc, &node);
    let bundle = sharing(Bundle::small(), "pod");
    let _victim = runtime.run(&bundle);
    for (who, keys) in [
        ("nobody", vec![]),
        (
            "an image, by podman",
            vec![
                ("io.container.manager", "libpod"),
                ("io.kubernetes.cri.container-type", "container"),
                ("io.kubernetes.cri.sandbox-id", "pod"),
            ],
        ),
        (
            "a pod, by CRI-O",
            vec![
                ("io.kubernetes.cri-o.ContainerType", "container"),
                ("io.kubernetes.cri-o.SandboxID", "own"),
                ("io.kubernetes.cri.container-type", "container"),
                ("io.kubernetes.cri.sandbox-id", "pod"),
            ],
        ),
        (
            "a pod, by containerd",
            vec![
                ("io.kubernetes.cri.container-type", "container"),
                ("io.kubernetes.cri.sandbox-id", "own"),
                ("io.kubernetes.cri-o.ContainerType", "container"),
                ("io.kubernetes.cri-o.SandboxID", "pod"),
            ],
        ),
    ] {
        let keys = keys.into_iter().chain([("gpushare.io/scope", "pod"), ("gpushare.io/memory", "8GiB")]);
        let forged = keys.fold(Bundle::small(), |bundle, (key, value)| bundle.annotation(key, value));
        let line = runtime.create(&forged).expect_err(who).line();
        let two_engines = "io.kubernetes.cri-o.ContainerType and io.kubernetes.cri.container-type contradict";
        let word = if who.starts_with("a pod") { two_engines } else { "names no pod" };
        assert!(line.contains(word), "{who}: {line}");
    }
    assert_eq!(holders(&runtime), [[bundle.id()]]);
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_pods_containers_are_known_by_the_names_that_the_cluster_gave_them() {
    if !met(&[Need::Root, Need::Runc, Need::Busybox]) {
        return;
    }
    let node = SimulatedNode::create(1, MODEL, "80GiB");
    let runtime = runtime(LowLevel::Runc, &node);
    let named = |bundle: Bundle, pod: &str, container: &str| {
        in_pod(bundle.env("GPUSHARE_MEMORY", "1GiB"), pod)
            .annotation("io.kubernetes.cri.container-name", container)
            .annotation("io.kubernetes.cri.sandbox-name", pod)
            .annotation("io.kubernetes.cri.sandbox-namespace", "team")
            .annotation("io.kubernetes.cri.sandbox-uid", "0b5c1f6e")
    };
    let bundles = [
        named(Bundle::with_probe(), "web-0", "main"),
        named(Bundle::with_probe(), "web-0", "beside"),
        // crictl takes any name, and a terminal would act on this one.
        named(Bundle::with_probe(), "web-1", "\u{1b}[2Jmain"),
    ];
    let held = bundles.each_ref().map(|bundle| runtime.create(bundle).expect("there is room"));
    let ps = || cli(runtime.config(), &["ps"]).expect_success("gpushare ps").stdout;
    for told in ["team/web-0/main ", "team/web-0/beside ", held[2].id()] {
        assert!(ps().contains(told), "{told:?}: {}", ps());
    }
    assert!(!ps().contains("2Jmain"), "{}", ps());
    let leases = shares(runtime.config());
    let main = json!({"namespace": "team", "name": "web-0", "uid": "0b5c1f6e", "container": "main"});
    assert_eq!((&leases[0]["containers"][0]["pod"], &leases[0]["claim"]), (&main, &Value::Null));
    assert_eq!(leases[2]["containers"][0]["pod"], Value::Null);
    let release = |name: &str| cli(runtime.config(), &["release", "--force", name]);
    let told = release("team/web-0");
    assert!(
        !told.success()
            && told.stderr.contains("team/web-0/main (")
            && told.stderr.contains("team/web-0/beside ("),
        "{}",
        told.stderr
    );
    let told = release("team/web-0/main").expect_success("it is one").stdout;
    assert!(told.contains("gave back the share of team/web-0/main"), "{told}");
    assert!(!ps().contains("web-0/main"), "{}", ps());
}
