//! What containers get of a card in virtual time, with the figures that are promised.

mod card;

use card::{Work, World};
use gpushare_schedule::Policy;
use gpushare_schedule::frame::Frame;

/// A card whose `fixed` containers have windows of these per cents, one behind the other, each with programs.
fn fixed(shares: &[(u32, &[Work])]) -> World {
    let frame = Frame::for_windows(shares.len());
    let lengths: Vec<u32> = shares.iter().map(|(share, _)| frame.share(*share)).collect();
    let places = frame.packed(&lengths).expect("they fit");
    let mut world = World::new(frame);
    for ((_, works), place) in shares.iter().zip(places) {
        let _ = world.add(Policy::Fixed(place), works);
    }
    world
}

fn burst(shares: &[(u32, &[Work])]) -> World {
    let mut world = World::new(Frame::SHORT);
    for (share, works) in shares {
        let _ = world.add(Policy::Burst { share: *share, ceiling: 100 }, works);
    }
    world
}

/// What these programs get of a card by themselves.
fn solo(works: &[Work]) -> f64 {
    let mut world = World::new(Frame::SHORT);
    let lease = world.add_free(Policy::Unlimited, works);
    world.run(3);
    world.mean(lease) / 100.0
}

/// The means of all containers, after six seconds of which the first does not count.
fn means(world: &mut World) -> Vec<f64> {
    world.run(6);
    let leases: Vec<i64> = world.tenants.iter().map(|tenant| tenant.lease).collect();
    leases.into_iter().map(|lease| world.mean(lease)).collect()
}

const ENDLESS: &[Work] = &[Work::Endless];
const FOUR: &[Work] = &[Work::Endless; 4];
const WAITING: &[Work] = &[Work::Waits(1_000, 20)];

#[test]
fn fixed_shares_are_held_in_the_mean_and_in_every_second() {
    let cases: &[&[(u32, &[Work])]] = &[
        &[(30, ENDLESS), (70, ENDLESS)],
        &[(30, ENDLESS), (60, ENDLESS)],
        &[(10, ENDLESS), (90, ENDLESS)],
        &[(25, ENDLESS), (25, ENDLESS), (50, ENDLESS)],
        &[(20, ENDLESS); 5],
        &[(30, WAITING), (70, ENDLESS)],
        &[(30, WAITING), (70, WAITING)],
        &[(30, ENDLESS), (70, FOUR)],
        &[(30, FOUR), (70, ENDLESS)],
        &[(30, ENDLESS)],
    ];
    for case in cases {
        let mut world = fixed(case);
        let means = means(&mut world);
        let (mut sum, mut promised) = (0.0, 0.0);
        for ((tenant, (share, works)), mean) in world.tenants.iter().zip(*case).zip(&means) {
            let (mean, share) = (*mean, f64::from(*share));
            let alone = solo(works);
            let want = share * alone;
            assert!((mean - want).abs() <= 1.0, "{share} got {mean} of {want}: {means:?}");
            for second in world.seconds(tenant.lease) {
                assert!((second - want).abs() <= 3.0, "{share} got {second} of {want} in a second");
            }
            sum += mean / alone;
            promised += share;
        }
        assert!(sum >= promised * 0.97, "{sum} of {promised}");
        println!("{:?} {means:.1?}", case.iter().map(|(share, _)| share).collect::<Vec<_>>());
    }
}

/// A container's programs: so many that are busy, and idle ones.
fn programs(busy: usize, idle: usize) -> Vec<Work> {
    [vec![Work::Endless; busy], vec![Work::Idle; idle]].concat()
}

#[test]
fn burst_shares_are_held_whatever_the_number_of_programs() {
    // Shares, busy and idle programs of each, how much each may lack, and the least sum.
    type Case = (&'static [(u32, usize, usize)], &'static [f64], f64);
    let cases: &[Case] = &[
        (&[(30, 1, 0), (70, 1, 0)], &[2.0, 2.0], 96.0),
        (&[(20, 1, 0), (20, 1, 0), (20, 1, 0), (20, 1, 0), (20, 1, 0)], &[2.0; 5], 96.0),
        (&[(30, 1, 2), (70, 1, 0)], &[2.0, 2.0], 96.0),
        (&[(30, 2, 0), (70, 1, 0)], &[2.5, 2.0], 95.0),
        (&[(30, 1, 0), (70, 2, 0)], &[2.0, 2.5], 95.0),
        (&[(30, 4, 0), (70, 1, 0)], &[2.5, 2.0], 94.0),
        (&[(30, 1, 0), (70, 4, 0)], &[2.0, 2.5], 94.0),
        (&[(30, 8, 0), (70, 1, 0)], &[6.0, 2.0], 90.0),
        (&[(30, 1, 0), (70, 8, 0)], &[2.0, 6.0], 90.0),
        (&[(30, 1, 0), (70, 16, 0)], &[2.0, 20.0], 80.0),
        (&[(30, 16, 0), (70, 1, 0)], &[12.0, 2.0], 80.0),
        (&[(30, 1, 0)], &[-69.5], 99.5),
    ];
    for (shares, lacks, least) in cases {
        let works: Vec<Vec<Work>> = shares.iter().map(|(_, busy, idle)| programs(*busy, *idle)).collect();
        let named: Vec<(u32, &[Work])> =
            shares.iter().zip(&works).map(|((share, ..), works)| (*share, works.as_slice())).collect();
        let mut world = burst(&named);
        let means: Vec<f64> =
            means(&mut world).iter().zip(&works).map(|(mean, works)| mean / solo(works)).collect();
        println!("{shares:?} {means:.1?} {}", world.calls_made);
        for (((share, ..), lack), mean) in shares.iter().zip(*lacks).zip(&means) {
            assert!(f64::from(*share) - mean <= *lack, "{shares:?}: {means:.1?}");
        }
        assert!(means.iter().sum::<f64>() >= *least, "{shares:?}: {means:.1?}");
    }
}

/// Nobody starves beside windows, and what a window's owner does not need goes to those without one.
#[test]
fn containers_without_a_window_live_beside_those_with_one() {
    let frame = Frame::SHORT;
    let windows = frame.packed(&[frame.share(30), frame.share(65)]).expect("they fit");
    let room = frame.room(true);
    assert!(windows.iter().flatten().map(|piece| piece.length).sum::<u32>() <= room);
    for other in [Policy::Unlimited, Policy::Burst { share: 5, ceiling: 100 }] {
        let mut world = World::new(frame);
        for place in &windows {
            let _ = world.add(Policy::Fixed(place.clone()), ENDLESS);
        }
        let _ = world.add(other, ENDLESS);
        let means = means(&mut world);
        println!("{means:.1?}");
        assert!((means[0] - 30.0).abs() <= 1.0 && (means[1] - 65.0).abs() <= 1.0, "{means:?}");
        assert!(means[2] >= 4.0, "{means:?}");
    }
    // While the container with 30 has no program, the others have its window.
    let mut world = World::new(frame);
    let _ = world.add(Policy::Fixed(windows[0].clone()), &[]);
    let _ = world.add(Policy::Fixed(windows[1].clone()), ENDLESS);
    let _ = world.add(Policy::Burst { share: 5, ceiling: 100 }, ENDLESS);
    let means = means(&mut world);
    assert!(means[0] == 0.0 && (means[1] - 65.0).abs() <= 1.0 && means[2] >= 33.0, "{means:?}");
}

/// A ceiling is a cap, and a share below it is held.
#[test]
fn a_ceiling_caps_and_keeps_the_share() {
    let capped = Policy::Burst { share: 30, ceiling: 60 };
    let mut alone = World::new(Frame::SHORT);
    let _ = alone.add(capped.clone(), ENDLESS);
    let mean = means(&mut alone)[0];
    assert!((mean - 60.0).abs() <= 1.0, "{mean}");
    let mut two = World::new(Frame::SHORT);
    let _ = two.add(capped, ENDLESS);
    let _ = two.add(Policy::Burst { share: 70, ceiling: 100 }, ENDLESS);
    let means = means(&mut two);
    println!("{means:.1?}");
    assert!(30.0 - means[0] <= 2.0 && 70.0 - means[1] <= 2.0, "{means:?}");
}

/// Every twentieth time a supervisor wakes up late, by up to 5 ms.
#[test]
fn late_supervisors_cost_little() {
    for seed in [1, 2, 3] {
        let mut world = fixed(&[(30, ENDLESS), (70, ENDLESS)]);
        world.late = Some(seed);
        let means = means(&mut world);
        println!("{means:.1?}");
        assert!((means[0] - 30.0).abs() <= 1.5 && (means[1] - 70.0).abs() <= 1.5, "seed {seed}: {means:?}");
        for (lease, want) in [(1, 30.0), (2, 70.0)] {
            let seconds = world.seconds(lease);
            assert!(seconds.iter().all(|second| (second - want).abs() <= 4.0), "seed {seed}: {seconds:?}");
        }
    }
}

/// A container whose contexts come and go a hundred times in a second takes nothing of the others' guarantees.
#[test]
fn contexts_that_come_and_go_starve_nobody() {
    let mut world = fixed(&[(30, ENDLESS), (60, ENDLESS)]);
    let _ = world.add(Policy::Burst { share: 10, ceiling: 100 }, ENDLESS);
    for round in 0..500u64 {
        world.tenants[0].is_present = round % 2 == 0;
        world.run_micros(10_000);
    }
    let (steady, rest) = (world.mean(2), world.mean(3));
    println!("{steady:.1} {rest:.1}");
    assert!((steady - 60.0).abs() <= 1.5, "{steady}");
    assert!(rest >= 9.0, "{rest}");
}
