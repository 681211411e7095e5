//! The container's processes and threads, as far as they made calls.

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

/// How long a program's memory may hold up the worker in all of a call, in microseconds. A page under
/// userfaultfd, or of a FUSE file, comes when the program likes.
const LONGEST: u32 = 1_000_000;

/// Bytes of the stack of a thread that closes a file.
const SMALL_STACK: usize = 16 << 10;

/// Most files of a program's that are being closed at a time. One that makes more of them take long waits for
/// itself.
const MOST_CLOSED: usize = 32;

/// Most processes and threads that are kept, so that a container cannot take all of our descriptors.
const MOST_KEPT: usize = 4096;

struct Process {
    descriptor: Option<OwnedFd>,
    /// Whether it made a call to this worker, or has a file of a client of the container's. One that is known
    /// from the books alone may be another process of the same pid.
    is_proved: bool,
    /// When it began, in ticks since the machine did: its number may be another's later.
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
    /// Numbers of those that were forgotten and had made clients. There are no more than the kernel has
    /// numbers.
    forgotten: BTreeMap<u32, Option<u64>>,
    /// The last of them that was asked for.
    asked_for: u32,
    /// Held by each thread that closes a file.
    closing: Arc<()>,
}

impl Tasks {
    /// Knows the processes `pids`, which made calls to an earlier worker, and of those `forgotten` that they
    /// were.
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

    /// The descriptor `fd` of a thread that is stopped in a call, what it is, and the thread's process. One
    /// that is not the driver's is given back at once.
    ///
    /// # Errors
    /// EBADF if it has no such descriptor, ESRCH if it has ended, ENOMEM for one thread too many, and while
    /// too many files of other drivers take long to close.
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
                // Its number is another thread's now.
                Err(Errno::ESRCH) => drop(self.threads.remove(&tid)),
                Err(errno) => return Err(errno),
            }
        }
        Err(Errno::ESRCH)
    }

    /// Closes a file of a program's. Where it is the last who does, that may take as long as the program
    /// likes: a socket waits for its data to be sent, and the file system may be a program. So a thread of
    /// its own does it.
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
            // They are asked for again where most of them live.
            if self.threads.len() > MOST_KEPT / 2 {
                self.threads.clear();
            }
        }
        let pid = process_of(tid).ok_or(Errno::ESRCH)?;
        self.add_process(pid)?;
        let descriptor = match sys::pidfd_open_thread(tid) {
            // Before kernel 6.9. The descriptors of all threads are the process's, unless one unshared them:
            // then the file is not RM's, or is one that the program has anyway.
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
        // Those that have ended are forgotten at the next look, unless RM counts something for them.
        if self.processes.len() >= MOST_KEPT && !self.processes.contains_key(&pid) {
            return Err(Errno::ENOMEM);
        }
        let descriptor = Some(sys::pidfd_open(pid)?);
        self.processes.insert(pid, Process { descriptor, is_proved: true, born: born(pid) });
        self.forgotten.remove(&pid); // asked for twice, it would count twice
        Ok(())
    }

    /// The descriptor of a process that is certainly the container's.
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
        // The number of one that has ended may be another's by now; it is not while nobody has taken note of
        // the end.
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

/// Which of the processes or threads live that these descriptors are of: they are readable once that has
/// ended. The kernel is asked once, since a container may have thousands.
fn living(descriptors: &[Option<&OwnedFd>]) -> Vec<bool> {
    let present = descriptors.iter().flatten();
    let mut asked: Vec<PollFd> = present.map(|one| PollFd::new(one.as_fd(), PollFlags::POLLIN)).collect();
    let is_told = poll(&mut asked, PollTimeout::ZERO).is_ok();
    let mut ended = asked.iter().map(|one| is_told && one.any().unwrap_or(false));
    descriptors.iter().map(|one| one.is_some() && !ended.next().unwrap_or(false)).collect()
}

/// Whether a process that has ended has its number still, waited for or not, and no other has.
fn has_number(pid: u32, began: Option<u64>) -> bool {
    !exists(pid) || (began.is_some() && born(pid) == began)
}

/// When a process began, in ticks since the machine did.
fn born(pid: u32) -> Option<u64> {
    const START_TIME: usize = 22 - 3; // as proc_pid_stat(5) counts, from the field behind the name on
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

/// Until when the worker may touch a program's memory, in microseconds of the monotonic clock, in memory that
/// outlives it; 0: it does not.
#[derive(Clone, Copy)]
pub struct Touch(pub &'static AtomicU64);

impl Touch {
    /// Does something within `left` microseconds, which it shortens by what that takes.
    fn time<T>(self, left: &Cell<u32>, what: impl FnOnce() -> T) -> T {
        let until = now() + u64::from(left.get());
        self.0.store(until, Ordering::Relaxed);
        let done = sys::within(left.get(), what);
        self.0.store(0, Ordering::Relaxed);
        left.set(u32::try_from(until.saturating_sub(now())).unwrap_or(LONGEST).max(1));
        done
    }

    /// Whether the last worker was held up for as long as it may be.
    pub fn has_delayed(self) -> bool {
        let until = self.0.swap(0, Ordering::Relaxed);
        until != 0 && now() >= until
    }
}

/// Microseconds of the monotonic clock.
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
    /// Where it is noted that its memory is touched.
    pub touch: Touch,
    left: Cell<u32>,
}

impl<'l> Stopped<'l> {
    /// The thread of a notification.
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

    /// A socket whose close takes a minute, while its other end lives and reads nothing.
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
        // Each of them would have taken a minute.
        assert_eq!(take(&mut tasks), Err(Errno::ENOMEM));
        drop(ends);
        let until = Instant::now() + Duration::from_secs(30);
        while take(&mut tasks).is_err() {
            assert!(Instant::now() < until, "the files are closed");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
