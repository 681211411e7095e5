//! Memory that RM writes while this process reads it.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use gpushare_supervisor::abi::switches::record;
use nix::errno::Errno;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

/// The memory, mapped while this value lives.
pub struct Mapped {
    base: NonNull<c_void>,
    size: usize,
}

// SAFETY: the mapping belongs to the process and is only read, by atomic loads.
unsafe impl Send for Mapped {}

impl Mapped {
    /// Maps the first `size` bytes of a file.
    ///
    /// # Errors
    /// The errors of mmap(2).
    pub fn new(file: impl AsFd, size: usize) -> Result<Self, Errno> {
        let length = NonZeroUsize::new(size).ok_or(Errno::EINVAL)?;
        // SAFETY: the kernel chooses the address, so the mapping touches no other memory of this process.
        let base = unsafe { mmap(None, length, ProtFlags::PROT_READ, MapFlags::MAP_SHARED, file, 0) }?;
        Ok(Self { base, size })
    }

    /// Returns the address of `bytes` bytes at this offset, which is a multiple of 8.
    fn at(&self, offset: usize, bytes: usize) -> *mut u8 {
        assert!(offset.is_multiple_of(8.min(bytes)) && offset + bytes <= self.size, "within the mapping");
        // SAFETY: within the mapping.
        unsafe { self.base.as_ptr().cast::<u8>().add(offset) }
    }

    /// Loads a 32-bit word. Reads after it see all that RM wrote before it.
    pub fn word(&self, offset: usize) -> u32 {
        // SAFETY: within the mapping and aligned, which `at` ensures.
        unsafe { AtomicU32::from_ptr(self.at(offset, size_of::<u32>()).cast()) }.load(Ordering::Acquire)
    }

    /// Loads a 64-bit word with the same ordering.
    pub fn long(&self, offset: usize) -> u64 {
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(self.at(offset, size_of::<u64>()).cast()) }.load(Ordering::Acquire)
    }

    /// Copies one line of the record.
    pub fn line(&self, offset: usize) -> [u8; record::SIZE] {
        let mut line = [0; record::SIZE];
        for (at, bytes) in (offset..).step_by(8).zip(line.chunks_exact_mut(8)) {
            bytes.copy_from_slice(&self.long(at).to_ne_bytes());
        }
        line
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, and no reference into it is left.
        let _ = unsafe { munmap(self.base, self.size) };
    }
}
