//! Makes the functions that `names.txt` lists and `src` does not define. They answer "not supported".

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

fn main() {
    println!("cargo:rerun-if-changed=names.txt");
    println!("cargo:rerun-if-changed=src");
    // Like the real library: without -Bsymbolic, and with the old hash table only.
    for argument in ["-Wl,-soname,libnvidia-ml.so.1", "-Wl,--hash-style=sysv", "-Wl,-z,nodelete"] {
        println!("cargo:rustc-cdylib-link-arg={argument}");
    }
    let defined = defined_names();
    let names = fs::read_to_string("names.txt").expect("names.txt lies beside build.rs");
    let mut code = String::new();
    let listed =
        names.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.split(' ').next());
    let known: BTreeSet<&str> = listed.collect();
    if let Some(name) = defined.iter().find(|name| !known.contains(name.as_str())) {
        panic!("{name} is not in names.txt");
    }
    for name in known.into_iter().filter(|name| !defined.contains(*name)) {
        writeln!(code, "#[unsafe(no_mangle)]\nextern \"C\" fn {name}() -> u32 {{ super::not_simulated() }}")
            .expect("a string takes everything");
    }
    let out = env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    fs::write(Path::new(&out).join("names.rs"), code).expect("OUT_DIR can be written");
}

/// The names that the sources define: those after `fn` and `also` in their `exports!` blocks.
fn defined_names() -> BTreeSet<String> {
    let mut names = BTreeSet::from(["nvmlErrorString".to_owned(), "nvmlInternalGetExportTable".to_owned()]);
    for entry in fs::read_dir("src").expect("the sources lie beside build.rs") {
        let path = entry.expect("a readable folder").path();
        let text = fs::read_to_string(path).expect("a readable source");
        let constants = text.split("\nconstants! {").nth(1).and_then(|part| part.split('}').next());
        for row in constants.unwrap_or_default().lines() {
            names.extend(row.split_whitespace().next().map(str::to_owned));
        }
        for part in text.split("exports! {").skip(1) {
            let words =
                part.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty());
            let mut before = "";
            for word in words {
                if word.starts_with("nvml") && matches!(before, "fn" | "also") {
                    names.insert(word.to_owned());
                }
                before = word;
            }
        }
    }
    names
}
