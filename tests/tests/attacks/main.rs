//! The attack table: what a hostile image, bundle, container or user tries, and what must come of it. A
//! test's name begins with its row. docs/attacks.md says which rows are tested elsewhere, and how each test
//! was seen to fail.

mod config;
mod docker;
mod files;
mod hook;
mod image;
mod inside;
mod paths;
mod processes;
mod region;
mod requests;
mod rights;
mod store;
mod table;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use gpushare_tests::bundle::Bundle;
use gpushare_tests::needs::Need;
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::runtime::{LowLevel, Runtime};
use gpushare_tests::scratch::Scratch;
use gpushare_tests::{artifacts, command};

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Crun, Need::Busybox];

/// A container that asks for a share; its image is one static busybox.
fn share() -> Bundle {
    asking(Bundle::small())
}

fn asking(bundle: Bundle) -> Bundle {
    bundle.env("GPUSHARE_MEMORY", "4GiB")
}

/// Runs `attack` in front of each low-level runtime, on a node of its own.
fn on_both(attack: impl Fn(&SimulatedNode, &Runtime, LowLevel)) {
    for low_level in LowLevel::ALL {
        let node = SimulatedNode::one_gpu();
        attack(&node, &Runtime::wrapped(low_level, &node), low_level);
    }
}

/// How often an attack that needs luck is tried: `GPUSHARE_ATTACK_ROUNDS`, else `usual`.
fn rounds(usual: usize) -> usize {
    std::env::var("GPUSHARE_ATTACK_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

/// What came of a container whose image or bundle is hostile.
enum Outcome {
    /// It was created, started and deleted. Holds the lines of its mountinfo while it ran.
    Ran(Vec<String>),
    /// It was refused. Holds what the engine's user reads.
    Refused(String),
}

/// Compiles a program of `tests/programs` into one static file, for images that have no library.
fn compile(source: &str, program: &Path) {
    let source = artifacts::checkout().join("tests/programs").join(source);
    let mut compiler = Command::new("cc");
    let compiler = compiler.args(["-static", "-O1", "-Wall", "-Werror", "-o"]).arg(program).arg(source);
    let _ = command::run(compiler).expect_success("cc");
}

/// Creates, starts and deletes the container.
fn attempt(runtime: &Runtime, bundle: &Bundle) -> Outcome {
    match runtime.create(bundle) {
        Ok(container) => {
            container.start();
            let mounts =
                container.exec(&["/bin/cat", "/proc/self/mountinfo"]).expect_success("mountinfo").stdout;
            Outcome::Ran(mounts.lines().map(str::to_owned).collect())
        }
        Err(refusal) => Outcome::Refused(refusal.log.unwrap_or(refusal.outcome.stderr)),
    }
}

/// A folder of the host that nobody may touch, with a file in it.
fn outside() -> Scratch {
    let scratch = Scratch::new("outside");
    scratch.file("kept", "as it was");
    scratch
}

/// Everything at or below `folder`: kind, mode, owner, length and modification of each file.
fn tree(folder: &Path) -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    let Ok(metadata) = fs::symlink_metadata(folder) else { return found };
    let kind = format!(
        "{:o} {}:{} {} {}.{}",
        metadata.permissions().mode(),
        metadata.uid(),
        metadata.gid(),
        metadata.len(),
        metadata.mtime(),
        metadata.mtime_nsec()
    );
    found.insert(folder.to_owned(), kind);
    if metadata.is_dir() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            found.extend(tree(&entry.path()));
        }
    }
    found
}

/// A program that is called as a low-level runtime and does nothing, for tests of what happens before one is
/// needed.
fn idle_runtime(scratch: &Scratch) -> PathBuf {
    let program = scratch.file("idle-runtime", "#!/bin/sh\nexit 0\n");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("a mode can be set");
    program
}

/// The settings of `node` with that program as its low-level runtime.
fn idle_config(node: &SimulatedNode, scratch: &Scratch) -> PathBuf {
    let program = idle_runtime(scratch);
    node.config_with("idle", &format!("[runtime]\ncandidates = [\"{}\"]", program.display()))
}
