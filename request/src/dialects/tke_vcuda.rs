//! Tencent's gpu-manager: annotations `tencent.com/vcuda-{core,memory,device}`, which its device plugin writes (tkestack/
//! gpu-manager pkg/services/allocator/nvidia/allocator.go, pkg/services/virtual-manager/manager.go).
//!
//! A container whose limits did not reach the bundle is told by the mount of `/etc/vcuda`, and refused.

use gpushare_inventory::{DeviceMemory, Gpu};

use super::Dialect;
use crate::cards::{Cards, IndexMeaning};
use crate::channel::Trust;
use crate::claim::{Amount, Cap, Claim};
use crate::device_list::{Named, items, named};
use crate::error::RequestError;
use crate::grammar::{Cores, DeviceSelector};
use crate::quantity;
use crate::reading::{Reading, Said, conflict};

pub(super) static DIALECT: Dialect = Dialect { name: "tke-vcuda", detects, read, owns, by_position: false };

/// Percent of one card; hundreds are whole cards.
const CORE: &str = "tencent.com/vcuda-core";
/// Bytes.
const MEMORY: &str = "tencent.com/vcuda-memory";
/// As `/dev/nvidia0,/dev/nvidia1`.
const DEVICE: &str = "tencent.com/vcuda-device";
/// Percent that idle time may be used up to. Pods have it, the other three only containers.
const CORE_LIMIT: &str = "tencent.com/vcuda-core-limit";
const MOUNT: &str = "/etc/vcuda";
/// What a pod's specification counts memory in.
const BLOCK: u64 = 256 << 20;

fn detects(reading: &Reading) -> bool {
    reading.annotations().any(|said| matches!(said.key, CORE | MEMORY | DEVICE)) || mount(reading).is_some()
}

fn owns(key: &str) -> bool {
    matches!(key, CORE | MEMORY | DEVICE | CORE_LIMIT)
}

fn mount<'a>(reading: &Reading<'a>) -> Option<Said<'a>> {
    let mount = reading.container.mounts().iter().find(|mount| mount.target == MOUNT)?;
    Some(Said { key: "mount /etc/vcuda", value: &mount.source, trust: Trust::Environment })
}

fn read<'a>(reading: &Reading<'a>, cards: Cards<'a>) -> Result<Vec<Claim>, RequestError> {
    let device = needed(reading, DEVICE)?;
    let core = needed(reading, CORE)?;
    let gpus = gpus(cards, device)?;
    let claim = match percent(core)? {
        whole if whole >= 100 => whole_cards(core, whole, device, &gpus)?,
        share => part(reading, core, share, device, &gpus)?,
    };
    let mut claims = vec![claim];
    match named(reading, cards, IndexMeaning::Pci)? {
        Named::Gpus(list, gpus) => claims.push(Claim::by(list).naming(&gpus)),
        Named::NoGpu(list) => return Err(conflict(device, list)),
        Named::Nothing => {}
    }
    Ok(claims)
}

/// The annotation of this name, without which the others are no request.
fn needed<'a>(reading: &Reading<'a>, key: &str) -> Result<Said<'a>, RequestError> {
    let known = [DEVICE, CORE, MEMORY].into_iter().find_map(|key| reading.annotation(key));
    let Some(known) = known.or_else(|| mount(reading)) else {
        return Err(RequestError::LimitWithoutGpu { by: key.to_owned() });
    };
    reading.annotation(key).ok_or_else(|| {
        known.wrong(format!(
            "gpu-manager's {key} did not reach the bundle: pass tencent.com/vcuda-* to the runtime (containerd: \
             container_annotations of the handler)"
        ))
    })
}

fn gpus<'a>(cards: Cards<'a>, said: Said) -> Result<Vec<&'a Gpu>, RequestError> {
    let mut gpus: Vec<&Gpu> = Vec::new();
    for item in items(said.value) {
        let minor = item.strip_prefix("/dev/nvidia").and_then(quantity::whole);
        let minor = minor.and_then(|minor| u32::try_from(minor).ok());
        let minor = minor.ok_or_else(|| said.wrong("devices are a list as /dev/nvidia0,/dev/nvidia1"))?;
        let gpu = cards.find(DEVICE, &DeviceSelector::Minor(minor))?;
        if !gpus.iter().any(|other| other.uuid == gpu.uuid) {
            gpus.push(gpu);
        }
    }
    if gpus.is_empty() { Err(said.wrong("no device: name one, as /dev/nvidia0")) } else { Ok(gpus) }
}

fn percent(said: Said) -> Result<u64, RequestError> {
    let percent = quantity::whole(said.value).filter(|percent| *percent > 0);
    percent
        .filter(|percent| *percent < 100 || percent % 100 == 0)
        .ok_or_else(|| said.wrong("compute is 1 to 99 percent of one card, or whole cards: 100 for each"))
}

fn whole_cards(core: Said, percent: u64, device: Said, gpus: &[&Gpu]) -> Result<Claim, RequestError> {
    if u64::try_from(gpus.len()).ok() != Some(percent / 100) {
        return Err(conflict(core, device));
    }
    let by = Said { trust: core.trust.min(device.trust), ..core };
    Ok(Claim { exclusive: true, ..Claim::by(by).naming(gpus) })
}

fn part(
    reading: &Reading,
    core: Said,
    percent: u64,
    device: Said,
    gpus: &[&Gpu],
) -> Result<Claim, RequestError> {
    if gpus.len() > 1 {
        return Err(conflict(core, device));
    }
    let said = needed(reading, MEMORY)?;
    let bytes = quantity::whole(said.value).filter(|bytes| *bytes >= 1 << 20);
    let bytes = bytes.ok_or_else(|| {
        said.wrong("memory is digits: bytes, at least 1 MiB (a pod's 256 MiB blocks times 268435456)")
    })?;
    if bytes % BLOCK != 0 {
        reading.note(format!(
            "{said} is no whole number of 256 MiB blocks, which gpu-manager always writes; it counts as it is"
        ));
    }
    let amount = Amount { memory: Some(DeviceMemory::from_bytes(bytes)), cores: Cap::of(percent) };
    let by = Said { trust: core.trust.min(device.trust).min(said.trust), ..said };
    let claim = Claim::by(by).on(gpus, |_, _| Ok(amount))?;
    Ok(Claim { burst: burst(reading, core, percent)?, ..claim })
}

/// How much of idle time may be used. It raises what the container was granted, so a strict node takes it only of somebody
/// who may grant there.
fn burst(reading: &Reading, core: Said, percent: u64) -> Result<Option<Cores>, RequestError> {
    let Some(said) = reading.annotation(CORE_LIMIT) else { return Ok(None) };
    let most = quantity::whole(said.value).filter(|most| *most >= percent);
    let most = most.ok_or_else(|| {
        said.wrong(format!("the most is a whole number, at least {percent} as {core} says"))
    })?;
    if most == percent {
        return Ok(None);
    }
    let may = said.trust >= core.trust || reading.policy.ceilings.of(said.trust).is_some();
    if reading.policy.strict && !may {
        return Err(RequestError::Raised { key: said.to_string(), trusted: core.to_string() });
    }
    Ok(u8::try_from(most.min(100)).ok().and_then(Cores::new))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::cards::four;
    use crate::{Ceilings, Container, KeyPatterns, MemoryAsk, Policy};

    #[test]
    fn a_claim_is_worth_what_the_least_trusted_of_its_annotations_is() {
        let share = [(CORE, "30"), (MEMORY, "4294967296"), (DEVICE, "/dev/nvidia1")];
        let whole = [(CORE, "100"), (MEMORY, "0"), (DEVICE, "/dev/nvidia1")];
        for (annotations, pods) in
            [(share, CORE), (share, MEMORY), (share, DEVICE), (whole, CORE), (whole, DEVICE)]
        {
            let trusted = [CORE, MEMORY, DEVICE].into_iter().filter(|key| *key != pods).map(str::to_owned);
            let ceilings = Ceilings { pod: "1GiB".parse().ok(), ..Ceilings::default() };
            let trusted_annotations = KeyPatterns::new(trusted.collect());
            let policy = Policy { ceilings, trusted_annotations, ..Policy::default() };
            let annotations = annotations.map(|(key, value)| (key.to_owned(), value.to_owned()));
            let container = Container::new(BTreeMap::from(annotations), Vec::new());
            let told = crate::read(&container, &policy, &four());
            assert!(matches!(told, Err(RequestError::AboveCeiling { .. })), "{pods} by a pod: {told:?}");
        }
    }

    #[test]
    fn a_strict_node_lets_a_pod_raise_its_compute_only_where_pods_may_grant() {
        let annotations = BTreeMap::from([(CORE_LIMIT.to_owned(), "60".to_owned())]);
        let container = Container::new(annotations, Vec::new());
        let core = Said { key: CORE, value: "30", trust: Trust::Granted };
        for (strict, pod, want) in
            [(false, None, Some(60)), (true, None, None), (true, Some(MemoryAsk::Percent(100)), Some(60))]
        {
            let ceilings = Ceilings { pod, ..Ceilings::default() };
            let policy = Policy { strict, ceilings, ..Policy::default() };
            let found = burst(&Reading::new(&container, &policy), core, 30);
            let found = found.map(|cores| cores.map(Cores::percent));
            match want {
                Some(_) => assert_eq!(found, Ok(want), "strict {strict}"),
                None => assert!(matches!(found, Err(RequestError::Raised { .. })), "{found:?}"),
            }
        }
        let trusted_annotations = KeyPatterns::new(vec![CORE_LIMIT.to_owned()]);
        let policy = Policy { strict: true, trusted_annotations, ..Policy::default() };
        let found = burst(&Reading::new(&container, &policy), core, 30);
        assert_eq!(found, Ok(Cores::new(60)), "who may grant compute may grant more of it");
    }
}
