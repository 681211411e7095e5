//! Properties of the files that ship: they must run on machines and in images that are older or smaller than
//! this one.

use std::process::Command;

use gpushare_tests::artifacts;
use gpushare_tests::command;

const OLDEST_GLIBC: (u32, u32) = (2, 17);

fn readelf(flags: &[&str], path: &std::path::Path) -> String {
    command::run(Command::new("readelf").arg("--wide").args(flags).arg(path)).expect_success("readelf").stdout
}

#[test]
#[ignore = "needs the release build: reads its files"]
fn the_wrapper_and_the_hook_are_static() {
    for program in [artifacts::wrapper(), artifacts::hook()] {
        let told = readelf(&["--program-headers", "--dynamic"], &program);
        assert!(!told.contains("INTERP"), "{} has an interpreter", program.display());
        assert!(!told.contains("(NEEDED)"), "{} needs a library", program.display());
    }
}

#[test]
#[ignore = "needs the release build: reads its files"]
fn the_injected_libraries_have_the_drivers_names_and_need_no_symbol_above_glibc_2_17() {
    for soname in ["libcuda.so.1", "libnvidia-ml.so.1"] {
        let library = artifacts::library(soname);
        let dynamic = readelf(&["--dynamic"], &library);
        assert!(dynamic.contains(&format!("soname: [{soname}]")), "{soname}: {dynamic}");
        let versions = readelf(&["--version-info", "--dyn-syms"], &library);
        for (major, minor) in glibc_versions(&versions) {
            assert!((major, minor) <= OLDEST_GLIBC, "{soname} needs GLIBC_{major}.{minor}");
        }
    }
}

fn glibc_versions(text: &str) -> Vec<(u32, u32)> {
    let after = |part: &str| {
        part.split(|letter: char| !(letter.is_ascii_digit() || letter == '.')).next().map(str::to_owned)
    };
    text.split("GLIBC_")
        .skip(1)
        .filter_map(after)
        .filter_map(|version| {
            let mut numbers = version.split('.').map(|number| number.parse().ok());
            Some((numbers.next()??, numbers.next()??))
        })
        .collect()
}

#[test]
fn glibc_versions_are_read_from_readelfs_listing() {
    assert_eq!(glibc_versions("Name: GLIBC_2.2.5  Flags\n malloc@GLIBC_2.34 (3)"), [(2, 2), (2, 34)]);
    assert_eq!(glibc_versions("no version at all"), []);
}
