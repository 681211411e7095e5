//! The driver's own limit of memory as a second wall: what a program that passes by gpushare's libraries gets.

mod changes;

use std::fs;
use std::path::Path;

use gpushare_tests::artifacts;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::command::{Outcome, run};
use gpushare_tests::hooked::{self, Cgroups};
use gpushare_tests::leases::{cli, leases};
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::{MODEL, SimulatedNode};
use gpushare_tests::probe::{GIB, OUT_OF_MEMORY, Report, SUCCESS};
use gpushare_tests::python;
use gpushare_tests::runtime::{Container, LowLevel, Runtime};
use gpushare_tests::view::{View, beside};
use serde_json::json;

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Busybox];

/// The first driver with limits of its own.
fn node(more: &[&str]) -> SimulatedNode {
    SimulatedNode::with(2, MODEL, "80GiB", &[&["--driver", "615.71.09"], more].concat())
}

fn settings(low_level: LowLevel, word: &str) -> String {
    format!("{}\n[inject]\ndriver_limit = \"{word}\"\n", low_level.settings())
}

fn wrapped(node: &SimulatedNode, low_level: LowLevel, view: View, word: &str) -> Runtime {
    let config = node.config_with(&format!("{low_level:?}-{word}"), &settings(low_level, word));
    Runtime::with_config(low_level, &config).in_view(view)
}

fn share() -> Bundle {
    Bundle::with_probe().env("GPUSHARE_MEMORY", "4GiB")
}

/// What a program gets for each size that calls the driver's own library in place of gpushare's.
fn past_the_libraries(container: &Container<'_>, sizes: &[&str]) -> Vec<String> {
    let asked: Vec<String> = sizes.iter().map(|size| format!("--allocate {size}")).collect();
    let script = format!(
        "LD_PRELOAD=/usr/lib/gpushare/driver/cuda exec /bin/gpushare-simulator probe --json {}",
        asked.join(" ")
    );
    let told = container.exec(&["/bin/busybox", "sh", "-c", &script]).expect_success("a program past us");
    Report::parse(&told.stdout).allocations()
}

fn within_the_share(container: &Container<'_>) {
    let report = Report::of(container, &["3GiB", "1GiB"]);
    report.assert_size(4 * GIB);
    assert_eq!(report.allocations(), [SUCCESS, OUT_OF_MEMORY]);
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_program_past_the_libraries_meets_the_drivers_own_limit() {
    if !met(NEEDS) {
        return;
    }
    let node = node(&[]);
    let open = wrapped(&node, LowLevel::Runc, View::V2, "off");
    let bundle = share();
    let container = open.run(&bundle);
    within_the_share(&container);
    assert_eq!(past_the_libraries(&container, &["5GiB"]), [SUCCESS], "without it");
    drop(container);

    let runtime = wrapped(&node, LowLevel::Runc, View::V2, "require");
    let plan = run_in(&runtime, &["plan", "--bundle", &bundle.path().to_string_lossy()])
        .expect_success("a plan")
        .stdout;
    assert!(
        plan.contains("the driver's own limit too; if that cannot be set, the container is refused"),
        "{plan}"
    );
    let (ours, other) = (share().env("GPUSHARE_COUNT", "2"), share());
    let (ours_runs, other_runs) = (runtime.run(&ours), runtime.run(&other));
    for container in [&ours_runs, &other_runs] {
        within_the_share(container);
        let got = past_the_libraries(container, &["5GiB", "3GiB", "1GiB"]);
        assert_eq!(got, [OUT_OF_MEMORY, SUCCESS, OUT_OF_MEMORY]);
    }
    // It follows the share, and only this container's.
    let resize = |size| {
        let told = run_in(&runtime, &["update", ours_runs.id(), "--memory", size]);
        assert!(told.success(), "{told:?}");
    };
    resize("6GiB");
    assert_eq!(past_the_libraries(&ours_runs, &["5GiB", "1GiB"]), [SUCCESS, OUT_OF_MEMORY]);
    assert_eq!(past_the_libraries(&other_runs, &["5GiB"]), [OUT_OF_MEMORY]);
    resize("2GiB");
    assert_eq!(past_the_libraries(&ours_runs, &["3GiB", "1GiB"]), [OUT_OF_MEMORY, SUCCESS]);
    drop((ours_runs, other_runs));
    assert_eq!(leases(runtime.config()), []);
}

/// `gpushare` with the settings, the mounts and the cgroups of `runtime`.
fn run_in(runtime: &Runtime, args: &[&str]) -> Outcome {
    let mut command = beside(runtime.mounts_of(), artifacts::cli().as_os_str());
    run(command.args(args).env("GPUSHARE_CONFIG", runtime.config()))
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_growing_share_may_grow_up_to_the_drivers_own_limit() {
    if !met(NEEDS) {
        return;
    }
    let node = node(&[]);
    let runtime = wrapped(&node, LowLevel::Runc, View::V2, "require");
    let bundle = share().env("GPUSHARE_MEMORY_LIMIT", "8GiB");
    let container = runtime.run(&bundle);
    assert_eq!(past_the_libraries(&container, &["7GiB", "1GiB"]), [SUCCESS, OUT_OF_MEMORY]);
    // Whole cards and turns have no limit.
    for mode in ["exclusive", "time-slice"] {
        let whole = Bundle::with_probe().env("GPUSHARE_MODE", mode);
        let container = runtime.run(&whole);
        assert_eq!(Report::of(&container, &["79GiB"]).allocations(), [SUCCESS], "{mode}");
    }
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a_hook_alone_sets_it_too() {
    if !met(NEEDS) {
        return;
    }
    let node = node(&[]);
    let config = node.config_with("hooked", &settings(LowLevel::Runc, "require"));
    let config = config.to_string_lossy();
    let runtime = hooked::runtime(LowLevel::Runc, &node, Cgroups::V2);
    let hook = artifacts::hook();
    let bundle = share().hook("createRuntime", &hook, &["createRuntime", "--config", &config]).hook(
        "poststop",
        &hook,
        &["poststop", "--config", &config],
    );
    let container = runtime.run(&bundle);
    within_the_share(&container);
    assert_eq!(past_the_libraries(&container, &["5GiB", "3GiB"]), [OUT_OF_MEMORY, SUCCESS]);
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn where_there_is_none_it_is_left_out_or_the_container_is_refused() {
    if !met(NEEDS) {
        return;
    }
    let old = SimulatedNode::create(1, MODEL, "80GiB");
    let new = node(&["--mig", "1=1g.10gb"]);
    let instance = || share().env("GPUSHARE_MIG", "1g.10gb");
    let no_cgroups: &[View] = if View::AsItIs.is_v2() { &[] } else { &[View::AsItIs] };
    let cases = no_cgroups.iter().map(|view| (&new, *view, share(), "need cgroup v2 at /sys/fs/cgroup"));
    let cases = cases.chain([
        (&old, View::V2, share(), "they came with 615"),
        (&new, View::V2, instance(), "no limit of its own for a MIG instance"),
    ]);
    for (node, view, bundle, want) in cases {
        let refusing = wrapped(node, LowLevel::Runc, view, "require");
        let line = refusing.create(&bundle).expect_err(want).line();
        assert!(line.contains(want) && line.contains("inject.driver_limit"), "{line}");
        assert_eq!(leases(refusing.config()), [], "{want}");
        let lenient = wrapped(node, LowLevel::Runc, view, "auto");
        for (runtime, verdict) in [(&refusing, "FAILURE"), (&lenient, "warning")] {
            let told = run_in(runtime, &["doctor"]).stdout;
            let line = told.lines().find(|line| line.contains("driver's limit")).expect("a line of doctor");
            let is_had = line.starts_with("ok");
            assert!(is_had || line.starts_with(verdict) && line.contains(want), "{line}");
            assert_eq!(is_had, want.contains("MIG"), "{line}");
        }
        let container = lenient.run(&bundle);
        assert_eq!(
            Report::of(&container, &["3GiB", "1GiB"]).allocations(),
            [SUCCESS, OUT_OF_MEMORY],
            "{want}"
        );
    }
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn where_it_cannot_be_set_the_log_says_so_or_the_container_is_refused() {
    if !met(NEEDS) {
        return;
    }
    let node = node(&[]);
    assert!(cli(node.config(), &["inventory", "refresh"]).success());
    let broken = node.root().join("broken");
    fs::write(&broken, "#!/bin/sh\necho 'gpushare: NVML says no' >&2\nexit 1\n")
        .expect("a script can be written");
    executable(&broken);
    let log = node.root().join("gpushare.log");
    let refusing = behind(&node, &broken, "require");
    let bundle = share();
    let line = refusing.create(&bundle).expect_err("NVML says no").outcome.stderr;
    assert!(line.contains("the driver's own limit cannot be set"), "{line}");
    assert!(line.contains("NVML says no"), "{line}");
    refusing.delete_force(bundle.id()); // as an engine does after a failed create
    assert_eq!(leases(node.config()), []);
    let lenient = behind(&node, &broken, "auto");
    within_the_share(&lenient.run(&bundle));
    let told = fs::read_to_string(&log).expect("a log");
    assert!(told.contains("only the libraries limit it") && told.contains("NVML says no"), "{told}");
}

/// A runtime that calls `cli` in place of gpushare's own, and logs into gpushare.log.
fn behind(node: &SimulatedNode, cli: &Path, word: &str) -> Runtime {
    let log = node.root().join("gpushare.log");
    let config = fs::read_to_string(node.config()).expect("settings").replace(
        "[paths]\n",
        &format!("[log]\nfile = {:?}\n[paths]\ncli = {:?}\n", log.display(), cli.display()),
    );
    let path = node.root().join(format!("{word}.toml"));
    fs::write(&path, format!("{config}\n{}", settings(LowLevel::Runc, word)))
        .expect("settings can be written");
    Runtime::with_config(LowLevel::Runc, &path).in_view(View::V2)
}

fn executable(path: &Path) {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("its mode can be set");
}

#[test]
#[ignore = "needs root: makes a cgroup"]
fn nvidias_own_client_reads_the_limit_that_we_set() {
    if !met(&[Need::Root, Need::Python]) {
        return;
    }
    let node = node(&[]);
    let devices = cli(node.config(), &["devices", "--json"]).expect_success("devices").stdout;
    let devices: serde_json::Value = serde_json::from_str(&devices).expect("devices prints JSON");
    let uuid = devices["gpus"][0]["uuid"].as_str().expect("a UUID");
    let group = format!("/sys/fs/cgroup/gpushare-tests-{}", std::process::id());
    let script = format!(
        "mkdir {group} && trap 'rmdir {group}' EXIT && \
         {cli} system driver-limit {group} {uuid}=4294967296 && {python} -c '{PROGRAM}' {group} && \
         {cli} system driver-limit /tmp {uuid}=1; {cli} system driver-limit {group}/none {uuid}=1; \
         {cli} system driver-limit {group} GPU-01010101-0101-0101-0101-010101010101=1; \
         {cli} system driver-limit {group} {uuid}=4G",
        cli = artifacts::cli().display(),
        python = python::interpreter().display(),
    );
    let mut command = View::V2.command("/bin/sh".as_ref());
    command.args(["-c", &script]).env("GPUSHARE_CONFIG", node.config());
    command.env("GPUSHARE_SIMULATOR", node.shared()).env("LD_LIBRARY_PATH", node.libraries());
    let told = run(&mut command);
    let answer: Result<serde_json::Value, _> = serde_json::from_str(told.stdout.trim());
    let want = json!([[0, 4_u64 << 30, 0], [1_u64 << 20, 2_u64 << 30, 0], "Not Found"]);
    assert_eq!(answer.ok(), Some(want), "{told:?}");
    for part in [
        "/tmp is no folder of cgroup v2",
        "cannot look at the cgroup",
        "NVML sets no limit on GPU GPU-0101",
        "an equals sign, and bytes",
    ] {
        assert!(told.stderr.contains(part), "{part}: {}", told.stderr);
    }
}

/// Reads the limit by nvidia-ml-py, sets another one, and reads it.
const PROGRAM: &str = r#"
import json, sys
from pynvml import *
nvmlInit()
gpu = nvmlDeviceGetHandleByIndex(0)
path = sys.argv[1].encode()
def told(path):
    limits = c_nvmlGetMemoryLimits_v1_t(nameSpace=path)
    nvmlDeviceGetMemoryLimits_v1(gpu, limits)
    return [limits.softLimit, limits.hardLimit, limits.currentUsed]
first = told(path)
nvmlDeviceSetMemoryLimits_v1(gpu, c_nvmlSetMemoryLimits_v1_t(nameSpace=path, softLimit=1 << 20, hardLimit=2 << 30))
second = told(path)
try:
    told(b"/sys/fs/cgroup/no-such-cgroup")
except NVMLError as error:
    print(json.dumps([first, second, str(error)]))
"#;
