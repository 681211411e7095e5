//! Link arguments of the program.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // The driver libraries need libm. With it among the program's own needs, a root file system that is made of the
    // program and what it needs can hold the driver as well.
    println!("cargo:rustc-link-arg-bins=-Wl,--no-as-needed,-lm");
}
