//! Two sources in one bundle, for every two dialects: on no node does the less trusted source raise what the
//! other granted.

use gpushare_inventory::{DeviceMemory, GpuUuid};
use gpushare_request::{
    ComputePolicy, Container, Cores, DeviceSelector, Devices, MemoryRequest, Mode, Policy, Request, read,
};

use super::golden::{gpus, policy};
use super::sets::{Set, all};

const TOTAL: u64 = 15360;

/// What a request may use of each GPU: bytes, and percent of compute with idle time included.
pub fn shares(request: &Request) -> Vec<(GpuUuid, u64, u8)> {
    let gpus = gpus(TOTAL);
    let named = |selector: &DeviceSelector| gpushare_request::find_gpu(selector, &gpus).unwrap().uuid;
    let uuids: Vec<GpuUuid> = match &request.devices {
        Devices::These(list) => list.iter().map(named).collect(),
        Devices::All => gpus.iter().map(|gpu| gpu.uuid).collect(),
        // Placement chooses; here the first GPUs are taken.
        Devices::Any(count) => gpus.iter().take((*count).into()).map(|gpu| gpu.uuid).collect(),
        Devices::Among(count, of) => of.iter().take((*count).into()).copied().collect(),
    };
    let share = |uuid: GpuUuid| {
        let share = request.on(uuid);
        let all = DeviceMemory::from_bytes(TOTAL << 20);
        let memory = match share.memory {
            _ if request.mode == Mode::Exclusive => all,
            MemoryRequest::Bytes(memory) => memory,
            MemoryRequest::Percent(percent) => all.percent(percent),
            MemoryRequest::Rest => all,
        };
        let most = match request.compute_policy {
            ComputePolicy::Fixed => share.cores,
            ComputePolicy::Burst | ComputePolicy::Latency => request.burst,
            ComputePolicy::None => None,
        };
        (uuid, memory.bytes(), most.map_or(100, Cores::percent))
    };
    uuids.into_iter().map(share).collect()
}

fn raises(request: &Request, granted: &Request) -> Option<String> {
    let most = shares(granted);
    let above = |(uuid, memory, cores): &(GpuUuid, u64, u8)| {
        let allowed = most.iter().find(|(other, _, _)| other == uuid);
        allowed.is_none_or(|(_, most, cap)| memory > most || cores > cap)
    };
    shares(request).iter().find(|share| above(share)).map(|share| format!("{share:?} of {most:?}"))
}

/// Both sets in one bundle of containerd's CRI. What the first says by annotation stays.
fn together(first: &Set, second: &Set) -> Set {
    let mut both = first.clone();
    both.engine = "cri".to_owned();
    both.env.extend(second.env.iter().cloned());
    both.mounts.extend(second.mounts.iter().cloned());
    both.nodes.extend(second.nodes.iter().cloned());
    for (key, value) in &second.annotations {
        both.annotations.entry(key.clone()).or_insert_with(|| value.clone());
    }
    both
}

fn alone(set: &Set, policy: &Policy) -> Option<Request> {
    let set = Set { engine: "cri".to_owned(), ..set.clone() };
    read(&Container::from_json(&set.bundle()), policy, &gpus(TOTAL)).ok().flatten()
}

/// The annotations that plugins write: gpushare's own and gpu-manager's.
fn plugins() -> Vec<Set> {
    let set = |pairs: &[(&str, &str)]| Set {
        annotations: pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect(),
        ..Set::default()
    };
    let uuid = super::sets::UUIDS[0];
    vec![
        set(&[
            ("alloc.gpushare.io/memory", "1GiB"),
            ("alloc.gpushare.io/cores", "20"),
            ("alloc.gpushare.io/devices", uuid),
        ]),
        set(&[
            ("tencent.com/vcuda-core", "20"),
            ("tencent.com/vcuda-memory", "1073741824"),
            ("tencent.com/vcuda-device", "/dev/nvidia1"),
        ]),
    ]
}

/// Whether the set uses gpu-manager's way to make a pod's share its guarantee, with idle time beyond it.
fn asks_for_idle_time(set: &Set) -> bool {
    set.annotations.contains_key("tencent.com/vcuda-core-limit")
}

#[test]
fn nobody_raises_what_a_plugins_annotation_granted_on_any_node() {
    let (mut pairs, mut granted) = (0, 0);
    for plugin in plugins() {
        for sets in all() {
            for set in sets.set.iter().filter(|set| !asks_for_idle_time(set)) {
                for strict in [false, true] {
                    let policy = policy(set, strict);
                    let base = alone(&plugin, &policy).expect("a plugin's annotation grants");
                    let both = together(&plugin, set);
                    let told = read(&Container::from_json(&both.bundle()), &policy, &gpus(TOTAL));
                    pairs += 1;
                    let Ok(Some(request)) = told else { continue };
                    granted += 1;
                    let raised = raises(&request, &base);
                    assert_eq!(
                        raised, None,
                        "{}: {} beside {:?}",
                        sets.dialect, set.case, plugin.annotations
                    );
                }
            }
        }
    }
    assert!(pairs > 100 && granted > 0, "{granted} of {pairs} granted");
}

/// Whether the set speaks only by variables. What is handed over is trusted more than an annotation.
fn is_of_variables(set: &Set) -> bool {
    set.annotations.is_empty() && set.nodes.is_empty() && set.mounts.is_empty()
}

/// Whether the set states something by an annotation. gpushare's own note of a list that became void counts
/// as a variable's, and an annotation that no dialect reads counts as nobody's.
fn states_by_annotation(set: &Set) -> bool {
    let spoken = set.spoken.as_ref().is_none_or(|dialects| !dialects.is_empty());
    spoken && set.annotations.keys().any(|key| key != gpushare_request::GRANTED_LIST)
}

#[test]
fn no_variable_raises_what_a_pods_annotation_states_on_a_strict_node() {
    let all = all();
    let sets = || all.iter().flat_map(|sets| sets.set.iter().map(|set| (&sets.dialect, set)));
    let (mut pairs, mut granted) = (0, 0);
    for (dialect, first) in sets().filter(|(_, set)| states_by_annotation(set) && !set.grants.is_empty()) {
        let policy = policy(first, true);
        let Some(base) = alone(first, &policy) else { continue };
        for (other, second) in sets().filter(|(_, set)| is_of_variables(set)) {
            let both = together(first, second);
            pairs += 1;
            let told = read(&Container::from_json(&both.bundle()), &policy, &gpus(TOTAL));
            let Ok(Some(request)) = told else { continue };
            granted += 1;
            let raised = raises(&request, &base);
            assert_eq!(raised, None, "{dialect}: {} beside {other}: {}", first.case, second.case);
        }
    }
    assert!(pairs > 0, "{granted} of {pairs} granted");
}
