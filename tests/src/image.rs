//! Root file systems of containers, made from this machine's own files: a static busybox alone, or with the C
//! library and the simulator's CUDA client, laid out like a Debian image (`/bin` and `/lib` are links into
//! `/usr`).

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use crate::distribution::copy;
use crate::scratch::Scratch;
use crate::{artifacts, command};

/// A busybox that needs no shared library.
pub const BUSYBOX: &str = "/bin/busybox";

/// The image of [`archive`] whose containers are asked for by name.
pub const IMAGE: &str = "localhost/gpushare-test:1";
/// The image of [`archive`] that only waits, for the sandbox of a pod.
pub const PAUSE: &str = "localhost/gpushare-pause:1";

const APPLETS: &[&str] =
    &["sh", "sleep", "true", "false", "cat", "ls", "id", "echo", "dd", "mount", "env", "grep", "ps", "kill"];

/// Lays out a root of busybox alone in `root`, as an image built from scratch has it: no C library, no
/// loader.
///
/// # Panics
/// Like all functions of this module: when a file cannot be written.
pub fn static_only(root: &Path) {
    for folder in ["usr/bin", "usr/lib", "usr/lib64", "etc", "dev", "proc", "sys", "tmp", "run"] {
        fs::create_dir_all(root.join(folder)).expect("a folder of the image can be made");
    }
    for (link, target) in
        [("bin", "usr/bin"), ("sbin", "usr/bin"), ("lib", "usr/lib"), ("lib64", "usr/lib64")]
    {
        symlink(target, root.join(link)).expect("a link of the image can be made");
    }
    copy(Path::new(BUSYBOX), &root.join("usr/bin/busybox"));
    for applet in APPLETS {
        symlink("busybox", root.join("usr/bin").join(applet)).expect("a link of the image can be made");
    }
    fs::write(root.join("etc/passwd"), "root:x:0:0:root:/:/bin/sh\n")
        .expect("a file of the image can be written");
}

/// Adds to [`static_only`] the C library and `/bin/gpushare-simulator`, whose `probe` is the CUDA client of
/// the tests.
pub fn with_probe(root: &Path) {
    static_only(root);
    let client = artifacts::simulator();
    copy(&client, &root.join("usr/bin/gpushare-simulator"));
    for library in libraries_of(&client) {
        copy(&library, &container_path(root, &library));
    }
}

/// Adds to [`with_probe`] `/bin/gpushare-tests-client`, which launches kernels.
pub fn with_client(root: &Path) {
    with_probe(root);
    let client = artifacts::client();
    copy(&client, &root.join("usr/bin/gpushare-tests-client"));
    for library in libraries_of(&client) {
        copy(&library, &container_path(root, &library));
    }
}

/// Writes an archive with [`IMAGE`], which is [`with_probe`], and [`PAUSE`] into `scratch`, in the form of
/// `docker save`, which all engines load; its path.
pub fn archive(scratch: &Scratch) -> PathBuf {
    let (root, parts) = (scratch.folder("image/root"), scratch.folder("image/parts"));
    with_probe(&root);
    let layer = parts.join("layer.tar");
    tar(&layer, &root, &["."]);
    let sum = command::run(Command::new("sha256sum").arg(&layer)).expect_success("sha256sum").stdout;
    let digest = format!("sha256:{}", sum.split_whitespace().next().unwrap_or_default());
    let mut manifest = Vec::new();
    for (name, tag, program) in [
        ("image.json", IMAGE, ["/bin/sh", "-c", ":"]),
        ("pause.json", PAUSE, ["/bin/sh", "-c", "exec sleep 1000000"]),
    ] {
        let image = json!({
            "architecture": "amd64", "os": "linux",
            "config": {"Env": ["PATH=/bin"], "Cmd": program},
            "rootfs": {"type": "layers", "diff_ids": [digest]}
        });
        fs::write(parts.join(name), image.to_string()).expect("a file of the archive can be written");
        manifest.push(json!({"Config": name, "RepoTags": [tag], "Layers": ["layer.tar"]}));
    }
    fs::write(parts.join("manifest.json"), json!(manifest).to_string())
        .expect("a file of the archive can be written");
    let archive = scratch.path().join("image.tar");
    tar(&archive, &parts, &["manifest.json", "image.json", "pause.json", "layer.tar"]);
    archive
}

fn tar(archive: &Path, folder: &Path, names: &[&str]) {
    let mut tar = Command::new("tar");
    tar.arg("--create").arg("--file").arg(archive).arg("--directory").arg(folder);
    let _ = command::run(tar.args(["--owner=0", "--group=0"]).args(names)).expect_success("tar of the image");
}

/// Everything that `program` is linked with, and what else of the C library the driver's files are linked
/// with.
fn libraries_of(program: &Path) -> BTreeSet<PathBuf> {
    let listing = command::run(Command::new("ldd").arg(program)).expect_success("ldd").stdout;
    let mut libraries: BTreeSet<PathBuf> = listing
        .lines()
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')))
        .map(PathBuf::from)
        .collect();
    let folder = libraries
        .iter()
        .find(|path| path.ends_with("libc.so.6"))
        .and_then(|path| path.parent())
        .map(Path::to_owned)
        .expect("the client is linked with the C library");
    let companions = ["libdl.so.2", "libpthread.so.0", "librt.so.1", "libm.so.6", "libgcc_s.so.1"];
    libraries.extend(companions.iter().map(|name| folder.join(name)).filter(|path| path.exists()));
    libraries
}

/// Where a library of the host stands in an image whose `/lib` and `/lib64` are links into `/usr`.
fn container_path(root: &Path, library: &Path) -> PathBuf {
    let below = library.strip_prefix("/").expect("ldd prints absolute paths");
    if below.starts_with("usr") { root.join(below) } else { root.join("usr").join(below) }
}
