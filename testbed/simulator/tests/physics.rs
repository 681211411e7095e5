//! The physics of a real GPU, by the profile `h200-580`: the figures are those that were measured on one.

mod support;

use support::{Node, Running, client};

const MIB: u64 = 1 << 20;

/// The body of the client processes; see [`support::Node::run`].
#[test]
#[ignore = "not a test: the client that the tests start"]
fn client() {
    if let Ok(script) = std::env::var("SCRIPT") {
        client::run(&script);
    }
}

fn real(arguments: &[&str]) -> Node {
    Node::new(&[&["--profile", "h200-580"][..], arguments].concat())
}

/// `between` tells how long 20 kernels of 10 ms took, in microseconds.
const TWENTY: &str = "context\nlaunch busy_10ms 1\nevent a\nlaunch busy_10ms 20\nevent b\nbetween a b";

#[test]
fn busy_contexts_get_equal_slices_less_what_the_switches_cost() {
    let node = real(&[]);
    assert_eq!(node.run(TWENTY).number("between"), 200_000, "alone, nothing is switched");
    let mut others: Vec<Running> = Vec::new();
    // 47.1 % of two and 31.3 % of three were measured.
    for (count, percent) in [(1, 47.06), (2, 31.37)] {
        let mut other = node.run("context\nlaunch busy_50ms 1000\nelapsed\nsleep 60000");
        other.number("elapsed");
        others.push(other);
        let between = node.run(TWENTY).number("between") as f64;
        let got = 200_000.0 * 100.0 / between;
        assert!((got - percent).abs() < 1.0, "{got} % beside {count}");
    }
}

#[test]
fn a_context_takes_what_the_card_took_and_grows_with_its_first_modules() {
    let node = real(&["--memory", "4GiB"]);
    // The client's context loads a module; `link` loads another.
    let mut client = node.run("context\nfree\nlink\nfree\nlink\nfree");
    let taken = [(); 3].map(|()| 4096 - client.number("free") / MIB);
    assert_eq!(taken, [610, 676, 676]);
}

#[test]
fn nvml_has_more_memory_than_cuda_and_cuda_more_than_can_be_allocated() {
    for (profile, reserved) in [("h200-580", 616), ("ideal", 0)] {
        let node = Node::new(&["--profile", profile, "--memory", "4GiB", "--context", "0B"]);
        let output = node.probe(&["--json", "--allocate", "4095MiB", "--allocate", "2MiB"]).output();
        let answers = String::from_utf8(output.expect("the program runs").stdout).expect("text");
        for want in [
            format!("\"device_total\":{}", 4112 * MIB),
            format!("\"nvml_total\":{}", (4112 + reserved) * MIB),
            format!("\"bytes\":{},\"result\":\"CUDA_SUCCESS\"", 4095 * MIB),
            format!("\"bytes\":{},\"result\":\"CUDA_ERROR_OUT_OF_MEMORY\"", 2 * MIB),
        ] {
            assert!(answers.replace(' ', "").contains(&want), "{profile}: no {want} in {answers}");
        }
    }
}

#[test]
fn a_value_of_its_own_takes_the_place_of_the_profiles() {
    let node = real(&["--memory", "4GiB", "--context", "300MiB", "--device", "fifo"]);
    let mut client = node.run("context\nfree");
    assert_eq!(4096 - client.number("free") / MIB, 300, "a context of a given size does not grow");
    let mut first = node.run("context\nlaunch busy_50ms 4\nelapsed\nsleep 60000");
    first.number("elapsed");
    assert_eq!(node.run(TWENTY).number("between"), 200_000, "in the order of submission");
}
