//! What the scheduler noted on the pod: `UUID,TYPE,MEMORY,PERCENT:` for each GPU, `;` after each container (HAMi
//! pkg/device/devices.go; Volcano pkg/scheduler/api/devices/nvidia/vgpu).
//!
//! The entries are in the order of the pod's containers, and a bundle does not tell its container's place: one entry is
//! this container's where it alone has the GPUs that the container is given. `hami.io/vgpu-devices-to-allocate` is not
//! read: what is allocated is taken out of it before a container starts.

use gpushare_inventory::{DeviceMemory, Gpu, GpuUuid};

use crate::claim::{Amount, Cap, Claim};
use crate::error::RequestError;
use crate::quantity;
use crate::reading::{Reading, Said};

/// In MiB.
const HAMI: &str = "hami.io/vgpu-devices-allocated";
/// Its memory is in units of a factor that only the scheduler's settings tell.
const VOLCANO: &str = "volcano.sh/vgpu-ids-new";

/// What the annotations say of this container, if they do.
pub(super) fn claims(reading: &Reading, gpus: &[&Gpu]) -> Result<Vec<Claim>, RequestError> {
    let mut claims = Vec::new();
    for said in reading.annotations().filter(|said| matches!(said.key, HAMI | VOLCANO)) {
        let ours: Vec<&str> = said.value.split(';').filter(|entry| is_of(entry, gpus)).collect();
        match ours[..] {
            [entry] => claims.push(claim(said, entry, gpus)?),
            [] => reading
                .note(format!("{} has no entry with the GPUs of this container: it is not read", said.key)),
            _ => {} // containers that share their GPUs
        }
    }
    Ok(claims)
}

/// The parts of an entry, one for each GPU.
fn parts(entry: &str) -> impl Iterator<Item = &str> {
    entry.split(':').filter(|part| !part.is_empty())
}

/// Whether the entry has these GPUs and no other.
fn is_of(entry: &str, gpus: &[&Gpu]) -> bool {
    let uuid = |part: &str| part.split(',').next().and_then(|uuid| uuid.parse().ok());
    let listed: Vec<Option<GpuUuid>> = parts(entry).map(uuid).collect();
    listed.len() == gpus.len() && gpus.iter().all(|gpu| listed.contains(&Some(gpu.uuid)))
}

fn claim(said: Said, entry: &str, gpus: &[&Gpu]) -> Result<Claim, RequestError> {
    Claim::by(said).on(gpus, |_, gpu| {
        let is_its = |part: &&str| part.split(',').next().is_some_and(|uuid| uuid.parse().ok() == Some(gpu.uuid));
        let amount = parts(entry).find(is_its).and_then(|part| amount(said.key, part));
        amount.ok_or_else(|| {
            said.wrong("an entry is UUID,TYPE,MEMORY,PERCENT with memory above 0 and 0 to 100 percent: delete the pod")
        })
    })
}

fn amount(key: &str, part: &str) -> Option<Amount> {
    let [_, _, memory, percent] = part.split(',').collect::<Vec<_>>()[..] else { return None };
    let memory = quantity::whole(memory).filter(|memory| *memory > 0)?.checked_mul(1 << 20)?;
    let cores = match quantity::whole(percent)? {
        0 => Cap::Unlimited,
        percent => Cap::of(percent)?,
    };
    let memory = (key == HAMI).then_some(DeviceMemory::from_bytes(memory));
    Some(Amount { memory, cores: Some(cores) })
}
