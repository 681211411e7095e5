//! The private table from which nvidia-smi gets its process lists. It is in read-only memory, so programs get
//! a copy. In the copy the three process lists are ours, and for driver 535 also the samples that `pmon`
//! reads. Their positions depend on the driver. For an unknown driver the table is passed through, since
//! nvidia-smi refuses to run without it.

use core::ffi::{c_char, c_void};
use core::sync::atomic::{AtomicUsize, Ordering};

use super::{Device, SUCCESS, Status, book, list, read, real, sample, write};
use crate::book::Book;
use crate::sys;

/// The table's name.
const ID: [u8; 16] =
    [0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e, 0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7, 0xc4];
/// Size of driver 535's table in bytes: its first word.
const SIZE_535: usize = 0x7a8;
/// Major versions of other drivers whose lists are in the same slots.
const SAME_SLOTS: [&[u8]; 2] = [b"535.", b"580."];
/// Words from the start of the table: compute, graphics, MPS.
const COMPUTE: usize = 213;
const LISTS: usize = 3;
/// Driver 535's samples by process.
const MOMENTS: usize = 145;
const LARGEST: usize = 1 << 16;

/// Address of our copy of the table.
static COPY: AtomicUsize = AtomicUsize::new(0);
/// The driver's own functions in the three slots.
static REAL: [AtomicUsize; LISTS] = [const { AtomicUsize::new(0) }; LISTS];

/// The driver's own function in the slot of samples.
static REAL_MOMENTS: AtomicUsize = AtomicUsize::new(0);

type Moments = unsafe extern "C" fn(Device, u64, *mut u32, *mut u32, *mut u8) -> Status;
type Slot = unsafe extern "C" fn(Device, *mut u32, *mut c_void) -> Status;

/// A process list. Only the first, that of compute processes, has entries: the books contain no processes for
/// the others.
///
/// # Safety
/// The contract of the driver's function in slot `COMPUTE + AT`.
unsafe extern "C" fn slot<const AT: usize>(
    device: Device,
    count: *mut u32,
    processes: *mut c_void,
) -> Status {
    let address = REAL.get(AT).map_or(0, |real| real.load(Ordering::Acquire));
    let pointer = core::ptr::with_exposed_provenance::<()>(address);
    // SAFETY: the address was in this slot of the driver's table, so it has the slot's signature.
    let real: Slot = unsafe { core::mem::transmute::<*const (), Slot>(pointer) };
    // SAFETY: without room the driver writes only the count.
    let probe = |count| unsafe { real(device, count, core::ptr::null_mut()) };
    let layout = (AT == 0).then_some(list::Layout::Named);
    // SAFETY: our caller's arguments.
    unsafe { list::processes(device, count, processes, layout, probe) }
}

/// # Safety
/// The contract of the driver's function in slot `MOMENTS`.
unsafe extern "C" fn moments(
    device: Device,
    last: u64,
    kind: *mut u32,
    count: *mut u32,
    list: *mut u8,
) -> Status {
    let address = REAL_MOMENTS.load(Ordering::Acquire);
    let pointer = core::ptr::with_exposed_provenance::<()>(address);
    // SAFETY: the address was in this slot of the driver's table, so it has the slot's signature.
    let real: Moments = unsafe { core::mem::transmute::<*const (), Moments>(pointer) };
    // SAFETY: our caller's arguments, unchanged.
    let call = || unsafe { real(device, last, kind, count, list) };
    // SAFETY: the driver has written as many moments as it says.
    unsafe { sample::moments(count, list, call) }
}

/// Whether the positions of the process lists in this driver's table are known.
fn is_known(size: usize) -> bool {
    if size == SIZE_535 {
        return true;
    }
    let mut text = [0u8; 96];
    // SAFETY: the driver writes at most 96 bytes.
    let status = unsafe { real::nvmlSystemGetDriverVersion(text.as_mut_ptr().cast::<c_char>(), 96) };
    status == SUCCESS
        && SAME_SLOTS.iter().any(|version| text.starts_with(version))
        && size / 8 >= COMPUTE + LISTS
}

/// Our copy of the table at `address`.
fn copy(address: usize) -> Option<usize> {
    let made = COPY.load(Ordering::Acquire);
    if made != 0 {
        return Some(made);
    }
    let table: *const usize = core::ptr::with_exposed_provenance(address);
    // SAFETY: the first word of the table is its size.
    let size = unsafe { read(table) }.filter(|size| *size <= LARGEST && is_known(*size))?;
    let ours = sys::map_private(size).ok()?;
    let copied: *mut usize = core::ptr::with_exposed_provenance_mut(ours);
    // SAFETY: the table has `size` bytes, and so has the new mapping.
    unsafe { core::ptr::copy_nonoverlapping(table, copied, size / size_of::<usize>()) };
    let lists: [Slot; LISTS] = [slot::<0>, slot::<1>, slot::<2>];
    for ((at, list), real) in (COMPUTE..).zip(lists).zip(&REAL) {
        // SAFETY: `is_known` has checked that the table has these slots.
        real.store(unsafe { read(table.wrapping_add(at)) }.unwrap_or(0), Ordering::Release);
        // SAFETY: as above, and the copy is ours.
        unsafe { write(copied.wrapping_add(at), (list as *const ()).addr()) };
    }
    if size == SIZE_535 {
        // SAFETY: a table of this size has the slot.
        REAL_MOMENTS.store(unsafe { read(table.wrapping_add(MOMENTS)) }.unwrap_or(0), Ordering::Release);
        // SAFETY: as above, and the copy is ours.
        unsafe { write(copied.wrapping_add(MOMENTS), (moments as Moments as *const ()).addr()) };
    }
    // Two threads may both make a copy. Either copy works, and neither is ever unmapped.
    COPY.store(ours, Ordering::Release);
    Some(ours)
}

hooks! { |call|
    nvmlInternalGetExportTable(table: *mut usize, id: *const c_void) => {
        let status = call();
        // SAFETY: null or 16 bytes, which the driver has read.
        let wanted = unsafe { read(id.cast::<[u8; 16]>()) } == Some(ID);
        // SAFETY: written by the driver when it succeeded.
        let found = unsafe { read(table) }.filter(|_| status == SUCCESS && wanted);
        match found.map(copy) {
            // SAFETY: as above.
            Some(Some(ours)) => unsafe { write(table, ours) },
            Some(None) => book().map_or((), Book::count_unhooked),
            None => {}
        }
        status
    };
}
