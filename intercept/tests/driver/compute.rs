//! The compute share in real time. The bounds are wide: the benchmark gives exact figures, in virtual time
//! and on quiet machines.

mod survivors;

use std::fs::File;
use std::io::{Read, Write};
use std::mem::offset_of;
use std::os::fd::FromRawFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use gpushare_region::{LimitLine, LimitsFile, LimitsHeader};

use crate::client::{Cuda, call_long, out};
use crate::place::{CONTEXT, Share, books, inside};
use crate::processes::{fork, wait};

const PTX: &std::ffi::CStr =
    c".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry busy_1ms() { ret; }\n\
    .visible .entry busy_100us() { ret; }\n.visible .entry busy_100ms() { ret; }";

/// A program with kernels. Their names state how long they take.
pub struct Program {
    pub cuda: Cuda,
    module: usize,
    launch: usize,
}

impl Program {
    pub fn start() -> Self {
        Self::start_on(0)
    }

    fn start_on(device: usize) -> Self {
        let cuda = Cuda::start_on(device);
        let mut module = 0usize;
        assert_eq!(cuda.call("cuModuleLoadData", &[out(&mut module), PTX.as_ptr().expose_provenance()]), 0);
        let launch = cuda.library.symbol("cuLaunchKernel");
        Self { cuda, module, launch }
    }

    pub fn kernel(&self, name: &std::ffi::CStr) -> usize {
        let mut function = 0usize;
        let name = name.as_ptr().expose_provenance();
        assert_eq!(self.cuda.call("cuModuleGetFunction", &[out(&mut function), self.module, name]), 0);
        function
    }

    pub fn launch(&self, function: usize) {
        assert_eq!(call_long(self.launch, &[function, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0]), 0);
    }

    /// The driver's answer to a launch in `stream`.
    pub fn launch_in(&self, function: usize, stream: usize) -> i32 {
        call_long(self.launch, &[function, 1, 1, 1, 1, 1, 1, 0, stream])
    }

    pub fn synchronize(&self) {
        assert_eq!(self.cuda.call("cuCtxSynchronize", &[]), 0);
    }

    /// Launches with `launch` for `time`. Returns the GPU time used, in percent of the time until all work
    /// was done.
    pub fn share_once(&self, time: Duration, length: Duration, mut launch: impl FnMut()) -> f64 {
        let start = Instant::now();
        let mut launches = 0;
        while start.elapsed() < time {
            launch();
            launches += 1;
        }
        self.synchronize();
        100.0 * (length * launches).as_secs_f64() / start.elapsed().as_secs_f64()
    }

    /// Like [`Program::share_once`], for a program that uses the GPU alone.
    pub fn share_of(&self, time: Duration, length: Duration, mut launch: impl FnMut()) -> f64 {
        undisturbed(|| self.share_once(time, length, &mut launch))
    }
}

/// Repeats a measurement in which this thread waited for a processor, since it says nothing about the share.
fn undisturbed(mut measure: impl FnMut() -> f64) -> f64 {
    for _ in 1..ATTEMPTS {
        let (start, before) = (Instant::now(), waited());
        let share = measure();
        if waited().saturating_sub(before) < start.elapsed() / 50 {
            return share;
        }
    }
    measure()
}

/// The number of measurements on a machine that never has a processor free; the last one counts.
const ATTEMPTS: usize = 5;

/// How long this thread has waited on a run queue (Linux, sched-stats.rst).
fn waited() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    Duration::from_nanos(text.split(' ').nth(1).and_then(|word| word.parse().ok()).unwrap_or(0))
}

fn assert_near(share: f64, want: f64, tolerance: f64, what: &str) {
    assert!((share - want).abs() <= tolerance, "{what}: {share:.1} % of {want} %");
    println!("{what}: {share:.1} % of {want} %");
}

/// Runs `child` in `count` forked processes at once. Returns the result of each.
fn fork_all(count: usize, child: impl Fn(usize) -> f64) -> Vec<f64> {
    let mut pipe = [0; 2];
    // SAFETY: two descriptors are written.
    assert_eq!(unsafe { libc::pipe(pipe.as_mut_ptr()) }, 0);
    // SAFETY: descriptors of this test.
    let [mut read, write] = pipe.map(|fd| unsafe { File::from_raw_fd(fd) });
    let run = |index| fork(|| (&write).write_all(&child(index).to_ne_bytes()).unwrap());
    let children: Vec<_> = (0..count).map(run).collect();
    drop(write);
    children.into_iter().for_each(|child| assert_eq!(wait(child), 0));
    let mut bytes = Vec::new();
    read.read_to_end(&mut bytes).unwrap();
    bytes.chunks_exact(8).map(|bytes| f64::from_ne_bytes(bytes.try_into().unwrap())).collect()
}

/// Writes a word of the limits as the host does, in place.
pub fn set_limit(offset: usize, value: u32) {
    let file = File::options().write(true).open("/usr/lib/gpushare/limits").unwrap();
    file.write_all_at(&value.to_ne_bytes(), offset as u64).unwrap();
}

const LIMITED: usize = offset_of!(LimitsFile, header) + offset_of!(LimitsHeader, compute_limited);
const LINE: usize = offset_of!(LimitsFile, devices);
pub const CORES: usize = LINE + offset_of!(LimitLine, cores_percent);
pub const POLICY: usize = LINE + offset_of!(LimitLine, policy);

const SECOND: Duration = Duration::from_secs(1);
const MILLISECOND: Duration = Duration::from_millis(1);

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn case_40_a_share_holds_for_short_and_long_kernels() {
    let share = Share { cores: &[25], profile: "ideal", ..Share::default() };
    if !inside("compute::case_40_a_share_holds_for_short_and_long_kernels", &share) {
        return;
    }
    let program = Program::start();
    for (name, length) in [(c"busy_100us", MILLISECOND / 10), (c"busy_1ms", MILLISECOND)] {
        let kernel = program.kernel(name);
        let share = program.share_of(3 * SECOND / 2, length, || program.launch(kernel));
        assert_near(share, 25.0, 4.0, &format!("{name:?}"));
    }
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn case_42_a_long_kernel_followed_by_a_synchronisation_pays() {
    let share = Share { cores: &[50], profile: "ideal", ..Share::default() };
    if !inside("compute::case_42_a_long_kernel_followed_by_a_synchronisation_pays", &share) {
        return;
    }
    let program = Program::start();
    let kernel = program.kernel(c"busy_100ms");
    let share = program.share_of(2 * SECOND, 100 * MILLISECOND, || {
        program.launch(kernel);
        program.synchronize();
    });
    assert_near(share, 50.0, 6.0, "100 ms and a synchronisation");
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn cases_41_43_44_every_kind_of_launch_is_held_to_the_share() {
    let share = Share { cores: &[25], driver: "535.309.01", profile: "ideal", ..Share::default() };
    if !inside("compute::cases_41_43_44_every_kind_of_launch_is_held_to_the_share", &share) {
        return;
    }
    let program = Program::start();
    let cuda = &program.cuda;
    let kernel = program.kernel(c"busy_1ms");
    let (mut stream, mut graph, mut executable) = (0usize, 0usize, 0usize);
    assert_eq!(cuda.call("cuStreamCreate", &[out(&mut stream), 1]), 0);
    assert_eq!(cuda.call("cuStreamBeginCapture_v2", &[stream, 0]), 0);
    assert_eq!(program.launch_in(kernel, stream), 0);
    assert_eq!(cuda.call("cuStreamEndCapture", &[stream, out(&mut graph)]), 0);
    assert_eq!(cuda.call("cuGraphInstantiateWithFlags", &[out(&mut executable), graph, 0]), 0);
    assert_eq!(cuda.call("cuFuncSetBlockShape", &[kernel, 32, 1, 1]), 0);
    // CUlaunchConfig: grid and block, shared memory, stream, attributes and their number.
    let configuration = [1 | 1 << 32, 1 | 1 << 32, 1 | 1 << 32, 0, stream, 0, 0];
    let configuration = configuration.as_ptr().expose_provenance();
    // CUDA_LAUNCH_PARAMS: function, grid and block, shared memory, stream, parameters.
    let one = [kernel, 1 | 1 << 32, 1 | 1 << 32, 1 | 1 << 32, 0, stream, 0];
    let one = one.as_ptr().expose_provenance();
    let direct = [kernel, 1, 1, 1, 1, 1, 1, 0, stream];
    for (name, arguments) in [
        ("cuLaunchKernel", &direct[..]),
        ("cuLaunchKernel_ptsz", &[kernel, 1, 1, 1, 1, 1, 1, 0, 0]),
        ("cuLaunchKernelEx", &[configuration, kernel, 0, 0]),
        ("cuLaunchKernelEx_ptsz", &[configuration, kernel, 0, 0]),
        ("cuLaunchCooperativeKernel", &direct),
        ("cuLaunchCooperativeKernel_ptsz", &direct),
        ("cuLaunchCooperativeKernelMultiDevice", &[one, 1, 0]),
        ("cuLaunch", &[kernel]),
        ("cuLaunchGrid", &[kernel, 4, 4]),
        ("cuLaunchGridAsync", &[kernel, 4, 4, stream]),
        ("cuGraphLaunch", &[executable, stream]),
        ("cuGraphLaunch_ptsz", &[executable, stream]),
    ] {
        let address = cuda.library.symbol(name);
        let share =
            program.share_of(SECOND / 2, MILLISECOND, || assert_eq!(call_long(address, arguments), 0));
        assert_near(share, 25.0, 6.0, name);
    }
}

/// Cases 19 and 43: recorded launches cost nothing and are not timed, and the limit holds again afterwards.
#[test]
#[ignore = "needs root: makes a mount namespace"]
fn cases_19_43_launches_into_a_captured_stream_cost_nothing() {
    let share = Share { cores: &[25], profile: "ideal", ..Share::default() };
    if !inside("compute::cases_19_43_launches_into_a_captured_stream_cost_nothing", &share) {
        return;
    }
    let program = Program::start();
    let (kernel, long) = (program.kernel(c"busy_1ms"), program.kernel(c"busy_100ms"));
    let mut stream = 0usize;
    assert_eq!(program.cuda.call("cuStreamCreate", &[out(&mut stream), 1]), 0);
    program.share_of(SECOND / 5, MILLISECOND, || program.launch(kernel));
    program.launch(long); // its cost becomes known, and the debt is half a second
    program.synchronize();
    let start = Instant::now();
    let mut graph = 0usize;
    assert_eq!(program.cuda.call("cuStreamBeginCapture_v2", &[stream, 0]), 0);
    for _ in 0..500 {
        assert_eq!(program.launch_in(long, stream), 0);
    }
    assert_eq!(program.cuda.call("cuStreamEndCapture", &[stream, out(&mut graph)]), 0, "spoilt");
    assert!(start.elapsed() < SECOND / 10, "{:?} for 500 launches that do not run", start.elapsed());
    std::thread::sleep(SECOND / 2);
    let share = program.share_of(SECOND, MILLISECOND, || program.launch(kernel));
    assert_near(share, 25.0, 5.0, "after the capture");
    // A recorded launch is not paid from the credit that an earlier real launch left over.
    let short = program.kernel(c"busy_100us");
    let share = program.share_of(SECOND, MILLISECOND / 10, || {
        program.launch(short);
        assert_eq!(program.cuda.call("cuStreamBeginCapture_v2", &[stream, 0]), 0);
        for _ in 0..8 {
            assert_eq!(program.launch_in(short, stream), 0);
        }
        assert_eq!(program.cuda.call("cuStreamEndCapture", &[stream, out(&mut graph)]), 0);
        assert_eq!(program.cuda.call("cuGraphDestroy", &[graph]), 0);
    });
    assert_near(share, 25.0, 6.0, "between captures");
    // It is also not paid from the credit that a launch in another stream leaves over in the meantime.
    let mut other = 0usize;
    assert_eq!(program.cuda.call("cuStreamCreate", &[out(&mut other), 1]), 0);
    assert_eq!(program.cuda.call("cuStreamBeginCapture_v2", &[stream, 2]), 0); // relaxed
    // Each launch asks now, and sleeps while it may not go: the number of launches in a second depends on the
    // machine. The time paid for them does not.
    let before = books().devices[0].gpu_nanoseconds;
    let mut worked = Duration::ZERO;
    let start = Instant::now();
    while start.elapsed() < SECOND {
        assert_eq!(program.launch_in(short, other), 0);
        worked += MILLISECOND / 10;
        (0..8).for_each(|_| assert_eq!(program.launch_in(short, stream), 0));
    }
    assert_eq!(program.cuda.call("cuStreamEndCapture", &[stream, out(&mut graph)]), 0);
    let paid = Duration::from_nanos(books().devices[0].gpu_nanoseconds - before);
    let part = paid.as_secs_f64() / worked.as_secs_f64();
    assert!((0.9..=1.5).contains(&part), "{paid:?} paid for work of {worked:?}");
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn case_45_each_device_has_a_share_of_its_own() {
    let share = Share {
        gpus: 3,
        limits: &[CONTEXT + 1024; 3],
        cores: &[25, 60],
        profile: "ideal",
        ..Share::default()
    };
    if !inside("compute::case_45_each_device_has_a_share_of_its_own", &share) {
        return;
    }
    let shares = fork_all(3, |device| {
        let program = Program::start_on(device);
        let kernel = program.kernel(c"busy_1ms");
        let share = program.share_of(SECOND, MILLISECOND, || program.launch(kernel));
        share + 1000.0 * device as f64
    });
    for (device, want) in [(0, 25.0), (1, 60.0), (2, 100.0)] {
        let share = shares.iter().find(|share| (**share / 1000.0).floor() == f64::from(device)).unwrap();
        assert_near(share - 1000.0 * f64::from(device), want, 6.0, &format!("device {device}"));
    }
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn case_45_a_thread_that_uses_two_devices_spends_nothing_of_one_on_the_other() {
    let share = Share {
        gpus: 2,
        limits: &[CONTEXT + 1024; 2],
        cores: &[90, 10],
        profile: "ideal",
        ..Share::default()
    };
    if !inside("compute::case_45_a_thread_that_uses_two_devices_spends_nothing_of_one_on_the_other", &share) {
        return;
    }
    let shares = fork_all(1, |_| {
        let programs = [Program::start_on(0), Program::start_on(1)];
        // A kernel of a library has one handle on all devices, so its launches are of one kind.
        let (cuda, mut library, mut kernel) = (&programs[0].cuda, 0usize, 0usize);
        let (image, name) = (PTX.as_ptr().expose_provenance(), c"busy_100us".as_ptr().expose_provenance());
        assert_eq!(cuda.call("cuLibraryLoadData", &[out(&mut library), image, 0, 0, 0, 0]), 0);
        assert_eq!(cuda.call("cuLibraryGetKernel", &[out(&mut kernel), library, name]), 0);
        let launch = |device: usize| {
            assert_eq!(cuda.call("cuCtxSetCurrent", &[programs[device].cuda.context]), 0);
            programs[device].launch(kernel);
        };
        // The first device could have nine times as much: the second one holds both back.
        programs[0].share_of(SECOND, MILLISECOND / 10, || [0, 1].into_iter().for_each(launch))
    });
    assert_near(shares[0], 10.0, 6.0, "the second of two devices by turns");
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn processes_threads_and_forked_children_share_one_share() {
    let share = Share { limits: &[4096], cores: &[50], profile: "ideal", ..Share::default() };
    if !inside("compute::processes_threads_and_forked_children_share_one_share", &share) {
        return;
    }
    let measure = |_| {
        let program = Program::start();
        let kernel = program.kernel(c"busy_1ms");
        program.share_once(3 * SECOND / 2, MILLISECOND, || program.launch(kernel))
    };
    let shares = fork_all(4, measure);
    assert_near(shares.iter().sum(), 50.0, 6.0, "4 processes");
    let threads = fork_all(1, |_| {
        let program = Program::start();
        let kernel = program.kernel(c"busy_1ms");
        std::thread::scope(|scope| {
            let run = || {
                assert_eq!(program.cuda.call("cuCtxSetCurrent", &[program.cuda.context]), 0);
                program.share_once(3 * SECOND / 2, MILLISECOND, || program.launch(kernel))
            };
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(run)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        })
    });
    assert_near(threads[0], 50.0, 6.0, "4 threads");
    // A program that launched and then forked. The child cannot launch, and the program keeps its share.
    let forked = fork_all(1, |_| {
        let program = Program::start();
        let kernel = program.kernel(c"busy_1ms");
        program.share_of(SECOND / 5, MILLISECOND, || program.launch(kernel));
        let child =
            fork(|| assert_ne!(call_long(program.launch, &[kernel, 1, 1, 1, 1, 1, 1]), 0, "no context"));
        assert_eq!(wait(child), 0);
        program.share_of(SECOND, MILLISECOND, || program.launch(kernel))
    });
    assert_near(forked[0], 50.0, 6.0, "after a fork");
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn case_20_new_limits_are_obeyed_at_once_in_a_running_program() {
    let share = Share { cores: &[25], profile: "ideal", ..Share::default() };
    if !inside("compute::case_20_new_limits_are_obeyed_at_once_in_a_running_program", &share) {
        return;
    }
    let program = Program::start();
    let kernel = program.kernel(c"busy_1ms");
    for (what, cores, policy, limited, want) in [
        ("25", 25, 1, 1, 25.0),
        ("75", 75, 1, 1, 75.0),
        ("no limit", 75, 0, 0, 100.0),
        ("burst, of whom nobody knows who works beside", 30, 2, 1, 100.0),
        ("limited again", 40, 1, 1, 40.0),
    ] {
        set_limit(CORES, cores);
        set_limit(POLICY, policy);
        set_limit(LIMITED, limited);
        let share = program.share_of(SECOND, MILLISECOND, || program.launch(kernel));
        assert_near(share, want, 6.0, what);
    }
    // A waiting launch also sees the change: it has ten seconds of debt at one percent.
    set_limit(CORES, 1);
    program.launch(program.kernel(c"busy_100ms"));
    let start = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(SECOND / 4);
            set_limit(CORES, 100);
        });
        (0..2).for_each(|_| program.launch(kernel));
        let waited = start.elapsed();
        assert!((SECOND / 4..SECOND / 2).contains(&waited), "released after {waited:?}");
    });
}

/// Events end with their context.
#[test]
#[ignore = "needs root: makes a mount namespace"]
fn a_context_that_ends_takes_its_events_and_not_the_share() {
    let share = Share { cores: &[50], profile: "ideal", ..Share::default() };
    if !inside("compute::a_context_that_ends_takes_its_events_and_not_the_share", &share) {
        return;
    }
    let mut program = Program::start();
    let (start, mut launches) = (Instant::now(), 0);
    while start.elapsed() < SECOND {
        let kernel = program.kernel(c"busy_1ms");
        (0..20).for_each(|_| program.launch(kernel));
        launches += 20;
        assert_eq!(program.cuda.call("cuDevicePrimaryCtxReset_v2", &[0]), 0);
        program = Program::start();
    }
    // Work that is still queued when its context ends is lost, but was charged.
    let most = 100.0 * f64::from(launches) * 0.001 / start.elapsed().as_secs_f64();
    assert!((30.0..56.0).contains(&most), "{most:.1} % launched");
}

/// This includes work that runs when its context ends. Libraries often make a release that only lowers a
/// count.
#[test]
#[ignore = "needs root: makes a mount namespace"]
fn work_whose_context_is_let_go_of_is_paid() {
    let share = Share { limits: &[4096], cores: &[25], profile: "ideal", ..Share::default() };
    if !inside("compute::work_whose_context_is_let_go_of_is_paid", &share) {
        return;
    }
    let mut program = Program::start();
    let kernel = program.kernel(c"busy_100ms");
    let share = program.share_of(2 * SECOND, 100 * MILLISECOND, || {
        program.launch(kernel);
        program.synchronize();
        let mut context = 0usize;
        assert_eq!(program.cuda.call("cuDevicePrimaryCtxRetain", &[out(&mut context), 0]), 0);
        assert_eq!(program.cuda.call("cuDevicePrimaryCtxRelease_v2", &[0]), 0);
    });
    assert_near(share, 25.0, 6.0, "retained and released");
    for (what, runs) in [("reset after it ended", 100), ("reset while it runs", 60)] {
        let (start, mut used) = (Instant::now(), Duration::ZERO);
        while start.elapsed() < 2 * SECOND {
            let kernel = program.kernel(c"busy_100ms");
            program.launch(kernel);
            if runs == 100 {
                program.synchronize();
            } else {
                std::thread::sleep(runs * MILLISECOND);
            }
            assert_eq!(program.cuda.call("cuDevicePrimaryCtxReset_v2", &[0]), 0);
            used += runs * MILLISECOND;
            program = Program::start();
        }
        program.launch(program.kernel(c"busy_1ms")); // waits until the debt of the last kernel is paid
        let share = 100.0 * used.as_secs_f64() / start.elapsed().as_secs_f64();
        assert_near(share, 25.0, 8.0, what);
    }
}

/// A kernel of a millisecond that runs on the GPU of its stream.
fn kernel_of_no_context(cuda: &Cuda) -> usize {
    let (mut library, mut kernel) = (0usize, 0usize);
    let name = c"busy_1ms".as_ptr().expose_provenance();
    let image = PTX.as_ptr().expose_provenance();
    assert_eq!(cuda.call("cuLibraryLoadData", &[out(&mut library), image, 0, 0, 0, 0]), 0);
    assert_eq!(cuda.call("cuLibraryGetKernel", &[out(&mut kernel), library, name]), 0);
    kernel
}

/// The GPU of the current context is not charged for the launch.
#[test]
#[ignore = "needs root: makes a mount namespace"]
fn the_gpu_of_the_stream_pays_for_a_launch() {
    let share = Share { gpus: 2, limits: &[4096; 2], cores: &[25], profile: "ideal", ..Share::default() };
    if !inside("compute::the_gpu_of_the_stream_pays_for_a_launch", &share) {
        return;
    }
    let program = Program::start_on(0);
    let cuda = &program.cuda;
    let function = program.kernel(c"busy_1ms");
    let kernel = kernel_of_no_context(cuda);
    let (mut stream, mut graph, mut executable, mut other) = (0usize, 0usize, 0usize, 0usize);
    assert_eq!(cuda.call("cuStreamCreate", &[out(&mut stream), 1]), 0);
    assert_eq!(cuda.call("cuStreamBeginCapture_v2", &[stream, 0]), 0);
    assert_eq!(call_long(program.launch, &[function, 1, 1, 1, 1, 1, 1, 0, stream]), 0);
    assert_eq!(cuda.call("cuStreamEndCapture", &[stream, out(&mut graph)]), 0);
    assert_eq!(cuda.call("cuGraphInstantiateWithFlags", &[out(&mut executable), graph, 0]), 0);
    assert_eq!(cuda.call("cuDevicePrimaryCtxRetain", &[out(&mut other), 1]), 0);
    let graph_launch = cuda.library.symbol("cuGraphLaunch");
    for current in [cuda.context, other] {
        assert_eq!(cuda.call("cuCtxSetCurrent", &[current]), 0);
        for (name, address, arguments) in [
            ("a CUkernel", program.launch, &[kernel, 1, 1, 1, 1, 1, 1, 0, stream][..]),
            ("a graph", graph_launch, &[executable, stream]),
        ] {
            let (start, mut launches) = (Instant::now(), 0);
            while start.elapsed() < SECOND {
                assert_eq!(call_long(address, arguments), 0);
                launches += 1;
            }
            assert_eq!(cuda.call("cuStreamSynchronize", &[stream]), 0);
            let share = 0.1 * f64::from(launches) / start.elapsed().as_secs_f64();
            assert_near(
                share,
                25.0,
                5.0,
                &format!("{name}, its own GPU current: {}", current == cuda.context),
            );
        }
    }
}

/// A green context with all processors of GPU 0, and one of its streams.
pub fn green_stream(cuda: &Cuda) -> (usize, usize) {
    let (mut resource, mut description, mut green, mut stream) = ([0u32; 36], 0usize, 0usize, 0usize);
    assert_eq!(cuda.call("cuDeviceGetDevResource", &[0, out(&mut resource), 1]), 0);
    assert_eq!(cuda.call("cuDevResourceGenerateDesc", &[out(&mut description), out(&mut resource), 1]), 0);
    assert_eq!(cuda.call("cuGreenCtxCreate", &[out(&mut green), description, 0, 1]), 0);
    assert_eq!(cuda.call("cuGreenCtxStreamCreate", &[out(&mut stream), green, 1, 0]), 0);
    (green, stream)
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn launches_into_a_stream_of_a_green_context_are_paid_by_its_gpu() {
    let share = Share { gpus: 2, limits: &[4096; 2], cores: &[25], profile: "ideal", ..Share::default() };
    if !inside("compute::launches_into_a_stream_of_a_green_context_are_paid_by_its_gpu", &share) {
        return;
    }
    let program = Program::start_on(0);
    let cuda = &program.cuda;
    let kernel = kernel_of_no_context(cuda);
    let (_, stream) = green_stream(cuda);
    let mut other = 0usize;
    assert_eq!(cuda.call("cuDevicePrimaryCtxRetain", &[out(&mut other), 1]), 0);
    for (current, what) in [(cuda.context, "GPU 0 current"), (other, "GPU 1 current"), (0, "no context")] {
        assert_eq!(cuda.call("cuCtxSetCurrent", &[current]), 0);
        let (start, mut launches) = (Instant::now(), 0);
        while start.elapsed() < SECOND {
            assert_eq!(call_long(program.launch, &[kernel, 1, 1, 1, 1, 1, 1, 0, stream]), 0, "{what}");
            launches += 1;
        }
        assert_eq!(cuda.call("cuStreamSynchronize", &[stream]), 0);
        let share = 0.1 * f64::from(launches) / start.elapsed().as_secs_f64();
        assert_near(share, 25.0, 5.0, what);
    }
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn launches_into_a_stream_of_another_context_are_timed() {
    let share = Share { limits: &[4096], cores: &[25], profile: "ideal", ..Share::default() };
    if !inside("compute::launches_into_a_stream_of_another_context_are_timed", &share) {
        return;
    }
    let program = Program::start();
    let long = program.kernel(c"busy_100ms");
    let (mut stream, mut other) = (0usize, 0usize);
    assert_eq!(program.cuda.call("cuStreamCreate", &[out(&mut stream), 1]), 0);
    assert_eq!(program.cuda.call("cuCtxCreate_v2", &[out(&mut other), 0, 0]), 0);
    let share = program.share_of(2 * SECOND, 100 * MILLISECOND, || {
        assert_eq!(call_long(program.launch, &[long, 1, 1, 1, 1, 1, 1, 0, stream]), 0);
        assert_eq!(program.cuda.call("cuStreamSynchronize", &[stream]), 0);
    });
    assert_near(share, 25.0, 6.0, "100 ms and a synchronisation");
}
