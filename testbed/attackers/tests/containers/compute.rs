//! Tests containers whose compute share a supervisor enforces, through the shipped wrapper, on a simulated
//! card that obeys RM.

use std::time::{Duration, Instant};

use gpushare_tests::bundle::Bundle;
use gpushare_tests::leases::{cli, shares};
use gpushare_tests::meter;
use gpushare_tests::runtime::{Container, LowLevel, Runtime};

use crate::node::Node;
use crate::ready;
use crate::survival::{channels, programs};

/// Kernels of 900 us that the card completes per second when nothing else runs.
const ALONE: f64 = 1111.0;

/// Creates a container with a part of compute that does fixed work for this many seconds.
pub fn worker(cores: &str, policy: &str, seconds: u16) -> Bundle {
    let work = format!("/bin/gpushare-tests-client work --seconds {seconds}");
    let bundle = Bundle::with_client().args(&["/bin/sh", "-c", &work]);
    let bundle = bundle.env("GPUSHARE_MEMORY", "8GiB").env("GPUSHARE_CORES", cores);
    bundle.env("GPUSHARE_COMPUTE_POLICY", policy)
}

/// Returns the work of a container in per cent of a card of its own.
fn done(node: &Node, container: &Container) -> f64 {
    let rate = || {
        let said = container.stdout();
        said.lines().find_map(|line| line.strip_prefix("rate ")?.parse::<f64>().ok())
    };
    node.eventually("the work is done", || rate().is_some());
    rate().unwrap_or(0.0) * 100.0 / ALONE
}

/// Runs these containers at the same time until each gets its expected share within this many points. Other
/// tests may keep the machine from waking threads in time.
fn expect(node: &Node, runtime: &Runtime, wanted: &[(&str, &str, f64)], within: f64) {
    let mut seen = Vec::new();
    for _ in 0..4 {
        let bundles: Vec<Bundle> = wanted.iter().map(|(cores, policy, _)| worker(cores, policy, 5)).collect();
        let all: Vec<Container> = bundles.iter().map(|bundle| runtime.run(bundle)).collect();
        let parts: Vec<f64> = all.iter().map(|container| done(node, container)).collect();
        if parts.iter().zip(wanted).all(|(part, (.., want))| (part - want).abs() <= within) {
            return;
        }
        seen.push(parts);
    }
    panic!("{wanted:?}, and not {seen:.1?}\\n{}", node.figures());
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn shares_of_compute_hold_beside_neighbours() {
    if !ready() {
        return;
    }
    let node = Node::new();
    let runtime = node.runtime_that_holds_compute(LowLevel::Runc);
    expect(&node, &runtime, &[("30", "fixed", 30.0)], 3.0);
    expect(&node, &runtime, &[("30", "fixed", 29.5), ("70", "fixed", 69.5)], 4.0);
    // Libraries do not enforce burst shares, so these show that the supervisor does.
    expect(&node, &runtime, &[("30", "burst", 28.5), ("70", "burst", 67.0)], 5.0);
    expect(&node, &runtime, &[("40", "fixed", 39.5), ("30", "burst", 58.0)], 5.0);
}

/// Returns the microseconds for which all channels have run.
fn ran(node: &Node) -> u64 {
    let figures = node.figures();
    let of_channel = figures.lines().filter_map(|line| line.strip_prefix("channel of ")?.split(' ').nth(2));
    of_channel.filter_map(|ran| ran.parse::<u64>().ok()).sum()
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_container_stands_still_while_it_is_paused() {
    if !ready() {
        return;
    }
    let node = Node::new();
    let runtime = node.runtime_that_holds_compute(LowLevel::Runc);
    let bundles = ["50", "40"].map(|cores| worker(cores, if cores == "50" { "fixed" } else { "burst" }, 120));
    let container = runtime.run(&bundles[0]);
    node.eventually("it works", || ran(&node) > 0);
    let say = |word: &str| {
        let said = cli(runtime.config(), &[word, container.id()]).expect_success(word).stdout;
        (said, shares(runtime.config())[0]["state"].as_str().unwrap_or_default().to_owned())
    };
    let (said, state) = say("pause");
    assert!(said.contains("is paused: its programs stand still") && state == "paused", "{said}{state}");
    let has_stopped = || {
        let before = ran(&node);
        std::thread::sleep(std::time::Duration::from_millis(300));
        ran(&node) == before
    };
    node.eventually("it stands still", has_stopped);
    assert!(say("pause").0.contains("was paused already"));
    // Meanwhile the others get its window.
    let other = runtime.run(&bundles[1]);
    let begun = std::time::Instant::now();
    let mut least = 0;
    while least < 85 {
        assert!(begun.elapsed() < std::time::Duration::from_secs(60), "{least} per cent");
        let before = ran(&node);
        std::thread::sleep(std::time::Duration::from_secs(1));
        least = (ran(&node) - before) / 10_000;
    }
    drop(other);
    let (said, state) = say("resume");
    assert!(said.contains("runs again") && state == "active", "{said}{state}");
    node.eventually("it runs", || !has_stopped());
    // The supervisor cannot stop a program whose share a library enforces.
    let library = node.runtime(LowLevel::Runc, "off");
    let bundle = worker("10", "fixed", 60);
    let held = library.run(&bundle);
    let told = cli(library.config(), &["pause", held.id()]);
    assert!(!told.success() && told.stderr.contains("no supervisor holds its compute"), "{told:?}");
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn an_update_of_compute_comes_into_force() {
    if !ready() {
        return;
    }
    let node = Node::new();
    let runtime = node.runtime_that_holds_compute(LowLevel::Runc);
    let bundle = worker("30", "fixed", 120);
    let container = runtime.run(&bundle);
    node.eventually("it works", || ran(&node) > 0);
    for (words, share) in
        [(["--cores", "60"], 60), (["--cores", "20"], 20), (["--compute-policy", "burst"], 100)]
    {
        let change = [&["update"][..], &words, &[container.id()]].concat();
        let _ = cli(runtime.config(), &change).expect_success("update");
        let begun = Instant::now();
        // Per cent in each of the following 200 ms.
        let mut parts = Vec::new();
        node.eventually("it has its new share", || {
            let (before, from) = (ran(&node), Instant::now());
            std::thread::sleep(Duration::from_millis(200));
            parts.push(u128::from(ran(&node) - before) * 100 / from.elapsed().as_micros());
            parts.last().is_some_and(|part| part.abs_diff(share) <= 4)
        });
        println!("{words:?}: {parts:?} within {:?}", begun.elapsed());
    }
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn it_is_said_who_holds_compute() {
    if !ready() {
        return;
    }
    let node = Node::new();
    let runtime = node.runtime_that_holds_compute(LowLevel::Crun);
    let bundle = worker("30", "fixed", 60);
    let container = runtime.run(&bundle);
    node.eventually("it works", || node.figures().contains("channel of"));
    let lease = &shares(runtime.config())[0];
    assert_eq!(lease["compute_held_by"], "supervisor", "{lease}");
    drop(container);
}

/// Returns the meter's figure of a container's GPU time: nanoseconds, and its source.
fn told(runtime: &Runtime, id: &str) -> (u64, String) {
    let part = meter::listed(runtime.config(), id, 0);
    let by = part["gpu_time_by"].as_str().unwrap_or_default().to_owned();
    (part["gpu_nanoseconds"].as_u64().unwrap_or(0), by)
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn gpu_time_is_that_of_the_cards_own_record() {
    if !ready() {
        return;
    }
    let node = Node::new();
    let runtime = node.runtime_that_holds_compute(LowLevel::Runc);
    let _meter = meter::start(runtime.config());
    let wanted = [("20", "fixed"), ("50", "fixed"), ("20", "burst")];
    let bundles = wanted.map(|(cores, policy)| worker(cores, policy, 300));
    let containers = bundles.each_ref().map(|bundle| runtime.run(bundle));
    let times = || bundles.each_ref().map(|bundle| told(&runtime, bundle.id()));
    let all_work = || times().iter().all(|(time, by)| *time > 1_000_000_000 && by == "record");
    node.eventually("all work, and the record says so", all_work);
    let pids = containers.each_ref().map(|container| [programs(container), vec![container.pid()]].concat());
    let windows = || [0, 1].map(|at| channels(&node, &pids[at]).map_or(0, |[ran, _]| ran));
    // On a busy machine supervisors wake up late. Compare the record where the card's own figures show the two
    // windows; the third container has the rest.
    let (mut seen, limit) = (Vec::new(), Instant::now() + Duration::from_secs(90));
    while Instant::now() < limit {
        let (before, ran_before, begun) = (times(), windows(), Instant::now());
        std::thread::sleep(Duration::from_secs(3));
        let (after, ran, wall) = (times(), windows(), begun.elapsed().as_nanos());
        let percent = |nanos: u64| u128::from(nanos) as f64 * 100.0 / wall as f64;
        let held = [0, 1].map(|at| percent((ran[at] - ran_before[at]) * 1000));
        let parts = [0, 1, 2].map(|at| percent(after[at].0 - before[at].0));
        seen.push((held, parts));
        if held.iter().zip([20.0, 50.0]).all(|(part, want)| (part - want).abs() <= 1.5) {
            let wanted = [19.5, 49.5, 28.0];
            let is_right = parts.iter().zip(wanted).all(|(part, want)| (part - want).abs() <= 3.0);
            assert!(is_right, "{seen:.1?}");
            return;
        }
    }
    panic!("the schedule was never kept: {seen:.1?}");
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_share_is_divided_among_those_of_its_processes_that_work() {
    if !ready() {
        return;
    }
    let node = Node::new();
    let runtime = node.runtime_that_holds_compute(LowLevel::Runc);
    let idle = "/bin/gpushare-tests-client launch 1ms --every 1 --pause 200000 --seconds 200 &";
    let work = "exec /bin/gpushare-tests-client work --seconds 200";
    let of = |cores: &str, script: &str| worker(cores, "burst", 0).args(&["/bin/sh", "-c", script]);
    let bundles = [of("30", &format!("{idle} {idle} {work}")), of("70", work)];
    let _containers = bundles.each_ref().map(|bundle| runtime.run(bundle));
    let first = || {
        let parts = || bundles.each_ref().map(|bundle| told(&runtime, bundle.id()).0);
        let before = parts();
        std::thread::sleep(Duration::from_secs(2));
        let after = parts();
        let [one, two] = [0, 1].map(|at| after[at] - before[at]);
        one as f64 * 100.0 / (one + two).max(1) as f64
    };
    let mut seen = Vec::new();
    let _meter = meter::start(runtime.config());
    // While all three count, it gets 13 per cent.
    node.eventually("the one that works has the share's part", || {
        seen.push(first());
        seen.last().is_some_and(|part| (26.0..=33.0).contains(part))
    });
    println!("{seen:.1?}");
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn one_container_of_a_card_is_answered_before_others() {
    if !ready() {
        return;
    }
    let node = Node::new();
    let runtime = node.runtime_that_holds_compute(LowLevel::Runc);
    let _meter = meter::start(runtime.config());
    let bundles = [worker("60", "burst", 300), worker("30", "latency", 300), worker("5", "latency", 300)];
    let _busy = runtime.run(&bundles[0]);
    let before = runtime.run(&bundles[1]);
    let listed = shares(runtime.config());
    let of = |id: &str| listed.iter().find(|lease| lease["id"] == id).expect("it is listed").clone();
    assert_eq!(of(before.id())["compute_policy"], "latency", "{listed:?}");
    let refused = format!("{:?}", runtime.create(&bundles[2]).err());
    assert!(refused.contains("there can be one on a GPU"), "{refused}");
    // It works all the time, so it gets its share and no more, as the record shows.
    let parts = || {
        let times = || [0, 1].map(|at| told(&runtime, bundles[at].id()).0);
        let earlier = times();
        std::thread::sleep(Duration::from_secs(2));
        let later = times();
        let [one, two] = [0, 1].map(|at| later[at] - earlier[at]);
        two as f64 * 100.0 / (one + two).max(1) as f64
    };
    let mut seen = Vec::new();
    node.eventually("it falls back to its share", || {
        seen.push(parts());
        seen.last().is_some_and(|part| (29.0..=38.0).contains(part))
    });
    println!("{seen:.1?}");
    // The output says so if no supervisor enforces compute.
    let library = node.runtime(LowLevel::Runc, "off");
    let bundle = worker("10", "latency", 60);
    bundle.write();
    let plan = cli(library.config(), &["plan", "--bundle", &bundle.path().to_string_lossy()]);
    assert!(plan.stdout.contains("keeps no part of the GPU"), "{plan:?}");
}
