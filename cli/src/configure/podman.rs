//! podman: a runtime by name, in a drop-in of its own or in a containers.conf that the administrator names.

use std::path::Path;

use toml::{Table, Value};

use super::toml_text::{self, Mistake, Owned, Setting, Wanted, path, quoted};
use super::{Runtime, WRAPPER};

/// What a new drop-in begins with.
pub const HEAD: &str = "# Made by `gpushare configure`; goes with the runtime.\n";
/// podman's own list (4.3). It is repeated, since a list in a drop-in replaces it.
const SUPPORT_JSON: [&str; 6] = ["crun", "runc", "kata", "runsc", "youki", "krun"];

/// `text` with the runtime in it. `others` are the settings that podman reads before this file, in its order.
/// Their list of runtimes that support JSON is continued.
pub fn with(text: &str, others: &[Table], runtime: &Runtime) -> Result<String, Mistake> {
    let owned = owned(&runtime.name);
    let (engine, runtimes) = (path(["engine"]), path(["engine", "runtimes"]));
    let entry = entry(&runtime.name);
    let values = toml_text::values_of_others(text, &runtime.name, &owned, &entry)?;
    let mut settings = Vec::new();
    if runtime.default {
        settings.push(Setting::value(&engine, "runtime", quoted(&runtime.name)));
    }
    let supports = path(["engine", "runtime_supports_json"]);
    let wanted = match toml_text::value(&values, &supports) {
        Some(_) => Wanted::Elements(elements(runtime)),
        None => Wanted::Value(json_list(others, &supports, runtime)),
    };
    settings.push(Setting { table: engine, key: "runtime_supports_json".to_owned(), wanted });
    settings.push(Setting::value(&runtimes, &runtime.name, format!("[{}]", quoted(&runtime.path))));
    toml_text::with(text, &runtime.name, &settings, &owned)
}

/// The key of a runtime's programs.
pub fn entry(name: &str) -> Vec<String> {
    path(["engine", "runtimes", name])
}

/// The names for the list of runtimes that support JSON. podman looks a runtime up by its name, and one that
/// is given as a path by its file's name.
fn elements(runtime: &Runtime) -> Vec<String> {
    let shipped = Path::new(&runtime.path).ends_with(WRAPPER).then(|| WRAPPER.to_owned());
    std::iter::once(runtime.name.clone()).chain(shipped).collect()
}

fn json_list(others: &[Table], key: &[String], runtime: &Runtime) -> String {
    let last = others.iter().rev().find_map(|values| toml_text::value(values, key)?.as_array());
    let listed = last.map(|list| list.iter().filter_map(Value::as_str).map(str::to_owned).collect());
    let mut names: Vec<String> = listed.unwrap_or_else(|| SUPPORT_JSON.map(str::to_owned).to_vec());
    for element in elements(runtime) {
        if !names.contains(&element) {
            names.push(element);
        }
    }
    let names: Vec<String> = names.iter().map(|name| quoted(name)).collect();
    format!("[{}]", names.join(", "))
}

/// `text` without the runtime; `None` where the file was made for it alone.
pub fn removed(text: &str, name: &str) -> Result<Option<String>, Mistake> {
    let rest = toml_text::without(text, name, &owned(name))?;
    Ok((rest != HEAD).then_some(rest))
}

fn owned(name: &str) -> Owned {
    Owned {
        paths: vec![
            path(["engine", "runtime"]),
            path(["engine", "runtime_supports_json"]),
            path(["engine", "runtimes", name]),
        ],
        lists: vec![path(["engine", "runtime_supports_json"])],
        elements: vec![name.to_owned(), WRAPPER.to_owned()],
    }
}

/// Whether the runtime is the default one in this file.
pub fn is_default(text: &str, name: &str) -> bool {
    toml_text::says(text, &path(["engine", "runtime"]), name)
}
