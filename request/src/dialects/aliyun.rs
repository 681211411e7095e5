//! Alibaba's gpushare and ACK device plugins, and cGPU under docker: `ALIYUN_COM_GPU_MEM_CONTAINER` of
//! `ALIYUN_COM_GPU_MEM_DEV` parts of a GPU (gpushare-device-plugin pkg/gpu/nvidia/allocate.go; lvmxh/cgpu
//! README).
//!
//! The plugin counts every GPU of a node by the size of the first. If this GPU has another size, a part is a
//! GiB or a MiB. The scheduler extender records an index on the pod. It is read only if the plugin found no
//! pod, as with pods of several GPU containers; otherwise it can be wrong (gpushare-scheduler-extender issue
//! 220).

use gpushare_inventory::Gpu;

use crate::dialect::{Dialect, Speech};
use crate::dialects::cgpu::{self, INDEX, OF, PART, Ratio, SLICED};
use crate::quantity;
use crate::sources::list;
use crate::sources::names::DEVICES;
use gpushare_claims::{Claim, NodeGpus, Priority, RequestError, Word, Words, conflict, contains};

/// If the plugin found no pod, the list of GPUs holds a sentinel text; see
/// [`crate::sources::names::is_sentinel`].
pub(super) static DIALECT: Dialect =
    Dialect { name: "aliyun", speech, read, owns: cgpu::owns, numbers: cgpu::meaning, ..Dialect::PLAIN };

const WEIGHT: &str = "ALIYUN_COM_GPU_SCHD_WEIGHT";
const HIGH: &str = "ALIYUN_COM_GPU_HIGH_PRIO";

fn speech(words: &Words) -> Speech {
    let has = [PART, OF, SLICED].iter().any(|key| words.has(key));
    Speech::asking(has || words.named(INDEX).any(|word| word.value == "-1"))
}

fn read<'a>(words: &Words<'a>, node: NodeGpus<'a>) -> Result<Vec<Claim>, RequestError> {
    let sliced = words.one(SLICED)?;
    let ratios = Ratio::read(words)?;
    let Some(first) = ratios.first().copied() else {
        cgpu::index(words, node)?;
        let off = format!("without {PART} and {OF} cGPU would be off: set them, too");
        return sliced.map_or(Ok(Vec::new()), |word| Err(word.wrong(off)));
    };
    let (gpus, chosen) = given(words, node, first.by, sliced)?;
    let limited = sliced_of(words, node, sliced, &gpus, chosen.is_some())?;
    let mut claims: Vec<Claim> = chosen.into_iter().collect();
    for ratio in ratios {
        claims.push(cgpu::memory_claim(words, node, ratio, &limited)?);
    }
    claims.extend(cgpu::caps(words)?);
    claims.extend(priorities(words)?);
    Ok(claims)
}

/// The container's GPUs, and a claim that names them. Without a list of GPUs, the container gets the sliced
/// GPUs.
fn given<'a>(
    words: &Words<'a>,
    node: NodeGpus<'a>,
    limit: Word,
    sliced: Option<Word<'a>>,
) -> Result<(Vec<&'a Gpu>, Option<Claim>), RequestError> {
    let meaning = cgpu::meaning(words);
    let is_listed = cgpu::is_noted(words)
        || list::named(words, node, meaning)?.is_some()
        || list::denial(words).is_some();
    let Some(word) = sliced.filter(|_| !is_listed) else { return cgpu::given(words, node, limit) };
    let gpus = cgpu::listed(node, meaning, word)?;
    let index = cgpu::index(words, node)?.filter(|(_, gpu)| gpus.len() > 1 && contains(&gpus, gpu));
    let (word, gpus) = index.map_or((word, gpus), |(word, gpu)| (word, vec![gpu]));
    let claim = Claim::by(word).naming(&gpus);
    Ok((gpus, Some(claim)))
}

/// The GPUs of which the container gets a part. It gets the others whole.
fn sliced_of<'a>(
    words: &Words<'a>,
    node: NodeGpus<'a>,
    sliced: Option<Word<'a>>,
    gpus: &[&'a Gpu],
    is_chosen: bool,
) -> Result<Vec<&'a Gpu>, RequestError> {
    let Some(word) = sliced else { return Ok(node.unnamed()) };
    let cut = cgpu::listed(node, cgpu::meaning(words), word)?;
    let outside = cut.iter().any(|gpu| !contains(gpus, gpu));
    let all_of_one = is_chosen && cut.iter().any(|gpu| contains(gpus, gpu));
    if outside && !all_of_one {
        let list = list::lists(words).first().map_or_else(|| DEVICES.to_owned(), |list| list.to_string());
        return Err(conflict(list, word));
    }
    Ok(cut.into_iter().filter(|gpu| contains(gpus, gpu)).collect())
}

/// Turns cGPU's weight (1 to 25) into a priority. A scheduler that computes the weight from a percentage
/// writes 0 for the smallest. The variable for high priority takes precedence over the weight.
fn priorities(words: &Words) -> Result<Vec<Claim>, RequestError> {
    let mut claims = Vec::new();
    for word in words.named(HIGH) {
        match word.value {
            "0" => {}
            "1" => claims.push(Claim { priority: Some(Priority::HIGHEST), ..Claim::by(word) }),
            _ => return Err(word.wrong("high priority is 1, else 0")),
        }
    }
    let is_high = !claims.is_empty();
    for word in words.named(WEIGHT) {
        let weight = quantity::whole::<u8>(word.value).filter(|weight| *weight <= 25);
        let weight = weight.ok_or_else(|| word.wrong("a weight is a whole number from 1 to 25"))?;
        let priority = Some(Priority::at_most(weight));
        claims.extend((!is_high).then(|| Claim { priority, ..Claim::by(word) }));
    }
    Ok(claims)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use gpushare_claims::{Container, Policy};

    #[test]
    fn weight_and_high_priority_become_a_priority() {
        for (env, want) in [
            (&[][..], None),
            (&["ALIYUN_COM_GPU_SCHD_WEIGHT=0"], Some(0)),
            (&["ALIYUN_COM_GPU_SCHD_WEIGHT=3"], Some(3)),
            (&["ALIYUN_COM_GPU_SCHD_WEIGHT=25"], Some(9)),
            (&["ALIYUN_COM_GPU_SCHD_WEIGHT=3", "ALIYUN_COM_GPU_HIGH_PRIO=1"], Some(9)),
            (&["ALIYUN_COM_GPU_SCHD_WEIGHT=3", "ALIYUN_COM_GPU_HIGH_PRIO=0"], Some(3)),
        ] {
            let container =
                Container::new(BTreeMap::new(), env.iter().map(|&entry| entry.to_owned()).collect());
            let policy = Policy::default();
            let found = priorities(&Words::new(&container, &policy)).unwrap();
            let found = found.iter().find_map(|claim| claim.priority);
            assert_eq!(found.map(Priority::level), want, "{env:?}");
        }
    }
}
