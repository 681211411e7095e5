//! Reads limits in the grammars that several systems share. Values that their own readers treat as "no limit"
//! (garbage, 0) are errors here.

use std::collections::BTreeSet;

use gpushare_inventory::DeviceMemory;

use crate::quantity;
use gpushare_claims::{Cap, Claim, Cores, RequestError, Word};

/// Reads memory as HAMi-core and vgpu-manager do: digits, optionally followed by k, m, g or t (binary units).
/// Without a letter the number is in bytes. The minimum is 1 MiB.
pub(crate) fn memory(said: Word) -> Result<DeviceMemory, RequestError> {
    memory_or(said, "0 states no limit: write the limit, as 3000m")
}

/// Like [`memory`], with `zero` as the error's text for 0.
pub(crate) fn memory_or(said: Word, zero: &str) -> Result<DeviceMemory, RequestError> {
    let remedy = "memory is digits and perhaps one of k, m, g (binary), as 3000m";
    match quantity::binary(said.value).ok_or_else(|| said.wrong(remedy))? {
        0 => Err(said.wrong(zero)),
        bytes @ 1..=0xf_ffff => {
            Err(said.wrong(format!("below 1 MiB; without a letter it is bytes: did you mean {bytes}m?")))
        }
        bytes => Ok(DeviceMemory::from_bytes(bytes)),
    }
}

/// Reads a whole number of MiB, at least 1.
pub(crate) fn mebibytes(said: Word) -> Result<DeviceMemory, RequestError> {
    let bytes =
        quantity::whole::<u64>(said.value).filter(|mib| *mib > 0).and_then(|mib| mib.checked_mul(1 << 20));
    let remedy = "memory is in MiB, digits only, from 1, as 2000";
    bytes.map(DeviceMemory::from_bytes).ok_or_else(|| said.wrong(remedy))
}

/// Reads each word with `read` and returns the value with its word.
pub(crate) fn each<'a, T>(
    words: impl Iterator<Item = Word<'a>>,
    read: impl Fn(Word<'a>) -> Result<T, RequestError>,
) -> Result<Vec<(Word<'a>, T)>, RequestError> {
    words.map(|word| Ok((word, read(word)?))).collect()
}

/// Reads a percentage of a GPU's compute, 1 to 100.
pub(crate) fn cores(said: Word) -> Result<Cores, RequestError> {
    let cores = quantity::whole(said.value).and_then(Cores::new);
    cores.ok_or_else(|| said.wrong("a percentage of compute is a whole number from 1 to 100"))
}

/// Reads a compute limit in which the other system writes 0 for no limit.
pub(crate) fn cores_or_all(said: Word) -> Result<Cap, RequestError> {
    match quantity::whole(said.value) {
        Some(0) => Ok(Cap::Unlimited),
        Some(percent) => Cap::of(percent).ok_or_else(|| said.wrong("a percentage is from 0 (no cap) to 100")),
        None => Err(said.wrong("a percentage is a whole number from 0 (no cap) to 100")),
    }
}

/// Refuses memory limits on only some of the container's `gpus`: that counts as a mistake, never as "no
/// limit" on the others. `first` is the word for the error, and `key` the variable that limits all of them.
pub(crate) fn refuse_half(claims: &[Claim], first: Word, gpus: usize, key: &str) -> Result<(), RequestError> {
    let stated = claims.iter().flat_map(|claim| &claim.particular);
    let limited = stated.filter(|(_, amount)| amount.memory.is_some()).map(|(gpu, _)| gpu);
    match limited.collect::<BTreeSet<_>>().len() {
        limited if limited == 0 || limited == gpus => Ok(()),
        limited => Err(first.wrong(format!(
            "{} of {gpus} GPUs have no memory limit: give each its own, or set {key}",
            gpus - limited
        ))),
    }
}
