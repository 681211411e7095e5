//! Faults that a client or a test asks for, and how long kernels take.

mod support;

use std::fs;
use std::process::Command;

use support::{Node, client, program};

/// The body of the client processes; see [`support::Node::run`].
#[test]
#[ignore = "not a test: the client that the tests start"]
fn client() {
    if let Ok(script) = std::env::var("SCRIPT") {
        client::run(&script);
    }
}

const MIB: u64 = 1 << 20;

#[test]
fn the_call_that_is_named_fails_and_has_no_effect() {
    let node = Node::new(&["--memory", "1GiB", "--context", "64MiB"]);
    let script = format!("context\n{}free", "allocate 134217728\n".repeat(4));
    let mut client = node.run_with(&script, &[("GPUSHARE_SIMULATOR_FAIL", "cuMemAlloc_v2:3:999")]);
    let told: Vec<u64> = (0..4).map(|_| client.number("allocate")).collect();
    assert_eq!(told, [0, 0, 999, 0]);
    assert_eq!(client.number("free"), (1024 - 64 - 3 * 128) * MIB);
}

#[test]
fn a_process_dies_before_or_after_the_effect_of_a_call() {
    for fault in ["cuMemAlloc_v2:2:kill", "cuMemAlloc_v2:2:kill-after", "cuLaunchKernel:1:kill-after"] {
        let node = Node::new(&["--memory", "1GiB", "--context", "64MiB"]);
        let script = "context\nallocate 134217728\nlaunch busy_50ms 1\nallocate 134217728\nsleep 60000";
        let mut client = node.run_with(script, &[("GPUSHARE_SIMULATOR_FAIL", fault)]);
        assert_eq!(client.number("allocate"), 0);
        client.killed();
        let mut other = node.run("context\nfree");
        assert_eq!(other.number("free"), (1024 - 64) * MIB, "after {fault}");
    }
}

#[test]
fn a_fault_that_cannot_be_read_is_no_quiet_success() {
    let node = Node::new(&[]);
    let mut probe = node.probe(&[]);
    let output = probe.env("GPUSHARE_SIMULATOR_FAIL", "cuInit").output().expect("it runs");
    assert!(!output.status.success());
    let output = node.probe(&[]).env("GPUSHARE_SIMULATOR_KERNEL_SHAPE", "circle").output().expect("it runs");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(told.contains("no shape") && told.contains("CUDA_ERROR_INVALID_VALUE"), "{told}");
}

fn change(node: &Node, how: &str, gpu: &str) -> String {
    let output = Command::new(program()).arg(how).arg(node.path("")).arg(gpu).output().expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

#[test]
fn a_replaced_card_has_another_uuid_everywhere() {
    let node = Node::new(&[]);
    let information = node.path("proc/driver/nvidia/gpus/0000:07:00.0/information");
    let before = fs::read_to_string(&information).expect("readable");
    let uuid = change(&node, "replace", "0");
    let after = fs::read_to_string(&information).expect("readable");
    assert!(after.contains(&format!("GPU UUID: \t {uuid}\n")) && before != after, "{after}");
    let output = node.probe(&["--json"]).output().expect("it runs");
    assert!(String::from_utf8_lossy(&output.stdout).contains(&uuid));
}

#[test]
fn an_excluded_card_is_listed_and_cannot_be_used() {
    let node = Node::new(&["--gpus", "2"]);
    change(&node, "exclude", "0");
    let read = |address: &str| {
        let path = node.path("proc/driver/nvidia/gpus").join(address).join("information");
        fs::read_to_string(path).expect("readable")
    };
    assert!(read("0000:07:00.0").contains("GPU Excluded:\t Yes\n"));
    assert!(read("0000:0f:00.0").contains("GPU Excluded:\t No\n"));
    assert_eq!(node.run("count").number("count"), 1);
}

/// Microseconds that `work` takes on the GPU. One kernel runs before, so that the GPU never waits for the
/// client.
fn time(node: &Node, work: &str, variables: &[(&str, &str)]) -> u64 {
    let script = format!("context\nlaunch busy_10ms 2\nevent a\n{work}\nevent b\nbetween a b");
    node.run_with(&script, variables).number("between")
}

#[test]
fn a_kernel_takes_the_time_of_its_name_or_of_its_grid_and_a_graph_that_of_its_nodes() {
    let round = [("GPUSHARE_SIMULATOR_KERNEL_NS", "1000000")];
    for device in ["fifo", "slices"] {
        // The GPU has 132 multiprocessors with 8 blocks each.
        let node = Node::new(&["--device", device, "--cores", "132"]);
        for (work, want) in [
            ("launch busy_1ms 3", 3_000),
            ("grid 4096\nlaunch busy_1ms 3", 3_000),
            ("launch plain 1", 1_000),
            ("grid 1056\nlaunch plain 1", 1_000),
            ("grid 1057\nlaunch plain 1", 2_000),
            ("grid 4096\nlaunch plain 1", 4_000),
            ("graph busy_1ms 5", 10_000),
            ("grid 4096\ngraph plain 2", 16_000),
        ] {
            assert_eq!(time(&node, work, &round), want, "{work:?} on a GPU with {device}");
        }
    }
}

#[test]
fn the_time_that_a_name_promises_changes_by_the_shape() {
    let node = Node::new(&[]);
    let shaped = |shape| time(&node, "launch busy_1ms 40", &[("GPUSHARE_SIMULATOR_KERNEL_SHAPE", shape)]);
    assert_eq!(shaped("steps:2.5:1s"), 100_000);
    let jitter = shaped("jitter:0.5");
    assert!(jitter != 40_000 && (30_000..50_000).contains(&jitter), "{jitter}");
    // All kernels are launched within a small part of one wave, at nearly the same height of it.
    let sine = shaped("sine:0.9:1000s");
    assert!((4_000..=76_000).contains(&sine) && sine != 40_000, "{sine}");
}
