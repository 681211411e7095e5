//! A container that takes all that the kernel gives it keeps nobody from being looked at, and has nobody
//! named but itself.

use std::fs;
use std::path::Path;
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use gpushare_tests::bundle::Bundle;
use gpushare_tests::command::eventually;
use gpushare_tests::leases::{cli, shares};
use gpushare_tests::meter;
use gpushare_tests::needs::met;
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::runtime::{LowLevel, Runtime};
use serde_json::{Value, json};

use crate::{NEEDS, SOON};

/// Variable by which each kind has a round of its own, as many as it says, in place of one round of all.
const ROUNDS: &str = "GPUSHARE_CAMPAIGN";
/// Variable with the number of rounds of the innocents' test.
const INNOCENTS: &str = "GPUSHARE_INNOCENTS";
const KINDS: [&str; 12] = [
    "processes",
    "pids",
    "threads",
    "descriptors",
    "locks",
    "leases",
    "mappings",
    "mounts",
    "watches",
    "keys",
    "sockets",
    "paths",
];
/// What a look and root's commands may take here. What they take is printed: on a machine at rest, less than
/// two seconds.
const PATIENCE: Duration = Duration::from_secs(15);
/// Bytes of the meter's memory.
const MOST_MEMORY: u64 = 64 << 20;

/// Who is named, with the kinds.
fn named(config: &Path) -> Vec<(String, Vec<String>)> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let kinds = |share: &Value| {
        share["violations"].as_array().into_iter().flatten().map(|one| text(&one["kind"])).collect()
    };
    shares(config).iter().map(|share| (text(&share["id"]), kinds(share))).collect()
}

/// The longest time between two writings of the meter's list, until the function that it returns is called.
fn longest_gap(state: &Path, is_over: impl Fn() -> bool) -> Duration {
    let file = state.join("violations.json");
    let written = || fs::metadata(&file).and_then(|found| found.modified()).ok();
    let (mut last, mut since, mut longest) = (written(), Instant::now(), Duration::ZERO);
    while !is_over() {
        sleep(Duration::from_millis(50));
        let now = written();
        if now != last {
            (last, since) = (now, Instant::now());
        }
        longest = longest.max(since.elapsed());
    }
    longest
}

fn resident(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("its memory");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
}

fn took(config: &Path, verb: &str) -> Duration {
    let begin = Instant::now();
    let _ = cli(config, &[verb]);
    begin.elapsed()
}

/// One round, in which a container exhausts these kinds. Prints what that cost others.
fn round(kinds: &[&str]) {
    const CLIENT: &str = "/bin/gpushare-tests-client";
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let config = runtime.config();
    let meter = meter::start(config);
    let share = |memory: &str, script: &str| {
        Bundle::with_client().env("GPUSHARE_MEMORY", memory).args(&["sh", "-c", script])
    };
    let hold = "exec /bin/gpushare-simulator probe --json --allocate 1GiB --hold 1000";
    let honest = share("2GiB", hold);
    let innocent = runtime.run(&honest);
    let all = kinds.iter().map(|kind| format!("{CLIENT} exhaust {kind} &")).collect::<Vec<_>>().join(" ");
    let plain = share("1GiB", &format!("{all} wait; exec busybox sleep 1000"))
        .set("/process/user", json!({"uid": 1000, "gid": 1000}));
    let glutton = runtime.run(&plain);
    // It takes what it gets for three seconds.
    sleep(Duration::from_secs(4));
    let told = glutton.stdout();
    let counts = told.lines().filter_map(|line| line.strip_prefix("holds ")?.parse::<u64>().ok());
    let held: u64 = counts.sum();
    let is_over = std::sync::atomic::AtomicBool::new(false);
    let ended = || is_over.load(std::sync::atomic::Ordering::SeqCst);
    let (delay, commands, gap) = thread::scope(|scope| {
        let gap = scope.spawn(|| longest_gap(&node.state(), ended));
        let cheat = share(
            "1GiB",
            &format!("LD_PRELOAD=/usr/lib/gpushare/driver/cuda {hold}").replace("1GiB", "3GiB"),
        );
        let cheating = runtime.run(&cheat);
        let begin = Instant::now();
        let tells = || {
            named(config)
                .iter()
                .any(|(id, kinds)| id == cheat.id() && kinds.iter().any(|kind| kind == "memory"))
        };
        assert!(eventually(SOON, tells), "{kinds:?}: {:?}\n{}", named(config), cheating.stderr());
        let delay = begin.elapsed();
        let commands = ["doctor", "ps"].map(|verb| took(config, verb));
        is_over.store(true, std::sync::atomic::Ordering::SeqCst);
        (delay, commands, gap.join().expect("it only looks"))
    });
    let memory = resident(meter.pid());
    println!(
        "{kinds:?}: {held} held, {} MiB of the meter, a look after {gap:?} at most, a cheat named after {delay:?}, doctor and ps in {commands:?}",
        memory >> 20
    );
    assert!(memory <= MOST_MEMORY, "{kinds:?}: {memory}");
    assert!(
        gap <= PATIENCE && commands.iter().all(|took| *took <= PATIENCE),
        "{kinds:?}: {gap:?}, {commands:?}"
    );
    let innocent = named(config).into_iter().find(|(id, _)| id == innocent.id());
    assert_eq!(innocent, Some((honest.id().to_owned(), vec![])), "{kinds:?}");
    let list: Value =
        serde_json::from_slice(&fs::read(node.state().join("violations.json")).expect("its list"))
            .expect("JSON");
    let rows = list["violations"].as_array().expect("rows");
    assert!(rows.len() <= 30 && rows.iter().all(|row| row["container"] != honest.id()), "{list}");
}

/// In each round one container exhausts one kind while a new and an old container do nothing wrong.
fn innocents(rounds: usize) {
    const CLIENT: &str = "/bin/gpushare-tests-client";
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let config = runtime.config();
    let meter = meter::start(config);
    let list = node.state().join("violations.json");
    let written = || fs::metadata(&list).and_then(|found| found.modified()).ok();
    let share =
        |script: &str| Bundle::with_client().env("GPUSHARE_MEMORY", "1GiB").args(&["sh", "-c", script]);
    let honest = "/bin/gpushare-simulator probe --json --allocate 256MiB --hold 1000";
    let stays = share(&format!("exec {honest}"));
    let _staying = runtime.run(&stays);
    let mut innocents = vec![stays.id().to_owned()];
    for (number, kind) in KINDS.iter().cycle().take(rounds).enumerate() {
        let exhausts = share(&format!("{CLIENT} exhaust {kind} & wait; exec busybox sleep 1000"))
            .set("/process/user", json!({"uid": 1000, "gid": 1000}));
        let comes = share(&format!("{honest} & while :; do busybox true; done"));
        let _both = [&exhausts, &comes].map(|bundle| runtime.run(bundle));
        innocents.push(comes.id().to_owned());
        for _ in 0..2 {
            let before = written();
            assert!(eventually(PATIENCE, || written() != before), "{kind}: no look");
            let others: Vec<_> = named(config).into_iter().filter(|(id, _)| id != exhausts.id()).collect();
            assert!(others.iter().all(|(_, kinds)| kinds.is_empty()), "round {number}, {kind}: {others:?}");
        }
    }
    let log = meter.log();
    let accused = innocents.iter().find(|id| log.contains(&format!("container={id} ")));
    assert_eq!(accused, None, "{log}");
    println!("{rounds} rounds, {} innocent containers, none named", innocents.len());
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn innocents_are_named_in_no_round() {
    if met(NEEDS) {
        innocents(std::env::var(INNOCENTS).map_or(2, |rounds| rounds.parse().expect("a number of rounds")));
    }
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_container_that_exhausts_all_that_it_may_hides_nobody_and_blames_nobody() {
    if !met(NEEDS) {
        return;
    }
    match std::env::var(ROUNDS) {
        Ok(rounds) => {
            let rounds: usize = rounds.parse().expect("a number of rounds");
            (0..rounds).for_each(|at| round(&KINDS[at % KINDS.len()..=at % KINDS.len()]));
        }
        Err(_) => round(&KINDS),
    }
}
