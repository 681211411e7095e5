//! The sources that are read in every bundle, whichever system scheduled it: gpushare's own keys, lists of
//! GPUs, CDI names, what the engine was handed, what kubelet allocated, and what the node reserved.

pub(crate) mod allocated;
pub(crate) mod cdi;
pub(crate) mod entry;
pub(crate) mod handed;
pub(crate) mod list;
pub(crate) mod names;
pub(crate) mod own;
pub(crate) mod qualified;
pub(crate) mod reserved;
