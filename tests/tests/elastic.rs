//! Shares whose memory grows above what they were promised, while the GPU has it.

use std::sync::atomic::Ordering;
use std::time::Duration;

use gpushare_simulator::session::Session;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::command::eventually;
use gpushare_tests::leases::{cli, leases};
use gpushare_tests::meter;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::{MODEL, SimulatedNode};
use gpushare_tests::probe::{GIB, OUT_OF_MEMORY, Report, SUCCESS};
use gpushare_tests::runtime::{LowLevel, Runtime};

const SOON: Duration = Duration::from_secs(20);
const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Busybox];

fn growing() -> Bundle {
    Bundle::with_probe().env("GPUSHARE_MEMORY", "4GiB").env("GPUSHARE_MEMORY_LIMIT", "12GiB")
}

/// What stands in the store, in bytes, oldest lease first.
fn granted(runtime: &Runtime) -> Vec<u64> {
    leases(runtime.config()).iter().map(|lease| lease.memory[0]).collect()
}

#[test]
#[ignore = "needs root and runc: runs containers and the meter"]
fn a_share_grows_into_what_nobody_was_promised_and_shrinks_when_it_frees() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::with(1, MODEL, "17GiB", &[]);
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let config = runtime.config();
    let alone = growing();
    let container = runtime.run(&alone);
    let report = Report::of(&container, &["5GiB", "3GiB"]);
    assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS], "without the meter");
    drop(container);

    let meter = meter::start(config);
    let hold = "gpushare-simulator probe --allocate 8GiB --hold 1000; echo freed; exec sleep 1000";
    let holder = growing().args(&["/bin/busybox", "sh", "-c", hold]);
    let first = runtime.run(&holder);
    assert!(eventually(SOON, || first.stdout().contains("8589934592 CUDA_SUCCESS")), "{}", first.stdout());
    let [held] = granted(&runtime)[..] else { panic!("one lease") };
    assert!((8 * GIB..=9 * GIB).contains(&held), "{held}");
    let report = Report::of(&first, &[]);
    report.assert_size(12 * GIB);
    let shown = cli(config, &["ps"]).expect_success("ps").stdout;
    assert!(shown.contains("(4 GiB to 12 GiB)"), "{shown}");

    // What is in use is taken from nobody, and what is promised is kept free.
    let large = Bundle::with_probe().env("GPUSHARE_MEMORY", "9GiB");
    let line = runtime.create(&large).expect_err("8 GiB are in use").line();
    assert!(line.contains("9 GiB requested"), "{line}");
    let second = Bundle::with_probe().env("GPUSHARE_MEMORY", "7GiB");
    let second = runtime.run(&second);
    let report = Report::of(&first, &["1GiB"]);
    assert_eq!(report.allocations(), [OUT_OF_MEMORY], "the card has none left");
    let free = || Report::of(&first, &[]).number("memory_free");
    assert!(eventually(SOON, || free() < GIB), "it is told so: {}", free());
    let told = cli(config, &["update", holder.id(), "--memory", "5GiB"]);
    assert!(told.stderr.contains("grows and shrinks by itself"), "{}", told.stderr);
    assert_eq!(Report::of(&second, &["6GiB"]).allocations(), [SUCCESS], "its promise holds");

    let killed = first.exec(&["/bin/busybox", "killall", "gpushare-simulator"]);
    assert!(eventually(SOON, || first.stdout().contains("freed")), "{killed:?}");
    assert!(eventually(SOON, || granted(&runtime)[0] == 4 * GIB), "{:?}", granted(&runtime));
    drop(second);
    let rest = Bundle::with_probe().env("GPUSHARE_MEMORY", "12GiB");
    drop(runtime.run(&rest));
    drop((first, meter));
    assert_eq!(leases(config), []);
}

/// Bytes that living processes hold of the card. The simulated driver notices late that a process has ended,
/// where a real one frees its memory before that. Nobody takes memory while it is summed, or what one frees
/// and another takes would count twice.
fn bytes_of_living(card: &Session) -> u64 {
    card.sweep();
    let gpu = &card.state().gpus()[0];
    let _nobody_takes = card.lock(&gpu.memory_lock);
    gpu.bytes.iter().map(|bytes| bytes.load(Ordering::Relaxed)).sum()
}

#[test]
#[ignore = "needs root and runc: runs containers and the meter"]
fn while_shares_grow_and_shrink_the_store_never_has_less_than_they_hold_nor_more_than_the_card() {
    if !met(NEEDS) {
        return;
    }
    // The card itself has room for more than the leases may have, and would not hide a mistake.
    let node = SimulatedNode::with(1, MODEL, "16GiB", &["--context", "0B"]);
    let settings = format!("{}\n[quota]\nreserve = \"8GiB\"\n", LowLevel::Runc.settings());
    let runtime = Runtime::with_config(LowLevel::Runc, &node.config_with("reserve", &settings));
    let meter = meter::start(runtime.config());
    // Each fills what it can get and frees it, over and over; together they wish for twice the card.
    let program = "i=0; while [ $i -lt 4 ]; do gpushare-tests-client fill linear --processes 2 --rounds 2 --largest 256; \
                   i=$((i + 1)); sleep 0.7; done; echo done; exec sleep 1000";
    let bundles = [1, 2].map(|_| {
        Bundle::with_client().env("GPUSHARE_MEMORY", "2GiB").env("GPUSHARE_MEMORY_LIMIT", "8GiB").args(&[
            "/bin/busybox",
            "sh",
            "-c",
            program,
        ])
    });
    let containers = bundles.each_ref().map(|bundle| runtime.run(bundle));
    let card = Session::open(&node.shared()).expect("the node's state can be mapped");
    let (mut most, mut grown) = (0, 0);
    let done = || containers.iter().all(|container| container.stdout().contains("done"));
    assert!(
        eventually(Duration::from_secs(60), || {
            let held = bytes_of_living(&card);
            let granted: u64 = granted(&runtime).iter().sum();
            most = most.max(held);
            grown = grown.max(granted);
            assert!((4 * GIB..=8 * GIB).contains(&granted), "{granted}");
            done()
        }),
        "{:?}",
        containers.each_ref().map(|container| (container.stdout(), container.stderr()))
    );
    assert!(most <= 8 * GIB && grown > 6 * GIB, "{most} held at most, {grown} granted");
    let filled: Vec<u64> = containers
        .iter()
        .flat_map(|container| container.stdout().lines().map(str::to_owned).collect::<Vec<_>>())
        .filter_map(|line| line.strip_prefix("held ")?.parse().ok())
        .collect();
    assert_eq!(filled.len(), 8 * 2, "{filled:?}");
    drop((containers, meter));
    assert_eq!(leases(runtime.config()), []);
}
