//! A store that an earlier gpushare wrote, with running containers.

use super::*;

/// Stores of each earlier version, in which leases 7 and 8 stand.
const EARLIER: [&str; 4] = [
    include_str!("schemas/1.sql"),
    include_str!("schemas/2.sql"),
    include_str!("schemas/3.sql"),
    include_str!("schemas/4.sql"),
];

/// A store of an earlier version in which `leases` leases were granted, of which two stand.
fn earlier(text: &str, leases: i64) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let text = [
        ("{BOOT}", gpushare_inventory::boot_id().unwrap()),
        ("{LEASES}", leases.to_string()),
        ("{PID}", here().pid.to_string()),
        ("{START}", here().start_time.to_string()),
        ("{GPU}", gpu(0, 80).uuid.to_string()),
        ("{NAMESPACES}", crate::schema::Boot::here().unwrap().namespaces),
    ]
    .iter()
    .fold(text.to_owned(), |text, (mark, value)| text.replace(mark, value));
    Connection::open(folder.path().join("quota.db")).unwrap().execute_batch(&text).unwrap();
    folder
}

fn version(folder: &TempDir) -> i32 {
    let db = Connection::open(folder.path().join("quota.db")).unwrap();
    db.pragma_query_value(None, "user_version", |row| row.get(0)).unwrap()
}

#[test]
fn running_containers_keep_their_leases_when_gpushare_is_updated() {
    for (text, ceiling) in EARLIER.into_iter().zip([100, 60, 60, 60]) {
        keep_their_leases(text, ceiling);
    }
}

fn keep_their_leases(text: &str, ceiling: u8) {
    let folder = earlier(text, 100);
    let store = Store::open(folder.path()).unwrap();
    let lease = store.lease(&key("running")).unwrap().unwrap();
    let Member { state, holder, .. } = &lease.member;
    assert_eq!((lease.id, *state, holder.pid), (7, LeaseState::Active, here().pid));
    assert_eq!(
        (holder.start_time, holder.cgroup.as_deref()),
        (here().start_time, Some(Path::new("/cgroup")))
    );
    assert_eq!((lease.grants[0].memory.bytes(), lease.grants[0].cores), (4 * GIB, Cores::new(30)));
    assert_eq!(
        (lease.ceiling, lease.priority.level(), lease.granted_at),
        (Cores::new(ceiling).unwrap(), 7, 3)
    );
    assert_eq!(store.loads().unwrap().values().next().unwrap().memory.bytes(), 8 * GIB);
    assert_eq!(store.history().unwrap()[0].key, key("before"));
    // Hooks that were written before the migration name the lease by id and container.
    assert!(store.activate(8, &key("starting"), &here()).unwrap());
    assert_eq!(store.release(7, &key("running"), ReleaseReason::Ended).unwrap(), Release::Ended);
    assert_eq!(store.history().unwrap()[0].key, key("running"));
    let new = keep(&store, "new", &["GPUSHARE_MEMORY=76GiB"], &here()).unwrap();
    assert_eq!(new.id, 101, "no number is given twice");
    assert_eq!((version(&folder), Store::open(folder.path()).unwrap().leases().unwrap().len()), (5, 2));
}

#[test]
fn of_many_that_find_an_earlier_store_one_takes_it_over() {
    let folder = earlier(EARLIER[0], 8);
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
    let folder = earlier(EARLIER[1], 8);
    let path = folder.path().join("quota.db");
    // A row that violates the tables of today.
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
