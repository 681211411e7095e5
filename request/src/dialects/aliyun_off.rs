//! Alibaba's cGPU turned off: `CGPU_DISABLE` (lvmxh/cgpu README; gpushare-device-plugin writes it on nodes
//! labelled `cgpu.disable.isolation`). If the node honours the switch, the container asks for whole GPUs.
//! Otherwise the switch has no effect, and the rest of the bundle counts.

use crate::dialect::{Dialect, Off, Speech, Switch};
use crate::dialects::cgpu::{self, OFF};
use crate::sources::list::names_gpus;
use crate::sources::names::DEVICES;
use gpushare_claims::{Claim, NodeGpus, RequestError, Word, Words};

/// The dialect owns cGPU's limits too, so that they no longer count.
pub(super) static DIALECT: Dialect = Dialect {
    name: "aliyun-off",
    speech,
    read,
    owns: |key| key == OFF || cgpu::owns(key),
    over: &["aliyun"],
    numbers: cgpu::meaning,
    switches: &[Switch { key: OFF, is_on: |value, _| is_on(value) == Some(true), turns_off: Off::Limits }],
    ..Dialect::PLAIN
};

/// A switch with an unknown value also counts as asking, so that [`read`] refuses it. In a container without
/// a GPU it is ignored, since it may come from the image.
fn speech(words: &Words) -> Speech {
    let is_honoured = words.policy.switches.iter().any(|switch| switch == OFF);
    let speaks = |word: Word| is_on(word.value).is_none_or(|on| on && is_honoured);
    let is_about_gpus =
        || names_gpus(words) || words.variables().any(|word| word.key != DEVICES && cgpu::owns(word.key));
    Speech::asking(words.named(OFF).any(speaks) && is_about_gpus())
}

fn is_on(value: &str) -> Option<bool> {
    match value {
        "true" | "1" => Some(true),
        "false" | "0" | "" => Some(false),
        _ => None,
    }
}

fn read<'a>(words: &Words<'a>, node: NodeGpus<'a>) -> Result<Vec<Claim>, RequestError> {
    let Some(off) = words.one(OFF)? else { return Ok(Vec::new()) };
    if is_on(off.value).is_none() {
        return Err(
            off.wrong("true or 1 turns cGPU off; false, 0 or nothing leaves it on: write one of these")
        );
    }
    let (_, chosen) = cgpu::given(words, node, off)?;
    Ok(chosen.into_iter().chain([Claim::by(off).exclusive()]).collect())
}
