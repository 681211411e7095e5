//! Attackers under the supervisor, against a resource manager that the kernel reaches as it reaches a driver.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use gpushare_attackers::{Place, pids_of};
use nix::mount::{MntFlags, umount2};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const DRIVER: &str = "580.142";

/// A node with one GPU and one supervisor.
struct Node {
    // Unmounted before the folder goes.
    place: Place,
    folder: TempDir,
}

/// Whether the kernel can mount the simulated manager. Where everything must be tested, it has to.
fn has_fuse() -> bool {
    let has = fs::exists("/dev/fuse").unwrap_or(false);
    assert!(has || std::env::var("CI").as_deref() != Ok("true"), "there is no /dev/fuse");
    if !has {
        println!("skipped: attackers under the supervisor: no /dev/fuse");
    }
    has
}

impl Node {
    fn new(limit: u64) -> Self {
        Self::of_driver(limit, DRIVER)
    }

    fn of_driver(limit: u64, driver: &str) -> Self {
        let folder = TempDir::new().expect("a temporary folder");
        let place = Place::new(folder.path(), driver).expect("root may mount");
        let program = Path::new(env!("CARGO_BIN_EXE_supervisor"));
        place.start_supervisor(program, limit).expect("the supervisor starts");
        Self { place, folder }
    }

    fn eventually(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let began = Instant::now();
        while !holds() {
            assert!(began.elapsed() < Duration::from_secs(60), "{what}\n{}", self.figures());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn figures(&self) -> String {
        self.place.figures().expect("the manager answers")
    }

    /// Bytes of the GPU in use, as the manager itself counts.
    fn used(&self) -> u64 {
        let figures = self.figures();
        let used = figures.lines().find_map(|line| line.strip_prefix("gpu 0 used "));
        used.and_then(|used| used.parse().ok()).expect("there is a GPU")
    }

    /// Starts an attacker under the filter, and waits until it says what it got.
    fn attack(&self, words: &[&str]) -> Attack {
        self.attack_unread(words).heard()
    }

    /// Starts an attacker under the filter.
    fn attack_unread(&self, words: &[&str]) -> Attack {
        let mut around = Command::new(env!("CARGO_BIN_EXE_around"));
        around.arg("--socket").arg(self.folder.path().join("socket")).arg(env!("CARGO_BIN_EXE_attacker"));
        self.started(around, words)
    }

    /// Starts it without a filter.
    fn attack_bare(&self, words: &[&str]) -> Attack {
        self.started(Command::new(env!("CARGO_BIN_EXE_attacker")), words).heard()
    }

    fn started(&self, mut command: Command, words: &[&str]) -> Attack {
        command.arg(self.place.dev()).args(words);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("the attacker starts");
        let out = BufReader::new(child.stdout.take().expect("a pipe"));
        Attack { child, said: String::new(), out }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // Each starts the other anew, until both are gone at once.
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(10) {
            let all = [pids(self, "keeper"), pids(self, "worker")].concat();
            if all.is_empty() {
                break;
            }
            for pid in all {
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
        }
        // What is being killed may still have a file of it.
        let _ = umount2(&self.place.dev(), MntFlags::MNT_DETACH);
    }
}

/// An attacker that holds what it got.
struct Attack {
    child: Child,
    said: String,
    out: BufReader<ChildStdout>,
}

impl Attack {
    /// Waits until it says what it got.
    fn heard(mut self) -> Self {
        let _ = self.out.read_line(&mut self.said).expect("a pipe can be read");
        self
    }

    /// Whether it has said what it got.
    fn has_spoken(&mut self) -> bool {
        let mut asked = [PollFd::new(self.out.get_ref().as_fd(), PollFlags::POLLIN)];
        if poll(&mut asked, PollTimeout::ZERO) == Ok(0) {
            return false;
        }
        let _ = self.out.read_line(&mut self.said).expect("a pipe can be read");
        true
    }
}

impl Drop for Attack {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const DIRECT: [&str; 8] = ["long", "short", "heap", "pitch", "range", "other-type", "wrapped", "duplicate"];

#[test]
#[ignore = "needs root: mounts, and installs filters"]
fn an_attacker_gets_its_share_and_not_a_page_more() {
    if !has_fuse() {
        return;
    }
    for mode in DIRECT.iter().chain(&["export", "flip", "x32"]) {
        let node = Node::new(1024 * MIB);
        let bare = node.attack_bare(&[mode, "--pieces", "40"]);
        assert!(
            mode == &"x32" || node.used() >= 40 * 64 * MIB,
            "{mode} alone: {}{}",
            bare.said,
            node.figures()
        );
        drop(bare);
        node.eventually("the attacker's memory is gone", || node.used() == 0);
        let held = node.attack(&[mode, "--pieces", "40"]);
        assert!(node.used() <= 1024 * MIB, "{mode}: {}{}", held.said, node.figures());
        // A kernel may have no entry for x32 programs.
        if !(*mode == "x32" && held.said.contains("ENOSYS")) {
            assert!(node.used() >= 960 * MIB, "{mode}: {}{}", held.said, node.figures());
        }
        assert!(node.figures().starts_with("privileged 0\n"), "{mode}: {}", node.figures());
    }
}

#[test]
#[ignore = "needs root: mounts, and installs filters"]
fn pieces_are_charged_as_the_card_rounds_them() {
    if !has_fuse() {
        return;
    }
    let node = Node::new(64 * MIB);
    let held = node.attack(&["long", "--piece", "4", "--pieces", "3000"]);
    assert_eq!(held.said, "got 1024 pieces: Status(Status(81))\n");
    assert_eq!(node.used(), 64 * MIB);
}

/// Any program may stop any other's channels, as far as RM is concerned.
#[test]
#[ignore = "needs root: mounts, and installs filters"]
fn a_program_stops_its_own_channels_and_nobody_elses() {
    if !has_fuse() {
        return;
    }
    let node = Node::new(1024 * MIB);
    let stopped =
        || node.figures().lines().find_map(|line| line.strip_prefix("stopped ")?.parse::<u32>().ok());
    let victim = node.attack_bare(&["stop"]);
    assert!(victim.said.ends_with("Ok(())\n"), "{}", victim.said);
    let [client, channel, ..] = victim.said.split(' ').collect::<Vec<_>>()[..] else {
        panic!("{}", victim.said)
    };
    assert_eq!(stopped(), Some(1));
    let others = ["stop", "--channel", client, channel];
    let bare = node.attack_bare(&others);
    assert!(bare.said.ends_with("Ok(())\n"), "{}", bare.said);
    // The supervisor ends with the last of them.
    let held =
        [&[][..], &["--wrapped"], &["--planted"]].map(|more| node.attack(&[&others[..], more].concat()));
    for one in &held {
        assert!(one.said.ends_with("Err(Status(Status(27)))\n"), "{}", one.said);
    }
    let own = [node.attack(&["stop"]), node.attack(&["stop", "--wrapped"])];
    assert!(own.iter().all(|one| one.said.ends_with("Ok(())\n")), "{}{}", own[0].said, own[1].said);
    assert_eq!(stopped(), Some(3), "{}", node.figures());
}

#[test]
#[ignore = "needs root: mounts, and installs filters"]
fn page_tables_of_address_ranges_are_charged() {
    if !has_fuse() {
        return;
    }
    let node = Node::new(1024 * MIB);
    // 64 GiB of addresses take 136.5 MiB of page tables.
    let held = node.attack(&["ranges", "--piece", &(64 << 20).to_string(), "--pieces", "20"]);
    assert!(held.said.starts_with("got 7 pieces"), "{}", held.said);
    assert!(node.used() <= 1024 * MIB, "{}", node.figures());
}

#[test]
#[ignore = "needs root: mounts, and installs filters"]
fn memory_that_is_freed_can_be_had_again() {
    if !has_fuse() {
        return;
    }
    let node = Node::new(128 * MIB);
    let held = node.attack(&["rounds", "--pieces", "500"]);
    assert_eq!(held.said, "got 500 pieces: limit of pieces, then 2 at once\n");
    assert_eq!(node.used(), 128 * MIB);
}

#[test]
#[ignore = "needs root: mounts, and installs filters"]
fn older_drivers_are_held_too() {
    if !has_fuse() {
        return;
    }
    for driver in ["515.43.04", "525.147.05", "535.54.03", "550.163.01", "570.211.01"] {
        for mode in ["long", "short", "heap"] {
            let node = Node::of_driver(256 * MIB, driver);
            let mut around = Command::new(env!("CARGO_BIN_EXE_around"));
            around.arg("--socket").arg(node.folder.path().join("socket")).args(["--driver", driver]);
            around.arg(env!("CARGO_BIN_EXE_attacker"));
            let held = node.started(around, &[mode, "--driver", driver, "--pieces", "40"]).heard();
            assert_eq!(held.said, "got 4 pieces: Status(Status(81))\n", "{driver} {mode}");
            drop(held);
            node.eventually("the attacker's memory is gone", || node.used() == 0);
        }
    }
}

#[test]
#[ignore = "needs root: mounts, and installs filters"]
fn who_races_past_the_supervisor_is_ended() {
    if !has_fuse() {
        return;
    }
    let node = Node::new(256 * MIB);
    let mut held = node.attack(&["race", "--pieces", "100000"]);
    let ended = held.child.wait().expect("it ends");
    assert!(!ended.success(), "{}", held.said);
    node.eventually("its memory is gone", || node.used() == 0);
}

/// Pids of this node's keepers and workers.
fn pids(node: &Node, role: &str) -> Vec<i32> {
    pids_of(role, &node.place.dev()).expect("there is /proc")
}

/// Kills one of the two over and over while programs allocate and free; each call must be done once.
#[test]
#[ignore = "needs root: mounts, and installs filters"]
fn a_keeper_or_worker_that_is_killed_loses_no_call_and_doubles_none() {
    if !has_fuse() {
        return;
    }
    for role in ["worker", "keeper"] {
        let node = Node::new(128 * MIB);
        let rounds = 4000;
        let mut held = node.attack_unread(&["rounds", "--pieces", &rounds.to_string()]);
        // A start that loses its supervisor ends, closed.
        node.eventually("the program has a client", || node.figures().contains(" pid "));
        let mut kills = 0u64;
        while !held.has_spoken() {
            if let Some(pid) = pids(&node, role).first() {
                kills += u64::from(kill(Pid::from_raw(*pid), Signal::SIGKILL).is_ok());
            }
            // Now and then long enough for the next one to do something.
            std::thread::sleep(Duration::from_millis(kills * 7 % 40 + 3));
        }
        assert_eq!(
            held.said,
            format!("got {rounds} pieces: limit of pieces, then 2 at once\n"),
            "{role}, {kills} kills"
        );
        assert!(kills > 20, "{kills} kills of the {role}");
        assert_eq!(node.used(), 128 * MIB, "{role}: {}", node.figures());
    }
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

/// With both dead at once there is nobody to answer. Then nothing is allocated any more.
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
        // Stopped, neither can start the other anew.
        for signal in [Signal::SIGSTOP, Signal::SIGKILL] {
            for pid in &both {
                let _ = kill(Pid::from_raw(*pid), signal);
            }
        }
        both.is_empty()
    });
    node.eventually("its next call is answered", || held.has_spoken());
    // A FREE that fails ends it without a word, and with an error.
    let failed = held.said.is_empty() && held.child.wait().is_ok_and(|status| !status.success());
    assert!(failed || held.said.contains("Errno(ENOSYS)"), "{}", held.said);
    assert!(node.used() <= 512 * MIB, "{}", node.figures());
}
