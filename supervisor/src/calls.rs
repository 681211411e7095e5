//! What is done about each call: it is performed on the program's behalf, let through, or refused.
//!
//! Calls that take or give back device memory are performed, on a copy that the program cannot change. The
//! rest is let through, and may run with other parameters than those that were seen here, since another
//! thread can change them. So nothing that is let through is trusted: RM's own figures tell what it did
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

/// The largest structure of a call that is performed.
pub const MOST_BYTES: usize = vid_heap::SIZE;

/// The program that made a call, stopped in it.
pub trait Program {
    /// Reads its memory.
    ///
    /// # Errors
    /// When it has none there.
    fn read(&self, address: u64, to: &mut [u8]) -> Result<(), Errno>;

    /// Writes its memory, all parts or none that counts.
    ///
    /// # Errors
    /// When it has none there, or none that may be written.
    fn write(&self, parts: &[(u64, &[u8])]) -> Result<(), Errno>;

    /// Whether it still waits for the answer.
    fn waits(&self) -> bool;
}

/// The processes that made calls, by pid in our pid namespace. RM too counts by pid, and adds up what a
/// process and an earlier one of the same pid have.
pub trait Processes {
    /// An open file of RM's.
    type File;

    /// Those that are not yet forgotten, and whether each lives.
    fn tracked(&self) -> Vec<(u32, bool)>;

    /// Whether it lives.
    fn lives(&self, pid: u32) -> bool;

    /// Its descriptor `fd`, if that is of RM's control device.
    fn file(&self, pid: u32, fd: i32) -> Option<Self::File>;

    /// A descriptor of it that is readable once it has ended; `None` if it is not known.
    fn watch(&self, pid: u32) -> Option<Self::File>;

    /// What tells it from earlier and later processes of the same number, if that is known: never 0.
    fn birth(&self, pid: u32) -> Option<u32>;

    /// Whether it is certainly the container's.
    fn is_proved(&self, pid: u32) -> bool;

    /// Takes note that RM knows a file of this one as that of a client of the container's.
    fn prove(&mut self, pid: u32);

    /// Forgets one that has ended, and for which RM counts nothing. One that made no clients never comes
    /// back.
    fn forget(&mut self, pid: u32, made_clients: bool);

    /// Whether one was forgotten that had this number, and nobody has it now.
    fn was_forgotten(&self, pid: u32) -> bool;

    /// The next so many of those that were forgotten and whose numbers nobody has now, all of them in turn.
    /// What one left to others, RM counts for it.
    fn forgotten(&mut self, most: usize) -> Vec<u32>;

    /// Knows a forgotten one again.
    fn remember(&mut self, pid: u32);
}

/// A call as the kernel reported it.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// Its number.
    pub number: u8,
    /// Size of its structure in bytes.
    pub size: usize,
    /// Where the structure is in the program's memory.
    pub address: u64,
    /// The thread's id, in our pid namespace.
    pub thread: u32,
    /// Its process.
    pub process: u32,
    /// The descriptor that was called.
    pub fd: i32,
    /// When it was received, in microseconds of any clock that only goes forward.
    pub at: u64,
}

/// The answer to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The kernel makes the call in the program.
    LetThrough,
    /// All that is to be said stands in the program's memory.
    Done,
    /// The call fails.
    Fail(Errno),
    /// The program does not wait any more.
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

/// How long a call that was let through may still run, in microseconds, when nothing else proves that it
/// ended.
const MOST_PASSING: u64 = 20_000;

/// Everything that decides about the calls of one container.
pub struct Supervisor<'m, M: Manager, P: Processes<File = M::File>> {
    /// The driver's interface.
    pub era: &'static Era,
    /// The container's books.
    pub books: Books<'m>,
    /// The lease's budget.
    pub budget: Budget<'m>,
    /// The calls in hand.
    pub journal: Journal<'m>,
    /// RM.
    pub manager: M,
    /// The container's processes.
    pub processes: P,
    compute: Option<Compute<M::File>>,
    /// Parents, by client and handle, of which RM has said where they are since anybody may have made a
    /// client.
    confirmed: HashMap<(u32, u32), Gpu>,
    /// GPUs of which a race took more than the lease may hold, and still does.
    raced: [bool; MOST_GPUS],
    /// When an allocation was let through last.
    let_allocate_at: Option<u64>,
    passing: Vec<Passing>,
    /// When RM's figures should be looked at, by the clock of [`Call::at`].
    look_at: Option<u64>,
    /// GPUs for which RM did not answer when it was asked last.
    blind: [bool; MOST_GPUS],
    /// Processes that were let allocate since RM's figures were last looked at.
    let_allocate: Vec<u32>,
    handles: Handles,
}

/// How long after a call that was let through RM's figures are looked at, in microseconds.
const LOOK_AFTER: u64 = 2_000;

impl<'m, M: Manager, P: Processes<File = M::File>> Supervisor<'m, M, P> {
    /// Begins where the books and the journal stand. `seed` is a random number.
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

    /// Decides about a call that was made on `file`, one of RM's devices, and does what it decides.
    pub fn handle(&mut self, call: &Call, program: &impl Program, file: &M::File) -> Answer {
        self.passing.retain(|passing| passing.thread != call.thread); // what it was let do before is over
        match (call.number, call.size) {
            (number::ALLOC, size) if self.era.has_alloc_size(size) => self.allocate(call, program, file),
            // No library makes it any more, and a client that it makes would be nobody's.
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

    /// Notes that UVM was let map memory, which makes a duplicate of it.
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
                // Another thread could make any other call of it, a FREE that nobody sees among them. No
                // driver library transfers any: RM's structures are smaller than 4 KiB, from where on
                // libraries do.
                Answer::LetThrough => Answer::Fail(Errno::EINVAL),
                answer => answer,
            },
            _ => Answer::Fail(Errno::EINVAL),
        }
    }

    /// Whether what goes past would not be seen.
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

    /// When RM's figures should be looked at because of a call that was let through.
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

    /// Writes RM's status alone, at `address`.
    fn refuse(&self, program: &impl Program, address: u64, status: Status) -> Answer {
        if !program.waits() {
            return Answer::Gone;
        }
        match program.write(&[(address, &status.0.to_ne_bytes())]) {
            Ok(()) => Answer::Done,
            Err(_) => Answer::Fail(Errno::EFAULT),
        }
    }

    /// Makes a subdevice of the supervisor's own under a device of the client's, and returns its handle.
    ///
    /// # Errors
    /// RM's status.
    fn own_subdevice(&mut self, client: u32, device: u32, file: &M::File) -> Result<u32, Status> {
        let Self { manager, handles, era, .. } = self;
        handles.first_free(|handle| add_subdevice(manager, file, [client, device, handle], era))
    }

    /// Brings this supervisor's part of the budget to what the books say.
    fn settle_budget(&self, gpu: Gpu) {
        self.budget.set(gpu, self.books.sums(gpu).charged());
    }

    /// Notes by which process and descriptor a client can be reached.
    fn note_client(&mut self, handle: u32, call: &Call) {
        let known = self.books.client(handle);
        // The first one that lives stays: it may be the one that made the client.
        let is_reached =
            known.is_some_and(|known| known.process != call.process && self.processes.lives(known.process));
        if !is_reached {
            let owner = known.and_then(|known| known.owner);
            let _ = self.books.note_client(&Client { handle, process: call.process, fd: call.fd, owner });
        }
    }
}
