//! Takes over the leases of versions that kept them in a SQLite database.

use std::path::{Path, PathBuf};

use crate::boot::Boot;
use crate::database::database;
use crate::ended;
use crate::error::StoreError;
use crate::lease::{PastLease, ReleaseReason};
use crate::ledger::{Entry, Ledger};
use crate::pid_namespace::PidNamespace;
use crate::turn::Turn;

/// What a database says.
#[derive(Clone, Debug)]
pub struct Kept {
    /// The id of the boot that the leases belong to.
    pub boot: String,
    /// The namespaces in which they are valid; empty where the version did not record them.
    pub namespaces: String,
    /// Oldest first.
    pub leases: Vec<Entry>,
    /// The history, oldest first.
    pub past: Vec<PastLease>,
    /// The highest lease id that was ever given.
    pub last_id: i64,
}

/// The turn to take leases over, which no other process has meanwhile: neither one of this version nor one of
/// those that wrote the database.
#[derive(Debug)]
pub struct Takeover {
    ledger: Ledger,
    here: Boot,
    turn: Turn,
}

impl Takeover {
    /// Waits for the turn. `None` when there is nothing to take over.
    ///
    /// # Errors
    /// When others take longer than the deadline, or the state folder cannot be used.
    pub fn begin(state: &Path) -> Result<Option<Self>, StoreError> {
        let here = Boot::here()?;
        let ledger = Ledger::at(state, here.clone());
        // Every command asks, and must not wait for writers when there is nothing to do.
        if !ledger.is_behind() {
            return Ok(None);
        }
        let turn = Turn::take(state)?;
        Ok(ledger.is_behind().then_some(Self { ledger, here, turn }))
    }

    /// The database's path.
    pub fn database(&self) -> PathBuf {
        database(self.ledger.state())
    }

    /// Fails if the database's containers cannot be seen from this process. One that does not record its
    /// namespaces is believed to be kept in these if one of its containers lives here, if it has none, or if
    /// this is the machine's first pid namespace.
    ///
    /// # Errors
    /// [`StoreError::Stranger`].
    pub fn check(&self, kept: &Kept) -> Result<(), StoreError> {
        let mut members = kept.leases.iter().flat_map(|entry| entry.lease.members());
        let is_ours = kept.boot != self.here.id
            || kept.leases.is_empty()
            || match kept.namespaces.as_str() {
                "" => {
                    PidNamespace::own().is_some_and(PidNamespace::is_first)
                        || members.any(|member| member.holder.lives())
                }
                known => known == self.here.namespaces,
            };
        match is_ours {
            true => Ok(()),
            false => Err(StoreError::Stranger {
                path: self.database(),
                theirs: match kept.namespaces.is_empty() {
                    true => "the one before the update".to_owned(),
                    false => kept.namespaces.clone(),
                },
                ours: self.here.namespaces.clone(),
            }),
        }
    }

    /// Writes the leases into the ledger of this boot, if they are of this boot, and makes the ledger if
    /// there is none. One may be there if a program of an earlier version was run beside this one, or if who
    /// began this was killed; what stands in it already is not added again. The caller gives the database the
    /// version [`TAKEN`] while it has the turn, which is returned.
    ///
    /// # Errors
    /// When the ledger cannot be written.
    pub fn finish(self, kept: Kept) -> Result<Self, StoreError> {
        let Self { ledger, here, turn } = self;
        let state = ledger.state();
        let (living, ended) = match kept.boot == here.id {
            true => (kept.leases, Vec::new()),
            false => (Vec::new(), kept.leases),
        };
        let turn = match ledger.is_absent() {
            true => {
                ledger.make(&turn, living, kept.last_id)?;
                ledger.retire_earlier(&turn)?;
                turn
            }
            false => {
                let mut writing = ledger.write_in(turn)?;
                let page = &mut writing.page;
                page.head.next = page.head.next.max(kept.last_id + 1);
                for entry in living {
                    let known = page.lease(entry.lease.id)?;
                    if known.is_none_or(|known| known.lease.granted_at != entry.lease.granted_at) {
                        page.push(entry);
                    }
                }
                writing.commit()?
            }
        };
        kept.past.iter().for_each(|past| ended::note(state, past));
        for entry in ended {
            ended::note(state, &PastLease::of(&entry.lease, &entry.former, ReleaseReason::Reboot));
        }
        Ok(Self { ledger, here, turn })
    }
}
