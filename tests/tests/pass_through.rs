//! A container without a request reaches the low-level runtime byte for byte as the engine wrote it. So does
//! every call that is not gpushare's.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use gpushare_tests::artifacts;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::command;
use gpushare_tests::leases::leases;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::runtime::{LowLevel, Runtime};
use gpushare_tests::scratch::Scratch;

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_container_without_a_request_runs_from_the_engines_own_bytes() {
    if !met(&[Need::Root, Need::Runc, Need::Crun, Need::Busybox]) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    for (low_level, bystanders) in LowLevel::ALL.into_iter().flat_map(|one| [(one, "allow"), (one, "deny")]) {
        let settings = format!("{}\n[supervisor]\nbystanders = \"{bystanders}\"\n", low_level.settings());
        let runtime = Runtime::with_config(low_level, &node.config_with(bystanders, &settings));
        for bundle in [
            Bundle::small(),
            Bundle::small().env("NVIDIA_VISIBLE_DEVICES", "void"),
            Bundle::small().annotation("example.com/gpushare.io", "memory=4GiB"),
        ] {
            let bundle = bundle.args(&["/bin/sh", "-c", "echo out; echo err >&2; exit 3"]);
            let written = bundle.write();
            let container = runtime.run(&bundle);
            assert_eq!(bundle.config_bytes(), written, "{low_level:?} {bystanders}");
            assert!(container.wait_stopped(Duration::from_secs(20)), "{low_level:?} {bystanders}");
            assert_eq!(
                (container.stdout().as_str(), container.stderr().as_str()),
                ("out\n", "err\n"),
                "{low_level:?} {bystanders}"
            );
            assert_eq!(leases(runtime.config()), [], "{low_level:?} {bystanders}");
        }
    }
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_slip_in_the_settings_stops_only_the_containers_that_ask_for_something() {
    if !met(&[Need::Root, Need::Runc, Need::Busybox]) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    for (slip, told) in [("strickt = true", "strickt"), ("strict = fasle", "slip.toml:")] {
        let settings = format!("{}\n[request]\n{slip}\n", LowLevel::Runc.settings());
        let runtime = Runtime::with_config(LowLevel::Runc, &node.config_with("slip", &settings));
        let sandbox = Bundle::small()
            .annotation("io.kubernetes.cri.container-type", "sandbox")
            .annotation("gpushare.io/memory", "4GiB");
        for bundle in [Bundle::small(), sandbox] {
            let written = bundle.write();
            // In the end it is killed and deleted.
            let container = runtime.run(&bundle);
            assert_eq!(container.status().as_deref(), Some("running"), "{slip}");
            assert_eq!(bundle.config_bytes(), written);
        }
        for bundle in [
            Bundle::small().env("GPUSHARE_MEMORY", "4GiB"),
            Bundle::small().env("GPUSHARE_MEMORY", "garbage"),
            Bundle::small().annotation("gpushare.io/memory", "4GiB"),
            Bundle::small().env("NVIDIA_VISIBLE_DEVICES", "all"),
        ] {
            let line = runtime.create(&bundle).map(drop).expect_err("it asks for something").line();
            assert!(line.contains(told), "{line}");
        }
    }
}

/// A low-level runtime that only records how it was called.
struct Recorder {
    scratch: Scratch,
}

impl Recorder {
    fn new() -> Self {
        let scratch = Scratch::new("recorder");
        let calls = scratch.path().join("calls");
        let program =
            scratch.file("runc", format!("#!/bin/sh\nprintf '%s\\n' \"$@\" >{}\nexit 7\n", calls.display()));
        fs::set_permissions(program, fs::Permissions::from_mode(0o755)).expect("a mode can be set");
        Self { scratch }
    }

    fn settings(&self) -> PathBuf {
        let program = self.scratch.path().join("runc");
        self.scratch.file("gpushare.toml", format!("[runtime]\ncandidates = [\"{}\"]\n", program.display()))
    }

    fn calls(&self) -> Vec<String> {
        let text = fs::read_to_string(self.scratch.path().join("calls")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }
}

fn wrapper(recorder: &Recorder, args: &[&str], folder: &Path) -> command::Outcome {
    let mut wrapper = Command::new(artifacts::wrapper());
    wrapper.args(args).current_dir(folder).env_clear().env("GPUSHARE_CONFIG", recorder.settings());
    command::run(&mut wrapper)
}

#[test]
fn calls_that_are_not_ours_arrive_unchanged_on_a_node_without_a_driver() {
    for args in [
        vec!["--version"],
        vec!["features"],
        vec!["--help"],
        vec!["--root", "/r", "--log=/l", "start", "id"],
        vec![
            "--root",
            "/r",
            "--log",
            "/l",
            "--log-format",
            "json",
            "exec",
            "--process",
            "p",
            "--detach",
            "id",
            "--",
            "x y",
            "",
        ],
        vec!["ps", "--format", "json", "id"],
        vec!["update", "--resources", "-", "id"],
        vec!["state", "id"],
        vec!["no-such-subcommand", "--flag"],
    ] {
        let recorder = Recorder::new();
        let outcome = wrapper(&recorder, &args, recorder.scratch.path());
        assert_eq!(recorder.calls(), args, "{outcome:?}");
        assert_eq!(outcome.status.code(), Some(7), "{args:?}");
        assert_eq!((outcome.stdout.as_str(), outcome.stderr.as_str()), ("", ""), "{args:?}");
    }
}

#[test]
fn bundles_of_real_engines_without_a_request_stay_as_they_came() {
    for name in [
        "docker-plain",
        "docker-privileged",
        "ctr-run-plain",
        "cri-sandbox-hostnet",
        "cri-container-privileged",
    ] {
        let recorder = Recorder::new();
        let fixture = artifacts::checkout().join(format!("tests/fixtures/{name}.json"));
        let written = fs::read(&fixture).unwrap_or_else(|error| panic!("{}: {error}", fixture.display()));
        recorder.scratch.file("config.json", without_request(&written));
        let before = fs::read(recorder.scratch.path().join("config.json")).expect("config.json can be read");
        let folder = recorder.scratch.path().to_string_lossy().into_owned();
        let args = ["--root", "/r", "create", "--bundle", &folder, "--pid-file", "/p", "id"];
        let outcome = wrapper(&recorder, &args, recorder.scratch.path());
        assert_eq!(recorder.calls(), args, "{name}: {outcome:?}");
        let after = fs::read(recorder.scratch.path().join("config.json")).expect("config.json can be read");
        assert!(before == after, "{name}: config.json was changed");
    }
}

/// The fixture's bytes without a request. The pods of the fixtures ask for a share by annotation and
/// environment, so those names are replaced for their application containers. The sandbox keeps its
/// annotations, since it passes anyway.
fn without_request(bytes: &[u8]) -> Vec<u8> {
    let text = String::from_utf8(bytes.to_vec()).expect("a fixture is UTF-8");
    if text.contains("\"io.kubernetes.cri.container-type\":\"sandbox\"") {
        return text.into_bytes();
    }
    let text = text.replace("gpushare.io/", "example.org/").replace("GPUSHARE_", "EXAMPLE_");
    text.replace("NVIDIA_VISIBLE_DEVICES", "EXAMPLE_VISIBLE_DEVICES").into_bytes()
}

#[test]
fn a_restore_is_passed_on_unless_the_bundle_asks_for_a_share() {
    for (env, passes) in [("A=b", true), ("GPUSHARE_MEMORY=4GiB", false), ("GPUSHARE_MEMORY=garbage", false)]
    {
        let recorder = Recorder::new();
        let folder = recorder.scratch.path().to_string_lossy().into_owned();
        let text = format!(r#"{{"process": {{"env": ["{env}"]}}}}"#);
        let config = recorder.scratch.file("config.json", &text);
        let args = ["--root", "/r", "restore", "--image-path", "/i", "--bundle", &folder, "--detach", "id"];
        let outcome = wrapper(&recorder, &args, Path::new("/"));
        assert_eq!(recorder.calls() == args, passes, "{env}: {outcome:?}");
        assert_eq!(outcome.status.code() == Some(7), passes, "{env}: {outcome:?}");
        assert_eq!(fs::read_to_string(config).expect("it is there"), text, "{env}");
        if env.ends_with("4GiB") {
            assert!(outcome.stderr.contains("restored from a checkpoint"), "{outcome:?}");
        }
    }
}

#[test]
fn calls_that_runtimes_could_read_in_different_ways_reach_none_of_them() {
    for args in [&["create", "--bund", "/b", "id"][..], &["-root", "/r", "delete", "id"], &["run", "a", "b"]]
    {
        let recorder = Recorder::new();
        let outcome = wrapper(&recorder, args, recorder.scratch.path());
        assert_eq!(recorder.calls(), [""; 0], "{args:?}: {outcome:?}");
        assert!(outcome.stderr.contains("; write"), "{args:?}: {outcome:?}");
    }
    // A call for help gets help, wherever the flag stands.
    for args in [&["create", "--help"][..], &["run", "-h"], &["delete", "-f", "--help"]] {
        let recorder = Recorder::new();
        let outcome = wrapper(&recorder, args, Path::new("/"));
        assert_eq!(recorder.calls(), args, "{outcome:?}");
    }
}
