use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use gpushare_inventory::{DeviceMemory, FileIdentity, GpuUuid};
use gpushare_quota::{Enforcement, Grant, Holder, LeaseKey, Member, REGIONS};
use gpushare_region::{USAGE_LEN, empty_usage_header};
use gpushare_request::{ComputePolicy, Cores, Priority};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use super::*;

fn member(container: &str, state: LeaseState) -> Member {
    let key = LeaseKey { root: "/run/runc".into(), container: container.into() };
    Member { state, ..Member::reserved(key, Holder::this_process().unwrap()) }
}

fn lease(container: &str, others: Vec<Member>, enforcement: Enforcement) -> Lease {
    Lease {
        id: 7,
        member: member(container, LeaseState::Reserved),
        others,
        grants: vec![Grant {
            gpu: GpuUuid::from_bytes([1; 16]),
            card: None,
            memory: DeviceMemory::from_bytes(1 << 30),
            cores: None,
        }],
        enforcement,
        compute_policy: ComputePolicy::Fixed,
        ceiling: Cores::ALL,
        host_memory: DeviceMemory::ZERO,
        elastic: None,
        priority: Priority::default(),
        granted_at: 0,
        restated: std::collections::BTreeMap::new(),
        shrunk_from: Vec::new(),
    }
}

fn alone(container: &str) -> Lease {
    lease(container, Vec::new(), Enforcement::Intercepted)
}

/// A state folder whose regions are removed with it on drop.
struct State(tempfile::TempDir);

impl State {
    fn new() -> (Self, Region) {
        let folder = tempfile::tempdir().unwrap();
        let region = Region::of(folder.path(), 7);
        (Self(folder), region)
    }

    fn entries(&self) -> Vec<String> {
        let found = fs::read_dir(self.0.path().join(REGIONS)).unwrap();
        let mut names: Vec<String> =
            found.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

impl Drop for State {
    fn drop(&mut self) {
        Region::of(self.0.path(), 7).remove();
        let limits = self.0.path().join(super::super::LIMITS);
        let _ = umount2(&limits, MntFlags::MNT_DETACH);
    }
}

#[test]
#[ignore = "needs root: mounts a tmpfs"]
fn of_twenty_containers_of_a_pod_at_once_one_makes_the_region_and_all_find_it_whole() {
    let (state, region) = State::new();
    let start = Barrier::new(20);
    thread::scope(|scope| {
        for number in 0..20 {
            let (region, start) = (&region, &start);
            scope.spawn(move || {
                start.wait();
                let lease = alone(&format!("c{number}"));
                region.join(&lease).unwrap();
                assert!(region.grants_are(&lease).unwrap());
                // The container uses its file from now on: nobody may write it anew.
                let usage =
                    fs::OpenOptions::new().write(true).open(region.staged(&format!("c{number}"))).unwrap();
                usage.write_all_at(&[1], 8192 + number).unwrap();
            });
        }
    });
    let usage = fs::read(region.staged("c3")).unwrap();
    assert_eq!(usage[8192..8212], [1; 20]);
    assert_eq!(state.entries(), ["7", "7.members"]);
    assert_eq!(fs::read_dir(region.members()).unwrap().count(), 20);
}

/// A claim's lease, whose containers come and go.
#[test]
#[ignore = "needs root: mounts a tmpfs"]
fn who_holds_a_claims_share_changes_with_its_region_and_only_while_nobody_has_it() {
    let (state, region) = State::new();
    let claim = || Member::reserved(LeaseKey::of_claim("uid").unwrap(), Holder::agent());
    let held = |container: &str, enforcement| lease(container, vec![claim()], enforcement);
    let budget = crate::supervision::Budgets::of(state.0.path()).path(7);
    let write = |text: &str, container: &str| fs::write(region.staged(container), text).unwrap();
    for (enforcement, has_budget) in [
        (Enforcement::Intercepted, false),
        (Enforcement::Supervised, true),
        (Enforcement::Intercepted, false),
    ] {
        region.join(&held("a", enforcement)).unwrap();
        assert_eq!(budget.exists(), has_budget, "{enforcement:?}");
        assert!(region.grants_are(&held("a", enforcement)).unwrap(), "{enforcement:?}");
        // The same holder finds what the last one wrote.
        write("alive", "a");
        region.join(&held("b", enforcement)).unwrap();
        assert_eq!(fs::read(region.staged("b")).unwrap(), b"alive", "{enforcement:?}");
    }
    // Beside a living container nothing is made anew, whatever is missing.
    let living = vec![claim(), member("a", LeaseState::Active)];
    region.join(&lease("c", living, Enforcement::Supervised)).unwrap();
    assert_eq!(fs::read(region.staged("c")).unwrap(), b"alive");
    assert!(!budget.exists());
}

#[test]
#[ignore = "needs root: mounts a tmpfs"]
fn a_container_waits_for_the_one_that_makes_the_region() {
    let (state, region) = State::new();
    let regions = state.0.path().join(REGIONS);
    fs::create_dir(&regions).unwrap();
    let other = File::open(&regions).unwrap();
    other.lock().unwrap();
    region.make_folder().unwrap();
    thread::scope(|scope| {
        let joined = scope.spawn(|| region.join(&alone("b")));
        // Gives the joining thread time to find half a region. What it does not wait for is removed then.
        thread::sleep(Duration::from_millis(200));
        assert!(!joined.is_finished() && region.folder.exists() && !region.limits().exists());
        fs::remove_dir(&region.folder).unwrap();
        region.make(&alone("a")).unwrap();
        fs::write(region.staged("a"), "alive").unwrap();
        drop(other);
        joined.join().unwrap().unwrap();
    });
    assert_eq!(fs::read(region.staged("b")).unwrap(), b"alive", "its books go on");
}

#[test]
#[ignore = "needs root: mounts a tmpfs"]
fn what_a_killed_process_left_of_a_region_is_made_anew() {
    let whole = alone("a");
    type Leave = (&'static str, fn(&Region));
    let leave: [Leave; 5] = [
        ("a folder", |region| region.make_folder().unwrap()),
        ("an empty tmpfs", |region| {
            region.make(&alone("a")).unwrap();
            fs::remove_file(region.limits()).unwrap();
            fs::remove_file(region.staged("a")).unwrap();
            region.leave_all();
        }),
        ("usage alone", |region| {
            region.make(&alone("a")).unwrap();
            fs::remove_file(region.limits()).unwrap();
            region.leave_all();
        }),
        ("empty limits", |region| {
            region.make(&alone("a")).unwrap();
            fs::write(region.limits(), "").unwrap();
            region.leave_all();
        }),
        ("no entry", |region| {
            region.make(&alone("a")).unwrap();
            region.leave_all();
        }),
    ];
    for (name, leave) in leave {
        let (_state, region) = State::new();
        leave(&region);
        region.join(&whole).unwrap_or_else(|error| panic!("after {name}: {error}"));
        assert!(region.grants_are(&whole).unwrap(), "after {name}");
        assert!(region.read_usage(&gpushare_quota::Running::default(), 16).is_ok(), "after {name}");
    }
}

#[test]
fn a_region_that_is_hidden_from_this_process_is_not_made_once_more() {
    for (known, others) in [
        (&["a"][..], Vec::new()),
        (&[], vec![member("a", LeaseState::Active)]),
        (&["a"], vec![member("a", LeaseState::Reserved)]),
    ] {
        let (state, region) = State::new();
        fs::create_dir(state.0.path().join(REGIONS)).unwrap();
        known.iter().try_for_each(|id| region.make_entry(id).map(drop)).unwrap();
        let before = state.entries();
        let refused = region.join(&lease("b", others, Enforcement::Intercepted));
        assert!(matches!(refused, Err(RegionError::Hidden { .. })), "{refused:?}");
        assert_eq!(state.entries(), before);
    }
}

#[test]
fn the_entries_of_a_pods_containers_go_one_by_one_and_the_rest_with_the_region() {
    let (state, region) = State::new();
    // Whole GPUs: their region is a folder alone, and needs no mount.
    let first = lease("a", Vec::new(), Enforcement::WholeGpu);
    region.make(&first).unwrap();
    assert!(!region.is_shared(), "a container that is alone has no entry");
    let others = vec![member("a", LeaseState::Active)];
    region.join(&lease("b", others, Enforcement::WholeGpu)).unwrap();
    for (leaves, shared) in [("c", true), ("", true), ("a", true), ("b", false)] {
        region.leave(leaves);
        assert_eq!(region.is_shared(), shared, "{leaves:?} left");
    }
    let outside = state.0.path().join("outside");
    fs::create_dir(&outside).unwrap();
    for leads_out in ["../../outside", outside.to_str().unwrap()] {
        region.leave(leads_out);
        assert!(outside.exists(), "{leads_out}");
    }
    assert_eq!(state.entries(), ["7", "7.members"]);
    assert_eq!(Region::existing(state.0.path()), [7].into());
    region.join(&first).unwrap();
    region.remove();
    assert_eq!(state.entries(), [""; 0]);
}

#[test]
fn nobody_waits_for_ever_for_the_pods_other_containers() {
    let (state, region) = State::new();
    let regions = state.0.path().join(REGIONS);
    fs::create_dir(&regions).unwrap();
    let other = File::open(regions).unwrap();
    other.lock().unwrap();
    assert!(matches!(region.join(&alone("a")), Err(RegionError::Busy { .. })));
    drop(other);
}

/// The mounts at or below `folder` in the mount namespace of this thread.
fn mounts_below(folder: &Path) -> usize {
    let table = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    let points = table.lines().filter_map(|line| line.split(' ').nth(4));
    points.filter(|point| Path::new(point).starts_with(folder)).count()
}

#[test]
#[ignore = "needs root: mounts a tmpfs"]
fn a_region_that_an_earlier_version_mounted_on_the_host_is_found_shown_and_removed() {
    let (state, region) = State::new();
    // As that version left it, with the namespace made since.
    region.make(&alone("a")).unwrap();
    region.leave_all();
    region.namespace.enter(|| region.unmount()).unwrap();
    mount(Some("gpushare"), &region.folder, Some("tmpfs"), MsFlags::empty(), Some("size=1m,nr_inodes=3"))
        .unwrap();
    fs::write(region.folder.join("usage"), empty_usage_header()).unwrap();
    fs::create_dir_all(region.members().join("a")).unwrap();

    region.join(&alone("b")).unwrap();
    fs::OpenOptions::new().append(true).open(region.staged("b")).unwrap().set_len(USAGE_LEN as u64).unwrap();
    assert!(region.read_usage(&gpushare_quota::Running::default(), 16).is_ok(), "b's file is a's");
    region.leave("b");
    assert!(region.is_shared());
    region.remove();
    assert_eq!(state.entries(), [""; 0]);
    assert_eq!(mounts_below(&state.0.path().join(REGIONS)), 0);
}

#[test]
#[ignore = "needs root: mounts a tmpfs"]
fn a_region_is_on_the_host_only_until_its_container_has_it() {
    let (state, region) = State::new();
    region.make(&alone("a")).unwrap();
    // The container also has a mount whose path is no UTF-8.
    let script = r#"odd=$2$(printf '\377') && mkdir "$odd" && mount -t tmpfs none "$odd" &&
        mount --bind "$1" "$2" && echo && exec sleep 60"#;
    let mut other = Command::new("/usr/bin/unshare");
    other.args(["--mount", "/bin/sh", "-c", script, "sh"]);
    let target = state.0.path().join("target");
    fs::write(&target, "").unwrap();
    other.arg(region.staged("a")).arg(&target).stdout(Stdio::piped());
    let regions = state.0.path().join(REGIONS);

    let before = Command::new("/bin/sleep").arg("60").spawn().unwrap();
    region.hide("a", i32::try_from(before.id()).unwrap()).unwrap();
    assert_eq!(mounts_below(&regions), 1, "its process has no mount of the file");
    let mut container = other.spawn().unwrap();
    container.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
    region.hide("a", i32::try_from(container.id()).unwrap()).unwrap();
    assert_eq!(mounts_below(&regions), 0);
    let inside = fs::metadata(format!("/proc/{}/root{}", container.id(), target.display())).unwrap();
    let identity = FileIdentity { device: inside.dev(), inode: inside.ino() };
    assert_eq!(region.identities()[1], Some(identity), "container and host have one file");
    assert!(region.read_usage(&gpushare_quota::Running::default(), 16).is_ok());
    for mut process in [before, container] {
        process.kill().unwrap();
        process.wait().unwrap();
    }
    // A container more of the pod finds it all the same.
    region.join(&lease("b", vec![member("a", LeaseState::Active)], Enforcement::Intercepted)).unwrap();
    assert_eq!(mounts_below(&regions), 1);
    region.hide_from_all("b");
    assert_eq!(mounts_below(&regions), 0, "b has no use for it");
    region.remove();
    assert_eq!(mounts_below(&regions), 0);
    assert!(region.identities().iter().all(Option::is_none));
}
