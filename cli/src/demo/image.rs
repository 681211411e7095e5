//! The demo's root file system: the client, and the C library that this program itself runs on.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use procfs::process::{MMapPath, Process};

/// Libraries that programs such as nvidia-smi need beside those that this process has loaded.
const COMPANIONS: [&str; 5] = ["libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1"];
/// Where x86-64 programs name their loader.
const LOADER: &str = "lib64/ld-linux-x86-64.so.2";

/// Fills `root`; the client becomes `/bin/client`.
pub fn fill(root: &Path, client: &Path) -> Result<()> {
    for folder in ["bin", "dev", "etc", "lib64", "proc", "sys", "tmp", "usr/bin"] {
        fs::create_dir_all(root.join(folder))?;
    }
    copy(client, &root.join("bin/client"))?;
    for library in libraries()? {
        let name = library.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let is_loader = name.starts_with("ld-linux");
        let target = if is_loader { Path::new(LOADER) } else { library.strip_prefix("/")? };
        copy(&library, &root.join(target))?;
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::copy(from, to).with_context(|| format!("cannot copy {} into the demo's image", from.display()))?;
    Ok(())
}

/// The shared libraries of this process, and their companions.
fn libraries() -> Result<BTreeSet<PathBuf>> {
    let maps = Process::myself()?.maps()?;
    let mapped = maps.into_iter().filter_map(|map| match map.pathname {
        MMapPath::Path(path) => Some(path),
        _ => None,
    });
    let mut libraries: BTreeSet<PathBuf> =
        mapped.filter(|path| path.to_string_lossy().contains(".so")).collect();
    let libc = libraries.iter().find(|path| path.file_name().is_some_and(|name| name == "libc.so.6"));
    let folder =
        libc.and_then(|path| path.parent()).context("gpushare itself is not linked with libc.so.6")?;
    let companions: Vec<PathBuf> = COMPANIONS.iter().map(|name| folder.join(name)).collect();
    libraries.extend(companions.into_iter().filter(|path| path.exists()));
    Ok(libraries)
}
