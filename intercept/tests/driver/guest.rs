//! The library is a guest in another program's process: it leaves the program's settings alone.

use std::ffi::{CStr, CString};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use crate::OUT_OF_MEMORY;
use crate::client::{Library, bytes, memory_info, out};
use crate::compute::Program;
use crate::place::{Share, inside};

/// The settings of a program: handlers of all signals and which of them it blocks, umask, locale,
/// environment.
#[derive(Debug, PartialEq, Eq)]
struct Settings {
    handlers: Vec<(usize, i32)>,
    blocked: Vec<i32>,
    umask: libc::mode_t,
    locale: CString,
    environment: Vec<(String, String)>,
    threads: usize,
}

impl Settings {
    fn now() -> Self {
        let mut mask = std::mem::MaybeUninit::<libc::sigset_t>::zeroed();
        // SAFETY: nothing is set; the kernel's answer is written.
        assert_eq!(unsafe { libc::sigprocmask(0, std::ptr::null(), mask.as_mut_ptr()) }, 0);
        // SAFETY: written by the call, and all zero bytes are valid.
        let mask = unsafe { mask.assume_init() };
        // SAFETY: a set as the kernel wrote it.
        let is_blocked = |signal: &i32| unsafe { libc::sigismember(&raw const mask, *signal) == 1 };
        // SAFETY: sets the mask for a moment in which no other thread creates a file.
        let umask = unsafe { libc::umask(0o77) };
        // SAFETY: as above.
        unsafe { libc::umask(umask) };
        // SAFETY: only queries the locale.
        let locale = unsafe { libc::setlocale(libc::LC_ALL, std::ptr::null()) };
        Self {
            handlers: (1..64).map(handler).collect(),
            blocked: (1..64).filter(is_blocked).collect(),
            umask,
            // SAFETY: a C string owned by the C library.
            locale: unsafe { CStr::from_ptr(locale) }.to_owned(),
            environment: std::env::vars().collect(),
            threads: std::fs::read_dir("/proc/self/task").unwrap().count(),
        }
    }
}

/// Handler and flags of `signal`.
fn handler(signal: i32) -> (usize, i32) {
    let mut action = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: nothing is set; the kernel's answer is written. Signals that the C library reserves are
    // refused.
    unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) };
    // SAFETY: all zero bytes are valid.
    let action = unsafe { action.assume_init() };
    (action.sa_sigaction, action.sa_flags)
}

/// The output of `act` on standard output and standard error.
fn written(act: impl FnOnce()) -> String {
    let file = tempfile::tempfile().unwrap();
    let to = |from: i32, to: i32| {
        // SAFETY: descriptors of this test.
        assert!(unsafe { libc::dup2(from, to) } >= 0);
    };
    // SAFETY: descriptors of this test, which has one thread that prints.
    let kept = [1, 2].map(|number| unsafe { libc::dup(number) });
    [1, 2].iter().for_each(|number| to(file.as_raw_fd(), *number));
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(act));
    [(kept[0], 1), (kept[1], 2)].iter().for_each(|(from, number)| to(*from, *number));
    let mut text = [0; 4096];
    let length = file.read_at(&mut text, 0).unwrap();
    let text = String::from_utf8_lossy(&text[..length]).into_owned();
    assert!(outcome.is_ok(), "{text}");
    text
}

/// Case 36, and the output of case 47: only the program learns about refusals and waits.
#[test]
#[ignore = "needs root: makes a mount namespace"]
fn cases_36_47_signals_umask_environment_and_output_stay_the_programs_own() {
    let name = "guest::cases_36_47_signals_umask_environment_and_output_stay_the_programs_own";
    if !inside(name, &Share { cores: &[20], ..Share::default() }) {
        return;
    }
    let before = Settings::now();
    let text = written(|| {
        let program = Program::start();
        let kernel = program.kernel(c"busy_1ms");
        (0..100).for_each(|_| program.launch(kernel));
        assert_eq!(program.cuda.allocate(4096), Err(OUT_OF_MEMORY));
        assert!(program.cuda.allocate(8).is_ok());
        memory_info(&Library::open("libnvidia-ml.so.1"), 0);
    });
    assert_eq!((Settings::now(), text.as_str()), (before, ""));
}

/// Case 19: sizes that change during a capture mislead programs that measure the memory of a graph.
#[test]
#[ignore = "needs root: makes a mount namespace"]
fn case_19_the_size_of_free_memory_stays_the_same_while_a_graph_is_captured() {
    let name = "guest::case_19_the_size_of_free_memory_stays_the_same_while_a_graph_is_captured";
    if !inside(name, &Share { cores: &[50], ..Share::default() }) {
        return;
    }
    let program = Program::start();
    let (kernel, cuda) = (program.kernel(c"busy_100us"), &program.cuda);
    let (mut stream, mut graph, mut executable, mut pointer) = (0usize, 0usize, 0usize, 0usize);
    assert_eq!(cuda.call("cuStreamCreate", &[out(&mut stream), 1]), 0);
    // Memory in a pool that could be released, and a free that has not run.
    assert_eq!(cuda.call("cuMemAllocAsync", &[out(&mut pointer), bytes(64), stream]), 0);
    assert_eq!(cuda.call("cuMemFreeAsync", &[pointer, stream]), 0);
    let before = cuda.memory();
    assert_eq!(cuda.call("cuStreamBeginCapture_v2", &[stream, 0]), 0); // global: unsafe calls invalidate it
    for _ in 0..20 {
        assert_eq!(program.launch_in(kernel, stream), 0);
        assert_eq!(cuda.call("cuMemAllocAsync", &[out(&mut pointer), bytes(8), stream]), 0);
        assert_eq!(cuda.memory(), before);
        assert_eq!(cuda.call("cuMemFreeAsync", &[pointer, stream]), 0);
        assert_eq!(cuda.memory(), before);
    }
    assert_eq!(cuda.call("cuStreamEndCapture", &[stream, out(&mut graph)]), 0, "spoilt");
    assert_eq!(cuda.memory(), before);
    assert_eq!(cuda.call("cuGraphInstantiateWithFlags", &[out(&mut executable), graph, 0]), 0);
    assert_eq!(cuda.call("cuGraphLaunch", &[executable, stream]), 0);
    assert_eq!(cuda.call("cuStreamSynchronize", &[stream]), 0);
}
