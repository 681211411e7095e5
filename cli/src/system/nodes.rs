//! `gpushare system nodes`.

use std::fs::{self, Permissions};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use gpushare_inventory::{DeviceFile, DeviceFiles, FileState, Roots};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};

use super::{Item, State};

/// Every node that the driver wants, and how it is.
pub fn look(roots: &Roots) -> Result<Vec<(Item, Option<DeviceFile>)>> {
    let files = DeviceFiles::read(roots)?;
    let modules = files.missing_modules.iter().map(|module| {
        let path = roots.dev.join("dev").join(module);
        let why = format!("the kernel module is not loaded: modprobe {module}");
        (Item { path, what: format!("kernel module {module}"), state: State::Stuck(why) }, None)
    });
    let modules: Vec<_> = modules.collect();
    Ok(files.nodes.into_iter().map(|file| (item(&file), Some(file))).chain(modules).collect())
}

fn item(file: &DeviceFile) -> Item {
    let node = &file.node;
    let state = match (file.state(), file.modify) {
        (FileState::Right, _) | (FileState::Rights, false) => State::Right,
        (FileState::Foreign, _) => State::Stuck("it is no device node; remove it".to_owned()),
        (_, false) => {
            let told = "the driver is told to leave its nodes alone (ModifyDeviceFiles: 0)";
            State::Stuck(format!("{told}: make it where that was set, or load the module without it"))
        }
        (FileState::Missing, true) => State::Missing,
        (FileState::Rights | FileState::Number, true) => State::Wrong,
    };
    let what = format!("c {}:{} mode {:03o} of {}:{}", node.major, node.minor, node.mode, node.uid, node.gid);
    Item { path: node.host_path.clone(), what, state }
}

/// Makes the node under another name and gives it its own at last: nobody meets one that is half made.
pub fn mend(path: &Path, file: &Option<DeviceFile>) -> Result<()> {
    let Some(DeviceFile { node, .. }) = file else { return Ok(()) };
    let folder = path.parent().context("it has no folder")?;
    if !folder.is_dir() {
        fs::DirBuilder::new().mode(0o755).recursive(true).create(folder).context("cannot make its folder")?;
    }
    let new = beside(path);
    let number = makedev(node.major.into(), node.minor.into());
    mknod(&new, SFlag::S_IFCHR, Mode::empty(), number).context("cannot make it")?;
    let placed = std::os::unix::fs::chown(&new, Some(node.uid), Some(node.gid))
        .and_then(|()| fs::set_permissions(&new, Permissions::from_mode(node.mode)))
        .and_then(|()| fs::rename(&new, path));
    placed.context("cannot make it").inspect_err(|_| {
        // What is left is closed to everybody.
        let _ = fs::remove_file(&new);
    })
}

/// A name in the same folder that nobody looks for; one that a killed run has left is removed.
pub fn beside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let new = path.with_file_name(format!(".gpushare-{name}"));
    let _ = fs::remove_file(&new);
    new
}
