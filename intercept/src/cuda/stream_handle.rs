//! Streams as the driver's functions take them, and questions to the driver about one.

use super::{Context, SUCCESS, Stream, real};

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

/// Whether `stream` is a default stream, which no program makes: the legacy or the per-thread stream, by any
/// of their names.
pub(super) const fn is_default(stream: Stream) -> bool {
    stream <= PER_THREAD_STREAM
}

/// The context of a stream that the program made; `None` when the driver does not tell.
pub(super) fn owner(stream: Stream) -> Option<Context> {
    let mut context = 0;
    // SAFETY: our caller's stream, which the driver checks; it writes one handle.
    let asked = unsafe { real::cuStreamGetCtx(stream, &mut context) };
    (asked == SUCCESS && context != 0).then_some(context)
}

impl StreamHandle {
    /// The context that a launch into the stream goes to.
    pub(super) fn context(self) -> Option<Context> {
        if !is_default(self.stream)
            && let Some(context) = owner(self.stream)
        {
            return Some(context);
        }
        let mut context = 0;
        // SAFETY: the driver writes one handle.
        let asked = unsafe { real::cuCtxGetCurrent(&mut context) };
        (asked == SUCCESS && context != 0).then_some(context)
    }

    /// Whether launches into the stream are only recorded. An error of the driver counts as yes: it answers
    /// with one for the legacy stream while another stream of the context is captured.
    pub(super) fn is_recording(self) -> bool {
        let mut recording = 0;
        let mut status = SUCCESS;
        relaxed(|| {
            status = if self.per_thread {
                // SAFETY: our caller's stream, which the driver checks; it writes one integer.
                unsafe { real::cuStreamIsCapturing_ptsz(self.stream, &mut recording) }
            } else {
                // SAFETY: our caller's stream, which the driver checks; it writes one integer.
                unsafe { real::cuStreamIsCapturing(self.stream, &mut recording) }
            };
        });
        status != SUCCESS || recording != 0
    }

    /// Whether all work of the stream has ended, so that new work begins at once.
    pub(super) fn is_idle(self) -> bool {
        let status = if self.per_thread {
            // SAFETY: our caller's stream, which the driver checks.
            unsafe { real::cuStreamQuery_ptsz(self.stream) }
        } else {
            // SAFETY: our caller's stream, which the driver checks.
            unsafe { real::cuStreamQuery(self.stream) }
        };
        status == SUCCESS
    }
}

/// Runs our own driver calls so that they do not invalidate a capture in progress on this thread.
pub(super) fn relaxed(act: impl FnOnce()) {
    let mut mode = 2; // CU_STREAM_CAPTURE_MODE_RELAXED
    // SAFETY: the driver exchanges one integer.
    let exchanged = unsafe { real::cuThreadExchangeStreamCaptureMode(&mut mode) };
    act();
    if exchanged == SUCCESS {
        // SAFETY: restores the mode that the driver gave above.
        unsafe { real::cuThreadExchangeStreamCaptureMode(&mut mode) };
    }
}
