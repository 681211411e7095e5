//! The sources that are read in every bundle, regardless of the system that scheduled it: gpushare's own
//! keys, lists of GPUs, CDI names, devices handed to the engine, kubelet's allocations, and the node's
//! reservations.

pub(crate) mod allocated;
pub(crate) mod cdi;
pub(crate) mod entry;
pub(crate) mod handed;
pub(crate) mod list;
pub(crate) mod names;
pub(crate) mod own;
pub(crate) mod qualified;
pub(crate) mod reserved;
