//! Tests that no call is lost or done twice, whatever happens to keeper, worker or program.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::node::{MIB, Node, has_fuse, pids};

/// Returns about how many processes of each kind to kill; `GPUSHARE_KILLS` makes the run longer.
fn kills() -> u64 {
    std::env::var("GPUSHARE_KILLS").map_or(60, |number| number.parse().expect("a number"))
}

/// Kills one of the two again and again while programs allocate and free; each call must be done once.
#[test]
#[ignore = "needs root: mounts, and installs filters"]
fn a_keeper_or_worker_that_is_killed_loses_no_call_and_doubles_none() {
    if !has_fuse() {
        return;
    }
    for role in ["worker", "keeper"] {
        let node = Node::new(128 * MIB);
        let (least, rounds) = (kills() / 4, kills() * 20);
        let mut held = node.attack_unread(&["rounds", "--pieces", &rounds.to_string()]);
        // If it loses its supervisor while starting, it fails closed.
        node.eventually("the program has a client", || node.figures().contains(" pid "));
        let mut kills = 0;
        while !held.has_spoken() {
            if let Some(pid) = pids(&node, role).first() {
                kills += u64::from(kill(Pid::from_raw(*pid), Signal::SIGKILL).is_ok());
            }
            // Some pauses are long enough for the next process to do something.
            std::thread::sleep(Duration::from_millis(kills * 7 % 40 + 3));
        }
        assert_eq!(
            held.said,
            format!("got {rounds} pieces: limit of pieces, then 2 at once\n"),
            "{role}, {kills} kills"
        );
        println!("{role}: {kills} kills, {rounds} rounds");
        assert!(kills > least, "{kills} kills of the {role}");
        assert_eq!(node.used(), 128 * MIB, "{role}: {}", node.figures());
    }
}

/// Stops a program and resumes it, a thousand times a second.
#[test]
#[ignore = "needs root: mounts, and installs filters"]
fn a_program_that_is_stopped_amid_its_calls_loses_none() {
    if !has_fuse() {
        return;
    }
    let node = Node::new(128 * MIB);
    let mut held = node.attack_unread(&["rounds", "--pieces", "500"]);
    let pid = Pid::from_raw(i32::try_from(held.child.id()).expect("a pid"));
    let mut stops = 0;
    while !held.has_spoken() {
        for signal in [Signal::SIGSTOP, Signal::SIGCONT] {
            kill(pid, signal).expect("it lives");
            std::thread::sleep(Duration::from_micros(500));
        }
        stops += 1;
    }
    assert_eq!(held.said, "got 500 pieces: limit of pieces, then 2 at once\n", "{stops} stops");
    assert!(stops > 20, "{stops} stops");
}

/// Many processes with many threads allocate at once, in a share that has room for few of them.
#[test]
#[ignore = "needs root: mounts, and installs filters"]
fn a_crowd_is_held_like_one_program() {
    if !has_fuse() {
        return;
    }
    let node = Node::new(128 * MIB);
    let processes = kills() / 4;
    let crowd = "$ATTACK crowd --threads 40 --pieces 2";
    let script = format!("for _ in $(seq {processes}); do {crowd} & done; wait; echo all");
    let mut shell = node.shell(&script).spawn().expect("the shell starts");
    let said = BufReader::new(shell.stdout.take().expect("a pipe")).lines().map_while(Result::ok);
    let crowd = std::thread::spawn(|| said.take_while(|line| line != "all").collect::<Vec<_>>());
    let mut most = 0;
    while !crowd.is_finished() {
        most = most.max(node.used());
        std::thread::sleep(Duration::from_millis(1));
    }
    let got = crowd.join().expect("it does not panic");
    let _ = shell.wait();
    println!("{processes} processes, {most} bytes at most");
    assert_eq!(u64::try_from(got.len()), Ok(processes), "{got:?}");
    assert!(got.iter().any(|line| line != "got 0 pieces"), "{got:?}");
    assert!(most <= 128 * MIB, "{most}");
    node.eventually("all is gone", || node.used() == 0 && node.charged() == 0);
}

/// Kills programs at any moment; the next one gets the whole share.
#[test]
#[ignore = "needs root: mounts, and installs filters"]
fn a_program_that_is_killed_amid_a_call_leaves_nothing_behind() {
    if !has_fuse() {
        return;
    }
    let node = Node::new(128 * MIB);
    // Other programs use the card, too.
    let others = node.attack_bare(&["long", "--pieces", "3"]);
    let theirs = node.used();
    let script = "while read -r _; do $ATTACK rounds --pieces 1000000 & echo $!; wait; done";
    let mut shell = node.shell(script).stdin(Stdio::piped()).spawn().expect("the shell starts");
    let mut ask = shell.stdin.take().expect("a pipe");
    let mut said = BufReader::new(shell.stdout.take().expect("a pipe")).lines();
    for kill_number in 0..kills() {
        writeln!(ask, "go").expect("the shell reads");
        let pid: i32 = said.next().and_then(|line| line.ok()?.parse().ok()).expect("a pid");
        node.eventually("it allocates", || node.used() > theirs);
        std::thread::sleep(Duration::from_micros(kill_number * 137 % 5000));
        kill(Pid::from_raw(pid), Signal::SIGKILL).expect("it has not ended by itself");
        node.eventually("its memory is gone", || node.used() == theirs);
    }
    println!("program: {} kills", kills());
    node.eventually("the whole share can be had", || node.charged() == 0);
    drop((ask, others));
    let _ = shell.wait();
}

#[test]
#[ignore = "needs root: mounts, installs filters, and uses userfaultfd"]
fn memory_that_never_comes_holds_nobody_up_for_long() {
    if !has_fuse() {
        return;
    }
    let node = Node::new(512 * MIB);
    let held = node.attack(&["blocked", "--pieces", "5"]);
    assert_eq!(held.said, "got 5 pieces: limit of pieces\n");
    assert_eq!(node.used(), 5 * 64 * MIB);
}

/// If both are dead at once, no process answers calls, so allocations fail.
#[test]
#[ignore = "needs root: mounts, and installs filters"]
fn without_keeper_and_worker_nothing_is_allocated() {
    if !has_fuse() {
        return;
    }
    let node = Node::new(512 * MIB);
    let mut held = node.attack_unread(&["rounds", "--pieces", "1000000"]);
    node.eventually("the program has a client", || node.figures().contains(" pid "));
    node.eventually("both have ended", || {
        let both = [pids(&node, "keeper"), pids(&node, "worker")].concat();
        // While stopped, neither can restart the other.
        for signal in [Signal::SIGSTOP, Signal::SIGKILL] {
            for pid in &both {
                let _ = kill(Pid::from_raw(*pid), signal);
            }
        }
        both.is_empty()
    });
    node.eventually("its next call is answered", || held.has_spoken());
    // A FREE that fails ends the program without output, with an error.
    let failed = held.said.is_empty() && held.child.wait().is_ok_and(|status| !status.success());
    assert!(failed || held.said.contains("Errno(ENOSYS)"), "{}", held.said);
    assert!(node.used() <= 512 * MIB, "{}", node.figures());
}

/// A zombie process holds no share any more, even in a container whose first process reaps no children.
#[test]
#[ignore = "needs root: mounts, and installs filters"]
fn a_process_that_nobody_waits_for_keeps_no_share() {
    if !has_fuse() {
        return;
    }
    let node = Node::new(128 * MIB);
    let others = node.attack_bare(&["long", "--pieces", "3"]);
    let script = "$ATTACK long --pieces 2 </dev/null & exec sleep 1000";
    let mut first = node.shell(script).spawn().expect("the shell starts");
    let mut said = String::new();
    let mut out = BufReader::new(first.stdout.take().expect("a pipe"));
    let _ = out.read_line(&mut said).expect("a pipe can be read");
    assert_eq!(said, "got 2 pieces: limit of pieces\n");
    let children =
        || fs::read_to_string(format!("/proc/{0}/task/{0}/children", first.id())).unwrap_or_default();
    let is_zombie = |pid: &str| {
        fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains("(attacker) Z"))
    };
    node.eventually("it has ended, and nobody waits for it", || children().split_whitespace().any(is_zombie));
    let second = node.attack(&["long", "--pieces", "2"]);
    assert_eq!(second.said, "got 2 pieces: limit of pieces\n", "{} charged", node.charged());
    drop((second, others));
    let _ = first.kill();
    let _ = first.wait();
}
