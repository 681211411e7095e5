//! What each set comes to by reading alone, without an engine.

use std::path::Path;

use gpushare_config::Config;
use gpushare_inventory::{DeviceMemory, DeviceNode, Gpu};
use gpushare_request::{Container, Mode, Policy, Request, read};

use super::sets::{MINORS, Set, UUIDS, all, found, handed};

/// The GPUs of the sets' node, each with `total` MiB.
pub fn gpus(total: u64) -> Vec<Gpu> {
    let gpu = |(index, (uuid, minor)): (usize, (&str, u32))| {
        let path = std::path::PathBuf::from(format!("/dev/nvidia{minor}"));
        let host_path = path.clone();
        Gpu {
            index: u32::try_from(index).unwrap(),
            uuid: uuid.parse().unwrap(),
            minor,
            model: "Tesla T4".to_owned(),
            memory: Some(DeviceMemory::from_bytes(total << 20)),
            node: DeviceNode { path, host_path, major: 195, minor, mode: 0o666, uid: 0, gid: 0 },
            place: gpushare_inventory::Place::default(),
            instance: None,
        }
    };
    UUIDS.into_iter().zip(MINORS).enumerate().map(gpu).collect()
}

/// The settings of `set`. On a strict node every channel may grant the whole GPU.
pub fn policy(set: &Set, strict: bool) -> Policy {
    let config = Config::from_text(Path::new("set"), &set.settings, Path::new("/opt/gpushare/bin"));
    let mut policy = config.unwrap_or_else(|error| panic!("{}: {error}", set.case)).request;
    if strict {
        let whole = Some("100%".parse().unwrap());
        policy.strict = true;
        policy.ceilings.pod = policy.ceilings.pod.or(whole);
        policy.ceilings.env = policy.ceilings.env.or(whole);
    }
    policy
}

pub fn granted(request: &Request) -> Vec<String> {
    let devices: Vec<gpushare_request::DeviceSelector> = match &request.devices {
        gpushare_request::Devices::These(devices) => devices.clone(),
        // Placement chooses; on an empty node it takes the first GPUs.
        gpushare_request::Devices::Among(count, of) => {
            of.iter().take((*count).into()).map(|gpu| gpushare_request::DeviceSelector::Uuid(*gpu)).collect()
        }
        other => return vec![format!("{other:?}")],
    };
    let line = |selector: &gpushare_request::DeviceSelector| {
        let gpu = *gpushare_request::find_gpu(selector, &gpus(1)).map(|gpu| &gpu.uuid).unwrap();
        let share = request.on(gpu);
        let mut line = format!("{gpu} {}", memory(share.memory));
        if let Some(cores) = share.cores {
            line += &format!(" {cores}");
        }
        if let Some(burst) = request.burst {
            line += &format!(" burst {burst}");
        }
        if request.mode == Mode::Exclusive { format!("{gpu} exclusive") } else { line }
    };
    devices.iter().map(line).collect()
}

fn memory(memory: gpushare_request::MemoryRequest) -> String {
    match memory {
        gpushare_request::MemoryRequest::Bytes(memory) if memory.bytes() % (1 << 20) == 0 => {
            format!("{} MiB", memory.bytes() >> 20)
        }
        gpushare_request::MemoryRequest::Rest => "rest".to_owned(),
        other => other.to_string(),
    }
}

/// What is wrong with the outcome of `set`; `None` where it is as the set says.
fn fault(dialect: &str, set: &Set, strict: bool) -> Option<String> {
    let container = Container::from_json(&set.bundle());
    let outcome = read(&container, &policy(set, strict), &gpus(set.total.unwrap_or(15360)));
    let refused = if strict && !set.strictly.is_empty() { &set.strictly } else { &set.refused };
    match outcome {
        Err(error) => {
            let told = gpushare_inject::one_line(&error);
            let right = !refused.is_empty() && told.contains(refused.as_str());
            (!right).then(|| format!("refused: {told}"))
        }
        Ok(None) => (!set.passes).then(|| "passes".to_owned()),
        Ok(Some(request)) => {
            let granted = granted(&request);
            let mut spoken = set.spoken.clone().unwrap_or_else(|| vec![dialect.to_owned()]);
            spoken.sort();
            let noted = |text: &String| request.notes.iter().any(|note| note.contains(text.as_str()));
            let stands: Vec<String> =
                request.variables.iter().map(|(key, value)| format!("{key}={value}")).collect();
            let right = refused.is_empty()
                && !set.passes
                && (set.stands.is_empty() || set.stands == stands)
                && granted == set.grants
                && (spoken == ["nvidia-plain"] && request.dialects.is_empty() || request.dialects == spoken)
                && (strict || set.notes.iter().all(noted));
            (!right).then(|| {
                let (by, notes) = (&request.dialects, &request.notes);
                format!("{granted:?} by {by:?}, {stands:?} stand, notes {notes:?}")
            })
        }
    }
}

#[test]
fn every_set_of_every_dialect_comes_to_what_it_says() {
    let mut faults = Vec::new();
    let mut count = 0;
    for sets in all().into_iter().chain(handed()).chain(found()) {
        for set in &sets.set {
            for strict in [false, true] {
                count += 1;
                if let Some(fault) = fault(&sets.dialect, set, strict) {
                    let node = if strict { "strict" } else { "lenient" };
                    faults.push(format!("{} ({node}): {}: {fault}", sets.dialect, set.case));
                }
            }
        }
    }
    assert!(count > 0);
    assert!(faults.is_empty(), "{} of {count}:\n{}", faults.len(), faults.join("\n"));
}

#[test]
fn every_set_says_one_outcome_and_every_dialect_has_sets() {
    let all = all();
    for sets in all.iter().chain(&handed()).chain(&found()) {
        for set in &sets.set {
            let outcomes = [!set.grants.is_empty(), !set.refused.is_empty(), set.passes];
            assert_eq!(outcomes.iter().filter(|has| **has).count(), 1, "{}: {}", sets.dialect, set.case);
        }
    }
    for name in gpushare_request::dialect_names() {
        assert!(all.iter().any(|sets| sets.dialect == name), "no sets of {name}");
    }
}
