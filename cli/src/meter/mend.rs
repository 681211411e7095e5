//! Limits files that differ from their leases.

use anyhow::Result;
use gpushare_inject::Region;
use gpushare_quota::{Lease, Store};

/// Makes the limits file of a living lease say what the store says. Returns whether it had to. It compares
/// again while nobody else can change either.
///
/// # Errors
/// When the store fails, or the file cannot be written.
pub fn mend(store: &Store, region: &Region, lease: &Lease) -> Result<bool> {
    match region.grants_are(lease) {
        Ok(true) => return Ok(false),
        // A container that is being created or has ended has no file to compare.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error.into()),
        Ok(false) => {}
    }
    let mended = store.settle(lease.id, &lease.member.key, |lease| match region.grants_are(lease) {
        // A meter that was killed while the share grew or shrank has left less memory there: no container's
        // doing.
        Ok(false) if lease.elastic.is_some() && region.has_less_memory(lease)? => {
            region.set_memory(lease)?;
            match region.grants_are(lease)? {
                true => Ok(false),
                false => region.set_grants(lease).map(|()| true),
            }
        }
        Ok(false) => region.set_grants(lease).map(|()| true),
        other => other.map(|_| false),
    })?;
    Ok(mended.transpose()?.unwrap_or(false))
}
