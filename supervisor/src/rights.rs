//! Capabilities.
//!
//! RM derives privilege from the task that makes a call. A supervisor with CAP_SYS_ADMIN would make
//! privileged channels for the container, and give it access to the whole card.

use caps::errors::CapsError;
use caps::{CapSet, Capability, CapsHashSet};

use crate::keeper::Role;

/// Drops all capabilities except those that the role needs, or that both need if there is no role. A worker
/// needs to read and kill the container's processes. A keeper needs to send descriptors even if root's other
/// processes have many in flight.
///
/// # Errors
/// If the kernel refuses.
pub fn drop_all_but_needed(role: Option<Role>) -> Result<(), CapsError> {
    let (worker, keeper) =
        ([Capability::CAP_SYS_PTRACE, Capability::CAP_KILL], [Capability::CAP_SYS_RESOURCE]);
    let needed: CapsHashSet = match role {
        Some(Role::Worker) => worker.into(),
        Some(Role::Keeper) => keeper.into(),
        None => worker.into_iter().chain(keeper).collect(),
    };
    let has = caps::read(None, CapSet::Permitted)?;
    let keeps: CapsHashSet = needed.intersection(&has).copied().collect();
    caps::set(None, CapSet::Effective, &keeps)?;
    caps::set(None, CapSet::Permitted, &keeps)?;
    caps::set(None, CapSet::Inheritable, &CapsHashSet::new())
}
