//! Tests on shared libraries built by the C compiler.

use std::path::Path;
use std::process::Command;

use super::*;

/// Compiles C text to a shared library.
fn library(folder: &Path, name: &str, text: &str) -> Vec<u8> {
    let (source, path) = (folder.join("source.c"), folder.join(name));
    std::fs::write(&source, text).unwrap();
    let mut compiler = Command::new("cc");
    compiler
        .args(["-shared", "-nostdlib", "-fPIC", "-Wl,--hash-style=gnu"])
        .arg(format!("-Wl,-soname,{name}"));
    assert!(compiler.arg("-o").arg(&path).arg(&source).status().unwrap().success());
    std::fs::read(path).unwrap()
}

/// gpushare's library, which needs `outside` and has a name that the driver lacks; and the driver's library,
/// which has data and a private name.
fn both() -> (Vec<u8>, Vec<u8>) {
    let folder = tempfile::tempdir().unwrap();
    let ours = "void outside(void); void hooked(void) { outside(); } void newer(void) {}";
    let driver = "int data = 1; void hooked(void) {} void plain(void) {}
        __attribute__((weak)) void spare(void) {} static void hidden(void) {} void *user = hidden;";
    (library(folder.path(), "ours.so", ours), library(folder.path(), "driver.so", driver))
}

fn exports(elf: &[u8]) -> Vec<String> {
    let names = View::read(elf).unwrap().exports().unwrap().into_keys();
    names.map(|name| String::from_utf8_lossy(name).into_owned()).collect()
}

/// The exports that the loader finds, in the table that the program headers point to. Fitting leaves that
/// table in its place.
fn exports_for_the_loader(fitted: &[u8], built: &[u8]) -> Vec<String> {
    let mut elf = fitted.to_vec();
    elf[..size_of::<Header>()].copy_from_slice(&built[..size_of::<Header>()]);
    exports(&elf)
}

#[test]
fn a_linker_sees_the_drivers_functions_and_the_loader_our_own_of_them() {
    let (ours, driver) = both();
    let fitted = fit(&ours, &driver).unwrap();
    assert_eq!(exports(&fitted), ["hooked", "plain", "spare"]);
    assert_eq!(exports_for_the_loader(&fitted, &ours), ["hooked"]);
    let view = View::read(&fitted).unwrap();
    let spare = view.exports().unwrap()[b"spare".as_slice()].st_bind();
    assert_eq!(spare, object::elf::STB_WEAK, "as the driver has it");
    let mut undefined = view.symbols.iter().filter(|symbol| !is_export(symbol));
    assert!(
        undefined.any(|symbol| view.name(symbol).unwrap() == b"outside"),
        "what ours needs is still said"
    );
}

#[test]
fn what_the_loader_reads_changes_by_the_absent_names_alone() {
    let (ours, driver) = both();
    let fitted = fit(&ours, &driver).unwrap();
    let start = size_of::<Header>();
    let changed: Vec<usize> = (start..ours.len()).filter(|at| ours[*at] != fitted[*at]).collect();
    assert!(!changed.is_empty() && changed.len() <= size_of::<Symbol>(), "{changed:?}");
    assert!(changed.last().unwrap() - changed.first().unwrap() < size_of::<Symbol>(), "{changed:?}");
}

#[test]
fn what_is_no_library_is_refused() {
    let (ours, driver) = both();
    for (name, text) in [
        ("empty", &b""[..]),
        ("a script", b"#!/bin/sh\nexit 0\n"),
        ("the beginning of an ELF file", &ours[..64]),
        ("32 bits", b"\x7fELF\x01\x01\x01\0\0\0\0\0\0\0\0\0\x03\0\x03\0\x01\0\0\0\0\0\0\0\0\0\0\0"),
    ] {
        assert!(undefine(&mut text.to_vec(), |_| true).is_err(), "{name}");
        assert!(fit(text, &driver).is_err() && fit(&ours, text).is_err(), "{name}");
    }
}

#[test]
fn a_cut_or_damaged_library_is_refused_or_read_and_nothing_else() {
    let (ours, driver) = both();
    for length in (0..ours.len()).step_by(61) {
        let _ = fit(&ours[..length], &driver);
        let _ = fit(&ours, &driver[..length.min(driver.len())]);
    }
    let headers = Header::parse(ours.as_slice()).unwrap().e_shoff(LE);
    let headers = usize::try_from(headers).unwrap();
    for at in (0..64).chain(headers..ours.len()) {
        for value in [0, 1, 0x7f, 0xff] {
            let mut damaged = ours.clone();
            damaged[at] = value;
            let _ = fit(&damaged, &driver);
            let _ = fit(&driver, &damaged);
        }
    }
}

#[test]
fn a_name_is_taken_away_once() {
    let (mut elf, _) = both();
    assert_eq!(undefine(&mut elf, |_| false).unwrap(), 0);
    assert_eq!(undefine(&mut elf, |name| name == b"newer").unwrap(), 1);
    assert_eq!(undefine(&mut elf, |name| name == b"newer").unwrap(), 0);
    assert_eq!(exports(&elf), ["hooked"]);
}

#[test]
fn a_build_is_known_by_its_contents() {
    let folder = tempfile::tempdir().unwrap();
    let built = |text: &str| {
        let (source, path) = (folder.path().join("source.c"), folder.path().join("built.so"));
        std::fs::write(&source, text).unwrap();
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-nostdlib", "-fPIC", "-Wl,--build-id=sha1"]);
        assert!(compiler.arg("-o").arg(&path).arg(&source).status().unwrap().success());
        let bytes = std::fs::read(path).unwrap();
        build_id(&bytes[..BUILD_ID_BYTES.min(bytes.len())]).unwrap()
    };
    let (one, again, other) = (built("int a;"), built("int a;"), built("int b = 2;"));
    assert!(one == again && one != other && one.len() == 20, "{one:?} {other:?}");
    for bytes in [&b""[..], b"\x7fELF", &[0; 4096]] {
        assert_eq!(build_id(bytes), None);
    }
}
