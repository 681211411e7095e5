//! Tests of how idle time is given: guarantees stand, and neighbours that come and go are followed.

use super::*;

/// A tenant that uses a steady share; all figures in percent.
fn steady(guarantee: u32, ceiling: u32, used: u32) -> Tenant {
    let share = Allowance { share: guarantee * 100, claim: used * 100 };
    Tenant {
        guarantee: guarantee * 100,
        ceiling: ceiling * 100,
        weight: 6,
        recent: [used * 100; WINDOWS],
        held_back: false,
        last: share,
    }
}

fn hungry(tenant: Tenant) -> Tenant {
    Tenant { held_back: true, ..tenant }
}

fn shares(tenants: &[Tenant], foreign: u32) -> Vec<u32> {
    allowances(tenants, &[foreign * 100; WINDOWS]).iter().map(|allowance| allowance.share / 100).collect()
}

#[test]
fn idle_time_goes_to_those_who_want_it_and_guarantees_stand() {
    let high = Tenant { weight: 10, ..hungry(steady(20, 100, 20)) };
    let low = Tenant { weight: 1, ..hungry(steady(20, 100, 20)) };
    for (name, tenants, foreign, want) in [
        ("alone", vec![hungry(steady(30, 100, 30))], 0, vec![100]),
        ("alone up to its ceiling", vec![hungry(steady(30, 60, 30))], 0, vec![60]),
        ("alone and content", vec![steady(30, 100, 10)], 0, vec![100]),
        ("idle", vec![steady(30, 100, 0)], 0, vec![30]),
        ("beside an idle one", vec![hungry(steady(30, 100, 30)), steady(70, 70, 0)], 0, vec![100, 70]),
        ("beside a busy one", vec![hungry(steady(30, 100, 30)), hungry(steady(70, 70, 70))], 0, vec![30, 70]),
        ("beside a content one", vec![hungry(steady(30, 100, 60)), steady(70, 70, 20)], 0, vec![77, 70]),
        ("two who want more", vec![hungry(steady(30, 100, 30)); 2], 0, vec![50, 50]),
        ("by weight", vec![high, low], 0, vec![74, 25]),
        ("foreign work is not there to give", vec![hungry(steady(30, 100, 30))], 40, vec![60]),
        ("a guarantee stands beside foreign work", vec![hungry(steady(30, 100, 30))], 90, vec![30]),
        ("more is promised than there is", vec![hungry(steady(80, 100, 50)); 2], 0, vec![80, 80]),
        ("nobody", vec![], 0, vec![]),
    ] {
        assert_eq!(shares(&tenants, foreign), want, "{name}");
    }
}

#[test]
fn a_container_that_only_says_it_was_held_back_gets_nothing_for_it() {
    let liar = |used| hungry(steady(30, 100, used));
    let honest = hungry(steady(30, 100, 60));
    for used in [0, 5, 15] {
        let lied = shares(&[honest.clone(), liar(used)], 0);
        let silent = shares(&[honest.clone(), steady(30, 100, used)], 0);
        assert_eq!(lied, silent, "using {used} %");
    }
}

#[test]
fn whatever_the_figures_say_nobody_gets_less_than_guaranteed_or_more_than_its_ceiling() {
    let mut seed = 1_u32;
    let mut random = move |below: u32| {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (seed >> 8) % below
    };
    for round in 0..20_000 {
        let tenants: Vec<Tenant> = (0..random(6))
            .map(|_| {
                let guarantee = 100 + random(9_901);
                Tenant {
                    guarantee,
                    ceiling: guarantee + random(WHOLE + 1 - guarantee),
                    weight: 1 + random(10),
                    recent: std::array::from_fn(|_| random(12_000)),
                    held_back: random(2) == 1,
                    last: Allowance { share: random(12_000), claim: random(12_000) },
                }
            })
            .collect();
        let foreign = std::array::from_fn(|_| random(12_000));
        let given = allowances(&tenants, &foreign);
        let mut beyond = 0;
        for (tenant, allowance) in tenants.iter().zip(&given) {
            assert!(allowance.share >= tenant.guarantee, "round {round}: {tenant:?}");
            assert!(allowance.share <= tenant.ceiling, "round {round}: {tenant:?}, {allowance:?}");
            beyond += allowance.share - tenant.guarantee;
        }
        assert!(beyond <= WHOLE, "round {round}: idle time is given away twice");
    }
}

/// A simple GPU: each that wants to run and may, runs. Beyond the whole, each gets an equal part of what is
/// asked (time slices).
fn ran(wants: &[u32]) -> Vec<u32> {
    fill(WHOLE, wants, &vec![1; wants.len()])
}

/// Plays `windows` windows; `wants` is what each container wants in each window, in percent. Returns what
/// each got. New allowances hold from the next window on.
fn play(tenants: Vec<Tenant>, windows: usize, wants: impl Fn(usize, usize) -> u32) -> Vec<Vec<u32>> {
    let mut tenants = tenants;
    for tenant in &mut tenants {
        *tenant = Tenant {
            recent: [0; WINDOWS],
            last: Allowance { share: tenant.guarantee, claim: 0 },
            ..tenant.clone()
        };
    }
    let mut log = Vec::new();
    for window in 0..windows {
        let wanted: Vec<u32> = (0..tenants.len()).map(|index| wants(window, index) * 100).collect();
        let may = |index: usize| wanted[index].min(tenants[index].last.share);
        let asked: Vec<u32> = (0..tenants.len()).map(may).collect();
        let got = ran(&asked);
        for (index, tenant) in tenants.iter_mut().enumerate() {
            tenant.recent.rotate_right(1);
            // The driver tells whole percents, rounded down.
            tenant.recent[0] = got[index] / 100 * 100;
            tenant.held_back = wanted[index] > tenant.last.share;
        }
        let next = allowances(&tenants, &[0; WINDOWS]);
        tenants.iter_mut().zip(next).for_each(|(tenant, next)| tenant.last = next);
        log.push(got.iter().map(|got| got / 100).collect());
    }
    log
}

fn sum(got: &[Vec<u32>]) -> u32 {
    let all: u32 = got.iter().flatten().sum();
    all / u32::try_from(got.len()).unwrap()
}

#[test]
fn a_guarantee_is_back_two_windows_after_its_owner() {
    // Guarantees 30 (burst) and 70 (fixed); the second is active in windows 24 to 47.
    let tenants = || vec![steady(30, 100, 0), steady(70, 70, 0)];
    let got =
        play(tenants(), 72, |window, index| if index == 0 || (24..48).contains(&window) { 100 } else { 0 });
    assert!(sum(&got[2..24]) >= 99, "alone: {got:?}");
    for window in &got[26..48] {
        assert!((29..=31).contains(&window[0]) && window[1] >= 69, "in contention: {window:?}");
    }
    assert!(sum(&got[51..]) >= 99, "alone again: {:?}", &got[48..]);
}

#[test]
fn two_who_both_want_more_leave_nothing_and_do_not_swing() {
    let got = play(vec![steady(30, 100, 0), steady(30, 100, 0)], 60, |window, index| {
        if index == 0 || window >= 20 { 100 } else { 0 }
    });
    assert!(sum(&got[24..]) >= 97, "{got:?}");
    for window in &got[24..] {
        assert!(window.iter().all(|share| (48..=52).contains(share)), "{window:?}");
    }
    let three = play(vec![steady(25, 100, 0), steady(25, 100, 0), steady(50, 100, 0)], 60, |_, _| 100);
    assert!(three[6..].iter().all(|window| window[..] == [25, 25, 50]), "{three:?}");
}

#[test]
fn a_neighbour_that_wants_little_gets_it_and_the_rest_is_used() {
    for wanted in [5, 20, 45] {
        let got = play(vec![steady(30, 100, 0), steady(70, 70, 0)], 120, |window, index| match index {
            0 => 100,
            _ => wanted - 1 + u32::try_from(window % 3).unwrap(),
        });
        let late = &got[12..];
        let neighbour: u32 =
            late.iter().map(|window| window[1]).sum::<u32>() / u32::try_from(late.len()).unwrap();
        assert!(neighbour + 1 >= wanted, "{wanted}: {late:?}");
        assert!(sum(late) >= 94, "{wanted}: {} {late:?}", sum(late));
    }
}

#[test]
fn a_neighbour_that_pulses_twice_a_second_keeps_what_it_needs() {
    // 60 % in every third window. What is kept for it must not be given away and taken back all the time.
    let got = play(vec![steady(30, 100, 0), steady(70, 70, 0)], 120, |window, index| match index {
        0 => 100,
        _ => {
            if window % 3 == 0 {
                60
            } else {
                0
            }
        }
    });
    for pulse in got[12..].iter().step_by(3) {
        assert!(pulse[1] >= 59, "{pulse:?} of {got:?}");
    }
}

#[test]
fn a_neighbour_that_grows_gets_its_guarantee_within_three_windows() {
    let got = play(vec![steady(30, 100, 0), steady(70, 70, 0)], 80, |window, index| match (index, window) {
        (0, _) => 100,
        (_, 0..40) => 20,
        _ => 60,
    });
    assert!(got[38][0] >= 75, "before: {:?}", got[38]);
    assert!(got[43..].iter().all(|window| window[1] >= 60), "after: {:?}", &got[38..]);
    assert!(sum(&got[46..]) >= 95, "after: {:?}", &got[38..]);
}
