//! What kubelet allocated to the containers of a pod: a file for each pod in the state folder, which the
//! node's agent writes and whoever prepares a container reads.
//!
//! The agent learns of a pod when kubelet does. A container may therefore come before its pod's file: while
//! the agent lives, which a lock on a file of its own shows, the file is waited for.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use gpushare_inventory::{ProcError, boot_id};
use gpushare_quota::StateFolder;
use gpushare_request::{Allocated, Container, KubeletPolicy};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

/// The folder in the state folder with a file for each pod, named by its UID.
const FOLDER: &str = "allocations";
/// The file in it that a living agent has locked. No UID begins with a dot.
const AGENT: &str = ".agent";
/// How long a container waits for its pod's file: less than a hook may take.
const WAIT: Duration = Duration::from_secs(8);
/// Time between two looks for it.
const PAUSE: Duration = Duration::from_millis(5);

/// What kubelet allocated to the containers of one pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PodAllocation {
    /// Id of the boot in which it was noted: kubelet may allocate anew in the next.
    pub boot: String,
    /// `NAMESPACE/NAME`, for people.
    pub pod: String,
    /// By the container's name. A container that is not here got nothing.
    pub containers: BTreeMap<String, Allocated>,
    /// Why what a container got cannot be held, by the container's name.
    pub refused: BTreeMap<String, String>,
}

/// Why it is not known what was allocated to a container.
#[derive(Debug, thiserror::Error)]
pub enum AllocationError {
    /// The agent lives, and has not noted the pod.
    #[error(
        "what kubelet allocated to this pod is not known after {} seconds (request.kubelet); see why in the \
         log of gpushare's agent on this node: kubelet's PodResources or the API server may not answer it",
        WAIT.as_secs()
    )]
    Untold,
    /// The agent does not live, and had not noted the pod.
    #[error(
        "what kubelet allocated to this pod is not known, since gpushare's agent does not run on this node, or \
         has not read the setting yet (request.kubelet); start it (gpushare-kube node), wait half a minute, or \
         have the administrator set request.kubelet"
    )]
    Away,
    /// What the container got cannot be held.
    #[error("what this pod was allocated cannot be held (request.kubelet): {0}")]
    Refused(String),
    /// The bundle is a pod's, and does not say which one's.
    #[error(
        "the engine does not name this container's pod and its name in it (request.kubelet): use containerd \
         1.6 or later, or CRI-O"
    )]
    NoPod,
    /// The engine wrote something else in place of a pod's UID.
    #[error("the engine names no UID of a pod but {0:?}")]
    Uid(String),
    /// A file or the folder cannot be used.
    #[error("cannot use {path}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file holds something else.
    #[error("{path} is damaged; remove it, and restart gpushare's agent, which writes it anew")]
    Damaged {
        /// Path of the pod's note.
        path: PathBuf,
        /// What is wrong in it.
        source: serde_json::Error,
    },
    /// The boot cannot be told.
    #[error(transparent)]
    Proc(#[from] ProcError),
}

/// The container with what kubelet allocated to it; `None` where the policy does not ask, the container is no
/// pod's, or nobody noted anything and the policy believes then. Waits at most 8 seconds.
///
/// # Errors
/// When it is not known and the policy refuses then, or a file cannot be read.
pub fn look_up_allocation(
    container: &Container,
    state: &StateFolder,
    policy: KubeletPolicy,
) -> Result<Option<Container>, AllocationError> {
    look_up_within(container, state, policy, WAIT)
}

/// As [`look_up_allocation`], and waits for nobody.
///
/// # Errors
/// As [`look_up_allocation`].
pub fn known_allocation(
    container: &Container,
    state: &StateFolder,
    policy: KubeletPolicy,
) -> Result<Option<Container>, AllocationError> {
    look_up_within(container, state, policy, Duration::ZERO)
}

fn look_up_within(
    container: &Container,
    state: &StateFolder,
    policy: KubeletPolicy,
    wait: Duration,
) -> Result<Option<Container>, AllocationError> {
    if policy == KubeletPolicy::Off || !container.is_in_cluster() {
        return Ok(None);
    }
    let (uid, name) = container.in_cluster().ok_or(AllocationError::NoPod)?;
    let allocations = Allocations::of(state)?;
    let since = Instant::now();
    loop {
        if let Some(pod) = allocations.read(uid)? {
            if let Some(why) = pod.refused.get(name) {
                return Err(AllocationError::Refused(why.clone()));
            }
            let allocated = pod.containers.get(name).cloned().unwrap_or_default();
            return Ok(Some(container.clone().with_allocated(allocated)));
        }
        let is_late = since.elapsed() >= wait;
        match allocations.has_agent()? {
            false if policy == KubeletPolicy::Believe => {
                tracing::warn!(pod = uid, "gpushare's agent is away: the container's own words are believed");
                return Ok(None);
            }
            // It may be on its way, as after an update.
            _ if !is_late => sleep(PAUSE),
            true => return Err(AllocationError::Untold),
            false => return Err(AllocationError::Away),
        }
    }
}

/// The files of all pods. Only root reaches them: the state folder is root's alone.
#[derive(Debug)]
pub struct Allocations {
    folder: PathBuf,
    boot: String,
}

/// Shows that an agent lives, until it is dropped or the process ends.
#[derive(Debug)]
pub struct Presence(#[expect(dead_code, reason = "the lock is held by keeping it")] Flock<File>);

impl Allocations {
    /// The files in this state folder. The folder is made at the first write.
    ///
    /// # Errors
    /// When the running boot cannot be told.
    pub fn of(state: &StateFolder) -> Result<Self, AllocationError> {
        Ok(Self { folder: state.path().join(FOLDER), boot: boot_id()? })
    }

    /// What is noted of the pod in this boot.
    ///
    /// # Errors
    /// When `uid` is none, or the file cannot be read.
    pub fn read(&self, uid: &str) -> Result<Option<PodAllocation>, AllocationError> {
        let path = self.path(uid)?;
        let text = match fs::read(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            other => other.map_err(io_error(&path))?,
        };
        let pod: PodAllocation =
            serde_json::from_slice(&text).map_err(|source| AllocationError::Damaged { path, source })?;
        Ok((pod.boot == self.boot).then_some(pod))
    }

    /// Notes what was allocated to the pod in this boot, in place of what was noted before.
    ///
    /// # Errors
    /// When `uid` is none, or the file cannot be written.
    pub fn write(&self, uid: &str, pod: PodAllocation) -> Result<(), AllocationError> {
        let path = self.path(uid)?;
        self.make_folder()?;
        let pod = PodAllocation { boot: self.boot.clone(), ..pod };
        let text = serde_json::to_vec(&pod)
            .map_err(|source| AllocationError::Damaged { path: path.clone(), source })?;
        // Readers see the file whole or not at all. What a crash of the machine leaves is of an earlier boot.
        let new = self.folder.join(format!(".{uid}"));
        let write = || {
            let mut options = OpenOptions::new();
            options.write(true).create(true).truncate(true).mode(0o600);
            options.open(&new)?.write_all(&text)?;
            fs::rename(&new, &path)
        };
        write().map_err(io_error(&path))
    }

    /// Forgets the pod.
    ///
    /// # Errors
    /// When `uid` is none, or its file cannot be removed.
    pub fn forget(&self, uid: &str) -> Result<(), AllocationError> {
        let path = self.path(uid)?;
        match fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(io_error(&path)(error)),
            _ => Ok(()),
        }
    }

    /// The UIDs of all pods that are noted.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub fn pods(&self) -> Result<Vec<String>, AllocationError> {
        let entries = match fs::read_dir(&self.folder) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            other => other.map_err(io_error(&self.folder))?,
        };
        let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        Ok(names.filter(|name| is_uid(name)).collect())
    }

    /// Shows from now on that an agent lives. Several agents may.
    ///
    /// # Errors
    /// When the lock cannot be had.
    pub fn appear(&self) -> Result<Presence, AllocationError> {
        self.make_folder()?;
        let path = self.folder.join(AGENT);
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).mode(0o600).open(&path);
        let file = file.map_err(io_error(&path))?;
        let locked = Flock::lock(file, FlockArg::LockShared);
        locked.map(Presence).map_err(|(_, errno)| io_error(&path)(errno.into()))
    }

    /// Whether an agent lives.
    fn has_agent(&self) -> Result<bool, AllocationError> {
        let path = self.folder.join(AGENT);
        let file = match File::open(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            other => other.map_err(io_error(&path))?,
        };
        // Another container's look has it for an instant, too: then this one looks again.
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(_) => Ok(false),
            Err((_, Errno::EWOULDBLOCK)) => Ok(true),
            Err((_, errno)) => Err(io_error(&path)(errno.into())),
        }
    }

    fn make_folder(&self) -> Result<(), AllocationError> {
        match DirBuilder::new().mode(0o700).create(&self.folder) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(io_error(&self.folder)(error)),
            _ => Ok(()),
        }
    }

    fn path(&self, uid: &str) -> Result<PathBuf, AllocationError> {
        match is_uid(uid) {
            true => Ok(self.folder.join(uid)),
            false => Err(AllocationError::Uid(uid.chars().take(64).collect())),
        }
    }
}

/// Whether it can be a pod's UID, and so a file's name: the API server makes UUIDs, and kubelet a hash for
/// pods that it reads from files.
fn is_uid(uid: &str) -> bool {
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    !uid.is_empty() && uid.len() <= 64 && uid.bytes().all(is_part)
}

fn io_error(path: &Path) -> impl Fn(io::Error) -> AllocationError {
    move |source| AllocationError::Io { path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use gpushare_request::AllocatedPart;
    use serde_json::json;

    use super::*;

    const UID: &str = "0b5c1f6e-8e0f-4c7d-9a51-3f6f2b8f1a10";

    fn state() -> (tempfile::TempDir, StateFolder) {
        let scratch = tempfile::tempdir().unwrap();
        let state = StateFolder::open(&scratch.path().join("state")).unwrap();
        (scratch, state)
    }

    fn container(uid: &str) -> Container {
        Container::from_json(&json!({"annotations": {
            "io.kubernetes.cri.container-type": "container",
            "io.kubernetes.cri.container-name": "main",
            "io.kubernetes.cri.sandbox-uid": uid,
        }}))
    }

    fn whole() -> Allocated {
        let by = "nvidia.com/gpu".to_owned();
        Allocated(vec![AllocatedPart { by, gpu: None, count: 1, memory: None, cores: None, is_pods: false }])
    }

    fn noted(name: &str) -> PodAllocation {
        let containers = BTreeMap::from([(name.to_owned(), whole())]);
        PodAllocation { pod: "team/pod".into(), containers, ..PodAllocation::default() }
    }

    #[test]
    fn a_container_gets_what_was_noted_of_it_and_of_no_other() {
        let (_scratch, state) = state();
        let allocations = Allocations::of(&state).unwrap();
        let look = |policy| look_up_allocation(&container(UID), &state, policy);
        for (name, want) in [("main", whole()), ("other", Allocated::default())] {
            allocations.write(UID, noted(name)).unwrap();
            for policy in [KubeletPolicy::Refuse, KubeletPolicy::Believe] {
                assert_eq!(look(policy).unwrap().unwrap().allocated(), Some(&want), "{name}");
            }
        }
        assert_eq!(look(KubeletPolicy::Off).unwrap(), None);
        let refused = BTreeMap::from([("main".to_owned(), "it is shared".to_owned())]);
        allocations.write(UID, PodAllocation { refused, ..noted("main") }).unwrap();
        let told = look(KubeletPolicy::Refuse).unwrap_err().to_string();
        assert!(told.ends_with("it is shared"), "{told}");
        assert_eq!(allocations.pods().unwrap(), [UID]);
        allocations.forget(UID).unwrap();
        allocations.forget(UID).unwrap();
        assert!(allocations.pods().unwrap().is_empty());
    }

    #[test]
    fn without_an_agent_the_setting_says_what_happens() {
        let (_scratch, state) = state();
        let wait = Duration::from_millis(30);
        let look = |policy| look_up_within(&container(UID), &state, policy, wait);
        let is_away = |policy| matches!(look(policy), Err(AllocationError::Away));
        assert!(is_away(KubeletPolicy::Refuse), "none was ever there");
        assert_eq!(look(KubeletPolicy::Believe).unwrap(), None);
        let allocations = Allocations::of(&state).unwrap();
        drop(allocations.appear().unwrap());
        assert!(is_away(KubeletPolicy::Refuse), "it has ended");
        // What an agent of an earlier boot noted does not count.
        let earlier = Allocations { boot: "earlier".into(), ..Allocations::of(&state).unwrap() };
        earlier.write(UID, noted("main")).unwrap();
        assert!(is_away(KubeletPolicy::Refuse), "the boot is another");
    }

    #[test]
    fn a_pod_that_the_agent_is_about_to_note_is_waited_for() {
        let (_scratch, state) = state();
        let allocations = Allocations::of(&state).unwrap();
        let (first, second) = (allocations.appear().unwrap(), allocations.appear().unwrap());
        drop(first);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| look_up_allocation(&container(UID), &state, KubeletPolicy::Refuse));
            std::thread::sleep(Duration::from_millis(50));
            allocations.write(UID, noted("main")).unwrap();
            let found = waiting.join().unwrap().unwrap().unwrap();
            assert_eq!(found.allocated(), Some(&whole()));
        });
        drop(second);
    }

    #[test]
    fn a_uid_that_is_none_and_a_damaged_file_are_refused() {
        let (_scratch, state) = state();
        let allocations = Allocations::of(&state).unwrap();
        allocations.write(UID, noted("main")).unwrap();
        for uid in ["../leases", "", ".agent", "a/b", &"a".repeat(65)] {
            let told = look_up_allocation(&container(uid), &state, KubeletPolicy::Believe);
            assert!(matches!(told, Err(AllocationError::Uid(_))), "{uid:?}: {told:?}");
        }
        let nameless = json!({"annotations": {"io.kubernetes.cri.container-type": "container"}});
        let told = look_up_allocation(&Container::from_json(&nameless), &state, KubeletPolicy::Refuse);
        assert!(matches!(told, Err(AllocationError::NoPod)), "{told:?}");
        fs::write(state.path().join(FOLDER).join(UID), "{").unwrap();
        let told = look_up_allocation(&container(UID), &state, KubeletPolicy::Believe);
        assert!(matches!(told, Err(AllocationError::Damaged { .. })), "{told:?}");
    }
}
