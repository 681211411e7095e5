//! Layout of the mapped state file, and the mapping itself.
//!
//! Every field is an atomic, so that any process may read or write at any time and be killed at any instruction. A
//! file of zeros is a valid state without GPUs.

use std::fs::{File, OpenOptions};
use std::io;
use std::mem::size_of;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

/// First word of a state file: the layout's name and version.
pub const MAGIC: u64 = 0x6770_7573_696d_0004;
/// GPUs that a node can have.
pub const GPUS: usize = 16;
/// Processes that can use a node's GPUs at one time.
pub const SLOTS: usize = 512;
/// Runs that a GPU's time line remembers.
pub const RUNS: usize = 65536;
/// Cancelled pieces of the time line that are remembered.
pub const CUTS: usize = 4096;
/// Stamps that a process can have asked a GPU for at one time.
pub const STAMPS: usize = 256;
/// Name of the mapped file in the shared folder.
pub const STATE_FILE: &str = "state";
/// Name of the file whose byte locks tell which slots live.
pub const SLOTS_FILE: &str = "slots";

/// A short text, padded with zeros.
#[repr(C)]
pub struct Text<const N: usize>([AtomicU8; N]);

impl<const N: usize> Text<N> {
    /// Writes `text`, cut to the field's size.
    pub fn set(&self, text: &str) {
        let bytes = text.bytes().chain(std::iter::repeat(0));
        for (cell, byte) in self.0.iter().zip(bytes) {
            cell.store(byte, Ordering::Relaxed);
        }
    }

    /// The text up to the first zero.
    #[must_use]
    pub fn get(&self) -> String {
        let bytes: Vec<u8> =
            self.0.iter().map(|cell| cell.load(Ordering::Relaxed)).take_while(|&byte| byte != 0).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// One uninterrupted piece of work on a GPU; neighbours of one process are joined.
#[repr(C)]
pub struct Run {
    /// Begin, nanoseconds of the device clock.
    pub start: AtomicU64,
    /// End, nanoseconds of the device clock.
    pub end: AtomicU64,
    /// Nanoseconds between begin and end in which the GPU worked.
    pub busy: AtomicU64,
    /// Slot of the process that owns the work.
    pub slot: AtomicU32,
    /// Generation of that slot.
    pub generation: AtomicU32,
}

/// A piece that was taken out of the time line because its process died.
#[repr(C)]
pub struct Cut {
    /// Begin, in the time line as it was before the cut.
    pub start: AtomicU64,
    /// End, in the time line as it was before the cut.
    pub end: AtomicU64,
}

/// One process's work on a GPU that slices: positions on a line of nanoseconds of GPU time.
#[repr(C)]
pub struct Line {
    /// Generation of the slot whose work this is; that of a dead process until the next owner queues work.
    pub generation: AtomicU32,
    /// Padding, zero.
    pub reserved: AtomicU32,
    /// End of the work that was ever queued.
    pub queued: AtomicU64,
    /// Up to where it has run.
    pub ran: AtomicU64,
    /// Stamps ever asked for.
    pub asked: AtomicU64,
    /// Stamps ever given.
    pub given: AtomicU64,
}

/// A place on a line whose moment is asked for.
#[repr(C)]
pub struct Stamp {
    /// The place.
    pub position: AtomicU64,
    /// When the GPU came there, nanoseconds of the device clock.
    pub time: AtomicU64,
}

/// The turns that processes take on a GPU that slices.
#[repr(C)]
pub struct Turns {
    /// Length of a turn, nanoseconds; 0 for a GPU that works in the order of submission.
    pub slice: AtomicU64,
    /// Up to this moment the GPU's work is written down.
    pub time: AtomicU64,
    /// When the turn ends at the latest.
    pub end: AtomicU64,
    /// Slot of the process whose turn it is.
    pub holder: AtomicU32,
    /// 1 while `step` is to be carried out.
    pub pending: AtomicU32,
    /// The step under way.
    pub step: Step,
}

/// What a piece of work changes, as values and not as differences: carried out twice, it has happened once. Whoever
/// takes the time lock from a dead process finishes its step.
#[repr(C)]
pub struct Step {
    /// Slot of the process that works.
    pub slot: AtomicU32,
    /// Generation of that slot.
    pub generation: AtomicU32,
    /// When the work stops.
    pub time: AtomicU64,
    /// When the turn ends at the latest.
    pub turn: AtomicU64,
    /// Position at which the work stops.
    pub ran: AtomicU64,
    /// Number of the run that holds the work.
    pub run: AtomicU64,
    /// Begin of that run.
    pub start: AtomicU64,
    /// Nanoseconds of work in that run.
    pub busy: AtomicU64,
}

/// One GPU.
#[repr(C)]
pub struct Gpu {
    /// The UUID's 16 bytes.
    pub uuid: [AtomicU8; 16],
    /// Model name.
    pub model: Text<96>,
    /// PCI bus number; domain, device and function are 0.
    pub bus: AtomicU32,
    /// Number of the device node.
    pub minor: AtomicU32,
    /// Multiprocessors.
    pub cores: AtomicU32,
    /// 1: no new process gets the GPU.
    pub excluded: AtomicU32,
    /// Memory in bytes.
    pub memory: AtomicU64,
    /// Guards the sum of `bytes`.
    pub memory_lock: AtomicU64,
    /// Guards everything below but `bytes`.
    pub time_lock: AtomicU64,
    /// When the last queued work ends.
    pub tail: AtomicU64,
    /// Runs ever written.
    pub run_count: AtomicU64,
    /// Cuts ever written.
    pub cut_count: AtomicU64,
    /// Bytes held by each slot.
    pub bytes: [AtomicU64; SLOTS],
    /// Whose turn it is.
    pub turns: Turns,
    /// Each slot's work.
    pub lines: [Line; SLOTS],
    /// The last stamps that each slot asked for.
    pub stamps: [[Stamp; STAMPS]; SLOTS],
    /// The last runs.
    pub runs: [Run; RUNS],
    /// The last cuts.
    pub cuts: [Cut; CUTS],
}

/// One process.
#[repr(C)]
pub struct Slot {
    /// 1 while a process owns the slot.
    pub live: AtomicU32,
    /// Counts the owners of this slot.
    pub generation: AtomicU32,
    /// Owner's pid in its own namespace.
    pub pid: AtomicU32,
    /// Owner's pid in the node's own namespace; 0 while no process there has seen it.
    pub host_pid: AtomicU32,
    /// A number that the kernel drew when the owner's program was started.
    pub image: AtomicU64,
    /// Owner's program.
    pub program: Text<104>,
}

/// How NVML measures utilisation, and what it tells of processes.
#[repr(C)]
pub struct Sampling {
    /// Length of a window, nanoseconds.
    pub period: AtomicU64,
    /// How long after its end a window can be read, nanoseconds.
    pub delay: AtomicU64,
    /// 1: percents are rounded to the nearest; 0: down.
    pub nearest: AtomicU32,
    /// 1: nothing is told of single processes.
    pub no_processes: AtomicU32,
    /// 1: pids are always those of the node's own pid namespace; 0: those of the caller's.
    pub host_pids: AtomicU32,
    /// Padding, zero.
    pub reserved: AtomicU32,
    /// Inode of the node's own pid namespace.
    pub namespace: AtomicU64,
}

/// The state of a node.
#[repr(C)]
pub struct State {
    /// [`MAGIC`].
    pub magic: AtomicU64,
    /// Number of GPUs.
    pub gpu_count: AtomicU32,
    /// CUDA version of the driver, for example 12020.
    pub cuda: AtomicU32,
    /// Driver version.
    pub driver: Text<32>,
    /// Bytes that a context costs.
    pub context: AtomicU64,
    /// Wall clock less device clock, nanoseconds, as at creation: makes NVML's time stamps steady.
    pub wall_offset: AtomicU64,
    /// How NVML measures.
    pub sampling: Sampling,
    /// One more than the highest slot ever used.
    pub slots_used: AtomicU32,
    /// Padding, zero.
    pub reserved: AtomicU32,
    /// The processes.
    pub slots: [Slot; SLOTS],
    /// The GPUs.
    pub gpus: [Gpu; GPUS],
}

const _: () =
    assert!(size_of::<Run>() == 32 && size_of::<Slot>() == 128 && size_of::<Gpu>().is_multiple_of(8));

impl State {
    /// Makes a state file in the folder `shared`, empty but for its magic, and maps it.
    ///
    /// # Errors
    /// When a file cannot be made or mapped.
    pub fn create(shared: &Path) -> io::Result<&'static Self> {
        for name in [STATE_FILE, SLOTS_FILE] {
            let file = OpenOptions::new().read(true).write(true).create_new(true).open(shared.join(name))?;
            // The processes of every container write here, under whatever user they run.
            file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666))?;
            if name == STATE_FILE {
                file.set_len(size_of::<Self>() as u64)?;
            }
        }
        let state = Self::map(&OpenOptions::new().read(true).write(true).open(shared.join(STATE_FILE))?)?;
        state.magic.store(MAGIC, Ordering::Release);
        Ok(state)
    }

    /// Maps the state file of the folder `shared`.
    ///
    /// # Errors
    /// When the file is absent, of another size or another layout.
    pub fn open(shared: &Path) -> io::Result<&'static Self> {
        let file = OpenOptions::new().read(true).write(true).open(shared.join(STATE_FILE))?;
        if file.metadata()?.len() != size_of::<Self>() as u64 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a state file of another layout"));
        }
        let state = Self::map(&file)?;
        if state.magic.load(Ordering::Acquire) != MAGIC {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a state file of another version"));
        }
        Ok(state)
    }

    fn map(file: &File) -> io::Result<&'static Self> {
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let address =
            unsafe { libc::mmap(std::ptr::null_mut(), size_of::<Self>(), access, kind, file.as_raw_fd(), 0) };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the mapping has the size of `Self`, is page-aligned, is never unmapped, and any bits are valid atomics.
        Ok(unsafe { &*address.cast::<Self>() })
    }

    /// The GPUs that the node has.
    #[must_use]
    pub fn gpus(&self) -> &[Gpu] {
        let count = self.gpu_count.load(Ordering::Acquire) as usize;
        &self.gpus[..count.min(GPUS)]
    }

    /// The slots that were ever in use.
    #[must_use]
    pub fn used_slots(&self) -> usize {
        (self.slots_used.load(Ordering::Acquire) as usize).min(SLOTS)
    }
}

impl Gpu {
    /// The UUID's bytes.
    #[must_use]
    pub fn uuid_bytes(&self) -> [u8; 16] {
        std::array::from_fn(|index| self.uuid[index].load(Ordering::Relaxed))
    }

    /// The UUID as the driver prints it: `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`.
    #[must_use]
    pub fn uuid_text(&self) -> String {
        let mut text = String::from("GPU-");
        for (index, byte) in self.uuid_bytes().iter().enumerate() {
            if matches!(index, 4 | 6 | 8 | 10) {
                text.push('-');
            }
            text.push_str(&format!("{byte:02x}"));
        }
        text
    }

    /// The PCI address in the form of `/proc`: `0000:3b:00.0`.
    #[must_use]
    pub fn address(&self) -> String {
        format!("0000:{:02x}:00.0", self.bus.load(Ordering::Relaxed))
    }
}
