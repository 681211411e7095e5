//! Root file systems as distributions lay them out, made of the packages that `tests/setup/images.sh`
//! unpacked: with this machine's distribution's own glibc, a shell where the distribution has one, and the
//! CUDA client.
//!
//! Debian's loader searches Debian's folders. For Red Hat's layout its built-in list is written over with Red
//! Hat's, so that it misses what is put into any other folder; the rest of that glibc is Debian's.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::artifacts;
use crate::command;

/// The CUDA client in all these roots.
pub const CLIENT: &str = "/usr/bin/gpushare-simulator";
/// Debian's folder for libraries of this machine's kind.
pub const MULTIARCH: &str = "x86_64-linux-gnu";
const LOADER: &str = "ld-linux-x86-64.so.2";

/// Where the packages are; absent before the set-up.
#[must_use]
pub fn packages() -> PathBuf {
    artifacts::checkout().join(".cache/images")
}

/// Debian and Ubuntu: `/bin` and `/lib` are links into `/usr`, libraries lie by architecture; no
/// `ld.so.cache` yet.
///
/// # Panics
/// Like all functions of this module: when a file cannot be written, or the packages are not there.
pub fn debian(root: &Path) {
    copy_tree(&packages().join("glibc"), root);
    for name in ["bin", "sbin", "lib", "lib64"] {
        let folder = root.join(name);
        if folder.is_symlink() {
            continue; // as the packages of newer releases have it
        }
        if folder.is_dir() {
            copy_tree(&folder, &root.join("usr").join(name));
            fs::remove_dir_all(&folder).expect("a folder of the image can be removed");
        }
        symlink(Path::new("usr").join(name), folder).expect("a link of the image can be made");
    }
    client(root);
}

/// As [`debian`], with the cache that a package manager's `ldconfig` leaves.
pub fn ubuntu(root: &Path) {
    debian(root);
    cache(root);
}

/// Debian before the merged `/usr`: glibc in `/lib`, the rest in `/usr/lib`.
pub fn debian_unmerged(root: &Path) {
    folders(root, &["bin", "usr/bin", "etc", "dev", "proc", "sys", "tmp"]);
    folders(root, &[&format!("usr/lib/{MULTIARCH}")]);
    copy_glibc(&root.join("lib").join(MULTIARCH));
    copy(&glibc().join(LOADER), &root.join("lib64").join(LOADER));
    copy(&packages().join("glibc/bin/bash"), &root.join("bin/bash"));
    client(root);
}

/// Distroless: glibc and one program. No shell, no `/etc`, no links.
pub fn distroless(root: &Path) {
    for library in fs::read_dir(glibc()).expect("glibc was unpacked").flatten() {
        let name = library.file_name();
        if name
            .to_str()
            .is_some_and(|name| ["libc.", "libm.", "ld-linux"].iter().any(|one| name.starts_with(one)))
        {
            copy(&library.path(), &root.join("lib").join(MULTIARCH).join(&name));
        }
    }
    copy(&glibc().join(LOADER), &root.join("lib64").join(LOADER));
    folders(root, &["dev", "proc", "sys"]);
    client(root);
}

/// Red Hat's: everything in `/usr/lib64`, and a loader that searches `/lib64` and `/usr/lib64` and nothing
/// else.
pub fn red_hat(root: &Path) {
    folders(root, &["usr/lib", "usr/lib64", "usr/bin", "etc", "dev", "proc", "sys", "tmp"]);
    for name in ["bin", "sbin", "lib", "lib64"] {
        let target = if name == "sbin" { "usr/bin".into() } else { Path::new("usr").join(name) };
        symlink(target, root.join(name)).expect("a link of the image can be made");
    }
    copy_glibc(&root.join("usr/lib64"));
    let loader = root.join("usr/lib64").join(LOADER);
    let bytes = fs::read(&loader).expect("the loader can be read");
    fs::write(&loader, with_red_hats_folders(bytes)).expect("the loader can be written");
    copy(&packages().join("glibc/bin/bash"), &root.join("usr/bin/bash"));
    client(root);
}

/// Arch's and others': everything in `/usr/lib`, to which the other folders are links.
pub fn plain(root: &Path) {
    folders(root, &["usr/lib", "usr/bin", "etc", "dev", "proc", "sys", "tmp"]);
    for (link, target) in [("bin", "usr/bin"), ("lib", "usr/lib"), ("lib64", "usr/lib"), ("usr/lib64", "lib")]
    {
        symlink(target, root.join(link)).expect("a link of the image can be made");
    }
    copy_glibc(&root.join("usr/lib"));
    client(root);
}

/// Alpine's: musl and a static busybox, and `/bin/dynamic`, a program that is linked with musl and prints one
/// word.
pub fn alpine(root: &Path) {
    folders(root, &["bin", "lib", "usr/lib", "etc", "dev", "proc", "sys", "tmp"]);
    let musl = library_folder("musl", "x86_64-linux-musl");
    copy(&musl.join("libc.so"), &root.join("lib/ld-musl-x86_64.so.1"));
    copy(Path::new(crate::image::BUSYBOX), &root.join("bin/busybox"));
    let source = root.join("tmp/dynamic.c");
    let program = "int puts(const char *);\nvoid _exit(int);\n\
                   __attribute__((force_align_arg_pointer)) void _start(void) { _exit(puts(\"musl\") < 0); }\n";
    fs::write(&source, program).expect("a file of the image can be written");
    let mut compiler = Command::new("cc");
    compiler.args(["-nostdlib", "-Wl,--dynamic-linker=/lib/ld-musl-x86_64.so.1", "-o"]);
    compiler.arg(root.join("bin/dynamic")).arg(&source).arg("-L").arg(&musl).arg("-l:libc.so");
    let _ = command::run(&mut compiler).expect_success("cc of a program for musl");
}

/// Adds the 32-bit glibc to a Debian root, and `/bin/getconf32`, a 32-bit program.
pub fn add_32_bit(root: &Path) {
    let libraries = library_folder("glibc32", "i386-linux-gnu");
    copy_tree(&libraries, &root.join("usr/lib/i386-linux-gnu"));
    copy(&libraries.join("ld-linux.so.2"), &root.join("usr/lib/ld-linux.so.2"));
    copy(&packages().join("glibc32/usr/bin/getconf"), &root.join("usr/bin/getconf32"));
}

/// Writes the image's `ld.so.cache`, as its package manager would.
pub fn cache(root: &Path) {
    let _ = command::run(Command::new("/sbin/ldconfig").arg("-r").arg(root))
        .expect_success("ldconfig of the image");
}

fn glibc() -> PathBuf {
    library_folder("glibc", MULTIARCH)
}

/// Where the packages of a set have their libraries: newer releases have moved them below `/usr`.
fn library_folder(set: &str, folder: &str) -> PathBuf {
    let places = ["lib", "usr/lib"].map(|place| packages().join(set).join(place).join(folder));
    let libraries =
        places.iter().find(|place| fs::read_dir(place).is_ok_and(|mut files| files.next().is_some()));
    libraries.unwrap_or_else(|| panic!("no libraries of {set}: run tests/setup/images.sh")).clone()
}

fn copy_glibc(folder: &Path) {
    for library in fs::read_dir(glibc()).expect("glibc was unpacked").flatten() {
        if library.path().is_file() {
            copy(&library.path(), &folder.join(library.file_name()));
        }
    }
}

fn client(root: &Path) {
    copy(&artifacts::simulator(), &root.join(CLIENT.trim_start_matches('/')));
}

/// The loader's built-in folders have lengths of their own, so each is written over with a path of the same
/// length; Red Hat's loader has no third and fourth.
fn with_red_hats_folders(mut loader: Vec<u8>) -> Vec<u8> {
    let old = b"/lib/x86_64-linux-gnu/\0/usr/lib/x86_64-linux-gnu/\0/lib/\0/usr/lib/\0";
    let new = b"/lib64//./././././././\0/usr/lib64//./././././././\0/l64/\0/usr/l64/\0";
    assert_eq!(old.len(), new.len());
    let places: Vec<usize> =
        (0..loader.len() - old.len()).filter(|at| loader[*at..].starts_with(old)).collect();
    assert!(!places.is_empty(), "this loader has other folders than Debian's");
    for at in places {
        loader[at..at + new.len()].copy_from_slice(new);
    }
    loader
}

fn folders(root: &Path, names: &[&str]) {
    for name in names {
        fs::create_dir_all(root.join(name)).expect("a folder of the image can be made");
    }
}

/// Copies a folder's contents into `to`, links as links.
fn copy_tree(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a folder of the image can be made");
    let mut copy = Command::new("cp");
    let _ = command::run(copy.arg("-a").arg(from.join(".")).arg(to)).expect_success("cp of an image's files");
}

/// Copies a file's contents and mode, links followed. Never a hard link: the container's root may write to
/// what it finds.
pub fn copy(from: &Path, to: &Path) {
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder).expect("a folder of the image can be made");
    }
    fs::copy(from, to)
        .unwrap_or_else(|error| panic!("cannot copy {} to {}: {error}", from.display(), to.display()));
}
