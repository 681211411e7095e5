use std::fs;
use std::time::{Duration, Instant};

use gpushare_inventory::{DeviceMemory, GpuUuid};
use gpushare_quota::{Enforcement, Grant, Holder, LeaseKey, LeaseState, Member};
use gpushare_region::{DeviceUsage, SLOT_LIVE, UsageFile, UsageHeader, empty_usage_header};
use gpushare_request::{ComputePolicy, Cores, Priority};

use super::super::namespace::Namespace;
use super::*;
use crate::supervision::Budgets;

fn lease(memory: u64, cores: Option<u8>) -> Lease {
    let grant = |first: u8| Grant {
        gpu: GpuUuid::from_bytes([first; 16]),
        card: None,
        memory: DeviceMemory::from_bytes(memory),
        cores: cores.and_then(Cores::new),
    };
    Lease {
        id: 1,
        member: Member {
            key: LeaseKey { root: String::new(), container: "a".into() },
            state: LeaseState::Active,
            holder: Holder::this_process().unwrap(),
            name: None,
            called: gpushare_quota::Called::default(),
            has_driver_limit: false,
        },
        others: Vec::new(),
        grants: vec![grant(1), grant(2)],
        enforcement: Enforcement::Intercepted,
        compute_policy: ComputePolicy::Burst,
        ceiling: Cores::ALL,
        host_memory: gpushare_inventory::DeviceMemory::ZERO,
        elastic: None,
        priority: Priority::default(),
        granted_at: 0,
        restated: std::collections::BTreeMap::new(),
        shrunk_from: Vec::new(),
    }
}

/// A region without a tmpfs of its own, where earlier versions had it: these tests do not depend on the file
/// system.
fn region(lease: &Lease) -> (tempfile::TempDir, Region) {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("limits"), encoded(lease).unwrap()).unwrap();
    let mut usage = vec![0; USAGE_LEN];
    usage[..USAGE_HEADER_LEN].copy_from_slice(&empty_usage_header());
    fs::write(folder.path().join("usage"), usage).unwrap();
    let limits = folder.path().join("limits");
    let namespace = Namespace::beside(folder.path());
    let budgets = Budgets::of(folder.path());
    let region = Region {
        folder: folder.path().to_owned(),
        limits,
        name: "limits".to_owned(),
        namespace,
        budgets,
        id: 1,
    };
    (folder, region)
}

#[test]
fn a_change_is_written_into_the_same_inode_and_keeps_the_measurements() {
    use std::os::unix::fs::MetadataExt;
    let old = lease(4 << 30, None);
    let (_folder, region) = region(&old);
    let inode = fs::metadata(region.limits()).unwrap().ino();
    let seen = Measurement { until: 7, written: 9, ..Measurement::default() };
    let measuring = region.to_measure().unwrap();
    measuring.set(1, &seen).unwrap();
    measuring.set(99, &seen).unwrap();
    assert!(region.grants_are(&old).unwrap(), "measurements are no grants");

    let new = lease(6 << 30, Some(50));
    assert!(!region.grants_are(&new).unwrap());
    region.set_grants(&new).unwrap();
    assert!(region.grants_are(&new).unwrap() && !region.grants_are(&old).unwrap());
    assert_eq!(region.measured().unwrap()[..2], [Measurement::default(), seen]);
    assert_eq!(fs::metadata(region.limits()).unwrap().ino(), inode);
}

#[test]
fn a_limits_file_that_was_cut_or_changed_is_told_and_mended() {
    let lease = lease(4 << 30, Some(30));
    let (_folder, region) = region(&lease);
    let good = fs::read(region.limits()).unwrap();
    let longer = [&good[..], &[0]].concat();
    for bad in [&[][..], &good[..100], &[0xff; LIMITS_LEN], &longer] {
        fs::write(region.limits(), bad).unwrap();
        assert!(!region.grants_are(&lease).unwrap(), "{} bytes", bad.len());
        region.set_grants(&lease).unwrap();
        assert!(region.grants_are(&lease).unwrap(), "{} bytes", bad.len());
    }
}

/// Writes that slot 0 holds 1 MiB for the process `pid` with this start time.
fn hold(region: &Region, pid: u32, start_time: u64) {
    let mut bytes = fs::read(region.folder.join("usage")).unwrap();
    let owners = std::mem::offset_of!(UsageFile, owners);
    let lines = std::mem::offset_of!(UsageFile, lines);
    let mut put = |at: usize, word: &[u8]| bytes[at..at + word.len()].copy_from_slice(word);
    put(std::mem::offset_of!(UsageHeader, live), &1_u64.to_ne_bytes());
    put(owners, &SLOT_LIVE.to_ne_bytes());
    put(owners + 4, &pid.to_ne_bytes());
    put(owners + 8, &start_time.to_ne_bytes());
    put(lines, &(1_u64 << 20).to_ne_bytes());
    fs::write(region.folder.join("usage"), bytes).unwrap();
}

#[test]
fn a_slot_counts_while_its_owner_runs_whoever_holds_its_lock() {
    let (_folder, region) = region(&lease(1 << 30, None));
    let bytes = || region.read_usage(&Running::default(), 16).unwrap().devices[0].bytes;
    let me = Holder::this_process().unwrap();
    let pid = u32::try_from(me.pid).unwrap();
    hold(&region, pid, me.start_time);
    assert_eq!(bytes(), 1 << 20);
    hold(&region, pid, me.start_time + 1_000_000);
    assert_eq!(bytes(), 1 << 20, "it may have begun since the processes were listed");
    hold(&region, pid, me.start_time - 1);
    assert_eq!(bytes(), 0, "its owner ended");
}

#[test]
fn a_damaged_usage_file_costs_bounded_time_and_says_so() {
    let (folder, region) = region(&lease(1 << 30, None));
    assert_eq!(region.read_usage(&Running::default(), 16).unwrap().devices[0], DeviceUsage::default());
    assert_eq!(region.read_throttled().unwrap()[0], 0);
    let usage = folder.path().join("usage");
    let good = fs::read(&usage).unwrap();
    let mut wrong_version = good.clone();
    wrong_version[8] ^= 1;
    for (name, bad) in [
        ("empty", vec![]),
        ("short", good[..5000].to_vec()),
        ("random", good.iter().map(|byte| byte ^ 0x5a).collect()),
        ("of another version", wrong_version),
    ] {
        fs::write(&usage, bad).unwrap();
        assert!(matches!(region.read_usage(&Running::default(), 16), Err(UsageError::Damaged(_))), "{name}");
    }
    // A sparse file claims a terabyte and holds nothing.
    fs::write(&usage, &good).unwrap();
    fs::OpenOptions::new().write(true).open(&usage).unwrap().set_len(1 << 40).unwrap();
    let start = Instant::now();
    assert!(region.read_usage(&Running::default(), 16).is_ok());
    assert!(start.elapsed() < Duration::from_secs(1));
    fs::remove_file(&usage).unwrap();
    assert!(matches!(region.read_usage(&Running::default(), 16), Err(UsageError::Io(_))));
    std::os::unix::fs::symlink(region.limits(), &usage).unwrap();
    assert!(
        matches!(region.read_usage(&Running::default(), 16), Err(UsageError::Io(_))),
        "a link is not followed"
    );
}

#[test]
fn the_file_holds_the_bursts_ceiling_and_never_one_below_the_share() {
    for (ceiling, cores, want) in [(60, Some(30), 60), (60, Some(80), 80), (100, Some(30), 100)] {
        let lease = Lease { ceiling: Cores::new(ceiling).unwrap(), ..lease(1 << 30, cores) };
        assert_eq!(limits(&lease)[0].ceiling_percent, want, "{ceiling} over {cores:?}");
    }
}
