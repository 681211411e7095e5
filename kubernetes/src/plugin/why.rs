//! Why a pod waits for its GPU, in lines for people.

use gpushare_request::POD_ANNOTATION;
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::api::resource::v1::{CapacityRequirements, ResourceClaim};

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::picture::{Gpu, Picture, amount, size};
use crate::node::{CORES, DRIVER, MEMORY, claims_of_pod};

/// How many of the last warnings are told.
const WARNINGS: usize = 3;

/// What is known of the pod's place, its claims, its containers, and what was said of it.
/// `by_resources` is what is known of its countable resources.
pub fn lines(
    pod: &Pod,
    claims: &[ResourceClaim],
    by_resources: &[String],
    events: &[Event],
    picture: &Picture,
) -> Vec<String> {
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    let mut lines = vec![match (phase, node) {
        (Some(phase @ ("Succeeded" | "Failed")), _) => format!("The pod has ended ({phase})."),
        (_, Some(node)) => format!("The pod is bound to node {node}."),
        (_, None) => "The pod is bound to no node.".to_owned(),
    }];
    let has_ended = lines[0].contains("ended");
    let names = claims_of_pod(pod);
    let namespace = pod.metadata.namespace.as_deref();
    if by_resources.is_empty() && names.is_empty() {
        lines.push(without_claim(pod));
    }
    if !has_ended {
        lines.extend(by_resources.iter().cloned());
    }
    for name in names {
        let is_its = |claim: &&ResourceClaim| {
            claim.metadata.name.as_deref() == Some(&name) && claim.metadata.namespace.as_deref() == namespace
        };
        match claims.iter().find(is_its) {
            None if has_ended => lines.push(format!("Claim {name} was made for the pod, and went with it.")),
            None => lines.push(format!("Claim {name} does not exist.")),
            Some(claim) => of_claim(&name, claim, picture, &mut lines),
        }
    }
    let status = pod.status.as_ref();
    let conditions = status.and_then(|status| status.conditions.as_ref()).into_iter().flatten();
    let unmet = conditions.filter(|condition| condition.status == "False");
    lines.extend(unmet.filter_map(|condition| {
        Some(format!(
            "{}: {}",
            condition.type_,
            condition.message.as_deref().filter(|text| !text.is_empty())?
        ))
    }));
    let containers = status.and_then(|status| status.container_statuses.as_ref()).into_iter().flatten();
    lines.extend(containers.filter_map(|container| {
        let state = container.state.as_ref()?;
        let (what, said) = match (&state.waiting, &state.terminated) {
            (Some(waiting), _) => ("waits", [&waiting.reason, &waiting.message]),
            (None, Some(ended)) if ended.exit_code != 0 => ("failed", [&ended.reason, &ended.message]),
            _ => return None,
        };
        let said: Vec<String> = said.into_iter().flatten().cloned().collect();
        Some(format!("Container {} {what}: {}", container.name, said.join(": ")))
    }));
    let warnings = events.iter().filter(|event| event.type_.as_deref() == Some("Warning"));
    let mut warnings: Vec<&Event> = warnings.collect();
    warnings.sort_by_key(|event| event.last_timestamp.clone());
    lines.extend(
        warnings[warnings.len().saturating_sub(WARNINGS)..]
            .iter()
            .filter_map(|event| Some(format!("{}: {}", event.reason.as_deref()?, event.message.as_deref()?))),
    );
    // A message of an engine may hold what a terminal acts on.
    lines.iter().map(|line| line.chars().filter(|c| !c.is_control()).collect()).collect()
}

/// How a pod without a claim asks, if it does.
fn without_claim(pod: &Pod) -> String {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let limits = containers.filter_map(|container| container.resources.as_ref()?.limits.as_ref());
    let counted = limits.flatten().find(|(name, _)| {
        name.split_once('/')
            .is_some_and(|(domain, _)| domain != "kubernetes.io" && !domain.ends_with(".kubernetes.io"))
    });
    let annotations = pod.metadata.annotations.iter().flatten();
    let annotation = annotations.map(|(key, _)| key).find(|key| key.starts_with(POD_ANNOTATION));
    match (counted, annotation) {
        (Some((name, Quantity(count))), _) => format!(
            "It has no resource claim, and asks for {count} of {name}: where a device class stands behind that, the scheduler makes \
             the claim when it places the pod."
        ),
        (None, Some(key)) => format!(
            "It has no resource claim, and asks by {key}: its node decides when the container starts, and the scheduler counts \
             nothing of it."
        ),
        (None, None) => {
            "It has no resource claim: it asks for no share of a GPU by the scheduler.".to_owned()
        }
    }
}

fn of_claim(name: &str, claim: &ResourceClaim, picture: &Picture, lines: &mut Vec<String>) {
    let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
    let mut shares =
        picture.shares.iter().filter(|share| share.claim == name && share.namespace == namespace).peekable();
    let is_allocated = claim.status.as_ref().is_some_and(|status| status.allocation.is_some());
    if is_allocated && shares.peek().is_none() {
        lines.push(format!("Claim {name} is allocated, and has no share of gpushare's."));
    }
    for share in shares {
        let gpu = share.index.map_or_else(|| share.device.clone(), |index| index.to_string());
        let memory = size(share.memory_bytes);
        lines.push(format!("Claim {name} was allotted {memory} of GPU {gpu} on node {}.", share.node));
    }
    if is_allocated {
        return;
    }
    let requests = claim.spec.devices.iter().flat_map(|devices| devices.requests.iter().flatten());
    for request in requests {
        if let Some(exactly) = &request.exactly {
            let why = of_request(&exactly.device_class_name, exactly.capacity.as_ref(), picture);
            lines.push(format!("Claim {name} waits: {why}"));
        }
        for one in request.first_available.iter().flatten() {
            let why = of_request(&one.device_class_name, one.capacity.as_ref(), picture);
            lines.push(format!(
                "Claim {name} waits, alternative {} of request {}: {why}",
                one.name, request.name
            ));
        }
    }
}

/// How a request and the free room compare. A class of another name may be one of gpushare's too, so what the
/// scheduler says stands beside it.
fn of_request(class: &str, capacity: Option<&CapacityRequirements>, picture: &Picture) -> String {
    let asked = capacity.and_then(|capacity| capacity.requests.clone()).unwrap_or_default();
    let least = |default: fn(&Gpu) -> u64| picture.gpus.iter().map(default).min().unwrap_or(0);
    let wanted = |name: &str, default: fn(&Gpu) -> u64| match asked.contains_key(name) {
        true => amount(&asked, name),
        false => least(default),
    };
    let memory = wanted(MEMORY, |gpu| gpu.memory_default_bytes);
    let cores = wanted(CORES, |gpu| gpu.cores_default_percent);
    let wanted = match cores {
        0 => size(memory),
        cores => format!("{} and {cores} % of compute", size(memory)),
    };
    let largest = picture.gpus.iter().max_by_key(|gpu| gpu.memory_bytes);
    let open = || picture.gpus.iter().filter(|gpu| gpu.is_open());
    let freest = open().max_by_key(|gpu| gpu.free());
    let fits = open().any(|gpu| gpu.free() >= memory && gpu.free_cores() >= cores);
    match (largest, freest) {
        (None, _) if !picture.sees_gpus => format!("it asks for {wanted} (class {class})"),
        (None, _) => format!(
            "it asks for {wanted} (class {class}), and no node shows a GPU of {DRIVER}: is gpushare-kube node \
             running there?"
        ),
        (Some(largest), _) if largest.memory_bytes < memory => format!(
            "it asks for {wanted} of a GPU, and the largest has {} (node {}): it never fits",
            size(largest.memory_bytes),
            largest.node
        ),
        (Some(one), None) => format!(
            "it asks for {wanted} of a GPU, and no GPU is open for new shares: GPU {} of node {} is {} \
             (`kubectl gpushare gpus` shows all)",
            one.index,
            one.node,
            one.state()
        ),
        (_, Some(freest)) if !fits => format!(
            "it asks for {wanted} of a GPU, and no GPU has that free: the freest has {} and {} % of compute \
             (node {}, GPU {}){}",
            size(freest.free()),
            freest.free_cores(),
            freest.node,
            freest.index,
            match picture.gpus.iter().filter(|gpu| !gpu.is_open()).count() {
                0 => String::new(),
                closed => format!("; {closed} more are not open for new shares (`kubectl gpushare gpus`)"),
            }
        ),
        _ if !picture.sees_all => format!(
            "it asks for {wanted} of a GPU, which would fit beside the shares that you may see: those of other namespaces may be in \
             the way"
        ),
        _ => format!(
            "it asks for {wanted} of a GPU, which would fit; another condition of the claim (selectors, \
             constraints, other requests) or of the pod holds it"
        ),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::plugin::picture::tests::{claim, slice};

    fn pod(claim: &str, status: Value) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": "pod", "namespace": "team"},
            "spec": {"containers": [], "resourceClaims": [{"name": "share", "resourceClaimName": claim}]},
            "status": status,
        }))
        .unwrap()
    }

    #[test]
    fn a_pod_is_told_what_it_waits_for() {
        let held = [claim("a", &[0], "60Gi"), claim("b", &[1], "70Gi")];
        for (asked, want) in [
            ("30Gi", "no GPU has that free: the freest has 20 GiB and 60 % of compute (node node-a, GPU 0)"),
            ("100Gi", "the largest has 80 GiB (node node-a): it never fits"),
            ("10Gi", "would fit"),
        ] {
            let claims = [&held[..], &[claim("mine", &[], asked)]].concat();
            let picture = Picture::of(&[slice(1)], &claims);
            let told = lines(&pod("mine", json!({})), &claims, &[], &[], &picture).join("\n");
            assert!(told.contains("bound to no node") && told.contains(want), "{asked}: {told}");
        }
        let claims = [claim("mine", &[], "10Gi")];
        let told = lines(&pod("mine", json!({})), &claims, &[], &[], &Picture::of(&[], &claims)).join("\n");
        assert!(told.contains("no node shows a GPU"), "{told}");
        let told = lines(&pod("other", json!({})), &claims, &[], &[], &Picture::of(&[], &claims)).join("\n");
        assert!(told.contains("Claim other does not exist"), "{told}");
    }

    #[test]
    fn each_alternative_of_a_request_is_told_and_compute_by_the_nodes_default() {
        let alternative = |name: &str, memory: &str| json!({"name": name, "deviceClassName": DRIVER, "capacity": {"requests": {"memory": memory}}});
        let request = json!({"name": "gpu", "firstAvailable": [alternative("large", "100Gi"), alternative("small", "10Gi")]});
        let mine = json!({"metadata": {"name": "mine", "namespace": "team"},
            "spec": {"devices": {"requests": [request]}}});
        let claims = [serde_json::from_value(mine).unwrap(), claim("a", &[0, 1], "1Gi")];
        let mut slice = slice(1);
        for device in slice.spec.devices.iter_mut().flatten() {
            let cores = json!({"value": "100", "requestPolicy": {"default": "70"}});
            device
                .capacity
                .as_mut()
                .unwrap()
                .insert(CORES.to_owned(), serde_json::from_value(cores).unwrap());
        }
        let told = lines(&pod("mine", json!({})), &claims, &[], &[], &Picture::of(&[slice], &claims));
        assert!(
            told[1].contains("alternative large of request gpu: it asks for 100 GiB and 70 % of compute"),
            "{told:?}"
        );
        assert!(
            told[2].contains("alternative small") && told[2].contains("no GPU has that free"),
            "{told:?}"
        );
    }

    #[test]
    fn a_gpu_with_a_taint_has_no_room() {
        let claims = [claim("mine", &[], "10Gi")];
        let told = |tainted: &[usize]| {
            let mut slice = slice(1);
            for gpu in tainted {
                let taint = json!([{"key": "gpu.gpushare.io/cordoned", "effect": "NoSchedule"}]);
                slice.spec.devices.as_mut().unwrap()[*gpu].taints = serde_json::from_value(taint).unwrap();
            }
            let picture = Picture::of(&[slice], &claims);
            (lines(&pod("mine", json!({})), &claims, &[], &[], &picture).join("\n"), picture.gpus_table())
        };
        let (one, table) = told(&[0]);
        assert!(one.contains("would fit"), "{one}");
        assert!(table.lines().nth(1).unwrap().ends_with("  cordoned"), "{table}");
        let (all, _) = told(&[0, 1]);
        assert!(all.contains("no GPU is open for new shares: GPU 1 of node node-a is cordoned"), "{all}");
    }

    #[test]
    fn what_scheduler_and_engine_say_stands_beside_it() {
        let claims = [claim("mine", &[1], "10Gi")];
        let picture = Picture::of(&[slice(1)], &claims);
        let status = json!({
            "conditions": [{"type": "PodScheduled", "status": "True", "message": "no"},
                {"type": "Ready", "status": "False", "message": "containers with unready status"}],
            "containerStatuses": [{"name": "main", "image": "", "imageID": "", "ready": false, "restartCount": 0,
                "state": {"waiting": {"reason": "RunContainerError", "message": "cannot lease a GPU\u{1b}[2J"}}}],
        });
        let told = lines(&pod("mine", status), &claims, &[], &[], &picture);
        assert_eq!(
            told[1..],
            [
                "Claim mine was allotted 10 GiB of GPU 1 on node node-a.",
                "Ready: containers with unready status",
                "Container main waits: RunContainerError: cannot lease a GPU[2J",
            ]
        );
    }

    #[test]
    fn who_asks_otherwise_or_has_ended_and_what_was_warned_of_is_told() {
        let metadata =
            |annotations: Value| json!({"name": "pod", "namespace": "team", "annotations": annotations});
        let container =
            |limits: Value| json!({"containers": [{"name": "main", "resources": {"limits": limits}}]});
        let plain = Picture { sees_all: true, sees_gpus: true, ..Picture::default() };
        let warning = |reason: &str, time: &str| -> Event {
            serde_json::from_value(
                json!({"metadata": {}, "involvedObject": {}, "type": "Warning", "reason": reason,
                "message": "no room", "lastTimestamp": time}),
            )
            .unwrap()
        };
        let events = [
            warning("FailedPrepareDynamicResources", "2026-01-01T00:00:04Z"),
            warning("Oldest", "2026-01-01T00:00:01Z"),
            warning("Second", "2026-01-01T00:00:02Z"),
            warning("Third", "2026-01-01T00:00:03Z"),
        ];
        for (pod, want) in [
            (
                json!({"metadata": metadata(json!({})), "spec": container(json!({"gpushare.io/gpu": "1"}))}),
                "asks for 1 of gpushare.io/gpu",
            ),
            (
                json!({"metadata": metadata(json!({"gpushare.io/memory": "4GiB"})), "spec": container(json!({}))}),
                "asks by gpushare.io/memory",
            ),
            (
                json!({"metadata": metadata(json!({})), "spec": container(json!({"cpu": "1"}))}),
                "no share of a GPU by the scheduler",
            ),
            (
                json!({"metadata": metadata(json!({})), "spec": container(json!({})), "status": {"phase": "Failed"}}),
                "has ended (Failed)",
            ),
        ] {
            let told = lines(&serde_json::from_value(pod).unwrap(), &[], &[], &events, &plain);
            assert!(told.iter().any(|line| line.contains(want)), "{want}: {told:?}");
            let last: Vec<&str> = told.iter().rev().take(3).map(String::as_str).collect();
            assert_eq!(last, ["FailedPrepareDynamicResources: no room", "Third: no room", "Second: no room"]);
        }
        let claims = [claim("mine", &[], "10Gi")];
        let told = |picture: Picture| lines(&pod("mine", json!({})), &claims, &[], &[], &picture).join("\n");
        let partly = Picture { sees_all: false, ..Picture::of(&[slice(1)], &claims) };
        assert!(told(partly).contains("beside the shares that you may see"));
        let blind = told(Picture { sees_gpus: false, ..Picture::of(&[], &claims) });
        assert!(blind.contains("asks for 10 GiB") && !blind.contains("is gpushare-kube node"), "{blind}");
    }
}
