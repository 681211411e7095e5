//! Programs that confine themselves, change their user, start by the hundreds or end in any order. The
//! library must not harm them or give them more than their share.

use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use gpushare_intercept::table::{Entry, Kind, Table};

use crate::container::{Container, Files, MIB, open};
use crate::process::{Shared, fork, kill, pause, random, until, wait};

/// From here on the kernel returns `errno` for system call `number`.
fn forbid(number: libc::c_long, errno: i32) {
    let statement = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut filter = [
        statement(0x20, 0, 0, 0),                                           // load the number
        statement(0x15, 0, 1, u32::try_from(number).unwrap()),              // is it this one?
        statement(0x06, 0, 0, 0x0005_0000 | u32::try_from(errno).unwrap()), // SECCOMP_RET_ERRNO
        statement(0x06, 0, 0, 0x7fff_0000),                                 // SECCOMP_RET_ALLOW
    ];
    let program = libc::sock_fprog { len: 4, filter: filter.as_mut_ptr() };
    // SAFETY: sets a flag of the child.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
    // SAFETY: a filter of four statements.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_SECCOMP, 2, &raw const program) }, 0);
}

/// Every system call of the library may be forbidden, before or after the books were opened. A request that
/// cannot be charged is refused, granted memory stays counted, and the program continues.
#[test]
fn a_confined_program_is_refused_at_worst() {
    const CALLS: [libc::c_long; 9] = [
        libc::SYS_openat,
        libc::SYS_read,
        libc::SYS_close,
        libc::SYS_fstat,
        libc::SYS_mmap,
        libc::SYS_madvise,
        libc::SYS_fcntl,
        libc::SYS_readlink,
        libc::SYS_futex,
    ];
    for number in CALLS {
        for errno in [libc::EPERM, libc::ENOSYS] {
            for moment in 0..3 {
                let container = Container::new(1024 * MIB);
                let (files, outcome) = (container.files(), Shared::new(2));
                let neighbour = open(files);
                assert!(neighbour.reserve(0, 24 * MIB));
                let status = wait(fork(|| confined(files, &outcome, number, errno, moment)));
                let what = format!("call {number} forbidden with {errno} at moment {moment}");
                assert_eq!((status, outcome.get(0)), (0, 1), "{what}: it did not come to its end");
                let granted = outcome.get(1);
                assert!(granted <= 1000, "{what}: {granted} MiB");
                assert!(
                    moment < 2 || granted == 1000,
                    "{what}: what is forbidden after all is done harms nobody"
                );
                until("its memory to come back", || neighbour.reserve(0, 1000 * MIB));
            }
        }
    }
}

/// Returns the number of MiB granted.
fn confined(files: Files, outcome: &Shared, number: libc::c_long, errno: i32, moment: u32) {
    let step = |at: u32| {
        if at == moment {
            forbid(number, errno);
        }
    };
    step(0);
    let book = open(files);
    step(1);
    for _ in 0..10 {
        if book.reserve(0, 100 * MIB) {
            outcome.0[1].fetch_add(100, SeqCst);
        }
    }
    step(2);
    if outcome.get(1) > 0 {
        book.release(0, 100 * MIB);
        if !book.reserve(0, 100 * MIB) {
            outcome.0[1].fetch_sub(100, SeqCst);
        }
    }
    if book.reserve(0, 1000 * MIB) {
        outcome.0[1].fetch_add(1000, SeqCst);
    }
    book.used_by_living(0);
    let table = Table::default();
    for key in 0..1000 {
        let entry = Entry { key, size: 1, extra: 0, kind: Kind::Linear, device: 0, context: 0 };
        let _ = table.put(entry); // fails if mmap is forbidden
        table.take(Kind::Linear, key / 2);
    }
    outcome.add(0);
}

/// A program changes its user, as setuid programs do, and must not be traceable. Other processes still notice
/// its end.
#[test]
fn programs_of_other_users_count_like_all_others() {
    let container = Container::new(1024 * MIB);
    for (name, mode) in [("", 0o755), ("usage", 0o666), ("limits", 0o444)] {
        let path = container.folder.path().join(name);
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }
    let (files, ready) = (container.files(), Shared::new(2));
    let become_user = |user: u32| {
        // SAFETY: the child has one thread, which opens nothing but the books.
        assert_eq!(unsafe { libc::setresuid(user, user, user) }, 0);
        // SAFETY: sets a flag of the child.
        assert_eq!(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0) }, 0);
    };
    let holder = fork(|| {
        become_user(65533);
        ready.0[0].store(1 + u64::from(open(files).reserve(0, 600 * MIB)), SeqCst);
        pause();
    });
    until("the holder", || ready.get(0) > 0);
    assert_eq!(ready.get(0), 2, "the holder was refused");
    let other = fork(|| {
        become_user(65534);
        let book = open(files);
        let refused = !book.reserve(0, 600 * MIB);
        ready.0[1].store(1 + u64::from(refused), SeqCst);
        while ready.get(0) < 3 {
            std::hint::spin_loop();
        }
        let start = Instant::now();
        while !book.reserve(0, 600 * MIB) && start.elapsed() < Duration::from_secs(10) {
            std::hint::spin_loop();
        }
        ready.0[1].store(3 + u64::from(book.used(0) == 600 * MIB), SeqCst);
        pause();
    });
    until("the other", || ready.get(1) > 0);
    assert_eq!(ready.get(1), 2, "the holder's memory was not counted");
    kill(holder, libc::SIGKILL);
    wait(holder);
    ready.0[0].store(3, SeqCst);
    until("the other again", || ready.get(1) > 2);
    assert_eq!(ready.get(1), 4, "the dead holder's memory was not found");
    kill(other, libc::SIGKILL);
    wait(other);
}

/// A user without write permission for the books is granted nothing.
#[test]
fn books_that_cannot_be_written_grant_nothing() {
    let container = Container::new(1024 * MIB);
    for (name, mode) in [("", 0o755), ("usage", 0o444)] {
        let path = container.folder.path().join(name);
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }
    let (files, outcome) = (container.files(), Shared::new(1));
    let child = fork(|| {
        // SAFETY: the child has one thread, which opens nothing but the books.
        assert_eq!(unsafe { libc::setresuid(65534, 65534, 65534) }, 0);
        let book = open(files);
        let granted = book.reserve(0, MIB);
        book.release(0, MIB);
        outcome.0[0].store(1 + u64::from(granted), SeqCst);
    });
    assert_eq!((wait(child), outcome.get(0)), (0, 1));
}

/// Case 25: 200 to 300 processes need about a minute to start.
#[test]
fn case_25_a_process_starts_as_fast_beside_250_others_as_alone() {
    let container = Container::new(1 << 40);
    let (files, counts) = (container.files(), Shared::new(2));
    // Not the median: the machine also runs other tests.
    let fast = |rounds: u64| {
        let mut all: Vec<_> = (0..rounds)
            .map(|_| {
                wait(fork(|| {
                    let start = Instant::now();
                    let book = open(files);
                    let granted = book.reserve(0, MIB);
                    let nanoseconds = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
                    counts.0[1].store(if granted { nanoseconds } else { u64::MAX }, SeqCst);
                }));
                counts.get(1)
            })
            .collect();
        all.sort_unstable();
        Duration::from_nanos(all[all.len() / 10])
    };
    let alone = fast(100);
    let hold = || {
        if open(files).reserve(0, MIB) {
            counts.add(0);
        }
        pause();
    };
    let children: Vec<_> = (0..250).map(|_| fork(hold)).collect();
    until("250 processes to hold memory", || counts.get(0) == 250);
    let beside = fast(300);
    println!("start: {alone:?} alone, {beside:?} beside 250 others");
    // A start that checks every process takes fifteen times as long.
    assert!(beside < alone * 5 + Duration::from_micros(100), "{alone:?} alone, {beside:?} beside 250 others");
    for child in children {
        kill(child, libc::SIGKILL);
        wait(child);
    }
}

/// Thousands of short-lived processes leave nothing behind.
#[test]
fn three_thousand_short_processes_leave_no_trace() {
    let container = Container::new(1024 * MIB);
    let (files, granted) = (container.files(), Shared::new(1));
    for _ in 0..3000 / 8 {
        let live = |_| {
            fork(|| {
                let book = open(files);
                if book.reserve(0, 100 * MIB) {
                    granted.add(0);
                }
            })
        };
        let children: Vec<_> = (0..8).map(live).collect();
        children.into_iter().for_each(|child| assert_eq!(wait(child), 0));
    }
    assert_eq!(granted.get(0), 3000);
    let book = open(files);
    assert!(book.reserve(0, 1024 * MIB));
    assert_eq!(container.usage().processes, 1);
}

/// Programs that start other programs with vfork and exec, as compilers and shells do.
#[test]
fn programs_started_by_vfork_and_exec_take_nothing_from_their_parent() {
    let container = Container::new(1024 * MIB);
    let files = container.files();
    let book = open(files);
    assert!(book.reserve(0, 600 * MIB));
    for _ in 0..50 {
        // The standard library uses posix_spawn, and so vfork, if it has nothing to change in the child
        // first.
        assert!(std::process::Command::new("/bin/true").status().unwrap().success());
        let outcome = Shared::new(1);
        wait(fork(|| outcome.0[0].store(1 + u64::from(open(files).reserve(0, 600 * MIB)), SeqCst)));
        assert_eq!(outcome.get(0), 1, "the parent's lock was lost");
    }
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(book.used_by_living(0), 600 * MIB);
}

/// Regardless of the order in which processes end, the books keep exactly the memory of the others.
#[test]
fn processes_that_end_in_any_order_leave_the_others_sums() {
    const COUNT: usize = 20;
    let container = Container::new(1 << 30);
    let (files, ready) = (container.files(), Shared::new(1 + COUNT));
    let mut children: Vec<_> = (0..COUNT)
        .map(|at| {
            let child = fork(|| {
                if open(files).reserve(0, (at as u64 + 1) * MIB) {
                    ready.add(0);
                }
                while ready.get(1 + at) == 0 {
                    std::thread::sleep(Duration::from_micros(200));
                }
            });
            (at, child)
        })
        .collect();
    until("all to hold memory", || ready.get(0) == COUNT as u64);
    let (book, mut state) = (open(files), 99);
    assert!(book.reserve(0, 1));
    while !children.is_empty() {
        let index = usize::try_from(random(&mut state)).unwrap() % children.len();
        let (at, child) = children.swap_remove(index);
        if random(&mut state).is_multiple_of(2) {
            kill(child, libc::SIGKILL);
        } else {
            ready.add(1 + at); // ends by itself
        }
        wait(child);
        let left = children.iter().map(|(at, _)| (*at as u64 + 1) * MIB).sum::<u64>();
        until("the sum to follow", || book.used_by_living(0) == left + 1);
    }
    assert_eq!(container.usage().processes, 1);
}

/// Case 21: a refusal is an answer, not a reason to end a process.
#[test]
fn case_21_a_refusal_ends_nobody() {
    let container = Container::new(1024 * MIB);
    let (files, refused) = (container.files(), Shared::new(1));
    let children: [_; 4] = std::array::from_fn(|_| {
        fork(|| {
            let book = open(files);
            for _ in 0..500 {
                if !book.reserve(0, 400 * MIB) {
                    refused.add(0);
                    continue;
                }
                std::thread::sleep(Duration::from_micros(100));
                book.release(0, 400 * MIB);
            }
        })
    });
    assert_eq!(children.map(wait), [0; 4], "exit codes and signals");
    assert!(refused.get(0) > 0, "nobody met the limit");
}

/// Case 10: an allocation and its free cost more as more allocations are live.
#[test]
fn case_10_a_look_up_costs_the_same_whatever_is_live() {
    let entry = |key: u64| Entry { key, size: 1, extra: 0, kind: Kind::Linear, device: 0, context: 0 };
    let address = |index: u64| 0x7f00_0000_0000 + index * 0x20_0000;
    let mut probes = [0u32; 2];
    for (live, probes) in [100u64, 50_000].into_iter().zip(&mut probes) {
        let table = Table::default();
        (0..live).for_each(|index| assert!(table.put(entry(address(index))).is_ok()));
        let best = (0..20).map(|_| {
            let start = Instant::now();
            for index in 0..1000 {
                let _ = table.put(entry(address(live + index)));
                assert!(table.take(Kind::Linear, address(live + index)).is_some());
            }
            start.elapsed()
        });
        *probes = u32::try_from(best.min().unwrap().as_nanos()).unwrap() / 1000;
    }
    assert!(probes[1] < 8 * probes[0] + 500, "{probes:?} ns per pair with 100 and 50,000 live");
}

/// No value that the tenant writes to a field may end a process whose library reads it.
#[test]
fn books_full_of_anything_harm_nobody() {
    let container = Container::new(1024 * MIB);
    let path = container.folder.path().join("usage");
    let (files, outcome) = (container.files(), Shared::new(1));
    let mut state = 5;
    for round in 0..200 {
        let mut bytes = std::fs::read(&path).unwrap();
        // Header and version stay: an unknown file grants nothing at all.
        bytes[64..].iter_mut().for_each(|byte| *byte = random(&mut state).to_le_bytes()[0]);
        if round % 3 == 0 {
            bytes[64..].fill(0xff);
        }
        let write = || {
            let file = std::fs::File::options().write(true).open(&path).unwrap();
            std::os::unix::fs::FileExt::write_all_at(&file, &bytes, 0).unwrap();
        };
        write();
        outcome.0[0].store(0, SeqCst);
        let child = fork(|| {
            let book = open(files);
            for size in 1..20 {
                book.reserve(0, size * MIB);
                book.used_by_living(0);
                book.release(0, size * MIB);
            }
            outcome.add(0);
        });
        write(); // and while it works
        assert_eq!((wait(child), outcome.get(0)), (0, 1), "round {round}");
    }
}
