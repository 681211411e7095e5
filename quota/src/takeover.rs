//! Takes over the leases of versions that kept them in a SQLite database, `quota.db`. This crate knows only
//! the database's version number, since the programs on the way of a container hold no SQLite.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;

use crate::boot::Boot;
use crate::ended;
use crate::error::StoreError;
use crate::lease::{PastLease, ReleaseReason};
use crate::ledger::{Entry, Ledger};
use crate::pid_namespace::PidNamespace;
use crate::turn::Turn;

/// The `user_version` of a database whose leases stand in a ledger. Programs of earlier versions refuse it.
pub const TAKEN: u32 = 200;
/// Added to the version of a database whose leases are being taken over. Programs of earlier versions refuse
/// that too.
pub const FENCED: u32 = 100;

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
        if !holds_leases(&ledger) {
            return Ok(None);
        }
        let turn = Turn::take(state)?;
        Ok(holds_leases(&ledger).then_some(Self { ledger, here, turn }))
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

    /// Writes the leases into the ledger of this boot, if they are of this boot, and makes the ledger if there
    /// is none. One may be there if a program of an earlier version was run beside this one. From then on the
    /// database does not count; the caller gives it the version [`TAKEN`].
    ///
    /// # Errors
    /// When the ledger cannot be written.
    pub fn finish(self, kept: Kept) -> Result<(), StoreError> {
        let state = self.ledger.state();
        let (living, ended) = match kept.boot == self.here.id {
            true => (kept.leases, Vec::new()),
            false => (Vec::new(), kept.leases),
        };
        let turn = match self.ledger.is_absent() {
            true => {
                self.ledger.make(&self.turn, living, kept.last_id)?;
                self.ledger.retire_earlier(&self.turn)?;
                self.turn
            }
            false => {
                let mut writing = self.ledger.write_in(self.turn)?;
                writing.page.head.next = writing.page.head.next.max(kept.last_id + 1);
                writing.page.entries.extend(living);
                writing.commit()?
            }
        };
        kept.past.iter().for_each(|past| ended::note(state, past));
        for entry in ended {
            ended::note(state, &PastLease::of(&entry.lease, &entry.former, ReleaseReason::Reboot));
        }
        drop(turn);
        Ok(())
    }
}

/// Where earlier versions kept the leases.
pub(crate) fn database(state: &Path) -> PathBuf {
    state.join("quota.db")
}

/// Whether there is a database whose leases may not stand in the ledger yet. What is no database counts too:
/// who takes it over says what is wrong with it.
pub(crate) fn holds_leases(ledger: &Ledger) -> bool {
    // The database file format: the user version is the big-endian number at byte 60 (sqlite.org,
    // fileformat2). A pipe in its place must not be waited for.
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    let mut header = [0; 64];
    let file = OpenOptions::new().read(true).custom_flags(flags.bits()).open(database(ledger.state()));
    match file.and_then(|mut file| file.read_exact(&mut header)) {
        Ok(()) => match header.last_chunk().copied().map(u32::from_be_bytes) {
            Some(TAKEN) => false,
            // Its leases stand in the ledger as soon as there is one.
            Some(FENCED..TAKEN) => ledger.is_absent(),
            _ => true,
        },
        Err(error) => error.kind() != ErrorKind::NotFound,
    }
}
