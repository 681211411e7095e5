//! A share is changed while its container runs. The container sees it within a second, what does not fit on
//! the node is refused, and nothing is taken from what is held.

use std::fs;
use std::process::Command;
use std::time::Duration;

use gpushare_tests::artifacts;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::command::{self, eventually};
use gpushare_tests::leases::{cli, leases_of, shares, sweep};
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::{MODEL, SimulatedNode};
use gpushare_tests::probe::{GIB, OUT_OF_MEMORY, Report, SUCCESS};
use gpushare_tests::regions;
use gpushare_tests::runtime::{LowLevel, Runtime};
use serde_json::Value;

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Busybox];

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_share_grows_and_shrinks_under_a_running_container() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let bundle = Bundle::with_probe().env("GPUSHARE_MEMORY", "4GiB");
    let container = runtime.run(&bundle);
    Report::of(&container, &[]).assert_size(4 * GIB);

    for size in [6, 2] {
        let memory = format!("{size}GiB");
        let done = cli(runtime.config(), &["update", bundle.id(), "--memory", &memory]);
        let done = done.expect_success("gpushare update");
        assert!(done.stdout.contains(&format!("{size} GiB")), "{}", done.stdout);
        // The next question finds the new size: the file behind the container's mount changed in place.
        let (within, beyond) = (format!("{}MiB", (size - 1) * 1024), format!("{size}GiB"));
        let report = Report::of(&container, &[&beyond, &within]);
        report.assert_size(size * GIB);
        assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS], "{size} GiB");
        assert_eq!(leases_of(runtime.config(), bundle.id())[0].memory, [size * GIB]);
    }
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_share_smaller_than_what_is_held_takes_nothing_and_gives_nothing_more() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let holder = ["/bin/gpushare-simulator", "probe", "--json", "--allocate", "6GiB", "--hold", "1000"];
    let bundle = Bundle::with_probe().env("GPUSHARE_MEMORY", "8GiB").args(&holder);
    let container = runtime.run(&bundle);
    assert!(eventually(Duration::from_secs(20), || !container.stdout().is_empty()), "{}", container.stderr());

    let outcome = cli(runtime.config(), &["update", bundle.id(), "--memory", "3GiB", "--json"])
        .expect_success("gpushare update");
    let told: Value = serde_json::from_str(&outcome.stdout).expect("gpushare update --json prints JSON");
    assert_eq!(
        (&told["gpus"][0]["over"], &told["gpus"][0]["memory_bytes"]),
        (&true.into(), &(3 * GIB).into())
    );
    let text = cli(runtime.config(), &["update", bundle.id(), "--memory", "3GiB"]).stdout;
    assert!(text.contains("nothing is taken away"), "{text}");

    assert_eq!(container.status().as_deref(), Some("running"), "nobody is killed");
    // Another process does not even get the memory of a context.
    assert_ne!(Report::of(&container, &["1MiB"]).allocations(), [SUCCESS]);
    // Others can have at once what the container gave up, although it still holds it.
    let neighbour = Bundle::small().env("GPUSHARE_MEMORY", "77GiB");
    let _neighbour = runtime.run(&neighbour);
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn what_a_killed_process_held_is_shown_no_more() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let holder = "/bin/gpushare-simulator probe --json --allocate 6GiB --hold 1000 >/dev/null & echo $!; wait; sleep 1000";
    let bundle = Bundle::with_probe().env("GPUSHARE_MEMORY", "8GiB").args(&["sh", "-c", holder]);
    let container = runtime.run(&bundle);
    let used =
        || shares(runtime.config())[0]["gpus"][0]["used_bytes"].as_u64().expect("the container has books");
    assert!(eventually(Duration::from_secs(20), || used() >= 6 * GIB), "{}", container.stderr());
    let _ = container.exec(&["kill", "-9", container.stdout().trim()]).expect_success("kill");
    assert!(eventually(Duration::from_secs(20), || used() == 0), "{} bytes of nobody", used());
    let told = cli(runtime.config(), &["update", bundle.id(), "--memory", "3GiB"]);
    assert!(!told.expect_success("gpushare update").stdout.contains("it holds"));
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_share_does_not_grow_beyond_the_node() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::create(2, MODEL, "80GiB");
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let first = Bundle::with_probe().env("GPUSHARE_MEMORY", "30GiB").env("GPUSHARE_CORES", "50");
    let second = Bundle::small().env("GPUSHARE_MEMORY", "40GiB").env("GPUSHARE_CORES", "30");
    let (container, _other) = (runtime.run(&first), runtime.run(&second));
    for (change, parts) in [
        (["--memory", "41GiB"], ["41 GiB", "40 GiB free on GPU 0"]),
        (["--memory", "81GiB"], ["81 GiB", "80 GiB"]),
        (["--cores", "71"], ["71%", "70% free on GPU 0"]),
        (["--device", "1"], ["holds no share", "GPU 1"]),
    ] {
        let change =
            if change[0] == "--device" { vec!["--device", "1", "--cores", "10"] } else { change.to_vec() };
        let outcome = cli(runtime.config(), &[&["update", first.id()], &change[..]].concat());
        assert!(!outcome.success(), "{change:?}: {outcome:?}");
        assert_eq!(outcome.stderr.lines().count(), 1, "{change:?}: {outcome:?}");
        for part in parts {
            assert!(outcome.stderr.contains(part), "{change:?}: {part:?} is not in: {}", outcome.stderr);
        }
    }
    Report::of(&container, &[]).assert_size(30 * GIB);
    assert_eq!(leases_of(runtime.config(), first.id())[0].memory, [30 * GIB]);
    let both = ["update", first.id(), "--memory", "40GiB", "--cores", "70", "--device", "0"];
    let _ = cli(runtime.config(), &both).expect_success("gpushare update");
    Report::of(&container, &[]).assert_size(40 * GIB);
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn only_a_living_share_can_be_changed() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let update = |id: &str| cli(runtime.config(), &["update", id, "--memory", "1GiB"]);
    assert!(update("nobody").stderr.contains("no container"), "{:?}", update("nobody"));
    let nothing = cli(runtime.config(), &["update", "nobody"]);
    assert_eq!(nothing.status.code(), Some(2), "a call that changes nothing is wrong usage: {nothing:?}");

    let whole = Bundle::small().env("GPUSHARE_MODE", "exclusive");
    let container = runtime.run(&whole);
    assert!(update(whole.id()).stderr.contains("whole GPUs"), "{:?}", update(whole.id()));
    drop(container);

    let dead = Bundle::small().env("GPUSHARE_MEMORY", "4GiB");
    let container = runtime.run(&dead);
    container.kill_init();
    // The kernel takes a moment to empty the cgroup of a killed container.
    let gone = eventually(Duration::from_secs(5), || update(dead.id()).stderr.contains("is gone"));
    assert!(gone, "{:?}", update(dead.id()));
}

/// The memory that each container's limits file grants on its first GPU, in the order in which the containers
/// were made.
fn granted(node: &SimulatedNode) -> Vec<u64> {
    let memory = |id: String| {
        let bytes = fs::read(node.state().join(format!("limits/{id}"))).expect("the limits can be read");
        u64::from_ne_bytes(bytes[80..88].try_into().expect("eight bytes"))
    };
    regions::ids(&node.state()).into_iter().map(memory).collect()
}

#[test]
#[ignore = "needs root and runc: kills updates"]
fn an_update_killed_at_any_point_never_leaves_a_container_more_than_the_store_says() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let bundles = [(); 2].map(|()| Bundle::small().env("GPUSHARE_MEMORY", "20GiB"));
    let _containers = [runtime.run(&bundles[0]), runtime.run(&bundles[1])];
    let mut changed = 0;
    for round in 0..80_u64 {
        // Each container in turn wants three quarters of the GPU, and only one can have them.
        let size = if round % 4 < 2 { "60GiB" } else { "20GiB" };
        let bundle = &bundles[usize::try_from(round % 2).expect("0 or 1")];
        let mut update = Command::new(artifacts::cli());
        update.args(["update", bundle.id(), "--memory", size]).env("GPUSHARE_CONFIG", runtime.config());
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let mut update = command::spawn(&mut update, folder.path());
        std::thread::sleep(Duration::from_micros(round * 150));
        // Some have ended by themselves before.
        let _ = update.kill();
        changed += u64::from(update.wait().expect("a child can be waited for").success());

        let stored = bundles.each_ref().map(|bundle| leases_of(runtime.config(), bundle.id())[0].memory[0]);
        assert!(stored.iter().sum::<u64>() <= 80 * GIB, "round {round}: {stored:?}");
        for (granted, stored) in granted(&node).into_iter().zip(stored) {
            assert!(granted <= stored, "round {round}: {granted} bytes granted of {stored}");
        }
        sweep(runtime.config());
        assert_eq!(granted(&node), stored, "round {round}: the sweep mends what was cut off");
    }
    assert!(changed > 0 && changed < 80, "{changed} updates came through: the kills tell nothing");
}
