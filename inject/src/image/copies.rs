//! Finds driver libraries that the image carries itself. Its loader may find them before ours, so a share
//! covers each of them.
//!
//! They are looked for where a loader looks: in the default folders, cuda-compat's, LD_LIBRARY_PATH's,
//! ld.so.conf's, and those beside the programs in PATH. A folder that only a running program knows is not
//! found. Everything read here is the image's, and every read is bounded.

use std::fs::{self, File};
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{Root, resolve};
use crate::parts::{entries, texts};

/// File stems of libraries of which only the host's version fits its kernel module.
const STEMS: [&str; 7] = [
    "libcuda",
    "libnvidia-ml",
    "libnvidia-ptxjitcompiler",
    "libnvidia-nvvm",
    "libnvidia-gpucomp",
    "libnvidia-pkcs11-openssl3",
    "libnvidia-tileiras",
];
/// Those that ours replace in a share.
const INTERCEPTED: [&str; 2] = [STEMS[0], STEMS[1]];
const DEFAULT_FOLDERS: [&str; 8] = [
    super::TRIPLET_FOLDERS[0],
    super::TRIPLET_FOLDERS[1],
    "/usr/lib64",
    "/lib64",
    "/usr/lib",
    "/lib",
    "/usr/local/nvidia/lib",
    "/usr/local/nvidia/lib64",
];
const MAX_FOLDERS: usize = 128;
const MAX_ENTRIES: usize = 20_000;
const MAX_COPIES: usize = 128;
const MAX_CONF_BYTES: u64 = 64 << 10;

/// The folders that the container's loader may search.
pub(super) fn searched(root: &Root, json: &Value) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = DEFAULT_FOLDERS.iter().map(PathBuf::from).collect();
    folders.extend(compat(root));
    folders.extend(variable(json, "LD_LIBRARY_PATH="));
    folders.extend(variable(json, "PATH=").filter_map(beside_programs));
    folders.extend(conf(root));
    folders.truncate(MAX_FOLDERS);
    folders
}

/// The first of the folders `searched` in which a volume of the bundle brings a library that a share
/// intercepts. Nothing of ours can be mounted there, because its files are the host's.
pub(super) fn volume(root: &Root, bundle: &Path, json: &Value, searched: &[PathBuf]) -> Option<PathBuf> {
    let placed = entries(json, "/mounts").filter_map(|mount| {
        let source = mount.get("source").and_then(Value::as_str).filter(|_| super::is_bind(mount));
        let place = super::led(root, Path::new(mount.get("destination")?.as_str()?));
        Some((place, source.map(|source| bundle.join(source))))
    });
    let placed: Vec<(PathBuf, Option<PathBuf>)> = placed.collect();
    if placed.iter().all(|(_, source)| source.is_none()) {
        return None;
    }
    let brings_driver = |folder: &&PathBuf| {
        let at = super::led(root, folder);
        // What was mounted last lies on top.
        let Some((place, Some(source))) = placed.iter().rfind(|(place, _)| at.starts_with(place)) else {
            return false;
        };
        let inner = at.strip_prefix(place).unwrap_or(Path::new(""));
        names_below(source, inner).iter().any(|name| is_of(&INTERCEPTED, name))
    };
    searched.iter().find(brings_driver).cloned()
}

/// The names in a folder of a volume. Links are followed inside the volume.
fn names_below(volume: &Path, folder: &Path) -> Vec<String> {
    if !volume.is_dir() {
        return Vec::new(); // to open a FIFO would block
    }
    let found = super::open_root(volume).ok().and_then(|volume| resolve(&volume, folder).ok());
    found.map(|fd| names(&fd)).unwrap_or_default()
}

/// The paths of all copies in the folders `searched`, each once, in the order of the folders.
pub(super) fn find(root: &Root, searched: &[PathBuf]) -> Vec<PathBuf> {
    let mut seen = Vec::new();
    let mut copies: Vec<PathBuf> = Vec::new();
    for folder in searched {
        let Ok(fd) = resolve(root, folder) else { continue };
        let Ok(real) = fs::read_link(by_descriptor(&fd)) else { continue };
        if seen.contains(&real) {
            continue; // another name of the same folder: a mount covers the file under all of them
        }
        seen.push(real);
        let found = names(&fd).into_iter().filter(|name| is_of(&STEMS, name));
        copies.extend(found.map(|name| folder.join(name)));
    }
    copies.truncate(MAX_COPIES);
    copies
}

/// Whether `name` is that of a library of one of these stems, of any version.
pub(super) fn is_of(stems: &[&str], name: &str) -> bool {
    let mut rests = stems.iter().filter_map(|stem| name.strip_prefix(stem));
    rests.any(|rest| rest == ".so" || rest.starts_with(".so."))
}

fn by_descriptor(fd: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

fn names(fd: &OwnedFd) -> Vec<String> {
    let entries = fs::read_dir(by_descriptor(fd)).into_iter().flatten().filter_map(Result::ok);
    entries.take(MAX_ENTRIES).filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// The folders `/usr/local/cuda*/compat`.
fn compat(root: &Root) -> Vec<PathBuf> {
    let Ok(local) = resolve(root, Path::new("usr/local")) else { return Vec::new() };
    let toolkits = names(&local).into_iter().filter(|name| name.starts_with("cuda"));
    toolkits.map(|name| Path::new("/usr/local").join(name).join("compat")).collect()
}

/// The absolute folders of a variable of the container, whose `name` ends in `=`.
fn variable<'a>(json: &'a Value, name: &'a str) -> impl Iterator<Item = PathBuf> + 'a {
    let values = texts(json, "/process/env").filter_map(move |entry| entry.strip_prefix(name));
    let folders = values.flat_map(|value| value.split([':', ';']));
    folders.filter(|path| path.starts_with('/')).map(PathBuf::from)
}

/// The folder `X/lib` for `X/bin`. The programs of a conda environment look there before anywhere else
/// (DT_RPATH `$ORIGIN/../lib`).
fn beside_programs(folder: PathBuf) -> Option<PathBuf> {
    (folder.file_name()? == "bin").then(|| folder.with_file_name("lib"))
}

/// The folders of the image's ld.so.conf and of the files in ld.so.conf.d, which every distribution includes.
fn conf(root: &Root) -> Vec<PathBuf> {
    let drop_ins = resolve(root, Path::new("etc/ld.so.conf.d")).map(|fd| names(&fd)).unwrap_or_default();
    let drop_ins = drop_ins.iter().filter(|name| name.ends_with(".conf")).take(MAX_FOLDERS);
    let drop_ins = drop_ins.map(|name| Path::new("etc/ld.so.conf.d").join(name));
    let mut folders = Vec::new();
    for file in std::iter::once(PathBuf::from("etc/ld.so.conf")).chain(drop_ins) {
        let text = text(root, &file);
        let lines = text.lines().map(str::trim).filter(|line| line.starts_with('/'));
        folders.extend(lines.map(PathBuf::from));
    }
    folders
}

/// The text of a regular file, cut at 64 KiB. Anything else has none: to open a FIFO would block.
fn text(root: &Root, path: &Path) -> String {
    let open = resolve(root, path).ok().and_then(|fd| {
        let path = by_descriptor(&fd);
        fs::metadata(&path).ok().filter(fs::Metadata::is_file)?;
        File::open(path).ok()
    });
    let mut bytes = Vec::new();
    if let Some(file) = open {
        let _ = file.take(MAX_CONF_BYTES).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use serde_json::json;

    use super::*;

    #[test]
    fn copies_are_found_wherever_the_loader_looks_and_once() {
        let root = tempfile::tempdir().unwrap();
        let file = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        file("usr/local/cuda-12.4/compat/libcuda.so.550.54.15", "");
        file("usr/local/cuda-12.4/compat/libnvidia-ptxjitcompiler.so.1", "");
        file("usr/local/cuda-12.4/compat/libcudadebugger.so.1", "");
        file("opt/env/libcuda.so", "");
        file("opt/conda/lib/libcuda.so.1", "");
        file("opt/conda/lib/stubs/libcuda.so", "");
        file("opt/tools/libcuda.so.1", "");
        file("usr/local/nvidia/lib64/libcuda.so.470.82.01", "");
        file("opt/conf/libnvidia-ml.so.1", "");
        file("usr/lib/libcuda.so.1", "");
        file("usr/lib/libcuda.so1", "");
        file("etc/ld.so.conf", "include /etc/ld.so.conf.d/*.conf\n");
        file("etc/ld.so.conf.d/x.conf", "# ours\n/opt/conf\n");
        symlink("usr/lib", root.path().join("lib")).unwrap();
        symlink("cuda-12.4", root.path().join("usr/local/cuda")).unwrap();
        // A link's target on the host is not part of the image.
        let host = tempfile::tempdir().unwrap();
        fs::write(host.path().join("libcuda.so.1"), "").unwrap();
        symlink(host.path(), root.path().join("opt/out")).unwrap();
        nix::unistd::mkfifo(&root.path().join("etc/ld.so.conf.d/y.conf"), nix::sys::stat::Mode::S_IRWXU)
            .unwrap();
        let json = json!({"process": {"env": [
            "LD_LIBRARY_PATH=/opt/env:/opt/out:relative:/none", "PATH=/opt/conda/bin:/opt/tools:/usr/bin:bin",
        ]}});
        let root = super::super::open_root(root.path()).unwrap();
        let mut found = find(&root, &searched(&root, &json));
        for path in &mut found {
            // Which of the two names of one folder is read first is the file system's choice.
            *path = path.to_str().unwrap().replace("cuda-12.4", "cuda").into();
        }
        found.sort();
        let want = [
            "/opt/conda/lib/libcuda.so.1",
            "/opt/conf/libnvidia-ml.so.1",
            "/opt/env/libcuda.so",
            "/usr/lib/libcuda.so.1",
            "/usr/local/cuda/compat/libcuda.so.550.54.15",
            "/usr/local/cuda/compat/libnvidia-ptxjitcompiler.so.1",
            "/usr/local/nvidia/lib64/libcuda.so.470.82.01",
        ];
        assert_eq!(found, want.map(PathBuf::from));
    }
}
