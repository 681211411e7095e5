//! Tests the compute share in virtual time, with some of the runs of `make bench`.

use gpushare_intercept_trial::{
    Bounds, Container, Discipline, Estimates, Load, MILLISECOND, Setting, Trial, cases,
};

const SLICES: Discipline = Discipline::Slices(2 * MILLISECOND);

/// A kernel of 40 ms is four points of a second.
fn bounds(case: &str) -> Bounds {
    let (mean, second, least) = match case {
        "kernel time steps 1, 4, 0.5" => (0.5, 7.0, 95.0),
        // Several processes start one after the other.
        "2 processes" | "4 processes" => (0.5, 3.0, 70.0),
        _ => (0.5, 3.0, 95.0),
    };
    Bounds { mean, second, first: least..=110.0 }
}

#[test]
fn cases_40_to_45_a_container_gets_its_share_whatever_it_launches() {
    for device in [Discipline::Submission, SLICES] {
        let is_tried = |runs: &[Vec<Container>]| device != SLICES || runs.iter().all(|run| run.len() == 1);
        for case in cases().into_iter().filter(|case| is_tried(&case.runs)) {
            let bounds = bounds(case.name);
            let worst = case.run(&Setting { device, bounds: bounds.clone() }, 1..2, 4).worst;
            assert!(worst.is_within(&bounds), "{} on {device:?}: {worst:?}", case.name);
        }
    }
}

/// Kernels that outlast a turn are measured too long, so a container that shares with busy ones falls short
/// of its share. None exceeds it.
#[test]
fn in_turns_with_others_nobody_has_more_than_its_share_and_each_more_than_half_of_it() {
    for case in cases() {
        for containers in case.runs.iter().step_by(4).filter(|run| run.len() > 1) {
            let cores: Vec<f64> = containers.iter().map(|one| f64::from(one.cores)).collect();
            let figures = Trial::new(containers.clone(), SLICES, 1).run();
            for (figures, cores) in figures.iter().zip(cores) {
                let part = (cores + figures.mean) / cores;
                assert!((0.5..=1.01).contains(&part), "{}: {part} of {cores}: {figures:?}", case.name);
            }
        }
    }
}

/// The negative control. Without it the other tests would prove nothing: they could pass on a device on which
/// every limiter looks right.
#[test]
fn a_limiter_that_learns_nothing_fails_by_far() {
    let container = Container::fixed(25, 1, Load::steady(10 * MILLISECOND, 0));
    let learns = Trial { seconds: 3, ..Trial::new(vec![container], SLICES, 1) };
    let pinned = Trial { estimates: Estimates::Pinned, ..learns.clone() };
    let [learns, pinned] = [learns, pinned].map(|trial| trial.run()[0].clone());
    assert!(pinned.first > 300.0 && pinned.mean > 50.0, "pinned: {pinned:?}");
    assert!(learns.first < 110.0 && learns.mean < 2.0, "learns: {learns:?}");
}

/// Case 46: a container is refilled by wall time. A program that wants less than its share is not slowed
/// down, and an idle one does not burst.
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
