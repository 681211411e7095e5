//! Memory of arrays that have none of their own: allocation handles mapped to pieces of sparse and deferred
//! arrays.
//!
//! A mapping keeps its memory charged, as a mapping to addresses does. The bytes are not accessible: only
//! textures could read a sparse array, and they are not simulated.

use std::collections::HashMap;
use std::sync::Mutex;

use crate::abi::{Code, Handle, In, Result};
use crate::driver::{Driver, driver, locked};

/// CUarrayMapInfo of the driver's interface.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Piece {
    resource_kind: u32,
    resource: Handle,
    piece_kind: u32,
    /// For a level: level, layer, offsets and extents. For the tail of small levels: layer, offset and size.
    piece: [u64; 4],
    operation: u32,
    handle_kind: u32,
    memory: Handle,
    offset: u64,
    devices: u32,
    flags: u32,
    reserved: [u32; 2],
}

const _: () = assert!(size_of::<Piece>() == 96);

const ARRAY: u32 = 0;
const MIPMAPPED: u32 = 1;
const MAP: u32 = 1;
const UNMAP: u32 = 2;

type Key = (Handle, u32, [u64; 4]);

/// The memory mapped to pieces of all arrays.
#[derive(Default)]
pub struct Sparse {
    pieces: Mutex<HashMap<Key, Handle>>,
}

impl Sparse {
    /// Unmaps the memory of a dying array.
    pub fn forget(&self, driver: &Driver, array: Handle) {
        let mut pieces = locked(&self.pieces);
        let gone: Vec<Key> = pieces.keys().filter(|key| key.0 == array).copied().collect();
        for memory in gone.into_iter().filter_map(|key| pieces.remove(&key)) {
            let _ = driver.memory.let_go(driver, memory);
        }
    }

    fn change(&self, driver: &Driver, piece: &Piece) -> Result {
        let unbacked = match piece.resource_kind {
            ARRAY => driver.arrays.is_unbacked(piece.resource)?,
            MIPMAPPED => driver.arrays.is_unbacked_mipmapped(piece.resource)?,
            _ => return Err(Code::INVALID_VALUE),
        };
        if !unbacked {
            return Err(Code::INVALID_VALUE);
        }
        let key = (piece.resource, piece.piece_kind, piece.piece);
        let mut pieces = locked(&self.pieces);
        let before = match piece.operation {
            MAP => {
                driver.memory.hold(piece.memory, piece.offset, 0)?;
                pieces.insert(key, piece.memory)
            }
            UNMAP => pieces.remove(&key),
            _ => return Err(Code::INVALID_VALUE),
        };
        // Either operation ends the previous mapping.
        before.map_or(Ok(()), |memory| driver.memory.let_go(driver, memory))
    }
}

exports! {
    fn cuMemMapArrayAsync thread cuMemMapArrayAsync_ptsz (list: In<Piece>, count: u32, stream: Handle) {
        let driver = driver()?;
        driver.stream(stream)?;
        list.list(count as usize)?.iter().try_for_each(|piece| driver.sparse.change(driver, piece))
    }
}
