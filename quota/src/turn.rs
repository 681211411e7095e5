//! The turn to write: one process at a time, first come, first served.
//!
//! The kernel queues the waiters for a file lock and wakes one at a time (Linux 5.0 and later). It releases
//! the lock when the process that holds it ends.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use crate::alarm::Alarm;
use crate::error::StoreError;
use crate::lock_holder::{self, open, sign};

/// How long a process waits for others. An engine's `inspect` hangs while its `create` waits here.
const DEADLINE: Duration = Duration::from_secs(5);
/// Pause between two attempts of a process that cannot wait in the queue.
const NAP: Duration = Duration::from_millis(2);

/// This process's turn; it ends on drop.
#[derive(Debug)]
pub(crate) struct Turn {
    _lock: File,
}

impl Turn {
    /// Waits for the turn to write in the state folder `state`.
    ///
    /// # Errors
    /// When others hold it past the deadline, or the lock file cannot be opened.
    pub fn take(state: &Path) -> Result<Self, StoreError> {
        let io = |source| StoreError::io(&lock_holder::path(state), source);
        loop {
            let file = open(state).map_err(io)?;
            let taken = match file.try_lock() {
                Ok(()) => Some(file),
                Err(TryLockError::WouldBlock) => wait(file).map_err(io)?,
                Err(TryLockError::Error(source)) => return Err(io(source)),
            };
            let lock = taken.ok_or_else(|| StoreError::busy(state))?;
            // The file may have been deleted meanwhile: the next process would lock another one.
            if is_at(&lock, &lock_holder::path(state)).map_err(io)? {
                sign(&lock);
                return Ok(Self { _lock: lock });
            }
        }
    }
}

/// Whether the open file is the one at `path` now.
pub(crate) fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let file = file.metadata()?;
    match fs::symlink_metadata(path) {
        Ok(there) => Ok((there.dev(), there.ino()) == (file.dev(), file.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Waits in the kernel's queue; `None` if others held the lock until the deadline.
fn wait(file: File) -> io::Result<Option<File>> {
    let until = Instant::now() + DEADLINE;
    // Without a timer we cannot wait in the queue: it has no deadline of its own.
    let Ok(_alarm) = Alarm::set(DEADLINE) else { return lock_without_queue(file) };
    loop {
        match file.lock() {
            Ok(()) => return Ok(Some(file)),
            Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
            Err(_) if Instant::now() >= until => return Ok(None),
            Err(_) => {} // interrupted by another signal
        }
    }
}

/// Locks `file` and returns it once it is locked; `None` if others held the lock until the queue's deadline.
///
/// # Errors
/// When locking fails.
pub fn lock_without_queue(file: File) -> io::Result<Option<File>> {
    let until = Instant::now() + DEADLINE;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(Some(file)),
            Err(TryLockError::Error(source)) => return Err(source),
            Err(TryLockError::WouldBlock) if Instant::now() >= until => return Ok(None),
            Err(TryLockError::WouldBlock) => thread::sleep(NAP),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_comes_out_of_the_queue_too_and_its_holder_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let first = Turn::take(folder.path()).unwrap();
        let told = StoreError::busy(folder.path()).to_string();
        assert!(told.contains(&format!(": process {} (", std::process::id())), "{told}");
        let other = open(folder.path()).unwrap();
        thread::scope(|scope| {
            let looking = scope.spawn(|| lock_without_queue(other).unwrap().is_some());
            thread::sleep(NAP * 5);
            assert!(!looking.is_finished());
            drop(first);
            assert!(looking.join().unwrap());
        });
    }
}
