//! This machine, or a bare one, below an overlay, where tests install and remove as on a machine of its own.

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::mount::{MsFlags, mount};

use crate::artifacts;
use crate::command::{self, Outcome};
use crate::scratch::Scratch;

/// A root below an overlay, as a machine of its own: its dpkg, its shell and its glibc, and nothing that is
/// installed there is left. For a mount namespace of its own.
#[derive(Debug)]
pub struct Machine {
    scratch: Scratch,
}

impl Machine {
    /// This machine's own root.
    ///
    /// # Panics
    /// When it cannot be mounted.
    #[must_use]
    pub fn new() -> Self {
        Self::over(Path::new("/"))
    }

    /// The root of `tests/setup/bare-machine.sh`: the distribution's smallest set of packages, and docker.
    ///
    /// # Panics
    /// As [`Machine::new`].
    #[must_use]
    pub fn bare() -> Self {
        Self::over(&artifacts::bare_machine())
    }

    fn over(lower: &Path) -> Self {
        let machine = Self { scratch: Scratch::new("machine") };
        // The upper layer cannot lie in the lower one, so it is a file system of its own.
        in_memory(&machine.scratch.folder("layer"));
        let root = machine.scratch.folder("root");
        machine.overlay(lower, "layer", &root);
        for folder in ["/dev", "/proc", "/sys"] {
            machine.bind(Path::new(folder));
        }
        // A machine that nobody has used gpushare on yet, also where this one has it.
        for path in [
            "etc/gpushare",
            "etc/docker",
            "run/gpushare",
            "run/systemd",
            "usr/lib/gpushare",
            "var/lib/gpushare",
        ] {
            // It may not be there.
            let _ = fs::remove_dir_all(root.join(path));
        }
        machine
    }

    /// The path outside of what is `inside` at this path, without the first slash.
    #[must_use]
    pub fn path(&self, inside: &str) -> PathBuf {
        self.scratch.path().join("root").join(inside)
    }

    /// Shows the host's `folder` at the same path.
    ///
    /// # Panics
    /// When it cannot be mounted there.
    pub fn bind(&self, folder: &Path) {
        let inside = self.path("").join(folder.strip_prefix("/").expect("an absolute path"));
        fs::create_dir_all(&inside).expect("a folder can be made in an overlay");
        let flags = MsFlags::MS_BIND | MsFlags::MS_REC;
        mount(Some(folder), &inside, None::<&str>, flags, None::<&str>).expect("a folder can be bound");
    }

    /// Shows the host's `folder` at the same path as a copy: what is written there stays here.
    ///
    /// # Panics
    /// When it cannot be mounted there.
    pub fn copy(&self, folder: &Path) {
        let inside = self.path("").join(folder.strip_prefix("/").expect("an absolute path"));
        fs::create_dir_all(&inside).expect("a folder can be made in an overlay");
        self.overlay(folder, "layer/copy", &inside);
    }

    /// Empties the folder `inside`, which is made where it is missing, and keeps in memory what is written to
    /// it.
    ///
    /// # Panics
    /// When nothing can be mounted there.
    pub fn empty(&self, inside: &str) {
        let folder = self.path(inside);
        fs::create_dir_all(&folder).expect("a folder can be made in an overlay");
        in_memory(&folder);
    }

    /// Mounts at `target` what `lower` has, with changes in the folder `layer`.
    fn overlay(&self, lower: &Path, layer: &str, target: &Path) {
        let part = |name: &str| self.scratch.folder(&format!("{layer}/{name}"));
        let (upper, work) = (part("upper"), part("work"));
        let options =
            format!("lowerdir={},upperdir={},workdir={}", lower.display(), upper.display(), work.display());
        mount(Some("overlay"), target, Some("overlay"), MsFlags::empty(), Some(options.as_str()))
            .expect("an overlay can be mounted");
    }

    /// A command inside, which installs without questions.
    #[must_use]
    pub fn chroot(&self, args: &[&str]) -> Command {
        let mut run = Command::new("chroot");
        run.arg(self.path("")).args(args).env("DEBIAN_FRONTEND", "noninteractive").env_remove("FORCE");
        run
    }

    /// Runs it to its end.
    #[must_use]
    pub fn run(&self, args: &[&str]) -> Outcome {
        command::run(&mut self.chroot(args))
    }

    /// Files that carry the name of gpushare and are there, below the root; what a test bound there is none.
    #[must_use]
    pub fn left(&self) -> Vec<String> {
        let upper = self.scratch.path().join("layer/upper");
        let name = |path: &PathBuf| path.to_string_lossy().into_owned();
        let named = entries(&upper).into_iter().filter(|path| name(path).contains("gpushare"));
        let of_packages = named.filter(|path| !name(path).contains("gpushare-tests-"));
        // An overlay notes with such a device that a file of the lower layer is gone.
        let is_there = |path: &PathBuf| {
            fs::symlink_metadata(upper.join(path)).is_ok_and(|file| !file.file_type().is_char_device())
        };
        of_packages.filter(is_there).map(|path| name(&path)).collect()
    }
}

impl Default for Machine {
    fn default() -> Self {
        Self::new()
    }
}

/// Mounts an empty file system in memory.
fn in_memory(folder: &Path) {
    mount(Some("tmpfs"), folder, Some("tmpfs"), MsFlags::empty(), Some("mode=755"))
        .expect("a tmpfs can be mounted");
}

/// All files and folders below `folder`, by their paths from there, in order.
#[must_use]
pub fn entries(folder: &Path) -> Vec<PathBuf> {
    fn walk(top: &Path, below: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(top.join(below)).into_iter().flatten().flatten() {
            let path = below.join(entry.file_name());
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                walk(top, &path, found);
            }
            found.push(path);
        }
    }
    let mut found = Vec::new();
    walk(folder, Path::new(""), &mut found);
    found.sort();
    found
}
