//! Events between processes. A file in the node's shared directory stores the end of the work before the last
//! record.

use std::fs::{File, OpenOptions, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::PathBuf;

use gpushare_simulator::lock::Owner;
use gpushare_simulator::timeline::Mark;

use crate::abi::{Code, Handle, Out, Result};
use crate::context::current;
use crate::driver::{Driver, driver};

/// CUipcEventHandle as this driver fills it: the owner's slot and generation, the event's handle, the UUID of
/// its GPU.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct IpcHandle {
    magic: u64,
    slot: u32,
    generation: u32,
    id: u64,
    ordinal_uuid: [u8; 16],
    rest: [u8; 24],
}

const _: () = assert!(size_of::<IpcHandle>() == 64);

const MAGIC: u64 = 0x6770_7573_6970_6532;

/// The file of an event that several processes use.
pub struct SharedMark {
    file: File,
    /// Path of the file, in the process that made it.
    own: Option<PathBuf>,
    handle: IpcHandle,
}

/// Length of the file in words: a mark between two equal counts. If the counts differ, a writer is active,
/// and the reader tries again.
const WORDS: usize = 6;

impl SharedMark {
    /// Writes the end of the work before the event's last record.
    pub fn write(&self, mark: Mark) -> Result {
        let [a, b, c, d] = mark.words();
        let count = self.read_words()?[0].wrapping_add(1);
        let bytes: Vec<u8> = [count, a, b, c, d, count].into_iter().flat_map(u64::to_le_bytes).collect();
        self.file.write_all_at(&bytes, 0).map_err(|_| Code::OPERATING_SYSTEM)
    }

    /// Reads the mark of the last record, or the end of no work before the first record.
    pub fn read(&self) -> Result<Mark> {
        loop {
            let [before, a, b, c, d, after] = self.read_words()?;
            if before == after {
                return Ok(Mark::of_words([a, b, c, d]));
            }
        }
    }

    fn read_words(&self) -> Result<[u64; WORDS]> {
        let mut bytes = [[0; 8]; WORDS];
        self.file.read_exact_at(bytes.as_flattened_mut(), 0).map_err(|_| Code::OPERATING_SYSTEM)?;
        Ok(bytes.map(u64::from_le_bytes))
    }

    fn make(driver: &Driver, id: Handle, ordinal: i32) -> Result<Self> {
        let owner = driver.session.owner;
        let path = driver.session.reader.shared_memory(owner, id as u64);
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path);
        let file = file.map_err(|_| Code::OPERATING_SYSTEM)?;
        file.set_permissions(Permissions::from_mode(0o666)).map_err(|_| Code::OPERATING_SYSTEM)?;
        file.set_len(8 * WORDS as u64).map_err(|_| Code::OUT_OF_MEMORY)?;
        let handle = IpcHandle {
            magic: MAGIC,
            slot: owner.slot,
            generation: owner.generation,
            id: id as u64,
            ordinal_uuid: driver.gpu(ordinal)?.uuid_bytes(),
            rest: [0; 24],
        };
        Ok(Self { file, own: Some(path), handle })
    }

    fn open(driver: &Driver, handle: IpcHandle) -> Result<Self> {
        if handle.magic != MAGIC {
            return Err(Code::INVALID_VALUE);
        }
        let owner = Owner { slot: handle.slot, generation: handle.generation };
        if owner == driver.session.owner {
            return Err(Code::INVALID_CONTEXT);
        }
        let path = driver.session.reader.shared_memory(owner, handle.id);
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(|_| Code::INVALID_VALUE)?;
        Ok(Self { file, own: None, handle })
    }
}

impl Drop for SharedMark {
    fn drop(&mut self) {
        if let Some(path) = &self.own {
            // If this process dies first, the sweep for dead processes removes the file.
            let _ = std::fs::remove_file(path);
        }
    }
}

exports! {
    fn cuIpcGetEventHandle(out: Out<IpcHandle>, event: Handle) {
        out.given()?;
        let driver = driver()?;
        let event = driver.events.get(event)?;
        out.set(event.shared(|id, ordinal| SharedMark::make(driver, id, ordinal))?.handle)
    }

    fn cuIpcOpenEventHandle(out: Out<Handle>, handle: IpcHandle) {
        out.given()?;
        let driver = driver()?;
        let context = current()?;
        if driver.gpu(context.ordinal)?.uuid_bytes() != handle.ordinal_uuid {
            return Err(Code::INVALID_DEVICE);
        }
        out.set(driver.events.adopt(&context, SharedMark::open(driver, handle)?))
    }
}
