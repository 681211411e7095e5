//! Temporary folders that may hold mounts: whatever is still mounted below one is unmounted before the folder
//! is removed, so that removal never walks into something that was only bound there.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, umount2};

/// A temporary folder, removed on drop together with the mounts below it.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
}

impl Scratch {
    /// A new folder whose name contains `purpose`.
    ///
    /// # Panics
    /// When the folder cannot be made.
    #[must_use]
    pub fn new(purpose: &str) -> Self {
        let folder = tempfile::Builder::new()
            .prefix(&format!("gpushare-tests-{purpose}-"))
            .tempdir()
            .expect("a temporary folder can be made");
        let path = folder.keep();
        // A container whose root is nobody on the host has to pass through it, as through a machine's own
        // folders.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o711))
            .expect("the mode of one's own folder can be set");
        Self { path }
    }

    /// The folder's absolute path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes the folder `name` inside and returns its path.
    ///
    /// # Panics
    /// When it cannot be made.
    #[must_use]
    pub fn folder(&self, name: &str) -> PathBuf {
        let path = self.path.join(name);
        fs::create_dir_all(&path).expect("a folder can be made in the scratch folder");
        path
    }

    /// Writes the file `name` inside and returns its path.
    ///
    /// # Panics
    /// When it cannot be written.
    pub fn file(&self, name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path.join(name);
        fs::write(&path, contents).expect("a file can be written in the scratch folder");
        path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        for mount in mounts_below(&self.path).iter().rev() {
            // A failure shows when the mounts are listed again below.
            let _ = umount2(mount, MntFlags::MNT_DETACH);
        }
        if mounts_below(&self.path).is_empty() {
            // What cannot be removed is only litter in the temporary folder.
            let _ = fs::remove_dir_all(&self.path);
        } else {
            eprintln!("{} is left: something is still mounted there", self.path.display());
        }
    }
}

/// The mount points at or below `folder`, in the order in which they were mounted, as this thread sees them:
/// it may have a mount namespace of its own.
fn mounts_below(folder: &Path) -> Vec<PathBuf> {
    fs::read_to_string("/proc/thread-self/mountinfo")
        .unwrap_or_default()
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .map(PathBuf::from)
        .filter(|point| point.starts_with(folder))
        .collect()
}
