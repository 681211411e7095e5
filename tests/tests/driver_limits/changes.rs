//! What becomes of the driver's own limit when shares change, and where it would be others' limit, too.

use std::fs;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use gpushare_tests::artifacts;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::command::{eventually, run};
use gpushare_tests::leases::{cli, leases};
use gpushare_tests::needs::met;
use gpushare_tests::node::{MODEL, SimulatedNode};
use gpushare_tests::probe::{OUT_OF_MEMORY, SUCCESS};
use gpushare_tests::runtime::{LowLevel, Runtime};
use gpushare_tests::view::{View, beside};
use serde_json::json;

use crate::{NEEDS, behind, executable, node, past_the_libraries, run_in, share, wrapped};

/// A program in place of gpushare's CLI that runs `script` first.
fn cli_after(node: &SimulatedNode, script: &str) -> PathBuf {
    let path = node.root().join("cli");
    let text = format!("#!/bin/sh\n{script}\nexec {} \"$@\"\n", artifacts::cli().display());
    fs::write(&path, text).expect("a script can be written");
    executable(&path);
    path
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_cgroup_that_others_are_in_is_not_limited() {
    if !met(NEEDS) {
        return;
    }
    let node = node(&[]);
    let runtime = wrapped(&node, LowLevel::Runc, View::V2, "require");
    let cgroup = json!(format!("/gpushare-tests-shared-{}", std::process::id()));
    let first = share().set("/linux/cgroupsPath", cgroup.clone());
    let second = Bundle::with_probe().env("GPUSHARE_MEMORY", "1GiB").set("/linux/cgroupsPath", cgroup);
    let first_runs = runtime.run(&first);
    let told = runtime.create(&second).expect_err("it is in the first one's cgroup").outcome.stderr;
    assert!(told.contains("others than this container are in its cgroup"), "{told}");
    runtime.delete_force(second.id());
    assert_eq!(past_the_libraries(&first_runs, &["3GiB", "2GiB"]), [SUCCESS, OUT_OF_MEMORY]);
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_share_whose_limit_cannot_follow_stays_as_it_was() {
    if !met(NEEDS) {
        return;
    }
    let node = node(&[]);
    let broken = node.root().join("broken");
    let program = cli_after(
        &node,
        &format!("[ ! -e {} ] || {{ echo 'gpushare: NVML says no' >&2; exit 1; }}", broken.display()),
    );
    let runtime = behind(&node, &program, "require");
    let bundle = share();
    let container = runtime.run(&bundle);
    fs::write(&broken, "").expect("a file can be written");
    for size in ["7GiB", "1GiB"] {
        let told = run_in(&runtime, &["update", bundle.id(), "--memory", size]);
        assert!(!told.success(), "{told:?}");
        for part in ["its share stays as it was", "cannot be set (inject.driver_limit): NVML says no"] {
            assert!(told.stderr.contains(part), "{part}: {}", told.stderr);
        }
        let held = leases(node.config())[0].memory[0];
        assert_eq!(held, 4 << 30, "{size}");
    }
    fs::remove_file(&broken).expect("it is there");
    assert!(run_in(&runtime, &["update", bundle.id(), "--memory", "7GiB"]).success());
    assert_eq!(past_the_libraries(&container, &["6GiB", "1GiB"]), [SUCCESS, OUT_OF_MEMORY]);
    // Who turns it off does not leave the old wall around a larger share.
    let off = behind(&node, &program, "off");
    let mut update = beside(runtime.mounts_of(), artifacts::cli().as_os_str());
    update.args(["update", bundle.id(), "--memory", "9GiB"]).env("GPUSHARE_CONFIG", off.config());
    let _ = run(&mut update).expect_success("an update");
    assert_eq!(past_the_libraries(&container, &["8GiB", "1GiB"]), [SUCCESS, OUT_OF_MEMORY]);
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn of_two_changes_at_once_the_driver_has_the_one_that_the_lease_has() {
    if !met(NEEDS) {
        return;
    }
    let node = node(&[]);
    // The first change sets its limit after the second one has.
    let went = node.root().join("went");
    let wait = format!("for i in $(seq 200); do [ ! -e {} ] || break; sleep 0.05; done", went.display());
    let program = cli_after(&node, &format!("case \"$*\" in *={}) {wait} ;; esac", 6_u64 << 30));
    let runtime = behind(&node, &program, "require");
    let bundle = share();
    let container = runtime.run(&bundle);
    let mut slow = beside(runtime.mounts_of(), artifacts::cli().as_os_str());
    slow.args(["update", bundle.id(), "--memory", "6GiB"]).env("GPUSHARE_CONFIG", runtime.config());
    slow.stdout(Stdio::null());
    let mut slow = slow.spawn().expect("it starts");
    let has_changed = || leases(node.config())[0].memory[0] == 6 << 30;
    assert!(eventually(Duration::from_secs(20), has_changed));
    assert!(run_in(&runtime, &["update", bundle.id(), "--memory", "2GiB"]).success());
    fs::write(&went, "").expect("a file can be written");
    assert!(slow.wait().expect("it ends").success());
    assert_eq!(past_the_libraries(&container, &["3GiB", "1GiB"]), [OUT_OF_MEMORY, SUCCESS]);
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn nobody_is_ended_for_a_container_that_cannot_have_it() {
    if !met(NEEDS) {
        return;
    }
    let old = SimulatedNode::create(1, MODEL, "80GiB");
    let rule = "\n[inject]\ndriver_limit = \"require\"\n[rules]\npreemption = \"lower\"\n";
    let config = old.config_with("preempting", &format!("{}{rule}", LowLevel::Runc.settings()));
    let asking = |level| Bundle::with_probe().env("GPUSHARE_MEMORY", "60GiB").env("GPUSHARE_PRIORITY", level);
    let low = asking("1");
    let open = wrapped(&old, LowLevel::Runc, View::V2, "off");
    let runs = open.run(&low);
    let high = asking("9");
    let runtime = Runtime::with_config(LowLevel::Runc, &config).in_view(View::V2);
    let line = runtime.create(&high).expect_err("the driver is old").line();
    assert!(line.contains("they came with 615"), "{line}");
    assert_eq!(runs.status().as_deref(), Some("running"));
    assert!(cli(old.config(), &["ps"]).stdout.contains("60 GiB"));
}
