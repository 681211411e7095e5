//! `watch`: records the host's pids of a node's processes, so that NVML can report them in another pid
//! namespace.

use std::time::Duration;

use anyhow::{Context, Result};
use gpushare_simulator::session::Reader;

use crate::Watch;

/// Returns only on an error.
///
/// # Errors
/// If there is no node, or it was made in another pid namespace.
pub fn run(watch: &Watch) -> Result<()> {
    let shared = watch.dir.join("shared");
    let reader = Reader::open(&shared).with_context(|| format!("no node in {}", watch.dir.display()))?;
    anyhow::ensure!(reader.is_host(), "the node was made in another pid namespace");
    loop {
        reader.note_pids();
        std::thread::sleep(Duration::from_millis(watch.every));
    }
}
