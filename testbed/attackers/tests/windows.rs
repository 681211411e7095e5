//! Tests containers whose time supervisors enforce, on one simulated GPU: which channels run, and for how
//! long.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use gpushare_attackers::{Place, pids_of, supervisors};
use gpushare_schedule::Policy;
use gpushare_schedule::frame::{Frame, Piece};
use gpushare_supervisor::plan::Plan;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

/// A GPU that containers share.
struct Node {
    // Dropped first, so that it is unmounted before the directory is removed.
    place: Place,
    folder: TempDir,
}

/// A program under the supervisor of its container, or under none.
struct Program(Child);

fn fixed(start: u32, length: u32) -> Policy {
    Policy::Fixed(vec![Piece { start, length }])
}

/// Whether the kernel can mount the simulated manager. In CI it must.
fn has_fuse() -> bool {
    let has = fs::exists("/dev/fuse").unwrap_or(false);
    assert!(has || std::env::var("CI").as_deref() != Ok("true"), "there is no /dev/fuse");
    if !has {
        println!("skipped: windows: no /dev/fuse");
    }
    has
}

impl Node {
    fn new() -> Self {
        let folder = TempDir::new().expect("a temporary folder");
        let place = Place::new(folder.path(), "580.142").expect("root may mount");
        Self { place, folder }
    }

    /// Starts the supervisor of a lease, and returns its socket.
    fn supervise(&self, lease: i64, policy: Policy) -> PathBuf {
        let program = Path::new(env!("CARGO_BIN_EXE_supervisor"));
        let plan = Plan { policy, frame: Frame::SHORT };
        let started = self.place.supervise(program, &format!("{lease}-"), lease, 4 << 30, Some(&plan));
        started.expect("the supervisor starts")
    }

    /// Runs an attacker under the supervisor at `socket`.
    fn run(&self, socket: Option<&Path>, mode: &str) -> Program {
        let mut command = match socket {
            Some(socket) => {
                let mut around = Command::new(env!("CARGO_BIN_EXE_around"));
                around.arg("--socket").arg(socket).arg(env!("CARGO_BIN_EXE_attacker"));
                around
            }
            None => Command::new(env!("CARGO_BIN_EXE_attacker")),
        };
        command.arg(self.place.dev()).arg(mode).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("it starts");
        let mut line = String::new();
        let out = child.stdout.as_mut().expect("a pipe");
        BufReader::new(out).read_line(&mut line).expect("it says something");
        assert_eq!(line, "works\n");
        Program(child)
    }

    /// Returns the run time and the age of a program's channel, in microseconds.
    fn ran(&self, program: &Program) -> Option<[u64; 2]> {
        let figures = self.place.figures().expect("the manager answers");
        let its = format!("channel of {} ran ", program.0.id());
        let line = figures.lines().find_map(|line| line.strip_prefix(&its))?;
        let (ran, lived) = line.split_once(" of ")?;
        Some([ran.parse().ok()?, lived.parse().ok()?])
    }

    /// Returns the per cent of a second for which the channels of these programs ran.
    fn second<const N: usize>(&self, programs: [&Program; N]) -> [u64; N] {
        let before = programs.map(|one| self.ran(one).expect("it has a channel"));
        std::thread::sleep(Duration::from_secs(1));
        let after = programs.map(|one| self.ran(one).expect("it has a channel"));
        std::array::from_fn(|at| (after[at][0] - before[at][0]) * 100 / (after[at][1] - before[at][1]))
    }

    /// Waits for a second in which each ran within 4 per cent of the expected time. Other tests may keep the
    /// machine from waking threads in time.
    fn expect<const N: usize>(&self, what: &str, programs: [&Program; N], want: [u64; N]) {
        let mut seen = Vec::new();
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(60) {
            let second = self.second(programs);
            if second.iter().zip(want).all(|(ran, want)| ran.abs_diff(want) <= 4) {
                return;
            }
            seen.push(second);
        }
        panic!("{what}: {want:?}, and not {seen:?}");
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(10) {
            let all = supervisors(self.folder.path()).unwrap_or_default();
            if all.is_empty() {
                break;
            }
            for pid in all {
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = (self.0.kill(), self.0.wait());
    }
}

#[test]
#[ignore = "needs root: mounts, and installs filters"]
fn each_runs_in_its_window_whatever_it_does() {
    if !has_fuse() {
        return;
    }
    let node = Node::new();
    let [one, two] = [node.supervise(1, fixed(0, 15_000)), node.supervise(2, fixed(15_000, 35_000))];
    let (honest, second) = (node.run(Some(&one), "work"), node.run(Some(&one), "work"));
    let attacker = node.run(Some(&two), "start");
    node.expect("windows of 30 and 70", [&honest, &second, &attacker], [30, 30, 70]);
    drop(attacker);
    node.expect("a window is a cap", [&honest, &second], [30, 30]);
    let attacker = node.run(Some(&one), "start");
    node.expect("who starts its channels again", [&honest, &attacker], [30, 30]);
}

#[test]
#[ignore = "needs root: mounts, and installs filters"]
fn who_has_no_window_runs_between_them_and_instead_of_those_that_are_not_there() {
    if !has_fuse() {
        return;
    }
    let node = Node::new();
    let burst = Policy::Burst { share: 30, ceiling: 100 };
    let [window, between] = [node.supervise(1, fixed(10_000, 20_000)), node.supervise(2, burst)];
    let other = node.run(Some(&between), "work");
    node.expect("alone", [&other], [100]);
    let owner = node.run(Some(&window), "work");
    node.expect("beside a window", [&owner, &other], [40, 60]);
    drop(owner);
    node.expect("alone again", [&other], [100]);
    // No supervisor limits a program of the host.
    let host = node.run(None, "work");
    node.expect("beside the host's", [&host, &other], [100, 100]);
}

#[test]
#[ignore = "needs root: mounts, and installs filters"]
fn windows_outlive_supervisors_and_memory_its_programs() {
    if !has_fuse() {
        return;
    }
    let node = Node::new();
    let [one, two] = [node.supervise(1, fixed(0, 15_000)), node.supervise(2, fixed(15_000, 35_000))];
    let programs = [node.run(Some(&one), "work"), node.run(Some(&two), "start")];
    for role in ["worker", "keeper", "worker"] {
        for pid in pids_of(role, node.folder.path()).expect("/proc can be read") {
            kill(Pid::from_raw(pid), Signal::SIGKILL).expect("it is there");
        }
        node.expect(role, programs.each_ref(), [30, 70]);
    }
    let [first, _second] = programs;
    drop(first);
    let began = Instant::now();
    let is_gone =
        |figures: String| !figures.contains("channel of") || figures.matches("channel of").count() == 1;
    while !is_gone(node.place.figures().expect("the manager answers")) {
        assert!(began.elapsed() < Duration::from_secs(30), "its client is kept: {:?}", node.place.figures());
        std::thread::sleep(Duration::from_millis(2));
    }
}
