//! Lists the folders below a driver root that may hold the driver's files, the most trusted first. Most are
//! fixed names. The folders in `ld.so.conf` and `ld.so.cache`, which may be stale, come last and are only
//! more places to search.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::folder;
use crate::root::Root;
use crate::roots::Roots;

/// Debian's folder name for this processor.
const TRIPLET: &str = if cfg!(target_arch = "aarch64") { "aarch64-linux-gnu" } else { "x86_64-linux-gnu" };

/// Library folders of known systems, below the driver root. Debian's own come before these.
const FOLDERS: [&str; 9] = [
    "usr/lib64",
    "usr/local/nvidia/lib64",
    "var/lib/nvidia/lib64",
    "run/opengl-driver/lib",
    "usr/local/glibc/usr/lib",
    "usr/lib",
    "lib64",
    "usr/local/nvidia/lib",
    "lib",
];
const PROGRAM_FOLDERS: [&str; 8] = [
    "usr/lib/nvidia/current",
    "usr/bin",
    "usr/sbin",
    "usr/local/nvidia/bin",
    "var/lib/nvidia/bin",
    "run/current-system/sw/bin",
    "usr/local/bin",
    "bin",
];
/// Limit on parallel Debian driver packages; no real system has more.
const MAX_VARIANTS: usize = 16;
/// Limit on the size of `ld.so.cache`, in bytes. A large machine's has 200 KiB.
const MAX_CACHE_BYTES: u64 = 16 << 20;

/// Folders to search for libraries: first the configured ones, then those of known systems, then those in the
/// loader's files. The loader's files are read only if the search gets that far.
pub(super) fn library_folders(roots: &Roots, root: &Root) -> impl Iterator<Item = PathBuf> {
    let below = |folder: &Path| roots.driver.join(folder.strip_prefix("/").unwrap_or(folder));
    let mut folders: Vec<PathBuf> = roots.library_folders.iter().map(|folder| below(folder)).collect();
    let debians = roots.driver.join("usr/lib").join(TRIPLET);
    folders.extend(variants(&debians.join("nvidia")));
    folders.push(debians);
    folders.push(roots.driver.join("lib").join(TRIPLET));
    folders.extend(FOLDERS.iter().map(|folder| below(Path::new(folder))));
    let listed = std::iter::once_with(move || {
        let listed = [loader_folders(Path::new("etc/ld.so.conf"), root, 0), cached_folders(root)].concat();
        listed.iter().map(|folder| below(folder)).collect::<Vec<_>>()
    });
    folders.into_iter().chain(listed.flatten())
}

/// Debian's driver folders, `current` first. Debian keeps packages for older GPUs next to it, in `tesla-470`
/// and similar.
fn variants(folder: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> =
        folder::paths(folder).filter(|path| path.is_dir()).take(MAX_VARIANTS).collect();
    found.sort_by_key(|path| (!path.ends_with("current"), path.clone()));
    found
}

/// Folders to search for programs if the libraries are in `libraries`: first those that belong to these
/// libraries, then those of known systems.
pub(super) fn program_folders(root: &Root, libraries: &[PathBuf]) -> Vec<PathBuf> {
    let variant = libraries.first().filter(|folder| {
        folder.parent().is_some_and(|folder| folder.ends_with(Path::new(TRIPLET).join("nvidia")))
    });
    let own = variant.and_then(|variant| Some(root.path().join("usr/lib/nvidia").join(variant.file_name()?)));
    let beside = libraries.iter().filter_map(|folder| beside(root, folder));
    let known = PROGRAM_FOLDERS.iter().map(|folder| root.path().join(folder));
    let mut folders = Vec::new();
    for folder in own.into_iter().chain(beside).chain(known) {
        if !folders.contains(&folder) {
            folders.push(folder);
        }
    }
    folders
}

/// The folder `bin` of the prefix in which libraries lie: `usr/local/nvidia/bin` for
/// `usr/local/nvidia/lib64`, and `usr/bin` for `usr/lib/x86_64-linux-gnu`.
fn beside(root: &Root, libraries: &Path) -> Option<PathBuf> {
    let of_real = || libraries.strip_prefix(root.real()?).ok();
    let below = libraries.strip_prefix(root.path()).ok().or_else(of_real)?;
    let is_lib =
        |folder: &&Path| folder.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"lib"));
    Some(root.path().join(below.ancestors().find(is_lib)?.with_file_name("bin")))
}

/// The folders in an ld.so.conf, following `include` lines. Only the form `FOLDER/*.conf` is supported; no
/// other is in use.
fn loader_folders(conf: &Path, root: &Root, depth: u32) -> Vec<PathBuf> {
    let text = root.file(&root.path().join(conf)).and_then(|path| fs::read_to_string(path).ok());
    let mut folders = Vec::new();
    for line in text.unwrap_or_default().lines() {
        let line = line.split('#').next().unwrap_or("").trim();
        let Some(pattern) = line.strip_prefix("include ").map(str::trim) else {
            folders.extend((line.starts_with('/')).then(|| PathBuf::from(line)));
            continue;
        };
        let (Some(folder), true, 0) = (pattern.strip_suffix("/*.conf"), pattern.starts_with('/'), depth)
        else {
            continue;
        };
        let folder = Path::new(folder.trim_start_matches('/'));
        let entries = folder::entries(&root.path().join(folder));
        let mut files: Vec<PathBuf> = entries.map(|entry| folder.join(entry.file_name())).collect();
        files.sort();
        let included = files.iter().filter(|file| file.extension().is_some_and(|end| end == "conf"));
        folders.extend(included.flat_map(|file| loader_folders(file, root, depth + 1)));
    }
    folders
}

/// The folders in which ld.so.cache lists libcuda or libnvidia-ml. In every format of the cache, paths are
/// strings that end in a zero byte.
fn cached_folders(root: &Root) -> Vec<PathBuf> {
    let mut bytes = Vec::new();
    let cache = root.file(&root.path().join("etc/ld.so.cache")).and_then(|path| File::open(path).ok());
    if cache.is_none_or(|file| file.take(MAX_CACHE_BYTES).read_to_end(&mut bytes).is_err()) {
        return Vec::new();
    }
    let texts = bytes.split(|byte| *byte == 0).filter(|text| text.starts_with(b"/"));
    let paths = texts.filter_map(|text| std::str::from_utf8(text).ok()).map(Path::new);
    let ours = paths.filter(|path| path.ends_with("libcuda.so.1") || path.ends_with("libnvidia-ml.so.1"));
    ours.filter_map(|path| path.parent().map(Path::to_path_buf)).collect()
}
