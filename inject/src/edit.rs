//! Puts a plan into config.json: our entries come last, and a second time changes nothing more.
//!
//! What others wrote stays, in its order and with every number as written. There are three exceptions. What
//! would give a whole GPU beside the share goes: the hooks of NVIDIA's programs, the node's own driver, the
//! nodes of GPUs that were handed over. The hooks of our own CDI devices go, because the plan's hooks replace
//! them. Of the request's own variables, duplicates go.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use gpushare_request::{Container, GRANTED_LIST, HANDED, Interceptor, is_privileged, kept_list, ran_before};
use serde_json::{Map, Value, json};

use crate::host_files::is_same_file;
use crate::mps::SHARED_MEMORY;
use crate::parts::{device_numbers, entries, number, text, texts};
use crate::plan::{Plan, READ_ONLY};

mod driver;
mod foreign_devices;
mod handed;
mod previous_plan;
mod seccomp;

use driver::brings_gpus;
pub(crate) use driver::is_nvidias_hook;
pub use driver::take_out_driver;
pub(crate) use foreign_devices::has_user_namespace;
use foreign_devices::{denies_all, refuse_driver, refuse_other_gpus};
pub use previous_plan::{lease_of_previous_plan, refuse_previous_plan};

/// Why a config.json cannot take a plan.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum EditError {
    /// A field has another JSON type than the runtime specification says.
    #[error("{field} is not {kind}")]
    Kind {
        /// Path of the field, with dots.
        field: &'static str,
        /// The type that it must have, such as `a list`.
        kind: &'static str,
    },
    /// The bundle gives a GPU that the plan does not.
    #[error(
        "{what} is of a GPU that the container's share does not cover; leave it out, or ask for that GPU with \
         GPUSHARE_DEVICES"
    )]
    OtherGpu {
        /// The device node or device rule of the bundle, as text.
        what: String,
    },
    /// Somebody handed GPUs to the container, and the share is of another one.
    #[error(
        "the share is of {granted}, and a device plugin, CDI or --device handed over {handed}; leave that out, or ask for \
         that GPU with GPUSHARE_DEVICES"
    )]
    NotHanded {
        /// Paths of the granted GPUs' nodes, separated by commas.
        granted: String,
        /// Paths of the nodes of the GPUs that were handed over, separated by commas.
        handed: String,
    },
    /// The bundle gives a node of MIG's that the lease does not: another instance's, or that of the
    /// configuration.
    #[error(
        "{what} is of a MIG instance that the container's share does not cover, or of MIG's configuration; leave it out, or ask \
         for that instance with GPUSHARE_DEVICES"
    )]
    Mig {
        /// The device node or device rule of the bundle, as text.
        what: String,
    },
    /// A mount of the bundle brings the driver of a whole GPU beside a share.
    #[error(
        "mount {target} brings the driver of a whole GPU beside the container's share (a CDI device of NVIDIA's, or a \
         volume); leave it out, or ask for the whole GPU with GPUSHARE_MODE=exclusive"
    )]
    Driver {
        /// The mount's path in the container, escaped.
        target: String,
    },
    /// A hook would bring whole GPUs, and the bundle can no longer be changed.
    #[error(
        "the bundle's hook {path} gives whole GPUs beside the share; leave out --gpus, or its hooks.d file"
    )]
    WholeGpus {
        /// Path of the hook's program, escaped.
        path: String,
    },
    /// A rule of the seccomp filter has a condition that cannot be narrowed.
    #[error(
        "the bundle's seccomp filter allows {names} by a condition to which none against user namespaces can be added, since \
         runtimes take two on one argument for either (inject.user_namespaces); leave that condition out"
    )]
    Seccomp {
        /// The rule's system calls, as a JSON list.
        names: String,
    },
    /// The seccomp filter allows new user namespaces, and the bundle can no longer be changed.
    #[error(
        "this node lets no container with a share make user namespaces (inject.user_namespaces), and a hook cannot change \
         the bundle's seccomp filter, which lets it: use gpushare-runtime, or have the engine's filter deny them"
    )]
    UserNamespaces,
    /// The bundle was run with a share, was not written anew, and asks for no share any more.
    #[error(
        "config.json still holds the share of an earlier start, and asks for none under the present settings; have the \
         engine write it anew, or take gpushare's hooks, mounts and devices out of it"
    )]
    PreviousPlan,
    /// A part of the plan cannot be written as JSON.
    #[error("the plan cannot be written as JSON")]
    Plan,
}

/// NVIDIA's fixed major number; minors from 254 up are control nodes.
pub(crate) const NVIDIA_MAJOR: u64 = 195;
/// The fixed major number of the nodes below /dev/dri.
const DRM_MAJOR: u64 = 226;
const FIRST_CONTROL_MINOR: u64 = 254;

impl Plan {
    /// Puts the plan into `json`, a whole config.json. A second call changes nothing more.
    ///
    /// # Errors
    /// When a part that must be changed has an unknown form, or the container would have a GPU beside its
    /// share. `json` may be half changed then.
    pub fn edit(&self, json: &mut Value) -> Result<(), EditError> {
        apply(json, self)
    }
}

/// Puts `plan` into the configuration. On an error `json` may be half changed.
pub(crate) fn apply(json: &mut Value, plan: &Plan) -> Result<(), EditError> {
    let privileged = is_privileged(json);
    let user_namespace = has_user_namespace(json);
    object(json, &[], "config.json")?;
    let handed = handed::minors(json);
    let parts = handed::capabilities(json);
    if !ran_before(json) {
        // Only our wrapper may write these annotations. A pod's own would be believed at the next start,
        // since our hook is in the bundle then.
        let notes = json.get_mut("annotations").and_then(Value::as_object_mut);
        notes
            .into_iter()
            .for_each(|all| all.retain(|key, _| ![GRANTED_LIST, HANDED].contains(&key.as_str())));
    }
    take_back(json, plan);
    handed::refuse_beyond(&handed, plan)?;
    let noted = (handed.union(&plan.handed), parts.union(&plan.handed_capabilities));
    handed::note(json, &noted.0.copied().collect(), &noted.1.copied().collect())?;
    if !privileged {
        handed::take_out_nodes(json, &handed, &parts, plan);
        refuse_other_gpus(json, plan)?;
    }
    refuse_driver(json, plan)?;
    if user_namespace {
        // In a user namespace the plan's nodes are mounts, and one path cannot be both a node and a mount.
        let is_mounted = |path: &Path| plan.device_mounts.iter().any(|mount| *mount.destination() == path);
        take_out(json, "/linux/devices", |device| is_mounted(Path::new(text(device, "path"))));
    }
    let linux = object(json, &["linux"], "linux")?;
    if !user_namespace {
        let devices = list(linux, "devices", "linux.devices")?;
        put(devices, "path", plan.devices.iter().map(value).collect::<Result<_, _>>()?);
    }
    let resources = object_in(linux, "resources", "linux.resources")?;
    let rules = list(resources, "devices", "linux.resources.devices")?;
    if !privileged && !rules.first().is_some_and(denies_all) {
        // Without this rule crun allows every device.
        rules.insert(0, json!({"allow": false, "access": "rwm"}));
    }
    for rule in &plan.device_rules {
        let rule = value(rule)?;
        rules.retain(|other| *other != rule); // later rules win: ours come last, each once
        rules.push(rule);
    }
    let root = object(json, &[], "config.json")?;
    let mounts = list(root, "mounts", "mounts")?;
    let nodes = plan.device_mounts.iter().filter(|_| user_namespace);
    put(mounts, "destination", plan.mounts.iter().chain(nodes).map(value).collect::<Result<_, _>>()?);
    hooks(json, plan)?;
    if plan.denies_user_namespaces {
        seccomp::deny_user_namespaces(json)?;
    }
    groups(json, &plan.additional_gids)?;
    environment(json, plan)
}

/// Checks a bundle that can no longer be changed: refuses what would give the container more than its share.
pub(crate) fn check(json: &Value, plan: &Plan) -> Result<(), EditError> {
    let stages = json.get("hooks").and_then(Value::as_object).into_iter().flatten();
    let hooks = stages.filter_map(|(_, hooks)| hooks.as_array()).flatten();
    if let Some(hook) = hooks.filter(|hook| brings_gpus(hook)).find(|hook| !is_this_program(hook)) {
        return Err(EditError::WholeGpus { path: text(hook, "path").escape_debug().to_string() });
    }
    if plan.denies_user_namespaces && !seccomp::denies_user_namespaces(json) {
        return Err(EditError::UserNamespaces);
    }
    refuse_driver(json, plan)?;
    if is_privileged(json) { Ok(()) } else { refuse_other_gpus(json, plan) }
}

/// Takes an earlier plan of ours out of a bundle that is run again and was not written anew: its GPU may be
/// somebody else's by now. Only what a plan adds is taken out, so a bundle that merely imitates our hook
/// loses nothing that it may keep.
fn take_back(json: &mut Value, plan: &Plan) {
    if !entries(json, "/hooks/prestart").any(|hook| is_hook_of(hook, plan.prestart.path(), "prestart")) {
        return;
    }
    // A privileged container keeps its nodes and rules: ours cannot be told from the engine's.
    if !is_privileged(json) {
        take_out(json, "/linux/devices", is_our_node);
        take_out(json, "/linux/resources/devices", |rule| is_our_rule(rule, plan.outside.mig_major));
    }
    take_out(json, "/mounts", |mount| is_our_mount(mount) || is_of_a_plan(mount, &plan.outside.sources));
}

/// Takes the mounts of another system's interception library out of the bundle, and the library out of
/// LD_PRELOAD.
pub(crate) fn take_out_interceptor(json: &mut Value, found: &Interceptor) {
    let mounts: BTreeSet<&str> = found.mounts.iter().map(String::as_str).collect();
    let preloads: BTreeSet<&str> = found.preloads.iter().map(String::as_str).collect();
    take_out(json, "/mounts", |mount| mounts.contains(text(mount, "destination")));
    let goes = |item: &str| preloads.contains(item);
    take_out_mut(json, "/process/env", |entry| loses_all(entry, "LD_PRELOAD=", &[':', ' '], goes));
}

/// Removes the paths for which `goes` is true from an entry of the variable `name`, which ends in `=`.
/// Returns true when it removed some and nothing is left.
fn loses_all(entry: &mut Value, name: &str, separators: &[char], goes: impl Fn(&str) -> bool) -> bool {
    let Some(list) = entry.as_str().and_then(|entry| entry.strip_prefix(name)) else { return false };
    let left: Vec<&str> = list.split(separators).filter(|item| !goes(item)).collect();
    if left.len() == list.split(separators).count() {
        return false;
    }
    let none = left.iter().all(|item| item.is_empty());
    *entry = json!(format!("{name}{}", left.join(":")));
    none
}

fn take_out(json: &mut Value, pointer: &str, goes: impl Fn(&Value) -> bool) {
    take_out_mut(json, pointer, |entry| goes(entry));
}

/// As [`take_out`], where `goes` may change the entries that stay.
fn take_out_mut(json: &mut Value, pointer: &str, goes: impl Fn(&mut Value) -> bool) {
    if let Some(list) = json.pointer_mut(pointer).and_then(Value::as_array_mut) {
        list.retain_mut(|entry| !goes(entry));
    }
}

fn gpu_minor(entry: &Value) -> Option<u64> {
    let (major, minor) = device_numbers(entry);
    minor.filter(|minor| major == Some(NVIDIA_MAJOR) && *minor < FIRST_CONTROL_MINOR)
}

fn is_drm(entry: &Value) -> bool {
    number(entry, "major") == Some(DRM_MAJOR)
}

/// Whether this is a GPU's node under its own name, one of a MIG instance, or one below /dev/dri. Control
/// nodes do not count: every plan has the same ones.
fn is_our_node(device: &Value) -> bool {
    let path = text(device, "path");
    let of_gpu = gpu_minor(device).is_some_and(|minor| path == format!("/dev/nvidia{minor}"));
    let of_instance = || {
        let minor = path.strip_prefix("/dev/nvidia-caps/nvidia-cap").and_then(|minor| minor.parse().ok());
        minor.is_some() && minor == number(device, "minor")
    };
    of_gpu || of_instance() || is_drm(device) && path.starts_with("/dev/dri/")
}

fn is_our_rule(rule: &Value, mig_major: Option<u32>) -> bool {
    let is_mig = mig_major.is_some() && number(rule, "major") == mig_major.map(u64::from);
    let of_gpu = gpu_minor(rule).is_some() || is_drm(rule) || is_mig;
    of_gpu && text(rule, "access") == "rw"
}

/// Whether target, type and options are those of our mounts, at a place where nobody else mounts. What a user
/// mounts there in another way stays.
fn is_our_mount(mount: &Value) -> bool {
    let options = texts(mount, "/options");
    let as_we_do = ["nosuid", "rbind", "rprivate"].iter().all(|option| options.clone().any(|o| o == *option));
    let target = text(mount, "destination");
    let ours = ["/usr/lib/gpushare/", "/dev/nvidia", "/dev/dri/"].iter().any(|ours| target.starts_with(ours));
    ours && as_we_do && text(mount, "type") == "bind"
}

/// Whether a plan mounted this file of the driver's or ours, at whatever path the image wants it. A share
/// must not keep the files of a whole GPU.
fn is_of_a_plan(mount: &Value, sources: &[PathBuf]) -> bool {
    let source = Path::new(text(mount, "source"));
    // What MPS' clients share is mounted at a place of the engine's.
    let is_shared = text(mount, "destination") == SHARED_MEMORY;
    let as_we_do = is_shared || mount.get("options") == Some(&json!(READ_ONLY));
    as_we_do && text(mount, "type") == "bind" && sources.iter().any(|folder| source.starts_with(folder))
}

fn hooks(json: &mut Value, plan: &Plan) -> Result<(), EditError> {
    let hooks = object(json, &["hooks"], "hooks")?;
    for (_, stage) in hooks.iter_mut() {
        stage.as_array_mut().into_iter().for_each(|list| list.retain(|hook| !is_nvidias_hook(hook)));
    }
    // An earlier start in this bundle may have left its poststop hook.
    for (stage, field, ours) in [
        ("prestart", "hooks.prestart", Some(&plan.prestart)),
        ("poststop", "hooks.poststop", plan.poststop.as_ref()),
    ] {
        if ours.is_none() && hooks.get(stage).is_none_or(Value::is_null) {
            continue;
        }
        let list = list(hooks, stage, field)?;
        list.retain(|hook| !is_hook_of(hook, plan.prestart.path(), stage));
        if let Some(ours) = ours {
            list.push(value(ours)?);
        }
    }
    if let Some(list) = hooks.get_mut("createRuntime").and_then(Value::as_array_mut) {
        // This one comes with our CDI devices, for engines whose runtime is not gpushare's.
        let ours = value(plan.prestart.path())?;
        list.retain(|hook| hook.get("path") != Some(&ours));
    }
    Ok(())
}

/// Whether the hook's program is the running one: our hook may be installed where docker looks for NVIDIA's.
fn is_this_program(hook: &Value) -> bool {
    is_same_file(text(hook, "path").as_ref(), "/proc/self/exe".as_ref())
}

fn is_hook_of(hook: &Value, program: &Path, stage: &str) -> bool {
    Path::new(text(hook, "path")) == program && hook.pointer("/args/1").and_then(Value::as_str) == Some(stage)
}

fn groups(json: &mut Value, gids: &[u32]) -> Result<(), EditError> {
    if gids.is_empty() {
        return Ok(());
    }
    let user = object(json, &["process", "user"], "process.user")?;
    let list = list(user, "additionalGids", "process.user.additionalGids")?;
    for gid in gids {
        if !list.iter().any(|other| other.as_u64() == Some(u64::from(*gid))) {
            list.push(json!(gid));
        }
    }
    Ok(())
}

/// Keeps anything inside the container from acting on the granted request again. Each variable of the request
/// stays once. NVIDIA_VISIBLE_DEVICES becomes `void`, so that a runtime inside the container finds nothing to
/// inject; an annotation keeps its list. If other sources took part in the request, the annotation keeps what
/// was granted: those sources may be gone at the next run, and the list alone would mean more.
fn environment(json: &mut Value, plan: &Plan) -> Result<(), EditError> {
    let engine = Container::from_json(json).engine();
    let Some(process) = json.get_mut("process").and_then(Value::as_object_mut) else { return Ok(()) };
    let env = list(process, "env", "process.env")?;
    let variables: BTreeMap<&str, &str> =
        plan.variables.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    let granted = |name: &str| variables.get(name).copied();
    let ours = |name: &str| {
        name.starts_with("GPUSHARE_") || name == "NVIDIA_VISIBLE_DEVICES" || granted(name).is_some()
    };
    let mut seen = BTreeSet::new(); // an image may set a hundred thousand of them
    let mut lists = Vec::new();
    env.retain_mut(|entry| {
        let written = entry.as_str().and_then(|entry| entry.split_once('=')).filter(|(name, _)| ours(name));
        let Some((name, list)) = written.map(|(name, list)| (name.to_owned(), list.to_owned())) else {
            return true;
        };
        if name == "NVIDIA_VISIBLE_DEVICES" {
            lists.push(list);
            *entry = json!("NVIDIA_VISIBLE_DEVICES=void");
        } else if let Some(value) = granted(&name) {
            *entry = json!(format!("{name}={value}"));
        }
        seen.insert(name)
    });
    let is_told = |entry: &Value| {
        let name = entry.as_str().and_then(|entry| entry.split_once('=')).map(|(name, _)| name);
        plan.told.iter().any(|(told, _)| Some(told.as_str()) == name)
    };
    env.retain(|entry| !is_told(entry));
    env.extend(plan.told.iter().map(|(name, value)| json!(format!("{name}={value}"))));
    if let Some(list) = kept_list(&lists, engine, &plan.kept) {
        object(json, &["annotations"], "annotations")?.insert(GRANTED_LIST.to_owned(), json!(list));
    }
    Ok(())
}

/// Puts entries last, in place of those with the same `field`: a later entry in a list of mounts lies on top.
fn put(list: &mut Vec<Value>, field: &str, entries: Vec<Value>) {
    let name = |entry: &Value| entry.get(field).and_then(Value::as_str).map(str::to_owned);
    let ours: BTreeSet<_> = entries.iter().filter_map(name).collect();
    list.retain(|other| other.get(field).and_then(Value::as_str).is_none_or(|name| !ours.contains(name)));
    list.extend(entries);
}

fn value(part: &impl serde::Serialize) -> Result<Value, EditError> {
    serde_json::to_value(part).map_err(|_| EditError::Plan)
}

type Object = Map<String, Value>;

/// The object at `path`, which messages call `field`. What is absent on the way is made.
fn object<'a>(json: &'a mut Value, path: &[&str], field: &'static str) -> Result<&'a mut Object, EditError> {
    let map = json.as_object_mut().ok_or(EditError::Kind { field: "config.json", kind: "an object" })?;
    path.iter().try_fold(map, |map, name| object_in(map, name, field))
}

fn object_in<'a>(map: &'a mut Object, name: &str, field: &'static str) -> Result<&'a mut Object, EditError> {
    entry(map, name, json!({})).as_object_mut().ok_or(EditError::Kind { field, kind: "an object" })
}

fn list<'a>(map: &'a mut Object, name: &str, field: &'static str) -> Result<&'a mut Vec<Value>, EditError> {
    entry(map, name, json!([])).as_array_mut().ok_or(EditError::Kind { field, kind: "a list" })
}

/// The entry `name`, which becomes `empty` where it is absent or null.
fn entry<'a>(map: &'a mut Object, name: &str, empty: Value) -> &'a mut Value {
    let entry = map.entry(name).or_insert(Value::Null);
    if entry.is_null() {
        *entry = empty;
    }
    entry
}

#[cfg(test)]
mod tests;
