//! What the store says: the leases that stand and the past.

use std::fs;
use std::time::SystemTime;

use gpushare_claims::Cores;
use gpushare_inventory::DeviceMemory;
use rusqlite::{ToSql, Transaction, TransactionBehavior, params};

use super::Store;
use crate::error::StoreError;
use crate::lease::{Grant, Lease, LeaseKey, PastLease};
use crate::rows::{grouped, lease, unsigned, uuid};

impl Store {
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

    pub(super) fn find(&self, key: &LeaseKey) -> Result<Option<Lease>, StoreError> {
        const ITS: &str = "WHERE lease.id = (SELECT lease FROM member WHERE root = ?1 AND container = ?2)";
        let found = self.with_grants(self.select(ITS, params![key.root, key.container])?)?;
        Ok(found.into_iter().find_map(|lease| lease.asked_by(|other| other == key)))
    }

    /// Whether the lease `id` exists.
    ///
    /// # Errors
    /// When the store fails.
    pub fn stands(&self, id: i64) -> Result<bool, StoreError> {
        self.finds("SELECT 1 FROM lease WHERE id = ?1", params![id])
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
        const PAST: &str = "SELECT root, container, grants, granted_at, released_at, reason, others FROM past
                            ORDER BY id DESC";
        self.rows(PAST, params![], |row| {
            Ok(PastLease {
                key: LeaseKey { root: row.get(0)?, container: row.get(1)? },
                others: row.get::<_, String>(6)?.split_whitespace().map(str::to_owned).collect(),
                grants: row.get(2)?,
                granted_at: unsigned(row.get(3)?),
                released_at: unsigned(row.get(4)?),
                reason: row.get(5)?,
            })
        })
    }

    pub(super) fn select(&self, rest: &'static str, values: &[&dyn ToSql]) -> Result<Vec<Lease>, StoreError> {
        const LEASES: &str = "SELECT lease.id, enforcement, compute_policy, ceiling, priority, granted_at, \
                              member.root, container, state, pid, start_time, cgroup, leads \
                              FROM lease JOIN member ON member.lease = lease.id ";
        const ORDER: &str = " ORDER BY lease.id, member.id";
        self.rows(&[LEASES, rest, ORDER].concat(), values, lease).map(grouped)
    }

    pub(super) fn with_grants(&self, leases: Vec<Lease>) -> Result<Vec<Lease>, StoreError> {
        leases.into_iter().map(|lease| Ok(Lease { grants: self.grants(lease.id)?, ..lease })).collect()
    }

    pub(super) fn grants(&self, id: i64) -> Result<Vec<Grant>, StoreError> {
        const GRANTS: &str = "SELECT gpu, memory, cores FROM granted WHERE lease = ?1 ORDER BY position";
        self.rows(GRANTS, params![id], |row| {
            Ok(Grant {
                gpu: uuid(row, 0)?,
                memory: DeviceMemory::from_bytes(unsigned(row.get(1)?)),
                cores: row.get::<_, Option<u8>>(2)?.and_then(Cores::new),
            })
        })
    }
}
