//! What happens to a container that breaks its share, as the settings say (`meter.on_cheating`).

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use gpushare_config::OnCheating;
use gpushare_inject::ending::{self, active};
use gpushare_quota::{Done, Holder, Lease};

use crate::container::ids;
use crate::violation::{Kind, Violation};

/// What was done about leases, by this meter or one before it.
#[derive(Debug)]
pub struct Response<'a> {
    /// Those whose containers are frozen.
    frozen: BTreeSet<i64>,
    /// Those whose limits are lowered by what their containers hold beyond their books.
    capped: BTreeSet<i64>,
    /// Those whose containers were killed.
    ended: BTreeSet<i64>,
    state: &'a Path,
}

impl<'a> Response<'a> {
    /// Goes on from the containers that an earlier meter left frozen. What is done is noted below the state
    /// folder.
    pub fn after(frozen: impl IntoIterator<Item = i64>, state: &'a Path) -> Self {
        Self { frozen: frozen.into_iter().collect(), capped: BTreeSet::new(), ended: BTreeSet::new(), state }
    }

    /// The leases whose containers are frozen.
    pub fn frozen(&self) -> impl Iterator<Item = i64> {
        self.frozen.iter().copied()
    }

    /// Ends or freezes containers by what was found, and lets others go on. For `report` there is only the
    /// log and the lists. Under `cap` a container is not frozen for memory where a lower limit of its own
    /// `is_enough`.
    pub fn act(
        &mut self,
        wanted: OnCheating,
        leases: &[Lease],
        found: &[Violation],
        is_enough: impl Fn(i64) -> bool,
    ) {
        for lease in leases {
            let mut broken = found.iter().filter(|one| one.lease == Some(lease.id) && counts(one));
            match wanted {
                OnCheating::Report => self.set(lease, None),
                OnCheating::End => {
                    self.set(lease, None);
                    broken.next().into_iter().for_each(|broken| self.end(lease, broken));
                }
                OnCheating::Cap => {
                    let is_memory = |one: &&Violation| one.kind == Kind::Memory.name();
                    let (memory, others): (Vec<_>, Vec<_>) = broken.partition(is_memory);
                    let is_enough = is_enough(lease.id);
                    self.note_cap(lease, memory.first().copied().filter(|_| is_enough));
                    let stops = others.first().or_else(|| memory.first().filter(|_| !is_enough));
                    self.set(lease, stops.copied());
                }
            }
        }
        for known in [&mut self.frozen, &mut self.capped, &mut self.ended] {
            known.retain(|id| leases.iter().any(|lease| lease.id == *id));
        }
    }

    /// Notes when a container's limit is lowered.
    fn note_cap(&mut self, lease: &Lease, broken: Option<&Violation>) {
        match broken {
            Some(_) if self.capped.insert(lease.id) => {
                let container = ids(lease).join(", ");
                tracing::warn!(%container, "its limit is lowered by what its books lack (meter.on_cheating)");
                Done::Capped { why: why(broken) }.note(self.state, lease);
            }
            Some(_) => {}
            None => drop(self.capped.remove(&lease.id)),
        }
    }

    /// Kills the containers' processes, at each look until there are none.
    fn end(&mut self, lease: &Lease, broken: &Violation) {
        if self.ended.insert(lease.id) {
            tracing::warn!(container = %ids(lease).join(", "), "ended: it broke its share (meter.on_cheating)");
            Done::Ended { why: why(Some(broken)) }.note(self.state, lease);
        }
        ending::end(lease);
    }

    /// Freezes the containers of `lease`, or lets them go on if nothing is broken. What fails is tried again at
    /// the next look.
    fn set(&mut self, lease: &Lease, broken: Option<&Violation>) {
        let frozen = broken.is_some();
        if self.frozen.contains(&lease.id) == frozen {
            return;
        }
        let container = ids(lease).join(", ");
        let done: io::Result<Vec<()>> = active(lease).map(|holder| freeze(holder, frozen)).collect();
        match (done, frozen) {
            (Err(error), _) => {
                tracing::warn!(%container, %error, frozen, "its processes cannot be stopped or let go on");
            }
            (Ok(_), true) => {
                self.frozen.insert(lease.id);
                Done::Stopped { why: why(broken) }.note(self.state, lease);
                tracing::warn!(%container, "stopped until it keeps to its share (meter.on_cheating)");
            }
            (Ok(_), false) => {
                self.frozen.remove(&lease.id);
                Done::Continued.note(self.state, lease);
                tracing::info!(%container, "goes on");
            }
        }
    }
}

/// Whether a violation is a reason to stop a container. Strangers are not, and neither is what cannot be read
/// for a moment, since the container's own end may look the same, nor a call that was changed, about which
/// its supervisor has done what is to be done. All of them are only reported.
fn counts(found: &Violation) -> bool {
    ![Kind::Unreadable, Kind::Stranger, Kind::Race].iter().any(|kind| kind.name() == found.kind)
}

/// The setting, and what was found.
fn why(broken: Option<&Violation>) -> String {
    let text = broken.map(|broken| broken.text.as_str()).unwrap_or_default();
    format!("meter.on_cheating: {text}")
}

/// Stops the processes of a container, or lets them go on.
fn freeze(holder: &Holder, frozen: bool) -> io::Result<()> {
    let cgroup =
        holder.cgroup.as_deref().ok_or_else(|| io::Error::other("the container has no cgroup of its own"))?;
    match version_1(cgroup) {
        Some(folder) => fs::write(folder.join("freezer.state"), if frozen { "FROZEN" } else { "THAWED" }),
        None => fs::write(cgroup.join("cgroup.freeze"), if frozen { "1" } else { "0" }),
    }
}

/// The freezer's folder of a cgroup of version 1; the store knows the cgroup by its devices controller.
fn version_1(cgroup: &Path) -> Option<PathBuf> {
    let below = cgroup.strip_prefix("/sys/fs/cgroup/devices").ok()?;
    Some(Path::new("/sys/fs/cgroup/freezer").join(below))
}
