//! The worker: receives and answers calls.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::abi::{Era, UVM_MAP_EXTERNAL};
use crate::books::Books;
use crate::budget::Budget;
use crate::calls::{Answer, Call, Compute, Race, Supervisor, twin_of};
use crate::devices::{Devices, FileKind};
use crate::handover::{receive_descriptor, send_word};
use crate::journal::{Journal, Step};
use crate::keeper::{Holdings, Role};
use crate::kernel::Kernel;
use crate::manager::free_object;
use crate::memory::is_in_use;
use crate::sys;
use crate::tasks::{Stopped, Tasks, Touch};

const ARCH_I386: u32 = 0x4000_0003;

/// How many workers a program's memory may delay in one call.
const MOST_DELAYS: u32 = 2;
/// How many workers may end during one call, for whatever reason.
const MOST_RESTARTS: u32 = 64;

/// Interval between two comparisons of RM's figures with the books, in microseconds, while there is a client.
const LOOK_EVERY: u64 = 1_000_000;

/// The same interval after a race that put the lease above its limit.
const AFTER_RACE: u64 = 100_000;

/// Checks after calls that were let through take at most this fraction of the time, because a container may
/// have thousands of processes. The pause between them is at most this many microseconds.
const LOOK_PART: u64 = 5;
const LONGEST_PAUSE: u64 = 20_000;

/// Delay before another attempt to start a keeper, in milliseconds.
const RETRY: u8 = 20;
/// How long the last processes may take to end, in microseconds, and the pause between two checks for them.
const LONGEST_END: u64 = 10_000_000;
const BETWEEN_ENDS: Duration = Duration::from_millis(20);

/// Handles a race: receives the descriptors of those of the race's processes that certainly belong to the
/// container, and returns how many it killed.
pub type OnRace = Box<dyn FnMut(&Race, &[&OwnedFd]) -> u64>;

/// The keeper and the descriptors that a worker shares with it.
pub struct Peer {
    /// The descriptors that both hold.
    pub holdings: Holdings,
    /// The link to the keeper.
    pub link: Option<OwnedFd>,
}

/// A running worker.
pub struct Worker {
    supervisor: Supervisor<'static, Kernel, Tasks>,
    peer: Peer,
    touch: Touch,
    began: Instant,
    next_look: u64,
    look_not_before: u64,
    on_race: OnRace,
}

/// Contents of a notification.
struct Notification {
    id: u64,
    tid: u32,
    fd: i32,
    command: u32,
    address: u64,
}

fn readable(fd: &OwnedFd) -> PollFd<'_> {
    PollFd::new(fd.as_fd(), PollFlags::POLLIN)
}

impl Notification {
    fn read(words: &[u64]) -> Self {
        let low = |word: u64| u32::try_from(word & u64::from(u32::MAX)).unwrap_or(0);
        let (tid, arch) = (low(words[1]), low(words[2] >> 32));
        let address = if arch == ARCH_I386 { u64::from(low(words[6])) } else { words[6] };
        Self { id: words[0], tid, fd: low(words[4]).cast_signed(), command: low(words[5]), address }
    }
}

impl Worker {
    /// Creates a worker from the state that outlives it, and with the container's timekeepers. `on_race`
    /// receives each race and its processes' descriptors.
    pub fn new(
        era: &'static Era,
        (devices, kernel): (Devices, Kernel),
        (books, budget, journal): (Books<'static>, Budget<'static>, Journal<'static>),
        (peer, touch): (Peer, Touch),
        compute: Option<Compute<OwnedFd>>,
        on_race: OnRace,
    ) -> Self {
        let tasks = Tasks::new(devices, books.processes(), books.ended_makers());
        peer.holdings.listeners.iter().for_each(|listener| sys::set_synchronous(listener.as_fd()));
        let supervisor = Supervisor::new(era, (books, budget, journal), kernel, tasks, sys::random());
        let supervisor = match compute {
            Some(compute) => supervisor.holding_compute(compute),
            None => supervisor,
        };
        Self { supervisor, peer, touch, began: Instant::now(), next_look: 0, look_not_before: 0, on_race }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// Runs until no process has the filter any more and their memory is released. A worker without listeners
    /// waits for the first one, as long as its keeper does.
    ///
    /// # Errors
    /// If the kernel refuses to wait or to receive.
    pub fn run(&mut self) -> io::Result<()> {
        self.resume();
        if let Some(link) = &self.peer.link {
            let _ = send_word(link); // a missing keeper is replaced below
        }
        let mut had_listeners = !self.peer.holdings.listeners.is_empty();
        while !self.peer.holdings.listeners.is_empty() || (!had_listeners && self.peer.link.is_some()) {
            if self.peer.link.is_none() {
                self.peer.link = self.peer.holdings.start(Role::Keeper).ok();
            }
            // There is no keeper for now: the machine may have had no room for one.
            let timeout = match self.peer.link {
                Some(_) => self.timeout(),
                None => PollTimeout::from(RETRY),
            };
            let listeners = &self.peer.holdings.listeners;
            let mut asked: Vec<PollFd> = self.peer.link.iter().chain(listeners).map(readable).collect();
            match poll(&mut asked, timeout) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            let mut events: Vec<PollFlags> =
                asked.iter().map(|one| one.revents().unwrap_or(PollFlags::empty())).collect();
            if self.peer.link.is_none() {
                events.insert(0, PollFlags::empty());
            }
            for (at, events) in events[1..].iter().enumerate() {
                // Check before a call: if the call's memory never arrives, it ends this worker.
                if self.is_look_due() {
                    self.look();
                }
                if events.contains(PollFlags::POLLIN) {
                    self.receive(at)?;
                }
            }
            let is_over = |events: &PollFlags| events.intersects(PollFlags::POLLHUP | PollFlags::POLLERR);
            let mut over = events[1..].iter().map(is_over);
            self.peer.holdings.listeners.retain(|_| !over.next().unwrap_or(false));
            if events[0].contains(PollFlags::POLLIN) {
                self.add_listener();
            } else if is_over(&events[0]) {
                self.peer.link = None;
            }
            had_listeners |= !self.peer.holdings.listeners.is_empty();
            if self.is_look_due() {
                self.look();
            }
        }
        // The pod's other containers can use the memory of the last processes once they and their files are
        // gone.
        let until = self.now() + LONGEST_END;
        loop {
            let is_shared = is_in_use(&self.peer.holdings.budget).unwrap_or(true); // by other containers
            if self.supervisor.end(is_shared) || self.now() >= until {
                break;
            }
            std::thread::sleep(BETWEEN_ENDS);
        }
        Ok(())
    }

    /// Takes a listener from the keeper, and confirms it.
    fn add_listener(&mut self) {
        let Some(link) = &self.peer.link else { return };
        match receive_descriptor(link) {
            Ok(Some(listener)) => {
                sys::set_synchronous(listener.as_fd());
                self.peer.holdings.listeners.push(listener);
                let _ = send_word(link);
            }
            Ok(None) => {}
            Err(_) => self.peer.link = None,
        }
    }

    /// Returns when the next check is due; `None` while there is no client.
    fn next_look(&self) -> Option<u64> {
        let regular = self.supervisor.has_clients().then_some(self.next_look);
        let due = self.supervisor.look_due().map(|due| due.max(self.look_not_before));
        regular.into_iter().chain(due).min()
    }

    fn timeout(&self) -> PollTimeout {
        let Some(due) = self.next_look() else { return PollTimeout::NONE };
        let left = due.saturating_sub(self.now()).div_ceil(1000);
        PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
    }

    fn is_look_due(&self) -> bool {
        self.next_look().is_some_and(|due| due <= self.now())
    }

    fn look(&mut self) {
        let began = self.now();
        let mut is_above = false;
        for race in self.supervisor.look() {
            is_above |= race.is_above;
            let tasks = &self.supervisor.processes;
            let processes: Vec<_> = race.processes.iter().filter_map(|pid| tasks.descriptor(*pid)).collect();
            let ended = (self.on_race)(&race, &processes);
            self.supervisor.budget.note_race(ended);
        }
        let now = self.now();
        self.look_not_before = now + ((now - began) * (LOOK_PART - 1)).min(LONGEST_PAUSE);
        self.next_look = now + if is_above { AFTER_RACE } else { LOOK_EVERY };
    }

    fn receive(&mut self, listener: usize) -> Result<(), Errno> {
        let to = self.supervisor.journal.notification();
        match sys::receive(self.peer.holdings.listeners[listener].as_fd(), to) {
            Ok(()) => self.answer(listener),
            Err(Errno::ENOENT | Errno::EINTR) => {}
            Err(errno) => return Err(errno),
        }
        Ok(())
    }

    /// Decides about the notification in the journal, and answers it.
    fn answer(&mut self, listener: usize) {
        let notification = Notification::read(self.supervisor.journal.notification());
        let answer = self.decide(&notification, listener);
        let (errno, lets_through) = match answer {
            Answer::Done => (None, false),
            Answer::Fail(errno) => (Some(errno), false),
            // The program has ended, so it never sees this answer. A call that was not performed is never let
            // through.
            Answer::Gone => (Some(Errno::EINTR), false),
            Answer::LetThrough => (None, true),
        };
        let _ =
            sys::send(self.peer.holdings.listeners[listener].as_fd(), notification.id, errno, lets_through);
        self.supervisor.journal.finish();
    }

    fn decide(&mut self, notification: &Notification, listener: usize) -> Answer {
        let Notification { id, tid, fd, command, address, .. } = *notification;
        let at = self.now();
        let touch = self.touch;
        let program = Stopped::new(&self.peer.holdings.listeners[listener], id, tid, touch);
        let (file, kind, process) = match self.supervisor.processes.take(tid, fd) {
            Ok(taken) => taken,
            Err(Errno::EBADF) => return Answer::Fail(Errno::EBADF),
            Err(Errno::ENOMEM) => return Answer::Fail(Errno::ENOMEM),
            Err(_) if !sys::is_valid(program.listener.as_fd(), id) => return Answer::Gone,
            Err(_) => return Answer::Fail(Errno::EPERM),
        };
        // Only now is it certain that the notification refers to this thread and descriptor.
        if !sys::is_valid(program.listener.as_fd(), id) {
            return Answer::Gone;
        }
        let size = (command >> 16 & 0x3fff) as usize;
        let number = command.to_le_bytes()[0];
        let call = Call { number, size, address, thread: tid, process, fd, at };
        match (kind, file) {
            // Any other driver may use this command number, and the kernel may find a different file there.
            _ if command == UVM_MAP_EXTERNAL => self.supervisor.map_external(&call),
            (FileKind::Control | FileKind::Gpu, Some(file)) => self.supervisor.handle(&call, &program, &file),
            _ => Answer::Fail(Errno::ENOTTY),
        }
    }

    /// Continues the call that the last worker had received.
    fn resume(&mut self) {
        let notification = Notification::read(self.supervisor.journal.notification());
        if notification.id == 0 {
            return self.supervisor.journal.finish();
        }
        let is_its = |one: &OwnedFd| sys::is_valid(one.as_fd(), notification.id);
        let Some(listener) = self.peer.holdings.listeners.iter().position(is_its) else {
            return self.supervisor.journal.finish();
        };
        let restarts = self.supervisor.journal.count_restart();
        let delays = if self.touch.has_delayed() { self.supervisor.journal.count_delay() } else { 0 };
        if let Step::Allocating { client, handle } = self.supervisor.journal.step() {
            // Whether RM had performed it or not: undo it, and do it again.
            if let Ok((Some(file), ..)) = self.supervisor.processes.take(notification.tid, notification.fd) {
                let manager = &mut self.supervisor.manager;
                let _ = free_object(manager, &file, client, twin_of(handle));
                if free_object(manager, &file, client, handle).is_ok() {
                    self.supervisor.books.remove(client, handle);
                }
            }
        }
        if delays >= MOST_DELAYS || restarts >= MOST_RESTARTS {
            // The program's memory delays any process that touches it.
            let to = self.peer.holdings.listeners[listener].as_fd();
            let _ = sys::send(to, notification.id, Some(Errno::EFAULT), false);
            return self.supervisor.journal.finish();
        }
        self.answer(listener);
    }
}
