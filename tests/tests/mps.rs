//! Containers that share a GPU by NVIDIA's Multi-Process Service: its own control daemon runs, and stands for
//! the server, which needs a GPU.

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::Duration;

use gpushare_simulator::state::State;
use gpushare_tests::artifacts;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::command::{self, eventually};
use gpushare_tests::leases::{cli, leases, shares, sweep};
use gpushare_tests::mps::{Cleared, daemons, install, left, serve};
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::{MODEL, SimulatedNode};
use gpushare_tests::probe::{GIB, OUT_OF_MEMORY, Report, SUCCESS, UNUSABLE};
use gpushare_tests::regions;
use gpushare_tests::runtime::{Container, LowLevel, Runtime};
use gpushare_tests::service::Service;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Busybox, Need::MpsControl];
const CLIENT: &str = "/bin/gpushare-tests-client";
/// More than a start or an end of a daemon takes.
const SOON: Duration = Duration::from_secs(20);
/// Multiprocessors of the simulated GPU.
const ALL: u64 = 132;

fn by_mps(memory: &str, cores: &str) -> Bundle {
    let bundle = Bundle::with_client().env("GPUSHARE_MODE", "mps").env("GPUSHARE_MEMORY", memory);
    if cores.is_empty() { bundle } else { bundle.env("GPUSHARE_CORES", cores) }
}

fn node() -> SimulatedNode {
    let node = SimulatedNode::one_gpu();
    install(&node);
    node
}

/// What the client says of its GPU: `cuda_total` or `multiprocessors`.
fn told(container: &Container<'_>, name: &str) -> u64 {
    told_by(container, name, &[CLIENT, "sizes"])
}

fn told_by(container: &Container<'_>, name: &str, program: &[&str]) -> u64 {
    let sizes = container.exec(program).expect_success("the CUDA client in the container").stdout;
    let line = sizes.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("{sizes}"));
    line.trim().parse().expect("a number")
}

/// The GPUs' compute modes, by the words of nvidia-smi.
fn compute_modes(node: &SimulatedNode) -> Vec<&'static str> {
    let state = State::open(&node.shared()).expect("the node's state can be mapped");
    let word = |mode| match mode {
        0 => "DEFAULT",
        3 => "EXCLUSIVE_PROCESS",
        _ => "another",
    };
    state.gpus().iter().map(|gpu| word(gpu.compute_mode.load(Ordering::Relaxed))).collect()
}

fn is_clean(node: &SimulatedNode) -> bool {
    daemons(node).is_empty()
        && left(node).is_empty()
        && compute_modes(node).iter().all(|mode| *mode == "DEFAULT")
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn containers_run_at_once_within_their_memory_and_their_part_of_the_threads() {
    if !met(NEEDS) {
        return;
    }
    let node = node();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let _cleared = Cleared(&node);
    let (first, second) = (by_mps("20GiB", "30"), by_mps("10GiB", "50%"));
    let line = runtime.create(&first).expect_err("nobody serves").line();
    assert!(line.contains("does not serve mode mps") && line.contains("gpushare mps serve"), "{line}");
    assert_eq!(leases(runtime.config()), []);

    let serving = serve(runtime.config());
    let containers = [runtime.run(&first), runtime.run(&second)];
    let running = daemons(&node);
    assert_eq!(running.len(), 1, "one daemon for both");
    assert_eq!(compute_modes(&node), ["EXCLUSIVE_PROCESS"]);
    for (container, memory, cores) in [(&containers[0], 20, 40), (&containers[1], 10, 66)] {
        assert_eq!(told(container, "cuda_total"), memory * GIB);
        assert_eq!(told(container, "multiprocessors"), cores);
        // Whatever the environment says or lacks.
        for env in [
            &["env", "-i"][..],
            &["env", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100", "CUDA_MPS_PIPE_DIRECTORY=/x"],
        ] {
            let program: Vec<&str> =
                ["/bin/busybox"].iter().chain(env).copied().chain([CLIENT, "sizes"]).collect();
            assert_eq!(told_by(container, "multiprocessors", &program), cores, "{env:?}");
        }
        let less = ["/bin/busybox", "env", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=10", CLIENT, "sizes"];
        assert_eq!(told_by(container, "multiprocessors", &less), 14, "a program may take less");
        let all = format!("{memory}GiB");
        let report = Report::of(container, &["9GiB", &all]);
        report.assert_size(memory * GIB);
        assert_eq!(report.allocations(), [SUCCESS, OUT_OF_MEMORY]);
        for forbidden in ["rm /usr/lib/gpushare/mps/control", "ls /usr/lib/gpushare/mps/control_privileged"] {
            let words: Vec<&str> = std::iter::once("/bin/busybox").chain(forbidden.split(' ')).collect();
            assert!(!container.exec(&words).success(), "{forbidden}");
        }
    }
    let shown = cli(runtime.config(), &["ps"]).expect_success("ps").stdout;
    assert_eq!(shown.matches("mps").count(), 2, "{shown}");

    let share = Bundle::with_client().env("GPUSHARE_MEMORY", "1GiB");
    let turns = Bundle::with_client().env("GPUSHARE_MODE", "time-slice");
    let user = by_mps("1GiB", "").set("/process/user", json!({"uid": 1000, "gid": 1000}));
    let below = by_mps("1GiB", "")
        .mount(json!({"destination": "/dev/shm/cache", "type": "tmpfs", "source": "none", "options": []}));
    let mapped = by_mps("1GiB", "").edit(|spec| {
        spec["linux"]["namespaces"].as_array_mut().expect("a list").push(json!({"type": "user"}));
        spec["linux"]["uidMappings"] = json!([{"containerID": 0, "hostID": 100_000, "size": 65536}]);
        spec["linux"]["gidMappings"] = json!([{"containerID": 0, "hostID": 100_000, "size": 65536}]);
    });
    for (bundle, want) in [
        (&share, "is held in mode mps"),
        (&turns, "is held in mode mps"),
        (&by_mps("1GiB", "30"), "20% free"),
        (&by_mps("51GiB", ""), "50 GiB free"),
        (&user, "MPS serves one user of a GPU at a time, and uid 0 has it"),
        (&below, "/dev/shm/cache would lie below /dev/shm"),
        (&mapped, "a container with a user namespace cannot be a client of MPS"),
        (&by_mps("1GiB", "").env("GPUSHARE_COUNT", "2"), "is for one GPU"),
        (&by_mps("1GiB", "10").env("GPUSHARE_COMPUTE_POLICY", "burst"), "active thread percentage alone"),
    ] {
        let line = runtime.create(bundle).expect_err(want).line();
        assert!(line.contains(want), "{want:?}: {line}");
    }
    let told_policy = cli(runtime.config(), &["update", containers[0].id(), "--compute-policy", "burst"]);
    assert!(told_policy.stderr.contains("MPS"), "{}", told_policy.stderr);
    let _ = cli(runtime.config(), &["update", containers[0].id(), "--memory", "22GiB", "--cores", "40"])
        .expect_success("update");
    assert_eq!(told(&containers[0], "cuda_total"), 22 * GIB);
    assert_eq!(told(&containers[0], "multiprocessors"), 53, "programs that start later have it");

    // A daemon that is killed is started anew, in the folder that the containers have.
    kill(Pid::from_raw(running[0]), Signal::SIGKILL).expect("it lives");
    let again = || daemons(&node).first().is_some_and(|pid| *pid != running[0]);
    assert!(eventually(SOON, again), "{}", serving.log());
    assert!(eventually(SOON, || told(&containers[1], "multiprocessors") == 66), "{}", serving.log());

    // By hooks alone, as podman and others run it.
    let path = runtime.config().to_string_lossy().into_owned();
    let hooked = by_mps("2GiB", "10")
        .hook("createRuntime", &artifacts::hook(), &["createRuntime", "--config", &path])
        .hook("poststop", &artifacts::hook(), &["poststop", "--config", &path]);
    let bare = Runtime::bare(LowLevel::Runc);
    let by_hook = bare.run(&hooked);
    assert_eq!(told(&by_hook, "multiprocessors"), 14);
    by_hook.stop();

    // The daemon outlives who started it, and is taken over.
    let running = daemons(&node);
    serving.kill();
    let late = by_mps("1GiB", "");
    let third = runtime.run(&late);
    assert_eq!(told(&third, "multiprocessors"), ALL, "no limit of compute was asked for");
    let serving = serve(runtime.config());
    drop((third, containers));
    // A share of the same GPU waits until MPS has left it.
    let after = runtime.run(&share);
    assert_eq!(compute_modes(&node), ["DEFAULT"]);
    assert_eq!(told(&after, "cuda_total"), GIB);
    drop(after);
    assert!(
        eventually(SOON, || is_clean(&node)),
        "{:?} {:?}: {}",
        daemons(&node),
        left(&node),
        serving.log()
    );
    assert_eq!(daemons(&node), Vec::<i32>::new(), "{running:?}");
    assert_eq!(leases(runtime.config()), []);
}

/// Sets the GPU's compute mode as an administrator would, by NVML's number.
fn set_compute_mode(node: &SimulatedNode, mode: u32) {
    let state = State::open(&node.shared()).expect("the node's state can be mapped");
    state.gpus()[0].compute_mode.store(mode, Ordering::Relaxed);
}

fn compute_mode(node: &SimulatedNode) -> u32 {
    let state = State::open(&node.shared()).expect("the node's state can be mapped");
    state.gpus()[0].compute_mode.load(Ordering::Relaxed)
}

/// Whether a process of the host gets memory on the node's GPU, without MPS.
fn is_open_to_others(node: &SimulatedNode) -> bool {
    let mut probe = Command::new(artifacts::simulator());
    probe.args(["probe", "--json", "--allocate", "1GiB"]);
    probe.env("GPUSHARE_SIMULATOR", node.shared()).env("LD_LIBRARY_PATH", node.libraries());
    let told = command::run(&mut probe);
    told.success() && Report::parse(&told.stdout).allocations() == [SUCCESS]
}

/// Settings of a node on which MPS leaves the compute mode alone.
fn unchanged(node: &SimulatedNode) -> PathBuf {
    let settings = format!("{}\n[mps]\ncompute_mode = \"unchanged\"\n", LowLevel::Runc.settings());
    node.config_with("unchanged", &settings)
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn with_unchanged_the_compute_mode_is_never_set_and_others_come_in() {
    if !met(NEEDS) {
        return;
    }
    let node = node();
    let runtime = Runtime::with_config(LowLevel::Runc, &unchanged(&node));
    let _cleared = Cleared(&node);
    // Any call that sets a mode fails, so MPS would not start.
    let serving = Service::spawn_with(
        &["mps", "serve"],
        runtime.config(),
        &[(
            "GPUSHARE_SIMULATOR_FAIL",
            &(1..=9).map(|call| format!("nvmlDeviceSetComputeMode:{call}:4")).collect::<Vec<_>>().join(","),
        )],
    );
    let bundles = [by_mps("20GiB", "30"), by_mps("10GiB", "50")];
    let share = Bundle::with_client().env("GPUSHARE_MEMORY", "1GiB");
    // What the administrator has set stays: DEFAULT, and EXCLUSIVE_PROCESS.
    for mode in [0, 3] {
        set_compute_mode(&node, mode);
        assert!(eventually(SOON, || serving.log().contains("MPS is served")), "{}", serving.log());
        let containers = bundles.each_ref().map(|bundle| runtime.run(bundle));
        assert_eq!(daemons(&node).len(), 1, "one daemon for both");
        for (container, memory, cores) in [(&containers[0], 20, 40), (&containers[1], 10, 66)] {
            assert_eq!(told(container, "cuda_total"), memory * GIB, "mode {mode}");
            assert_eq!(told(container, "multiprocessors"), cores, "mode {mode}");
        }
        let shown = cli(runtime.config(), &["doctor"]).stdout;
        assert!(shown.contains("1 of them keep their compute mode"), "{shown}");
        let line = runtime.create(&share).expect_err("MPS has the card").line();
        assert!(line.contains("is held in mode mps"), "{line}");
        assert_eq!(compute_mode(&node), mode);
        if mode == 0 {
            assert!(is_open_to_others(&node), "nothing keeps a process of the host away");
        }
        // A daemon that is started anew takes no mode either.
        let daemon = daemons(&node)[0];
        kill(Pid::from_raw(daemon), Signal::SIGKILL).expect("it lives");
        let again = || daemons(&node).first().is_some_and(|pid| *pid != daemon);
        assert!(eventually(SOON, again), "{}", serving.log());
        drop(containers);
        // A share waits until MPS has left the card.
        let after = runtime.run(&share);
        assert_eq!((daemons(&node), left(&node)), (Vec::new(), Vec::new()), "{}", serving.log());
        assert_eq!(told(&after, "cuda_total"), GIB);
        assert_eq!(compute_mode(&node), mode);
        drop(after);
    }
    set_compute_mode(&node, 2);
    let line = runtime.create(&bundles[0]).expect_err("nobody may have a context").line();
    assert!(line.contains("PROHIBITED") && line.contains("mps.compute_mode"), "{line}");
    assert_eq!(compute_mode(&node), 2);
    let clean = eventually(SOON, || daemons(&node).is_empty() && left(&node).is_empty());
    assert!(clean, "{:?} {:?}: {}", daemons(&node), left(&node), serving.log());
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_changed_setting_counts_for_a_card_once_its_last_container_in_mode_mps_has_left() {
    if !met(NEEDS) {
        return;
    }
    let node = node();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let _cleared = Cleared(&node);
    let later = unchanged(&node);
    // A program that keeps its context, as MPS' server does, which is not simulated.
    let holder = ["/bin/gpushare-simulator", "probe", "--json", "--allocate", "1GiB", "--hold", "1000"];
    let bundle =
        Bundle::with_probe().env("GPUSHARE_MODE", "mps").env("GPUSHARE_MEMORY", "2GiB").args(&holder);
    let serving = serve(runtime.config());
    let container = runtime.run(&bundle);
    let is_alone = || !is_open_to_others(&node);
    assert!(eventually(SOON, is_alone), "the driver refuses a process beside MPS' server");
    serving.kill();
    // The daemon is taken over, and started anew, as it was.
    let serving = serve(&later);
    let daemon = daemons(&node)[0];
    kill(Pid::from_raw(daemon), Signal::SIGKILL).expect("it lives");
    let again = || daemons(&node).first().is_some_and(|pid| *pid != daemon);
    assert!(eventually(SOON, again), "{}", serving.log());
    assert_eq!(compute_modes(&node), ["EXCLUSIVE_PROCESS"]);
    drop(container);
    assert!(eventually(SOON, || is_clean(&node)), "its mode is given back: {}", serving.log());
    let container = runtime.run(&bundle);
    assert_eq!(compute_modes(&node), ["DEFAULT"]);
    assert!(is_open_to_others(&node));
    serving.kill();
    // The other way round: a card that was left alone stays so.
    let serving = serve(runtime.config());
    let daemon = daemons(&node)[0];
    kill(Pid::from_raw(daemon), Signal::SIGKILL).expect("it lives");
    let again = || daemons(&node).first().is_some_and(|pid| *pid != daemon);
    assert!(eventually(SOON, again), "{}", serving.log());
    assert_eq!(compute_modes(&node), ["DEFAULT"]);
    drop(container);
    assert!(eventually(SOON, || is_clean(&node)), "{}", serving.log());
    drop(runtime.run(&bundle));
    assert!(eventually(SOON, || is_clean(&node)), "{}", serving.log());
}

#[test]
#[ignore = "needs root and runc: kills the serving process at any point"]
fn whenever_the_serving_process_is_killed_the_next_one_leaves_nothing() {
    if !met(NEEDS) {
        return;
    }
    let node = node();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let _cleared = Cleared(&node);
    drop(runtime.run(&Bundle::with_client().env("GPUSHARE_MEMORY", "1GiB"))); // reads the node's sizes
    for round in 0..24_u64 {
        let bundle = by_mps("1GiB", "");
        let serving = Service::spawn(&["mps", "serve"], runtime.config());
        let mut create = runtime.spawn_create(&bundle);
        std::thread::sleep(Duration::from_millis(round * 5));
        serving.kill();
        // The container waits for the next one, is refused, or runs already.
        let again = serve(runtime.config());
        create.wait().expect("a child can be waited for");
        if round % 2 == 0 {
            // Killed while it ends the daemon, too.
            runtime.delete_force(bundle.id());
            std::thread::sleep(Duration::from_millis(round * 5));
            again.kill();
        } else {
            drop(again);
            runtime.delete_force(bundle.id());
        }
        let last = serve(runtime.config());
        let clean = eventually(SOON, || is_clean(&node) && leases(runtime.config()).is_empty());
        assert!(clean, "round {round}: {:?} {:?}: {}", daemons(&node), left(&node), last.log());
    }
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_daemon_that_is_missing_or_does_not_answer_is_named() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let _cleared = Cleared(&node);
    let serving = serve(runtime.config());
    let bundle = by_mps("1GiB", "");
    let line = runtime.create(&bundle).expect_err("there is no program").line();
    assert!(line.contains("nvidia-cuda-mps-control is missing: install it"), "{line}");
    assert!(eventually(SOON, || is_clean(&node)), "{:?}: {}", left(&node), serving.log());

    install(&node);
    let container = runtime.run(&bundle);
    let daemon = Pid::from_raw(daemons(&node)[0]);
    kill(daemon, Signal::SIGSTOP).expect("it lives");
    let late = by_mps("1GiB", "");
    let refused = || match runtime.create(&late) {
        Err(refusal) => refusal.line().contains("does not answer"),
        Ok(container) => {
            drop(container);
            false
        }
    };
    assert!(eventually(SOON, refused), "{}", serving.log());
    let shown = cli(runtime.config(), &["doctor"]).stdout;
    assert!(shown.contains("does not answer"), "{shown}");
    kill(daemon, Signal::SIGCONT).expect("it lives");
    assert!(eventually(SOON, || runtime.create(&late).is_ok()), "{}", serving.log());
    drop(container);
    assert!(eventually(SOON, || is_clean(&node)), "{:?}: {}", left(&node), serving.log());
}

/// A container of each mode, and a second one where the mode takes several. Each names its GPU.
fn of_every_mode() -> Vec<(&'static str, Bundle)> {
    let on = |gpu: &str| Bundle::with_client().env("GPUSHARE_DEVICES", gpu);
    let share = |gpu: &str| on(gpu).env("GPUSHARE_MEMORY", "4GiB").env("GPUSHARE_CORES", "40");
    vec![
        ("share", share("0")),
        ("share", share("0").env("GPUSHARE_HOST_MEMORY", "2GiB")),
        ("mps", share("1").env("GPUSHARE_MODE", "mps")),
        ("mps", share("1").env("GPUSHARE_MODE", "mps")),
        ("time-slice", on("2").env("GPUSHARE_MODE", "time-slice")),
        ("time-slice", on("2").env("GPUSHARE_MODE", "time-slice")),
        ("exclusive", on("3").env("GPUSHARE_MODE", "exclusive")),
        // Shares of a MIG instance, one of which may grow.
        ("share", share("4:0")),
        ("share", share("4:0").env("GPUSHARE_MEMORY_LIMIT", "5GiB")),
    ]
}

/// A node with a GPU for each mode, and one that is divided.
fn of_five() -> (SimulatedNode, Runtime) {
    let node = SimulatedNode::with(5, MODEL, "80GiB", &["--mig", "4=1g.10gb,1g.10gb"]);
    install(&node);
    let lends = format!("{}\n[quota]\nhost_memory = \"8GiB\"\n", LowLevel::Runc.settings());
    let runtime = Runtime::with_config(LowLevel::Runc, &node.config_with("lends", &lends));
    (node, runtime)
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn every_mode_runs_at_once_on_one_node_and_sees_what_is_its_own() {
    if !met(NEEDS) {
        return;
    }
    let (node, runtime) = of_five();
    let _cleared = Cleared(&node);
    let serving = serve(runtime.config());
    let bundles = of_every_mode();
    let containers: Vec<_> = bundles.iter().map(|(mode, bundle)| (*mode, runtime.run(bundle))).collect();
    assert_eq!(leases(runtime.config()).len(), bundles.len());
    let modes = compute_modes(&node);
    assert_eq!(modes.iter().position(|mode| *mode != "DEFAULT"), Some(1), "{modes:?}");
    assert_eq!(modes[1], "EXCLUSIVE_PROCESS");
    let of_instance = bundles.len() - 2;
    for (at, (mode, container)) in containers.iter().enumerate() {
        let (total, cores) = match *mode {
            "share" if at == of_instance => (4 * GIB, ALL / 8),
            "share" if at > of_instance => (5 * GIB, ALL / 8),
            "share" => (4 * GIB, ALL),
            "mps" => (4 * GIB, 53),
            _ => (80 * GIB + UNUSABLE, ALL),
        };
        assert_eq!(told(container, "cuda_total"), total, "{mode}");
        // NVML counts what the driver keeps of a whole GPU, too.
        let nvml = told(container, "nvml_total");
        assert!(if total > 80 * GIB { nvml > total } else { nvml == total }, "{mode}: {nvml}");
        assert_eq!(told(container, "multiprocessors"), cores, "{mode}");
    }
    for ((mode, bundle), lease) in bundles.iter().zip(shares(runtime.config())) {
        assert_eq!((lease["mode"].as_str(), lease["id"].as_str()), (Some(*mode), Some(bundle.id())));
    }
    let modes = |shown: &str| -> Vec<String> {
        let list: Value = serde_json::from_str(shown).expect("devices prints JSON");
        let gpus = list["gpus"].as_array().expect("a list").iter();
        gpus.map(|gpu| gpu["mode"].as_str().unwrap_or("free").to_owned()).collect()
    };
    let shown = cli(runtime.config(), &["devices", "--json"]).expect_success("devices").stdout;
    assert_eq!(modes(&shown), ["share", "mps", "time-slice", "exclusive", "share", "free"]);
    drop(containers);
    let clean = eventually(SOON, || is_clean(&node));
    assert!(clean, "{:?} {:?}: {}", daemons(&node), left(&node), serving.log());
    let shown = cli(runtime.config(), &["devices", "--json"]).expect_success("devices").stdout;
    assert_eq!(modes(&shown), ["free"; 6]);
}

/// `GPUSHARE_KILLS` kills, else 60: of creates and deletes, first processes, the serving process and the
/// daemons.
#[test]
#[ignore = "needs root and runc: kills containers and gpushare's own processes at random"]
fn no_kill_in_any_mode_leaves_a_lease_a_daemon_a_mount_or_a_compute_mode() {
    if !met(NEEDS) {
        return;
    }
    let wanted: u64 = std::env::var("GPUSHARE_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(60);
    let (node, runtime) = of_five();
    let _cleared = Cleared(&node);
    let bundles = of_every_mode();
    let mut serving = Some(serve(runtime.config()));
    // A generator of Numerical Recipes: the same kills in each run.
    let mut state = 7_u64;
    let mut random = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let mut kills = 0;
    while kills < wanted {
        let at = usize::try_from(random(bundles.len() as u64)).expect("an index");
        let (mode, bundle) = &bundles[at];
        let mut create = runtime.spawn_create(bundle);
        let is_killed = random(3) > 0;
        if is_killed {
            std::thread::sleep(Duration::from_micros(random(40_000)));
            create.kill().expect("a child can be killed");
            kills += 1;
        }
        create.wait().expect("a child can be waited for");
        match random(4) {
            0 => {
                for pid in leases(runtime.config()).iter().filter_map(|lease| lease.pid) {
                    let _ = kill(Pid::from_raw(i32::try_from(pid).expect("a pid")), Signal::SIGKILL);
                    kills += 1;
                }
            }
            1 => {
                serving.take().expect("it runs").kill();
                kills += 1;
                serving = Some(Service::spawn(&["mps", "serve"], runtime.config()));
            }
            2 => {
                for pid in daemons(&node) {
                    let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
                    kills += 1;
                }
            }
            _ => {}
        }
        let mut delete = runtime.spawn(&["delete", "--force"], bundle.id());
        if random(3) == 0 {
            std::thread::sleep(Duration::from_micros(random(20_000)));
            delete.kill().expect("a child can be killed");
            kills += 1;
        }
        delete.wait().expect("a child can be waited for");
        runtime.delete_force(bundle.id());
        bundle.kill_orphans();
        let returned = eventually(SOON, || {
            sweep(runtime.config());
            leases(runtime.config()).is_empty()
        });
        assert!(returned, "{mode}, {kills} kills: {:?}", leases(runtime.config()));
    }
    drop(serving);
    let last = serve(runtime.config());
    let clean = eventually(SOON, || is_clean(&node) && regions::left(&node.state()).is_empty());
    assert!(clean, "{:?} {:?}: {}", daemons(&node), left(&node), last.log());
}
