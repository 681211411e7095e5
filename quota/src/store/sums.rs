//! What is granted on each GPU: sums over the living leases.

use gpushare_inventory::{DeviceMemory, GpuUuid};
use rusqlite::{Transaction, params};

use super::{Loads, Store, StoreError};
use crate::lease::Lease;
use crate::place::GpuLoad;
use crate::rows::{unsigned, uuid};

impl Store {
    /// Sums per GPU over all living leases.
    ///
    /// They are computed twice, by SQLite from the index and here from the rows: SQLite itself would read on
    /// in a file in which one of them is damaged. `ORDER BY` the key makes SQLite read the table; otherwise it
    /// could read the index alone, which has all the columns.
    ///
    /// # Errors
    /// When the store fails, or the two sums differ.
    pub fn loads(&self) -> Result<Loads, StoreError> {
        const INDEX: &str = "SELECT gpu, sum(memory), sum(ifnull(cores, 0)), count(*), max(exclusive) \
                             FROM granted INDEXED BY granted_by_gpu GROUP BY gpu";
        const ROWS: &str =
            "SELECT gpu, memory, ifnull(cores, 0), 1, exclusive FROM granted ORDER BY lease, position";
        const WITHOUT_GRANT: &str = "SELECT 1 FROM lease WHERE id NOT IN (SELECT lease FROM granted)";
        let by_index: Loads = self.loads_of(INDEX)?.into_iter().collect();
        let mut by_row = Loads::new();
        for (gpu, load) in self.loads_of(ROWS)? {
            by_row.entry(gpu).or_default().join(&load);
        }
        if by_index != by_row || self.finds(WITHOUT_GRANT, params![])? {
            return Err(StoreError::Damaged { path: self.path.clone() });
        }
        Ok(by_row)
    }

    /// As [`Store::loads`], without the leases whose containers are all gone: the next creation that needs
    /// their room sweeps them.
    ///
    /// # Errors
    /// When the store fails.
    pub fn living_loads(&self) -> Result<Loads, StoreError> {
        let mut loads = Loads::new();
        for lease in self.leases()?.iter().filter(|lease| !lease.is_gone()) {
            add(&mut loads, lease);
        }
        Ok(loads)
    }

    /// The sums as the open transaction sees them. The last sums of this connection are used while no other
    /// process has committed since; else the sums are computed from all rows.
    pub(super) fn current_loads(&self, tx: &Transaction) -> Result<(i64, Loads), StoreError> {
        let (version, loads) = self.remembered(tx)?;
        Ok((version, loads.map_or_else(|| self.loads(), Ok)?))
    }

    /// The version of the database, and the last sums if they belong to it.
    fn remembered(&self, tx: &Transaction) -> Result<(i64, Option<Loads>), StoreError> {
        let version = self.sql(tx.pragma_query_value(None, "data_version", |row| row.get(0)))?;
        let sums = self.sums.take().filter(|(known, _)| *known == version);
        Ok((version, sums.map(|(_, loads)| loads)))
    }

    /// Takes a lease that is being released out of the remembered sums.
    pub(super) fn forget_grants(&self, tx: &Transaction, lease: &Lease) -> Result<(), StoreError> {
        if let (version, Some(mut loads)) = self.remembered(tx)? {
            for grant in &lease.grants {
                loads.entry(grant.gpu).or_default().remove(grant);
            }
            loads.retain(|_, load| load.leases > 0);
            self.sums.replace(Some((version, loads)));
        }
        Ok(())
    }

    fn loads_of(&self, query: &str) -> Result<Vec<(GpuUuid, GpuLoad)>, StoreError> {
        self.rows(query, params![], |row| {
            let load = GpuLoad {
                memory: DeviceMemory::from_bytes(unsigned(row.get(1)?)),
                cores: unsigned(row.get(2)?),
                leases: unsigned(row.get(3)?),
                exclusive: row.get(4)?,
            };
            Ok((uuid(row, 0)?, load))
        })
    }
}

/// Adds what a lease holds.
pub(super) fn add(loads: &mut Loads, lease: &Lease) {
    for grant in &lease.grants {
        loads.entry(grant.gpu).or_default().add(grant, !lease.enforcement.terms().has_neighbours);
    }
}
