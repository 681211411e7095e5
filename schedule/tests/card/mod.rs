//! A card in virtual time, with the physics that were measured on an H200 (driver 580): a slice runs 1.02 times what
//! was asked, a switch costs 185 µs of work, or 110 when the group that leaves has none, a stop takes hold 240 µs into a
//! call of 500, a start 270 into one of 300, and calls to one card wait for each other.

use std::collections::BTreeMap;

use gpushare_schedule::frame::Frame;
use gpushare_schedule::windows::Overrun;
use gpushare_schedule::{Card, Policy, Tenant};

const SWITCH: u64 = 185;
const SWITCH_IDLE: u64 = 110;
const SECOND: u64 = 1_000_000;
/// What libcuda asks for.
const SLICE: u64 = 2_048;
/// A group that held the engine within this time works.
const WORKS: u64 = 100_000;

/// What a program does with the card.
#[derive(Clone, Copy)]
pub enum Work {
    /// There is always more of it.
    Endless,
    /// Kernels of the first length, each followed by a pause of the second.
    Waits(u64, u64),
    /// None.
    Idle,
}

/// A channel group.
struct Group {
    lease: i64,
    work: Work,
    /// Work that is left of this kernel; 0 while the program pauses.
    left: u64,
    /// When it has work again.
    again: u64,
    slice: u64,
    /// Whether it is in its container's window.
    in_window: bool,
    /// Whether it is its turn among its container's groups.
    has_turn: bool,
    last: Option<u64>,
    /// Microseconds of work in each second.
    done: Vec<u64>,
}

impl Group {
    fn runs(&self) -> bool {
        self.in_window && self.has_turn
    }

    fn has_work(&self, now: u64) -> bool {
        let has = match self.work {
            Work::Idle => false,
            Work::Endless => true,
            Work::Waits(..) => self.left > 0 || self.again <= now,
        };
        has && self.runs()
    }
}

/// A call to the card.
struct Call {
    at: u64,
    lease: i64,
    what: What,
}

enum What {
    Run(bool),
    /// Which of the container's working groups run, from the first on, and their slice.
    Slices {
        slice: u64,
        first: usize,
        count: usize,
    },
}

/// A container's supervisor.
struct Supervisor {
    lease: i64,
    runs: Option<bool>,
    next: u64,
    next_slices: u64,
    sent: Option<(u64, usize, usize)>,
    overrun: Overrun,
}

/// A card, its containers and their supervisors.
pub struct World {
    pub frame: Frame,
    pub tenants: Vec<Tenant>,
    groups: Vec<Group>,
    supervisors: Vec<Supervisor>,
    calls: Vec<Call>,
    /// When the last call returns.
    free_at: u64,
    now: u64,
    current: Option<usize>,
    slice_ends: u64,
    /// A pause while the card switches.
    busy_until: u64,
    pub calls_made: u64,
    /// The seed of late wake-ups.
    pub late: Option<u64>,
}

impl World {
    pub fn new(frame: Frame) -> Self {
        Self {
            frame,
            tenants: Vec::new(),
            groups: Vec::new(),
            supervisors: Vec::new(),
            calls: Vec::new(),
            free_at: 0,
            now: 0,
            current: None,
            slice_ends: 0,
            busy_until: 0,
            calls_made: 0,
            late: None,
        }
    }

    /// Adds a container whose programs do this, each in a group of its own.
    pub fn add(&mut self, policy: Policy, works: &[Work]) -> i64 {
        let lease = self.add_free(policy, works);
        self.supervisors.push(Supervisor {
            lease,
            runs: None,
            next: 0,
            next_slices: 0,
            sent: None,
            overrun: Overrun::default(),
        });
        lease
    }

    /// Adds one without a supervisor.
    pub fn add_free(&mut self, policy: Policy, works: &[Work]) -> i64 {
        let lease = i64::try_from(self.tenants.len()).unwrap_or(0) + 1;
        let is_present = !works.is_empty();
        self.tenants.push(Tenant { lease, policy, is_present, working: 0 });
        for work in works {
            let left = if let Work::Waits(kernel, _) = work { *kernel } else { 0 };
            self.groups.push(Group {
                lease,
                work: *work,
                left,
                again: 0,
                slice: SLICE,
                in_window: true,
                has_turn: true,
                last: None,
                done: Vec::new(),
            });
        }
        lease
    }

    /// Lets so many seconds pass.
    pub fn run(&mut self, seconds: u64) {
        self.run_micros(seconds * SECOND);
    }

    /// Lets so many microseconds pass.
    pub fn run_micros(&mut self, micros: u64) {
        let end = self.now + micros;
        while self.now < end {
            self.supervise();
            self.take_effect();
            self.choose();
            let next = self.next_event().min(end).max(self.now + 1);
            self.pass(next);
        }
    }

    fn supervise(&mut self) {
        let now = self.now;
        for tenant in &mut self.tenants {
            // One whose turn it is not worked when it was stopped.
            let works = |group: &&Group| {
                let did = group.last.is_some_and(|last| now - last < WORKS);
                group.lease == tenant.lease && (did || !group.has_turn)
            };
            tenant.working = u32::try_from(self.groups.iter().filter(works).count()).unwrap_or(0);
        }
        let card = Card { frame: self.frame, tenants: &self.tenants };
        for one in &mut self.supervisors {
            if one.next <= now {
                let stretch = card.stretch(one.lease, now, 1, &mut one.overrun);
                one.next = stretch.until + self.late.as_mut().map_or(0, lateness);
                if one.runs.unwrap_or(true) != stretch.runs {
                    let (takes, effect) = if stretch.runs { (300, 270) } else { (500, 240) };
                    let begin = self.free_at.max(now);
                    self.free_at = begin + takes;
                    self.calls_made += 1;
                    self.calls.push(Call {
                        at: begin + effect,
                        lease: one.lease,
                        what: What::Run(stretch.runs),
                    });
                }
                one.runs = Some(stretch.runs);
            }
            if one.next_slices <= now {
                one.next_slices = now + 100_000;
                let Some(slices) = card.slices(one.lease) else { continue };
                let working =
                    card.tenants.iter().find(|tenant| tenant.lease == one.lease).map_or(0, |one| one.working);
                let (first, count) = slices.turn(working, now).unwrap_or((0, u32::MAX));
                let slices = (u64::from(slices.slice), first as usize, count as usize);
                if one.sent != Some(slices) {
                    one.sent = Some(slices);
                    let begin = self.free_at.max(now);
                    self.free_at = begin + 250;
                    self.calls_made += 1;
                    let (slice, first, count) = slices;
                    self.calls.push(Call {
                        at: begin + 250,
                        lease: one.lease,
                        what: What::Slices { slice, first, count },
                    });
                }
            }
        }
    }

    fn take_effect(&mut self) {
        let (now, due): (u64, Vec<Call>) = {
            let now = self.now;
            let (due, later) = std::mem::take(&mut self.calls).into_iter().partition(|call| call.at <= now);
            self.calls = later;
            (now, due)
        };
        for call in due {
            let own = self.groups.iter_mut().filter(|group| group.lease == call.lease);
            match call.what {
                What::Run(runs) => own.for_each(|group| group.in_window = runs),
                What::Slices { slice, first, count } => {
                    let own: Vec<&mut Group> = own.collect();
                    let all = own.len().max(1);
                    for (at, group) in own.into_iter().enumerate() {
                        group.slice = slice;
                        group.has_turn = count >= all || (at + all - first % all) % all < count;
                    }
                }
            }
        }
        if let Some(current) = self.current
            && !self.groups[current].runs()
        {
            self.leave(now, SWITCH);
        }
    }

    /// Takes the current group off the card.
    fn leave(&mut self, now: u64, cost: u64) {
        self.current = None;
        self.busy_until = now + cost;
    }

    fn choose(&mut self) {
        let now = self.now;
        if let Some(current) = self.current {
            let others = (0..self.groups.len()).any(|at| at != current && self.groups[at].has_work(now));
            if !self.groups[current].has_work(now) {
                // An idle group stays until another one has work.
                if others {
                    self.leave(now, SWITCH_IDLE);
                }
            } else if self.slice_ends <= now {
                if others {
                    self.order(current);
                    self.leave(now, SWITCH);
                } else {
                    self.slice_ends = now + self.groups[current].slice * 102 / 100;
                }
            }
        }
        if self.current.is_none() && self.busy_until <= now {
            self.current = (0..self.groups.len()).find(|at| self.groups[*at].has_work(now));
            if let Some(current) = self.current {
                self.slice_ends = now + self.groups[current].slice * 102 / 100;
            }
        }
    }

    /// Puts a group behind all others.
    fn order(&mut self, group: usize) {
        let moved = self.groups.remove(group);
        self.groups.push(moved);
    }

    fn next_event(&self) -> u64 {
        let now = self.now;
        let mut next = u64::MAX;
        let mut at = |time: u64| {
            if time > now {
                next = next.min(time);
            }
        };
        self.calls.iter().for_each(|call| at(call.at));
        self.supervisors.iter().for_each(|one| {
            at(one.next);
            at(one.next_slices);
        });
        at(self.busy_until);
        if let Some(current) = self.current {
            at(self.slice_ends);
            if let (Work::Waits(kernel, _), left) = (self.groups[current].work, self.groups[current].left) {
                at(now + if left > 0 { left } else { kernel });
            }
        }
        self.groups.iter().for_each(|group| at(group.again));
        next
    }

    /// Lets the card work until `next`.
    fn pass(&mut self, next: u64) {
        let took = next - self.now;
        let now = self.now;
        if let Some(current) = self.current.filter(|current| self.groups[*current].has_work(now)) {
            let group = &mut self.groups[current];
            if let (Work::Waits(kernel, _), 0) = (group.work, group.left) {
                group.left = kernel;
            }
            group.last = Some(now);
            let second = usize::try_from(now / SECOND).unwrap_or(0);
            if group.done.len() <= second {
                group.done.resize(second + 1, 0);
            }
            let mut worked = took;
            if let Work::Waits(_, pause) = group.work {
                worked = took.min(group.left);
                group.left -= worked;
                if group.left == 0 {
                    group.again = now + worked + pause;
                }
            }
            group.done[second] += worked;
        }
        self.now = next;
    }

    /// Per cent of the card that a container had in each second but the first.
    pub fn seconds(&self, lease: i64) -> Vec<f64> {
        let mut seconds: BTreeMap<usize, u64> = BTreeMap::new();
        let all = usize::try_from(self.now / SECOND).unwrap_or(0);
        for group in self.groups.iter().filter(|group| group.lease == lease) {
            for second in 1..all {
                *seconds.entry(second).or_default() += group.done.get(second).copied().unwrap_or(0);
            }
        }
        seconds.into_values().map(|micros| micros as f64 / SECOND as f64 * 100.0).collect()
    }

    /// The mean of these seconds.
    pub fn mean(&self, lease: i64) -> f64 {
        let seconds = self.seconds(lease);
        seconds.iter().sum::<f64>() / seconds.len().max(1) as f64
    }
}

/// How late the next wake-up is: mostly not at all.
fn lateness(seed: &mut u64) -> u64 {
    // xorshift64 (Marsaglia, 2003).
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    if seed.is_multiple_of(20) { *seed / 20 % 5_000 } else { 0 }
}
