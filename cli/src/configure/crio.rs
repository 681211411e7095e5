//! CRI-O: a runtime handler, in a drop-in of its own or in a file that the administrator names.

use toml::{Table, Value};

use super::Runtime;
use super::containerd::by_hand;
use super::toml_text::{self, Mistake, Owned, Setting, Wanted, path, quoted};

/// What a new drop-in begins with.
pub const HEAD: &str = "# Made by `gpushare configure`; goes with the runtime.\n";

/// `text` with the handler in it. `others` are the settings that CRI-O reads before this file, in its order.
/// What they say of the monitor is copied to the handler, since packages put conmon where CRI-O does not look
/// for it by itself.
pub fn with(text: &str, others: &[Table], runtime: &Runtime) -> Result<String, Mistake> {
    let plain = toml_text::without(text, &runtime.name, &owned(&runtime.name))?;
    let values = toml_text::values(&plain)?;
    let handler = path(["crio", "runtime", "runtimes", &runtime.name]);
    if toml_text::value(&values, &handler).is_some() {
        return Err(Mistake::at(
            &plain,
            toml_text::place(&plain, &handler).unwrap_or(0),
            by_hand(&runtime.name),
        ));
    }
    let setting = |table: &[String], key: &str, value: String| Setting {
        table: table.to_vec(),
        key: key.to_owned(),
        wanted: Wanted::Value(value),
    };
    let mut settings = vec![
        setting(&handler, "runtime_path", quoted(&runtime.path)),
        setting(&handler, "runtime_type", quoted("oci")),
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
            settings.push(setting(&handler, key, value.to_string()));
        }
    }
    if runtime.default {
        settings.push(setting(&path(["crio", "runtime"]), "default_runtime", quoted(&runtime.name)));
    }
    toml_text::with(text, &runtime.name, &settings, &owned(&runtime.name))
}

/// What the entry of the default runtime says for `key`, else runc's, else crun's.
fn neighbour<'a>(all: &[&'a Table], key: &str) -> Option<&'a Value> {
    let last = |wanted: &[String]| all.iter().rev().find_map(|values| toml_text::value(values, wanted));
    let default =
        last(&path(["crio", "runtime", "default_runtime"])).and_then(Value::as_str).unwrap_or("runc");
    let names = [default, "runc", "crun"];
    names.iter().find_map(|name| last(&path(["crio", "runtime", "runtimes", name, key])))
}

/// `text` without the handler; `None` where the file was made for it alone.
pub fn removed(text: &str, name: &str) -> Result<Option<String>, Mistake> {
    let rest = toml_text::without(text, name, &owned(name))?;
    Ok((rest != HEAD).then_some(rest))
}

fn owned(name: &str) -> Owned {
    let paths =
        vec![path(["crio", "runtime", "runtimes", name]), path(["crio", "runtime", "default_runtime"])];
    Owned { paths, ..Owned::default() }
}

/// What is wrong with the handler in the settings as CRI-O merged them, if anything.
pub fn fault(merged: &Table, runtime: &Runtime) -> Option<String> {
    let text = |key: &[String]| toml_text::value(merged, key).and_then(Value::as_str);
    if text(&path(["crio", "runtime", "runtimes", &runtime.name, "runtime_path"])) != Some(&runtime.path) {
        return Some("the runtime is not in what CRI-O makes of its files".to_owned());
    }
    let default = text(&path(["crio", "runtime", "default_runtime"]));
    (runtime.default && default != Some(&runtime.name))
        .then(|| "CRI-O has another default runtime".to_owned())
}

/// Whether the runtime is the default one in this file.
pub fn is_default(text: &str, name: &str) -> bool {
    let key = path(["crio", "runtime", "default_runtime"]);
    toml_text::values(text)
        .is_ok_and(|values| toml_text::value(&values, &key).and_then(Value::as_str) == Some(name))
}
