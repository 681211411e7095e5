//! Capabilities.
//!
//! RM takes privilege from the task that makes a call. A supervisor with CAP_SYS_ADMIN would make privileged
//! channels for the container, and hand it views of the whole card.

use caps::errors::CapsError;
use caps::{CapSet, Capability, CapsHashSet};

use crate::keeper::Role;

/// Keeps what the role needs, and without one what both need: for a worker what reading and ending the container's processes takes, for a keeper what sending descriptors takes
/// where others of root's have many in flight, and nothing else.
///
/// # Errors
/// When the kernel refuses.
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
