//! What streams tell the families: that freed memory may be back after a synchronisation, and that some stream was
//! captured, so that the cost of asking is paid by programs that capture.

use core::ffi::c_void;
use core::sync::atomic::Ordering;

use super::{SUCCESS, Status, Stream, graph, here, pool, real};

fn settle_pools() {
    if let Some(here) = here() {
        pool::settle_all(here);
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

    pub unsafe extern "C" fn cuCtxSynchronize() -> Status {
        // SAFETY: no arguments.
        let status = unsafe { real::cuCtxSynchronize() };
        settle_pools();
        if let Some(here) = here().filter(|_| status == SUCCESS) {
            graph::synchronised(here);
        }
        status
    }

    macro_rules! synchronisations {
        ($($name:ident($argument:ident: $type:ty);)*) => { $(
            pub unsafe extern "C" fn $name($argument: $type) -> Status {
                // SAFETY: our caller's argument, unchanged.
                let status = unsafe { real::$name($argument) };
                settle_pools();
                status
            }
        )* };
    }
    synchronisations! {
        cuStreamSynchronize(stream: Stream);
        cuStreamSynchronize_ptsz(stream: Stream);
        cuEventSynchronize(event: usize);
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
