//! NVIDIA's Multi-Process Service on this node: where the control daemon of each GPU has its files, and what a
//! container needs to be its client.
//!
//! `gpushare mps serve` starts and ends the daemons as the leases say. A container whose lease is an MPS
//! share waits until its GPU's daemon is ready. The server takes clients of one user at a time and lets
//! others wait for ever (CUDA's MPS guide, "Multi-User Environments"), so a second user is refused here.

use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};

use gpushare_inventory::GpuUuid;
use gpushare_quota::{Holder, Lease, StateFolder, Store, StoreError, lock_without_queue};
use gpushare_region::path as inner;
use oci_spec::runtime::Mount;
use serde_json::Value;

use crate::edit::has_user_namespace;
use crate::parts::entries;
use crate::plan::bind;

/// The folder in the state folder with a folder for each GPU.
const FOLDER: &str = "mps";
/// The file in it that the serving process has locked.
const LOCK: &str = "serve.lock";
/// The daemon's socket for clients. Its presence shows that this process sees the daemon's files.
const CONTROL: &str = "control";
/// A file that the daemon makes for everybody to lock.
const CONTROL_LOCK: &str = "control_lock";
/// How long a container waits for its daemon.
const WAIT: Duration = Duration::from_secs(10);
/// Time between two looks for it.
const PAUSE: Duration = Duration::from_millis(5);
/// Where clients and server share memory (CUDA's MPS guide, "Client-Server IPC").
pub(crate) const SHARED_MEMORY: &str = "/dev/shm";

/// Why a container cannot be a client of MPS.
#[derive(Debug, thiserror::Error)]
pub enum MpsError {
    /// Nobody runs the daemons.
    #[error(
        "this node does not serve mode mps; have the administrator run `gpushare mps serve` \
         (systemctl enable --now gpushare-mps), or ask for mode share"
    )]
    NotServed,
    /// The daemon cannot be started, or does not answer.
    #[error("MPS does not run on {gpu}: {why}")]
    Failed {
        /// The GPU.
        gpu: GpuUuid,
        /// Why, as the serving process noted it.
        why: String,
    },
    /// The daemon was not ready in time.
    #[error(
        "MPS is not ready on {gpu} after {} seconds; see the log of `gpushare mps serve`",
        WAIT.as_secs()
    )]
    Late {
        /// The GPU.
        gpu: GpuUuid,
    },
    /// The daemon's files cannot be seen.
    #[error(
        "the files of MPS on {gpu} cannot be seen from here: `gpushare mps serve` runs in another mount namespace than the \
         container's engine; run it in the host's"
    )]
    Hidden {
        /// The GPU.
        gpu: GpuUuid,
    },
    /// Another user's containers are clients already.
    #[error(
        "MPS serves one user of a GPU at a time, and uid {other} has it on {gpu}: run this container as that user in place of \
         uid {own}, wait until the others end (`gpushare ps`), or ask for mode share"
    )]
    OtherUser {
        /// The container's user.
        own: u32,
        /// The user of the containers that are there.
        other: u32,
        /// The GPU.
        gpu: GpuUuid,
    },
    /// The container's users are others outside it.
    #[error(
        "a container with a user namespace cannot be a client of MPS, whose server knows users by their numbers on the host; \
         start it without one, or ask for mode share"
    )]
    UserNamespace,
    /// A mount that what all clients share would hide.
    #[error(
        "{path} would lie below /dev/shm, which all containers in mode mps of a GPU have in common; mount it elsewhere, or ask for \
         mode share"
    )]
    BelowSharedMemory {
        /// Where the bundle mounts something.
        path: String,
    },
    /// MPS has not given a GPU back that is granted in another mode.
    #[error(
        "MPS still has {gpu} after {} seconds; see `gpushare doctor`, and keep `gpushare mps serve` running, which gives it back",
        WAIT.as_secs()
    )]
    NotGivenBack {
        /// The GPU.
        gpu: GpuUuid,
    },
    /// A file cannot be used.
    #[error("cannot use {path}")]
    Io {
        /// Path of the file or folder on the host.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The quota store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The files of one GPU's daemon. Only root reaches them; containers get what is mounted into them.
///
/// What a client can write into lies on file systems of their own, so that none fills the state folder's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MpsFolder {
    folder: PathBuf,
    gpu: GpuUuid,
}

impl MpsFolder {
    /// That of a GPU, whether it exists or not.
    pub fn of(state: &Path, gpu: GpuUuid) -> Self {
        // Sockets lie below it, whose paths have at most 107 bytes.
        let name: String = gpu.bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        Self { folder: Self::all(state).join(name), gpu }
    }

    /// Those that exist.
    pub fn existing(state: &Path) -> Vec<Self> {
        let entries = fs::read_dir(Self::all(state)).into_iter().flatten().flatten();
        let gpus = entries.filter_map(|entry| gpu_named(entry.file_name().to_str()?));
        gpus.map(|gpu| Self::of(state, gpu)).collect()
    }

    /// The folder that holds them all.
    pub fn all(state: &Path) -> PathBuf {
        state.join(FOLDER)
    }

    /// The file that the serving process has locked.
    pub fn lock(state: &Path) -> PathBuf {
        Self::all(state).join(LOCK)
    }

    /// The GPU.
    pub fn gpu(&self) -> GpuUuid {
        self.gpu
    }

    /// The whole folder.
    pub fn path(&self) -> &Path {
        &self.folder
    }

    /// The small file system of the daemon's own files.
    pub fn run(&self) -> PathBuf {
        self.folder.join("run")
    }

    /// The daemon's pipe folder, which clients get.
    pub fn pipe(&self) -> PathBuf {
        self.run().join("pipe")
    }

    /// The folder of the socket by which root rules the daemon, which no client gets.
    pub fn admin(&self) -> PathBuf {
        self.run().join("admin")
    }

    /// The daemon's log folder.
    pub fn log(&self) -> PathBuf {
        self.run().join("log")
    }

    /// The memory that server and clients share, mounted over their `/dev/shm`.
    pub fn shared_memory(&self) -> PathBuf {
        self.folder.join("shm")
    }

    /// Says that containers may come: the daemon as a [`Holder`].
    pub fn ready(&self) -> PathBuf {
        self.folder.join("ready")
    }

    /// Why containers cannot come.
    pub fn error(&self) -> PathBuf {
        self.folder.join("error")
    }

    /// The GPU's compute mode as it was before, or [`UNCHANGED`](Self::UNCHANGED). The file exists as long as
    /// MPS has the GPU, whichever of the two it says.
    pub fn compute_mode(&self) -> PathBuf {
        self.folder.join("compute-mode")
    }

    /// Stands in that file where MPS has left the GPU's compute mode alone.
    pub const UNCHANGED: &str = "UNCHANGED";

    /// Whether MPS has the GPU and has left its compute mode alone, so that other processes may use it, too.
    pub fn keeps_compute_mode(&self) -> bool {
        fs::read_to_string(self.compute_mode()).is_ok_and(|word| word == Self::UNCHANGED)
    }

    /// A file for each lease and user whose containers hold it, named `LEASE-USER`. The folder is locked by
    /// who changes it.
    pub fn users(&self) -> PathBuf {
        self.folder.join("users")
    }

    /// The daemon that is ready; `None` where there is none, or it has ended.
    pub fn daemon(&self) -> Option<Holder> {
        let holder: Holder = serde_json::from_slice(&fs::read(self.ready()).ok()?).ok()?;
        holder.lives().then_some(holder)
    }

    /// What a client's container gets of it.
    pub(crate) fn mounts(&self) -> [Mount; 3] {
        let pipe = Path::new(inner::MPS_PIPE.to_str().unwrap_or_default());
        let options = ["nosuid", "nodev", "noexec"];
        // A client that could write into the folder could put a socket of its own in place of the daemon's.
        let read_only = ["ro", "nosuid", "nodev", "noexec"];
        [
            bind(&self.pipe(), pipe, &read_only),
            bind(&self.pipe().join(CONTROL_LOCK), &pipe.join(CONTROL_LOCK), &options),
            bind(&self.shared_memory(), Path::new(SHARED_MEMORY), &options),
        ]
    }

    /// Those targets of [`mounts`](Self::mounts) that are folders.
    pub(crate) fn folders() -> [PathBuf; 2] {
        [PathBuf::from(inner::MPS_PIPE.to_str().unwrap_or_default()), PathBuf::from(SHARED_MEMORY)]
    }

    fn io(path: PathBuf) -> impl FnOnce(io::Error) -> MpsError {
        |source| MpsError::Io { path, source }
    }

    /// Waits until the daemon is ready.
    fn await_daemon(&self, state: &Path) -> Result<(), MpsError> {
        let (since, began) = (Instant::now(), SystemTime::now());
        while self.daemon().is_none() {
            if let Some(why) = self.failure_since(began) {
                return Err(MpsError::Failed { gpu: self.gpu, why });
            }
            if !is_served(state) {
                return Err(MpsError::NotServed);
            }
            if since.elapsed() > WAIT {
                return Err(MpsError::Late { gpu: self.gpu });
            }
            sleep(PAUSE);
        }
        match self.pipe().join(CONTROL).symlink_metadata() {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == ErrorKind::NotFound => Err(MpsError::Hidden { gpu: self.gpu }),
            Err(source) => Err(MpsError::Io { path: self.pipe(), source }),
        }
    }

    /// What the serving process noted after `began`: an earlier failure may be mended by now.
    fn failure_since(&self, began: SystemTime) -> Option<String> {
        let noted = self.error().metadata().and_then(|metadata| metadata.modified()).ok()?;
        // A file system may keep coarser times than the clock has.
        (noted + Duration::from_millis(20) >= began).then(|| fs::read_to_string(self.error()).ok())?
    }

    /// Notes the user of a lease, and refuses one who would wait for another: one at a time, since all notes
    /// are of leases that stood before they were written. Notes of leases that ended are removed.
    fn enter(&self, store: &Store, lease: &Lease, user: u32) -> Result<(), MpsError> {
        let users = self.users();
        let io = || Self::io(users.clone());
        let folder = File::open(&users).map_err(io())?;
        let Some(_turn) = lock_without_queue(folder).map_err(io())? else {
            return Err(io()(ErrorKind::TimedOut.into()));
        };
        let notes: Vec<_> = fs::read_dir(&users).map_err(io())?.flatten().collect();
        // Read after the notes: a note without its lease is of one that ended.
        let leases = store.leases()?;
        for note in notes {
            let name = note.file_name();
            let noted = name.to_str().and_then(|name| name.split_once('-'));
            let noted =
                noted.and_then(|(id, user)| Some((id.parse::<i64>().ok()?, user.parse::<u32>().ok()?)));
            match noted.filter(|(id, _)| leases.iter().any(|lease| lease.id == *id)) {
                None => drop(fs::remove_file(note.path())),
                Some((_, other)) if other != user => {
                    return Err(MpsError::OtherUser { own: user, other, gpu: self.gpu });
                }
                Some(_) => {}
            }
        }
        let note = users.join(format!("{}-{user}", lease.id));
        File::create(&note).map(drop).map_err(Self::io(note))
    }
}

/// The GPU whose folder has this name.
fn gpu_named(name: &str) -> Option<GpuUuid> {
    let mut bytes = [0; 16];
    if name.len() != 2 * bytes.len() || !name.is_ascii() {
        return None;
    }
    for (byte, digits) in bytes.iter_mut().zip(name.as_bytes().chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(GpuUuid::from_bytes(bytes))
}

/// Whether a process serves MPS on the node with this state folder.
pub fn is_served(state: &Path) -> bool {
    let file = File::open(MpsFolder::lock(state));
    file.is_ok_and(|file| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)))
}

/// Refuses a container that could never be a client, whoever serves.
fn check(json: &Value) -> Result<(), MpsError> {
    if has_user_namespace(json) {
        return Err(MpsError::UserNamespace);
    }
    let targets = entries(json, "/mounts").filter_map(|mount| mount.get("destination")?.as_str());
    let mut below =
        targets.filter(|path| Path::new(path).starts_with(SHARED_MEMORY) && *path != SHARED_MEMORY);
    match below.next() {
        Some(path) => Err(MpsError::BelowSharedMemory { path: path.escape_debug().to_string() }),
        None => Ok(()),
    }
}

/// Refuses a container that asks for MPS and cannot have it, before anything is reserved for it.
///
/// # Errors
/// When nobody serves MPS, or the container could never be a client.
pub(crate) fn admit(json: &Value, state: &StateFolder) -> Result<(), MpsError> {
    check(json)?;
    let is_ready = || MpsFolder::existing(state.path()).iter().any(|folder| folder.daemon().is_some());
    if is_served(state.path()) || is_ready() { Ok(()) } else { Err(MpsError::NotServed) }
}

/// Makes the container of this config.json a client of its lease's GPU. The lease is reserved already, so
/// that the daemon starts, or stays.
///
/// # Errors
/// When the daemon is not ready in 10 seconds, or another user has it.
pub(crate) fn join(json: &Value, state: &StateFolder, store: &Store, lease: &Lease) -> Result<(), MpsError> {
    // Also for one that asks for something else and joins its pod's lease.
    check(json)?;
    let user = json.pointer("/process/user/uid").and_then(Value::as_u64).unwrap_or(0);
    let user = u32::try_from(user).unwrap_or(u32::MAX);
    for grant in &lease.grants {
        let folder = MpsFolder::of(state.path(), grant.gpu);
        folder.await_daemon(state.path())?;
        folder.enter(store, lease, user)?;
    }
    Ok(())
}

/// Waits until MPS has left the GPUs of a lease in another mode. Its server may live a moment longer than its
/// last lease: it holds memory and, where the compute mode was set, lets no other process have a context.
///
/// # Errors
/// When it has not in 10 seconds.
pub(crate) fn await_end(state: &StateFolder, lease: &Lease) -> Result<(), MpsError> {
    let since = Instant::now();
    for grant in &lease.grants {
        let taken = MpsFolder::of(state.path(), grant.gpu).compute_mode();
        while taken.exists() {
            if since.elapsed() > WAIT {
                return Err(MpsError::NotGivenBack { gpu: grant.gpu });
            }
            sleep(PAUSE);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu() -> GpuUuid {
        GpuUuid::from_bytes([7; 16])
    }

    #[test]
    fn nobody_waits_where_nobody_serves() {
        let state = tempfile::tempdir().unwrap();
        let folder = MpsFolder::of(state.path(), gpu());
        assert!(matches!(folder.await_daemon(state.path()), Err(MpsError::NotServed)));
        fs::create_dir_all(folder.path()).unwrap();
        assert_eq!(MpsFolder::existing(state.path()), std::slice::from_ref(&folder));
        fs::write(folder.error(), "no such program").unwrap();
        let failed = folder.await_daemon(state.path());
        assert!(
            matches!(&failed, Err(MpsError::Failed { why, .. }) if why == "no such program"),
            "{failed:?}"
        );
    }

    #[test]
    fn a_daemon_is_ready_while_it_lives() {
        let state = tempfile::tempdir().unwrap();
        let folder = MpsFolder::of(state.path(), gpu());
        fs::create_dir_all(folder.path()).unwrap();
        let holder = Holder::this_process().unwrap();
        fs::write(folder.ready(), serde_json::to_vec(&holder).unwrap()).unwrap();
        assert_eq!(folder.daemon(), Some(holder.clone()));
        let hidden = folder.await_daemon(state.path());
        assert!(matches!(hidden, Err(MpsError::Hidden { .. })), "{hidden:?}");
        let dead = Holder { start_time: holder.start_time + 1, ..holder };
        fs::write(folder.ready(), serde_json::to_vec(&dead).unwrap()).unwrap();
        assert_eq!(folder.daemon(), None);
    }
}
