//! Hooks of streams. They tell that work has run, so that freed memory may return; that a stream ends; and
//! that a capture begins or ends, so that only programs that capture pay for asking about captures.

use core::ffi::c_void;

use super::queue::{self, Queue, Ran};
use super::{Context, Graph, Here, SUCCESS, Status, Stream, capture, context, here, launch, pool, real};

/// Settles the pools, which may have shrunk. After a success, `work` says what has run.
fn synchronised(status: Status, work: impl FnOnce(Here) -> Option<Ran>) {
    let Some(here) = here().filter(|here| !queue::is_unused(here)) else { return };
    pool::settle_all(here);
    if status == SUCCESS
        && let Some(work) = work(here)
    {
        queue::ran(here, work);
    }
}

fn context_synchronised(here: Here, context: Context) -> Option<Ran> {
    let number = match context {
        0 => context::current(here)?.context,
        _ => context::number(here, context),
    };
    Some(Ran::Context(number))
}

fn destroy(stream: Stream, call: impl FnOnce() -> Status) -> Status {
    // Before the driver can give the handle to another stream.
    if let Some(here) = here() {
        launch::forget_stream(here, stream);
        if !queue::is_unused(here) {
            queue::forget(here, stream);
        }
    }
    let status = call();
    if let Some(here) = here().filter(|_| status == SUCCESS) {
        capture::stream_ended(here, stream);
    }
    status
}

/// The hooks of this family.
#[allow(
    non_snake_case,
    missing_docs,
    clippy::missing_safety_doc,
    reason = "the driver names and documents them"
)]
pub mod hooks {
    use super::*;

    macro_rules! contexts {
        ($($name:ident($($argument:ident: $type:ty)?), $context:expr;)*) => { $(
            pub unsafe extern "C" fn $name($($argument: $type)?) -> Status {
                // SAFETY: our caller's argument, if there is one, unchanged.
                let status = unsafe { real::$name($($argument)?) };
                synchronised(status, |here| context_synchronised(here, $context));
                status
            }
        )* };
    }
    contexts! {
        cuCtxSynchronize(), 0;
        cuCtxSynchronize_v2(context: Context), context;
    }

    macro_rules! streams {
        ($($name:ident, $per_thread:literal;)*) => { $(
            pub unsafe extern "C" fn $name(stream: Stream) -> Status {
                // SAFETY: our caller's argument, unchanged.
                let status = unsafe { real::$name(stream) };
                synchronised(status, |here| Some(Ran::Queue(Queue::of(here, stream, $per_thread))));
                status
            }
        )* };
    }
    streams! {
        cuStreamSynchronize, false;
        cuStreamSynchronize_ptsz, true;
    }

    pub unsafe extern "C" fn cuEventSynchronize(event: usize) -> Status {
        // SAFETY: our caller's argument, unchanged.
        let status = unsafe { real::cuEventSynchronize(event) };
        synchronised(status, |_| None);
        status
    }

    macro_rules! ends {
        ($($name:ident;)*) => { $(
            pub unsafe extern "C" fn $name(stream: Stream) -> Status {
                // SAFETY: our caller's argument, unchanged.
                destroy(stream, || unsafe { real::$name(stream) })
            }
        )* };
    }
    ends! {
        cuStreamDestroy;
        cuStreamDestroy_v2;
    }

    macro_rules! captures {
        ($($name:ident($stream:ident: Stream $(, $argument:ident: $type:ty)*);)*) => { $(
            pub unsafe extern "C" fn $name($stream: Stream $(, $argument: $type)*) -> Status {
                // SAFETY: our caller's arguments, unchanged.
                let call = || unsafe { real::$name($stream $(, $argument)*) };
                let Some(here) = here() else { return call() };
                capture::begin(here, $stream, || {
                    launch::close(here);
                    call()
                })
            }
        )* };
    }
    captures! {
        cuStreamBeginCapture(stream: Stream);
        cuStreamBeginCapture_ptsz(stream: Stream);
        cuStreamBeginCapture_v2(stream: Stream, mode: i32);
        cuStreamBeginCapture_v2_ptsz(stream: Stream, mode: i32);
        cuStreamBeginCaptureToGraph(stream: Stream, graph: usize, after: *const usize, edges: *const c_void, count: usize, mode: i32);
        cuStreamBeginCaptureToGraph_ptsz(stream: Stream, graph: usize, after: *const usize, edges: *const c_void, count: usize, mode: i32);
        // Newer than the headers that we have: as many words are passed as there are registers for arguments.
        cuStreamBeginCaptureToCig(stream: Stream, a: usize, b: usize, c: usize, d: usize, e: usize);
        cuStreamBeginCaptureToCig_ptsz(stream: Stream, a: usize, b: usize, c: usize, d: usize, e: usize);
        cuStreamBeginRecaptureToGraph(stream: Stream, a: usize, b: usize, c: usize, d: usize, e: usize);
        cuStreamBeginRecaptureToGraph_ptsz(stream: Stream, a: usize, b: usize, c: usize, d: usize, e: usize);
    }

    macro_rules! capture_ends {
        ($($name:ident, $per_thread:literal ($($graph:ident)?);)*) => { $(
            pub unsafe extern "C" fn $name(stream: Stream $(, $graph: *mut Graph)?) -> Status {
                // SAFETY: our caller's arguments, unchanged.
                capture::end(stream, $per_thread, || unsafe { real::$name(stream $(, $graph)?) })
            }
        )* };
    }
    capture_ends! {
        cuStreamEndCapture, false (graph);
        cuStreamEndCapture_ptsz, true (graph);
        cuStreamEndCaptureToCig, false ();
        cuStreamEndCaptureToCig_ptsz, true ();
    }
}
