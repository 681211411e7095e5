//! Containers that hold GPUs in other ways than by shares with limits.

use std::sync::atomic::Ordering;
use std::time::Duration;

use gpushare_simulator::state::State;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::cluster::kubelet::in_pod;
use gpushare_tests::command::eventually;
use gpushare_tests::leases::{cli, leases, shares};
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::{MODEL, SimulatedNode};
use gpushare_tests::probe::{GIB, Report, SUCCESS};
use gpushare_tests::runtime::{LowLevel, Runtime};

/// More than a program takes to start.
const SOON: Duration = Duration::from_secs(20);
const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Crun, Need::Busybox];

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn containers_take_turns_on_a_gpu_without_limits_and_by_their_number() {
    if !met(NEEDS) {
        return;
    }
    for low_level in LowLevel::ALL {
        let node = SimulatedNode::one_gpu();
        let settings = format!("{}\n[quota]\nreplicas = 2\n", low_level.settings());
        let config = node.config_with("replicas", &settings);
        let runtime = Runtime::with_config(low_level, &config).in_view(low_level.view());
        let turns = Bundle::with_probe().env("GPUSHARE_MODE", "time-slice");
        let named = in_pod(Bundle::with_probe(), "needs", "team")
            .annotation("gpushare.io/mode", "time-slice")
            .annotation("gpushare.io/memory", "30GiB");
        let late = Bundle::with_probe().env("GPUSHARE_MODE", "time-slice");
        let share = Bundle::with_probe().env("GPUSHARE_MEMORY", "1GiB");
        late.write();
        let plan = cli(&config, &["plan", "--bundle", &late.path().to_string_lossy()]).expect_success("plan");
        for part in
            ["note      time-slice: nothing limits", "asked     mode time-slice", "turns, no limit of memory"]
        {
            assert!(plan.stdout.contains(part), "{part:?}: {}", plan.stdout);
        }

        let containers = [runtime.run(&turns), runtime.run(&named)];
        for container in &containers {
            let report = Report::of(container, &["60GiB"]);
            report.assert_whole(80 * GIB);
            assert_eq!(report.allocations(), [SUCCESS], "{low_level:?}: also beyond what it names");
        }
        for (bundle, want) in
            [(&late, "may take turns on a GPU (quota.replicas)"), (&share, "is held in mode time-slice")]
        {
            let line = runtime.create(bundle).expect_err("it is refused").line();
            assert!(line.contains(want), "{low_level:?}: {line}");
        }
        let shown = cli(&config, &["ps"]).expect_success("ps").stdout;
        assert_eq!(shown.matches("time-slice").count(), 2, "{shown}");
        assert!(shown.contains("no limit (30 GiB)"), "{shown}");
        let shown = cli(&config, &["devices"]).expect_success("devices").stdout;
        assert!(shown.contains("2 time-slice"), "{shown}");
        let told = cli(&config, &["update", containers[0].id(), "--memory", "1GiB"]);
        assert!(told.stderr.contains("no limits to change"), "{}", told.stderr);
        drop(containers);
        assert_eq!(leases(&config), [], "{low_level:?}");
        drop(runtime.run(&share));
    }
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn several_gpus_are_those_that_nvlink_connects_and_one_alone_breaks_no_pair() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::with(4, MODEL, "80GiB", &["--nvlink", "1,3"]);
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let shown = cli(runtime.config(), &["devices", "--topology"]).expect_success("devices").stdout;
    let rows: Vec<Vec<&str>> = shown.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[2][..5], ["1", "SYS", "X", "SYS", "NV"], "{shown}");
    let gpus =
        || -> Vec<Vec<String>> { leases(runtime.config()).into_iter().map(|lease| lease.gpus).collect() };
    let all: Vec<String> = {
        let bundle = Bundle::small().env("GPUSHARE_MEMORY", "1GiB").env("GPUSHARE_DEVICES", "all");
        let container = runtime.create(&bundle).expect("it fits");
        let all = gpus().remove(0);
        container.leave();
        runtime.delete_force(bundle.id());
        all
    };
    let (pair, first) = ([all[1].clone(), all[3].clone()], [all[0].clone()]);
    for (env, want) in [
        (&[("GPUSHARE_MODE", "exclusive"), ("GPUSHARE_COUNT", "2")][..], &pair[..]),
        (&[("GPUSHARE_MEMORY", "4GiB"), ("GPUSHARE_COUNT", "2")], &pair),
        (&[("GPUSHARE_MODE", "time-slice"), ("GPUSHARE_COUNT", "2")], &pair),
        (&[("GPUSHARE_MODE", "exclusive")], &first),
    ] {
        let bundle = env.iter().fold(Bundle::small(), |bundle, (name, value)| bundle.env(name, value));
        let container =
            runtime.create(&bundle).unwrap_or_else(|refusal| panic!("{env:?}: {}", refusal.line()));
        assert_eq!(gpus(), [want], "{env:?}");
        drop(container);
    }
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_gpu_is_cordoned_and_uncordoned_by_a_command_and_its_containers_stay() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::create(2, MODEL, "80GiB");
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let config = runtime.config();
    let held = Bundle::small().env("GPUSHARE_MEMORY", "1GiB").env("GPUSHARE_DEVICES", "0");
    let any = Bundle::small().env("GPUSHARE_MEMORY", "2GiB");
    let first = runtime.create(&held).expect("it fits");
    let told = cli(config, &["cordon", "0"]).expect_success("cordon").stdout;
    assert!(told.contains("is cordoned: no new share of it is given; 1 lease(s) stay"), "{told}");
    let _ = cli(config, &["cordon", "0"]).expect_success("a second time is none too many");
    let again = Bundle::small().env("GPUSHARE_MEMORY", "1GiB").env("GPUSHARE_DEVICES", "0");
    let line = runtime.create(&again).expect_err("it is cordoned").line();
    assert!(line.contains("gpushare uncordon"), "{line}");
    let other = runtime.create(&any).expect("the other GPU has room");
    let gpus: Vec<_> = leases(config).into_iter().map(|lease| lease.gpus).collect();
    assert_ne!(gpus[0], gpus[1]);
    let shown = cli(config, &["devices"]).expect_success("devices").stdout;
    assert_eq!(shown.matches("cordoned").count(), 1, "{shown}");
    for (arguments, want) in [
        (&["cordon", "7"][..], "7"),
        (&["cordon", "GPU-x"], "GPU-x"),
        (&["cordon"], "<GPUS>"),
        (&["uncordon", "0", "9"], "9"),
    ] {
        let refused = cli(config, arguments);
        assert!(!refused.success() && refused.stderr.contains(want), "{arguments:?}: {}", refused.stderr);
    }
    assert!(runtime.create(&again).is_err(), "what is refused changes nothing");
    let told = cli(config, &["uncordon", &gpus[0][0]]).expect_success("uncordon").stdout;
    assert!(told.contains("gives new shares"), "{told}");
    assert!(!config.with_extension("toml.d").join("cordoned.toml").exists(), "nothing is left of it");
    drop((first, other, runtime.create(&again).expect("it is given again")));
    // What the administrator wrote, a command neither changes nor hides.
    let set = node.config_with(
        "set",
        &format!("{}\n[quota]\ncordoned = [\"{}\"]\n", LowLevel::Runc.settings(), gpus[0][0]),
    );
    let _ = cli(&set, &["cordon", "0", "1"]).expect_success("cordon");
    let told = cli(&set, &["uncordon", "0"]);
    assert!(told.stderr.contains("quota.cordoned of the settings names it"), "{}", told.stderr);
    let shown = cli(&set, &["devices"]).expect_success("devices").stdout;
    assert_eq!(shown.matches("cordoned").count(), 2, "{shown}");
}

/// Whether the container's used memory is told as this: on the GPU, and of the host.
fn uses(config: &std::path::Path, id: &str, want: (u64, u64)) -> bool {
    let shares = shares(config);
    let lease = shares.iter().find(|lease| lease["id"] == id);
    let told =
        lease.map(|lease| (lease["gpus"][0]["used_bytes"].as_u64(), lease["host_used_bytes"].as_u64()));
    told == Some((Some(want.0), Some(want.1)))
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn what_does_not_fit_into_a_share_spills_into_the_host_memory_that_was_granted() {
    const CLIENT: &str = "/bin/gpushare-tests-client";
    if !met(NEEDS) {
        return;
    }
    let low_level = LowLevel::Runc;
    let node = SimulatedNode::one_gpu();
    let lends = format!("{}\n[quota]\nhost_memory = \"6GiB\"\n", low_level.settings());
    let config = node.config_with("lends", &lends);
    let runtime = Runtime::with_config(low_level, &config).in_view(low_level.view());
    // A context is charged as 776 MiB. What comes after the first allocation is all of the host's.
    let program = "exec /bin/gpushare-tests-client product --beside 3320 --beside 2048 --hold 1000";
    let share = || Bundle::with_client().env("GPUSHARE_MEMORY", "4GiB");
    let spills = share().env("GPUSHARE_HOST_MEMORY", "4GiB").args(&["/bin/busybox", "sh", "-c", program]);
    let container = runtime.run(&spills);
    let right = || container.stdout().starts_with("right ");
    assert!(eventually(SOON, right), "{low_level:?}: {} {}", container.stdout(), container.stderr());
    assert!(uses(&config, spills.id(), (4 * GIB, 2 * GIB)), "{:?}", cli(&config, &["ps"]));
    let shown = cli(&config, &["ps"]).expect_success("ps").stdout;
    assert!(shown.contains("4 GiB + 4 GiB host") && shown.contains("4 GiB + 2 GiB host"), "{shown}");
    let device = State::open(&node.shared()).expect("the node's state can be mapped").gpus()[0].bytes.iter();
    let device: u64 = device.map(|bytes| bytes.load(Ordering::Relaxed)).sum();
    assert!(device <= 4 * GIB, "the GPU itself holds no more than the share: {device}");
    drop(container);
    assert_eq!(leases(&config), []);

    // Processes at once have no more of either than was granted, with or without what was freed before.
    let filled = share().env("GPUSHARE_HOST_MEMORY", "4GiB");
    let container = runtime.run(&filled);
    for family in ["linear", "pitch", "managed"] {
        let arguments = [CLIENT, "fill", family, "--processes", "4", "--rounds", "3", "--largest", "256"];
        let told = container.exec(&arguments).expect_success("fill").stdout;
        for line in told.lines() {
            let held: u64 = line.trim_start_matches("held ").parse().expect("a number");
            let most = 8 * GIB - 4 * (776 << 20);
            assert!(held <= most && held > most - (256 << 20), "{low_level:?}, {family}: {held} of {most}");
        }
    }
    let pools = container.exec(&[CLIENT, "fill", "async"]).expect_success("fill").stdout;
    let held: u64 = pools.trim().trim_start_matches("held ").parse().expect("a number");
    assert!(held <= 4 * GIB, "pools do not spill: {held}");
    assert!(eventually(SOON, || uses(&config, filled.id(), (0, 0))), "{:?}", cli(&config, &["ps"]));

    let second = share().env("GPUSHARE_HOST_MEMORY", "3GiB");
    let whole = Bundle::small().env("GPUSHARE_MODE", "exclusive").env("GPUSHARE_HOST_MEMORY", "1GiB");
    let percent = share().env("GPUSHARE_HOST_MEMORY", "50%");
    for (bundle, want) in [
        (&second, "3 GiB of host memory requested, 2 GiB of 6 GiB free (quota.host_memory)"),
        (&whole, "which has no limit to pass"),
        (&percent, "an amount with a unit"),
    ] {
        let line = runtime.create(bundle).expect_err(want).line();
        assert!(line.contains(want), "{low_level:?}: {line}");
    }
    drop(container);
    let none = Runtime::wrapped(low_level, &node);
    let line = none.create(&second).expect_err("it is off by default").line();
    assert!(line.contains("lends no host memory"), "{line}");
    let without = share();
    let container = none.run(&without);
    let refused = container.exec(&[CLIENT, "product", "--beside", "3776", "--beside", "2048"]);
    assert!(!refused.success() && refused.stderr.contains("cuMemAlloc"), "{refused:?}");
}
