//! The SQLite database in which earlier versions kept the leases, `quota.db`. This crate knows only its
//! version number, since the programs on the way of a container hold no SQLite.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;

/// The `user_version` of a database whose leases stand in a ledger. Programs of earlier versions refuse it.
pub const TAKEN: u32 = 200;
/// Added to the version of a database whose leases are being taken over. Programs of earlier versions refuse
/// that too.
pub const FENCED: u32 = 100;

/// Where earlier versions kept the leases.
pub(crate) fn database(state: &Path) -> PathBuf {
    state.join("quota.db")
}

/// Whether there is a database whose leases may not stand in the ledger yet. What is no database counts too:
/// who takes it over says what is wrong with it.
pub(crate) fn holds_leases(state: &Path) -> bool {
    // The database file format: the user version is the big-endian number at byte 60 (sqlite.org,
    // fileformat2). A pipe in its place must not be waited for.
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    let mut header = [0; 64];
    let file = OpenOptions::new().read(true).custom_flags(flags.bits()).open(database(state));
    match file.and_then(|mut file| file.read_exact(&mut header)) {
        Ok(()) => header.last_chunk().copied().map(u32::from_be_bytes) != Some(TAKEN),
        Err(error) => error.kind() != ErrorKind::NotFound,
    }
}
