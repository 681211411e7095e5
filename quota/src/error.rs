//! Errors of the store, and reasons why a share is not granted.

use std::path::{Path, PathBuf};

use nix::errno::Errno;

use crate::claim::ClaimName;
use crate::lease::{BadContainerId, LeaseKey};
use crate::lock_holder;
use crate::place::Refusal;
use crate::refusals::Reason;

/// Why the store cannot be used. It grants nothing then.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another process held the turn to write for longer than this one waits, which is a few seconds.
    #[error("the quota store {path} has been busy for seconds{holder}")]
    Busy {
        /// The state folder.
        path: PathBuf,
        /// The process that holds it and what to do about it: the end of the sentence.
        holder: String,
    },
    /// The file system is full, read-only or failing.
    #[error(
        "the quota store {path} cannot be written: its file system is full (df, df -i), read-only or failing, or this \
         process may write no file of that size (ulimit -f); make room there, or see the kernel log"
    )]
    Full {
        /// Path of the ledger.
        path: PathBuf,
    },
    /// The file is not a quota store, or it is damaged.
    #[error(
        "the quota store {path} is damaged, so nothing is granted; stop the containers that hold a share first, then delete \
         the file: a new one is made at the next start, unless the folder regions beside it still names such containers"
    )]
    Damaged {
        /// Path of the ledger.
        path: PathBuf,
    },
    /// The ledger is missing, but regions are left, either of running containers or of an earlier boot.
    #[error(
        "the quota store {path} is gone, but {regions} names containers that hold a share, so nothing is granted; stop them, \
         then run `umount {regions}/* {regions}/*/* 2>/dev/null; rm -r {regions}`, or restart the machine if that \
         folder is in its memory"
    )]
    Missing {
        /// Path of the ledger.
        path: PathBuf,
        /// The folder of the containers' regions.
        regions: PathBuf,
    },
    /// The containers' processes are invisible from this process's namespaces, so each would count as ended.
    #[error(
        "the quota store {path} is kept in the namespaces {theirs} of pids and of time, and this process runs in {ours}, to \
         which each container there would seem ended; run gpushare in those (in a pod: hostPID: true), or, if they have \
         ended, as with a node that is a container, delete the file and the folder regions beside it"
    )]
    Stranger {
        /// Path of the ledger.
        path: PathBuf,
        /// The pid and time namespaces of the store, formatted as by `ls -l /proc/PID/ns`.
        theirs: String,
        /// The same namespaces of this process.
        ours: String,
    },
    /// Another version of gpushare wrote it.
    #[error(
        "the quota store {path} has version {version}, which this gpushare does not know; update gpushare"
    )]
    Version {
        /// Path of the ledger.
        path: PathBuf,
        /// Its version.
        version: u32,
    },
    /// An early version of gpushare kept the leases in this database.
    #[error(
        "the quota store {path} is of an early version, which this gpushare cannot read; end the containers with \
         shares, then delete that file"
    )]
    Earlier {
        /// Path of the database.
        path: PathBuf,
    },
    /// The ledger or the lock file could not be opened, read or created.
    #[error("cannot use the quota store {path}")]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// The error from the system.
        source: std::io::Error,
    },
    /// The id of the running boot could not be read.
    #[error(transparent)]
    Boot(#[from] gpushare_inventory::ProcError),
}

impl StoreError {
    /// The error if this process did not get its turn in time.
    pub(crate) fn busy(state: &Path) -> Self {
        Self::Busy { path: state.into(), holder: lock_holder::described(state) }
    }

    /// Converts a system error about the file at `path`.
    pub(crate) fn io(path: &Path, source: std::io::Error) -> Self {
        const FULL: [Errno; 5] = [Errno::ENOSPC, Errno::EDQUOT, Errno::EROFS, Errno::EFBIG, Errno::EIO];
        let path = path.to_path_buf();
        match source.raw_os_error() {
            Some(code) if FULL.contains(&Errno::from_raw(code)) => Self::Full { path },
            _ => Self::Io { path, source },
        }
    }
}

/// Why a share was not granted.
#[derive(Debug, thiserror::Error)]
pub enum ReserveError {
    /// The node has no room for the share.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The container already has a lease.
    #[error("container {0} holds a share already; delete the old container first, or run `gpushare sweep`")]
    Held(LeaseKey),
    /// The container requests its pod's share, but it belongs to no pod.
    #[error(
        "the container asks for a share of its pod, and its bundle names no pod: only containerd and CRI-O write \
         one for Kubernetes; ask for a share of its own"
    )]
    NoPod(LeaseKey),
    /// The pod already has a share for another request.
    #[error(
        "the containers of a pod hold one share together: this pod's is {held}, and the container asks for {asked}; \
         write the same request for all of them, or give this one a share of its own"
    )]
    Differs {
        /// The request of the pod's first container.
        held: String,
        /// The request of this container.
        asked: String,
    },
    /// The claim's lease is for another request, and containers use it.
    #[error(
        "claim {name} holds {held} on this node, with containers that run; delete their pods before it is allocated anew"
    )]
    ClaimInUse {
        /// Namespace, name and UID of the claim.
        name: ClaimName,
        /// The request that its lease was made for.
        held: String,
    },
    /// The claim's UID is not valid in a lease key.
    #[error(transparent)]
    BadUid(#[from] BadContainerId),
    /// The reservation is gone: an administrator released it.
    #[error("the share of container {0} was released while the container was made; start it anew")]
    Lost(LeaseKey),
    /// The store cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl ReserveError {
    /// Returns the kind of reason.
    pub fn reason(&self) -> Reason {
        match self {
            Self::Refused(refusal) => refusal.reason(),
            Self::Held(_)
            | Self::NoPod(_)
            | Self::Differs { .. }
            | Self::ClaimInUse { .. }
            | Self::BadUid(_) => Reason::Request,
            Self::Lost(_) | Self::Store(_) => Reason::Node,
        }
    }
}
