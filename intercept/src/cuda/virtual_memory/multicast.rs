//! Multicast objects: they have no memory of their own, and keep memory that is bound to them alive.

use super::super::{Device, Here, Status, after_success, here, line_of, real};
use super::object::object_of_handle;
use super::{drop_range, object_at, refer};
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
    let Some(memory) = here.state.table.get(Kind::Physical, object) else { return call() };
    let key = binding(target, at as u64, memory.device);
    refer(here, Kind::Binding, key, bytes as u64, object, call)
}

/// Drops the memory bound at `at` for `device`; the object no longer keeps it alive.
fn unbind(object: u64, device: Device, at: u64, bytes: u64) {
    let Some(here) = here() else { return };
    let line = line_of(here, device);
    drop_range(here, Kind::Binding, at, bytes, |at| binding(object, at, line));
}

hooks! { |call|
    cuMulticastBindMem(object: u64, at: usize, handle: u64, offset: usize, bytes: usize, flags: u64) =>
        bind(object, at, bytes, |here| object_of_handle(here, handle), call);
    cuMulticastBindMem_v2(
        object: u64, device: Device, at: usize, handle: u64, offset: usize, bytes: usize, flags: u64,
    ) => bind(object, at, bytes, |here| object_of_handle(here, handle), call);
    cuMulticastBindAddr(object: u64, at: usize, address: u64, bytes: usize, flags: u64) =>
        bind(object, at, bytes, |here| object_at(here, address), call);
    cuMulticastBindAddr_v2(object: u64, device: Device, at: usize, address: u64, bytes: usize, flags: u64) =>
        bind(object, at, bytes, |here| object_at(here, address), call);
    cuMulticastUnbind(object: u64, device: Device, at: usize, bytes: usize) =>
        after_success(call, || unbind(object, device, at as u64, bytes as u64));
}
