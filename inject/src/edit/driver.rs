//! Takes the node's own driver out of a bundle. CDI devices and device plugins mount it for a whole GPU, and
//! the plan brings the share's files instead. Only what is known as the node's own is taken out; another
//! driver stays, and is refused.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{loses_all, take_out, take_out_mut};
use crate::host_files::is_same_file;
use crate::parts::{entries, text, texts};

/// Libraries of the driver whose names do not say NVIDIA.
const LIBRARIES: [&str; 4] = ["libcuda.so", "libcudadebugger.so", "libnvcuvid.so", "libnvoptix.so"];
const PROGRAMS: [&str; 7] = [
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "nvidia-imex",
    "nvidia-imex-ctl",
];
/// The ends of the paths of the driver's data files.
const DATA: [&str; 12] = [
    "OpenCL/vendors/nvidia.icd",
    "X11/xorg.conf.d/10-nvidia.conf",
    "X11/xorg.conf.d/nvidia-drm-outputclass.conf",
    "egl_external_platform.d/09_nvidia_wayland2.json",
    "egl_external_platform.d/10_nvidia_wayland.json",
    "egl_external_platform.d/15_nvidia_gbm.json",
    "egl_external_platform.d/20_nvidia_xcb.json",
    "egl_external_platform.d/20_nvidia_xlib.json",
    "egl_vendor.d/10_nvidia.json",
    "icd.d/nvidia_icd.json",
    "implicit_layer.d/nvidia_layers.json",
    "nvidia/nvoptix.bin",
];
/// The daemons' sockets. Sockets and firmware lie outside of the driver's folders, and have the same path in
/// the container as on the host.
const SOCKETS: [&str; 2] = ["run/nvidia-persistenced/socket", "run/nvidia-fabricmanager/socket"];
/// Where device plugins mount the driver as a whole; CUDA images search it.
const TREE: &str = "/usr/local/nvidia";
/// Where device plugins also mount one folder of that tree.
const BESIDE_TREE: &str = "/etc/vulkan";
/// Where a tree of the driver has its libraries.
const LIBRARY_FOLDERS: [&str; 3] = ["", "lib64", "lib"];
/// The two libraries that ours replace in a share.
pub(super) const INTERCEPTED: [&str; 2] = ["libcuda.so", "libnvidia-ml.so"];
/// Entries of a folder that are read at most; a driver has fewer.
const MAX_ENTRIES: usize = 20_000;

/// Takes out the mounts of the node's own driver, which lies in `folders`, and the parts of the environment
/// that lead to them. It must be called before anything looks for volumes in the bundle.
pub fn take_out_driver(json: &mut Value, folders: &[PathBuf]) {
    let trees = trees(json, folders);
    let goes = |mount: &Value| {
        bound(mount).is_some_and(|(source, target)| {
            is_own_file(source, target, folders) || is_of_tree(source, target, &trees)
        })
    };
    let mounts = entries(json, "/mounts").filter(|mount| goes(mount));
    let taken: Vec<PathBuf> = mounts.map(|mount| PathBuf::from(text(mount, "destination"))).collect();
    if !taken.is_empty() {
        take_out(json, "/mounts", goes);
    }
    forget(json, &taken);
}

/// The folders of the host that are mounted as the driver's tree, links followed.
fn trees(json: &Value, folders: &[PathBuf]) -> Vec<PathBuf> {
    let trees = entries(json, "/mounts").filter_map(bound).filter(|(_, target)| target.starts_with(TREE));
    trees.filter(|(source, _)| is_own_tree(source, folders)).map(|(source, _)| real(source)).collect()
}

/// Source and target of a mount whose source is an absolute path of the host.
fn bound(mount: &Value) -> Option<(&Path, &Path)> {
    let path = |field: &str| mount.get(field).and_then(Value::as_str).map(Path::new);
    Some((path("source").filter(|source| source.is_absolute())?, path("destination")?))
}

fn is_of_tree(source: &Path, target: &Path, trees: &[PathBuf]) -> bool {
    let is_there = [TREE, BESIDE_TREE].iter().any(|place| target.starts_with(place));
    is_there && !trees.is_empty() && trees.iter().any(|tree| real(source).starts_with(tree))
}

/// Whether the folder has driver libraries, and each of them is the node's own.
fn is_own_tree(source: &Path, folders: &[PathBuf]) -> bool {
    let mut libraries =
        LIBRARY_FOLDERS.iter().flat_map(|folder| intercepted(&source.join(folder))).peekable();
    libraries.peek().is_some() && libraries.all(|library| is_in(&library, folders))
}

fn intercepted(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok).take(MAX_ENTRIES);
    let is_one = |path: &PathBuf| INTERCEPTED.iter().any(|stem| name(path).starts_with(stem));
    entries.map(|entry| entry.path()).filter(is_one).collect()
}

/// Whether a mount brings a file of the node's own driver. Its name on either side must be a driver's: a
/// driver file under another name is still the driver. Its source must lie in the driver's folders, or be a
/// socket or firmware at its usual place.
fn is_own_file(source: &Path, target: &Path, folders: &[PathBuf]) -> bool {
    let is_drivers = is_driver_file(target) || is_driver_file(source);
    is_drivers && is_in(source, folders) || is_kept_place(target) && has_end_of(source, target)
}

fn is_driver_file(path: &Path) -> bool {
    let name = name(path);
    let is_library = name.contains(".so")
        && (name.contains("nvidia") || LIBRARIES.iter().any(|library| name.starts_with(library)));
    is_library
        || PROGRAMS.contains(&name)
        || DATA.iter().any(|end| path.ends_with(end))
        || name.starts_with("nvidia_icd.") && path.parent().is_some_and(|folder| folder.ends_with("icd.d"))
}

/// Whether the target is a daemon's socket, or firmware of the GPU's own processor.
fn is_kept_place(target: &Path) -> bool {
    let is_firmware = || {
        let folder = target.parent().and_then(Path::parent);
        name(target).starts_with("gsp") && folder.is_some_and(|folder| folder.ends_with("firmware/nvidia"))
    };
    SOCKETS.iter().any(|socket| target.ends_with(socket)) || is_firmware()
}

/// Whether the path on the host ends in the one in the container, as below a driver root.
fn has_end_of(source: &Path, target: &Path) -> bool {
    target.strip_prefix("/").is_ok_and(|target| source.ends_with(target))
}

/// Whether the file is of the node's driver: it lies in one of the `folders`, or is the same file as one
/// there.
fn is_in(file: &Path, folders: &[PathBuf]) -> bool {
    let real = real(file);
    let holds = |folder: &PathBuf| file.starts_with(folder) || real.starts_with(folder);
    folders.iter().any(|folder| holds(folder) || is_same_file(&real, &folder.join(name(&real))))
}

/// `path` without links, or as it is if it does not exist.
fn real(path: &Path) -> PathBuf {
    fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf())
}

pub(super) fn name(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

/// Takes out of the environment what had a meaning only with the mounts at `taken`.
fn forget(json: &mut Value, taken: &[PathBuf]) {
    let leads_there = |item: &str| taken.iter().any(|target| Path::new(item).starts_with(target));
    let goes = |entry: &mut Value| {
        entry.as_str().is_some_and(|entry| entry.starts_with("NVIDIA_CTK_"))
            || loses_all(entry, "LD_LIBRARY_PATH=", &[':', ';'], leads_there)
            || loses_all(entry, "LD_PRELOAD=", &[':', ' '], leads_there)
    };
    take_out_mut(json, "/process/env", goes);
}

/// Whether the hook runs one of NVIDIA's programs, by base name. They bring whole GPUs, or set up the
/// driver's files that CDI mounted. With `ctr --gpus`, containerd runs NVIDIA's program.
pub(crate) fn is_nvidias_hook(hook: &Value) -> bool {
    match program(hook) {
        "nvidia-cdi-hook" => true,
        "nvidia-ctk" => matches!(verb(hook), Some("hook" | "cdi")),
        _ => brings_gpus(hook),
    }
}

/// Whether the hook by itself brings the GPUs of NVIDIA's list.
pub(super) fn brings_gpus(hook: &Value) -> bool {
    let own = ["nvidia-container-runtime-hook", "nvidia-container-toolkit", "nvidia-container-cli"];
    own.contains(&program(hook)) || texts(hook, "/args").any(|argument| base_name(argument) == own[2])
}

/// The base name of the hook's program, without the `.real` that NVIDIA's installer for clusters appends.
fn program(hook: &Value) -> &str {
    let name = base_name(text(hook, "path"));
    name.strip_suffix(".real").unwrap_or(name)
}

/// The first argument after the program's name that is no option.
fn verb(hook: &Value) -> Option<&str> {
    entries(hook, "/args").skip(1).filter_map(Value::as_str).find(|argument| !argument.starts_with('-'))
}

fn base_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or_default()
}
