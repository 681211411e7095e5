//! A34 and A38: processes that watch gpushare's processes, and users who call its programs.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::Command;

use gpushare_tests::artifacts::{self, Installed};
use gpushare_tests::bundle::Bundle;
use gpushare_tests::command;
use gpushare_tests::leases::leases;
use gpushare_tests::needs::met;
use gpushare_tests::regions;
use gpushare_tests::scratch::Scratch;
use serde_json::json;

use crate::{NEEDS, on_both, rounds, share, tree};

/// Looks for processes of the hook for ever, and says which of their files it can read a byte of or open for
/// writing. Of a process that has ended everybody may open an empty list of mappings.
const WATCH: &str = "while :; do for p in /proc/[0-9]*; do \
    read -r name 2>/dev/null <$p/comm || continue; [ \"$name\" = gpushare-hook ] || continue; \
    echo seen; for f in exe mem maps environ fd/0 fd/3 cwd/. root/.; do \
    (busybox dd if=$p/$f bs=1 count=1 2>/dev/null | busybox grep -q .) && echo read $f; done; \
    (: >>$p/exe) 2>/dev/null && echo wrote exe; (: >>$p/mem) 2>/dev/null && echo wrote mem; done; done";

/// A container without a share in the host's pid namespace, which runs [`WATCH`] with or without the right to
/// trace.
fn watcher(traces: bool) -> Bundle {
    let program = format!("exec 2>/dev/null; {WATCH}");
    Bundle::small().args(&["/bin/busybox", "sh", "-c", &program]).edit(|spec| {
        let namespaces =
            spec.pointer_mut("/linux/namespaces").and_then(|list| list.as_array_mut()).expect("a list");
        namespaces.retain(|namespace| namespace["type"] != "pid");
        if traces {
            for set in ["bounding", "effective", "permitted"] {
                let list = spec["process"]["capabilities"][set].as_array_mut().expect("a list");
                list.push(json!("CAP_SYS_PTRACE"));
            }
        }
    })
}

#[test]
#[ignore = "needs root, runc and crun: runs containers in the host's PID namespace"]
fn a34_a_container_that_sees_the_hook_opens_nothing_of_it() {
    if !met(NEEDS) {
        return;
    }
    on_both(|node, runtime, low_level| {
        let program = fs::read(artifacts::hook()).expect("the hook can be read");
        drop(runtime.run(&share())); // reads the node's inventory
        for traces in [false, true] {
            let watching = watcher(traces);
            let container = runtime.run(&watching);
            // While the lock is held, the hook waits for its turn at the store and can be seen.
            let lock = fs::File::options()
                .write(true)
                .open(node.state().join("quota.lock"))
                .expect("the lock is there");
            for _ in 0..rounds(6) {
                let bundle = share();
                let mut create = runtime.spawn_create(&bundle);
                // The wrapper has its own turn first.
                let seen = command::eventually(std::time::Duration::from_secs(5), || {
                    !leases(runtime.config()).is_empty()
                });
                assert!(seen, "{low_level:?}: no reservation");
                lock.lock().expect("a lock can be taken");
                std::thread::sleep(std::time::Duration::from_millis(400));
                lock.unlock().expect("a lock can be given back");
                let _ = command::wait(&mut create, command::DEADLINE).expect("create ends");
                runtime.delete_force(bundle.id());
            }
            let told = container.stdout();
            let lines = |word: &str| told.lines().filter(|line| line.starts_with(word)).count();
            assert!(lines("seen") > 0, "{low_level:?}: the watcher saw no hook, so nothing is shown");
            if traces {
                // A process that may trace the host's processes is root on the host. This shows that the
                // watcher works.
                assert!(lines("read") > 0, "{low_level:?}: {told}");
            } else {
                assert_eq!((lines("read"), lines("wrote")), (0, 0), "{low_level:?}: {told}");
            }
        }
        assert_eq!(fs::read(artifacts::hook()).expect("the hook can be read"), program);
        assert_eq!(leases(runtime.config()), []);
    });
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a38_a_user_of_the_host_changes_and_reads_nothing() {
    if !met(NEEDS) {
        return;
    }
    on_both(|node, runtime, low_level| {
        let installed = Installed::new();
        let bin = installed.root().join("usr/local/bin");
        let bundle = share();
        let container = runtime.run(&bundle);
        let held = leases(runtime.config());
        let before = tree(&node.state());
        // The user may enter every folder on the way, except those that gpushare closed.
        for folder in
            [installed.root(), &node.root(), node.root().parent().expect("it has one"), bundle.path()]
        {
            fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).expect("a mode can be set");
        }
        let (root, state) =
            (runtime.root().to_string_lossy().into_owned(), node.state().to_string_lossy().into_owned());
        let lease = regions::ids(state.as_ref()).first().cloned().expect("a region");
        let folder = bundle.path().to_string_lossy().into_owned();
        let key = ["--state", &state, "--lease", &lease, "--root", &root, "--id", bundle.id()];
        let forged =
            json!({"ociVersion": "1.0.2", "id": bundle.id(), "status": "creating", "pid": 1, "bundle": "/"});
        let scratch = Scratch::new("state");
        let stdin = scratch.file("state.json", forged.to_string());
        for (program, args) in [
            ("gpushare-hook", [&["prestart"][..], &key].concat()),
            ("gpushare-hook", [&["poststop"][..], &key].concat()),
            ("gpushare-runtime", vec!["--root", &root, "create", "--bundle", &folder, "mine"]),
            ("gpushare-runtime", vec!["--root", &root, "delete", "--force", bundle.id()]),
            ("gpushare", vec!["release", "--root", &root, bundle.id()]),
            ("gpushare", vec!["update", bundle.id(), "--memory", "1GiB"]),
            ("gpushare", vec!["sweep"]),
            ("gpushare", vec!["inventory", "refresh"]),
            ("gpushare", vec!["ps"]),
            ("gpushare", vec!["history"]),
            ("gpushare", vec!["meter"]),
        ] {
            let mut call = Command::new(bin.join(program));
            call.args(&args).uid(65534).gid(65534).current_dir("/");
            call.env_clear().env("GPUSHARE_CONFIG", runtime.config()).env("PATH", "/usr/bin:/bin");
            if program == "gpushare-hook" {
                call.env_remove("GPUSHARE_CONFIG").env("GPUSHARE_HOOK", "1");
            }
            let outcome = call
                .stdin(fs::File::open(&stdin).expect("the state can be read"))
                .output()
                .expect("it starts");
            assert!(!outcome.status.success(), "{low_level:?}: {program} {args:?}: {outcome:?}");
            assert!(!outcome.stderr.is_empty(), "{low_level:?}: {program} {args:?} says nothing");
        }
        let mut look = Command::new("/bin/cat");
        let look = command::run(look.arg(node.ledger()).uid(65534).gid(65534));
        assert!(!look.success() && look.stdout.is_empty(), "{look:?}");
        assert_eq!(leases(runtime.config()), held, "{low_level:?}");
        let names = |tree: &std::collections::BTreeMap<_, _>| {
            tree.keys().cloned().collect::<Vec<std::path::PathBuf>>()
        };
        assert_eq!(names(&tree(&node.state())), names(&before), "{low_level:?}");
        assert_eq!(container.status().as_deref(), Some("running"));
        drop(container);
    });
}
