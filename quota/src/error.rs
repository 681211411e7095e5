//! Why the store cannot be used, and why a share is not granted.

use std::path::{Path, PathBuf};

use rusqlite::ErrorCode;

use crate::lease::LeaseKey;
use crate::lock_holder;
use crate::place::Refusal;

/// Why the store cannot be used. Nothing is granted then.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Others held it for longer than the deadline.
    #[error("the quota store {path} has been busy for seconds{holder}")]
    Busy {
        /// The database.
        path: PathBuf,
        /// Who holds it, and the remedy.
        holder: String,
    },
    /// The file system is full, read-only or failing.
    #[error(
        "the quota store {path} cannot be written: its file system is full (df, df -i), read-only or failing, or this \
         process may write no file of that size (ulimit -f); make room there, or see the kernel log"
    )]
    Full {
        /// The database.
        path: PathBuf,
    },
    /// The file is no database of ours, or a broken one.
    #[error(
        "the quota store {path} is damaged, so nothing is granted; stop the containers that hold a share first, then delete \
         the file: a new one is made at the next start, unless the folder regions beside it still names such containers"
    )]
    Damaged {
        /// The database.
        path: PathBuf,
    },
    /// Somebody took the database away from running containers, or an earlier boot's folders are left without it.
    #[error(
        "the quota store {path} is gone, but {regions} names containers that hold a share, so nothing is granted; stop them, \
         then run `umount {regions}/*; rm -r {regions}`, or restart the machine if that folder is in its memory"
    )]
    Missing {
        /// The database.
        path: PathBuf,
        /// The folder of the containers' regions.
        regions: PathBuf,
    },
    /// Its containers' processes are not to be seen from here: each would count as ended.
    #[error(
        "the quota store {path} is kept in the namespaces {theirs} of pids and of time, and this process runs in {ours}, to \
         which each container there would seem ended; run gpushare in those (in a pod: hostPID: true), or, if they have \
         ended, as with a node that is a container, delete the file and the folder regions beside it"
    )]
    Stranger {
        /// The database.
        path: PathBuf,
        /// As `ls -l /proc/PID/ns/pid` shows it.
        theirs: String,
        /// The same, of this process.
        ours: String,
    },
    /// Written by another version of gpushare.
    #[error(
        "the quota store {path} has schema version {version}, which this gpushare does not know; update gpushare"
    )]
    Version {
        /// The database.
        path: PathBuf,
        /// Its schema version.
        version: i32,
    },
    /// The file could not be made.
    #[error("cannot make the quota store {path}")]
    Io {
        /// The database.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Anything else that SQLite says.
    #[error("quota store {path}")]
    Sqlite {
        /// The database.
        path: PathBuf,
        /// What SQLite said.
        source: rusqlite::Error,
    },
    /// The running boot could not be told.
    #[error(transparent)]
    Boot(#[from] gpushare_inventory::ProcError),
}

impl StoreError {
    /// Nobody got at the database at `path` in time.
    pub(crate) fn busy(path: &Path) -> Self {
        Self::Busy { path: path.into(), holder: lock_holder::described(path) }
    }

    pub(crate) fn sqlite(path: &Path, source: rusqlite::Error) -> Self {
        let path = path.to_path_buf();
        let extended = source.sqlite_error().map(|error| error.extended_code);
        match source.sqlite_error_code() {
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => Self::busy(&path),
            Some(ErrorCode::DiskFull | ErrorCode::ReadOnly) => Self::Full { path },
            Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt | ErrorCode::TypeMismatch) => {
                Self::Damaged { path }
            }
            Some(ErrorCode::SystemIoFailure) => Self::Full { path },
            // Without a further number: no room for another file.
            Some(ErrorCode::CannotOpen) if extended == Some(rusqlite::ffi::SQLITE_CANTOPEN) => {
                Self::Full { path }
            }
            _ => Self::Sqlite { path, source },
        }
    }
}

/// Why a share was not granted.
#[derive(Debug, thiserror::Error)]
pub enum ReserveError {
    /// The node cannot hold it.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The container has a lease already.
    #[error("container {0} holds a share already; delete the old container first, or run `gpushare sweep`")]
    Held(LeaseKey),
    /// A share of a pod for a container of none.
    #[error(
        "the container asks for a share of its pod, and its bundle names no pod: only containerd and CRI-O write \
         one for Kubernetes; ask for a share of its own"
    )]
    NoPod(LeaseKey),
    /// The pod holds another share already.
    #[error(
        "the containers of a pod hold one share together: this pod's is {held}, and the container asks for {asked}; \
         write the same request for all of them, or give this one a share of its own"
    )]
    Differs {
        /// What the pod's first container asked for.
        held: String,
        /// What this container asks for.
        asked: String,
    },
    /// The reservation is gone: an administrator released it.
    #[error("the share of container {0} was released while the container was made; start it anew")]
    Lost(LeaseKey),
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
}
