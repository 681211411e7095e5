//! A store that an earlier gpushare wrote, with running containers.

use std::fs;
use std::thread;

use gpushare_inventory::boot_id;
use gpushare_quota::{Release, ReleaseReason, Store};
use tempfile::TempDir;

use super::*;

/// Stores of each earlier version, in which leases 7 and 8 stand.
const EARLIER: [&str; 5] = [
    include_str!("schemas/1.sql"),
    include_str!("schemas/2.sql"),
    include_str!("schemas/3.sql"),
    include_str!("schemas/4.sql"),
    include_str!("schemas/5.sql"),
];
const GPU: &str = "GPU-00000000-0000-0000-0000-000000000001";
const GIB: u64 = 1 << 30;

fn here() -> Holder {
    Holder::this_process().unwrap()
}

fn key(container: &str) -> LeaseKey {
    LeaseKey { root: "/run/runc".into(), container: container.into() }
}

/// Where this process sees its containers, as the later versions recorded it.
fn namespaces() -> String {
    let name = |kind: &str| fs::read_link(format!("/proc/self/ns/{kind}")).unwrap().display().to_string();
    format!("{} {}", name("pid"), name("time"))
}

/// A store of an earlier version in which 100 leases were granted, of which two stand.
fn earlier(text: &str, namespaces: &str, boot: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let text = [
        ("{BOOT}", boot),
        ("{LEASES}", "100"),
        ("{PID}", &here().pid.to_string()),
        ("{START}", &here().start_time.to_string()),
        ("{GPU}", GPU),
        ("{NAMESPACES}", namespaces),
    ]
    .iter()
    .fold(text.to_owned(), |text, (mark, value)| text.replace(mark, value));
    database(&folder).execute_batch(&text).unwrap();
    folder
}

fn of_this_boot(text: &str) -> TempDir {
    earlier(text, &namespaces(), &boot_id().unwrap())
}

fn database(folder: &TempDir) -> Connection {
    Connection::open(folder.path().join("quota.db")).unwrap()
}

fn version(folder: &TempDir) -> u32 {
    database(folder).pragma_query_value(None, "user_version", |row| row.get(0)).unwrap()
}

#[test]
fn running_containers_keep_their_leases_when_gpushare_is_updated() {
    for (text, ceiling) in EARLIER.into_iter().zip([100, 60, 60, 60, 60]) {
        let folder = of_this_boot(text);
        assert!(matches!(Store::open(folder.path()), Err(StoreError::Earlier { .. })));
        take_over(folder.path()).unwrap();
        take_over(folder.path()).unwrap();
        keeps_its_leases(&folder, ceiling);
        assert_eq!(version(&folder), TAKEN);
    }
}

fn keeps_its_leases(folder: &TempDir, ceiling: u8) {
    let store = Store::open(folder.path()).unwrap();
    let lease = store.lease(&key("running")).unwrap().unwrap();
    let Member { state, holder, .. } = &lease.member;
    assert_eq!((lease.id, *state, holder.pid), (7, LeaseState::Active, here().pid));
    assert_eq!(
        (holder.start_time, holder.cgroup.as_deref()),
        (here().start_time, Some(Path::new("/cgroup")))
    );
    let grant = &lease.grants[0];
    assert_eq!((grant.gpu, grant.memory.bytes()), (GPU.parse().unwrap(), 4 * GIB));
    assert_eq!(grant.cores.map(Into::into), Some(30_u8));
    assert_eq!((lease.ceiling.percent(), lease.priority.level(), lease.granted_at), (ceiling, 7, 3));
    assert_eq!(store.loads().unwrap().values().next().unwrap().memory.bytes(), 8 * GIB);
    assert_eq!(store.history()[0].key, key("before"));
    // Hooks that were written before the update name the lease by id and container.
    assert!(store.activate(8, &key("starting"), &here()).unwrap());
    assert_eq!(store.release(7, &key("running"), ReleaseReason::Ended).unwrap(), Release::Ended);
    assert_eq!(store.history()[0].key, key("running"));
}

#[test]
fn of_many_that_find_an_earlier_store_one_takes_it_over() {
    let folder = of_this_boot(EARLIER[4]);
    thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| take_over(folder.path()).unwrap());
        }
    });
    let store = Store::open(folder.path()).unwrap();
    assert_eq!((store.leases().unwrap().len(), store.history().len()), (2, 1));
}

#[test]
fn an_earlier_store_that_cannot_be_taken_over_stays_as_it_is() {
    let folder = of_this_boot(EARLIER[1]);
    let spoil = "PRAGMA ignore_check_constraints = 1; UPDATE lease SET priority = 99 WHERE id = 8";
    database(&folder).execute_batch(spoil).unwrap();
    assert!(take_over(folder.path()).is_err());
    assert_eq!(version(&folder), 2);
    assert!(matches!(Store::open(folder.path()), Err(StoreError::Earlier { .. })), "nothing is granted");
    database(&folder).execute("UPDATE lease SET priority = 9 WHERE id = 8", []).unwrap();
    take_over(folder.path()).unwrap();
    assert_eq!(Store::open(folder.path()).unwrap().leases().unwrap().len(), 2);
}

#[test]
fn what_is_no_store_of_ours_is_refused_and_kept() {
    for content in [&b""[..], &[0; 4096], b"SQLite format 3\0 and nonsense", &[0xff; 8192]] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("quota.db");
        fs::write(&path, content).unwrap();
        assert!(matches!(Store::open(folder.path()), Err(StoreError::Earlier { .. })));
        let told = format!("{:#}", take_over(folder.path()).unwrap_err());
        assert!(told.contains("damaged"), "{told}");
        assert_eq!(fs::read(&path).unwrap(), content);
    }
}

#[test]
fn a_process_of_an_earlier_version_that_still_runs_finds_and_grants_nothing() {
    for text in EARLIER {
        let folder = of_this_boot(text);
        let theirs = database(&folder);
        let statements = [
            "UPDATE lease SET priority = 1",
            "DELETE FROM lease",
            "INSERT INTO lease SELECT * FROM lease WHERE id < 0",
        ];
        for statement in statements {
            theirs.prepare(statement).unwrap();
        }
        take_over(folder.path()).unwrap();
        for statement in statements {
            assert!(theirs.execute(statement, []).is_err(), "{statement}");
        }
        assert!(theirs.query_row("SELECT count(*) FROM lease", [], |_| Ok(())).is_err());
    }
}

/// As when somebody went back to an earlier version, with the database deleted, and then forth again.
#[test]
fn leases_of_an_earlier_version_beside_a_ledger_are_added_to_it() {
    let folder = of_this_boot(EARLIER[4]);
    take_over(folder.path()).unwrap();
    let store = Store::open(folder.path()).unwrap();
    store.release(8, &key("starting"), ReleaseReason::Ended).unwrap();
    store.release(7, &key("running"), ReleaseReason::Ended).unwrap();
    fs::remove_file(folder.path().join("quota.db")).unwrap();
    let again = of_this_boot(EARLIER[4]);
    fs::rename(again.path().join("quota.db"), folder.path().join("quota.db")).unwrap();
    assert!(matches!(Store::open(folder.path()), Err(StoreError::Earlier { .. })), "nothing is granted");
    take_over(folder.path()).unwrap();
    assert_eq!(Store::open(folder.path()).unwrap().leases().unwrap().len(), 2);
}

#[test]
fn who_is_killed_between_the_two_stores_leaves_the_rest_to_the_next() {
    let folder = of_this_boot(EARLIER[4]);
    let takeover = Takeover::begin(folder.path()).unwrap().unwrap();
    fenced(&database(&folder), &takeover).unwrap();
    drop(takeover);
    assert!(matches!(Store::open(folder.path()), Err(StoreError::Earlier { .. })), "nothing is granted");
    take_over(folder.path()).unwrap();
    assert_eq!(Store::open(folder.path()).unwrap().leases().unwrap().len(), 2);
    // So too beside a ledger, and after the leases stand in it.
    for is_noted in [false, true] {
        let folder = of_this_boot(EARLIER[4]);
        let before = tempfile::tempdir().unwrap();
        let database_in = |folder: &TempDir| folder.path().join("quota.db");
        fs::rename(database_in(&folder), database_in(&before)).unwrap();
        Store::open(folder.path()).unwrap();
        fs::rename(database_in(&before), database_in(&folder)).unwrap();
        let takeover = Takeover::begin(folder.path()).unwrap().unwrap();
        let version = fenced(&database(&folder), &takeover).unwrap();
        if is_noted {
            takeover.finish(read(&database(&folder), version).unwrap()).unwrap();
        } else {
            drop(takeover);
        }
        assert!(matches!(Store::open(folder.path()), Err(StoreError::Earlier { .. })), "nothing is granted");
        take_over(folder.path()).unwrap();
        assert_eq!(Store::open(folder.path()).unwrap().leases().unwrap().len(), 2, "{is_noted}");
    }
    // The next one may be in other namespaces, to which the containers seem gone.
    let folder = of_this_boot(EARLIER[4]);
    let takeover = Takeover::begin(folder.path()).unwrap().unwrap();
    fenced(&database(&folder), &takeover).unwrap();
    drop(takeover);
    database(&folder).execute("UPDATE boot_taken SET namespaces = 'pid:[1] time:[2]'", []).unwrap();
    assert!(take_over(folder.path()).is_err());
    assert!(matches!(Store::open(folder.path()), Err(StoreError::Earlier { .. })), "nothing is granted");
}

#[test]
fn leases_of_an_earlier_boot_or_of_other_namespaces_are_not_taken_over() {
    let folder = earlier(EARLIER[4], &namespaces(), "another");
    take_over(folder.path()).unwrap();
    let store = Store::open(folder.path()).unwrap();
    let reasons: Vec<String> = store.history().into_iter().map(|past| past.reason).collect();
    assert_eq!(
        (store.leases().unwrap().len(), &reasons[..]),
        (0, &["reboot", "reboot", "ended"].map(str::to_owned)[..])
    );
    let folder = earlier(EARLIER[4], "pid:[1] time:[2]", &boot_id().unwrap());
    let told = format!("{:#}", take_over(folder.path()).unwrap_err());
    assert!(told.contains("hostPID"), "{told}");
    assert_eq!(version(&folder), 5);
}
