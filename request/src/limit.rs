//! Reads limits in the grammars that several systems share. Values that their own readers take for "no limit"
//! (garbage, 0) are errors here.

use gpushare_inventory::DeviceMemory;

use crate::quantity;
use gpushare_claims::{Cores, RequestError, Word};

/// Reads memory as HAMi-core and vgpu-manager do: digits, perhaps followed by k, m, g or t (binary units).
/// Without a letter the number is in bytes. At least 1 MiB.
pub(crate) fn memory(said: Word) -> Result<DeviceMemory, RequestError> {
    let remedy = "memory is digits and perhaps one of k, m, g (binary), as 3000m";
    match quantity::binary(said.value).ok_or_else(|| said.wrong(remedy))? {
        0 => Err(said.wrong("0 states no limit: write the limit, as 3000m")),
        bytes @ 1..=0xf_ffff => {
            Err(said.wrong(format!("below 1 MiB; without a letter it is bytes: did you mean {bytes}m?")))
        }
        bytes => Ok(DeviceMemory::from_bytes(bytes)),
    }
}

/// Reads a whole number of MiB, at least 1.
pub(crate) fn mebibytes(said: Word) -> Result<DeviceMemory, RequestError> {
    let bytes = quantity::whole(said.value).filter(|mib| *mib > 0).and_then(|mib| mib.checked_mul(1 << 20));
    let remedy = "memory is in MiB, digits only, from 1, as 2000";
    bytes.map(DeviceMemory::from_bytes).ok_or_else(|| said.wrong(remedy))
}

/// Reads a percentage of a GPU's compute, 1 to 100.
pub(crate) fn cores(said: Word) -> Result<Cores, RequestError> {
    let percent = quantity::whole(said.value).and_then(|percent| u8::try_from(percent).ok());
    percent
        .and_then(Cores::new)
        .ok_or_else(|| said.wrong("a percentage of compute is a whole number from 1 to 100"))
}
