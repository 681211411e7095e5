//! What the command line says when there is nothing to show, and what it says about what it did.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::Command;

use gpushare_tests::artifacts;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::command;
use gpushare_tests::leases::cli;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::runtime::{LowLevel, Runtime};
use gpushare_tests::scratch::Scratch;

#[test]
#[ignore = "needs root and runc: runs a container"]
fn every_command_says_what_it_found_or_did() {
    if !met(&[Need::Root, Need::Runc, Need::Busybox]) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let said = |args: &[&str]| cli(runtime.config(), args).expect_success(&args.join(" ")).stdout;
    for (args, want) in [
        (&["ps"][..], "no shares held\n"),
        (&["history"], "no share was given back yet, and none refused\n"),
        (&["sweep"], "nothing to give back\n"),
        (&["ps", "-q"], ""),
    ] {
        assert_eq!(said(args), want, "{args:?}");
    }
    let refreshed = said(&["inventory", "refresh"]);
    assert!(refreshed.ends_with("the memory of 1 of 1 GPU(s) is known\n"), "{refreshed}");

    let bundle = Bundle::small().env("GPUSHARE_MEMORY", "4GiB").env("GPUSHARE_CORES", "30%");
    let bundle = bundle.env("GPUSHARE_COMPUTE_POLICY", "none");
    let container = runtime.run(&bundle);
    let listing = said(&["ps"]);
    assert!(listing.contains("30% kept") && listing.contains("  0 GPU-"), "{listing}");
    let named = cli(runtime.config(), &["update", "web", "--memory", "1GiB"]).stderr;
    assert!(named.contains("give its name") && named.lines().count() == 1, "{named}");
    // Who is named as the beginning of another one's id is not taken for it.
    let other = Bundle::small().env("GPUSHARE_MEMORY", "1GiB");
    let (beginning, _) = bundle.id().split_at(bundle.id().len() - 1);
    let other = other.annotation("nerdctl/name", beginning);
    let namesake = runtime.run(&other);
    let told = cli(runtime.config(), &["release", "--force", beginning]);
    assert!(!told.success() && told.stderr.contains("several containers fit"), "{told:?}");
    drop(namesake);
    let released = said(&["release", "--force", bundle.id()]);
    assert_eq!(released, format!("gave back the share of {}\n", bundle.id()));
    let history = said(&["history"]);
    assert!(history.contains("  0 GPU-") && history.contains(": 4 GiB, 30%"), "{history}");
    drop(container);
}

#[test]
#[ignore = "needs root: gives root up"]
fn each_command_says_what_only_root_may_do() {
    if !met(&[Need::Root]) {
        return;
    }
    // The build's folder may be closed to other users.
    let folder = Scratch::new("nobody");
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).expect("a folder can be opened");
    let program = folder.path().join("gpushare");
    fs::copy(artifacts::cli(), &program).expect("the program can be copied");
    for (args, deed) in [
        (&["ps"][..], "look at the node's shares"),
        (&["update", "x", "--memory", "1GiB"], "change a share"),
        (&["release", "x"], "give back shares"),
        (&["system", "nodes"], "look after device nodes"),
    ] {
        let outcome = command::run(Command::new(&program).args(args).uid(65_534));
        assert_eq!(outcome.stderr, format!("gpushare: only root may {deed}: use sudo\n"), "{args:?}");
        assert!(!outcome.success());
    }
}
