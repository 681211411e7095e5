//! Turns the shipped settings into code: a `Default` for each section of `gpushare.toml`. Defaults are
//! written only in that file. If it lacks a key of a section, or has a key that no section has, the crate
//! does not compile.

use std::error::Error;
use std::path::Path;
use std::{env, fs};

use toml::{Table, Value};

const SHIPPED: &str = "gpushare.toml";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed={SHIPPED}");
    let sections: Table = toml::from_str(&fs::read_to_string(SHIPPED)?)?;
    let code: Vec<String> =
        sections.iter().map(|(name, section)| default(&capitalised(name), section)).collect();
    let folder = env::var_os("OUT_DIR").ok_or("cargo names no folder")?;
    fs::write(Path::new(&folder).join("shipped.rs"), code.join("\n"))?;
    Ok(())
}

/// Writes the `Default` of the section `name`, which is capitalised, and of its subsections: `[dialects.mps]`
/// becomes `DialectsMpsSection`.
fn default(name: &str, keys: &Value) -> String {
    let keys = || keys.as_table().into_iter().flatten();
    let fields: String = keys().map(|(key, value)| format!("{key}: {},\n", literal(value))).collect();
    let inner = keys().filter(|(_, value)| value.is_table());
    let inner: String =
        inner.map(|(key, value)| default(&format!("{name}{}", capitalised(key)), value)).collect();
    // The lint would complain about a section whose values are all empty.
    let allow = "#[allow(clippy::derivable_impls)]";
    format!(
        "{inner}{allow}\nimpl Default for {name}Section {{\nfn default() -> Self {{\nSelf {{\n{fields}}}\n}}\n}}\n"
    )
}

fn capitalised(word: &str) -> String {
    let (first, rest) = word.split_at(1);
    format!("{}{rest}", first.to_uppercase())
}

fn literal(value: &Value) -> String {
    match value {
        Value::String(text) => format!("{text:?}.into()"),
        Value::Array(values) => {
            format!("vec![{}]", values.iter().map(literal).collect::<Vec<_>>().join(", "))
        }
        Value::Table(_) => "Default::default()".to_owned(),
        other => other.to_string(),
    }
}
