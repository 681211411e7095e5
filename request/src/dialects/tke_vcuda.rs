//! Tencent's gpu-manager: annotations `tencent.com/vcuda-{core,memory,device}`, which its device plugin
//! writes (tkestack/gpu-manager pkg/services/allocator/nvidia/allocator.go,
//! pkg/services/virtual-manager/manager.go).
//!
//! A mount of `/etc/vcuda` without the annotations means that they did not reach the bundle; such a container
//! is refused.

use gpushare_inventory::{DeviceMemory, Gpu};

use crate::dialect::{Dialect, Speech};
use crate::quantity;
use crate::sources::list::denial;
use crate::sources::names::items;
use gpushare_claims::{
    Amount, Cap, Claim, Cores, DeviceSelector, Library, NodeGpus, RequestError, Word, Words, conflict,
    each_once,
};

/// The mounted folder does not show the library, so nothing proves its owner.
pub(super) static DIALECT: Dialect = Dialect {
    name: "tke-vcuda",
    speech,
    read,
    owns: |key| matches!(key, CORE | MEMORY | DEVICE | CORE_LIMIT),
    library: Some(Library {
        folders: &["/etc/vcuda", "/usr/local/nvidia"],
        files: &["libcuda-control.so"],
        owner: None,
    }),
    ..Dialect::PLAIN
};

/// Percent of one GPU; 100 and its multiples are whole GPUs.
const CORE: &str = "tencent.com/vcuda-core";
/// Memory in bytes.
const MEMORY: &str = "tencent.com/vcuda-memory";
/// A list of device nodes, such as `/dev/nvidia0,/dev/nvidia1`.
const DEVICE: &str = "tencent.com/vcuda-device";
/// The most compute in percent, idle time included. This annotation is on pods; the other three are only on
/// containers.
const CORE_LIMIT: &str = "tencent.com/vcuda-core-limit";
const MOUNT: &str = "/etc/vcuda";
/// The unit of memory in a pod's specification, in bytes.
const BLOCK: u64 = 256 << 20;

fn speech(words: &Words) -> Speech {
    let is_annotated = words.annotations().any(|word| matches!(word.key, CORE | MEMORY | DEVICE));
    Speech::asking(is_annotated || mount(words).is_some())
}

fn mount<'a>(words: &Words<'a>) -> Option<Word<'a>> {
    let mount = words.container.mounts().iter().find(|mount| mount.target == MOUNT)?;
    Some(Word { is_variable: false, ..Word::variable("mount /etc/vcuda", &mount.source) })
}

fn read<'a>(words: &Words<'a>, node: NodeGpus<'a>) -> Result<Vec<Claim>, RequestError> {
    let device = needed(words, DEVICE)?;
    let core = needed(words, CORE)?;
    if let Some(denial) = denial(words) {
        return Err(conflict(device, denial));
    }
    let gpus = gpus(node, device)?;
    let claim = match percent(core)? {
        whole if whole >= 100 => whole_gpus(core, whole, device, &gpus)?,
        share => part(words, core, share, device, &gpus)?,
    };
    Ok(vec![claim])
}

/// The annotation with this name. Without it the others are not a complete request, so its absence is an
/// error.
fn needed<'a>(words: &Words<'a>, key: &str) -> Result<Word<'a>, RequestError> {
    let known = [DEVICE, CORE, MEMORY].into_iter().find_map(|key| words.annotation(key));
    let Some(known) = known.or_else(|| mount(words)) else {
        return Err(RequestError::LimitWithoutGpu { by: key.to_owned() });
    };
    words.annotation(key).ok_or_else(|| {
        known.wrong(format!(
            "gpu-manager's {key} did not reach the bundle: pass tencent.com/vcuda-* to the runtime (containerd: \
             container_annotations of the handler)"
        ))
    })
}

fn gpus<'a>(node: NodeGpus<'a>, word: Word) -> Result<Vec<&'a Gpu>, RequestError> {
    let gpu = |item: &str| {
        let minor = item.strip_prefix("/dev/nvidia").and_then(quantity::whole);
        let minor = minor.ok_or_else(|| word.wrong("devices are a list as /dev/nvidia0,/dev/nvidia1"))?;
        node.find(DEVICE, &DeviceSelector::Minor(minor))
    };
    let gpus = each_once(items(word.value).map(gpu))?;
    if gpus.is_empty() { Err(word.wrong("no device: name one, as /dev/nvidia0")) } else { Ok(gpus) }
}

fn percent(word: Word) -> Result<u64, RequestError> {
    let percent = quantity::whole::<u64>(word.value).filter(|percent| *percent > 0);
    percent
        .filter(|percent| *percent < 100 || percent % 100 == 0)
        .ok_or_else(|| word.wrong("compute is 1 to 99 percent of one card, or whole cards: 100 for each"))
}

fn whole_gpus(core: Word, percent: u64, device: Word, gpus: &[&Gpu]) -> Result<Claim, RequestError> {
    if u64::try_from(gpus.len()).ok() != Some(percent / 100) {
        return Err(conflict(core, device));
    }
    let by = Word { rank: core.rank.min(device.rank), ..core };
    Ok(Claim::by(by).naming(gpus).exclusive())
}

fn part(words: &Words, core: Word, percent: u64, device: Word, gpus: &[&Gpu]) -> Result<Claim, RequestError> {
    if gpus.len() > 1 {
        return Err(conflict(core, device));
    }
    let word = needed(words, MEMORY)?;
    let bytes = quantity::whole::<u64>(word.value).filter(|bytes| *bytes >= 1 << 20);
    let bytes = bytes.ok_or_else(|| {
        word.wrong("memory is digits: bytes, at least 1 MiB (a pod's 256 MiB blocks times 268435456)")
    })?;
    let note = (bytes % BLOCK != 0).then(|| {
        format!(
            "{word} is no whole number of 256 MiB blocks, which gpu-manager always writes; it counts as it is"
        )
    });
    let amount = Amount { cores: Cap::of(percent), ..Amount::memory(DeviceMemory::from_bytes(bytes)) };
    let by = Word { rank: core.rank.min(device.rank).min(word.rank), ..word };
    let claim = Claim::by(by).naming(gpus).on_each(gpus.iter().copied(), amount).noting(note);
    Ok(Claim { burst: burst(words, core, percent)?, ..claim })
}

/// The most compute that may be used in idle time. It raises what the container was granted, so a strict node
/// accepts it only from a word that may grant there.
fn burst(words: &Words, core: Word, percent: u64) -> Result<Option<Cores>, RequestError> {
    let Some(word) = words.annotation(CORE_LIMIT) else { return Ok(None) };
    let most = quantity::whole::<u64>(word.value).filter(|most| *most >= percent);
    let most = most.ok_or_else(|| {
        word.wrong(format!("the most is a whole number, at least {percent} as {core} says"))
    })?;
    if most == percent {
        return Ok(None);
    }
    let may = word.rank >= core.rank || words.policy.authority(word.rank).is_some();
    if !may {
        return Err(RequestError::Raised { key: word.to_string(), trusted: core.to_string() });
    }
    Ok(u8::try_from(most.min(100)).ok().and_then(Cores::new))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::{Ceilings, Container, KeyPatterns, MemoryRequest, Policy};
    use gpushare_claims::{Rank, four};

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
            let told = crate::read::read(&container, &policy, &four());
            assert!(matches!(told, Err(RequestError::AboveCeiling { .. })), "{pods} by a pod: {told:?}");
        }
    }

    #[test]
    fn a_strict_node_lets_a_pod_raise_its_compute_only_where_pods_may_grant() {
        let annotations = BTreeMap::from([(CORE_LIMIT.to_owned(), "60".to_owned())]);
        let container = Container::new(annotations, Vec::new());
        let core = Word { key: CORE, value: "30", rank: Rank::Granted, is_variable: false };
        for (strict, pod, want) in
            [(false, None, Some(60)), (true, None, None), (true, Some(MemoryRequest::Percent(100)), Some(60))]
        {
            let ceilings = Ceilings { pod, ..Ceilings::default() };
            let policy = Policy { strict, ceilings, ..Policy::default() };
            let found = burst(&Words::new(&container, &policy), core, 30);
            let found = found.map(|cores| cores.map(Cores::percent));
            match want {
                Some(_) => assert_eq!(found, Ok(want), "strict {strict}"),
                None => assert!(matches!(found, Err(RequestError::Raised { .. })), "{found:?}"),
            }
        }
        let trusted_annotations = KeyPatterns::new(vec![CORE_LIMIT.to_owned()]);
        let policy = Policy { strict: true, trusted_annotations, ..Policy::default() };
        let found = burst(&Words::new(&container, &policy), core, 30);
        assert_eq!(found, Ok(Cores::new(60)), "who may grant compute may grant more of it");
    }
}
