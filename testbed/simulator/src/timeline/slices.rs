//! A GPU that slices: processes with work take turns, and a kernel is cut where its turn ends.
//!
//! A process's work is a line of nanoseconds of GPU time, in the order of submission. Each query by a process
//! computes and records the GPU's progress since the last one. No end is known at submission.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::runs::{extensible, run};
use crate::clock;
use crate::lock::Owner;
use crate::session::Session;
use crate::state::{Gpu, Line, SLOTS, STAMPS, Stamp};

/// A place on a process's line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The process that owns the line.
    pub owner: Owner,
    /// Nanoseconds of GPU time from the line's begin.
    pub position: u64,
}

/// Moment that the GPU stamps, in nanoseconds of the device clock; 0 until the GPU has reached its place.
pub type Moment = Arc<AtomicU64>;

/// The moments that this process has requested from one GPU and has not read yet, in the order of its line.
#[derive(Default)]
pub struct Asked(Mutex<VecDeque<Moment>>);

fn line(gpu: &Gpu, slot: u32) -> &Line {
    &gpu.lines[slot as usize % SLOTS]
}

fn stamp(gpu: &Gpu, slot: u32, number: u64) -> &Stamp {
    &gpu.stamps[slot as usize % SLOTS][usize::try_from(number).unwrap_or(0) % STAMPS]
}

impl Line {
    fn left(&self) -> u64 {
        self.queued.load(Ordering::Acquire).saturating_sub(self.ran.load(Ordering::Acquire))
    }

    /// Whether it has work and is not stopped.
    fn is_ready(&self) -> bool {
        self.left() > 0 && self.stopped.load(Ordering::Acquire) == 0
    }

    /// Assigns the line to a slot's next owner, unless that has happened already.
    fn belong_to(&self, generation: u32) {
        if self.generation.load(Ordering::Relaxed) != generation {
            self.drop_rest();
            self.stopped.store(0, Ordering::Relaxed);
            self.slice.store(0, Ordering::Relaxed);
            self.generation.store(generation, Ordering::Release);
        }
    }

    /// Drops the work that has not run, and the stamps that were not written.
    fn drop_rest(&self) {
        self.queued.store(self.ran.load(Ordering::Relaxed), Ordering::Relaxed);
        self.asked.store(self.given.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

/// Queues `length` nanoseconds of work, and returns the place of its end.
pub fn submit(gpu: &Gpu, session: &Session, length: u64) -> Place {
    let _guard = session.lock(&gpu.time_lock);
    advance(gpu, session);
    place(gpu, session.owner, length)
}

/// Adds `length` nanoseconds to the owner's line. The caller holds the time lock and has advanced the GPU to
/// now.
fn place(gpu: &Gpu, owner: Owner, length: u64) -> Place {
    let line = line(gpu, owner.slot);
    line.belong_to(owner.generation);
    let position = line.queued.load(Ordering::Relaxed).saturating_add(length);
    line.queued.store(position, Ordering::Release);
    Place { owner, position }
}

/// Drops the queued work of a dead process that has not run. The caller holds the time lock.
pub fn cancel(gpu: &Gpu, session: &Session, dead: Owner) {
    advance(gpu, session);
    let line = line(gpu, dead.slot);
    if line.generation.load(Ordering::Relaxed) == dead.generation {
        line.drop_rest();
    }
}

/// Computes the GPU's work until now. The caller holds the time lock.
pub fn advance(gpu: &Gpu, session: &Session) {
    advance_to(gpu, session.state().used_slots(), clock::now());
}

fn advance_to(gpu: &Gpu, used: usize, now: u64) {
    let turns = &gpu.turns;
    if turns.pending.load(Ordering::Acquire) != 0 {
        carry_out(gpu);
    }
    let mut time = turns.time.load(Ordering::Relaxed);
    while time < now {
        let Some(Turn { slot, begin, end }) = turn(gpu, used, time) else { break };
        // Before the turn begins, the GPU switches and nothing runs.
        let start = begin.clamp(time, now);
        let length = line(gpu, slot).left().min(end - start).min(now - start);
        time = start + length;
        write_down(gpu, slot, length, time, end);
        carry_out(gpu);
    }
    turns.time.fetch_max(now, Ordering::Release);
}

/// One process's turn, in nanoseconds of the device clock.
struct Turn {
    slot: u32,
    /// When the GPU has switched to the process.
    begin: u64,
    /// The latest end of the turn.
    end: u64,
}

/// Returns the turn at `time`: the current one, or a new one for the next process with work.
fn turn(gpu: &Gpu, used: usize, time: u64) -> Option<Turn> {
    let turns = &gpu.turns;
    let (holder, end) = (turns.holder.load(Ordering::Relaxed), turns.end.load(Ordering::Relaxed));
    if time < end && line(gpu, holder).is_ready() {
        return Some(Turn { slot: holder, begin: end.saturating_sub(slice(gpu, holder)), end });
    }
    let slot = after(holder, used).find(|&slot| line(gpu, slot).is_ready())?;
    // The process that had the last turn is still resident.
    let switch = if slot == holder { 0 } else { turns.switch.load(Ordering::Relaxed) };
    let begin = time.saturating_add(switch);
    Some(Turn { slot, begin, end: begin.saturating_add(slice(gpu, slot)) })
}

/// Returns the length of a process's turns in nanoseconds.
fn slice(gpu: &Gpu, slot: u32) -> u64 {
    match line(gpu, slot).slice.load(Ordering::Relaxed) {
        0 => gpu.turns.slice.load(Ordering::Relaxed).max(1),
        own => own,
    }
}

/// Runs or stops a process, and sets the length of its turns in nanoseconds; 0: the GPU's default. A running
/// kernel is cut at once.
pub fn steer(gpu: &Gpu, session: &Session, owner: Owner, runs: bool, slice: u64) {
    let _guard = session.lock(&gpu.time_lock);
    advance(gpu, session);
    steer_now(gpu, owner, runs, slice);
}

fn steer_now(gpu: &Gpu, owner: Owner, runs: bool, slice: u64) {
    let line = line(gpu, owner.slot);
    line.belong_to(owner.generation);
    line.stopped.store(u32::from(!runs), Ordering::Release);
    line.slice.store(slice, Ordering::Release);
    if !runs && gpu.turns.holder.load(Ordering::Relaxed) == owner.slot {
        gpu.turns.end.store(0, Ordering::Relaxed); // the next turn begins with a switch
    }
}

/// Lists all slots in the order of turns; `holder` comes last.
fn after(holder: u32, used: usize) -> impl Iterator<Item = u32> {
    let used = u32::try_from(used).unwrap_or(u32::MAX);
    (holder.saturating_add(1)..used).chain(0..holder.saturating_add(1).min(used))
}

/// Records the step: `slot` works for `length` nanoseconds until `time`, in a turn that ends at `turn`. A
/// step of length zero records which process's turn has begun while the GPU still switches to it.
fn write_down(gpu: &Gpu, slot: u32, length: u64, time: u64, turn: u64) {
    let line = line(gpu, slot);
    let owner = Owner { slot, generation: line.generation.load(Ordering::Relaxed) };
    let begin = time - length;
    let (index, start, busy) = match extensible(gpu, owner, begin, time) {
        Some(index) => {
            let last = run(gpu, index);
            (index, last.start.load(Ordering::Relaxed), last.busy.load(Ordering::Relaxed) + length)
        }
        None => (gpu.run_count.load(Ordering::Relaxed), begin, length),
    };
    let step = &gpu.turns.step;
    step.slot.store(slot, Ordering::Relaxed);
    step.generation.store(owner.generation, Ordering::Relaxed);
    step.time.store(time, Ordering::Relaxed);
    step.turn.store(turn, Ordering::Relaxed);
    step.ran.store(line.ran.load(Ordering::Relaxed) + length, Ordering::Relaxed);
    step.run.store(index, Ordering::Relaxed);
    step.start.store(start, Ordering::Relaxed);
    step.busy.store(busy, Ordering::Relaxed);
    gpu.turns.pending.store(1, Ordering::Release);
}

/// Carries out the recorded step.
fn carry_out(gpu: &Gpu) {
    let (turns, step) = (&gpu.turns, &gpu.turns.step);
    let (slot, time) = (step.slot.load(Ordering::Relaxed), step.time.load(Ordering::Relaxed));
    let ran = step.ran.load(Ordering::Relaxed);
    give_stamps(gpu, slot, ran, time);
    line(gpu, slot).ran.store(ran, Ordering::Release);
    let index = step.run.load(Ordering::Relaxed);
    let run = run(gpu, index);
    run.start.store(step.start.load(Ordering::Relaxed), Ordering::Relaxed);
    run.end.store(time, Ordering::Relaxed);
    run.busy.store(step.busy.load(Ordering::Relaxed), Ordering::Relaxed);
    run.slot.store(slot, Ordering::Relaxed);
    run.generation.store(step.generation.load(Ordering::Relaxed), Ordering::Relaxed);
    gpu.run_count.fetch_max(index + 1, Ordering::Release);
    turns.holder.store(slot, Ordering::Relaxed);
    turns.end.store(step.turn.load(Ordering::Relaxed), Ordering::Relaxed);
    turns.time.store(time, Ordering::Release);
    turns.pending.store(0, Ordering::Release);
}

/// Writes the stamps of all places up to `ran`, which the GPU reached at `time`.
fn give_stamps(gpu: &Gpu, slot: u32, ran: u64, time: u64) {
    let line = line(gpu, slot);
    let asked = line.asked.load(Ordering::Relaxed);
    let mut given = line.given.load(Ordering::Relaxed);
    while given < asked {
        let stamp = stamp(gpu, slot, given);
        let Some(before) = ran.checked_sub(stamp.position.load(Ordering::Relaxed)) else { return };
        stamp.time.store(time - before, Ordering::Relaxed);
        given += 1;
        line.given.store(given, Ordering::Release);
    }
}

impl Place {
    fn line<'gpu>(&self, gpu: &'gpu Gpu) -> &'gpu Line {
        line(gpu, self.owner.slot)
    }

    /// Returns the nanoseconds of work before the place; 0 once its process is dead and another owner uses
    /// the line.
    fn before(&self, gpu: &Gpu) -> u64 {
        let line = self.line(gpu);
        if line.generation.load(Ordering::Acquire) != self.owner.generation {
            return 0;
        }
        self.position
            .min(line.queued.load(Ordering::Acquire))
            .saturating_sub(line.ran.load(Ordering::Acquire))
    }

    /// Whether the GPU has reached the place.
    pub fn passed(&self, gpu: &Gpu, session: &Session) -> bool {
        let before = self.before(gpu);
        if before == 0 {
            return true;
        }
        // The GPU cannot have worked for longer than the time since its work was last recorded.
        if clock::now().saturating_sub(gpu.turns.time.load(Ordering::Acquire)) < before {
            return false;
        }
        let _guard = session.lock(&gpu.time_lock);
        advance(gpu, session);
        self.before(gpu) == 0
    }

    /// Returns the fewest nanoseconds until the GPU reaches the place: the process's own work before it, and
    /// the turns of processes that come before it in this round.
    pub fn left(&self, gpu: &Gpu, session: &Session) -> u64 {
        let before = self.before(gpu);
        let turns = &gpu.turns;
        let (holder, end) = (turns.holder.load(Ordering::Relaxed), turns.end.load(Ordering::Relaxed));
        let time = turns.time.load(Ordering::Acquire);
        if before == 0 || (holder == self.owner.slot && time < end) {
            return before;
        }
        let of_holder = line(gpu, holder).left().min(end.saturating_sub(time));
        let others = after(holder, session.state().used_slots()).take_while(|&slot| slot != self.owner.slot);
        let ready = others.filter(|&slot| line(gpu, slot).is_ready());
        let turns = ready.map(|slot| line(gpu, slot).left().min(slice(gpu, slot)));
        turns.fold(before + of_holder, u64::saturating_add)
    }
}

impl Asked {
    /// Requests the moment at which the GPU reaches the end of the queued work. A stamp is a nanosecond of
    /// work, so it waits for its process's turn as all work does. Sleeps while the process has [`STAMPS`]
    /// pending stamps.
    pub fn ask(&self, gpu: &Gpu, session: &Session) -> (Place, Moment) {
        let mut list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            {
                let _guard = session.lock(&gpu.time_lock);
                advance(gpu, session);
                if list.len() >= STAMPS {
                    read(gpu, session.owner, &mut list);
                }
                if list.len() < STAMPS {
                    return self.ask_now(gpu, session.owner, &mut list);
                }
            }
            // The GPU works on in the meantime, so one of the process's 256 stamps becomes free.
            std::thread::sleep(std::time::Duration::from_micros(100));
        }
    }

    fn ask_now(&self, gpu: &Gpu, owner: Owner, list: &mut VecDeque<Moment>) -> (Place, Moment) {
        let place = place(gpu, owner, 1);
        let line = place.line(gpu);
        let number = line.asked.load(Ordering::Relaxed);
        let stamp = stamp(gpu, owner.slot, number);
        stamp.position.store(place.position, Ordering::Relaxed);
        line.asked.store(number + 1, Ordering::Release);
        let moment = Moment::default();
        list.push_back(Arc::clone(&moment));
        (place, moment)
    }

    /// Returns the time of `moment`, once the GPU has reached it.
    pub fn time(&self, gpu: &Gpu, session: &Session, place: Place, moment: &Moment) -> Option<u64> {
        if moment.load(Ordering::Acquire) == 0 && place.passed(gpu, session) {
            read(gpu, session.owner, &mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
        }
        Some(moment.load(Ordering::Acquire)).filter(|&time| time != 0)
    }
}

/// Reads the stamps that were written, and removes them from `list`.
fn read(gpu: &Gpu, owner: Owner, list: &mut VecDeque<Moment>) {
    let line = line(gpu, owner.slot);
    let asked = line.asked.load(Ordering::Acquire);
    let given = line.given.load(Ordering::Acquire);
    let first = asked - list.len() as u64;
    for number in first..given {
        let time = stamp(gpu, owner.slot, number).time.load(Ordering::Relaxed);
        if let Some(moment) = list.pop_front() {
            moment.store(time, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::State;
    use crate::timeline::runs;

    const MS: u64 = 1_000_000;
    const OWNERS: [Owner; 3] = [
        Owner { slot: 0, generation: 1 },
        Owner { slot: 1, generation: 1 },
        Owner { slot: 2, generation: 1 },
    ];

    /// Creates a GPU with turns of 2 ms, idle until 1 s; the first process gets the next turn.
    fn gpu() -> &'static Gpu {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let gpu = &State::create(folder.path()).expect("a state").gpus[0];
        gpu.turns.slice.store(2 * MS, Ordering::Relaxed);
        gpu.turns.holder.store(2, Ordering::Relaxed);
        advance_to(gpu, 3, 1000 * MS);
        gpu
    }

    fn ran(gpu: &Gpu) -> [u64; 3] {
        OWNERS.map(|owner| line(gpu, owner.slot).ran.load(Ordering::Relaxed))
    }

    /// Returns the sum of the runs of each owner.
    fn books(gpu: &Gpu) -> [u64; 3] {
        let all = runs::newest(gpu, |_| true);
        OWNERS.map(|owner| {
            let own = all.iter().filter(|run| runs::owner(run) == owner);
            own.map(|run| run.busy.load(Ordering::Relaxed)).sum()
        })
    }

    #[test]
    fn those_with_work_take_turns_and_those_without_lose_theirs_at_once() {
        let gpu = gpu();
        let [a, b, c] = OWNERS;
        place(gpu, a, 10 * MS);
        place(gpu, b, 3 * MS);
        place(gpu, c, MS / 2);
        for (after, want) in [
            (0, [0, 0, 0]),
            (1000, [1000, 0, 0]),
            (2000, [2000, 0, 0]),
            (4000, [2000, 2000, 0]),
            // The third gives up its turn after half a millisecond.
            (4500, [2000, 2000, 500]),
            (6500, [4000, 2000, 500]),
            (7500, [4000, 3000, 500]),
            // Alone, the first continues from turn to turn.
            (13_500, [10_000, 3000, 500]),
            (20_000, [10_000, 3000, 500]),
        ] {
            advance_to(gpu, 3, 1000 * MS + after * 1000);
            assert_eq!(ran(gpu).map(|ns| ns / 1000), want, "after {after} us");
            assert_eq!(books(gpu), ran(gpu), "after {after} us");
        }
    }

    #[test]
    fn who_is_stopped_does_not_run_and_the_length_of_turns_is_each_ones_own() {
        let gpu = gpu();
        let [a, b, _] = OWNERS;
        place(gpu, a, 100 * MS);
        place(gpu, b, 100 * MS);
        steer_now(gpu, a, true, 3 * MS);
        steer_now(gpu, b, true, 7 * MS);
        advance_to(gpu, 3, 1020 * MS);
        assert_eq!(ran(gpu), [6 * MS, 14 * MS, 0]);
        // Steer it in the middle of its turn.
        advance_to(gpu, 3, 1021 * MS);
        steer_now(gpu, a, false, 3 * MS);
        advance_to(gpu, 3, 1031 * MS);
        assert_eq!(ran(gpu), [7 * MS, 24 * MS, 0]);
        steer_now(gpu, b, false, 7 * MS);
        advance_to(gpu, 3, 1041 * MS);
        assert_eq!(ran(gpu), [7 * MS, 24 * MS, 0]);
        steer_now(gpu, a, true, 0);
        advance_to(gpu, 3, 1051 * MS);
        assert_eq!(ran(gpu), [17 * MS, 24 * MS, 0]);
        // The next owner of the slot is not stopped.
        place(gpu, Owner { generation: 2, ..b }, MS);
        advance_to(gpu, 3, 1055 * MS);
        assert_eq!(ran(gpu)[1], 25 * MS);
    }

    #[test]
    fn it_does_not_matter_how_often_somebody_looks() {
        let (once, often) = (gpu(), gpu());
        for gpu in [once, often] {
            OWNERS.iter().zip([7, 11, 5]).for_each(|(owner, length)| {
                place(gpu, *owner, length * MS);
            });
        }
        advance_to(once, 3, 1017 * MS);
        (0..=17_000).step_by(70).for_each(|us| advance_to(often, 3, 1000 * MS + us * 1000));
        advance_to(often, 3, 1017 * MS);
        assert_eq!(ran(once), ran(often));
        assert_eq!(books(once), books(often));
    }

    #[test]
    fn stamps_tell_when_the_gpu_came_to_them() {
        let gpu = gpu();
        let [a, b, _] = OWNERS;
        let (asked, mut list) = (Asked::default(), VecDeque::new());
        place(gpu, b, 100 * MS);
        advance_to(gpu, 3, 1001 * MS);
        let (_, begin) = asked.ask_now(gpu, a, &mut list);
        place(gpu, a, 3 * MS);
        let (end_place, end) = asked.ask_now(gpu, a, &mut list);
        advance_to(gpu, 3, 1006 * MS);
        read(gpu, a, &mut list);
        // The begin waits for the process's first turn, which starts at 1002 ms; the end is still to come.
        assert_eq!(begin.load(Ordering::Relaxed), 1002 * MS + 1);
        assert_eq!((end.load(Ordering::Relaxed), end_place.before(gpu)), (0, MS + 2));
        advance_to(gpu, 3, 1100 * MS);
        read(gpu, a, &mut list);
        // The other process's turn lies between its two turns.
        assert_eq!(end.load(Ordering::Relaxed), 1007 * MS + 2);
    }

    #[test]
    fn a_step_that_its_process_did_not_finish_is_finished_once() {
        let gpu = gpu();
        let [a, ..] = OWNERS;
        let mut list = VecDeque::new();
        place(gpu, a, 5 * MS);
        let (_, moment) = Asked::default().ask_now(gpu, a, &mut list);
        for (length, time) in [(MS, 1001 * MS), (4 * MS + 1, 1005 * MS + 1)] {
            // The process was killed after it recorded its step and carried out a part of it.
            write_down(gpu, a.slot, length, time, 1010 * MS);
            let until = gpu.turns.step.ran.load(Ordering::Relaxed);
            give_stamps(gpu, a.slot, until, time);
            line(gpu, a.slot).ran.store(until, Ordering::Relaxed);
            advance_to(gpu, 3, time);
        }
        assert_eq!((ran(gpu)[0], books(gpu)[0]), (5 * MS + 1, 5 * MS + 1));
        read(gpu, a, &mut list);
        assert_eq!(moment.load(Ordering::Relaxed), 1005 * MS + 1);
    }

    #[test]
    fn the_next_owner_of_a_slot_does_not_get_the_dead_ones_work() {
        let gpu = gpu();
        let [a, b, _] = OWNERS;
        place(gpu, a, 50 * MS);
        place(gpu, b, 50 * MS);
        advance_to(gpu, 3, 1001 * MS);
        let heir = Owner { generation: 2, ..a };
        let place = place(gpu, heir, MS);
        assert_eq!(place.before(gpu), MS);
        advance_to(gpu, 3, 1060 * MS);
        assert_eq!(ran(gpu), [2 * MS, 50 * MS, 0]);
    }
}
