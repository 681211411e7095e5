//! Tests of one GPU's account: time, restarts, and clocks that jump.

use super::*;
use crate::meter::windows::PERIOD;

const START: u64 = 1_700_000_000_000_000_000;

/// Both clocks, this many sampling periods after the start.
fn at(periods: u64) -> Clock {
    let past = periods * PERIOD * 1000;
    Clock { monotonic: 1_000_000_000 + past, wall: START + past }
}

fn sample(pid: u32, period: u64, percent: u32) -> Sample {
    Sample { pid, stamp: START / 1000 + period * PERIOD, percent }
}

fn account(leases: &[i64]) -> Account {
    let mut account = Account::new(&[], PERIOD, at(0));
    leases.iter().for_each(|lease| account.admit(*lease, 0, &Measurement::default(), at(0)));
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
fn own_time_is_all_that_was_sampled() {
    let mut account = account(&[1, 2]);
    assert_eq!(published(&account, at(0))[0].1.until, 0, "nothing was asked yet");
    for window in 1..=10 {
        let samples = vec![sample(1, window, 30), sample(2, window, 50), sample(99, window, 10)];
        account.count(samples, owner);
    }
    let all = published(&account, at(10));
    assert_eq!([&all[0], &all[1]].map(|one| one.1.own_nanoseconds), [time(10, 30), time(10, 50)]);
    assert_eq!(all[0].1.until, at(10).monotonic);
    account.retain(|lease| lease == 2);
    assert_eq!(published(&account, at(10)).len(), 1);
}

#[test]
fn the_record_tells_time_in_place_of_samples_and_goes_on_where_they_ended() {
    let mut account = account(&[1, 2]);
    account.count(vec![sample(1, 1, 30)], owner);
    assert!(!published(&account, at(1))[0].1.is_by_record);
    // The first has a third of each period, a stranger another one.
    let third = PERIOD * 1000 / 3;
    let spent = |pid| Spent { pid, nanoseconds: third };
    for period in 2..=10 {
        let used = Use { spent: vec![spent(1), spent(99)], until: at(period).wall_micros() };
        account.count_record(used, at(period), owner);
    }
    let all = published(&account, at(10));
    assert_eq!([&all[0], &all[1]].map(|one| one.1.own_nanoseconds), [time(1, 30) + 9 * third, 0]);
    assert!(all.iter().all(|(_, line)| line.is_by_record && line.until == at(10).monotonic));
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
    let mut first = account(&[1]);
    for window in 1..=5 {
        first.count(vec![sample(1, window, 30)], owner);
    }
    let before = published(&first, at(5))[0].1;
    let again = |known: Measurement| {
        let mut account = Account::new(&[known], PERIOD, at(8));
        account.admit(1, 0, &known, at(8));
        account
    };
    let mut second = again(before);
    assert!(second.ask_from(at(8)) <= sample(1, 5, 0).stamp, "nothing after the fifth window may be missed");
    second.count((1..=8).map(|window| sample(1, window, 30)).collect(), owner);
    assert_eq!(published(&second, at(8))[0].1.own_nanoseconds, time(8, 30));
    for forged in [
        Measurement { until: u64::MAX, own_nanoseconds: 5, ..before },
        Measurement { until: 10, own_nanoseconds: 11, ..before },
        Measurement { until: 0, own_nanoseconds: 7, ..before },
    ] {
        assert_eq!(published(&again(forged), at(8))[0].1.own_nanoseconds, 0, "{forged:?}");
    }
}

#[test]
fn a_wall_clock_that_was_set_back_does_not_blind_the_meter() {
    let mut account = account(&[1]);
    account.count(vec![sample(1, 100, 30)], owner);
    let back = Clock { wall: START, ..at(101) };
    assert!(account.ask_from(back) <= back.wall_micros());
    account.count(vec![sample(1, 1, 30)], owner);
    assert_eq!(published(&account, at(102))[0].1.own_nanoseconds, time(2, 30));
}

#[test]
fn an_updated_lease_keeps_what_was_measured() {
    let mut account = account(&[1]);
    account.count(vec![sample(1, 1, 30)], owner);
    account.admit(1, 3, &Measurement::default(), at(1));
    account.count(vec![sample(1, 2, 30)], owner);
    let (_, line, value) = account.measurements(at(2)).next().unwrap();
    assert_eq!((line, value.own_nanoseconds), (3, time(2, 30)));
}
