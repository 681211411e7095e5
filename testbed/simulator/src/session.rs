//! A process's connection to the state: its slot, and which other slots are alive.
//!
//! A slot is alive as long as its process holds a POSIX lock on the slot's byte. The kernel drops the lock
//! however the process dies, a forked child does not inherit it, and `F_GETLK` names the holder's pid in the
//! reader's own pid namespace.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use libc::{F_UNLCK, F_WRLCK, c_short, flock};
use nix::fcntl::{FcntlArg, fcntl};

use crate::lock::{self, Guard, Owner};
use crate::state::{Gpu, SLOTS, SLOTS_FILE, Slot, State};
use crate::timeline;

/// The mapped state and the slots' lock file, without a slot. Closing any descriptor of that file would drop
/// the process's lock, so a reader is never dropped.
pub struct Reader {
    /// The mapped state file.
    pub state: &'static State,
    shared: PathBuf,
    locks: File,
    identity: Identity,
    namespace: u64,
}

/// Distinguishes a process from all others. The random number of its program distinguishes it from an earlier
/// process with the same pid, and from the program before an exec.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Identity {
    pid: u32,
    image: u64,
}

impl Identity {
    fn own() -> Self {
        // SAFETY: reads a word of the auxiliary vector that the kernel gave this program.
        let random = unsafe { libc::getauxval(libc::AT_RANDOM) };
        let place: *const [u8; 8] = std::ptr::with_exposed_provenance(usize::try_from(random).unwrap_or(0));
        // SAFETY: null, or 16 random bytes that the kernel placed above the stack; nothing moves or frees
        // them.
        let image = unsafe { place.as_ref() }.map_or(0, |bytes| u64::from_ne_bytes(*bytes));
        Self { pid: std::process::id(), image }
    }

    fn of(slot: &Slot) -> Self {
        Self { pid: slot.pid.load(Ordering::Relaxed), image: slot.image.load(Ordering::Relaxed) }
    }

    fn write(self, slot: &Slot) {
        slot.pid.store(self.pid, Ordering::Relaxed);
        slot.host_pid.store(0, Ordering::Relaxed);
        slot.image.store(self.image, Ordering::Relaxed);
    }
}

/// Whether a slot's owner lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// No living process.
    Dead,
    /// A process with this pid in our pid namespace; `None` if it has no pid there or the kernel refused to
    /// report it.
    Alive(Option<u32>),
}

impl Reader {
    /// Maps the state in the directory `shared`, without a slot of its own.
    ///
    /// # Errors
    /// If a file is absent or cannot be opened or mapped.
    pub fn open(shared: &Path) -> io::Result<&'static Self> {
        let state = State::open(shared)?;
        let locks = OpenOptions::new().read(true).write(true).open(shared.join(SLOTS_FILE))?;
        let shared = shared.to_owned();
        let (identity, namespace) = (Identity::own(), pid_namespace());
        let reader = Self { state, shared, locks, identity, namespace };
        Ok(Box::leak(Box::new(reader)))
    }

    /// Returns the node's shared directory.
    #[must_use]
    pub fn shared(&self) -> &Path {
        &self.shared
    }

    /// Whether this process is in the node's own pid namespace.
    #[must_use]
    pub fn is_host(&self) -> bool {
        self.state.sampling.namespace.load(Ordering::Relaxed) == self.namespace
    }

    /// Records the pid of every process in the node's own pid namespace. Does nothing if this process is in
    /// another.
    pub fn note_pids(&self) {
        if self.is_host() {
            for index in 0..self.state.used_slots() {
                self.noted(index);
            }
        }
    }

    /// Returns whether the owner of slot `index` is alive. Records its pid for readers in other pid
    /// namespaces, if this process is in the node's own.
    fn noted(&self, index: usize) -> Life {
        let slot = &self.state.slots[index];
        let generation = slot.generation.load(Ordering::Acquire);
        let life = self.life(index);
        if let Life::Alive(Some(pid)) = life
            && self.is_host()
            && slot.generation.load(Ordering::Acquire) == generation
        {
            slot.host_pid.store(pid, Ordering::Relaxed);
        }
        life
    }

    /// Returns the pid that NVML reports for the process of slot `index`; `None` if it is dead or no such pid
    /// is known.
    #[must_use]
    pub fn told_pid(&self, index: usize) -> Option<u32> {
        let Life::Alive(pid) = self.noted(index) else { return None };
        if self.state.sampling.host_pids.load(Ordering::Relaxed) == 0 || self.is_host() {
            return pid;
        }
        Some(self.state.slots[index].host_pid.load(Ordering::Relaxed)).filter(|&pid| pid != 0)
    }

    /// Returns the path of the file that backs a piece of `owner`'s memory that other processes may open.
    #[must_use]
    pub fn shared_memory(&self, owner: Owner, id: u64) -> PathBuf {
        self.shared.join(format!("{}{id}", prefix(owner)))
    }

    fn remove_files(&self, owner: Owner) {
        let Ok(folder) = std::fs::read_dir(&self.shared) else { return };
        let prefix = prefix(owner);
        for entry in folder.flatten() {
            if entry.file_name().to_string_lossy().starts_with(&prefix) {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }

    /// Returns whether the owner of slot `index` is alive.
    #[must_use]
    pub fn life(&self, index: usize) -> Life {
        let slot = &self.state.slots[index];
        if slot.live.load(Ordering::Acquire) == 0 {
            return Life::Dead;
        }
        // F_GETLK never reports our own lock.
        if Identity::of(slot) == self.identity {
            return Life::Alive(Some(self.identity.pid));
        }
        let mut request = byte(F_WRLCK, index);
        match fcntl(&self.locks, FcntlArg::F_GETLK(&mut request)) {
            Ok(_) if c_int_of(request.l_type) == F_UNLCK => Life::Dead,
            Ok(_) => Life::Alive(u32::try_from(request.l_pid).ok().filter(|&pid| pid != 0)),
            Err(_) => Life::Alive(None),
        }
    }
}

/// A process with a slot of its own.
pub struct Session {
    /// The state and the lock file.
    pub reader: &'static Reader,
    /// Its slot and that slot's generation.
    pub owner: Owner,
}

impl Session {
    /// Claims a slot for this process.
    ///
    /// # Errors
    /// If a living process has every slot, or the files cannot be opened.
    pub fn open(shared: &Path) -> io::Result<Self> {
        let reader = Reader::open(shared)?;
        let state = reader.state;
        for (index, slot) in state.slots.iter().enumerate() {
            // Another copy of this library in our process, as made by dlmopen, holds a lock that does not
            // exclude us.
            let ours = slot.live.load(Ordering::Acquire) != 0 && Identity::of(slot) == reader.identity;
            if ours || fcntl(&reader.locks, FcntlArg::F_SETLK(&byte(F_WRLCK, index))).is_err() {
                continue;
            }
            let number = u32::try_from(index).unwrap_or(u32::MAX);
            let stale = slot.live.load(Ordering::Acquire) != 0;
            let before = slot.generation.fetch_add(1, Ordering::AcqRel);
            clear(state, index);
            reader.identity.write(slot);
            slot.cgroup.store(crate::cgroup::own(), Ordering::Relaxed);
            slot.program.set(&program());
            state.slots_used.fetch_max(number + 1, Ordering::AcqRel);
            slot.live.store(1, Ordering::Release);
            let generation = before.wrapping_add(1);
            let session = Self { reader, owner: Owner { slot: number, generation } };
            if stale {
                session.bury(Owner { slot: number, generation: before });
            }
            return Ok(session);
        }
        Err(io::Error::other(format!("all {SLOTS} process slots are taken")))
    }

    /// Releases the slot and all its memory.
    pub fn close(self) {
        clear(self.state(), self.index());
        let _ = fcntl(&self.reader.locks, FcntlArg::F_SETLK(&byte(F_UNLCK, self.index())));
    }

    /// Returns the mapped state file.
    #[must_use]
    pub fn state(&self) -> &'static State {
        self.reader.state
    }

    /// Returns the index of this process's own slot.
    #[must_use]
    pub fn index(&self) -> usize {
        self.owner.slot as usize
    }

    /// Takes a lock word of a GPU, even from a dead holder.
    pub fn lock<'word>(&self, word: &'word std::sync::atomic::AtomicU64) -> Guard<'word> {
        lock::take(word, self.owner, |other| {
            let index = other.slot as usize;
            index >= SLOTS
                || self.state().slots[index].generation.load(Ordering::Acquire) != other.generation
                || self.reader.life(index) == Life::Dead
        })
    }

    /// Steers the process with this pid in the node's own pid namespace on the GPU of this index. This
    /// process must be in that namespace too. Does nothing if the process has no slot. `slice` is as in
    /// [`timeline::steer`].
    pub fn steer(&self, gpu: usize, pid: u32, runs: bool, slice: u64) {
        let state = self.state();
        let Some(gpu) = state.gpus().get(gpu) else { return };
        for index in 0..state.used_slots() {
            if self.reader.life(index) == Life::Alive(Some(pid)) {
                let generation = state.slots[index].generation.load(Ordering::Acquire);
                let owner = Owner { slot: u32::try_from(index).unwrap_or(u32::MAX), generation };
                timeline::steer(gpu, self, owner, runs, slice);
            }
        }
    }

    /// Lists the processes whose work began on the GPU of this index, and when, as [`timeline::began`] does,
    /// with their pids in this process's namespace. Ended processes are left out.
    #[must_use]
    pub fn began(&self, gpu: usize, from: u64) -> (Vec<(u32, Owner, u64)>, u64) {
        let Some(gpu) = self.state().gpus().get(gpu) else { return (Vec::new(), from) };
        let (begun, next) = timeline::began(gpu, self, from);
        let mut pids = HashMap::new();
        let pid = |owner: Owner| match self.reader.life(owner.slot as usize) {
            Life::Alive(pid) => pid,
            Life::Dead => None,
        };
        let mut known = |owner: Owner| *pids.entry(owner.slot).or_insert_with(|| pid(owner));
        (begun.into_iter().filter_map(|(owner, at)| Some((known(owner)?, owner, at))).collect(), next)
    }

    /// Reclaims the memory of dead processes and their work that had not run. It records the pids of the
    /// others as [`Reader::note_pids`] does, because each check of a slot costs a system call.
    pub fn sweep(&self) {
        let state = self.state();
        for index in 0..state.used_slots() {
            let stale = state.slots[index].live.load(Ordering::Acquire) != 0
                && index != self.index()
                && self.reader.noted(index) == Life::Dead;
            if stale {
                self.reclaim(index);
            }
        }
    }

    /// Reclaims the resources of the dead owner of slot `index`. Only the holder of the byte lock may clear a
    /// slot, because a new process could have taken it since the check.
    fn reclaim(&self, index: usize) {
        let state = self.state();
        // Only one thread of this process at a time: byte locks do not exclude threads of one process.
        let _one = self.lock(&state.gpus[0].memory_lock);
        if state.slots[index].live.load(Ordering::Acquire) == 0
            || fcntl(&self.reader.locks, FcntlArg::F_SETLK(&byte(F_WRLCK, index))).is_err()
        {
            return;
        }
        let generation = state.slots[index].generation.load(Ordering::Acquire);
        let dead = Owner { slot: u32::try_from(index).unwrap_or(u32::MAX), generation };
        self.bury(dead);
        clear(state, index);
        let _ = fcntl(&self.reader.locks, FcntlArg::F_SETLK(&byte(F_UNLCK, index)));
    }

    /// Drops a dead process's queued work and removes the files of its memory.
    fn bury(&self, dead: Owner) {
        for gpu in self.state().gpus() {
            let _time = self.lock(&gpu.time_lock);
            timeline::cancel(gpu, self, dead);
        }
        self.reader.remove_files(dead);
    }

    /// Returns the bytes that `gpu` has left for this process, and the total, after reclaiming dead
    /// processes' memory. A limit of its cgroup bounds both.
    #[must_use]
    pub fn free_and_total(&self, gpu: &Gpu) -> (u64, u64) {
        self.sweep();
        let total = gpu.total();
        // Memory that no program can allocate counts as in use.
        let free = gpu.memory.load(Ordering::Relaxed).saturating_sub(gpu.used(self.state().used_slots()));
        match gpu.left_to_cgroup(self.state(), self.cgroup()) {
            Some((left, limit)) => (free.min(left), total.min(limit)),
            None => (free, total),
        }
    }

    /// Returns the id of the cgroup that this process counts to; 0 if it is unknown.
    #[must_use]
    pub fn cgroup(&self) -> u64 {
        self.state().slots[self.index()].cgroup.load(Ordering::Relaxed)
    }
}

fn prefix(owner: Owner) -> String {
    format!("memory-{}-{}-", owner.slot, owner.generation)
}

fn clear(state: &State, index: usize) {
    state.slots[index].live.store(0, Ordering::Release);
    for gpu in state.gpus() {
        gpu.bytes[index].store(0, Ordering::Release);
    }
}

fn byte(kind: i32, index: usize) -> flock {
    let start = libc::off_t::try_from(index).unwrap_or(0);
    let kind = c_short::try_from(kind).unwrap_or(0);
    flock { l_type: kind, l_whence: 0, l_start: start, l_len: 1, l_pid: 0 }
}

fn c_int_of(value: c_short) -> i32 {
    i32::from(value)
}

/// Returns the inode of this process's pid namespace; 0 if it cannot be read.
#[must_use]
pub fn pid_namespace() -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self/ns/pid").map_or(0, |data| data.ino())
}

fn program() -> String {
    std::fs::read_link("/proc/self/exe").map_or_else(|_| String::new(), |path| path.display().to_string())
}
