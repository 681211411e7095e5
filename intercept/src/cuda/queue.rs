//! Queues: work in a queue runs in order. Some memory may only be released once the work of its queue has
//! run.
//!
//! A free or a launch in a stream is done once the program has waited for the stream or for its whole
//! context. If it is unknown whether work has run, it counts as not run: releasing memory late is safe,
//! releasing it early is not.

use core::sync::atomic::{AtomicU64, Ordering};

use super::stream_handle::{LEGACY_STREAM, PER_THREAD_STREAM, StreamHandle, is_default, owner, relaxed};
use super::{Cuda, Here, SUCCESS, Stream, capture, context, real};
use crate::sys;

/// Bit in `Queue::stream` of a value that is not a driver handle. A handle is an address, and no address has
/// the highest bit.
const DEFAULT: u64 = 1 << 63;
/// One of several streams, or of streams that have ended.
const ANY: u64 = u64::MAX;

/// The note of work that the driver is about to take.
const BEING_TAKEN: u64 = u64::MAX;

/// A stream and its context. A stream has one value here, regardless of the handle that the program uses. All
/// zero: no work anywhere.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Queue {
    stream: u64,
    /// Number of the context; 0: unknown.
    context: u64,
    /// The number of the last note of work in it, as counted by [`Notes`]; 0: it only names the queue.
    noted: u64,
}

impl PartialEq for Queue {
    fn eq(&self, other: &Self) -> bool {
        (self.stream, self.context) == (other.stream, other.context)
    }
}

/// Counts the notes of work that may not have run yet. Work that another thread notes during a wait entered
/// its queue too late for that wait.
#[repr(C)]
pub(super) struct Notes(AtomicU64);

impl Notes {
    /// The number of the last note. Read it before a wait begins.
    pub(super) fn last(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

impl Queue {
    /// The queue of `stream`, as seen by the calling thread.
    pub(super) fn of(here: Here, stream: Stream, per_thread: bool) -> Self {
        let stream = match (stream, per_thread) {
            (0, false) => LEGACY_STREAM,
            (0, true) => PER_THREAD_STREAM,
            _ => stream,
        };
        // Each context has its own default streams, and in it each thread has its own per-thread stream.
        match stream {
            LEGACY_STREAM => Self::default_of(here, 0),
            PER_THREAD_STREAM => Self::default_of(here, u64::from(sys::thread())),
            _ => {
                let context = owner(stream).map_or(0, |owner| context::number(here, owner));
                Self { stream: stream as u64, context: context.into(), noted: 0 }
            }
        }
    }

    fn default_of(here: Here, thread: u64) -> Self {
        match context::current(here).map_or(0, |current| current.queues) {
            0 => Self { stream: ANY, context: 0, noted: 0 },
            context => Self { stream: DEFAULT | thread, context: context.into(), noted: 0 },
        }
    }

    /// Some stream of the current context.
    pub(super) fn anywhere(here: Here) -> Self {
        let context = context::current(here).map_or(0, |current| current.queues);
        Self { stream: ANY, context: context.into(), noted: 0 }
    }

    /// The queue with work that the driver has just taken.
    pub(super) fn noted(self, here: Here) -> Self {
        Self { noted: here.state.notes.0.fetch_add(1, Ordering::SeqCst) + 1, ..self }
    }

    /// The queue with work that the driver is about to take. No wait covers it before [`Queue::taken`].
    pub(super) const fn being_taken(self) -> Self {
        Self { noted: BEING_TAKEN, ..self }
    }

    /// Records work that was being taken.
    pub(super) fn taken(&mut self, here: Here) {
        if self.noted == BEING_TAKEN {
            *self = self.noted(here);
        }
    }

    /// The number of the last note of work in it.
    pub(super) const fn last_note(self) -> u64 {
        self.noted
    }

    /// No stream at all.
    pub(super) fn is_nowhere(self) -> bool {
        self == Self::default()
    }

    /// The combined work of both queues.
    pub(super) fn and(self, other: Self) -> Self {
        let noted = self.noted.max(other.noted);
        if self == other || other.is_nowhere() {
            return Self { noted, ..self };
        }
        if self.is_nowhere() {
            return Self { noted, ..other };
        }
        let context = if self.context == other.context { self.context } else { 0 };
        Self { stream: ANY, context, noted }
    }

    /// Calls `act` with the driver's handle, which refers to this stream while `act` runs. Does not call
    /// `act` if the calling thread has no handle for the stream. The caller must not hold a family's lock:
    /// those are taken after the lock of the contexts.
    pub(super) fn with_handle(self, here: Here, act: impl FnOnce(Stream)) {
        if self.stream == ANY || self.is_nowhere() {
            return;
        }
        if self.stream & DEFAULT == 0 {
            return Stream::try_from(self.stream).map_or((), act);
        }
        let thread = self.stream & !DEFAULT;
        if thread == 0 {
            context::within_number(here, self.context, || act(LEGACY_STREAM));
        } else if thread == u64::from(sys::thread()) {
            context::within_number(here, self.context, || act(PER_THREAD_STREAM));
        }
    }

    /// The same work once the stream of this handle has ended.
    pub(super) fn without(self, stream: Stream) -> Self {
        if self.stream == stream as u64 { Self { stream: ANY, ..self } } else { self }
    }
}

/// The place where work has run.
#[derive(Clone, Copy)]
pub(super) enum Place {
    /// In one stream.
    Queue(Queue),
    /// In the context with this number.
    Context(u8),
}

/// Work that has run: everything in one place up to a certain note.
#[derive(Clone, Copy)]
pub(super) struct Ran {
    place: Place,
    last: u64,
}

impl Ran {
    /// All work of `place` up to the note with the number `last`.
    pub(super) const fn until(last: u64, place: Place) -> Self {
        Self { place, last }
    }

    /// All work of the context with this number, which has ended.
    pub(super) const fn ended(number: u8) -> Self {
        Self::until(u64::MAX, Place::Context(number))
    }

    /// Whether this includes all work of `queue`.
    pub(super) fn covers(self, queue: Queue) -> bool {
        let is_there = match self.place {
            Place::Queue(ran) => ran == queue && ran.stream != ANY,
            Place::Context(number) => number != 0 && queue.context == u64::from(number),
        };
        is_there && queue.noted <= self.last
    }
}

/// Queries the driver for the queue in each of the `most` places of a family's list, and reports those that
/// have run. `look` passes the queue of a place, if work waits there, while it holds the list's lock. Called
/// before a refusal: the work may have run without a wait in the program.
pub(super) fn ask_driver(here: Here, most: usize, look: impl Fn(usize, &mut dyn FnMut(Queue))) {
    for at in 0..most {
        let mut queue = Queue::default();
        look(at, &mut |found| queue = found);
        let (mut idle, last) = (false, here.state.notes.last());
        // A stream that is still in the list has not been destroyed: its end calls `forget`, which waits for
        // the list's lock.
        queue.with_handle(here, |stream| {
            look(at, &mut |found| idle = found == queue && is_idle(here, stream));
        });
        if idle {
            ran(here, Ran::until(last, Place::Queue(queue)));
        }
    }
}

/// Whether work on `stream` is being recorded. Recorded work allocates and frees nothing now.
pub(super) fn is_captured(here: Here, stream: Stream, per_thread: bool) -> bool {
    capture::is_any(here) && {
        let (asked, capturing) = StreamHandle { stream, per_thread }.capture_status();
        asked == SUCCESS && capturing != 0
    }
}

/// Whether all work of `stream` has run. False if a query would be harmful: it invalidates a capture of the
/// stream, and a query of the legacy stream invalidates a capture of any other stream.
pub(super) fn is_idle(here: Here, stream: Stream) -> bool {
    if capture::is_any(here) && (stream == LEGACY_STREAM || is_captured(here, stream, false)) {
        return false;
    }
    // SAFETY: a stream that has not been destroyed, which our caller ensures.
    unsafe { real::cuStreamQuery(stream) == SUCCESS }
}

/// The interface through which queues and charges reach the families that hold memory beyond its use. Each
/// family uses queues and charges, so these must not name a family: [`holders`](super::holders) is above all
/// families and implements this for them. A trait with one implementation lets the compiler check that there
/// is one and resolve the calls. A table of functions would be empty until filled.
pub(super) trait Holders {
    /// Whether no family waits for a stream.
    fn await_nothing(here: Here) -> bool;
    /// Releases memory that only waited for this work.
    fn ran(here: Here, work: Ran);
    /// A stream ends, and its handle may be reused for another stream.
    fn forget(here: Here, stream: Stream);
    /// The last context of this process on `line` has ended.
    fn line_ended(here: Here, line: u8);
    /// Returns memory that this process holds unused. False if there is none to return.
    fn give_back_unused(here: Here) -> bool;
}

/// Whether no family waits for a stream.
pub(super) fn is_unused(here: Here) -> bool {
    Cuda::await_nothing(here)
}

/// Releases memory that only waited for this work.
pub(super) fn ran(here: Here, work: Ran) {
    Cuda::ran(here, work);
}

/// A stream ends, possibly with work that has not run yet. Afterwards the driver may reuse its handle for
/// another stream, so the old one can no longer be queried. Then only a wait for the whole context shows that
/// its work has run. We do not wait for the context ourselves before a refusal: it may be running a kernel
/// that waits for the allocating thread.
pub(super) fn forget(here: Here, stream: Stream) {
    let last = here.state.notes.last();
    if is_idle_at_its_end(here, stream) {
        ran(here, Ran::until(last, Place::Queue(Queue::of(here, stream, false))));
    }
    Cuda::forget(here, stream);
}

fn is_idle_at_its_end(here: Here, stream: Stream) -> bool {
    // A default stream does not end, even if the program asks for it.
    !is_default(stream) && relaxed(|| is_idle(here, stream))
}

/// The last context of this process on `line` has ended, and all its memory with it.
pub(super) fn line_ended(here: Here, line: u8) {
    Cuda::line_ended(here, line);
}
