//! The lease store: one SQLite database below the state folder. It grants, changes and releases leases.

mod members;
mod reading;
mod sums;
mod update;
mod writing;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use gpushare_claims::{Request, Scope};
use gpushare_inventory::{Gpu, GpuUuid};
use rusqlite::{CachedStatement, Connection, Row, ToSql, Transaction, params};

use crate::error::{ReserveError, StoreError};
use crate::holder::Holder;
use crate::lease::{Grant, Lease, LeaseKey, Member, Release, ReleaseReason};
use crate::place::{Admission, GpuLoad, place};
use crate::pod::{Pod, words};
use crate::rows::{now, signed, summary};
use crate::schema::{self, Boot};

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
        if known.as_ref() != Some(&boot) {
            store.enter_boot(&boot)?;
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
        sums::add(&mut loads, &lease);
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
        lease.log_release(left, reason);
        Ok(left)
    }

    fn sql<T>(&self, result: rusqlite::Result<T>) -> Result<T, StoreError> {
        result.map_err(|error| StoreError::sqlite(&self.path, error))
    }

    /// Runs a statement that is kept prepared.
    fn run(&self, tx: &Transaction, statement: &str, values: &[&dyn ToSql]) -> Result<(), StoreError> {
        self.sql(tx.prepare_cached(statement).and_then(|mut statement| statement.execute(values)).map(drop))
    }

    /// Whether a query finds anything.
    fn finds(&self, query: &str, values: &[&dyn ToSql]) -> Result<bool, StoreError> {
        self.sql(self.db.prepare_cached(query).and_then(|mut query| query.exists(values)))
    }

    /// The values of all rows that a query finds.
    fn rows<T>(
        &self,
        query: &str,
        values: &[&dyn ToSql],
        value: impl FnMut(&Row) -> rusqlite::Result<T>,
    ) -> Result<Vec<T>, StoreError> {
        let all = |mut query: CachedStatement| query.query_map(values, value)?.collect();
        self.sql(self.db.prepare_cached(query).and_then(all))
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
