//! Puts a plan into a container that exists already, by the pid of its init: hook-only mode.
//!
//! Everything is reached by descriptors that are opened once. The kernel resolves them inside the container's
//! root, and they are checked after opening: whoever can write to the image may change paths meanwhile. Needs
//! Linux 5.14.

mod child;
mod filter;
mod mounts;
mod process;
mod program;
mod root;
mod rules;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::stat::{Mode, umask};
use nix::unistd::{Gid, Uid, setfsgid, setfsuid};
use serde_json::Value;

use crate::edit::{self, EditError};
use crate::parts::{entries, number};
use crate::plan::Plan;
use mounts::Tree;
use process::Process;
use root::Root;
use rules::Rules;

pub use child::run_child;

/// Why a plan cannot be put into a living container. Nothing of it is left there then.
#[derive(Debug, thiserror::Error)]
pub enum LiveError {
    /// The container's init ended while its hooks ran.
    #[error("process {pid} of the container has ended (ESRCH); start the container anew")]
    Gone {
        /// Its pid on the host.
        pid: i32,
    },
    /// The process is not the init of this container before pivot_root.
    #[error(
        "process {pid} is not this container's init: it {what}; run this hook by an OCI runtime at createRuntime or prestart"
    )]
    NotTheContainer {
        /// Its pid on the host.
        pid: i32,
        /// What shows this, as words after "it".
        what: &'static str,
    },
    /// A system call failed that older kernels lack or that is forbidden here.
    #[error(
        "cannot {act}; a hook needs Linux 5.14 and full root for this: use gpushare-runtime as the container's runtime"
    )]
    Kernel {
        /// What was tried, as words after "cannot".
        act: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// Something in the image keeps a file or node from being put at a path.
    #[error("the image has {what} at {target}, where gpushare must put something; change the image")]
    BadTarget {
        /// The path in the container.
        target: PathBuf,
        /// What is there.
        what: &'static str,
    },
    /// The path lies on a mount that is not the container's own.
    #[error("{target} lies on a volume or another mount, where a hook makes nothing; mount it elsewhere")]
    Foreign {
        /// The path in the container.
        target: PathBuf,
    },
    /// The path lies on a shared mount: what is mounted there would appear on the host.
    #[error(
        "{target} lies on a shared mount, and the host would see what is mounted there; use private propagation"
    )]
    Shared {
        /// The path in the container.
        target: PathBuf,
    },
    /// The cgroup's device rules cannot be changed by a hook.
    #[error("cannot allow the granted devices: {reason}; use gpushare-runtime as the container's runtime")]
    Rules {
        /// The cause, as the message says it.
        reason: &'static str,
    },
    /// The container's process lacks a group that may open a granted node.
    #[error(
        "device nodes belong to group {gid}, which a hook cannot give to the container's process; add it (--group-add {gid})"
    )]
    Group {
        /// Number of the group.
        gid: u32,
    },
    /// The bundle would give the container more than its share.
    #[error(transparent)]
    Bundle(#[from] EditError),
    /// A file could not be used.
    #[error("cannot {act} {path}")]
    Io {
        /// What was tried, as words after "cannot".
        act: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

impl LiveError {
    fn kernel(act: &'static str, errno: Errno) -> Self {
        Self::Kernel { act, source: errno.into() }
    }

    fn at(act: &'static str, path: impl AsRef<Path>, errno: Errno) -> Self {
        match errno {
            Errno::ENOSYS => Self::kernel(act, errno),
            errno => Self::io(act, path, errno.into()),
        }
    }

    fn io(act: &'static str, path: impl AsRef<Path>, source: std::io::Error) -> Self {
        Self::Io { act, path: path.as_ref().into(), source }
    }
}

/// A container between its creation and pivot_root.
#[derive(Debug)]
pub struct Live {
    process: Process,
    namespace: OwnedFd,
    root: Root,
}

/// A plan that was put into a container. On drop it is taken out again, newest part first.
#[must_use = "dropping it takes the plan out of the container again"]
#[derive(Debug)]
pub struct Applied {
    live: Live,
    trees: Vec<Tree>,
    rules: Rules,
    owner: Owner,
}

impl Live {
    /// Takes hold of the container whose init is `pid` and whose root folder on the host is `host_root`. A
    /// process that started after `newest` (clock ticks since boot) is refused: it only has the pid that the
    /// init once had.
    ///
    /// # Errors
    /// When the process has ended, or is not this container's init before pivot_root.
    pub fn open(pid: i32, newest: u64, host_root: &Path) -> Result<Self, LiveError> {
        let process = Process::open(pid, newest)?;
        let namespace = process.mount_namespace()?;
        let root = Root::of(&process, host_root)?;
        Ok(Self { process, namespace, root })
    }

    /// Puts `plan` into the container whose config.json is `json`. Device rules come last: no device can be
    /// opened before all else is in place.
    ///
    /// # Errors
    /// On any failure. What was done is undone then.
    pub fn apply(self, plan: &Plan, json: &Value) -> Result<Applied, LiveError> {
        edit::check(json, plan)?;
        check_groups(json, &plan.additional_gids)?;
        let bound = self.process.has_user_namespace()?;
        let nodes = plan.device_mounts.iter().filter(|_| bound);
        let trees = plan.mounts.iter().chain(nodes).map(Tree::of).collect::<Result<Vec<_>, _>>()?;
        let rules = Rules::prepare(&self.process, &plan.device_rules, gpushare_request::is_privileged(json))?;
        let owner = Owner::of(&self.process)?;
        let mut applied = Applied { live: self, trees, rules, owner };
        applied.enter(plan, bound)?;
        Ok(applied)
    }
}

impl Applied {
    /// Leaves the plan in the container.
    pub fn keep(self) {
        // Only `drop` would undo it. The process ends soon, and its descriptors with it.
        std::mem::forget(self);
    }

    fn enter(&mut self, plan: &Plan, bound: bool) -> Result<(), LiveError> {
        let live = &mut self.live;
        let targets = self.owner.act(|| {
            if !bound {
                plan.devices.iter().try_for_each(|device| live.root.node(device))?;
            }
            self.trees.iter().map(|tree| tree.target(&mut live.root)).collect::<Result<Vec<_>, _>>()
        })?;
        mounts::attach(&live.namespace, &self.trees, &targets)?;
        self.trees.iter().try_for_each(|tree| tree.check(&live.root))?;
        self.rules.apply()?;
        live.process.check_alive()
    }
}

impl Drop for Applied {
    fn drop(&mut self) {
        self.rules.undo();
        // This fails if the namespace is gone; then so are the mounts in it.
        let _ = mounts::detach(&self.live.namespace, &self.trees);
        let root = &mut self.live.root;
        self.owner.act(|| root.undo());
    }
}

/// The owner of what is made in the container: its root user, by the host's numbers. On a file system that
/// belongs to a user namespace nobody else can make anything.
#[derive(Debug)]
struct Owner {
    uid: Uid,
    gid: Gid,
}

impl Owner {
    fn of(process: &Process) -> Result<Self, LiveError> {
        let id = |map| -> Result<u32, LiveError> {
            process::host_id_of_root(&process.read(map)?).ok_or(process.is_not_it("has no root user"))
        };
        Ok(Self { uid: Uid::from_raw(id("uid_map")?), gid: Gid::from_raw(id("gid_map")?) })
    }

    fn act<T>(&self, act: impl FnOnce() -> T) -> T {
        // Modes must be exactly as written: any user of the container passes through the folders.
        let mask = umask(Mode::empty());
        // The group is set first: only root may change it.
        let gid = setfsgid(self.gid);
        let uid = setfsuid(self.uid);
        let done = act();
        setfsuid(uid);
        setfsgid(gid);
        umask(mask);
        done
    }
}

/// Checks that the container's process has the groups `gids`, unless it is root: a hook cannot give groups to
/// a process that exists already.
fn check_groups(json: &Value, gids: &[u32]) -> Result<(), LiveError> {
    let Some(user) = json.pointer("/process/user") else { return Ok(()) };
    if number(user, "uid") == Some(0) {
        return Ok(());
    }
    let groups = user.get("gid").into_iter().chain(entries(user, "/additionalGids"));
    let has: Vec<u64> = groups.filter_map(Value::as_u64).collect();
    match gids.iter().find(|gid| !has.contains(&u64::from(**gid))) {
        Some(gid) => Err(LiveError::Group { gid: *gid }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_process_needs_the_groups_of_the_nodes_unless_it_is_root() {
        for (user, fits) in [
            (json!({"uid": 0, "gid": 0}), true),
            (json!({"uid": 1000, "gid": 44}), true),
            (json!({"uid": 1000, "gid": 1, "additionalGids": [44]}), true),
            (json!({"uid": 1000, "gid": 1}), false),
            (json!({"uid": 1000, "gid": 1, "additionalGids": ["44"]}), false),
        ] {
            let json = json!({"process": {"user": user}});
            assert_eq!(check_groups(&json, &[44]).is_ok(), fits, "{json}");
            assert!(check_groups(&json, &[]).is_ok());
        }
    }
}
