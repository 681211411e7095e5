//! Link arguments of the program.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // The driver libraries need libm. The program names it among its own needs, so that a root file system
    // made of the program and its needs can hold the driver as well.
    println!("cargo:rustc-link-arg-bins=-Wl,--no-as-needed,-lm");
}
