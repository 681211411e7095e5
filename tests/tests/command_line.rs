//! The wrapper reads a command line as the low-level runtime does. Random lines are shown to our reader and
//! to the real runc and crun.
//!
//! Only the bundle that our reading names has a configuration, and only the runtime root that it names holds
//! a container of the id that it names. A runtime that reads the same finds that the container exists
//! already.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use args::Args;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::command::{self, Outcome};
use gpushare_tests::leases::leases;
use gpushare_tests::namespace;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::runtime::{LowLevel, Runtime};
use gpushare_tests::scratch::Scratch;
use nix::mount::{MntFlags, umount2};
use serde_json::json;

// The wrapper is a program and no library, so its reader is included here to be tested by itself.
#[path = "../../runtime-wrapper/src/args.rs"]
mod args;

/// How many lines are made. Our reader refuses roughly half of them, and no runtime is shown those.
const LINES: usize = 6_000;

/// Flags before the command, each with values that runtimes take; `@` stands for the scratch folder.
const GLOBAL: [(&str, &[&str]); 7] = [
    ("root", &["@/r1", "r2"]),
    ("log", &["@/l1", "@/l2"]),
    ("log-format", &["json", "text"]),
    ("debug", &[]),
    ("rootless", &["false"]),
    ("cgroup-manager", &["cgroupfs"]),
    ("version", &[]),
];

/// The same for flags after the command.
const BEHIND: [(&str, &[&str]); 13] = [
    ("bundle", &["b1", "b2", "."]),
    ("bundle", &["b1", "@/b2"]),
    ("bundle", &["b1", "./b2", "b1/"]),
    ("config", &["c1", "config.json", "./config.json"]),
    ("pid-file", &["p1"]),
    ("preserve-fds", &["3"]),
    ("no-pivot", &[]),
    ("no-new-keyring", &[]),
    ("detach", &[]),
    ("keep", &[]),
    ("image-path", &["i1"]),
    ("help", &[]),
    ("force", &[]),
];

/// A 64-bit xorshift, which gives the same lines in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 33).unwrap_or_default() % end
    }

    fn of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())]
    }

    fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }
}

/// A line as an engine, a person or an attacker may write it. It begins with a root in the scratch folder,
/// since a runtime's default root belongs to the machine.
fn line(random: &mut Random) -> Vec<String> {
    let mut words = vec!["--root".to_owned(), "@/r0".to_owned()];
    for _ in 0..random.below(4) {
        words.extend(flag(random, &GLOBAL));
    }
    words.push(
        random.of(&["create", "create", "create", "create", "run", "run", "restore", "state"]).to_owned(),
    );
    let flags = random.below(5);
    let id_at = random.below(flags + 1);
    for at in 0..=flags {
        if at == id_at && !random.one_in(30) {
            words.push(random.of(&["x", "y"]).to_owned());
        }
        if at < flags {
            words.extend(flag(random, &BEHIND));
        }
    }
    words
}

/// A flag in one of its many forms; seldom something else.
fn flag(random: &mut Random, known: &[(&str, &[&str])]) -> Vec<String> {
    if random.one_in(40) {
        return vec![random.of(&["--", "-", "-h", "--help=false", "--unheard-of", "create", "z"]).to_owned()];
    }
    let (name, values) = random.of(known);
    let short = &name[..1];
    let part = &name[..name.len() - random.below(name.len() - 1).min(3)];
    if values.is_empty() {
        let odd =
            [format!("--{name}=true"), format!("--{name}=false"), format!("-{name}"), format!("--{part}")];
        return vec![match random.below(12) {
            form @ 0..4 => odd[form].clone(),
            4 | 5 => format!("-{short}"),
            _ => format!("--{name}"),
        }];
    }
    let value = random.of(values);
    match random.below(24) {
        0 => vec![format!("-{name}"), value.to_owned()],
        1 => vec![format!("-{name}={value}")],
        2 => vec![format!("-{short}={value}")],
        3 => vec![format!("-{short}{value}")],
        4 => vec![format!("--{part}"), value.to_owned()],
        5 => vec![format!("--{part}={value}")],
        6 => vec![format!("--{name}")],
        7 => vec![format!("--{name}=")],
        8..=10 => vec![format!("-{short}"), value.to_owned()],
        11..=16 => vec![format!("--{name}={value}")],
        _ => vec![format!("--{name}"), value.to_owned()],
    }
}

/// A scratch folder with three bundles, of which the working folder is one, and with the runtime roots. None
/// has a configuration or container at first.
struct Place {
    scratch: Scratch,
    low_level: LowLevel,
}

/// What a low-level runtime made of a line.
#[derive(Debug, PartialEq, Eq)]
enum Reading {
    /// It opened the bundle that we read and found the container that we read.
    Ours,
    /// It refused the line, or only printed something.
    None,
    /// Anything else.
    Another(String),
}

impl Place {
    fn new(low_level: LowLevel) -> Self {
        let scratch = Scratch::new("lines");
        for name in ["b1", "b2", "r0", "r1", "r2", "rootfs"] {
            let _ = scratch.folder(name);
        }
        Self { scratch, low_level }
    }

    fn at(&self, path: &Path) -> PathBuf {
        self.scratch.path().join(path)
    }

    fn call(&self, words: &[String]) -> Outcome {
        let mut call = Command::new(self.low_level.program());
        call.args(words).current_dir(self.scratch.path()).env_clear().env("PATH", "/usr/sbin:/usr/bin");
        command::run(&mut call)
    }

    /// What the runtime makes of `words` where only what `args` names exists.
    fn reading(&self, words: &[String], args: &Args) -> Reading {
        let root = self.at(args.root.as_deref().expect("every line has a root"));
        let container = root.join(args.id.as_deref().expect("a clear line has an id"));
        let bundle = self.at(&args.bundle);
        // Our reader takes a relative file as one in its own working folder.
        let here = std::env::current_dir().expect("there is a working folder");
        let config = args.config.as_deref().map_or_else(
            || bundle.join("config.json"),
            |path| self.at(path.strip_prefix(&here).expect("the generator's paths are relative")),
        );
        for folder in [&bundle, &container] {
            // A flag may have taken any other word as its value, so the folder may not exist.
            fs::create_dir_all(folder).expect("a folder can be made");
        }
        fs::write(&config, configuration(&self.at(Path::new("rootfs")))).expect("a file can be written");
        let outcome = self.call(words);
        let _ = fs::remove_dir_all(&container);
        fs::remove_file(&config).expect("the file is still there");
        let logged = self.logged();
        let told = format!("{}{}{}", outcome.stdout, outcome.stderr, logged.join(""));
        if is_refused(&told) {
            Reading::None
        } else if !told.contains("already exists") || logged != self.expected_log(args, &logged) {
            Reading::Another(format!("{logged:?} {outcome:?}"))
        } else {
            Reading::Ours
        }
    }

    /// The names and texts of all logs. The logs are removed.
    fn logged(&self) -> Vec<String> {
        let mut logged = Vec::new();
        for name in ["l1", "l2"] {
            let path = self.at(Path::new(name));
            if let Ok(text) = fs::read_to_string(&path) {
                logged.push(format!("{name}: {text}"));
                fs::remove_file(path).expect("a file can be removed");
            }
        }
        logged
    }

    /// The logs that should be there: only the one that `args` names.
    fn expected_log(&self, args: &Args, logged: &[String]) -> Vec<String> {
        // A relative log lies in the bundle for crun and in the caller's folder for runc, so the comparison
        // leaves it out.
        let Some(log) = args.log.as_ref().filter(|log| log.is_absolute()) else { return vec![] };
        let start = format!("{}: ", log.file_name().unwrap_or_default().display());
        let fits = |text: &&String| {
            text.strip_prefix(&start).is_some_and(|text| text.starts_with('{') == args.log_json)
        };
        let found: Vec<String> = logged.iter().filter(fits).cloned().collect();
        if found.is_empty() { vec![format!("{start}nothing")] } else { found }
    }
}

fn configuration(root: &Path) -> String {
    json!({
        "ociVersion": "1.0.2",
        "process": {"user": {"uid": 0, "gid": 0}, "args": ["/true"], "cwd": "/"},
        "root": {"path": root},
        "mounts": [],
        "linux": {"namespaces": [{"type": "mount"}, {"type": "pid"}]},
    })
    .to_string()
}

/// Whether runc or crun says that it opened no bundle.
fn is_refused(told: &str) -> bool {
    let words = [
        "Incorrect Usage",
        "USAGE:",
        "Usage: ",
        "--usage'",
        "No help topic for",
        "unknown command",
        "requires a maximum of",
        "please specify a ID",
        "invalid container ID format",
        "open log file",
        "unknown log format",
        "unknown log-format",
        "unknown cgroup manager",
        "runc version",
        "crun version",
    ];
    words.iter().any(|word| told.contains(word))
}

/// Whether runc or crun says that it opened a bundle without a configuration.
fn opened_a_bundle(told: &str) -> bool {
    told.contains("specification file config.json not found") || told.contains("error loading")
}

/// Compares in a view that the runtime accepts. crun refuses a machine that mixes cgroup v1 and v2 before it
/// looks for the container.
fn in_its_view(low_level: LowLevel) -> (usize, usize) {
    namespace::private(|| {
        if low_level == LowLevel::Crun {
            // Where it is not mounted, nothing is mixed.
            let _ = umount2("/sys/fs/cgroup/unified", MntFlags::MNT_DETACH);
        }
        compare(low_level)
    })
}

/// How many lines the runtime read as we do, and how many our reader passed on unread.
fn compare(low_level: LowLevel) -> (usize, usize) {
    let place = Place::new(low_level);
    let mut random = Random(0x1234_5678_9ABC_DEF1);
    let (mut taken, mut passed) = (0, 0);
    for _ in 0..LINES {
        let here = place.scratch.path().to_string_lossy();
        let words: Vec<String> = line(&mut random).iter().map(|word| word.replace('@', &here)).collect();
        let args = Args::parse(&words.iter().map(OsString::from).collect::<Vec<_>>());
        match args.command {
            args::Command::Unclear(_) | args::Command::Delete => {}
            args::Command::Other | args::Command::Exec | args::Command::Checkpoint => {
                let outcome = place.call(&words);
                let told = format!("{}{}{}", outcome.stdout, outcome.stderr, place.logged().join(""));
                assert!(!opened_a_bundle(&told), "{low_level:?}: passed on unread: {words:?}: {told}");
                passed += 1;
            }
            args::Command::Create | args::Command::Run | args::Command::Restore => {
                match place.reading(&words, &args) {
                    Reading::Ours => taken += 1,
                    Reading::None => {}
                    Reading::Another(told) => panic!("{low_level:?}: {words:?}\nread as {args:?}\n{told}"),
                }
            }
        }
    }
    (taken, passed)
}

#[test]
#[ignore = "needs root, runc and crun: shows them command lines"]
fn a_command_line_is_read_as_the_low_level_runtime_reads_it_or_refused() {
    if !met(&[Need::Root, Need::Runc, Need::Crun]) {
        return;
    }
    let found = std::thread::scope(|scope| {
        let both = LowLevel::ALL.map(|low_level| scope.spawn(move || in_its_view(low_level)));
        both.map(|each| each.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    for (low_level, (taken, passed)) in LowLevel::ALL.iter().zip(found) {
        println!("{low_level:?}: {taken} lines taken as we read them, {passed} passed on unread");
        assert!(taken > LINES / 20 && passed > LINES / 20, "{low_level:?}: {taken}, {passed}");
    }
}

#[test]
#[ignore = "needs root and runc: creates a container"]
fn the_bundle_that_is_named_behind_the_id_is_the_one_that_is_checked() {
    if !met(&[Need::Root, Need::Runc, Need::Busybox]) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let (here, bundle) = (Bundle::small(), Bundle::small().env("GPUSHARE_MEMORY", "4GiB"));
    let log = bundle.path().join("log.json");
    let mut create = runtime.command(&log, ["create", bundle.id(), "--bundle"]);
    let outcome =
        command::run_with_output_in(create.arg(bundle.path()).current_dir(here.path()), bundle.path());
    let granted = leases(runtime.config());
    runtime.delete_force(bundle.id());
    assert!(outcome.success(), "{outcome:?}");
    assert_eq!(granted.len(), 1, "{granted:?}");
    assert_eq!(leases(runtime.config()), []);
}
