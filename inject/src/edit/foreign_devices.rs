//! Refuses what a bundle brings beside a plan, by which the container would get more than its lease: nodes
//! and rules of other GPUs, and the driver of a whole GPU.

use std::path::Path;

use gpushare_claims::lets_use;
use oci_spec::runtime::LinuxDevice;
use serde_json::Value;

use super::driver::{INTERCEPTED, name};
use super::handed::granted_minor;
use super::{EditError, FIRST_CONTROL_MINOR, NVIDIA_MAJOR};
use crate::parts::{DeviceNumbers, device_numbers, entries, is_block, numbers_text, text};
use crate::plan::Plan;

/// Refuses a GPU that somebody put into the bundle beside the share (`--device`, `--device-cgroup-rule`,
/// CDI): it would be usable without a limit.
pub(super) fn refuse_other_gpus(json: &Value, plan: &Plan) -> Result<(), EditError> {
    for device in entries(json, "/linux/devices").filter(|device| !is_block(device)) {
        let numbers @ (Some(_), Some(_)) = device_numbers(device) else { continue };
        refuse_numbers(plan, numbers, || format!("device {}", text(device, "path").escape_debug()))?;
    }
    for rule in entries(json, "/linux/resources/devices").filter(|rule| lets_use(rule) && !is_block(rule)) {
        let numbers = device_numbers(rule);
        refuse_numbers(plan, numbers, || format!("device rule c {}", numbers_text(numbers)))?;
    }
    Ok(())
}

/// Refuses numbers that cover the node of a GPU that the plan does not give, or a node of MIG's.
fn refuse_numbers(
    plan: &Plan,
    (major, minor): DeviceNumbers,
    what: impl Fn() -> String,
) -> Result<(), EditError> {
    let is = |part: Option<u64>, number: u64| part.is_none_or(|part| part == number);
    let granted = |minor: u64| plan.devices.iter().any(|device| granted_minor(device) == Some(minor));
    let is_gpu = is(major, NVIDIA_MAJOR) && minor.is_none_or(|m| m < FIRST_CONTROL_MINOR && !granted(m));
    let mut others = plan.outside.other_nodes.iter();
    if is_gpu || others.any(|(other, m)| is(major, (*other).into()) && is(minor, (*m).into())) {
        return Err(EditError::OtherGpu { what: what() });
    }
    let of_plan = |device: &LinuxDevice| {
        u64::try_from(device.major()).ok() == major && u64::try_from(device.minor()).ok() == minor
    };
    let is_given = major.is_some() && minor.is_some() && plan.devices.iter().any(of_plan);
    if plan.outside.mig_major.is_some_and(|mig| is(major, mig.into())) && !is_given {
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
    let ours = |target: &Path| plan.mounts.iter().any(|mount| mount.destination() == target);
    let is_driver = |target: &Path| INTERCEPTED.iter().any(|library| name(target).starts_with(library));
    let mut targets = entries(json, "/mounts").map(|mount| text(mount, "destination"));
    match targets.find(|target| is_driver(target.as_ref()) && !ours(target.as_ref())) {
        Some(target) => Err(EditError::Driver { target: target.escape_debug().to_string() }),
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

pub(crate) fn has_user_namespace(json: &Value) -> bool {
    let own = entries(json, "/linux/namespaces").any(|namespace| text(namespace, "type") == "user");
    own || entries(json, "/linux/uidMappings").next().is_some()
}
