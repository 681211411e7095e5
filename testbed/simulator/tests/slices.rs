//! A GPU on which processes take turns.

mod support;

use std::time::{Duration, Instant};

use support::{Node, Running, client};

/// The body of the client processes; see [`support::Node::run`].
#[test]
#[ignore = "not a test: the client that the tests start"]
fn client() {
    if let Ok(script) = std::env::var("SCRIPT") {
        client::run(&script);
    }
}

fn slicing(slice: &str) -> Node {
    Node::new(&["--device", "slices", "--slice", slice])
}

/// A process with more work than any test takes time for.
fn hog(node: &Node) -> Running {
    let mut hog = node.run("context\nlaunch busy_50ms 1000\nelapsed\nsleep 60000");
    hog.number("elapsed");
    hog
}

/// `between` tells how long 20 kernels of 10 ms took. One more kernel runs before, so that the GPU never
/// waits for the client.
const TWENTY: &str = "context\nlaunch busy_10ms 1\nevent a\nlaunch busy_10ms 20\nevent b\nbetween a b";

#[test]
fn two_processes_get_half_each_and_event_times_include_the_others_turns() {
    for slice in ["0.5ms", "2ms", "5ms"] {
        let node = slicing(slice);
        assert_eq!(node.run(TWENTY).number("between"), 200_000, "alone, by {slice}");
        let _hog = hog(&node);
        let beside = node.run(TWENTY).number("between");
        assert!((395_000..=405_000).contains(&beside), "beside another, by {slice}: {beside} us");
        let _third = hog(&node);
        let beside = node.run(TWENTY).number("between");
        assert!((590_000..=610_000).contains(&beside), "beside two others, by {slice}: {beside} us");
    }
}

#[test]
fn in_the_order_of_submission_event_times_include_nothing_of_the_others() {
    let node = Node::new(&[]);
    let mut first = node.run("context\nlaunch busy_50ms 10\nelapsed\nsleep 60000");
    first.number("elapsed");
    let begin = Instant::now();
    assert_eq!(node.run(TWENTY).number("between"), 200_000);
    assert!(begin.elapsed() > Duration::from_millis(600), "it waited for all that was queued before");
}

#[test]
fn a_short_kernel_waits_for_a_turn_and_not_for_a_kernel() {
    let node = slicing("2ms");
    let _hog = hog(&node);
    let script = format!("context\nclock\n{}elapsed", "launch busy_1ms 1\nsynchronize\n".repeat(20));
    let elapsed = node.run(&script).number("elapsed");
    assert!((55..200).contains(&elapsed), "20 kernels of 1 ms, each after a turn of 2 ms: {elapsed} ms");
}

#[test]
fn a_process_that_pauses_leaves_its_turns_to_the_others() {
    let node = slicing("2ms");
    let mut pausing = node.run("context\nlaunch busy_10ms 10\nelapsed\nsleep 60000");
    pausing.number("elapsed");
    // At least 90 ms of the other process's 100 ms come between, if it started at once.
    let between = node.run(TWENTY).number("between");
    assert!((250_000..=305_000).contains(&between), "{between} us");
}

#[test]
fn more_events_than_the_gpu_keeps_are_all_stamped() {
    let node = slicing("2ms");
    let mut script = String::from("context\nlaunch busy_10ms 1\nevent first\n");
    for number in 0..700 {
        script += &format!("launch busy_1ms 1\nevent {number}\n");
    }
    let mut client = node.run(&format!("{script}between first 0\nbetween 99 199\nbetween first 699"));
    for want in [1_000, 100_000, 700_000] {
        let between = client.number("between");
        // Each stamp is a nanosecond of work.
        assert!((want..=want + 1).contains(&between), "{between} for {want} us");
    }
}

#[test]
fn what_a_killed_process_had_queued_gets_no_more_turns() {
    let node = slicing("2ms");
    let hog = hog(&node);
    let mut other = node.run(&format!("context\nlaunch busy_1ms 1\nfree\nsleep 300\nfree\n{TWENTY}"));
    other.number("free");
    hog.kill();
    other.number("free");
    assert_eq!(other.number("between"), 200_000);
}

#[test]
fn a_slot_that_nobody_swept_starts_empty() {
    for node in [slicing("2ms"), Node::new(&[])] {
        // No other process is there to notice the death, so the next process takes the slot as it was left.
        for _ in 0..3 {
            hog(&node).kill();
            let begin = Instant::now();
            assert_eq!(node.run(TWENTY).number("between"), 200_000);
            assert!(begin.elapsed() < Duration::from_secs(2), "50 s of the dead are gone");
        }
    }
}

#[test]
fn kills_at_any_moment_leave_the_gpu_usable() {
    let node = slicing("0.5ms");
    for round in 0..40 {
        let clients: Vec<Running> = (0..4).map(|_| node.run("context\nkeep plain 60000")).collect();
        std::thread::sleep(Duration::from_millis(20 + 7 * (round % 11)));
        clients.into_iter().for_each(Running::kill);
    }
    let begin = Instant::now();
    assert_eq!(node.run(TWENTY).number("between"), 200_000);
    assert!(begin.elapsed() < Duration::from_secs(2), "a killed process blocks nobody");
}
