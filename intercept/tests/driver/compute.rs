//! The compute share in real time. Wide bounds: exact figures are the benchmark's, in virtual time and on quiet machines.

use std::time::{Duration, Instant};

use crate::client::{Cuda, call_long, out};
use crate::place::{Share, inside};

const PTX: &std::ffi::CStr = c".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry busy_1ms() { ret; }\n\
    .visible .entry busy_100us() { ret; }\n.visible .entry busy_100ms() { ret; }\n.visible .entry busy_300ms() { ret; }";

/// A program with kernels whose names say how long they take.
struct Program {
    cuda: Cuda,
    module: usize,
    launch: usize,
}

impl Program {
    fn start() -> Self {
        Self::start_on(0)
    }

    fn start_on(device: usize) -> Self {
        let cuda = Cuda::start_on(device);
        let mut module = 0usize;
        assert_eq!(cuda.call("cuModuleLoadData", &[out(&mut module), PTX.as_ptr().expose_provenance()]), 0);
        let launch = cuda.library.symbol("cuLaunchKernel");
        Self { cuda, module, launch }
    }

    fn kernel(&self, name: &std::ffi::CStr) -> usize {
        let mut function = 0usize;
        let name = name.as_ptr().expose_provenance();
        assert_eq!(self.cuda.call("cuModuleGetFunction", &[out(&mut function), self.module, name]), 0);
        function
    }

    fn launch(&self, function: usize) {
        assert_eq!(call_long(self.launch, &[function, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0]), 0);
    }

    fn synchronize(&self) {
        assert_eq!(self.cuda.call("cuCtxSynchronize", &[]), 0);
    }

    /// Launches with `launch` for `time`; the GPU time used, in percent of the time until it was done.
    fn share_of(&self, time: Duration, length: Duration, mut launch: impl FnMut()) -> f64 {
        let start = Instant::now();
        let mut launches = 0;
        while start.elapsed() < time {
            launch();
            launches += 1;
        }
        self.synchronize();
        100.0 * (length * launches).as_secs_f64() / start.elapsed().as_secs_f64()
    }
}

fn assert_near(share: f64, want: f64, tolerance: f64, what: &str) {
    assert!((share - want).abs() <= tolerance, "{what}: {share:.1} % of {want} %");
    println!("{what}: {share:.1} % of {want} %");
}

const SECOND: Duration = Duration::from_secs(1);
const MILLISECOND: Duration = Duration::from_millis(1);

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn case_40_a_share_holds_for_short_and_long_kernels() {
    if !inside(
        "compute::case_40_a_share_holds_for_short_and_long_kernels",
        &Share { cores: &[25], ..Share::default() },
    ) {
        return;
    }
    let program = Program::start();
    for (name, length) in
        [(c"busy_100us", MILLISECOND / 10), (c"busy_1ms", MILLISECOND), (c"busy_100ms", 100 * MILLISECOND)]
    {
        let kernel = program.kernel(name);
        let share = program.share_of(2 * SECOND, length, || program.launch(kernel));
        assert_near(share, 25.0, 5.0, &format!("{name:?}"));
    }
}
