//! Reads the CDI devices of resource claims. The node's agent makes one for each share that a cluster's
//! scheduler placed here. Its variable shows the claim's token and names a GPU; the size of the container's
//! share is in the quota store.
//!
//! The token is a secret of the node, so the store's entry is trusted more than any word of the bundle, and
//! the variable is read even on nodes that read no other variables. Other words neither raise nor lower a
//! claim's share: several containers may hold it together.

use gpushare_inventory::{DeviceMemory, GpuUuid};

use gpushare_claims::{
    Amount, Cap, Claim, Container, Cores, Devices, MemoryRequest, NodeGpus, Rank, Request, RequestError,
    Words, conflict,
};

/// The CDI kind of a resource claim's share.
pub const CLAIM_KIND: &str = "gpushare.io/claim";
/// Prefix of the variables that the CDI files of claims set.
pub const VARIABLE: &str = "GPUSHARE_CDI_CLAIM_";

/// The share of a claim that a bundle names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedClaim<'a> {
    /// The claim's token, as written.
    pub token: &'a str,
    /// The GPUs of the claim that the container gets, each once.
    pub gpus: Vec<GpuUuid>,
}

/// The value of a claim's variable, for the agent that writes it.
pub fn claim_value(token: &str, gpu: GpuUuid) -> String {
    format!("{CLAIM_KIND}={token}/{gpu}")
}

/// The claim that the bundle names; `None` if it names none.
///
/// # Errors
/// If a variable holds no such name, or variables name two claims.
pub fn named_claim(container: &Container) -> Result<Option<NamedClaim<'_>>, RequestError> {
    let mut found: Option<NamedClaim> = None;
    for (key, value) in container.env().filter(|(key, _)| key.starts_with(VARIABLE)) {
        let rest = value.strip_prefix(CLAIM_KIND).and_then(|rest| rest.strip_prefix('='));
        let parts = rest.and_then(|rest| rest.split_once('/'));
        let read = parts.and_then(|(token, gpu)| Some((token, gpu.parse::<GpuUuid>().ok()?)));
        let (token, gpu) =
            read.ok_or_else(|| RequestError::MalformedClaim { key: key.escape_debug().to_string() })?;
        let claim = found.get_or_insert(NamedClaim { token, gpus: Vec::new() });
        if claim.token != token {
            return Err(RequestError::SeveralClaims);
        }
        if !claim.gpus.contains(&gpu) {
            claim.gpus.push(gpu);
        }
    }
    Ok(found)
}

/// Whether the bundle names a claim. Reads only the bundle.
pub(crate) fn is_named(words: &Words) -> bool {
    words.container.env().any(|(key, _)| key.starts_with(VARIABLE))
}

/// The claim of the node's reservation.
pub(crate) fn claims(words: &Words, node: NodeGpus) -> Result<Vec<Claim>, RequestError> {
    if !is_named(words) {
        return Ok(Vec::new());
    }
    let reserved = words.container.reserved().ok_or(RequestError::UnpreparedClaim)?;
    let mut gpus = Vec::new();
    for share in &reserved.shares {
        let found = node.0.iter().find(|gpu| gpu.uuid == share.gpu);
        gpus.push(
            found.ok_or_else(|| RequestError::ClaimedGpuGone {
                claim: reserved.claim.clone(),
                gpu: share.gpu,
            })?,
        );
    }
    let amounts = reserved.shares.iter().map(|share| {
        let cores = share.cores.map_or(Cap::Unlimited, Cap::from);
        let memory = Some(MemoryRequest::Bytes(share.memory));
        (share.gpu, Amount { memory, cores: Some(cores) })
    });
    let claim = Claim {
        by: format!("claim {}", reserved.claim),
        rank: Rank::Node,
        asks: true,
        particular: amounts.collect(),
        takes_defaults: true,
        ..Claim::default()
    };
    Ok(vec![claim.naming(&gpus)])
}

/// Marks a request as one that joins the reserved lease.
///
/// # Errors
/// If other words of the bundle made it less than the claim's share.
pub(crate) fn join(request: &mut Request, container: &Container) -> Result<(), RequestError> {
    let Some(reserved) = container.reserved() else { return Ok(()) };
    let is_less = reserved.shares.iter().any(|share| {
        let left = request.on(share.gpu);
        let cap = |cores: Option<Cores>| cores.map_or(Cap::Unlimited, Cap::from);
        left.memory != MemoryRequest::Bytes(share.memory) || cap(left.cores) < cap(share.cores)
    });
    let has_all = matches!(&request.devices, Devices::These(list) if list.len() == reserved.shares.len());
    if is_less || !has_all {
        return Err(RequestError::BelowClaim { claim: reserved.claim.clone() });
    }
    if request.host_memory > DeviceMemory::ZERO {
        let host = format!("{} of host memory", request.host_memory);
        return Err(conflict(format!("claim {}, which has none", reserved.claim), host));
    }
    if let Some(limit) = request.memory_limit {
        let limit = format!("a memory-limit of {limit}");
        return Err(conflict(format!("claim {}, which has none", reserved.claim), limit));
    }
    request.reserved = Some(reserved.lease);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use gpushare_claims::{DeviceSelector, Policy, Reserved, ReservedShare, four};
    use gpushare_inventory::DeviceMemory;

    use super::*;
    use crate::read::{is_request, read};

    const TOKEN: &str = "000102030405060708090a0b0c0d0e0f";
    const GIB: u64 = 1 << 30;

    fn variable(gpu: usize) -> String {
        format!("{VARIABLE}{gpu}={}", claim_value(TOKEN, four()[gpu].uuid))
    }

    /// A container that names a claim of 30 GiB on each of `gpus`, with these additional words.
    fn container(gpus: &[usize], annotations: &[(&str, &str)], env: &[&str]) -> Container {
        let annotations = annotations.iter().map(|(key, value)| (key.to_string(), value.to_string()));
        let env = env.iter().map(ToString::to_string).chain(gpus.iter().map(|gpu| variable(*gpu)));
        let share = |gpu: &usize| ReservedShare {
            gpu: four()[*gpu].uuid,
            memory: DeviceMemory::from_bytes(30 * GIB),
            cores: Cores::new(40),
        };
        let shares = gpus.iter().map(share).collect();
        let reserved = Reserved { claim: "team/training".into(), lease: 7, shares };
        Container::new(annotations.collect::<BTreeMap<_, _>>(), env.collect()).with_reserved(reserved)
    }

    fn policies() -> [Policy; 3] {
        let (strict, ignore_env) = (true, true);
        [
            Policy::default(),
            Policy { strict, ..Policy::default() },
            Policy { ignore_env, ..Policy::default() },
        ]
    }

    #[test]
    fn a_claim_is_the_request_on_every_node_and_beside_what_images_say() {
        for policy in policies() {
            for env in [&[][..], &["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_REQUIRE_CUDA=cuda>=12.0"]] {
                let container = container(&[2, 1], &[], env);
                assert!(is_request(&container, &policy));
                let request = read(&container, &policy, &four()).unwrap().unwrap();
                let uuid = |gpu: usize| DeviceSelector::Uuid(four()[gpu].uuid);
                assert_eq!(request.reserved, Some(7));
                assert_eq!(request.devices, Devices::These(vec![uuid(2), uuid(1)]), "{env:?}");
                let memory = MemoryRequest::Bytes(DeviceMemory::from_bytes(30 * GIB));
                assert_eq!((request.memory, request.cores), (memory, Cores::new(40)));
            }
        }
    }

    #[test]
    fn other_words_neither_raise_nor_lower_a_claims_share() {
        for policy in policies() {
            for (annotations, env) in [
                (&[("gpushare.io/memory", "4GiB")][..], &[][..]),
                (&[("gpushare.io/memory", "60GiB")], &[]),
                (&[("gpushare.io/cores", "10")], &[]),
                (&[("gpushare.io/devices", "3")], &[]),
                (&[("gpushare.io/mode", "exclusive")], &[]),
                (&[("alloc.gpushare.io/memory", "4GiB")], &[]),
                (&[], &["NVIDIA_VISIBLE_DEVICES=3"]),
            ] {
                let read = read(&container(&[0], annotations, env), &policy, &four());
                let told = read.expect_err(&format!("{annotations:?} {env:?}")).to_string();
                assert!(told.contains("team/training"), "{annotations:?} {env:?}: {told}");
            }
        }
    }

    #[test]
    fn a_name_that_was_not_looked_up_or_that_nobody_wrote_is_refused() {
        let other = format!("{VARIABLE}B={}", claim_value(&TOKEN.replace('0', "f"), four()[0].uuid));
        for (env, want) in [
            (vec![variable(0)], RequestError::UnpreparedClaim),
            (vec![variable(0), other], RequestError::SeveralClaims),
            (
                vec![format!("{VARIABLE}A={TOKEN}")],
                RequestError::MalformedClaim { key: format!("{VARIABLE}A") },
            ),
        ] {
            let container = Container::new(BTreeMap::new(), env);
            let read = named_claim(&container)
                .and_then(|_| read(&container, &Policy::default(), &four()))
                .unwrap_err();
            assert_eq!(read, want);
        }
    }

    #[test]
    fn a_gpu_that_is_gone_is_named() {
        let told = read(&container(&[3], &[], &[]), &Policy::default(), &four()[..3]).unwrap_err();
        assert!(matches!(told, RequestError::ClaimedGpuGone { .. }), "{told}");
    }
}
