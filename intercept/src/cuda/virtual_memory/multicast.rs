//! Multicast objects: they have no memory of their own, and keep alive what is bound to them.

use super::super::{Device, Here, SUCCESS, Status, here, line_of, real};
use super::object::{add_reference, drop_reference, object_of_handle};
use super::{drop_range, enter, object_at};
use crate::table::Kind;

fn binding(object: u64, at: u64, device: u8) -> u64 {
    (object.rotate_left(20) ^ at).wrapping_add(u64::from(device) << 56)
}

/// Binds physical memory to a multicast object, which keeps it alive.
fn bind(
    target: u64,
    at: usize,
    bytes: usize,
    find: impl FnOnce(Here) -> Option<u64>,
    call: impl FnOnce() -> Status,
) -> Status {
    let Some(here) = here() else { return call() };
    let Some(object) = find(here) else { return call() };
    let Some(device) = here.state.table.get(Kind::Physical, object).map(|entry| entry.device) else {
        return call();
    };
    add_reference(here, object);
    let status = call();
    if status == SUCCESS {
        enter(here, Kind::Binding, binding(target, at as u64, device), bytes as u64, object);
    } else {
        drop_reference(here, object);
    }
    status
}

/// The hooks of this family.
#[allow(
    non_snake_case,
    missing_docs,
    clippy::missing_safety_doc,
    reason = "the driver names and documents them"
)]
pub mod hooks {
    use super::*;

    pub unsafe extern "C" fn cuMulticastBindMem(
        object: u64,
        at: usize,
        handle: u64,
        offset: usize,
        bytes: usize,
        flags: u64,
    ) -> Status {
        // SAFETY: our caller's arguments, unchanged.
        let call = || unsafe { real::cuMulticastBindMem(object, at, handle, offset, bytes, flags) };
        bind(object, at, bytes, |here| object_of_handle(here, handle), call)
    }

    pub unsafe extern "C" fn cuMulticastBindMem_v2(
        object: u64,
        device: Device,
        at: usize,
        handle: u64,
        offset: usize,
        bytes: usize,
        flags: u64,
    ) -> Status {
        // SAFETY: our caller's arguments, unchanged.
        let call =
            || unsafe { real::cuMulticastBindMem_v2(object, device, at, handle, offset, bytes, flags) };
        bind(object, at, bytes, |here| object_of_handle(here, handle), call)
    }

    pub unsafe extern "C" fn cuMulticastBindAddr(
        object: u64,
        at: usize,
        address: u64,
        bytes: usize,
        flags: u64,
    ) -> Status {
        // SAFETY: our caller's arguments, unchanged.
        let call = || unsafe { real::cuMulticastBindAddr(object, at, address, bytes, flags) };
        bind(object, at, bytes, |here| object_at(here, address), call)
    }

    pub unsafe extern "C" fn cuMulticastBindAddr_v2(
        object: u64,
        device: Device,
        at: usize,
        address: u64,
        bytes: usize,
        flags: u64,
    ) -> Status {
        // SAFETY: our caller's arguments, unchanged.
        let call = || unsafe { real::cuMulticastBindAddr_v2(object, device, at, address, bytes, flags) };
        bind(object, at, bytes, |here| object_at(here, address), call)
    }

    pub unsafe extern "C" fn cuMulticastUnbind(
        object: u64,
        device: Device,
        at: usize,
        bytes: usize,
    ) -> Status {
        // SAFETY: our caller's arguments, unchanged.
        let status = unsafe { real::cuMulticastUnbind(object, device, at, bytes) };
        if status == SUCCESS
            && let Some(here) = here()
        {
            let line = line_of(here, device);
            drop_range(here, Kind::Binding, at as u64, bytes as u64, |at| binding(object, at, line));
        }
        status
    }
}
