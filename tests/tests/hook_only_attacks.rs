//! Hook-only mode against hostile images, pids and cgroups: what the hook cannot do safely it refuses in one line, and a container
//! whose hook failed has nothing of what was asked.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gpushare_tests::artifacts;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::hooked::{self, Cgroups};
use gpushare_tests::leases::{leases, leases_of};
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::runtime::{Container, LowLevel};
use gpushare_tests::watched::{Answer, Around, Canary, answer, watched};
use serde_json::{Value, json};

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Crun, Need::Busybox];
const DENIED: &str = "Operation not permitted";

fn request() -> Bundle {
    Bundle::small().env("GPUSHARE_MEMORY", "4GiB")
}

fn host_mounts() -> String {
    fs::read_to_string("/proc/self/mountinfo").expect("the mount table can be read")
}

/// Asserts that a container whose hook failed got nothing.
fn assert_untouched(container: &Container<'_>, when: &str) {
    let sh = |script: &str| container.exec(&["/bin/busybox", "sh", "-c", script]);
    let made =
        sh("ls /dev | grep nvidia; cat /proc/self/mountinfo | grep -e libcuda -e nvidia -e gpushare/limits");
    assert_eq!(made.stdout, "", "{when}");
    for node in ["195 0", "195 255"] {
        let told = sh(&format!("busybox mknod /tmp/n$$ c {node} && cat /tmp/n$$")).stderr;
        assert!(told.contains(DENIED), "{when}: {node}: {told}");
    }
}

/// The one line of a hook that refused.
fn refusal(answer: &Answer, when: &str) -> String {
    assert_eq!(answer.status, 1, "{when}: {answer:?}");
    assert_eq!(answer.said.lines().count(), 1, "{when}: {answer:?}");
    answer.said.clone()
}

/// Ways to lead a mount target elsewhere. Each gets the root folder and the canary.
type Trap = fn(&Path, &Canary);

fn link(path: &Path, target: impl AsRef<Path>) {
    let _ = fs::remove_dir_all(path);
    symlink(target, path).expect("a link of the image can be made");
}

const TRAPS: &[(&str, Trap)] = &[
    ("a folder is an absolute link to the host", |root, canary| {
        link(&root.join("usr/lib64"), canary.path());
    }),
    ("a folder is a chain of ..", |root, canary| {
        let up = "../".repeat(30);
        link(&root.join("usr/lib64"), format!("{up}{}", canary.path().display()));
    }),
    ("our own folder is a link to the host", |root, canary| {
        link(&root.join("usr/lib/gpushare"), canary.path());
    }),
    ("our own folder is a dangling link", |root, canary| {
        link(&root.join("usr/lib/gpushare"), canary.path().join("new"));
    }),
    ("a target is a link to a file of the host", |root, canary| {
        link(&root.join("usr/lib64/libcuda.so.1"), canary.file());
    }),
    ("a target is a dangling link", |root, canary| {
        link(&root.join("usr/lib64/libcuda.so.1"), canary.path().join("new"));
    }),
    ("a target leads into /proc", |root, _| {
        link(&root.join("usr/lib64/libcuda.so.1"), "/proc/self/environ");
    }),
    ("a folder leads into /proc", |root, _| {
        link(&root.join("usr/lib/gpushare"), "/proc/self");
    }),
    ("a folder leads into /sys", |root, _| {
        link(&root.join("usr/lib/gpushare"), "/sys/kernel");
    }),
    ("a target is a folder", |root, _| {
        fs::create_dir_all(root.join("usr/lib64/libcuda.so.1")).expect("a folder can be made");
    }),
    ("a target is a FIFO", |root, _| {
        let path = root.join("usr/lib64/libcuda.so.1");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).expect("a FIFO can be made");
    }),
    ("a target is a device", |root, _| {
        use nix::sys::stat::{Mode, SFlag, makedev, mknod};
        let path = root.join("usr/lib64/libcuda.so.1");
        mknod(&path, SFlag::S_IFCHR, Mode::S_IRWXU, makedev(1, 3)).expect("a device can be made");
    }),
    ("a target is another name of a host file", |root, canary| {
        // Where the two are on one file system; elsewhere this is an ordinary file.
        let target = root.join("usr/lib64/libcuda.so.1");
        let _ = fs::hard_link(canary.file(), &target).or_else(|_| fs::write(&target, "host"));
    }),
];

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn an_image_leads_no_mount_target_out_of_its_root() {
    if !met(NEEDS) {
        return;
    }
    for low_level in LowLevel::ALL {
        let node = SimulatedNode::one_gpu();
        let runtime = hooked::runtime(low_level, &node, Cgroups::Machine);
        let before = host_mounts();
        for (name, trap) in TRAPS {
            let when = format!("{low_level:?}: {name}");
            let canary = Canary::new();
            let bundle = request();
            trap(&bundle.root(), &canary);
            let bundle = watched(bundle, &node, Around::default());
            let start = Instant::now();
            let container = runtime.run(&bundle);
            assert!(start.elapsed() < Duration::from_secs(20), "{when}: it hung");
            let answer = answer(&bundle);
            if answer.status != 0 {
                println!("{when}: {}", refusal(&answer, &when).trim());
                assert_untouched(&container, &when);
                assert_eq!(leases(runtime.config()), [], "{when}");
            } else {
                println!("{when}: works inside");
            }
            drop(container);
            canary.assert_unchanged(&when);
            assert_eq!(host_mounts(), before, "{when}");
        }
    }
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_link_that_is_swapped_with_a_folder_all_the_time_changes_nothing_outside() {
    const ROUNDS: usize = 300;
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = hooked::runtime(LowLevel::Runc, &node, Cgroups::Machine);
    let canary = Canary::new();
    let (mut granted, mut refused) = (0, 0);
    for round in 0..ROUNDS {
        let bundle = request();
        let root = bundle.root();
        // The image has the same path, so that a link which is followed inside works, and is tried to the end.
        let inner = root.join(canary.path().strip_prefix("/").expect("an absolute path"));
        fs::create_dir_all(inner).expect("a folder can be made");
        let (place, folder, lead) = (root.join("usr/lib/gpushare"), root.join("folder"), root.join("lead"));
        fs::create_dir(&folder).expect("a folder can be made");
        symlink(canary.path(), &lead).expect("a link can be made");
        let bundle = watched(bundle, &node, Around::default());
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    for other in [&folder, &lead] {
                        let _ = fs::rename(other, &place);
                        let _ = fs::rename(&place, other);
                    }
                }
            });
            let created = runtime.create(&bundle);
            stop.store(true, Ordering::Relaxed);
            let container = created.expect("the watching hook never fails");
            match answer(&bundle).status {
                0 => granted += 1,
                _ => refused += 1,
            }
            drop(container);
        });
        canary.assert_unchanged(&format!("round {round}"));
    }
    println!("{ROUNDS} rounds: {granted} granted, {refused} refused, nothing outside");
    assert_eq!(leases(runtime.config()), []);
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_failure_at_any_step_takes_everything_back() {
    if !met(NEEDS) {
        return;
    }
    for low_level in LowLevel::ALL {
        for cgroups in Cgroups::versions() {
            let node = SimulatedNode::one_gpu();
            let runtime = hooked::runtime(low_level, &node, cgroups);
            let before = host_mounts();
            for (name, sabotage, word) in [
                ("a wrong node", "inside mknod $root/dev/nvidiactl c 1 3", "/dev/nvidiactl"),
                (
                    "a folder where a file must be, on a mount that the host does not see",
                    "mkdir -p $root/usr/lib/gpushare && inside mount -t tmpfs none $root/usr/lib/gpushare && \
                     inside mkdir $root/usr/lib/gpushare/limits",
                    "/usr/lib/gpushare/limits",
                ),
                (
                    "a volume over a folder, by a link",
                    "mkdir -p $out/volume $root/vol && inside mount --bind $out/volume $root/vol && \
                     ln -s /vol $root/usr/lib/gpushare",
                    "another mount",
                ),
                ("a shared mount", "inside mount --make-shared $root", "shared mount"),
            ] {
                let when = format!("{low_level:?} {cgroups:?}: {name}");
                // What the saboteur did is none of the hook's to take back.
                let after = "inside rm -f $root/dev/nvidiactl; inside umount $root/usr/lib/gpushare; \
                             inside mount --make-private $root";
                let bundle = watched(request(), &node, Around { before: sabotage, after });
                let container = runtime.run(&bundle);
                let line = refusal(&answer(&bundle), &when);
                assert!(line.contains(word) && line.contains(bundle.id()), "{when}: {line}");
                assert_untouched(&container, &when);
                assert_eq!(leases(runtime.config()), [], "{when}");
                assert!(!bundle.root().join("usr/lib64/libcuda.so.1").exists(), "{when}: a target is left");
                if let Ok(volume) = fs::read_dir(bundle.path().join("volume")) {
                    assert_eq!(volume.count(), 0, "{when}: something was made in the volume");
                }
                drop(container);
                assert_eq!(host_mounts(), before, "{when}");
            }
        }
    }
}

#[test]
#[ignore = "needs root and runc: runs a container"]
fn device_rules_that_cannot_be_changed_take_the_mounts_back_too() {
    if !met(NEEDS) || !Cgroups::versions().contains(&Cgroups::V1) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = hooked::runtime(LowLevel::Runc, &node, Cgroups::V1);
    let bundle = request();
    let parent = Path::new("/sys/fs/cgroup/devices").join(format!("{}-parent", bundle.id()));
    fs::create_dir(&parent).expect("a cgroup can be made");
    let write = |file: &str, line: &str| fs::write(parent.join(file), line).expect("a rule can be written");
    write("devices.deny", "a");
    for rule in ["c *:* m", "b *:* m", "c 1:* rwm", "c 5:* rwm", "c 136:* rwm", "c 10:200 rwm"] {
        write("devices.allow", rule);
    }
    let path = format!("/{}-parent/{}", bundle.id(), bundle.id());
    let bundle = watched(bundle.set("/linux/cgroupsPath", json!(path)), &node, Around::default());
    let container = runtime.run(&bundle);
    let line = refusal(&answer(&bundle), "a parent that forbids");
    assert!(line.contains("devices.allow"), "{line}");
    assert_untouched(&container, "a parent that forbids");
    assert_eq!(leases(runtime.config()), []);
    drop(container);
    fs::remove_dir(&parent).expect("the cgroup is empty");
}

/// Runs the hook as a runtime would, on a state of the test's own.
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
        let line = refusal(&hook(&node, "createRuntime", &state), name);
        println!("{name}: {}", line.trim());
        assert!(line.contains(word) && line.contains(asking.id()), "{name}: {line}");
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
        refusal(&hook(&node, "createRuntime", &state), &state.to_string());
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

    // A second container that calls itself the same, below another runtime root.
    let renamed = format!("state=$(printf %s \"$state\" | sed s/gps-[0-9]*-[0-9]*/{}/)", bundle.id());
    let second = watched(request(), &node, Around { before: &renamed, after: "" });
    let other = hooked::runtime(LowLevel::Runc, &node, Cgroups::Machine);
    let twin = other.run(&second);
    let line = refusal(&answer(&second), "the same id twice");
    assert!(line.contains("another container of this id"), "{line}");
    assert_untouched(&twin, "the same id twice");
    drop(twin);

    container.stop();
    assert_eq!(leases(runtime.config()), []);
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_whole_gpu_beside_a_share_is_refused() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::create(2, gpushare_tests::node::MODEL, "80GiB");
    let runtime = hooked::runtime(LowLevel::Runc, &node, Cgroups::Machine);
    let one = || request().env("GPUSHARE_DEVICES", "0");
    let rules = json!([
        {"allow": false, "access": "rwm"},
        {"allow": true, "type": "c", "major": 195, "minor": 1, "access": "rw"}
    ]);
    let foreign = Path::new("/usr/bin/nvidia-container-runtime-hook");
    for (name, bundle, word) in [
        ("a rule", one().set("/linux/resources/devices", rules), "195:1"),
        ("NVIDIA's hook", one().hook("poststop", foreign, &["poststop"]), "nvidia-container-runtime-hook"),
    ] {
        let bundle = watched(bundle, &node, Around::default());
        let _container = runtime.run(&bundle);
        let line = refusal(&answer(&bundle), name);
        assert!(line.contains(word), "{name}: {line}");
        assert_eq!(leases(runtime.config()), [], "{name}");
    }
}

/// Looks for processes of the hook in a container that sees the host's, and tries to open what would give them away.
const SPY: &str = "while :; do for p in /proc/[0-9]*; do \
    if busybox grep -q 'gpushare-hoo[k]' $p/cmdline 2>/dev/null; then echo seen; for f in exe mem maps environ fd/0; do \
    if busybox dd if=$p/$f of=/dev/null bs=1 count=1 2>/dev/null; then echo opened $f; fi; done; fi; done; done";

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
        // The hook waits for its turn to write the store.
        let lock = fs::File::create(node.state().join("quota.lock")).expect("the lock file can be opened");
        lock.lock().expect("the lock is free");
        let bundle = watched(request(), node, Around::default());
        std::thread::scope(|scope| {
            let create = scope.spawn(|| runtime.create(&bundle).map(drop));
            std::thread::sleep(Duration::from_secs(3));
            drop(lock);
            create.join().expect("no panic").expect("the share is granted");
        });
        assert_eq!(answer(&bundle).status, 0);
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
    gpushare_tests::leases::sweep(node.config());
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
    // With this one it would be root on the host: the spy does look in the right place.
    let told = spied(&node, &set(&[&usual[..], &["CAP_SYS_PTRACE"]].concat()));
    assert!(told.contains("opened"), "the spy opens nothing at all");
    assert!(before == fs::read(artifacts::hook()).expect("the hook can be read"), "the hook was changed");
}
