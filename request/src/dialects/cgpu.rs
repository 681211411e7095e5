//! The words of Alibaba's cGPU, which several systems write: which card, how much of it, and that cGPU be off (lvmxh/cgpu
//! README; gpushare-device-plugin pkg/gpu/nvidia/const.go).

use gpushare_inventory::{DeviceMemory, Gpu};

use crate::quantity::{self, Decimal};
use crate::sources::list;
use crate::sources::names::{items, selectors, word as word_of};
use gpushare_claims::{
    Amount, Cap, Claim, DeviceSelector, IndexMeaning, NodeGpus, RequestError, Word, Words, contains, total,
};

pub(crate) const OFF: &str = "CGPU_DISABLE";
pub(crate) const INDEX: &str = "ALIYUN_COM_GPU_MEM_IDX";
/// The cards that are sliced.
pub(crate) const SLICED: &str = "ALIYUN_COM_GPU_VISIBLE_DEVICES";
pub(crate) const PART: &str = "ALIYUN_COM_GPU_MEM_CONTAINER";
pub(crate) const OF: &str = "ALIYUN_COM_GPU_MEM_DEV";
const UNIT: &str = "ALIYUN_COM_GPU_MEM_UNIT";
const PERCENT: &str = "GPU_UTIL_PER_DEVICE";

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

/// What the two units of the device plugin are in bytes.
const UNITS: [u64; 2] = [GIB, MIB];

/// Whether `key` is one of cGPU's own.
pub(crate) fn owns(key: &str) -> bool {
    key.starts_with("ALIYUN_COM_GPU_") || key == PERCENT
}

/// How a number names a GPU: the device plugin, which alone writes the index, writes minors; whoever calls docker means what
/// docker means.
pub(crate) fn meaning(words: &Words) -> IndexMeaning {
    if words.has(INDEX) { words.policy.dialects.aliyun_index } else { IndexMeaning::Pci }
}

/// The GPUs of a list, each once.
pub(crate) fn listed<'a>(
    node: NodeGpus<'a>,
    meaning: IndexMeaning,
    word: Word,
) -> Result<Vec<&'a Gpu>, RequestError> {
    if word_of(word.value) == Some("all") {
        return Ok(node.all());
    }
    let gpus = node.find_each(word.key, &selectors(word, items(word.value), meaning)?)?;
    if gpus.is_empty() {
        Err(word.wrong("names no GPU: write indexes or UUIDs, or remove it"))
    } else {
        Ok(gpus)
    }
}

/// The GPU that the plugin chose; none where the container is not the plugin's. Where it found no pod, the scheduler
/// extender's annotation tells, which is the pod's word.
pub(crate) fn index<'a>(
    words: &Words<'a>,
    node: NodeGpus<'a>,
) -> Result<Option<(Word<'a>, &'a Gpu)>, RequestError> {
    let Some(word) = words.one(INDEX)? else { return Ok(None) };
    if word.value != "-1" {
        // The index of a plugin on a node with one GPU may be none of its own (issue 220): then the list counts.
        return Ok(node.find(INDEX, &number(words, word)?).ok().map(|gpu| (word, gpu)));
    }
    let noted = words.annotation(INDEX).ok_or_else(|| {
        word.wrong(
            "the device plugin found no pod for this allocation: delete the pod and start it anew, and see the scheduler \
             extender's log; for pods of several GPU containers pass the pod annotation ALIYUN_COM_GPU_MEM_IDX to the runtime",
        )
    })?;
    Ok(Some((noted, node.find(INDEX, &number(words, noted)?)?)))
}

fn number(words: &Words, word: Word) -> Result<DeviceSelector, RequestError> {
    let number = quantity::whole(word.value).and_then(|number| u32::try_from(number).ok());
    let number =
        number.ok_or_else(|| word.wrong("the index is digits, or -1 where the plugin found no pod"))?;
    Ok(match meaning(words) {
        IndexMeaning::Pci => DeviceSelector::Index(number),
        IndexMeaning::Minor => DeviceSelector::Minor(number),
    })
}

/// Whether the plugin found no pod, and the extender's annotation tells the GPU in its place.
pub(crate) fn is_noted(words: &Words) -> bool {
    words.named(INDEX).any(|word| word.value == "-1") && words.annotation(INDEX).is_some()
}

/// The GPUs that the container has, by the plugin's choice of one where it wrote its index, else by the list; and a claim for
/// the choice. Whatever else the bundle says, the plugin gives one GPU.
pub(crate) fn given<'a>(
    words: &Words<'a>,
    node: NodeGpus<'a>,
    limit: Word,
) -> Result<(Vec<&'a Gpu>, Option<Claim>), RequestError> {
    let chosen = index(words, node)?;
    if is_noted(words) {
        let chosen = chosen.map(|(word, gpu)| (vec![gpu], Some(Claim::by(word).naming(&[gpu]))));
        return Ok(chosen.unwrap_or_default());
    }
    let listed = match list::named(words, node, meaning(words))? {
        list::Named::Gpus(_, gpus) => gpus,
        list::Named::Nothing | list::Named::NoGpu => Vec::new(),
    };
    // On a node with one GPU the plugin's own index may be another node's (issue 220).
    let chosen = chosen.filter(|_| node.0.len() > 1);
    match (chosen, listed) {
        (None, listed) if listed.is_empty() => Err(RequestError::LimitWithoutGpu { by: limit.to_string() }),
        (None, listed) => Ok((listed, None)),
        (Some((word, gpu)), _) => Ok((vec![gpu], Some(Claim::by(word).naming(&[gpu])))),
    }
}

/// So many parts of a card.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ratio<'a> {
    /// The parts that the container gets, for messages.
    pub by: Word<'a>,
    pub part: u64,
    /// Those that the card has, for messages.
    pub dev: Word<'a>,
    pub of: u64,
    /// What a part is said to be, in bytes.
    pub unit: Option<u64>,
}

impl<'a> Ratio<'a> {
    /// What the variables say, one for each that states the part.
    pub fn read(words: &Words<'a>) -> Result<Vec<Self>, RequestError> {
        let dev = words.one(OF)?;
        let of = dev.map(parts).transpose()?;
        let unit = words.one(UNIT)?.map(unit).transpose()?;
        let stated: Vec<Word> = words.named(PART).collect();
        let ratio = |by: Word<'a>| match (parts(by)?, dev.zip(of)) {
            (part, Some((dev, of))) if part <= of => Ok(Self { by, part, dev, of, unit }),
            (_, Some((dev, _))) => {
                Err(by.wrong(format!("more than the whole card has, {dev}: ask for less")))
            }
            (_, None) => Err(by.wrong(format!("set {OF} to the card's size in the same unit, too"))),
        };
        match (stated.as_slice(), dev) {
            ([], Some(dev)) => Err(
                dev.wrong(format!("without {PART} cGPU would be off: set that to the container's part, too"))
            ),
            (stated, _) => stated.iter().copied().map(ratio).collect(),
        }
    }

    /// The part of a card with this much memory.
    fn of(&self, total: DeviceMemory) -> DeviceMemory {
        let part = Decimal { numerator: self.part, denominator: self.of };
        DeviceMemory::from_bytes(part.of(total.bytes()))
    }
}

/// What a ratio says of the node's GPUs: of those that are `limited` a part, of the others nothing.
pub(crate) fn memory_claim(
    words: &Words,
    node: NodeGpus,
    ratio: Ratio,
    limited: &[&Gpu],
) -> Result<Claim, RequestError> {
    let of = |gpu: &Gpu| match contains(limited, gpu) {
        true => memory(words, node, ratio, gpu).map(|(memory, note)| (Amount::memory(memory), note)),
        false => Ok((Amount::default(), None)),
    };
    let gpus = node.all();
    let notes: Vec<Option<String>> =
        gpus.iter().map(|gpu| Ok(of(gpu)?.1)).collect::<Result<_, RequestError>>()?;
    let claim = Claim::by(ratio.by).on(&gpus, |_, gpu| Ok(of(gpu)?.0))?;
    Ok(Claim { notes: notes.into_iter().flatten().collect(), ..claim })
}

/// The part of the card, as cGPU has it; of a card that the plugin counted by another's size, so many GiB or MiB, which is
/// told.
fn memory(
    words: &Words,
    node: NodeGpus,
    ratio: Ratio,
    gpu: &Gpu,
) -> Result<(DeviceMemory, Option<String>), RequestError> {
    let all = total(gpu)?;
    let set = words.policy.dialects.aliyun_unit;
    let is_size =
        |unit: &u64| (all.bytes() / unit).abs_diff(ratio.of) <= 1 && set.is_none_or(|set| set == *unit);
    if !words.has(INDEX) || UNITS.iter().any(is_size) {
        return Ok((ratio.of(all), None));
    }
    // A pod can write the unit, too: it counts where the first card may have so many.
    let first = total(node.0.first().unwrap_or(gpu))?.bytes();
    let is_near = |unit: &u64| {
        let size = ratio.of.checked_mul(*unit);
        size.is_some_and(|size| (first / 2..=first.saturating_mul(2)).contains(&size))
    };
    let unit = match set.or(ratio.unit.filter(is_near)) {
        Some(unit) => unit,
        None => unit_by(ratio.of, total(node.0.first().unwrap_or(gpu))?).ok_or_else(|| {
            ratio.dev.wrong(
                "no GPU of this node has so many GiB or MiB: have the administrator set dialects.aliyun.unit",
            )
        })?,
    };
    let memory = ratio.part.checked_mul(unit).map(DeviceMemory::from_bytes);
    let memory = memory.ok_or_else(|| ratio.by.wrong("more than any GPU has"))?;
    let note = format!(
        "{} is not the size of GPU {} ({all}): {} counts as {memory}",
        ratio.dev, gpu.index, ratio.by
    );
    Ok((memory, Some(note)))
}

/// The unit by which `count` is the size of the first card, of which the others are given the same. GiB and MiB lie a
/// thousand apart, so between half and double there is no doubt.
fn unit_by(count: u64, first: DeviceMemory) -> Option<u64> {
    let near = |size: u64| (first.bytes() / 2..=first.bytes().saturating_mul(2)).contains(&size);
    UNITS.into_iter().find(|unit| count.checked_mul(*unit).is_some_and(near))
}

fn parts(word: Word) -> Result<u64, RequestError> {
    let parts = quantity::whole(word.value).filter(|parts| *parts > 0);
    parts.ok_or_else(|| word.wrong("a count of GiB or MiB is digits without a unit, and not 0"))
}

/// GB is not taken for GiB: of the two the smaller one never gives too much.
fn unit(word: Word) -> Result<u64, RequestError> {
    match word.value {
        "GiB" => Ok(GIB),
        "MiB" => Ok(MIB),
        "GB" => Ok(1_000_000_000),
        "MB" => Ok(1_000_000),
        _ => Err(word.wrong("known units are GiB, MiB, GB and MB")),
    }
}

/// What the variables say of the share of compute on each GPU.
pub(crate) fn caps(words: &Words) -> Result<Vec<Claim>, RequestError> {
    Claim::each_of(words.named(PERCENT), |word| {
        let cap = quantity::whole(word.value).and_then(Cap::of).ok_or_else(|| {
            word.wrong("a percentage is a whole number from 1 to 100; to state none, remove it")
        })?;
        Ok(Amount::cores(cap))
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::{Container, DialectSettings, Policy};
    use gpushare_claims::four;

    #[test]
    fn a_part_of_a_card_that_the_plugin_counted_by_the_first_is_so_many_units() {
        const GB: u64 = 1_000_000_000;
        let unit = |unit| Policy {
            dialects: DialectSettings { aliyun_unit: unit, ..DialectSettings::default() },
            ..Policy::default()
        };
        for (first, set, stated, part, of, want) in [
            (15360, None, "", "3", "17", Some(3 << 30)),
            (15360, Some(1 << 20), "", "3", "15", Some(3 << 20)), // where the administrator says MiB, 15 is no card's size
            (15360, Some(1 << 20), "GiB", "4", "20", Some(4 << 20)), // whom a pod's unit does not outvote
            (81920, None, "GB", "4", "80", Some(4 * GB)),
            (15360, None, "GB", "4", "20", Some(4 * GB)),
            (15360, None, "MB", "4000", "20000", Some(4 * GB)),
            (15360, None, "GiB", "4000", "15109", Some(4000 << 20)), // a card of so many GiB there is not
            (15360, None, "GB", "4", "5", None),
            (15360, None, "GB", "4", "50", None),
        ] {
            let mut gpus = four();
            gpus[0].memory = Some(DeviceMemory::from_bytes(first << 20));
            let mut env = vec![format!("{INDEX}=0"), format!("{PART}={part}"), format!("{OF}={of}")];
            env.extend((!stated.is_empty()).then(|| format!("ALIYUN_COM_GPU_MEM_UNIT={stated}")));
            let (container, policy) = (Container::new(BTreeMap::new(), env), unit(set));
            let words = Words::new(&container, &policy);
            let ratio = Ratio::read(&words).unwrap()[0];
            let found = memory(&words, NodeGpus(&gpus), ratio, &gpus[1]);
            assert_eq!(
                found.ok().map(|(memory, _)| memory.bytes()),
                want,
                "{part} of {of} {stated:?}, {set:?}"
            );
        }
    }
}
