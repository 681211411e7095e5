//! Where the binaries and libraries under test are: the release build of this checkout, or an installed tree
//! when `GPUSHARE_PREFIX` names one.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::command;
use crate::scratch::Scratch;

/// The root of the checkout.
#[must_use]
pub fn checkout() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests are a folder of the checkout")
}

fn prefix() -> Option<PathBuf> {
    std::env::var_os("GPUSHARE_PREFIX").map(PathBuf::from)
}

fn existing(path: PathBuf) -> PathBuf {
    assert!(path.exists(), "{} is missing: run `make build` first", path.display());
    path
}

fn program(name: &str) -> PathBuf {
    existing(match prefix() {
        Some(prefix) => prefix.join("bin").join(name),
        None => release(name),
    })
}

fn release(name: &str) -> PathBuf {
    checkout().join("target/release").join(name)
}

/// The command line, `gpushare`.
///
/// # Panics
/// Like all functions of this module: when the file has not been built.
#[must_use]
pub fn cli() -> PathBuf {
    program("gpushare")
}

/// `gpushare-runtime`, the wrapper.
#[must_use]
pub fn wrapper() -> PathBuf {
    program("gpushare-runtime")
}

/// `gpushare-hook`.
#[must_use]
pub fn hook() -> PathBuf {
    program("gpushare-hook")
}

/// `gpushare-supervisor`.
#[must_use]
pub fn supervisor() -> PathBuf {
    program("gpushare-supervisor")
}

/// `gpushare-simulator`. It is a tool of development and may be absent from an installed tree: then the
/// checkout's own is taken.
#[must_use]
pub fn simulator() -> PathBuf {
    prefix()
        .map(|prefix| prefix.join("bin/gpushare-simulator"))
        .filter(|path| path.exists())
        .unwrap_or_else(|| existing(release("gpushare-simulator")))
}

/// `gpushare-tests-client`, a CUDA client with one verb per use of a GPU.
#[must_use]
pub fn client() -> PathBuf {
    existing(release("gpushare-tests-client"))
}

/// An injected library by its soname: `libcuda.so.1` or `libnvidia-ml.so.1`.
#[must_use]
pub fn library(soname: &str) -> PathBuf {
    existing(prefix().unwrap_or_else(|| checkout().join("target")).join("lib/gpushare").join(soname))
}

/// NVIDIA's own nvidia-smi as `tests/setup/driver-libraries.sh` unpacks it; it may be absent.
#[must_use]
pub fn nvidia_smi() -> PathBuf {
    checkout().join(".cache/driver-libraries/root/usr/lib/nvidia/current/nvidia-smi")
}

/// NVIDIA's own MPS control daemon as `tests/setup/driver-libraries.sh` unpacks it; it may be absent.
#[must_use]
pub fn mps_control() -> PathBuf {
    checkout().join(".cache/driver-libraries/root/usr/bin/nvidia-cuda-mps-control")
}

/// kubectl as `tests/setup/kubectl.sh` fetches it; it may be absent.
#[must_use]
pub fn kubectl() -> PathBuf {
    checkout().join(".cache/kubectl/kubectl")
}

/// helm, beside it; it may be absent.
#[must_use]
pub fn helm() -> PathBuf {
    kubectl().with_file_name("helm")
}

/// The root that `tests/setup/bare-machine.sh` makes; it may be absent. Overlays take no link.
#[must_use]
pub fn bare_machine() -> PathBuf {
    let cache = checkout().join(".cache");
    cache.canonicalize().unwrap_or(cache).join("bare-machine")
}

/// The folder of NVIDIA's own libraries beside nvidia-smi; it may be absent.
#[must_use]
pub fn nvidia_libraries() -> PathBuf {
    checkout().join(".cache/driver-libraries/root/usr/lib/x86_64-linux-gnu/nvidia/current")
}

/// A tree that `make install` would make, below a folder of its own.
#[derive(Debug)]
pub struct Installed {
    destination: Scratch,
}

const PREFIX: &str = "/usr/local";

impl Installed {
    /// Installs what has been built.
    ///
    /// # Panics
    /// When the installation fails.
    #[must_use]
    pub fn new() -> Self {
        let tree = Self { destination: Scratch::new("installed") };
        tree.packaging("install.sh");
        tree
    }

    /// Installs once more, over what is there.
    ///
    /// # Panics
    /// When the installation fails.
    pub fn again(&self) {
        self.packaging("install.sh");
    }

    /// The installed wrapper.
    #[must_use]
    pub fn wrapper(&self) -> PathBuf {
        self.root().join("usr/local/bin/gpushare-runtime")
    }

    /// The installed hook.
    #[must_use]
    pub fn hook(&self) -> PathBuf {
        self.root().join("usr/local/bin/gpushare-hook")
    }

    /// The installed command line.
    #[must_use]
    pub fn cli(&self) -> PathBuf {
        self.root().join("usr/local/bin/gpushare")
    }

    /// The folder that stands for the machine's root.
    #[must_use]
    pub fn root(&self) -> &Path {
        self.destination.path()
    }

    /// Removes it again, as `make uninstall` does.
    ///
    /// # Panics
    /// When that fails.
    pub fn uninstall(&self) {
        self.packaging("uninstall.sh");
    }

    fn packaging(&self, script: &str) {
        let mut run = Command::new(checkout().join("packaging").join(script));
        let _ = command::run(run.arg(self.root()).arg(PREFIX)).expect_success(script);
    }
}

impl Default for Installed {
    fn default() -> Self {
        Self::new()
    }
}
