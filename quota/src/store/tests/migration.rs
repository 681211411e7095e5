//! A store that an earlier gpushare wrote, with running containers.

use super::*;

/// The tables of version 2.
const EARLIER: &str = "
CREATE TABLE boot (id TEXT NOT NULL) STRICT;
CREATE TABLE lease (
    id INTEGER PRIMARY KEY AUTOINCREMENT, root TEXT NOT NULL, container TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('reserved', 'active')),
    exclusive INTEGER NOT NULL CHECK (exclusive IN (0, 1)),
    compute_policy TEXT NOT NULL CHECK (compute_policy IN ('fixed', 'burst', 'none')),
    ceiling INTEGER NOT NULL CHECK (ceiling BETWEEN 1 AND 100),
    priority INTEGER NOT NULL CHECK (priority BETWEEN 0 AND 9),
    pid INTEGER NOT NULL CHECK (pid > 0), start_time INTEGER NOT NULL, cgroup TEXT,
    granted_at INTEGER NOT NULL, UNIQUE (root, container)
) STRICT;
CREATE TABLE granted (
    lease INTEGER NOT NULL REFERENCES lease (id) ON DELETE CASCADE, position INTEGER NOT NULL, gpu TEXT NOT NULL,
    memory INTEGER NOT NULL CHECK (memory > 0), cores INTEGER CHECK (cores BETWEEN 1 AND 100),
    exclusive INTEGER NOT NULL CHECK (exclusive IN (0, 1)), PRIMARY KEY (lease, position)
) STRICT, WITHOUT ROWID;
CREATE INDEX granted_by_gpu ON granted (gpu, memory, cores, exclusive);
CREATE TABLE past (
    id INTEGER PRIMARY KEY, root TEXT NOT NULL, container TEXT NOT NULL, grants TEXT NOT NULL,
    granted_at INTEGER NOT NULL, released_at INTEGER NOT NULL, reason TEXT NOT NULL
) STRICT;
INSERT INTO past VALUES (5, '/run/runc', 'before', 'GPU: 1 GiB', 1, 2, 'ended');
";

/// A store of version 2 in which `leases` leases were granted, of which two stand.
fn earlier(leases: i64) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let db = Connection::open(folder.path().join("quota.db")).unwrap();
    let boot = gpushare_inventory::boot_id().unwrap();
    db.execute_batch(EARLIER).unwrap();
    db.execute("INSERT INTO boot VALUES (?1)", [boot]).unwrap();
    db.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('lease', ?1)", [leases]).unwrap();
    let (pid, start) = (here().pid, i64::try_from(here().start_time).unwrap());
    for (id, container, state) in [(7, "running", "active"), (8, "starting", "reserved")] {
        db.execute(
            "INSERT INTO lease VALUES (?1, '/run/runc', ?2, ?3, 0, 'burst', 60, 7, ?4, ?5, '/cgroup', 3)",
            params![id, container, state, pid, start],
        )
        .unwrap();
        let gpu = gpu(0, 80).uuid.to_string();
        db.execute("INSERT INTO granted VALUES (?1, 0, ?2, ?3, 30, 0)", params![id, gpu, 4_i64 << 30])
            .unwrap();
    }
    db.pragma_update(None, "application_id", 0x6770_7368).unwrap();
    db.pragma_update(None, "user_version", 2).unwrap();
    folder
}

fn version(folder: &TempDir) -> i32 {
    let db = Connection::open(folder.path().join("quota.db")).unwrap();
    db.pragma_query_value(None, "user_version", |row| row.get(0)).unwrap()
}

#[test]
fn running_containers_keep_their_leases_when_gpushare_is_updated() {
    let folder = earlier(100);
    let store = Store::open(folder.path()).unwrap();
    let lease = store.lease(&key("running")).unwrap().unwrap();
    let Member { state, holder, .. } = &lease.member;
    assert_eq!((lease.id, *state, holder.pid), (7, LeaseState::Active, here().pid));
    assert_eq!(
        (holder.start_time, holder.cgroup.as_deref()),
        (here().start_time, Some(Path::new("/cgroup")))
    );
    assert_eq!((lease.grants[0].memory.bytes(), lease.grants[0].cores), (4 * GIB, Cores::new(30)));
    assert_eq!((lease.ceiling, lease.priority.level(), lease.granted_at), (Cores::new(60).unwrap(), 7, 3));
    assert_eq!(store.loads().unwrap().values().next().unwrap().memory.bytes(), 8 * GIB);
    assert_eq!(store.history().unwrap()[0].key, key("before"));
    // Their hooks name the lease by number and container, as they were written before.
    assert!(store.activate(8, &key("starting"), &here()).unwrap());
    assert_eq!(store.release(7, &key("running"), ReleaseReason::Ended).unwrap(), Release::Ended);
    assert_eq!(store.history().unwrap()[0].key, key("running"));
    let new = keep(&store, "new", &["GPUSHARE_MEMORY=76GiB"], &here()).unwrap();
    assert_eq!(new.id, 101, "no number is given twice");
    assert_eq!((version(&folder), Store::open(folder.path()).unwrap().leases().unwrap().len()), (3, 2));
}

#[test]
fn of_many_that_find_an_earlier_store_one_takes_it_over() {
    let folder = earlier(8);
    thread::scope(|scope| {
        for number in 0..16 {
            let state = folder.path();
            scope.spawn(move || {
                let name = format!("c{number}");
                keep(&Store::open(state).unwrap(), &name, &["GPUSHARE_MEMORY=1GiB"], &here()).unwrap();
            });
        }
    });
    assert_eq!(Store::open(folder.path()).unwrap().leases().unwrap().len(), 18);
}

#[test]
fn an_earlier_store_that_cannot_be_taken_over_stays_as_it_is() {
    let folder = earlier(8);
    let path = folder.path().join("quota.db");
    // A row that the tables of today do not take.
    let db = Connection::open(&path).unwrap();
    db.execute_batch("PRAGMA ignore_check_constraints = 1; UPDATE lease SET priority = 99 WHERE id = 8")
        .unwrap();
    drop(db);
    assert!(Store::open(folder.path()).is_err());
    assert_eq!(version(&folder), 2);
    let db = Connection::open(&path).unwrap();
    let count: i64 = db
        .query_row("SELECT count(*) FROM lease JOIN granted ON lease = lease.id", [], |row| row.get(0))
        .unwrap();
    assert_eq!(count, 2);
    db.execute("UPDATE lease SET priority = 9 WHERE id = 8", []).unwrap();
    drop(db);
    assert_eq!(Store::open(folder.path()).unwrap().leases().unwrap().len(), 2);
}
