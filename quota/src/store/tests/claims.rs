//! Leases of resource claims.

use super::*;
use crate::claim::{ClaimName, ResourceClaim};
use crate::enforcement::Enforcement;

const UID: &str = "0b5c1f6e-8e0f-4c7d-9a51-3f6f2b8f1a10";

fn name(uid: &str) -> ClaimName {
    ClaimName { uid: uid.into(), namespace: "team".into(), name: "training".into() }
}

fn claim(store: &Store, uid: &str, env: &[&str]) -> Result<(ResourceClaim, Lease), ReserveError> {
    store.reserve_claim(&name(uid), None, &request(env), &[gpu(0, 80)], &Admission::default(), |_| ())
}

/// Adds a container to the claim whose lease is `id`.
fn join(store: &Store, container: &str, id: i64) -> Result<Lease, ReserveError> {
    let request = Request { reserved: Some(id), ..request(&["GPUSHARE_MEMORY=30GiB"]) };
    keep_in(store, None, &member(container, &here()), &request)
}

fn held(store: &Store) -> u64 {
    store.loads().unwrap().values().map(|load| load.memory.bytes() / GIB).sum()
}

const THIRTY: &[&str] = &["GPUSHARE_MEMORY=30GiB"];

#[test]
fn a_claim_keeps_its_lease_and_token_however_often_it_is_reserved() {
    let (folder, store) = open();
    let (first, lease) = claim(&store, UID, THIRTY).unwrap();
    assert_eq!((held(&store), lease.member.holder.is_agent()), (30, true));
    let (again, same) = claim(&Store::open(folder.path()).unwrap(), UID, THIRTY).unwrap();
    assert_eq!((&again, same.id), (&first, lease.id));
    assert_eq!(held(&store), 30, "capacity is taken once");
    assert_eq!(store.claims().unwrap(), [(first.clone(), lease.clone())]);
    assert_eq!(store.claim_of(&first.token).unwrap(), Some((first, lease)));
    assert_eq!(store.claim_of(&"0".repeat(32).parse().unwrap()).unwrap(), None);
}

#[test]
fn nobody_sweeps_a_claim_and_two_do_not_fit_where_one_does() {
    let (_folder, store) = open();
    let (_, lease) = claim(&store, UID, &["GPUSHARE_MEMORY=50GiB"]).unwrap();
    assert_eq!(store.sweep().unwrap(), []);
    let told = claim(&store, "other", &["GPUSHARE_MEMORY=50GiB"]).unwrap_err();
    assert!(matches!(told, ReserveError::Refused(_)), "{told}");
    assert!(matches!(keep(&store, "a", &["GPUSHARE_MEMORY=50GiB"], &here()), Err(ReserveError::Refused(_))));
    assert_eq!(
        store.release_claim(UID).unwrap().map(|swept| (swept.lease, swept.left)),
        Some((lease.id, Release::Ended))
    );
    assert_eq!(store.release_claim(UID).unwrap(), None, "twice is once");
    claim(&store, "other", &["GPUSHARE_MEMORY=50GiB"]).unwrap();
}

#[test]
fn containers_of_a_claim_hold_its_lease_and_leave_it_to_the_claim() {
    let (_folder, store) = open();
    let (told, lease) = claim(&store, UID, THIRTY).unwrap();
    let (a, b) = (join(&store, "a", lease.id).unwrap(), join(&store, "b", lease.id).unwrap());
    assert_eq!((a.id, b.id, held(&store)), (lease.id, lease.id, 30));
    assert_eq!(a.member.key, key("a"));
    let release = |container| store.release(lease.id, &key(container), ReleaseReason::Ended).unwrap();
    assert_eq!((release("a"), release("b")), (Release::Left, Release::Left));
    assert_eq!(held(&store), 30, "the claim still holds it");
    join(&store, "a", lease.id).unwrap();
    assert_eq!(store.claim_of(&told.token).unwrap().map(|(_, lease)| lease.id), Some(lease.id));
}

#[test]
fn the_first_container_of_a_claim_decides_who_holds_its_share() {
    let (_folder, store) = open();
    let (_, lease) = claim(&store, UID, THIRTY).unwrap();
    assert_eq!(lease.enforcement, Enforcement::Intercepted);
    let supervised = |container: &str| {
        let request = request(&["GPUSHARE_MEMORY=30GiB"]);
        let request = Request { reserved: Some(lease.id), is_supervised: true, ..request };
        keep_in(&store, None, &member(container, &here()), &request).unwrap().enforcement
    };
    assert_eq!(supervised("a"), Enforcement::Supervised);
    assert_eq!(join(&store, "b", lease.id).unwrap().enforcement, Enforcement::Supervised);
    let release = |container| store.release(lease.id, &key(container), ReleaseReason::Ended).unwrap();
    assert_eq!((release("a"), release("b")), (Release::Left, Release::Left));
    assert_eq!(join(&store, "c", lease.id).unwrap().enforcement, Enforcement::Intercepted, "anew");

    let (_, lease) = claim(&store, "other", THIRTY).unwrap();
    assert_eq!(join(&store, "d", lease.id).unwrap().enforcement, Enforcement::Intercepted);
    let request = Request { reserved: Some(lease.id), is_supervised: true, ..request(THIRTY) };
    let joins = keep_in(&store, None, &member("e", &here()), &request).unwrap();
    assert_eq!(joins.enforcement, Enforcement::Intercepted, "libraries hold it already");
}

#[test]
fn the_second_claim_that_would_be_answered_before_others_is_refused_where_it_begins() {
    let (_folder, store) = open();
    let asked = ["GPUSHARE_MEMORY=10GiB", "GPUSHARE_CORES=30", "GPUSHARE_COMPUTE_POLICY=latency"];
    let begin = |uid: &str, is_scheduled: bool| {
        // The enforcement is unknown when the lease is reserved.
        let (_, lease) = claim(&store, uid, &asked).unwrap();
        let request = Request {
            reserved: Some(lease.id),
            is_supervised: is_scheduled,
            is_scheduled,
            ..request(&asked)
        };
        keep_in(&store, None, &member(uid, &here()), &request)
    };
    assert_eq!(begin("a", true).unwrap().enforcement, Enforcement::Scheduled);
    let refused = begin("b", true).unwrap_err().to_string();
    assert!(refused.contains("compute-policy=latency is on GPU 0 "), "{refused}");
    assert_eq!(begin("c", false).unwrap().enforcement, Enforcement::Intercepted);
    // Windows must leave time for a container that runs between them.
    let fixed = ["GPUSHARE_MEMORY=10GiB", "GPUSHARE_CORES=10"];
    let (_, lease) = claim(&store, "d", &fixed).unwrap();
    let scheduled = |words| Request { is_supervised: true, is_scheduled: true, ..request(words) };
    let request = Request { reserved: Some(lease.id), ..scheduled(&fixed) };
    let rules = Admission { compute_reserve: 95, ..Admission::default() };
    let refused = store.reserve(&member("d", &here()), None, &request, &[gpu(0, 80)], &rules, |_| ());
    let refused = refused.map(drop).unwrap_err().to_string();
    assert!(refused.contains("compute_reserve"), "{refused}");
    assert_eq!(store.lease(&LeaseKey::of_claim("d").unwrap()).unwrap().unwrap().others.len(), 0);
    // A container that already joined can restart, regardless of later changes.
    assert!(keep_in(&store, None, &member("d", &here()), &request).is_ok());
    let first = store.lease(&LeaseKey::of_claim("a").unwrap()).unwrap().unwrap();
    let container = member("a", &here());
    let _ = store.release(first.id, &container.key, ReleaseReason::Ended).unwrap();
    let request = Request { reserved: Some(first.id), ..scheduled(&asked) };
    assert!(store.reserve(&container, None, &request, &[gpu(0, 80)], &rules, |_| ()).is_ok());
}

#[test]
fn containers_that_outlive_their_claim_keep_its_lease_and_no_other_joins() {
    let (_folder, store) = open();
    let (told, lease) = claim(&store, UID, THIRTY).unwrap();
    join(&store, "a", lease.id).unwrap();
    assert_eq!(store.release_claim(UID).unwrap().map(|swept| swept.left), Some(Release::Left));
    assert_eq!(held(&store), 30, "a container that lives keeps what it holds");
    assert_eq!(store.claim_of(&told.token).unwrap(), None);
    assert!(matches!(join(&store, "b", lease.id), Err(ReserveError::Lost(_))));
    assert_eq!(store.release(lease.id, &key("a"), ReleaseReason::Ended).unwrap(), Release::Ended);
    assert!(matches!(join(&store, "b", lease.id), Err(ReserveError::Lost(_))));
}

#[test]
fn a_claim_for_something_else_gets_a_new_lease_once_no_container_holds_the_old_one() {
    let (_folder, store) = open();
    let (old, lease) = claim(&store, UID, THIRTY).unwrap();
    join(&store, "a", lease.id).unwrap();
    let told = claim(&store, UID, &["GPUSHARE_MEMORY=60GiB"]).unwrap_err().to_string();
    assert!(told.contains("team/training") && told.contains("30 GiB"), "{told}");
    store.release(lease.id, &key("a"), ReleaseReason::Ended).unwrap();
    let mut replaced = Vec::new();
    let (new, other) = {
        let (asked, gpus) = (request(&["GPUSHARE_MEMORY=60GiB"]), [gpu(0, 80)]);
        let swept = |swept: &Swept| replaced.push((swept.lease, swept.left));
        store.reserve_claim(&name(UID), None, &asked, &gpus, &Admission::default(), swept).unwrap()
    };
    assert_eq!(replaced, [(lease.id, Release::Ended)], "the caller removes what it keeps for the old lease");
    assert_ne!((&old.token, lease.id), (&new.token, other.id));
    assert_eq!((held(&store), store.leases().unwrap().len()), (60, 1));
}

#[test]
fn a_refused_change_of_a_claim_leaves_its_lease() {
    let (_folder, store) = open();
    let (_, lease) = claim(&store, UID, THIRTY).unwrap();
    keep(&store, "other", THIRTY, &here()).unwrap();
    assert!(matches!(claim(&store, UID, &["GPUSHARE_MEMORY=60GiB"]), Err(ReserveError::Refused(_))));
    assert_eq!(store.claims().unwrap()[0].1.id, lease.id);
    assert_eq!(held(&store), 60);
}

#[test]
fn a_uid_that_is_no_name_is_refused() {
    let (_folder, store) = open();
    for uid in ["", "../x", "a b", &"x".repeat(256)] {
        assert!(matches!(claim(&store, uid, THIRTY), Err(ReserveError::BadUid(_))), "{uid:?}");
        assert_eq!(store.release_claim(uid).unwrap(), None);
    }
}

#[test]
fn claims_do_not_outlive_a_boot() {
    let (folder, store) = open();
    claim(&store, UID, THIRTY).unwrap();
    let store = restart(&folder);
    assert_eq!(store.claims().unwrap(), []);
    assert_eq!(store.history()[0].key, LeaseKey::of_claim(UID).unwrap());
}

#[test]
fn the_oldest_readable_ledger_continues_as_one_of_this_version() {
    let (folder, store) = open();
    let lease = keep(&store, "a", THIRTY, &here()).unwrap();
    let text = fs::read_to_string(file(&folder)).unwrap();
    let (_, body) = text.trim_end().split_once('\n').unwrap();
    let body = format!("{}\n", body.replace(",\"shrunk_from\":[]", ""));
    let write = |version: u32| {
        let sum = crc32fast::hash(&[&version.to_le_bytes(), body.as_bytes()].concat());
        let first =
            format!("gpushare leases, version {version}: {:010} bytes, crc32 {sum:08x}\n", body.len());
        fs::write(file(&folder), first + &body).unwrap();
    };
    write(3);
    assert!(matches!(store.leases(), Err(StoreError::Version { version: 3, .. })));
    write(4);
    assert_eq!(store.leases().unwrap(), [lease]);
    claim(&store, UID, THIRTY).unwrap();
    let title = text.split_once(": ").unwrap().0;
    assert!(fs::read_to_string(file(&folder)).unwrap().starts_with(title));
    assert_eq!(held(&store), 60);
}

#[test]
fn the_pods_of_a_claim_are_those_that_were_told_last() {
    let (_folder, store) = open();
    let pods = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
    let told = |store: &Store| store.claims().unwrap()[0].0.pods.clone();
    let (one, two) = (pods(&["a"]), pods(&["a", "b"]));
    let reserve = |pods: &[String]| {
        let (asked, gpus) = (request(THIRTY), [gpu(0, 80)]);
        store
            .reserve_claim(&name(UID), Some(pods), &asked, &gpus, &Admission::default(), |_| ())
            .unwrap()
            .1
            .id
    };
    let lease = reserve(&one);
    assert_eq!(told(&store), Some(one.clone()));
    assert!(!store.set_claim_pods(UID, Some(&one)).unwrap());
    assert!(store.set_claim_pods(UID, Some(&two)).unwrap());
    assert_eq!(told(&store), Some(two));
    assert_eq!((reserve(&one), told(&store)), (lease, Some(one)));
    assert!(!store.set_claim_pods("no-such", None).unwrap());
}
