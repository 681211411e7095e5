//! podman with files of its own.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::scratch::Scratch;

/// Where Debian's podman is.
pub const PODMAN: &str = "/usr/bin/podman";

/// The flags that every container needs: no network, and limits that root may set without CAP_SYS_RESOURCE.
pub const EVERY: [&str; 3] = ["--network=none", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1000:1000"];

/// A program that executes `wrapper` under the settings file `config`: conmon gives runtimes only its own environment.
///
/// # Panics
/// When it cannot be written.
#[must_use]
pub fn runtime_script(scratch: &Scratch, wrapper: &Path, config: &Path) -> PathBuf {
    let text =
        format!("#!/bin/sh\nGPUSHARE_CONFIG='{}' exec '{}' \"$@\"\n", config.display(), wrapper.display());
    let script = scratch.file("gpushare-runtime", text);
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("a mode can be set");
    script
}

/// The flags that keep podman's files in `scratch`.
pub fn storage(podman: &mut Command, scratch: &Scratch) {
    for (flag, name) in [("--root", "root"), ("--runroot", "run"), ("--tmpdir", "tmp")] {
        podman.arg(flag).arg(scratch.path().join(name));
    }
    podman.args(["--storage-driver=vfs", "--cgroup-manager=cgroupfs", "--events-backend=file"]);
}
