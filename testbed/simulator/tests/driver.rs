//! What a simulated driver does for several processes that use it at one time.

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

const MIB: u64 = 1 << 20;

fn free(node: &Node) -> u64 {
    let mut client = node.run("context\nfree");
    let free = client.number("free");
    client.finish();
    free
}

#[test]
fn racing_processes_get_exactly_the_memory_that_there_is() {
    let node = Node::new(&["--memory", "10GiB", "--context", "64MiB"]);
    let script = format!("context\nsleep 300\n{}sleep 1500", "allocate 134217728\n".repeat(20));
    let mut clients: Vec<Running> = (0..8).map(|_| node.run(&script)).collect();
    let granted = clients
        .iter_mut()
        .map(|client| (0..20).filter(|_| client.number("allocate") == 0).count())
        .sum::<usize>();
    // The memory that eight contexts leave, in pieces of 128 MiB.
    assert_eq!(granted, (10240 - 8 * 64) / 128);
    clients.into_iter().for_each(Running::finish);
    assert_eq!(free(&node), (10240 - 64) * MIB);
}

#[test]
fn the_memory_of_a_killed_process_is_free_at_once() {
    let node = Node::new(&["--memory", "10GiB", "--context", "64MiB"]);
    for _ in 0..5 {
        let mut holder = node.run("context\nallocate 9663676416\nsleep 60000");
        assert_eq!(holder.number("allocate"), 0);
        let mut other = node.run("context\nallocate 8589934592");
        assert_eq!(other.number("allocate"), 2);
        other.finish();
        holder.kill();
        assert_eq!(free(&node), (10240 - 64) * MIB);
    }
}

#[test]
fn books_hold_when_processes_are_killed_while_they_allocate() {
    let node = Node::new(&["--memory", "1GiB", "--context", "64MiB"]);
    for round in 0..20 {
        let clients: Vec<Running> = (0..4).map(|_| node.run("context\npairs 1000000000")).collect();
        std::thread::sleep(Duration::from_millis(30 + 7 * round));
        clients.into_iter().for_each(Running::kill);
    }
    let begin = Instant::now();
    assert_eq!(free(&node), (1024 - 64) * MIB);
    assert!(begin.elapsed() < Duration::from_secs(2), "a killed process blocks nobody");
}

#[test]
fn kernels_of_all_processes_run_one_after_the_other() {
    let node = Node::new(&[]);
    let script = "context\nsleep 200\nclock\nlaunch busy_50ms 4\nsynchronize\nelapsed";
    let mut clients: Vec<Running> = (0..2).map(|_| node.run(script)).collect();
    let times: Vec<u64> = clients.iter_mut().map(|client| client.number("elapsed")).collect();
    let last = times.iter().max().copied().unwrap_or(0);
    assert!((350..1000).contains(&last), "eight kernels of 50 ms took {times:?}");
    clients.into_iter().for_each(Running::finish);
}

#[test]
fn what_a_killed_process_had_queued_does_not_run() {
    let node = Node::new(&[]);
    let mut hog = node.run("context\nlaunch busy_50ms 200\nelapsed\nsleep 60000");
    hog.number("elapsed");
    let mut other = node.run("context\nclock\nlaunch busy_1ms 1\nfree\nsynchronize\nelapsed");
    other.number("free");
    hog.kill();
    let elapsed = other.number("elapsed");
    assert!(elapsed < 1000, "a kernel of 1 ms waited {elapsed} ms for ten seconds of a dead process");
}

#[test]
fn a_kernel_of_readable_ptx_really_runs() {
    let node = Node::new(&[]);
    assert_eq!(node.run("context\nwrite").value("write"), "[42, 42, 42, 42]");
}

#[test]
fn ptx_that_was_linked_with_a_library_really_runs() {
    let node = Node::new(&[]);
    let mut client = node.run("context\nlink\nwrite");
    assert_eq!(client.value("link"), "[0, 0, 0, 0, 0, 0]");
    assert_eq!(client.value("write"), "[42, 42, 42, 42]");
}

#[test]
fn a_kernel_that_fails_says_how() {
    let node = Node::new(&[]);
    for (kernel, want) in [("trapped", 719), ("misaligned", 716)] {
        assert_eq!(node.run(&format!("context\nfault {kernel}")).number("fault"), want, "{kernel}");
    }
}

#[test]
fn a_forked_child_cannot_use_its_parents_driver() {
    let node = Node::new(&[]);
    assert_eq!(node.run("context\nfork").number("fork"), 3);
}

#[test]
fn a_gpu_whose_node_is_absent_does_not_exist() {
    let node = Node::new(&["--gpus", "2"]);
    assert_eq!(node.run("count").number("count"), 2);
    std::fs::remove_file(node.path("dev/nvidia0")).expect("the node was there");
    assert_eq!(node.run("count").number("count"), 1);
    std::fs::remove_file(node.path("dev/nvidia1")).expect("the node was there");
    assert_eq!(node.run("count").number("init"), 100);
}

#[test]
fn probe_tells_what_it_sees_and_is_refused() {
    let node = Node::new(&["--memory", "4GiB", "--context", "256MiB"]);
    let output =
        node.probe(&["--json", "--allocate", "3GiB", "--allocate", "1GiB"]).output().expect("it runs");
    assert!(output.status.success());
    let told: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one object");
    assert_eq!(told["memory_total"], (4096 + 16) * MIB, "with what no program can allocate");
    assert_eq!(told["memory_free"], (4096 - 256) * MIB);
    assert_eq!(told["nvml_used"], 256 * MIB);
    assert_eq!(told["allocate"][0]["result"], "CUDA_SUCCESS");
    assert_eq!(told["allocate"][1]["result"], "CUDA_ERROR_OUT_OF_MEMORY");
}
