//! Tests that compute shares recover from kills of supervisors, programs and the meter, without false
//! reports.

use std::fs;
use std::time::{Duration, Instant};

use gpushare_attackers::pids_of;
use gpushare_tests::leases::shares;
use gpushare_tests::meter;
use gpushare_tests::runtime::{Container, LowLevel};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::compute::worker;
use super::node::Node;
use super::ready;

/// Returns the number of kills; `GPUSHARE_KILLS` makes the run longer.
fn kills() -> usize {
    std::env::var("GPUSHARE_KILLS").map_or(96, |number| number.parse().expect("a number"))
}

/// Number of kills between two checks.
const ROUND: usize = 24;

/// Lists the PIDs of the children of the container's first process.
pub fn programs(container: &Container) -> Vec<i32> {
    let first = container.pid();
    let children = fs::read_to_string(format!("/proc/{first}/task/{first}/children")).unwrap_or_default();
    children.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// Returns run time and lifetime of the first channel of these programs, in microseconds.
pub fn channels(node: &Node, pids: &[i32]) -> Option<[u64; 2]> {
    let figures = node.figures();
    let channel = |pid: &i32| {
        let prefix = format!("channel of {pid} ran ");
        let (ran, lived) = figures.lines().find_map(|line| line.strip_prefix(&prefix))?.split_once(" of ")?;
        Some([ran.parse::<u64>().ok()?, lived.parse::<u64>().ok()?])
    };
    pids.iter().find_map(channel)
}

/// Returns the per cent of half a second in which each container's channel ran; `None` if one of them has no
/// channel.
fn parts<const N: usize>(node: &Node, containers: [&Container; N]) -> Option<[u64; N]> {
    let all = containers.map(programs);
    let figures = || all.each_ref().map(|pids| channels(node, pids));
    let before = figures();
    std::thread::sleep(Duration::from_millis(500));
    let mut parts = [0; N];
    for ((part, before), after) in parts.iter_mut().zip(before).zip(figures()) {
        let (before, after) = (before?, after?);
        *part = (after[0] - before[0]) * 100 / (after[1] - before[1]).max(1);
    }
    Some(parts)
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn shares_survive_whoever_is_killed_and_nobody_is_named() {
    if !ready() {
        return;
    }
    let node = Node::new();
    let runtime = node.runtime_that_holds_compute(LowLevel::Runc);
    let script = "while :; do /bin/gpushare-tests-client work --seconds 60000; done";
    let bundles = ["30", "60"].map(|cores| worker(cores, "fixed", 0).args(&["/bin/sh", "-c", script]));
    let containers = bundles.each_ref().map(|bundle| runtime.run(bundle));
    let [one, two] = &containers;
    let mut meter = Some(meter::start(runtime.config()));
    let mut longest = Duration::ZERO;
    let mut killed = 0;
    while killed < kills() {
        // Keeper and worker restart each other, so only one of them is killed at a time.
        let role = ["worker", "keeper"][killed / ROUND % 2];
        for number in killed..killed + ROUND {
            let victims = match number % 4 {
                0 | 1 => pids_of(role, &node.node.root()).expect("/proc can be read"),
                2 => containers.iter().flat_map(programs).collect(),
                _ => {
                    meter.take().expect("it runs").kill();
                    meter = Some(meter::start(runtime.config()));
                    continue;
                }
            };
            if let Some(pid) = victims.get(number / 4 % victims.len().max(1)) {
                let _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
            }
            // Some pauses let the next process start its work.
            let pause = u64::try_from(number * 7 % 40).expect("a few") + 3;
            std::thread::sleep(Duration::from_millis(pause));
        }
        killed += ROUND;
        let begun = Instant::now();
        let mut seen = Vec::new();
        node.eventually("each has its share", || {
            seen.push(parts(&node, [one, two]));
            assert!(seen.len() < 60, "{seen:?}\n{}{}", one.stderr(), two.stderr());
            seen.last().is_some_and(|parts| {
                parts.is_some_and(|[one, two]| one.abs_diff(30) <= 4 && two.abs_diff(60) <= 4)
            })
        });
        longest = longest.max(begun.elapsed());
    }
    println!("{killed} killed; shares were right after {longest:.1?} at most");
    let both = node.supervisors().len();
    assert_eq!(both, 4, "a keeper and a worker each");
    for share in shares(runtime.config()) {
        assert_eq!(share["violations"].to_string(), "[]", "{share}");
    }
}
