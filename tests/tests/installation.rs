//! `make install` makes a tree that works by itself, and `make uninstall` removes it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use gpushare_tests::artifacts::{self, Installed};
use gpushare_tests::bundle::Bundle;
use gpushare_tests::command;
use gpushare_tests::leases::leases;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::probe::{GIB, OUT_OF_MEMORY, Report, SUCCESS};
use gpushare_tests::runtime::Runtime;
use gpushare_tests::scratch::Scratch;

#[test]
#[ignore = "needs root and runc: runs a container"]
fn an_installed_gpushare_runs_without_the_checkout() {
    if !met(&[Need::Root, Need::Runc, Need::Busybox]) {
        return;
    }
    let installed = Installed::new();
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::installed(&installed.wrapper(), &node);
    let bundle = Bundle::with_probe().env("GPUSHARE_MEMORY", "4GiB");
    let container = runtime.run(&bundle);
    let report = Report::of(&container, &["5GiB", "3GiB"]);
    report.assert_size(4 * GIB);
    assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS]);
    drop(container);
    assert_eq!(leases(runtime.config()), []);
}

/// `GPUSHARE_INSTALLED_STARTS` sets the number of starts.
#[test]
#[ignore = "needs root and runc: runs containers"]
fn containers_start_and_end_while_gpushare_is_installed_again_and_again() {
    if !met(&[Need::Root, Need::Runc, Need::Busybox]) {
        return;
    }
    let starts =
        std::env::var("GPUSHARE_INSTALLED_STARTS").ok().and_then(|text| text.parse().ok()).unwrap_or(40);
    let installed = Installed::new();
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::installed(&installed.wrapper(), &node);
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        let installs = scope.spawn(|| {
            let mut installs = 0;
            while !ended.load(Ordering::Relaxed) {
                installed.again();
                installs += 1;
            }
            installs
        });
        let _ended = OnDrop(&ended);
        for start in 0..starts {
            let bundle = Bundle::small().env("GPUSHARE_MEMORY", "4GiB");
            let container =
                runtime.create(&bundle).unwrap_or_else(|refusal| panic!("start {start}: {refusal:?}"));
            container.start();
        }
        ended.store(true, Ordering::Relaxed);
        assert!(installs.join().expect("no install fails") > 3);
    });
    assert_eq!(leases(runtime.config()), []);
}

/// Stops the other thread, also where a start fails.
struct OnDrop<'a>(&'a AtomicBool);

impl Drop for OnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
#[ignore = "needs the release build: copies its files"]
fn uninstalling_leaves_nothing_but_the_administrators_settings() {
    let installed = Installed::new();
    let settings = installed.root().join("etc/gpushare/gpushare.toml");
    assert!(files(installed.root()).len() > 8);
    fs::write(&settings, "# mine\n").expect("the settings can be written");
    installed.uninstall();
    let left = files(installed.root());
    assert!(left.iter().all(|path| *path == settings), "{left:?}");
}

#[test]
fn a_prefix_that_is_no_absolute_path_is_refused_by_name() {
    let scratch = Scratch::new("prefix");
    for script in ["install.sh", "uninstall.sh"] {
        for prefix in ["usr/local", "", "."] {
            let mut run = Command::new(artifacts::checkout().join("packaging").join(script));
            let outcome = command::run(run.arg(scratch.path().join("tree")).arg(prefix));
            assert!(!outcome.success(), "{script} {prefix:?}");
            assert!(outcome.stderr.contains("PREFIX must begin with /"), "{outcome:?}");
        }
    }
    assert_eq!(fs::read_dir(scratch.path()).expect("the folder is there").count(), 0);
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}
