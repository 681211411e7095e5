//! The books under many real processes. A "driver" of one shared word per process says what is really held, so that
//! every test compares the books with something that they do not keep themselves.

#![allow(clippy::unwrap_used, reason = "a step that fails shall fail the test")]

use std::ffi::{CStr, CString};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use gpushare_intercept::book::Book;
use gpushare_region::{
    ComputePolicy, DeviceLimits, SLOTS, USAGE_LEN, Usage, empty_usage_header, encode_limits, read_usage,
};

const MIB: u64 = 1 << 20;
const UUID: [u8; 16] = [7; 16];

type Files = (&'static CStr, &'static CStr);

/// One container's two files.
struct Container {
    folder: tempfile::TempDir,
}

impl Container {
    fn new(memory_bytes: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let policy = ComputePolicy::None;
        let device = DeviceLimits {
            uuid: UUID,
            memory_bytes,
            cores_percent: 100,
            policy,
            priority: 5,
            ceiling_percent: 100,
        };
        std::fs::write(folder.path().join("limits"), encode_limits(&[device]).unwrap()).unwrap();
        let mut usage = std::fs::File::create(folder.path().join("usage")).unwrap();
        usage.write_all(&empty_usage_header()).unwrap();
        usage.set_len(USAGE_LEN as u64).unwrap();
        Self { folder }
    }

    fn files(&self) -> Files {
        let path = |name: &str| {
            let path = self.folder.path().join(name).into_os_string().into_encoded_bytes();
            &*Box::leak(CString::new(path).unwrap().into_boxed_c_str())
        };
        (path("limits"), path("usage"))
    }

    fn usage(&self) -> Usage {
        read_usage(&std::fs::read(self.folder.path().join("usage")).unwrap()).unwrap()
    }
}

fn open(files: Files) -> Book {
    Book::open(files.0, files.1)
}

/// Memory that forked processes share.
struct Shared(&'static [AtomicU64]);

impl Shared {
    fn new(words: usize) -> Self {
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping.
        let address = unsafe { libc::mmap(std::ptr::null_mut(), words * 8, protection, flags, -1, 0) };
        assert_ne!(address, libc::MAP_FAILED);
        // SAFETY: `words` zeroed words, never unmapped.
        Self(unsafe { std::slice::from_raw_parts(address.cast(), words) })
    }

    fn get(&self, at: usize) -> u64 {
        self.0[at].load(SeqCst)
    }

    fn add(&self, at: usize) {
        self.0[at].fetch_add(1, SeqCst);
    }
}

/// Runs `child` in a forked process. It may not allocate: other threads of the test may have held the heap's lock.
fn fork(child: impl FnOnce()) -> libc::pid_t {
    // SAFETY: the child calls only what needs no lock, and ends by _exit.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        // SAFETY: a failed test must not leave children behind.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
        child();
        // SAFETY: ends the child without running the parent's exit handlers.
        unsafe { libc::_exit(0) };
    }
    pid
}

fn kill(pid: libc::pid_t, signal: i32) {
    // SAFETY: a child of ours that was not waited for.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
}

fn wait(pid: libc::pid_t) -> i32 {
    let mut status = 0;
    // SAFETY: a child of ours.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    status
}

fn pause() {
    // SAFETY: waits for a signal.
    unsafe { libc::pause() };
}

fn until(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(20), "waited for {what}");
        std::thread::sleep(Duration::from_micros(100));
    }
}

fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// Words of the driver: peak in MiB, grants, then by process what it holds.
const PEAK: usize = 0;
const GRANTS: usize = 1;
const FIRST: usize = 2;

/// What one process holds in MiB, with a version above it: no two states of a cell are the same word.
struct Cell<'a>(&'a AtomicU64);

impl Cell<'_> {
    /// Only the process itself calls this, or the test while that one is stopped.
    fn set(&self, held: impl FnOnce(u64) -> u64) {
        let old = self.0.load(SeqCst);
        self.0.store(((old >> 32) + 1) << 32 | held(old & 0xffff_ffff), SeqCst);
    }
}

/// What all hold at one moment: two equal readings in a row. 0 when they never come.
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

/// Takes and gives back random sizes for `rounds` rounds, or until killed.
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

/// Cases 22 to 24: SIGKILL anywhere leaves no deadlock, no lost memory and no byte too many.
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
        // Stopped, it holds on in the books; the driver's word for it can then go before the kernel frees it.
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

/// Case 9: the slot of a dead process keeps nothing.
#[test]
fn case_9_slots_of_the_dead_are_used_again() {
    let container = Container::new(1024 * MIB);
    let (files, granted) = (container.files(), Shared::new(1));
    for round in 0..600u64 {
        wait(fork(|| {
            if open(files).reserve(0, 1000 * MIB) {
                granted.add(0);
            }
        }));
        assert_eq!(granted.get(0), round + 1, "{:?}", container.usage());
    }
}

/// Case 9 as reported: two processes exit, and a third still sees what they held.
#[test]
fn case_9_a_living_process_sees_the_memory_of_the_dead_come_back() {
    let container = Container::new(1024 * MIB);
    let files = container.files();
    let book = open(files);
    assert!(book.reserve(0, 24 * MIB));
    for _ in 0..2 {
        wait(fork(|| {
            open(files).reserve(0, 500 * MIB);
        }));
    }
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(book.used_by_living(0), 24 * MIB);
    assert!(book.reserve(0, 1000 * MIB));
}

/// Every slot taken: the next process is refused, never unlimited, until one of the others ends.
#[test]
fn the_257th_process_is_refused_and_never_unlimited() {
    let container = Container::new(1 << 40);
    let (files, granted) = (container.files(), Shared::new(1));
    let hold = || {
        if open(files).reserve(0, MIB) {
            granted.add(0);
        }
        pause();
    };
    let mut children: Vec<_> = (0..SLOTS).map(|_| fork(hold)).collect();
    until("256 processes to hold memory", || granted.get(0) == SLOTS as u64);
    let late = open(files);
    assert!(!late.reserve(0, MIB));
    assert_eq!((container.usage().processes, container.usage().no_slot), (256, 1));
    assert_eq!(late.used(0), 256 * MIB, "it still sees what the others hold");
    let one = children.swap_remove(100);
    kill(one, libc::SIGKILL);
    wait(one);
    assert!(late.reserve(0, MIB));
    for child in children {
        kill(child, libc::SIGKILL);
        wait(child);
    }
}

/// A stopped process costs the others some ten milliseconds at most, even one that holds the lock.
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
    assert!(slowest < Duration::from_millis(100), "{slowest:?}"); // 11 ms on a quiet machine
}

/// A program that closes every descriptor loses its lock, not its memory.
#[test]
fn a_process_that_closed_all_descriptors_still_counts() {
    let container = Container::new(1024 * MIB);
    let (files, ready) = (container.files(), Shared::new(1));
    let child = fork(|| {
        if open(files).reserve(0, 600 * MIB) {
            // SAFETY: the child uses no descriptor any more.
            unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) };
            ready.add(0);
        }
        pause();
    });
    until("the child", || ready.get(0) == 1);
    let book = open(files);
    assert!(!book.reserve(0, 600 * MIB), "the child still holds its memory");
    kill(child, libc::SIGKILL);
    wait(child);
    assert!(book.reserve(0, 600 * MIB));
}

/// A process that was taken for dead, as one of another pid namespace can be, moves to a new slot with all that it holds.
#[test]
fn a_process_whose_slot_was_taken_moves_to_another_with_what_it_holds() {
    let container = Container::new(1024 * MIB);
    let (files, step) = (container.files(), Shared::new(3));
    let child = fork(|| {
        let book = open(files);
        step.0[1].store(1 + u64::from(book.reserve(0, 600 * MIB)), SeqCst);
        // SAFETY: the child uses no descriptor of its own any more.
        unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) };
        step.add(0);
        while step.get(0) < 2 {
            std::hint::spin_loop();
        }
        let refused = !book.reserve(0, 500 * MIB) && book.used(0) == 900 * MIB;
        step.0[2].store(1 + u64::from(refused), SeqCst);
        book.release(0, 600 * MIB);
        book.release(0, 600 * MIB); // a mistake that may cost nobody anything
        step.add(0);
        pause();
    });
    until("the child", || step.get(0) == 1);
    let file = std::fs::File::options().write(true).open(container.folder.path().join("usage")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[0; 32], 128).unwrap(); // the slots that count: none
    let book = open(files);
    assert!(book.reserve(0, 300 * MIB), "it takes the first slot, which was the child's");
    step.add(0);
    until("the child again", || step.get(0) == 3);
    assert_eq!((step.get(1), step.get(2)), (2, 2), "granted first, then refused");
    assert_eq!((container.usage().processes, book.used(0)), (2, 300 * MIB));
    kill(child, libc::SIGKILL);
    wait(child);
}

/// The books of many threads stay exact when the slot is lost under them.
#[test]
fn threads_lose_nothing_when_their_slot_is_taken() {
    let container = Container::new(1 << 30);
    let book = open(container.files());
    let file = std::fs::File::options().write(true).open(container.folder.path().join("usage")).unwrap();
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..4u64)
            .map(|at| {
                let book = &book;
                scope.spawn(move || {
                    for _ in 0..20_000 {
                        assert!(book.reserve(0, MIB << at));
                        book.release(0, MIB << at);
                    }
                    book.add(0, MIB << at);
                })
            })
            .collect();
        while !workers.iter().all(std::thread::ScopedJoinHandle::is_finished) {
            std::os::unix::fs::FileExt::write_all_at(&file, &[0; 32], 128).unwrap();
            std::thread::sleep(Duration::from_micros(200));
        }
    });
    assert!(book.reserve(0, MIB));
    assert_eq!((container.usage().processes, book.used(0)), (1, 16 * MIB));
    drop(file); // not earlier: it takes the record locks with it
}

/// The same, and another file takes the descriptor's number.
#[test]
fn a_descriptor_that_the_program_reused_is_not_touched() {
    let container = Container::new(1024 * MIB);
    let (files, outcome) = (container.files(), Shared::new(1));
    let other = tempfile::tempfile().unwrap();
    let other = other.as_raw_fd();
    wait(fork(|| {
        let book = open(files);
        let first = book.reserve(0, 100 * MIB);
        for fd in (3..64).filter(|fd| *fd != other) {
            // SAFETY: replaces whatever descriptor stands there.
            unsafe { libc::dup2(other, fd) };
        }
        let refused = !book.reserve(0, 1000 * MIB); // sweeps, and so looks at the descriptor
        let granted = book.reserve(0, 900 * MIB);
        outcome.0[0].store(u64::from(first && refused && granted) + 1, SeqCst);
    }));
    assert_eq!(outcome.get(0), 2);
}

/// `exec` keeps pid and start time; what the process held before is gone with its old image.
#[test]
fn a_process_that_execs_does_not_pay_for_its_former_life() {
    let container = Container::new(1024 * MIB);
    let files = container.files();
    let test = CString::new(std::env::current_exe().unwrap().into_os_string().into_encoded_bytes()).unwrap();
    let arguments = [&*test, c"--ignored", c"--exact", c"after_exec"].map(CStr::as_ptr);
    let arguments = [&arguments[..], &[std::ptr::null()]].concat();
    let variable =
        CString::new(format!("GPUSHARE_TEST_FOLDER={}", container.folder.path().display())).unwrap();
    let environment = [variable.as_ptr(), std::ptr::null()];
    let bystander = open(files);
    let child = fork(|| {
        if open(files).reserve(0, 1000 * MIB) {
            // SAFETY: three lists of C strings, each ended by null.
            unsafe { libc::execve(test.as_ptr(), arguments.as_ptr(), environment.as_ptr()) };
        }
        // SAFETY: reached only when a step above failed.
        unsafe { libc::_exit(9) };
    });
    assert_eq!(wait(child), 0, "the second life was refused");
    assert_eq!(container.usage().reclaimed, 1, "by the process itself");
    assert!(bystander.reserve(0, 1000 * MIB));
}

#[test]
#[ignore = "second half of a_process_that_execs_does_not_pay_for_its_former_life, which runs it"]
fn after_exec() {
    let Some(folder) = std::env::var_os("GPUSHARE_TEST_FOLDER") else { return };
    let path = |name: &str| {
        let path = std::path::Path::new(&folder).join(name).into_os_string().into_encoded_bytes();
        &*Box::leak(CString::new(path).unwrap().into_boxed_c_str())
    };
    let book = open((path("limits"), path("usage")));
    assert!(book.reserve(0, MIB));
    assert_eq!(book.used(0), MIB, "others see nothing of the former life either");
    assert!(book.reserve(0, 999 * MIB));
}

/// G8: what is missing, short or foreign grants nothing, and harms nobody.
#[test]
fn files_that_are_missing_short_or_foreign_grant_nothing() {
    type Harm<'a> = (&'a str, Option<Vec<u8>>);
    let short = std::fs::read(Container::new(1 << 30).folder.path().join("limits")).unwrap()[..100].to_vec();
    let harms: [Harm<'_>; 6] = [
        ("limits", None),
        ("limits", Some(short)),
        ("limits", Some(vec![b'x'; 4096])),
        ("usage", None),
        ("usage", Some(empty_usage_header().to_vec())),
        ("usage", Some(vec![0; USAGE_LEN])),
    ];
    for (index, (name, bytes)) in harms.iter().enumerate() {
        let container = Container::new(1 << 30);
        let path = container.folder.path().join(name);
        match bytes {
            Some(bytes) => std::fs::write(path, bytes).unwrap(),
            None => std::fs::remove_file(path).unwrap(),
        }
        let book = open(container.files());
        assert!(!book.reserve(0, 1), "harm {index} to {name}");
        book.release(0, 5);
        assert_eq!(book.used(0), 0, "harm {index} to {name}");
    }
}

/// Case 16: a device is found by its UUID, and one that is not granted has no line.
#[test]
fn case_16_devices_are_matched_by_uuid() {
    let container = Container::new(1 << 30);
    let book = open(container.files());
    assert_eq!((book.device(&UUID), book.device(&[8; 16])), (Some(0), None));
    for line in [1, 15, 16, 255] {
        assert!(!book.reserve(line, 1), "line {line}");
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
