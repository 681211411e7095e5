//! What happens to a container that breaks its share, as the settings say (`meter.on_cheating`).

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use gpushare_config::OnCheating;
use gpushare_inject::ending::{self, active};
use gpushare_quota::{Done, Holder, Lease};

use super::process::Process;
use super::searches::is_in;
use crate::container::ids;
use crate::violation::{Kind, Violation};

/// What was done about leases by this meter, and what an earlier version's left to be undone.
#[derive(Debug)]
pub struct Response<'a> {
    /// Those whose containers an earlier version's meter stopped, which none does any more.
    frozen: BTreeSet<i64>,
    /// Those whose containers were killed.
    ended: BTreeSet<i64>,
    state: &'a Path,
}

impl<'a> Response<'a> {
    /// Begins with the leases that an earlier version's meter left `frozen`. What is done is noted below the
    /// state folder.
    pub fn after(frozen: impl IntoIterator<Item = i64>, state: &'a Path) -> Self {
        Self { frozen: frozen.into_iter().collect(), ended: BTreeSet::new(), state }
    }

    /// The leases whose containers are still to go on.
    pub fn frozen(&self) -> impl Iterator<Item = i64> {
        self.frozen.iter().copied()
    }

    /// Ends containers by what was found, where that is `wanted`. Else there is only the log and the lists.
    pub fn act(&mut self, wanted: OnCheating, leases: &[Lease], found: &[Violation]) {
        for lease in leases {
            self.thaw(lease);
            let mut broken = found.iter().filter(|one| one.lease == Some(lease.id) && counts(one));
            if let Some(broken) =
                broken.find(|one| still_holds(one, lease, leases)).filter(|_| wanted == OnCheating::End)
            {
                self.end(lease, broken);
            }
        }
        for known in [&mut self.frozen, &mut self.ended] {
            known.retain(|id| leases.iter().any(|lease| lease.id == *id));
        }
    }

    /// Kills the containers' processes, at each look until there are none.
    fn end(&mut self, lease: &Lease, broken: &Violation) {
        if self.ended.insert(lease.id) {
            tracing::warn!(container = %ids(lease).join(", "), "ended: it broke its share (meter.on_cheating)");
            Done::Ended { why: format!("meter.on_cheating: {}", broken.text) }.note(self.state, lease);
        }
        ending::end(lease);
    }

    /// Lets containers go on that an earlier version's meter stopped. What fails is tried again at the next
    /// look.
    fn thaw(&mut self, lease: &Lease) {
        if !self.frozen.contains(&lease.id) {
            return;
        }
        let container = ids(lease).join(", ");
        let done: io::Result<Vec<()>> = active(lease).map(thaw).collect();
        match done {
            Err(error) => tracing::warn!(%container, %error, "its processes cannot be let go on"),
            Ok(_) => {
                self.frozen.remove(&lease.id);
                Done::Continued.note(self.state, lease);
                tracing::info!(%container, "goes on: nothing is stopped for breaking its share any more");
            }
        }
    }
}

/// Whether a violation is a reason to end a container. Strangers are not, and neither is what cannot be read
/// for a moment, since the container's own end may look the same, nor a call that was changed, about which
/// its supervisor has done what is to be done. GPU time is none either: the libraries may fail to hold a
/// share although the container does nothing wrong. All of these are only reported.
fn counts(found: &Violation) -> bool {
    let reported = [Kind::Unreadable, Kind::Unsearched, Kind::Stranger, Kind::Race, Kind::Compute];
    !found.is_hint && !reported.iter().any(|kind| kind.name() == found.kind)
}

/// Whether the process that proves a violation is still there and in a container of the lease.
fn still_holds(found: &Violation, lease: &Lease, leases: &[Lease]) -> bool {
    let Some((pid, born)) = found.pid.zip(found.born) else { return true };
    let process = Process::open(pid);
    process.is_some_and(|process| is_in(lease, leases, pid) && process.start_time() == Some(born))
}

/// Lets the processes of a container go on.
fn thaw(holder: &Holder) -> io::Result<()> {
    let cgroup =
        holder.cgroup.as_deref().ok_or_else(|| io::Error::other("the container has no cgroup of its own"))?;
    match version_1(cgroup) {
        Some(folder) => fs::write(folder.join("freezer.state"), "THAWED"),
        None => fs::write(cgroup.join("cgroup.freeze"), "0"),
    }
}

/// The freezer's folder of a cgroup of version 1; the store knows the cgroup by its devices controller.
fn version_1(cgroup: &Path) -> Option<PathBuf> {
    let below = cgroup.strip_prefix("/sys/fs/cgroup/devices").ok()?;
    Some(Path::new("/sys/fs/cgroup/freezer").join(below))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_proofs_end_a_container() {
        let found = |kind: Kind| Violation {
            lease: Some(7),
            container: "web".to_owned(),
            pid: None,
            kind: kind.name().to_owned(),
            text: String::new(),
            born: None,
            is_hint: false,
        };
        let proofs: Vec<&str> =
            Kind::ALL.into_iter().filter(|kind| counts(&found(*kind))).map(Kind::name).collect();
        assert_eq!(proofs, ["limits", "files", "unlimited", "file-lease", "memory"]);
        assert!(!counts(&Violation { is_hint: true, ..found(Kind::Memory) }));
    }
}
