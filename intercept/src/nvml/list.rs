//! Process lists. The driver's own list names pids of another namespace, or of other tenants. The lists are
//! therefore written from the books: they name the container's processes with the pids that the container
//! knows.

use core::ffi::c_void;

use super::{Device, INSUFFICIENT_SIZE, SUCCESS, Status, book, each_granted, read, real, write};

/// Layouts of one list entry.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    /// Pid, memory.
    V1,
    /// V1 with two MIG instances.
    V2,
    /// V2 with confidential memory.
    Detail,
    /// V2 with the program's name. The table that nvidia-smi asks for uses this layout.
    Named,
}

impl Layout {
    const fn stride(self) -> usize {
        match self {
            Self::V1 => 16,
            Self::V2 => 24,
            Self::Detail => 32,
            Self::Named => 4128,
        }
    }

    /// # Safety
    /// `entry` is writable for the stride.
    unsafe fn write(self, entry: *mut u8, pid: u32, memory: u64, instance: [u32; 2]) {
        // SAFETY: the caller guarantees this; a V1 entry is two words.
        unsafe { write(entry.cast(), [u64::from(pid), memory]) };
        if self != Self::V1 {
            // SAFETY: the caller guarantees this; all other layouts have two instances at 16.
            unsafe { write(entry.wrapping_add(16).cast(), instance) };
        }
        if self == Self::Detail {
            // SAFETY: the caller guarantees this.
            unsafe { write(entry.wrapping_add(24).cast(), 0u64) };
        }
        if self == Self::Named {
            let mut name = [0u8; 256];
            let length = crate::identity::read_proc(pid, b"cmdline", &mut name).map_or(0, <[u8]>::len);
            // A command line is a list of strings; the first is the program.
            name.iter_mut().skip(length.min(255)).for_each(|byte| *byte = 0);
            // SAFETY: the caller guarantees this; the name has 4096 bytes.
            unsafe { write(entry.wrapping_add(32).cast(), name) };
        }
    }
}

/// Writes the container's processes on `device`. In NVML's protocol the first call asks for the number, the
/// second for the list.
///
/// # Safety
/// `count` is readable and writable; `list` is null or has room for `*count` entries.
unsafe fn write_list(device: Device, count: *mut u32, list: *mut u8, layout: Layout) -> Status {
    // SAFETY: the caller guarantees this.
    let room = unsafe { read(count) }.unwrap_or(0);
    let room = if list.is_null() { 0 } else { room };
    let mut found = 0u32;
    if let Some(book) = book() {
        each_granted(book, device, |granted| {
            book.each_living(granted.line, |pid, bytes| {
                if found < room {
                    let entry = list.wrapping_add(found as usize * layout.stride());
                    // SAFETY: `found` is below the number of entries that fit.
                    unsafe { layout.write(entry, pid, bytes, granted.instance) };
                }
                found += 1;
            });
        });
    }
    // SAFETY: the caller guarantees this.
    unsafe { write(count, found) };
    if found > room { INSUFFICIENT_SIZE } else { SUCCESS }
}

/// Answers with a list of `layout`, or an empty one for `None`, if the driver's function accepts the call.
/// `probe` calls that function without room for entries.
///
/// # Safety
/// Same as [`write_list`], but `count` may be null.
pub(super) unsafe fn processes(
    device: Device,
    count: *mut u32,
    list: *mut c_void,
    layout: Option<Layout>,
    probe: impl Fn(*mut u32) -> Status,
) -> Status {
    if count.is_null() {
        return probe(count);
    }
    let status = probe(&mut 0);
    if status != SUCCESS && status != INSUFFICIENT_SIZE {
        return status;
    }
    match layout {
        // SAFETY: the caller guarantees this.
        Some(layout) => unsafe { write_list(device, count, list.cast(), layout) },
        None => {
            // SAFETY: not null, so writable.
            unsafe { write(count, 0) };
            SUCCESS
        }
    }
}

/// `nvmlProcessDetailList_t`.
#[derive(Clone, Copy)]
#[repr(C)]
struct DetailList {
    version: u32,
    mode: u32,
    count: u32,
    list: *mut u8,
}

/// The hooks of this family.
#[allow(non_snake_case, missing_docs, clippy::missing_safety_doc, reason = "NVML names and documents them")]
pub mod hooks {
    use super::*;

    macro_rules! lists {
        ($($name:ident, $layout:expr;)*) => { $(
            pub unsafe extern "C" fn $name(device: Device, count: *mut u32, list: *mut c_void) -> Status {
                // SAFETY: without room the driver writes only the count.
                let probe = |count| unsafe { real::$name(device, count, core::ptr::null_mut()) };
                // SAFETY: our caller's arguments.
                unsafe { processes(device, count, list, $layout, probe) }
            }
        )* };
    }

    // Every process with a slot counts as a compute process. The books contain no graphics processes and no
    // MPS clients.
    lists! {
        nvmlDeviceGetComputeRunningProcesses, Some(Layout::V1);
        nvmlDeviceGetComputeRunningProcesses_v2, Some(Layout::V2);
        nvmlDeviceGetComputeRunningProcesses_v3, Some(Layout::V2);
        nvmlDeviceGetGraphicsRunningProcesses, None;
        nvmlDeviceGetGraphicsRunningProcesses_v2, None;
        nvmlDeviceGetGraphicsRunningProcesses_v3, None;
        nvmlDeviceGetMPSComputeRunningProcesses, None;
        nvmlDeviceGetMPSComputeRunningProcesses_v2, None;
        nvmlDeviceGetMPSComputeRunningProcesses_v3, None;
    }

    pub unsafe extern "C" fn nvmlDeviceGetRunningProcessDetailList(
        device: Device,
        list: *mut c_void,
    ) -> Status {
        const COMPUTE: u32 = 0;
        let list: *mut DetailList = list.cast();
        // SAFETY: null or our caller's list.
        let Some(asked) = (unsafe { read(list) }) else {
            // SAFETY: our caller's arguments, unchanged.
            return unsafe { real::nvmlDeviceGetRunningProcessDetailList(device, list.cast()) };
        };
        let mut empty = DetailList { count: 0, list: core::ptr::null_mut(), ..asked };
        // SAFETY: a list without room.
        let status = unsafe {
            real::nvmlDeviceGetRunningProcessDetailList(device, core::ptr::from_mut(&mut empty).cast())
        };
        if status != SUCCESS && status != INSUFFICIENT_SIZE {
            return status;
        }
        let (mut count, mut status) = (0, SUCCESS);
        if asked.mode == COMPUTE {
            count = asked.count;
            // SAFETY: our caller's array has room for as many entries as it says.
            status = unsafe { write_list(device, &mut count, asked.list, Layout::Detail) };
        }
        // SAFETY: not null, so writable.
        unsafe { write(list, DetailList { count, ..asked }) };
        status
    }
}
