//! Checks the built libraries as the loader will see them.

#![allow(clippy::unwrap_used, reason = "a step that fails shall fail the test")]

use std::path::Path;
use std::process::Command;

/// Cases 29, 30, 31 and 36: only the driver's names are exported, and only the driver's file is needed. No
/// constructor of ours can print, end the program or set a handler, since it has no library to do so. No
/// panic is reachable.
#[test]
#[ignore = "needs the libraries that `make build` makes"]
fn cases_29_30_31_36_only_listed_names_are_exported_and_only_the_driver_is_needed() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let target = std::env::current_exe().unwrap().ancestors().nth(3).unwrap().to_owned();
    for (library, hooked) in [
        ("libgpushare_intercept_cuda.so", gpushare_intercept::cuda::HOOKED),
        ("libgpushare_intercept_nvml.so", gpushare_intercept::nvml::HOOKED),
    ] {
        let path = target.join("shim").join(library);
        let output = Command::new(folder.join("check-symbols.sh")).arg(&path).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let table = Command::new("readelf").args(["--dyn-syms", "-W"]).arg(&path).output().unwrap();
        let table = String::from_utf8(table.stdout).unwrap();
        let defined = table.lines().filter(|line| line.contains(" FUNC ") && !line.contains(" UND "));
        let mut exported: Vec<_> = defined.filter_map(|line| line.split(' ').next_back()).collect();
        let mut hooked = hooked.to_vec();
        exported.sort_unstable();
        hooked.sort_unstable();
        assert_eq!(exported, hooked, "{library}");
    }
}

/// A name that no driver has would hook nothing. A name that driver 580 lacks came with a later CUDA version.
#[test]
fn every_hooked_name_is_an_export_of_a_real_driver_580_or_newer_than_it() {
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let read = |path: &str| std::fs::read_to_string(checkout.join(path)).unwrap();
    for (library, part, hooked) in [
        ("libcuda", "cuda", gpushare_intercept::cuda::HOOKED),
        ("libnvidia-ml", "nvml", gpushare_intercept::nvml::HOOKED),
    ] {
        let exports = read(&format!("tests/fixtures/h200-580/{library}.symbols"));
        let names = read(&format!("testbed/simulator/{part}/names.txt"));
        let is_newer = |name: &str| {
            let line = names.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            let version = line.and_then(|rest| rest.split(' ').next()?.parse::<u32>().ok());
            version.is_some_and(|version| version > 13000)
        };
        let unknown = |name: &&&str| !is_newer(name) && exports.lines().all(|export| export != **name);
        let unknown: Vec<_> = hooked.iter().filter(unknown).collect();
        assert!(unknown.is_empty(), "{library} has no {unknown:?}");
    }
}
