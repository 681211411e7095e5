//! Capabilities.
//!
//! RM takes privilege from the task that makes a call. A supervisor with CAP_SYS_ADMIN would make privileged
//! channels for the container, and hand it views of the whole card.

use caps::errors::CapsError;
use caps::{CapSet, Capability, CapsHashSet};

use crate::keeper::Role;

/// Keeps what reading and ending the container's processes takes, for a keeper what sending descriptors takes
/// where others of root's have many in flight, and nothing else.
///
/// # Errors
/// When the kernel refuses.
pub fn drop_all_but_needed(role: Option<Role>) -> Result<(), CapsError> {
    let needed = match role {
        Some(Role::Worker) => CapsHashSet::from([Capability::CAP_SYS_PTRACE, Capability::CAP_KILL]),
        Some(Role::Keeper) | None => CapsHashSet::from([Capability::CAP_SYS_RESOURCE]),
    };
    let has = caps::read(None, CapSet::Permitted)?;
    let keeps: CapsHashSet = needed.intersection(&has).copied().collect();
    caps::set(None, CapSet::Effective, &keeps)?;
    caps::set(None, CapSet::Permitted, &keeps)?;
    caps::set(None, CapSet::Inheritable, &CapsHashSet::new())
}
