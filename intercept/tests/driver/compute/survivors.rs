//! Launches of a process while other processes start and are killed.

use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use super::{MILLISECOND, Program, SECOND, assert_near, fork_all};
use crate::place::{Share, inside};
use crate::processes::{Schedule, fork, wait};
use crate::views::shared_word;

/// The observations of a launching process while others were killed.
struct Seen {
    /// Its share, in percent of the GPU.
    share: f64,
    /// How many of its launches were blocked for more than ten milliseconds, and the longest of all. Waiting
    /// for a processor does not count.
    late: u32,
    longest: Duration,
    /// The longest time for which the machine itself stood still.
    stall: Duration,
}

/// Runs a process that launches for three seconds while others start and are killed. All of them `pause`
/// after each kernel of a millisecond.
fn beside_the_killed(pause: Duration) -> Seen {
    let (late, longest, stall) = (shared_word(), shared_word(), shared_word());
    let survivor = |_| {
        let program = Program::start();
        let (kernel, schedule) = (program.kernel(c"busy_1ms"), Schedule::of_this_thread());
        program.share_of(SECOND / 5, MILLISECOND, || program.launch(kernel)); // a container starts in debt
        std::thread::sleep(SECOND / 10);
        program.share_of(3 * SECOND, MILLISECOND, || {
            let ((), _, blocked) = schedule.time(|| program.launch(kernel));
            late.fetch_add(u32::from(blocked > 10 * MILLISECOND), SeqCst);
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
    // It only sleeps, so any delay that it sees affects all processes.
    let witness = fork(|| {
        let schedule = Schedule::of_this_thread();
        let until = Instant::now() + 3 * SECOND;
        while Instant::now() < until {
            let ((), _, slept) = schedule.time(|| std::thread::sleep(MILLISECOND));
            stall.fetch_max(u32::try_from(slept.saturating_sub(MILLISECOND).as_micros()).unwrap(), SeqCst);
        }
    });
    let share = fork_all(1, survivor)[0];
    assert_eq!((wait(others), wait(witness)), (0, 0));
    let [longest, stall] = [longest, stall].map(|word| Duration::from_micros(word.load(SeqCst).into()));
    let late = late.load(SeqCst);
    println!(
        "pauses of {pause:?}: {share:.1} %, {late} launches late, one for {longest:?}, a sleep for {stall:?}"
    );
    Seen { share, late, longest, stall }
}

/// Cases 24 and 39: a process that dies neither removes the limit nor stops the others.
#[test]
#[ignore = "needs root: makes a mount namespace"]
fn cases_24_39_killed_processes_neither_block_nor_free_the_others() {
    let share = Share { limits: &[8192], cores: &[50], profile: "ideal", ..Share::default() };
    if !inside("compute::survivors::cases_24_39_killed_processes_neither_block_nor_free_the_others", &share) {
        return;
    }
    // While the share suffices for all, a launch can only be delayed by one of about fifty kills, or by a
    // machine that stands still.
    let Seen { share, late, longest, .. } = beside_the_killed(6 * MILLISECOND);
    assert!(share > 10.0 && late < 5 && longest < SECOND, "{share:.1} %, {late} late, one for {longest:?}");
    // Otherwise a launch also waits for its turn: the work that the others drew and queued has to be earned
    // first. A machine that stands still for a moment lets them queue more. The share shows that the process
    // still makes progress.
    let Seen { share, longest, stall, .. } = beside_the_killed(Duration::ZERO);
    let blocked = longest.saturating_sub(stall);
    assert!((15.0..53.0).contains(&share) && blocked < SECOND, "{share:.1} %, blocked for {blocked:?}");
    let alone = fork_all(1, |_| {
        let program = Program::start();
        let kernel = program.kernel(c"busy_1ms");
        program.share_of(SECOND, MILLISECOND, || program.launch(kernel))
    });
    assert_near(alone[0], 50.0, 5.0, "afterwards");
}
