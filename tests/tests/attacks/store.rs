//! A39 to A43: the state folder and the quota store.

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use gpushare_tests::artifacts;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::command::{self, Outcome, eventually};
use gpushare_tests::leases::{cli, leases, sweep};
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::{SimulatedNode, ledger_in};
use gpushare_tests::regions;
use gpushare_tests::runtime::{LowLevel, Runtime};
use gpushare_tests::scratch::Scratch;
use nix::mount::{MsFlags, mount, umount};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use nix::unistd::{Uid, chown};

use crate::{NEEDS, idle_config, on_both, share, tree};

fn mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("a mode can be set");
}

#[test]
#[ignore = "needs root, runc and crun: would run containers"]
fn a39_a_state_folder_that_somebody_else_prepared_is_refused() {
    if !met(NEEDS) {
        return;
    }
    type Prepare = fn(&Path, &Path);
    let prepared: [(&str, Prepare); 7] = [
        ("of another user", |state, _| {
            fs::create_dir(state).expect("a folder can be made");
            mode(state, 0o700);
            chown(state, Some(Uid::from_raw(65534)), None).expect("an owner can be set");
        }),
        ("a link", |state, other| symlink(other, state).expect("a link can be made")),
        ("group-writable", |state, _| {
            fs::create_dir(state).expect("a folder can be made");
            mode(state, 0o770);
        }),
        ("readable by others", |state, _| {
            fs::create_dir(state).expect("a folder can be made");
            mode(state, 0o755);
        }),
        ("a file", |state, _| fs::write(state, "").expect("a file can be written")),
        ("a ledger that is a link", |state, other| {
            fs::create_dir(state).expect("a folder can be made");
            mode(state, 0o700);
            symlink(other.join("ledger"), ledger_in(state)).expect("a link can be made");
        }),
        ("a ledger that is a link which leads nowhere", |state, other| {
            fs::create_dir(state).expect("a folder can be made");
            mode(state, 0o700);
            symlink(other.join("new"), ledger_in(state)).expect("a link can be made");
        }),
    ];
    on_both(|sound, runtime, low_level| {
        drop(runtime.run(&share())); // makes a store that gpushare would take for its own
        let store = fs::read(sound.ledger()).expect("the store can be read");
        for (what, prepare) in prepared {
            let node = SimulatedNode::one_gpu();
            let runtime = Runtime::wrapped(low_level, &node);
            let other = Scratch::new("other");
            fs::write(other.path().join("ledger"), &store).expect("a file can be written");
            prepare(&node.state(), other.path());
            let before = tree(other.path());
            let bundle = share();
            let line = runtime.create(&bundle).map(drop).expect_err(what).line();
            assert!(line.contains(&*node.state().to_string_lossy()), "{low_level:?}: {what}: {line}");
            assert_eq!(tree(other.path()), before, "{low_level:?}: {what}");
        }
    });
}

#[test]
#[ignore = "needs root and runc: mounts a FUSE file system"]
fn a39_a_state_folder_that_is_not_local_is_refused() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let state = node.state();
    fs::create_dir(&state).expect("a folder can be made");
    mode(&state, 0o700);
    // The mount belongs to another user, so that the kernel refuses instead of asking a server, which does
    // not exist.
    let server = fs::File::options().read(true).write(true).open("/dev/fuse").expect("the kernel has FUSE");
    let options = format!("fd={},rootmode=40700,user_id=65534,group_id=65534", server.as_raw_fd());
    mount(Some("nobody"), &state, Some("fuse.nobody"), MsFlags::empty(), Some(options.as_str()))
        .expect("a FUSE file system can be mounted");
    let refusal = runtime.create(&share()).map(drop);
    umount(&state).expect("it can be unmounted");
    let line = refusal.expect_err("the folder is a server's").line();
    assert!(line.contains("FUSE") && line.contains(&*state.to_string_lossy()), "{line}");
    drop(runtime.run(&share()));
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a40_an_end_takes_back_the_share_of_its_own_container_alone() {
    if !met(NEEDS) {
        return;
    }
    on_both(|node, runtime, low_level| {
        let config = runtime.config();
        let other = Runtime::with_config(low_level, config);
        let bundle = share();
        let first = runtime.run(&bundle);
        // A container of the same name under another root, as of somebody else's engine.
        let twin = share();
        let folder = twin.path().to_string_lossy().into_owned();
        let log = twin.path().join("log.json");
        let pid_file = twin.path().join("init.pid");
        let mut create = other.command(&log, ["create", "--bundle", &folder, "--pid-file"]);
        create.arg(&pid_file).arg(bundle.id());
        let _ = command::run_with_output_in(&mut create, twin.path()).expect_success("create");
        let held = leases(config);
        assert_eq!(held.len(), 2, "{low_level:?}");
        other.delete_force(bundle.id());
        let left = leases(config);
        assert_eq!(
            (left.len(), left[0].pid),
            (1, u64::try_from(first.pid()).ok()),
            "{low_level:?}: the first one's stays"
        );
        for id in [bundle.id(), "nobody", "nobody"] {
            other.delete_force(id);
        }
        // poststop again, and for a lease that never existed: it succeeds and removes nothing of others.
        let root = runtime.root().to_string_lossy().into_owned();
        for (lease, id) in [("1", bundle.id()), ("1", bundle.id()), ("999999", "nobody"), ("-1", "nobody")] {
            let mut poststop = Command::new(artifacts::hook());
            poststop.args(["poststop", "--state"]).arg(node.state());
            poststop.args(["--lease", lease, "--root", &root, "--id", id]).env_clear();
            let _ = command::run(&mut poststop).expect_success("poststop of what is not there");
        }
        assert_eq!(leases(config), left, "{low_level:?}");
        drop(first);
        assert_eq!(leases(config), []);
    });
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a41_who_stops_inside_its_transaction_makes_others_fail_in_time() {
    if !met(NEEDS) {
        return;
    }
    on_both(|node, runtime, low_level| {
        drop(runtime.run(&share()));
        // Holds the lock, as a process would that was stopped while it had the turn.
        let lock =
            fs::File::options().write(true).open(node.state().join("quota.lock")).expect("the lock is there");
        lock.lock().expect("a lock can be taken");
        let (bundle, start) = (share(), Instant::now());
        let line = runtime.create(&bundle).map(drop).expect_err("the store is busy").line();
        assert!(
            line.contains("busy") && line.contains(&*node.state().to_string_lossy()),
            "{low_level:?}: {line}"
        );
        assert!(start.elapsed() < Duration::from_secs(9), "{low_level:?}: {:?}", start.elapsed());
        lock.unlock().expect("a lock can be given back");
        assert_eq!(leases(runtime.config()), [], "{low_level:?}");
        drop(runtime.run(&bundle));
    });
}

#[test]
#[ignore = "needs root, runc and crun: would run containers"]
fn a42_a_store_that_is_damaged_foreign_or_newer_is_refused_and_kept() {
    if !met(NEEDS) {
        return;
    }
    on_both(|_, _, low_level| {
        let node = SimulatedNode::one_gpu();
        let runtime = Runtime::wrapped(low_level, &node);
        let bundle = share();
        drop(runtime.run(&bundle));
        let ledger = node.ledger();
        let whole = fs::read(&ledger).expect("the store can be read");
        let text = String::from_utf8(whole.clone()).expect("it is a text");
        let with = |old: &str, new: &str| {
            assert!(text.contains(old), "{old}: {text}");
            text.replacen(old, new, 1).into_bytes()
        };
        let version = text.lines().next().and_then(|line| line.split("version ").nth(1));
        let version = version.and_then(|rest| rest.split(|c: char| !c.is_ascii_digit()).next());
        let version: u32 = version.and_then(|v| v.parse().ok()).expect("the first line names the version");
        let of_version = |other: u32| with(&format!("version {version}"), &format!("version {other}"));
        for (what, bytes) in [
            ("cut", whole[..text.trim_end().len() - 1].to_vec()),
            ("cut after its first line", whole[..=text.find('\n').expect("there is a line")].to_vec()),
            ("empty", Vec::new()),
            (
                "random",
                (0..20_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24).to_ne_bytes()[0]).collect(),
            ),
            ("of another program", with("gpushare leases", "something else")),
            ("newer", of_version(version + 1)),
            ("of no version", of_version(0)),
            ("edited by hand", with("\"next\":1", "\"next\":2")),
        ] {
            fs::write(&ledger, &bytes).expect("the store can be overwritten");
            let line = runtime.create(&bundle).map(drop).expect_err(what).line();
            assert!(line.contains(&*ledger.to_string_lossy()), "{low_level:?}: {what}: {line}");
            assert!(
                fs::read(&ledger).is_ok_and(|now| now == bytes),
                "{low_level:?}: {what}: it was replaced"
            );
            sweep_fails(&runtime);
        }
        // Does what the message says.
        fs::remove_file(&ledger).expect("the store can be removed");
        drop(runtime.run(&bundle));
        assert_eq!(leases(runtime.config()), []);
    });
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a42_a_store_that_is_deleted_under_containers_is_not_made_anew() {
    if !met(NEEDS) {
        return;
    }
    for low_level in LowLevel::ALL {
        for whole_card in [false, true] {
            let node = SimulatedNode::one_gpu();
            let runtime = Runtime::wrapped(low_level, &node);
            let ledger = node.ledger();
            let gone = format!("{} is gone", ledger.display());
            let running =
                if whole_card { Bundle::small().env("GPUSHARE_MODE", "exclusive") } else { share() };
            let container = runtime.run(&running);
            // Deletes all that can be deleted. Regions are mounts and stay.
            for entry in fs::read_dir(node.state()).expect("the state folder can be read").flatten() {
                let _ = fs::remove_file(entry.path());
            }
            let bundle = share();
            for call in ["the first", "the next"] {
                let line = runtime.create(&bundle).map(drop).expect_err("the store was deleted").line();
                assert!(line.contains(&gone), "{low_level:?}: {call}: {line}");
                sweep_fails(&runtime);
                assert!(!ledger.exists(), "{low_level:?}: {call}: a store was made");
            }
            let doctor = cli(runtime.config(), &["doctor"]).stdout;
            assert!(doctor.contains(&gone), "{low_level:?}: {doctor}");
            drop(container);
            // Its region was removed with it.
            drop(runtime.run(&bundle));
            assert_eq!(leases(runtime.config()), [], "{low_level:?}");
        }
    }
}

#[test]
#[ignore = "needs root and runc: runs a container"]
fn a42_the_remedy_for_a_deleted_store_works_after_a_container_that_nobody_deleted() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let killed = share();
    let container = runtime.run(&killed);
    container.kill_init();
    fs::remove_file(node.ledger()).expect("the store can be removed");
    let bundle = share();
    let line = runtime.create(&bundle).map(drop).expect_err("the store was deleted").line();
    let (_, rest) = line.split_once("run `").expect("the message has a command");
    let (remedy, _) = rest.split_once('`').expect("the command ends");
    let regions = fs::canonicalize(node.state()).expect("the state folder is there").join("regions");
    // The command is compared before it is run, since it deletes files.
    assert_eq!(remedy, format!("umount {0}/* {0}/*/* 2>/dev/null; rm -r {0}", regions.display()));
    let _ = command::run(Command::new("/bin/sh").args(["-c", remedy])).expect_success("the remedy");
    drop(runtime.run(&bundle));
    drop(container);
    assert_eq!(leases(runtime.config()), []);
    sweep(runtime.config());
    assert_eq!(regions::left(&node.state()), Vec::<std::path::PathBuf>::new());
}

fn sweep_fails(runtime: &Runtime) {
    let outcome = cli(runtime.config(), &["sweep"]);
    assert!(!outcome.success(), "{outcome:?}");
}

#[test]
#[ignore = "needs root and runc: asks for shares"]
fn a43_a_creation_that_runs_out_of_descriptors_at_any_step_grants_nothing() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    drop(Runtime::wrapped(LowLevel::Runc, &node).run(&share())); // reads the node's inventory
    let scratch = Scratch::new("idle");
    let config = idle_config(&node, &scratch);
    let (mut refused, mut granted) = (0, 0);
    for limit in 3..24 {
        let bundle = share();
        let written = bundle.write();
        let mut create = Command::new("/usr/bin/prlimit");
        create.arg(format!("--nofile={limit}")).arg(artifacts::wrapper());
        create
            .args(["create", "--bundle"])
            .arg(bundle.path())
            .arg(bundle.id())
            .env("GPUSHARE_CONFIG", &config);
        let outcome = command::run(&mut create);
        if bundle.config_bytes() == written {
            assert!(!outcome.success(), "{limit}: it ran without its share: {outcome:?}");
            assert_eq!(leases(&config), [], "{limit}: {outcome:?}");
            refused += 1;
        } else {
            // The config.json is edited as a whole, and the lease ends with the runtime that did nothing.
            assert!(serde_json::from_slice::<serde_json::Value>(&bundle.config_bytes()).is_ok(), "{limit}");
            granted += 1;
        }
        sweep(&config);
        assert_eq!(leases(&config), [], "{limit}");
        assert_eq!(regions::left(&node.state()), Vec::<std::path::PathBuf>::new(), "{limit}");
    }
    assert!(refused > 2 && granted > 2, "{refused} refused, {granted} granted");
}

/// The system calls by which a creation and a sweep use a disk.
const DISK_CALLS: &str = "openat read pread64 write pwrite64 fsync fdatasync ftruncate fallocate rename renameat2 unlink mkdir rmdir \
     mount umount2 unshare setns pivot_root open_tree move_mount";

/// Runs `program` so that the call with this name and number gets a disk error. Returns whether it made that
/// call.
fn failing(call: &str, number: usize, program: &Path, prepare: impl FnOnce(&mut Command)) -> (bool, Outcome) {
    let scratch = Scratch::new("trace");
    let trace = scratch.path().join("trace");
    let mut strace = Command::new("/usr/bin/strace");
    strace.args(["-f", "-qq", "-e", &format!("trace={call}"), "-o"]).arg(&trace);
    strace.arg("-e").arg(format!("inject={call}:error=EIO:when={number}")).arg(program);
    prepare(&mut strace);
    let outcome = command::run(&mut strace);
    let met = fs::read_to_string(&trace).is_ok_and(|text| text.contains("(INJECTED)"));
    (met, outcome)
}

/// As on a node that runs from its initial RAM disk. What it unmounts later must be free.
#[test]
#[ignore = "needs root, runc and strace: lets a system call fail"]
fn where_the_root_cannot_be_changed_the_regions_hold_no_mount_of_the_host() {
    if !met(NEEDS) || !met(&[Need::Strace]) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let scratch = Scratch::new("idle");
    let config = idle_config(&node, &scratch);
    let _ = cli(&config, &["inventory", "refresh"]).expect_success("gpushare inventory refresh");
    let (volume, none) = (scratch.folder("a volume"), None::<&str>);
    mount(none, &volume, Some("tmpfs"), MsFlags::empty(), none).expect("a tmpfs can be mounted");
    let events = Inotify::init(InitFlags::IN_NONBLOCK).expect("inotify");
    events.add_watch(&volume, AddWatchFlags::IN_DELETE_SELF).expect("the volume can be watched");

    let bundle = share();
    bundle.write();
    let strace =
        ["-f", "-qq", "-o", "/dev/null", "-e", "inject=pivot_root:error=EINVAL", "-e", "trace=pivot_root"];
    let mut create = Command::new("/usr/bin/strace");
    create.args(strace).arg(artifacts::wrapper()).args(["create", "--bundle"]).arg(bundle.path());
    create.arg(bundle.id()).env("GPUSHARE_CONFIG", &config);
    let _ = command::run(&mut create).expect_success("create");
    let lease = regions::ids(&node.state()).pop().expect("it has a region");
    let names = regions::within(&node.state(), || {
        Ok(fs::read_dir("/")?.flatten().map(|one| one.file_name()).collect::<Vec<_>>())
    });
    assert_eq!(names.expect("it can be entered"), [std::ffi::OsString::from(lease)]);

    umount(&volume).expect("the volume is not in use");
    let ended = || {
        events
            .read_events()
            .is_ok_and(|all| all.iter().any(|one| one.mask.contains(AddWatchFlags::IN_UNMOUNT)))
    };
    assert!(eventually(Duration::from_secs(5), ended), "its file system goes on somewhere");
    sweep(&config);
    assert_eq!(regions::left(&node.state()), Vec::<std::path::PathBuf>::new());
}

#[test]
#[ignore = "needs root, runc and strace: lets system calls fail"]
fn a43_a_disk_error_at_any_step_of_a_creation_or_of_the_sweep_grants_nothing() {
    if !met(NEEDS) || !met(&[Need::Strace]) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    drop(Runtime::wrapped(LowLevel::Runc, &node).run(&share())); // reads the node's inventory
    let scratch = Scratch::new("idle");
    let config = idle_config(&node, &scratch);
    let (mut refused, mut granted) = (0, 0);
    for call in DISK_CALLS.split(' ') {
        for number in 1.. {
            let bundle = share();
            let written = bundle.write();
            let (met, outcome) = failing(call, number, &artifacts::wrapper(), |create| {
                create.args(["create", "--bundle"]).arg(bundle.path()).arg(bundle.id());
                create.env("GPUSHARE_CONFIG", &config);
            });
            let when = format!("{call} number {number}");
            if bundle.config_bytes() == written {
                assert!(!outcome.success(), "{when}: it ran without its share: {outcome:?}");
                refused += 1;
            } else {
                let whole = serde_json::from_slice::<serde_json::Value>(&bundle.config_bytes());
                assert!(whole.is_ok_and(|json| json["hooks"]["prestart"].is_array()), "{when}: half edited");
                granted += 1;
            }
            // The disk fails the sweep too, and then works again.
            let (met_again, _) = failing(call, number, &artifacts::cli(), |swept| {
                swept.arg("sweep").env("GPUSHARE_CONFIG", &config);
            });
            sweep(&config);
            assert_eq!((leases(&config), regions::left(&node.state())), (Vec::new(), Vec::new()), "{when}");
            if !met && !met_again {
                break;
            }
        }
    }
    println!("{refused} creations were refused, {granted} went on");
    assert!(refused > 40 && granted > 50, "{refused} refused, {granted} granted");
}

#[test]
#[ignore = "needs root and runc: mounts the state folder read-only"]
fn a43_a_read_only_or_full_file_system_grants_nothing() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    drop(runtime.run(&share()));
    let none: Option<&str> = None;
    let state = node.state();
    mount(Some(&state), &state, none, MsFlags::MS_BIND, none).expect("a bind mount can be made");
    let read_only = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY;
    mount(none, &state, none, read_only, none).expect("it can be made read-only");
    let bundle = share();
    let line = runtime.create(&bundle).map(drop).expect_err("the store cannot be written").line();
    umount(&state).expect("it can be unmounted");
    assert!(line.contains(&*state.to_string_lossy()), "{line}");
    assert_eq!(leases(runtime.config()), []);
    drop(runtime.run(&bundle));
}
