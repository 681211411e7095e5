//! What is granted on each GPU: sums over the living leases.

use gpushare_inventory::{DeviceMemory, GpuUuid};
use rusqlite::{Connection, Transaction};

use super::{Loads, Store, StoreError};
use crate::lease::Lease;
use crate::place::GpuLoad;
use crate::rows::{unsigned, uuid};

impl Store {
    /// Sums per GPU over all living leases.
    ///
    /// # Errors
    /// When the store fails.
    pub fn loads(&self) -> Result<Loads, StoreError> {
        self.loads_in(&self.db)
    }

    /// As [`Store::loads`], without the leases whose containers are all gone: the next creation that needs
    /// their room sweeps them.
    ///
    /// # Errors
    /// When the store fails.
    pub fn living_loads(&self) -> Result<Loads, StoreError> {
        let mut loads = Loads::new();
        for lease in self.leases()?.iter().filter(|lease| !lease.is_gone()) {
            for grant in &lease.grants {
                loads.entry(grant.gpu).or_default().add(grant, !lease.enforcement.terms().has_neighbours);
            }
        }
        Ok(loads)
    }

    /// The sums as the open transaction sees them. The last sums of this connection are used while no other
    /// process has committed since; else the sums are computed from all rows.
    pub(super) fn current_loads(&self, tx: &Transaction) -> Result<(i64, Loads), StoreError> {
        let version = self.sql(tx.pragma_query_value(None, "data_version", |row| row.get(0)))?;
        match self.sums.take() {
            Some((known, loads)) if known == version => Ok((version, loads)),
            _ => Ok((version, self.loads_in(tx)?)),
        }
    }

    /// Takes a lease that is being released out of the remembered sums.
    pub(super) fn forget_grants(&self, tx: &Transaction, lease: &Lease) -> Result<(), StoreError> {
        let Some((known, mut loads)) = self.sums.take() else { return Ok(()) };
        let version: i64 = self.sql(tx.pragma_query_value(None, "data_version", |row| row.get(0)))?;
        if known == version {
            for grant in &lease.grants {
                loads.entry(grant.gpu).or_default().remove(grant);
            }
            loads.retain(|_, load| load.leases > 0);
            self.sums.replace(Some((version, loads)));
        }
        Ok(())
    }

    /// Computes the sums twice, by SQLite from the index and here from the rows, and fails if they differ:
    /// SQLite itself would read on in a file in which one of them is damaged. `ORDER BY` the key makes SQLite
    /// read the table; otherwise it could read the index alone, which has all the columns.
    pub(super) fn loads_in(&self, db: &Connection) -> Result<Loads, StoreError> {
        const INDEX: &str = "SELECT gpu, sum(memory), sum(ifnull(cores, 0)), count(*), max(exclusive) \
                             FROM granted INDEXED BY granted_by_gpu GROUP BY gpu";
        const ROWS: &str =
            "SELECT gpu, memory, ifnull(cores, 0), 1, exclusive FROM granted ORDER BY lease, position";
        const WITHOUT_GRANT: &str = "SELECT 1 FROM lease WHERE id NOT IN (SELECT lease FROM granted)";
        let by_index: Loads = self.loads_of(db, INDEX)?.into_iter().collect();
        let mut by_row = Loads::new();
        for (gpu, load) in self.loads_of(db, ROWS)? {
            by_row.entry(gpu).or_default().join(&load);
        }
        let without_grant = self.sql(self.sql(db.prepare_cached(WITHOUT_GRANT))?.exists([]))?;
        if by_index != by_row || without_grant {
            return Err(StoreError::Damaged { path: self.path.clone() });
        }
        Ok(by_row)
    }

    fn loads_of(&self, db: &Connection, query: &str) -> Result<Vec<(GpuUuid, GpuLoad)>, StoreError> {
        let mut query = self.sql(db.prepare_cached(query))?;
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
}
