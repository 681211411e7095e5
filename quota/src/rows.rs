//! Rows of the database as values, and back.

use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use gpushare_inventory::GpuUuid;
use gpushare_request::{Cores, Mode, Priority};
use rusqlite::Row;

use crate::holder::Holder;
use crate::lease::{Grant, Lease, LeaseKey, LeaseState};

/// A lease without its grants, from the columns that `Store::select` names.
pub(crate) fn lease(row: &Row) -> rusqlite::Result<Lease> {
    let state: String = row.get(3)?;
    let policy: String = row.get(5)?;
    let priority: u8 = row.get(6)?;
    Ok(Lease {
        id: row.get(0)?,
        key: LeaseKey { root: row.get(1)?, container: row.get(2)? },
        grants: Vec::new(),
        mode: if row.get(4)? { Mode::Exclusive } else { Mode::Share },
        compute_policy: policy.parse().unwrap_or_default(),
        ceiling: Cores::new(row.get(11)?).unwrap_or(Cores::ALL),
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

pub(crate) fn uuid(row: &Row, column: usize) -> rusqlite::Result<GpuUuid> {
    let text: String = row.get(column)?;
    let bad = |error| {
        rusqlite::Error::FromSqlConversionFailure(column, rusqlite::types::Type::Text, Box::new(error))
    };
    text.parse().map_err(bad)
}

pub(crate) fn summary(grants: &[Grant]) -> String {
    let grants = grants.iter().map(|grant| match grant.cores {
        Some(cores) => format!("{}: {}, {cores}", grant.gpu, grant.memory),
        None => format!("{}: {}", grant.gpu, grant.memory),
    });
    grants.collect::<Vec<_>>().join("; ")
}

/// SQLite's integers are signed; every figure stored here is far below 2^63.
pub(crate) fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

pub(crate) fn unsigned(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
