//! NVIDIA's MPS as its device plugin, its DRA driver, GKE's plugin, Amazon ECS or a user sets it:
//! `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT` by position in the device list or by UUID, and
//! `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`.
//!
//! MPS counts the pinned limit per process, so a container can exceed it by forking (k8s-device-plugin issues
//! 594 and 720). Here it is the container's limit. A bundle does not show the limits set in the MPS daemon
//! (k8s-device-plugin cmd/mps-control-daemon/mps/daemon.go), so a pipe directory alone states no amount.

use crate::dialect::{Dialect, Speech};
use crate::dialects::mps::{PERCENTAGE, PINNED, PIPE, mode, percentages, pinned};
use crate::sources::handed::is_handed;
use crate::sources::list;
use gpushare_claims::{Claim, IndexMeaning, NodeGpus, RequestError, Words};

pub(super) static DIALECT: Dialect = Dialect {
    name: "nvidia-mps",
    speech,
    read,
    owns: |key| matches!(key, PINNED | PERCENTAGE | PIPE),
    by_position: true,
    is_mps: |_| true,
    ..Dialect::PLAIN
};

/// A pipe directory is only a client's address. It is a request only if the bundle names GPUs.
fn speech(words: &Words) -> Speech {
    let names = || list::asks(words) || is_handed(words);
    Speech::asking(words.has(PINNED) || words.has(PIPE) && names())
}

fn read<'a>(words: &Words<'a>, node: NodeGpus<'a>) -> Result<Vec<Claim>, RequestError> {
    let Some(limit) = words.named(PINNED).chain(words.named(PIPE)).next() else { return Ok(Vec::new()) };
    let Some((list, gpus)) = list::named(words, node, IndexMeaning::Pci)? else {
        return Err(limit.wrong("a limit without a GPU: name GPUs in NVIDIA_VISIBLE_DEVICES"));
    };
    let mut claims = vec![Claim::by(limit).noting(mode(words))];
    claims.extend(pinned(words, node, &gpus)?);
    list::refuse_order(&claims, (list, limit), &gpus)?;
    claims.extend(percentages(words)?);
    Ok(claims)
}
