//! A low-level runtime without the wrapper, in front of bundles that bring gpushare's hook, with either
//! version of cgroups.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::artifacts;
use crate::node::SimulatedNode;
use crate::rlimit;
use crate::runtime::{LowLevel, Runtime};
use crate::scratch::Scratch;

/// For which containers an engine runs the hooks of its folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Those with an annotation of gpushare's: the files as they are shipped.
    Annotated,
    /// All of them, as the documentation has it for requests by the environment.
    Always,
}

/// The folder for an engine's `--hooks-dir`, in `scratch`: the files of packaging/hooks.d with the program
/// `hook` and the settings file `config` in them.
///
/// # Panics
/// When a file cannot be read or written.
#[must_use]
pub fn hooks_folder(scratch: &Scratch, hook: &Path, config: &Path, when: When) -> PathBuf {
    let folder = scratch.folder("hooks.d");
    for name in ["99-gpushare.json", "99-gpushare-poststop.json"] {
        let shipped = artifacts::checkout().join("packaging/hooks.d").join(name);
        let text = fs::read_to_string(shipped).expect("the file is shipped");
        let mut entry: Value = serde_json::from_str(&text).expect("the file is JSON");
        entry["hook"]["path"] = json!(hook);
        let args = entry["hook"]["args"].as_array_mut().expect("the hook has arguments");
        args.extend([json!("--config"), json!(config)]);
        if when == When::Always {
            entry["when"] = json!({"always": true});
        }
        fs::write(folder.join(name), entry.to_string()).expect("a file can be written");
    }
    folder
}

/// Which cgroups a runtime sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cgroups {
    /// Those that the machine has.
    Machine,
    /// Version 1.
    V1,
    /// Version 2 alone, in a mount namespace of the call's own.
    V2,
}

impl Cgroups {
    /// The versions that this machine can show.
    #[must_use]
    pub fn versions() -> Vec<Self> {
        let has_v1 = Path::new("/sys/fs/cgroup/devices").is_dir();
        if has_v1 { vec![Self::V1, Self::V2] } else { vec![Self::V2] }
    }
}

/// The runtime on `node`, with these cgroups.
#[must_use]
pub fn runtime(low_level: LowLevel, node: &SimulatedNode, cgroups: Cgroups) -> Runtime {
    runtime_behind(low_level, node, cgroups, "true")
}

/// As [`runtime`], where the shell command `change` was run in the mount namespace of every call before.
///
/// # Panics
/// When the script that does it cannot be written.
#[must_use]
pub fn runtime_behind(low_level: LowLevel, node: &SimulatedNode, cgroups: Cgroups, change: &str) -> Runtime {
    Runtime::through(&program_behind(low_level, &node.root(), cgroups, change), low_level, node.config())
}

/// The program of [`runtime_behind`], in `folder`, for an engine to call.
///
/// # Panics
/// As [`runtime_behind`].
#[must_use]
pub fn program_behind(low_level: LowLevel, folder: &Path, cgroups: Cgroups, change: &str) -> PathBuf {
    let name = format!("{low_level:?}-{cgroups:?}").to_lowercase();
    let script = folder.join(name);
    fs::write(&script, self::script(low_level, cgroups, change)).expect("a script can be written");
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("its mode can be set");
    script
}

/// The shell command, for [`runtime_behind`], that shows the settings file `config` at its default place:
/// docker gives the hook no more than a stage. What it mounts is kept in `scratch`.
///
/// # Panics
/// When the settings cannot be copied.
#[must_use]
pub fn settings_in_place(scratch: &Scratch, config: &Path) -> String {
    let _ = scratch.folder("etc/gpushare");
    let settings = fs::read(config).expect("the settings can be read");
    scratch.file("etc/gpushare/gpushare.toml", settings);
    format!("mount -t overlay overlay -o lowerdir={}/etc:/etc /etc", scratch.path().display())
}

/// Each program executes the next, so the process id stays.
fn script(low_level: LowLevel, cgroups: Cgroups, change: &str) -> String {
    let unified = Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
    let view = match cgroups {
        Cgroups::V2 if !unified => "umount -l /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup",
        _ => "true",
    };
    let preload = match (low_level, cgroups) {
        (LowLevel::Crun, Cgroups::V2) => rlimit::stub().map(|path| format!("LD_PRELOAD={}", path.display())),
        _ => None,
    };
    let (preload, program) = (preload.unwrap_or_default(), low_level.program());
    format!(
        "#!/bin/sh\nexec unshare --mount --propagation private sh -c \
         '{view} && {change} && exec env {preload} {program} \"$@\"' sh \"$@\"\n"
    )
}
