//! The lease store: one SQLite database below the state folder. It grants, changes and releases leases.

mod members;
mod sums;
mod update;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use gpushare_claims::{Cores, Request, Scope};
use gpushare_inventory::{DeviceMemory, Gpu, GpuUuid};
use rusqlite::{Connection, OptionalExtension, Transaction, TransactionBehavior, params};

use crate::error::{ReserveError, StoreError};
use crate::holder::Holder;
use crate::lease::{Grant, Lease, LeaseKey, Member, PastLease, Release, ReleaseReason};
use crate::place::{Admission, GpuLoad, place};
use crate::pod::{Pod, words};
use crate::rows::{grouped, lease, now, signed, summary, unsigned, uuid};
use crate::schema::{self, Boot};
use crate::write_queue::Turn;

pub use update::UpdateError;

/// How many past leases are kept.
const HISTORY_ROWS: u32 = 1000;

/// An open lease store.
#[derive(Debug)]
pub struct Store {
    db: Connection,
    path: PathBuf,
    /// The last sums, with the `data_version` of the database that they belong to. Any other process's commit
    /// makes them stale.
    sums: RefCell<Option<(i64, Loads)>>,
}

/// Sums over all living leases, by GPU.
pub type Loads = BTreeMap<GpuUuid, GpuLoad>;

/// A container that the sweep took out of its lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Swept {
    /// The lease's id.
    pub lease: i64,
    /// The container that was taken out.
    pub key: LeaseKey,
    /// What became of the lease: [`Release::Left`] or [`Release::Ended`].
    pub left: Release,
}

impl Store {
    /// The database's file in the state folder `state`.
    pub fn path(state: &Path) -> PathBuf {
        state.join("quota.db")
    }

    /// Opens the store below the state folder. Leases of an earlier boot are moved to the history.
    ///
    /// # Errors
    /// When the database cannot be made or opened, is damaged, of an unknown version, kept in other
    /// namespaces, or missing while containers' regions are left.
    pub fn open(state: &Path) -> Result<Self, StoreError> {
        let path = Self::path(state);
        let (db, known) = schema::open(&path)?;
        let store = Self { db, path, sums: RefCell::new(None) };
        let boot = Boot::here()?;
        match known {
            Some(known) if known == boot => {}
            Some(known) if known.id == boot.id => {
                // Same boot, other namespaces: `claim` takes a store without leases over, and fails for any
                // other.
                let tx = store.begin_anywhere()?;
                store.claim(&tx, &boot)?;
                store.commit(tx)?;
            }
            _ => store.enter_boot(&boot)?,
        }
        Ok(store)
    }

    /// Grants `request` to the container `member`, or says why not. The holder of `member` keeps the share
    /// until the container is activated. A container of a pod that joins another one's pid namespace, or that
    /// asks for the pod's share, becomes one more member of the lease that exists already. When the node
    /// looks full, members whose holders are gone are swept first. `swept` is called for each of them, since
    /// the caller has to remove what it keeps for them.
    ///
    /// # Errors
    /// When the node cannot hold the share, the container holds one already, the pod holds another, or the
    /// store fails.
    pub fn reserve(
        &self,
        member: &Member,
        pod: Option<&Pod>,
        request: &Request,
        gpus: &[Gpu],
        rules: &Admission,
        swept: impl FnMut(&Swept),
    ) -> Result<Reservation<'_>, ReserveError> {
        let lease = match self.try_reserve(member, pod, request, gpus, rules) {
            Err(
                refusal @ (ReserveError::Refused(_) | ReserveError::Held(_) | ReserveError::Differs { .. }),
            ) => {
                let gone = self.sweep()?;
                if gone.is_empty() {
                    return Err(refusal);
                }
                gone.iter().for_each(swept);
                self.try_reserve(member, pod, request, gpus, rules)?
            }
            other => other?,
        };
        let (container, grants, with) = (&member.key.container, summary(&lease.grants), lease.others.len());
        tracing::info!(%container, %grants, with, "lease granted");
        Ok(Reservation { store: self, lease })
    }

    fn try_reserve(
        &self,
        member: &Member,
        pod: Option<&Pod>,
        request: &Request,
        gpus: &[Gpu],
        rules: &Admission,
    ) -> Result<Lease, ReserveError> {
        let tx = self.begin()?;
        if self.find(&member.key)?.is_some() {
            return Err(ReserveError::Held(member.key.clone()));
        }
        let of_pod = match (request.scope, pod) {
            (Scope::Container, _) => None,
            (Scope::Pod, Some(_)) => Some(words(request, gpus)?),
            (Scope::Pod, None) => return Err(ReserveError::NoPod(member.key.clone())),
        };
        let join =
            pod.map(|pod| self.to_join(&member.key.root, pod, of_pod.as_deref())).transpose()?.flatten();
        if let Some(id) = join {
            self.insert_member(&tx, id, member)?;
            let lease = self.find(&member.key)?;
            self.commit(tx)?;
            return lease.ok_or_else(|| ReserveError::Lost(member.key.clone()));
        }
        let (version, mut loads) = self.current_loads(&tx)?;
        let grants = place(request, gpus, |gpu| loads.get(&gpu).copied().unwrap_or_default(), rules)?;
        let lease = Lease { granted_at: now(), ..Lease::new(member.clone(), request, grants) };
        let id = self.insert(&tx, &lease, pod, of_pod.as_deref())?;
        self.commit(tx)?;
        for grant in &lease.grants {
            loads.entry(grant.gpu).or_default().add(grant, !lease.enforcement.terms().has_neighbours);
        }
        self.sums.replace(Some((version, loads)));
        Ok(Lease { id, ..lease })
    }

    /// What would be granted now, without granting it: for `gpushare plan`.
    ///
    /// # Errors
    /// As [`Store::reserve`].
    pub fn preview(
        &self,
        request: &Request,
        gpus: &[Gpu],
        rules: &Admission,
    ) -> Result<Vec<Grant>, ReserveError> {
        let loads = self.loads()?;
        Ok(place(request, gpus, |gpu| loads.get(&gpu).copied().unwrap_or_default(), rules)?)
    }

    /// Makes `holder`, the container's init process, the holder of container `key`'s reservation of the lease
    /// `id`.
    ///
    /// Returns whether `holder` holds it now. A reservation that another process has activated is not taken.
    ///
    /// # Errors
    /// When the store fails.
    pub fn activate(&self, id: i64, key: &LeaseKey, holder: &Holder) -> Result<bool, StoreError> {
        let cgroup = holder.cgroup.as_ref().map(|path| path.to_string_lossy().into_owned());
        let tx = self.begin()?;
        let changed = self.sql(tx.execute(
            "UPDATE member SET state = 'active', pid = ?4, start_time = ?5, cgroup = ?6, leads = ?7
             WHERE lease = ?1 AND root = ?2 AND container = ?3 AND state = 'reserved'",
            params![id, key.root, key.container, holder.pid, signed(holder.start_time), cgroup, holder.leads],
        ))?;
        // runc 1.1.5 calls the hooks of a container without a mount namespace twice.
        let again = || {
            let same = |held: &Holder| (held.pid, held.start_time) == (holder.pid, holder.start_time);
            let its = |lease: Lease| lease.id == id && same(&lease.member.holder);
            self.find(key).map(|lease| lease.is_some_and(its))
        };
        let holds = changed == 1 || again()?;
        self.commit(tx)?;
        Ok(holds)
    }

    /// Takes container `key` out of the lease `id`. The lease ends with its last container. It is no error if
    /// the container does not hold it. A container that was started again under the same key has a lease of
    /// another id, which stays.
    ///
    /// # Errors
    /// When the store fails.
    pub fn release(&self, id: i64, key: &LeaseKey, reason: ReleaseReason) -> Result<Release, StoreError> {
        self.release_if(key, reason, |lease| lease.id == id)
    }

    /// As [`Store::release`], if the container's holder is proved gone.
    ///
    /// # Errors
    /// When the store fails.
    pub fn release_if_gone(
        &self,
        id: i64,
        key: &LeaseKey,
        reason: ReleaseReason,
    ) -> Result<Release, StoreError> {
        self.release_if(key, reason, |lease| lease.id == id && lease.member.holder.is_gone())
    }

    /// Takes all containers whose holders are proved gone out of their leases, each in its own transaction,
    /// and returns them.
    ///
    /// # Errors
    /// When the store fails.
    pub fn sweep(&self) -> Result<Vec<Swept>, StoreError> {
        let mut swept = Vec::new();
        for lease in self.select("", params![])? {
            for member in lease.members().filter(|member| member.holder.is_gone()) {
                // `release_if_gone` looks again inside the transaction: the hook may have activated the lease
                // meanwhile.
                match self.release_if_gone(lease.id, &member.key, ReleaseReason::Swept)? {
                    Release::Nothing => {}
                    left => swept.push(Swept { lease: lease.id, key: member.key.clone(), left }),
                }
            }
        }
        Ok(swept)
    }

    /// Whether a lease could be written now: for `gpushare doctor`.
    ///
    /// # Errors
    /// When the store is busy, read-only or full.
    pub fn check_writable(&self) -> Result<(), StoreError> {
        let tx = self.begin()?;
        self.sql(tx.execute("UPDATE boot SET id = id", []))?;
        self.commit(tx)
    }

    /// When the database was last written, which changes with every commit. It spares callers to read
    /// unchanged leases again. `None` when it cannot be told.
    pub fn last_change(&self) -> Option<SystemTime> {
        // Asked by name: closing a descriptor of the file would drop SQLite's locks.
        fs::metadata(&self.path).and_then(|metadata| metadata.modified()).ok()
    }

    /// All living leases, oldest first.
    ///
    /// # Errors
    /// When the store fails.
    pub fn leases(&self) -> Result<Vec<Lease>, StoreError> {
        // One transaction for all reads: otherwise each lease's grants would be read with locks of their own,
        // and could have changed meanwhile.
        let _one_look = if self.db.is_autocommit() {
            Some(self.sql(Transaction::new_unchecked(&self.db, TransactionBehavior::Deferred))?)
        } else {
            None
        };
        self.with_grants(self.select("", params![])?)
    }

    /// The lease of one container.
    ///
    /// # Errors
    /// When the store fails.
    pub fn lease(&self, key: &LeaseKey) -> Result<Option<Lease>, StoreError> {
        let _one_look = self.sql(Transaction::new_unchecked(&self.db, TransactionBehavior::Deferred))?;
        self.find(key)
    }

    fn find(&self, key: &LeaseKey) -> Result<Option<Lease>, StoreError> {
        const ITS: &str = "WHERE lease.id = (SELECT lease FROM member WHERE root = ?1 AND container = ?2)";
        let found = self.with_grants(self.select(ITS, params![key.root, key.container])?)?;
        Ok(found.into_iter().find_map(|lease| lease.asked_by(|other| other == key)))
    }

    /// Whether the lease `id` exists.
    ///
    /// # Errors
    /// When the store fails.
    pub fn stands(&self, id: i64) -> Result<bool, StoreError> {
        let mut query = self.sql(self.db.prepare_cached("SELECT 1 FROM lease WHERE id = ?1"))?;
        self.sql(query.exists(params![id]))
    }

    /// The leases of all containers with this id, whatever their runtime roots.
    ///
    /// # Errors
    /// When the store fails.
    pub fn leases_by_id(&self, container: &str) -> Result<Vec<Lease>, StoreError> {
        const THEIRS: &str = "WHERE lease.id IN (SELECT lease FROM member WHERE container = ?1)";
        let found = self.with_grants(self.select(THEIRS, params![container])?)?;
        let asked = |lease: Lease| lease.asked_by(|key| key.container == container);
        Ok(found.into_iter().filter_map(asked).collect())
    }

    /// The last leases that ended, newest first.
    ///
    /// # Errors
    /// When the store fails.
    pub fn history(&self) -> Result<Vec<PastLease>, StoreError> {
        let mut query = self.sql(self.db.prepare(
            "SELECT root, container, grants, granted_at, released_at, reason, others FROM past
             ORDER BY id DESC",
        ))?;
        let rows = query.query_map([], |row| {
            Ok(PastLease {
                key: LeaseKey { root: row.get(0)?, container: row.get(1)? },
                others: row.get::<_, String>(6)?.split_whitespace().map(str::to_owned).collect(),
                grants: row.get(2)?,
                granted_at: unsigned(row.get(3)?),
                released_at: unsigned(row.get(4)?),
                reason: row.get(5)?,
            })
        });
        self.sql(rows.and_then(Iterator::collect))
    }

    fn release_if(
        &self,
        key: &LeaseKey,
        reason: ReleaseReason,
        wanted: impl Fn(&Lease) -> bool,
    ) -> Result<Release, StoreError> {
        let tx = self.begin()?;
        let Some(lease) = self.find(key)?.filter(wanted) else { return Ok(Release::Nothing) };
        let left = if lease.others.is_empty() {
            self.retire(&tx, &lease, reason)?;
            Release::Ended
        } else {
            self.leave(&tx, &lease)?;
            Release::Left
        };
        self.commit(tx)?;
        tell_release(&lease, left, reason);
        Ok(left)
    }

    /// Retires the leases of an earlier boot. The boot is looked at again inside the transaction: when
    /// several processes see the new boot first, only one may retire leases, or it would retire the others'
    /// new leases.
    fn enter_boot(&self, boot: &Boot) -> Result<(), StoreError> {
        let tx = self.begin_anywhere()?;
        let known: Option<String> =
            self.sql(tx.query_row("SELECT id FROM boot", [], |row| row.get(0)).optional())?;
        if known.as_ref() == Some(&boot.id) {
            self.claim(&tx, boot)?;
            return self.commit(tx);
        }
        // If the stored boot id were damaged, the code below would end the leases of living containers.
        if !self.sql(schema::is_sound(&tx))? {
            return Err(StoreError::Damaged { path: self.path.clone() });
        }
        let earlier = self.leases()?;
        for lease in &earlier {
            self.retire(&tx, lease, ReleaseReason::Reboot)?;
        }
        self.sql(tx.execute("DELETE FROM boot", []))?;
        let insert = "INSERT INTO boot (id, namespaces) VALUES (?1, ?2)";
        self.sql(tx.execute(insert, params![boot.id, boot.namespaces]))?;
        self.commit(tx)?;
        earlier.iter().for_each(|lease| tell_release(lease, Release::Ended, ReleaseReason::Reboot));
        Ok(())
    }

    /// Moves a lease into the history.
    fn retire(&self, tx: &Transaction, lease: &Lease, reason: ReleaseReason) -> Result<(), StoreError> {
        self.forget_grants(tx, lease)?;
        let key = &lease.member.key;
        let others = self.former(tx, lease.id, lease.others.iter().map(|member| &member.key))?;
        self.sql(tx.execute(
            "INSERT INTO past (root, container, grants, granted_at, released_at, reason, others)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
            params![
                key.root,
                key.container,
                summary(&lease.grants),
                signed(lease.granted_at),
                signed(now()),
                reason.name(),
                others
            ],
        ))?;
        self.sql(
            tx.execute("DELETE FROM past WHERE id <= (SELECT max(id) FROM past) - ?1", params![HISTORY_ROWS]),
        )?;
        self.sql(tx.execute("DELETE FROM lease WHERE id = ?1", params![lease.id])).map(drop)
    }

    fn insert(
        &self,
        tx: &Transaction,
        lease: &Lease,
        pod: Option<&Pod>,
        pod_request: Option<&str>,
    ) -> Result<i64, StoreError> {
        let terms = lease.enforcement.terms();
        self.sql(tx.prepare_cached(
            "INSERT INTO lease (root, sandbox, pod_request, former, enforcement, compute_policy, ceiling, priority,
                                granted_at)
             VALUES (?1, ?2, ?3, '', ?4, ?5, ?6, ?7, ?8)",
        ))
        .and_then(|mut insert| {
            self.sql(insert.execute(params![
                lease.member.key.root,
                pod.map(|pod| &pod.sandbox),
                pod_request,
                terms.name,
                lease.compute_policy.name(),
                lease.ceiling.percent(),
                lease.priority.level(),
                signed(lease.granted_at),
            ]))
        })?;
        let id = tx.last_insert_rowid();
        let mut insert = self.sql(tx.prepare_cached(
            "INSERT INTO granted (lease, position, gpu, memory, cores, exclusive) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
        ))?;
        for (position, grant) in (0_i64..).zip(&lease.grants) {
            let cores = grant.cores.map(Cores::percent);
            let memory = signed(grant.memory.bytes());
            let exclusive = !terms.has_neighbours;
            self.sql(insert.execute(params![id, position, grant.gpu.to_string(), memory, cores, exclusive]))?;
        }
        self.insert_member(tx, id, &lease.member)?;
        Ok(id)
    }

    fn select(
        &self,
        rest: &'static str,
        arguments: &[&dyn rusqlite::ToSql],
    ) -> Result<Vec<Lease>, StoreError> {
        const LEASES: &str = "SELECT lease.id, enforcement, compute_policy, ceiling, priority, granted_at, \
                              member.root, container, state, pid, start_time, cgroup, leads \
                              FROM lease JOIN member ON member.lease = lease.id ";
        const ORDER: &str = " ORDER BY lease.id, member.id";
        let mut query = self.sql(self.db.prepare_cached(&[LEASES, rest, ORDER].concat()))?;
        let rows = query.query_map(arguments, lease);
        self.sql(rows.and_then(Iterator::collect)).map(grouped)
    }

    fn with_grants(&self, leases: Vec<Lease>) -> Result<Vec<Lease>, StoreError> {
        leases.into_iter().map(|lease| Ok(Lease { grants: self.grants(lease.id)?, ..lease })).collect()
    }

    fn grants(&self, id: i64) -> Result<Vec<Grant>, StoreError> {
        let mut query = self
            .sql(self.db.prepare_cached(
                "SELECT gpu, memory, cores FROM granted WHERE lease = ?1 ORDER BY position",
            ))?;
        let rows = query.query_map(params![id], |row| {
            Ok(Grant {
                gpu: uuid(row, 0)?,
                memory: DeviceMemory::from_bytes(unsigned(row.get(1)?)),
                cores: row.get::<_, Option<u8>>(2)?.and_then(Cores::new),
            })
        });
        self.sql(rows.and_then(Iterator::collect))
    }

    /// Fails if the store is kept in other namespaces than this process's: from here each holder would seem
    /// gone. A store without leases moves to this process's namespaces.
    fn claim(&self, tx: &Transaction, boot: &Boot) -> Result<(), StoreError> {
        let known: (String, String) = self
            .sql(tx.prepare_cached("SELECT id, namespaces FROM boot"))
            .and_then(|mut query| self.sql(query.query_row([], |row| Ok((row.get(0)?, row.get(1)?)))))?;
        let (id, theirs) = known;
        if id == boot.id && theirs == boot.namespaces {
            return Ok(());
        }
        if id != boot.id || self.sql(self.sql(tx.prepare("SELECT 1 FROM lease"))?.exists([]))? {
            return Err(StoreError::Stranger {
                path: self.path.clone(),
                theirs,
                ours: boot.namespaces.clone(),
            });
        }
        self.sql(tx.execute("UPDATE boot SET namespaces = ?1", [&boot.namespaces])).map(drop)
    }

    /// Waits for this process's turn and begins a writing transaction. Both end on drop, the transaction
    /// first.
    fn begin(&self) -> Result<Writing<'_>, StoreError> {
        let writing = self.begin_anywhere()?;
        self.claim(&writing, &Boot::here()?)?;
        Ok(writing)
    }

    /// As [`Store::begin`], without the check that the store is kept in this process's namespaces.
    fn begin_anywhere(&self) -> Result<Writing<'_>, StoreError> {
        let turn = Turn::take(&self.path)?;
        let tx = self.sql(Transaction::new_unchecked(&self.db, TransactionBehavior::Immediate))?;
        Ok(Writing { tx, _turn: turn })
    }

    fn commit(&self, writing: Writing) -> Result<(), StoreError> {
        self.sql(writing.tx.commit())
    }

    fn sql<T>(&self, result: rusqlite::Result<T>) -> Result<T, StoreError> {
        result.map_err(|error| StoreError::sqlite(&self.path, error))
    }
}

/// A writing transaction of the process whose turn it is.
struct Writing<'store> {
    tx: Transaction<'store>,
    _turn: Turn,
}

impl<'store> Deref for Writing<'store> {
    type Target = Transaction<'store>;

    fn deref(&self) -> &Transaction<'store> {
        &self.tx
    }
}

/// A share that the store holds as reserved. Drop gives it back; after a successful execve there is no drop.
#[must_use = "dropping a reservation gives the share back"]
#[derive(Debug)]
pub struct Reservation<'store> {
    store: &'store Store,
    lease: Lease,
}

impl Reservation<'_> {
    /// What was granted.
    pub fn lease(&self) -> &Lease {
        &self.lease
    }

    /// Makes `init`, the container's first process, the holder. The lease then stands until it is released.
    ///
    /// # Errors
    /// When the store fails, or when somebody released the reservation meanwhile. The share is given back
    /// then.
    pub fn hand_over(self, init: &Holder) -> Result<(), ReserveError> {
        if !self.store.activate(self.lease.id, &self.lease.member.key, init)? {
            return Err(ReserveError::Lost(self.lease.member.key.clone()));
        }
        std::mem::forget(self);
        Ok(())
    }
}

fn tell_release(lease: &Lease, left: Release, reason: ReleaseReason) {
    let (container, reason) = (&lease.member.key.container, reason.name());
    match left {
        Release::Nothing => {}
        Release::Left => tracing::info!(%container, reason, "lease left to the pod's other containers"),
        Release::Ended => tracing::info!(%container, reason, "lease released"),
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        let key = &self.lease.member.key;
        if let Err(error) = self.store.release(self.lease.id, key, ReleaseReason::Failed) {
            tracing::warn!(container = %key.container, %error, "reservation left for the sweep");
        }
    }
}

#[cfg(test)]
mod tests;
