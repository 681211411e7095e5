//! The scenarios that are the same for every engine.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use gpushare_tests::artifacts;
use gpushare_tests::command::{self, eventually};
use gpushare_tests::leases::{Lease, leases, leases_of, sweep};
use gpushare_tests::probe::{GIB, OUT_OF_MEMORY, Report, SUCCESS};
use gpushare_tests::view;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::engine::{Engine, FIRST_MAPPED, USER, Wanted, With, report};
use crate::place::Place;
use crate::table::Row;

/// The longest time that engines and kernel may take until a share is released.
pub const SOON: Duration = Duration::from_secs(20);

/// An engine on a node.
pub struct Scene<'s> {
    /// The engine.
    pub engine: &'s mut dyn Engine,
    /// The node and its settings.
    pub place: &'s Place,
    /// How often [`Row::Restart`] restarts.
    pub restarts: usize,
    /// The containers that were run.
    pub names: Vec<&'static str>,
}

/// A scenario. It panics where something does not hold.
pub type Scenario = fn(&mut Scene<'_>);

/// The scenarios that need nothing particular of an engine.
pub const SCENARIOS: &[(Row, Scenario)] = &[
    (Row::Run, runs),
    (Row::NoRequest, touches_nothing),
    (Row::Annotation, reads_an_annotation),
    (Row::Exec, execs),
    (Row::Stop, |scene| ends(scene, |engine| engine.stop("one"))),
    (Row::Kill, |scene| ends(scene, |engine| engine.kill("one"))),
    (Row::Restart, restarts),
    (Row::Pause, pauses),
    (Row::EngineUpdate, keeps_its_rules_over_an_update),
    (Row::ShareUpdate, grows),
    (Row::KilledForMemory, is_killed_for_memory),
    (Row::Refused, is_refused),
    (Row::FailedCreate, fails_to_start),
    (Row::Crash, outlives_its_daemon),
    (Row::ReadOnlyRoot, |scene| restricted(scene, With::ReadOnlyRoot)),
    (Row::User, |scene| restricted(scene, With::User)),
    (Row::NoCapabilities, |scene| restricted(scene, With::NoCapabilities)),
    (Row::NoNewPrivileges, |scene| restricted(scene, With::NoNewPrivileges)),
    (Row::HostPids, |scene| restricted(scene, With::HostPids)),
    (Row::Privileged, |scene| restricted(scene, With::Privileged)),
    (Row::PrivilegedStrict, is_refused_privileges_where_strict),
    (Row::DefaultRuntime, is_the_default),
    (Row::OtherRuntime, leaves_other_runtimes_alone),
];

impl Scene<'_> {
    /// Runs `wanted`, which must start.
    pub fn start(&mut self, wanted: &Wanted) {
        self.try_start(wanted).unwrap_or_else(|said| panic!("{} was refused: {said}", wanted.name));
    }

    /// Runs `wanted`.
    ///
    /// # Errors
    /// With what the engine's user is told when the container is refused.
    pub fn try_start(&mut self, wanted: &Wanted) -> Result<(), String> {
        self.names.push(wanted.name);
        self.engine.run(wanted)
    }

    /// All leases.
    pub fn leases(&self) -> Vec<Lease> {
        leases(&self.place.config)
    }

    /// The leases of the container called `name`.
    pub fn leases_of(&self, name: &str) -> Vec<Lease> {
        leases_of(&self.place.config, &self.engine.id(name))
    }

    /// What the client of the container called `name` reported when it started.
    pub fn report(&self, name: &str) -> Report {
        report(self.engine, name)
    }

    /// What a client that runs in the container now reports.
    pub fn exec_report(&self, name: &str) -> Report {
        let told = self.engine.exec(name, &["gpushare-simulator", "probe", "--json"]);
        Report::parse(&told.expect_success("the CUDA client by exec").stdout)
    }

    /// Asserts that nobody holds a share any more and that its region is gone, soon and without a sweep.
    ///
    /// The region goes last: an engine may call the hooks of a killed container after it has told of its end.
    pub fn assert_all_returned(&self) {
        let left = || (self.leases(), self.place.regions());
        let returned = eventually(SOON, || left() == (Vec::new(), 0));
        assert!(returned, "not given back: leases and regions {:?}", left());
    }

    /// Asserts that the container called `name` has nothing of ours: no lease, no mount, no device node.
    pub fn assert_untouched(&self, name: &str) {
        assert_eq!(self.leases_of(name), [], "{name}");
        assert_untouched(self.engine.pid(name));
    }

    /// Removes every container of the scenario, and asserts that nothing of them is left.
    pub fn clear(&mut self) {
        for name in std::mem::take(&mut self.names) {
            self.engine.remove(name);
        }
        let returned = eventually(SOON, || {
            sweep(&self.place.config);
            self.leases().is_empty()
        });
        assert!(returned, "left after all containers were removed: {:?}", self.leases());
        assert_eq!(self.place.regions(), 0, "regions are left without a lease");
    }
}

/// Asserts that nothing of ours is mounted in the mount namespace of `pid`, and that it has no GPU.
pub fn assert_untouched(pid: i32) {
    let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo")).expect("the process lives");
    let targets = mounts.lines().filter_map(|line| line.split(' ').nth(4));
    let ours: Vec<&str> = targets.filter(|target| is_ours(target)).collect();
    assert_eq!(ours, [""; 0]);
    let nodes = fs::read_dir(format!("/proc/{pid}/root/dev")).expect("the process lives").flatten();
    let nodes: Vec<_> = nodes.map(|node| node.file_name()).collect();
    assert!(!nodes.iter().any(|node| node.to_string_lossy().starts_with("nvidia")), "{nodes:?}");
}

fn is_ours(target: &str) -> bool {
    ["/usr/lib/gpushare", "nvidia", "libcuda"].iter().any(|part| target.contains(part))
}

fn runs(scene: &mut Scene<'_>) {
    scene.start(&Wanted::client("one", &["5GiB", "3GiB"]).share("4GiB"));
    let report = scene.report("one");
    report.assert_size(4 * GIB);
    assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS]);
    let held = scene.leases_of("one");
    let pid = u64::try_from(scene.engine.pid("one")).ok();
    assert_eq!(held.len(), 1, "{held:?}");
    assert_eq!((held[0].state.as_str(), held[0].pid, &held[0].memory[..]), ("active", pid, &[4 * GIB][..]));
}

fn touches_nothing(scene: &mut Scene<'_>) {
    scene.start(&Wanted::waiting("plain"));
    scene.assert_untouched("plain");
}

fn reads_an_annotation(scene: &mut Scene<'_>) {
    scene.start(&Wanted::client("one", &[]).annotation("gpushare.io/memory", "3GiB"));
    scene.report("one").assert_size(3 * GIB);
}

fn execs(scene: &mut Scene<'_>) {
    scene.start(&Wanted::waiting("one").share("4GiB"));
    scene.exec_report("one").assert_size(4 * GIB);
}

fn ends(scene: &mut Scene<'_>, end: fn(&mut dyn Engine)) {
    scene.start(&Wanted::waiting("one").share("4GiB"));
    assert_eq!(scene.leases().len(), 1);
    end(scene.engine);
    scene.assert_all_returned();
}

fn pauses(scene: &mut Scene<'_>) {
    scene.start(&Wanted::waiting("one").share("4GiB"));
    let held = scene.leases();
    scene.engine.pause("one");
    assert!(!scene.engine.is_running("one"), "it is paused");
    sweep(&scene.place.config);
    assert_eq!(scene.leases(), held);
    scene.engine.unpause("one");
    assert!(scene.engine.is_running("one"), "it goes on");
    scene.exec_report("one").assert_size(4 * GIB);
}

fn keeps_its_rules_over_an_update(scene: &mut Scene<'_>) {
    scene.start(&Wanted::waiting("one").share("4GiB"));
    scene.engine.update("one");
    // Without a driver the kernel still tells what the rules allow.
    for (script, want) in [
        ("cat /dev/nvidia0", "No such device or address"),
        ("cat /dev/nvidiactl", "No such device or address"),
        ("busybox mknod /tmp/other c 195 1 && cat /tmp/other", "Operation not permitted"),
    ] {
        let said = scene.engine.exec("one", &["/bin/sh", "-c", script]).stderr;
        assert!(said.contains(want), "{script}: {said}");
    }
    scene.exec_report("one").assert_size(4 * GIB);
}

fn grows(scene: &mut Scene<'_>) {
    scene.start(&Wanted::waiting("one").share("4GiB"));
    // By the name that its user gave it; a bundle run by hand has its id alone.
    let is_named = scene.engine.id("one").len() == 64;
    let name = if is_named { "one".to_owned() } else { scene.engine.id("one") };
    // The limits are mounted where the wrapper ran, so the command runs in the engine's mount namespace, as
    // the engine's administrator would run it.
    let mut update = view::beside(scene.engine.mounts_of(), artifacts::cli().as_os_str());
    update.args(["update", &name, "--memory", "6GiB"]).env("GPUSHARE_CONFIG", &scene.place.config);
    let _ = command::run(&mut update).expect_success("gpushare update");
    scene.exec_report("one").assert_size(6 * GIB);
}

fn is_killed_for_memory(scene: &mut Scene<'_>) {
    // The shell outlives the killed process by some seconds. An engine that hears of the end before the
    // kernel's notice of the kill calls it another end, and on a busy machine that notice takes its time.
    let greedy = |name, seconds| {
        let script = format!(
            "dd if=/dev/zero of=/dev/null bs=200M count=1 && exec sleep 1000; end=$?; sleep {seconds}; exit $end"
        );
        Wanted::shell(name, &script).share("4GiB")
    };
    scene.start(&greedy("free", 0));
    let told = [1, 5, 15].into_iter().any(|seconds| {
        scene.start(&greedy("small", seconds).with(With::LittleMemory));
        assert!(
            eventually(SOON, || !scene.engine.is_running("small")),
            "it got more memory than it may have"
        );
        let told = eventually(SOON, || scene.engine.was_killed_for_memory("small") != Some(false));
        if !told {
            scene.engine.remove("small");
        }
        told
    });
    assert!(scene.engine.is_running("free"), "the same program without a limit goes on");
    assert!(told, "the engine calls it another end");
    let returned = eventually(SOON, || {
        sweep(&scene.place.config);
        scene.leases().len() == 1
    });
    assert!(returned, "{:?}", scene.leases());
}

fn is_refused(scene: &mut Scene<'_>) {
    scene.start(&Wanted::waiting("large").share("70GiB"));
    let late = Wanted::waiting("late").share("20GiB");
    let said = scene.try_start(&late).expect_err("10 GiB are free, 20 GiB are asked");
    let signed = format!("{}: cannot lease a GPU", scene.engine.refuses_as());
    for part in [&*signed, "20 GiB requested", "10 GiB free", "gpushare ps"] {
        assert!(said.contains(part), "{part:?} is not in: {said}");
    }
    assert_eq!(scene.leases().len(), 1, "what was refused holds nothing");
    scene.engine.remove("large");
    scene.engine.remove("late");
    scene.start(&late);
}

fn fails_to_start(scene: &mut Scene<'_>) {
    let mut wrong = Wanted::waiting("wrong").share("80GiB");
    wrong.args = vec!["/no/such/program".to_owned()];
    let said = scene.try_start(&wrong).expect_err("there is no such program");
    assert!(said.contains("/no/such/program"), "{said}");
    if scene.engine.tells_of_a_failed_start() {
        scene.assert_all_returned();
    }
    scene.start(&Wanted::waiting("next").share("80GiB"));
}

fn outlives_its_daemon(scene: &mut Scene<'_>) {
    scene.start(&Wanted::waiting("kept").share("4GiB"));
    scene.start(&Wanted::waiting("gone").share("8GiB"));
    let held = scene.leases_of("kept");
    let gone = Pid::from_raw(scene.engine.pid("gone"));
    scene.engine.crash(&mut || kill(gone, Signal::SIGKILL).expect("init can be killed"));
    assert_eq!(scene.leases_of("kept"), held, "it ran all the time");
    scene.exec_report("kept").assert_size(4 * GIB);
    let returned = eventually(SOON, || {
        sweep(&scene.place.config);
        scene.leases().len() == 1
    });
    assert!(returned, "{:?}", scene.leases());
    assert_eq!(scene.leases_of("kept"), held);
    scene.engine.stop("kept");
    scene.assert_all_returned();
}

fn is_the_default(scene: &mut Scene<'_>) {
    scene.start(&Wanted::client("one", &[]).share("2GiB").with(With::DefaultRuntime));
    scene.report("one").assert_size(2 * GIB);
    scene.start(&Wanted::waiting("plain").with(With::DefaultRuntime));
    scene.assert_untouched("plain");
}

fn leaves_other_runtimes_alone(scene: &mut Scene<'_>) {
    scene.start(&Wanted::waiting("one").share("2GiB"));
    scene.start(&Wanted::waiting("other").share("2GiB").with(With::PlainRunc));
    scene.assert_untouched("other");
    scene.engine.remove("other");
    assert_eq!(scene.leases().len(), 1);
}

fn is_refused_privileges_where_strict(scene: &mut Scene<'_>) {
    let place = scene.place;
    let strict = "[request]\nstrict = true\nenv_ceiling = \"4GiB\"";
    place.under(strict, || scene.start(&Wanted::waiting("one").share("4GiB")));
    scene.engine.remove("one");
    let privileged = Wanted::waiting("privileged").share("4GiB").with(With::Privileged);
    let said = place.under(strict, || scene.try_start(&privileged));
    let said = said.expect_err("a privileged container gets no share on such a node");
    assert!(said.contains("privileged container") && said.contains("request.strict"), "{said}");
    let other = Wanted::waiting("other").share("4GiB");
    let said = place.under("[request]\nstrict = true", || scene.try_start(&other));
    let said = said.expect_err("without a ceiling nobody's variables grant");
    assert!(said.contains("trusted annotations"), "{said}");
    scene.assert_all_returned();
}

/// Runs a container with a share that differs by `with`, and checks that the kernel enforces the difference.
pub fn restricted(scene: &mut Scene<'_>, with: With) {
    scene.start(&Wanted::client("one", &["3GiB", "1GiB"]).share("2GiB").with(with));
    let report = scene.report("one");
    report.assert_size(2 * GIB);
    assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS]);
    let pid = scene.engine.pid("one");
    let file = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
    let field = |name: &str| {
        let line = file("status").lines().find_map(|line| line.strip_prefix(name).map(str::to_owned));
        line.unwrap_or_default().split_whitespace().next().unwrap_or_default().to_owned()
    };
    match with {
        With::ReadOnlyRoot => {
            let root = file("mountinfo");
            let root =
                root.lines().rev().find(|line| line.split(' ').nth(4) == Some("/")).unwrap_or_default();
            assert!(root.split(' ').nth(5).is_some_and(|options| options.starts_with("ro")), "{root}");
        }
        With::User => assert_eq!(field("Uid:"), USER.to_string()),
        With::NoCapabilities => assert_eq!(field("CapEff:"), "0000000000000000"),
        With::NoNewPrivileges => assert_eq!(field("NoNewPrivs:"), "1"),
        With::HostPids => {
            let namespace = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/pid")).expect("it lives");
            assert_eq!(namespace(&pid.to_string()), namespace("self"));
        }
        With::UserNamespace => {
            let map = file("uid_map");
            let map: Vec<&str> = map.split_whitespace().take(2).collect();
            assert_eq!(map, ["0", &FIRST_MAPPED.to_string()]);
        }
        With::Privileged => {
            let said = scene
                .engine
                .exec("one", &["/bin/sh", "-c", "busybox mknod /tmp/other c 195 1; cat /tmp/other"]);
            assert!(said.stderr.contains("No such device or address"), "{said:?}");
        }
        other => unreachable!("{other:?} is no restriction"),
    }
}

/// What must not pile up when containers are restarted.
#[derive(Debug, PartialEq, Eq)]
struct Footprint {
    leases: usize,
    regions: usize,
    mounts: usize,
    image_files: BTreeSet<PathBuf>,
}

impl Footprint {
    fn of(scene: &Scene<'_>, name: &str) -> Self {
        let mounts = fs::read_to_string(format!("/proc/{}/mountinfo", scene.engine.mounts_of()));
        let folders = [scene.engine.folder().to_owned(), scene.place.folder()]
            .map(|path| path.to_string_lossy().into_owned());
        let below = |line: &&str| folders.iter().any(|folder| line.contains(folder.as_str()));
        let mut image_files = BTreeSet::new();
        let root = PathBuf::from(format!("/proc/{}/root/", scene.engine.pid(name)));
        walk(&root, &root, &mut image_files);
        Self {
            leases: scene.leases().len(),
            regions: scene.place.regions(),
            mounts: mounts.expect("the engine lives").lines().filter(below).count(),
            image_files,
        }
    }
}

/// Finds every path of the file system of `root`, without what is mounted in it.
fn walk(root: &Path, folder: &Path, found: &mut BTreeSet<PathBuf>) {
    let device = |path: &Path| fs::symlink_metadata(path).map(|metadata| metadata.dev()).ok();
    let own = fs::metadata(root).map(|metadata| metadata.dev()).ok();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        found.insert(path.strip_prefix(root).unwrap_or(&path).to_owned());
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) && device(&path) == own {
            walk(root, &path, found);
        }
    }
}

fn restarts(scene: &mut Scene<'_>) {
    scene.start(&Wanted::waiting("one").share("4GiB"));
    let before = Footprint::of(scene, "one");
    assert_eq!((before.leases, before.regions), (1, 1));
    assert!(before.image_files.contains(Path::new("usr/bin/busybox")), "the image was looked through");
    for _ in 0..scene.restarts {
        scene.engine.restart("one");
    }
    assert_eq!(Footprint::of(scene, "one"), before, "after {} restarts", scene.restarts);
    scene.exec_report("one").assert_size(4 * GIB);
}
