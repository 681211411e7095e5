//! Tests of one GPU's account: time, restarts, bursts, and clocks that jump.

use gpushare_inventory::{DeviceMemory, GpuUuid};
use gpushare_quota::{Enforcement, Holder, LeaseKey, LeaseState, Member};
use gpushare_request::{Cores, Priority};

use super::*;
use crate::meter::windows::PERIOD;

const START: u64 = 1_700_000_000_000_000_000;
const GPU: GpuUuid = GpuUuid::from_bytes([7; 16]);

/// Both clocks, this many sampling periods after the start.
fn at(periods: u64) -> Clock {
    let past = periods * PERIOD * 1000;
    Clock { monotonic: 1_000_000_000 + past, wall: START + past }
}

fn sample(pid: u32, period: u64, percent: u32) -> Sample {
    Sample { pid, stamp: START / 1000 + period * PERIOD, percent }
}

fn lease(id: i64, cores: Option<u8>, compute_policy: ComputePolicy) -> Lease {
    let grant = Grant {
        gpu: GPU,
        card: None,
        memory: DeviceMemory::from_bytes(1 << 30),
        cores: cores.and_then(Cores::new),
    };
    Lease {
        id,
        member: Member {
            key: LeaseKey { root: String::new(), container: id.to_string() },
            state: LeaseState::Active,
            holder: Holder { pid: 1, start_time: 1, cgroup: None, leads: false },
            name: None,
            called: gpushare_quota::Called::default(),
            has_driver_limit: false,
        },
        others: Vec::new(),
        grants: vec![grant],
        enforcement: Enforcement::Intercepted,
        compute_policy,
        ceiling: Cores::ALL,
        host_memory: DeviceMemory::ZERO,
        elastic: None,
        priority: Priority::default(),
        granted_at: 0,
        restated: std::collections::BTreeMap::new(),
    }
}

fn account(leases: &[Lease], known: &[Measurement]) -> Account {
    let mut account = Account::new(known, PERIOD, at(0));
    for (index, lease) in leases.iter().enumerate() {
        let known = known.get(index).copied().unwrap_or_default();
        account.admit(lease, 0, &lease.grants[0], &known, at(0));
    }
    account
}

/// The owner of a process: its pid is its lease's id.
fn owner(pid: u32) -> Option<i64> {
    Some(i64::from(pid))
}

fn published(account: &Account, clock: Clock) -> Vec<(i64, Measurement)> {
    account.measurements(clock).map(|(lease, _, value)| (lease, value)).collect()
}

/// GPU time in nanoseconds of this many windows.
fn time(windows: u64, percent: u64) -> u64 {
    windows * ((percent * 100 + 25) * PERIOD / 10)
}

#[test]
fn own_time_is_all_that_was_sampled_and_of_others_only_whether_they_used_any() {
    let fixed = ComputePolicy::Fixed;
    let mut account = account(&[lease(1, Some(30), fixed), lease(2, Some(50), fixed)], &[]);
    assert_eq!(published(&account, at(0))[0].1.until, 0, "nothing was asked yet");
    for window in 1..=10 {
        let samples = vec![sample(1, window, 30), sample(2, window, 50), sample(99, window, 10)];
        assert!(account.count(samples, at(window), owner), "a window ended");
    }
    let all = published(&account, at(10));
    assert_eq!((all[0].1.own_nanoseconds, all[0].1.others_windows), (time(10, 30), 10));
    assert_eq!((all[1].1.own_nanoseconds, all[1].1.others_windows), (time(10, 50), 10));
    assert_eq!(all[0].1.until, at(10).monotonic);
    assert!(account.count(vec![sample(1, 11, 30)], at(11), owner));
    let alone = published(&account, at(11));
    assert_eq!([alone[0].1.others_windows, alone[1].1.others_windows], [10, 11]);
    assert_eq!(all[0].1.burst_share, 0, "nobody bursts here");
}

#[test]
fn the_record_tells_time_in_place_of_samples_and_goes_on_where_they_ended() {
    let burst = ComputePolicy::Burst;
    let mut account = account(&[lease(1, Some(30), burst), lease(2, Some(50), ComputePolicy::Fixed)], &[]);
    assert!(account.count(vec![sample(1, 1, 30)], at(1), owner));
    assert!(!published(&account, at(1))[0].1.is_by_record);
    // The first has a third of each period, a stranger another one, as long looks as the driver's windows.
    let third = PERIOD * 1000 / 3;
    let spent = |pid| Spent { pid, nanoseconds: third };
    let mut ended = 0;
    for period in 2..=10 {
        let used = Use { spent: vec![spent(1), spent(99)], until: at(period).wall_micros() };
        ended += u32::from(account.count_record(used, at(period), owner));
    }
    let all = published(&account, at(10));
    assert_eq!(all[0].1.own_nanoseconds, time(1, 30) + 9 * third);
    assert_eq!((all[1].1.own_nanoseconds, all[1].1.others_windows), (0, 10));
    assert!(all.iter().all(|(_, line)| line.is_by_record && line.until == at(10).monotonic));
    assert_eq!(ended, 9, "each look was as long as a window");
    account.decide(|_, _| true);
    // It gets what the stranger does not use.
    let share = published(&account, at(10))[0].1.burst_share;
    assert!((5_000..=7_000).contains(&share), "{share}");
    // The wall clock is set back by a minute: time goes on.
    let back = |period: u64| Clock { wall: at(period).wall - 60_000_000_000, ..at(period) };
    let used = Use { spent: vec![spent(1)], until: back(11).wall_micros() };
    account.count_record(used, back(11), owner);
    let line = published(&account, back(11))[0].1;
    assert_eq!(line.own_nanoseconds, time(1, 30) + 10 * third);
    assert!(line.until <= at(11).monotonic);
}

#[test]
fn a_restarted_meter_goes_on_where_the_last_one_stopped() {
    let lease = lease(1, Some(30), ComputePolicy::Fixed);
    let mut first = account(std::slice::from_ref(&lease), &[]);
    for window in 1..=5 {
        first.count(vec![sample(1, window, 30)], at(window), owner);
    }
    let before = published(&first, at(5))[0].1;
    let mut second = Account::new(&[before], PERIOD, at(8));
    second.admit(&lease, 0, &lease.grants[0], &before, at(8));
    assert!(second.ask_from(at(8)) <= sample(1, 5, 0).stamp, "nothing after the fifth window may be missed");
    let told = (1..=8).map(|window| sample(1, window, 30)).collect();
    second.count(told, at(8), owner);
    assert_eq!(published(&second, at(8))[0].1.own_nanoseconds, time(8, 30));

    for forged in [
        Measurement { until: u64::MAX, own_nanoseconds: 5, ..before },
        Measurement { until: 10, own_nanoseconds: 11, ..before },
        Measurement { until: 0, own_nanoseconds: 7, ..before },
    ] {
        let mut third = Account::new(&[forged], PERIOD, at(8));
        third.admit(&lease, 0, &lease.grants[0], &forged, at(8));
        assert_eq!(published(&third, at(8))[0].1.own_nanoseconds, 0, "{forged:?}");
    }
}

#[test]
fn idle_time_is_given_to_a_bursting_container_and_taken_back() {
    let leases = [lease(1, Some(30), ComputePolicy::Burst), lease(2, Some(70), ComputePolicy::Fixed)];
    let mut account = account(&leases, &[]);
    let mut share = |window: u64, samples: Vec<Sample>| {
        account.count(samples, at(window), owner);
        account.decide(|_, _| true);
        published(&account, at(window))[0].1.burst_share
    };
    assert_eq!(share(1, vec![sample(1, 1, 30)]), 10_000);
    assert_eq!(share(2, vec![sample(1, 2, 99)]), 10_000);
    assert_eq!(share(3, vec![sample(1, 3, 60), sample(2, 3, 40)]), 3_000, "the neighbour came back");
    for window in 4..=12 {
        share(window, vec![sample(1, window, 30)]);
    }
    assert_eq!(share(13, vec![sample(1, 13, 30)]), 10_000, "and went");
}

#[test]
fn a_bursting_container_gets_no_more_idle_time_than_its_ceiling() {
    let bound = Lease { ceiling: Cores::new(60).unwrap(), ..lease(1, Some(30), ComputePolicy::Burst) };
    let mut account = account(&[bound], &[]);
    account.count(vec![sample(1, 1, 30)], at(1), owner);
    account.decide(|_, _| true);
    assert_eq!(published(&account, at(1))[0].1.burst_share, 6_000);
}

#[test]
fn what_was_used_before_a_limit_is_not_billed_to_it() {
    let [limited, free] = [Some(30), None].map(|cores| vec![lease(1, cores, ComputePolicy::Fixed)]);
    let mut account = account(&limited, &[]);
    account.count(vec![sample(1, 1, 30)], at(1), owner);
    account.admit(&free[0], 0, &free[0].grants[0], &Measurement::default(), at(2));
    assert!(!account.is_limited(), "nobody asks any more");
    account.admit(&limited[0], 0, &limited[0].grants[0], &Measurement::default(), at(60));
    assert_eq!(account.ask_from(at(60)), sample(1, 60, 0).stamp);
    let told = (2..=61).map(|window| sample(1, window, 100)).collect();
    account.count(told, at(61), owner);
    assert_eq!(published(&account, at(61))[0].1.own_nanoseconds, time(1, 30) + time(1, 100));
}

#[test]
fn a_gpu_that_falls_silent_is_idle_soon() {
    let leases = [lease(1, Some(30), ComputePolicy::Burst), lease(2, Some(70), ComputePolicy::Fixed)];
    let mut account = account(&leases, &[]);
    account.count(vec![sample(1, 1, 30), sample(2, 1, 70)], at(1), owner);
    account.decide(|_, _| true);
    assert_eq!(published(&account, at(1))[0].1.burst_share, 3_000);
    for window in 2..=12 {
        account.count(vec![], at(window), owner);
        account.decide(|_, _| false);
    }
    account.count(vec![sample(1, 13, 30)], at(13), owner);
    account.decide(|_, _| true);
    assert_eq!(published(&account, at(13))[0].1.burst_share, 10_000);
}

#[test]
fn a_clock_that_jumps_ahead_by_centuries_costs_no_time() {
    let leases = [lease(1, Some(30), ComputePolicy::Burst), lease(2, Some(70), ComputePolicy::Fixed)];
    let mut account = account(&leases, &[]);
    account.count(vec![sample(1, 1, 30), sample(2, 1, 70)], at(1), owner);
    let start = std::time::Instant::now();
    let far = Clock { wall: at(1).wall * 5, ..at(1) };
    assert!(account.count(vec![], far, owner));
    assert!(start.elapsed() < std::time::Duration::from_secs(1));
    account.decide(|_, _| false);
    assert_eq!(published(&account, far)[0].1.burst_share, 3_000, "nobody is active any more");
}

#[test]
fn a_container_without_a_compute_share_is_measured_and_not_held() {
    let leases = [lease(1, Some(30), ComputePolicy::Burst), lease(2, None, ComputePolicy::Fixed)];
    let mut account = account(&leases, &[]);
    assert!(account.is_limited());
    account.count(vec![sample(1, 1, 30), sample(2, 1, 60)], at(1), owner);
    account.decide(|_, _| true);
    let all = published(&account, at(1));
    assert_eq!((all[0].1.burst_share, all[1].1.burst_share), (3_975, 0), "what it uses is not there to give");
    assert_eq!(all[1].1.own_nanoseconds, time(1, 60));
    account.retain(|lease| lease == 2);
    assert!(!account.is_limited() && !account.is_empty());
}

#[test]
fn a_wall_clock_that_was_set_back_does_not_blind_the_meter() {
    let lease = lease(1, Some(30), ComputePolicy::Fixed);
    let mut account = account(std::slice::from_ref(&lease), &[]);
    account.count(vec![sample(1, 100, 30)], at(100), owner);
    let back = Clock { wall: START, ..at(101) };
    assert!(account.ask_from(back) <= back.wall_micros());
    account.count(vec![sample(1, 1, 30)], Clock { wall: START + PERIOD * 1000, ..at(102) }, owner);
    assert_eq!(published(&account, at(102))[0].1.own_nanoseconds, time(2, 30));
}

#[test]
fn an_updated_lease_keeps_what_was_measured() {
    let old = lease(1, Some(30), ComputePolicy::Fixed);
    let mut account = account(std::slice::from_ref(&old), &[]);
    account.count(vec![sample(1, 1, 30)], at(1), owner);
    let new = lease(1, Some(60), ComputePolicy::Burst);
    account.admit(&new, 0, &new.grants[0], &Measurement::default(), at(1));
    account.count(vec![sample(1, 2, 30)], at(2), owner);
    account.decide(|_, _| true);
    let value = published(&account, at(2))[0].1;
    assert_eq!((value.own_nanoseconds, value.burst_share), (time(2, 30), 10_000));
}
