//! Included by the build scripts of both interception libraries. It links a Rust library so that it can
//! replace the driver's. Only the profile `shim` builds that library; in every other profile the crate is
//! empty, so that `cargo test` and `cargo clippy` of the whole workspace need no linker settings.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// The differences between the two libraries.
pub struct Library<'a> {
    /// Its name in the container.
    pub soname: &'a str,
    /// The driver's file behind it.
    pub driver: &'a str,
    /// Module of `gpushare_intercept` that holds its hooks.
    pub module: &'a str,
    /// The driver's names that it exports.
    pub exports: &'a [&'a str],
}

/// Tells cargo how to link `library`, in the profile that builds it.
pub fn build(library: &Library<'_>) {
    println!("cargo::rustc-check-cfg=cfg(shim)");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=../link.rs");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    // <target>/<profile>/build/<package>/out: only this path shows a build script the profile.
    if out.ancestors().nth(3).and_then(Path::file_name).is_none_or(|profile| profile != "shim") {
        return;
    }
    println!("cargo::rustc-cfg=shim");
    write_exports(library, &out);
    let script = write_version_script(library, &out);
    let stub = build_stub(library, &out);
    let linker = linker_folder();
    for argument in [
        // rustc passes its own version script, and only lld merges two.
        "-fuse-ld=lld".to_owned(),
        format!("-B{}", linker.display()),
        "-nostartfiles".to_owned(),
        "-nodefaultlibs".to_owned(),
        format!("-Wl,-soname,{}", library.soname),
        "-Wl,-z,nodelete,-z,now,-z,relro,-z,noexecstack".to_owned(),
        // -Wl would split a path at a comma.
        "-Xlinker".to_owned(),
        format!("--version-script={}", script.display()),
        "-Wl,--no-as-needed,--build-id=sha1".to_owned(),
        stub.display().to_string(),
    ] {
        println!("cargo::rustc-link-arg-cdylib={argument}");
    }
}

/// One jump per exported name. Do not use `#[no_mangle]`: it would put the names into rustc's own version
/// script.
fn write_exports(library: &Library<'_>, out: &Path) {
    let mut text = format!("use gpushare_intercept::{} as library;\n", library.module);
    let jump = match env::var("CARGO_CFG_TARGET_ARCH").as_deref() {
        Ok("aarch64") => "b",
        _ => "jmp",
    };
    for name in library.exports {
        text += &format!(
            "core::arch::global_asm!(\".pushsection .text.{name},\\\"ax\\\",@progbits\", \".globl {name}\", \
             \".type {name},@function\", \".p2align 4\", \"{name}:\", \"{jump} {{hook}}\", \
             \".size {name}, . - {name}\", \".popsection\", hook = sym library::hooks::{name});\n"
        );
    }
    fs::write(out.join("exports.rs"), text).expect("OUT_DIR is writable");
}

fn write_version_script(library: &Library<'_>, out: &Path) -> PathBuf {
    let path = out.join("version.map");
    let text = format!("{{ global: {}; local: *; }};\n", library.exports.join("; "));
    fs::write(&path, text).expect("OUT_DIR is writable");
    path
}

/// An empty library whose SONAME is the driver's private path: the linker copies it into our DT_NEEDED.
fn build_stub(library: &Library<'_>, out: &Path) -> PathBuf {
    let path = out.join("stub.so");
    let compiler = env::var_os("CC").unwrap_or_else(|| "cc".into());
    let status = Command::new(compiler)
        .args(["-shared", "-nostdlib", "-o"])
        .arg(&path)
        .arg(format!("-Wl,-soname,{}", library.driver))
        .args(["-x", "c", "/dev/null"])
        .status()
        .expect("a C compiler, which rustc needs for linking too");
    assert!(status.success(), "cannot build {}", path.display());
    path
}

/// The folder of the toolchain in which its lld is called `ld.lld`.
fn linker_folder() -> PathBuf {
    let rustc = env::var_os("RUSTC").expect("cargo sets RUSTC");
    let output = Command::new(rustc).args(["--print", "sysroot"]).output().expect("rustc runs");
    let sysroot = String::from_utf8(output.stdout).expect("rustc prints its sysroot as text");
    let host = env::var("HOST").expect("cargo sets HOST");
    Path::new(sysroot.trim()).join("lib/rustlib").join(host).join("bin/gcc-ld")
}
