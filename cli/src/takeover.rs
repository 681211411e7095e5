//! Reads the database in which earlier versions kept the leases, for [`Takeover`].

use std::path::Path;

use anyhow::{Context, Error, Result, ensure};
use gpushare_inventory::DeviceMemory;
use gpushare_quota::{
    Called, Enforcement, Entry, FENCED, Grant, Holder, Kept, Lease, LeaseKey, LeaseState, Member, PastLease,
    StoreError, TAKEN, Takeover,
};
use rusqlite::{Connection, ErrorCode, OpenFlags, OptionalExtension, Row, Transaction, TransactionBehavior};

/// "gpsh": told our database from any other SQLite file.
const APPLICATION_ID: u32 = 0x6770_7368;
/// Makes each statement about leases fail in a program of an earlier version that has the database open.
const FENCE: &str = "ALTER TABLE boot RENAME TO boot_taken; ALTER TABLE lease RENAME TO lease_taken;";

/// What differs between the versions: how a lease with one container, its last columns in the order of
/// [`lease`], is read, whether the history names other containers, and whether the namespaces are recorded.
const VERSIONS: [(&str, &str, &str); 5] = [
    (
        "id, root, NULL, NULL, '', iif(exclusive, 'whole-gpu', 'intercepted'), compute_policy, 100, priority, \
         granted_at, root, container, state, pid, start_time, cgroup, 0 FROM lease_taken ORDER BY id",
        "''",
        "''",
    ),
    (
        "id, root, NULL, NULL, '', iif(exclusive, 'whole-gpu', 'intercepted'), compute_policy, ceiling, \
         priority, granted_at, root, container, state, pid, start_time, cgroup, 0 FROM lease_taken ORDER BY id",
        "''",
        "''",
    ),
    (
        "lease.id, lease.root, sandbox, pod_request, former, iif(exclusive, 'whole-gpu', 'intercepted'), \
         compute_policy, ceiling, priority, granted_at, member.root, container, state, pid, start_time, cgroup, 0 \
         FROM lease_taken AS lease JOIN member ON member.lease = lease.id ORDER BY lease.id, member.id",
        "others",
        "''",
    ),
    (
        "lease.id, lease.root, sandbox, pod_request, former, iif(exclusive, 'whole-gpu', 'intercepted'), \
         compute_policy, ceiling, priority, granted_at, member.root, container, state, pid, start_time, cgroup, leads \
         FROM lease_taken AS lease JOIN member ON member.lease = lease.id ORDER BY lease.id, member.id",
        "others",
        "namespaces",
    ),
    (
        "lease.id, lease.root, sandbox, pod_request, former, enforcement, compute_policy, ceiling, priority, \
         granted_at, member.root, container, state, pid, start_time, cgroup, leads \
         FROM lease_taken AS lease JOIN member ON member.lease = lease.id ORDER BY lease.id, member.id",
        "others",
        "namespaces",
    ),
];

/// Takes the leases of an earlier version over, if there are any and no other process does. Running
/// containers keep them, and their hooks, which name leases by number, find them.
pub fn take_over(state: &Path) -> Result<()> {
    let Some(takeover) = Takeover::begin(state)? else { return Ok(()) };
    let path = takeover.database();
    let named = || {
        format!(
            "cannot take over the leases of the earlier version in {}; if none of its containers runs any more, \
             delete that file",
            path.display()
        )
    };
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NOFOLLOW;
    let db = Connection::open_with_flags(&path, flags).with_context(named)?;
    let version = fenced(&db, &takeover).with_context(named)?;
    let kept = read(&db, version).with_context(named)?;
    // Asked again: the process that fenced it may have been killed, and have seen other containers.
    takeover.check(&kept)?;
    let _turn = takeover.finish(kept)?;
    db.pragma_update(None, "user_version", TAKEN).with_context(named)
}

/// Bars programs of earlier versions from the database, which has to be sound, and returns the version of its
/// tables.
fn fenced(db: &Connection, takeover: &Takeover) -> Result<u32> {
    let number = |name| db.pragma_query_value(None, name, |row| row.get::<_, u32>(0));
    let damaged = || StoreError::Damaged { path: takeover.database() };
    let tx = Transaction::new_unchecked(db, TransactionBehavior::Immediate).map_err(|error| {
        match error.sqlite_error_code() {
            Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt) => Error::from(damaged()),
            _ => error.into(),
        }
    })?;
    let version = number("user_version")?;
    ensure!(number("application_id")? == APPLICATION_ID, damaged());
    if (FENCED..TAKEN).contains(&version) {
        return Ok(version - FENCED);
    }
    let known = usize::try_from(version).is_ok_and(|version| (1..=VERSIONS.len()).contains(&version));
    ensure!(known, StoreError::Version { path: takeover.database(), version });
    let sound: String = db.pragma_query_value(None, "integrity_check", |row| row.get(0))?;
    ensure!(sound == "ok", damaged());
    tx.execute_batch(FENCE)?;
    takeover.check(&read(&tx, version)?)?;
    tx.pragma_update(None, "user_version", FENCED + version)?;
    tx.commit()?;
    Ok(version)
}

fn read(db: &Connection, version: u32) -> Result<Kept> {
    let (columns, others, namespaces) = VERSIONS[usize::try_from(version)? - 1];
    // A store that was made and never used has no boot.
    let boot = format!("SELECT id, {namespaces} FROM boot_taken");
    let boot = db.query_row(&boot, [], |row| Ok((row.get(0)?, row.get(1)?))).optional()?;
    let (boot, namespaces) = boot.unwrap_or_default();
    let mut leases: Vec<Entry> = Vec::new();
    let mut query = db.prepare(&format!("SELECT {columns}"))?;
    let mut rows = query.query([])?;
    while let Some(row) = rows.next()? {
        let entry = entry(row)?;
        match leases.last_mut().filter(|last| last.lease.id == entry.lease.id) {
            Some(last) => last.lease.others.push(entry.lease.member),
            None => leases.push(entry),
        }
    }
    for entry in &mut leases {
        entry.lease.grants = grants(db, entry.lease.id)?;
        ensure!(!entry.lease.grants.is_empty(), "lease {} is of no GPU", entry.lease.id);
    }
    let last_id = "SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'lease_taken'), 0)";
    Ok(Kept {
        boot,
        namespaces,
        leases,
        past: past(db, others)?,
        last_id: db.query_row(last_id, [], |row| row.get(0))?,
    })
}

/// One lease with one container, without its grants.
fn entry(row: &Row) -> Result<Entry> {
    let word = |column| row.get::<_, String>(column);
    let enforcement = word(5)?;
    let former = word(4)?;
    Ok(Entry {
        root: word(1)?,
        sandbox: row.get(2)?,
        pod_request: row.get(3)?,
        claim: None,
        former: former.split_whitespace().map(str::to_owned).collect(),
        lease: Lease {
            id: row.get(0)?,
            member: member(row)?,
            others: Vec::new(),
            grants: Vec::new(),
            enforcement: Enforcement::named(&enforcement)
                .with_context(|| format!("enforcement {enforcement:?}"))?,
            compute_policy: word(6)?.parse()?,
            ceiling: row.get::<_, u8>(7)?.try_into()?,
            elastic: None,
            host_memory: DeviceMemory::ZERO,
            priority: row.get::<_, u8>(8)?.try_into()?,
            granted_at: row.get::<_, i64>(9)?.try_into()?,
            restated: std::collections::BTreeMap::new(),
            shrunk_from: Vec::new(),
        },
    })
}

fn member(row: &Row) -> Result<Member> {
    Ok(Member {
        key: LeaseKey { root: row.get(10)?, container: row.get(11)? },
        state: if row.get::<_, String>(12)? == "active" { LeaseState::Active } else { LeaseState::Reserved },
        holder: Holder {
            pid: row.get(13)?,
            start_time: row.get::<_, i64>(14)?.try_into()?,
            cgroup: row.get::<_, Option<String>>(15)?.map(Into::into),
            leads: row.get(16)?,
        },
        name: None,
        called: Called::default(),
        has_driver_limit: false,
    })
}

fn grants(db: &Connection, lease: i64) -> Result<Vec<Grant>> {
    let mut query =
        db.prepare("SELECT gpu, memory, cores FROM granted WHERE lease = ?1 ORDER BY position")?;
    let mut rows = query.query([lease])?;
    let mut grants = Vec::new();
    while let Some(row) = rows.next()? {
        grants.push(Grant {
            gpu: row.get::<_, String>(0)?.parse()?,
            card: None,
            memory: DeviceMemory::from_bytes(row.get::<_, i64>(1)?.try_into()?),
            cores: row.get::<_, Option<u8>>(2)?.map(TryInto::try_into).transpose()?,
        });
    }
    Ok(grants)
}

fn past(db: &Connection, others: &str) -> Result<Vec<PastLease>> {
    let columns = format!("root, container, {others}, grants, granted_at, released_at, reason");
    let mut query = db.prepare(&format!("SELECT {columns} FROM past ORDER BY id"))?;
    let mut rows = query.query([])?;
    let mut past = Vec::new();
    while let Some(row) = rows.next()? {
        past.push(PastLease {
            key: LeaseKey { root: row.get(0)?, container: row.get(1)? },
            others: row.get::<_, String>(2)?.split_whitespace().map(str::to_owned).collect(),
            grants: row.get(3)?,
            granted_at: row.get::<_, i64>(4)?.try_into()?,
            released_at: row.get::<_, i64>(5)?.try_into()?,
            reason: row.get(6)?,
            name: None,
            called: Called::default(),
            shares: Vec::new(),
            used: None,
        });
    }
    Ok(past)
}

#[cfg(test)]
mod tests;
