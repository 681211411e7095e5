//! The lease store: one SQLite database below the state folder.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use gpushare_inventory::{DeviceMemory, Gpu, GpuUuid};
use gpushare_request::{ComputePolicy, Cores, Mode, Priority, Request};
use rusqlite::{Connection, ErrorCode, OptionalExtension, Row, Transaction, TransactionBehavior, params};

use crate::holder::Holder;
use crate::lease::{Grant, Lease, LeaseKey, LeaseState, PastLease, ReleaseReason};
use crate::place::{Admission, GpuLoad, Refusal, place};
use crate::schema;

/// How many past leases are kept.
const HISTORY_ROWS: u32 = 1000;

/// An open lease store.
#[derive(Debug)]
pub struct Store {
    db: Connection,
    path: PathBuf,
}

/// Why the store cannot be used. Nothing is granted then.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Others held it for longer than the deadline.
    #[error("the quota store {path} has been busy for 5 seconds; try again, and see `gpushare doctor`")]
    Busy {
        /// The database.
        path: PathBuf,
    },
    /// The file system is full or read-only.
    #[error(
        "the quota store {path} cannot be written: its file system is full or read-only; make room there"
    )]
    Full {
        /// The database.
        path: PathBuf,
    },
    /// The file is no database of ours, or a broken one.
    #[error(
        "the quota store {path} is damaged, so nothing is granted; end the containers that hold GPUs, then delete the \
         file (it is made anew)"
    )]
    Damaged {
        /// The database.
        path: PathBuf,
    },
    /// Written by another version of gpushare.
    #[error(
        "the quota store {path} has schema version {version}, which this gpushare does not know; update gpushare"
    )]
    Version {
        /// The database.
        path: PathBuf,
        /// Its schema version.
        version: i32,
    },
    /// The file could not be made.
    #[error("cannot make the quota store {path}")]
    Io {
        /// The database.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Anything else that SQLite says.
    #[error("quota store {path}")]
    Sqlite {
        /// The database.
        path: PathBuf,
        /// What SQLite said.
        source: rusqlite::Error,
    },
    /// The running boot could not be told.
    #[error(transparent)]
    Boot(#[from] gpushare_inventory::ProcError),
}

impl StoreError {
    pub(crate) fn sqlite(path: &Path, source: rusqlite::Error) -> Self {
        let path = path.to_path_buf();
        match source.sqlite_error_code() {
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => Self::Busy { path },
            Some(ErrorCode::DiskFull | ErrorCode::ReadOnly) => Self::Full { path },
            Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt | ErrorCode::TypeMismatch) => {
                Self::Damaged { path }
            }
            Some(ErrorCode::SystemIoFailure) => Self::Full { path },
            _ => Self::Sqlite { path, source },
        }
    }
}

/// Why a share was not granted.
#[derive(Debug, thiserror::Error)]
pub enum ReserveError {
    /// The node cannot hold it.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The container has a lease already.
    #[error("container {0} holds a share already; delete the old container first, or run `gpushare sweep`")]
    Held(LeaseKey),
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Store {
    /// Opens the store below the state folder. Leases of an earlier boot are moved to the history.
    ///
    /// # Errors
    /// When the database cannot be made or opened, is damaged or of another version.
    pub fn open(state: &Path) -> Result<Self, StoreError> {
        let path = state.join("quota.db");
        let store = Self { db: schema::open(&path)?, path };
        store.enter_boot(&gpushare_inventory::boot_id()?)?;
        Ok(store)
    }

    /// Grants `request` to the container `key`, held by `holder` until it is activated, or says why not. When the
    /// node looks full, leases whose holders are gone are swept first.
    ///
    /// # Errors
    /// When the node cannot hold the share, the container holds one already, or the store fails.
    pub fn reserve(
        &self,
        key: &LeaseKey,
        request: &Request,
        gpus: &[Gpu],
        rules: &Admission,
        holder: &Holder,
    ) -> Result<Reservation<'_>, ReserveError> {
        let first = self.try_reserve(key, request, gpus, rules, holder);
        let lease = match first {
            Err(ReserveError::Refused(_) | ReserveError::Held(_)) if !self.sweep()?.is_empty() => {
                self.try_reserve(key, request, gpus, rules, holder)?
            }
            other => other?,
        };
        tracing::info!(container = %key.container, grants = %summary(&lease.grants), "lease granted");
        Ok(Reservation { store: self, lease })
    }

    fn try_reserve(
        &self,
        key: &LeaseKey,
        request: &Request,
        gpus: &[Gpu],
        rules: &Admission,
        holder: &Holder,
    ) -> Result<Lease, ReserveError> {
        let tx = self.begin()?;
        if self.id_of(&tx, key)?.is_some() {
            return Err(ReserveError::Held(key.clone()));
        }
        let loads = self.loads_in(&tx)?;
        let grants = place(request, gpus, |gpu| loads.get(&gpu).copied().unwrap_or_default(), rules)?;
        let lease = Lease {
            id: 0,
            key: key.clone(),
            grants,
            mode: request.mode,
            compute_policy: request.compute_policy,
            priority: request.priority,
            state: LeaseState::Reserved,
            holder: holder.clone(),
            granted_at: now(),
        };
        let id = self.insert(&tx, &lease)?;
        self.commit(tx)?;
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

    /// Makes `holder`, the container's init, the holder of the reserved lease.
    ///
    /// Returns whether there is such a lease.
    ///
    /// # Errors
    /// When the store fails.
    pub fn activate(&self, key: &LeaseKey, holder: &Holder) -> Result<bool, StoreError> {
        let cgroup = holder.cgroup.as_ref().map(|path| path.to_string_lossy().into_owned());
        let changed = self.sql(self.db.execute(
            "UPDATE lease SET state = 'active', pid = ?3, start_time = ?4, cgroup = ?5 WHERE root = ?1 AND container = ?2",
            params![key.root, key.container, holder.pid, signed(holder.start_time), cgroup],
        ))?;
        Ok(changed == 1)
    }

    /// Gives a lease back; an unknown key is success. Returns whether there was one.
    ///
    /// # Errors
    /// When the store fails.
    pub fn release(&self, key: &LeaseKey, reason: ReleaseReason) -> Result<bool, StoreError> {
        self.release_if(key, reason, |_| true)
    }

    /// Gives a lease back if its holder is proved gone. Returns whether it did.
    ///
    /// # Errors
    /// When the store fails.
    pub fn release_if_gone(&self, key: &LeaseKey, reason: ReleaseReason) -> Result<bool, StoreError> {
        self.release_if(key, reason, |lease| lease.holder.is_gone())
    }

    /// Gives back all leases whose holders are proved gone, each in a transaction of its own, and returns them.
    ///
    /// # Errors
    /// When the store fails.
    pub fn sweep(&self) -> Result<Vec<Lease>, StoreError> {
        let mut swept = Vec::new();
        for lease in self.leases()?.into_iter().filter(|lease| lease.holder.is_gone()) {
            // Looked at again inside the transaction: the hook may have activated it meanwhile.
            if self.release_if_gone(&lease.key, ReleaseReason::Swept)? {
                swept.push(lease);
            }
        }
        Ok(swept)
    }

    /// All living leases, oldest first.
    ///
    /// # Errors
    /// When the store fails.
    pub fn leases(&self) -> Result<Vec<Lease>, StoreError> {
        self.select("ORDER BY id", params![])
    }

    /// The lease of one container.
    ///
    /// # Errors
    /// When the store fails.
    pub fn lease(&self, key: &LeaseKey) -> Result<Option<Lease>, StoreError> {
        let mut found =
            self.select("WHERE root = ?1 AND container = ?2", params![key.root, key.container])?;
        Ok(found.pop())
    }

    /// Sums per GPU over all living leases.
    ///
    /// # Errors
    /// When the store fails.
    pub fn loads(&self) -> Result<BTreeMap<GpuUuid, GpuLoad>, StoreError> {
        self.loads_in(&self.db)
    }

    /// The last leases that ended, newest first.
    ///
    /// # Errors
    /// When the store fails.
    pub fn history(&self) -> Result<Vec<PastLease>, StoreError> {
        let mut query = self.sql(self.db.prepare(
            "SELECT root, container, grants, granted_at, released_at, reason FROM past ORDER BY id DESC",
        ))?;
        let rows = query.query_map([], |row| {
            Ok(PastLease {
                key: LeaseKey { root: row.get(0)?, container: row.get(1)? },
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
    ) -> Result<bool, StoreError> {
        let tx = self.begin()?;
        let Some(lease) = self.lease(key)?.filter(wanted) else { return Ok(false) };
        self.sql(tx.execute(
            "INSERT INTO past (root, container, grants, granted_at, released_at, reason) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
            params![
                key.root,
                key.container,
                summary(&lease.grants),
                signed(lease.granted_at),
                signed(now()),
                reason.name()
            ],
        ))?;
        self.sql(
            tx.execute("DELETE FROM past WHERE id <= (SELECT max(id) FROM past) - ?1", params![HISTORY_ROWS]),
        )?;
        let arguments = params![key.root, key.container];
        self.sql(tx.execute("DELETE FROM lease WHERE root = ?1 AND container = ?2", arguments))?;
        self.commit(tx)?;
        tracing::info!(container = %key.container, reason = reason.name(), "lease released");
        Ok(true)
    }

    fn enter_boot(&self, boot: &str) -> Result<(), StoreError> {
        let known: Option<String> =
            self.sql(self.db.query_row("SELECT id FROM boot", [], |row| row.get(0)).optional())?;
        if known.as_deref() == Some(boot) {
            return Ok(());
        }
        for lease in self.leases()?.into_iter().filter(|_| known.is_some()) {
            self.release(&lease.key, ReleaseReason::Reboot)?;
        }
        let tx = self.begin()?;
        self.sql(tx.execute("DELETE FROM boot", []))?;
        self.sql(tx.execute("INSERT INTO boot (id) VALUES (?1)", params![boot]))?;
        self.commit(tx)
    }

    fn insert(&self, tx: &Transaction, lease: &Lease) -> Result<i64, StoreError> {
        let exclusive = lease.mode == Mode::Exclusive;
        self.sql(tx.prepare_cached(
            "INSERT INTO lease (root, container, state, exclusive, compute_policy, priority, pid, start_time, granted_at)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
        ))
        .and_then(|mut insert| {
            self.sql(insert.execute(params![
                lease.key.root,
                lease.key.container,
                lease.state.name(),
                exclusive,
                policy_name(lease.compute_policy),
                lease.priority.level(),
                lease.holder.pid,
                signed(lease.holder.start_time),
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
            self.sql(insert.execute(params![id, position, grant.gpu.to_string(), memory, cores, exclusive]))?;
        }
        Ok(id)
    }

    fn loads_in(&self, db: &Connection) -> Result<BTreeMap<GpuUuid, GpuLoad>, StoreError> {
        let mut query = self.sql(db.prepare_cached(
            "SELECT gpu, sum(memory), sum(ifnull(cores, 0)), count(*), max(exclusive) FROM granted GROUP BY gpu",
        ))?;
        let rows = query.query_map([], |row| {
            let load = GpuLoad {
                memory: DeviceMemory::from_bytes(unsigned(row.get(1)?)),
                cores: unsigned(row.get(2)?),
                leases: unsigned(row.get(3)?),
                exclusive: row.get(4)?,
            };
            Ok((uuid(row, 0)?, load))
        });
        self.sql(rows.and_then(Iterator::collect))
    }

    fn select(
        &self,
        rest: &'static str,
        arguments: &[&dyn rusqlite::ToSql],
    ) -> Result<Vec<Lease>, StoreError> {
        const LEASES: &str = "SELECT id, root, container, state, exclusive, compute_policy, priority, pid, start_time, \
                              cgroup, granted_at FROM lease ";
        let mut query = self.sql(self.db.prepare_cached(&[LEASES, rest].concat()))?;
        let rows = query.query_map(arguments, lease);
        let found: Vec<Lease> = self.sql(rows.and_then(Iterator::collect))?;
        found.into_iter().map(|lease| Ok(Lease { grants: self.grants(lease.id)?, ..lease })).collect()
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

    fn id_of(&self, db: &Connection, key: &LeaseKey) -> Result<Option<i64>, StoreError> {
        let mut query =
            self.sql(db.prepare_cached("SELECT id FROM lease WHERE root = ?1 AND container = ?2"))?;
        self.sql(query.query_row(params![key.root, key.container], |row| row.get(0)).optional())
    }

    fn begin(&self) -> Result<Transaction<'_>, StoreError> {
        self.sql(Transaction::new_unchecked(&self.db, TransactionBehavior::Immediate))
    }

    fn commit(&self, tx: Transaction) -> Result<(), StoreError> {
        self.sql(tx.commit())
    }

    fn sql<T>(&self, result: rusqlite::Result<T>) -> Result<T, StoreError> {
        result.map_err(|error| StoreError::sqlite(&self.path, error))
    }
}

/// A share written to the store as reserved; given back on drop, which a successful execve never reaches.
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
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.store.release(&self.lease.key, ReleaseReason::Failed) {
            tracing::warn!(container = %self.lease.key.container, %error, "reservation left for the sweep");
        }
    }
}

fn lease(row: &Row) -> rusqlite::Result<Lease> {
    let state: String = row.get(3)?;
    let policy: String = row.get(5)?;
    let priority: u8 = row.get(6)?;
    Ok(Lease {
        id: row.get(0)?,
        key: LeaseKey { root: row.get(1)?, container: row.get(2)? },
        grants: Vec::new(),
        mode: if row.get(4)? { Mode::Exclusive } else { Mode::Share },
        compute_policy: policy.parse().unwrap_or_default(),
        priority: priority.to_string().parse::<Priority>().unwrap_or_default(),
        state: if state == "active" { LeaseState::Active } else { LeaseState::Reserved },
        holder: Holder {
            pid: row.get(7)?,
            start_time: unsigned(row.get(8)?),
            cgroup: row.get::<_, Option<String>>(9)?.map(PathBuf::from),
        },
        granted_at: unsigned(row.get(10)?),
    })
}

fn uuid(row: &Row, column: usize) -> rusqlite::Result<GpuUuid> {
    let text: String = row.get(column)?;
    let bad = |error| {
        rusqlite::Error::FromSqlConversionFailure(column, rusqlite::types::Type::Text, Box::new(error))
    };
    text.parse().map_err(bad)
}

const fn policy_name(policy: ComputePolicy) -> &'static str {
    match policy {
        ComputePolicy::Fixed => "fixed",
        ComputePolicy::Burst => "burst",
        ComputePolicy::None => "none",
    }
}

fn summary(grants: &[Grant]) -> String {
    let grants = grants.iter().map(|grant| match grant.cores {
        Some(cores) => format!("{}: {}, {cores}", grant.gpu, grant.memory),
        None => format!("{}: {}", grant.gpu, grant.memory),
    });
    grants.collect::<Vec<_>>().join("; ")
}

/// SQLite's integers are signed; every figure stored here is far below 2^63.
fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn unsigned(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests;
