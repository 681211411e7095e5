//! Opens files on which a container may hold a file lease (`fcntl(F_SETLEASE)`, fcntl(2)) without waiting,
//! and tells who holds leases and locks. These leases are the kernel's and have nothing to do with
//! gpushare's.
//!
//! The owner of a file may take a lease on it without any privilege. Whoever then opens the file waits up to
//! `/proc/sys/fs/lease-break-time`, 45 seconds, and may have to wait again. Containers have files of the host
//! mounted, so no program of gpushare's opens such a file in a way that waits. Nobody gets a lease on a file
//! owned by [`NOBODYS`], unless it may take that user id (CAP_SETUID), nor a write lease on a file that
//! others hold open.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::fcntl::OFlag;
use nix::sys::stat::makedev;

/// The owner of files that containers get: a user id outside every range that systems assign (in systemd's
/// UIDS-GIDS.md it is below the foreign ones and above all that are allocated).
pub const NOBODYS: u32 = 2_147_483_600;

/// Opens a regular file for reading without waiting for a lease. If a container holds a lease on it, the
/// error is `WouldBlock`, and the kernel starts to end that lease.
///
/// # Errors
/// When it cannot be opened now, or is no regular file.
pub fn open_now(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let file = options.read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::other("it is no regular file")),
    }
}

/// How often `/proc/locks` is read to find one lock: a single read can miss a line.
const LOOKS: usize = 5;

/// Reads a whole file, opened by [`open_now`].
///
/// # Errors
/// Those of [`open_now`], or when reading fails.
pub fn read_now(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_now(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// A file as `/proc/locks` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileIdentity {
    /// Device number of the file system.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
}

impl FileIdentity {
    /// The identity of the file at `path`, links followed. This opens nothing, so no lease makes it wait.
    ///
    /// # Errors
    /// When the file does not exist or cannot be looked up.
    pub fn of(path: &Path) -> io::Result<Self> {
        fs::metadata(path).map(|found| Self { device: found.dev(), inode: found.ino() })
    }
}

/// All file leases of the machine: the pid of each holder, as /proc shows it here, and the file.
///
/// # Errors
/// When `/proc/locks` cannot be read.
pub fn file_leases(proc: &Path) -> io::Result<Vec<(u32, FileIdentity)>> {
    Ok(locks(proc)?.lines().filter_map(|line| held(line, "LEASE")).collect())
}

/// Reads `/proc/locks` in as few reads as the kernel allows. The kernel continues at the number of the next
/// line, so a lock that ends between two reads hides one line (in 3 of 1,000 attempts with small reads and 90
/// other locks).
fn locks(proc: &Path) -> io::Result<String> {
    let mut text = String::with_capacity(64 << 10);
    File::open(proc.join("locks"))?.read_to_string(&mut text)?;
    Ok(text)
}

/// The process that took the `flock` of this file; `None` if nobody holds it or the kernel does not show it.
pub fn flock_holder(file: &File) -> Option<u32> {
    let metadata = file.metadata().ok()?;
    let identity = FileIdentity { device: metadata.dev(), inode: metadata.ino() };
    // A single read can miss a line.
    (0..LOOKS).find_map(|_| {
        let locks = locks(Path::new("/proc")).ok()?;
        let all: Vec<(u32, FileIdentity)> = locks.lines().filter_map(|line| held(line, "FLOCK")).collect();
        let exactly = all.iter().find(|(_, held)| *held == identity);
        // For some file systems `/proc/locks` shows another device number than `stat` does.
        let found = exactly.or_else(|| all.iter().find(|(_, held)| held.inode == identity.inode));
        found.map(|(pid, _)| *pid)
    })
}

/// Holder and file in a line of this kind, as `3: LEASE  ACTIVE    WRITE 4711 08:01:2359299 0 EOF` (Linux,
/// fs/locks.c). Lines of waiting processes have an arrow before the kind and do not match.
fn held(line: &str, kind: &str) -> Option<(u32, FileIdentity)> {
    let mut words = line.split_ascii_whitespace().skip(1);
    (words.next()? == kind).then_some(())?;
    let (pid, file) = (words.nth(2)?.parse().ok()?, words.next()?);
    let mut parts = file.split(':');
    let mut number = || u64::from_str_radix(parts.next()?, 16).ok();
    let (major, minor) = (number()?, number()?);
    let inode = parts.next()?.parse().ok()?;
    Some((pid, FileIdentity { device: makedev(major, minor), inode }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_told_with_its_file_and_what_is_no_file_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "x").unwrap();
        let identity = FileIdentity::of(&path).unwrap();
        let line = format!(
            "3: LEASE  ACTIVE    WRITE 4711 {:02x}:{:02x}:{} 0 EOF",
            nix::sys::stat::major(identity.device),
            nix::sys::stat::minor(identity.device),
            identity.inode
        );
        assert_eq!(held(&line, "LEASE"), Some((4711, identity)));
        for other in
            ["", "1: POSIX  ADVISORY  WRITE 1 08:01:2 0 EOF", "2: LEASE ACTIVE READ x 08:01:2 0 EOF", "LEASE"]
        {
            assert_eq!(held(other, "LEASE"), None, "{other}");
        }
        assert_eq!(held("7: -> FLOCK  ADVISORY  WRITE 9 08:01:2 0 EOF", "FLOCK"), None, "one who waits");
        assert_eq!(read_now(&path).unwrap(), b"x");
        assert!(open_now(folder.path()).is_err());
        let fifo = folder.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(open_now(&fifo).is_err(), "nobody writes there");
    }

    #[test]
    fn the_kernel_names_who_locked_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let file = File::create(&path).unwrap();
        assert_eq!(flock_holder(&file), None);
        file.lock().unwrap();
        assert_eq!(flock_holder(&File::open(&path).unwrap()), Some(std::process::id()));
    }
}
