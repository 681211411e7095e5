//! Maps the `limits` file for writing. Besides `live::sys` this is the only module of this crate with
//! `unsafe` in it.
//!
//! The file is mapped, not written with `pwrite`. Libraries read single words without looking at the
//! sequence, so each word must change in one store, and the kernel promises nothing about how its copy stores
//! bytes. The price: a container that may mount (CAP_SYS_ADMIN on the host) can cut the file short under us,
//! and a store beyond its end raises SIGBUS. The handler then puts memory of our own in place of the file
//! that is being written. The store goes there, and the caller gets an error.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use gpushare_region::{LIMITS_LEN, LimitsFile};
use nix::libc::{c_int, c_void, siginfo_t};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

const LENGTH: NonZeroUsize = NonZeroUsize::new(LIMITS_LEN).unwrap();
const WRITABLE: ProtFlags = ProtFlags::PROT_READ.union(ProtFlags::PROT_WRITE);

/// Address of the mapping that is being written, 0 for none. Only the holder of [`ONE`] sets it.
static GUARDED: AtomicUsize = AtomicUsize::new(0);
/// Whether the file was cut short under the writer.
static LOST: AtomicBool = AtomicBool::new(false);
/// One file is written at a time in this process.
static ONE: Mutex<()> = Mutex::new(());
static HANDLER: OnceLock<Result<(), nix::Error>> = OnceLock::new();

/// A mapped limits file, unmapped on drop.
#[derive(Debug)]
pub(super) struct Mapped(NonNull<c_void>);

impl Mapped {
    /// Maps `file`, which is open for reading and writing.
    ///
    /// # Errors
    /// When it cannot be mapped.
    pub(super) fn of(file: &File) -> io::Result<Self> {
        (*HANDLER.get_or_init(install))?;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        Ok(Self(unsafe { mmap(None, LENGTH, WRITABLE, MapFlags::MAP_SHARED, file, 0) }?))
    }

    /// Lets `act` write into the file.
    ///
    /// # Errors
    /// When the file was cut short. From then on the mapping is no longer the file.
    pub(super) fn write<T>(&self, act: impl FnOnce(&LimitsFile) -> T) -> io::Result<T> {
        let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        GUARDED.store(self.0.as_ptr().addr(), Ordering::SeqCst);
        // SAFETY: the mapping is page-aligned, as long as a `LimitsFile`, stays as long as `self`, and every
        // byte of it belongs to an atomic integer, whoever else writes there.
        let done = act(unsafe { self.0.cast::<LimitsFile>().as_ref() });
        GUARDED.store(0, Ordering::SeqCst);
        match LOST.swap(false, Ordering::SeqCst) {
            true => Err(io::Error::other("the container cut its limits file short")),
            false => Ok(done),
        }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: nothing refers to the mapping any more.
        let _ = unsafe { munmap(self.0, LIMITS_LEN) };
    }
}

/// Maps `file`, which is open for reading and writing, and lets `act` write into it.
///
/// # Errors
/// When it cannot be mapped, or was cut short meanwhile.
pub(super) fn write<T>(file: &File, act: impl FnOnce(&LimitsFile) -> T) -> io::Result<T> {
    Mapped::of(file)?.write(act)
}

fn install() -> Result<(), nix::Error> {
    let action = SigAction::new(SigHandler::SigAction(on_bus_error), SaFlags::SA_SIGINFO, SigSet::empty());
    // SAFETY: the handler makes one system call and touches two atomics.
    unsafe { sigaction(Signal::SIGBUS, &action) }.map(drop)
}

extern "C" fn on_bus_error(_: c_int, info: *mut siginfo_t, _: *mut c_void) {
    // SAFETY: with SA_SIGINFO the kernel hands over a valid siginfo.
    let info = unsafe { &*info };
    // SAFETY: every SIGBUS that a memory access raised has the address.
    let address = unsafe { info.si_addr() }.addr();
    let page = GUARDED.load(Ordering::SeqCst);
    if page == 0 || address.wrapping_sub(page) >= LIMITS_LEN || !replace(page) {
        // Not our mapping. The access is repeated and raises the signal again, which now ends the process.
        let default = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
        // SAFETY: the default action runs no code of ours.
        let _ = unsafe { sigaction(Signal::SIGBUS, &default) };
    }
}

/// Puts empty memory of our own in place of the whole mapping.
fn replace(page: usize) -> bool {
    LOST.store(true, Ordering::SeqCst);
    let flags = MapFlags::MAP_FIXED | MapFlags::MAP_PRIVATE;
    let at = NonZeroUsize::new(page);
    // SAFETY: this replaces the mapping of the file, which the interrupted `write` owns, and nothing else.
    let made = unsafe { mmap_anonymous(at, LENGTH, WRITABLE, flags) };
    made.is_ok_and(|made: NonNull<c_void>| made.as_ptr().addr() == page)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;

    #[test]
    fn a_file_that_is_cut_short_under_the_writer_is_an_error_and_no_signal() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(LIMITS_LEN as u64).unwrap();
        write(&file, |limits| limits.header.devices.store(3, Relaxed)).unwrap();
        let error = write(&file, |limits| {
            file.set_len(0).unwrap();
            limits.header.devices.store(4, Relaxed);
        });
        assert!(error.unwrap_err().to_string().contains("cut its limits file short"));
        file.set_len(LIMITS_LEN as u64).unwrap();
        assert_eq!(write(&file, |limits| limits.header.devices.load(Relaxed)).unwrap(), 0);
    }
}
