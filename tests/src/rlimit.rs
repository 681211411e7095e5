//! crun on cgroup v2 raises its limit of locked memory before it loads a device program. Where root lacks
//! CAP_SYS_RESOURCE, as in many build containers, that fails, although kernels from 5.11 on do not need it. A
//! preloaded `setrlimit` then says yes.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use crate::command;
use crate::scratch::Scratch;

const STUB: &str = "int setrlimit(int what, const void *limit) { return 0; }\n\
                    int setrlimit64(int what, const void *limit) { return 0; }\n";
const SYS_RESOURCE: u64 = 1 << 24;

/// The library to preload so that crun runs all the same; `None` where root may raise its limits.
pub fn stub() -> Option<PathBuf> {
    static LIBRARY: OnceLock<Option<PathBuf>> = OnceLock::new();
    LIBRARY.get_or_init(|| (!may_raise_limits()).then(build)).clone()
}

fn may_raise_limits() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let held =
        status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("CapEff:")?.trim(), 16).ok());
    held.unwrap_or(0) & SYS_RESOURCE != 0
}

/// Builds the library. It is left in the temporary folder, since every test of this process uses it.
fn build() -> PathBuf {
    let scratch = Scratch::new("rlimit");
    let source = scratch.file("setrlimit.c", STUB);
    let library = source.with_extension("so");
    let mut compile = Command::new("cc");
    compile.args(["-shared", "-fPIC", "-w", "-o"]).arg(&library).arg(&source);
    let _ = command::run(&mut compile).expect_success("cc of a stub for setrlimit");
    std::mem::forget(scratch);
    library
}
