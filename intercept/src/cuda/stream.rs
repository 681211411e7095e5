//! Hooks of streams. They report that work has run, so that freed memory may return; that a stream ends; and
//! that a capture begins or ends, so that only programs that capture pay for queries about captures.

use core::ffi::c_void;

use super::queue::{self, Place, Queue, Ran};
use super::{Context, Graph, Here, SUCCESS, Status, Stream, capture, context, here, launch, pool, real};

/// Waits with `call` and settles the pools, which may have shrunk. After a success, `work` returns the place
/// whose work has run.
fn synchronise(call: impl FnOnce() -> Status, work: impl FnOnce(Here) -> Option<Place>) -> Status {
    let last = here().map_or(0, |here| here.state.notes.last());
    let status = call();
    let Some(here) = here().filter(|here| !queue::is_unused(here)) else { return status };
    pool::settle_all(here);
    if status == SUCCESS
        && let Some(place) = work(here)
    {
        queue::ran(here, Ran::until(last, place));
    }
    status
}

/// `context`: 0 for the current one.
fn synchronise_context(context: Context, call: impl FnOnce() -> Status) -> Status {
    synchronise(call, |here| {
        let number = match context {
            0 => context::current(here)?.queues,
            _ => context::number(here, context),
        };
        Some(Place::Context(number))
    })
}

fn synchronise_stream(stream: Stream, per_thread: bool, call: impl FnOnce() -> Status) -> Status {
    synchronise(call, |here| Some(Place::Queue(Queue::of(here, stream, per_thread))))
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

/// Begins a capture with `call`. No launch is paid from credit during a capture.
fn begin_capture(stream: Stream, call: impl FnOnce() -> Status) -> Status {
    let Some(here) = here() else { return call() };
    capture::begin(here, stream, || {
        launch::close(here);
        call()
    })
}

hooks! { |call|
    cuCtxSynchronize() => synchronise_context(0, call);
    cuCtxSynchronize_v2(context: Context) => synchronise_context(context, call);
    cuStreamSynchronize(stream: Stream) => synchronise_stream(stream, false, call);
    cuStreamSynchronize_ptsz(stream: Stream) => synchronise_stream(stream, true, call);
    cuEventSynchronize(event: usize) => synchronise(call, |_| None);
    cuStreamDestroy(stream: Stream) => destroy(stream, call);
    cuStreamDestroy_v2(stream: Stream) => destroy(stream, call);

    cuStreamBeginCapture(stream: Stream) => begin_capture(stream, call);
    cuStreamBeginCapture_ptsz(stream: Stream) => begin_capture(stream, call);
    cuStreamBeginCapture_v2(stream: Stream, mode: i32) => begin_capture(stream, call);
    cuStreamBeginCapture_v2_ptsz(stream: Stream, mode: i32) => begin_capture(stream, call);
    cuStreamBeginCaptureToGraph(
        stream: Stream, graph: Graph, after: *const usize, edges: *const c_void, count: usize, mode: i32,
    ) => begin_capture(stream, call);
    cuStreamBeginCaptureToGraph_ptsz(
        stream: Stream, graph: Graph, after: *const usize, edges: *const c_void, count: usize, mode: i32,
    ) => begin_capture(stream, call);
    // Newer than our headers: pass as many words as there are argument registers.
    cuStreamBeginCaptureToCig(stream: Stream, a: usize, b: usize, c: usize, d: usize, e: usize) =>
        begin_capture(stream, call);
    cuStreamBeginCaptureToCig_ptsz(stream: Stream, a: usize, b: usize, c: usize, d: usize, e: usize) =>
        begin_capture(stream, call);
    cuStreamBeginRecaptureToGraph(stream: Stream, a: usize, b: usize, c: usize, d: usize, e: usize) =>
        begin_capture(stream, call);
    cuStreamBeginRecaptureToGraph_ptsz(stream: Stream, a: usize, b: usize, c: usize, d: usize, e: usize) =>
        begin_capture(stream, call);
    cuStreamEndCapture(stream: Stream, graph: *mut Graph) => capture::end(stream, false, call);
    cuStreamEndCapture_ptsz(stream: Stream, graph: *mut Graph) => capture::end(stream, true, call);
    cuStreamEndCaptureToCig(stream: Stream) => capture::end(stream, false, call);
    cuStreamEndCaptureToCig_ptsz(stream: Stream) => capture::end(stream, true, call);
}
