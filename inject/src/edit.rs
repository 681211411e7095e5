//! A plan put into config.json: lossless, ours last, and so that twice is once.
//!
//! What others wrote is neither reordered nor removed, but for NVIDIA's own injection hook (it would bring whole
//! GPUs beside the share) and double entries of the request's own variables.

use serde_json::{Map, Value, json};

use crate::plan::Plan;

/// Why a config.json cannot take a plan.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum EditError {
    /// A field is of another kind than the runtime specification says.
    #[error("{field} is not {kind}")]
    Kind {
        /// The field, dotted.
        field: &'static str,
        /// What it should be.
        kind: &'static str,
    },
    /// A whole GPU beside a share.
    #[error(
        "device {path} is a GPU that the container's share does not cover; leave out --device, or ask for that GPU with \
         GPUSHARE_DEVICES"
    )]
    OtherGpu {
        /// The node.
        path: String,
    },
    /// A plan's part that JSON cannot hold.
    #[error("the plan cannot be written as JSON")]
    Plan,
}

/// NVIDIA's fixed major number; minors from 254 up are control nodes.
const NVIDIA_MAJOR: u64 = 195;
const FIRST_CONTROL_MINOR: u64 = 254;

/// Puts `plan` into the configuration.
pub(crate) fn apply(json: &mut Value, plan: &Plan) -> Result<(), EditError> {
    let privileged = is_privileged(json);
    let user_namespace = has_user_namespace(json);
    if !privileged {
        refuse_other_gpus(json, plan)?;
    }
    let linux = object(json, &["linux"], "linux")?;
    if !user_namespace {
        let devices = list(linux, "devices", "linux.devices")?;
        for device in &plan.devices {
            put(devices, "path", value(device)?);
        }
    }
    let resources = object_in(linux, "resources", "linux.resources")?;
    let rules = list(resources, "devices", "linux.resources.devices")?;
    if rules.is_empty() {
        // Without any rule crun allows every device.
        rules.push(json!({"allow": false, "access": "rwm"}));
    }
    for rule in &plan.device_rules {
        let rule = value(rule)?;
        rules.retain(|other| *other != rule); // later rules win: ours come last, each once
        rules.push(rule);
    }
    let root = json.as_object_mut().ok_or(EditError::Kind { field: "config.json", kind: "an object" })?;
    let mounts = list(root, "mounts", "mounts")?;
    let nodes = plan.device_mounts.iter().filter(|_| user_namespace);
    for mount in plan.mounts.iter().chain(nodes) {
        put(mounts, "destination", value(mount)?);
    }
    hooks(json, plan)?;
    groups(json, &plan.additional_gids)?;
    environment(json)
}

fn hooks(json: &mut Value, plan: &Plan) -> Result<(), EditError> {
    let hooks = object(json, &["hooks"], "hooks")?;
    for (stage, field, ours) in
        [("prestart", "hooks.prestart", &plan.prestart), ("poststop", "hooks.poststop", &plan.poststop)]
    {
        let list = list(hooks, stage, field)?;
        list.retain(|hook| !is_nvidias(hook));
        let ours = value(ours)?;
        list.retain(|hook| !same_hook(hook, &ours));
        list.push(ours);
    }
    if let Some(list) = hooks.get_mut("createRuntime").and_then(Value::as_array_mut) {
        list.retain(|hook| !is_nvidias(hook));
    }
    Ok(())
}

/// By base name, as docker's `--gpus` and NVIDIA's runtime write it.
fn is_nvidias(hook: &Value) -> bool {
    let path = hook.get("path").and_then(Value::as_str).unwrap_or_default();
    matches!(path.rsplit('/').next(), Some("nvidia-container-runtime-hook" | "nvidia-container-toolkit"))
}

fn same_hook(hook: &Value, ours: &Value) -> bool {
    hook.get("path") == ours.get("path") && hook.pointer("/args/1") == ours.pointer("/args/1")
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

/// The request is granted: nothing inside the container shall act on it again. Each of its keys stays once, and
/// NVIDIA's list becomes void, so that a runtime inside the container finds nothing to inject.
fn environment(json: &mut Value) -> Result<(), EditError> {
    let Some(process) = json.get_mut("process").and_then(Value::as_object_mut) else { return Ok(()) };
    let env = list(process, "env", "process.env")?;
    let name = |entry: &Value| {
        entry.as_str().and_then(|entry| entry.split_once('=')).map(|(name, _)| name.to_owned())
    };
    let ours = |name: &String| name.starts_with("GPUSHARE_") || name == "NVIDIA_VISIBLE_DEVICES";
    let mut seen: Vec<String> = Vec::new();
    env.retain_mut(|entry| {
        let Some(name) = name(entry).filter(ours) else { return true };
        if seen.contains(&name) {
            return false;
        }
        if name == "NVIDIA_VISIBLE_DEVICES" {
            *entry = json!("NVIDIA_VISIBLE_DEVICES=void");
        }
        seen.push(name);
        true
    });
    Ok(())
}

/// A GPU that somebody put into the bundle beside the share (`--device`, CDI) would be usable without a limit.
fn refuse_other_gpus(json: &Value, plan: &Plan) -> Result<(), EditError> {
    let granted: Vec<i64> = plan.devices.iter().map(|device| device.minor()).collect();
    let devices = json.pointer("/linux/devices").and_then(Value::as_array).into_iter().flatten();
    for device in devices {
        let number = |field: &str| device.get(field).and_then(Value::as_u64);
        let (Some(NVIDIA_MAJOR), Some(minor)) = (number("major"), number("minor")) else { continue };
        if minor < FIRST_CONTROL_MINOR && !granted.iter().any(|granted| u64::try_from(*granted) == Ok(minor))
        {
            let path = device.get("path").and_then(Value::as_str).unwrap_or_default();
            return Err(EditError::OtherGpu { path: path.escape_debug().to_string() });
        }
    }
    Ok(())
}

/// Whether the bundle allows every device anyway. Such a container is root on the host for every purpose.
pub fn is_privileged(json: &Value) -> bool {
    let rules = json.pointer("/linux/resources/devices").and_then(Value::as_array).into_iter().flatten();
    rules.filter(|rule| rule.get("allow") == Some(&Value::Bool(true))).any(|rule| {
        let kind = rule.get("type").and_then(Value::as_str).unwrap_or("a");
        let number = |field: &str| rule.get(field).and_then(Value::as_i64).filter(|number| *number >= 0);
        matches!(kind, "a" | "") && number("major").is_none() && number("minor").is_none()
    })
}

fn has_user_namespace(json: &Value) -> bool {
    let namespaces = json.pointer("/linux/namespaces").and_then(Value::as_array).into_iter().flatten();
    let own = namespaces.clone().any(|namespace| namespace.get("type") == Some(&json!("user")));
    let mapped =
        json.pointer("/linux/uidMappings").and_then(Value::as_array).is_some_and(|list| !list.is_empty());
    own || mapped
}

/// Replaces the entry with the same `field`, else appends.
fn put(list: &mut Vec<Value>, field: &str, entry: Value) {
    match list.iter_mut().find(|other| other.get(field) == entry.get(field)) {
        Some(other) => *other = entry,
        None => list.push(entry),
    }
}

fn value(part: &impl serde::Serialize) -> Result<Value, EditError> {
    serde_json::to_value(part).map_err(|_| EditError::Plan)
}

fn object<'a>(
    json: &'a mut Value,
    path: &[&str],
    field: &'static str,
) -> Result<&'a mut Map<String, Value>, EditError> {
    let wrong = EditError::Kind { field, kind: "an object" };
    let mut map = json.as_object_mut().ok_or(EditError::Kind { field: "config.json", kind: "an object" })?;
    for name in path {
        let entry = map.entry(*name).or_insert_with(|| json!({}));
        if entry.is_null() {
            *entry = json!({});
        }
        let Some(inner) = entry.as_object_mut() else { return Err(wrong) };
        map = inner;
    }
    Ok(map)
}

fn object_in<'a>(
    map: &'a mut Map<String, Value>,
    name: &str,
    field: &'static str,
) -> Result<&'a mut Map<String, Value>, EditError> {
    let entry = map.entry(name).or_insert_with(|| json!({}));
    if entry.is_null() {
        *entry = json!({});
    }
    entry.as_object_mut().ok_or(EditError::Kind { field, kind: "an object" })
}

fn list<'a>(
    map: &'a mut Map<String, Value>,
    name: &str,
    field: &'static str,
) -> Result<&'a mut Vec<Value>, EditError> {
    let entry = map.entry(name).or_insert_with(|| json!([]));
    if entry.is_null() {
        *entry = json!([]);
    }
    entry.as_array_mut().ok_or(EditError::Kind { field, kind: "a list" })
}

#[cfg(test)]
mod tests;
