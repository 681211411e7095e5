//! Launches of a process while other processes begin and are killed.

use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use super::{MILLISECOND, Program, SECOND, assert_near, fork_all};
use crate::place::{Share, inside};
use crate::processes::{Schedule, end, fork, wait, witnesses};
use crate::views::shared_word;

/// Runs a process that launches for three seconds while others begin and are killed. All of them make a
/// `pause` after each kernel of a millisecond. Returns its share, the longest time for which one of its
/// launches was blocked, without the wait for a processor, and the longest time for which the machine itself
/// stood still.
fn beside_the_killed(pause: Duration) -> (f64, Duration, Duration) {
    let (longest, stall) = (shared_word(), shared_word());
    let survivor = |_| {
        let program = Program::start();
        let (kernel, schedule) = (program.kernel(c"busy_1ms"), Schedule::of_this_thread());
        program.share_of(SECOND / 5, MILLISECOND, || program.launch(kernel)); // a container begins in debt
        std::thread::sleep(SECOND / 10);
        program.share_of(3 * SECOND, MILLISECOND, || {
            let ((), _, blocked) = schedule.time(|| program.launch(kernel));
            longest.fetch_max(u32::try_from(blocked.as_micros()).unwrap(), SeqCst);
            std::thread::sleep(pause);
        })
    };
    let others = fork(|| {
        let until = Instant::now() + 3 * SECOND;
        let mut round = 0u64;
        while Instant::now() < until {
            round += 1;
            let child = fork(|| {
                let program = Program::start();
                let kernel = program.kernel(c"busy_1ms");
                loop {
                    program.launch(kernel);
                    std::thread::sleep(pause);
                }
            });
            std::thread::sleep(Duration::from_micros(20_000 + round * 7_919 % 60_000));
            // SAFETY: a child of this process.
            unsafe { libc::kill(child, libc::SIGKILL) };
            wait(child);
        }
        assert!(round > 20, "{round} kills");
    });
    let witnesses = witnesses(|late| {
        stall.fetch_max(u32::try_from(late.as_micros()).unwrap(), SeqCst);
    });
    let share = fork_all(1, survivor)[0];
    assert_eq!(wait(others), 0);
    witnesses.into_iter().for_each(end);
    let [longest, stall] = [longest, stall].map(|word| Duration::from_micros(word.load(SeqCst).into()));
    println!(
        "pauses of {pause:?}: {share:.1} %, a launch was blocked for {longest:?}, a sleep for {stall:?}"
    );
    (share, longest, stall)
}

/// Cases 24 and 39: a process that dies neither removes the limit nor stops the others.
#[test]
#[ignore = "needs root: makes a mount namespace"]
fn cases_24_39_killed_processes_neither_block_nor_free_the_others() {
    let share = Share { limits: &[8192], cores: &[50], ..Share::default() };
    if !inside("compute::survivors::cases_24_39_killed_processes_neither_block_nor_free_the_others", &share) {
        return;
    }
    // While the share suffices for all, only a kill can delay a launch, or a machine that stands still.
    let (share, longest, stall) = beside_the_killed(6 * MILLISECOND);
    let blocked = longest.saturating_sub(stall);
    assert!(share > 10.0 && blocked < 10 * MILLISECOND, "{share:.1} %, blocked for {blocked:?}");
    // Otherwise a launch also waits for its turn: what the others drew and queued has to be earned first. A
    // machine that stands still for a moment lets them queue more. The share shows that the process still
    // makes progress.
    let (share, longest, stall) = beside_the_killed(Duration::ZERO);
    let blocked = longest.saturating_sub(stall);
    assert!((15.0..53.0).contains(&share) && blocked < SECOND, "{share:.1} %, blocked for {blocked:?}");
    let alone = fork_all(1, |_| {
        let program = Program::start();
        let kernel = program.kernel(c"busy_1ms");
        program.share_of(SECOND, MILLISECOND, || program.launch(kernel))
    });
    assert_near(alone[0], 50.0, 5.0, "afterwards");
}
