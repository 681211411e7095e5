//! Leases that several containers share.

use std::process::{Child, Stdio};

use gpushare_claims::Devices;

use super::*;
use crate::pid_namespace::PidNamespace;
use crate::place::tests::request_on;

fn pod(sandbox: &str) -> Pod {
    Pod { sandbox: sandbox.into(), joins: None }
}

fn for_the_pod(env: &[&str]) -> Request {
    Request { scope: Scope::Pod, ..request_on(&[gpu(0, 80)], env) }
}

const FOUR: &[&str] = &["GPUSHARE_MEMORY=4GiB", "GPUSHARE_CORES=20"];

/// Adds a container that requests the pod's share of 4 GiB to the pod `sandbox`.
fn join(store: &Store, container: &str, sandbox: &str) -> Result<Lease, ReserveError> {
    keep_in(store, Some(&pod(sandbox)), &member(container, &here()), &for_the_pod(FOUR))
}

fn held(store: &Store) -> u64 {
    store.loads().unwrap().values().map(|load| load.memory.bytes() / GIB).sum()
}

fn ids(lease: &Lease) -> Vec<&str> {
    lease.members().map(|member| member.key.container.as_str()).collect()
}

#[test]
fn the_containers_of_a_pod_hold_one_lease_and_other_pods_their_own() {
    let (_folder, store) = open();
    let first = join(&store, "a", "pod").unwrap();
    let second = join(&store, "b", "pod").unwrap();
    assert_eq!((first.id, &first.grants), (second.id, &second.grants));
    assert_eq!((ids(&first), ids(&second)), (vec!["a"], vec!["b", "a"]));
    assert_eq!(held(&store), 4, "capacity is taken once");
    let neighbour = join(&store, "c", "another pod").unwrap();
    let below = LeaseKey { root: "/other".into(), container: "a".into() };
    let elsewhere =
        keep_in(&store, Some(&pod("pod")), &Member::reserved(below, here()), &for_the_pod(FOUR)).unwrap();
    let alone = keep_in(&store, Some(&pod("pod")), &member("d", &here()), &request(FOUR)).unwrap();
    let leases = [first.id, neighbour.id, elsewhere.id, alone.id];
    assert_eq!(store.leases().unwrap().iter().map(|lease| lease.id).collect::<Vec<_>>(), leases);
    assert_eq!(held(&store), 16);
    assert!(matches!(join(&store, "b", "pod"), Err(ReserveError::Held(_))));
}

#[test]
fn a_pods_containers_get_their_shares_of_one_gpu_unless_it_is_full() {
    let (_folder, store) = open();
    let (gpus, spread) = ([gpu(0, 80), gpu(1, 80)], crate::Placement::Spread);
    let rules = Admission { placement: spread, ..Admission::default() };
    let take = |container: &str, sandbox: &str, size: &str| {
        let asked = request_on(&gpus, &[&format!("GPUSHARE_MEMORY={size}")]);
        let (member, pod) = (member(container, &here()), pod(sandbox));
        let taken = store.reserve(&member, Some(&pod), &asked, &gpus, &rules, |_| ()).unwrap();
        let gpu = taken.lease().grants[0].gpu;
        std::mem::forget(taken);
        gpus.iter().position(|one| one.uuid == gpu).unwrap()
    };
    let taken = [take("a", "pod", "30GiB"), take("b", "another", "10GiB"), take("c", "pod", "40GiB")];
    assert_eq!(taken, [0, 1, 0]);
    assert_eq!(take("d", "pod", "20GiB"), 1, "the pod's GPU has no room for it");
    // From now on the pod has shares on both GPUs, and the other one has more room.
    assert_eq!(take("e", "pod", "5GiB"), 1);
}

#[test]
fn a_pods_lease_ends_with_the_last_of_its_containers() {
    let (_folder, store) = open();
    let lease = join(&store, "a", "pod").unwrap();
    join(&store, "b", "pod").unwrap();
    let release = |container| store.release(lease.id, &key(container), ReleaseReason::Ended).unwrap();
    assert_eq!((release("a"), release("a")), (Release::Left, Release::Nothing));
    assert_eq!(held(&store), 4);
    // A container that returns while the other lives gets the same share.
    assert_eq!(join(&store, "a2", "pod").unwrap().id, lease.id);
    assert_eq!((release("b"), release("a2")), (Release::Left, Release::Ended));
    assert_eq!((held(&store), store.stands(lease.id).unwrap()), (0, false));
    let past = &store.history()[..];
    assert_eq!(
        (past.len(), &past[0].key, &past[0].others[..]),
        (1, &key("a2"), &["a".into(), "b".into()][..])
    );
    assert_ne!(join(&store, "a3", "pod").unwrap().id, lease.id);
}

#[test]
fn of_a_container_that_fails_without_end_the_history_keeps_a_few_names() {
    let (_folder, store) = open();
    let lease = join(&store, "sidecar", "pod").unwrap();
    for number in 0..20 {
        let failing = join(&store, &format!("c{number}"), "pod").unwrap();
        store.release(lease.id, &failing.member.key, ReleaseReason::Ended).unwrap();
    }
    store.release(lease.id, &key("sidecar"), ReleaseReason::Ended).unwrap();
    let others = store.history().remove(0).others;
    assert_eq!((others.len(), others.last().unwrap().as_str()), (8, "c19"));
}

#[test]
fn containers_of_a_pod_that_ask_for_different_shares_are_told_both() {
    let (_folder, store) = open();
    let first = join(&store, "a", "pod").unwrap();
    for (other, part) in [
        (for_the_pod(&["GPUSHARE_MEMORY=5GiB", "GPUSHARE_CORES=20"]), "5 GiB and 20% of compute on 1 GPU"),
        (for_the_pod(&["GPUSHARE_MEMORY=4GiB"]), "4 GiB on 1 GPU"),
        (for_the_pod(&["GPUSHARE_MEMORY=4GiB", "GPUSHARE_CORES=20", "GPUSHARE_DEVICES=0"]), "on GPU-"),
        (Request { scope: Scope::Pod, ..Request::whole(Devices::Any(1)) }, "whole GPUs on 1 GPU"),
    ] {
        let refused = keep_in(&store, Some(&pod("pod")), &member("b", &here()), &other).unwrap_err();
        let line = refused.to_string();
        for part in [part, "4 GiB and 20% of compute on 1 GPU", "write the same request"] {
            assert!(line.contains(part) && !line.contains('\n'), "{part:?} is not in {line}");
        }
    }
    assert_eq!(store.leases().unwrap(), [first]);
}

#[test]
fn a_share_of_the_pod_needs_a_pod() {
    let (_folder, store) = open();
    let refused = keep_in(&store, None, &member("a", &here()), &for_the_pod(FOUR));
    assert!(matches!(refused, Err(ReserveError::NoPod(_))), "{refused:?}");
    assert_eq!(store.leases().unwrap(), []);
}

#[test]
fn a_container_that_fails_leaves_the_share_of_its_pod_as_it_was() {
    let (_folder, store) = open();
    let first = join(&store, "a", "pod").unwrap();
    let (failing, pod, asked) = (member("b", &here()), pod("pod"), for_the_pod(FOUR));
    let rules = Admission::default();
    drop(store.reserve(&failing, Some(&pod), &asked, &[gpu(0, 80)], &rules, |_| ()).unwrap());
    assert_eq!(store.leases().unwrap(), [first]);
}

#[test]
fn twenty_containers_of_a_pod_at_once_make_one_lease() {
    let (folder, store) = open();
    thread::scope(|scope| {
        for number in 0..20 {
            let state = folder.path();
            scope.spawn(move || {
                join(&Store::open(state).unwrap(), &format!("c{number}"), "pod").unwrap();
            });
        }
    });
    let leases = store.leases().unwrap();
    assert_eq!((leases.len(), leases[0].members().count(), held(&store)), (1, 20, 4));
}

#[test]
fn the_sweep_takes_the_dead_of_a_pod_and_spares_the_others() {
    let (_folder, store) = open();
    let (pod, asked) = (pod("pod"), for_the_pod(FOUR));
    let dead = keep_in(&store, Some(&pod), &member("dead", &gone()), &asked).unwrap();
    let alive = join(&store, "alive", "pod").unwrap();
    let swept = store.sweep().unwrap();
    assert_eq!(swept, [Swept { lease: dead.id, key: key("dead"), left: Release::Left }]);
    assert_eq!((alive.id, held(&store)), (dead.id, 4));
    assert_eq!(ids(&store.lease(&key("alive")).unwrap().unwrap()), ["alive"]);
    // Dead members are swept before an engine recreates the same container, and before another request of the
    // pod is refused.
    keep_in(&store, Some(&pod), &member("again", &gone()), &asked).unwrap();
    assert_eq!(join(&store, "again", "pod").unwrap().id, dead.id);
    for container in ["alive", "again"] {
        store.release(dead.id, &key(container), ReleaseReason::Ended).unwrap();
    }
    keep_in(&store, Some(&pod), &member("dead", &gone()), &asked).unwrap();
    let other = for_the_pod(&["GPUSHARE_MEMORY=5GiB"]);
    let new = keep_in(&store, Some(&pod), &member("new", &here()), &other).unwrap();
    assert_eq!(ids(&new), ["new"]);
}

#[test]
fn an_update_by_any_container_of_a_pod_is_everybodys_and_a_restart_still_asks_as_before() {
    let (_folder, store) = open();
    let first = join(&store, "a", "pod").unwrap();
    let second = join(&store, "b", "pod").unwrap();
    let reserved = update(&store, &second, &memory("6GiB"), |_| Ok(()));
    assert!(matches!(reserved, Err(UpdateError::Reserved(_))), "the region may not be there yet");
    assert!(store.activate(first.id, &key("a"), &here()).unwrap());
    let (_, new) = update(&store, &second, &memory("6GiB"), |_| Ok(())).unwrap();
    assert_eq!(new.grants[0].memory.bytes(), 6 * GIB);
    for container in ["a", "b"] {
        assert_eq!(store.lease(&key(container)).unwrap().unwrap().grants, new.grants);
    }
    store.release(first.id, &key("a"), ReleaseReason::Ended).unwrap();
    let again = join(&store, "a", "pod").unwrap();
    assert_eq!((again.id, again.grants), (first.id, new.grants));
}

#[test]
fn a_lease_is_found_by_each_of_its_containers() {
    let (_folder, store) = open();
    for container in ["a", "b", "c"] {
        join(&store, container, "pod").unwrap();
    }
    assert_eq!(ids(&store.leases().unwrap()[0]), ["a", "b", "c"]);
    assert_eq!(ids(&store.lease(&key("b")).unwrap().unwrap()), ["b", "a", "c"]);
    assert_eq!(ids(&store.leases_by_id("c").unwrap()[0]), ["c", "a", "b"]);
    assert_eq!(store.leases_by_id("d").unwrap(), []);
}

#[test]
fn a_boot_ends_a_pods_lease_once() {
    let (folder, store) = open();
    join(&store, "a", "pod").unwrap();
    join(&store, "b", "pod").unwrap();
    let store = restart(&folder);
    let past = store.history();
    assert_eq!((store.leases().unwrap().len(), past.len()), (0, 1));
    assert_eq!((&past[0].key, &past[0].others[..]), (&key("a"), &["b".into()][..]));
}

/// A shell that is the first process of a pid namespace, with a second process in it. `unshare` is their
/// parent.
struct Namespace(Child);

impl Namespace {
    fn new() -> Self {
        let unshare = ["--pid", "--fork", "--kill-child", "sh", "-c", "sleep 60 & wait"];
        Self(Command::new("unshare").args(unshare).stdout(Stdio::null()).spawn().unwrap())
    }

    /// The processes in the namespace, oldest first.
    fn holders(&self) -> [Holder; 2] {
        let child = |pid: u32| {
            let path = format!("/proc/{pid}/task/{pid}/children");
            let found = || fs::read_to_string(&path).ok()?.split_whitespace().next()?.parse::<u32>().ok();
            loop {
                match found() {
                    Some(pid) => return pid,
                    None => thread::sleep(Duration::from_millis(1)),
                }
            }
        };
        let first = child(self.0.id());
        // Without a cgroup: the test's own cgroup stays populated.
        let holder = |pid| Holder { cgroup: None, ..Holder::init(i32::try_from(pid).unwrap()).unwrap() };
        [first, child(first)].map(holder)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
#[ignore = "needs root: makes pid namespaces"]
fn an_ephemeral_container_joins_the_share_of_its_target_and_no_other() {
    let (_folder, store) = open();
    let (namespace, another) = (Namespace::new(), Namespace::new());
    let [init, child] = namespace.holders();
    let of = |holder: &Holder| PidNamespace::at(Path::new(&format!("/proc/{}/ns/pid", holder.pid)));
    let joining = |sandbox: &str, joins| Pod { sandbox: sandbox.into(), joins };
    let grant = |container: &str, pod: &Pod, env: &[&str]| {
        keep_in(&store, Some(pod), &member(container, &here()), &request(env)).unwrap()
    };
    let target = grant("target", &pod("pod"), &["GPUSHARE_MEMORY=60GiB"]);
    let early = grant("early", &joining("pod", of(&init)), &["GPUSHARE_MEMORY=1GiB"]);
    assert_ne!(early.id, target.id, "a container that is being created is no target yet");
    assert!(store.activate(target.id, &key("target"), &init).unwrap());
    // The holder of `inside` is not the first process of its namespace, as in a pod whose containers share a
    // pid namespace.
    let inside = grant("inside", &pod("sharing"), &["GPUSHARE_MEMORY=1GiB"]);
    assert!(store.activate(inside.id, &key("inside"), &child).unwrap());

    // The node has no 60 GiB left for a lease of its own.
    let debugger = grant("debugger", &joining("pod", of(&init)), &["GPUSHARE_MEMORY=60GiB"]);
    assert_eq!((debugger.id, ids(&debugger)), (target.id, vec!["debugger", "target"]));
    for (name, pod) in [
        ("of another pod", joining("another pod", of(&init))),
        ("in no target's namespace", joining("pod", of(&another.holders()[0]))),
        ("in a namespace that all share", joining("sharing", of(&child))),
    ] {
        let own = grant(name, &pod, &["GPUSHARE_MEMORY=1GiB"]);
        assert_eq!(ids(&own), [name]);
    }
    drop(namespace);
    while !init.is_gone() {
        thread::yield_now();
    }
    assert_eq!(
        store.release_if_gone(target.id, &key("target"), ReleaseReason::Ended).unwrap(),
        Release::Left
    );
    assert_eq!(store.release(target.id, &key("debugger"), ReleaseReason::Ended).unwrap(), Release::Ended);
}
