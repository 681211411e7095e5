//! `gpushare system nodes`: the device nodes that the loaded driver wants.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result};
use gpushare_inventory::{DeviceFile, DeviceFiles, FileState, Roots, Unregistered};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};

use super::{Item, State};

/// Every node that the driver wants, and how it was found.
pub fn look(roots: &Roots) -> Result<Vec<(Item, Option<DeviceFile>)>> {
    let files = DeviceFiles::read(roots)?;
    let unregistered: Vec<_> = files.unregistered.iter().map(|device| (stuck(device, roots), None)).collect();
    Ok(files.nodes.into_iter().map(|file| (item(&file), Some(file))).chain(unregistered).collect())
}

fn stuck(device: &Unregistered, roots: &Roots) -> Item {
    let Unregistered { name, module } = device;
    let why = match module == name {
        true => format!("the kernel module is not loaded: modprobe {module}"),
        // The driver is loaded, or its devices would not be known.
        false => format!("/proc/devices lacks it: load the kernel module {module} anew, or reboot"),
    };
    let path = roots.dev.join("dev").join(name);
    Item { path, what: format!("character device {name}"), state: State::Stuck(why) }
}

fn item(file: &DeviceFile) -> Item {
    let node = &file.node;
    let state = match (file.state(), file.modify) {
        (FileState::Right, true) if own_folder(file).is_some_and(|folder| !is_passable(folder)) => {
            State::Wrong
        }
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

/// Makes the node, in a folder that everybody can enter.
pub fn mend(path: &Path, file: &Option<DeviceFile>) -> Result<()> {
    let Some(file) = file else { return Ok(()) };
    let node = &file.node;
    if let Some(folder) = own_folder(file) {
        make_passable(folder).context("cannot make its folder")?;
    }
    let number = makedev(node.major.into(), node.minor.into());
    place(path, |new| {
        // It has mode 0 at first, so that nobody can open it if it stays behind after a failure.
        mknod(new, SFlag::S_IFCHR, Mode::empty(), number)?;
        std::os::unix::fs::chown(new, Some(node.uid), Some(node.gid))?;
        Ok(fs::set_permissions(new, Permissions::from_mode(node.mode))?)
    })
}

/// The folder below /dev that holds only nodes of this kind; `None` for /dev itself.
fn own_folder(file: &DeviceFile) -> Option<&Path> {
    let is_own = file.node.path.parent().is_some_and(|folder| folder != Path::new("/dev"));
    file.node.host_path.parent().filter(|_| is_own)
}

/// Whether everybody may enter and list the folder; false for one that does not exist.
fn is_passable(folder: &Path) -> bool {
    folder.metadata().is_ok_and(|metadata| metadata.permissions().mode() & 0o555 == 0o555)
}

/// Makes the folder passable whatever the umask is, also one that an earlier run made too narrow.
fn make_passable(folder: &Path) -> io::Result<()> {
    if !folder.is_dir() {
        fs::create_dir_all(folder)?;
    }
    if is_passable(folder) { Ok(()) } else { fs::set_permissions(folder, Permissions::from_mode(0o755)) }
}

/// Makes `path` under another name and renames it at the end, so that nobody meets what is half made, and
/// what is in use is never missing. What a killed run has left under that name is removed; the caller's lock
/// keeps other runs away.
pub fn place(path: &Path, make: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let new = path.with_file_name(format!(".gpushare-{name}"));
    let _ = fs::remove_file(&new);
    let placed = make(&new).and_then(|()| Ok(fs::rename(&new, path)?));
    placed.context("cannot make it").inspect_err(|_| {
        let _ = fs::remove_file(&new); // it may never have been made
    })
}
