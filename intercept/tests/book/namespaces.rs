//! Processes of other pid namespaces: a reader in another namespace would mistake their pids for other
//! processes.

use std::ffi::CStr;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering::SeqCst;

use gpushare_region::{lock_byte, processes};

use crate::container::{Container, MIB, open};
use crate::process::{Shared, fork, kill, pause, until, wait};

/// Case 26: `kill(pid, 0)` across pid namespaces reads as dead.
#[test]
#[ignore = "needs root: makes a pid namespace"]
fn case_26_a_process_of_another_pid_namespace_is_not_taken_for_dead() {
    let container = Container::new(1024 * MIB);
    let (files, ready) = (container.files(), Shared::new(1));
    let between = fork(|| {
        // SAFETY: the next child is the first process of a new namespace.
        assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWPID) }, 0);
        let inner = fork(|| {
            // Its pid there is 1. Here pid 1 is a process that lives as long as the machine.
            let first = std::process::id() == 1;
            ready.0[0].store(1 + u64::from(first && open(files).reserve(0, 600 * MIB)), SeqCst);
            pause();
        });
        wait(inner);
    });
    until("the inner process", || ready.get(0) > 0);
    assert_eq!(ready.get(0), 2);
    let book = open(files);
    for _ in 0..20 {
        assert!(!book.reserve(0, 600 * MIB), "its memory is still held");
    }
    kill(between, libc::SIGKILL); // the inner one ends with it
    wait(between);
    until("its memory to come back", || book.reserve(0, 600 * MIB));
}

/// Mounts the file system `kind`, or changes an existing mount.
fn mount(kind: &CStr, target: &CStr, flags: libc::c_ulong) {
    // SAFETY: all strings end in 0, and no data is passed.
    let done = unsafe { libc::mount(kind.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, std::ptr::null()) };
    assert_eq!(done, 0, "{target:?}");
}

/// The containers of a pod share their books, and each numbers its processes from 1.
#[test]
#[ignore = "needs root: makes a pid namespace"]
fn a_process_of_another_pid_namespace_counts_and_is_listed_to_its_own_alone() {
    let container = Container::new(1024 * MIB);
    let (files, words) = (container.files(), Shared::new(1));
    let between = fork(|| {
        // SAFETY: the next child is the first process of a new namespace.
        assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWPID) }, 0);
        let inner = fork(|| {
            // SAFETY: the mounts of this process are its own from here.
            assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNS) }, 0);
            mount(c"none", c"/", libc::MS_REC | libc::MS_PRIVATE);
            mount(c"proc", c"/proc", 0);
            let book = open(files);
            let held = book.reserve(0, 600 * MIB) && book.is_own_pid(1);
            words.0[0].store(1 + u64::from(held), SeqCst);
            pause();
        });
        wait(inner);
    });
    until("the inner process", || words.get(0) > 0);
    assert_eq!(words.get(0), 2);
    let book = open(files);
    let mut listed = Vec::new();
    book.each_living(0, |pid, bytes| listed.push((pid, bytes)));
    assert_eq!((listed, book.is_own_pid(1)), (vec![], false));
    assert_eq!(book.held_by_living(0), 600 * MIB);
    assert!(!book.reserve(0, 600 * MIB) && book.reserve(0, 400 * MIB));
    kill(between, libc::SIGKILL); // the inner one ends with it
    wait(between);
}

/// Case 27: the host mistakes a container's process for another one, since it guesses which process is new on
/// the GPU.
#[test]
#[ignore = "needs root: makes a pid namespace"]
fn case_27_the_lock_of_a_slot_names_its_owner_by_the_hosts_pid() {
    let container = Container::new(1024 * MIB);
    let (files, words) = (container.files(), Shared::new(2));
    let between = fork(|| {
        // SAFETY: the next child is the first process of a new namespace.
        assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWPID) }, 0);
        let inner = fork(|| {
            words.0[1].store(1 + u64::from(open(files).reserve(0, MIB)), SeqCst);
            pause();
        });
        words.0[0].store(u64::from(inner.unsigned_abs()), SeqCst);
        wait(inner);
    });
    until("the inner process", || words.get(1) > 0 && words.get(0) > 0);
    assert_eq!(words.get(1), 2);
    let bytes = std::fs::read(container.folder.path().join("usage")).unwrap();
    let slot = processes(&bytes).unwrap().next().unwrap();
    assert_eq!(slot.pid, 1, "by its own word, which is the tenant's to write");
    let file =
        std::fs::File::options().read(true).write(true).open(container.folder.path().join("usage")).unwrap();
    let owner = || {
        let mut lock = libc::flock {
            l_type: i16::try_from(libc::F_WRLCK).unwrap(),
            l_whence: i16::try_from(libc::SEEK_SET).unwrap(),
            l_start: lock_byte(slot.slot).cast_signed(),
            l_len: 1,
            l_pid: 0,
        };
        // SAFETY: an open file, and a structure that the kernel reads and writes.
        assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETLK, &raw mut lock) }, 0);
        (i32::from(lock.l_type) != libc::F_UNLCK).then_some(u64::from(lock.l_pid.unsigned_abs()))
    };
    assert_eq!(owner(), Some(words.get(0)));
    kill(between, libc::SIGKILL); // the inner one ends with it
    wait(between);
    until("the lock to go with it", || owner().is_none());
}
