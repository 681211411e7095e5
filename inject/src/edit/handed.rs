//! GPUs that somebody handed to the container before the wrapper saw it. A device plugin, CDI or the engine's
//! caller put their nodes into `linux.devices`. The plan brings the nodes of the granted ones; all others are
//! taken out.

use std::collections::BTreeSet;

use gpushare_claims::{CAPABILITY, Container, HANDED, lets_use};
use oci_spec::runtime::LinuxDevice;
use serde_json::{Value, json};

use super::{EditError, FIRST_CONTROL_MINOR, NVIDIA_MAJOR, object, take_out};
use crate::parts::{device_numbers, entries, is_block};
use crate::plan::Plan;

/// Minor numbers of the GPUs that were handed over.
pub(super) fn minors(json: &Value) -> BTreeSet<u64> {
    Container::from_json(json).handed().into_iter().map(|(_, minor)| minor.into()).collect()
}

/// Minor numbers of the nodes of MIG instances that were handed over beside them.
pub(super) fn capabilities(json: &Value) -> BTreeSet<u64> {
    Container::from_json(json).handed_capabilities().into_iter().map(u64::from).collect()
}

/// Refuses a share of a GPU that was not among those handed over: whoever handed them over chose them.
pub(super) fn refuse_beyond(minors: &BTreeSet<u64>, plan: &Plan) -> Result<(), EditError> {
    let granted: BTreeSet<u64> = plan.devices.iter().filter_map(granted_minor).collect();
    if minors.is_empty() || granted.is_subset(minors) {
        return Ok(());
    }
    Err(EditError::NotHanded { granted: paths(&granted), handed: paths(minors) })
}

/// The minor number of a node of the plan, if it is a GPU's.
pub(super) fn granted_minor(device: &LinuxDevice) -> Option<u64> {
    let minor = u64::try_from(device.minor()).ok()?;
    (u64::try_from(device.major()) == Ok(NVIDIA_MAJOR) && minor < FIRST_CONTROL_MINOR).then_some(minor)
}

fn paths(minors: &BTreeSet<u64>) -> String {
    minors.iter().map(|minor| format!("/dev/nvidia{minor}")).collect::<Vec<_>>().join(", ")
}

/// Takes out the nodes of the GPUs with these `minors`, their nodes below /dev/dri, those of MIG instances
/// with these `parts`, and each rule that names exactly their numbers. A rule that reaches further stays, and
/// is refused. A share also loses the driver's control nodes that came along: the plan brings those that it
/// needs, without the right to make nodes.
pub(super) fn take_out_nodes(json: &mut Value, minors: &BTreeSet<u64>, parts: &BTreeSet<u64>, plan: &Plan) {
    if minors.is_empty() {
        return;
    }
    let gpus = minors.iter().map(|minor| (NVIDIA_MAJOR, *minor));
    let display = plan.outside.display_nodes.iter().filter(|(minor, _)| minors.contains(&u64::from(*minor)));
    let display = display.map(|(_, numbers)| *numbers);
    // Those of MIG's configuration are no instance's, and stay to be refused.
    let given = plan.devices.iter().filter_map(|device| {
        Some((u32::try_from(device.major()).ok()?, u32::try_from(device.minor()).ok()?))
    });
    let of_parts = given.chain(plan.outside.other_nodes.iter().copied()).filter(|(major, minor)| {
        Some(*major) == plan.outside.mig_major && parts.contains(&u64::from(*minor))
    });
    let others = display.chain(of_parts).map(|(major, minor)| (u64::from(major), u64::from(minor)));
    let nodes: BTreeSet<(u64, u64)> = gpus.chain(others).collect();
    let is_control = |(major, minor): (u64, u64)| {
        let is_fixed = major == NVIDIA_MAJOR && minor >= FIRST_CONTROL_MINOR;
        plan.is_share() && (is_fixed || Some(major) == uvm_major(plan))
    };
    let is_handed = |device: &Value| {
        !is_block(device) && number(device).is_some_and(|one| nodes.contains(&one) || is_control(one))
    };
    let devices = entries(json, "/linux/devices").filter(|device| is_handed(device));
    let taken: BTreeSet<(u64, u64)> = devices.filter_map(number).collect();
    let is_theirs = |entry: &Value| !is_block(entry) && number(entry).is_some_and(|one| taken.contains(&one));
    take_out(json, "/linux/devices", is_theirs);
    take_out(json, "/linux/resources/devices", |rule| lets_use(rule) && is_theirs(rule));
}

/// The major number of nvidia-uvm's nodes, which differs between boots.
fn uvm_major(plan: &Plan) -> Option<u64> {
    let uvm = plan.devices.iter().find(|device| device.path().ends_with("nvidia-uvm"))?;
    u64::try_from(uvm.major()).ok()
}

/// Notes which GPUs were handed over, for when the bundle is run again without being written anew.
pub(super) fn note(json: &mut Value, minors: &BTreeSet<u64>, parts: &BTreeSet<u64>) -> Result<(), EditError> {
    if minors.is_empty() {
        return Ok(());
    }
    let parts = parts.iter().map(|minor| format!("{CAPABILITY}{minor}"));
    let list = minors.iter().map(u64::to_string).chain(parts).collect::<Vec<_>>().join(",");
    object(json, &["annotations"], "annotations")?.insert(HANDED.to_owned(), json!(list));
    Ok(())
}

fn number(entry: &Value) -> Option<(u64, u64)> {
    let (major, minor) = device_numbers(entry);
    major.zip(minor)
}
