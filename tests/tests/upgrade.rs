//! A deb is upgraded beside containers under load, and killed at each step: no container notices, no program
//! is ever half there, containers start meanwhile, and the upgrade can be made again.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use gpushare_tests::artifacts;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::command::{self, Outcome, alive};
use gpushare_tests::machine::{Machine, entries};
use gpushare_tests::namespace::private;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::{MODEL, SimulatedNode};
use gpushare_tests::probe::{GIB, OUT_OF_MEMORY, Report, SUCCESS};
use gpushare_tests::runtime::{Container, Runtime};
use gpushare_tests::scratch::Scratch;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde_json::Value;

/// How many containers hold a share meanwhile.
const CONTAINERS: usize = 20;

/// What each of them does with its 4 GiB: one process keeps what it has, and others ask again and again for
/// too much and for little. It ends once an answer is another one. With what contexts cost, 3 GiB are left,
/// and 2 while one of the others lives.
const LOAD: &str = "gpushare-simulator probe --allocate 16MiB --hold 100000 >/dev/null &
while gpushare-simulator probe --json --allocate 5GiB --allocate 16MiB |
    grep -q 'CUDA_ERROR_OUT_OF_MEMORY.*CUDA_SUCCESS'; do echo held; sleep 2; done";

/// What runs when a container starts, and the command line.
const PROGRAMS: [&str; 5] = [
    "usr/bin/gpushare",
    "usr/bin/gpushare-hook",
    "usr/bin/gpushare-runtime",
    "usr/lib/gpushare/libcuda.so.1",
    "usr/lib/gpushare/libnvidia-ml.so.1",
];

/// What dpkg and the package's scripts call.
const CALLED: [&str; 7] = ["dpkg-deb", "dpkg-split", "ls", "rm", "sed", "systemctl", "tar"];

/// A program that counts its calls, and at the one that it is told ends its whole process group.
const STEP: &str = r#"#!/bin/sh
echo "$0" >>"$COUNT"
[ "$(wc -l <"$COUNT")" != "$AT" ] || kill -9 0
PATH=/usr/sbin:/usr/bin:/sbin:/bin exec "${0##*/}" "$@"
"#;

/// A step of dpkg's, before which it can be killed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    /// The rename(2) of its own with this number.
    Rename(usize),
    /// The start of one of [`CALLED`], with this number.
    Program(usize),
}

/// The steps, each with the file that it is about.
type Steps = Vec<(Step, String)>;

/// The package in versions of which each has its own bytes in every program.
struct Packages {
    /// The programs as they were built.
    built: BTreeMap<&'static str, Vec<u8>>,
    scratch: Scratch,
}

impl Packages {
    fn new() -> Self {
        let scratch = Scratch::new("upgrade");
        let mut run = Command::new(artifacts::checkout().join("packaging/package.sh"));
        run.args(["deb", "0"]).arg(scratch.path()).env("XZ_LEVEL", "0");
        let deb = command::run(&mut run).expect_success("package.sh").stdout;
        let tree = scratch.path().join("tree");
        let mut unpack = Command::new("dpkg-deb");
        let _ = command::run(unpack.arg("--raw-extract").arg(deb.trim_end()).arg(&tree))
            .expect_success("dpkg-deb --raw-extract");
        // Two hundred pages, each as the one before: they take most of the time, and nobody runs them.
        fs::remove_dir_all(tree.join("usr/share")).expect("each package has it");
        let read = |path| (path, fs::read(tree.join(path)).expect("each package has it"));
        Self { built: PROGRAMS.into_iter().map(read).collect(), scratch }
    }

    /// Packs `version` into `deb`, without pains.
    fn pack(&self, version: usize, deb: &Path) {
        let tree = self.scratch.path().join("tree");
        for path in PROGRAMS {
            fs::write(tree.join(path), self.program(path, version)).expect("a file can be written");
        }
        let control = tree.join("DEBIAN/control");
        let text = fs::read_to_string(&control).expect("each package has it");
        let lines = text.lines().map(|line| match line.split_once(": ") {
            Some(("Version", _)) => format!("Version: {version}\n"),
            _ => format!("{line}\n"),
        });
        fs::write(control, lines.collect::<String>()).expect("a file can be written");
        let mut build = Command::new("dpkg-deb");
        let _ = command::run(build.args(["-Znone", "--build"]).arg(&tree).arg(deb))
            .expect_success("dpkg-deb --build");
    }

    /// The bytes of a program in `version`: a loader leaves what stands behind its last section alone.
    fn program(&self, path: &str, version: usize) -> Vec<u8> {
        [&self.built[path], format!("\nversion {version}\n").as_bytes()].concat()
    }
}

/// A machine on which the package is upgraded from one version to the next.
struct Place {
    machine: Machine,
    packages: Packages,
}

impl Place {
    /// With version 1, on a machine where systemd runs.
    fn new() -> Self {
        let place = Self { machine: Machine::bare(), packages: Packages::new() };
        let machine = &place.machine;
        for folder in ["run/systemd/system", "run/gpushare", "steps"] {
            fs::create_dir_all(machine.path(folder)).expect("a folder can be made in an overlay");
        }
        // The package's script reads it.
        fs::write(machine.path("run/gpushare/leases-of-this-boot"), "")
            .expect("a file can be made in an overlay");
        for name in CALLED {
            program(&machine.path("steps").join(name), STEP);
        }
        program(&machine.path("usr/bin/systemctl"), "#!/bin/sh\n");
        place.packages.pack(1, &place.deb());
        let _ = place.install().expect_success("dpkg --install");
        place
    }

    fn deb(&self) -> PathBuf {
        self.machine.path("var/tmp/gpushare.deb")
    }

    /// Installs what [`Place::deb`] is.
    fn install(&self) -> Outcome {
        self.machine.run(&["dpkg", "--install", "/var/tmp/gpushare.deb"])
    }

    /// Installs it, and is killed there. Returns the steps that dpkg took, in its order.
    fn install_killed(&self, kill: Option<Step>) -> Steps {
        let (count, trace) = (self.machine.path("run/count"), self.machine.path("run/trace"));
        for file in [&count, &trace] {
            fs::write(file, "").expect("a file can be made in an overlay");
        }
        let dpkg = self.machine.chroot(&["dpkg", "--install", "/var/tmp/gpushare.deb"]);
        // With a program it is not traced: what is waited for must be dpkg itself, which has locks.
        let (mut run, at) = match kill {
            Some(Step::Program(at)) => (dpkg, at),
            Some(Step::Rename(at)) => {
                (traced(&dpkg, &trace, &["-e", &format!("inject=rename:signal=SIGKILL:when={at}")]), 0)
            }
            None => (traced(&dpkg, &trace, &[]), 0),
        };
        run.env("PATH", "/steps:/usr/sbin:/usr/bin:/sbin:/bin")
            .env("DEBIAN_FRONTEND", "noninteractive")
            .env("COUNT", "/run/count")
            .env("AT", at.to_string())
            .process_group(0);
        let mut child = command::spawn(&mut run, &self.packages.scratch.folder("output"));
        let status = command::wait(&mut child, command::DEADLINE).expect("dpkg ends");
        assert_eq!(status.success(), kill.is_none(), "{status}");
        // What dpkg started ends with it.
        let group = Pid::from_raw(i32::try_from(child.id()).expect("pids are small"));
        // It may be empty.
        let _ = killpg(group, Signal::SIGKILL);
        let read = |file| fs::read_to_string(file).expect("the file is there");
        let programs =
            read(&count).lines().zip(1..).map(|(name, at)| (Step::Program(at), name.to_owned())).collect();
        [renames(&read(&trace)), programs].concat()
    }

    /// The version that dpkg knows, and its word for its state.
    fn version(&self) -> String {
        let format = "--showformat=${Version} ${db:Status-Status}";
        self.machine.run(&["dpkg-query", "--show", format, "gpushare"]).stdout
    }

    /// Asserts that every program is wholly of one of these versions.
    fn assert_whole(&self, versions: &[usize], when: &str) {
        for path in PROGRAMS {
            let found =
                fs::read(self.machine.path(path)).unwrap_or_else(|error| panic!("{when}: {path}: {error}"));
            let whole = versions.iter().any(|version| self.packages.program(path, *version) == found);
            assert!(whole, "{when}: {path} is of none of {versions:?}, with {} bytes", found.len());
        }
    }

    /// The containers with a share, as the installed command line lists them.
    fn listed(&self, config: &Path, when: &str) -> BTreeSet<String> {
        let mut ps = Command::new(self.machine.path("usr/bin/gpushare"));
        let told =
            command::run(ps.args(["ps", "--json"]).env("GPUSHARE_CONFIG", config)).expect_success(when);
        let told: Value = serde_json::from_str(&told.stdout).expect("it prints JSON");
        let shares = told["shares"].as_array().expect("it lists shares");
        shares.iter().filter_map(|share| share["id"].as_str()).map(str::to_owned).collect()
    }
}

fn program(path: &Path, text: &str) {
    fs::write(path, text).expect("a file can be written in an overlay");
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("and made a program");
}

/// The command `run`, whose own renames strace writes into `trace`.
fn traced(run: &Command, trace: &Path, more: &[&str]) -> Command {
    let mut strace = Command::new("/usr/bin/strace");
    strace.args(["-qq", "-e", "signal=none", "-e", "trace=rename"]).args(more).arg("-o").arg(trace);
    strace.arg(run.get_program()).args(run.get_args());
    strace
}

/// The renames of a trace after which programs, or what dpkg knows of the package, are others. Units are
/// renamed in between, each as the one before.
fn renames(trace: &str) -> Steps {
    let all = trace.lines().zip(1..).filter_map(|(line, at)| Some((line.split('"').nth(3)?, at)));
    let matter = all.filter(|(to, _)| {
        PROGRAMS.iter().any(|program| to[1..] == **program) || to.starts_with("/var/lib/dpkg/")
    });
    matter.map(|(to, at)| (Step::Rename(at), to.to_owned())).collect()
}

#[test]
#[ignore = "needs root, runc and strace: kills dpkg in a root of its own, beside containers"]
fn an_upgrade_that_is_killed_at_any_step_harms_no_container_and_can_be_made_again() {
    if !met(&[Need::Root, Need::Runc, Need::Busybox, Need::Dpkg, Need::Strace, Need::BareMachine]) {
        return;
    }
    private(|| {
        let place = Place::new();
        let node = SimulatedNode::create(2, MODEL, "80GiB");
        let runtime = Runtime::installed(&place.machine.path("usr/bin/gpushare-runtime"), &node);
        let share = || Bundle::with_probe().env("GPUSHARE_MEMORY", "4GiB");
        let bundles: Vec<Bundle> = (0..CONTAINERS).map(|_| share().args(&["sh", "-c", LOAD])).collect();
        let containers: Vec<Container<'_>> = bundles.iter().map(|bundle| runtime.run(bundle)).collect();
        let ids: BTreeSet<String> = containers.iter().map(|container| container.id().to_owned()).collect();
        let all_live = |when: &str| {
            let ended = containers.iter().filter(|one| !alive(u64::from(one.pid().unsigned_abs())));
            let ended: Vec<&str> = ended.map(Container::id).collect();
            assert!(ended.is_empty(), "{when}: {ended:?} have ended");
            assert_eq!(place.listed(runtime.config(), when), ids, "{when}");
        };
        let small = Bundle::small().env("GPUSHARE_MEMORY", "4GiB");

        place.packages.pack(2, &place.deb());
        let steps = place.install_killed(None);
        place.assert_whole(&[2], "upgraded at once");
        all_live("upgraded at once");
        assert!(steps.len() > 25, "{} steps", steps.len());
        let mut last = 2;
        for (step, what) in steps {
            let (before, next) = (last, last + 1);
            let when = format!("on the way to {next}, killed before {what}");
            place.packages.pack(next, &place.deb());
            let _ = place.install_killed(Some(step));
            place.assert_whole(&[before, next], &when);
            all_live(&when);
            drop(runtime.run(&small));

            // As dpkg's own advice goes; where it cannot, it says that the package is to be installed again.
            let _ = place.machine.run(&["dpkg", "--configure", "-a"]);
            if place.version() != format!("{next} installed") {
                let _ = place.install().expect_success(&when);
            }
            assert_eq!(place.version(), format!("{next} installed"), "{when}");
            place.assert_whole(&[next], &when);
            last = next;
        }
        all_live("after all kills");
        let litter = entries(&place.machine.path("usr")).into_iter();
        let litter: Vec<PathBuf> = litter.filter(|path| path.to_string_lossy().contains(".dpkg-")).collect();
        assert!(litter.is_empty(), "{litter:?}");
        for container in &containers {
            let report = Report::of(container, &["5GiB", "1GiB"]);
            report.assert_size(4 * GIB);
            assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS], "{report:?}");
            assert!(container.stdout().lines().count() > 1, "it was under load: {}", container.stdout());
        }
        let late = share();
        let report = Report::of(&runtime.run(&late), &["5GiB", "1GiB"]);
        assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS], "a container of version {last}");
    });
}
