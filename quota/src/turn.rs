//! The turn to write: one process at a time, first come first served.
//!
//! The kernel keeps the waiters for a file lock in a queue and wakes one (Linux 5.0 and later). The lock goes
//! with the process that holds it.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use crate::alarm::Alarm;
use crate::error::StoreError;
use crate::lock_holder::{self, open, sign};

/// How long a process waits for the others. An engine's `inspect` hangs as long as its `create` waits here.
const DEADLINE: Duration = Duration::from_secs(5);
/// Pause between two tries of a process that cannot wait in the queue.
const NAP: Duration = Duration::from_millis(2);

/// This process's turn; ends on drop.
#[derive(Debug)]
pub(crate) struct Turn {
    _lock: File,
}

impl Turn {
    /// Waits for the turn to write in the state folder `state`.
    ///
    /// # Errors
    /// When others took longer than the deadline, or the lock file cannot be opened.
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
            // Somebody may have deleted the file meanwhile: the next process would lock another one.
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

/// Waits in the kernel's queue; `None` when others held the lock until the deadline.
fn wait(file: File) -> io::Result<Option<File>> {
    let until = Instant::now() + DEADLINE;
    // No timer could be made: this process cannot wait in the queue, which has no deadline of its own.
    let Ok(_alarm) = Alarm::set(DEADLINE) else { return lock_without_queue(file) };
    loop {
        match file.lock() {
            Ok(()) => return Ok(Some(file)),
            Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
            Err(_) if Instant::now() >= until => return Ok(None),
            Err(_) => {} // by another signal
        }
    }
}

/// Locks `file`, and returns it once it is locked; `None` where others held the lock for as long as the
/// queue's deadline.
///
/// # Errors
/// When it cannot be locked.
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
