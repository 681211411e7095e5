//! Reads single processes from /proc, one file each, and parses only the needed fields. Every creation and
//! every sweep waits for this, and the kernel's text about one process has some sixty lines.

use std::fs::{self, File};
use std::io::{self, Read};

use procfs::process::Stat;
use procfs::{FromRead, ProcError, ProcResult};

/// "No such process": the kernel returns this error when a process ends while its file is read.
const ESRCH: i32 = 3;

/// State and start time of the process `pid`.
///
/// # Errors
/// `ProcError::NotFound` when there is no such process.
pub fn stat(pid: i32) -> ProcResult<Stat> {
    let path = format!("/proc/{pid}/stat");
    File::open(&path).map_err(ProcError::from).and_then(Stat::from_read).map_err(|error| match error {
        ProcError::Io(error, _) if error.raw_os_error() == Some(ESRCH) => {
            ProcError::NotFound(Some(path.into()))
        }
        other => other,
    })
}

/// The pid of the process `pid` in each of its pid namespaces, the innermost last; `None` if it is unknown.
pub fn pids(pid: i32) -> Option<Vec<i32>> {
    let mut status = Vec::with_capacity(4096); // large enough for one read
    File::open(format!("/proc/{pid}/status")).and_then(|mut file| file.read_to_end(&mut status)).ok()?;
    let line = status.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"NSpid:"))?;
    std::str::from_utf8(line).ok()?.split_whitespace().map(|pid| pid.parse().ok()).collect()
}

/// Returns a thread of the process that has not ended: the first thread if possible; `None` if all have
/// ended. The files in /proc/PID describe the first thread, and are empty once it has ended.
pub fn living_thread(pid: i32) -> Option<i32> {
    let Ok(found) = stat(pid) else { return None };
    if !matches!(found.state, 'Z' | 'X') {
        return Some(pid);
    }
    if found.num_threads <= 1 {
        return None;
    }
    let threads = fs::read_dir(format!("/proc/{pid}/task")).ok()?.filter_map(Result::ok);
    let mut numbers = threads.filter_map(|thread| thread.file_name().to_str()?.parse().ok());
    numbers.find(|thread| *thread != pid)
}

/// The pid of this process, as /proc shows it.
///
/// # Errors
/// When /proc cannot be read, or shows another pid namespace, where this process may have no pid.
pub fn own_pid() -> ProcResult<i32> {
    let link = fs::read_link("/proc/self")?;
    let pid = link.to_str().and_then(|pid| pid.parse().ok());
    pid.ok_or_else(|| ProcError::Io(io::ErrorKind::InvalidData.into(), Some(link)))
}
