//! The region of a living container. Writes its grants and measurements in place, and reads its usage.
//!
//! A bind mount pins the `limits` file's inode, so the file is never replaced or shortened. The container may
//! write `usage`: it is read with a bounded `pread`, never mapped, and nothing in it is believed.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::Ordering;

use gpushare_inventory::FileIdentity;
use gpushare_quota::{Lease, Running};
use gpushare_region::{
    ContextCost, Damaged, LIMITS_LEN, LimitsFile, MAX_DEVICES, Measurement, Overhead, ProcessUsage,
    USAGE_HEADER_LEN, USAGE_LEN, Usage, grants_are, measurements, processes, read_throttled, read_usage_of,
    read_wishes, usage_length,
};
use nix::fcntl::OFlag;

use super::mapped::Mapped;
use super::{Region, encoded, is_supervised, limits, mapped, usage_name};
use crate::context_costs::ContextCosts;

/// Why a container's `usage` file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum UsageError {
    /// It is not there: the container ended, or holds whole GPUs and so has none.
    #[error("no usage file")]
    Io(#[from] io::Error),
    /// The container cut or changed it.
    #[error(transparent)]
    Damaged(#[from] Damaged),
}

const FOREIGN: &str = "another version of gpushare started the container, and its limits have a layout that this one does not \
                       know; start it anew";

/// A living `limits` file that measurements are written into.
#[derive(Debug)]
pub struct Measuring(Mapped);

impl Measuring {
    /// Writes the measurement of one line (a GPU's index in the lease). A line that the file does not have is
    /// ignored.
    ///
    /// # Errors
    /// When the container has cut the file short. What is written from then on reaches nobody.
    pub fn set(&self, line: usize, value: &Measurement) -> io::Result<()> {
        self.0.write(|file| {
            if let Some(place) = file.measured.get(line) {
                place.set(value);
            }
        })
    }
}

impl Measuring {
    /// Writes what contexts are charged as on the GPU of `line`. A line that the file does not have is ignored.
    ///
    /// # Errors
    /// As [`Measuring::set`].
    pub fn set_context_cost(&self, line: usize, cost: ContextCost) -> io::Result<()> {
        self.0.write(|file| {
            if let Some(place) = file.devices.get(line) {
                place.set_context_cost(cost);
            }
        })
    }

    /// Writes what the container's contexts really take on the GPU of `line`, as seen at `now` in monotonic
    /// nanoseconds. A line that the file does not have is ignored.
    ///
    /// # Errors
    /// As [`Measuring::set`].
    pub fn set_overhead(&self, line: usize, overhead: Option<Overhead>, now: u64) -> io::Result<()> {
        self.0.write(|file| {
            if let Some(place) = file.devices.get(line) {
                place.set_overhead(overhead, now);
            }
        })
    }

    /// Tells the container what the node could add to its memory limit on the GPU of `line`, in MiB, and that
    /// its wish of this number was answered. A line that the file does not have is ignored.
    ///
    /// # Errors
    /// As [`Measuring::set`].
    pub fn answer(&self, line: usize, room_mebibytes: u32, answered: u32) -> io::Result<()> {
        self.0.write(|file| {
            if let Some(place) = file.measured.get(line) {
                place.room_mebibytes.store(room_mebibytes, Ordering::Relaxed);
                place.answered.store(answered, Ordering::SeqCst);
            }
        })
    }
}

/// How often a file that is being written is read again before the reader gives up.
const TRIES: usize = 5;
impl Region {
    /// Writes the lease's grants into the living `limits` file. There must be one writer at a time: the
    /// caller holds the store's turn.
    ///
    /// # Errors
    /// When the file is not there, or the container cuts it short at this very moment.
    pub fn set_grants(&self, lease: &Lease) -> io::Result<()> {
        self.budgets.grant(lease)?;
        let file = self.open_limits()?;
        let length = u64::try_from(LIMITS_LEN).map_err(io::Error::other)?;
        if file.metadata()?.len() != length {
            file.set_len(length)?;
        }
        let host = lease.host_memory.bytes();
        mapped::write(&file, |file| file.set_grants(&limits(lease), host, is_supervised(lease)))
    }

    pub(super) fn set_context_costs(&self, lease: &Lease, costs: &ContextCosts) -> io::Result<()> {
        mapped::write(&self.open_limits()?, |file| {
            for (line, grant) in file.devices.iter().zip(&lease.grants) {
                line.set_context_cost(costs.of(grant.gpu));
            }
        })
    }

    /// Writes the lease's memory limits alone into the living `limits` file: the container's account of
    /// compute goes on. A process that reserves memory after this obeys them; what was reserved before, the
    /// container's books show from now on. There must be one writer at a time: the caller holds the store's
    /// turn.
    ///
    /// # Errors
    /// As [`Region::set_grants`].
    pub fn set_memory(&self, lease: &Lease) -> io::Result<()> {
        self.budgets.grant(lease)?;
        let file = self.open_limits()?;
        mapped::write(&file, |file| file.set_memory(lease.grants.iter().map(|grant| grant.memory.bytes())))
    }

    /// Whether the memory limits in the living `limits` file are at most those of the lease.
    ///
    /// # Errors
    /// As [`Region::set_grants`].
    pub fn has_less_memory(&self, lease: &Lease) -> io::Result<bool> {
        let is_less = |file: &LimitsFile| {
            let mut grants = lease.grants.iter().enumerate();
            grants.all(|(line, grant)| (1..=grant.memory.bytes()).contains(&file.memory(line)))
        };
        mapped::write(&self.open_limits()?, is_less)
    }

    /// Whether the living `limits` file grants what the lease says. A container that may mount can change the
    /// file.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn grants_are(&self, lease: &Lease) -> io::Result<bool> {
        if !self.budgets.grants_are(lease)? {
            return Ok(false);
        }
        let granted = encoded(lease).map_err(io::Error::other)?;
        // One byte more than a whole file has: this shows that a file was made longer.
        let bytes = read(&open(&self.limits, false)?, LIMITS_LEN + 1)?;
        Ok(grants_are(&bytes, &granted))
    }

    /// Opens the living `limits` file for measurements. There must be one meter at a time.
    ///
    /// # Errors
    /// As [`Region::set_grants`].
    pub fn to_measure(&self) -> io::Result<Measuring> {
        Mapped::of(&self.open_limits()?).map(Measuring)
    }

    /// The current measurements, by line.
    ///
    /// # Errors
    /// When the file cannot be read, is too short, or is written all the time.
    pub fn measured(&self) -> io::Result<[Measurement; MAX_DEVICES]> {
        let file = open(&self.limits, false)?;
        for _ in 0..TRIES {
            let bytes = read(&file, LIMITS_LEN)?;
            if bytes == read(&file, LIMITS_LEN)? {
                return measurements(&bytes).ok_or_else(|| io::Error::other("limits file cut short"));
            }
        }
        Err(io::Error::other("limits file written all the time"))
    }

    /// What the container says that it holds on the first `lines` of its GPUs. A process that was killed
    /// leaves its slot to the next process that needs memory. Such a slot does not count: `running` does not
    /// know its owner. The slots' locks say the same of most, but the kernel is not asked for them: it walks all
    /// locks of the file, of which the container has as many as it likes.
    ///
    /// # Errors
    /// When there is no such file, or it is damaged.
    pub fn read_usage(&self, running: &Running, lines: usize) -> Result<Usage, UsageError> {
        Self::usage_in(&self.open_usage(false)?, running, lines)
    }

    /// As [`Region::read_usage`], of a `usage` file that [`Region::hold`] keeps open.
    ///
    /// # Errors
    /// As [`Region::read_usage`].
    pub fn usage_in(file: &File, running: &Running, lines: usize) -> Result<Usage, UsageError> {
        // Pages of the buffer that are not filled cost nothing. A file that ends too early is damaged, and is
        // found so below.
        let mut bytes = vec![0; USAGE_LEN];
        if file.metadata()?.len() < USAGE_LEN as u64
            || read_into(file, &mut bytes[..usage_length(lines)])? == 0
        {
            return Err(UsageError::Damaged(Damaged));
        }
        Ok(read_usage_of(&bytes, |process| running.may_have(process.pid, process.start_time))?)
    }

    /// The processes that have a slot in a `usage` file that [`Region::hold`] keeps open, as the container says.
    ///
    /// # Errors
    /// As [`Region::read_usage`].
    pub fn processes_in(file: &File) -> Result<Vec<ProcessUsage>, UsageError> {
        let mut bytes = vec![0; USAGE_LEN];
        if file.metadata()?.len() < USAGE_LEN as u64 || read_into(file, &mut bytes[..usage_length(0)])? == 0 {
            return Err(UsageError::Damaged(Damaged));
        }
        Ok(processes(&bytes)?.collect())
    }

    /// The memory limits that the container wishes for, by line: number of the wish, and bytes. `file` is one
    /// that [`Region::hold`] keeps open.
    ///
    /// # Errors
    /// As [`Region::read_usage`].
    pub fn wishes_in(file: &File) -> Result<[(u32, u64); MAX_DEVICES], UsageError> {
        Ok(read_wishes(&read(file, USAGE_HEADER_LEN)?)?)
    }

    /// For how long the container says that launches were held back, in nanoseconds by line.
    ///
    /// # Errors
    /// As [`Region::read_usage`].
    pub fn read_throttled(&self) -> Result<[u64; MAX_DEVICES], UsageError> {
        Self::throttled_in(&self.open_usage(false)?)
    }

    /// As [`Region::read_throttled`], of a file that is open already.
    ///
    /// # Errors
    /// As [`Region::read_usage`].
    pub fn throttled_in(file: &File) -> Result<[u64; MAX_DEVICES], UsageError> {
        Ok(read_throttled(&read(file, USAGE_HEADER_LEN)?)?)
    }

    /// Opens `usage` for reading, for who looks at it again and again.
    ///
    /// # Errors
    /// When it is not there, or somebody has a file lease on it.
    pub fn open_books(&self) -> io::Result<File> {
        self.open_usage(false)
    }

    fn open_limits(&self) -> io::Result<File> {
        open(&self.limits, true).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound if self.is_foreign() => io::Error::other(FOREIGN),
            _ => error,
        })
    }

    /// Opens `usage` as [`open`] does, wherever it is mounted.
    pub(super) fn open_usage(&self, for_writing: bool) -> io::Result<File> {
        self.at_usage(|path| open(path, for_writing))
    }

    /// Device and inode of `limits` and `usage`. This opens neither, so no file lease makes it wait.
    pub fn identities(&self) -> [Option<FileIdentity>; 2] {
        [FileIdentity::of(&self.limits).ok(), self.at_usage(FileIdentity::of).ok()]
    }

    /// What `look` finds at the path of `usage`. Earlier versions mounted it on the host.
    fn at_usage<T: Send>(&self, look: impl Fn(&Path) -> io::Result<T> + Sync) -> io::Result<T> {
        let name = usage_name();
        self.namespace.enter(|| look(&self.place().join(&name))).or_else(|error| match error.kind() {
            io::ErrorKind::NotFound => look(&self.folder.join(&name)),
            _ => Err(error),
        })
    }

    /// Opens both files for writing. While they are open, nobody gets a file lease (F_SETLEASE) on them.
    ///
    /// # Errors
    /// When one is not there, or somebody has a file lease on it already.
    pub fn hold(&self) -> io::Result<[File; 2]> {
        Ok([open(&self.limits, true)?, self.open_usage(true)?])
    }
}

/// Opens a file for reading, and for writing too. This follows no link, and waits neither for a FIFO nor for
/// somebody's file lease.
fn open(path: &Path, for_writing: bool) -> io::Result<File> {
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    OpenOptions::new().read(true).write(for_writing).custom_flags(flags.bits()).open(path)
}

/// At most `length` bytes from the start of the file, whatever size it claims.
fn read(file: &File, length: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; length];
    let filled = read_into(file, &mut bytes)?;
    bytes.truncate(filled);
    Ok(bytes)
}

/// Fills `bytes` from the start of the file as far as that goes.
fn read_into(file: &File, bytes: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, u64::try_from(filled).map_err(io::Error::other)?) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

#[cfg(test)]
mod tests;
