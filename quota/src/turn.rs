//! Who may write: one process at a time, first come first served.
//!
//! SQLite's own waiting is a sleep and another try, which lets 64 processes on two processors wake each other for
//! nothing. The kernel keeps waiters for a file lock in a queue and wakes one (Linux 5.0 and later).

use std::fs::{File, OpenOptions, TryLockError};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use crate::store::StoreError;

/// How long a process waits for the others: an engine's `inspect` hangs as long as its `create`.
const DEADLINE: Duration = Duration::from_secs(5);

/// This process's turn; ends on drop.
#[derive(Debug)]
pub(crate) struct Turn {
    _lock: File,
}

impl Turn {
    /// Waits for the turn to write to the database at `path`.
    ///
    /// # Errors
    /// When others took longer than the deadline, or the lock file cannot be opened.
    pub fn take(path: &Path) -> Result<Self, StoreError> {
        let io = |source| StoreError::Io { path: path.into(), source };
        let name = path.with_extension("lock");
        let file =
            OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(name).map_err(io)?;
        match file.try_lock() {
            Ok(()) => Ok(Self { _lock: file }),
            Err(TryLockError::WouldBlock) => Self::wait(file, path),
            Err(TryLockError::Error(source)) => Err(io(source)),
        }
    }

    /// The wait itself knows no deadline, so another thread does it. One that comes too late is alone with its file:
    /// the receiver is gone, the file is dropped, and the lock with it.
    fn wait(file: File, path: &Path) -> Result<Self, StoreError> {
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || {
            let locked = file.lock().map(|()| file);
            let _ = sender.send(locked);
        });
        match receiver.recv_timeout(DEADLINE) {
            Ok(Ok(file)) => Ok(Self { _lock: file }),
            Ok(Err(source)) => Err(StoreError::Io { path: path.into(), source }),
            Err(_) => Err(StoreError::Busy { path: path.into() }),
        }
    }
}
