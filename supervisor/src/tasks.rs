//! The container's processes and threads that made calls.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::os::fd::{AsFd, IntoRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::Builder;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::time::TimeValLike;
use nix::time::{ClockId, clock_gettime};
use nix::unistd::close;

use crate::calls::{self, Processes};
use crate::devices::{Devices, FileKind};
use crate::sys;

/// How long a program's memory may delay the worker during one call, in microseconds. The program decides
/// when a page under userfaultfd or of a FUSE file arrives.
const LONGEST: u32 = 1_000_000;

/// Stack size of a thread that closes a file, in bytes.
const SMALL_STACK: usize = 16 << 10;

/// Most files of programs that are being closed at a time. A program that makes more closes slow has only
/// itself to wait for.
const MOST_CLOSED: usize = 32;

/// Most processes and threads to track, so that a container cannot exhaust our descriptors.
const MOST_KEPT: usize = 4096;

struct Process {
    descriptor: Option<OwnedFd>,
    /// Whether it made a call to this worker, or has a file of a client of the container. A process known
    /// only from the books may be another one with the same PID.
    is_proved: bool,
    /// Start time in ticks since boot: another process may have its PID later.
    born: Option<u64>,
}

struct Thread {
    descriptor: OwnedFd,
    process: u32,
}

/// The tasks that made calls.
pub struct Tasks {
    devices: Devices,
    processes: HashMap<u32, Process>,
    threads: HashMap<u32, Thread>,
    /// PIDs of forgotten processes that had made clients. The kernel's range of PIDs bounds their number.
    forgotten: BTreeMap<u32, Option<u64>>,
    /// The forgotten PID that was returned last.
    asked_for: u32,
    /// Held by each thread that closes a file.
    closing: Arc<()>,
}

impl Tasks {
    /// Tracks the processes `pids`, which made calls to an earlier worker, and marks `forgotten` as
    /// forgotten.
    pub fn new(
        devices: Devices,
        pids: impl IntoIterator<Item = u32>,
        forgotten: impl IntoIterator<Item = u32>,
    ) -> Self {
        let known = |pid| {
            let descriptor = sys::pidfd_open(pid).ok();
            let born = descriptor.as_ref().and_then(|_| born(pid));
            (pid, Process { descriptor, is_proved: false, born })
        };
        Self {
            devices,
            processes: pids.into_iter().map(known).collect(),
            threads: HashMap::new(),
            forgotten: forgotten.into_iter().map(|pid| (pid, None)).collect(),
            asked_for: 0,
            closing: Arc::new(()),
        }
    }

    /// Returns the descriptor `fd` of a thread that is stopped in a call, its kind, and the thread's process.
    /// Closes the descriptor at once if it is not the driver's.
    ///
    /// # Errors
    /// EBADF if there is no such descriptor, ESRCH if the thread has ended, ENOMEM if there are too many
    /// threads, or too many files of other drivers that are slow to close.
    pub fn take(&mut self, tid: u32, fd: i32) -> Result<(Option<OwnedFd>, FileKind, u32), Errno> {
        if Arc::strong_count(&self.closing) > MOST_CLOSED {
            return Err(Errno::ENOMEM);
        }
        for _ in 0..2 {
            if !self.threads.contains_key(&tid) {
                self.add_thread(tid)?;
            }
            let Some(thread) = self.threads.get(&tid) else { return Err(Errno::ESRCH) };
            match sys::pidfd_getfd(thread.descriptor.as_fd(), fd) {
                Ok(file) => {
                    let (kind, process) = (self.devices.kind(&file), thread.process);
                    if kind == FileKind::Other {
                        self.give_back(file);
                        return Ok((None, kind, process));
                    }
                    return Ok((Some(file), kind, process));
                }
                // Another thread has its id now.
                Err(Errno::ESRCH) => drop(self.threads.remove(&tid)),
                Err(errno) => return Err(errno),
            }
        }
        Err(Errno::ESRCH)
    }

    /// Closes a file of a program. The last close may take as long as the program likes: a socket waits for
    /// its data to be sent, and the file system may be a program. A separate thread therefore closes it.
    fn give_back(&self, file: OwnedFd) {
        let closing = self.closing.clone();
        let number = file.into_raw_fd(); // without room for a thread it stays open
        let _detached = Builder::new().stack_size(SMALL_STACK).spawn(move || {
            let _ = close(number);
            drop(closing);
        });
    }

    fn add_thread(&mut self, tid: u32) -> Result<(), Errno> {
        if self.threads.len() >= MOST_KEPT {
            let descriptors: Vec<_> = self.threads.values().map(|thread| Some(&thread.descriptor)).collect();
            let mut lives = living(&descriptors).into_iter();
            self.threads.retain(|_, _| lives.next().unwrap_or(false));
            // Threads that still live are added again at their next call.
            if self.threads.len() > MOST_KEPT / 2 {
                self.threads.clear();
            }
        }
        let pid = process_of(tid).ok_or(Errno::ESRCH)?;
        self.add_process(pid)?;
        let descriptor = match sys::pidfd_open_thread(tid) {
            // Before kernel 6.9. All threads share the process's descriptors, unless one unshared them: then
            // the file is not RM's, or the program has it anyway.
            Err(Errno::EINVAL) => sys::pidfd_open(pid)?,
            other => other?,
        };
        self.threads.insert(tid, Thread { descriptor, process: pid });
        Ok(())
    }

    fn add_process(&mut self, pid: u32) -> Result<(), Errno> {
        if self.processes.get(&pid).is_some_and(|known| known.is_proved && known.lives()) {
            return Ok(());
        }
        // The next check forgets processes that have ended, unless RM counts something for them.
        if self.processes.len() >= MOST_KEPT && !self.processes.contains_key(&pid) {
            return Err(Errno::ENOMEM);
        }
        let descriptor = Some(sys::pidfd_open(pid)?);
        self.processes.insert(pid, Process { descriptor, is_proved: true, born: born(pid) });
        self.forgotten.remove(&pid); // listed twice, it would count twice
        Ok(())
    }

    /// Returns the descriptor of a process that certainly belongs to the container.
    pub fn descriptor(&self, pid: u32) -> Option<&OwnedFd> {
        self.processes.get(&pid).filter(|process| process.is_proved)?.descriptor.as_ref()
    }
}

impl Process {
    fn lives(&self) -> bool {
        self.descriptor.as_ref().is_some_and(|descriptor| !has_ended(descriptor))
    }
}

impl Processes for Tasks {
    type File = OwnedFd;

    fn tracked(&self) -> Vec<(u32, bool)> {
        let (pids, descriptors): (Vec<u32>, Vec<Option<&OwnedFd>>) =
            self.processes.iter().map(|(pid, process)| (*pid, process.descriptor.as_ref())).unzip();
        let lives = living(&descriptors);
        // Another process may have the PID of one that has ended, but not until it has been reaped.
        let has_its_number = |pid: u32, one: Option<&OwnedFd>| {
            let born = || self.processes.get(&pid).and_then(|process| process.born);
            one.is_some_and(|one| sys::has_number(one.as_fd())) || has_number(pid, born())
        };
        let all = pids.into_iter().zip(descriptors).zip(lives);
        all.filter(|((pid, one), lives)| *lives || has_its_number(*pid, *one))
            .map(|((pid, _), lives)| (pid, lives))
            .collect()
    }

    fn lives(&self, pid: u32) -> bool {
        self.processes.get(&pid).is_some_and(Process::lives)
    }

    fn file(&self, pid: u32, fd: i32) -> Option<OwnedFd> {
        let process = self.processes.get(&pid)?.descriptor.as_ref()?;
        let file = sys::pidfd_getfd(process.as_fd(), fd).ok()?;
        if self.devices.kind(&file) == FileKind::Control {
            return Some(file);
        }
        self.give_back(file);
        None
    }

    fn watch(&self, pid: u32) -> Option<OwnedFd> {
        self.processes.get(&pid)?.descriptor.as_ref()?.try_clone().ok()
    }

    fn birth(&self, pid: u32) -> Option<u32> {
        let low = self.processes.get(&pid)?.born? & u64::from(u32::MAX);
        u32::try_from(low).ok().filter(|birth| *birth != 0)
    }

    fn prove(&mut self, pid: u32) {
        if let Some(process) = self.processes.get_mut(&pid) {
            process.is_proved |= process.descriptor.is_some();
        }
    }

    fn is_proved(&self, pid: u32) -> bool {
        self.descriptor(pid).is_some()
    }

    fn forgotten(&mut self, most: usize) -> Vec<u32> {
        let after = self.asked_for + 1;
        let in_turn = self.forgotten.range(after..).chain(self.forgotten.range(..after));
        let some: Vec<(u32, Option<u64>)> = in_turn.take(most).map(|(pid, born)| (*pid, *born)).collect();
        self.asked_for = some.last().map_or(0, |(pid, _)| *pid);
        some.into_iter().filter(|(pid, born)| has_number(*pid, *born)).map(|(pid, _)| pid).collect()
    }

    fn remember(&mut self, pid: u32) {
        if let Some(born) = self.forgotten.remove(&pid) {
            self.processes.insert(pid, Process { descriptor: None, is_proved: false, born });
        }
    }

    fn was_forgotten(&self, pid: u32) -> bool {
        self.forgotten.get(&pid).is_some_and(|born| has_number(pid, *born))
    }

    fn forget(&mut self, pid: u32, made_clients: bool) {
        let Some(process) = self.processes.remove(&pid) else { return };
        if made_clients {
            self.forgotten.insert(pid, process.born);
        }
        self.threads.retain(|_, thread| thread.process != pid);
    }
}

fn has_ended(descriptor: &OwnedFd) -> bool {
    living(&[Some(descriptor)]) == [false]
}

/// Returns which of the processes or threads behind these descriptors live: a descriptor becomes readable
/// when its process has ended. Polls once for all, because a container may have thousands.
fn living(descriptors: &[Option<&OwnedFd>]) -> Vec<bool> {
    let present = descriptors.iter().flatten();
    let mut asked: Vec<PollFd> = present.map(|one| PollFd::new(one.as_fd(), PollFlags::POLLIN)).collect();
    let is_told = poll(&mut asked, PollTimeout::ZERO).is_ok();
    let mut ended = asked.iter().map(|one| is_told && one.any().unwrap_or(false));
    descriptors.iter().map(|one| one.is_some() && !ended.next().unwrap_or(false)).collect()
}

/// Whether a process that has ended still has its PID, reaped or not, and no other process has it.
fn has_number(pid: u32, began: Option<u64>) -> bool {
    !exists(pid) || (began.is_some() && born(pid) == began)
}

/// Returns the start time of a process, in ticks since boot.
fn born(pid: u32) -> Option<u64> {
    const START_TIME: usize = 22 - 3; // numbered as in proc_pid_stat(5), counted from the field after the name
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    text.rsplit_once(')')?.1.split_whitespace().nth(START_TIME)?.parse().ok()
}

fn exists(pid: u32) -> bool {
    fs::exists(format!("/proc/{pid}")).unwrap_or(true)
}

fn process_of(tid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{tid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("Tgid:"))?.trim().parse().ok()
}

/// Deadline for touching a program's memory, in microseconds of the monotonic clock, or 0. Stored in memory
/// that outlives the worker.
#[derive(Clone, Copy)]
pub struct Touch(pub &'static AtomicU64);

impl Touch {
    /// Runs `what` within `left` microseconds, and deducts the elapsed time from `left`.
    fn time<T>(self, left: &Cell<u32>, what: impl FnOnce() -> T) -> T {
        let until = now() + u64::from(left.get());
        self.0.store(until, Ordering::Relaxed);
        let done = sys::within(left.get(), what);
        self.0.store(0, Ordering::Relaxed);
        left.set(u32::try_from(until.saturating_sub(now())).unwrap_or(LONGEST).max(1));
        done
    }

    /// Whether the last worker was delayed until its deadline.
    pub fn has_delayed(self) -> bool {
        let until = self.0.swap(0, Ordering::Relaxed);
        until != 0 && now() >= until
    }
}

/// Returns microseconds of the monotonic clock.
pub fn now() -> u64 {
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(0, |time| time.num_microseconds());
    u64::try_from(time).unwrap_or(0)
}

/// A thread that is stopped in a call.
pub struct Stopped<'l> {
    /// The listener that reported it.
    pub listener: &'l OwnedFd,
    /// The notification's id.
    pub id: u64,
    /// The thread's id, in our pid namespace.
    pub tid: u32,
    /// Records when its memory is being touched.
    pub touch: Touch,
    left: Cell<u32>,
}

impl<'l> Stopped<'l> {
    /// Creates the thread of a notification.
    pub fn new(listener: &'l OwnedFd, id: u64, tid: u32, touch: Touch) -> Self {
        Self { listener, id, tid, touch, left: Cell::new(LONGEST) }
    }
}

impl calls::Program for Stopped<'_> {
    fn read(&self, address: u64, to: &mut [u8]) -> Result<(), Errno> {
        self.touch.time(&self.left, || sys::read_memory(self.tid, address, to))
    }

    fn write(&self, parts: &[(u64, &[u8])]) -> Result<(), Errno> {
        self.touch.time(&self.left, || sys::write_memory(self.tid, parts))
    }

    fn waits(&self) -> bool {
        sys::is_valid(self.listener.as_fd(), self.id)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;
    use std::path::Path;
    use std::time::{Duration, Instant};

    use nix::sys::socket::{setsockopt, sockopt};

    use super::*;

    /// Returns a socket whose close takes a minute, while its other end lives and reads nothing.
    fn lingering(listener: &TcpListener) -> (TcpStream, TcpStream) {
        let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let linger = nix::libc::linger { l_onoff: 1, l_linger: 60 };
        setsockopt(&socket, sockopt::Linger, &linger).unwrap();
        socket.set_nonblocking(true).unwrap();
        while socket.write(&[0; 1 << 16]).is_ok() {}
        (socket, listener.accept().unwrap().0)
    }

    #[test]
    fn a_process_that_nobody_waits_for_is_forgotten_like_any_other() {
        let devices = Devices::find(Path::new("/dev/null"), Path::new("/nowhere"), &[]).unwrap();
        let mut tasks = Tasks::new(devices, [], []);
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id();
        assert_eq!(tasks.add_process(pid), Ok(()));
        assert_eq!(tasks.tracked(), [(pid, true)]);
        child.kill().unwrap();
        let until = Instant::now() + Duration::from_secs(30);
        while tasks.tracked() != [(pid, false)] {
            assert!(Instant::now() < until, "it has ended");
            std::thread::sleep(Duration::from_millis(1));
        }
        tasks.forget(pid, true);
        assert_eq!(tasks.tracked(), []);
        assert!(tasks.was_forgotten(pid), "its number is nobody else's yet");
        assert_eq!(tasks.forgotten(10), [pid]);
        tasks.remember(pid);
        assert_eq!(tasks.tracked(), [(pid, false)]);
        child.wait().unwrap();
        assert_eq!(tasks.tracked(), [(pid, false)]);
    }

    #[test]
    fn files_that_take_long_to_close_hold_up_their_own_program_alone() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let devices = Devices::find(Path::new("/dev/null"), Path::new("/nowhere"), &[]).unwrap();
        let mut tasks = Tasks::new(devices, [], []);
        let own = std::fs::File::open("/dev/null").unwrap();
        let take = |tasks: &mut Tasks| {
            tasks.take(nix::unistd::gettid().as_raw().cast_unsigned(), own.as_raw_fd()).map(|taken| taken.1)
        };
        assert_eq!(take(&mut tasks), Ok(FileKind::Control));
        let mut ends = Vec::new();
        for _ in 0..MOST_CLOSED {
            let (socket, end) = lingering(&listener);
            ends.push(end);
            tasks.give_back(socket.into());
        }
        // Each close would have taken a minute.
        assert_eq!(take(&mut tasks), Err(Errno::ENOMEM));
        drop(ends);
        let until = Instant::now() + Duration::from_secs(30);
        while take(&mut tasks).is_err() {
            assert!(Instant::now() < until, "the files are closed");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
