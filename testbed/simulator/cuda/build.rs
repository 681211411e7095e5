//! Generates the table of entry points from `names.txt`. Names that `src` does not define answer "not
//! supported".

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

fn main() {
    println!("cargo:rerun-if-changed=names.txt");
    println!("cargo:rerun-if-changed=src");
    for argument in ["-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic", "-Wl,-z,nodelete"] {
        println!("cargo:rustc-cdylib-link-arg={argument}");
    }
    let defined = defined_names();
    let names = fs::read_to_string("names.txt").expect("names.txt lies beside build.rs");
    let mut rows: Vec<(&str, &str, &str, bool)> = Vec::new();
    for line in names.lines().filter(|line| !line.starts_with('#')) {
        let mut words = line.split(' ');
        let row = (words.next(), words.next(), words.next());
        let (Some(export), Some(version), Some(base)) = row else { panic!("names.txt: {line:?}") };
        rows.push((base, version, export, words.next() == Some("t")));
    }
    let known: BTreeSet<&str> = rows.iter().map(|row| row.2).collect();
    if let Some(name) = defined.iter().find(|name| !known.contains(name.as_str())) {
        panic!("{name} is not in names.txt");
    }
    rows.sort_by_key(|row| (row.0, row.1.parse::<u32>().unwrap_or(0)));
    let mut code = String::from("unsafe extern \"C\" {\n");
    for row in rows.iter().filter(|row| defined.contains(row.2)) {
        writeln!(code, "    fn {}();", row.2).expect("a string takes everything");
    }
    code.push_str("}\n");
    for row in rows.iter().filter(|row| !defined.contains(row.2)) {
        let name = row.2;
        writeln!(code, "#[unsafe(no_mangle)]\nextern \"C\" fn {name}() -> u32 {{ super::not_simulated() }}")
            .expect("a string takes everything");
    }
    code.push_str("pub static NAMES: &[Name] = &[\n");
    for (base, version, export, thread) in &rows {
        let address = if defined.contains(*export) {
            format!("Address::Live({export})")
        } else {
            format!("Address::Absent({export})")
        };
        writeln!(
            code,
            "    Name {{ base: {base:?}, version: {version}, thread: {thread}, address: {address} }},"
        )
        .expect("a string takes everything");
    }
    code.push_str("];\n");
    let out = env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    fs::write(Path::new(&out).join("names.rs"), code).expect("OUT_DIR can be written");
}

/// The names that the sources define: those after `fn`, `also` and `thread` in their `exports!` blocks.
fn defined_names() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for entry in fs::read_dir("src").expect("the sources lie beside build.rs") {
        let path = entry.expect("a readable folder").path();
        let text = fs::read_to_string(path).expect("a readable source");
        for part in text.split("exports! {").skip(1) {
            let words =
                part.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty());
            let mut before = "";
            for word in words {
                if word.starts_with("cu") && matches!(before, "fn" | "also" | "thread") {
                    names.insert(word.to_owned());
                }
                before = word;
            }
        }
    }
    names
}
