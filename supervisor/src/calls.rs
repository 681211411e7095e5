//! Decides about each call: the supervisor performs it on the program's behalf, lets it through, or refuses
//! it.
//!
//! It performs calls that take or release device memory, on a copy that the program cannot change. It lets
//! the rest through. Those may run with other parameters than the ones seen here, because another thread can
//! change them. Nothing that is let through is therefore trusted: RM's own figures show its effect
//! ([`look`]).

mod allocate;
mod compute;
mod control;
mod duplicate;
mod heap;
mod look;
mod owner;
mod place;
mod release;

pub use compute::{Compute, Engines};
pub use look::Race;
pub use owner::twin_of;

use std::collections::HashMap;

use nix::errno::Errno;

use crate::abi::{
    Era, Status, alloc_object, control as controls, duplicate as dup, free, heap as vid_heap, number,
    transfer, u32_at, u64_at,
};
use crate::books::{Books, Client, Gpu, MOST_GPUS};
use crate::budget::Budget;
use crate::handles::Handles;
use crate::journal::Journal;
use crate::manager::{Manager, add_subdevice};

/// The largest structure of a call that the supervisor performs.
pub const MOST_BYTES: usize = vid_heap::SIZE;

/// The program that made a call and is stopped in it.
pub trait Program {
    /// Reads the program's memory.
    ///
    /// # Errors
    /// If it has no memory there.
    fn read(&self, address: u64, to: &mut [u8]) -> Result<(), Errno>;

    /// Writes the program's memory. If it fails, some parts may have been written, and the call counts as
    /// failed.
    ///
    /// # Errors
    /// If it has no memory there, or none that it may write.
    fn write(&self, parts: &[(u64, &[u8])]) -> Result<(), Errno>;

    /// Whether the program still waits for the answer.
    fn waits(&self) -> bool;
}

/// The processes that made calls, by PID in our pid namespace. RM also counts by PID, and adds up the memory
/// of a process and an earlier one with the same PID.
pub trait Processes {
    /// An open file of RM's.
    type File;

    /// Lists the processes that are not forgotten yet, and whether each lives.
    fn tracked(&self) -> Vec<(u32, bool)>;

    /// Whether the process lives.
    fn lives(&self, pid: u32) -> bool;

    /// Returns its descriptor `fd`, if that is RM's control device.
    fn file(&self, pid: u32, fd: i32) -> Option<Self::File>;

    /// Returns a descriptor that becomes readable when the process ends; `None` if the process is unknown.
    fn watch(&self, pid: u32) -> Option<Self::File>;

    /// Returns a value that distinguishes it from other processes with the same PID, if known. Never 0.
    fn birth(&self, pid: u32) -> Option<u32>;

    /// Whether the process certainly belongs to the container.
    fn is_proved(&self, pid: u32) -> bool;

    /// Records that RM accepts a file of this process as that of one of the container's clients.
    fn prove(&mut self, pid: u32);

    /// Forgets a process that has ended and for which RM counts nothing. If it made no clients, it is never
    /// looked for again.
    fn forget(&mut self, pid: u32, made_clients: bool);

    /// Whether a process with this PID was forgotten, and no process has the PID now.
    fn was_forgotten(&self, pid: u32) -> bool;

    /// Returns the next forgotten processes, `most` at a time and all of them in turn, whose PIDs no process
    /// has now. RM counts for them the memory that they left to other processes.
    fn forgotten(&mut self, most: usize) -> Vec<u32>;

    /// Tracks a forgotten process again.
    fn remember(&mut self, pid: u32);
}

/// A call as the kernel reported it.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// Number of the call.
    pub number: u8,
    /// Size of its structure in bytes.
    pub size: usize,
    /// Address of the structure in the program's memory.
    pub address: u64,
    /// Id of the thread, in our pid namespace.
    pub thread: u32,
    /// PID of the process.
    pub process: u32,
    /// Descriptor on which the program called.
    pub fd: i32,
    /// Time of receipt, in microseconds of any monotonic clock.
    pub at: u64,
}

/// The answer to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The kernel makes the call in the program.
    LetThrough,
    /// The result already stands in the program's memory.
    Done,
    /// The call fails.
    Fail(Errno),
    /// The program no longer waits.
    Gone,
}

/// A call that was let through and may still run.
#[derive(Clone, Copy, Debug)]
struct Passing {
    thread: u32,
    process: u32,
    makes_duplicates: bool,
    at: u64,
}

/// How long a call that was let through may still be running, in microseconds, unless something else proves
/// that it ended.
const MOST_PASSING: u64 = 20_000;

/// All state that decides about the calls of one container.
pub struct Supervisor<'m, M: Manager, P: Processes<File = M::File>> {
    /// The driver's interface.
    pub era: &'static Era,
    /// The container's books.
    pub books: Books<'m>,
    /// The lease's budget.
    pub budget: Budget<'m>,
    /// The calls in progress.
    pub journal: Journal<'m>,
    /// RM.
    pub manager: M,
    /// The container's processes.
    pub processes: P,
    compute: Option<Compute<M::File>>,
    /// Parents, by client and handle, whose GPU RM has confirmed since a client may last have been made.
    confirmed: HashMap<(u32, u32), Gpu>,
    /// GPUs on which a race exceeded the lease's limit, and still does.
    raced: [bool; MOST_GPUS],
    /// Time of the last allocation that was let through.
    let_allocate_at: Option<u64>,
    passing: Vec<Passing>,
    /// When to check RM's figures next, by the clock of [`Call::at`].
    look_at: Option<u64>,
    /// GPUs for which RM did not answer the last query.
    blind: [bool; MOST_GPUS],
    /// Processes whose allocations were let through since the last check of RM's figures.
    let_allocate: Vec<u32>,
    handles: Handles,
}

/// Delay between a call that was let through and the check of RM's figures, in microseconds.
const LOOK_AFTER: u64 = 2_000;

impl<'m, M: Manager, P: Processes<File = M::File>> Supervisor<'m, M, P> {
    /// Continues from the state in the books and the journal. `seed` is a random number.
    pub fn new(
        era: &'static Era,
        (books, budget, journal): (Books<'m>, Budget<'m>, Journal<'m>),
        manager: M,
        processes: P,
        seed: u64,
    ) -> Self {
        let this = Self {
            era,
            books,
            budget,
            journal,
            manager,
            processes,
            compute: None,
            confirmed: HashMap::new(),
            raced: [false; MOST_GPUS],
            let_allocate_at: None,
            passing: Vec::new(),
            look_at: None,
            blind: [false; MOST_GPUS],
            let_allocate: Vec::new(),
            handles: Handles::new(seed),
        };
        (0..MOST_GPUS).for_each(|gpu| this.settle_budget(gpu));
        this
    }

    /// Decides about a call on `file`, one of RM's devices, and carries the decision out.
    pub fn handle(&mut self, call: &Call, program: &impl Program, file: &M::File) -> Answer {
        self.passing.retain(|passing| passing.thread != call.thread); // its previous call has returned
        match (call.number, call.size) {
            (number::ALLOC, size) if self.era.has_alloc_size(size) => self.allocate(call, program, file),
            // No current library makes this call, and it would make a client without a known owner.
            (number::ALLOC_OBJECT, alloc_object::SIZE) => {
                self.refuse(program, call.address + alloc_object::STATUS as u64, Status::NOT_SUPPORTED)
            }
            (number::FREE, free::SIZE) => self.free(call, program, file),
            (number::DUP_OBJECT, dup::SIZE) => self.duplicate(call, program, file),
            (number::VID_HEAP_CONTROL, vid_heap::SIZE) => self.heap(call, program, file),
            (number::TRANSFER, transfer::SIZE) => self.transfer(call, program, file),
            (number::CONTROL, controls::SIZE) => self.control(call, program, file),
            // RM refuses any other size.
            _ => Answer::Fail(Errno::EINVAL),
        }
    }

    /// Records that UVM maps memory by a call that was let through, which makes a duplicate of the memory.
    pub fn map_external(&mut self, call: &Call) -> Answer {
        self.passing.retain(|passing| passing.thread != call.thread);
        self.let_through(call, true)
    }

    fn transfer(&mut self, call: &Call, program: &impl Program, file: &M::File) -> Answer {
        let mut outer = [0; transfer::SIZE];
        if program.read(call.address, &mut outer).is_err() {
            return Answer::Fail(Errno::EFAULT);
        }
        let (Ok(number), size) =
            (u8::try_from(u32_at(&outer, transfer::COMMAND)), u32_at(&outer, transfer::LENGTH))
        else {
            return Answer::Fail(Errno::EINVAL);
        };
        let inner = Call { number, size: size as usize, address: u64_at(&outer, transfer::ADDRESS), ..*call };
        match number {
            number::ALLOC
            | number::FREE
            | number::CONTROL
            | number::DUP_OBJECT
            | number::VID_HEAP_CONTROL => match self.handle(&inner, program, file) {
                // Another thread could turn it into any other call, even an unseen FREE. No driver library
                // transfers any such call: libraries do so from 4 KiB on, and RM's structures are smaller.
                Answer::LetThrough => Answer::Fail(Errno::EINVAL),
                answer => answer,
            },
            _ => Answer::Fail(Errno::EINVAL),
        }
    }

    /// Whether the supervisor could not see what bypasses it.
    fn is_blind(&self) -> bool {
        self.blind.contains(&true)
    }

    fn let_through(&mut self, call: &Call, makes_duplicates: bool) -> Answer {
        let Call { thread, process, at, .. } = *call;
        self.passing.retain(|passing| at.saturating_sub(passing.at) < MOST_PASSING);
        self.passing.push(Passing { thread, process, makes_duplicates, at });
        if call.number == number::ALLOC {
            self.confirmed.clear();
            self.let_allocate_at = Some(at);
            let _ = self.look_at.get_or_insert(at + LOOK_AFTER);
            if !self.let_allocate.contains(&process) {
                self.let_allocate.push(process);
            }
        }
        Answer::LetThrough
    }

    /// Returns when to check RM's figures because of a call that was let through.
    pub fn look_due(&self) -> Option<u64> {
        self.look_at
    }

    /// Whether another thread of the process may be making a duplicate.
    fn may_be_duplicating(&self, process: u32, call: &Call) -> bool {
        self.passing.iter().any(|passing| {
            passing.makes_duplicates
                && passing.thread != call.thread
                && passing.process == process
                && call.at.saturating_sub(passing.at) < MOST_PASSING
        })
    }

    /// Writes only RM's status, at `address`.
    fn refuse(&self, program: &impl Program, address: u64, status: Status) -> Answer {
        if !program.waits() {
            return Answer::Gone;
        }
        match program.write(&[(address, &status.0.to_ne_bytes())]) {
            Ok(()) => Answer::Done,
            Err(_) => Answer::Fail(Errno::EFAULT),
        }
    }

    /// Makes a subdevice for the supervisor under a device of the client, and returns its handle.
    ///
    /// # Errors
    /// RM's status.
    fn own_subdevice(&mut self, client: u32, device: u32, file: &M::File) -> Result<u32, Status> {
        let Self { manager, handles, era, .. } = self;
        handles.first_free(|handle| add_subdevice(manager, file, [client, device, handle], era))
    }

    /// Sets this supervisor's charge in the budget to the books' sum.
    fn settle_budget(&self, gpu: Gpu) {
        self.budget.set(gpu, self.books.sums(gpu).charged());
    }

    /// Records the process and descriptor through which a client can be reached.
    fn note_client(&mut self, handle: u32, call: &Call) {
        let known = self.books.client(handle);
        // Keep the first living process: it may be the one that made the client.
        let is_reached =
            known.is_some_and(|known| known.process != call.process && self.processes.lives(known.process));
        if !is_reached {
            let owner = known.and_then(|known| known.owner);
            let _ = self.books.note_client(&Client { handle, process: call.process, fd: call.fd, owner });
        }
    }
}
