//! The private table of functions that nvidia-smi asks for. Its first word is its size in bytes; a function
//! stands in each other slot.
//!
//! Slots that nvidia-smi needs answer from the state. All others answer NVML_ERROR_NOT_SUPPORTED.

use std::ffi::c_void;
use std::sync::OnceLock;

use crate::abi::{Code, Handle, Out, Result, number, padded};
use crate::node::{gpu, node};
use crate::samples;

/// Size of the table of driver 535, bytes.
const SIZE: usize = 0x7a8;
const SLOTS: usize = SIZE / 8;
const ID: [u8; 16] = 0xc4fe_3e6c_c98f_6c4e_a327_ee69_6e12_f7c4_u128.to_be_bytes();

const LOGGER: usize = 26;
const TOPOLOGY_LEVEL: usize = 23;
const MONITORED: usize = 72;
const HANDLE_BY_INDEX: usize = 81;
const GLANCES: usize = 145;
const PROCESS_LISTS: [usize; 3] = [213, 214, 215];

#[repr(C)]
struct Table([*const c_void; SLOTS]);

// SAFETY: the table is written once, before it is shared, and holds addresses of functions and one number.
unsafe impl Send for Table {}
// SAFETY: as above; it is never written afterwards.
unsafe impl Sync for Table {}

static TABLE: OnceLock<Box<Table>> = OnceLock::new();

extern "C" fn absent() -> u32 {
    Code::NOT_SUPPORTED.0
}

/// Accepts any message and drops it.
extern "C" fn logger() -> u32 {
    0
}

/// Distance of two GPUs, given by their PCI identities: always one host bridge, which is 2 in this table's
/// own numbering.
extern "C" fn topology_level(_first: Out<u8>, _second: Out<u8>, out: Out<u32>) -> u32 {
    number(out.set(2))
}

/// Whether `dmon` and `pmon` can watch a GPU.
extern "C" fn monitored(device: Handle, out: Out<u32>) -> u32 {
    number(gpu(device).and_then(|_| out.set(1)))
}

extern "C" fn glances(device: Handle, seen: u64, kind: Out<u32>, count: Out<u32>, out: Out<u8>) -> u32 {
    number(kind.set(1).and_then(|()| samples::glances(device, seen, count, out)))
}

extern "C" fn handle_by_index(index: u32, out: Out<Handle>) -> u32 {
    number(node().and_then(|node| out.set(node.handle(index as usize)?)))
}

/// Bytes of an entry of the process lists: pid, memory, instances, and the program's name.
const STRIDE: usize = 4128;

fn list(device: Handle, count: Out<u32>, out: Out<u8>) -> Result {
    node()?.tells_processes()?;
    let users = node()?.users(gpu(device)?);
    let room = count.get()? as usize;
    count.set(u32::try_from(users.len()).unwrap_or(u32::MAX))?;
    if users.len() > room {
        return Err(Code::INSUFFICIENT_SIZE);
    }
    for (index, user) in users.iter().enumerate() {
        let program = std::fs::read_link(format!("/proc/{}/exe", user.pid));
        let name = program.map_or_else(|_| "-".to_owned(), |path| path.display().to_string());
        let entry: Out<u8> = out.offset(index * STRIDE);
        entry.offset::<u32>(0).set(user.pid)?;
        entry.offset::<u64>(8).set(user.memory)?;
        entry.offset::<[u32; 2]>(16).set([u32::MAX; 2])?;
        entry.offset::<[u8; 4096]>(32).set(padded(&name))?;
    }
    Ok(())
}

extern "C" fn compute_processes(device: Handle, count: Out<u32>, out: Out<u8>) -> u32 {
    number(list(device, count, out))
}

extern "C" fn no_processes(_device: Handle, count: Out<u32>, _out: Out<u8>) -> u32 {
    number(count.set(0))
}

fn table() -> &'static Table {
    TABLE.get_or_init(|| {
        let mut slots = [absent as *const c_void; SLOTS];
        slots[0] = std::ptr::without_provenance(SIZE);
        slots[LOGGER] = logger as *const c_void;
        slots[TOPOLOGY_LEVEL] = topology_level as *const c_void;
        slots[MONITORED] = monitored as *const c_void;
        slots[GLANCES] = glances as *const c_void;
        slots[HANDLE_BY_INDEX] = handle_by_index as *const c_void;
        let [compute, graphics, mps] = PROCESS_LISTS;
        slots[compute] = compute_processes as *const c_void;
        slots[graphics] = no_processes as *const c_void;
        slots[mps] = no_processes as *const c_void;
        Box::new(Table(slots))
    })
}

/// Gives the table to a caller that knows its id. Like the real library, it answers before nvmlInit too.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlInternalGetExportTable(out: Out<*const c_void>, id: Out<[u8; 16]>) -> u32 {
    number(match id.get() {
        Ok(ID) => out.set(std::ptr::from_ref(table()).cast()),
        Ok(_) => Err(Code::NOT_FOUND),
        Err(code) => Err(code),
    })
}
