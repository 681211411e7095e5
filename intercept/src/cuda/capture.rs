//! Captures in progress. While there is one, no launch of this process is paid from credit, since it may only
//! be recorded: each launch has to query the driver. A capture ends by its own call, or with its stream or
//! context.

use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

use super::stream_handle::{PER_THREAD_STREAM, StreamHandle};
use super::{Context, Here, SUCCESS, Status, Stream, here};
use crate::mutex::Mutex;

/// How many captures are tracked individually. Further captures are only counted, and end only by their own
/// call.
const FOLLOWED: usize = 64;

#[repr(C)]
pub(super) struct Captures {
    /// Captures in progress.
    count: AtomicU32,
    followed: Mutex<[Capture; FOLLOWED]>,
}

/// All zero: this place is free. Captures of two threads' own streams look the same.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
struct Capture {
    stream: Stream,
    context: Context,
}

/// The canonical handle of the stream. Handle 0 means the legacy or the per-thread stream, and the legacy
/// stream cannot be captured.
const fn name(stream: Stream) -> Stream {
    if stream == 0 { PER_THREAD_STREAM } else { stream }
}

impl Captures {
    /// Whether any capture is in progress.
    pub(super) fn is_any(&self) -> bool {
        self.count.load(Relaxed) != 0
    }

    fn follow(&self, capture: Capture) {
        let mut followed = self.followed.lock();
        if let Some(place) = followed.iter_mut().find(|place| **place == Capture::default()) {
            *place = capture;
        }
    }

    /// Ends one capture of `stream`. False: none is tracked.
    fn end_one(&self, stream: Stream) -> bool {
        let mut followed = self.followed.lock();
        let found = followed.iter_mut().find(|capture| capture.stream == name(stream));
        if let Some(capture) = found {
            *capture = Capture::default();
            self.uncount(1);
            return true;
        }
        false
    }

    /// `context` has ended, and its captures with it.
    pub(super) fn context_ended(&self, context: Context) {
        let mut followed = self.followed.lock();
        for capture in followed.iter_mut().filter(|capture| context != 0 && capture.context == context) {
            *capture = Capture::default();
            self.uncount(1);
        }
    }

    fn uncount(&self, ended: u32) {
        let _ = self.count.fetch_update(Relaxed, Relaxed, |count| Some(count.saturating_sub(ended)));
    }
}

/// Whether some stream of this process is being captured.
pub(super) fn is_any(here: Here) -> bool {
    here.state.captures.is_any()
}

/// Begins a capture of `stream` with `call`.
pub(super) fn begin(here: Here, stream: Stream, call: impl FnOnce() -> Status) -> Status {
    let captures = &here.state.captures;
    let context = StreamHandle { stream: name(stream), per_thread: false }.context().unwrap_or(0);
    captures.count.fetch_add(1, Relaxed);
    let status = call();
    if status == SUCCESS {
        captures.follow(Capture { stream: name(stream), context });
    } else {
        captures.uncount(1);
    }
    status
}

/// Ends a capture of `stream` with `call`, which may report an error and still end it.
pub(super) fn end(stream: Stream, per_thread: bool, call: impl FnOnce() -> Status) -> Status {
    let Some(here) = here() else { return call() };
    let handle = StreamHandle { stream, per_thread };
    let before = handle.is_recording();
    let status = call();
    let captures = &here.state.captures;
    if before && !handle.is_recording() && !captures.end_one(stream) {
        captures.uncount(1);
    }
    status
}

/// Ends the capture of `stream`, if there is one: the stream has ended.
pub(super) fn stream_ended(here: Here, stream: Stream) {
    let captures = &here.state.captures;
    if captures.is_any() {
        captures.end_one(stream);
    }
}
