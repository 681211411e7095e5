//! The behaviour of a held-back launch while it waits.

use std::time::{Duration, Instant};

use gpushare_region::ComputePolicy;

use crate::compute::{CORES, POLICY, Program, set_limit};
use crate::place::{Share, inside};

/// Processor time that this process has used.
fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one structure of ours.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    Duration::new(u64::try_from(time.tv_sec).unwrap(), u32::try_from(time.tv_nsec).unwrap())
}

/// Case 47: priority by sleeping a second, and waits by sleeps that end late.
#[test]
#[ignore = "needs root: makes a mount namespace"]
fn case_47_a_launch_that_waits_goes_on_soon_and_does_not_spin() {
    let share = Share { cores: &[1], ..Share::default() };
    if !inside("waits::case_47_a_launch_that_waits_goes_on_soon_and_does_not_spin", &share) {
        return;
    }
    let program = Program::start();
    let kernel = program.kernel(c"busy_1ms");
    let (mut late, mut spun, mut held) = (Vec::new(), Duration::ZERO, Duration::ZERO);
    for round in 0..20u64 {
        set_limit(CORES, 1);
        set_limit(POLICY, ComputePolicy::Fixed.number());
        let pause = Duration::from_micros(60_000 + round * 1_709 % 11_000);
        let used = processor_time();
        std::thread::scope(|scope| {
            let release = scope.spawn(|| {
                std::thread::sleep(pause);
                let released = Instant::now();
                set_limit(POLICY, ComputePolicy::None.number());
                released
            });
            // The share pays for ten such launches in a second, so the last launch before the release is held
            // back.
            let mut launches = Vec::new();
            while !release.is_finished() {
                let began = Instant::now();
                program.launch(kernel);
                launches.push((began, Instant::now()));
            }
            let released = release.join().unwrap();
            let waited: Vec<_> = launches.iter().filter(|(began, _)| *began < released).collect();
            assert!(waited.len() < 6, "round {round}: {} launches in {pause:?}", waited.len());
            let ended = waited[waited.len() - 1].1;
            late.push(ended.saturating_duration_since(released));
            held += pause;
        });
        spun += processor_time() - used;
        program.synchronize();
    }
    late.sort_unstable();
    println!("late by {:?} (median), {spun:?} of {held:?} on a processor", late[late.len() / 2]);
    assert!(late[late.len() / 2] < Duration::from_millis(15), "{late:?}");
    assert!(spun < held / 5, "{spun:?} of {held:?} on a processor");
}
