//! Scenarios that only docker has: `--gpus`, and compose files.

use std::fs;
use std::process::Command;
use std::time::Duration;

use gpushare_tests::command::{self, alive, eventually};
use gpushare_tests::docker::NVIDIA_HOOK_RAN;
use gpushare_tests::image::IMAGE;
use gpushare_tests::leases::{cli, shares, sweep};
use gpushare_tests::probe::{GIB, OUT_OF_MEMORY, Report, SUCCESS};
use gpushare_tests::runtime::LowLevel;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;

use crate::docker::DockerEngine;
use crate::engine::{Engine, Wanted, With};
use crate::place::Place;
use crate::scenarios::Scene;

/// Where Debian's docker-compose is.
pub const COMPOSE: &str = "/usr/bin/docker-compose";

/// docker writes NVIDIA's hook into the bundle, which would put whole GPUs beside the share. gpushare removes
/// it.
pub fn takes_nvidias_hook_out(scene: &mut Scene<'_>) {
    let ran = scene.engine.folder().join(NVIDIA_HOOK_RAN);
    scene.start(&Wanted::client("one", &[]).share("4GiB").with(With::Gpus));
    scene.report("one").assert_size(4 * GIB);
    assert!(!ran.exists(), "the hook of --gpus ran beside us");
    // Under runc the hook does run, so the check above would have found it.
    scene.start(&Wanted::waiting("other").with(With::Gpus).with(With::PlainRunc));
    assert!(ran.exists(), "docker's --gpus starts the hook");
    fs::remove_file(ran).expect("the mark of the hook can be removed");
}

/// A daemon whose flags name its settings is judged by those, and not by the usual file.
pub fn assert_found_by_doctor(docker: &DockerEngine, place: &Place) {
    let told = cli(&place.config, &["doctor"]).stdout;
    let settings = docker.folder().join("daemon.json");
    let want = format!("docker ({}) knows the runtime", settings.display());
    assert!(told.contains(&want), "{want:?} is not in: {told}");
}

/// With our hook under the name of NVIDIA's, docker gives shares by `--gpus` and a low-level runtime alone.
pub fn takes_nvidias_place(scene: &mut Scene<'_>, low_level: LowLevel, address: &str) {
    let gpus = |wanted: Wanted| wanted.with(With::Gpus).with(With::DefaultRuntime);
    scene.start(&gpus(Wanted::client("one", &["5GiB", "3GiB"]).share("4GiB")));
    let report = scene.report("one");
    report.assert_size(4 * GIB);
    assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS]);
    scene.exec_report("one").assert_size(4 * GIB);
    let pid = u64::try_from(scene.engine.pid("one")).ok();
    let held = scene.leases_of("one");
    assert_eq!(held.len(), 1, "{held:?}");
    assert_eq!((held[0].state.as_str(), held[0].pid, &held[0].memory[..]), ("active", pid, &[4 * GIB][..]));
    restarts(scene, low_level, address);
    let held = scene.leases_of("one");
    // Without --gpus docker runs no hook, whatever is asked for.
    scene.start(&Wanted::waiting("plain").share("4GiB").with(With::DefaultRuntime));
    scene.assert_untouched("plain");

    let late = gpus(Wanted::waiting("late").share("78GiB"));
    let said = scene.try_start(&late).expect_err("76 GiB are free, 78 GiB are asked");
    // crun drops what a hook says.
    let parts: &[&str] = match low_level {
        LowLevel::Runc => {
            &["gpushare-hook: cannot lease a GPU", "78 GiB requested", "76 GiB free", "gpushare ps"]
        }
        LowLevel::Crun | LowLevel::Youki => &["error executing hook", "nvidia-container-runtime-hook"],
    };
    for part in parts {
        assert!(said.contains(*part), "{part:?} is not in: {said}");
    }
    assert_eq!(scene.leases(), held, "what was refused holds nothing");
    scene.engine.remove("late");

    // docker runs no hook when a container ends. What it held is collected by the next container that finds
    // the node full, or by the sweep timer.
    scene.engine.stop("one");
    let ended = scene.leases();
    assert_eq!((ended.len(), ended[0].state.as_str()), (1, "gone"));
    scene.start(&late);
    assert_eq!(scene.leases(), scene.leases_of("late"));
    scene.engine.stop("late");
    sweep(&scene.place.config);
    scene.assert_all_returned();
}

/// dockerd doubles the wait before each restart of a container that ran for less than this.
const DOCKERS_MEMORY: Duration = Duration::from_secs(11);

/// How often the container of hook-only mode is restarted in each way: `GPUSHARE_HOOK_ONLY_RESTARTS`, else 3
/// times.
fn rounds() -> usize {
    std::env::var("GPUSHARE_HOOK_ONLY_RESTARTS").ok().and_then(|text| text.parse().ok()).unwrap_or(3)
}

/// docker runs no hook at a container's end, so each start of the container `one` finds the lease of its
/// earlier life.
fn restarts(scene: &Scene<'_>, low_level: LowLevel, address: &str) {
    let docker = |args: &[&str]| {
        let mut docker = Command::new("docker");
        docker.args(["--host", address]).env("DOCKER_CONFIG", scene.engine.folder()).args(args);
        let _ = command::run(&mut docker).expect_success(&args.join(" "));
    };
    let ways: [(&str, &[&[&str]]); 4] = [
        ("restart", &[&["restart", "--time", "0", "one"]]),
        ("stop, start", &[&["stop", "--time", "0", "one"], &["start", "one"]]),
        ("kill, start", &[&["kill", "one"], &["wait", "one"], &["start", "one"]]),
        ("--restart always", &[&["update", "--restart", "always", "one"]]),
    ];
    // docker's update also sets memory limits, which crun 1.8 cannot change here, also without gpushare.
    let possible = |(way, _): &(&str, _)| *way != "--restart always" || low_level == LowLevel::Runc;
    for (way, calls) in ways.into_iter().filter(possible) {
        for round in 0..rounds() {
            let before = scene.engine.pid("one");
            calls.iter().for_each(|args| docker(args));
            if way == "--restart always" {
                // The container's program is killed, and dockerd starts it again.
                kill(Pid::from_raw(before), Signal::SIGKILL).expect("the container's init can be killed");
            }
            let runs = || {
                let held = scene.leases_of("one");
                let pid = held.first().and_then(|lease| lease.pid);
                held.len() == 1 && pid != u64::try_from(before).ok() && pid.is_some_and(alive)
            };
            assert!(
                eventually(Duration::from_secs(90), runs),
                "{way}, round {round}: {:?}",
                scene.leases_of("one")
            );
            if way == "--restart always" && rounds() > 5 {
                std::thread::sleep(DOCKERS_MEMORY);
            }
        }
    }
    if low_level == LowLevel::Runc {
        docker(&["update", "--restart", "no", "one"]);
    }
    scene.exec_report("one").assert_size(4 * GIB);
}

/// A compose service with `runtime: gpushare` is started and removed.
pub fn composes(scene: &mut Scene<'_>, address: &str) {
    let wanted = Wanted::waiting("composed");
    let services = json!({"services": {"trainer": {
        "image": IMAGE,
        "container_name": wanted.name,
        "runtime": "gpushare",
        "network_mode": "none",
        "environment": {"GPUSHARE_MEMORY": "4GiB", "GPUSHARE_CORES": "30"},
        "command": wanted.args,
    }}});
    // JSON is valid YAML.
    let file = scene.engine.folder().join("compose.yaml");
    fs::write(&file, services.to_string()).expect("a compose file can be written");
    let compose = |verbs: &[&str]| {
        let mut compose = Command::new(COMPOSE);
        compose.env("DOCKER_HOST", address).env("DOCKER_CONFIG", scene.engine.folder());
        compose.arg("--file").arg(&file).args(["--project-name", "gpushare"]).args(verbs);
        let _ = command::run(&mut compose).expect_success("docker-compose");
    };
    compose(&["up", "--detach"]);
    let told = scene.engine.exec("composed", &["gpushare-simulator", "probe", "--json"]);
    Report::parse(&told.expect_success("the CUDA client by exec").stdout).assert_size(4 * GIB);
    assert_eq!(scene.leases_of("composed").len(), 1);
    let told = &shares(&scene.place.config)[0]["containers"][0];
    assert_eq!([&told["name"], &told["image"], &told["project"]], ["composed", IMAGE, "gpushare"], "{told}");
    compose(&["down"]);
    scene.assert_all_returned();
}
