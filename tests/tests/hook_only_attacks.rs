//! Hook-only mode against hostile images, volumes and cgroups. What the hook cannot do safely it refuses in
//! one line, and a container whose hook failed has nothing of what it asked for.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gpushare_tests::bundle::Bundle;
use gpushare_tests::hooked::{self, Cgroups};
use gpushare_tests::leases::leases;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::runtime::LowLevel;
use gpushare_tests::watched::{Around, Canary, answer, assert_untouched, watched};
use serde_json::json;

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Crun, Need::Busybox];

fn request() -> Bundle {
    Bundle::small().env("GPUSHARE_MEMORY", "4GiB")
}

/// All mounts that this process sees, except those that other programs made in the temporary folder.
fn host_mounts() -> String {
    let all = fs::read_to_string("/proc/self/mountinfo").expect("the mount table can be read");
    let is_ours = |line: &&str| !line.contains(" /tmp/") || line.contains(" /tmp/gpushare-tests-");
    all.lines().filter(is_ours).collect::<Vec<_>>().join("\n")
}

/// A way to lead a mount target elsewhere. It gets the root folder and the canary.
type Trap = fn(&Path, &Canary);

fn link(path: &Path, target: impl AsRef<Path>) {
    let _ = fs::remove_dir_all(path);
    fs::create_dir_all(path.parent().expect("no link is the root")).expect("a folder can be made");
    symlink(target, path).expect("a link of the image can be made");
}

const TRAPS: &[(&str, Trap)] = &[
    ("a folder of the driver's data is a link to the host", |root, canary| {
        link(&root.join("usr/share/nvidia"), canary.path());
    }),
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
        // A hard link works only within one file system; otherwise this is an ordinary file.
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
        let data = node.root().join("driver/usr/share/nvidia");
        fs::create_dir_all(&data)
            .and_then(|()| fs::write(data.join("nvoptix.bin"), ""))
            .expect("a file can be made");
        let runtime = hooked::runtime(low_level, &node, Cgroups::Machine);
        let before = host_mounts();
        for (name, trap) in TRAPS {
            let when = format!("{low_level:?}: {name}");
            let canary = Canary::new();
            let bundle = request().env("GPUSHARE_CAPABILITIES", "compute,utility,graphics");
            trap(&bundle.root(), &canary);
            let bundle = watched(bundle, &node, Around::default());
            let start = Instant::now();
            let container = runtime.run(&bundle);
            assert!(start.elapsed() < Duration::from_secs(20), "{when}: it hung");
            let answer = answer(&bundle);
            if answer.status != 0 {
                println!("{when}: {}", answer.refusal(&when));
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
        // The image has the same path too, so that a link that is followed inside the container works, and
        // the attack is tried to the end.
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
fn a_bundle_that_runtimes_read_in_different_ways_gets_nothing_from_the_hook_either() {
    if !met(NEEDS) {
        return;
    }
    for low_level in LowLevel::ALL {
        let node = SimulatedNode::one_gpu();
        let runtime = hooked::runtime(low_level, &node, Cgroups::versions()[0]);
        for (insertion, word) in [
            (r#""Annotations":{"gpushare.io/memory":"80GiB"}"#, "Annotations"),
            (r#""vendor":{"x":1,"x":2}"#, "twice"),
        ] {
            let when = format!("{low_level:?}: {insertion}");
            let bundle = watched(request(), &node, Around::default());
            let text = String::from_utf8(bundle.write()).expect("JSON is UTF-8");
            let text = text.replacen('{', &format!("{{{insertion},"), 1);
            fs::write(bundle.config_path(), text).expect("config.json can be written");
            let container = runtime.create_as_it_is(&bundle).expect("the watching hook never fails");
            container.start();
            let answer = answer(&bundle);
            let line = answer.refusal(&when);
            assert!(line.contains(word), "{when}: {line}");
            assert_untouched(&container, &when);
            assert_eq!(leases(runtime.config()), [], "{when}");
        }
    }
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
                // The hook does not undo what the saboteur did, so the test does.
                let after = "inside rm -f $root/dev/nvidiactl; inside umount $root/usr/lib/gpushare; \
                             inside mount --make-private $root";
                let bundle =
                    watched(request(), &node, Around { before: sabotage, after, ..Around::default() });
                let container = runtime.run(&bundle);
                let answer = answer(&bundle);
                let line = answer.refusal(&when);
                assert!(line.contains(word), "{when}: {line}");
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
    // A target that the image itself has must stay. What was mounted over it must not.
    let own = bundle.root().join("usr/lib/gpushare/limits");
    fs::create_dir_all(own.parent().expect("it has a folder")).expect("a folder of the image can be made");
    fs::write(&own, "").expect("a file of the image can be written");
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
    let answer = answer(&bundle);
    let line = answer.refusal("a parent that forbids");
    assert!(line.contains("devices.allow"), "{line}");
    assert_untouched(&container, "a parent that forbids");
    assert_eq!(leases(runtime.config()), []);
    drop(container);
    fs::remove_dir(&parent).expect("the cgroup is empty");
}

#[test]
#[ignore = "needs root, runc, crun and strace: lets writes to the store fail"]
fn a_store_that_fails_after_the_rules_were_changed_takes_them_back() {
    if !met(NEEDS) || !met(&[Need::Strace]) {
        return;
    }
    for (low_level, cgroups) in LowLevel::ALL.into_iter().zip(Cgroups::versions()) {
        let node = SimulatedNode::one_gpu();
        let runtime = hooked::runtime(low_level, &node, cgroups);
        drop(runtime.run(&watched(request(), &node, Around::default()))); // makes the store
        let refused = (1..100).find(|number| {
            let when = format!("{low_level:?} {cgroups:?}: write {number}");
            let by =
                format!("/usr/bin/strace -f -qq -o $out/trace -e inject=pwrite64:error=EIO:when={number}");
            let bundle = watched(request(), &node, Around { by: &by, ..Around::default() });
            let container = runtime.run(&bundle);
            let answer = answer(&bundle);
            if answer.status == 0 {
                return true;
            }
            let _ = answer.refusal(&when);
            assert_untouched(&container, &when);
            assert_eq!(leases(runtime.config()), [], "{when}");
            false
        });
        // Two transactions can fail: the reservation, and the activation once all else is in place.
        assert!(refused > Some(2), "{low_level:?} {cgroups:?}: {refused:?}");
    }
}

#[test]
#[ignore = "needs root, runc and strace: kills a container's init while its hook runs"]
fn a_container_that_ends_while_its_hook_runs_gets_no_lease() {
    if !met(NEEDS) || !met(&[Need::Strace]) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = hooked::runtime(LowLevel::Runc, &node, Cgroups::Machine);
    // Init is killed between the mounts and the lease. strace makes the hook sleep whenever a child of its
    // own has ended.
    let before =
        "( until grep -q gpushare/limits /proc/$pid/mountinfo; do sleep 0.01; done; kill -9 $pid ) &";
    let by = "/usr/bin/strace -qq -o $out/trace -e inject=wait4,waitid:delay_exit=1000000";
    let bundle = watched(request(), &node, Around { before, by, ..Around::default() });
    runtime.create(&bundle).map(drop).expect_err("the container's init was killed");
    let answer = answer(&bundle);
    assert!(answer.refusal("init was killed").contains("has ended"), "{answer:?}");
    assert_eq!(leases(runtime.config()), []);
}

#[test]
#[ignore = "needs root and runc: runs a container"]
fn a_cgroup_that_allows_what_its_bundle_does_not_is_refused() {
    if !met(NEEDS) || !Cgroups::versions().contains(&Cgroups::V1) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = hooked::runtime(LowLevel::Runc, &node, Cgroups::V1);
    let cgroup = "group=/sys/fs/cgroup/devices$(sed -n 's/^[0-9]*:devices://p' /proc/$pid/cgroup)";
    let before = format!("{cgroup}; echo a >$group/devices.allow");
    // Restores the rules, so that the container can be looked at.
    let after = format!(
        "{cgroup}; echo a >$group/devices.deny; \
         for rule in 'c *:* m' 'b *:* m' 'c 1:* rwm' 'c 5:* rwm'; do echo $rule >$group/devices.allow; done"
    );
    let bundle = watched(request(), &node, Around { before: &before, after: &after, ..Around::default() });
    let container = runtime.run(&bundle);
    let answer = answer(&bundle);
    let line = answer.refusal("no rules");
    assert!(line.contains("open every device"), "{line}");
    assert_untouched(&container, "no rules");
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
        let answer = answer(&bundle);
        let line = answer.refusal(name);
        assert!(line.contains(word), "{name}: {line}");
        assert_eq!(leases(runtime.config()), [], "{name}");
    }
}
