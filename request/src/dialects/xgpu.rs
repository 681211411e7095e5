//! Huawei Cloud's xGPU: `GPU_IDX`, `GPU_CONTAINER_MEM` in MiB and `GPU_CONTAINER_QUOTA_PERCENT`
//! (support.huaweicloud.com, "Installing and using xGPU"). Its device plugin writes the same variables.

use crate::dialect::{Dialect, Speech};
use crate::limit;
use crate::quantity;
use crate::sources::names::{items, selectors};
use gpushare_claims::{Amount, Cap, Claim, IndexMeaning, NodeGpus, RequestError, Word, Words};

pub(super) static DIALECT: Dialect = Dialect {
    name: "xgpu",
    speech: |words| Speech::asking(words.has(MEMORY) || words.has(PERCENT) && words.has(INDEX)),
    read,
    owns: |key| matches!(key, INDEX | MEMORY | PERCENT | "GPU_POLICY" | "GPU_CONTAINER_PRIORITY"),
    ..Dialect::PLAIN
};

const INDEX: &str = "GPU_IDX";
const MEMORY: &str = "GPU_CONTAINER_MEM";
const PERCENT: &str = "GPU_CONTAINER_QUOTA_PERCENT";

fn read<'a>(words: &Words<'a>, node: NodeGpus<'a>) -> Result<Vec<Claim>, RequestError> {
    let Some(first) = words.named(MEMORY).chain(words.named(PERCENT)).next() else { return Ok(Vec::new()) };
    let Some(index) = words.one(INDEX)? else {
        return Err(first.wrong("a limit without a GPU: set GPU_IDX to the index of its GPU, too"));
    };
    let list = selectors(index, items(index.value), IndexMeaning::Pci)?;
    if list.is_empty() {
        return Err(index.wrong("it names no GPU: write its index, as 0"));
    }
    let mut claims = vec![Claim::by(index).naming(&node.find_each(INDEX, &list)?)];
    claims.extend(Claim::each_of(words.named(MEMORY), |word| Ok(Amount::memory(limit::mebibytes(word)?)))?);
    claims.extend(Claim::each_of(words.named(PERCENT), |word| Ok(Amount::cores(cores(word)?)))?);
    Ok(claims)
}

/// Reads a compute limit. 0 is no limit: xGPU then gives time slices by its policy alone.
fn cores(word: Word) -> Result<Cap, RequestError> {
    match quantity::whole(word.value) {
        Some(0) => Ok(Cap::Unlimited),
        Some(percent) => Cap::of(percent).ok_or_else(|| word.wrong("a percentage is from 0 (no cap) to 100")),
        None => Err(word.wrong("a percentage is a whole number from 0 (no cap) to 100")),
    }
}
