//! Our libraries, fitted to the node's driver: made once, then reused, and made anew for another driver.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

use gpushare_tests::artifacts;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::probe::{OUT_OF_MEMORY, Report, SUCCESS};
use gpushare_tests::runtime::{LowLevel, Runtime};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Busybox];

fn cache(node: &SimulatedNode) -> PathBuf {
    node.root().join("cache")
}

fn copies(node: &SimulatedNode) -> BTreeSet<PathBuf> {
    fs::read_dir(cache(node)).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

/// Replaces the driver's file by a new one with the same bytes.
fn replace(file: &Path) {
    let bytes = fs::read(file).expect("the driver's file can be read");
    fs::remove_file(file).expect("the driver's file can be removed");
    fs::write(file, bytes).expect("the driver's file can be written");
    fs::set_permissions(file, fs::Permissions::from_mode(0o755)).expect("its mode can be set");
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn copies_are_made_once_and_again_for_a_new_driver() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let run = || {
        let bundle = Bundle::with_probe().env("GPUSHARE_MEMORY", "8GiB");
        let report = Report::of(&runtime.run(&bundle), &["9GiB", "7GiB"]);
        assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS]);
        copies(&node)
    };
    let first = run();
    assert_eq!(first.len(), 2, "one for each library: {first:?}");
    let made = |files: &BTreeSet<PathBuf>| -> Vec<_> {
        files.iter().map(|file| fs::metadata(file).and_then(|file| file.modified()).ok()).collect()
    };
    let times = made(&first);
    assert_eq!((run(), made(&first)), (first.clone(), times), "nothing is made again");

    let version = gpushare_tests::node::driver_version();
    replace(&node.root().join(format!("driver/usr/lib/x86_64-linux-gnu/libcuda.so.{version}")));
    let second = run();
    assert_eq!(
        (second.len(), second.is_superset(&first)),
        (3, true),
        "a creation under way needs the old one"
    );

    for copy in &second {
        let long_ago = SystemTime::now() - Duration::from_secs(48 * 3600);
        let file = fs::File::options().write(true).open(copy).expect("a copy can be opened");
        file.set_modified(long_ago).expect("its time can be set");
    }
    replace(&node.root().join(format!("driver/usr/lib/x86_64-linux-gnu/libcuda.so.{version}")));
    let third = run();
    assert_eq!((third.len(), third.intersection(&second).count()), (2, 1), "{second:?} {third:?}");

    // A copy that somebody else could have changed, or a file that is no copy at all, is made again.
    let copy = third.first().expect("there are two");
    fs::set_permissions(copy, fs::Permissions::from_mode(0o666)).expect("its mode can be set");
    assert_eq!(run(), third);
    assert_eq!(fs::metadata(copy).expect("it is there").permissions().mode() & 0o777, 0o644);
    fs::remove_file(copy).expect("it can be removed");
    symlink("/etc/passwd", copy).expect("a link can be made");
    assert_eq!(run(), third);
    assert!(fs::symlink_metadata(copy).expect("it is there").is_file());

    fs::set_permissions(cache(&node), fs::Permissions::from_mode(0o777)).expect("its mode can be set");
    let bundle = Bundle::with_probe().env("GPUSHARE_MEMORY", "8GiB");
    let refusal = runtime.create(&bundle).expect_err("the folder is anybody's");
    assert!(refusal.line().contains("writable by nobody else"), "{}", refusal.line());
}

#[test]
#[ignore = "needs root and runc: mounts a small tmpfs"]
fn a_cache_folder_that_cannot_serve_is_named_with_its_setting() {
    if !met(NEEDS) {
        return;
    }
    type Damage = fn(&Path);
    let damages: [(&str, Damage); 3] = [
        ("noexec", |folder| {
            fs::create_dir(folder).expect("the folder can be made");
            let flags = MsFlags::MS_NOEXEC;
            mount(Some("tmpfs"), folder, Some("tmpfs"), flags, Some("mode=755"))
                .expect("a tmpfs can be mounted");
        }),
        ("writable by nobody else", |folder| {
            fs::create_dir(folder).expect("the folder can be made");
            fs::set_permissions(folder, fs::Permissions::from_mode(0o777)).expect("its mode can be set");
        }),
        ("cannot use", |folder| fs::write(folder, "").expect("a file can be written")),
    ];
    for (part, damage) in damages {
        let node = SimulatedNode::one_gpu();
        damage(&cache(&node));
        let runtime = Runtime::wrapped(LowLevel::Runc, &node);
        let bundle = Bundle::small().env("GPUSHARE_MEMORY", "4GiB");
        let line = runtime.create(&bundle).map(drop).expect_err(part).line();
        let _ = umount2(&cache(&node), MntFlags::MNT_DETACH);
        for part in [part, "paths.cache"] {
            assert!(line.contains(part), "{part:?} is not in: {line}");
        }
    }
}

/// Every length that any finished copy has until `done`.
fn lengths(node: &SimulatedNode, done: &AtomicBool) -> BTreeSet<(PathBuf, u64)> {
    let mut seen = BTreeSet::new();
    while !done.load(Relaxed) {
        let finished =
            copies(node).into_iter().filter(|copy| copy.extension().is_some_and(|end| end != "new"));
        seen.extend(finished.filter_map(|copy| fs::metadata(&copy).ok().map(|file| (copy, file.len()))));
    }
    seen
}

/// Many creations at once on a node that nobody has prepared: each finds whole copies.
#[test]
#[ignore = "needs root and runc: runs containers"]
fn creations_at_once_make_the_copies_together() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let bundles: Vec<Bundle> = (0..6).map(|_| Bundle::with_probe().env("GPUSHARE_MEMORY", "2GiB")).collect();
    let done = AtomicBool::new(false);
    let seen = std::thread::scope(|scope| {
        let watch = scope.spawn(|| lengths(&node, &done));
        let run = |bundle| Report::of(&runtime.run(bundle), &["3GiB", "1GiB"]).allocations();
        let runs: Vec<_> = bundles.iter().map(|bundle| scope.spawn(move || run(bundle))).collect();
        let answers: Vec<_> = runs.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        done.store(true, Relaxed);
        for answer in answers {
            assert_eq!(answer.expect("the container ran"), [OUT_OF_MEMORY, SUCCESS]);
        }
        watch.join().expect("the cache can be read")
    });
    assert_eq!((copies(&node).len(), seen.len()), (2, 2), "copies were seen unfinished: {seen:?}");
}

/// An image with a compiler and without stub libraries: the linker finds what is mounted, and the program
/// finds the driver.
#[test]
#[ignore = "needs root, runc and a C compiler: runs a container"]
fn a_program_is_linked_and_run_in_a_container() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let bundle = Bundle::host_root().env("GPUSHARE_MEMORY", "1344MiB");
    let container = runtime.run(&bundle);
    let source = artifacts::checkout().join("intercept/tests/programs/linked.c");
    let source = source.to_str().expect("paths are UTF-8");
    let link = container.exec(&["/usr/bin/cc", "-o", "/tmp/linked", source, "-lcuda", "-lnvidia-ml"]);
    assert_eq!(link.expect_success("linking").stderr, "", "not even a warning");
    let told = container.exec(&["/tmp/linked"]).expect_success("the linked program").stdout;
    let lines: Vec<&str> = told.lines().collect();
    assert_eq!(lines[0], "allocations 0 0 2");
    assert!(lines[1].starts_with("version 0 1"), "{told}");
    assert_eq!(lines[3], "cuDriverGetVersion /usr/lib/gpushare/driver/cuda");
    assert!(lines[2].ends_with("/libcuda.so.1") && !lines[2].contains("gpushare"), "{told}");
}
