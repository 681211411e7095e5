//! `quota.db`, the SQLite database in which early versions kept the leases. This version cannot read its
//! leases.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;

/// The `user_version` of a database whose leases were moved to a ledger.
const MOVED: u32 = 200;

/// Path of the database.
pub(crate) fn database(state: &Path) -> PathBuf {
    state.join("quota.db")
}

/// Whether there is a database whose leases were not moved to a ledger. A file that is not a database counts
/// too.
pub(crate) fn holds_leases(state: &Path) -> bool {
    // The database file format: the user version is the big-endian number at byte 60 (sqlite.org,
    // fileformat2). Open without blocking: a FIFO in its place must not hang us.
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    let mut header = [0; 64];
    let file = OpenOptions::new().read(true).custom_flags(flags.bits()).open(database(state));
    match file.and_then(|mut file| file.read_exact(&mut header)) {
        Ok(()) => header.last_chunk().copied().map(u32::from_be_bytes) != Some(MOVED),
        Err(error) => error.kind() != ErrorKind::NotFound,
    }
}
