//! Tests of the store: leases, sweeps, several processes, updates, and damaged or foreign ledgers.

mod claims;
mod kills;
mod pods;

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::Duration;

use tempfile::TempDir;

use super::*;
use crate::lease::LeaseState;
use crate::place::tests::{gpu, request};
use crate::turn::Turn;
use gpushare_claims::Cores;

const GIB: u64 = 1 << 30;

fn key(container: &str) -> LeaseKey {
    LeaseKey { root: "/run/runc".into(), container: container.into() }
}

fn here() -> Holder {
    Holder::this_process().unwrap()
}

fn gone() -> Holder {
    Holder { pid: i32::MAX, start_time: 1, cgroup: None, leads: false }
}

/// The ledger's file.
fn file(folder: &TempDir) -> PathBuf {
    folder.path().join(format!("leases-{}", gpushare_inventory::boot_id().unwrap()))
}

/// The ledger's name in an earlier boot.
const EARLIER: &str = "leases-11111111-2222-3333-4444-555555555555";

/// Turns the store into one of an earlier boot.
fn restart(folder: &TempDir) -> Store {
    let spare = |path: PathBuf| path.with_extension("spare");
    let _ = fs::rename(spare(file(folder)), spare(folder.path().join(EARLIER)));
    fs::rename(file(folder), folder.path().join(EARLIER)).unwrap();
    Store::open(folder.path()).unwrap()
}

fn open() -> (TempDir, Store) {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path()).unwrap();
    (folder, store)
}

/// Reserves a lease and keeps it, as an execve would.
fn keep(store: &Store, container: &str, env: &[&str], holder: &Holder) -> Result<Lease, ReserveError> {
    keep_in(store, None, &member(container, holder), &request(env))
}

fn keep_in(
    store: &Store,
    pod: Option<&Pod>,
    member: &Member,
    request: &Request,
) -> Result<Lease, ReserveError> {
    let gpus = [gpu(0, 80)];
    let reservation = store.reserve(member, pod, request, &gpus, &Admission::default(), |_| ())?;
    let lease = reservation.lease().clone();
    std::mem::forget(reservation);
    Ok(lease)
}

fn member(container: &str, holder: &Holder) -> Member {
    Member::reserved(key(container), holder.clone())
}

#[test]
fn release_undoes_reserve_and_twice_is_once() {
    let (_folder, store) = open();
    let lease = keep(&store, "a", &["GPUSHARE_MEMORY=30GiB", "GPUSHARE_CORES=30"], &here()).unwrap();
    assert_eq!(store.leases().unwrap(), std::slice::from_ref(&lease));
    assert_eq!(store.lease(&lease.member.key).unwrap(), Some(lease.clone()));
    assert_eq!(store.loads().unwrap().values().next().unwrap().memory.bytes(), 30 * GIB);
    let release = || store.release(lease.id, &lease.member.key, ReleaseReason::Ended).unwrap();
    assert_eq!((release(), release()), (Release::Ended, Release::Nothing));
    assert!(store.loads().unwrap().is_empty());
    let history = store.history();
    assert_eq!((history.len(), history[0].reason.as_str()), (1, "ended"));
}

#[test]
fn a_late_release_of_an_old_lease_spares_its_successor() {
    let (_folder, store) = open();
    let old = keep(&store, "a", &["GPUSHARE_MEMORY=1GiB"], &gone()).unwrap();
    // The engine restarts the container before the old poststop hook has run.
    let new = keep(&store, "a", &["GPUSHARE_MEMORY=1GiB"], &here()).unwrap();
    let late = store.release(old.id, &old.member.key, ReleaseReason::Ended).unwrap();
    assert_eq!(late, Release::Nothing);
    assert_eq!(store.lease(&new.member.key).unwrap().unwrap().id, new.id);
}

#[test]
fn a_new_ledger_is_not_filled_by_what_a_deleted_one_left() {
    let (folder, store) = open();
    let old = keep(&store, "a", &["GPUSHARE_MEMORY=1GiB"], &here()).unwrap();
    fs::remove_file(file(&folder)).unwrap();
    let store = Store::open(folder.path()).unwrap();
    assert!(store.leases().unwrap().is_empty());
    let new = keep(&store, "a", &["GPUSHARE_MEMORY=1GiB"], &here()).unwrap();
    assert!(new.id > old.id, "regions are named by lease ids");
}

/// Makes the region folder of the lease.
fn make_region(state: &Path, lease: &Lease) -> PathBuf {
    let region = state.join(crate::REGIONS).join(lease.id.to_string());
    fs::create_dir_all(&region).unwrap();
    region
}

#[test]
fn no_new_ledger_is_made_beside_a_containers_region() {
    let (folder, store) = open();
    let region = make_region(folder.path(), &keep(&store, "a", &["GPUSHARE_MEMORY=1GiB"], &here()).unwrap());
    for entry in fs::read_dir(folder.path()).unwrap().flatten().filter(|entry| entry.path().is_file()) {
        fs::remove_file(entry.path()).unwrap();
        let opened = Store::open(folder.path()).map(drop);
        match file(&folder).exists() {
            true => opened.unwrap(),
            false => assert!(matches!(opened, Err(StoreError::Missing { .. })), "{opened:?}"),
        }
    }
    assert!(!file(&folder).exists());
    let told = [store.leases().unwrap_err(), Store::open(folder.path()).unwrap_err()];
    for line in told.map(|error| error.to_string()) {
        for word in ["is gone", "stop them", &format!("rm -r {}", region.parent().unwrap().display())] {
            assert!(line.contains(word) && !line.contains('\n'), "{word:?}: {line}");
        }
    }
    fs::remove_dir(region).unwrap();
    Store::open(folder.path()).unwrap();
}

#[test]
fn a_copy_of_the_ledger_does_not_stand_for_an_earlier_boots() {
    let (folder, store) = open();
    make_region(folder.path(), &keep(&store, "a", &["GPUSHARE_MEMORY=1GiB"], &here()).unwrap());
    for end in ["~", ".bak"] {
        let name = file(&folder).to_string_lossy().into_owned() + end;
        fs::copy(file(&folder), name).unwrap();
    }
    fs::remove_file(file(&folder)).unwrap();
    assert!(matches!(Store::open(folder.path()), Err(StoreError::Missing { .. })));
}

#[test]
fn a_store_that_a_reboot_left_behind_is_not_one_that_was_deleted() {
    let (folder, store) = open();
    make_region(folder.path(), &keep(&store, "a", &["GPUSHARE_MEMORY=1GiB"], &here()).unwrap());
    fs::rename(file(&folder), folder.path().join(EARLIER)).unwrap();
    assert!(Store::find(folder.path()).unwrap().is_none(), "this boot has granted nothing yet");
    fs::remove_file(folder.path().join(EARLIER)).unwrap();
    let spare = file(&folder).to_string_lossy().into_owned() + ".spare";
    let _ = fs::remove_file(spare);
    assert!(matches!(Store::find(folder.path()), Err(StoreError::Missing { .. })));
}

#[test]
fn of_two_first_containers_the_slower_opens_the_store_of_the_faster() {
    let (made, store) = open();
    let lease = keep(&store, "faster", &["GPUSHARE_MEMORY=1GiB"], &here()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let turn = Turn::take(folder.path()).unwrap();
    let slower = thread::scope(|scope| {
        let slower = scope.spawn(|| Store::open(folder.path()));
        // Gives the thread time to find no ledger and to wait for its turn.
        thread::sleep(Duration::from_millis(200));
        fs::rename(file(&made), file(&folder)).unwrap();
        make_region(folder.path(), &lease);
        drop(turn);
        slower.join().unwrap().unwrap()
    });
    assert_eq!(slower.leases().unwrap(), [lease]);
}

#[test]
fn regions_of_an_earlier_boot_hinder_nobody() {
    let (folder, store) = open();
    make_region(folder.path(), &keep(&store, "a", &["GPUSHARE_MEMORY=1GiB"], &here()).unwrap());
    assert_eq!(restart(&folder).leases().unwrap(), []);
}

#[test]
fn a_reservation_that_is_dropped_leaves_nothing() {
    let (_folder, store) = open();
    let gpus = [gpu(0, 80)];
    let asked = request(&["GPUSHARE_MEMORY=30GiB"]);
    let member = member("a", &here());
    drop(store.reserve(&member, None, &asked, &gpus, &Admission::default(), |_| ()).unwrap());
    assert!(store.leases().unwrap().is_empty());
}

#[test]
fn the_same_id_under_another_root_is_another_lease() {
    let (_folder, store) = open();
    let mine = keep(&store, "a", &["GPUSHARE_MEMORY=1GiB"], &here()).unwrap();
    assert!(matches!(keep(&store, "a", &["GPUSHARE_MEMORY=1GiB"], &here()), Err(ReserveError::Held(_))));
    let other = LeaseKey { root: "/other".into(), container: "a".into() };
    assert_eq!(store.release(mine.id, &other, ReleaseReason::Ended).unwrap(), Release::Nothing);
    assert_eq!(store.leases().unwrap().len(), 1);
    let theirs =
        keep_in(&store, None, &Member::reserved(other.clone(), here()), &request(&["GPUSHARE_MEMORY=1GiB"]))
            .unwrap();
    assert_ne!(theirs.id, mine.id);
    assert_eq!(store.release(theirs.id, &other, ReleaseReason::Ended).unwrap(), Release::Ended);
    assert_eq!(store.leases().unwrap(), [mine]);
}

#[test]
fn a_full_node_is_swept_before_it_refuses() {
    let (_folder, store) = open();
    keep(&store, "dead", &["GPUSHARE_MEMORY=70GiB"], &gone()).unwrap();
    keep(&store, "new", &["GPUSHARE_MEMORY=20GiB"], &here()).unwrap();
    let keys: Vec<String> =
        store.leases().unwrap().into_iter().map(|lease| lease.member.key.container).collect();
    assert_eq!(keys, ["new"]);
    assert!(matches!(
        keep(&store, "more", &["GPUSHARE_MEMORY=70GiB"], &here()),
        Err(ReserveError::Refused(_))
    ));
}

#[test]
fn the_sweep_spares_what_lives() {
    let (_folder, store) = open();
    keep(&store, "dead", &["GPUSHARE_MEMORY=1GiB"], &gone()).unwrap();
    let alive = keep(&store, "alive", &["GPUSHARE_MEMORY=1GiB"], &gone()).unwrap();
    let init = Holder { cgroup: None, ..here() };
    assert!(store.activate(alive.id, &key("alive"), &init).unwrap());
    assert!(store.activate(alive.id, &key("alive"), &init).unwrap(), "twice is once");
    let other = Holder { start_time: init.start_time + 1, ..init.clone() };
    assert!(!store.activate(alive.id, &key("alive"), &other).unwrap(), "an active lease has its holder");
    let swept: Vec<LeaseKey> = store.sweep().unwrap().into_iter().map(|swept| swept.key).collect();
    assert_eq!(swept, [key("dead")]);
    let left = store.release_if_gone(alive.id, &key("alive"), ReleaseReason::Ended).unwrap();
    assert_eq!(left, Release::Nothing);
    assert_eq!(store.lease(&key("alive")).unwrap().unwrap().state(), LeaseState::Active);
    assert!(!store.activate(alive.id + 1, &key("dead"), &here()).unwrap());
}

#[test]
fn leases_do_not_outlive_a_boot() {
    let (folder, store) = open();
    keep(&store, "a", &["GPUSHARE_MEMORY=1GiB"], &here()).unwrap();
    keep(&store, "b", &["GPUSHARE_MEMORY=1GiB"], &here()).unwrap();
    let store = restart(&folder);
    assert!(store.leases().unwrap().is_empty());
    let history = store.history();
    assert_eq!((history.len(), history[0].reason.as_str()), (2, "reboot"));
    let left = fs::read_dir(folder.path()).unwrap().flatten().map(|entry| entry.file_name());
    let left = left.filter(|name| name.to_string_lossy().starts_with(EARLIER)).count();
    assert_eq!(left, 0, "nothing is left of the earlier boot's");
}

#[test]
fn a_spoiled_ledger_of_an_earlier_boot_hinders_nobody() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join(EARLIER), "gpushare lea").unwrap();
    let store = Store::open(folder.path()).unwrap();
    assert_eq!((store.leases().unwrap().len(), store.history().len()), (0, 0));
}

#[test]
fn a_ledger_that_is_not_ours_is_refused_and_kept() {
    for content in [&b""[..], &[0; 4096], b"gpushare leases, version 4: 0 bytes\n", &[0xff; 8192]] {
        let folder = tempfile::tempdir().unwrap();
        fs::write(file(&folder), content).unwrap();
        let store = Store::open(folder.path()).unwrap();
        let errors = [store.leases().unwrap_err(), store.check_writable().unwrap_err()];
        assert!(errors.iter().all(|error| matches!(error, StoreError::Damaged { .. })), "{errors:?}");
        assert_eq!(fs::read(file(&folder)).unwrap(), content);
    }
}

#[test]
fn a_ledger_that_is_a_link_is_refused_and_kept() {
    let (sound, _store) = open();
    for end in [file(&sound), sound.path().join("nowhere")] {
        let folder = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(&end, file(&folder)).unwrap();
        let store = Store::open(folder.path()).unwrap();
        let errors = [store.leases().unwrap_err(), store.check_writable().unwrap_err()];
        assert!(errors.iter().all(|error| matches!(error, StoreError::Io { .. })), "{errors:?}");
        assert_eq!(fs::read_link(file(&folder)).unwrap(), end);
    }
}

#[test]
fn a_truncated_ledger_is_refused() {
    let (folder, store) = open();
    for number in 0..50 {
        keep(&store, &format!("c{number}"), &["GPUSHARE_MEMORY=1GiB"], &here()).unwrap();
    }
    let whole = fs::read(file(&folder)).unwrap();
    fs::write(file(&folder), &whole[..whole.len() / 2]).unwrap();
    assert!(matches!(store.leases(), Err(StoreError::Damaged { .. })));
}

#[test]
fn sums_are_those_of_all_leases_whoever_writes() {
    let (folder, store) = open();
    let other = Store::open(folder.path()).unwrap();
    let free = |store: &Store, name: &str, gib: u64| {
        keep(store, name, &[&format!("GPUSHARE_MEMORY={gib}GiB")], &here())
    };
    let a = free(&store, "a", 30).unwrap();
    let b = free(&other, "b", 30).unwrap();
    assert!(free(&store, "c", 30).is_err(), "what another process holds counts");
    other.release(b.id, &key("b"), ReleaseReason::Ended).unwrap();
    free(&store, "c", 30).unwrap();
    store.release(a.id, &key("a"), ReleaseReason::Ended).unwrap();
    free(&store, "d", 50).unwrap();
    assert!(free(&store, "e", 1).is_err());
    assert_eq!(store.loads().unwrap().values().next().unwrap().memory.bytes(), 80 * GIB);
}

#[test]
fn a_newer_version_is_refused() {
    let (folder, store) = open();
    let text = fs::read_to_string(file(&folder)).unwrap();
    let (title, rest) = text.split_once(": ").unwrap();
    assert!(title.starts_with("gpushare leases, version "));
    fs::write(file(&folder), format!("gpushare leases, version 99: {rest}")).unwrap();
    assert!(matches!(store.leases(), Err(StoreError::Version { version: 99, .. })));
}

/// A helper process, not a test of its own: `sixty_four_processes_get_exactly_what_fits` starts it 64 times.
#[test]
fn helper_process_reserves_one_share() {
    let (Ok(state), Ok(name)) = (std::env::var("QUOTA_TEST_STATE"), std::env::var("QUOTA_TEST_NAME")) else {
        return;
    };
    let store = Store::open(Path::new(&state)).unwrap();
    let outcome = keep(&store, &name, &["GPUSHARE_MEMORY=1GiB"], &here());
    println!("outcome: {}", if outcome.is_ok() { "granted" } else { "refused" });
    // The holder must live while the others are still counting, or the lease would be swept.
    while !Path::new(&state).join("finish").exists() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

#[test]
fn sixty_four_processes_get_exactly_what_fits() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path()).unwrap();
    // 80 GiB less 24 GiB leave room for 56 leases of 1 GiB.
    keep(&store, "other", &["GPUSHARE_MEMORY=24GiB"], &here()).unwrap();
    let program = std::env::current_exe().unwrap();
    let children: Vec<_> = (0..64)
        .map(|number| {
            Command::new(&program)
                .args(["--exact", "store::tests::helper_process_reserves_one_share", "--nocapture"])
                .env("QUOTA_TEST_STATE", folder.path())
                .env("QUOTA_TEST_NAME", format!("c{number}"))
                .stdout(std::process::Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while store.leases().unwrap().len() < 57 && std::time::Instant::now() < deadline {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    std::thread::sleep(std::time::Duration::from_millis(500));
    fs::write(folder.path().join("finish"), "").unwrap();
    let outputs: Vec<String> = children
        .into_iter()
        .map(|child| String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap())
        .collect();
    let granted = outputs.iter().filter(|output| output.contains("outcome: granted")).count();
    let refused = outputs.iter().filter(|output| output.contains("outcome: refused")).count();
    assert_eq!((granted, refused), (56, 8));
}

/// Makes an active lease.
fn active(store: &Store, container: &str, env: &[&str]) -> Lease {
    let lease = keep(store, container, env, &here()).unwrap();
    assert!(store.activate(lease.id, &lease.member.key, &Holder { cgroup: None, ..here() }).unwrap());
    lease
}

fn memory(size: &str) -> crate::Change {
    crate::Change { memory: Some(size.parse().unwrap()), ..crate::Change::default() }
}

fn update(
    store: &Store,
    lease: &Lease,
    change: &crate::Change,
    write: impl FnMut(&Lease) -> std::io::Result<()>,
) -> Result<(Lease, Lease), UpdateError> {
    store.update(
        lease.id,
        &lease.member.key,
        std::slice::from_ref(change),
        &[gpu(0, 80)],
        &Admission::default(),
        write,
    )
}

#[test]
fn an_update_changes_the_store_and_writes_the_lesser_first() {
    let (_folder, store) = open();
    let lease = active(&store, "a", &["GPUSHARE_MEMORY=20GiB", "GPUSHARE_CORES=30"]);
    for (size, want) in [("50GiB", [20, 50]), ("10GiB", [10, 10])] {
        let mut written = Vec::new();
        let (_, new) = update(&store, &lease, &memory(size), |lease| {
            written.push(lease.grants[0].memory.bytes() / GIB);
            // At the first call the store is unchanged, at the second it has changed. The file never grants
            // more.
            let stored =
                Store::open(store.ledger.state()).unwrap().lease(&lease.member.key).unwrap().unwrap();
            assert!(lease.grants[0].memory <= stored.grants[0].memory);
            Ok(())
        })
        .unwrap();
        assert_eq!(written, want, "{size}");
        assert_eq!(store.lease(&lease.member.key).unwrap(), Some(new));
        assert_eq!(store.loads().unwrap().values().next().unwrap().memory.bytes(), want[1] * GIB);
    }
    assert_eq!(store.lease(&lease.member.key).unwrap().unwrap().grants[0].cores, Cores::new(30));
}

#[test]
fn an_update_that_does_not_fit_or_cannot_be_written_changes_nothing() {
    let (_folder, store) = open();
    let lease = active(&store, "a", &["GPUSHARE_MEMORY=20GiB"]);
    let other = active(&store, "b", &["GPUSHARE_MEMORY=50GiB"]);
    let refused = update(&store, &lease, &memory("31GiB"), |_| panic!("nothing is written"));
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("31 GiB requested, 30 GiB free on GPU 0"), "{text}");
    let failed = update(&store, &lease, &memory("30GiB"), |_| Err(std::io::Error::other("gone")));
    assert!(matches!(failed, Err(UpdateError::Limits { .. })), "{failed:?}");
    assert_eq!(store.lease(&lease.member.key).unwrap().unwrap().grants, lease.grants);
    update(&store, &lease, &memory("30GiB"), |_| Ok(())).unwrap();
    assert!(keep(&store, "c", &["GPUSHARE_MEMORY=1GiB"], &here()).is_err(), "sums know the update");
    update(&store, &other, &memory("1GiB"), |_| Ok(())).unwrap();
    keep(&store, "c", &["GPUSHARE_MEMORY=49GiB"], &here()).unwrap();
}

#[test]
fn only_a_living_share_is_updated_and_settled() {
    let (_folder, store) = open();
    let reserved = keep(&store, "reserved", &["GPUSHARE_MEMORY=1GiB"], &here()).unwrap();
    let outcome = update(&store, &reserved, &memory("2GiB"), |_| Ok(()));
    assert!(matches!(outcome, Err(UpdateError::Reserved(_))));
    assert_eq!(store.settle(reserved.id, &reserved.member.key, |_| ()).unwrap(), None);
    let ended = Lease { id: reserved.id + 1, ..reserved.clone() };
    assert!(matches!(update(&store, &ended, &memory("2GiB"), |_| Ok(())), Err(UpdateError::NoLease(_))));
    let living = active(&store, "living", &["GPUSHARE_MEMORY=3GiB"]);
    let seen = store.settle(living.id, &living.member.key, |lease| lease.grants.clone()).unwrap();
    assert_eq!(seen, Some(living.grants));
    store.release(reserved.id, &reserved.member.key, ReleaseReason::Ended).unwrap();
    store.release(living.id, &living.member.key, ReleaseReason::Ended).unwrap();
    let whole = active(&store, "whole", &["GPUSHARE_MODE=exclusive"]);
    assert!(matches!(update(&store, &whole, &memory("2GiB"), |_| Ok(())), Err(UpdateError::Unlimited(_))));
}

#[test]
fn the_ceiling_of_a_burst_is_kept() {
    let (_folder, store) = open();
    let asked = Request { burst: Cores::new(60), ..request(&["GPUSHARE_MEMORY=1GiB", "GPUSHARE_CORES=30"]) };
    keep_in(&store, None, &member("a", &here()), &asked).unwrap();
    assert_eq!(store.leases().unwrap()[0].ceiling, Cores::new(60).unwrap());
}

#[test]
fn a_store_that_is_kept_in_another_pid_namespace_is_left_alone() {
    let (folder, store) = open();
    let boot = Boot { namespaces: "pid:[1]".to_owned(), ..Boot::here().unwrap() };
    let elsewhere = Store { ledger: Ledger::at(folder.path(), boot), measure: None };
    let lease = keep(&elsewhere, "a", &["GPUSHARE_MEMORY=30GiB"], &gone()).unwrap();
    for told in [store.leases().unwrap_err(), store.sweep().unwrap_err()] {
        assert!(matches!(&told, StoreError::Stranger { theirs, .. } if theirs == "pid:[1]"), "{told}");
        assert!(told.to_string().contains("hostPID"), "{told}");
    }
    assert!(
        elsewhere.stands(lease.id).unwrap(),
        "its holder is not to be seen from here, and not proved gone"
    );
    // A ledger without leases moves to the new namespaces.
    elsewhere.release(lease.id, &lease.member.key, ReleaseReason::Forced).unwrap();
    let taken = keep(&store, "b", &["GPUSHARE_MEMORY=30GiB"], &here()).unwrap();
    assert_eq!(store.leases().unwrap(), [taken]);
}

/// Damages one byte after the other, by one bit each, in the file of a store with leases.
#[test]
fn a_store_with_a_damaged_byte_never_says_that_less_is_granted() {
    let (folder, store) = open();
    for (name, memory) in [("a", 30), ("b", 20), ("c", 10)] {
        keep(&store, name, &[&format!("GPUSHARE_MEMORY={memory}GiB"), "GPUSHARE_CORES=30"], &here()).unwrap();
    }
    let whole = fs::read(file(&folder)).unwrap();
    let request = request(&["GPUSHARE_MEMORY=21GiB"]);
    let (mut refused, mut unharmed) = (0, 0);
    for at in 0..whole.len() {
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << (at % 8);
        fs::write(file(&folder), &bytes).unwrap();
        match store.preview(None, &request, &[gpu(0, 80)], &Admission::default()) {
            Ok(grants) => panic!("byte {at} damaged, and {grants:?} would be granted beside 60 GiB of 80"),
            // Only the blank lines at the end are insignificant.
            Err(ReserveError::Refused(_)) => {
                unharmed += usize::from(whole[at..].iter().all(|byte| *byte == b'\n'))
            }
            Err(_) => refused += 1,
        }
    }
    assert_eq!(refused + unharmed, whole.len());
    assert!(refused > 1000 && unharmed > 1000, "{refused} refused, {unharmed} unharmed");
}
