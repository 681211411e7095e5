//! Capabilities.
//!
//! RM takes privilege from the task that makes a call. A supervisor with CAP_SYS_ADMIN would make privileged
//! channels for the container, and hand it views of the whole card.

use caps::errors::CapsError;
use caps::{CapSet, Capability, CapsHashSet};

/// Keeps what reading and ending the container's processes takes, and nothing else.
///
/// # Errors
/// When the kernel refuses.
pub fn drop_all_but_needed() -> Result<(), CapsError> {
    let needed = CapsHashSet::from([Capability::CAP_SYS_PTRACE, Capability::CAP_KILL]);
    let has = caps::read(None, CapSet::Permitted)?;
    let keeps: CapsHashSet = needed.intersection(&has).copied().collect();
    caps::set(None, CapSet::Effective, &keeps)?;
    caps::set(None, CapSet::Permitted, &keeps)?;
    caps::set(None, CapSet::Inheritable, &CapsHashSet::new())
}
