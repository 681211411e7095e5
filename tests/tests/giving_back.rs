//! A lease ends when its container has ended and not before, whichever process is killed meanwhile.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use gpushare_tests::artifacts;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::command::{alive, eventually, run};
use gpushare_tests::leases::{cli, leases, leases_of, sweep};
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::runtime::{LowLevel, Runtime};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

/// The longest time that the kernel may take to end a killed process.
const SOON: Duration = Duration::from_secs(5);

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Crun, Need::Busybox];

fn request() -> Bundle {
    Bundle::small().env("GPUSHARE_MEMORY", "4GiB")
}

#[test]
#[ignore = "needs root and runc: runs a container"]
fn a_simulated_node_goes_once_its_containers_have_ended() {
    if !met(&[Need::Root, Need::Runc, Need::Busybox]) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let remove = || run(Command::new(artifacts::simulator()).arg("remove").arg(node.root()));
    let bundle = request();
    let container = runtime.run(&bundle);
    let told = remove();
    assert!(!told.success() && told.stderr.contains("has containers that hold a share"), "{told:?}");
    drop(container);
    let _ = remove().expect_success("gpushare-simulator remove");
    assert!(!node.root().exists());
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_lease_follows_its_container_from_create_to_delete() {
    if !met(NEEDS) {
        return;
    }
    for low_level in LowLevel::ALL {
        let node = SimulatedNode::one_gpu();
        let runtime = Runtime::wrapped(low_level, &node);
        let bundle = request();
        let container = runtime.create(&bundle).expect("the GPU is free");
        let held = leases_of(runtime.config(), bundle.id());
        assert_eq!(held.len(), 1, "{low_level:?}");
        assert_eq!(
            (held[0].state.as_str(), &held[0].memory[..]),
            ("active", &[4 << 30][..]),
            "{low_level:?}"
        );
        assert_eq!(
            held[0].pid,
            u64::try_from(container.pid()).ok(),
            "{low_level:?}: the lease is held by init"
        );

        container.start();
        sweep(runtime.config());
        assert!(!runtime.call(&["delete"], bundle.id()).success(), "a running container cannot be deleted");
        assert_eq!(leases(runtime.config()), held, "{low_level:?}: it runs, so the lease stands");

        container.stop();
        assert_eq!(leases(runtime.config()), [], "{low_level:?}");
    }
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_killed_init_gives_back_by_delete_or_by_the_sweep() {
    if !met(NEEDS) {
        return;
    }
    for low_level in LowLevel::ALL {
        let node = SimulatedNode::one_gpu();
        let runtime = Runtime::wrapped(low_level, &node);
        let deleted = request();
        let swept = request();
        let (first, second) = (runtime.run(&deleted), runtime.run(&swept));
        assert_eq!(leases(runtime.config()).len(), 2, "{low_level:?}");

        first.kill_init();
        runtime.delete_force(deleted.id());
        assert_eq!(leases_of(runtime.config(), deleted.id()), [], "{low_level:?}");

        second.kill_init();
        let returned = eventually(SOON, || {
            sweep(runtime.config());
            leases(runtime.config()).is_empty()
        });
        assert!(returned, "{low_level:?}: {:?}", leases(runtime.config()));
        runtime.delete_force(swept.id());
    }
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_call_that_ends_a_container_gives_its_share_back_before_it_returns() {
    if !met(NEEDS) {
        return;
    }
    for low_level in LowLevel::ALL {
        let node = SimulatedNode::one_gpu();
        let runtime = Runtime::wrapped(low_level, &node);
        let (running, created, whole, failing) = (request(), request(), request(), request());

        runtime.run(&running).leave();
        runtime.delete_force(running.id());
        assert_eq!(leases(runtime.config()), [], "{low_level:?}: delete --force of a running container");
        assert!(!has_poststop(&running), "{low_level:?}: `delete` needs no help");

        runtime.create(&created).expect("the GPU is free").leave();
        let deleted = runtime.call(&["delete"], created.id()).success(); // runc does that, crun does not
        assert_eq!(leases(runtime.config()).is_empty(), deleted, "{low_level:?}: delete of a created one");
        runtime.delete_force(created.id());
        assert_eq!(leases(runtime.config()), [], "{low_level:?}: delete --force of a created one");

        for (bundle, script, status) in [(whole, "exit 0", 0), (failing, "exit 7", 7)] {
            let bundle = bundle.args(&["/bin/sh", "-c", script]);
            bundle.write();
            let folder = bundle.path().to_str().expect("paths of tests are UTF-8");
            let ran = runtime.call(&["run", "--bundle", folder], bundle.id());
            assert_eq!(
                (ran.status.code(), leases(runtime.config())),
                (Some(status), Vec::new()),
                "{low_level:?}"
            );
            assert!(has_poststop(&bundle), "{low_level:?}: nobody calls `delete` after `run`");
        }
        // An engine that never waits for its children, whose disposition the wrapper inherits.
        let deaf = request();
        runtime.run(&deaf).leave();
        let log = deaf.path().join("deaf.json");
        let call = runtime.command(&log, ["delete", "--force", deaf.id()]);
        let mut deafly = Command::new("/bin/sh");
        deafly.args(["-c", "trap '' CHLD; exec \"$@\"", "sh"]).arg(call.get_program()).args(call.get_args());
        deafly.env_clear().envs(call.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let _ = run(&mut deafly).expect_success("delete --force with SIGCHLD ignored");
        assert_eq!(leases(runtime.config()), [], "{low_level:?}: SIGCHLD ignored");

        let unknown = runtime.call(&["delete"], "unknown");
        assert!(!unknown.success(), "{low_level:?}: {unknown:?}");
    }
}

/// Whether the bundle's configuration has a poststop hook of gpushare's.
fn has_poststop(bundle: &Bundle) -> bool {
    let json: Value = serde_json::from_slice(&bundle.config_bytes()).expect("a configuration is JSON");
    let hooks = json["hooks"]["poststop"].as_array().map_or(&[][..], Vec::as_slice);
    let ours = artifacts::hook().display().to_string();
    hooks.iter().any(|hook| hook["path"] == ours)
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_full_node_looks_for_dead_leases_before_it_refuses() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let dead = Bundle::small().env("GPUSHARE_MEMORY", "80GiB");
    let next = Bundle::small().env("GPUSHARE_MEMORY", "80GiB");
    let first = runtime.run(&dead);
    assert!(runtime.create(&next).is_err(), "the first one runs");
    first.kill_init();
    next.write();
    let plan = || cli(runtime.config(), &["plan", "--bundle", next.path().to_str().expect("it is UTF-8")]);
    let planned = eventually(SOON, || plan().success()); // the kernel may take a moment to end it
    assert!(planned, "{:?}", plan());
    assert_eq!(runtime.run(&next).status().as_deref(), Some("running"));
}

#[test]
#[ignore = "needs root and runc: kills the wrapper while it creates"]
fn a_wrapper_killed_at_any_point_of_create_leaves_nothing() {
    if !met(NEEDS) {
        return;
    }
    for low_level in LowLevel::ALL {
        let node = SimulatedNode::one_gpu();
        let runtime = Runtime::wrapped(low_level, &node);
        // The first create also reads the node's memory sizes, which takes longer.
        let first = request();
        drop(runtime.run(&first));
        for round in 0..60_u64 {
            let bundle = request();
            let mut create = runtime.spawn_create(&bundle);
            std::thread::sleep(Duration::from_micros(round * 700));
            create.kill().expect("a child can be killed");
            create.wait().expect("a child can be waited for");
            // A kill takes a moment. A lease that exists after a sweep must be held by a process that still
            // lives then.
            let swept = || {
                sweep(runtime.config());
                leases(runtime.config()).iter().all(|lease| lease.pid.is_some_and(alive))
            };
            if round % 2 == 0 {
                let held = eventually(SOON, swept);
                assert!(held, "{low_level:?}, round {round}: {:?}", leases(runtime.config()));
            }
            runtime.delete_force(bundle.id());
            // crun that is killed between its hooks and its status file leaves an init that waits for `start`
            // for ever. Its own `delete --force` does not know that init.
            assert_returns(runtime.config(), &format!("{low_level:?}, round {round}"));
        }
    }
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_container_that_its_runtime_has_forgotten_is_ended_by_delete_force() {
    if !met(NEEDS) {
        return;
    }
    for low_level in LowLevel::ALL {
        let node = SimulatedNode::one_gpu();
        let runtime = Runtime::wrapped(low_level, &node);
        let bundle = request();
        let container = runtime.create(&bundle).expect("the GPU is free");
        let init = u64::from(container.pid().unsigned_abs());
        // As if the runtime was killed between its hooks and its own record of the container.
        fs::remove_dir_all(runtime.root().join(bundle.id())).expect("the record can be removed");
        let _ = runtime.call(&["delete"], bundle.id());
        assert!(alive(init), "{low_level:?}: nobody asked for force");
        assert_eq!(leases(runtime.config()).len(), 1, "{low_level:?}: it lives, so the lease stands");

        runtime.delete_force(bundle.id());
        assert!(!alive(init), "{low_level:?}");
        assert_eq!(leases(runtime.config()), [], "{low_level:?}");
    }
}

#[test]
#[ignore = "needs root, runc and crun: kills the wrapper while it starts and deletes"]
fn a_wrapper_killed_at_any_point_of_start_or_delete_leaves_nothing() {
    if !met(NEEDS) {
        return;
    }
    for low_level in LowLevel::ALL {
        let node = SimulatedNode::one_gpu();
        let runtime = Runtime::wrapped(low_level, &node);
        for round in 0..20_u64 {
            let bundle = request();
            let container = runtime.create(&bundle).expect("the GPU is free");
            for call in [&["start"][..], &["delete"], &["delete", "--force"]] {
                let mut killed = runtime.spawn(call, bundle.id());
                std::thread::sleep(Duration::from_micros(round * 1500));
                killed.kill().expect("a child can be killed");
                killed.wait().expect("a child can be waited for");
                sweep(runtime.config());
                let standing = leases(runtime.config()).len();
                let running = usize::from(alive(u64::from(container.pid().unsigned_abs())));
                assert!(
                    standing >= running,
                    "{low_level:?}, round {round}: {call:?}: it lives without its lease"
                );
            }
            runtime.delete_force(bundle.id());
            assert_returns(runtime.config(), &format!("{low_level:?}, round {round}"));
        }
    }
}

/// Two deletions of one container at once would meet each other's half-removed records.
#[test]
#[ignore = "needs root and runc: kills the wrapper while it deletes"]
fn a_killed_call_ends_the_low_level_runtime_that_it_waits_for() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let told = node.root().join("deletes");
    let slow = node.root().join("slow");
    fs::write(
        &slow,
        format!("#!/bin/sh\necho $$ >{0}.new; mv {0}.new {0}; exec sleep 100\n", told.display()),
    )
    .expect("a file can be written");
    fs::set_permissions(&slow, fs::Permissions::from_mode(0o755)).expect("a mode can be set");
    let settings = node.config_with("slow", &format!("[runtime]\ncandidates = [{slow:?}]"));
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let bundle = request();
    let container = runtime.run(&bundle);

    let mut delete = runtime.command(&node.root().join("log.json"), ["delete", "--force", bundle.id()]);
    let mut delete = delete.env("GPUSHARE_CONFIG", settings).spawn().expect("the wrapper can be started");
    assert!(eventually(SOON, || told.exists()), "the low-level runtime is called");
    let pid = fs::read_to_string(&told).expect("it told its pid").trim().parse().expect("a number");
    assert!(alive(pid));
    delete.kill().expect("a child can be killed");
    delete.wait().expect("a child can be waited for");
    assert!(eventually(SOON, || !alive(pid)));
    container.stop();
    assert_eq!(leases(runtime.config()), []);
}

#[test]
#[ignore = "needs root and runc: runs a container"]
fn an_administrator_cannot_release_what_still_runs() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let bundle = request();
    let container = runtime.run(&bundle);
    let root = runtime.root().to_string_lossy().into_owned();
    let refused = cli(runtime.config(), &["release", "--root", &root, bundle.id()]);
    assert!(!refused.success(), "{refused:?}");
    assert_eq!(leases(runtime.config()).len(), 1);
    container.kill_init();
    let _ =
        cli(runtime.config(), &["release", "--root", &root, bundle.id()]).expect_success("gpushare release");
    assert_eq!(leases(runtime.config()), []);
}

/// Fails unless the sweep soon takes back every share.
fn assert_returns(config: &Path, context: &str) {
    let returned = eventually(SOON, || {
        sweep(config);
        leases(config).is_empty()
    });
    assert!(returned, "{context}: {:?}", leases(config));
}

/// The log's lines about the leases of the container `id`, each as `MESSAGE REASON`.
fn told(log: &Path, id: &str) -> Vec<String> {
    let text = fs::read_to_string(log).expect("there is a log");
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("a line is an object"));
    let about = lines.map(|mut line| line["fields"].take()).filter(|fields| fields["container"] == id);
    let word = |field: &Value| field.as_str().unwrap_or_default().to_owned();
    let of_leases = about.filter(|fields| word(&fields["message"]).starts_with("lease "));
    of_leases.map(|fields| format!("{} {}", word(&fields["message"]), word(&fields["reason"]))).collect()
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn the_log_has_one_line_per_lease_granted_refused_and_released() {
    if !met(NEEDS) {
        return;
    }
    for low_level in LowLevel::ALL {
        let node = SimulatedNode::one_gpu();
        let log = node.root().join("gpushare.log");
        let logged =
            format!("{}\n[log]\nfile = \"{}\"\nformat = \"json\"", low_level.settings(), log.display());
        let runtime = Runtime::with_config(low_level, &node.config_with("logged", &logged));
        let (ended, swept, forced) = (request(), request(), request());
        runtime.run(&ended).stop();
        let (second, third) = (runtime.run(&swept), runtime.run(&forced));
        second.kill_init();
        let returned = eventually(SOON, || {
            sweep(runtime.config());
            leases_of(runtime.config(), swept.id()).is_empty()
        });
        assert!(returned, "{low_level:?}");
        let _ =
            cli(runtime.config(), &["release", "--force", forced.id()]).expect_success("gpushare release");
        drop((second, third));
        let failed = request().args(&["/no/such/program"]);
        assert!(runtime.create(&failed).is_err(), "{low_level:?}");
        runtime.delete_force(failed.id());
        for (bundle, reason) in
            [(&ended, "ended"), (&swept, "swept"), (&forced, "forced"), (&failed, "ended")]
        {
            let want = ["lease granted ".to_owned(), format!("lease released {reason}")];
            assert_eq!(told(&log, bundle.id()), want, "{low_level:?}");
        }
        let refused = Bundle::small().env("GPUSHARE_MEMORY", "81GiB");
        let line = runtime.create(&refused).map(drop).expect_err("the GPU has 80 GiB").line();
        assert_eq!(told(&log, refused.id()), [format!("lease refused {line}")], "{low_level:?}");
    }
}

/// In hook-only mode the runtime itself or its hook is killed.
#[test]
#[ignore = "needs root, runc and crun: kills runtimes while they create"]
fn a_runtime_or_its_hook_killed_at_any_point_of_create_leaves_nothing() {
    if !met(NEEDS) {
        return;
    }
    for low_level in LowLevel::ALL {
        let node = SimulatedNode::one_gpu();
        let config = node.config().to_str().expect("a plain path");
        let hooked = |bundle: Bundle| {
            let hook = artifacts::hook();
            bundle.hook("createRuntime", &hook, &["createRuntime", "--config", config]).hook(
                "poststop",
                &hook,
                &["poststop", "--config", config],
            )
        };
        let runtime = Runtime::bare(low_level);
        drop(runtime.run(&hooked(request())));
        for round in 0..rounds(60) {
            let bundle = hooked(request());
            let mut create = runtime.spawn_create(&bundle);
            if round % 3 == 0 {
                // The kill comes at a different moment of the hook in each round.
                let found = eventually(Duration::from_millis(500), || hook_of(create.id()).is_some());
                std::thread::sleep(Duration::from_micros(round / 3 % 20 * 400));
                if let Some(hook) = hook_of(create.id()).filter(|_| found) {
                    let _ = kill(Pid::from_raw(hook), Signal::SIGKILL);
                }
            } else {
                std::thread::sleep(Duration::from_micros(round % 60 * 700));
                let _ = create.kill();
            }
            create.wait().expect("a child can be waited for");
            sweep(node.config());
            let standing = leases(node.config());
            let inits = runtime.status(bundle.id()).filter(|status| status == "created");
            assert!(
                inits.is_none() || !standing.is_empty(),
                "{low_level:?}, round {round}: created without its lease"
            );
            runtime.delete_force(bundle.id());
            bundle.kill_orphans();
            assert_returns(node.config(), &format!("{low_level:?}, round {round}"));
        }
    }
}

/// The number of rounds: `GPUSHARE_KILLS`, else `usual`.
fn rounds(usual: u64) -> u64 {
    std::env::var("GPUSHARE_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

/// The pid of the hook that a process below `pid` runs.
fn hook_of(pid: u32) -> Option<i32> {
    let text = |path: String| std::fs::read_to_string(path).unwrap_or_default();
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten();
    let children = threads.flat_map(|thread| {
        let children = text(format!("{}/children", thread.path().display()));
        children.split_whitespace().filter_map(|child| child.parse::<u32>().ok()).collect::<Vec<_>>()
    });
    let is_hook = |pid: &u32| text(format!("/proc/{pid}/comm")).starts_with("gpushare-hook");
    let all: Vec<u32> = children.collect();
    let own = all.iter().find(|child| is_hook(child)).and_then(|child| i32::try_from(*child).ok());
    own.or_else(|| all.iter().find_map(|child| hook_of(*child)))
}
