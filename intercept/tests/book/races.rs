//! Processes that race to the limit, and processes that are killed or stopped in the meantime.

use std::mem::offset_of;
use std::os::unix::fs::FileExt;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use gpushare_region::{UsageFile, UsageHeader};

use crate::container::{Container, Files, MIB, open};
use crate::process::{Shared, fork, kill, pause, random, until, wait};

/// Words of the driver: peak in MiB, number of grants, then the memory of each process.
const PEAK: usize = 0;
const GRANTS: usize = 1;
const FIRST: usize = 2;

/// The memory of one process in MiB, with a version in the upper half. No two states of a cell are the same
/// word.
struct Cell<'a>(&'a AtomicU64);

impl Cell<'_> {
    /// Only the process itself calls this, or the test while the process is stopped.
    fn set(&self, held: impl FnOnce(u64) -> u64) {
        let old = self.0.load(SeqCst);
        self.0.store(((old >> 32) + 1) << 32 | held(old & 0xffff_ffff), SeqCst);
    }
}

/// The memory of all processes at one moment, from two equal readings in a row. 0 if no two readings are
/// equal.
fn held(driver: &Shared, processes: usize) -> u64 {
    let read =
        || std::array::from_fn::<u64, 8, _>(|at| if at < processes { driver.get(FIRST + at) } else { 0 });
    let mut last = read();
    for _ in 0..100 {
        let now = read();
        if now == last {
            return now.iter().map(|word| word & 0xffff_ffff).sum();
        }
        last = now;
    }
    0
}

/// Takes and releases random sizes for `rounds` rounds, or until killed.
fn churn(files: Files, driver: &Shared, at: usize, of: usize, rounds: u64) {
    let book = open(files);
    let (mut own, mut state) = ([0u64; 16], 0x9e37 + at as u64 * 77);
    let cell = Cell(&driver.0[FIRST + at]);
    for _ in 0..rounds {
        let place = &mut own[(random(&mut state) % 16) as usize];
        if *place != 0 {
            cell.set(|held| held - *place); // the driver frees first
            book.release(0, *place * MIB);
            *place = 0;
            continue;
        }
        let size = random(&mut state) % 128 + 1;
        if book.reserve(0, size * MIB) {
            cell.set(|held| held + size);
            *place = size;
            driver.0[PEAK].fetch_max(held(driver, of), SeqCst);
            driver.add(GRANTS);
        }
    }
    for size in own {
        cell.set(|held| held - size);
        book.release(0, size * MIB);
    }
}

/// Case 8: eight processes race to the limit.
#[test]
fn case_8_racing_processes_never_pass_the_limit() {
    let container = Container::new(1024 * MIB);
    let (files, driver) = (container.files(), Shared::new(64));
    let children: Vec<_> = (0..8).map(|at| fork(|| churn(files, &driver, at, 8, 100_000))).collect();
    children.into_iter().for_each(|child| assert_eq!(wait(child), 0));
    let (peak, grants) = (driver.get(PEAK), driver.get(GRANTS));
    assert!(peak <= 1024, "{peak} MiB of 1024");
    assert!(peak > 900 && grants > 10_000, "no race: peak {peak} MiB, {grants} grants");
    assert_eq!(container.usage().devices[0].bytes, 0, "all was given back");
}

/// Cases 22 to 24: SIGKILL at any point causes no deadlock, no lost memory and no excess byte.
#[test]
fn cases_22_23_24_kills_at_random_points_leave_exact_books() {
    const LIMIT: u64 = 1024 * MIB;
    let container = Container::new(LIMIT);
    let (files, driver) = (container.files(), Shared::new(64));
    let spawn = |at: usize| fork(|| churn(files, &driver, at, 6, u64::MAX));
    let mut children: Vec<_> = (0..6).map(spawn).collect();
    let mut state = 42;
    for round in 0..1000 {
        std::thread::sleep(Duration::from_micros(random(&mut state) % 2000));
        let at = (random(&mut state) % 6) as usize;
        // While it is stopped, the books still count it. The driver's word can then be cleared before the
        // kernel ends the process.
        kill(children[at], libc::SIGSTOP);
        // SAFETY: a child of ours.
        unsafe { libc::waitpid(children[at], std::ptr::null_mut(), libc::WUNTRACED) };
        Cell(&driver.0[FIRST + at]).set(|_| 0);
        kill(children[at], libc::SIGKILL);
        wait(children[at]);
        let before = driver.get(GRANTS);
        until("the others to go on", || driver.get(GRANTS) > before);
        assert!(driver.get(PEAK) <= LIMIT / MIB, "round {round}: {} MiB", driver.get(PEAK));
        children[at] = spawn(at);
    }
    for child in children {
        kill(child, libc::SIGKILL);
        wait(child);
    }
    let book = open(files);
    assert!(book.reserve(0, LIMIT), "everything the dead held is there again: {:?}", container.usage());
    book.release(0, LIMIT);
    assert_eq!(container.usage().devices[0].bytes, 0);
}

/// A stopped process delays the others by at most about ten milliseconds, even if it holds the lock.
#[test]
fn a_stopped_process_blocks_nobody_for_long() {
    let container = Container::new(1024 * MIB);
    let (files, driver) = (container.files(), Shared::new(64));
    let mut slowest = Duration::ZERO;
    let book = open(files);
    let child = fork(|| churn(files, &driver, 0, 1, u64::MAX));
    until("the child to work", || driver.get(GRANTS) > 100);
    for _ in 0..200 {
        kill(child, libc::SIGSTOP);
        let start = Instant::now();
        if book.reserve(0, 900 * MIB) {
            book.release(0, 900 * MIB);
        }
        slowest = slowest.max(start.elapsed());
        kill(child, libc::SIGCONT);
        std::thread::sleep(Duration::from_micros(300));
    }
    kill(child, libc::SIGKILL);
    wait(child);
    assert!(slowest < Duration::from_secs(1), "{slowest:?}"); // 11 ms on a quiet machine
}

/// A refusal waits for dying processes and for the lock, in total no longer than ten milliseconds.
#[test]
fn a_refusal_comes_within_ten_milliseconds_whomever_it_waits_for() {
    let container = Container::new(1024 * MIB);
    let (files, held) = (container.files(), Shared::new(1));
    let hold = |closes: bool| {
        fork(|| {
            if open(files).reserve(0, 300 * MIB) {
                if closes {
                    // SAFETY: the child no longer uses any descriptor.
                    unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) };
                }
                held.add(0);
            }
            pause();
        })
    };
    // The process of slot 0 lives. The process of slot 1 runs without its lock, as if the kernel were ending
    // it.
    let mut children = vec![hold(false)];
    until("the first to hold memory", || held.get(0) == 1);
    children.push(hold(true));
    until("the second to hold memory", || held.get(0) == 2);
    let book = open(files);
    assert!(book.reserve(0, MIB));
    let usage = std::fs::File::options().write(true).open(container.folder.path().join("usage")).unwrap();
    for (what, holder) in [("one that dies", 0u32), ("the lock, too", 1)] {
        let place = offset_of!(UsageFile, header) + offset_of!(UsageHeader, lock);
        usage.write_all_at(&holder.to_ne_bytes(), place as u64).unwrap();
        let refuse = || {
            let start = Instant::now();
            assert!(!book.reserve(0, 900 * MIB));
            start.elapsed()
        };
        let fastest = (0..20).map(|_| refuse()).min().unwrap(); // longer ones come from a busy machine
        println!("waiting for {what}: {fastest:?}");
        assert!(
            (Duration::from_millis(8)..Duration::from_millis(10)).contains(&fastest),
            "waiting for {what}: {fastest:?}"
        );
    }
    for child in children {
        kill(child, libc::SIGKILL);
        wait(child);
    }
}

/// Many threads of one process share one slot.
#[test]
fn threads_of_a_process_share_its_slot() {
    let container = Container::new(1 << 30);
    let book = open(container.files());
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..20_000 {
                    assert!(book.reserve(0, MIB));
                    book.release(0, MIB);
                }
            });
        }
    });
    assert_eq!((container.usage().processes, book.used(0)), (1, 0));
}
