//! Streams as the driver's functions take them, and driver queries about a stream.

use super::context::current_handle;
use super::{Context, SUCCESS, Status, Stream, real};

/// `CU_STREAM_LEGACY`.
pub(super) const LEGACY_STREAM: Stream = 1;
/// `CU_STREAM_PER_THREAD`.
pub(super) const PER_THREAD_STREAM: Stream = 2;

/// A stream as the driver's function takes it.
#[derive(Clone, Copy)]
pub(super) struct StreamHandle {
    pub(super) stream: Stream,
    /// Whether handle 0 means the thread's own stream.
    pub(super) per_thread: bool,
}

/// Whether `stream` is a default stream, which programs do not create: the legacy or the per-thread stream,
/// under any of their names.
pub(super) const fn is_default(stream: Stream) -> bool {
    stream <= PER_THREAD_STREAM
}

/// The context of a stream that the program created; `None` if the driver does not report it.
pub(super) fn owner(stream: Stream) -> Option<Context> {
    let mut context = 0;
    // SAFETY: our caller's stream, which the driver checks; it writes one handle.
    let asked = unsafe { real::cuStreamGetCtx(stream, &mut context) };
    if asked == SUCCESS && context != 0 { Some(context) } else { green_owner(stream) }
}

/// The context of a stream that a green context created, for drivers that report it through no other
/// function.
#[cold]
fn green_owner(stream: Stream) -> Option<Context> {
    let (mut green, mut context) = (0, 0);
    // SAFETY: our caller's stream, which the driver checks; it writes one handle.
    let asked = unsafe { real::cuStreamGetGreenCtx(stream, &mut green) };
    if asked != SUCCESS || green == 0 {
        return None;
    }
    // SAFETY: the driver gave the handle; it writes another one.
    let asked = unsafe { real::cuCtxFromGreenCtx(&mut context, green) };
    (asked == SUCCESS && context != 0).then_some(context)
}

/// Driver calls that give handle 0 the same meaning as this [`StreamHandle`] does.
macro_rules! stream_calls {
    ($($name:ident($($argument:ident: $type:ty)?): $legacy:ident, $per_thread:ident;)*) => { $(
        /// # Safety
        /// The driver's contract for these arguments.
        pub(super) unsafe fn $name(self $(, $argument: $type)?) -> Status {
            if self.per_thread {
                // SAFETY: the caller guarantees this.
                unsafe { real::$per_thread($($argument,)? self.stream) }
            } else {
                // SAFETY: the caller guarantees this.
                unsafe { real::$legacy($($argument,)? self.stream) }
            }
        }
    )* };
}

impl StreamHandle {
    stream_calls! {
        query(): cuStreamQuery, cuStreamQuery_ptsz;
        synchronise(): cuStreamSynchronize, cuStreamSynchronize_ptsz;
        record(event: usize): cuEventRecord, cuEventRecord_ptsz;
        free(pointer: u64): cuMemFreeAsync, cuMemFreeAsync_ptsz;
    }

    /// The context that a launch into the stream goes to.
    pub(super) fn context(self) -> Option<Context> {
        let owner = if is_default(self.stream) { None } else { owner(self.stream) };
        owner.or_else(current_handle)
    }

    /// The driver's answer and, after a success, whether the stream is being captured (0: it is not).
    pub(super) fn capture_status(self) -> (Status, i32) {
        let mut capturing = 0;
        let status = if self.per_thread {
            // SAFETY: our caller's stream, which the driver checks; it writes one integer.
            unsafe { real::cuStreamIsCapturing_ptsz(self.stream, &mut capturing) }
        } else {
            // SAFETY: our caller's stream, which the driver checks; it writes one integer.
            unsafe { real::cuStreamIsCapturing(self.stream, &mut capturing) }
        };
        (status, capturing)
    }

    /// Whether launches into the stream are only recorded. A driver error counts as yes: the driver returns
    /// one for the legacy stream while another stream of the context is being captured.
    pub(super) fn is_recording(self) -> bool {
        relaxed(|| self.capture_status()) != (SUCCESS, 0)
    }

    /// Whether all work of the stream has ended, so that new work begins at once.
    pub(super) fn is_idle(self) -> bool {
        // SAFETY: our caller's stream, which the driver checks.
        unsafe { self.query() == SUCCESS }
    }
}

/// Runs our own driver calls so that they do not invalidate a capture in progress on this thread.
pub(super) fn relaxed<T>(act: impl FnOnce() -> T) -> T {
    let mut mode = 2; // CU_STREAM_CAPTURE_MODE_RELAXED
    // SAFETY: the driver exchanges one integer.
    let exchanged = unsafe { real::cuThreadExchangeStreamCaptureMode(&mut mode) };
    let result = act();
    if exchanged == SUCCESS {
        // SAFETY: restores the mode that the driver gave above.
        unsafe { real::cuThreadExchangeStreamCaptureMode(&mut mode) };
    }
    result
}
