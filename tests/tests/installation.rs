//! `make install` makes a tree that works by itself, and `make uninstall` removes it.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use gpushare_tests::artifacts::{self, Installed};
use gpushare_tests::bundle::Bundle;
use gpushare_tests::command;
use gpushare_tests::leases::leases;
use gpushare_tests::machine::Machine;
use gpushare_tests::namespace::private;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::probe::{GIB, OUT_OF_MEMORY, Report, SUCCESS};
use gpushare_tests::runtime::Runtime;
use gpushare_tests::scratch::Scratch;
use gpushare_tests::shim::Shim;
use nix::mount::{MsFlags, mount, umount};

#[test]
#[ignore = "needs root and runc: runs a container"]
fn an_installed_gpushare_runs_without_the_checkout() {
    if !met(&[Need::Root, Need::Runc, Need::Busybox]) {
        return;
    }
    let installed = Installed::new();
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::installed(&installed.wrapper(), &node);
    let bundle = Bundle::with_probe().env("GPUSHARE_MEMORY", "4GiB");
    let container = runtime.run(&bundle);
    let report = Report::of(&container, &["5GiB", "3GiB"]);
    report.assert_size(4 * GIB);
    assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS]);
    drop(container);
    assert_eq!(leases(runtime.config()), []);
}

/// `GPUSHARE_INSTALLED_STARTS` sets the number of starts.
#[test]
#[ignore = "needs root and runc: runs containers"]
fn containers_start_and_end_while_gpushare_is_installed_again_and_again() {
    if !met(&[Need::Root, Need::Runc, Need::Busybox]) {
        return;
    }
    let starts =
        std::env::var("GPUSHARE_INSTALLED_STARTS").ok().and_then(|text| text.parse().ok()).unwrap_or(40);
    let installed = Installed::new();
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::installed(&installed.wrapper(), &node);
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        let installs = scope.spawn(|| {
            let mut installs = 0;
            while !ended.load(Ordering::Relaxed) {
                installed.again();
                installs += 1;
            }
            installs
        });
        let _ended = OnDrop(&ended);
        for start in 0..starts {
            let bundle = Bundle::small().env("GPUSHARE_MEMORY", "4GiB");
            let container =
                runtime.create(&bundle).unwrap_or_else(|refusal| panic!("start {start}: {refusal:?}"));
            container.start();
        }
        ended.store(true, Ordering::Relaxed);
        assert!(installs.join().expect("no install fails") > 3);
    });
    assert_eq!(leases(runtime.config()), []);
}

/// Stops the other thread, also where a start fails.
struct OnDrop<'a>(&'a AtomicBool);

impl Drop for OnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
#[ignore = "needs the release build: copies its files"]
fn uninstalling_leaves_nothing_but_the_administrators_settings() {
    let installed = Installed::new();
    let settings = installed.root().join("etc/gpushare/gpushare.toml");
    assert!(files(installed.root()).len() > 8);
    fs::write(&settings, "# mine\n").expect("the settings can be written");
    installed.uninstall();
    let left = files(installed.root());
    assert!(left.iter().all(|path| *path == settings), "{left:?}");
}

/// What an installer leaves that is killed at once, no program can clear.
#[test]
#[ignore = "needs root and the release build: installs it on disks that are too small"]
fn a_full_disk_is_told_and_nothing_half_written_is_left() {
    if !met(&[Need::Root]) {
        return;
    }
    private(|| {
        let scratch = Scratch::new("full");
        let disk = scratch.folder("disk");
        let call = |script: &str| {
            let script = artifacts::checkout().join("packaging").join(script);
            command::run(Command::new(script).arg(&disk).arg("/usr/local"))
        };
        let half_written = || {
            let left = files(&disk).into_iter();
            left.filter(|path| path.extension().is_some_and(|end| end == "new")).collect::<Vec<_>>()
        };
        // From a disk that lacks room for the first libraries to one that lacks it for the programs.
        for size in (500..=4000).step_by(500) {
            let options = format!("size={size}k,mode=755");
            mount(Some("tmpfs"), &disk, Some("tmpfs"), MsFlags::empty(), Some(options.as_str()))
                .expect("root may mount");
            let told = call("install.sh");
            assert!(!told.success() && told.stderr.contains("No space left"), "{size}: {told:?}");
            assert_eq!(half_written(), [""; 0].map(PathBuf::from), "{size}");
            fs::write(disk.join("usr/local/share/gpushare/.gpushare.toml.new"), "")
                .expect("a name takes no room");
            let units = disk.join("usr/local/lib/systemd/system");
            fs::write(units.join(".gpushare-mps.service.new"), "").expect("a name takes no room");
            let _ = call("uninstall.sh").expect_success("uninstall.sh");
            assert_eq!(files(&disk), [""; 0].map(PathBuf::from), "{size}");
            umount(&disk).expect("root may unmount");
        }
    });
}

#[test]
#[ignore = "needs root and the release build: installs it in a root of its own"]
fn what_would_harm_a_machine_is_refused_and_nothing_is_written_elsewhere() {
    if !met(&[Need::Root]) {
        return;
    }
    private(|| {
        let machine = Machine::new();
        machine.bind(artifacts::checkout());
        let scripts = artifacts::checkout().join("packaging");
        let call = |script: &str| {
            let line = format!("umask 000; exec {}/{script} '' /usr/local", scripts.display());
            machine.run(&["sh", "-c", &line])
        };
        let refused = |script: &str, why: &str| {
            let told = call(script);
            let last = told.stderr.lines().last().unwrap_or_default();
            assert!(!told.success() && last.starts_with(&format!("{script}: ")), "{told:?}");
            assert!(last.contains(why), "{why}: {told:?}");
        };
        let write = |path: &str, text: &str| {
            let path = machine.path(path);
            fs::create_dir_all(path.parent().expect("it lies in a folder")).expect("a folder can be made");
            fs::write(path, text).expect("a file can be written in an overlay");
        };
        let newer = "run/gpushare/leases-of-a-newer-gpushare";
        write(newer, "gpushare leases, version 9999: 0000000000 bytes, crc32 00000000\n");
        refused("install.sh", "has version 9999");
        fs::remove_dir_all(machine.path("run/gpushare")).expect("it can be removed");
        write("run/gpushare/leases-of-an-older-gpushare", "gpushare leases, version 3: 0000000000 bytes\n");
        refused("install.sh", "has version 3");
        fs::remove_dir_all(machine.path("run/gpushare")).expect("it can be removed");
        write("run/gpushare/quota.db", &"x".repeat(100));
        refused("install.sh", "is of an early version");
        assert!(!machine.path("usr/local/bin/gpushare").exists());
        fs::remove_dir_all(machine.path("run/gpushare")).expect("it can be removed");

        // What lies in the way of a file that is written is no file to write to.
        write("precious", "mine");
        fs::create_dir_all(machine.path("usr/local/share/gpushare")).expect("a folder can be made");
        for name in [".runtimeclass.yaml.new", ".pages.new", ".gpushare.toml.new"] {
            symlink("/precious", machine.path("usr/local/share/gpushare").join(name)).expect("a link");
        }
        let _ = call("install.sh").expect_success("install.sh");
        assert_eq!(fs::read_to_string(machine.path("precious")).expect("it is there"), "mine");
        let ours = machine.left().into_iter().filter(|path| path.starts_with("usr/local"));
        let mode =
            |path: &String| fs::metadata(machine.path(path)).expect("it is there").permissions().mode();
        let open: Vec<String> = ours.filter(|path| mode(path) & 0o022 != 0).collect();
        assert_eq!(open, [""; 0], "others may write there");

        // An engine of which nobody can tell whether it names the runtime.
        write("etc/docker/daemon.json", "{\"default-runtime\": \"runc\"}\n");
        let configure = ["/usr/local/bin/gpushare", "configure", "docker", "--default"];
        let _ = machine.run(&configure).expect_success("configure");
        let record = machine.path("etc/docker/daemon.json.before-gpushare");
        fs::remove_file(&record).expect("what it remembers can be removed");
        symlink("/nowhere", &record).expect("a link");
        refused("uninstall.sh", "docker still has the runtime: take /usr/local/bin/gpushare-runtime out of");
        assert!(machine.path("usr/local/bin/gpushare-runtime").exists());
    });
}

#[test]
#[ignore = "needs root and the release build: installs it in a root of its own"]
fn whatever_an_engine_calls_the_runtime_it_is_asked_to_forget_it_first() {
    if !met(&[Need::Root]) {
        return;
    }
    private(|| {
        let machine = Machine::new();
        machine.bind(artifacts::checkout());
        let script = |name: &str, prefix: &str| {
            let script = artifacts::checkout().join("packaging").join(name);
            machine.run(&[&*script.to_string_lossy(), "", prefix])
        };
        // Anybody can open this folder and lock it.
        fs::create_dir_all(machine.path("usr/local")).expect("a folder can be made in an overlay");
        let folder = fs::File::open(machine.path("usr/local")).expect("it is there");
        folder.lock().expect("nobody else has locked it");
        let _ = script("install.sh", "/usr/local/").expect_success("install.sh");

        let template = "/var/lib/rancher/k3s/agent/etc/containerd/config.toml.tmpl";
        let cases: [(&str, &str, &[&str], &str); 4] = [
            (
                "docker",
                "etc/docker",
                &["--name", "gpu"],
                "run `gpushare configure docker --remove --name gpu` first",
            ),
            (
                "crio",
                "etc/crio",
                &["--name", "gpu", "--default"],
                "run `gpushare configure crio --remove --name gpu` first",
            ),
            (
                "containerd",
                "var/lib/rancher/k3s/agent/etc/containerd",
                &["--config", template],
                &format!("run `gpushare configure containerd --remove --config {template}` first"),
            ),
            (
                "podman",
                "etc/containers/containers.conf.d",
                &[],
                "run `gpushare configure podman --remove` first",
            ),
        ];
        for (engine, folder, words, remedy) in cases {
            // Others read the settings that it makes, and write none, whatever the caller's mask.
            for mask in ["077", "000"] {
                // It may not be there.
                let _ = fs::remove_dir_all(machine.path(folder));
                let by_mask = ["sh", "-c", "umask $1; shift; exec \"$@\"", "sh", mask];
                let configure =
                    [&by_mask[..], &["/usr/local/bin/gpushare", "configure", engine], words].concat();
                let _ = machine.run(&configure).expect_success("configure");
                let made = machine.path(folder).metadata().expect("it is there").permissions().mode();
                assert_eq!(made & 0o7777, 0o755, "{engine}, {mask}");
            }
            let told = script("uninstall.sh", "/usr/local");
            let want = format!("uninstall.sh: {engine} still has the runtime: {remedy}");
            assert!(!told.success() && told.stderr.contains(&want), "{want}: {told:?}");
            let (_, command) = remedy.split_once('`').expect("it is a command");
            let (command, _) = command.split_once('`').expect("it has an end");
            let _ = machine.run(&["sh", "-c", &format!("/usr/local/bin/{command}")]).expect_success(command);
        }
        let by_hand = "etc/containerd/by-hand.toml";
        fs::create_dir_all(machine.path("etc/containerd")).expect("a folder can be made in an overlay");
        let main = machine.path("etc/containerd/config.toml");
        fs::write(&main, "version = 2\nimports = [\"/etc/containerd/by-*.toml\"]\n")
            .expect("it can be written");
        let text = "[plugins.x.containerd.runtimes.mine.options]\nBinaryName = \"/usr/local/bin/gpushare-runtime\"\n";
        fs::write(machine.path(by_hand), text).expect("a file can be written in an overlay");
        let told = script("uninstall.sh", "/usr/local");
        let want = "take /usr/local/bin/gpushare-runtime out of /etc/containerd/by-hand.toml first";
        assert!(!told.success() && told.stderr.contains(want), "{told:?}");
        fs::remove_file(machine.path(by_hand)).expect("it can be removed");

        // A container without a share is stopped by the runtime, too.
        let scratch = Scratch::new("runs");
        let notes = [("runtime", "/usr/local/bin/gpushare-runtime".to_owned())];
        let shim = Shim::start(&scratch, &machine, &notes);
        let told = script("uninstall.sh", "/usr/local");
        let want = "container pod-1 still runs by the runtime: end it first";
        assert!(!told.success() && told.stderr.contains(want), "{told:?}");
        drop(shim);
        fs::remove_dir_all(machine.path("run/anywhere")).expect("it can be removed");

        // What names no runtime keeps nobody, however odd it is: not a container's own words, nor a false
        // shim's.
        let words = r#"{"process":{"env":["X=/usr/local/bin/gpushare-runtime"],"args":["\"path\":\"/usr/local/bin/gpushare-x\""]}}"#;
        let notes = [("runtime", "/usr/bin/runc".to_owned()), ("config.json", words.to_owned())];
        let others = Shim::start(&scratch, &machine, &notes);
        let false_one = Shim::false_one(&scratch, "/usr/local/bin/gpushare-runtime", Some(65_534));
        fs::create_dir_all(machine.path("etc/docker")).expect("a folder can be made in an overlay");
        fs::write(machine.path("etc/docker/daemon.json"), "").expect("a file can be written in an overlay");
        // A container of another test may run by a runtime of this path for a moment.
        let mut told = script("uninstall.sh", "/usr/local/");
        let began = Instant::now();
        while told.stderr.contains(" still runs by the runtime") && began.elapsed() < Duration::from_secs(120)
        {
            std::thread::sleep(Duration::from_millis(500));
            told = script("uninstall.sh", "/usr/local/");
        }
        let told = told.expect_success("nobody needs it");
        assert!(!told.stdout.contains("it was changed"), "{told:?}");
        drop((others, false_one));
        fs::remove_dir_all(machine.path("run/anywhere")).expect("it can be removed");
        let left =
            machine.left().into_iter().filter(|path| path.contains("gpushare") && !path.starts_with("var/"));
        assert_eq!(left.collect::<Vec<_>>(), ["run/gpushare-installer.lock"]);
    });
}

#[test]
#[ignore = "needs root and the release build: runs it in a root of its own"]
fn a_program_of_anybody_that_is_called_as_an_engine_misleads_nobody() {
    if !met(&[Need::Root]) {
        return;
    }
    private(|| {
        let machine = Machine::new();
        let own = machine.path("home/eve");
        fs::create_dir_all(&own).expect("a folder can be made in an overlay");
        // It becomes root whoever calls it, and what it is told to do is a name, of what keeps a reader
        // waiting.
        let program = own.join("program");
        let _ = fs::copy(fs::canonicalize("/usr/bin/python3").expect("it is there"), &program)
            .expect("a program can be copied");
        fs::set_permissions(&program, fs::Permissions::from_mode(0o4755)).expect("root may allow it");
        let waits = "import time; time.sleep(1000)";
        let _ = command::run(Command::new("mkfifo").arg(own.join(waits))).expect_success("mkfifo");
        let mut engine = Command::new(&program);
        engine.arg0("containerd").args(["-c", waits]).current_dir(&own).uid(65_534);
        let mut engine = engine.spawn().expect("it starts");
        let status = || fs::read_to_string(format!("/proc/{}/status", engine.id())).unwrap_or_default();
        assert!(
            command::eventually(Duration::from_secs(20), || status().contains("Uid:\t65534\t0\t")),
            "{}",
            status()
        );
        let doctor = command::run(Command::new(artifacts::cli()).arg("doctor"));
        assert!(!doctor.stdout.contains("time.sleep"), "{doctor:?}");
        engine.kill().expect("one's own child can be ended");
        let _ = engine.wait().expect("and waited for");
    });
}

#[test]
#[ignore = "needs the release build: installs its files"]
fn a_relative_folder_is_one_of_the_callers_own() {
    let scratch = Scratch::new("relative");
    for script in ["install.sh", "uninstall.sh"] {
        let mut run = Command::new(artifacts::checkout().join("packaging").join(script));
        let _ = command::run(run.args(["stage", "/usr/local"]).current_dir(scratch.path()))
            .expect_success(script);
        let is_there = scratch.path().join("stage/usr/local/bin/gpushare").exists();
        assert_eq!(is_there, script == "install.sh");
    }
}

#[test]
fn a_prefix_that_is_no_absolute_path_is_refused_by_name() {
    let scratch = Scratch::new("prefix");
    for script in ["install.sh", "uninstall.sh"] {
        for prefix in ["usr/local", "", "."] {
            let mut run = Command::new(artifacts::checkout().join("packaging").join(script));
            let outcome = command::run(run.arg(scratch.path().join("tree")).arg(prefix));
            assert!(!outcome.success(), "{script} {prefix:?}");
            assert!(outcome.stderr.contains("PREFIX must begin with /"), "{outcome:?}");
        }
    }
    assert_eq!(fs::read_dir(scratch.path()).expect("the folder is there").count(), 0);
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

#[test]
#[ignore = "needs root and the release build: installs it twice in a root of its own"]
fn of_two_installations_one_goes_and_leaves_the_other_what_is_its() {
    if !met(&[Need::Root, Need::Docker]) {
        return;
    }
    private(|| {
        let machine = Machine::new();
        machine.bind(artifacts::checkout());
        let script = |name: &str, prefix: &str| {
            let script = artifacts::checkout().join("packaging").join(name);
            machine.run(&[&*script.to_string_lossy(), "", prefix])
        };
        for prefix in ["/usr/local", "/opt/other"] {
            let _ = script("install.sh", prefix).expect_success(prefix);
        }
        let other = |words: &[&str]| machine.run(&[&["/opt/other/bin/gpushare"], words].concat());
        let _ = other(&["configure", "docker"]).expect_success("configure");
        let state = machine.path("run/gpushare/mine");
        fs::create_dir_all(&state).expect("a folder can be made in an overlay");
        let private = fs::Permissions::from_mode(0o700);
        fs::set_permissions(machine.path("run/gpushare"), private).expect("it is private as gpushare's");
        let settings = machine.path("etc/gpushare/gpushare.toml");

        let told = script("uninstall.sh", "/usr/local").expect_success("nobody needs that one");
        assert!(told.stdout.contains("another gpushare works on this machine"), "{told:?}");
        assert!(!machine.path("usr/local/bin/gpushare").exists());
        assert!(state.exists() && settings.exists(), "they are the other one's");

        let refused = script("uninstall.sh", "/opt/other");
        assert!(!refused.success() && refused.stderr.contains("docker still has the runtime"), "{refused:?}");
        // By another name it is the same one.
        symlink("other", machine.path("opt/link")).expect("a link can be made");
        let daemon = machine.path("etc/docker/daemon.json");
        let text = fs::read_to_string(&daemon).expect("configure has made it");
        fs::write(&daemon, text.replace("/opt/other/", "/opt/link/")).expect("it can be written");
        let refused = script("uninstall.sh", "/opt/other");
        assert!(!refused.success() && refused.stderr.contains("docker still has the runtime"), "{refused:?}");

        let _ = other(&["configure", "docker", "--remove"]).expect_success("configure --remove");
        let _ = script("uninstall.sh", "/opt/other").expect_success("the last one goes");
        assert!(!state.exists() && !settings.exists(), "nobody needs them any more");
    });
}
