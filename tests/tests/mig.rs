//! MIG instances: whole ones, and shares of them.

use std::path::Path;
use std::process::Command;

use gpushare_tests::artifacts;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::command::{Outcome, eventually, run};
use gpushare_tests::leases::{cli, leases};
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::{MODEL, SimulatedNode};
use gpushare_tests::probe::{GIB, OUT_OF_MEMORY, Report, SUCCESS};
use gpushare_tests::runtime::{LowLevel, Runtime};
use serde_json::{Value, json};

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Crun, Need::Busybox];

/// A node whose GPU 0 is divided and whose GPU 1 is whole.
fn divided(more: &[&str]) -> SimulatedNode {
    let mig = ["--mig", "0=3g.40gb,1g.10gb,1g.10gb"];
    SimulatedNode::with(2, MODEL, "80GiB", &[&mig, more].concat())
}

fn devices(config: &Path) -> Value {
    let told = cli(config, &["devices", "--json"]).expect_success("devices").stdout;
    serde_json::from_str(&told).expect("devices prints JSON")
}

/// UUIDs of the instances, in NVML's order.
fn instances(config: &Path) -> Vec<String> {
    let all = devices(config);
    let gpus = all["gpus"].as_array().expect("a list of GPUs").iter();
    gpus.filter(|gpu| gpu["mig"].is_object())
        .map(|gpu| gpu["uuid"].as_str().unwrap_or_default().to_owned())
        .collect()
}

/// What `nvidia-capN` the container has, and what it may open.
fn nodes(outcome: &Outcome) -> Vec<&str> {
    outcome.stdout.split_whitespace().collect()
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn an_instance_is_given_whole_or_in_shares_and_its_card_never_beside_it() {
    if !met(NEEDS) {
        return;
    }
    for low_level in LowLevel::ALL {
        let node = divided(&[]);
        let runtime = Runtime::wrapped(low_level, &node).in_view(low_level.view());
        let config = runtime.config();
        let shown = cli(config, &["devices"]).expect_success("devices").stdout;
        for part in ["0:0", "0:1", "0:2", "MIG 1g.10gb", "10 GiB", "MIG-"] {
            assert!(shown.contains(part), "{part}: {shown}");
        }
        let uuids = instances(config);
        assert_eq!(uuids.len(), 3, "{shown}");

        // By size: two shares of one instance, then the other one, since the first is full.
        let of_size =
            |memory| Bundle::with_probe().env("GPUSHARE_MIG", "1g.10gb").env("GPUSHARE_MEMORY", memory);
        let (first, second, third) = (of_size("6GiB"), of_size("4GiB"), of_size("6GiB"));
        let whole =
            Bundle::with_probe().env("NVIDIA_VISIBLE_DEVICES", "0:0").env("GPUSHARE_MODE", "exclusive");
        let plan = {
            first.write();
            cli(config, &["plan", "--bundle", &first.path().to_string_lossy()]).expect_success("plan").stdout
        };
        assert!(
            plan.contains("on MIG 0:1 1g.10gb") && plan.contains("/dev/nvidia-caps/nvidia-cap6"),
            "{plan}"
        );
        let containers =
            [runtime.run(&first), runtime.run(&second), runtime.run(&third), runtime.run(&whole)];
        let gpus: Vec<String> = leases(config).iter().map(|lease| lease.gpus[0].clone()).collect();
        assert_eq!(gpus, [&*uuids[1], &uuids[1], &uuids[2], &uuids[0]], "{low_level:?}");
        let report = Report::of(&containers[0], &["5GiB", "1GiB"]);
        report.assert_size(6 * GIB);
        assert_eq!(report.text("instance"), uuids[1], "{low_level:?}");
        assert_eq!(report.allocations(), [SUCCESS, OUT_OF_MEMORY], "{low_level:?}");
        Report::of(&containers[1], &[]).assert_size(4 * GIB);
        Report::of(&containers[3], &["39GiB"]).assert_whole(40 * GIB);
        let listed = containers[0].exec(&["/bin/busybox", "ls", "/dev/nvidia-caps"]);
        assert_eq!(nodes(&listed), ["nvidia-cap6", "nvidia-cap7"], "{low_level:?}");
        // Another instance's node, made by the container itself, stays closed.
        let made = containers[0].exec(&[
            "/bin/busybox",
            "sh",
            "-c",
            "busybox mknod /dev/other c 508 9 && busybox cat /dev/other",
        ]);
        assert!(!made.success() && !made.stderr.contains("No such device"), "{low_level:?}: {made:?}");

        for (env, want) in [
            (("GPUSHARE_DEVICES", "0"), "0 is divided into MIG instances"),
            (("GPUSHARE_DEVICES", "0:7"), "no GPU 0:7"),
            (
                ("GPUSHARE_MIG", "7g.80gb"),
                "no such MIG instance (`gpushare devices`); it has MIG 0:0 3g.40gb",
            ),
            (("GPUSHARE_MIG", "big"), "a MIG profile is written as"),
            (("GPUSHARE_DEVICES", &uuids[1]), "8 GiB requested, 0 MiB free on MIG 0:1 1g.10gb"),
        ] {
            let bundle = Bundle::small().env("GPUSHARE_MEMORY", "8GiB").env(env.0, env.1);
            let line = runtime.create(&bundle).expect_err(want).line();
            assert!(line.contains(want), "{low_level:?}, {env:?}: {line}");
        }
        // Who names no instance gets a whole GPU.
        let any = Bundle::with_probe().env("GPUSHARE_MEMORY", "4GiB");
        let container = runtime.run(&any);
        let nodes = container.exec(&["/bin/busybox", "ls", "/dev"]).stdout;
        assert!(nodes.contains("nvidia1") && !nodes.contains("nvidia-caps"), "{low_level:?}: {nodes}");
        let told = cli(config, &["cordon", "0"]).expect_success("cordon").stdout;
        assert!(told.contains("is cordoned"), "{told}");
        let line = runtime.create(&of_size("1GiB")).expect_err("its card is cordoned").line();
        assert!(line.contains("is cordoned"), "{low_level:?}: {line}");
        let _ = cli(config, &["uncordon", "0"]).expect_success("uncordon");
        drop((containers, container));
        assert_eq!(leases(config), [], "{low_level:?}");
    }
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_node_without_a_whole_gpu_gives_instances_to_who_names_none_and_a_bundle_runs_again_on_another() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::with(1, MODEL, "80GiB", &["--mig", "0=1g.10gb,1g.20gb"]);
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let uuids = instances(runtime.config());
    let bundle = Bundle::with_probe().env("GPUSHARE_MEMORY", "8GiB");
    let container = runtime.run(&bundle);
    assert_eq!(Report::of(&container, &[]).text("instance"), uuids[0], "the smallest that fits");
    drop(container);
    let fills = Bundle::small().env("GPUSHARE_DEVICES", &uuids[0]);
    let filled = runtime.run(&fills);
    let container = runtime.create_as_it_is(&bundle).expect("the other one has room");
    container.start();
    let listed = container.exec(&["/bin/busybox", "ls", "/dev/nvidia-caps"]);
    assert_eq!(nodes(&listed), ["nvidia-cap6", "nvidia-cap7"], "nothing of the first run's instance is left");
    let report = Report::of(&container, &["7GiB"]);
    report.assert_size(8 * GIB);
    assert_eq!(report.text("instance"), uuids[1]);
    drop((container, filled));
    assert_eq!(leases(runtime.config()), []);
}

/// A node as a device plugin or CDI puts it into a bundle, with a rule of its own.
fn hand(bundle: &mut Value, path: &str, major: u32, minor: u32) {
    let node = json!({"path": path, "type": "c", "major": major, "minor": minor, "fileMode": 292});
    let rule = json!({"allow": true, "type": "c", "major": major, "minor": minor, "access": "rw"});
    let lists = [("/linux/devices", node), ("/linux/resources/devices", rule)];
    for (list, entry) in lists {
        if let Some(list) = bundle.pointer_mut(list).and_then(Value::as_array_mut) {
            list.push(entry);
        }
    }
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn an_instance_that_the_engine_was_handed_is_the_one_that_is_given_also_when_the_bundle_runs_again() {
    if !met(NEEDS) {
        return;
    }
    let node = divided(&[]);
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let uuids = instances(runtime.config());
    // Two instances of one card, of which the list names one: caps 3 and 4, 6 and 7, 9 and 10.
    let handed = |bundle: Bundle, minors: &[u32]| {
        bundle.edit(|json| {
            json["linux"]["devices"] = json!([]);
            hand(json, "/dev/nvidia0", 195, 0);
            for minor in minors {
                hand(json, &format!("/dev/nvidia-caps/nvidia-cap{minor}"), 508, *minor);
            }
        })
    };
    let one = handed(Bundle::with_probe().env("GPUSHARE_MEMORY", "4GiB"), &[9, 10]);
    let of_two = Bundle::with_probe().env("GPUSHARE_MEMORY", "4GiB").env("NVIDIA_VISIBLE_DEVICES", &uuids[1]);
    let of_two = handed(of_two, &[9, 10, 6, 7]);
    for (bundle, instance, caps) in [
        (&one, &uuids[2], ["nvidia-cap10", "nvidia-cap9"]),
        (&of_two, &uuids[1], ["nvidia-cap6", "nvidia-cap7"]),
    ] {
        for again in [false, true] {
            let container = match again {
                false => runtime.create(bundle),
                true => runtime.create_as_it_is(bundle),
            };
            let container = container.unwrap_or_else(|refusal| panic!("{again}: {}", refusal.line()));
            container.start();
            assert_eq!(Report::of(&container, &[]).text("instance"), *instance, "again: {again}");
            let listed = container.exec(&["/bin/busybox", "ls", "/dev/nvidia-caps"]);
            assert_eq!(nodes(&listed), caps, "again: {again}");
        }
    }
    for (minors, want) in [
        (&[][..], "is divided into MIG instances"),
        (&[9], "is divided into MIG instances"),
        (&[9, 10, 1], "or of MIG's configuration"),
    ] {
        let bundle = handed(Bundle::small().env("GPUSHARE_MEMORY", "1GiB"), minors);
        let line = runtime.create(&bundle).expect_err(want).line();
        assert!(line.contains(want), "{minors:?}: {line}");
    }
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn an_instance_that_vanished_is_gone_at_the_next_grant_and_its_lease_comes_back() {
    if !met(NEEDS) {
        return;
    }
    let node = divided(&[]);
    let runtime = Runtime::wrapped(LowLevel::Crun, &node).in_view(LowLevel::Crun.view());
    let config = runtime.config();
    let uuids = instances(config);
    let held = Bundle::small().env("GPUSHARE_DEVICES", &uuids[2]).env("GPUSHARE_MEMORY", "4GiB");
    let container = runtime.run(&held);
    let _ = run(Command::new(artifacts::simulator()).arg("destroy").arg(node.root()).arg("4"))
        .expect_success("destroy");
    for (bundle, want) in [
        (Bundle::small().env("GPUSHARE_DEVICES", &uuids[2]), "this node has no GPU MIG-"),
        (Bundle::small().env("GPUSHARE_DEVICES", "0:2"), "this node has no GPU 0:2"),
    ] {
        let line = runtime.create(&bundle).expect_err(want).line();
        assert!(line.contains(want), "{line}");
    }
    assert_eq!(instances(config), uuids[..2]);
    let shown = cli(config, &["ps"]).expect_success("ps").stdout;
    assert!(shown.contains(&uuids[2]), "the lease is still told: {shown}");
    let told = cli(config, &["update", held.id(), "--memory", "5GiB"]);
    assert!(told.stderr.contains("out of service or gone"), "{}", told.stderr);
    drop(container);
    assert!(
        eventually(std::time::Duration::from_secs(5), || leases(config).is_empty()),
        "{:?}",
        leases(config)
    );
    let other = Bundle::small().env("GPUSHARE_MIG", "1g.10gb");
    drop(runtime.run(&other));
}

#[test]
#[ignore = "needs root: makes device nodes"]
fn a_gpu_in_mig_mode_without_instances_is_out_of_service_and_doctor_says_why() {
    if !met(&[Need::Root]) {
        return;
    }
    let node = SimulatedNode::with(2, MODEL, "80GiB", &["--mig", "1="]);
    let shown = cli(node.config(), &["devices"]).expect_success("devices").stdout;
    assert!(shown.contains("GPU 1 at") && shown.contains("has no compute instance"), "{shown}");
    let doctor = cli(node.config(), &["doctor"]).stdout;
    assert!(doctor.contains("nvidia-smi mig -cgi"), "{doctor}");
    let topology = cli(node.config(), &["devices", "--topology"]).expect_success("topology").stdout;
    assert!(topology.contains("GPU 0  GPU 1"), "a divided GPU stays where it is: {topology}");
}
