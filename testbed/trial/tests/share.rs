//! Tests the compute share in virtual time, with a part of the runs of `make bench`.

use gpushare_intercept_trial::{Container, Discipline, Estimates, Load, MILLISECOND, Meter, Trial, cases};

const SLICES: Discipline = Discipline::Slices(2 * MILLISECOND);

/// Allowed points of the mean, points of the worst second, and percent of the share in the first second. A
/// kernel of 40 ms is four points of a second, and shares that add up to 100 % leave no time to make up for a
/// loss.
fn bounds(case: &str) -> (f64, f64, f64) {
    match case {
        "kernel time steps 1, 4, 0.5" => (1.5, 7.0, 110.0),
        "25/25/50" => (2.0, 6.0, 110.0),
        _ => (1.5, 4.0, 110.0),
    }
}

#[test]
fn cases_40_to_45_a_container_gets_its_share_whatever_it_launches_and_whoever_is_beside_it() {
    for device in [Discipline::Submission, SLICES] {
        for case in cases() {
            let worst = case.run(device, 1..2, 4).worst;
            let (mean, second, first) = bounds(case.name);
            assert!(
                worst.mean.abs() <= mean && worst.worst <= second && worst.first <= first,
                "{} on {device:?}: mean {:.1}, second {:.1}, first {:.0} %",
                case.name,
                worst.mean,
                worst.worst,
                worst.first
            );
        }
    }
}

/// The negative control. Without it the other tests prove nothing: they could pass on a device on which every
/// limiter looks right.
#[test]
fn a_limiter_that_learns_nothing_fails_by_far() {
    let container = Container::fixed(25, 1, Load::steady(10 * MILLISECOND, 0));
    let learns = Trial { seconds: 3, ..Trial::new(vec![container], SLICES, 1) };
    let pinned = Trial { estimates: Estimates::Pinned, meter: None, ..learns.clone() };
    let [learns, pinned] = [learns, pinned].map(|trial| trial.run()[0].clone());
    assert!(pinned.first > 300.0 && pinned.mean > 50.0, "pinned: {pinned:?}");
    assert!(learns.first < 110.0 && learns.mean < 2.0, "learns: {learns:?}");
}

#[test]
fn case_39_without_a_meter_pairs_of_events_hold_the_share_of_a_container_and_never_open_it() {
    let load = Load::steady(10 * MILLISECOND, 0);
    let alone = vec![Container::fixed(30, 2, load.clone())];
    let beside = [30, 70].map(|cores| Container::fixed(cores, 1, load.clone())).to_vec();
    for (what, containers, device, points) in [
        ("alone", alone, Discipline::Submission, 3.0),
        ("beside another, one after the other", beside.clone(), Discipline::Submission, 4.0),
        // Kernels that outlast a slice are measured too long. This is the accuracy without a meter.
        ("beside another, in turns", beside, SLICES, 25.0),
    ] {
        let trial = Trial { meter: None, ..Trial::new(containers, device, 1) };
        for figures in trial.run() {
            assert!(figures.mean < 2.0 && figures.mean > -points, "{what}: {figures:?}");
        }
    }
}

#[test]
fn a_meter_that_tells_late_or_rounds_otherwise_still_settles_the_share() {
    use gpushare_intercept_trial::Rounding;
    let load = Load::steady(10 * MILLISECOND, 16);
    let containers: Vec<_> = [30, 60].map(|cores| Container::fixed(cores, 1, load.clone())).into();
    for (what, meter) in [
        ("50 ms late", Meter { delay: 50 * MILLISECOND, ..Meter::default() }),
        ("to the nearest", Meter { rounding: Rounding::Nearest, ..Meter::default() }),
        ("windows of 100 ms", Meter { window: 100 * MILLISECOND, ..Meter::default() }),
    ] {
        let trial = Trial { meter: Some(meter), ..Trial::new(containers.clone(), SLICES, 1) };
        for figures in trial.run() {
            assert!(figures.mean.abs() <= 1.5 && figures.worst <= 5.0, "{what}: {figures:?}");
        }
    }
}

/// Case 46: a container is refilled by wall time. One that wants less than its share is not slowed down, and
/// one that was idle does not burst.
#[test]
fn case_46_a_program_that_wants_less_than_its_share_is_not_slowed() {
    // One kernel of 1 ms, then 4 ms of pause: about 20 %.
    let load = Load { pause: 4 * MILLISECOND, ..Load::steady(MILLISECOND, 1) };
    let used = [25, 100].map(|cores| {
        let trial = Trial::new(vec![Container::fixed(cores, 1, load.clone())], Discipline::Submission, 1);
        trial.run()[0].mean + f64::from(cores)
    });
    assert!((used[0] - used[1]).abs() < 0.3, "{used:?}");
}
