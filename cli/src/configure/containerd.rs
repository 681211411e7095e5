//! containerd: a runtime handler in the CRI plugin's tables. Their names differ between versions of the
//! settings.

use std::path::Path;

use toml::{Table, Value};

use super::Runtime;
use super::toml_text::{self, Mistake, Owned, Setting, path, quoted};

/// Keys that only gpushare's own cluster parts or a device plugin may write. containerd takes these
/// annotations from the kubelet alone.
const CONTAINER_ANNOTATIONS: &[&str] = &[
    "alloc.gpushare.io/*",
    "cdi.k8s.io/nvidia-device-plugin_*",
    "nvidia.cdi.k8s.io/nvidia-device-plugin_*",
    "tencent.com/vcuda-core",
    "tencent.com/vcuda-device",
    "tencent.com/vcuda-memory",
];

/// Keys that a pod's author writes, or a scheduler for him. No key may fit both lists, or a pod could forge
/// it.
const POD_ANNOTATIONS: &[&str] = &[
    "gpushare.io/*",
    "ALIYUN_COM_GPU_MEM_*",
    "elasticgpu.io/*",
    "gpu-fraction*",
    "gpu-memory",
    "hami.io/vgpu-devices-*",
    "nvidia.com/container.*",
    "nvidia.com/pre-allocated",
    "nvidia.com/real-allocated",
    "scheduling.koordinator.sh/*",
    "tencent.com/predicate-gpu-idx-*",
    "tencent.com/vcuda-core-limit",
    "volcano.sh/*",
];

/// The plugin's name in each version of the settings. Version 4, the default of containerd 2.3, has the
/// tables of version 3.
const PLUGINS: [(i64, &str); 3] =
    [(1, "cri"), (2, "io.containerd.grpc.v1.cri"), (3, "io.containerd.cri.v1.runtime")];

/// Keys whose meaning depends on the settings' version.
const PLUGIN_KEYS: [&str; 3] = ["plugins", "disabled_plugins", "required_plugins"];

/// What a new file begins with. Version 2 is understood by every containerd from 1.3 on, also by 2.x.
const HEAD: &str = "# Made by `gpushare configure`; goes with the runtime.\nversion = 2\n";
/// What a new template of k3s or rke2 begins with: their own settings come first.
const TEMPLATE_HEAD: &str =
    "# Made by `gpushare configure`; goes with the runtime.\n{{ template \"base\" . }}\n";

/// What a new file at `path` begins with.
pub fn head(path: &Path) -> &'static str {
    if is_template(path) { TEMPLATE_HEAD } else { HEAD }
}

/// Whether the file is a template, from which k3s or rke2 writes containerd's settings at every start.
pub fn is_template(path: &Path) -> bool {
    path.extension().is_some_and(|end| end == "tmpl")
}

/// `text` with the handler in it. The name `file` tells a template's version.
pub fn with(text: &str, file: &Path, runtime: &Runtime) -> Result<String, Mistake> {
    let plain = without(text, &runtime.name)?;
    let values = toml_text::values(&plain)?;
    let (version, unversioned) = version(&plain, &values, file)?;
    refuse_disabled_cri(&plain, &values)?;
    let handler = below(version, ["runtimes", &runtime.name]);
    toml_text::refuse_foreign(&plain, &values, &runtime.name, &handler)?;
    let runc = below(version, ["runtimes", "runc"]);
    let mut settings = Vec::new();
    if unversioned {
        settings.push(Setting::value(&[], "version", version.to_string()));
    }
    let runc_entry = toml_text::value(&values, &runc).and_then(Value::as_table);
    if runc_entry.is_none() && !is_template(file) {
        // A CRI section that names any runtime must name runc too, or containerd does not load it.
        settings.push(Setting::value(&runc, "runtime_type", quoted("io.containerd.runc.v2")));
    }
    settings.extend(handler_settings(&handler, runc_entry, &runtime.path));
    if runtime.default {
        settings.push(Setting::value(&base(version), "default_runtime_name", quoted(&runtime.name)));
    }
    toml_text::with(text, &runtime.name, &settings, &owned(&runtime.name))
}

/// The settings of the handler. It gets what the administrator set for runc, except for the program and the
/// lists of annotations: a list that lets everything through would let pods forge what only a device plugin
/// may say.
fn handler_settings(handler: &[String], runc: Option<&Table>, program: &str) -> Vec<Setting> {
    const OURS: [&str; 6] = [
        "runtime_type",
        "pod_annotations",
        "container_annotations",
        "runtime_path",
        "runtime_root",
        "runtime_engine",
    ];
    let scalar = |value: &Value| !matches!(value, Value::Table(_) | Value::Array(_));
    let mut settings = vec![Setting::value(handler, "runtime_type", quoted("io.containerd.runc.v2"))];
    for (key, value) in runc.into_iter().flatten() {
        if scalar(value) && !OURS.contains(&key.as_str()) {
            settings.push(Setting::value(handler, key, value.to_string()));
        }
    }
    settings.push(Setting::value(handler, "pod_annotations", list(POD_ANNOTATIONS)));
    settings.push(Setting::value(handler, "container_annotations", list(CONTAINER_ANNOTATIONS)));
    let options = [handler, &path(["options"])].concat();
    settings.push(Setting::value(&options, "BinaryName", quoted(program)));
    for (key, value) in runc.and_then(|runc| runc.get("options")?.as_table()).into_iter().flatten() {
        if scalar(value) && key != "BinaryName" {
            settings.push(Setting::value(&options, key, value.to_string()));
        }
    }
    settings
}

fn list(patterns: &[&str]) -> String {
    let lines: String = patterns.iter().map(|pattern| format!("    {},\n", quoted(pattern))).collect();
    format!("[\n{lines}]")
}

/// `text` without the handler; `None` where the file was made for it alone.
pub fn removed(text: &str, name: &str) -> Result<Option<String>, Mistake> {
    let rest = without(text, name)?;
    let (before, after) = (toml_text::values(text)?, toml_text::values(&rest)?);
    let needed = PLUGIN_KEYS.iter().any(|key| after.contains_key(*key));
    if needed && before.contains_key("version") && !after.contains_key("version") {
        let message =
            "the rest of this file needs its `version`: move this line above the line BEGIN gpushare";
        return Err(Mistake::at_key(text, &path(["version"]), message));
    }
    Ok((rest != HEAD && rest != TEMPLATE_HEAD).then_some(rest))
}

fn without(text: &str, name: &str) -> Result<String, Mistake> {
    toml_text::without(text, name, &owned(name))
}

fn owned(name: &str) -> Owned {
    let mut paths = Vec::new();
    for (version, _) in PLUGINS {
        paths.push(below(version, ["runtimes", name]));
        paths.push(below(version, ["runtimes", "runc"]));
        paths.push(below(version, ["default_runtime_name"]));
    }
    Owned { paths, ..Owned::default() }
}

fn base(version: i64) -> Vec<String> {
    let plugin = PLUGINS.iter().find(|(known, _)| *known == version.min(3)).map_or("", |(_, plugin)| plugin);
    path(["plugins", plugin, "containerd"])
}

/// The path of `names` in the plugin's table of this version.
fn below<const LENGTH: usize>(version: i64, names: [&str; LENGTH]) -> Vec<String> {
    [base(version), path(names)].concat()
}

/// The version of the settings, and whether it has to be written.
fn version(text: &str, values: &Table, file: &Path) -> Result<(i64, bool), Mistake> {
    match values.get("version") {
        Some(Value::Integer(version @ 1..=4)) => Ok((*version, false)),
        Some(other) => {
            let message = format!("settings of version {other} are not known: 1 to 4 are");
            Err(Mistake::at_key(text, &path(["version"]), message))
        }
        None if is_template(file) => Ok((if file.to_string_lossy().contains("-v3") { 3 } else { 2 }, false)),
        // Only keys of plugins differ in version 1.
        None if !PLUGIN_KEYS.iter().any(|key| values.contains_key(*key)) => Ok((2, true)),
        None => {
            // containerd takes such a file for version 1 and ignores tables with the names of later versions.
            for (version, plugin) in &PLUGINS[1..] {
                let key = path(["plugins", plugin]);
                if toml_text::value(values, &key).is_some() {
                    let message = format!(
                        "this table is of version {version}, and the file does not say `version = {version}`"
                    );
                    return Err(Mistake::at_key(text, &key, message));
                }
            }
            Ok((1, false))
        }
    }
}

/// Fails if the CRI plugin is off: a handler in it would be reported as a success and change nothing.
pub fn refuse_disabled_cri(text: &str, values: &Table) -> Result<(), Mistake> {
    let mut names = PLUGINS.iter().map(|(_, plugin)| *plugin).chain(["io.containerd.cri.v1.images"]);
    let off = path(["disabled_plugins"]);
    match names.find(|name| toml_text::strings(values, &off).any(|plugin| plugin == *name)) {
        None => Ok(()),
        Some(name) => Err(Mistake::at_key(
            text,
            &off,
            format!(
                "the CRI plugin is off, so no runtime of Kubernetes would work: take {name:?} out of disabled_plugins \
                 (docker needs no handler here: gpushare configure docker)"
            ),
        )),
    }
}

/// Whether the settings have a table of the CRI plugin.
pub fn has_cri(values: &Table) -> bool {
    PLUGINS.iter().any(|(_, plugin)| toml_text::value(values, &path(["plugins", plugin])).is_some())
}

/// What is wrong with the handler in the settings as containerd merged them, if anything.
pub fn fault(merged: &Table, runtime: &Runtime) -> Option<String> {
    let handler = PLUGINS.iter().find_map(|(version, _)| {
        let base = base(*version);
        let base = toml_text::value(merged, &base)?.as_table()?;
        Some((base, base.get("runtimes")?.get(&runtime.name)?.as_table()?))
    });
    let Some((base, handler)) = handler else {
        return Some("the runtime is not in what containerd makes of its files".to_owned());
    };
    let program =
        handler.get("options").and_then(|options| options.get("BinaryName")).and_then(Value::as_str);
    if program != Some(&runtime.path) {
        return Some("containerd would run another program for it".to_owned());
    }
    if handler.get("runtime_type").and_then(Value::as_str).is_none_or(str::is_empty) {
        return Some("containerd sees no runtime_type".to_owned());
    }
    let default = base.get("default_runtime_name").and_then(Value::as_str);
    (runtime.default && default != Some(&runtime.name))
        .then(|| "containerd has another default runtime".to_owned())
}

/// The default runtime in the settings as containerd merged them, if they do not describe it: then containerd
/// does not load its CRI plugin.
pub fn unknown_default(merged: &Table) -> Option<String> {
    PLUGINS.iter().find_map(|(version, _)| {
        let plugin = toml_text::value(merged, &base(*version))?;
        let default = plugin.get("default_runtime_name")?.as_str().filter(|name| !name.is_empty())?;
        let known = plugin.get("runtimes").is_some_and(|runtimes| runtimes.get(default).is_some());
        (!known).then(|| default.to_owned())
    })
}

/// `text` without the setting of a default runtime.
pub fn without_default(text: &str) -> String {
    PLUGINS.iter().fold(text.to_owned(), |text, (version, _)| {
        toml_text::without_key(&text, &below(*version, ["default_runtime_name"]))
    })
}

/// The entries of `imports`.
pub fn imports(values: &Table) -> Vec<String> {
    toml_text::strings(values, &path(["imports"])).map(str::to_owned).collect()
}

/// Whether the runtime is the default one in this file.
pub fn is_default(text: &str, name: &str) -> bool {
    PLUGINS.iter().any(|(version, _)| toml_text::says(text, &below(*version, ["default_runtime_name"]), name))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Go's path.Match for patterns that have only stars: a star stops at a slash.
    fn matches(pattern: &str, key: &str) -> bool {
        match pattern.split_once('*') {
            None => pattern == key,
            Some((start, rest)) => key.strip_prefix(start).is_some_and(|tail| {
                (0..=tail.len())
                    .filter(|end| tail.is_char_boundary(*end) && !tail[..*end].contains('/'))
                    .any(|end| matches(rest, &tail[end..]))
            }),
        }
    }

    #[test]
    fn no_annotation_fits_the_lists_of_pods_and_of_containers_both() {
        assert!(
            matches("gpushare.io/*", "gpushare.io/memory")
                && !matches("gpushare.io/*", "a.gpushare.io/memory")
        );
        for container in CONTAINER_ANNOTATIONS {
            for pod in POD_ANNOTATIONS {
                let (some, other) = (container.replace('*', "x"), pod.replace('*', "x"));
                assert!(!matches(pod, &some) && !matches(container, &other), "{container} and {pod}");
                // Beyond these samples: two patterns can meet only if the literal beginning of one continues
                // that of the other.
                let [a, b] = [container, pod].map(|pattern| pattern.split('*').next().unwrap_or_default());
                let open = container.contains('*') && a.len() <= b.len() && b.starts_with(a)
                    || pod.contains('*') && b.len() <= a.len() && a.starts_with(b);
                assert!(!open && container != pod, "{container} and {pod}");
            }
        }
    }
}
