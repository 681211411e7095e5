//! The database's schema, its migration from earlier versions, and how a connection is set up.

use std::fs::{self, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags, OptionalExtension, Row, Transaction, TransactionBehavior};

use crate::error::StoreError;
use crate::holder::Holder;
use crate::pid_namespace::PidNamespace;
use crate::rows::unsigned;
use crate::state::REGIONS;
use crate::write_queue::Turn;

/// "gpsh": tells our database from any other SQLite file.
const APPLICATION_ID: i32 = 0x6770_7368;
/// Version of the tables below; raised with every change to them.
const VERSION: i32 = 5;

const TABLES: &str = "
CREATE TABLE boot (id TEXT NOT NULL, namespaces TEXT NOT NULL) STRICT;
CREATE UNIQUE INDEX boot_by_id ON boot (id);
CREATE TABLE lease (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    root TEXT NOT NULL,
    sandbox TEXT,
    pod_request TEXT,
    former TEXT NOT NULL,
    enforcement TEXT NOT NULL CHECK (enforcement IN ('intercepted', 'foreign', 'whole-gpu')),
    compute_policy TEXT NOT NULL CHECK (compute_policy IN ('fixed', 'burst', 'none')),
    ceiling INTEGER NOT NULL CHECK (ceiling BETWEEN 1 AND 100),
    priority INTEGER NOT NULL CHECK (priority BETWEEN 0 AND 9),
    granted_at INTEGER NOT NULL
) STRICT;
CREATE UNIQUE INDEX lease_by_pod ON lease (root, sandbox) WHERE pod_request IS NOT NULL;
CREATE TABLE member (
    id INTEGER PRIMARY KEY,
    lease INTEGER NOT NULL REFERENCES lease (id) ON DELETE CASCADE,
    root TEXT NOT NULL,
    container TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('reserved', 'active')),
    pid INTEGER NOT NULL CHECK (pid > 0),
    start_time INTEGER NOT NULL,
    cgroup TEXT,
    leads INTEGER NOT NULL DEFAULT 0 CHECK (leads IN (0, 1)),
    UNIQUE (root, container)
) STRICT;
CREATE INDEX member_by_lease ON member (lease);
CREATE TABLE granted (
    lease INTEGER NOT NULL REFERENCES lease (id) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    gpu TEXT NOT NULL,
    memory INTEGER NOT NULL CHECK (memory > 0),
    cores INTEGER CHECK (cores BETWEEN 1 AND 100),
    exclusive INTEGER NOT NULL CHECK (exclusive IN (0, 1)),
    PRIMARY KEY (lease, position)
) STRICT, WITHOUT ROWID;
CREATE INDEX granted_by_gpu ON granted (gpu, memory, cores, exclusive);
CREATE TABLE past (
    id INTEGER PRIMARY KEY,
    root TEXT NOT NULL,
    container TEXT NOT NULL,
    others TEXT NOT NULL,
    grants TEXT NOT NULL,
    granted_at INTEGER NOT NULL,
    released_at INTEGER NOT NULL,
    reason TEXT NOT NULL
) STRICT;
";

/// Steps that bring a database of an earlier version to a later one in place: from, statements, to. The
/// database is not made anew, since running containers rely on it. Lease ids stay the same, since the hooks
/// of running containers name them.
const STEPS: [(i32, &[&str], i32); 4] = [
    (
        1,
        &[
            "ALTER TABLE lease ADD COLUMN ceiling INTEGER NOT NULL DEFAULT 100 CHECK (ceiling BETWEEN 1 AND 100);",
        ],
        2,
    ),
    // In version 2 a lease had one container, which stood in the lease's row.
    (2, &[PUT_ASIDE, TABLES, TAKE_OVER], VERSION),
    (
        3,
        &[
            "ALTER TABLE boot ADD COLUMN namespaces TEXT NOT NULL DEFAULT '';",
            "CREATE UNIQUE INDEX boot_by_id ON boot (id);",
            "ALTER TABLE member ADD COLUMN leads INTEGER NOT NULL DEFAULT 0 CHECK (leads IN (0, 1));",
        ],
        4,
    ),
    // A lease said only whether it was of whole GPUs.
    (
        4,
        &[
            "ALTER TABLE lease ADD COLUMN enforcement TEXT NOT NULL DEFAULT 'intercepted' \
             CHECK (enforcement IN ('intercepted', 'foreign', 'whole-gpu'));",
            "UPDATE lease SET enforcement = 'whole-gpu' WHERE exclusive;",
            "ALTER TABLE lease DROP COLUMN exclusive;",
        ],
        VERSION,
    ),
];

/// Runs before [`TABLES`]: renames the tables of version 2.
const PUT_ASIDE: &str = "
ALTER TABLE lease RENAME TO lease_2;
ALTER TABLE granted RENAME TO granted_2;
ALTER TABLE past RENAME TO past_2;
ALTER TABLE boot RENAME TO boot_2;
DROP INDEX granted_by_gpu;
";
/// Runs after [`TABLES`]: copies the rows and drops the tables of version 2.
const TAKE_OVER: &str = "
INSERT INTO boot SELECT id, '' FROM boot_2;
INSERT INTO lease (id, root, sandbox, pod_request, former, enforcement, compute_policy, ceiling, priority,
                   granted_at)
    SELECT id, root, NULL, NULL, '', iif(exclusive, 'whole-gpu', 'intercepted'), compute_policy, ceiling, priority,
           granted_at FROM lease_2;
INSERT INTO member (lease, root, container, state, pid, start_time, cgroup)
    SELECT id, root, container, state, pid, start_time, cgroup FROM lease_2 ORDER BY id;
INSERT INTO granted SELECT lease, position, gpu, memory, cores, exclusive FROM granted_2;
INSERT INTO past (id, root, container, others, grants, granted_at, released_at, reason)
    SELECT id, root, container, '', grants, granted_at, released_at, reason FROM past_2;
DROP TABLE granted_2;
DELETE FROM sqlite_sequence WHERE name = 'lease';
UPDATE sqlite_sequence SET name = 'lease' WHERE name = 'lease_2';
DROP TABLE lease_2;
DROP TABLE past_2;
DROP TABLE boot_2;
";

/// How long a reader waits for a commit to end, which takes a fraction of a millisecond.
const DEADLINE: Duration = Duration::from_secs(2);
const NAP: Duration = Duration::from_micros(250);

/// A boot of this machine, and the namespaces in which the containers' pids and start times are valid.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Boot {
    pub id: String,
    /// The pid namespace, and the time namespace on which start times depend, as `ls -l /proc/PID/ns` shows
    /// them.
    pub namespaces: String,
}

impl Boot {
    /// The running boot and the namespaces of this process.
    pub fn here() -> Result<Self, StoreError> {
        let unknown = || "unknown".to_owned();
        let pid = PidNamespace::own().map_or_else(unknown, |own| own.to_string());
        // Kernels before 5.6 have no time namespaces.
        let time =
            fs::read_link("/proc/self/ns/time").map_or_else(|_| unknown(), |link| link.display().to_string());
        Ok(Self { id: gpushare_inventory::boot_id()?, namespaces: format!("{pid} {time}") })
    }

    /// The boot that the database names.
    pub fn known(db: &Connection) -> rusqlite::Result<Self> {
        let boot = |row: &Row| Ok(Self { id: row.get(0)?, namespaces: row.get(1)? });
        db.prepare_cached("SELECT id, namespaces FROM boot")?.query_row([], boot)
    }
}

/// Opens the database, and makes it first if there is none. Returns the boot that its leases belong to. A
/// file that exists but is not a quota store is an error and is never replaced: running containers may rely
/// on it.
pub(crate) fn open(path: &Path) -> Result<(Connection, Option<Boot>), StoreError> {
    if is_absent(path) {
        create(path)?;
    }
    let db = connect(path)?;
    let boot = match read_boot(&db, path) {
        Err(StoreError::Version { version, .. }) if STEPS.iter().any(|(from, ..)| *from == version) => {
            migrate(&db, path)?;
            read_boot(&db, path)?
        }
        other => other?,
    };
    Ok((db, boot))
}

/// The boot that the leases belong to. All reads are one transaction: with a rollback journal each read by
/// itself takes and drops the file's locks anew, and so does the read of the schema.
fn read_boot(db: &Connection, path: &Path) -> Result<Option<Boot>, StoreError> {
    let wrap = |error| StoreError::sqlite(path, error);
    let tx = Transaction::new_unchecked(db, TransactionBehavior::Deferred).map_err(wrap)?;
    match numbers(&tx).map_err(wrap)? {
        (APPLICATION_ID, VERSION) => {}
        (APPLICATION_ID, version) => return Err(StoreError::Version { path: path.into(), version }),
        _ => return Err(StoreError::Damaged { path: path.into() }),
    }
    keep_journal(&tx).map_err(wrap)?;
    Boot::known(&tx).optional().map_err(wrap)
}

/// Whether indexes and rows agree. Reads the whole database.
pub(crate) fn is_sound(db: &Connection) -> rusqlite::Result<bool> {
    let told: String = db.pragma_query_value(None, "integrity_check", |row| row.get(0))?;
    Ok(told == "ok")
}

/// Application id and schema version.
fn numbers(db: &Connection) -> rusqlite::Result<(i32, i32)> {
    let number = |name| db.pragma_query_value(None, name, |row| row.get(0));
    Ok((number("application_id")?, number("user_version")?))
}

/// Brings a database of an earlier version to this version. Other processes that find the earlier version
/// wait for their turn and then find the work done. Earlier versions did not record the namespaces of the
/// store: it gets those of this process, since the update was made here.
fn migrate(db: &Connection, path: &Path) -> Result<(), StoreError> {
    let boot = Boot::here()?;
    let _turn = Turn::take(path)?;
    let wrap = |error| StoreError::sqlite(path, error);
    let tx = Transaction::new_unchecked(db, TransactionBehavior::Immediate).map_err(wrap)?;
    for (from, statements, to) in STEPS {
        if numbers(&tx).map_err(wrap)? == (APPLICATION_ID, from) {
            tx.execute_batch(&statements.concat()).map_err(wrap)?;
            tx.pragma_update(None, "user_version", to).map_err(wrap)?;
        }
    }
    if is_of_nowhere(&tx).map_err(wrap)? && !may_adopt(&tx).map_err(wrap)? {
        let (theirs, ours) = ("the one before the update".to_owned(), boot.namespaces);
        return Err(StoreError::Stranger { path: path.into(), theirs, ours });
    }
    tx.execute("UPDATE boot SET namespaces = ?1 WHERE namespaces = ''", [boot.namespaces]).map_err(wrap)?;
    tx.commit().map_err(wrap)
}

/// Whether the store has leases of a boot and does not say in which namespaces it was kept.
fn is_of_nowhere(db: &Connection) -> rusqlite::Result<bool> {
    db.prepare("SELECT 1 FROM boot WHERE namespaces = ''")?.exists([])
}

/// Whether this process can see the containers of a store that does not record its namespaces. It can if one
/// of the containers lives here, if there is none, or if this is the machine's first pid namespace.
fn may_adopt(db: &Connection) -> rusqlite::Result<bool> {
    if PidNamespace::own().is_some_and(PidNamespace::is_first) {
        return Ok(true);
    }
    let mut query = db.prepare("SELECT pid, start_time FROM member")?;
    let holder = |row: &Row| {
        Ok(Holder { pid: row.get(0)?, start_time: unsigned(row.get(1)?), cgroup: None, leads: false })
    };
    let holders: Vec<Holder> = query.query_map([], holder)?.collect::<Result<_, _>>()?;
    Ok(holders.is_empty() || holders.iter().any(Holder::lives))
}

/// A link that leads nowhere is not absent: the disk that it points to may be missing, with leases on it.
fn is_absent(path: &Path) -> bool {
    fs::symlink_metadata(path).is_err_and(|error| error.kind() == ErrorKind::NotFound)
}

/// Fails if a container's region stands beside the absent database. What was granted is unknown then, and an
/// empty store would grant it once more.
fn forbid_regions(path: &Path) -> Result<(), StoreError> {
    let regions = path.with_file_name(REGIONS);
    match fs::read_dir(&regions).map(|mut entries| entries.next()) {
        Ok(None) => Ok(()),
        Ok(Some(_)) => Err(StoreError::Missing { path: path.into(), regions }),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(source) => Err(StoreError::Io { path: path.into(), source }),
    }
}

fn connect(path: &Path) -> Result<Connection, StoreError> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
        | OpenFlags::SQLITE_OPEN_NO_MUTEX
        | OpenFlags::SQLITE_OPEN_NOFOLLOW
        | OpenFlags::SQLITE_OPEN_CREATE;
    let wrap = |error| StoreError::sqlite(path, error);
    let mut db = Connection::open_with_flags(path, flags).map_err(wrap)?;
    db.busy_handler(Some(wait)).map_err(wrap)?;
    db.set_db_config(DbConfig::SQLITE_DBCONFIG_DEFENSIVE, true).map_err(wrap)?;
    db.set_db_config(DbConfig::SQLITE_DBCONFIG_TRUSTED_SCHEMA, false).map_err(wrap)?;
    db.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_FKEY, true).map_err(wrap)?;
    Ok(db)
}

/// The journal is not WAL: every process here opens the database, writes once and exits, and the first to
/// open a WAL rebuilds its index from the whole log, which cost 12 ms against 0.2 ms. A rollback journal that
/// is kept costs one header per transaction.
fn keep_journal(db: &Connection) -> rusqlite::Result<()> {
    db.execute_batch("PRAGMA journal_mode = PERSIST")
}

/// Waits between two tries of SQLite, whose own back-off sleeps up to 100 ms.
fn wait(tries: i32) -> bool {
    thread::sleep(NAP);
    NAP * u32::try_from(tries).unwrap_or(u32::MAX) < DEADLINE
}

/// Microseconds since 1970.
fn microseconds() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX / 2)
}

/// Builds the database under another name and renames it, so that a file by the right name is always a whole
/// database.
fn create(path: &Path) -> Result<(), StoreError> {
    let io = |source| StoreError::Io { path: path.into(), source };
    let _turn = Turn::take(path)?;
    if !is_absent(path) {
        return Ok(());
    }
    // Checked only now that it is this process's turn: a faster process makes the database before its first
    // region.
    forbid_regions(path)?;
    // What is left of a database that somebody deleted must not be replayed into the new one.
    for rest in ["db-journal", "db-wal", "db-shm", "new-journal"] {
        match fs::remove_file(path.with_extension(rest)) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(io(error)),
            _ => {}
        }
    }
    let building = path.with_extension("new");
    // Closed before SQLite opens the file: closing any descriptor of it later would drop SQLite's locks.
    let private = OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(&building);
    drop(private.map_err(io)?);
    let wrap = |error| StoreError::sqlite(path, error);
    let db = connect(&building)?;
    keep_journal(&db).map_err(wrap)?;
    db.execute_batch(TABLES).map_err(wrap)?;
    // Lease ids continue from the clock, so that regions of an earlier database are never taken for those of
    // new leases.
    db.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('lease', ?1)", [microseconds()])
        .map_err(wrap)?;
    db.pragma_update(None, "application_id", APPLICATION_ID).map_err(wrap)?;
    db.pragma_update(None, "user_version", VERSION).map_err(wrap)?;
    db.close().map_err(|(_, error)| wrap(error))?;
    let _ = fs::remove_file(path.with_extension("new-journal"));
    fs::rename(&building, path).map_err(io)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_store_that_does_not_say_where_it_was_kept_has_to_be_adopted() {
        let db = Connection::open_in_memory().unwrap();
        db.execute_batch(TABLES).unwrap();
        assert!(!is_of_nowhere(&db).unwrap(), "no boot yet");
        for (namespaces, want) in [("pid:[1] time:[2]", false), ("", true)] {
            db.execute("DELETE FROM boot", []).unwrap();
            db.execute("INSERT INTO boot VALUES ('boot', ?1)", [namespaces]).unwrap();
            assert_eq!(is_of_nowhere(&db).unwrap(), want, "{namespaces:?}");
        }
    }
}
