//! Containers that hold a GPU in others' way: idle ones, those that hold it for long, and those of lower
//! priority.

use std::time::Duration;

use gpushare_tests::bundle::Bundle;
use gpushare_tests::command::eventually;
use gpushare_tests::leases::{cli, leases};
use gpushare_tests::meter;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::runtime::{LowLevel, Runtime};

const SOON: Duration = Duration::from_secs(30);
const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Busybox];

fn runtime(node: &SimulatedNode, name: &str, rules: &str) -> Runtime {
    let settings = format!("{}\n[rules]\n{rules}\n", LowLevel::Runc.settings());
    Runtime::with_config(LowLevel::Runc, &node.config_with(name, &settings))
}

fn held(runtime: &Runtime) -> Vec<String> {
    leases(runtime.config()).into_iter().map(|lease| lease.id).collect()
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_container_that_finds_no_room_ends_the_fewest_of_lower_priority_and_no_other() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let share = |memory: &str, priority: &str| {
        Bundle::small().env("GPUSHARE_MEMORY", memory).env("GPUSHARE_PRIORITY", priority)
    };
    // One says that it was asked to end; the others do not hear it, and are killed.
    let hears = "trap 'echo asked; exit 0' TERM; while :; do sleep 0.1; done";
    let [lowest, low] = [share("20GiB", "1").args(&["/bin/busybox", "sh", "-c", hears]), share("30GiB", "2")];
    let (middle, high) = (share("20GiB", "5"), share("35GiB", "9"));

    let off = runtime(&node, "off", "preemption = \"off\"");
    let lower = runtime(&node, "lower", "preemption = \"lower\"\ngrace = \"1s\"");
    let running = [lower.run(&lowest), lower.run(&low), lower.run(&middle)];
    let line = off.create(&high).expect_err("it is off as shipped").line();
    assert!(line.contains("35 GiB requested, 10 GiB free"), "{line}");
    for (bundle, why) in
        [(share("11GiB", "1"), "nobody is lower"), (share("61GiB", "5"), "that would not be enough")]
    {
        let line = lower.create(&bundle).expect_err(why).line();
        assert!(line.contains("GiB requested, 10 GiB free"), "{why}: {line}");
        assert_eq!(held(&lower), [lowest.id(), low.id(), middle.id()], "{why}");
    }

    // 30 + 10 GiB do, so the lowest stays, though it is looked at first.
    let winner = lower.run(&high);
    assert_eq!(held(&lower), [lowest.id(), middle.id(), high.id()]);
    assert!(running[1].wait_stopped(SOON), "{:?}", running[1].status());
    let second = share("20GiB", "9");
    let second_runs = lower.run(&second);
    assert_eq!(held(&lower), [middle.id(), high.id(), second.id()]);
    assert!(eventually(SOON, || running[0].stdout().contains("asked")), "{}", running[0].stdout());
    drop((winner, second_runs, running));
    let notes = cli(lower.config(), &["logs", "--filter", "event=ended"]).expect_success("logs").stdout;
    for ended in [low.id(), lowest.id()] {
        let is_its = |line: &&str| line.contains(&format!("{ended}: rules.preemption"));
        assert_eq!(notes.lines().filter(is_its).count(), 1, "{notes}");
    }
    assert_eq!(held(&lower), Vec::<String>::new());
}

#[test]
#[ignore = "needs root and runc: runs containers and the meter"]
fn who_uses_no_gpu_time_is_ended_and_who_does_goes_on() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = runtime(&node, "idle", "idle = \"3s\"\non_idle = \"end\"\ngrace = \"1s\"\nhold = \"1s\"");
    let meter = meter::start(runtime.config());
    let program = |what: &[&str]| {
        Bundle::with_client()
            .env("GPUSHARE_MEMORY", "4GiB")
            .args(&[&["/bin/gpushare-tests-client"], what].concat())
    };
    let works = program(&["launch", "1ms", "--every", "1", "--seconds", "3600"]);
    let sleeps = Bundle::with_client().env("GPUSHARE_MEMORY", "4GiB");
    let (working, idle) = (runtime.run(&works), runtime.run(&sleeps));
    assert!(idle.wait_stopped(SOON), "{}", meter.log());
    drop(idle);
    // A little longer than the rule's time again: who works is not idle later, either.
    let start = std::time::Instant::now();
    while start.elapsed() < Duration::from_secs(5) {
        assert_eq!(held(&runtime), [works.id()], "{}", meter.log());
        std::thread::sleep(Duration::from_millis(200));
    }
    assert_eq!(working.status().as_deref(), Some("running"));
    let log = meter.log();
    for part in ["has used no GPU time for long: it is ended", "has held its GPU for long: told alone"] {
        assert!(log.contains(part), "{part}: {log}");
    }
    let notes = cli(runtime.config(), &["logs", "--filter", "event=ended"]).expect_success("logs").stdout;
    assert!(notes.contains(&format!("{}: rules.idle", sleeps.id())), "{notes}");
    drop((working, meter));
    let shown = cli(runtime.config(), &["ps"]).expect_success("ps").stdout;
    assert_eq!(held(&runtime), Vec::<String>::new(), "{shown}");
}
