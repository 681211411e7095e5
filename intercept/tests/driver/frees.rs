//! Frees in stream order that have run without a wait in the program. Before a refusal, the library asks the
//! driver about them.

use crate::OUT_OF_MEMORY;
use crate::client::{Cuda, bytes, out};
use crate::place::{Share, inside};

const RELAXED: usize = 2; // CU_STREAM_CAPTURE_MODE_RELAXED

fn stream(cuda: &Cuda) -> usize {
    let mut stream = 0usize;
    assert_eq!(cuda.call("cuStreamCreate", &[out(&mut stream), 1]), 0);
    stream
}

fn begin_capture(cuda: &Cuda, stream: usize) {
    assert_eq!(cuda.call("cuStreamBeginCapture_v2", &[stream, RELAXED]), 0);
}

fn end_capture(cuda: &Cuda, stream: usize) -> i32 {
    let mut graph = 0usize;
    cuda.call("cuStreamEndCapture", &[stream, out(&mut graph)])
}

fn free_in(cuda: &Cuda, stream: usize, pointer: u64) {
    assert_eq!(cuda.call("cuMemFreeAsync", &[usize::try_from(pointer).unwrap(), stream]), 0);
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn a_capture_stands_in_the_way_of_its_own_stream_and_no_longer_than_it_lasts() {
    let name = "frees::a_capture_stands_in_the_way_of_its_own_stream_and_no_longer_than_it_lasts";
    if !inside(name, &Share::default()) {
        return;
    }
    let cuda = Cuda::start();
    let (one, other) = (stream(&cuda), stream(&cuda));
    let whole = cuda.allocate(900).unwrap();
    begin_capture(&cuda, other);
    free_in(&cuda, one, whole);
    let whole = cuda.allocate(900).expect("another stream is captured");
    assert_eq!(end_capture(&cuda, other), 0, "the question spoiled no capture");
    free_in(&cuda, one, whole);
    begin_capture(&cuda, one);
    assert_eq!(cuda.allocate(900), Err(OUT_OF_MEMORY), "a stream that is captured cannot be asked");
    assert_eq!(end_capture(&cuda, one), 0, "nor was it");
    cuda.allocate(900).expect("the capture has ended");
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn no_capture_is_spoiled_by_a_question_about_the_legacy_stream() {
    if !inside("frees::no_capture_is_spoiled_by_a_question_about_the_legacy_stream", &Share::default()) {
        return;
    }
    let cuda = Cuda::start();
    let mut blocking = 0usize;
    assert_eq!(cuda.call("cuStreamCreate", &[out(&mut blocking), 0]), 0);
    free_in(&cuda, 0, cuda.allocate(900).unwrap());
    begin_capture(&cuda, blocking);
    assert_eq!(cuda.allocate(900), Err(OUT_OF_MEMORY));
    assert_eq!(end_capture(&cuda, blocking), 0);
    cuda.allocate(900).expect("the capture has ended");
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn the_default_streams_of_another_context_are_asked_there() {
    if !inside("frees::the_default_streams_of_another_context_are_asked_there", &Share::default()) {
        return;
    }
    let cuda = Cuda::start();
    let mut second = 0usize;
    assert_eq!(cuda.call("cuCtxCreate_v2", &[out(&mut second), 0, 0]), 0);
    for default in [0, 1, 2] {
        assert_eq!(cuda.call("cuCtxSetCurrent", &[second]), 0);
        free_in(&cuda, default, cuda.allocate(900).unwrap());
        assert_eq!(cuda.call("cuCtxSetCurrent", &[cuda.context]), 0);
        let pointer = cuda.allocate(900).unwrap_or_else(|status| panic!("stream {default}: {status}"));
        let mut current = 0usize;
        assert_eq!(cuda.call("cuCtxGetCurrent", &[out(&mut current)]), 0);
        assert_eq!(current, cuda.context, "stream {default}");
        assert_eq!(cuda.free(pointer), 0);
    }
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn a_stream_is_asked_before_it_ends() {
    if !inside("frees::a_stream_is_asked_before_it_ends", &Share::default()) {
        return;
    }
    let cuda = Cuda::start();
    let stream = stream(&cuda);
    free_in(&cuda, stream, cuda.allocate(900).unwrap());
    assert_eq!(cuda.call("cuStreamDestroy_v2", &[stream]), 0);
    cuda.allocate(900).expect("the stream was idle");
}

/// The first context of a GPU searches all families for room. A pending free waits in a context without a
/// place, and each check of that free takes the lock of the contexts.
#[test]
#[ignore = "needs root: makes a mount namespace"]
fn a_context_that_does_not_fit_is_refused_while_frees_wait_in_a_context_without_a_place() {
    let share = Share { gpus: 2, memory: 65536, limits: &[40000, 400], ..Share::default() };
    let name = "frees::a_context_that_does_not_fit_is_refused_while_frees_wait_in_a_context_without_a_place";
    if !inside(name, &share) {
        return;
    }
    let cuda = Cuda::start();
    free_in(&cuda, 0, cuda.allocate(8).unwrap());
    let (mut properties, mut handle, mut context) = ([0u32; 8], 0u64, 0usize);
    (properties[0], properties[2], properties[3]) = (1, 1, 1);
    let create = [out(&mut handle), bytes(200), out(&mut properties), 0];
    assert_eq!(cuda.call("cuMemCreate", &create), 0);
    for _ in 0..66 {
        assert_eq!(cuda.call("cuCtxCreate_v2", &[out(&mut context), 0, 0]), 0);
    }
    // SAFETY: ends this process, which runs one test, if the driver does not answer.
    unsafe { libc::alarm(10) };
    assert_eq!(cuda.call("cuDevicePrimaryCtxRetain", &[out(&mut context), 1]), OUT_OF_MEMORY);
}
