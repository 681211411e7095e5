//! Scenarios of docker's own: `--gpus`, and compose files.

use std::fs;
use std::process::Command;

use gpushare_tests::command;
use gpushare_tests::docker::NVIDIA_HOOK_RAN;
use gpushare_tests::image::IMAGE;
use gpushare_tests::probe::{GIB, Report};
use serde_json::json;

use crate::engine::{Wanted, With};
use crate::scenarios::Scene;

/// Where Debian's docker-compose is.
pub const COMPOSE: &str = "/usr/bin/docker-compose";

/// docker writes NVIDIA's hook into the bundle, which would put whole GPUs beside the share.
pub fn takes_nvidias_hook_out(scene: &mut Scene<'_>) {
    let ran = scene.engine.folder().join(NVIDIA_HOOK_RAN);
    scene.start(&Wanted::client("one", &[]).share("4GiB").with(With::Gpus));
    scene.report("one").assert_size(4 * GIB);
    assert!(!ran.exists(), "the hook of --gpus ran beside us");
    // Under runc it does run: the look would find it.
    scene.start(&Wanted::waiting("other").with(With::Gpus).with(With::PlainRunc));
    assert!(ran.exists(), "docker's --gpus starts the hook");
    fs::remove_file(ran).expect("the mark of the hook can be removed");
}

/// A service with `runtime: gpushare`, up and down.
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
    // JSON is YAML.
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
    compose(&["down"]);
    scene.assert_all_returned();
}
