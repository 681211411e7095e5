//! Processes that are killed while they write, readers that run during writes, and a full disk.

use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;

/// A helper process, not a test of its own: it makes and ends leases without pause, and prints each step
/// before and after. It stops after `QUOTA_KILL_MOST` leases, if that is set.
#[test]
fn helper_process_reserves_and_releases() {
    let (Ok(state), Ok(name)) = (std::env::var("QUOTA_KILL_STATE"), std::env::var("QUOTA_KILL_NAME")) else {
        return;
    };
    let store = Store::open(Path::new(&state)).unwrap();
    // A holder that lives on, so that the sweep does not remove the leases.
    let parent = Holder::init(i32::try_from(std::os::unix::process::parent_id()).unwrap()).unwrap();
    let most = std::env::var("QUOTA_KILL_MOST").map_or(u64::MAX, |most| most.parse().unwrap());
    for number in 0..most {
        let container = format!("{name}-{number}");
        // Small, so that one process does not fill the node before the other starts.
        let lease = keep(&store, &container, &["GPUSHARE_MEMORY=16MiB"], &parent).unwrap();
        println!("\n+{}", lease.id);
        // Every second lease stays.
        if number % 2 == 0 {
            println!("\n?{}", lease.id);
            store.release(lease.id, &lease.member.key, ReleaseReason::Ended).unwrap();
            println!("\n-{}", lease.id);
        }
    }
}

/// The output of a killed process: leases that must exist, and a lease whose state is unknown.
#[derive(Default)]
struct Said {
    standing: Vec<i64>,
    open: Option<i64>,
}

impl Said {
    fn hear(&mut self, line: &str) {
        let id = || line.get(1..).and_then(|id| id.parse::<i64>().ok());
        match (line.chars().next(), id()) {
            (Some('+'), Some(id)) => self.standing.push(id),
            (Some('?'), Some(id)) => {
                self.standing.retain(|known| *known != id);
                self.open = Some(id);
            }
            (Some('-'), Some(_)) => self.open = None,
            _ => {}
        }
    }
}

/// Prepares the helper command, under `name`.
fn helper(command: &mut Command, state: &TempDir, name: &str) {
    command
        .args(["--exact", "store::tests::kills::helper_process_reserves_and_releases", "--nocapture"])
        .env("QUOTA_KILL_STATE", state.path())
        .env("QUOTA_KILL_NAME", name)
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
}

/// `GPUSHARE_KILLS` rounds, 60 by default: two processes write, and one of them is killed at any point.
#[test]
fn a_process_that_is_killed_loses_no_lease_and_leaves_none_behind() {
    let rounds = std::env::var("GPUSHARE_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(60_u64);
    let (folder, store) = open();
    let start = |name: String| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        helper(&mut command, &folder, &name);
        command.spawn().unwrap()
    };
    for round in 0..rounds {
        let mut children = [0, 1].map(|number| start(format!("r{round}-{number}")));
        let mut said = [(); 2].map(|()| Said::default());
        let mut outputs = children.each_mut().map(|child| BufReader::new(child.stdout.take().unwrap()));
        for (said, output) in said.iter_mut().zip(&mut outputs) {
            let mut line = String::new();
            while !line.starts_with('+') {
                line.clear();
                assert!(output.read_line(&mut line).unwrap() > 0, "round {round}: it ended by itself");
                said.hear(line.trim_end());
            }
        }
        thread::sleep(Duration::from_micros(round * 37 % 1500));
        for child in &mut children {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        for (said, output) in said.iter_mut().zip(&mut outputs) {
            let mut text = String::new();
            output.read_to_string(&mut text).unwrap();
            // Ignore the line that the kill cut off.
            let whole = text.rfind('\n').map_or("", |end| &text[..end]);
            whole.lines().for_each(|line| said.hear(line));
        }
        let standing: Vec<i64> = store.leases().unwrap().iter().map(|lease| lease.id).collect();
        let mut expected: Vec<i64> = said.iter().flat_map(|said| said.standing.iter().copied()).collect();
        for id in &expected {
            assert!(standing.contains(id), "round {round}: lease {id} is lost");
        }
        expected.extend(said.iter().filter_map(|said| said.open));
        let unknown = standing.iter().filter(|id| !expected.contains(id)).count();
        // Each process may have made one lease that it did not print.
        assert!(unknown <= 2, "round {round}: {unknown} leases that nobody made");
        assert_eq!(
            store.loads().unwrap().values().map(|load| load.leases).sum::<u64>(),
            standing.len() as u64
        );
        for lease in store.leases().unwrap() {
            store.release(lease.id, &lease.member.key, ReleaseReason::Swept).unwrap();
        }
    }
}

/// Tries each system call by which a turn touches the files: the process is killed when it makes the call.
#[test]
#[ignore = "needs strace: kills processes at each of their calls"]
fn who_is_killed_at_any_call_leaves_a_whole_ledger() {
    let (folder, store) = open();
    let mut kills = 0;
    for call in ["openat", "flock", "statx", "read", "pwrite64", "fallocate", "renameat2", "write", "close"] {
        for number in 1.. {
            let mut strace = Command::new("strace");
            strace.args(["-f", "-qq", "-o", "/dev/null", "-e", &format!("trace={call}")]);
            strace.args(["-e", &format!("inject={call}:signal=KILL:when={number}")]);
            strace.arg(std::env::current_exe().unwrap());
            helper(strace.env("QUOTA_KILL_MOST", "3"), &folder, &format!("{call}-{number}"));
            let output = strace.output().expect("strace starts");
            let mut said = Said::default();
            let text = String::from_utf8_lossy(&output.stdout);
            text[..text.rfind('\n').unwrap_or(0)].lines().for_each(|line| said.hear(line));
            let when = format!("{call} number {number}");
            let standing: Vec<i64> = store.leases().unwrap().iter().map(|lease| lease.id).collect();
            for id in &said.standing {
                assert!(standing.contains(id), "{when}: lease {id} is lost");
            }
            let known = |id: &&i64| said.standing.contains(id) || said.open.as_ref() == Some(*id);
            let unknown = standing.iter().filter(|id| !known(id)).count();
            assert!(unknown <= 1, "{when}: {unknown} leases that nobody made");
            // The next process gets the turn, and has room.
            let next = keep(&store, "next", &["GPUSHARE_MEMORY=1GiB"], &here()).unwrap();
            store.release(next.id, &next.member.key, ReleaseReason::Ended).unwrap();
            for lease in store.leases().unwrap() {
                store.release(lease.id, &lease.member.key, ReleaseReason::Swept).unwrap();
            }
            if output.status.success() {
                break;
            }
            kills += 1;
        }
    }
    println!("{kills} kills");
    assert!(kills > 120, "{kills}");
}

/// The second file at any point of a write, opened by its name, or by a reader when it was still the first.
#[test]
fn a_text_that_was_not_put_in_force_does_not_count() {
    let (folder, store) = open();
    let grant = |name: &str| keep(&store, name, &["GPUSHARE_MEMORY=1GiB"], &here()).unwrap();
    let first = grant("a");
    let early = || fs::File::open(file(&folder).with_extension("spare")).unwrap();
    let second = grant("b");
    let old = fs::read(file(&folder).with_extension("spare")).unwrap();
    let third = grant("c");
    let next = fs::read(file(&folder)).unwrap();
    store.release(third.id, &third.member.key, ReleaseReason::Ended).unwrap();
    for end in 0..=next.len() {
        let written = [&next[..end], &old[end.min(old.len())..]].concat();
        fs::write(file(&folder).with_extension("spare"), written).unwrap();
        assert!(store.ledger.in_force(&early()).unwrap().is_none());
        assert_eq!(store.leases().unwrap(), [first.clone(), second.clone()]);
    }
    let fourth = grant("d");
    assert_eq!(store.leases().unwrap(), [first, second, fourth]);
}

#[test]
fn who_locked_a_file_that_was_deleted_has_no_turn() {
    let folder = tempfile::tempdir().unwrap();
    let first = Turn::take(folder.path()).unwrap();
    thread::scope(|scope| {
        let second = scope.spawn(|| Turn::take(folder.path()).unwrap());
        thread::sleep(Duration::from_millis(100));
        fs::remove_file(folder.path().join("quota.lock")).unwrap();
        let third = Turn::take(folder.path()).unwrap();
        drop(first);
        thread::sleep(Duration::from_millis(100));
        assert!(!second.is_finished(), "it waited for a file that nobody locks any more");
        drop(third);
        drop(second.join().unwrap());
    });
}

#[test]
fn a_sweep_is_one_commit_however_many_are_gone() {
    let (folder, store) = open();
    for number in 0..40 {
        keep(&store, &format!("c{number}"), &["GPUSHARE_MEMORY=1GiB"], &gone()).unwrap();
    }
    let kept = keep(&store, "living", &["GPUSHARE_MEMORY=1GiB"], &here()).unwrap();
    let inode = || std::os::unix::fs::MetadataExt::ino(&fs::metadata(file(&folder)).unwrap());
    let before = inode();
    assert_eq!(store.sweep().unwrap().len(), 40);
    assert_ne!(inode(), before, "two files change places with each commit");
    assert_eq!((store.leases().unwrap(), store.history().len()), (vec![kept], 40));
}

#[test]
fn who_reads_beside_writers_sees_whole_states() {
    let (folder, store) = open();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let store = Store::open(folder.path()).unwrap();
            for _ in 0..2000 {
                let lease = keep(&store, "a", &["GPUSHARE_MEMORY=1GiB"], &here()).unwrap();
                store.release(lease.id, &lease.member.key, ReleaseReason::Ended).unwrap();
            }
            done.store(true, Ordering::Release);
        });
        let mut seen = [0_u64; 2];
        while !done.load(Ordering::Acquire) {
            seen[store.leases().unwrap().len()] += 1;
        }
        assert!(seen[0] > 0 && seen[1] > 0, "{seen:?}");
    });
}

/// The first file is long, the second one is still short, and the disk is full: the next text is shorter than
/// the first and longer than the second.
#[test]
#[ignore = "needs root: mounts a small file system"]
fn on_a_full_disk_a_short_lease_ends_beside_a_long_one() {
    let folder = tempfile::tempdir().unwrap();
    let mount =
        Command::new("mount").args(["-t", "tmpfs", "-o", "size=64k", "tmpfs"]).arg(folder.path()).status();
    assert!(mount.unwrap().success());
    let store = Store::open(folder.path()).unwrap();
    let long = keep(&store, "long", &["GPUSHARE_MEMORY=1GiB"], &here()).unwrap();
    let short = keep(&store, "short", &["GPUSHARE_MEMORY=1GiB"], &here()).unwrap();
    let init = Holder { cgroup: Some("/c".repeat(5000).into()), ..here() };
    assert!(store.activate(long.id, &long.member.key, &init).unwrap());
    let _ = fs::write(folder.path().join("filler"), vec![0; 64 << 10]);
    let ended = store.release(short.id, &short.member.key, ReleaseReason::Ended);
    let left = store.leases().map(|leases| leases.len());
    assert!(Command::new("umount").arg(folder.path()).status().unwrap().success());
    assert_eq!((ended.unwrap(), left.unwrap()), (Release::Ended, 1));
}

#[test]
#[ignore = "needs root: mounts a small file system"]
fn on_a_full_disk_nothing_is_granted_and_every_share_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    let mount = |args: &[&str]| {
        assert!(Command::new("mount").args(args).arg(folder.path()).status().unwrap().success())
    };
    mount(&["-t", "tmpfs", "-o", "size=64k", "tmpfs"]);
    let store = Store::open(folder.path()).unwrap();
    let full = loop {
        let name = format!("c{}", store.leases().unwrap().len());
        if let Err(error) = keep(&store, &name, &["GPUSHARE_MEMORY=1MiB"], &here()) {
            break error;
        }
    };
    // Use up the remaining room too.
    let _ = fs::write(folder.path().join("filler"), vec![0; 64 << 10]);
    let mut left = store.leases().unwrap();
    let count = left.len();
    while let Some(lease) = left.pop() {
        store.release(lease.id, &lease.member.key, ReleaseReason::Ended).unwrap();
        assert_eq!(store.leases().unwrap(), left);
    }
    let unmounted = Command::new("umount").arg(folder.path()).status().unwrap();
    assert!(matches!(full, ReserveError::Store(StoreError::Full { .. })), "{full}");
    assert!(count > 10 && unmounted.success(), "{count}");
}
