//! A node with one GPU and one supervisor, and attackers on it.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use gpushare_attackers::{Place, pids_of};
use gpushare_supervisor::memory::OpenBudget;
use nix::mount::{MntFlags, umount2};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

pub const MIB: u64 = 1 << 20;
const DRIVER: &str = "580.142";

/// A node with one GPU and one supervisor.
pub struct Node {
    // Dropped first, so that it is unmounted before the directory is removed.
    pub place: Place,
    pub folder: TempDir,
}

/// Whether the kernel can mount the simulated manager. In CI it must.
pub fn has_fuse() -> bool {
    let has = fs::exists("/dev/fuse").unwrap_or(false);
    assert!(has || std::env::var("CI").as_deref() != Ok("true"), "there is no /dev/fuse");
    if !has {
        println!("skipped: attackers under the supervisor: no /dev/fuse");
    }
    has
}

impl Node {
    pub fn new(limit: u64) -> Self {
        Self::of_driver(limit, DRIVER)
    }

    pub fn of_driver(limit: u64, driver: &str) -> Self {
        let folder = TempDir::new().expect("a temporary folder");
        let place = Place::new(folder.path(), driver).expect("root may mount");
        let program = Path::new(env!("CARGO_BIN_EXE_supervisor"));
        place.start_supervisor(program, limit).expect("the supervisor starts");
        Self { place, folder }
    }

    pub fn eventually(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let began = Instant::now();
        while !holds() {
            assert!(began.elapsed() < Duration::from_secs(60), "{what}\n{}", self.figures());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    pub fn figures(&self) -> String {
        self.place.figures().expect("the manager answers")
    }

    /// Returns the bytes of the GPU in use, as counted by the manager itself.
    pub fn used(&self) -> u64 {
        let figures = self.figures();
        let used = figures.lines().find_map(|line| line.strip_prefix("gpu 0 used "));
        used.and_then(|used| used.parse().ok()).expect("there is a GPU")
    }

    /// Returns the bytes of the GPU that the supervisor has charged.
    pub fn charged(&self) -> u64 {
        let budget = File::options().read(true).write(true).open(self.folder.path().join("budget"));
        let budget = OpenBudget::open(budget.expect("a budget")).expect("it can be mapped");
        budget.charged().iter().sum()
    }

    /// Starts an attacker under the filter, and waits until it prints how much it got.
    pub fn attack(&self, words: &[&str]) -> Attack {
        self.attack_unread(words).heard()
    }

    /// Starts an attacker under the filter.
    pub fn attack_unread(&self, words: &[&str]) -> Attack {
        let mut around = Command::new(env!("CARGO_BIN_EXE_around"));
        around.arg("--socket").arg(self.folder.path().join("socket")).arg(env!("CARGO_BIN_EXE_attacker"));
        self.started(around, words)
    }

    /// Returns a shell under the filter that runs `script`, in which `$ATTACK MODE` runs an attacker. All of
    /// its processes are under one filter, so the supervisor stays while the shell lives.
    pub fn shell(&self, script: &str) -> Command {
        let attack = format!("{} {}", env!("CARGO_BIN_EXE_attacker"), self.place.dev().display());
        let mut around = Command::new(env!("CARGO_BIN_EXE_around"));
        around.arg("--socket").arg(self.folder.path().join("socket")).args(["/bin/sh", "-c", script]);
        around.env("ATTACK", attack).stdout(Stdio::piped());
        around
    }

    /// Starts an attacker without a filter, and waits until it prints how much it got.
    pub fn attack_bare(&self, words: &[&str]) -> Attack {
        self.bare_unread(words).heard()
    }

    /// Starts an attacker without a filter, and does not wait for its output.
    pub fn bare_unread(&self, words: &[&str]) -> Attack {
        self.started(Command::new(env!("CARGO_BIN_EXE_attacker")), words)
    }

    pub fn started(&self, mut command: Command, words: &[&str]) -> Attack {
        command.arg(self.place.dev()).args(words);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("the attacker starts");
        let out = BufReader::new(child.stdout.take().expect("a pipe"));
        Attack { child, said: String::new(), out }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // Each restarts the other, until both are gone at once.
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
        // Processes that are being killed may still have a file open.
        let _ = umount2(&self.place.dev(), MntFlags::MNT_DETACH);
    }
}

/// An attacker that holds the memory that it got.
pub struct Attack {
    pub child: Child,
    pub said: String,
    out: BufReader<ChildStdout>,
}

impl Attack {
    /// Waits until it prints how much it got.
    pub fn heard(mut self) -> Self {
        let _ = self.out.read_line(&mut self.said).expect("a pipe can be read");
        self
    }

    /// Whether it has printed how much it got.
    pub fn has_spoken(&mut self) -> bool {
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

/// Lists the PIDs of this node's processes of a role.
pub fn pids(node: &Node, role: &str) -> Vec<i32> {
    pids_of(role, &node.place.dev()).expect("there is /proc")
}
