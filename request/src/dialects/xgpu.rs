//! Huawei Cloud's xGPU: `GPU_IDX`, `GPU_CONTAINER_MEM` in MiB and `GPU_CONTAINER_QUOTA_PERCENT`
//! (support.huaweicloud.com, "Installing and using xGPU"). Its device plugin writes the same variables.

use crate::dialect::{Dialect, Speech};
use crate::limit;
use crate::sources::names::gpus;
use gpushare_claims::{Amount, Claim, IndexMeaning, NodeGpus, RequestError, Words};

pub(super) static DIALECT: Dialect = Dialect {
    name: "xgpu",
    speech: |words| Speech::asking(words.has(MEMORY) || words.has(PERCENT) && words.has(INDEX)),
    read,
    owns: |key| matches!(key, INDEX | MEMORY | PERCENT | "GPU_POLICY" | "GPU_CONTAINER_PRIORITY"),
    ..Dialect::PLAIN
};

const INDEX: &str = "GPU_IDX";
const MEMORY: &str = "GPU_CONTAINER_MEM";
/// 0 means no limit: xGPU then schedules time slices by its policy alone.
const PERCENT: &str = "GPU_CONTAINER_QUOTA_PERCENT";

fn read<'a>(words: &Words<'a>, node: NodeGpus<'a>) -> Result<Vec<Claim>, RequestError> {
    let Some(first) = words.named(MEMORY).chain(words.named(PERCENT)).next() else { return Ok(Vec::new()) };
    let Some(index) = words.one(INDEX)? else {
        return Err(first.wrong("a limit without a GPU: set GPU_IDX to the index of its GPU, too"));
    };
    let gpus = gpus(index, node, IndexMeaning::Pci)?;
    if gpus.is_empty() {
        return Err(index.wrong("it names no GPU: write its index, as 0"));
    }
    let mut claims = vec![Claim::by(index).naming(&gpus)];
    claims.extend(Claim::each_of(words.named(MEMORY), |word| Ok(Amount::memory(limit::mebibytes(word)?)))?);
    claims
        .extend(Claim::each_of(words.named(PERCENT), |word| Ok(Amount::cores(limit::cores_or_all(word)?)))?);
    Ok(claims)
}
