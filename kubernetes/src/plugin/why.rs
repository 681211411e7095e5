//! Why a pod waits for its GPU, in lines for people.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{CapacityRequirements, ResourceClaim};

use super::picture::{Gpu, Picture, amount, size};
use crate::node::{CORES, DRIVER, MEMORY, claims_of_pod};

/// What is known of the pod's place, its claims, and its containers.
pub fn lines(pod: &Pod, claims: &[ResourceClaim], picture: &Picture) -> Vec<String> {
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
    let mut lines = vec![match node {
        Some(node) => format!("The pod is bound to node {node}."),
        None => "The pod is bound to no node.".to_owned(),
    }];
    let names = claims_of_pod(pod);
    let namespace = pod.metadata.namespace.as_deref();
    if names.is_empty() {
        let asks = "It has no resource claim: it asks for no share of a GPU by the scheduler.";
        lines.push(asks.to_owned());
    }
    for name in names {
        let is_its = |claim: &&ResourceClaim| {
            claim.metadata.name.as_deref() == Some(&name) && claim.metadata.namespace.as_deref() == namespace
        };
        match claims.iter().find(is_its) {
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
        let waiting = container.state.as_ref()?.waiting.as_ref()?;
        let said = [&waiting.reason, &waiting.message].into_iter().flatten().cloned().collect::<Vec<_>>();
        Some(format!("Container {} waits: {}", container.name, said.join(": ")))
    }));
    // A message of an engine may hold what a terminal acts on.
    lines.iter().map(|line| line.chars().filter(|c| !c.is_control()).collect()).collect()
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
        lines.push(format!("Claim {name} has {memory} of GPU {gpu} on node {}.", share.node));
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
            let told = lines(&pod("mine", json!({})), &claims, &picture).join("\n");
            assert!(told.contains("bound to no node") && told.contains(want), "{asked}: {told}");
        }
        let claims = [claim("mine", &[], "10Gi")];
        let told = lines(&pod("mine", json!({})), &claims, &Picture::default()).join("\n");
        assert!(told.contains("no node shows a GPU"), "{told}");
        let told = lines(&pod("other", json!({})), &claims, &Picture::default()).join("\n");
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
        let told = lines(&pod("mine", json!({})), &claims, &Picture::of(&[slice], &claims));
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
            (lines(&pod("mine", json!({})), &claims, &picture).join("\n"), picture.gpus_table())
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
        let told = lines(&pod("mine", status), &claims, &picture);
        assert_eq!(
            told[1..],
            [
                "Claim mine has 10 GiB of GPU 1 on node node-a.",
                "Ready: containers with unready status",
                "Container main waits: RunContainerError: cannot lease a GPU[2J",
            ]
        );
    }
}
