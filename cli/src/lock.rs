//! One process of a kind per node: the one that holds the lock file.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use gpushare_quota::{sign, signer};

/// Pause between two tries: a process that only looks holds the lock for a moment.
const LOOK: Duration = Duration::from_millis(10);

/// Takes the lock, which is held until it is dropped; `None` when another process holds it.
pub fn take(path: &Path) -> io::Result<Option<File>> {
    let mut options = OpenOptions::new();
    let file = options.create(true).truncate(false).write(true).mode(0o600).open(path)?;
    for _ in 0..10 {
        match file.try_lock() {
            Ok(()) => {
                sign(&file);
                return Ok(Some(file));
            }
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOOK),
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
    Ok(None)
}

/// Whether a process holds it.
pub fn is_held(path: &Path) -> bool {
    let file = File::open(path);
    file.is_ok_and(|file| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)))
}

/// The pid of its holder where that is stopped by a signal: it holds the lock and does nothing.
pub fn stopped(path: &Path) -> Option<i32> {
    let file = File::open(path).ok()?;
    if !matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)) {
        return None;
    }
    let stat = signer(&file)?;
    matches!(stat.state, 'T' | 't').then_some(stat.pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_one_holder_and_everybody_can_tell() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        assert!(!is_held(&path));
        let first = take(&path).unwrap();
        assert!(first.is_some() && is_held(&path));
        assert!(take(&path).unwrap().is_none());
        drop(first);
        // A child that another test is just starting holds a copy of every descriptor until its exec.
        let patience = std::time::Instant::now() + Duration::from_secs(5);
        while is_held(&path) && std::time::Instant::now() < patience {
            std::thread::sleep(LOOK);
        }
        assert!(!is_held(&path) && take(&path).unwrap().is_some());
    }
}
