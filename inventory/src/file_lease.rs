//! Opens files on which a container may hold a file lease (`fcntl(F_SETLEASE)`, fcntl(2)) without waiting,
//! and detects such leases. These are kernel leases, unrelated to gpushare's leases.
//!
//! The owner of a file may take a lease on it without any privilege. Opening the file then blocks for up to
//! `/proc/sys/fs/lease-break-time`, 45 seconds, and may have to block again. Host files are mounted into
//! containers, so gpushare's programs always open such files without blocking. A container cannot take a
//! lease on a file owned by [`NOBODYS`], unless it may take that user id (CAP_SETUID), nor a write lease on a
//! file that another process has open.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::fcntl::OFlag;

/// The owner of files that are mounted into containers: a user id outside every range that systems assign (in
/// systemd's UIDS-GIDS.md it is below the foreign ones and above all that are allocated).
pub const NOBODYS: u32 = 2_147_483_600;

/// Opens a regular file for reading without waiting for a lease. If a container holds a lease on it, the
/// error is `WouldBlock`, and the kernel starts to end that lease.
///
/// # Errors
/// When it cannot be opened now, or is not a regular file.
pub fn open_now(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let file = options.read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::other("it is no regular file")),
    }
}

/// Reads a whole file, opened by [`open_now`].
///
/// # Errors
/// The same as for [`open_now`], and when reading fails.
pub fn read_now(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_now(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The identity of a file in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileIdentity {
    /// Device number of the file system.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
}

impl FileIdentity {
    /// Returns the identity of the file at `path`, following links. It does not open the file, so a lease
    /// cannot block it.
    ///
    /// # Errors
    /// When the file does not exist or cannot be looked up.
    pub fn of(path: &Path) -> io::Result<Self> {
        fs::metadata(path).map(|found| Self { device: found.dev(), inode: found.ino() })
    }
}

/// Returns who set the lease that the text of `/proc/PID/fdinfo/N` shows on the open file `inode`
/// (fs/locks.c: `lock:`, a tab, `1: LEASE  ACTIVE    READ 4711 08:01:2359299 0 EOF`); `None` without a lease.
/// The process may have ended, and a pid of another namespace is 0.
pub fn lease_setter(fdinfo: &str, inode: u64) -> Option<u32> {
    let setter = |line: &str| {
        let mut words = line.strip_prefix("lock:")?.split_ascii_whitespace().skip(1);
        (words.next()? == "LEASE").then_some(())?;
        let pid = words.nth(2)?.parse().ok()?;
        let file = words.next()?;
        (file.rsplit(':').next()?.parse() == Ok(inode)).then_some(pid)
    };
    fdinfo.lines().find_map(setter)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_told_by_its_line_and_what_is_no_file_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "x").unwrap();
        for (line, want) in [
            ("lock:\t1: LEASE  ACTIVE    WRITE 4711 08:01:23 0 EOF", true),
            ("lock:\t1: LEASE  BREAKING  READ  4711 00:2f:23 0 EOF", true),
            ("lock:\t1: LEASE  ACTIVE    WRITE 4711 08:01:24 0 EOF", false),
            ("lock:\t1: POSIX  ADVISORY  WRITE 4711 08:01:23 0 EOF", false),
            ("lock:\t1: FLOCK  ADVISORY  WRITE 4711 08:01:23 0 EOF", false),
            ("1: LEASE  ACTIVE    WRITE 4711 08:01:23 0 EOF", false),
            ("lock:\tLEASE", false),
            ("", false),
        ] {
            let setter = lease_setter(&format!("pos:\t0\n{line}\nmnt_id:\t9\n"), 23);
            assert_eq!(setter, want.then_some(4711), "{line}");
        }
        assert_eq!(read_now(&path).unwrap(), b"x");
        assert!(open_now(folder.path()).is_err());
        let fifo = folder.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(open_now(&fifo).is_err(), "nobody writes there");
    }
}
