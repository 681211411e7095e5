//! The database's schema and how a connection is set up.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::thread;
use std::time::Duration;

use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags};

use crate::store::StoreError;

/// "gpsh": tells our database from any other SQLite file.
const APPLICATION_ID: i32 = 0x6770_7368;
/// Of the tables below; raised with every change to them.
const VERSION: i32 = 1;

const TABLES: &str = "
CREATE TABLE boot (id TEXT NOT NULL) STRICT;
CREATE TABLE lease (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    root TEXT NOT NULL,
    container TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('reserved', 'active')),
    exclusive INTEGER NOT NULL CHECK (exclusive IN (0, 1)),
    compute_policy TEXT NOT NULL CHECK (compute_policy IN ('fixed', 'burst', 'none')),
    priority INTEGER NOT NULL CHECK (priority BETWEEN 0 AND 9),
    pid INTEGER NOT NULL CHECK (pid > 0),
    start_time INTEGER NOT NULL,
    cgroup TEXT,
    granted_at INTEGER NOT NULL,
    UNIQUE (root, container)
) STRICT;
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
    grants TEXT NOT NULL,
    granted_at INTEGER NOT NULL,
    released_at INTEGER NOT NULL,
    reason TEXT NOT NULL
) STRICT;
";

/// How long a process waits for the others: an engine's `inspect` hangs as long as its `create`.
const DEADLINE: Duration = Duration::from_secs(5);
const NAP: Duration = Duration::from_micros(250);

/// Opens the database, making it first if there is none. A file that exists but is not ours is an error, never
/// replaced: containers may be running on what it says.
pub(crate) fn open(path: &Path) -> Result<Connection, StoreError> {
    if !path.exists() {
        create(path)?;
    }
    let db = connect(path)?;
    let identity: (i32, i32) = (pragma(&db, "application_id")?, pragma(&db, "user_version")?);
    match identity {
        (APPLICATION_ID, VERSION) => Ok(db),
        (APPLICATION_ID, version) => Err(StoreError::Version { path: path.into(), version }),
        _ => Err(StoreError::Damaged { path: path.into() }),
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
    // The last process to close would write the log back each time: half a millisecond on every create.
    db.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true).map_err(wrap)?;
    db.execute_batch("PRAGMA synchronous = NORMAL; PRAGMA foreign_keys = ON;").map_err(wrap)?;
    Ok(db)
}

/// SQLite's own back-off sleeps up to 100 ms; transactions here take a fraction of a millisecond.
fn wait(tries: i32) -> bool {
    thread::sleep(NAP);
    NAP * u32::try_from(tries).unwrap_or(u32::MAX) < DEADLINE
}

/// Builds the database under another name and renames it, so that a database by the right name is always whole.
fn create(path: &Path) -> Result<(), StoreError> {
    let io = |source| StoreError::Io { path: path.into(), source };
    let private =
        |name: &Path| OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(name);
    let lock = private(&path.with_extension("lock")).map_err(io)?;
    lock.lock().map_err(io)?;
    if path.exists() {
        return Ok(());
    }
    let building = path.with_extension("new");
    // Closed before SQLite opens it: closing any descriptor of the file later would drop SQLite's locks.
    private(&building).map(drop).map_err(io)?;
    let wrap = |error| StoreError::sqlite(path, error);
    let db = connect(&building)?;
    db.execute_batch(TABLES).map_err(wrap)?;
    db.pragma_update(None, "application_id", APPLICATION_ID).map_err(wrap)?;
    db.pragma_update(None, "user_version", VERSION).map_err(wrap)?;
    db.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, false).map_err(wrap)?;
    db.pragma_update(None, "journal_mode", "WAL").map_err(wrap)?;
    db.close().map_err(|(_, error)| StoreError::sqlite(path, error))?;
    fs::rename(&building, path).map_err(io)
}

fn pragma(db: &Connection, name: &str) -> Result<i32, StoreError> {
    db.pragma_query_value(None, name, |row| row.get(0)).map_err(|error| {
        let path = db.path().unwrap_or_default();
        StoreError::sqlite(Path::new(path), error)
    })
}
