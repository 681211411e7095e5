use core::sync::atomic::Ordering::Relaxed;

use super::*;

const KERNEL: Key = Key::kernel(0x1000, [1, 1, 1], [1, 1, 1]);
const OTHER: Key = Key::kernel(0x2000, [1, 1, 1], [1, 1, 1]);

/// One process and its books.
#[derive(Default)]
struct Bench {
    line: LimitLine,
    bucket: Bucket,
    credit: Credit,
    limiter: Box<Limiter>,
    now: u64,
}

impl Bench {
    fn new(cores: u32) -> Self {
        let bench = Self { now: 1_000 * MILLISECOND, ..Self::default() };
        bench.line.policy.store(1, Relaxed);
        bench.line.cores_percent.store(cores, Relaxed);
        bench
    }

    fn ask(&mut self, key: Key, timing: impl FnMut(usize) -> Timing) -> Answer {
        let Self { line, bucket, credit, limiter, now } = self;
        let ground = Ground { line, bucket, credit, capturing: false };
        limiter.ask(&ground, key, *now, timing)
    }

    /// Asks until the launch may go. Returns its pair and the time that this took.
    fn admit(&mut self, key: Key, mut timing: impl FnMut(usize, u64) -> Timing) -> (usize, u64) {
        let start = self.now;
        loop {
            let now = self.now;
            match self.ask(key, |pair| timing(pair, now)) {
                Answer::Timed(pair) => return (pair, self.now - start),
                Answer::Queued(nap) | Answer::HeldBack(nap) => self.now += nap,
                Answer::Free => panic!("not limited"),
            }
            assert!(self.now - start < 100_000 * MILLISECOND, "for ever");
        }
    }

    fn level(&self) -> i64 {
        self.bucket.nanoseconds.load(Relaxed).cast_signed()
    }
}

#[test]
fn a_launch_costs_what_the_last_ones_of_its_kind_took() {
    let mut bench = Bench::new(50);
    for _ in 0..8 {
        let (pair, _) = bench.admit(KERNEL, |_, _| Timing::Took(3 * MILLISECOND));
        bench.limiter.launched(pair, Some(0));
    }
    let start = bench.now;
    for _ in 0..100 {
        let (pair, _) = bench.admit(KERNEL, |_, _| Timing::Took(3 * MILLISECOND));
        bench.limiter.launched(pair, Some(0));
    }
    let each = (bench.now - start) / 100;
    assert!(each.abs_diff(6 * MILLISECOND) < MILLISECOND / 10, "3 ms at 50 % each {each} ns");
}

#[test]
fn a_refused_launch_costs_nothing() {
    let mut bench = Bench::new(50);
    let (pair, _) = bench.admit(KERNEL, |_, _| Timing::Lost);
    bench.limiter.refused(pair);
    let level = bench.level();
    for _ in 0..100 {
        let (pair, waited) = bench.admit(KERNEL, |_, _| Timing::Lost);
        assert_eq!(waited, 0, "what the first has drawn is there");
        bench.limiter.refused(pair);
    }
    assert_eq!(bench.level(), level);
}

/// A stream may wait for a later launch of this same thread.
#[test]
#[cfg_attr(miri, ignore = "takes long, without unsafe code or threads")]
fn work_that_never_ends_holds_launches_up_once_and_not_for_ever() {
    let mut bench = Bench::new(90);
    let (pair, _) = bench.admit(KERNEL, |_, _| Timing::Running);
    bench.limiter.launched(pair, Some(0));
    let (pair, waited) = bench.admit(KERNEL, |_, _| Timing::Running);
    bench.limiter.launched(pair, Some(0));
    assert!((PATIENCE..PATIENCE + 20 * MILLISECOND).contains(&waited), "{waited} ns");
    // The second launch is waited for once more. After that, launches in a running stream wait only for the
    // share.
    let mut total = 0;
    for _ in 0..200 {
        let (pair, waited) =
            bench.admit(OTHER, |pair, _| if pair < 2 { Timing::Running } else { Timing::Took(MILLISECOND) });
        bench.limiter.launched(pair, Some(0));
        total += waited;
    }
    let share = 200 * MILLISECOND * 10 / 9;
    assert!(total < PATIENCE + share + 20 * MILLISECOND, "200 launches of 1 ms at 90 % waited {total} ns");
}

/// A stream may wait for the host or for another process for any length of time.
#[test]
#[cfg_attr(miri, ignore = "takes long, without unsafe code or threads")]
fn a_stream_that_stands_still_does_not_take_the_share_from_the_others() {
    let mut bench = Bench::new(50);
    let begin = bench.now;
    let (mut gate, mut launches, mut longest) = (begin + 100 * MILLISECOND, 0_u64, 0);
    let mut ends = [(0, 0); TIMED];
    while bench.now < begin + 3_000 * MILLISECOND {
        let gated = bench.now >= gate;
        let (key, length, delay) = match gated {
            true => (OTHER, MILLISECOND / 10, 290 * MILLISECOND),
            false => (KERNEL, MILLISECOND, 0),
        };
        if !bench.credit.spend(key) {
            let (pair, waited) = bench.admit(key, |pair, now| match ends[pair] {
                (end, time) if now >= end => Timing::Took(time),
                _ => Timing::Running,
            });
            longest = longest.max(waited);
            ends[pair] = (bench.now + length + delay, length);
            bench.limiter.launched(pair, Some(0));
        }
        if gated {
            gate = bench.now + 300 * MILLISECOND;
        } else {
            bench.now += length; // waits for its own stream
            launches += 1;
        }
    }
    assert!((1_440..=1_530).contains(&launches), "{launches} launches of 1 ms in 3 s at 50 %");
    assert!(longest < 50 * MILLISECOND, "one waited {longest} ns");
}

/// A thread that loses the processor in every third launch, or whose driver refuses or loses the launch.
#[test]
#[cfg_attr(miri, ignore = "takes long, without unsafe code or threads")]
fn a_launch_that_cannot_be_timed_says_nothing_about_those_before_it() {
    type Third = fn(&mut Limiter, usize);
    for (what, third) in [
        ("in time", (|limiter, pair| limiter.launched(pair, Some(0))) as Third),
        ("late", |limiter, pair| limiter.launched(pair, Some(MILLISECOND))),
        ("not recorded", |limiter, pair| limiter.launched(pair, None)),
        ("refused", |limiter, pair| limiter.refused(pair)),
        ("lost", |limiter, pair| limiter.lost(pair)),
    ] {
        let mut bench = Bench::new(99);
        bench.limiter.costs.add(KERNEL, 2 * MILLISECOND);
        bench.bucket.nanoseconds.store(400_000_000, Relaxed);
        let (begin, mut launched) = (bench.now, 0);
        while bench.now < begin + PATIENCE - 50 * MILLISECOND {
            match bench.ask(KERNEL, |_| Timing::Running) {
                Answer::Timed(pair) if launched % 3 == 2 => {
                    third(&mut bench.limiter, pair);
                    launched += 1;
                }
                Answer::Timed(pair) => {
                    bench.limiter.launched(pair, Some(0));
                    launched += 1;
                }
                Answer::Queued(nap) | Answer::HeldBack(nap) => bench.now += nap,
                Answer::Free => panic!("not limited"),
            }
        }
        // Refused launches do not count.
        assert!((6..=11).contains(&launched), "{what}: {launched} launches of 2 ms are unfinished");
    }
}

#[test]
#[cfg_attr(miri, ignore = "takes long, without unsafe code or threads")]
fn as_many_launches_as_there_are_pairs_may_stand_still() {
    let mut bench = Bench::new(99);
    for _ in 0..4 * TIMED {
        let (pair, _) = bench.admit(KERNEL, |_, _| Timing::Running);
        bench.limiter.launched(pair, Some(0));
    }
}

#[test]
fn a_long_kernel_is_paid_for_after_it_even_if_nothing_was_known_of_it() {
    let mut bench = Bench::new(25);
    let (pair, _) = bench.admit(KERNEL, |_, _| Timing::Running);
    bench.limiter.launched(pair, Some(0));
    bench.now += 400 * MILLISECOND;
    let (_, waited) = bench.admit(OTHER, |_, _| Timing::Took(400 * MILLISECOND));
    let whole = 400 * MILLISECOND + waited;
    assert!(whole.abs_diff(1_600 * MILLISECOND) < 30 * MILLISECOND, "400 ms at 25 % every {whole} ns");
}

#[test]
fn a_late_timing_of_a_known_kind_teaches_nothing() {
    let mut bench = Bench::new(50);
    let took = |_, _| Timing::Took(MILLISECOND);
    for _ in 0..4 {
        let (pair, _) = bench.admit(KERNEL, took);
        bench.limiter.launched(pair, Some(0));
    }
    let cost = bench.limiter.costs.cost(KERNEL);
    for _ in 0..4 {
        let (pair, _) = bench.admit(KERNEL, |_, _| Timing::Took(5 * MILLISECOND));
        bench.limiter.launched(pair, Some(4 * MILLISECOND));
    }
    // One launch from before the late ones counts.
    assert!(bench.limiter.costs.cost(KERNEL) <= cost.map(|cost| 2 * cost));
}

#[test]
fn whatever_the_tenant_writes_and_the_device_says_is_computed_with() {
    for bytes in [u64::MAX, u64::MAX / 2, 1 << 63, 1 << 40, 1] {
        let mut bench = Bench::new(30);
        for (index, time) in [bytes, 0, 1, bytes.rotate_left(3)].into_iter().enumerate() {
            let bucket = &bench.bucket;
            for word in [&bucket.nanoseconds, &bucket.refilled] {
                word.store(bytes.rotate_left(u32::try_from(index).unwrap_or(0) * 13), Relaxed);
            }
            bench.now += 60 * MILLISECOND;
            if let Answer::Timed(pair) = bench.ask(KERNEL, |_| Timing::Took(time)) {
                bench.limiter.launched(pair, Some(bytes));
            }
        }
    }
}
