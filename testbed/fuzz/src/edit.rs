//! Applies a plan to a config.json, which an engine may have written from strings of an image and a user.

use std::collections::BTreeSet;

use gpushare_inject::{OutsidePlan, Plan};
use gpushare_request::{GRANTED_LIST, is_privileged, ran_before};
use oci_spec::runtime::{
    Hook, HookBuilder, LinuxDevice, LinuxDeviceBuilder, LinuxDeviceCgroup, LinuxDeviceCgroupBuilder,
    LinuxDeviceType, Mount, MountBuilder,
};
use serde_json::{Value, json};

const BUILDS: &str = "every field that must be set is set";

/// Edits the configuration `data`. Does nothing if `data` is not JSON.
pub fn edit(data: &[u8]) {
    let Ok(before) = serde_json::from_slice::<Value>(data) else { return };
    let plan = plan();
    let mut after = before.clone();
    if plan.edit(&mut after).is_err() {
        return; // refused, and not written
    }
    kept(&before, &after);
    believed(&before, &after);
    closed(&before, &after);
    last(&after, "/mounts", plan.mounts.iter().map(value));
    last(&after, "/linux/resources/devices", plan.device_rules.iter().map(value));
    twice_is_once(&plan, &after);
    let denying = Plan { denies_user_namespaces: true, ..plan };
    let mut after = before.clone();
    if denying.edit(&mut after).is_ok() {
        twice_is_once(&denying, &after);
    }
}

/// Checks that a second edit of `after`, which the plan made, changes nothing.
fn twice_is_once(plan: &Plan, after: &Value) {
    let text = after.to_string();
    let mut again: Value = serde_json::from_str(&text).expect("what is written can be read");
    plan.edit(&mut again).expect("what was edited can be edited");
    assert_eq!(text, again.to_string(), "twice is once");
}

/// Checks that every part which the plan does not own is unchanged and in its order.
fn kept(before: &Value, after: &Value) {
    let ours = ["/hooks", "/mounts", "/linux/devices", "/linux/resources/devices", "/process/env"];
    let groups = "/process/user/additionalGids";
    let without = |value: &Value| {
        let mut value = value.clone();
        for pointer in ours.iter().chain([&groups]) {
            if let Some(part) = value.pointer_mut(pointer) {
                *part = Value::Null;
            }
        }
        if let Some(annotations) = value.get_mut("annotations").and_then(Value::as_object_mut) {
            annotations.shift_remove(GRANTED_LIST); // the hook beside it tells who wrote it
        }
        value
    };
    assert_grown(&without(before), &without(after), "");
    let variables = |value: &Value| -> Vec<Value> {
        let list = value.pointer("/process/env").and_then(Value::as_array).into_iter().flatten();
        let foreign = |entry: &&Value| {
            entry
                .as_str()
                .is_none_or(|text| !text.starts_with("GPUSHARE_") && !text.starts_with("NVIDIA_VIS"))
        };
        list.filter(foreign).cloned().collect()
    };
    assert_eq!(variables(before), variables(after), "foreign variables");
}

/// Checks that the kept list is this plan's own or that of an earlier one, because it is believed from now on
/// beside our hook.
fn believed(before: &Value, after: &Value) {
    let kept = |value: &Value| value.get("annotations").and_then(|all| all.get(GRANTED_LIST)).cloned();
    let list = before.pointer("/process/env").and_then(Value::as_array).into_iter().flatten();
    let mut lists =
        list.filter_map(Value::as_str).filter_map(|entry| entry.strip_prefix("NVIDIA_VISIBLE_DEVICES="));
    match lists.next_back().filter(|list| !matches!(*list, "" | "void")) {
        Some(list) => assert_eq!(kept(after), Some(json!(list)), "the list as it was written"),
        None if ran_before(before) => assert_eq!(kept(after), kept(before), "an earlier plan's"),
        None => assert_eq!(kept(after), None, "nobody's"),
    }
}

/// Checks that `after` is `before`, with new fields only behind those that were there.
fn assert_grown(before: &Value, after: &Value, place: &str) {
    match (before, after) {
        (Value::Object(before), Value::Object(after)) => {
            assert!(
                after.keys().take(before.len()).eq(before.keys()),
                "the order of the fields of {place:?}"
            );
            for (key, value) in before {
                assert_grown(value, &after[key], &format!("{place}/{key}"));
            }
        }
        (Value::Null, _) => {} // an absent part, written out
        _ => assert_eq!(before.to_string(), after.to_string(), "{place}"),
    }
}

/// Checks that only the granted GPU is open and that everything is denied first. A container to which the
/// engine gave every device is exempt.
fn closed(before: &Value, after: &Value) {
    if is_privileged(before) {
        return;
    }
    let list = |pointer| after.pointer(pointer).and_then(Value::as_array).into_iter().flatten();
    let first = list("/linux/resources/devices").next();
    let denies = first.is_some_and(|rule| rule["allow"] == json!(false) && rule.get("major").is_none_or(any));
    assert!(denies, "{first:?}");
    let is_gpu = |device: &Value| device["major"].as_u64() == Some(195);
    // A node without a number is not counted; the low-level runtime reports it.
    let nodes = list("/linux/devices").filter(|node| is_gpu(node) && node["minor"].is_u64());
    for node in nodes.filter(|node| node["minor"].as_u64() < Some(254)) {
        assert_eq!(node["minor"].as_u64(), Some(0), "{node}");
    }
    for rule in list("/linux/resources/devices").filter(opens).filter(|rule| is_gpu(rule)) {
        let minor = rule["minor"].as_u64();
        assert!(minor == Some(0) || minor >= Some(254), "{rule}");
    }
}

fn any(number: &Value) -> bool {
    number.as_i64().is_none_or(|number| number < 0)
}

fn opens(rule: &&Value) -> bool {
    let access = rule.get("access").and_then(Value::as_str).unwrap_or_default();
    rule["allow"] == json!(true) && (access.is_empty() || access.contains(['r', 'w']))
}

/// Checks that the plan's entries are the last ones of their list, in the plan's order, because later ones
/// win.
fn last(after: &Value, pointer: &str, ours: impl Iterator<Item = Value>) {
    let ours: Vec<Value> = ours.collect();
    let list = after.pointer(pointer).and_then(Value::as_array).expect("the plan wrote it");
    assert!(list.ends_with(&ours), "{pointer}: {list:?}");
}

fn value(part: &impl serde::Serialize) -> Value {
    serde_json::to_value(part).expect("a part of a plan can be written")
}

/// A plan with one GPU, its control node, and two mounts.
fn plan() -> Plan {
    Plan {
        devices: vec![device("/dev/nvidia0", 0), device("/dev/nvidiactl", 255)],
        device_mounts: vec![],
        device_rules: vec![rule(0), rule(255)],
        mounts: vec![mount("/usr/lib/libcuda.so.1"), mount("/usr/lib/gpushare/limits")],
        prestart: hook("prestart"),
        poststop: Some(hook("poststop")),
        additional_gids: vec![44],
        told: Vec::new(),
        variables: Vec::new(),
        kept: gpushare_request::Kept::default(),
        handed: std::collections::BTreeSet::new(),
        handed_capabilities: std::collections::BTreeSet::new(),
        denies_user_namespaces: false,
        limiter: None,
        supervised: None,
        loader_cache: gpushare_inject::CacheChange::None,
        interpreters: Vec::new(),
        folders: BTreeSet::new(),
        outside: OutsidePlan::default(),
    }
}

fn device(path: &str, minor: i64) -> LinuxDevice {
    let device = LinuxDeviceBuilder::default().path(path).typ(LinuxDeviceType::C).major(195).minor(minor);
    device.file_mode(0o666_u32).uid(0_u32).gid(0_u32).build().expect(BUILDS)
}

fn rule(minor: i64) -> LinuxDeviceCgroup {
    let rule =
        LinuxDeviceCgroupBuilder::default().allow(true).typ(LinuxDeviceType::C).major(195).minor(minor);
    rule.access("rw").build().expect(BUILDS)
}

fn mount(target: &str) -> Mount {
    let options: Vec<String> = ["ro", "nosuid", "nodev", "rbind", "rprivate"].map(str::to_owned).to_vec();
    let mount = MountBuilder::default().source("/host/file").destination(target).typ("bind");
    mount.options(options).build().expect(BUILDS)
}

fn hook(stage: &str) -> Hook {
    let args = ["gpushare-hook", stage, "--lease", "7"].map(str::to_owned).to_vec();
    HookBuilder::default().path("/opt/gpushare-hook").args(args).build().expect(BUILDS)
}
