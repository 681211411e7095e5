//! Slot owners, and the slots of processes that end, lose their lock or become another program.

use std::ffi::{CStr, CString};
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use gpushare_region::SLOTS;

use crate::container::{Container, MIB, open};
use crate::process::{Shared, fork, kill, pause, until, wait};

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

/// Case 9 as reported: two processes exit, and a third still sees their memory.
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

/// If every slot is taken, the next process is refused (never unlimited) until another process ends.
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

/// A program that closes every descriptor loses its lock but not its memory.
#[test]
fn a_process_that_closed_all_descriptors_still_counts() {
    let container = Container::new(1024 * MIB);
    let (files, ready) = (container.files(), Shared::new(1));
    let child = fork(|| {
        if open(files).reserve(0, 600 * MIB) {
            // SAFETY: the child no longer uses any descriptor.
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

/// A process that was wrongly considered dead moves to a new slot with all its memory. This can happen to a
/// process of another pid namespace.
#[test]
fn a_process_whose_slot_was_taken_moves_to_another_with_what_it_holds() {
    let container = Container::new(1024 * MIB);
    let (files, step) = (container.files(), Shared::new(3));
    let child = fork(|| {
        let book = open(files);
        step.0[1].store(1 + u64::from(book.reserve(0, 600 * MIB)), SeqCst);
        // SAFETY: the child no longer uses any descriptor of its own.
        unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) };
        step.add(0);
        while step.get(0) < 2 {
            std::hint::spin_loop();
        }
        let refused = !book.reserve(0, 500 * MIB) && book.used(0) == 900 * MIB;
        step.0[2].store(1 + u64::from(refused), SeqCst);
        book.release(0, 600 * MIB);
        book.release(0, 600 * MIB); // one release too many, which must not affect any process
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

/// The books of many threads stay exact when their process loses its slot.
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
    drop(file); // not earlier: closing it drops the record locks
}

/// Another file takes the number of the usage file's descriptor.
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
            // SAFETY: replaces any descriptor with this number.
            unsafe { libc::dup2(other, fd) };
        }
        let refused = !book.reserve(0, 1000 * MIB); // sweeps, and so checks the descriptor
        let granted = book.reserve(0, 900 * MIB);
        outcome.0[0].store(u64::from(first && refused && granted) + 1, SeqCst);
    }));
    assert_eq!(outcome.get(0), 2);
}

/// `exec` keeps pid and start time. The memory that the process held before ended with its old image.
#[test]
fn a_process_that_execs_does_not_pay_for_its_former_life() {
    let container = Container::new(1024 * MIB);
    let files = container.files();
    let test = CString::new(std::env::current_exe().unwrap().into_os_string().into_encoded_bytes()).unwrap();
    let arguments = [&*test, c"--ignored", c"--exact", c"slots::after_exec"].map(CStr::as_ptr);
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
        // SAFETY: reached only if a step above failed.
        unsafe { libc::_exit(9) };
    });
    assert_eq!(wait(child), 0, "the second life was refused");
    assert_eq!(container.usage().reclaimed, 1, "by the process itself");
    assert!(bystander.reserve(0, 1000 * MIB));
}

/// A process becomes a program without CUDA, which never reads the books. Other processes reclaim the memory
/// that it held before.
#[test]
fn a_process_that_execs_into_another_program_costs_nobody_anything() {
    let container = Container::new(1024 * MIB);
    let (files, ready) = (container.files(), Shared::new(1));
    let sleep = [c"/bin/sleep", c"60"].map(CStr::as_ptr);
    let arguments = [sleep[0], sleep[1], std::ptr::null()];
    let child = fork(|| {
        if open(files).reserve(0, 1000 * MIB) {
            ready.add(0);
            // SAFETY: two lists of C strings, each ended by null.
            unsafe { libc::execv(sleep[0], arguments.as_ptr()) };
        }
    });
    until("the child to hold memory", || ready.get(0) == 1);
    let book = open(files);
    until("its memory to come back", || book.reserve(0, 1000 * MIB));
    assert_eq!((container.usage().processes, container.usage().reclaimed), (1, 1));
    kill(child, libc::SIGKILL);
    wait(child);
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
