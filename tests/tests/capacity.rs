//! What a GPU is said to have can be given out and used up, contexts included.

use std::time::Duration;

use gpushare_tests::bundle::Bundle;
use gpushare_tests::command::eventually;
use gpushare_tests::leases::cli;
use gpushare_tests::meter::{self, listed};
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::{MODEL, SimulatedNode};
use gpushare_tests::probe::GIB;
use gpushare_tests::runtime::{LowLevel, Runtime};

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Busybox];
const SOON: Duration = Duration::from_secs(60);
/// What of a full share no allocation takes: they have 2 MiB at least, and a figure of contexts is rounded up.
const LEFT: u64 = 16 << 20;

#[test]
#[ignore = "needs root and runc: runs containers"]
fn shares_of_a_whole_gpu_can_all_be_filled_at_the_same_time() {
    if !met(NEEDS) {
        return;
    }
    for profile in ["h200-580", "ideal"] {
        for (count, memory) in [(2, "50%"), (4, "25%"), (1, "100%")] {
            let node = SimulatedNode::with(1, MODEL, "16GiB", &["--profile", profile]);
            let runtime = Runtime::wrapped(LowLevel::Runc, &node);
            let _meter = meter::start(runtime.config());
            let fill = ["/bin/gpushare-tests-client", "fill", "linear", "--hold", "1000000"];
            let bundle = |_| Bundle::with_client().env("GPUSHARE_MEMORY", memory).args(&fill);
            let bundles: Vec<Bundle> = (0..count).map(bundle).collect();
            let containers: Vec<_> = bundles.iter().map(|bundle| runtime.run(bundle)).collect();
            let what = format!("{count} of {memory}, {profile}");
            for container in &containers {
                assert!(
                    eventually(SOON, || container.stdout().contains("held")),
                    "{what}: {}",
                    container.stderr()
                );
            }
            let size = 16 * GIB / count;
            for bundle in &bundles {
                let counted =
                    || listed(runtime.config(), bundle.id(), 0)["driver_bytes"].as_u64().unwrap_or(0);
                let is_full = eventually(SOON, || (size - LEFT..=size).contains(&counted()));
                assert!(is_full, "{what}: the driver counts {} of {size}", counted());
            }
        }
    }
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_gpu_has_what_is_left_of_nvmls_total_whichever_version_tells_it() {
    if !met(NEEDS) {
        return;
    }
    // The first version does not tell what is reserved, so nothing may be.
    for (driver, profile) in [("580.65.06", "h200-580"), ("535.309.01", "ideal"), ("470.256.02", "ideal")] {
        let node = SimulatedNode::with(1, MODEL, "16GiB", &["--driver", driver, "--profile", profile]);
        let devices = cli(node.config(), &["devices", "--json"]).expect_success("devices").stdout;
        let devices: serde_json::Value = serde_json::from_str(&devices).expect("JSON");
        assert_eq!(devices["gpus"][0]["memory_bytes"], 16 * GIB, "driver {driver}: {devices}");
    }
}
