//! What a node keeps for its containers: limits files, folders, and files in a mount namespace of their own.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::{io, thread};

use nix::sched::{CloneFlags, setns, unshare};

/// Where a container finds the file that it may write.
pub const USAGE: &str = "/usr/lib/gpushare/usage";

/// The leases that have a region, as their ids in text.
#[must_use]
pub fn ids(state: &Path) -> Vec<String> {
    let of_lease = |name: &String| name.bytes().all(|byte| byte.is_ascii_digit());
    let mut ids: Vec<String> = names(&state.join("regions")).into_iter().filter(of_lease).collect();
    ids.sort();
    ids
}

/// All that is there for some lease.
#[must_use]
pub fn left(state: &Path) -> Vec<PathBuf> {
    let folders = ["regions", "limits"].map(|folder| (folder, names(&state.join(folder))));
    let mounted = within(state, || Ok(names(Path::new("/")))).unwrap_or_default();
    let all = folders.into_iter().chain([("mounted", mounted)]);
    let paths =
        all.flat_map(|(folder, names)| names.into_iter().map(move |name| Path::new(folder).join(name)));
    paths.filter(|path| path != Path::new("limits/namespace")).collect()
}

/// Runs `work` in the mount namespace of the regions, where each lies in the folder `/LEASE`.
///
/// # Errors
/// When there is no such namespace, or `work` fails.
pub fn within<T: Send>(state: &Path, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    let namespace = File::open(state.join("limits/namespace"))?;
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            unshare(CloneFlags::CLONE_FS)?;
            setns(&namespace, CloneFlags::CLONE_NEWNS)?;
            work()
        });
        thread.join().expect("the thread ends")
    })
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}
