//! Tests container engines that run on their own files with gpushare's wrapper: an attacker in each engine's
//! container gets its share.

use std::path::Path;
use std::process::Command;

use gpushare_tests::command::{self, Outcome};
use gpushare_tests::containerd::{Containerd, WITHOUT_CRI};
use gpushare_tests::docker::Docker;
use gpushare_tests::image::{self, IMAGE};
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::driver_version;
use gpushare_tests::podman::{EVERY, PODMAN, runtime_script, storage};
use gpushare_tests::runtime::LowLevel;
use gpushare_tests::scratch::Scratch;
use gpushare_tests::view::View;
use gpushare_tests::{artifacts, leases::leases};

use crate::node::{FILES, Node};
use crate::{ATTACKER, MIB, has_files};

const INSIDE: &str = "/attacker";
const NAME: &str = "attacked";
/// The modes that differ most: plain, within another call, freed but held by a file.
const MODES: [&str; 3] = ["long", "wrapped", "export"];

/// Returns the shell command of a container's program.
fn attack(mode: &str) -> String {
    let version = driver_version();
    format!("sleep 1000 | {INSIDE} {FILES} {mode} --pieces 40 --driver {version}")
}

/// Attacks in every mode in a container that `run` creates and `end` removes.
fn assert_holds(node: &Node, config: &Path, run: impl Fn(&str) -> Outcome, end: impl Fn()) {
    for mode in MODES {
        let _ = run(&attack(mode)).expect_success(mode);
        node.eventually("it takes what it can", || node.used() >= 960 * MIB);
        // It keeps requesting more for a while.
        node.eventually("a supervisor holds it", || node.supervisors().len() == 2);
        std::thread::sleep(std::time::Duration::from_millis(300));
        assert!(node.used() <= 1024 * MIB, "{mode}: {}", node.figures());
        end();
        node.eventually("its memory is gone", || node.used() == 0);
        node.eventually("its lease is gone", || leases(config).is_empty());
    }
}

#[test]
#[ignore = "needs root and docker: runs containers"]
fn an_attacker_in_dockers_container_gets_its_share() {
    if !has_files() || !met(&[Need::Root, Need::Runc, Need::Docker]) {
        return;
    }
    let node = Node::new();
    let config = node.config(LowLevel::Runc, "required", "library");
    let docker = Docker::start(&artifacts::wrapper(), &config, false);
    let files = format!("{}:{FILES}", node.files().display());
    let program = format!("{ATTACKER}:{INSIDE}:ro");
    let run = |script: &str| {
        let flags = ["--detach", "--runtime", "gpushare", "--name", NAME, "--env", "GPUSHARE_MEMORY=1GiB"];
        docker.run(
            &[&flags[..], &["--volume", &files, "--volume", &program]].concat(),
            &["/bin/sh", "-c", script],
        )
    };
    assert_holds(&node, &config, run, || drop(docker.call(&["rm", "--force", NAME])));
}

#[test]
#[ignore = "needs root and containerd: runs containers"]
fn an_attacker_in_containerds_container_gets_its_share() {
    if !has_files() || !met(&[Need::Root, Need::Runc, Need::Containerd]) {
        return;
    }
    let node = Node::new();
    let config = node.config(LowLevel::Runc, "required", "library");
    let containerd = Containerd::start(&config, View::AsItIs, WITHOUT_CRI);
    let archive = image::archive(containerd.scratch());
    let ctr = |words: &[&str]| containerd.ctr("attackers", words);
    let _ = ctr(&["image", "import", &archive.to_string_lossy()]).expect_success("import");
    let wrapper = artifacts::wrapper();
    let bind =
        |from: &str, to: &str, mode: &str| format!("type=bind,src={from},dst={to},options=rbind:{mode}");
    let (files, program) = (bind(&node.files().to_string_lossy(), FILES, "rw"), bind(ATTACKER, INSIDE, "ro"));
    let run = |script: &str| {
        ctr(&[
            "run",
            "--detach",
            "--runc-binary",
            &wrapper.to_string_lossy(),
            "--env",
            "GPUSHARE_MEMORY=1GiB",
            "--mount",
            &files,
            "--mount",
            &program,
            IMAGE,
            NAME,
            "/bin/sh",
            "-c",
            script,
        ])
    };
    let end = || {
        for words in [&["task", "rm", "--force", NAME][..], &["container", "rm", NAME]] {
            let _ = ctr(words).expect_success("its end");
        }
    };
    assert_holds(&node, &config, run, end);
}

#[test]
#[ignore = "needs root, runc and podman: runs containers"]
fn an_attacker_in_podmans_container_gets_its_share() {
    if !has_files() || !met(&[Need::Root, Need::Runc, Need::Podman]) {
        return;
    }
    let node = Node::new();
    let config = node.config(LowLevel::Runc, "required", "library");
    let scratch = Scratch::new("podman");
    let podman = |words: &[&str]| {
        let mut podman = Command::new(PODMAN);
        storage(&mut podman, &scratch);
        command::run(podman.current_dir(scratch.path()).args(words))
    };
    let archive = image::archive(&scratch);
    let _ = podman(&["load", "--quiet", "--input", &archive.to_string_lossy()]).expect_success("load");
    let runtime = runtime_script(&scratch, &artifacts::wrapper(), &config);
    let files = format!("{}:{FILES}", node.files().display());
    let program = format!("{ATTACKER}:{INSIDE}:ro");
    let run = |script: &str| {
        let runtime = format!("--runtime={}", runtime.display());
        let name = format!("--name={NAME}");
        let before = [&runtime, "run", "--detach", &name, "--env=GPUSHARE_MEMORY=1GiB", "--volume", &files];
        let after = ["--volume", &program, IMAGE, "/bin/sh", "-c", script];
        podman(&[&before[..], &EVERY, &after].concat())
    };
    assert_holds(&node, &config, run, || drop(podman(&["rm", "--force", "--time=0", NAME])));
}
