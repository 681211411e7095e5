//! Initialisation and entry points. The driver resolves every name; then only the real address of a hooked
//! function is replaced by ours. So the driver alone handles versions, flags and suffixes.

use core::ffi::{CStr, c_char};

use super::{DRIVER, HOOKED, Status, after_success, functions, here, launch, mps, read, real, write};

/// Prefixes of the names of functions that allocate or move device memory or launch. [`NOT_OURS`] lists the
/// exceptions.
const OURS: [&str; 11] = [
    "cuMemAlloc",
    "cuMemCreate",
    "cuMemPoolCreate",
    "cuArrayCreate",
    "cuArray3DCreate",
    "cuMipmappedArrayCreate",
    "cuLaunch",
    "cuGraphLaunch",
    // These move memory that must stay on the host.
    "cuMemPrefetch",
    "cuMemDiscardAndPrefetch",
    "cuMemAdvise",
];
const NOT_OURS: [&str; 2] = ["cuMemAllocHost", "cuLaunchHostFunc"];

/// Replaces the real address at `function` with ours.
///
/// # Safety
/// `name` is null or a C string, `function` null or readable and writable.
unsafe fn substitute(name: *const c_char, function: *mut usize) {
    // SAFETY: the caller guarantees this.
    let Some(address) = unsafe { read(function) }.filter(|address| *address != 0) else { return };
    let number = DRIVER.number(address).filter(|number| *number < HOOKED.len());
    if let Some(ours) = number.and_then(functions::hook) {
        // SAFETY: the caller guarantees this.
        unsafe { write(function, ours) };
    } else if !name.is_null() && !(0..HOOKED.len()).any(|number| functions::hook(number) == Some(address)) {
        // SAFETY: the driver has just resolved it.
        count_unhooked(unsafe { CStr::from_ptr(name) }.to_bytes());
    }
}

/// Counts a name with such a prefix that has no hook: the driver is newer than our list.
#[cold]
fn count_unhooked(name: &[u8]) {
    let begins = |list: &[&str]| list.iter().any(|begin| name.starts_with(begin.as_bytes()));
    if begins(&OURS)
        && !begins(&NOT_OURS)
        && let Some(here) = here()
    {
        here.book().count_unhooked();
    }
}

hooks! { |call|
    cuInit(flags: u32) => after_success(|| { mps::join(); call() }, || {
        // Opens the books now rather than in the first allocation.
        if let Some(here) = here() {
            launch::open_gate(here);
        }
    });
    cuGetProcAddress(name: *const c_char, function: *mut usize, version: i32, flags: u64) =>
        // SAFETY: the driver has accepted them.
        after_success(call, || unsafe { substitute(name, function) });
    cuGetProcAddress_v2(
        name: *const c_char, function: *mut usize, version: i32, flags: u64, found: *mut i32,
    ) =>
        // SAFETY: the driver has accepted them.
        after_success(call, || unsafe { substitute(name, function) });
}
