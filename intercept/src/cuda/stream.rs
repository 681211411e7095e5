//! What streams tell the families: that freed memory may be back after a synchronisation, and that some stream was
//! captured, so that the cost of asking is paid by programs that capture.

use core::ffi::c_void;
use core::sync::atomic::Ordering;

use super::{Context, Here, SUCCESS, Status, Stream, graph, here, pool, real};

/// Pools may have shrunk; after a success `act` tells what has run.
fn synchronised(status: Status, act: impl FnOnce(Here)) {
    if let Some(here) = here() {
        pool::settle_all(here);
        if status == SUCCESS {
            act(here);
        }
    }
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
                synchronised(status, |here| {
                    pool::context_synchronised(here, $context);
                    graph::synchronised(here);
                });
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
                synchronised(status, |here| {
                    pool::stream_synchronised(here, pool::queue(stream, $per_thread));
                });
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
        synchronised(status, |_| {});
        status
    }

    macro_rules! captures {
        ($($name:ident($($argument:ident: $type:ty),*);)*) => { $(
            pub unsafe extern "C" fn $name($($argument: $type),*) -> Status {
                if let Some(here) = here() {
                    here.state.captures.store(true, Ordering::Relaxed);
                }
                // SAFETY: our caller's arguments, unchanged.
                unsafe { real::$name($($argument),*) }
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
    }
}
