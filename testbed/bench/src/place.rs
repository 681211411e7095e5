//! Places to run a client program: in a container with a share, on the same node with the bare driver, or on
//! the node with a peer's library preloaded.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};
use gpushare_region::ContextCost;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::node::{MODEL, SimulatedNode};
use gpushare_tests::runtime::{Container, LowLevel, Runtime};
use gpushare_tests::scratch::Scratch;
use gpushare_tests::{artifacts, command};

/// Environment variable with the path of a peer's library to preload: HAMi-core's `libvgpu.so`.
pub const PEER: &str = "HAMI_CORE";

/// Bytes that the interception library charges for a process's contexts if it has seen no real one.
pub const CONTEXT: u64 = ContextCost::UNKNOWN.most;

/// Creates a node on which a context costs as much as the interception library assumes, so books and limit
/// can be compared to the byte. `more` are further arguments for `gpushare-simulator create`.
pub fn node(more: &[&str]) -> SimulatedNode {
    let context = format!("{}MiB", CONTEXT >> 20);
    SimulatedNode::with(1, MODEL, "80GiB", &[&["--context", &*context], more].concat())
}

/// A sleeping container with a share, and the runtime that creates it.
pub struct Limited {
    runtime: Runtime,
    bundle: Bundle,
}

impl Limited {
    /// Creates one on `node`, with `environment` and with `GPUSHARE_SIMULATOR_RUN=0`, which makes kernels
    /// take time and compute nothing.
    pub fn new(node: &SimulatedNode, environment: &[(&str, &str)]) -> Self {
        let bundle = Bundle::host_root().env("GPUSHARE_SIMULATOR_RUN", "0");
        let bundle = environment.iter().fold(bundle, |bundle, (name, value)| bundle.env(name, value));
        Self { runtime: Runtime::wrapped(LowLevel::Runc, node), bundle }
    }

    /// Starts the container.
    pub fn start(&self) -> Container<'_> {
        self.runtime.run(&self.bundle)
    }
}

/// Path of the driver's own libcuda in a container.
pub const DRIVER: &str = "/usr/lib/gpushare/driver/cuda";

/// Runs the client in `container`, and returns its standard output.
///
/// # Errors
/// If the client fails, with its standard error.
pub fn inside(container: &Container<'_>, words: &[&str]) -> Result<String> {
    exec(container, &[], words)
}

/// Like [`inside`], but bypasses the interception library: the driver's own file is loaded first and so takes
/// the library's name. The cgroup is the same.
///
/// # Errors
/// If the client fails, with its standard error.
pub fn inside_bare(container: &Container<'_>, words: &[&str]) -> Result<String> {
    let preload = format!("LD_PRELOAD={DRIVER}");
    exec(container, &["/usr/bin/env", &preload], words)
}

fn exec(container: &Container<'_>, before: &[&str], words: &[&str]) -> Result<String> {
    let client = artifacts::client();
    let outcome = container.exec(&[before, &[&*client.to_string_lossy()], words].concat());
    if !outcome.success() {
        bail!("in the container, {words:?}: {}", outcome.stderr.trim());
    }
    Ok(outcome.stdout)
}

/// A place on the host where a program uses the node's driver, with an environment of its own.
#[derive(Debug)]
pub struct OnHost {
    environment: Vec<(String, String)>,
    scratch: Scratch,
}

impl OnHost {
    /// Creates a place with the bare driver of `node`.
    pub fn bare(node: &SimulatedNode) -> Self {
        let text = |path: PathBuf| path.to_string_lossy().into_owned();
        let environment = vec![
            ("GPUSHARE_SIMULATOR".to_owned(), text(node.shared())),
            ("GPUSHARE_SIMULATOR_RUN".to_owned(), "0".to_owned()),
            ("LD_LIBRARY_PATH".to_owned(), text(node.libraries())),
        ];
        Self { environment, scratch: Scratch::new("host") }
    }

    /// Creates a place with the peer's library on top of the bare driver, under a limit of `mib` MiB and
    /// `cores` percent. Returns `None` without a peer.
    pub fn peer(node: &SimulatedNode, mib: u64, cores: u32) -> Option<Self> {
        let library = env::var_os(PEER).filter(|path| !path.is_empty())?;
        Some(Self::preloaded(node, Path::new(&library), mib, cores))
    }

    fn preloaded(node: &SimulatedNode, library: &Path, mib: u64, cores: u32) -> Self {
        let mut place = Self::bare(node);
        let cache = place.scratch.path().join("peer.cache");
        place.environment.extend([
            ("LD_PRELOAD".to_owned(), library.to_string_lossy().into_owned()),
            ("CUDA_DEVICE_MEMORY_LIMIT".to_owned(), format!("{mib}m")),
            ("CUDA_DEVICE_SM_LIMIT".to_owned(), cores.to_string()),
            ("CUDA_DEVICE_MEMORY_SHARED_CACHE".to_owned(), cache.to_string_lossy().into_owned()),
            ("LIBCUDA_LOG_LEVEL".to_owned(), "0".to_owned()),
        ]);
        place
    }

    /// Adds a variable to the environment.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Runs the client here, and returns its standard output.
    ///
    /// # Errors
    /// If the client fails, with its standard error.
    pub fn run(&self, words: &[&str]) -> Result<String> {
        let client = artifacts::client();
        self.program(&client.to_string_lossy(), words)
    }

    /// Runs any program here, and returns its standard output.
    ///
    /// # Errors
    /// If the program fails, with its standard error.
    pub fn program(&self, program: &str, words: &[&str]) -> Result<String> {
        let environment = self.environment.iter().map(|(name, value)| (name, value));
        let outcome = command::run(Command::new(program).args(words).envs(environment));
        if !outcome.success() {
            bail!("on the host, {words:?}: {}", outcome.stderr.trim());
        }
        Ok(outcome.stdout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A preloaded library that finds its functions through dlsym, reduced to the minimum that limits
    /// cuMemAlloc.
    const STAND_IN: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

static int (*driver)(unsigned long long *, size_t);
static size_t used;

static int limited(unsigned long long *pointer, size_t bytes)
{
    size_t limit = strtoul(getenv("CUDA_DEVICE_MEMORY_LIMIT"), NULL, 10) << 20;
    if (used + bytes > limit)
        return 2;
    int status = driver(pointer, bytes);
    used += status ? 0 : bytes;
    return status;
}

void *dlsym(void *handle, const char *name)
{
    static void *(*next)(void *, const char *);
    if (!next)
        next = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
    if (!next)
        next = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    void *found = next(handle, name);
    if (!found || strcmp(name, "cuMemAlloc_v2"))
        return found;
    driver = found;
    return limited;
}
"#;

    #[test]
    #[ignore = "needs `make build` and a C compiler"]
    fn a_preloaded_library_gets_its_limit_and_stands_before_the_driver() {
        let node = node(&["--plain-nodes"]);
        let scratch = Scratch::new("stand-in");
        let (source, library) = (scratch.file("stand-in.c", STAND_IN), scratch.path().join("stand-in.so"));
        let mut compile = Command::new("cc");
        compile.args(["-shared", "-fPIC", "-O2", "-o"]).arg(&library).arg(&source).arg("-ldl");
        let _ = command::run(&mut compile).expect_success("cc");
        let words = ["allocate", "512", "1024"];
        let said = |place: &OnHost| place.run(&words).unwrap();
        assert_eq!(said(&OnHost::bare(&node)), "granted 512\ngranted 1024\n");
        assert_eq!(said(&OnHost::preloaded(&node, &library, 1024, 50)), "granted 512\nrefused 1024\n");
    }
}
