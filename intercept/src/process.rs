//! The state that one library keeps per process. It is in a mapping that the kernel wipes at fork. A child
//! therefore starts with no slot, an empty table and free locks, regardless of its parent's other threads.

use core::cell::UnsafeCell;
use core::ffi::CStr;
use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use crate::book::Book;
use crate::mutex::Mutex;
use crate::sys;

const NEW: u32 = 0;
const READY: u32 = 1;

/// The per-process part of a library: its books and its own state `T`.
///
/// All zero bytes must be a valid `T`, and its initial state.
#[repr(C)]
pub struct Process<T> {
    phase: AtomicU32,
    opening: Mutex<()>,
    /// The process that opened the books; only checked on kernels that do not wipe.
    pid: AtomicU32,
    unwiped: AtomicU32,
    book: UnsafeCell<Book>,
    /// The library's own state.
    pub state: T,
}

/// # Safety
/// All zero bytes are a valid value, which is also the initial one.
pub unsafe trait Zeroed: Sync + 'static {}

/// Provides a library with its process part.
pub struct Home<T> {
    process: AtomicPtr<Process<T>>,
    limits: &'static CStr,
    usage: &'static CStr,
}

impl<T: Zeroed> Home<T> {
    /// A home whose books are in the files at these paths.
    pub const fn new(limits: &'static CStr, usage: &'static CStr) -> Self {
        Self { process: AtomicPtr::new(core::ptr::null_mut()), limits, usage }
    }

    /// The process part; opens the books on the first call in a process. `None` if the kernel provides no
    /// memory.
    pub fn get(&self) -> Option<&'static Process<T>> {
        let pointer = self.process.load(Ordering::Acquire);
        if pointer.is_null() {
            return self.create();
        }
        // SAFETY: `create` published a mapping that is never unmapped.
        let process = unsafe { &*pointer };
        if process.phase.load(Ordering::Acquire) == READY
            && (process.unwiped.load(Ordering::Relaxed) == 0
                || process.pid.load(Ordering::Relaxed) == sys::pid())
        {
            return Some(process);
        }
        Some(self.open(process))
    }

    #[cold]
    fn create(&self) -> Option<&'static Process<T>> {
        let length = size_of::<Process<T>>();
        let address = sys::map_private(length).ok()?;
        let new: *mut Process<T> = core::ptr::with_exposed_provenance_mut(address);
        let wiped = sys::wipe_on_fork(address, length);
        let null = core::ptr::null_mut();
        match self.process.compare_exchange(null, new, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: zero bytes are a valid process part, and it is never unmapped.
            Ok(_) => unsafe { &*new }.unwiped.store(u32::from(!wiped), Ordering::Relaxed),
            // SAFETY: another thread was faster, and this mapping was never published.
            Err(_) => unsafe { sys::unmap(address, length) },
        }
        self.get()
    }

    #[cold]
    fn open(&self, process: &'static Process<T>) -> &'static Process<T> {
        if process.phase.load(Ordering::Acquire) == READY {
            process.forget();
        }
        let opening = process.opening.lock();
        if process.phase.load(Ordering::Acquire) == NEW {
            let book = Book::open(self.limits, self.usage);
            // SAFETY: readers wait for READY, and writers for `opening`.
            unsafe { process.book.get().write(book) };
            process.pid.store(sys::pid(), Ordering::Relaxed);
            process.phase.store(READY, Ordering::Release);
        }
        drop(opening);
        process
    }
}

impl<T: Zeroed> Process<T> {
    /// The container's books.
    pub fn book(&self) -> &Book {
        // SAFETY: `Home::get` returns a process part only after the book is written; it is not written again.
        unsafe { &*self.book.get() }
    }

    /// Wipes the process part explicitly, on an old kernel that did not. Runs in a forked child that still
    /// has only one thread.
    fn forget(&'static self) {
        let address = core::ptr::from_ref(self).cast_mut();
        // SAFETY: zero bytes are a valid process part; the child has a single thread at its first call.
        unsafe { address.write_bytes(0, 1) };
        self.unwiped.store(1, Ordering::Relaxed);
    }
}

// SAFETY: the book is written once, under `opening`, before READY publishes it; everything else is shareable
// by itself.
unsafe impl<T: Zeroed> Sync for Process<T> {}
