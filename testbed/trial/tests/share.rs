//! Tests the compute share in virtual time, with a part of the runs of `make bench`.

use gpushare_intercept_trial::{
    Bounds, Container, Discipline, Estimates, Load, MILLISECOND, Meter, Setting, Trial, cases,
};

const SLICES: Discipline = Discipline::Slices(2 * MILLISECOND);

/// A kernel of 40 ms is four points of a second, and shares that add up to 100 % leave no time to make up for
/// a loss. In turns, each kernel that outlasts a turn seems longer than it is until the meter has told.
fn bounds(case: &str, device: Discipline) -> Bounds {
    let (mean, second, least) = match (case, device == SLICES) {
        ("kernel time steps 1, 4, 0.5", _) => (0.6, 7.0, 95.0),
        ("kernel time sine +-80 %", _) => (0.5, 3.0, 90.0),
        ("25/25/50", true) => (2.0, 6.0, 75.0),
        (_, true) => (1.2, 4.0, 80.0),
        ("25/25/50", false) => (0.8, 3.0, 95.0),
        (_, false) => (0.5, 3.0, 95.0),
    };
    Bounds { mean, second, first: least..=110.0 }
}

#[test]
fn cases_40_to_45_a_container_gets_its_share_whatever_it_launches_and_whoever_is_beside_it() {
    for device in [Discipline::Submission, SLICES] {
        for case in cases() {
            let bounds = bounds(case.name, device);
            let setting = Setting { device, meter: Some(Meter::default()), bounds: bounds.clone() };
            let worst = case.run(&setting, 1..2, 4).worst;
            assert!(worst.is_within(&bounds), "{} on {device:?}: {worst:?}", case.name);
        }
    }
}

/// Whole percents are less than what event pairs know where nobody else's work lies between them.
#[test]
fn a_meter_makes_no_share_worse_that_is_exact_without_it() {
    let bounds = Bounds { mean: 0.5, second: 3.0, first: 95.0..=110.0 };
    let is_steady = |name: &str| !name.starts_with("kernel time") && name != "25/25/50";
    for case in cases().into_iter().filter(|case| is_steady(case.name)) {
        for meter in [None, Some(Meter::default())] {
            let setting = Setting { device: Discipline::Submission, meter, bounds: bounds.clone() };
            let summary = case.run(&setting, 1..2, 4);
            assert_eq!(summary.misses, 0, "{}, {meter:?}: {:?}", case.name, summary.worst);
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
