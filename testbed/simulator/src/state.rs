//! Layout of the mapped state file, and the mapping itself.
//!
//! Every field is an atomic, because any process may read or write at any time and may be killed at any
//! instruction. A file of zeros is a valid state without GPUs.

use std::fs::{File, OpenOptions};
use std::io;
use std::mem::size_of;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use crate::cgroup::CgroupLimit;
use crate::mig::Part;
use crate::physics::NodePhysics;

/// First word of a state file. It encodes the layout's name and version.
pub const MAGIC: u64 = 0x6770_7573_696d_0009;
/// Most GPUs that a node can have.
pub const GPUS: usize = 16;
/// Most processes that can use a node's GPUs at one time.
pub const SLOTS: usize = 512;
/// Most cgroups that have a limit on one GPU.
pub const CGROUPS: usize = 512;
/// Number of runs that a GPU's time line remembers; older ones are overwritten.
pub const RUNS: usize = 65536;
/// Number of cancelled pieces of the time line that are remembered; older ones are overwritten.
pub const CUTS: usize = 4096;
/// Most stamps that a process can have pending on one GPU.
pub const STAMPS: usize = 256;
/// Name of the mapped file in the shared directory.
pub const STATE_FILE: &str = "state";
/// Name of the file whose byte locks show which slots are alive.
pub const SLOTS_FILE: &str = "slots";

/// A short text, padded with zeros to `N` bytes.
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

/// One piece of work on a GPU. Neighbouring pieces of one process are joined, with short gaps between them.
#[repr(C)]
pub struct Run {
    /// Begin, in nanoseconds of the device clock.
    pub start: AtomicU64,
    /// End, in nanoseconds of the device clock.
    pub end: AtomicU64,
    /// Nanoseconds between begin and end in which the GPU worked.
    pub busy: AtomicU64,
    /// Slot of the process that owns the work.
    pub slot: AtomicU32,
    /// Generation of that slot.
    pub generation: AtomicU32,
}

/// A piece that was removed from the time line because its process died.
#[repr(C)]
pub struct Cut {
    /// Begin, in the time line as it was before the cut.
    pub start: AtomicU64,
    /// End, in the time line as it was before the cut.
    pub end: AtomicU64,
}

/// One process's work on a GPU that slices. Positions on the line are nanoseconds of GPU time.
#[repr(C)]
pub struct Line {
    /// Generation of the slot that owns the work. A dead process's generation stays until the next owner
    /// queues work.
    pub generation: AtomicU32,
    /// 1 while the process's channels are stopped.
    pub stopped: AtomicU32,
    /// Length of its turns in nanoseconds; 0: the GPU's default.
    pub slice: AtomicU64,
    /// Position of the end of all work ever queued.
    pub queued: AtomicU64,
    /// Position up to which the work has run.
    pub ran: AtomicU64,
    /// Number of stamps ever requested.
    pub asked: AtomicU64,
    /// Number of stamps ever written.
    pub given: AtomicU64,
}

/// A request to record the moment at which the GPU reaches a position on a line.
#[repr(C)]
pub struct Stamp {
    /// Position on the process's line, nanoseconds of GPU time.
    pub position: AtomicU64,
    /// When the GPU reached the position, in nanoseconds of the device clock.
    pub time: AtomicU64,
}

/// The turns that processes take on a GPU that slices.
#[repr(C)]
pub struct Turns {
    /// Length of a turn in nanoseconds; 0 for a GPU that works in the order of submission.
    pub slice: AtomicU64,
    /// Nanoseconds in which nothing runs when the turn goes to another process.
    pub switch: AtomicU64,
    /// Moment up to which the GPU's work is recorded, in nanoseconds of the device clock.
    pub time: AtomicU64,
    /// When the turn ends at the latest, in nanoseconds of the device clock.
    pub end: AtomicU64,
    /// Slot of the process that has the turn.
    pub holder: AtomicU32,
    /// 1 while `step` must be carried out.
    pub pending: AtomicU32,
    /// The step being carried out.
    pub step: Step,
}

/// The changes that a piece of work makes, as values and not as differences, so that a step carried out twice
/// has the effect of one. The next holder of the time lock finishes the step of a process that died.
#[repr(C)]
pub struct Step {
    /// Slot of the process that works.
    pub slot: AtomicU32,
    /// Generation of that slot.
    pub generation: AtomicU32,
    /// When the work stops, in nanoseconds of the device clock.
    pub time: AtomicU64,
    /// When the turn ends at the latest, in nanoseconds of the device clock.
    pub turn: AtomicU64,
    /// Position on the process's line at which the work stops.
    pub ran: AtomicU64,
    /// Number of the run that holds the work.
    pub run: AtomicU64,
    /// Begin of that run, in nanoseconds of the device clock.
    pub start: AtomicU64,
    /// Nanoseconds of work in that run.
    pub busy: AtomicU64,
}

/// One GPU: its properties, its memory books and its time line.
#[repr(C)]
pub struct Gpu {
    /// The 16 bytes of the UUID.
    pub uuid: [AtomicU8; 16],
    /// Model name as the driver reports it.
    pub model: Text<96>,
    /// PCI bus number; domain, device and function are 0.
    pub bus: AtomicU32,
    /// Minor number of the device node.
    pub minor: AtomicU32,
    /// Number of multiprocessors.
    pub cores: AtomicU32,
    /// 1 if the GPU is excluded: no new process gets it.
    pub excluded: AtomicU32,
    /// Compute mode, numbered as in NVML: 0 all processes may have contexts, 2 none, 3 one at a time.
    pub compute_mode: AtomicU32,
    /// 1 while the GPU is in MIG mode. Programs then run only on its instances.
    pub mig_mode: AtomicU32,
    /// Its relation to its card if it is an instance; all zero for a whole GPU.
    pub part: Part,
    /// The GPUs at the other ends of its NVLinks, a bit for each index.
    pub nvlinks: AtomicU64,
    /// Memory in bytes that programs can allocate.
    pub memory: AtomicU64,
    /// Lock word that guards the sum of `bytes`.
    pub memory_lock: AtomicU64,
    /// Lock word that guards every field below it except `bytes`.
    pub time_lock: AtomicU64,
    /// End of the last queued work, in nanoseconds of the device clock. Only used for the order of
    /// submission.
    pub tail: AtomicU64,
    /// Number of runs ever written; a run's place in `runs` is its number modulo [`RUNS`].
    pub run_count: AtomicU64,
    /// Number of cuts ever written; a cut's place in `cuts` is its number modulo [`CUTS`].
    pub cut_count: AtomicU64,
    /// Bytes held by each slot.
    pub bytes: [AtomicU64; SLOTS],
    /// Limits of memory by cgroup, guarded by `memory_lock`.
    pub limits: [CgroupLimit; CGROUPS],
    /// The current turn, on a GPU that slices.
    pub turns: Turns,
    /// Each slot's work, on a GPU that slices.
    pub lines: [Line; SLOTS],
    /// The last stamps that each slot requested; a ring for each slot.
    pub stamps: [[Stamp; STAMPS]; SLOTS],
    /// The last runs, as a ring.
    pub runs: [Run; RUNS],
    /// The last cuts, as a ring.
    pub cuts: [Cut; CUTS],
}

/// One process that uses the node's GPUs, or used them until it died.
#[repr(C)]
pub struct Slot {
    /// 1 while a process owns the slot.
    pub live: AtomicU32,
    /// Counts the owners of this slot, which distinguishes a later owner from an earlier one.
    pub generation: AtomicU32,
    /// Owner's pid in its own pid namespace.
    pub pid: AtomicU32,
    /// Owner's pid in the node's own pid namespace; 0 until a process there has seen the owner.
    pub host_pid: AtomicU32,
    /// Random number that the kernel gave the owner's program at its start. It distinguishes a program from
    /// the one before an exec.
    pub image: AtomicU64,
    /// Id of the owner's cgroup of version 2; 0 if it is unknown.
    pub cgroup: AtomicU64,
    /// Path of the owner's program.
    pub program: Text<96>,
}

/// NVML's reports about processes, and its rounding.
#[repr(C)]
pub struct Sampling {
    /// 1 if percents are rounded to the nearest; 0 if they are rounded down.
    pub nearest: AtomicU32,
    /// 1 if NVML reports nothing about single processes.
    pub no_processes: AtomicU32,
    /// 1 if NVML always reports pids in the node's own pid namespace; 0 if it reports them in the caller's.
    pub host_pids: AtomicU32,
    /// Padding, zero.
    pub reserved: AtomicU32,
    /// Inode of the node's own pid namespace, in which the node was made.
    pub namespace: AtomicU64,
}

/// The whole state file.
#[repr(C)]
pub struct State {
    /// [`MAGIC`] in a valid state file.
    pub magic: AtomicU64,
    /// Number of entries of `gpus` that are in use.
    pub gpu_count: AtomicU32,
    /// CUDA version of the driver, for example 12020 for 12.2.
    pub cuda: AtomicU32,
    /// Driver version, for example 535.309.01.
    pub driver: Text<32>,
    /// The physics that all GPUs of the node share.
    pub physics: NodePhysics,
    /// Wall clock minus device clock when the node was made, in nanoseconds. NVML's time stamps use it, so
    /// they never jump.
    pub wall_offset: AtomicU64,
    /// NVML's reports about processes, and its rounding.
    pub sampling: Sampling,
    /// Highest slot ever used plus one.
    pub slots_used: AtomicU32,
    /// Padding, zero.
    pub reserved: AtomicU32,
    /// One slot for each process.
    pub slots: [Slot; SLOTS],
    /// The GPUs; only the first `gpu_count` are in use.
    pub gpus: [Gpu; GPUS],
}

const _: () =
    assert!(size_of::<Run>() == 32 && size_of::<Slot>() == 128 && size_of::<Gpu>().is_multiple_of(8));

impl State {
    /// Creates the state file and the slots' lock file in the directory `shared`, and maps the state.
    /// Everything in it but the magic is zero.
    ///
    /// # Errors
    /// If a file cannot be created or mapped.
    pub fn create(shared: &Path) -> io::Result<&'static Self> {
        for name in [STATE_FILE, SLOTS_FILE] {
            let file = OpenOptions::new().read(true).write(true).create_new(true).open(shared.join(name))?;
            // The processes of every container write here, whatever user they run as.
            file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666))?;
            if name == STATE_FILE {
                file.set_len(size_of::<Self>() as u64)?;
            }
        }
        let state = Self::map(&OpenOptions::new().read(true).write(true).open(shared.join(STATE_FILE))?)?;
        state.magic.store(MAGIC, Ordering::Release);
        Ok(state)
    }

    /// Maps the state file of the directory `shared`, which must exist.
    ///
    /// # Errors
    /// If the file is absent, or has another size or another layout.
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
        // SAFETY: the kernel chooses the address of the new mapping, which touches no memory of ours.
        let address =
            unsafe { libc::mmap(std::ptr::null_mut(), size_of::<Self>(), access, kind, file.as_raw_fd(), 0) };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the mapping has the size of `Self`, is page-aligned and is never unmapped; any bits are
        // valid atomics.
        Ok(unsafe { &*address.cast::<Self>() })
    }

    /// Returns the GPUs of the node.
    #[must_use]
    pub fn gpus(&self) -> &[Gpu] {
        let count = self.gpu_count.load(Ordering::Acquire) as usize;
        &self.gpus[..count.min(GPUS)]
    }

    /// Returns the number of slots, from the first, that were ever in use.
    #[must_use]
    pub fn used_slots(&self) -> usize {
        (self.slots_used.load(Ordering::Acquire) as usize).min(SLOTS)
    }
}

impl Gpu {
    /// Returns the 16 bytes of the UUID.
    #[must_use]
    pub fn uuid_bytes(&self) -> [u8; 16] {
        std::array::from_fn(|index| self.uuid[index].load(Ordering::Relaxed))
    }

    /// Returns the UUID as the driver prints it: `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`, or `MIG-…` for
    /// an instance.
    #[must_use]
    pub fn uuid_text(&self) -> String {
        let mut text = String::from(if self.card().is_some() { "MIG-" } else { "GPU-" });
        for (index, byte) in self.uuid_bytes().iter().enumerate() {
            if matches!(index, 4 | 6 | 8 | 10) {
                text.push('-');
            }
            text.push_str(&format!("{byte:02x}"));
        }
        text
    }

    /// Returns the PCI address in the form of `/proc`: `0000:3b:00.0`.
    #[must_use]
    pub fn address(&self) -> String {
        format!("0000:{:02x}:00.0", self.bus.load(Ordering::Relaxed))
    }
}
