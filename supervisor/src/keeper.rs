//! Keeper and worker: two processes that hold the same descriptors, and restart each other.
//!
//! The keeper accepts listeners and serves no calls; the worker answers calls. While one of them lives, no
//! call is lost: a call that has not been received waits, and one that a dead worker had received is in the
//! journal.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, accept4, getsockopt, setsockopt, socketpair,
    sockopt::{PeerCredentials, ReceiveTimeout},
};
use nix::sys::time::TimeVal;

use crate::handover::{receive_descriptor, send_descriptor, send_word};

/// Descriptors and arguments that keeper and worker both hold.
pub struct Holdings {
    /// Books and journal.
    pub memory: OwnedFd,
    /// The lease's budget.
    pub budget: OwnedFd,
    /// The limits that the container's programs read.
    pub limits: OwnedFd,
    /// The socket that accepts new listeners.
    pub socket: OwnedFd,
    /// Seccomp listeners, one for each filter on the container's processes.
    pub listeners: Vec<OwnedFd>,
    /// The command-line words that both need.
    pub words: Vec<String>,
}

/// The role of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Accepts listeners.
    Keeper,
    /// Answers calls.
    Worker,
}

impl Role {
    /// Returns the role's word on the command line.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Keeper => "keeper",
            Self::Worker => "worker",
        }
    }

    /// Returns the name of its process.
    pub const fn process_name(self) -> &'static CStr {
        match self {
            Self::Keeper => c"gpushare-keeper",
            Self::Worker => c"gpushare-worker",
        }
    }

    /// Parses a role from its word.
    pub fn named(word: &str) -> Option<Self> {
        [Self::Keeper, Self::Worker].into_iter().find(|role| role.word() == word)
    }
}

impl Holdings {
    /// Starts a process of this role, and returns the link to it. It runs the same program as this process,
    /// even if the installed file was replaced.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(&self, role: Role) -> io::Result<OwnedFd> {
        let (ours, theirs) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
        let mut command = Command::new("/proc/self/exe");
        command.arg0("gpushare-supervisor").arg(role.word()).args(&self.words);
        let mut inherited = vec![
            theirs.as_fd(),
            self.memory.as_fd(),
            self.budget.as_fd(),
            self.limits.as_fd(),
            self.socket.as_fd(),
        ];
        inherited.extend(self.listeners.iter().map(AsFd::as_fd));
        // Copies without close-on-exec, which this process drops at once.
        let copies = inherited.into_iter().map(inheritable).collect::<Result<Vec<_>, _>>()?;
        for (flag, copy) in ["--link", "--memory", "--budget", "--limits", "--socket"].iter().zip(&copies) {
            command.arg(flag).arg(copy.as_raw_fd().to_string());
        }
        for listener in &copies[5..] {
            command.arg("--listener").arg(listener.as_raw_fd().to_string());
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().map(drop)?;
        Ok(ours)
    }
}

fn inheritable(fd: BorrowedFd) -> Result<OwnedFd, Errno> {
    let copy = fcntl(fd, FcntlArg::F_DUPFD(3))?;
    Ok(owned(copy))
}

/// Takes ownership of a descriptor that the process inherited.
#[allow(unsafe_code)]
pub fn owned(fd: RawFd) -> OwnedFd {
    // SAFETY: the process that started this one left it this descriptor, or the kernel has just made it;
    // nothing else in the process uses it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// Takes ownership of an inherited descriptor, and sets close-on-exec on it.
///
/// # Errors
/// EBADF for a number that is not an open descriptor.
pub fn inherited(fd: RawFd) -> Result<OwnedFd, Errno> {
    let fd = owned(fd);
    let _ = fcntl(&fd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
    Ok(fd)
}

/// Runs the keeper until no process has a filter any more. `link` leads to the worker.
///
/// # Errors
/// If the kernel refuses to wait.
pub fn keep(mut holdings: Holdings, link: Option<OwnedFd>) -> io::Result<()> {
    /// How long the first listener may take, in milliseconds: the process that should bring it may have
    /// ended.
    const FIRST: u16 = 60_000;
    let mut link = link;
    if let Some(link) = &link {
        let _ = send_word(link); // if the worker has ended meanwhile, that is detected below
    }
    let mut had_listeners = !holdings.listeners.is_empty();
    loop {
        if link.is_none() && !holdings.listeners.is_empty() {
            link = start_worker(&holdings);
        }
        let mut asked = vec![PollFd::new(holdings.socket.as_fd(), PollFlags::POLLIN)];
        asked.extend(link.iter().map(|link| PollFd::new(link.as_fd(), PollFlags::empty())));
        asked.extend(holdings.listeners.iter().map(|one| PollFd::new(one.as_fd(), PollFlags::empty())));
        let timeout = match (had_listeners, &link) {
            (false, _) => PollTimeout::from(FIRST),
            (true, Some(_)) => PollTimeout::NONE,
            (true, None) => PollTimeout::from(RETRY), // the worker could not be started for now
        };
        match poll(&mut asked, timeout) {
            Ok(0) if !had_listeners => return Ok(()),
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let events: Vec<PollFlags> =
            asked.iter().map(|one| one.revents().unwrap_or(PollFlags::empty())).collect();
        let is_over = |events: &PollFlags| events.intersects(PollFlags::POLLHUP | PollFlags::POLLERR);
        let links = usize::from(link.is_some());
        let has_new = events[0].contains(PollFlags::POLLIN);
        let is_worker_gone = links == 1 && is_over(&events[1]);
        let mut over = events[1 + links..].iter().map(is_over);
        holdings.listeners.retain(|_| !over.next().unwrap_or(false));
        if is_worker_gone {
            link = None;
        }
        if has_new {
            admit(&mut holdings, &mut link);
        }
        had_listeners |= !holdings.listeners.is_empty();
        if holdings.listeners.is_empty() && had_listeners {
            return Ok(());
        }
    }
}

/// Delay before another attempt to start a worker, in milliseconds.
const RETRY: u8 = 20;
/// How long a connecting process may take to hand its listener over.
const PATIENCE: TimeVal = TimeVal::new(5, 0);
/// How many workers may end over a call before a new listener is served.
const MOST_STARTS: usize = 4;

/// Starts a worker, and waits until it is ready.
fn start_worker(holdings: &Holdings) -> Option<OwnedFd> {
    let link = holdings.start(Role::Worker).ok()?;
    receive_descriptor(&link).ok().map(|_| link)
}

/// Accepts a listener from a connecting process. The process gets its answer when keeper and worker both hold
/// the listener.
fn admit(holdings: &mut Holdings, link: &mut Option<OwnedFd>) {
    let Ok(connection) = accept4(holdings.socket.as_raw_fd(), SockFlag::SOCK_CLOEXEC).map(owned) else {
        return;
    };
    let is_root = getsockopt(&connection, PeerCredentials).is_ok_and(|peer| peer.uid() == 0);
    if !is_root {
        return;
    }
    if setsockopt(&connection, ReceiveTimeout, &PATIENCE).is_err() {
        return;
    }
    let Ok(Some(listener)) = receive_descriptor(&connection) else { return };
    let is_worked = match &*link {
        Some(living) => match send_descriptor(living, &listener) {
            Ok(()) => receive_descriptor(living).is_ok(),
            Err(error) if is_gone(&error) => false,
            // The worker lives but cannot be notified: a second one would wait for its end.
            Err(_) => return,
        },
        None => false,
    };
    holdings.listeners.push(listener);
    let is_worked = is_worked || {
        *link = (0..MOST_STARTS).find_map(|_| start_worker(holdings));
        link.is_some()
    };
    if is_worked {
        let _ = send_word(&connection);
    } else {
        let _ = holdings.listeners.pop();
    }
}

/// Whether the other end of a socket is closed.
fn is_gone(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::NotConnected
    )
}
