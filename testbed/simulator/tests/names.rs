//! Which functions a driver of each version has, and how programs find them.

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use support::{Node, client, real_driver};

/// The body of the client processes; see [`support::Node::run`].
#[test]
#[ignore = "not a test: the client that the tests start"]
fn client() {
    if let Ok(script) = std::env::var("SCRIPT") {
        client::run(&script);
    }
}

#[test]
fn entry_points_follow_version_and_flags() {
    let node = Node::new(&["--driver", "535.309.01"]);
    for (name, version, flags, want) in [
        ("cuMemAlloc", 2000, 0, "0 0 cuMemAlloc"),
        ("cuMemAlloc", 12020, 0, "0 0 cuMemAlloc_v2"),
        ("cuMemAlloc_v2", 12020, 0, "0 1 -"),
        ("cuMemAllocAsync", 11010, 0, "0 2 -"),
        ("cuCtxCreate", 11040, 0, "0 0 cuCtxCreate_v3"),
        ("cuCtxCreate", 13000, 0, "0 0 cuCtxCreate_v3"),
        ("cuLaunchKernel", 12000, 2, "0 0 cuLaunchKernel_ptsz"),
        ("cuMemcpyHtoD", 12000, 2, "0 0 cuMemcpyHtoD_v2_ptds"),
        ("cuInit", 12000, 2, "0 0 cuInit"),
        ("cuNoSuchName", 12000, 0, "0 1 -"),
        ("cuGreenCtxCreate", 12040, 0, "0 1 -"),
    ] {
        let got = node.run(&format!("count\nentry {name} {version} {flags}")).value("entry");
        assert_eq!(got, want, "{name} at {version} with flags {flags}");
    }
    let refused = node.run("count\nentry cuInit 12000 4").value("entry");
    assert!(refused.starts_with("1 9 "), "flags that do not exist: {refused}");
}

#[test]
fn every_version_of_the_driver_gives_the_forms_of_its_time() {
    for (driver, name, version, flags, want) in [
        ("550.54.15", "cuGreenCtxCreate", 12040, 0, "0 0 cuGreenCtxCreate"),
        ("550.54.15", "cuGreenCtxCreate", 12020, 0, "0 2 -"),
        ("550.54.15", "cuCtxCreate", 12050, 0, "0 0 cuCtxCreate_v3"),
        ("550.54.15", "cuStreamGetCaptureInfo", 12030, 2, "0 0 cuStreamGetCaptureInfo_v3_ptsz"),
        ("550.54.15", "cuStreamGetCaptureInfo", 12020, 2, "0 0 cuStreamGetCaptureInfo_v2_ptsz"),
        ("570.86.10", "cuCtxCreate", 12050, 0, "0 0 cuCtxCreate_v4"),
        ("570.86.10", "cuCtxCreate", 12040, 0, "0 0 cuCtxCreate_v3"),
        ("570.86.10", "cuMemGetMemPool", 13000, 0, "0 1 -"),
        ("580.65.06", "cuMemGetMemPool", 13000, 0, "0 0 cuMemGetMemPool"),
        ("580.65.06", "cuMemGetMemPool", 12080, 0, "0 2 -"),
        ("580.65.06", "cuGetProcAddress", 11030, 0, "0 0 cuGetProcAddress"),
        ("580.65.06", "cuGetProcAddress", 13000, 3, "0 0 cuGetProcAddress_v2"),
        ("580.65.06", "cuCtxGetDevice", 13000, 0, "0 0 cuCtxGetDevice_v2"),
    ] {
        let node = Node::new(&["--driver", driver]);
        let got = node.run(&format!("count\nentry {name} {version} {flags}")).value("entry");
        assert_eq!(got, want, "{name} at {version} with flags {flags} in {driver}");
    }
}

#[test]
fn the_first_form_of_the_search_has_no_status() {
    for (driver, name, version, want) in [
        ("470.256.02", "cuMemAlloc", 11040, "0 cuMemAlloc_v2"),
        ("470.256.02", "cuCtxCreate", 11040, "0 cuCtxCreate_v3"),
        ("470.256.02", "cuMemAllocAsync", 11010, "500 untouched"),
        ("470.256.02", "cuNoSuchName", 11040, "500 untouched"),
        ("470.256.02", "cuGetProcAddress", 12000, "0 cuGetProcAddress"),
        ("535.309.01", "cuGetProcAddress", 12000, "0 cuGetProcAddress_v2"),
        ("535.309.01", "cuGreenCtxCreate", 12040, "500 untouched"),
    ] {
        let node = Node::new(&["--driver", driver]);
        let got = node.run(&format!("count\nold-entry {name} {version} 0")).value("old-entry");
        assert_eq!(got, want, "{name} at {version} in {driver}");
    }
}

#[test]
fn an_older_driver_lacks_newer_names() {
    for (driver, name, want) in [
        ("470.256.02", "cuGetProcAddress", "true"),
        ("470.256.02", "cuGetProcAddress_v2", "false"),
        ("535.309.01", "cuGetProcAddress_v2", "true"),
        ("535.309.01", "cuGreenCtxCreate", "false"),
        ("550.54.15", "cuGreenCtxCreate", "true"),
        ("580.65.06", "cuMemGetMemPool", "true"),
        ("580.65.06", "cuLogicalEndpointCreate", "false"),
        ("470.256.02", "nvmlDeviceGetMemoryInfo_v2", "false"),
        ("535.309.01", "nvmlDeviceGetMemoryInfo_v2", "true"),
        ("535.309.01", "nvmlDeviceGetProcessesUtilizationInfo", "false"),
        ("550.54.15", "nvmlDeviceGetProcessesUtilizationInfo", "true"),
    ] {
        let node = Node::new(&["--driver", driver]);
        assert_eq!(node.run(&format!("symbol {name}")).value("symbol"), want, "{name} in {driver}");
    }
}

/// Names of the functions that a shared library exports.
fn functions(library: &Path) -> BTreeSet<String> {
    let output = Command::new("nm").args(["-D", "--defined-only"]).arg(library).output().expect("nm runs");
    assert!(output.status.success(), "nm reads {}", library.display());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().filter_map(|line| line.split_once(" T ")).map(|(_, name)| name.to_owned()).collect()
}

#[test]
fn a_driver_exports_the_functions_that_the_real_one_of_its_version_exports() {
    let Some((version, folder)) = real_driver() else {
        eprintln!("skipped: NVIDIA's libraries are not here; tests/setup/driver-libraries.sh fetches them");
        return;
    };
    let node = Node::new(&["--driver", &version]);
    for stem in ["libcuda.so", "libnvidia-ml.so"] {
        let file = format!("{stem}.{version}");
        let own = functions(&node.path("driver/usr/lib/x86_64-linux-gnu").join(&file));
        let real = functions(&folder.join(&file));
        let lacking: Vec<_> = real.difference(&own).collect();
        let excess: Vec<_> = own.difference(&real).collect();
        assert!(lacking.is_empty() && excess.is_empty(), "{file}: lacks {lacking:?}, has {excess:?} besides");
    }
}

/// The functions that names.txt has for drivers of CUDA 13.0, as 580 is.
fn listed(names: &str) -> BTreeSet<&str> {
    let entries = names.lines().filter(|line| !line.starts_with('#')).filter_map(|line| {
        let mut words = line.split(' ');
        Some((words.next()?, words.next()?.parse::<u32>().ok()?))
    });
    entries.filter(|(_, version)| *version <= 13000).map(|(name, _)| name).collect()
}

#[test]
fn the_list_for_580_is_what_a_real_driver_580_159_04_exports() {
    let exports = |library: &str| {
        let path = format!("{}/../../tests/fixtures/h200-580/{library}.symbols", env!("CARGO_MANIFEST_DIR"));
        fs::read_to_string(path).expect("the fixture is in the checkout")
    };
    for (library, names) in
        [("libcuda", include_str!("../cuda/names.txt")), ("libnvidia-ml", include_str!("../nvml/names.txt"))]
    {
        let (exports, listed) = (exports(library), listed(names));
        let real: BTreeSet<&str> = exports.lines().collect();
        // The list of exports has variables, too, which only the debugger's part of libcuda exports.
        let lacking = real.difference(&listed).filter(|name| !name.starts_with("cudbg"));
        let (lacking, excess): (Vec<_>, Vec<_>) = (lacking.collect(), listed.difference(&real).collect());
        assert!(
            lacking.is_empty() && excess.is_empty(),
            "{library}: lacks {lacking:?}, has {excess:?} besides"
        );
    }
}
