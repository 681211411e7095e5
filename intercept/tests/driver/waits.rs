//! What a launch that is held back does meanwhile.

use std::time::{Duration, Instant};

use crate::compute::{PAUSED, Program, set_limit};
use crate::place::{Share, inside};

/// Time on a processor that this process has used.
fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one structure of ours.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    Duration::new(u64::try_from(time.tv_sec).unwrap(), u32::try_from(time.tv_nsec).unwrap())
}

/// Case 47: priority by a second's sleep, and waits in sleeps that end late.
#[test]
#[ignore = "needs root: makes a mount namespace"]
fn case_47_a_launch_that_waits_goes_on_soon_and_does_not_spin() {
    let share = Share { cores: &[90], ..Share::default() };
    if !inside("waits::case_47_a_launch_that_waits_goes_on_soon_and_does_not_spin", &share) {
        return;
    }
    let program = Program::start();
    let kernel = program.kernel(c"busy_1ms");
    (0..20).for_each(|_| program.launch(kernel));
    let (mut late, mut spun, mut paused) = (Vec::new(), Duration::ZERO, Duration::ZERO);
    for round in 0..20u64 {
        program.synchronize();
        set_limit(PAUSED, 1);
        let pause = Duration::from_micros(40_000 + round * 1_709 % 11_000);
        let (begin, used) = (Instant::now(), processor_time());
        let released = std::thread::scope(|scope| {
            let release = scope.spawn(|| {
                std::thread::sleep(pause);
                set_limit(PAUSED, 0);
                Instant::now()
            });
            program.launch(kernel);
            late.push(begin.elapsed());
            release.join().unwrap()
        });
        let held = released - begin;
        let after = late.pop().unwrap();
        assert!(after >= pause, "round {round}: launched {:?} before the end of the pause", pause - after);
        late.push(after.saturating_sub(held));
        (spun, paused) = (spun + (processor_time() - used), paused + held);
    }
    late.sort_unstable();
    println!("late by {:?} (median), {spun:?} of {paused:?} on a processor", late[late.len() / 2]);
    assert!(late[late.len() / 2] < Duration::from_millis(15), "{late:?}");
    assert!(spun < paused / 25, "{spun:?} of {paused:?} on a processor");
}
