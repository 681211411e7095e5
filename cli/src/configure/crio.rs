//! CRI-O: a runtime handler, in a drop-in of its own or in a file that the administrator names.

use toml::{Table, Value};

use super::Runtime;
use super::toml_text::{self, Mistake, Owned, Setting, path, quoted};

/// What a new drop-in begins with.
pub const HEAD: &str = "# Made by `gpushare configure`; goes with the runtime.\n";

/// `text` with the handler in it. `others` are the settings that CRI-O reads before this file, in its order.
/// What they say of the monitor is copied to the handler, since packages put conmon where CRI-O does not look
/// for it by itself.
pub fn with(text: &str, others: &[Table], runtime: &Runtime) -> Result<String, Mistake> {
    let owned = owned(&runtime.name);
    let handler = entry(&runtime.name);
    let values = toml_text::values_of_others(text, &runtime.name, &owned, &handler)?;
    let mut settings = vec![
        Setting::value(&handler, "runtime_path", quoted(&runtime.path)),
        Setting::value(&handler, "runtime_type", quoted("oci")),
    ];
    let all: Vec<&Table> = others.iter().chain([&values]).collect();
    for key in [
        "monitor_path",
        "monitor_cgroup",
        "monitor_exec_cgroup",
        "monitor_env",
        "privileged_without_host_devices",
    ] {
        if let Some(value) = neighbour(&all, key) {
            settings.push(Setting::value(&handler, key, value.to_string()));
        }
    }
    if runtime.default {
        settings.push(Setting::value(&path(["crio", "runtime"]), "default_runtime", quoted(&runtime.name)));
    }
    toml_text::with(text, &runtime.name, &settings, &owned)
}

/// The key of a handler's table.
pub fn entry(name: &str) -> Vec<String> {
    path(["crio", "runtime", "runtimes", name])
}

/// What the entry of the default runtime says for `key`, else runc's, else crun's.
fn neighbour<'a>(all: &[&'a Table], key: &str) -> Option<&'a Value> {
    let last = |wanted: &[String]| all.iter().rev().find_map(|values| toml_text::value(values, wanted));
    let default = last(&default()).and_then(Value::as_str).unwrap_or("runc");
    let names = [default, "runc", "crun"];
    names.iter().find_map(|name| last(&path(["crio", "runtime", "runtimes", name, key])))
}

/// `text` without the handler; `None` where the file was made for it alone.
pub fn removed(text: &str, name: &str) -> Result<Option<String>, Mistake> {
    let rest = toml_text::without(text, name, &owned(name))?;
    Ok((rest != HEAD).then_some(rest))
}

fn owned(name: &str) -> Owned {
    let paths = vec![path(["crio", "runtime", "runtimes", name]), default()];
    Owned { paths, ..Owned::default() }
}

/// The key that names the default runtime.
fn default() -> Vec<String> {
    path(["crio", "runtime", "default_runtime"])
}

/// The default runtime in the settings as CRI-O merged them, if they do not describe it.
pub fn unknown_default(merged: &Table) -> Option<String> {
    let default = toml_text::string(merged, &default()).filter(|name| !name.is_empty())?;
    let described = path(["crio", "runtime", "runtimes", default]);
    toml_text::value(merged, &described).is_none().then(|| default.to_owned())
}

/// `text` without the setting of a default runtime.
pub fn without_default(text: &str) -> String {
    toml_text::without_key(text, &default())
}

/// What is wrong with the handler in the settings as CRI-O merged them, if anything.
pub fn fault(merged: &Table, runtime: &Runtime) -> Option<String> {
    let program = path(["crio", "runtime", "runtimes", &runtime.name, "runtime_path"]);
    if toml_text::string(merged, &program) != Some(&runtime.path) {
        return Some("the runtime is not in what CRI-O makes of its files".to_owned());
    }
    (runtime.default && toml_text::string(merged, &default()) != Some(&runtime.name))
        .then(|| "CRI-O has another default runtime".to_owned())
}

/// Whether the runtime is the default one in this file.
pub fn is_default(text: &str, name: &str) -> bool {
    toml_text::says(text, &default(), name)
}
