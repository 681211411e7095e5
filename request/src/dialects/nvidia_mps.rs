//! NVIDIA's MPS as its device plugin, its DRA driver, Amazon ECS or a user sets it: `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT` by
//! position in the device list or UUID, and `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`.
//!
//! MPS counts the pinned limit per process, so that a container exceeds it by forking (k8s-device-plugin issues 594 and
//! 720); here it is the container's. Limits that stand in the daemon (k8s-device-plugin cmd/mps-control-daemon/mps/daemon.go)
//! cannot be read from a bundle: a pipe directory alone states nothing.

use super::Dialect;
use crate::cards::{Cards, IndexMeaning};
use crate::claim::{Amount, Claim};
use crate::device_list::{self, Named, named};
use crate::error::RequestError;
use crate::mps::{PERCENTAGE, PINNED, PIPE, percentage, pinned};
use crate::reading::Reading;

pub(super) static DIALECT: Dialect = Dialect { name: "nvidia-mps", detects, read, owns, by_position: true };

/// A pipe directory is a client's address, and a request only where GPUs are.
fn detects(reading: &Reading) -> bool {
    reading.has(PINNED) || reading.has(PIPE) && device_list::carrier(reading).is_some()
}

fn owns(key: &str) -> bool {
    matches!(key, PINNED | PERCENTAGE | PIPE)
}

/// Says that a container with MPS's words gets a share of gpushare's.
pub(super) fn note_mode(reading: &Reading) {
    if let Some(pipe) = reading.named(PIPE).next() {
        reading
            .note(format!("{pipe}: the share's limits are gpushare's, those of MPS's daemon are not read"));
    }
}

fn read<'a>(reading: &Reading<'a>, cards: Cards<'a>) -> Result<Vec<Claim>, RequestError> {
    let limit = reading.named(PINNED).chain(reading.named(PIPE)).next();
    let Some(limit) = limit else { return Ok(Vec::new()) };
    note_mode(reading);
    let Named::Gpus(_, gpus) = named(reading, cards, IndexMeaning::Pci)? else {
        return Err(limit.wrong("a limit without a GPU: name GPUs in NVIDIA_VISIBLE_DEVICES"));
    };
    let cores = reading.least(PERCENTAGE, percentage)?.map(|(_, cap)| cap);
    let pinned = pinned(reading, cards, &gpus)?;
    let claim = Claim::by(limit).on(&gpus, |position, _| {
        Ok(Amount { memory: pinned.as_ref().map(|limits| limits[position]), cores })
    })?;
    Ok(vec![claim])
}
