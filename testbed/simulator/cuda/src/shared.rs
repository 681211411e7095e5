//! Memory shared between processes through IPC handles, and memory imported from other interfaces.
//!
//! An exported allocation moves to a file in the node's shared directory, which its owner and every importer
//! map. Only the owner is charged.

use std::collections::HashMap;
use std::fs::{File, OpenOptions, Permissions};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Mutex;

use gpushare_simulator::lock::Owner;
use gpushare_simulator::memory::LARGE;

use crate::abi::{Code, DevicePointer, Handle, In, Out, Result, bytes_at};
use crate::context::current;
use crate::driver::{Driver, driver, locked};
use crate::heap::{Allocation, Kind, reserve, unreserve};
use crate::registry::Registry;
use crate::vmm::{map_file, unmap_file};

/// CUipcMemHandle as this driver fills it: the owner's slot and generation, the allocation's number, the
/// length of the file, the allocation's offset in it, and the UUID of its GPU.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct IpcHandle {
    magic: u64,
    slot: u32,
    generation: u32,
    id: u64,
    length: u64,
    offset: u64,
    ordinal_uuid: [u8; 16],
    rest: [u8; 8],
}

const _: () = assert!(size_of::<IpcHandle>() == 64);

const MAGIC: u64 = 0x6770_7573_6970_6331;
const PAGE: u64 = 4096;

/// Memory that this process exported or imported.
#[derive(Default)]
pub struct Shared {
    /// Handles and files of exported allocations, by first address.
    exported: Mutex<HashMap<u64, (IpcHandle, PathBuf)>>,
    /// Base and length of the mappings of imported memory, by first address.
    opened: Mutex<HashMap<u64, (u64, u64)>>,
    external: Registry<External>,
}

struct External {
    file: File,
    length: u64,
}

fn path_of(driver: &Driver, handle: &IpcHandle) -> PathBuf {
    let owner = Owner { slot: handle.slot, generation: handle.generation };
    driver.session.reader.shared_memory(owner, handle.id)
}

fn export(driver: &Driver, start: u64) -> Result<IpcHandle> {
    let found = *locked(&driver.heap).at(start).ok_or(Code::INVALID_VALUE)?;
    if found.kind != Kind::Device {
        return Err(Code::INVALID_VALUE);
    }
    let mut exported = locked(&driver.sharing.exported);
    if let Some((handle, _)) = exported.get(&start) {
        return Ok(*handle);
    }
    let first = start / PAGE * PAGE;
    let length = (start + found.extent).next_multiple_of(PAGE) - first;
    let handle = IpcHandle {
        magic: MAGIC,
        slot: driver.session.owner.slot,
        generation: driver.session.owner.generation,
        id: found.id,
        length,
        offset: start - first,
        ordinal_uuid: driver.gpu(found.ordinal)?.uuid_bytes(),
        rest: [0; 8],
    };
    let path = path_of(driver, &handle);
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path);
    let file = file.map_err(|_| Code::OPERATING_SYSTEM)?;
    file.set_permissions(Permissions::from_mode(0o666)).map_err(|_| Code::OPERATING_SYSTEM)?;
    file.set_len(length).map_err(|_| Code::OUT_OF_MEMORY)?;
    let content = bytes_at(first, usize::try_from(length).map_err(|_| Code::OUT_OF_MEMORY)?)?;
    std::os::unix::fs::FileExt::write_all_at(&file, &content, 0).map_err(|_| Code::OUT_OF_MEMORY)?;
    map_file(&file, first, length, 0)?;
    exported.insert(start, (handle, path));
    Ok(handle)
}

/// Maps `length` bytes of `file` at new addresses, and returns the address of the memory, which starts
/// `inner` bytes into them.
fn show(driver: &Driver, file: &File, length: u64, offset: u64, inner: u64, ordinal: i32) -> Result<u64> {
    let whole = length.next_multiple_of(PAGE);
    let base = reserve(whole + LARGE)?;
    map_file(file, base, whole, offset)?;
    let start = base + inner;
    let context = current()?.handle;
    let shown =
        Allocation::new(ordinal, context, Kind::Imported, length - inner, length - inner, 0).starting(start);
    locked(&driver.heap).adopt(shown);
    locked(&driver.sharing.opened).insert(start, (base, whole + LARGE));
    Ok(start)
}

impl Driver {
    /// Removes the file of an exported allocation that is freed, and puts fresh memory in its place.
    pub fn unshare(&self, start: u64) {
        let gone = locked(&self.sharing.exported).remove(&start);
        if let Some((handle, path)) = gone {
            unmap_file(start - handle.offset, handle.length);
            let _ = std::fs::remove_file(path);
        }
    }

    /// Unmaps the imported memory that starts at `start`.
    pub fn close_import(&self, start: u64) -> Result {
        let (base, length) = locked(&self.sharing.opened).remove(&start).ok_or(Code::INVALID_VALUE)?;
        locked(&self.heap).remove(start)?;
        unreserve(base, length);
        Ok(())
    }
}

fn open(handle: &IpcHandle) -> Result<u64> {
    let driver = driver()?;
    current()?;
    if handle.magic != MAGIC || handle.offset >= handle.length {
        return Err(Code::INVALID_VALUE);
    }
    if handle.slot == driver.session.owner.slot && handle.generation == driver.session.owner.generation {
        return Err(Code::INVALID_CONTEXT);
    }
    let file = OpenOptions::new().read(true).write(true).open(path_of(driver, handle));
    let file = file.map_err(|_| Code::INVALID_VALUE)?;
    let here = (0..).map_while(|ordinal| driver.gpu(ordinal).ok().map(|gpu| (ordinal, gpu)));
    let same = here.into_iter().find(|(_, gpu)| gpu.uuid_bytes() == handle.ordinal_uuid);
    show(driver, &file, handle.length, 0, handle.offset, same.ok_or(Code::INVALID_DEVICE)?.0)
}

/// CUDA_EXTERNAL_MEMORY_HANDLE_DESC, up to its flags.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ExternalDescription {
    kind: u32,
    descriptor: i32,
    rest: [u64; 2],
    length: u64,
    flags: u32,
}

exports! {
    fn cuIpcGetMemHandle(out: Out<IpcHandle>, start: DevicePointer) {
        out.given()?;
        out.set(export(driver()?, start)?)
    }

    fn cuIpcOpenMemHandle_v2 also cuIpcOpenMemHandle (out: Out<DevicePointer>, handle: IpcHandle, _flags: u32) {
        out.given()?;
        out.set(open(&handle)?)
    }

    fn cuIpcCloseMemHandle(start: DevicePointer) {
        driver()?.close_import(start)
    }

    /// Imports memory from another interface. No process is charged for it here.
    fn cuImportExternalMemory(out: Out<Handle>, description: In<ExternalDescription>) {
        out.given()?;
        let driver = driver()?;
        let wanted = description.get()?;
        if wanted.kind != 1 {
            return Err(Code::NOT_SUPPORTED);
        }
        if wanted.descriptor < 0 || wanted.length == 0 {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: by CUDA's documentation of this type, the caller transfers its descriptor to the driver.
        let file = File::from(unsafe { OwnedFd::from_raw_fd(wanted.descriptor) });
        out.set(driver.sharing.external.add(External { file, length: wanted.length }))
    }

    /// The buffer holds offset, length and flags.
    fn cuExternalMemoryGetMappedBuffer(out: Out<DevicePointer>, memory: Handle, buffer: In<[u64; 3]>) {
        out.given()?;
        let driver = driver()?;
        let external = driver.sharing.external.get(memory)?;
        let [offset, length, _] = buffer.get()?;
        let inside = offset.checked_add(length).is_some_and(|end| end <= external.length);
        if length == 0 || !inside || !offset.is_multiple_of(PAGE) {
            return Err(Code::INVALID_VALUE);
        }
        out.set(show(driver, &external.file, length, offset, 0, current()?.ordinal)?)
    }

    fn cuDestroyExternalMemory(memory: Handle) {
        driver()?.sharing.external.remove(memory).map(|_| ())
    }
}
