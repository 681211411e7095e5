//! `gpushare system dev-char`.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use gpushare_inventory::{DeviceFiles, Roots};

use super::nodes::beside;
use super::{Item, State};

/// The link of every NVIDIA node that there is, and how it is.
pub fn look(roots: &Roots) -> Result<Vec<(Item, PathBuf)>> {
    let nodes = DeviceFiles::existing(roots)?;
    let items = nodes.iter().map(|node| {
        let (path, target) = node.char_link(roots);
        let what = format!("-> {}", target.display());
        (Item { state: state(&path, &target), path, what }, target)
    });
    Ok(items.collect())
}

fn state(path: &Path, target: &Path) -> State {
    match fs::read_link(path) {
        Ok(found) if found == target => State::Right,
        Ok(_) => State::Wrong,
        Err(error) if error.kind() == ErrorKind::NotFound => State::Missing,
        Err(_) => State::Stuck("it is no link; remove it".to_owned()),
    }
}

/// By rename, so that a link which is used all the while is never missing.
pub fn mend(path: &Path, target: &PathBuf) -> Result<()> {
    let folder = path.parent().context("it has no folder")?;
    fs::create_dir_all(folder).context("cannot make its folder")?;
    let new = beside(path);
    let placed = symlink(target, &new).and_then(|()| fs::rename(&new, path));
    placed.context("cannot make it").inspect_err(|_| {
        let _ = fs::remove_file(&new); // it may never have been made
    })
}
