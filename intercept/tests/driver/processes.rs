//! Several processes of one container on one simulated GPU.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use crate::OUT_OF_MEMORY;
use crate::client::{Cuda, Library, MIB, bytes, call, out, really_held};
use crate::place::{CONTEXT, Share, books, inside};

/// Runs `child` in a forked process, which ends when `child` returns or when this test ends.
pub fn fork(child: impl FnOnce()) -> libc::pid_t {
    // SAFETY: this test runs in its own process, in which no other thread works.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        // SAFETY: a failed test must not leave children behind.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
        let code = i32::from(std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).is_err());
        // SAFETY: ends the child without running the parent's exit handlers.
        unsafe { libc::_exit(code) };
    }
    pid
}

/// The kernel's figures of one thread: time on a processor, time queued for a processor, number of turns.
pub struct Schedule(File);

impl Schedule {
    pub fn of_this_thread() -> Self {
        Self(File::open("/proc/thread-self/schedstat").unwrap())
    }

    /// Returns the result of `act`, how long it took, and how much of that time the thread had a processor or
    /// waited for something other than a processor.
    pub fn time<T>(&self, act: impl FnOnce() -> T) -> (T, Duration, Duration) {
        let (queued, start) = (self.queued(), Instant::now());
        let outcome = act();
        let took = start.elapsed();
        (outcome, took, took.saturating_sub(self.queued() - queued))
    }

    fn queued(&self) -> Duration {
        let mut bytes = [0; 96];
        let length = self.0.read_at(&mut bytes, 0).unwrap();
        let text = std::str::from_utf8(&bytes[..length]).unwrap();
        Duration::from_nanos(text.split(' ').nth(1).unwrap().parse().unwrap())
    }
}

pub fn wait(pid: libc::pid_t) -> i32 {
    let mut status = 0;
    // SAFETY: a child of ours.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    status
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn case_8_processes_that_race_in_a_slow_driver_never_pass_the_limit() {
    // Eight contexts, and 1 GiB for all processes.
    let share = Share {
        limits: &[8 * CONTEXT + 1024],
        variables: &[("GPUSHARE_SIMULATOR_ALLOCATION_NS", "1000000")],
        ..Share::default()
    };
    if !inside("processes::case_8_processes_that_race_in_a_slow_driver_never_pass_the_limit", &share) {
        return;
    }
    // No process ends while this one looks: the books charge 20 MiB more for a context than the GPU uses, and
    // the others could use the memory that an ended process's context leaves.
    let (end, mut ended) = std::io::pipe().unwrap();
    let churn = || {
        let cuda = Cuda::start();
        // All processes create their contexts first: a late one would find the limit used up by the others.
        while books().processes < 8 {
            std::thread::yield_now();
        }
        let mut held = Vec::new();
        for round in 0..400 {
            if held.len() > 8 || round % 7 == 6 {
                held.drain(..).for_each(|pointer| assert_eq!(cuda.free(pointer), 0));
            }
            match cuda.allocate(64) {
                Ok(pointer) => held.push(pointer),
                Err(status) => assert_eq!(status, OUT_OF_MEMORY),
            }
        }
        (&end).read_exact(&mut [0]).unwrap();
    };
    let children: Vec<_> = (0..8).map(|_| fork(churn)).collect();
    let (mut peak, looked) = (0, Instant::now() + Duration::from_millis(1500));
    while Instant::now() < looked {
        peak = peak.max(really_held(0));
        std::thread::yield_now();
    }
    ended.write_all(&[0; 8]).unwrap();
    children.into_iter().for_each(|child| assert_eq!(wait(child), 0));
    assert!(peak <= 8 * CONTEXT + 1024, "{peak} MiB held");
    assert!(books().refused > 0, "nobody met the limit");
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn memory_of_a_killed_process_is_there_within_ten_milliseconds() {
    if !inside(
        "processes::memory_of_a_killed_process_is_there_within_ten_milliseconds",
        &Share { limits: &[2 * CONTEXT + 1344], ..Share::default() },
    ) {
        return;
    }
    let cuda = Cuda::start();
    for round in 0..20 {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--include-ignored", "--exact", "processes::holder", "--test-threads=1"])
            .env("GPUSHARE_TEST_HOLD", "1000")
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let start = Instant::now();
        while books().devices[0].bytes / MIB < CONTEXT + CONTEXT + 1000 {
            assert!(start.elapsed() < Duration::from_secs(10), "the holder does not hold: {:?}", books());
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(cuda.allocate(1000), Err(OUT_OF_MEMORY));
        child.kill().unwrap();
        let killed = Instant::now();
        let pointer = loop {
            if let Ok(pointer) = cuda.allocate(1000) {
                break pointer;
            }
            assert!(killed.elapsed() < Duration::from_secs(5), "never came back");
        };
        let after = killed.elapsed();
        child.wait().unwrap();
        assert!(after < Duration::from_secs(1), "round {round}: {after:?}"); // some ms on a quiet machine
        assert_eq!(cuda.free(pointer), 0);
    }
    assert_eq!(books().processes, 1);
}

#[test]
#[ignore = "needs root: the part of memory_of_a_killed_process_is_there_within_ten_milliseconds that is killed"]
fn holder() {
    let Some(mib) = std::env::var("GPUSHARE_TEST_HOLD").ok().and_then(|text| text.parse().ok()) else {
        return;
    };
    let cuda = Cuda::start();
    cuda.allocate(mib).unwrap();
    std::thread::sleep(Duration::from_secs(60));
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn a_forked_child_leaves_its_parents_books_alone() {
    if !inside("processes::a_forked_child_leaves_its_parents_books_alone", &Share::default()) {
        return;
    }
    let cuda = Cuda::start();
    let pointer = cuda.allocate(500).unwrap();
    for _ in 0..10 {
        // Any answer to a forked child comes from the driver.
        let child = fork(|| {
            let _ = (cuda.allocate(100), cuda.free(pointer));
        });
        wait(child);
    }
    assert_eq!(cuda.free(pointer), 0);
    let whole = cuda.allocate(1024).unwrap();
    assert_eq!(books().devices[0].bytes / MIB, CONTEXT + 1024);
    assert_eq!(cuda.free(whole), 0);
    assert_eq!((books().devices[0].bytes / MIB, really_held(0)), (CONTEXT, CONTEXT));
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn threads_that_retain_and_release_at_the_limit_leave_exact_books() {
    let name = "processes::threads_that_retain_and_release_at_the_limit_leave_exact_books";
    if !inside(name, &Share { limits: &[CONTEXT + 680], ..Share::default() }) {
        return;
    }
    let cuda = Library::open("libcuda.so.1");
    assert_eq!(cuda.call("cuInit", &[0]), 0);
    let (mut handle, mut properties) = (0usize, [1u32, 0, 1, 0, 0, 0, 0, 0]);
    let mut context = 0usize;
    assert_eq!(cuda.call("cuDevicePrimaryCtxRetain", &[out(&mut context), 0]), 0);
    assert_eq!(cuda.call("cuMemCreate", &[out(&mut handle), bytes(640), out(&mut properties), 0]), 0);
    assert_eq!(cuda.call("cuDevicePrimaryCtxRelease_v2", &[0]), 0);
    let addresses =
        ["cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2"].map(|name| cuda.symbol(name));
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let mut context = 0usize;
                for _ in 0..30_000 {
                    assert_eq!(call(addresses[0], &[out(&mut context), 0]), 0);
                    assert_eq!(call(addresses[1], &[0]), 0);
                }
            });
        }
    });
    assert_eq!((books().devices[0].bytes / MIB, really_held(0)), (640, 640));
    assert_eq!(cuda.call("cuDevicePrimaryCtxRetain", &[out(&mut context), 0]), 0);
    assert_eq!(
        cuda.call("cuMemCreate", &[out(&mut handle), bytes(64), out(&mut properties), 0]),
        OUT_OF_MEMORY
    );
    let device = books().devices[0];
    assert_eq!(
        (device.bytes / MIB, device.context_bytes / MIB, really_held(0)),
        (CONTEXT + 640, CONTEXT, CONTEXT + 640)
    );
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn contexts_without_a_place_cost_no_more_than_others() {
    let share = Share { gpus: 2, limits: &[CONTEXT + 1024, CONTEXT + 1024], ..Share::default() };
    if !inside("processes::contexts_without_a_place_cost_no_more_than_others", &share) {
        return;
    }
    let cuda = Library::open("libcuda.so.1");
    assert_eq!(cuda.call("cuInit", &[0]), 0);
    let create = |device: usize| {
        let mut context = 0usize;
        assert_eq!(cuda.call("cuCtxCreate_v2", &[out(&mut context), 0, device]), 0);
        context
    };
    let charged = || books().devices[..2].iter().map(|device| device.bytes / MIB).collect::<Vec<_>>();
    let contexts: Vec<_> = (0..70).map(|_| create(0)).collect();
    for (round, end) in ["cuCtxDestroy_v2", "cuCtxDetach", "cuCtxDestroy_v2"].iter().enumerate() {
        let other = create(1);
        assert_eq!(charged(), [CONTEXT, CONTEXT], "round {round}");
        assert_eq!(cuda.call(end, &[other]), 0);
        assert_eq!(charged(), [CONTEXT, 0], "round {round}");
    }
    let mut primary = 0usize;
    for _ in 0..2 {
        assert_eq!(cuda.call("cuDevicePrimaryCtxRetain", &[out(&mut primary), 1]), 0);
    }
    for left in [CONTEXT, 0] {
        assert_eq!(cuda.call("cuDevicePrimaryCtxRelease_v2", &[1]), 0);
        assert_eq!(charged(), [CONTEXT, left]);
    }
    contexts.iter().rev().for_each(|context| assert_eq!(cuda.call("cuCtxDestroy_v2", &[*context]), 0));
    assert_eq!((charged(), really_held(0), really_held(1)), (vec![0, 0], 0, 0));
}
