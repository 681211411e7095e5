//! Which process the hook of hook-only mode takes for the container's init, what it believes of a state, and
//! who can look into the hook.

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use gpushare_tests::artifacts;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::hooked::{self, Cgroups};
use gpushare_tests::leases::{leases, leases_of, sweep};
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::runtime::LowLevel;
use gpushare_tests::watched::{Answer, Around, answer, assert_untouched, watched};
use serde_json::{Value, json};

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Busybox];

fn request() -> Bundle {
    Bundle::small().env("GPUSHARE_MEMORY", "4GiB")
}

/// All mounts except the node's table of limits and what lies in it, which the first grant mounts and which
/// stays.
fn host_mounts() -> String {
    let all = fs::read_to_string("/proc/self/mountinfo").expect("the mount table can be read");
    all.lines().filter(|line| !line.contains("/run/limits")).collect::<Vec<_>>().join("\n")
}

/// Runs the hook as a runtime would, with a state that the test wrote.
fn hook(node: &SimulatedNode, stage: &str, state: &Value) -> Answer {
    let mut command = Command::new(artifacts::hook());
    command.arg(stage).arg("--config").arg(node.config());
    let mut child =
        command.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the hook can be started");
    let mut stdin = child.stdin.take().expect("stdin is a pipe");
    std::io::Write::write_all(&mut stdin, state.to_string().as_bytes()).expect("the hook reads its state");
    drop(stdin);
    let outcome = child.wait_with_output().expect("the hook ends");
    let said = String::from_utf8_lossy(&outcome.stderr).into_owned();
    Answer { status: outcome.status.code().unwrap_or(-1), said }
}

#[test]
#[ignore = "needs root and runc: runs a container"]
fn a_process_that_is_not_becoming_this_container_is_refused() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = hooked::runtime(LowLevel::Runc, &node, Cgroups::Machine);
    let (other, asking) = (Bundle::small(), request());
    let running = runtime.run(&other);
    let mut ended = Command::new("/bin/true").spawn().expect("a process can be started");
    ended.wait().expect("it ends");
    let host = Command::new("/bin/sleep").arg("60").spawn().expect("a process can be started");
    let mut apart = Command::new("/usr/bin/unshare");
    let apart = apart.args(["--mount", "/bin/sleep", "60"]).spawn().expect("a process can be started");
    std::thread::sleep(Duration::from_millis(200));
    let mounts = |pid: u32| fs::read_to_string(format!("/proc/{pid}/mountinfo")).expect("it lives");
    let (before, apart_before) = (host_mounts(), mounts(apart.id()));
    for (name, pid, word) in [
        ("a dead one", u64::from(ended.id()), "ESRCH"),
        ("this one", u64::from(std::process::id()), "mount namespace"),
        ("one of the host", u64::from(host.id()), "mount namespace"),
        ("one of another container", u64::from(running.pid().unsigned_abs()), "root folder"),
        ("one that sees the bundle, in the machine's cgroup", u64::from(apart.id()), ""),
    ] {
        let state = json!({
            "ociVersion": "1.0.2", "id": asking.id(), "status": "creating", "pid": pid, "bundle": asking.path()
        });
        let answer = hook(&node, "createRuntime", &state);
        let line = answer.refusal(name);
        println!("{name}: {}", line);
        assert!(line.contains(word), "{name}: {line}");
        assert_eq!(leases(runtime.config()), [], "{name}");
        assert_eq!(host_mounts(), before, "{name}");
        assert_eq!(mounts(apart.id()), apart_before, "{name}");
    }
    for mut child in [host, apart] {
        child.kill().expect("a child can be killed");
        child.wait().expect("a child can be waited for");
    }
}

#[test]
#[ignore = "needs root and runc: runs a container"]
fn a_state_that_is_none_is_refused_and_never_taken_for_no_request() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let bundle = request();
    for state in [
        json!(null),
        json!({"id": bundle.id(), "bundle": bundle.path()}),
        json!({"id": bundle.id(), "pid": 0, "bundle": bundle.path()}),
        json!({"id": "../x", "pid": 1, "bundle": bundle.path()}),
        json!({"id": bundle.id(), "pid": 1, "bundle": "relative"}),
        json!({"id": bundle.id(), "pid": 1, "bundle": "/nowhere"}),
    ] {
        let _ = hook(&node, "createRuntime", &state).refusal(&state.to_string());
    }
    assert_eq!(leases(node.config()), []);
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn the_end_of_another_container_of_the_same_id_releases_nothing() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = hooked::runtime(LowLevel::Runc, &node, Cgroups::Machine);
    let bundle = watched(request(), &node, Around::default());
    let container = runtime.run(&bundle);
    assert_eq!(answer(&bundle).status, 0);
    let stopped = json!({"ociVersion": "1.0.2", "id": bundle.id(), "status": "stopped", "bundle": "/gone"});
    assert_eq!(hook(&node, "poststop", &stopped).status, 0);
    assert_eq!(leases_of(runtime.config(), bundle.id()).len(), 1, "it lives, so its lease stands");

    // A second container with the same name, below another runtime root.
    let renamed = format!("state=$(printf %s \"$state\" | sed s/gps-[0-9]*-[0-9]*/{}/)", bundle.id());
    let second = watched(request(), &node, Around { before: &renamed, ..Around::default() });
    let other = hooked::runtime(LowLevel::Runc, &node, Cgroups::Machine);
    let twin = other.run(&second);
    let answer = answer(&second);
    let line = answer.refusal("the same id twice");
    assert!(line.contains("another container of this id"), "{line}");
    assert_untouched(&twin, "the same id twice");
    drop(twin);

    container.stop();
    assert_eq!(leases(runtime.config()), []);
}

#[test]
#[ignore = "needs root and runc: runs a container"]
fn a_slip_in_the_settings_does_not_keep_the_lease_of_a_container_that_ended() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = hooked::runtime(LowLevel::Runc, &node, Cgroups::Machine);
    let bundle = watched(request(), &node, Around::default());
    let container = runtime.run(&bundle);
    assert_eq!(answer(&bundle).status, 0);
    container.kill_init();
    let settings = fs::read_to_string(node.config()).expect("the settings can be read");
    let write = |text: &str| fs::write(node.config(), text).expect("the settings can be written");
    write(&format!("{settings}\n[quota]\nplacment = \"spread\"\n"));
    let stopped =
        json!({"ociVersion": "1.0.2", "id": bundle.id(), "status": "stopped", "bundle": bundle.path()});
    assert_eq!(hook(&node, "poststop", &stopped).status, 0);
    write(&settings);
    assert_eq!(leases(runtime.config()), []);
}

/// Looks for processes of the hook in a container that sees the host's processes, and tries to open files
/// that would reveal them. It reads nothing: what it took out of a pipe the hook would miss. A process that ends has no
/// memory any more, and shows everybody empty files in its place: whose command line is still there has not ended.
const SPY: &str = "hooks() { busybox grep -q 'gpushare-hoo[k]' $1/cmdline 2>/dev/null; }; \
    while :; do for p in /proc/[0-9]*; do if hooks $p; then echo seen; for f in exe mem maps environ fd/0; do \
    if busybox dd if=$p/$f of=/dev/null count=0 2>/dev/null && hooks $p; then echo opened $f; fi; done; fi; done; done";

/// What a spy with these capabilities sees of a hook that works for another container.
fn spied(node: &SimulatedNode, capabilities: &Value) -> String {
    let runtime = hooked::runtime(LowLevel::Runc, node, Cgroups::Machine);
    let host_pids = json!([{"type": "network"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}]);
    let spy = Bundle::small()
        .set("/linux/namespaces", host_pids)
        .set("/process/capabilities", capabilities.clone());
    let spy = spy.args(&["/bin/busybox", "sh", "-c", SPY]);
    let container = runtime.run(&spy);
    {
        // While the lock is held, the hook waits for its turn to write the store.
        let lock = fs::File::create(node.state().join("quota.lock")).expect("the lock file can be opened");
        lock.lock().expect("the lock is free");
        let bundle = watched(request(), node, Around::default());
        std::thread::scope(|scope| {
            let create = scope.spawn(|| runtime.create(&bundle).map(drop));
            std::thread::sleep(Duration::from_secs(3));
            drop(lock);
            create.join().expect("no panic").expect("the share is granted");
        });
        let answer = answer(&bundle);
        assert_eq!(answer.status, 0, "{}", answer.said);
    }
    let told = container.stdout();
    container.kill_init();
    assert!(told.contains("seen"), "the spy was too slow");
    told
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_container_with_the_hosts_processes_opens_nothing_of_the_hooks() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    sweep(node.config());
    let before = fs::read(artifacts::hook()).expect("the hook can be read");
    let set = |names: &[&str]| json!({"bounding": names, "effective": names, "permitted": names});
    let usual = [
        "CAP_CHOWN",
        "CAP_DAC_OVERRIDE",
        "CAP_FOWNER",
        "CAP_KILL",
        "CAP_MKNOD",
        "CAP_SETUID",
        "CAP_SYS_CHROOT",
    ];
    let told = spied(&node, &set(&usual));
    assert!(!told.contains("opened"), "{told}");
    // With this capability the container would be root on the host. It shows that the spy looks in the right
    // place.
    let told = spied(&node, &set(&[&usual[..], &["CAP_SYS_PTRACE"]].concat()));
    assert!(told.contains("opened"), "the spy opens nothing at all");
    assert!(before == fs::read(artifacts::hook()).expect("the hook can be read"), "the hook was changed");
}
