//! `gpushare configure`: what the engines themselves make of their edited files, and that the edits harm
//! nothing.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use gpushare_tests::artifacts::{self, Installed};
use gpushare_tests::command::{self, Outcome, eventually};
use gpushare_tests::docker::Docker;
use gpushare_tests::leases::leases;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::probe::{GIB, Report};
use gpushare_tests::runtime::LowLevel;
use gpushare_tests::scratch::Scratch;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

const SOON: Duration = Duration::from_secs(20);

/// A containerd of its own, stopped on drop.
struct Containerd(Child);

impl Containerd {
    fn start(file: &Path, socket: &Path, logs: &Path) -> Self {
        let mut containerd = Command::new("/usr/bin/containerd");
        containerd.arg("--config").arg(file).env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        let child = Self(command::spawn(&mut containerd, logs));
        assert!(eventually(Duration::from_secs(60), || socket.exists()), "{}", read(&logs.join("stderr")));
        child
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        // It may have ended before.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A folder with a configuration, and gpushare's own settings beside it.
struct Place {
    scratch: Scratch,
    installed: Installed,
}

impl Place {
    fn new() -> Self {
        let scratch = Scratch::new("configure");
        let _ = scratch.file("gpushare.toml", String::new());
        Self { scratch, installed: Installed::new() }
    }

    fn settings(&self) -> PathBuf {
        self.scratch.path().join("gpushare.toml")
    }

    fn file(&self, name: &str, text: &str) -> PathBuf {
        self.scratch.file(name, text)
    }

    /// `gpushare configure ENGINE --config FILE ARGS...`.
    fn configure(&self, engine: &str, file: &Path, args: &[&str]) -> Outcome {
        configure(&self.installed.cli(), &self.settings(), engine, file, args)
    }

    /// The drop-in that turns grants by environment off.
    fn drop_in(&self, engine: &str) -> PathBuf {
        self.scratch.path().join(format!("gpushare.toml.d/90-default-runtime-of-{engine}.toml"))
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.scratch.path()).expect("the folder can be read").flatten();
        let mut names: Vec<String> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }
}

fn configure(cli: &Path, settings: &Path, engine: &str, file: &Path, args: &[&str]) -> Outcome {
    let mut command = Command::new(cli);
    command.args(["configure", engine, "--config"]).arg(file).args(args).env("GPUSHARE_CONFIG", settings);
    command::run(&mut command)
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn fixtures(engine: &str) -> Vec<PathBuf> {
    let folder = artifacts::checkout().join("cli/tests/configure").join(engine);
    let entries = fs::read_dir(folder).expect("the fixtures are in the checkout").flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|path| path.is_file()).collect();
    files.sort();
    files
}

#[test]
#[ignore = "needs root and containerd: asks it for its settings"]
fn containerd_sees_the_handler_in_every_file_and_its_own_settings_unchanged() {
    if !met(&[Need::Root, Need::Docker]) {
        return;
    }
    let place = Place::new();
    let mut asked = 0;
    for fixture in fixtures("containerd") {
        let old = read(&fixture);
        let name = fixture.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let file = place.file(&name, &old);
        // containerd 1.x does not know the plugins of versions 3 and 4, so it is asked about tables of
        // version 2 only.
        let later = ["version = 3", "version = 4"].iter().any(|line| old.contains(line));
        let known = !name.ends_with(".tmpl") && !later;
        for default in [false, true] {
            let flags: &[&str] = if default { &["--default"] } else { &[] };
            let before = known.then(|| dump(&file));
            let told = place.configure("containerd", &file, flags);
            if !known && !name.ends_with(".tmpl") {
                // What containerd makes of the file decides, and 1.x makes nothing of it.
                assert!(
                    told.success() || told.stderr.contains("not in what containerd makes"),
                    "{name}: {told:?}"
                );
                let _ = place.configure("containerd", &file, &["--remove"]);
                assert_eq!(read(&file), old, "{name}");
                continue;
            }
            let told = told.expect_success(&name);
            if let Some(before) = before {
                asked += 1;
                assert!(told.stdout.contains("containerd config dump"), "{name}: {told:?}");
                assert_eq!(without_handlers(&dump(&file)), without_handlers(&before), "{name}");
            }
            let _ = place.configure("containerd", &file, &["--remove"]).expect_success("configure --remove");
            assert_eq!(read(&file), old, "{name}");
        }
    }
    assert!(asked > 24, "{asked} files were shown to containerd");
}

/// The settings as containerd merges them, line by line.
/// containerd with a default runtime that nothing describes starts no pod.
#[test]
#[ignore = "needs containerd: asks it for its settings"]
fn a_default_that_containerd_does_not_know_any_more_is_not_put_back() {
    if !met(&[Need::Containerd]) {
        return;
    }
    let cri = "plugins.\"io.containerd.grpc.v1.cri\".containerd";
    let described = format!("[{cri}.runtimes.other]\nruntime_type = \"io.containerd.runc.v2\"\n");
    for (before, is_back) in [("other", false), ("runc", true)] {
        let place = Place::new();
        let chosen = format!("version = 2\n[{cri}]\ndefault_runtime_name = \"{before}\"\n");
        let file = place.file("config.toml", &format!("{chosen}{described}"));
        let _ = place.configure("containerd", &file, &["--default"]).expect_success("configure");
        let edited = read(&file);
        assert!(edited.contains(&described));
        fs::write(&file, edited.replace(&described, "")).expect("the administrator can edit it");
        let told = place.configure("containerd", &file, &["--remove"]).expect_success("--remove");
        let chosen = chosen.lines().filter(|line| is_back || !line.contains("default_runtime_name"));
        assert_eq!(read(&file).lines().collect::<Vec<_>>(), chosen.collect::<Vec<_>>());
        let note = format!("the default runtime before, {before}, is not put back");
        assert_eq!(told.stdout.contains(&note) || told.stderr.contains(&note), !is_back, "{told:?}");
    }
}

fn dump(file: &Path) -> Vec<String> {
    let mut containerd = Command::new("/usr/bin/containerd");
    let told = command::run(containerd.arg("--config").arg(file).args(["config", "dump"]));
    told.expect_success("containerd config dump").stdout.lines().map(str::to_owned).collect()
}

/// The lines except for tables of runtimes: those of gpushare and runc may appear, and the default may
/// change.
fn without_handlers(dump: &[String]) -> Vec<&str> {
    let mut skipped = false;
    let rest = dump.iter().map(|line| line.trim()).filter(|line| {
        if line.starts_with('[') {
            skipped = line.contains(".containerd.runtimes");
        }
        !skipped && !line.starts_with("default_runtime_name") && !line.is_empty()
    });
    rest.collect()
}

#[test]
#[ignore = "needs root and podman: asks it for its settings"]
fn podman_sees_the_runtime_in_every_file() {
    if !met(&[Need::Root, Need::Runc, Need::Podman]) {
        return;
    }
    let place = Place::new();
    for fixture in fixtures("podman") {
        let old = read(&fixture);
        let name = fixture.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let file = place.file(&name, &old);
        for flags in [&[][..], &["--default"]] {
            let told = place.configure("podman", &file, flags);
            if old.starts_with('\u{feff}') && !told.success() {
                // podman 4.3 itself does not accept a byte order mark.
                assert!(told.stderr.contains("podman would not take"), "{told:?}");
                assert_eq!(read(&file), old, "{name}");
                continue;
            }
            let told = told.expect_success(&name);
            assert!(told.stdout.contains("podman info"), "{name}: {told:?}");
            let _ = place.configure("podman", &file, &["--remove"]).expect_success("configure --remove");
            assert_eq!(read(&file), old, "{name}");
        }
    }
}

/// Has dockerd read its settings again.
fn reload(docker: &Docker) {
    let pid = read(&docker.folder().join("docker.pid")).trim().parse().expect("dockerd tells its process id");
    kill(Pid::from_raw(pid), Signal::SIGHUP).expect("dockerd lives");
}

#[test]
#[ignore = "needs root and docker: starts a daemon"]
fn docker_runs_a_container_by_the_file_that_configure_wrote_and_learns_of_it_by_a_reload() {
    if !met(&[Need::Root, Need::Runc, Need::Docker, Need::Busybox]) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let config = node.config_with("configure", &LowLevel::Runc.settings());
    let installed = Installed::new();
    let docker = Docker::start(&installed.wrapper(), &config, false);
    let args = ["--rm", "--runtime=gpushare", "-e", "GPUSHARE_MEMORY=4GiB"];
    let probe = ["gpushare-simulator", "probe", "--json"];
    let file = docker.folder().join("daemon.json");
    let old = "{\n  \"runtimes\": {\n    \"other\": { \"path\": \"/usr/bin/runc\" }\n  }\n}\n";
    fs::write(&file, old).expect("the settings of this docker can be written");
    reload(&docker);
    let runtimes = || docker.call(&["info", "--format", "{{json .Runtimes}}"]).stdout;
    let knows = || runtimes().contains("gpushare");
    assert!(
        eventually(SOON, || runtimes().contains("other") && !knows()),
        "dockerd reads its runtimes again on SIGHUP"
    );

    let told = configure(&installed.cli(), &config, "docker", &file, &[]).expect_success("configure docker");
    assert!(told.stdout.contains("decide it by --default-share"), "{told:?}");
    reload(&docker);
    assert!(eventually(SOON, knows), "{}", read(&file));
    // What who names no size gets is decided here, too.
    let by_name = ["--rm", "--runtime=gpushare", "-e", "NVIDIA_VISIBLE_DEVICES=0"];
    for (share, want) in [("25%", Some(20)), ("1GiB", Some(1)), ("refuse", None), ("rest", Some(80))] {
        let words = ["--default-share", share];
        let told = configure(&installed.cli(), &config, "docker", &file, &words).expect_success(share);
        assert!(!told.stdout.contains("decide it"), "{told:?}");
        let told = docker.run(&by_name, &probe);
        match want {
            Some(gib) => Report::parse(&told.expect_success(share).stdout).assert_size(gib * GIB),
            None => assert!(told.stderr.contains("cannot lease a GPU"), "{told:?}"),
        }
    }
    let told = docker.run(&args, &probe).expect_success("docker run --runtime=gpushare");
    Report::parse(&told.stdout).assert_size(4 * GIB);

    // While gpushare is the default runtime, no variable grants, whoever set it.
    let _ = configure(&installed.cli(), &config, "docker", &file, &["--default"]).expect_success("--default");
    reload(&docker);
    let default = || docker.call(&["info", "--format", "{{.DefaultRuntime}}"]).stdout;
    assert!(eventually(SOON, || default() == "gpushare\n"), "{}", default());
    let by_image = ["--rm", "-e", "NVIDIA_VISIBLE_DEVICES=all"];
    let told = docker.run(&by_image, &["ls", "/dev"]).expect_success("docker run by default");
    assert!(!told.stdout.contains("nvidia"), "{told:?}");
    for runtime in [&[][..], &["--runtime=gpushare"]] {
        let told =
            docker.run(&[&by_image[..], &["-e", "GPUSHARE_MEMORY=4GiB"], runtime].concat(), &["ls", "/dev"]);
        assert!(!told.success() && told.stderr.contains("no request on this node (request.env)"), "{told:?}");
    }

    let _ = configure(&installed.cli(), &config, "docker", &file, &["--remove"]).expect_success("--remove");
    assert_eq!(read(&file), old);
    assert_eq!(leases(&config), []);
}

#[test]
#[ignore = "needs root and containerd: starts a daemon"]
fn containerd_serves_cri_with_the_file_that_configure_wrote() {
    if !met(&[Need::Root, Need::Docker]) {
        return;
    }
    let place = Place::new();
    let base = place.scratch.path().display();
    let text = format!(
        "version = 2\nroot = \"{base}/root\"\nstate = \"{base}/state\"\n[grpc]\naddress = \"{base}/c.sock\"\n\
         [plugins.\"io.containerd.internal.v1.opt\"]\npath = \"{base}/opt\"\n\
         [plugins.\"io.containerd.grpc.v1.cri\"]\ndisable_apparmor = true\n\
         [plugins.\"io.containerd.grpc.v1.cri\".containerd]\nsnapshotter = \"native\"\n"
    );
    let file = place.file("config.toml", &text);
    let _ = place.configure("containerd", &file, &["--default"]).expect_success("configure containerd");
    let socket = place.scratch.path().join("c.sock");
    let _containerd = Containerd::start(&file, &socket, &place.scratch.folder("log"));
    let mut ctr = Command::new("/usr/bin/ctr");
    ctr.arg("--address").arg(&socket).args(["plugins", "ls"]);
    let plugins = command::run(&mut ctr).expect_success("ctr plugins ls").stdout;
    let cri = plugins.lines().find(|line| line.contains("io.containerd.grpc.v1") && line.contains(" cri "));
    assert!(cri.is_some_and(|line| line.trim_end().ends_with("ok")), "{plugins}");
}

#[test]
#[ignore = "needs the release build: runs it"]
fn a_dry_run_prints_the_difference_and_changes_nothing() {
    let place = Place::new();
    let file = place.file("daemon.json", "{\n  \"debug\": true\n}\n");
    let before = place.names();
    let told = place.configure("docker", &file, &["--default", "--dry-run"]).expect_success("--dry-run");
    for line in
        ["+  \"default-runtime\": \"gpushare\"", "-  \"debug\": true", "+  \"debug\": true,", "+env = false"]
    {
        assert!(told.stdout.lines().any(|told| told == line), "{line}: {}", told.stdout);
    }
    assert_eq!(read(&file), "{\n  \"debug\": true\n}\n");
    assert_eq!(place.names(), before);
}

#[test]
#[ignore = "needs the release build: runs it"]
fn configuring_again_writes_nothing_and_removing_leaves_nothing() {
    for (engine, name, text) in [
        ("docker", "daemon.json", Some("{\"default-runtime\": \"runc\", \"runtimes\": { }}")),
        ("docker", "daemon.json", None),
        ("containerd", "config.toml", Some("version = 2")),
        ("containerd", "config.toml", None),
        ("containerd", "config.toml.tmpl", None),
        ("crio", "crio.conf", Some("[crio.runtime]\ndefault_runtime = \"crun\"\n")),
        ("crio", "99-gpushare.conf", None),
        ("podman", "containers.conf", Some("[engine]\nruntime = \"crun\"\n")),
        ("podman", "99-gpushare.conf", None),
    ] {
        let place = Place::new();
        let file = place.scratch.path().join(name);
        if let Some(text) = text {
            let _ = place.file(name, text);
            fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).expect("the mode can be set");
        }
        let before = place.names();
        let told = place.configure(engine, &file, &["--default"]).expect_success(engine);
        assert!(told.stdout.contains("variables grant no GPU"), "{engine}: {}", told.stdout);
        assert!(read(&place.drop_in(engine)).contains("env = false"), "{engine}");
        let first = fs::metadata(&file).expect("the file is there");
        assert_eq!(first.mode() & 0o777, if text.is_some() { 0o640 } else { 0o644 }, "{engine}");

        let again = place.configure(engine, &file, &["--json"]).expect_success(engine);
        let again: Value = serde_json::from_str(&again.stdout).expect("--json prints JSON");
        assert_eq!((&again["changed"], &again["engine"]), (&Value::from(false), &Value::from(engine)));
        let second = fs::metadata(&file).expect("the file is there");
        assert_eq!(
            (first.ino(), first.mtime_nsec()),
            (second.ino(), second.mtime_nsec()),
            "{engine}: not written"
        );

        let _ = place.configure(engine, &file, &["--remove"]).expect_success("--remove");
        assert_eq!(fs::read_to_string(&file).ok().as_deref(), text, "{engine}");
        let _ = fs::remove_dir(place.scratch.path().join("gpushare.toml.d"));
        assert_eq!(place.names(), before, "{engine}: nothing is left beside the file");
        let told = place.configure(engine, &file, &["--remove"]).expect_success("--remove again");
        assert!(told.stdout.contains("is not configured"), "{engine}: {}", told.stdout);
    }
}

#[test]
#[ignore = "needs the release build: runs it"]
fn of_two_names_the_one_that_goes_leaves_the_default_and_its_rule_for_variables() {
    for (engine, name, text) in [
        ("docker", "daemon.json", "{\"default-runtime\": \"runc\"}\n"),
        ("containerd", "config.toml", "version = 2\n"),
        ("crio", "crio.conf", "[crio.runtime]\ndefault_runtime = \"crun\"\n"),
        ("podman", "containers.conf", "[engine]\nruntime = \"crun\"\n"),
    ] {
        let place = Place::new();
        let file = place.file(name, text);
        let configure = |args: &[&str]| {
            let _ = place.configure(engine, &file, args).expect_success(engine);
        };
        configure(&["--default"]);
        assert!(place.drop_in(engine).exists(), "{engine}");
        configure(&["--name", "other"]);
        configure(&["--name", "other", "--remove"]);
        assert!(place.drop_in(engine).exists(), "{engine}: variables of images would grant");
        configure(&["--remove"]);
        assert!(!place.drop_in(engine).exists(), "{engine}");
        assert_eq!(read(&file), text, "{engine}");
    }
}

#[test]
#[ignore = "needs the release build: runs it"]
fn what_is_refused_names_file_and_line_and_stays_as_it_is() {
    let place = Place::new();
    for engine in ["docker", "containerd", "crio", "podman"] {
        let folder = artifacts::checkout().join("cli/tests/configure").join(engine).join("refused");
        for entry in fs::read_dir(folder).expect("the fixtures are in the checkout").flatten() {
            let text = read(&entry.path());
            let name = entry.file_name().to_string_lossy().into_owned();
            let file = place.file(&name, &text);
            let told = place.configure(engine, &file, &["--default"]);
            assert_eq!(told.status.code(), Some(1), "{engine}/{name}: {told:?}");
            let wanted = format!("gpushare: {}, line ", file.display());
            assert!(told.stderr.starts_with(&wanted) && told.stderr.lines().count() == 1, "{}", told.stderr);
            assert_eq!(read(&file), text, "{engine}/{name}");
            assert!(!place.drop_in(engine).exists(), "{engine}/{name}: the settings stay as they are too");
        }
    }
}

#[test]
#[ignore = "needs root: fills a file system and makes a file unchangeable"]
fn the_old_file_stands_when_the_new_one_cannot_be_written() {
    if !met(&[Need::Root]) {
        return;
    }
    let place = Place::new();
    let small = place.scratch.folder("small");
    let flags = nix::mount::MsFlags::empty();
    nix::mount::mount(Some("none"), &small, Some("tmpfs"), flags, Some("size=16k"))
        .expect("a tmpfs can be mounted");
    let file = small.join("daemon.json");
    fs::write(&file, "{}\n").expect("there is place yet");
    let _ = fs::write(small.join("full"), vec![0_u8; 64 * 1024]);
    let told = place.configure("docker", &file, &[]);
    let (text, names) = (read(&file), fs::read_dir(&small).expect("the folder can be read").count());
    nix::mount::umount(&small).expect("the tmpfs can be unmounted");
    assert!(!told.success() && told.stderr.contains("cannot write"), "{told:?}");
    assert_eq!((text.as_str(), names), ("{}\n", 2), "no temporary file is left");
}
