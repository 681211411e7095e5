//! The node that is looked at: three GPUs, and twelve containers of which each shows something else.

use gpushare_tests::bundle::Bundle;
use gpushare_tests::cluster::kubelet::in_pod;
use gpushare_tests::node::{MODEL, SimulatedNode};
use gpushare_tests::runtime::{Container, Runtime};

/// The node, without containers.
pub fn simulated() -> SimulatedNode {
    SimulatedNode::with(3, MODEL, "80GiB", &["--profile", "ideal", "--context", "520MiB"])
}

/// The containers in the order in which they are started.
pub fn bundles() -> Vec<Bundle> {
    let pod = |pod: &str, memory: &str, cores: &str| {
        in_pod(Bundle::with_client(), pod, "team")
            .annotation("gpushare.io/memory", memory)
            .annotation("gpushare.io/cores", cores)
            .annotation("gpushare.io/devices", "0")
    };
    let shop = |bundle: Bundle| bundle.annotation("nerdctl/compose-project", "shop");
    let long = "a-name-that-says-all-about-its-container-and-does-not-end-before-1";
    vec![
        computing(pod("trainer-0", "20GiB", "30")),
        holding(pod("trainer-1", "8GiB", "10"), &["7400MiB", "1GiB"]),
        shop(named("web", "0", "4GiB")),
        shop(holding(named("api", "0", "8GiB").env("GPUSHARE_CORES", "20"), &["5GiB"])),
        holding(named("cache", "0", "16GiB"), &["15600MiB"]),
        named("both", "0,1", "10GiB"),
        computing(named("render", "1", "16GiB").env("GPUSHARE_CORES", "20")),
        holding(named("notebook", "1", "12GiB"), &["2GiB"]),
        holding(named(long, "1", "6GiB"), &["1GiB"]),
        named(&long.replace("-1", "-2"), "1", "6GiB"),
        bypassing(named("miner", "1", "4GiB")),
        holding(called("whole").env("GPUSHARE_DEVICES", "2").env("GPUSHARE_MODE", "exclusive"), &["60GiB"]),
    ]
}

/// Starts them, one after the other, and lets one be refused.
pub fn run<'t>(runtime: &'t Runtime, bundles: &'t [Bundle]) -> Vec<Container<'t>> {
    let containers = bundles.iter().map(|bundle| runtime.run(bundle)).collect();
    let _ = runtime.create(&named("large", "0", "900GiB")).expect_err("no GPU has as much");
    containers
}

fn called(name: &str) -> Bundle {
    Bundle::with_client().annotation("nerdctl/name", name)
}

fn named(name: &str, devices: &str, memory: &str) -> Bundle {
    called(name).env("GPUSHARE_DEVICES", devices).env("GPUSHARE_MEMORY", memory)
}

/// It computes without a pause. The kernels take time and nothing of the processor.
fn computing(bundle: Bundle) -> Bundle {
    let launch = ["/bin/gpushare-tests-client", "launch", "1ms", "--every", "1", "--seconds", "1000"];
    bundle.env("GPUSHARE_SIMULATOR_RUN", "0").args(&launch)
}

const PROBE: [&str; 4] = ["/bin/gpushare-simulator", "probe", "--hold", "1000"];

/// It holds these sizes, so far as it gets them.
fn holding(bundle: Bundle, sizes: &[&str]) -> Bundle {
    let sizes = sizes.iter().flat_map(|size| ["--allocate", *size]);
    bundle.args(&PROBE.into_iter().chain(sizes).collect::<Vec<_>>())
}

/// It uses the driver's own library in place of ours, and more than its share.
fn bypassing(bundle: Bundle) -> Bundle {
    let driver = ["/bin/env", "LD_PRELOAD=/usr/lib/gpushare/driver/cuda"];
    bundle.args(&[&driver[..], &PROBE, &["--allocate", "6GiB"]].concat())
}
