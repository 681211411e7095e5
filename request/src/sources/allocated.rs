//! Reads what kubelet allocated to a container, as recorded by the node's agent. It is trusted like a
//! reservation of the node itself: other words may ask for less, and on a strict node variables grant nothing
//! in addition.
//!
//! Allocated amounts are granted. GPUs without an amount only limit what other words ask for.

use gpushare_claims::{
    Allocated, AllocatedPart, Amount, Cap, Claim, MemoryRequest, NodeGpus, Rank, RequestError, Scope, Span,
    Words,
};

/// The claims of kubelet's allocations.
pub(crate) fn claims(words: &Words, node: NodeGpus) -> Result<Vec<Claim>, RequestError> {
    let Some(Allocated(parts)) = words.container.allocated() else { return Ok(Vec::new()) };
    let (named, counted): (Vec<_>, Vec<_>) = parts.iter().partition(|part| part.gpu.is_some());
    let mut claims: Vec<Claim> = counted.iter().map(|part| of_count(part)).collect();
    if !named.is_empty() {
        claims.push(of_gpus(&named, node)?);
    }
    Ok(claims)
}

fn amount(part: &AllocatedPart) -> Amount {
    Amount { memory: part.memory.map(MemoryRequest::Bytes), cores: part.cores.map(Cap::from) }
}

fn by(part: &AllocatedPart) -> Claim {
    let amount = amount(part);
    Claim {
        by: format!("kubelet's allocation of {}", part.by.escape_debug()),
        rank: Rank::Node,
        asks: amount != Amount::default(),
        span: Span::One,
        scope: part.is_pods.then_some(Scope::Pod),
        takes_defaults: true,
        ..Claim::default()
    }
}

fn of_count(part: &AllocatedPart) -> Claim {
    Claim { count: Some(part.count), each: amount(part), ..by(part) }
}

/// One claim for all of them: the container gets each.
fn of_gpus(parts: &[&AllocatedPart], node: NodeGpus) -> Result<Claim, RequestError> {
    let is_counted = parts.iter().any(|part| amount(part) != Amount::default());
    // If one GPU is given in part, another that is given whole counts as all of it.
    let whole = || Amount { memory: Some(MemoryRequest::Percent(100)), cores: None };
    let mut gpus = Vec::new();
    let mut particular = Vec::new();
    for (part, uuid) in parts.iter().filter_map(|part| Some((part, part.gpu?))) {
        let found = node.0.iter().find(|gpu| gpu.uuid == uuid);
        gpus.push(found.ok_or_else(|| RequestError::ClaimedGpuGone { claim: part.by.clone(), gpu: uuid })?);
        if is_counted {
            let stated = amount(part);
            particular.push((uuid, if stated == Amount::default() { whole() } else { stated }));
        }
    }
    let is_pods = parts.iter().any(|part| part.is_pods);
    let scope = is_pods.then_some(Scope::Pod);
    Ok(Claim { asks: is_counted, particular, scope, ..by(parts[0]) }.naming(&gpus))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use gpushare_claims::{
        Ceilings, Container, Cores, DeviceSelector, Devices, Policy, Request, Reserved, four,
    };
    use gpushare_inventory::DeviceMemory;

    use super::*;
    use crate::read::read;

    const GIB: u64 = 1 << 30;

    fn strict() -> Policy {
        Policy { strict: true, ..Policy::default() }
    }

    fn part(gpu: Option<usize>, memory: Option<u64>) -> AllocatedPart {
        AllocatedPart {
            by: "nvidia.com/gpu".into(),
            gpu: gpu.map(|gpu| four()[gpu].uuid),
            count: 1,
            memory: memory.map(|memory| DeviceMemory::from_bytes(memory * GIB)),
            cores: None,
            is_pods: false,
        }
    }

    fn asked(parts: &[AllocatedPart], env: &[&str], policy: &Policy) -> Result<Request, RequestError> {
        let env = env.iter().map(ToString::to_string).collect();
        let container = Container::new(BTreeMap::new(), env).with_allocated(Allocated(parts.to_vec()));
        Ok(read(&container, policy, &four())?.expect("it asks"))
    }

    fn bytes(gib: u64) -> MemoryRequest {
        MemoryRequest::Bytes(DeviceMemory::from_bytes(gib * GIB))
    }

    #[test]
    fn variables_of_a_container_without_an_allocation_grant_nothing_on_a_strict_node() {
        let ceilings = Ceilings { env: "100%".parse().ok(), ..Ceilings::default() };
        for policy in [strict(), Policy { ceilings, ..strict() }] {
            for env in [&["GPUSHARE_MEMORY=6GiB"][..], &["NVIDIA_VISIBLE_DEVICES=all"]] {
                let told = asked(&[], env, &policy).unwrap_err();
                assert!(matches!(told, RequestError::NotAllocated { .. }), "{told}");
            }
        }
        assert_eq!(asked(&[], &["GPUSHARE_MEMORY=6GiB"], &Policy::default()).unwrap().memory, bytes(6));
    }

    #[test]
    fn variables_grant_up_to_what_was_allocated() {
        let policy = strict();
        let on = |gpu: usize| Devices::These(vec![DeviceSelector::Uuid(four()[gpu].uuid)]);
        // A whole GPU, of which the container wants a part.
        let request = asked(&[part(Some(2), None)], &["GPUSHARE_MEMORY=6GiB"], &policy).unwrap();
        assert_eq!((request.memory, request.devices), (bytes(6), on(2)));
        // An amount: the variables may ask for less, and an image's list is no request.
        let amount = [part(Some(2), Some(4))];
        for (env, want) in [
            (&["NVIDIA_VISIBLE_DEVICES=all"][..], 4),
            (&["GPUSHARE_MEMORY=3GiB"], 3),
            (&["NVIDIA_VISIBLE_DEVICES=all", "GPUSHARE_MEMORY=4GiB"], 4),
        ] {
            let request = asked(&amount, env, &policy).unwrap_or_else(|error| panic!("{env:?}: {error}"));
            assert_eq!((request.memory, request.devices), (bytes(want), on(2)), "{env:?}");
        }
        for env in ["GPUSHARE_MEMORY=5GiB", "GPUSHARE_MODE=exclusive", "GPUSHARE_DEVICES=1"] {
            let told = asked(&amount, &[env, "NVIDIA_VISIBLE_DEVICES=all"], &policy).unwrap_err();
            assert!(told.to_string().contains("nvidia.com/gpu"), "{env}: {told}");
        }
        let told = asked(&[part(Some(2), None)], &["GPUSHARE_DEVICES=0,2", "GPUSHARE_MEMORY=1GiB"], &policy);
        assert!(told.is_err(), "{told:?}");
    }

    #[test]
    fn the_defaults_of_the_node_do_not_lower_what_was_allocated() {
        let policy =
            Policy { default_memory: "2GiB".parse().ok(), default_cores: Cores::new(20), ..strict() };
        let request = asked(&[part(Some(1), Some(9))], &["NVIDIA_VISIBLE_DEVICES=all"], &policy).unwrap();
        assert_eq!(request.memory, bytes(9));
        let request = asked(&[part(Some(1), None)], &["GPUSHARE_MEMORY=9GiB"], &policy).unwrap();
        assert_eq!(request.memory, bytes(9));
        let request = asked(&[part(Some(1), None)], &["NVIDIA_VISIBLE_DEVICES=all"], &policy).unwrap();
        assert_eq!(request.memory, bytes(2));
    }

    #[test]
    fn amounts_without_a_gpu_leave_the_gpu_to_the_words_of_its_scheduler() {
        let amount = [AllocatedPart { by: "nvidia.com/gpumem".into(), ..part(None, Some(3)) }];
        let listed = format!("NVIDIA_VISIBLE_DEVICES={}", four()[3].uuid);
        let request = asked(&amount, &[&listed, "CUDA_DEVICE_MEMORY_LIMIT=3072m"], &strict()).unwrap();
        let on = Devices::These(vec![DeviceSelector::Uuid(four()[3].uuid)]);
        assert_eq!((request.memory, request.devices), (bytes(3), on));
        let told = asked(&amount, &[&listed, "CUDA_DEVICE_MEMORY_LIMIT=4096m"], &strict()).unwrap_err();
        assert!(told.to_string().contains("nvidia.com/gpumem"), "{told}");
        let two = format!("NVIDIA_VISIBLE_DEVICES={},{}", four()[3].uuid, four()[1].uuid);
        assert!(asked(&amount, &[&two, "CUDA_DEVICE_MEMORY_LIMIT=1024m"], &strict()).is_err());
    }

    #[test]
    fn a_part_beside_a_whole_gpu_and_beside_a_count_lose_no_bound() {
        let both = [part(Some(0), Some(4)), part(Some(1), None)];
        let request = asked(&both, &["NVIDIA_VISIBLE_DEVICES=all"], &strict()).unwrap();
        assert_eq!(request.on(four()[0].uuid).memory, bytes(4));
        assert_eq!(request.on(four()[1].uuid).memory, MemoryRequest::Percent(100));
        // A count from another system does not widen it.
        let counted = AllocatedPart { by: "example.com/slots".into(), ..part(None, Some(60)) };
        for env in ["GPUSHARE_MEMORY=10GiB", "GPUSHARE_DEVICES=1"] {
            let told = asked(&[part(Some(0), Some(4)), counted.clone()], &[env], &strict());
            assert!(told.is_err(), "{env}: {told:?}");
        }
    }

    #[test]
    fn what_was_given_otherwise_keeps_the_ceiling_of_variables() {
        let ceilings = Ceilings { env: "100%".parse().ok(), ..Ceilings::default() };
        let policy = Policy { ceilings, ..strict() };
        let env = vec!["NVIDIA_VISIBLE_DEVICES=all".to_owned()];
        let bare = Container::new(BTreeMap::new(), env).with_allocated(Allocated::default());
        assert_eq!(policy.within(&bare).ceilings.env, None);
        let reserved = Reserved { claim: "team/training".into(), lease: 7, shares: Vec::new() };
        let with_claim = bare.clone().with_reserved(reserved);
        assert_eq!(policy.within(&with_claim).ceilings.env, policy.ceilings.env);
    }

    #[test]
    fn a_gpu_that_is_gone_is_named() {
        let env = vec!["NVIDIA_VISIBLE_DEVICES=all".to_owned()];
        let container =
            Container::new(BTreeMap::new(), env).with_allocated(Allocated(vec![part(Some(3), None)]));
        let told = read(&container, &strict(), &four()[..3]).unwrap_err();
        assert!(matches!(told, RequestError::ClaimedGpuGone { .. }), "{told}");
    }
}
