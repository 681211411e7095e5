//! A real dockerd with gpushare as a runtime: what `docker run` prints, what it refuses, and when a share is
//! released.

use std::time::Duration;

use gpushare_tests::artifacts::Installed;
use gpushare_tests::command::{alive, eventually};
use gpushare_tests::docker::{Docker, IMAGE};
use gpushare_tests::leases::{leases, sweep};
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::probe::{GIB, OUT_OF_MEMORY, Report, SUCCESS};
use gpushare_tests::runtime::LowLevel;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Docker, Need::Busybox];
const SOON: Duration = Duration::from_secs(20);

/// A node, its settings with runc, an installed gpushare, and a docker on it.
struct Place {
    docker: Docker,
    config: std::path::PathBuf,
    _installed: Installed,
    _node: SimulatedNode,
}

impl Place {
    fn new(by_default: bool) -> Self {
        let node = SimulatedNode::one_gpu();
        let config = node.config_with("docker", &LowLevel::Runc.settings());
        let installed = Installed::new();
        let docker = Docker::start(&installed.wrapper(), &config, by_default);
        Self { docker, config, _installed: installed, _node: node }
    }

    /// Starts a container called `name` that sleeps, with `flags`.
    fn sleeper(&self, name: &str, flags: &[&str]) {
        let flags = [&["--detach", "--name", name], flags].concat();
        let _ = self.docker.run(&flags, &["sleep", "1000"]).expect_success("docker run");
    }

    fn leases(&self) -> usize {
        leases(&self.config).len()
    }
}

#[test]
#[ignore = "needs root and docker: starts a daemon"]
fn docker_run_gives_a_gpu_of_the_size_asked_and_passes_on_the_refusal() {
    if !met(NEEDS) {
        return;
    }
    let place = Place::new(false);
    let docker = &place.docker;
    let client = ["gpushare-simulator", "probe", "--json", "--allocate", "5GiB", "--allocate", "3GiB"];
    let told = docker
        .run(&["--rm", "--runtime=gpushare", "-e", "GPUSHARE_MEMORY=4GiB"], &client)
        .expect_success("docker run --runtime=gpushare");
    let report = Report::parse(&told.stdout);
    report.assert_size(4 * GIB);
    assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS]);
    assert_eq!(told.stderr, "");
    assert_eq!(place.leases(), 0, "the container has ended");

    place.sleeper("large", &["--runtime=gpushare", "-e", "GPUSHARE_MEMORY=70GiB"]);
    let flags = ["--name", "late", "--runtime=gpushare", "-e", "GPUSHARE_MEMORY=20GiB"];
    let refused = docker.run(&flags, &["true"]);
    assert_eq!(refused.status.code(), Some(125), "{refused:?}");
    let stored = docker.inspect("late", "{{.State.Error}}");
    for text in [&refused.stderr, &stored] {
        assert!(text.contains("OCI runtime create failed"), "{text}");
        assert!(text.contains("20 GiB") && text.contains("10 GiB"), "{text}");
    }
    assert_eq!(place.leases(), 1);

    let exec = docker
        .call(&["exec", "large", "gpushare-simulator", "probe", "--json"])
        .expect_success("docker exec");
    Report::parse(&exec.stdout).assert_size(70 * GIB);
    let _ = docker.call(&["rm", "--force", "large"]).expect_success("docker rm -f");
    assert_eq!(place.leases(), 0, "rm -f returns when the container is gone");
    let _ = docker.call(&["start", "late"]).expect_success("docker start of what was refused before");
}

#[test]
#[ignore = "needs root and docker: starts a daemon"]
fn gpushare_can_be_the_default_runtime() {
    if !met(NEEDS) {
        return;
    }
    let place = Place::new(true);
    let told = place.docker.run(&["--rm"], &["id", "-u"]).expect_success("docker run without a request");
    assert_eq!((told.stdout.as_str(), told.stderr.as_str()), ("0\n", ""));
    let shares = ["--rm", "-e", "GPUSHARE_MEMORY=2GiB"];
    let told =
        place.docker.run(&shares, &["gpushare-simulator", "probe", "--json"]).expect_success("docker run");
    Report::parse(&told.stdout).assert_size(2 * GIB);
    let version = place.docker.call(&["info", "--format", "{{.DefaultRuntime}} {{.RuncCommit.ID}}"]);
    assert!(version.stdout.starts_with("gpushare "), "{version:?}");
    assert_eq!(place.leases(), 0);
}

#[test]
#[ignore = "needs root and docker: starts a daemon and kills its parts"]
fn a_share_returns_however_a_docker_container_ends() {
    if !met(NEEDS) {
        return;
    }
    let place = Place::new(false);
    let docker = &place.docker;
    let share = ["--runtime=gpushare", "-e", "GPUSHARE_MEMORY=4GiB"];
    let gone = || eventually(SOON, || place.leases() == 0);

    place.sleeper("killed", &share);
    assert_eq!(place.leases(), 1);
    kill(Pid::from_raw(docker.pid("killed")), Signal::SIGKILL).expect("init can be killed");
    assert!(gone(), "SIGKILL of init: {:?}", leases(&place.config));

    place.sleeper("restarted", &share);
    let _ = docker.call(&["restart", "--time", "0", "restarted"]).expect_success("docker restart");
    assert_eq!(place.leases(), 1, "restarted, with its share");
    let _ = docker.call(&["rm", "--force", "restarted"]).expect_success("docker rm -f");
    assert_eq!(place.leases(), 0, "rm -f");

    place.sleeper("shimless", &share);
    let init = docker.pid("shimless");
    for shim in docker.shims() {
        kill(Pid::from_raw(shim), Signal::SIGKILL).expect("a shim can be killed");
    }
    let cleaned = eventually(SOON, || {
        sweep(&place.config);
        place.leases() == 0
    });
    assert!(cleaned, "SIGKILL of the shim: {:?}", leases(&place.config));
    assert!(!alive(u64::from(init.unsigned_abs())), "the lease went before its container");

    place.sleeper("stopped", &share);
    let _ = docker.call(&["stop", "--time", "1", "stopped"]).expect_success("docker stop");
    assert!(gone(), "stop");
    // The same container starts again, from a config.json that docker writes anew.
    let _ = docker.call(&["start", "stopped"]).expect_success("docker start");
    assert_eq!(place.leases(), 1);
    let _ = docker
        .call(&["run", "--rm", "--network", "none", IMAGE, "true"])
        .expect_success("docker run with runc");
    assert_eq!(place.leases(), 1, "a container of another runtime changes nothing");
}
