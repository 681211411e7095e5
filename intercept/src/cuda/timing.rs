//! Pairs of events around a launch, which measure how long the launch took on the device. Events belong to a
//! context and end with it. If a launch goes to a context other than the current one, that context is made
//! current only while its events are created.

use super::context::{current_handle, within};
use super::stream_handle::StreamHandle;
use super::{Context, SUCCESS, Status, real};
use crate::compute::Timing;

/// `CUDA_ERROR_NOT_READY`.
const NOT_READY: Status = 600;
/// `CUDA_ERROR_NOT_FOUND`: the driver has no function of this name.
const ABSENT: Status = 500;

/// Two events of one context. All zero: there are no events.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Pair {
    context: Context,
    begin: usize,
    end: usize,
    /// Nanoseconds between the events in which the device only waited for the launch.
    idle: u64,
    /// When the launch between the events went to the driver, in monotonic nanoseconds; 0: there was none, or
    /// it has ended.
    since: u64,
    /// Whether the context is about to end. From then on only the thread that ends it may pass the events to
    /// the driver.
    ending: bool,
    /// Whether a thread uses the events for a launch.
    lent: bool,
}

impl Pair {
    /// Lends the events to a launch into `context` at `now`; [`take_back`](Self::take_back) returns them.
    /// `None`: another thread has them and has been in the driver for long, or the driver provides no events.
    pub(super) fn lend(&mut self, context: Context, now: u64) -> Option<Self> {
        if self.lent || !self.make(context) {
            return None;
        }
        self.since = now;
        self.lent = true;
        Some(*self)
    }

    /// Takes the events back. False: they ended with their context in the meantime.
    pub(super) fn take_back(&mut self, lent: Self) -> bool {
        let is_same = self.lent && self.context == lent.context && self.begin == lent.begin;
        if is_same {
            *self = Self { lent: false, idle: lent.idle, ..*self };
        }
        is_same
    }

    /// Creates the events in `context`, unless they exist. False: the driver provides no events.
    fn make(&mut self, context: Context) -> bool {
        if self.context != context {
            self.destroy();
        }
        self.context = context;
        for event in [&mut self.begin, &mut self.end] {
            if *event == 0 {
                *event = create(context);
            }
        }
        self.begin != 0 && self.end != 0
    }

    /// Destroys the events, which live in a context of this process.
    fn destroy(&mut self) {
        for event in [&mut self.begin, &mut self.end] {
            if core::mem::take(event) != 0 {
                // SAFETY: an event that `make` created, owned by this pair alone.
                unsafe { real::cuEventDestroy_v2(*event) };
            }
        }
        *self = Self::default();
    }

    /// Whether the events live in `context`.
    pub(super) fn is_in(&self, context: Context) -> bool {
        self.begin != 0 && self.context == context
    }

    /// Records the first event in `stream`.
    pub(super) fn begin(&self, stream: StreamHandle) -> bool {
        // SAFETY: an event of this pair and the stream that our caller launches in.
        unsafe { stream.record(self.begin) == SUCCESS }
    }

    /// The context is about to end at `now`. Returns the [`timing`](Self::timing) of the launch between the
    /// events.
    pub(super) fn context_ends(&mut self, now: u64) -> Timing {
        let timing = self.timing();
        self.ending = true;
        if timing != Timing::Running {
            self.since = 0;
        // SAFETY: an event of this pair.
        } else if unsafe { real::cuEventQuery(self.begin) } != SUCCESS {
            self.since = now; // the launch is still waiting, and can only begin while the context ends
        }
        timing
    }

    /// The context has not ended after all.
    pub(super) fn context_stays(&mut self) {
        self.ending = false;
    }

    /// The context has ended, and the events with it. Returns when the launch between them began to use the
    /// device, unless it had ended before.
    pub(super) fn context_ended(&mut self) -> Option<u64> {
        let since = core::mem::take(self).since;
        (since != 0).then_some(since)
    }

    /// Records the second event in `stream`. `idle`: how many nanoseconds the device waited for the launch.
    pub(super) fn end(&mut self, stream: StreamHandle, idle: u64) -> bool {
        self.idle = idle;
        // SAFETY: an event of this pair and the stream that our caller launches in.
        unsafe { stream.record(self.end) == SUCCESS }
    }

    /// The state of the launch between the pair's events.
    pub(super) fn timing(&self) -> Timing {
        if self.begin == 0 || self.end == 0 {
            return Timing::Lost;
        }
        if self.ending || self.lent {
            return Timing::Running;
        }
        // SAFETY: an event of this pair.
        match unsafe { real::cuEventQuery(self.end) } {
            SUCCESS => self.elapsed().map_or(Timing::Lost, Timing::Took),
            NOT_READY => Timing::Running,
            _ => Timing::Lost,
        }
    }

    fn elapsed(&self) -> Option<u64> {
        let mut milliseconds = 0.0;
        // SAFETY: two events of this pair; the driver writes one number.
        let mut status = unsafe { real::cuEventElapsedTime(&mut milliseconds, self.begin, self.end) };
        if status == ABSENT {
            // SAFETY: two events of this pair; the driver writes one number.
            status = unsafe { real::cuEventElapsedTime_v2(&mut milliseconds, self.begin, self.end) };
        }
        #[expect(
            clippy::cast_possible_truncation,
            reason = "`as` saturates, and turns what is no number into 0"
        )]
        #[expect(clippy::cast_sign_loss, reason = "a negative time is 0")]
        let nanoseconds = (f64::from(milliseconds) * 1e6) as u64;
        // Subtract at most half: a guess may shorten a timing, but must not dominate it.
        (status == SUCCESS).then(|| nanoseconds - self.idle.min(nanoseconds / 2))
    }
}

/// Creates an event with timing in `context`; 0: the driver provides none.
fn create(context: Context) -> usize {
    let create = || {
        let mut event = 0;
        // SAFETY: the driver writes one handle.
        let made = unsafe { real::cuEventCreate(&mut event, 0) };
        if made == SUCCESS { event } else { 0 }
    };
    if current_handle() == Some(context) { create() } else { within(context, create).unwrap_or(0) }
}
