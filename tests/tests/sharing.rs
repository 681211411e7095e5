//! Two containers share one GPU. Each sees a GPU of its own size, and a third is told how much is free.

use gpushare_tests::bundle::Bundle;
use gpushare_tests::leases::{cli, leases};
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::{MODEL, SimulatedNode};
use gpushare_tests::probe::{GIB, OUT_OF_MEMORY, Report, SUCCESS};
use gpushare_tests::runtime::{LowLevel, Runtime};

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Crun, Need::Busybox];

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn two_containers_share_a_gpu_and_a_third_waits_until_one_ends() {
    if !met(NEEDS) {
        return;
    }
    for low_level in LowLevel::ALL {
        let node = SimulatedNode::one_gpu();
        let runtime = Runtime::wrapped(low_level, &node);
        let small = Bundle::with_probe().env("GPUSHARE_MEMORY", "30GiB");
        let large = Bundle::with_probe().annotation("gpushare.io/memory", "40GiB");
        let late = Bundle::with_probe().env("GPUSHARE_MEMORY", "20GiB");

        let first = runtime.run(&small);
        let second = runtime.run(&large);
        for (container, size, within, beyond) in
            [(&first, 30, "29GiB", "31GiB"), (&second, 40, "39GiB", "41GiB")]
        {
            let report = Report::of(container, &[beyond, within]);
            report.assert_size(size * GIB);
            assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS], "{low_level:?}, {size} GiB");
            assert_eq!((report.number("devices"), report.number("nvml_devices")), (1, 1));
        }

        let refusal = runtime.create(&late).expect_err("10 GiB are free, 20 GiB are asked");
        let line = refusal.line();
        for part in ["20 GiB", "10 GiB"] {
            assert!(line.contains(part), "{low_level:?}: {part:?} is not in: {line}");
        }
        assert_eq!(leases(runtime.config()).len(), 2, "{low_level:?}");

        first.stop();
        let third = runtime.run(&late);
        Report::of(&third, &[]).assert_size(20 * GIB);
        drop((second, third));
        assert_eq!(leases(runtime.config()), [], "{low_level:?}");
    }
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn the_limit_holds_for_all_processes_of_a_container_together() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let holder = ["/bin/gpushare-simulator", "probe", "--json", "--allocate", "5GiB", "--hold", "1000"];
    let bundle = Bundle::with_probe().env("GPUSHARE_MEMORY", "8GiB").args(&holder);
    let container = runtime.run(&bundle);
    let ready = gpushare_tests::command::eventually(std::time::Duration::from_secs(20), || {
        !container.stdout().is_empty()
    });
    assert!(ready, "{}", container.stderr());
    assert_eq!(Report::parse(&container.stdout()).allocations(), [SUCCESS]);

    let report = Report::of(&container, &["2GiB", "1GiB"]);
    assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS]);
    assert!(report.number("memory_free") < 2 * GIB, "{report:?}");
    assert!(report.number("nvml_used") >= 6 * GIB, "{report:?}");
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_share_may_be_a_percentage_a_model_or_several_gpus() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::create(2, MODEL, "80GiB");
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    for (requests, size, devices) in [
        (vec![("GPUSHARE_MEMORY", "25%")], 20, 1),
        (vec![("GPUSHARE_MEMORY", "4Gi"), ("GPUSHARE_COUNT", "2")], 4, 2),
        (vec![("GPUSHARE_MEMORY", "4096MiB"), ("GPUSHARE_DEVICES", "1")], 4, 1),
        (vec![("GPUSHARE_MEMORY", "1GiB"), ("GPUSHARE_MODEL", "NVIDIA H100*")], 1, 1),
        (vec![("NVIDIA_VISIBLE_DEVICES", "1"), ("GPUSHARE_MEMORY", "2GiB")], 2, 1),
    ] {
        let bundle =
            requests.iter().fold(Bundle::with_probe(), |bundle, (name, value)| bundle.env(name, value));
        let container = runtime.run(&bundle);
        let report = Report::of(&container, &[]);
        report.assert_size(size * GIB);
        assert_eq!(report.number("devices"), devices, "{requests:?}");
    }
}

#[test]
#[ignore = "needs root and runc: asks about a bundle"]
fn a_plan_is_printed_and_nothing_is_changed() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let bundle = Bundle::with_probe().env("GPUSHARE_MEMORY", "4GiB").env("GPUSHARE_PRIORITY", "7");
    let before = bundle.write();
    let folder = bundle.path().to_string_lossy().into_owned();
    let text = cli(runtime.config(), &["plan", "--bundle", &folder]).expect_success("gpushare plan");
    for part in
        ["asked     memory 4 GiB\n", "granted   priority 7 and compute policy fixed\n", "/dev/nvidia0"]
    {
        assert!(text.stdout.contains(part), "{part:?}: {}", text.stdout);
    }
    let json = cli(runtime.config(), &["plan", "--bundle", &folder, "--json"])
        .expect_success("gpushare plan --json");
    serde_json::from_str::<serde_json::Value>(&json.stdout).expect("gpushare plan --json prints JSON");
    assert_eq!(bundle.config_bytes(), before);
    assert_eq!(leases(runtime.config()), []);
    let files = std::fs::read_dir(bundle.path()).expect("the bundle is there").count();
    assert_eq!(files, 2, "config.json and rootfs");
}
