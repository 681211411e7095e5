//! Puts all files of a run onto one tmpfs. Engines keep bundles, runtimes their state and gpushare its own on
//! `/run`, which is a tmpfs too. On a disk, write-back would affect every figure.

use anyhow::{Context, Result};
use gpushare_tests::scratch::Scratch;
use nix::mount::{MsFlags, mount};

/// Puts all temporary directories that this program creates from now on onto a tmpfs, which is unmounted on
/// drop.
///
/// # Errors
/// If it cannot be mounted.
pub fn on_tmpfs() -> Result<Scratch> {
    let scratch = Scratch::new("bench");
    mount(Some("tmpfs"), scratch.path(), Some("tmpfs"), MsFlags::empty(), Some("mode=0755"))
        .with_context(|| format!("cannot mount a tmpfs at {}", scratch.path().display()))?;
    tempfile::env::override_temp_dir(scratch.path())
        .map_err(|other| anyhow::anyhow!("temporary folders are at {} already", other.display()))?;
    Ok(scratch)
}
