//! The memory that keeper and worker share: books and journal. It outlives both processes.
#![allow(unsafe_code)]

use std::ops::Deref;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use nix::errno::Errno;
use nix::sys::mman::munmap;
use nix::unistd::{Whence, lseek};

use crate::books::{MOST_OBJECTS, Record};
use crate::budget::{MOST_SLOTS, Page};
use crate::journal::Entry;
use crate::tasks::Touch;
use crate::{board, sys};

/// Room for the journal's entry, a page.
const JOURNAL: usize = 4096;

/// Size of the shared memory in bytes.
pub const SIZE: usize = JOURNAL + MOST_OBJECTS * size_of::<Record>();

const _: () = assert!(size_of::<Entry>() + size_of::<AtomicU64>() <= JOURNAL && SIZE <= 8 << 20);

/// A container's memory as one worker maps it.
pub struct Mapped {
    /// The journal's entry.
    pub entry: &'static mut Entry,
    /// The records of the books.
    pub records: &'static mut [Record],
    /// Number of records up to the last one ever written. Reading beyond it would allocate memory.
    pub written: usize,
    /// Deadline for touching a program's memory.
    pub touch: Touch,
}

/// Maps a container's memory, which one worker at a time uses exclusively.
///
/// # Errors
/// The errors of mmap(2).
pub fn map(file: impl AsFd) -> Result<Mapped, Errno> {
    let base: *mut u8 = sys::map(&file, 0, SIZE)?;
    // SAFETY: both are within the mapping, which is never undone, and do not overlap. Any bytes are valid
    // values. The keeper maps nothing, and a worker starts after the previous one has ended.
    let entry = unsafe { &mut *base.cast::<Entry>() };
    // SAFETY: within the mapping.
    let records = unsafe { base.add(JOURNAL) }.cast::<Record>();
    // SAFETY: as above.
    let records = unsafe { std::slice::from_raw_parts_mut(records, MOST_OBJECTS) };
    // SAFETY: within the mapping, behind the entry and before the records.
    let touch = unsafe { base.add(JOURNAL - size_of::<AtomicU64>()) }.cast::<AtomicU64>();
    // SAFETY: as above; it is an atomic.
    let touch = Touch(unsafe { &*touch });
    let written = written(file).div_ceil(size_of::<Record>());
    Ok(Mapped { entry, records, written, touch })
}

/// Returns the number of bytes between the journal and the end of the last page in use.
fn written(file: impl AsFd) -> usize {
    let start = i64::try_from(JOURNAL).unwrap_or(0);
    let mut end = start;
    while let Ok(hole) =
        lseek(&file, end, Whence::SeekData).and_then(|data| lseek(&file, data, Whence::SeekHole))
    {
        end = hole;
    }
    usize::try_from(end - start).unwrap_or(SIZE)
}

/// A lease's budget for the process that grants it, mapped while this value lives.
#[derive(Debug)]
pub struct OpenBudget(NonNull<Page>);

impl OpenBudget {
    /// Opens the budget in `file`, which must be open for reading and writing.
    ///
    /// # Errors
    /// The errors of [`map_budget`].
    pub fn open(file: impl AsFd) -> Result<Self, Errno> {
        map_budget(file).map(|page| Self(NonNull::from(page)))
    }
}

impl Deref for OpenBudget {
    type Target = Page;

    fn deref(&self) -> &Page {
        // SAFETY: the mapping lives as long as this value. All fields are atomics.
        unsafe { self.0.as_ref() }
    }
}

impl Drop for OpenBudget {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, and no reference into it outlives the value.
        let _ = unsafe { munmap(self.0.cast(), size_of::<Page>()) };
    }
}

/// Whether a living supervisor charges to the budget in `file`.
///
/// # Errors
/// The errors of fcntl(2).
pub fn is_in_use(file: impl AsFd) -> Result<bool, Errno> {
    sys::has_locks(file, MOST_SLOTS)
}

/// Maps a lease's budget, which other supervisors map too.
///
/// # Errors
/// The errors of mmap(2); EINVAL for a file with another layout.
pub fn map_budget(file: impl AsFd) -> Result<&'static Page, Errno> {
    let size = nix::sys::stat::fstat(&file)?.st_size;
    if usize::try_from(size) != Ok(size_of::<Page>()) {
        return Err(Errno::EINVAL);
    }
    let page: *mut Page = sys::map(file, 0, 1)?;
    // SAFETY: the mapping is never undone, all fields are atomics, and any bytes are valid values.
    let page = unsafe { &*page };
    if page.is_known() { Ok(page) } else { Err(Errno::EINVAL) }
}

/// Maps a GPU's board, which all supervisors of the node map.
///
/// # Errors
/// The errors of mmap(2).
pub(crate) fn map_board(file: impl AsFd) -> Result<&'static board::Page, Errno> {
    let page: *mut board::Page = sys::map(file, 0, 1)?;
    // SAFETY: the mapping stays while any holder has the page, all fields are atomics, and any bytes are
    // valid values. The file was made long enough, and only root may truncate it.
    Ok(unsafe { &*page })
}

/// Undoes [`map_board`]. The caller has the only reference to the page, and drops it.
pub(crate) fn unmap_board(page: &'static board::Page) {
    let address = NonNull::from(page).cast();
    // SAFETY: it is a whole mapping of this size, and no longer in use.
    let _ = unsafe { munmap(address, size_of::<board::Page>()) };
}

#[cfg(test)]
mod tests {
    use nix::sys::memfd::{MFdFlags, memfd_create};
    use nix::sys::uio::pwrite;
    use nix::unistd::ftruncate;

    use super::*;

    #[test]
    fn records_that_were_never_written_to_are_not_looked_at() {
        let file = memfd_create("test", MFdFlags::MFD_CLOEXEC).unwrap();
        ftruncate(&file, i64::try_from(SIZE).unwrap()).unwrap();
        assert_eq!(written(&file), 0);
        pwrite(&file, &[1], 8).unwrap();
        assert_eq!(written(&file), 0, "the journal is none");
        pwrite(&file, &[1], i64::try_from(JOURNAL + 5 * 4096 + 7).unwrap()).unwrap();
        assert_eq!(written(&file), 6 * 4096);
        pwrite(&file, &[1], i64::try_from(SIZE - 1).unwrap()).unwrap();
        assert!(written(&file) >= SIZE - JOURNAL);
    }
}
