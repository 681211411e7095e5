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

/// Tells a process from all others. The random number of its program tells it from an earlier process with
/// the same pid, and from the program before an exec.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Identity {
    pid: u32,
    image: u64,
}

impl Identity {
    fn own() -> Self {
        // SAFETY: asks for a word of the auxiliary vector that the kernel gave this program.
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

/// Who owns a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// No living process.
    Dead,
    /// A process with this pid in our pid namespace; `None` when it has no pid there or the kernel refused to
    /// say.
    Alive(Option<u32>),
}

impl Reader {
    /// Maps the state in the folder `shared`, without a slot of its own.
    ///
    /// # Errors
    /// When a file is absent or cannot be opened or mapped.
    pub fn open(shared: &Path) -> io::Result<&'static Self> {
        let state = State::open(shared)?;
        let locks = OpenOptions::new().read(true).write(true).open(shared.join(SLOTS_FILE))?;
        let shared = shared.to_owned();
        let (identity, namespace) = (Identity::own(), pid_namespace());
        let reader = Self { state, shared, locks, identity, namespace };
        Ok(Box::leak(Box::new(reader)))
    }

    /// The node's shared folder.
    #[must_use]
    pub fn shared(&self) -> &Path {
        &self.shared
    }

    /// Whether this process is in the node's own pid namespace.
    #[must_use]
    pub fn is_host(&self) -> bool {
        self.state.sampling.namespace.load(Ordering::Relaxed) == self.namespace
    }

    /// Notes the pid of every process in the node's own pid namespace. Does nothing if this process is in
    /// another.
    pub fn note_pids(&self) {
        if self.is_host() {
            for index in 0..self.state.used_slots() {
                self.noted(index);
            }
        }
    }

    /// Whether the owner of slot `index` is alive. Notes its pid for readers in other pid namespaces, if this
    /// process is in the node's own.
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

    /// The pid that NVML reports for the process of slot `index`; `None` if it is dead or no such pid is
    /// known.
    #[must_use]
    pub fn told_pid(&self, index: usize) -> Option<u32> {
        let Life::Alive(pid) = self.noted(index) else { return None };
        if self.state.sampling.host_pids.load(Ordering::Relaxed) == 0 || self.is_host() {
            return pid;
        }
        Some(self.state.slots[index].host_pid.load(Ordering::Relaxed)).filter(|&pid| pid != 0)
    }

    /// Path of the file that backs a piece of `owner`'s memory which other processes may open.
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

    /// Whether the owner of slot `index` is alive.
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
    /// When every slot is taken by a living process, or the files cannot be opened.
    pub fn open(shared: &Path) -> io::Result<Self> {
        let reader = Reader::open(shared)?;
        let state = reader.state;
        for (index, slot) in state.slots.iter().enumerate() {
            // Another copy of this library in our process, as dlmopen makes, holds a lock that does not keep
            // us out.
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

    /// Gives the slot and all its memory back.
    pub fn close(self) {
        clear(self.state(), self.index());
        let _ = fcntl(&self.reader.locks, FcntlArg::F_SETLK(&byte(F_UNLCK, self.index())));
    }

    /// The mapped state file.
    #[must_use]
    pub fn state(&self) -> &'static State {
        self.reader.state
    }

    /// Index of this process's own slot.
    #[must_use]
    pub fn index(&self) -> usize {
        self.owner.slot as usize
    }

    /// Takes a lock word of a GPU; takes it from a dead holder too.
    pub fn lock<'word>(&self, word: &'word std::sync::atomic::AtomicU64) -> Guard<'word> {
        lock::take(word, self.owner, |other| {
            let index = other.slot as usize;
            index >= SLOTS
                || self.state().slots[index].generation.load(Ordering::Acquire) != other.generation
                || self.reader.life(index) == Life::Dead
        })
    }

    /// Steers the process that has this pid in the node's own pid namespace, which must be this one's too, on
    /// the GPU of this index; nothing happens if it has no slot. `slice` as in [`timeline::steer`].
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

    /// Whose work began on the GPU of this index and when, as [`timeline::began`] has it, by pids of this
    /// process's namespace. Those that have ended are left out.
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

    /// Gives back what dead processes held: memory, and work that had not run. It notes the pids of the
    /// others as [`Reader::note_pids`] does, because each look at a slot costs a system call.
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

    /// Gives back what the dead owner of slot `index` held. Only the holder of the byte lock may clear a
    /// slot, because a new process could have taken it since the test.
    fn reclaim(&self, index: usize) {
        let state = self.state();
        // One thread of this process at a time: byte locks do not exclude threads of one process.
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

    /// Bytes that `gpu` has left for this process, and of how many, after dead processes' memory was given
    /// back. A limit of its cgroup bounds both.
    #[must_use]
    pub fn free_and_total(&self, gpu: &Gpu) -> (u64, u64) {
        self.sweep();
        let total = gpu.total();
        // What no program can allocate counts as in use.
        let free = gpu.memory.load(Ordering::Relaxed).saturating_sub(gpu.used(self.state().used_slots()));
        match gpu.left_to_cgroup(self.state(), self.cgroup()) {
            Some((left, limit)) => (free.min(left), total.min(limit)),
            None => (free, total),
        }
    }

    /// Id of the cgroup that this process counts to; 0 if it is not known.
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

/// Inode of this process's pid namespace; 0 if it cannot be read.
#[must_use]
pub fn pid_namespace() -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self/ns/pid").map_or(0, |data| data.ino())
}

fn program() -> String {
    std::fs::read_link("/proc/self/exe").map_or_else(|_| String::new(), |path| path.display().to_string())
}
