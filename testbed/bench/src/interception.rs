//! Measures the interception library's cost to a program, and the most memory that it lets a container use.
//! The same program runs on the bare simulated driver in the same run, for comparison.

mod cost;
mod kills;
mod memory;

use std::path::PathBuf;

use anyhow::{Context, Result};
use gpushare_tests::runtime::Container;

use crate::place::{self, Limited, OnHost};
use crate::table::{Row, Table};

/// Measures the section.
///
/// # Errors
/// If a program fails.
pub fn section() -> Result<Table> {
    crate::need_runtime()?;
    let mut table = Table::default();
    cost::rows(&mut table)?;
    without_cuda(&mut table)?;
    memory::rows(&mut table)?;
    kills::rows(&mut table)?;
    if let Some(path) = std::env::var_os(place::PEER).filter(|path| !path.is_empty()) {
        table.note(format!("peer: {}, preloaded over the bare driver", PathBuf::from(path).display()));
    }
    Ok(table)
}

/// Checks whether a program that never opens CUDA has the interception library in its memory.
fn without_cuda(table: &mut Table) -> Result<()> {
    let node = place::node(&[]);
    let limited = Limited::new(&node, &[("GPUSHARE_MEMORY", "8GiB")]);
    let ours = maps(&limited.start())?;
    let peer = OnHost::peer(&node, 8 << 10, 100).map(|peer| peer.program("/bin/cat", &["/proc/self/maps"]));
    let word = |found: bool| if found { "loaded" } else { "not loaded" };
    let found = ours.contains("libcuda") || ours.contains("gpushare");
    let name = std::env::var_os(place::PEER).map(PathBuf::from);
    let name = name.as_deref().and_then(|path| path.file_name()).unwrap_or_default().to_string_lossy();
    let peer = peer.transpose()?.map(|maps| word(maps.contains(&*name)).to_owned());
    table.push(
        Row::plain("the library in a program without CUDA", word(found))
            .target("not loaded", !found)
            .peer(peer),
    );
    Ok(())
}

fn maps(container: &Container<'_>) -> Result<String> {
    let outcome = container.exec(&["/bin/cat", "/proc/self/maps"]);
    outcome.stdout.contains("[stack]").then_some(outcome.stdout).context("no memory map of a program")
}
