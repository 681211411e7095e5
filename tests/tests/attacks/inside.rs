//! A22 to A26 and A37: attacks from inside a container.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use gpushare_tests::artifacts;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::leases::{leases, sweep};
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::{MODEL, SimulatedNode};
use gpushare_tests::probe::{GIB, OUT_OF_MEMORY, Report, SUCCESS};
use gpushare_tests::runtime::{Container, LowLevel, Runtime};
use serde_json::json;

use crate::{NEEDS, asking, on_both, share, tree};

/// For each minor number of the driver's, whether the container can open a device node that it makes itself.
fn opened(container: &Container<'_>) -> Vec<(u32, bool)> {
    let script = "n=0; while [ $n -lt 256 ]; do busybox mknod /tmp/n$n c 195 $n; echo $n $(cat /tmp/n$n 2>&1); \
                  busybox rm /tmp/n$n; n=$((n+1)); done";
    let told =
        container.exec(&["/bin/busybox", "sh", "-c", script]).expect_success("mknod of every minor").stdout;
    let minors: Vec<(u32, bool)> = told
        .lines()
        .map(|line| {
            let (number, rest) = line.split_once(' ').expect("a number and a word");
            let allowed = rest.contains("No such device");
            assert!(allowed || rest.contains("Operation not permitted"), "{line}");
            (number.parse().expect("a number"), allowed)
        })
        .collect();
    assert_eq!(minors.len(), 256, "{told}");
    minors
}

fn allowed(container: &Container<'_>) -> Vec<u32> {
    opened(container).into_iter().filter(|(_, allowed)| *allowed).map(|(minor, _)| minor).collect()
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a22_of_all_minors_the_granted_ones_open() {
    if !met(NEEDS) {
        return;
    }
    for low_level in LowLevel::ALL {
        let node = SimulatedNode::create(4, MODEL, "80GiB");
        let runtime = Runtime::wrapped(low_level, &node);
        for (devices, want) in [("2", &[2, 255][..]), ("0,3", &[0, 3, 255])] {
            let bundle = share().env("GPUSHARE_DEVICES", devices);
            assert_eq!(allowed(&runtime.run(&bundle)), want, "{low_level:?}");
        }
        // Without rules in the bundle, crun denies nothing of its own.
        let bundle = share().env("GPUSHARE_DEVICES", "2").edit(|spec| spec["linux"]["resources"] = json!({}));
        assert_eq!(allowed(&runtime.run(&bundle)), [2, 255], "{low_level:?}: without rules");
        let bundle = Bundle::small();
        assert_eq!(allowed(&runtime.run(&bundle)), Vec::<u32>::new(), "{low_level:?}: no request");
    }
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a23_a_container_does_not_change_its_device_rules() {
    if !met(NEEDS) {
        return;
    }
    on_both(|_, runtime, low_level| {
        let bundle = share().mount(json!({
            "destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup",
            "options": ["nosuid", "noexec", "nodev", "relatime", "ro"]
        }));
        let container = runtime.run(&bundle);
        for attack in [
            "busybox mkdir -p /tmp/c && mount -t cgroup -o devices none /tmp/c",
            "busybox mkdir -p /tmp/c && mount -t cgroup2 none /tmp/c",
            "mount -o remount,rw /sys/fs/cgroup",
            "mount -o remount,rw /sys/fs/cgroup/devices",
            "for f in $(busybox find /sys/fs/cgroup -name devices.allow); do echo a >$f && exit 0; done; exit 1",
            "for f in $(busybox find /sys/fs/cgroup -name cgroup.procs); do echo $$ >$f && exit 0; done; exit 1",
        ] {
            let outcome = container.exec(&["/bin/busybox", "sh", "-c", attack]);
            assert!(!outcome.success(), "{low_level:?}: {attack}: {outcome:?}");
        }
        assert_eq!(allowed(&container), [0, 255], "{low_level:?}");
    });
}

#[test]
#[ignore = "needs root and runc: runs a container"]
fn a24_a_program_in_a_root_of_its_own_meets_the_limit_or_no_driver() {
    if !met(&[Need::Root, Need::Runc, Need::Busybox]) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let bundle = Bundle::with_probe().env("GPUSHARE_MEMORY", "8GiB");
    let container = runtime.run(&bundle);
    let probe = "/bin/gpushare-simulator probe --json --allocate 9GiB --allocate 7GiB";
    // A chroot to the same root leads to the same files.
    let told = container
        .exec(&["/bin/sh", "-c", &format!("exec busybox chroot / {probe}")])
        .expect_success("chroot");
    let report = Report::parse(&told.stdout);
    report.assert_size(8 * GIB);
    assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS]);
    // A copy of what the container sees, with the simulated driver's state.
    let jail = "busybox mkdir -p /jail/dev /jail/usr && busybox cp -a /bin /lib /lib64 /run /jail/ 2>/dev/null; \
                busybox cp -a /usr/bin /usr/lib /usr/lib64 /jail/usr/ 2>/dev/null; \
                busybox mknod /jail/dev/nvidiactl c 195 255 && busybox mknod /jail/dev/nvidia0 c 195 0";
    let _ = container.exec(&["/bin/sh", "-c", jail]).expect_success("a copy of the root");
    let in_jail = || container.exec(&["/bin/sh", "-c", &format!("exec busybox chroot /jail {probe}")]);
    let report = Report::parse(&in_jail().expect_success("the copy works").stdout);
    report.assert_size(8 * GIB);
    assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS]);
    // Without its limits file our library grants nothing.
    let remove = ["/bin/busybox", "rm", "/jail/usr/lib/gpushare/limits"];
    let _ = container.exec(&remove).expect_success("a copy can be removed");
    let told = in_jail();
    let got = |report: Report| report.allocations().iter().any(|result| result == SUCCESS);
    assert!(!told.success() || !got(Report::parse(&told.stdout)), "{told:?}");
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a26_a_container_cannot_write_its_limits() {
    if !met(NEEDS) {
        return;
    }
    on_both(|_, runtime, low_level| {
        let bundle = share();
        let container = runtime.run(&bundle);
        let limits = "/usr/lib/gpushare/limits";
        let sum = || container.exec(&["/bin/busybox", "md5sum", limits]).expect_success("md5sum").stdout;
        let before = sum();
        for attack in [
            format!("echo >{limits}"),
            format!("busybox truncate -s 0 {limits}"),
            format!("busybox dd if=/dev/zero of={limits} conv=notrunc count=1"),
            format!("busybox rm {limits}"),
            format!("busybox mv {limits} /tmp/x"),
            format!("busybox chmod 666 {limits}"),
            format!("mount -o remount,rw {limits}"),
            format!("mount -o remount,rw,bind {limits}"),
            format!("busybox umount {limits}"),
            "mount -t tmpfs none /usr/lib/gpushare".to_owned(),
        ] {
            let outcome = container.exec(&["/bin/busybox", "sh", "-c", &attack]);
            assert!(!outcome.success(), "{low_level:?}: {attack}: {outcome:?}");
        }
        assert_eq!(sum(), before, "{low_level:?}");
    });
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a37_in_a_user_namespace_nodes_are_bound_and_nothing_of_the_host_is_ours_to_change() {
    if !met(NEEDS) {
        return;
    }
    on_both(|node, runtime, low_level| {
        let mapped = 200_000;
        let bundle = asking(Bundle::small()).edit(|spec| {
            let map = json!([{"containerID": 0, "hostID": mapped, "size": 65536}]);
            let linux = &mut spec["linux"];
            linux["namespaces"].as_array_mut().expect("a list").push(json!({"type": "user"}));
            linux["uidMappings"] = map.clone();
            linux["gidMappings"] = map;
        });
        for path in [bundle.path(), &bundle.root()] {
            fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("a mode can be set");
        }
        for path in tree(&bundle.root()).into_keys() {
            std::os::unix::fs::lchown(path, Some(mapped), Some(mapped)).expect("an owner can be set");
        }
        let before = tree(&node.root().join("driver"));
        let container = runtime.run(&bundle);
        let ask = |script: &str| container.exec(&["/bin/busybox", "sh", "-c", script]);
        let mounts = ask("cat /proc/self/mountinfo").expect_success("mountinfo").stdout;
        assert!(mounts.contains(" /dev/nvidia0 "), "{low_level:?}: {mounts}");
        assert!(!ask("echo >/usr/lib/gpushare/limits").success(), "{low_level:?}");
        assert!(
            !ask("busybox unshare -m mount -o remount,rw,bind /usr/lib/gpushare/limits").success(),
            "{low_level:?}"
        );
        let open = ask("cat /dev/nvidia0");
        assert!(open.stderr.contains("No such device"), "{low_level:?}: {open:?}");
        assert!(
            ask("echo >>/usr/lib/gpushare/usage").success(),
            "{low_level:?}: usage is the container's own"
        );
        let owned = |folder: std::path::PathBuf| {
            use std::os::unix::fs::MetadataExt;
            let files = tree(&folder).into_keys();
            let ours = |path: &std::path::PathBuf| {
                fs::symlink_metadata(path).is_ok_and(|file| (mapped..mapped + 65_536).contains(&file.uid()))
            };
            files.filter(ours).collect::<Vec<_>>()
        };
        assert_eq!(owned(node.root()), Vec::<std::path::PathBuf>::new(), "{low_level:?}");
        drop(container);
        assert_eq!(tree(&node.root().join("driver")), before, "{low_level:?}");
        assert_eq!(leases(runtime.config()), []);
    });
}

/// A process that is root in a user namespace may mount another file over the limits.
#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a58_no_user_namespace_is_made_inside_a_share_where_the_settings_deny_it() {
    if !met(NEEDS) {
        return;
    }
    on_both(|node, _, low_level| {
        let settings = |word: &str| {
            let more = format!("{}\n[inject]\nuser_namespaces = \"{word}\"\n", low_level.settings());
            Runtime::with_config(low_level, &node.config_with(word, &more))
        };
        let makes = ["/bin/busybox", "unshare", "-U", "/bin/busybox", "true"];
        // A filter as docker writes it for a container with CAP_SYS_ADMIN, or no filter.
        let filter = json!({
            "defaultAction": "SCMP_ACT_LOG", "architectures": ["SCMP_ARCH_X86_64"],
            "syscalls": [{"names": ["clone", "clone3", "unshare", "read", "write"], "action": "SCMP_ACT_ALLOW"}]
        });
        for bundle in [share(), share().set("/linux/seccomp", filter)] {
            let (allowing, denying) = (settings("allow"), settings("deny"));
            let made = allowing.run(&bundle).exec(&makes);
            assert!(made.success(), "{low_level:?}: the attack works: {made:?}");
            let _ = bundle.write();
            let container = denying.run(&bundle);
            for _ in 0..2 {
                let told = container.exec(&makes);
                assert!(!told.success() && told.stderr.contains("not permitted"), "{low_level:?}: {told:?}");
            }
            assert!(
                container.exec(&["/bin/sh", "-c", "true | true"]).success(),
                "{low_level:?}: processes start"
            );
            drop(container);
        }
        // The hook cannot change config.json, which the runtime has read. It accepts a bundle whose own
        // filter denies user namespaces.
        let config = node.config_with("hooked", "[inject]\nuser_namespaces = \"deny\"\n");
        let args = ["createRuntime", "--config", config.to_str().expect("a plain path")];
        let hooked = || share().hook("createRuntime", &artifacts::hook(), &args);
        let bare = Runtime::bare(low_level);
        assert!(bare.create(&hooked()).is_err(), "{low_level:?}");
        let own = json!({
            "defaultAction": "SCMP_ACT_ALLOW", "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
            "syscalls": [
                {"names": ["clone", "unshare"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1,
                 "args": [{"index": 0, "value": 0x1000_0000, "valueTwo": 0x1000_0000, "op": "SCMP_CMP_MASKED_EQ"}]},
                {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38}
            ]
        });
        let denied = hooked().set("/linux/seccomp", own);
        let container = bare.run(&denied);
        assert!(!container.exec(&makes).success(), "{low_level:?}");
        drop(container);
        sweep(&config);
    });
}
