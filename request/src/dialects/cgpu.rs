//! The words of Alibaba's cGPU, which several systems write: which GPU, how much of it, and that cGPU is off
//! (lvmxh/cgpu README; gpushare-device-plugin pkg/gpu/nvidia/const.go).

use gpushare_inventory::{DeviceMemory, Gpu};

use crate::quantity::{self, Decimal};
use crate::sources::list;
use crate::sources::names::{gpus, word as word_of};
use gpushare_claims::{
    Amount, Cap, Claim, DeviceSelector, IndexMeaning, NodeGpus, RequestError, Word, Words, contains, total,
};

pub(crate) const OFF: &str = "CGPU_DISABLE";
pub(crate) const INDEX: &str = "ALIYUN_COM_GPU_MEM_IDX";
/// The GPUs of which the container gets a part.
pub(crate) const SLICED: &str = "ALIYUN_COM_GPU_VISIBLE_DEVICES";
pub(crate) const PART: &str = "ALIYUN_COM_GPU_MEM_CONTAINER";
pub(crate) const OF: &str = "ALIYUN_COM_GPU_MEM_DEV";
const UNIT: &str = "ALIYUN_COM_GPU_MEM_UNIT";
const PERCENT: &str = "GPU_UTIL_PER_DEVICE";

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

/// The two units of the device plugin, in bytes.
const UNITS: [u64; 2] = [GIB, MIB];

/// Whether `key` belongs to cGPU.
pub(crate) fn owns(key: &str) -> bool {
    key.starts_with("ALIYUN_COM_GPU_") || key == PERCENT
}

/// The meaning of a number in the list of GPUs. Only the device plugin writes the index variable, and it
/// counts by minors. A docker caller uses indexes, as docker does.
pub(crate) fn meaning(words: &Words) -> IndexMeaning {
    if words.has(INDEX) { words.policy.dialects.aliyun_index } else { IndexMeaning::Pci }
}

/// The GPUs of a list, without duplicates. A list without a GPU is an error.
pub(crate) fn listed<'a>(
    node: NodeGpus<'a>,
    meaning: IndexMeaning,
    word: Word,
) -> Result<Vec<&'a Gpu>, RequestError> {
    if word_of(word.value) == Some("all") {
        return Ok(node.unnamed());
    }
    let gpus = gpus(word, node, meaning)?;
    match gpus.is_empty() {
        true => Err(word.wrong("names no GPU: write indexes or UUIDs, or remove it")),
        false => Ok(gpus),
    }
}

/// The GPU that the plugin chose; `None` in a container that is not the plugin's. If the plugin found no pod
/// (index -1), the scheduler extender's annotation names the GPU, with the rank of a pod's word.
pub(crate) fn index<'a>(
    words: &Words<'a>,
    node: NodeGpus<'a>,
) -> Result<Option<(Word<'a>, &'a Gpu)>, RequestError> {
    let Some(word) = words.one(INDEX)? else { return Ok(None) };
    if word.value != "-1" {
        // On a node with one GPU the plugin's index may not exist on this node (issue 220). Then the list
        // counts.
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
    let number = quantity::whole(word.value);
    let number =
        number.ok_or_else(|| word.wrong("the index is digits, or -1 where the plugin found no pod"))?;
    Ok(match meaning(words) {
        IndexMeaning::Pci => DeviceSelector::Index(number),
        IndexMeaning::Minor => DeviceSelector::Minor(number),
    })
}

/// Whether the plugin found no pod and the extender's annotation names the GPU instead.
pub(crate) fn is_noted(words: &Words) -> bool {
    words.named(INDEX).any(|word| word.value == "-1") && words.annotation(INDEX).is_some()
}

/// The GPUs of the container, and a claim for the plugin's choice. If the plugin wrote its index, the
/// container gets that one GPU, no matter what else the bundle says; otherwise it gets those of the list.
pub(crate) fn given<'a>(
    words: &Words<'a>,
    node: NodeGpus<'a>,
    limit: Word,
) -> Result<(Vec<&'a Gpu>, Option<Claim>), RequestError> {
    let of_plugin = |(word, gpu)| (vec![gpu], Some(Claim::by(word).naming(&[gpu])));
    let chosen = index(words, node)?;
    if is_noted(words) {
        return Ok(chosen.map(of_plugin).unwrap_or_default());
    }
    let listed = list::named(words, node, meaning(words))?;
    // On a node with one GPU the plugin's index may belong to another node (issue 220).
    match (chosen.filter(|_| node.0.len() > 1), listed) {
        (Some(chosen), _) => Ok(of_plugin(chosen)),
        (None, Some((_, gpus))) => Ok((gpus, None)),
        (None, None) => Err(RequestError::LimitWithoutGpu { by: limit.to_string() }),
    }
}

/// A number of parts of a GPU, in the plugin's unit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ratio<'a> {
    /// The word for `part`, for messages.
    pub by: Word<'a>,
    pub part: u64,
    /// The word for `of`, for messages.
    pub dev: Word<'a>,
    pub of: u64,
    /// The size of a part in bytes, if the bundle states it.
    pub unit: Option<u64>,
}

impl<'a> Ratio<'a> {
    /// Reads the variables: one ratio for each word that states the container's part.
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

    /// The container's part of a GPU with this much memory.
    fn of(&self, total: DeviceMemory) -> DeviceMemory {
        Decimal { numerator: self.part, denominator: self.of }.of_memory(total)
    }
}

/// The claim of a ratio: the part on each GPU in `limited`, and no amount on the others.
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
    let amounts = gpus.iter().map(|gpu| of(gpu)).collect::<Result<Vec<_>, RequestError>>()?;
    let claim = Claim::by(ratio.by).on(&gpus, |place, _| Ok(amounts[place].0))?;
    Ok(claim.noting(amounts.into_iter().filter_map(|(_, note)| note)))
}

/// The container's memory on one GPU: its part of the GPU, as cGPU computes it. If the plugin counted the GPU
/// by another one's size, it is a number of GiB or MiB, and a note says so.
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
    // The plugin gives all GPUs the size of the first. GiB and MiB differ by a factor of about a thousand, so
    // only one of them yields between half and double the size. A pod can write the unit too, so a stated
    // unit counts only if it yields about this size.
    let first = total(node.unnamed().first().unwrap_or(&gpu))?.bytes();
    let is_near = |unit: &u64| {
        let size = ratio.of.checked_mul(*unit);
        size.is_some_and(|size| (first / 2..=first.saturating_mul(2)).contains(&size))
    };
    let unit = set.or(ratio.unit.filter(is_near)).or(UNITS.into_iter().find(is_near)).ok_or_else(|| {
        let remedy =
            "no GPU of this node has so many GiB or MiB: have the administrator set dialects.aliyun.unit";
        ratio.dev.wrong(remedy)
    })?;
    let memory = ratio.part.checked_mul(unit).map(DeviceMemory::from_bytes);
    let memory = memory.ok_or_else(|| ratio.by.wrong("more than any GPU has"))?;
    let note = format!(
        "{} is not the size of GPU {} ({all}): {} counts as {memory}",
        ratio.dev, gpu.index, ratio.by
    );
    Ok((memory, Some(note)))
}

fn parts(word: Word) -> Result<u64, RequestError> {
    let parts = quantity::whole::<u64>(word.value).filter(|parts| *parts > 0);
    parts.ok_or_else(|| word.wrong("a count of GiB or MiB is digits without a unit, and not 0"))
}

/// Reads a unit, in bytes. GB is 10^9, not GiB, so that a container never gets more than intended.
fn unit(word: Word) -> Result<u64, RequestError> {
    match word.value {
        "GiB" => Ok(GIB),
        "MiB" => Ok(MIB),
        "GB" => Ok(1_000_000_000),
        "MB" => Ok(1_000_000),
        _ => Err(word.wrong("known units are GiB, MiB, GB and MB")),
    }
}

/// The claims for the share of compute on each GPU.
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
            (15360, Some(1 << 20), "", "3", "15", Some(3 << 20)), // 15 MiB is no GPU's size
            (15360, Some(1 << 20), "GiB", "4", "20", Some(4 << 20)), // the setting takes precedence over a pod's unit
            (81920, None, "GB", "4", "80", Some(4 * GB)),
            (15360, None, "GB", "4", "20", Some(4 * GB)),
            (15360, None, "MB", "4000", "20000", Some(4 * GB)),
            (15360, None, "GiB", "4000", "15109", Some(4000 << 20)), // no GPU has 15109 GiB
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
