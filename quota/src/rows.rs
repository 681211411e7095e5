//! Converts rows of the database into values, and values into columns.

use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use gpushare_claims::{Cores, Priority};
use gpushare_inventory::GpuUuid;
use rusqlite::{Row, ffi};

use crate::enforcement::Enforcement;
use crate::holder::Holder;
use crate::lease::{Grant, Lease, LeaseKey, LeaseState, Member};

/// A lease with one container, without grants and other containers, from the columns that `Store::select`
/// names.
pub(crate) fn lease(row: &Row) -> rusqlite::Result<Lease> {
    let policy: String = row.get(2)?;
    let priority: u8 = row.get(4)?;
    Ok(Lease {
        id: row.get(0)?,
        member: member(row)?,
        others: Vec::new(),
        grants: Vec::new(),
        enforcement: enforcement(row)?,
        compute_policy: policy.parse().unwrap_or_default(),
        ceiling: Cores::new(row.get(3)?).unwrap_or(Cores::ALL),
        priority: priority.to_string().parse::<Priority>().unwrap_or_default(),
        granted_at: unsigned(row.get(5)?),
    })
}

fn enforcement(row: &Row) -> rusqlite::Result<Enforcement> {
    let name: String = row.get(1)?;
    // Another version's word must not pass for one that grants more.
    Enforcement::named(&name)
        .ok_or_else(|| rusqlite::Error::SqliteFailure(ffi::Error::new(ffi::SQLITE_CORRUPT), None))
}

/// Reads the columns that follow those of the lease.
fn member(row: &Row) -> rusqlite::Result<Member> {
    let state: String = row.get(8)?;
    Ok(Member {
        key: LeaseKey { root: row.get(6)?, container: row.get(7)? },
        state: if state == "active" { LeaseState::Active } else { LeaseState::Reserved },
        holder: Holder {
            pid: row.get(9)?,
            start_time: unsigned(row.get(10)?),
            cgroup: row.get::<_, Option<String>>(11)?.map(PathBuf::from),
            leads: row.get(12)?,
        },
    })
}

/// Joins the rows of each lease into one lease. The rows of one lease follow each other.
pub(crate) fn grouped(rows: Vec<Lease>) -> Vec<Lease> {
    let mut leases: Vec<Lease> = Vec::new();
    for row in rows {
        match leases.last_mut().filter(|lease| lease.id == row.id) {
            Some(lease) => lease.others.push(row.member),
            None => leases.push(row),
        }
    }
    leases
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
