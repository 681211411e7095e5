//! What breaks around gpushare: a sick GPU, a stopped process, a full or limited system. Nothing is granted
//! twice, nothing is lost, and each time a message says what is wrong and what to do.

use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use gpushare_tests::artifacts;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::command::{self, eventually};
use gpushare_tests::leases::{cli, leases, shares, sweep, told};
use gpushare_tests::meter;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::{MODEL, SimulatedNode};
use gpushare_tests::regions;
use gpushare_tests::runtime::{LowLevel, Runtime};
use gpushare_tests::scratch::Scratch;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Busybox];

fn share() -> Bundle {
    Bundle::small().env("GPUSHARE_MEMORY", "4GiB")
}

/// The `information` file of the GPU with this index.
fn information(node: &SimulatedNode, index: usize) -> PathBuf {
    let folder = node.proc_driver().join("gpus");
    let mut gpus: Vec<PathBuf> = fs::read_dir(&folder)
        .expect("the node has GPUs")
        .map(|entry| entry.expect("an entry").path())
        .collect();
    gpus.sort();
    gpus[index].join("information")
}

fn uuids(config: &Path) -> Vec<String> {
    let told = cli(config, &["devices", "--json"]).expect_success("devices");
    let told: Value = serde_json::from_str(&told.stdout).expect("devices prints JSON");
    let gpus = told["gpus"].as_array().expect("a list of GPUs");
    gpus.iter().map(|gpu| gpu["uuid"].as_str().expect("a UUID").to_owned()).collect()
}

/// The UUID of the first GPU of the only lease.
fn granted(config: &Path) -> String {
    shares(config)[0]["gpus"][0]["uuid"].as_str().expect("a UUID").to_owned()
}

/// The GPU with index 1 looks as if it fell off the bus, and the one with index 3 has no device node. Once
/// before NVML was asked, once after.
#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_sick_gpu_takes_nothing_but_itself_away() {
    if !met(NEEDS) {
        return;
    }
    for known_before in [false, true] {
        let node = SimulatedNode::create(4, MODEL, "80GiB");
        let runtime = Runtime::wrapped(LowLevel::Runc, &node);
        let all = if known_before { uuids(runtime.config()) } else { Vec::new() };
        let whole = fs::read(information(&node, 1)).expect("the file can be read");
        fs::write(information(&node, 1), "").expect("the file can be written");
        let fourth = node.root().join("dev/nvidia3");
        fs::rename(&fourth, fourth.with_extension("away")).expect("the node can be moved");

        let third = Bundle::small().env("GPUSHARE_MEMORY", "4GiB").env("GPUSHARE_DEVICES", "2");
        let container = runtime.run(&third);
        let granted = granted(runtime.config());
        assert_eq!(uuids(runtime.config()).len(), 2);
        assert_eq!(uuids(runtime.config())[1], granted, "the third keeps its index");
        if known_before {
            assert_eq!(all[2], granted);
        }
        drop(container);
        let both = Bundle::small().env("GPUSHARE_MEMORY", "4GiB").env("GPUSHARE_COUNT", "2");
        drop(runtime.run(&both));

        for (name, value) in [("GPUSHARE_DEVICES", "1"), ("GPUSHARE_DEVICES", "3"), ("GPUSHARE_COUNT", "3")] {
            let asks = Bundle::small().env("GPUSHARE_MEMORY", "4GiB").env(name, value);
            let line = runtime.create(&asks).map(drop).expect_err("it is sick").line();
            for part in ["GPU 1 at", "Device Minor", "GPU 3 at", "nvidia3", "out of service"] {
                assert!(line.contains(part), "{name}={value}: no {part:?} in: {line}");
            }
        }
        // A bundle that brings the sick GPU's node must not get it.
        let minor = 1;
        let brings = share().edit(|json| {
            json["linux"]["devices"] = serde_json::json!([
                {"path": "/dev/nvidia1", "type": "c", "major": 195, "minor": minor, "fileMode": 438, "uid": 0, "gid": 0}
            ]);
            json["linux"]["resources"]["devices"] = serde_json::json!([
                {"allow": false, "access": "rwm"}, {"allow": true, "type": "c", "major": 195, "minor": minor, "access": "rwm"}
            ]);
        });
        if let Ok(container) = runtime.create(&brings) {
            let inside = format!("/proc/{}/root/dev/nvidia", container.pid());
            let has = |minor: &str| Path::new(&format!("{inside}{minor}")).exists();
            assert!(has("ctl") && !has("1"), "the sick GPU's node is in the container");
        }

        let table = cli(runtime.config(), &["devices"]).expect_success("devices").stdout;
        assert!(table.contains("GPU 1 at") && table.contains("GPU 3 at"), "{table}");
        let doctor = cli(runtime.config(), &["doctor"]).stdout;
        assert!(
            doctor.lines().any(|line| line.starts_with("FAILURE") && line.contains("GPU 1 at")),
            "{doctor}"
        );
        // The other GPUs' nodes are made nevertheless.
        let third = node.root().join("dev/nvidia2");
        fs::remove_file(&third).expect("the node can be removed");
        let made = cli(runtime.config(), &["system", "nodes"]);
        assert!(third.exists(), "{made:?}");
        let plan = cli(runtime.config(), &["plan", "--bundle", both.path().to_str().expect("a plain path")]);
        assert!(plan.success(), "{plan:?}");
        assert_eq!(leases(runtime.config()), []);

        fs::write(information(&node, 1), whole).expect("the file can be written");
        if !fourth.exists() {
            fs::rename(fourth.with_extension("away"), &fourth).expect("the node can be moved");
        }
        assert_eq!(uuids(runtime.config()).len(), 4, "they are well again");
        let four = Bundle::small().env("GPUSHARE_MEMORY", "4GiB").env("GPUSHARE_COUNT", "4");
        drop(runtime.run(&four));
    }
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_sweep_in_another_pid_namespace_gives_nothing_away() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let bundle = share();
    let container = runtime.run(&bundle);
    for verb in ["sweep", "ps", "doctor"] {
        let mut inside = Command::new("unshare");
        inside.args(["--pid", "--fork", "--mount-proc"]).arg(artifacts::cli()).arg(verb);
        let told = command::run(inside.env("GPUSHARE_CONFIG", node.config()));
        let said = format!("{}{}", told.stdout, told.stderr);
        assert!(!told.success() && said.contains("hostPID"), "{verb}: {said}");
        // Start times differ in another time namespace.
        let mut later = Command::new("unshare");
        later.args(["--time", "--boottime", "1000", "--fork"]).arg(artifacts::cli()).arg(verb);
        let told = command::run(later.env("GPUSHARE_CONFIG", node.config()));
        let said = format!("{}{}", told.stdout, told.stderr);
        assert!(!told.success() && said.contains("of time"), "{verb}: {said}");
    }
    assert_eq!(leases(runtime.config()).len(), 1);
    drop(container);
    assert_eq!(leases(runtime.config()), []);
}

/// A process that holds the turn to write, or another lock of the state folder, and is stopped by a signal.
struct Stopped(Child);

impl Stopped {
    fn holding(lock: &Path) -> Self {
        let mut holder = Command::new("flock");
        holder.arg("--close").arg(lock).args(["sh", "-c", "echo; read x"]);
        let mut child = holder.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("flock starts");
        std::io::Read::read_exact(child.stdout.as_mut().expect("a pipe"), &mut [0]).expect("it has the lock");
        // Whoever of ours locks a file says there who that is.
        let pid = child.id();
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("it runs");
        let start =
            stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(19)).expect("its start");
        fs::write(lock, format!("{pid:>10} {start:>20}\n")).expect("the lock can be written");
        kill(Self::pid_of(&child), Signal::SIGSTOP).expect("it can be stopped");
        Self(child)
    }

    fn pid_of(child: &Child) -> Pid {
        Pid::from_raw(child.id().try_into().expect("a pid"))
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn who_is_stopped_with_the_turn_or_as_the_meter_is_named_with_the_remedy() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    drop(runtime.run(&share()));
    let holder = Stopped::holding(&node.state().join("quota.lock"));
    let remedy = format!("kill -CONT {}", holder.0.id());
    let line = runtime.create(&share()).map(drop).expect_err("nobody gets the turn").line();
    assert!(line.contains("stopped") && line.contains(&remedy), "{line}");
    assert!(line.contains(&*node.state().to_string_lossy()), "{line}");
    let doctor = cli(runtime.config(), &["doctor"]).stdout;
    assert!(doctor.contains(&remedy), "{doctor}");
    drop(holder);
    let meter = Stopped::holding(&node.state().join("meter.lock"));
    let doctor = cli(runtime.config(), &["doctor"]).stdout;
    let named =
        |line: &&str| line.starts_with("FAILURE") && line.contains(&format!("kill -CONT {}", meter.0.id()));
    assert!(doctor.lines().any(|line| named(&line)), "{doctor}");
    drop(meter);
    drop(runtime.run(&share()));
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_dead_containers_lease_ends_though_others_are_in_its_cgroup() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let bundle = share();
    let container = runtime.run(&bundle);
    let path = command::run(Command::new("cat").arg(format!("/proc/{}/cgroup", container.pid())));
    let devices =
        path.stdout.lines().find_map(|line| line.split_once(":devices:")).map(|(_, path)| path.to_owned());
    let cgroup = match devices {
        Some(path) => PathBuf::from(format!("/sys/fs/cgroup/devices{path}")),
        None => PathBuf::from(format!("/sys/fs/cgroup{}", path.stdout.trim().trim_start_matches("0::"))),
    };
    // A process that sees other mounts than the host's, as a process of a container without a cgroup of its
    // own does.
    let mut stranger =
        Command::new("unshare").args(["--mount", "sleep", "600"]).spawn().expect("unshare starts");
    fs::write(cgroup.join("cgroup.procs"), stranger.id().to_string()).expect("it can be put there");
    kill(Pid::from_raw(container.pid()), Signal::SIGKILL).expect("init can be killed");
    assert!(container.wait_stopped(Duration::from_secs(10)));
    let gone = eventually(Duration::from_secs(10), || {
        sweep(runtime.config());
        leases(runtime.config()).is_empty()
    });
    let _ = stranger.kill();
    let _ = stranger.wait();
    assert!(gone, "{:?}", leases(runtime.config()));
}

/// The command runs in a cgroup that allows no more processes or threads, while another process has the turn
/// for some time.
#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_process_that_may_start_no_thread_waits_for_its_turn_all_the_same() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    drop(runtime.run(&share()));
    let Some(cgroup) = pids_cgroup() else { panic!("no pids controller") };
    fs::write(cgroup.join("pids.max"), "1").expect("the limit can be set");
    let lock =
        fs::File::options().write(true).open(node.state().join("quota.lock")).expect("the lock is there");
    lock.lock().expect("a lock can be taken");
    let script = "echo $$ > \"$1/cgroup.procs\"; shift; exec \"$@\"";
    let mut limited = Command::new("sh");
    limited.args(["-c", script, "sh"]).arg(&cgroup).arg(artifacts::cli()).arg("doctor");
    limited.env("GPUSHARE_CONFIG", node.config()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = limited.spawn().expect("sh starts");
    std::thread::sleep(Duration::from_millis(300));
    drop(lock);
    let output = child.wait_with_output().expect("it ends");
    let _ = fs::remove_dir(&cgroup);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(!err.contains("panicked"), "{err}");
    assert!(out.lines().any(|line| line.starts_with("ok") && line.contains("0 share(s) held")), "{out}{err}");
}

fn pids_cgroup() -> Option<PathBuf> {
    let name = format!("gpushare-faults-{}", std::process::id());
    let made = ["/sys/fs/cgroup/pids", "/sys/fs/cgroup"].iter().map(|base| Path::new(base).join(&name));
    made.into_iter().find(|path| fs::create_dir(path).is_ok() && path.join("pids.max").exists())
}

/// Under a limit on file sizes: one line, no lease, and no death by a signal.
#[test]
#[ignore = "needs root and runc: would run containers"]
fn a_limit_on_file_sizes_is_told_and_kills_nothing_of_ours() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    drop(runtime.run(&share()));
    let bundle = share();
    bundle.write();
    let scratch = Scratch::new("limits");
    let mut told = 0;
    for bytes in [0, 512, 1024, 4096, 8192, 16384] {
        let log = scratch.path().join(format!("log-{bytes}"));
        let mut create = runtime.command(&log, ["create", "--bundle"]);
        create.arg(bundle.path()).arg(bundle.id());
        let mut limited = Command::new("prlimit");
        limited.arg(format!("--fsize={bytes}")).arg("--").arg(create.get_program()).args(create.get_args());
        limited.envs(create.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let output = limited.output().expect("prlimit starts");
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code().is_some(), "{bytes}: {:?} {err}", output.status);
        if err.contains("gpushare-runtime: ") {
            told += 1;
        }
        runtime.delete_force(bundle.id());
        sweep(runtime.config());
        assert_eq!(leases(runtime.config()), [], "{bytes}: {err}");
    }
    assert!(told > 0, "no limit was small enough for us");
    drop(runtime.run(&bundle));
}

#[test]
#[ignore = "needs root and runc: would run containers"]
fn a_file_system_without_inodes_is_told_in_our_words() {
    if !met(NEEDS) {
        return;
    }
    let scratch = Scratch::new("inodes");
    let node = SimulatedNode::one_gpu();
    let state = scratch.path().join("mount");
    fs::create_dir(&state).expect("a folder can be made");
    let mount = |inodes: u32| {
        let options = format!("nr_inodes={inodes},mode=700");
        let mounted =
            command::run(Command::new("mount").args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(&state));
        assert!(mounted.success(), "{mounted:?}");
    };
    let settings = node.config_with("inodes.toml", "");
    let text = fs::read_to_string(&settings).expect("the settings can be read");
    let text = text.replace(&node.state().display().to_string(), &state.join("run").display().to_string());
    fs::write(&settings, text).expect("the settings can be written");
    let mut refused = 0;
    for inodes in 2..16 {
        mount(inodes);
        let runtime = Runtime::with_config(LowLevel::Runc, &settings);
        if let Err(refusal) = runtime.create(&share()) {
            let line = refusal.line();
            refused += 1;
            assert!(
                line.contains("state folder") || line.contains("quota store") || line.contains("run/"),
                "{line}"
            );
            assert!(!line.contains("os error"), "{line}");
        }
        let unmounted = command::run(Command::new("umount").args(["--recursive"]).arg(&state));
        assert!(unmounted.success(), "{unmounted:?}");
    }
    assert!(refused > 3, "{refused}");
}

#[test]
#[ignore = "needs root and crun: would run containers"]
fn why_a_container_was_refused_stands_in_the_history_whatever_its_engine_says() {
    if !met(&[Need::Root, Need::Crun, Need::Busybox]) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let wrapped = Runtime::wrapped(LowLevel::Crun, &node);
    let config = node.config().to_str().expect("a plain path");
    let asks = || Bundle::small().env("GPUSHARE_MEMORY", "81GiB");
    let hooked = asks().hook("createRuntime", &artifacts::hook(), &["createRuntime", "--config", config]);
    for (runtime, bundle) in [(wrapped, asks()), (Runtime::bare(LowLevel::Crun), hooked)] {
        assert!(runtime.create(&bundle).is_err());
        let table = cli(node.config(), &["history"]).expect_success("history").stdout;
        let line = table.lines().find(|line| line.contains(bundle.id()));
        assert!(line.is_some_and(|line| line.contains("refused") && line.contains("81 GiB")), "{table}");
        let history = told(node.config(), &["history", "--json"]);
        let of_it = |entry: &Value| entry["id"] == bundle.id() && entry["kind"] == "request";
        assert!(history["refusals"].as_array().expect("a list").iter().any(of_it), "{history}");
    }
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_folder_that_others_may_write_holds_neither_settings_nor_a_node() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let scratch = Scratch::new("foreign");
    let settings = scratch.path().join("gpushare.toml");
    fs::copy(node.config(), &settings).expect("the settings can be copied");
    let drop_ins = scratch.path().join("gpushare.toml.d");
    fs::create_dir(&drop_ins).expect("a folder can be made");
    let check = || cli(&settings, &["config", "check"]);
    let mode = |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("a mode can be set")
    };
    mode(scratch.path(), 0o755);
    assert!(check().success(), "{:?}", check());
    for (folder, bits, owner, refused) in [
        (&drop_ins, 0o777, 0, true),
        (&drop_ins, 0o1777, 0, true),
        (&drop_ins, 0o775, 0, true),
        (&drop_ins, 0o755, 1000, true),
        (&drop_ins, 0o755, 0, false),
        (&scratch.path().to_path_buf(), 0o777, 0, true),
        (&scratch.path().to_path_buf(), 0o1777, 0, false),
        (&scratch.path().to_path_buf(), 0o755, 1000, true),
        (&scratch.path().to_path_buf(), 0o755, 0, false),
    ] {
        mode(folder, bits);
        chown(folder, Some(owner), None).expect("an owner can be set");
        let told = check();
        assert_eq!(!told.success(), refused, "{folder:?} {bits:o} of {owner}: {told:?}");
        assert!(!refused || told.stderr.contains("settings folder"), "{told:?}");
    }
    let runtime = Runtime::with_config(LowLevel::Runc, &settings);
    mode(&drop_ins, 0o777);
    let line = runtime.create(&share()).map(drop).expect_err("others may write its settings").line();
    assert!(line.contains("settings folder"), "{line}");

    for (bits, owner, refused) in [(0o777, 0, true), (0o755, 1000, true), (0o755, 0, false)] {
        let folder = scratch.path().join(format!("node-{bits:o}-{owner}"));
        fs::create_dir(&folder).expect("a folder can be made");
        mode(&folder, bits);
        chown(&folder, Some(owner), None).expect("an owner can be set");
        let made = command::run(Command::new(artifacts::simulator()).arg("create").arg(&folder));
        assert_eq!(!made.success(), refused, "{bits:o} of {owner}: {made:?}");
    }
}

/// The low-level runtime is started with the signals and descriptors that the engine had set.
#[test]
fn signals_and_descriptors_pass_through_as_they_were() {
    let scratch = Scratch::new("inherited");
    let seen = scratch.path().join("seen");
    let script = format!(
        "#!/bin/sh\nfor n in 0 1 2; do [ -e /proc/$$/fd/$n ] && fds=$fds$n; done\n\
         {{ grep -E 'Sig(Blk|Ign)' /proc/self/status; echo $fds; }} >{}\n",
        seen.display()
    );
    let stand_in = scratch.file("runc", script);
    fs::set_permissions(&stand_in, fs::Permissions::from_mode(0o755)).expect("a mode can be set");
    let settings = scratch
        .file("gpushare.toml", format!("[runtime]\ncandidates = [{:?}]\n", stand_in.display().to_string()));
    let start = |program: &Path, closed: &str, ignored: &str| {
        // A signal that a shell ignores stays ignored in the programs that it starts.
        let script = format!("trap '' {ignored} USR1; exec \"$1\" state x {closed}");
        let mut shell = Command::new("sh");
        shell.args(["-c", &script, "sh"]).arg(program).env("GPUSHARE_CONFIG", &settings);
        assert!(command::run(&mut shell).success(), "{closed:?}");
        fs::read_to_string(&seen).expect("the stand-in ran")
    };
    for closed in ["", "<&-", ">&-", "2>&-", "<&- >&- 2>&-"] {
        for ignored in ["", "PIPE", "XFSZ", "PIPE XFSZ"] {
            let wrapped = start(&artifacts::wrapper(), closed, ignored);
            assert_eq!(wrapped, start(&stand_in, closed, ignored), "{closed:?} {ignored:?}");
        }
    }
}

#[test]
#[ignore = "needs root: calls the hook as another user"]
fn a_hook_that_may_not_look_at_the_store_says_so() {
    if !met(&[Need::Root, Need::Runc, Need::Busybox]) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    drop(runtime.run(&share()));
    let scratch = Scratch::new("poststop");
    let hook = scratch.path().join("gpushare-hook");
    fs::copy(artifacts::hook(), &hook).expect("the hook can be copied");
    let settings = scratch.file("gpushare.toml", fs::read(node.config()).expect("the settings can be read"));
    fs::set_permissions(&settings, fs::Permissions::from_mode(0o644)).expect("a mode can be set");
    let state = scratch.file("state", r#"{"ociVersion":"1.0.2","id":"a","status":"stopped","bundle":"/x"}"#);
    let call = |user: &str| {
        let mut call = Command::new("setpriv");
        call.args(["--reuid", user, "--clear-groups"])
            .arg(&hook)
            .args(["poststop", "--config"])
            .arg(&settings);
        call.stdin(fs::File::open(&state).expect("the state can be read")).output().expect("setpriv starts")
    };
    assert!(call("0").status.success(), "{:?}", call("0"));
    let told = call("1000");
    let words = String::from_utf8_lossy(&told.stderr);
    assert!(!told.status.success() && words.contains("run as root"), "{told:?}");
}

/// A command looks from a mount namespace that is younger than the regions'. The node is one whose init is in
/// the older namespace, as on any machine.
#[test]
#[ignore = "needs root and runc: runs a container"]
fn who_looks_from_a_younger_mount_namespace_finds_what_containers_use() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let bundle = Bundle::small().env("GPUSHARE_MEMORY", "4GiB");
    bundle.write();
    let script = r#"
        root=$1 bundle=$2 id=$3 wrapper=$4 cli=$5
        $wrapper --root $root run --detach --bundle $bundle $id </dev/null >/dev/null 2>$root.log ||
            cat $root.log >&2
        unshare --mount $cli ps --json
        $wrapper --root $root delete --force $id
    "#;
    let mut init = Command::new("unshare");
    init.args(["--pid", "--mount", "--fork", "--mount-proc", "--kill-child", "/bin/sh", "-c", script, "sh"])
        .arg(runtime.root())
        .arg(bundle.path())
        .arg(bundle.id())
        .args([artifacts::wrapper(), artifacts::cli()])
        .env("GPUSHARE_CONFIG", runtime.config());
    let seen = command::run(&mut init).expect_success("a node in a pid namespace of its own").stdout;
    let list: Value = serde_json::from_str(&seen).expect("JSON");
    assert_eq!(list["shares"][0]["gpus"][0]["used_bytes"], 0, "{seen}");
}

/// The container's files are changed to what a gpushare with layout 3 would have.
#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_container_of_another_version_keeps_its_files_as_they_are() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let bundle = Bundle::with_probe().env("GPUSHARE_MEMORY", "4GiB").env("GPUSHARE_CORES", "30");
    let container = runtime.run(&bundle);
    let lease = regions::ids(&node.state()).pop().expect("there is a region");
    let limits = node.state().join("limits").join(&lease);
    let new_limits = limits.with_extension("3");
    fs::rename(&limits, &new_limits).expect("it can be renamed");
    let region = PathBuf::from("/").join(&lease);
    let renamed = regions::within(&node.state(), || fs::rename(region.join("usage"), region.join("usage.3")));
    renamed.expect("it can be renamed");
    let new_usage = PathBuf::from(format!("/proc/{}/root{}", container.pid(), regions::USAGE));
    for file in [&new_limits, &new_usage] {
        let file = fs::File::options().write(true).open(file).expect("it can be opened");
        file.write_all_at(&3_u32.to_ne_bytes(), 8).expect("it can be written");
    }
    let before = [&new_limits, &new_usage].map(|file| fs::read(file).expect("it can be read"));

    let meter = meter::start(runtime.config());
    std::thread::sleep(Duration::from_secs(3));
    sweep(runtime.config());
    let update = cli(runtime.config(), &["update", bundle.id(), "--memory", "2GiB"]);
    assert!(!update.success() && update.stderr.contains("another version"), "{update:?}");
    let ps = cli(runtime.config(), &["ps"]).expect_success("ps").stdout;
    assert!(ps.contains(bundle.id()) && ps.contains("4 GiB") && !ps.contains("CHEATING"), "{ps}");
    let doctor = cli(runtime.config(), &["doctor"]).stdout;
    assert!(
        doctor.lines().any(|line| line.contains("regions") && line.contains("another version")),
        "{doctor}"
    );
    assert!(!doctor.contains("cheating"), "{doctor}");
    assert!(!meter.log().contains("share broken"), "{}", meter.log());
    let after = [&new_limits, &new_usage].map(|file| fs::read(file).expect("it can be read"));
    assert!(before == after, "somebody wrote into them");

    // Our library finds limits of another layout: it grants nothing and says why.
    let told = container.exec(&["/bin/gpushare-simulator", "probe", "--json", "--allocate", "1GiB"]);
    assert!(told.stderr.contains("start it anew"), "{told:?}");
    drop(container);
    assert_eq!(leases(runtime.config()), []);
    assert_eq!(regions::left(&node.state()), Vec::<PathBuf>::new());
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn what_an_ended_container_held_is_shown_as_free_before_anybody_swept() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let bundle = share();
    let container = runtime.run(&bundle);
    let granted = || {
        let told = cli(runtime.config(), &["devices", "--json"]).expect_success("devices").stdout;
        let told: Value = serde_json::from_str(&told).expect("devices prints JSON");
        told["gpus"][0]["granted_bytes"].as_u64().expect("a number")
    };
    assert_eq!(granted(), 4 << 30);
    kill(Pid::from_raw(container.pid()), Signal::SIGKILL).expect("init can be killed");
    assert!(container.wait_stopped(Duration::from_secs(10)));
    assert!(eventually(Duration::from_secs(5), || granted() == 0), "{}", granted());
    assert_eq!(leases(runtime.config()).len(), 1, "nobody gave it back yet");
}
