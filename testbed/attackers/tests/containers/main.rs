//! Tests containers whose memory a supervisor enforces, created by the shipped wrapper through real low-level
//! runtimes.
//!
//! The containers use the files of a simulated RM, which the kernel reaches like a driver.

mod compute;
mod engines;
mod node;
mod survival;

use std::fs;

use gpushare_tests::bundle::Bundle;
use gpushare_tests::leases::{cli, leases, shares};
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::driver_version;
use gpushare_tests::probe::{GIB, OUT_OF_MEMORY, Report, SUCCESS};
use gpushare_tests::runtime::{Container, LowLevel};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;

use node::{FILES, Node};

const MIB: u64 = 1 << 20;
const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Crun];
const ATTACKER: &str = env!("CARGO_BIN_EXE_attacker");

/// Returns a shell command that attacks in this mode, and holds the memory that it got.
fn attack(mode: &str) -> String {
    format!("sleep 1000 | {ATTACKER} {FILES} {mode} --pieces 40 --driver {}", driver_version())
}

/// Waits until the container's program prints how much it got.
fn said(node: &Node, container: &Container) -> String {
    node.eventually("the program speaks", || container.stdout().contains('\n'));
    container.stdout()
}

/// Whether the kernel can mount RM's files. In CI it must.
fn has_files() -> bool {
    let has_fuse = fs::exists("/dev/fuse").unwrap_or(false);
    assert!(has_fuse || std::env::var("CI").as_deref() != Ok("true"), "there is no /dev/fuse");
    if !has_fuse {
        println!("skipped: containers under a supervisor: no /dev/fuse");
    }
    has_fuse
}

fn ready() -> bool {
    has_files() && met(NEEDS)
}

fn is_filtered(container: &Container) -> bool {
    let status = fs::read_to_string(format!("/proc/{}/status", container.pid())).expect("it runs");
    !status.contains("Seccomp:\t0")
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_container_holds_its_share_and_not_a_page_more() {
    if !ready() {
        return;
    }
    let node = Node::new();
    for low_level in LowLevel::ALL {
        let runtime = node.runtime(low_level, "required");
        for mode in ["long", "heap", "wrapped", "export"] {
            let bundle = node.bundle("1GiB", &attack(mode));
            let container = runtime.run(&bundle);
            let said = said(&node, &container);
            let used = node.used();
            assert!((960 * MIB..=1024 * MIB).contains(&used), "{low_level:?} {mode}: {used} {said}");
            assert_eq!(node.supervisors().len(), 2, "a keeper and a worker");
            assert_eq!(node.left().len(), 2, "{:?}", node.left());
            drop(container);
            node.eventually("its memory is gone", || node.used() == 0);
            node.eventually("its supervisor is gone", || node.supervisors().is_empty());
            assert_eq!((leases(runtime.config()), node.left()), (vec![], vec![]), "{low_level:?} {mode}");
        }
    }
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn who_asks_for_a_supervisor_gets_one_or_is_refused() {
    if !ready() {
        return;
    }
    let node = Node::new();
    let runtime = node.runtime(LowLevel::Runc, "off");
    let asking = |bundle: Bundle| bundle.env("GPUSHARE_SUPERVISOR", "required");
    let bundle = asking(node.bundle("1GiB", &attack("long")));
    let container = runtime.run(&bundle);
    assert_eq!(said(&node, &container), "got 16 pieces: Status(Status(81))\n");
    drop(container);
    node.eventually("its memory is gone", || node.used() == 0);

    let bundle = node.bundle("1GiB", &attack("long"));
    let container = runtime.run(&bundle);
    assert_eq!(said(&node, &container), "got 40 pieces: limit of pieces\n", "who does not ask gets none");
    drop(container);
    node.eventually("its memory is gone", || node.used() == 0);

    for (mode, want) in [("exclusive", "no limit of memory"), ("time-slice", "no limit of memory")] {
        let bundle = asking(node.bundle("", "true")).env("GPUSHARE_MODE", mode);
        let Err(refusal) = runtime.create(&bundle) else { panic!("nobody can hold it") };
        let told = refusal.line();
        assert!(
            told.contains("the container requires a supervisor") && told.contains(want),
            "{mode}: {told}"
        );
    }
    assert_eq!((leases(runtime.config()), node.left()), (vec![], vec![]));
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_process_that_is_added_is_held_with_the_container_or_gets_nothing() {
    if !ready() {
        return;
    }
    let node = Node::new();
    let added = |times: usize| {
        let one = format!("{ATTACKER} {FILES} long --pieces 40 --driver {} </dev/null", driver_version());
        vec![one; times].join("; ")
    };
    for low_level in LowLevel::ALL {
        let runtime = node.runtime(low_level, "required");
        let bundle = node.bundle("1GiB", &attack("long --piece 262144"));
        let container = runtime.run(&bundle);
        let _ = said(&node, &container);
        assert_eq!(node.used(), 1024 * MIB);
        let told = container.exec(&["/bin/sh", "-c", &added(2)]);
        assert_eq!(told.stdout, "got 0 pieces: Status(Status(81))\n".repeat(2), "{low_level:?}: {told:?}");
        // Without a supervisor an added process gets no memory, but it runs.
        let supervised = node.node.state().join("supervised").join(bundle.id());
        let hidden = node.node.state().join("hidden");
        fs::rename(&supervised, &hidden).expect("it is there");
        fs::create_dir(&supervised).expect("a folder");
        fs::write(supervised.join("1"), "{").expect("a file");
        let told = container.exec(&["/bin/sh", "-c", &format!("echo runs; {}", added(1))]);
        assert!(told.stdout.starts_with("runs\n"), "{told:?}");
        assert!(told.stderr.contains("root client: Errno(ENOTTY)"), "{low_level:?}: {told:?}");
        fs::remove_dir_all(&supervised).expect("it is there");
        fs::rename(&hidden, &supervised).expect("it is there");
        drop(container);
        node.eventually("its memory is gone", || node.used() == 0);
    }
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn an_update_counts_at_once() {
    if !ready() {
        return;
    }
    let node = Node::new();
    let runtime = node.runtime(LowLevel::Runc, "required");
    let bundle = node.bundle("1GiB", "sleep 1000");
    let container = runtime.run(&bundle);
    let tried = |pieces: u32| {
        let line = format!("{ATTACKER} {FILES} long --pieces {pieces} --driver {}", driver_version());
        container.exec(&["/bin/sh", "-c", &format!("{line} </dev/null")]).stdout
    };
    assert_eq!(tried(40), "got 16 pieces: Status(Status(81))\n");
    for (memory, want) in [("2GiB", 32), ("512MiB", 8)] {
        let _ = cli(runtime.config(), &["update", bundle.id(), "--memory", memory]).expect_success("update");
        assert_eq!(tried(40), format!("got {want} pieces: Status(Status(81))\n"), "{memory}");
    }
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn who_asks_for_nothing_gets_no_filter_and_a_share_one_with_or_without_a_supervisor() {
    if !ready() {
        return;
    }
    let node = Node::new();
    for low_level in LowLevel::ALL {
        let runtime = node.runtime(low_level, "required");
        for (mode, memory, filtered) in
            [("required", "", false), ("required", "1GiB", true), ("off", "1GiB", false)]
        {
            let runtime = if mode == "off" { &node.runtime(low_level, mode) } else { &runtime };
            let bundle = node.bundle(memory, "sleep 1000");
            let container = runtime.run(&bundle);
            assert_eq!(is_filtered(&container), filtered, "{low_level:?} {mode} {memory}");
            assert_eq!(node.supervisors().len(), if filtered { 2 } else { 0 }, "{mode} {memory}");
            drop(container);
            node.eventually("its supervisor is gone", || node.supervisors().is_empty());
        }
    }
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn what_no_supervisor_can_hold_is_refused_or_left_to_the_libraries() {
    if !ready() {
        return;
    }
    let node = Node::new();
    let notifies = json!({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [
        {"names": ["getcwd"], "action": "SCMP_ACT_NOTIFY"}
    ]});
    let gone = "/nowhere/gpushare-supervisor";
    let listens = Some("has a listener of its own");
    for (mode, has_listener, program, want) in [
        ("required", true, None, listens),
        ("auto", true, None, listens),
        ("required", false, Some(gone), Some("its program /nowhere/gpushare-supervisor is not there")),
        ("auto", false, Some(gone), None),
        ("off", true, None, None),
    ] {
        let what = format!("{mode} {has_listener} {program:?}");
        let runtime = node.runtime(LowLevel::Runc, mode);
        if let Some(program) = program {
            let more = runtime.config().with_extension("toml.d").join("z.toml");
            fs::write(more, format!("[paths]\nsupervisor = \"{program}\"\n")).expect("a file");
        }
        let bundle = node.bundle("1GiB", "sleep 1000");
        let bundle = if has_listener { bundle.set("/linux/seccomp", notifies.clone()) } else { bundle };
        match (runtime.create(&bundle), want) {
            (Ok(container), None) => {
                container.start();
                assert!(!is_filtered(&container), "{what}");
            }
            // runc itself refuses it, because no process listens.
            (Err(refusal), None) if has_listener => assert!(!refusal.line().contains("gpushare"), "{what}"),
            (Err(refusal), Some(want)) => {
                assert!(refusal.line().contains(want), "{what}: {}", refusal.line());
                assert_eq!((leases(runtime.config()), node.left()), (vec![], vec![]), "{what}");
            }
            (Ok(_), Some(_)) => panic!("{what}: it was created"),
            (Err(refusal), None) => panic!("{what}: {}", refusal.line()),
        }
        node.eventually("no supervisor is left", || node.supervisors().is_empty());
    }
}

/// Killing both processes of a supervisor takes the GPU's memory from its container, and every tool reports
/// it.
#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_supervisor_that_has_ended_is_told() {
    if !ready() {
        return;
    }
    let node = Node::new();
    let runtime = node.runtime(LowLevel::Runc, "required");
    let bundle = node.bundle("1GiB", "sleep 1000");
    let container = runtime.run(&bundle);
    let told = || cli(runtime.config(), &["describe", bundle.id()]).expect_success("describe").stdout;
    assert!(told().contains("held by    supervisor") && !told().contains("has ended"), "{}", told());
    node.eventually("both have ended", || {
        let both = node.supervisors();
        // While stopped, neither can restart the other.
        for signal in [Signal::SIGSTOP, Signal::SIGKILL] {
            for pid in &both {
                let _ = kill(Pid::from_raw(*pid), signal);
            }
        }
        both.is_empty()
    });
    assert!(told().contains("its supervisor has ended"), "{}", told());
    let doctor = cli(runtime.config(), &["doctor"]).stdout;
    assert!(doctor.contains("has ended: the driver's calls fail until"), "{doctor}");
    drop(container);
}

/// A container without a share calls the driver through a file that was passed to it. If bystanders are
/// denied, its calls fail. A container that may open GPUs continues as before.
#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_bystander_calls_no_driver_where_bystanders_are_denied() {
    if !ready() {
        return;
    }
    let node = Node::new();
    for low_level in LowLevel::ALL {
        for (denies, may_open, gets) in [(true, false, false), (true, true, true), (false, false, true)] {
            let what = format!("{low_level:?} {denies} {may_open}");
            let runtime = node.runtime(low_level, "off");
            let more = runtime.config().with_extension("toml.d").join("z.toml");
            let setting = if denies { "deny" } else { "allow" };
            fs::write(more, format!("[supervisor]\nbystanders = \"{setting}\"\n")).expect("a file");
            let bundle = node.bundle("", &attack("long"));
            let every = json!([{"allow": true, "access": "rwm"}]);
            let bundle = if may_open { bundle.set("/linux/resources/devices", every) } else { bundle };
            let container = runtime.run(&bundle);
            let added = || {
                let words =
                    format!("{ATTACKER} {FILES} long --pieces 2 --driver {} </dev/null", driver_version());
                container.exec(&["/bin/sh", "-c", &words])
            };
            assert_eq!(is_filtered(&container), !gets, "{what}");
            if gets {
                assert_eq!(said(&node, &container), "got 40 pieces: limit of pieces\n", "{what}");
                assert_eq!(added().stdout, "got 2 pieces: limit of pieces\n", "{what}");
            } else {
                let refused = added();
                assert!(refused.stderr.contains("ENOTTY"), "{what}: {}{}", refused.stdout, refused.stderr);
                assert_eq!(node.used(), 0, "{what}");
            }
            drop(container);
            node.eventually("its memory is gone", || node.used() == 0);
        }
    }
}

/// Runs an ordinary client of libcuda in this container, and returns its report.
fn client(container: &Container, sizes: &[&str]) -> Report {
    let mut words = vec!["/bin/gpushare-simulator".to_owned(), "probe".to_owned(), "--json".to_owned()];
    words.extend(sizes.iter().flat_map(|size| ["--allocate".to_owned(), (*size).to_owned()]));
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    Report::parse(&container.exec(&words).expect_success("the CUDA client in the container").stdout)
}

/// The driver's library makes RM's calls, so the supervisor counts its memory: contexts to the byte, and
/// allocations until the share is full.
#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn ordinary_programs_use_their_share_to_the_last_mebibytes() {
    if !ready() {
        return;
    }
    let node = Node::new();
    for low_level in LowLevel::ALL {
        let runtime = node.runtime(low_level, "required");
        let held = "/bin/gpushare-simulator probe --json --allocate 3GiB --hold 1000 & \
                    sleep 1000";
        let bundle = Bundle::with_probe().env("GPUSHARE_MEMORY", "4GiB").args(&["/bin/sh", "-c", held]);
        let container = runtime.run(&bundle);
        let first = Report::parse(&said(&node, &container));
        first.assert_size(4 * GIB);
        assert_eq!(first.allocations(), [SUCCESS]);
        // The context of the simulated driver, plus a channel group and an address space.
        let used = node.used();
        let context = used - 3 * GIB;
        assert!((520 * MIB..=525 * MIB).contains(&context), "{low_level:?}: {context}");
        // The supervisor charges a little more for an address space than the simulated one takes.
        let free = first.number("memory_free");
        assert!((0..MIB).contains(&(4 * GIB - context - free)), "{low_level:?}: {free} beside {context}");
        let second = client(&container, &["1MiB"]);
        assert_eq!(second.allocations(), ["CUDA_ERROR_INVALID_CONTEXT"], "no second context fits");
        assert_eq!(node.used(), used);
        drop(container);
        node.eventually("its memory is gone", || node.used() == 0);

        let bundle =
            Bundle::with_probe().env("GPUSHARE_MEMORY", "4GiB").args(&["/bin/sh", "-c", "sleep 1000"]);
        let container = runtime.run(&bundle);
        let sizes =
            ["3GiB", "512MiB", "256MiB", "128MiB", "64MiB", "32MiB", "16MiB", "8MiB", "4MiB", "2MiB", "2MiB"];
        let all = client(&container, &sizes);
        let answers = all.allocations();
        assert_eq!(answers[0], SUCCESS);
        let got = answers.iter().zip([3072, 512, 256, 128, 64, 32, 16, 8, 4, 2, 2]);
        let got: u64 = got.filter(|(answer, _)| *answer == SUCCESS).map(|(_, size)| size).sum();
        assert!(got >= 4096 - 520 - 8, "{low_level:?}: {got} MiB of 4096 beside a context of 520");
        drop(container);
        node.eventually("its memory is gone", || node.used() == 0);
    }
}

/// RM does not count managed memory, and so no supervisor does. The library counts it in addition to the
/// supervisor's charges.
#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn managed_memory_and_what_a_supervisor_holds_share_one_limit() {
    if !ready() {
        return;
    }
    let node = Node::new();
    let runtime = node.runtime(LowLevel::Crun, "required");
    let fill = "/bin/gpushare-tests-client fill managed --resident --hold 100000 & exec sleep 1000";
    let bundle = Bundle::with_client().args(&["/bin/sh", "-c", fill]).env("GPUSHARE_MEMORY", "4GiB");
    let container = runtime.run(&bundle);
    let filled = || container.stdout().lines().find_map(|line| line.strip_prefix("held ")?.parse().ok());
    node.eventually("it holds what it gets", || filled().is_some());
    let (managed, used): (u64, u64) = (filled().unwrap_or(0), node.used());
    assert!((520 * MIB..=530 * MIB).contains(&used), "its context alone: {used}");
    assert!((4080 * MIB..=4 * GIB).contains(&(managed + used)), "{managed} managed beside {used}");
    let other = client(&container, &["1MiB"]);
    assert_eq!(other.allocations(), ["CUDA_ERROR_INVALID_CONTEXT"], "another context has no room");
    let killed = container.exec(&["/bin/busybox", "killall", "-9", "gpushare-tests-client"]);
    node.eventually("its memory is gone", || node.used() == 0);
    let other = client(&container, &["3GiB"]);
    assert_eq!(other.allocations(), [SUCCESS], "what the dead had is free: {killed:?}");
}

/// Ways to bypass the libraries, each of which reaches the simulated driver's own libcuda.
#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn who_goes_past_the_libraries_is_held_all_the_same() {
    if !ready() {
        return;
    }
    let node = Node::new();
    let runtime = node.runtime(LowLevel::Runc, "required");
    let probe = "/bin/gpushare-simulator probe --json --allocate 256MiB --allocate 2GiB --hold 1000";
    let driver = "/usr/lib/gpushare/driver/cuda";
    for way in [
        format!("LD_PRELOAD={driver} {probe}"),
        format!(
            "busybox mkdir /own && busybox cp {driver} /own/libcuda.so.1 && LD_LIBRARY_PATH=/own {probe}"
        ),
        format!("busybox env -i LD_PRELOAD={driver} {probe}"),
        // A separate loader, which reads no cache and no preload file.
        format!(
            "busybox mkdir /own && busybox cp {driver} /own/libcuda.so.1 && \
             busybox cp /lib64/ld-linux-x86-64.so.2 /own/loader && \
             /own/loader --inhibit-cache --library-path /own:/lib/x86_64-linux-gnu {probe}"
        ),
    ] {
        let bundle = Bundle::with_probe().env("GPUSHARE_MEMORY", "1GiB").args(&["/bin/sh", "-c", &way]);
        let container = runtime.run(&bundle);
        let report = Report::parse(&said(&node, &container));
        assert_eq!(report.allocations(), [SUCCESS, OUT_OF_MEMORY], "{way}");
        assert!(report.number("memory_total") > 4 * GIB, "the libraries were in the way: {way}");
        let used = node.used();
        assert!((776 * MIB..=1024 * MIB).contains(&used), "{way}: {used}");
        drop(container);
        node.eventually("its memory is gone", || node.used() == 0);
    }
}

/// Processes started inside without the container's own environment, and in a nested container.
#[test]
#[ignore = "needs root, runc, crun and dropbear: runs containers"]
fn a_login_by_ssh_and_a_container_in_the_container_share_its_budget() {
    if !ready() || !met(&[Need::Ssh]) {
        return;
    }
    let node = Node::new();
    let runtime = node.runtime(LowLevel::Runc, "required");
    let all = format!("{ATTACKER} {FILES} long --pieces 40 --driver {} </dev/null", driver_version());
    let login = format!(
        "mkdir -p -m 700 /tmp/keys /root/.ssh && cd /tmp/keys && dropbearkey -t ed25519 -f host >/dev/null 2>&1 && \
         dropbearkey -t ed25519 -f user 2>/dev/null | grep ^ssh- >/root/.ssh/authorized_keys && \
         dropbear -s -E -p 127.0.0.1:2222 -r host -P pid 2>log && \
         dbclient -y -i user -p 2222 root@127.0.0.1 'env -i {all}' 2>>log || cat log"
    );
    let inner = json!({
        "ociVersion": "1.0.2",
        "process": {"args": ["/bin/sh", "-c", all], "cwd": "/", "env": ["PATH=/bin:/usr/bin"], "user": {"uid": 0, "gid": 0}},
        "root": {"path": "/rootfs"},
        "mounts": [],
        "linux": {"namespaces": [{"type": "pid"}, {"type": "mount"}, {"type": "ipc"}, {"type": "uts"}]}
    });
    let nested = "mount -t tmpfs none /sys/fs/cgroup && mkdir /rootfs && mount --rbind / /rootfs && \
                  crun --cgroup-manager=disabled --root /tmp/crun run --bundle /inner inner";
    for (what, script) in [("ssh", login.as_str()), ("nested", nested)] {
        let bundle = node.bundle("1GiB", &format!("{script}; echo over; sleep 1000"));
        let folder = bundle.path().join("inner");
        fs::create_dir(&folder).expect("a folder");
        fs::write(folder.join("config.json"), inner.to_string()).expect("a file");
        let bundle = bundle.mount(
            json!({"destination": "/inner", "type": "bind", "source": folder, "options": ["rbind", "rw"]}),
        );
        let bundle = bundle.edit(|spec| {
            for set in ["bounding", "effective", "permitted"] {
                spec["process"]["capabilities"][set]
                    .as_array_mut()
                    .expect("a list")
                    .push(json!("CAP_SYS_ADMIN"));
            }
        });
        let container = runtime.run(&bundle);
        let is_over = || container.stdout().contains("over\n");
        node.eventually("the program speaks", is_over);
        let said = container.stdout();
        assert!(
            said.ends_with("got 16 pieces: Status(Status(81))\nover\n"),
            "{what}: {said}{}",
            container.stderr()
        );
        drop(container);
        node.eventually("its memory is gone", || node.used() == 0);
    }
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn who_changes_a_call_on_its_way_is_ended_and_named() {
    if !ready() {
        return;
    }
    let node = Node::new();
    let runtime = node.runtime(LowLevel::Runc, "required");
    let meter = gpushare_tests::meter::start(runtime.config());
    let race = format!("{ATTACKER} {FILES} race --pieces 100000 --driver {} </dev/null", driver_version());
    let bundle = node.bundle("256MiB", &format!("{race}; echo ended with $?; sleep 1000"));
    let container = runtime.run(&bundle);
    node.eventually("the attacker is ended", || container.stdout().contains("ended with 137"));
    node.eventually("its memory is gone", || node.used() == 0);
    let violations = || shares(runtime.config())[0]["violations"].to_string();
    node.eventually("it is named", || violations().contains("ended above the limit"));
    assert!(violations().contains(r#""kind":"race""#), "{}", violations());
    drop(meter);
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_share_without_a_supervisor_says_why() {
    if !ready() {
        return;
    }
    let node = Node::new();
    let runtime = node.runtime(LowLevel::Crun, "auto");
    let settings = runtime.config().with_extension("toml.d").join("supervisor.toml");
    let text = fs::read_to_string(&settings).expect("the settings can be read");
    fs::write(&settings, text.replace(env!("CARGO_BIN_EXE_supervisor"), "/nowhere")).expect("a file");
    let bundle = node.bundle("1GiB", "sleep 1000");
    let _container = runtime.run(&bundle);
    let described = cli(runtime.config(), &["describe", bundle.id()]).expect_success("describe").stdout;
    let why = "libraries hold its memory, since no supervisor can: its program /nowhere is not there";
    assert!(described.contains("held by    library") && described.contains(why), "{described}");
}

/// A pod's containers share one budget, and memory that one of them held when it ended becomes available
/// again.
#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_pods_containers_share_one_budget_for_as_long_as_it_lives() {
    if !ready() {
        return;
    }
    let node = Node::new();
    let runtime = node.runtime(LowLevel::Runc, "required").in_view(LowLevel::Runc.view());
    let in_pod = |script: &str| {
        let bundle = node.bundle("", script).annotation("gpushare.io/memory", "1GiB");
        let bundle = bundle.annotation("gpushare.io/scope", "pod");
        let bundle = bundle.annotation("io.kubernetes.cri.container-type", "container");
        bundle.annotation("io.kubernetes.cri.sandbox-id", "pod")
    };
    let half = format!("sleep 1000 | {ATTACKER} {FILES} long --pieces 8 --driver {}", driver_version());
    let (stays, goes) = (in_pod("sleep 1000"), in_pod(&half));
    let staying = runtime.run(&stays);
    let all = format!("{ATTACKER} {FILES} long --pieces 40 --driver {} </dev/null", driver_version());
    let rest = || staying.exec(&["/bin/sh", "-c", &all]).stdout;
    for _ in 0..2 {
        // The memory of an ended process stays charged until its own supervisor's next check, within a
        // second.
        node.eventually("the pod's half can be had", || {
            let going = runtime.run(&goes);
            if said(&node, &going) != "got 8 pieces: limit of pieces\n" {
                return false;
            }
            assert_eq!(leases(runtime.config()).len(), 1, "one lease");
            assert_eq!(rest(), "got 8 pieces: Status(Status(81))\n");
            true
        });
        node.eventually("the half is free again", || node.used() == 0);
        node.eventually("its supervisor is gone", || node.supervisors().len() == 2);
        assert_eq!(rest(), "got 16 pieces: Status(Status(81))\n");
    }
    drop(staying);
    node.eventually("nothing is left", || node.supervisors().is_empty() && node.left().is_empty());
}

/// No supervisor counts host memory that stands in for the GPU's: the libraries enforce its bound.
#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn host_memory_stays_bounded_beside_a_supervisor() {
    if !ready() {
        return;
    }
    let node = Node::new();
    let runtime = node.runtime(LowLevel::Runc, "required");
    let more = runtime.config().with_extension("toml.d").join("host.toml");
    fs::write(more, "[quota]\nhost_memory = \"8GiB\"\n").expect("a file");
    let bundle = Bundle::with_probe().env("GPUSHARE_MEMORY", "1GiB").env("GPUSHARE_HOST_MEMORY", "1GiB");
    let bundle = bundle.args(&["/bin/sh", "-c", "sleep 1000"]);
    let container = runtime.run(&bundle);
    let sizes = ["256MiB", "512MiB", "512MiB", "512MiB", "512MiB"];
    let all = client(&container, &sizes);
    let got = all.allocations().iter().filter(|answer| *answer == SUCCESS).count();
    assert_eq!(got, 3, "256 MiB of the GPU's, 1 GiB of the host's: {:?}", all.allocations());
}
