//! `gpushare system dev-char`: the links /dev/char/MAJOR:MINOR to NVIDIA's device nodes.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use gpushare_inventory::{DeviceFiles, DeviceNode, Roots};

use super::nodes::place;
use super::{Item, State};

/// The link of every NVIDIA device node that exists, and how it was found.
pub fn look(roots: &Roots) -> Result<Vec<(Item, PathBuf)>> {
    let nodes = DeviceFiles::existing(roots)?;
    // Two nodes of one number share a link, which leads to the first of them by name.
    let mut numbers = BTreeSet::new();
    let nodes = nodes.iter().filter(|node| numbers.insert((node.major, node.minor)));
    let items = nodes.map(|node| {
        let (path, target) = node.char_link(roots);
        let what = format!("-> {}", target.display());
        (Item { state: state(&path, node), path, what }, target)
    });
    Ok(items.collect())
}

/// A link is right when it leads to a device of the number, however it is written: systemd asks no more.
fn state(path: &Path, node: &DeviceNode) -> State {
    match fs::read_link(path) {
        Ok(_) if node.is_at(path) => State::Right,
        Ok(_) => State::Wrong,
        Err(error) if error.kind() == ErrorKind::NotFound => State::Missing,
        Err(_) => State::Stuck("it is no link; remove it".to_owned()),
    }
}

/// Makes the link, and its folder where that is missing.
pub fn mend(path: &Path, target: &PathBuf) -> Result<()> {
    let folder = path.parent().context("it has no folder")?;
    fs::create_dir_all(folder).context("cannot make its folder")?;
    place(path, |new| Ok(symlink(target, new)?))
}
