//! The node's grants: the lease store, admission, placement and the release of leases.
//!
//! [`Store`] is one text file, the ledger. A process that grants a lease first takes the turn to write. Sums
//! are computed from the leases. A lease is released only when its holder is proved gone: by the hook, by
//! `delete`, by the sweep, or by dropping an unused [`Reservation`]. The containers of a [`Pod`] can share
//! one lease, which ends with the last of them. A [`ResourceClaim`] holds a lease before its containers
//! exist. [`place`] is pure: requests and loads in, grants or a refusal out.
#![deny(unsafe_code)]

mod alarm;
mod boot;
mod called;
mod claim;
mod database;
mod deeds;
mod ended;
mod enforcement;
mod error;
mod found;
mod holder;
mod journal;
mod lease;
mod ledger;
mod lock_holder;
mod made;
mod news;
mod pid_namespace;
mod place;
mod pod;
mod process;
mod refusals;
mod running;
mod state;
mod store;
mod turn;
mod update;

pub use called::Called;
pub use claim::{BadToken, ClaimName, ClaimToken, ResourceClaim};
pub use deeds::{Deed, Deeds, Done};
pub use enforcement::{Company, Enforcement, HeldBy, Terms};
pub use error::{ReserveError, StoreError};
pub use found::{Found, note_found};
pub use holder::{Holder, HolderError, cgroup_of, cgroup_path};
pub use lease::{
    BadContainerId, Elastic, Grant, Lease, LeaseKey, LeaseState, Member, PastLease, Release, ReleaseReason,
    Used,
};
pub use ledger::Entry;
pub use lock_holder::{sign, signer};
pub use made::note_made;
pub use news::{Following, News};
pub use pid_namespace::PidNamespace;
pub use place::{Admission, GpuLoad, Placement, Refusal, place};
pub use pod::{Pod, PodContainer, words};
pub use process::{living_thread, pids as process_numbers, stat as process_stat};
pub use refusals::{Reason, Refused};
pub use running::Running;
pub use state::{REGIONS, StateError, StateFolder, is_rootless};
pub use store::{Loads, Measure, Reservation, Store, Swept, UpdateError};
pub use turn::lock_without_queue;
pub use update::{Change, Compute};
