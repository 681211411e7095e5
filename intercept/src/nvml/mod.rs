//! NVML as the container sees it: memory of the granted size, and only the container's own processes.
//!
//! The real libnvidia-ml calls itself through its exported names, so one hook may be entered from inside
//! another: hooks hold no lock and keep no state per call. This library holds no slot; it only reads the
//! books.

mod functions;
pub mod hooks;
mod list;
mod memory;
mod sample;
mod table;

use gpushare_region::{MAX_DEVICES, path};

use crate::book::Book;
use crate::pointer::{read, write};
use crate::process::{Home, Zeroed};
use functions::real;
pub use functions::{DRIVER, HOOKED, NAMES};

/// `nvmlReturn_t`.
pub type Status = i32;
type Device = usize;

/// The most MIG instances of one GPU (nvmlDeviceGetMaxMigDeviceCount), with room for larger GPUs.
const MOST_INSTANCES: u32 = 16;

const SUCCESS: Status = 0;
const NOT_FOUND: Status = 6;
const INSUFFICIENT_SIZE: Status = 7;

static HOME: Home<Nothing> = Home::new(path::LIMITS, path::USAGE);

/// This library keeps nothing but the books.
struct Nothing;

// SAFETY: it has no bytes.
unsafe impl Zeroed for Nothing {}

/// Looks up the real functions. Called once, when the library is loaded and before any of its hooks.
pub fn load() {
    DRIVER.fill(path::DRIVER_NVML, &NAMES);
}

/// Runs `call`. After a success, replaces the value that it has written to `place` with the result of
/// `change`.
///
/// # Safety
/// `place` is null, or readable and writable after `call` succeeded.
unsafe fn rewrite<T: Copy>(
    place: *mut T,
    call: impl FnOnce() -> Status,
    change: impl FnOnce(T) -> T,
) -> Status {
    let status = call();
    if status == SUCCESS
        // SAFETY: the caller guarantees this.
        && let Some(written) = unsafe { read(place) }
    {
        // SAFETY: the caller guarantees this.
        unsafe { write(place, change(written)) };
    }
    status
}

fn book() -> Option<&'static Book> {
    HOME.get().map(crate::process::Process::book)
}

/// A granted GPU or MIG instance, as identified in the driver's process lists.
#[derive(Clone, Copy)]
struct Granted {
    /// Its line of the limits file.
    line: usize,
    /// Ids of the GPU instance and of the compute instance; all ones for a whole GPU.
    instance: [u32; 2],
}

/// "Not a MIG instance".
const NO_INSTANCE: [u32; 2] = [u32::MAX; 2];

/// Calls `each` for the granted parts of `device`: the device itself or, if it is divided, those of its MIG
/// instances that the driver shows here.
fn each_granted(book: &Book, device: Device, mut each: impl FnMut(Granted)) {
    if let Some(line) = line_of(book, device) {
        return each(Granted { line, instance: ids(device) });
    }
    for index in 0..MOST_INSTANCES {
        let mut instance = 0;
        // SAFETY: the driver writes one handle.
        let status = unsafe { real::nvmlDeviceGetMigDeviceHandleByIndex(device, index, &mut instance) };
        let line = (status == SUCCESS).then(|| line_of(book, instance)).flatten();
        if let Some(line) = line {
            each(Granted { line, instance: ids(instance) });
        }
    }
}

/// The ids of an instance.
fn ids(device: Device) -> [u32; 2] {
    let (mut gpu, mut compute) = (0, 0);
    // SAFETY: the driver writes one number.
    let status = unsafe { real::nvmlDeviceGetGpuInstanceId(device, &mut gpu) };
    if status != SUCCESS {
        return NO_INSTANCE;
    }
    // SAFETY: as above.
    let status = unsafe { real::nvmlDeviceGetComputeInstanceId(device, &mut compute) };
    if status == SUCCESS { [gpu, compute] } else { NO_INSTANCE }
}

/// The line of the limits file for `device`; `None` if it is not granted.
fn line_of(book: &Book, device: Device) -> Option<usize> {
    let mut text = [0u8; 96];
    // SAFETY: the driver writes at most 96 bytes.
    let status = unsafe { real::nvmlDeviceGetUUID(device, text.as_mut_ptr().cast(), 96) };
    let uuid = (status == SUCCESS).then(|| parse_uuid(&text)).flatten()?;
    book.device(&uuid).filter(|line| *line < MAX_DEVICES)
}

/// The 16 bytes of `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`, or of `MIG-…`.
fn parse_uuid(text: &[u8]) -> Option<[u8; 16]> {
    let hex = text.strip_prefix(b"GPU-").or_else(|| text.strip_prefix(b"MIG-"))?;
    let mut digits = hex.iter().filter(|byte| **byte != b'-');
    let mut digit = || char::from(*digits.next()?).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let mut uuid = [0; 16];
    for byte in &mut uuid {
        *byte = digit()? << 4 | digit()?;
    }
    Some(uuid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_read_from_left_to_right() {
        let want = [0x5f, 0x2e, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0xa, 0xb, 0xc, 0xd];
        for (text, want) in [
            (&b"GPU-5f2e0001-0203-0405-0607-08090a0b0c0d\0"[..], Some(want)),
            (b"MIG-5f2e0001-0203-0405-0607-08090a0b0c0d\0", Some(want)),
            (b"MIG-GPU-5f2e0001-0203-0405-0607-08090a0b0c0d/1/0\0", None),
            (b"GPU-5f2e0001-0203-0405-0607-08090a0b0c\0", None),
            (b"GPU-5f2e0001-0203-0405-0607-08090a0b0cxx", None),
            (b"", None),
        ] {
            assert_eq!(parse_uuid(text), want, "{:?}", String::from_utf8_lossy(text));
        }
    }
}
