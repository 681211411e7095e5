//! The node's meter: it tells containers' GPU time apart, goes on after a restart, is not needed by
//! containers that run, and sees what happens outside of the libraries.

mod campaign;
mod cheating;
mod faults;

use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use gpushare_tests::bundle::Bundle;
use gpushare_tests::command::eventually;
use gpushare_tests::leases::cli;
use gpushare_tests::meter::{self, listed};
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::probe::{GIB, Report, SUCCESS};
use gpushare_tests::regions;
use gpushare_tests::runtime::{Container, LowLevel, Runtime};

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Busybox];
/// The longest time that a loaded machine may take for what is due within a second.
const SOON: Duration = Duration::from_secs(60);

/// Launches kernels of one millisecond, each followed by a pause. Returns how long they ran, in nanoseconds.
fn work(container: &Container<'_>, pause: &str, seconds: &str) -> u64 {
    let launch = ["/bin/gpushare-tests-client", "launch", "1ms", "--every", "1"];
    let outcome = container.exec(&[&launch[..], &["--pause", pause, "--seconds", seconds]].concat());
    let outcome = outcome.expect_success("the client in the container");
    let count = outcome.stdout.lines().find_map(|line| line.strip_prefix("kernels ")?.parse::<u64>().ok());
    count.unwrap_or_else(|| panic!("no count from the client: {outcome:?}")) * 1_000_000
}

/// The GPU time of the container's processes that the meter measured, in nanoseconds.
fn measured(config: &Path, id: &str) -> u64 {
    listed(config, id, 0)["gpu_nanoseconds"].as_u64().unwrap_or(0)
}

/// Asserts that the two agree. The ideal driver tells whole percents of windows of 1/6 s, so half a point each way
/// is allowed, and the windows at both ends.
fn assert_near(measured: u64, worked: u64, wall: Duration, what: &str) {
    let wall = u64::try_from(wall.as_nanos()).expect("a test takes less than centuries");
    let error = measured.abs_diff(worked);
    assert!(error <= wall / 100 + 20_000_000, "{what}: {measured} ns measured of {worked} ns");
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn the_gpu_time_of_each_container_is_measured_over_a_restart_of_the_meter() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::ideal();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let share = |cores| Bundle::with_client().env("GPUSHARE_MEMORY", "4GiB").env("GPUSHARE_CORES", cores);
    let (light, heavy, idle) = (share("30"), share("50"), share("10"));
    let meter = meter::start(runtime.config());
    let containers = [&light, &heavy, &idle].map(|bundle| runtime.run(bundle));
    let start = std::time::Instant::now();
    let (light_time, heavy_time) = thread::scope(|scope| {
        let light = scope.spawn(|| work(&containers[0], "9", "4"));
        let heavy = scope.spawn(|| work(&containers[1], "3", "4"));
        thread::sleep(Duration::from_secs(2));
        meter.kill();
        let _meter = meter::start(runtime.config());
        let both = (light.join().expect("it ended"), heavy.join().expect("it ended"));
        // The last window ends after the work; it is asked for and written a quarter of a second later each.
        thread::sleep(Duration::from_millis(1500));
        both
    });
    let config = runtime.config();
    assert_near(measured(config, light.id()), light_time, start.elapsed(), "light");
    assert_near(measured(config, heavy.id()), heavy_time, start.elapsed(), "heavy");
    assert_eq!(measured(config, idle.id()), 0, "it did nothing");
    assert!(light_time > 100_000_000 && heavy_time > light_time, "the work was too little to tell anything");
    // Containers go on without the meter.
    assert_eq!(Report::of(&containers[0], &["1GiB"]).allocations(), [SUCCESS]);
    assert!(work(&containers[0], "9", "0.5") > 0);
}

#[test]
#[ignore = "needs root and runc: runs a container"]
fn a_node_has_one_meter_and_the_doctor_misses_it_where_it_is_needed() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    // The doctor goes on to the meter, whatever else this machine lacks.
    let doctor = || {
        let text = cli(runtime.config(), &["doctor"]).stdout;
        let line = text.lines().find(|line| line.split_whitespace().nth(1) == Some("meter"));
        line.unwrap_or_else(|| panic!("no meter in {text}")).to_owned()
    };
    assert!(doctor().starts_with("ok"), "{}", doctor());
    let bundle = Bundle::small().env("GPUSHARE_MEMORY", "4GiB").env("GPUSHARE_CORES", "30");
    let _container = runtime.run(&bundle);
    assert!(doctor().starts_with("warning"), "{}", doctor());
    let meter = meter::start(runtime.config());
    assert!(doctor().starts_with("ok"), "{}", doctor());
    let second = cli(runtime.config(), &["meter"]);
    assert!(!second.success() && second.stderr.contains("another gpushare meter"), "{second:?}");
    meter.kill();
    assert!(doctor().starts_with("warning"), "{}", doctor());
}

#[test]
#[ignore = "needs root and runc: runs a container"]
fn memory_that_passes_by_the_libraries_is_seen() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    // The driver's own library, loaded first, replaces ours in that process.
    let driver = "LD_PRELOAD=/usr/lib/gpushare/driver/cuda";
    let holder = ["/bin/gpushare-simulator", "probe", "--json", "--allocate", "6GiB", "--hold", "1000"];
    let honest = Bundle::with_probe().env("GPUSHARE_MEMORY", "8GiB").args(&holder);
    let bypass = Bundle::with_probe()
        .env("GPUSHARE_MEMORY", "4GiB")
        .args(&[&["/bin/env", driver][..], &holder].concat());
    let meter = meter::start(runtime.config());
    let containers = [&honest, &bypass].map(|bundle| runtime.run(bundle));
    let config = runtime.config();
    let unbooked = |bundle: &Bundle| listed(config, bundle.id(), 0)["unbooked_bytes"].as_u64().unwrap_or(0);
    let seen = eventually(SOON, || unbooked(&bypass) >= 6 * GIB);
    assert!(seen, "{}\n{}", listed(config, bypass.id(), 0), containers[1].stdout());
    assert!(listed(config, bypass.id(), 0)["drift"].as_i64() >= Some(6 << 30));
    assert!(meter.log().contains(bypass.id()), "{}", meter.log());
    assert!(cli(config, &["doctor"]).stdout.contains(bypass.id()));

    let driver_bytes = listed(config, honest.id(), 0)["driver_bytes"].as_u64();
    assert!(driver_bytes >= Some(6 * GIB), "{}", listed(config, honest.id(), 0));
    assert_eq!(unbooked(&honest), 0);
    assert!(!meter.log().contains(honest.id()), "{}", meter.log());
    assert!(containers.iter().all(|container| container.status().as_deref() == Some("running")));
}

/// The grants in the bytes of a limits file: of each line all but the last 16 bytes, which are the host's figures.
fn grants_of(limits: &[u8]) -> Option<Vec<&[u8]>> {
    limits.get(64..1088).map(|lines| lines.chunks(64).map(|line| &line[..48]).collect())
}

#[test]
#[ignore = "needs root and runc: runs a container"]
fn files_that_a_container_spoilt_are_mended_or_told() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let bundle = Bundle::with_probe().env("GPUSHARE_MEMORY", "4GiB").env("GPUSHARE_CORES", "30");
    let meter = meter::start(runtime.config());
    let container = runtime.run(&bundle);
    Report::of(&container, &[]).assert_size(4 * GIB);

    // A container with CAP_SYS_ADMIN on the host could do this to its own file.
    let lease = regions::ids(&node.state()).pop().expect("there is a region");
    let limits = node.state().join("limits").join(lease);
    let good = fs::read(&limits).expect("the limits can be read");
    let mut more = good.clone();
    more[64 + 16..64 + 24].copy_from_slice(&(70 * GIB).to_ne_bytes());
    for (what, bytes) in [("more", &more[..]), ("nothing", &[]), ("noise", &[0xa5; 500])] {
        fs::write(&limits, bytes).expect("the limits can be written");
        let mended =
            eventually(SOON, || fs::read(&limits).is_ok_and(|now| grants_of(&now) == grants_of(&good)));
        assert!(mended, "{what}: {}", meter.log());
        Report::of(&container, &[]).assert_size(4 * GIB);
    }
    assert!(meter.log().contains("rewritten"), "{}", meter.log());

    fs::OpenOptions::new()
        .write(true)
        .open(format!("/proc/{}/root{}", container.pid(), regions::USAGE))
        .and_then(|f| f.set_len(0))
        .expect("cut");
    assert!(eventually(SOON, || meter.log().contains("damaged")), "{}", meter.log());
    assert!(cli(runtime.config(), &["ps"]).stdout.contains("damaged"));
    meter.kill();
}
