//! Physical objects by our number, and the handles that refer to them. An object is charged as long as
//! anything refers to it.

use super::super::Here;
use super::super::charge::release;
use crate::table::{Entry, Kind};

pub(super) fn add_reference(here: Here, object: u64) {
    here.state.table.change(Kind::Physical, object, |entry| entry.extra += 1);
}

pub(super) fn drop_reference(here: Here, object: u64) {
    let left = here.state.table.change(Kind::Physical, object, |entry| {
        entry.extra = entry.extra.saturating_sub(1);
        entry.extra
    });
    if left == Some(0)
        && let Some(entry) = here.state.table.take(Kind::Physical, object)
    {
        release(here, &entry);
    }
}

pub(super) fn object_of_handle(here: Here, handle: u64) -> Option<u64> {
    here.state.table.get(Kind::Handle, handle).map(|entry| entry.extra)
}

/// Counts a handle that the driver gave for memory that already has a handle. `object` finds the memory if
/// the handle is new.
pub(super) fn retain(here: Here, handle: u64, object: impl FnOnce() -> Option<u64>) {
    let known = here.state.table.change(Kind::Handle, handle, |entry| {
        entry.size += 1;
        entry.extra
    });
    if let Some(object) = known {
        add_reference(here, object);
    } else if let Some(object) = object() {
        add_reference(here, object);
        let entry = Entry { key: handle, size: 1, extra: object, kind: Kind::Handle, device: 0, context: 0 };
        let _ = here.state.table.put(entry);
    }
}
