//! Refuses what a bundle brings beside a plan, by which the container would get more than its lease: nodes
//! and rules of other GPUs, and the driver of a whole GPU.

use std::path::PathBuf;

use gpushare_claims::lets_use;
use serde_json::{Value, json};

use super::{EditError, FIRST_CONTROL_MINOR, NVIDIA_MAJOR};
use crate::plan::Plan;

fn entries<'a>(json: &'a Value, pointer: &str) -> impl Iterator<Item = &'a Value> + Clone {
    json.pointer(pointer).and_then(Value::as_array).into_iter().flatten()
}

/// Refuses a GPU that somebody put into the bundle beside the share (`--device`, `--device-cgroup-rule`,
/// CDI): it would be usable without a limit.
pub(super) fn refuse_other_gpus(json: &Value, plan: &Plan) -> Result<(), EditError> {
    let number = |entry: &Value, field: &str| entry.get(field).and_then(Value::as_u64);
    let is_block = |entry: &Value| entry.get("type").and_then(Value::as_str) == Some("b");
    for device in entries(json, "/linux/devices").filter(|device| !is_block(device)) {
        let (Some(major), Some(minor)) = (number(device, "major"), number(device, "minor")) else { continue };
        let path = device.get("path").and_then(Value::as_str).unwrap_or_default();
        refuse_numbers(plan, Some(major), Some(minor), || format!("device {}", path.escape_debug()))?;
    }
    for rule in entries(json, "/linux/resources/devices").filter(|rule| lets_use(rule) && !is_block(rule)) {
        let numbers = ["major", "minor"].map(|field| number(rule, field));
        refuse_numbers(plan, numbers[0], numbers[1], || {
            let [major, minor] =
                numbers.map(|part| part.map_or_else(|| "*".to_owned(), |part| part.to_string()));
            format!("device rule c {major}:{minor}")
        })?;
    }
    Ok(())
}

/// Refuses numbers that cover the node of a GPU that the plan does not give, or a node of MIG's. `None`
/// stands for every number, as -1 does in a bundle.
fn refuse_numbers(
    plan: &Plan,
    major: Option<u64>,
    minor: Option<u64>,
    what: impl Fn() -> String,
) -> Result<(), EditError> {
    let is = |part: Option<u64>, number: u64| part.is_none_or(|part| part == number);
    let granted = |minor: u64| {
        let numbers = |major, minor| (u64::try_from(major), u64::try_from(minor));
        plan.devices.iter().any(|d| numbers(d.major(), d.minor()) == (Ok(NVIDIA_MAJOR), Ok(minor)))
    };
    let card = is(major, NVIDIA_MAJOR) && minor.is_none_or(|m| m < FIRST_CONTROL_MINOR && !granted(m));
    let mut others = plan.outside.other_nodes.iter();
    if card || others.any(|(other, m)| is(major, (*other).into()) && is(minor, (*m).into())) {
        return Err(EditError::OtherGpu { what: what() });
    }
    if plan.outside.mig_major.is_some_and(|mig| is(major, mig.into())) {
        return Err(EditError::Mig { what: what() });
    }
    Ok(())
}

/// Refuses the driver's own libraries under their own names, if the plan is a share: beside them it would
/// have no limit. NVIDIA's CDI edits bring them, and engines have applied these by now. A container with
/// whole GPUs may have them twice.
pub(super) fn refuse_driver(json: &Value, plan: &Plan) -> Result<(), EditError> {
    if !plan.is_share() {
        return Ok(());
    }
    let mounts = json.get("mounts").and_then(Value::as_array).into_iter().flatten();
    let targets = mounts.filter_map(|mount| Some(PathBuf::from(mount.get("destination")?.as_str()?)));
    let ours = |target: &PathBuf| plan.mounts.iter().any(|mount| mount.destination() == target);
    let is_driver = |target: &PathBuf| {
        let name = target.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        ["libcuda.so", "libnvidia-ml.so"].iter().any(|library| name.starts_with(library))
    };
    match targets.into_iter().find(|target| is_driver(target) && !ours(target)) {
        Some(target) => {
            Err(EditError::Driver { target: target.to_string_lossy().escape_debug().to_string() })
        }
        None => Ok(()),
    }
}

/// Whether a rule names neither a major nor a minor number.
fn is_for_all(rule: &Value) -> bool {
    let number = |field: &str| rule.get(field).and_then(Value::as_i64).filter(|number| *number >= 0);
    number("major").is_none() && number("minor").is_none()
}

pub(super) fn denies_all(rule: &Value) -> bool {
    let kind = rule.get("type").and_then(Value::as_str).unwrap_or("a");
    rule.get("allow") == Some(&Value::Bool(false)) && matches!(kind, "a" | "") && is_for_all(rule)
}

pub(super) fn has_user_namespace(json: &Value) -> bool {
    let own =
        entries(json, "/linux/namespaces").any(|namespace| namespace.get("type") == Some(&json!("user")));
    let mapped =
        json.pointer("/linux/uidMappings").and_then(Value::as_array).is_some_and(|list| !list.is_empty());
    own || mapped
}
