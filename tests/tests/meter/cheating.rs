//! A container that breaks its share is named within seconds, for memory and for compute, and what the
//! settings want is done.

use std::path::Path;
use std::time::{Duration, Instant};

use gpushare_tests::bundle::Bundle;
use gpushare_tests::command::eventually;
use gpushare_tests::leases::{cli, leases_of, shares, sweep};
use gpushare_tests::meter;
use gpushare_tests::needs::met;
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::runtime::{Container, LowLevel, Runtime};
use serde_json::{Value, json};

use crate::{NEEDS, SOON};

/// The driver's own library, loaded first, replaces ours in that process.
const BYPASS: &str = "LD_PRELOAD=/usr/lib/gpushare/driver/cuda";
const CLIENT: &str = "/bin/gpushare-tests-client";

/// The violations that `ps` lists for the container `id`: kind and text.
fn violations(config: &Path, id: &str) -> Vec<(String, String)> {
    let shares = shares(config);
    let lease = shares.iter().find(|lease| lease["id"] == id);
    let all = lease.and_then(|lease| lease["violations"].as_array());
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    all.into_iter().flatten().map(|one| (text(&one["kind"]), text(&one["text"]))).collect()
}

fn tells(config: &Path, id: &str, kind: &str) -> bool {
    violations(config, id).iter().any(|(found, _)| found == kind)
}

/// The node's settings with runc and `meter.on_cheating`.
fn runtime(node: &SimulatedNode, on_cheating: &str) -> Runtime {
    let more = format!("{}\n[meter]\non_cheating = \"{on_cheating}\"\n", LowLevel::Runc.settings());
    Runtime::with_config(LowLevel::Runc, &node.config_with(on_cheating, &more))
}

fn share(memory: &str, args: &[&str]) -> Bundle {
    Bundle::with_client().env("GPUSHARE_MEMORY", memory).args(args)
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn each_way_past_a_limit_is_named() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = runtime(&node, "report");
    let config = runtime.config();
    let _meter = meter::start(config);
    // A mount whose path is no UTF-8 hides nothing.
    let over_limits = "busybox mount -t tmpfs none /tmp && busybox mkdir -p /tmp/a/m && busybox mount -t tmpfs none /tmp/a/m && busybox mv /tmp/a /tmp/$(busybox printf '\\377') && busybox cp /usr/lib/gpushare/limits /tmp/l && busybox mount --bind /tmp/l /usr/lib/gpushare/limits && exec busybox sleep 1000";
    let hold = "/bin/gpushare-simulator probe --json --allocate 3GiB --hold 1000";
    let more = "/bin/gpushare-simulator probe --json --allocate 1GiB --hold 1000";
    // A context alone takes less memory than each process may leave unexplained.
    let idle = format!(
        "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do {BYPASS} /bin/gpushare-simulator probe --json --hold 1000 & done; \
         {BYPASS} {more}"
    );
    let bypass = format!("{BYPASS} {hold}");
    let own = format!(
        "busybox mkdir /own && busybox cp /usr/lib/gpushare/driver/cuda /own/libcuda.so.1 && LD_LIBRARY_PATH=/own {hold}"
    );
    let busy = format!("{BYPASS} {CLIENT} launch 1ms --seconds 1000");
    // The books in a copy of the root would be a second budget.
    let copied = format!(
        "busybox mkdir -p /jail/dev /jail/usr && busybox cp -a /bin /lib /lib64 /jail/ 2>/dev/null; \
         busybox cp -a /usr/bin /usr/lib /usr/lib64 /jail/usr/ 2>/dev/null; \
         busybox mknod /jail/dev/nvidiactl c 195 255 && busybox mknod /jail/dev/nvidia0 c 195 0; \
         exec busybox chroot /jail {more}"
    );
    let state = json!({
        "destination": "/jail/run/gpushare-simulator", "type": "bind", "source": node.shared(),
        "options": ["rbind", "rw"]
    });
    let spoilt = format!("busybox printf noise > /usr/lib/gpushare/usage; {bypass}");
    let honest = share("4GiB", &["sh", "-c", hold]).env("GPUSHARE_CORES", "50");
    let cheats = [
        (
            share("1GiB", &["busybox", "unshare", "-Urm", "sh", "-c", over_limits])
                .set("/process/user", json!({"uid": 1000, "gid": 1000})),
            &["files"][..],
        ),
        (share("1GiB", &["sh", "-c", &bypass]), &["memory"]),
        (share("1GiB", &["sh", "-c", &spoilt]), &["memory", "unreadable"]),
        (share("1GiB", &["sh", "-c", &own]), &["memory", "unlimited"]),
        (share("1GiB", &["sh", "-c", &copied]).mount(state), &["unlimited"]),
        // Idle processes beside it do not raise the slack.
        (share("1GiB", &["sh", "-c", &idle]), &["memory"]),
        (share("1GiB", &["sh", "-c", &busy]).env("GPUSHARE_CORES", "10"), &["compute"]),
    ];
    let containers: Vec<(Container<'_>, &[&str])> =
        cheats.iter().map(|(bundle, kinds)| (runtime.run(bundle), *kinds)).collect();
    let quiet = runtime.run(&honest);
    for (container, kinds) in &containers {
        for kind in *kinds {
            let named = eventually(SOON, || tells(config, container.id(), kind));
            assert!(named, "{kind}: {:?}\n{}", violations(config, container.id()), container.stderr());
        }
        let doctor = cli(config, &["doctor"]);
        assert!(!doctor.success() && doctor.stdout.contains(container.id()), "{doctor:?}");
        assert!(cli(config, &["ps"]).stdout.contains("CHEATING"));
    }
    assert_eq!(violations(config, quiet.id()), []);
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_process_on_a_shared_gpu_that_no_share_explains_is_named() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = runtime(&node, "end");
    let _meter = meter::start(runtime.config());
    let bundle = share("1GiB", &["sleep", "1000"]);
    let container = runtime.run(&bundle);
    let mut stranger = std::process::Command::new(gpushare_tests::artifacts::simulator());
    stranger.args(["probe", "--json", "--allocate", "2GiB", "--hold", "1000"]);
    stranger.env("LD_LIBRARY_PATH", node.libraries()).env("GPUSHARE_SIMULATOR", node.shared());
    let mut stranger =
        stranger.stdout(std::process::Stdio::null()).spawn().expect("the client can be started");
    let line = format!("process {}", stranger.id());
    let named = eventually(SOON, || cli(runtime.config(), &["ps"]).stdout.contains(&line));
    let told = cli(runtime.config(), &["ps"]).stdout;
    let lives = matches!(stranger.try_wait(), Ok(None));
    let _ = stranger.kill();
    let _ = stranger.wait();
    assert!(named && told.contains("STRANGER"), "{told}");
    assert!(lives && container.status().as_deref() == Some("running"), "nobody's share was broken");
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_container_that_cheats_is_ended_where_the_settings_say_so_and_never_stopped() {
    if !met(NEEDS) {
        return;
    }
    for wanted in ["end", "cap"] {
        let node = SimulatedNode::one_gpu();
        let runtime = runtime(&node, wanted);
        let config = runtime.config();
        let _meter = meter::start(config);
        let more = format!("{BYPASS} /bin/gpushare-simulator probe --json --allocate 3GiB --hold 1000");
        let cheat = share("1GiB", &["sh", "-c", &more]);
        let neighbour = share("1GiB", &["sleep", "1000"]);
        let (cheating, honest) = (runtime.run(&cheat), runtime.run(&neighbour));
        let notes = |event: &str| {
            let told = cli(config, &["logs", "--filter", &format!("event={event}")]).stdout;
            told.lines().filter(|line| line.contains(cheat.id()) && line.contains("on_cheating")).count()
        };
        match wanted {
            "end" => {
                assert!(eventually(SOON, || cheating.status().as_deref() == Some("stopped")), "{wanted}");
                assert_eq!(notes("ended"), 1);
                sweep(config);
                assert_eq!(leases_of(config, cheating.id()), []);
            }
            _ => {
                assert!(eventually(SOON, || tells(config, cheating.id(), "memory")), "{}", cheating.stderr());
                let doctor = cli(config, &["doctor"]).stdout;
                assert!(doctor.contains("\"cap\" counts as \"report\""), "{doctor}");
                assert_eq!((cheating.status().as_deref(), notes("stopped")), (Some("running"), 0));
            }
        }
        assert_eq!(honest.status().as_deref(), Some("running"), "{wanted}");
    }
}

/// The kernel keeps the pid of who set it, which another process may have by now.
#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_lease_whose_setter_has_ended_is_named_by_who_has_it() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = runtime(&node, "report");
    let config = runtime.config();
    let neighbour = share("1GiB", &["sh", "-c", "while :; do busybox true; busybox sleep 0.05; done"]);
    let taker = share("1GiB", &[CLIENT, "lease", "--by-child", "/usr/lib/gpushare/driver/cuda"]);
    let (innocent, taking) = (runtime.run(&neighbour), runtime.run(&taker));
    assert!(eventually(SOON, || taking.stdout().contains("leases 1")), "{}", taking.stderr());
    for has_meter in [false, true] {
        let meter = has_meter.then(|| meter::start(config));
        let doctor = || cli(config, &["doctor"]).stdout;
        let is_told =
            || doctor().lines().any(|line| line.contains(taker.id()) && line.contains("F_SETLEASE"));
        assert!(eventually(SOON, is_told), "meter: {has_meter}: {}", doctor());
        assert!(!doctor().contains(neighbour.id()), "{}", doctor());
        drop(meter);
    }
    drop(innocent);
}

/// What the meter of an earlier version stopped goes on at the first look of this one.
#[test]
#[ignore = "needs root and runc: runs containers"]
fn what_an_earlier_meter_stopped_goes_on() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = runtime(&node, "report");
    let config = runtime.config();
    let [stopped, paused] = [(); 2].map(|()| share("1GiB", &["sleep", "1000"]));
    let containers = [&stopped, &paused].map(|bundle| runtime.run(bundle));
    for container in &containers {
        let _ = runtime.call(&["pause"], container.id()).expect_success("pause");
    }
    // Numbers of leases only grow.
    let regions = std::fs::read_dir(node.state().join("regions")).unwrap();
    let numbers = regions.filter_map(|one| one.unwrap().file_name().to_string_lossy().parse::<i64>().ok());
    let told = json!({"seconds": 1, "violations": [], "frozen": [numbers.min()]}).to_string();
    std::fs::write(node.state().join("violations.json"), told).unwrap();
    let _meter = meter::start(config);
    let [is, other] = &containers;
    assert!(eventually(SOON, || is.status().as_deref() == Some("running")), "{:?}", is.status());
    assert_eq!(other.status().as_deref(), Some("paused"), "its owner paused it");
    let note = cli(config, &["logs", "--filter", "event=goes on"]).stdout;
    assert!(note.contains(stopped.id()) && !note.contains(paused.id()), "{note}");
    let _ = runtime.call(&["resume"], paused.id()); // so that it can be killed
}

/// Creates, updates and deletes beside a container that takes every lease on files that the kernel allows.
#[test]
#[ignore = "needs root and runc: runs containers"]
fn nobody_waits_for_a_container_that_takes_leases_on_files() {
    if !met(NEEDS) {
        return;
    }
    const FILES: [&str; 6] = [
        "/usr/lib/gpushare/limits",
        "/usr/lib/gpushare/usage",
        "/usr/lib/gpushare/driver/cuda",
        "/usr/lib/gpushare/driver/nvidia-ml",
        "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
        "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1",
    ];
    // Where a process waits for such a lease, it takes 45 seconds a file.
    const SOON: Duration = Duration::from_secs(5);
    let node = SimulatedNode::one_gpu();
    let runtime = runtime(&node, "report");
    let config = runtime.config();
    for (uid, has_meter) in
        [(None, false), (Some("2147483600"), false), (None, true), (Some("2147483600"), true)]
    {
        let before = share("1GiB", &["sleep", "1000"]);
        let _before = runtime.run(&before);
        let told = node.state().join("violations.json");
        let _ = std::fs::remove_file(&told);
        let meter = has_meter.then(|| meter::start(config));
        // The meter writes this file at the end of its first look, which opens the files.
        assert!(!has_meter || eventually(SOON, || told.exists()));
        let mut args = vec![CLIENT, "lease"];
        args.extend(uid.into_iter().flat_map(|uid| ["--uid", uid]));
        args.extend(FILES);
        let attacker = share("1GiB", &args);
        let victim = share("1GiB", &["sleep", "1000"]);
        let attacking = runtime.run(&attacker);
        assert!(eventually(SOON, || attacking.stdout().contains("leases")), "{}", attacking.stderr());
        let begin = Instant::now();
        let container = runtime.run(&victim);
        let _ = cli(config, &["update", victim.id(), "--memory", "2GiB"]).expect_success("update");
        let _ = cli(config, &["update", attacker.id(), "--memory", "2GiB"]); // done or refused, but at once
        for verb in ["sweep", "ps", "devices"] {
            let _ = cli(config, &[verb]).expect_success(verb);
        }
        if has_meter {
            // No process gets a lease for writing on a file that the meter has open, so another container's
            // loader does not wait.
            let probe = container.exec(&["/bin/gpushare-simulator", "probe", "--json"]);
            let _ = probe.expect_success("the CUDA client");
        }
        drop(container);
        assert!(begin.elapsed() < SOON, "{uid:?}, meter: {has_meter}: {:?}", begin.elapsed());
        let doctor = || cli(config, &["doctor"]).stdout;
        // The driver's own files belong to root, and so does the container's first user.
        assert!(eventually(SOON, || doctor().contains("F_SETLEASE")), "{uid:?}: {}", doctor());
        // A meter that starts now may wait for NVML's library, but searches in the meantime.
        let meter = meter.unwrap_or_else(|| meter::start(config));
        let is_named = || tells(config, attacker.id(), "file-lease");
        assert!(eventually(SOON, is_named), "{uid:?}: {}", meter.log());
    }
}
