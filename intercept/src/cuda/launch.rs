//! Launches: each pays for its GPU time before it goes to the driver. `crate::compute` decides. This file
//! adds the driver's events, the clock and the sleep.
//!
//! A thread that has to wait sleeps in its launch and holds the turn. Other threads wait for the turn; only
//! launches that credit pays for pass them. The state is not locked during the sleep, so that a context can
//! end in the meantime. No lock is held while the driver launches: the driver may call back into the program,
//! which may launch too, or it may wait for room in a stream.

use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering::Relaxed};

use gpushare_region::MAX_DEVICES;

use super::context::{current, device_of, line_of_context};
use super::stream_handle::{StreamHandle, is_default, owner, relaxed};
use super::timing::Pair;
use super::{Context, Here, SUCCESS, Status, Stream, here, line_of};
use crate::compute::{Answer, Credit, Ground, Key, Limiter, Share, Shared, TIMED, Timing};
use crate::mutex::Mutex;
use crate::sys;

/// The first check of the exported launches. Once the books are open, this is the limits file's number of
/// limited GPUs; until then it is our own word that is not 0.
pub(super) static GATE: AtomicPtr<AtomicU32> = AtomicPtr::new((&raw const CLOSED).cast_mut());
static CLOSED: AtomicU32 = AtomicU32::new(1);
/// The word used without a limits file. Nothing is then granted, so there is no context and no launch to
/// limit.
static OPEN: AtomicU32 = AtomicU32::new(0);

/// The launcher of the device if only one device is granted. The fast path then checks nothing else.
static ONLY: AtomicPtr<Launcher> = AtomicPtr::new(core::ptr::null_mut());

/// The longest usual time of a launch on the processor, in nanoseconds.
const USUAL_LAUNCH: u64 = 20_000;
/// How many functions have their block shape cached, for the launches that do not name a shape.
const SHAPES: usize = 256;
/// How many streams have their line cached.
const STREAMS: usize = 256;

/// The compute side of this process.
#[repr(C)]
pub(super) struct Launches {
    devices: [Launcher; MAX_DEVICES],
    /// By hash of the function: the block shape that `cuFuncSetBlockShape` gave it.
    shapes: [AtomicU32; SHAPES],
    /// By hash of the stream: its handle in the upper 56 bits, its line in the lower 8.
    streams: [AtomicU64; STREAMS],
}

/// Launches on one device.
#[repr(C)]
struct Launcher {
    credit: Credit,
    /// Locked by the one thread that asks or waits.
    turn: Mutex<()>,
    asked: Mutex<Asked>,
}

#[repr(C)]
struct Asked {
    limiter: Limiter,
    pairs: [Pair; TIMED],
}

/// Where a launch goes.
#[derive(Clone, Copy)]
struct Target {
    context: Context,
    handle: StreamHandle,
}

/// Lets the exported launches check the limits themselves from now on.
pub(super) fn open_gate(here: Here) {
    let word = here.book().limits.map_or(&OPEN, |limits| &limits.header.compute_limited);
    GATE.store(core::ptr::from_ref(word).cast_mut(), Relaxed);
    let devices = here.book().limits.map_or(0, |limits| limits.header.devices.load(Relaxed));
    let only = here.state.launches.devices.first().filter(|_| devices == 1);
    ONLY.store(only.map_or(core::ptr::null(), core::ptr::from_ref).cast_mut(), Relaxed);
}

/// The line of the limits file for a launch of this thread into `stream`; `None` if compute is not limited
/// there.
#[inline(always)]
fn limited_line(here: Here, stream: Stream) -> Option<usize> {
    let limits = here.book().limits?;
    let line = match limits.header.devices.load(Relaxed) {
        1 => 0, // no context can exist on another GPU
        _ => line_of_stream(here, stream)?.into(),
    };
    is_limited(here, line).then_some(line)
}

/// Whether compute is limited on `line`.
#[inline(always)]
fn is_limited(here: Here, line: usize) -> bool {
    here.book().limits.and_then(|limits| limits.devices.get(line)).is_some_and(Share::is_limited)
}

/// The line of the GPU of `stream`. It can differ from the current context's GPU: a graph and a `CUkernel`
/// run on the GPU of their stream.
fn line_of_stream(here: Here, stream: Stream) -> Option<u8> {
    if is_default(stream) {
        return current(here).map(|current| current.device);
    }
    let place = here.state.launches.place_of_stream(stream)?;
    let known = place.load(Relaxed);
    if known >> 8 == stream as u64 {
        let [line, ..] = known.to_le_bytes();
        return Some(line);
    }
    let Some(owner) = owner(stream) else { return current(here).map(|current| current.device) };
    // A context for which there was no place is on the GPU that the driver reports.
    let told = || {
        device_of(owner).map_or_else(
            |_| current(here).map(|current| current.device),
            |device| Some(line_of(here, device)),
        )
    };
    let line = line_of_context(here, owner).or_else(told)?;
    place.store((stream as u64) << 8 | u64::from(line), Relaxed);
    Some(line)
}

/// Whether a launch may go to the driver at once: it is paid, or nothing limits it.
#[inline(always)]
pub(super) fn is_paid(key: Key, stream: Stream) -> bool {
    let only = ONLY.load(Relaxed);
    if !only.is_null() {
        // SAFETY: a part of this process's state, which is never unmapped. It is wiped in a forked child,
        // which then finds no credit.
        return unsafe { &*only }.credit.spend(key);
    }
    is_paid_on_its_device(key, stream)
}

#[inline(never)]
fn is_paid_on_its_device(key: Key, stream: Stream) -> bool {
    let Some(here) = here() else { return true };
    let Some(line) = limited_line(here, stream) else { return true };
    here.state.launches.devices.get(line).is_some_and(|launcher| launcher.credit.spend(key))
}

/// Launches with `call`, after a wait if the launch is not paid and the share requires one.
#[inline(always)]
pub(super) fn launch(key: Key, handle: StreamHandle, call: &mut impl FnMut() -> Status) -> Status {
    if is_paid(key, handle.stream) { call() } else { launch_slowly(key, handle, call) }
}

/// Calls the driver, after a wait if the share requires one.
#[cold]
#[inline(never)]
pub(super) fn launch_slowly(key: Key, handle: StreamHandle, call: &mut dyn FnMut() -> Status) -> Status {
    let Some(here) = here() else { return call() };
    open_gate(here);
    let Some(line) = limited_line(here, handle.stream) else { return call() };
    let Some(launcher) = here.state.launches.devices.get(line) else { return call() };
    let Some(context) = handle.context().filter(|_| !handle.is_recording()) else {
        return call(); // the driver answers with its own error, or the launch is only recorded
    };
    match launcher.admit(here, line, key) {
        Some(number) => launcher.launch(here, line, number, Target { context, handle }, call),
        None => call(),
    }
}

impl Launcher {
    /// Waits until a launch of `key` may go. `Some`: time the launch with the pair of events with this
    /// number, then call [`launched`](Self::launched). `None`: the launch needs nothing more.
    fn admit(&self, here: Here, line: usize, key: Key) -> Option<usize> {
        let ground = self.ground(here, line)?;
        let start = sys::now();
        let _turn = self.turn.lock();
        if self.credit.spend(key) {
            return None; // the last holder of the turn has drawn enough
        }
        let mut held_back = false;
        loop {
            let ground = Ground { capturing: here.state.captures.is_any(), ..ground };
            let answer = self.asked.lock().ask(&ground, key);
            let nap = match answer {
                Answer::Free => return None,
                Answer::Timed(pair) => {
                    let throttled = if held_back { sys::now().saturating_sub(start) } else { 0 };
                    Shared::new(&ground).count_throttled(throttled);
                    return Some(pair);
                }
                Answer::Queued(nap) => nap,
                Answer::HeldBack(nap) => {
                    held_back = true;
                    nap
                }
            };
            sys::sleep(nap.div_ceil(1_000));
        }
    }

    /// Calls the driver between the events of pair `number`.
    fn launch(
        &self,
        here: Here,
        line: usize,
        number: usize,
        Target { context, handle }: Target,
        call: &mut dyn FnMut() -> Status,
    ) -> Status {
        let (mut lent, idle, mut timed) = relaxed(|| {
            let lent = self.asked.lock().lend(number, context);
            let idle = handle.is_idle();
            let timed = lent.as_ref().is_some_and(|pair| pair.begin(handle));
            (lent, idle, timed)
        });
        let start = sys::now();
        let status = call();
        // An idle device handles the first event at once, and then waits while this thread makes the launch.
        let waited = if idle { sys::now().saturating_sub(start) } else { 0 };
        if status == SUCCESS && timed {
            timed = relaxed(|| lent.as_mut().is_some_and(|pair| pair.end(handle, waited)));
        }
        // The usual time of a launch is known. Any excess means that the thread lost the processor and is
        // late.
        let late = sys::now().saturating_sub(start).saturating_sub(waited.min(USUAL_LAUNCH));
        let late = timed.then_some(if idle { late } else { 0 });
        self.launched(here, line, number, lent, (status == SUCCESS).then_some(late));
        status
    }

    /// Reports the outcome of the launch of pair `number` to the limiter; its events were `lent` for it.
    /// `outcome`: the argument of [`Limiter::launched`]; `None`: the driver refused the launch.
    fn launched(
        &self,
        here: Here,
        line: usize,
        number: usize,
        lent: Option<Pair>,
        outcome: Option<Option<u64>>,
    ) {
        let Asked { limiter, pairs } = &mut *self.asked.lock();
        let is_back = lent.is_some_and(|lent| pairs.get_mut(number).is_some_and(|pair| pair.take_back(lent)));
        match outcome {
            Some(late) => limiter.launched(number, late.filter(|_| is_back)),
            None => limiter.refused(number),
        }
        let counted = limiter.count();
        here.book().count_compute(line, counted.launches, counted.nanoseconds);
    }

    /// The data that the limiter reads and writes; `None`: there are no books.
    fn ground(&self, here: Here, line: usize) -> Option<Ground<'_>> {
        let (limits, usage) = (here.book().limits?, here.book().usage?);
        Some(Ground {
            line: limits.devices.get(line)?,
            bucket: usage.header.buckets.get(line)?,
            credit: &self.credit,
            capturing: false,
        })
    }
}

impl Asked {
    fn ask(&mut self, ground: &Ground<'_>, key: Key) -> Answer {
        let Self { limiter, pairs } = self;
        let timing = |pair| pairs.get(pair).map_or(Timing::Lost, Pair::timing);
        relaxed(|| limiter.ask(ground, key, sys::now(), timing))
    }

    /// Hands out the events of pair `number`, if there are any.
    fn lend(&mut self, number: usize, context: Context) -> Option<Pair> {
        self.pairs.get_mut(number).and_then(|pair| pair.lend(context, sys::now()))
    }

    /// Settles the launches that have ended in `context`, which is about to end.
    fn context_ends(&mut self, ground: Option<&Ground<'_>>, context: Context) {
        let Self { limiter, pairs } = self;
        for (number, pair) in pairs.iter_mut().enumerate().filter(|(_, pair)| pair.is_in(context)) {
            let now = sys::now();
            let timing = pair.context_ends(now);
            if let Some(ground) = ground {
                limiter.settle_one(ground, number, timing);
            }
        }
    }

    /// Charges launches that had not ended when `context` ended: the driver may have let them run to
    /// completion. Concurrent kernels are charged once, for the time of the longest.
    fn context_ended(&mut self, ground: Option<&Ground<'_>>, context: Context) {
        let Self { limiter, pairs } = self;
        let mut first: Option<(u64, usize)> = None;
        for (number, pair) in pairs.iter_mut().enumerate().filter(|(_, pair)| pair.is_in(context)) {
            match pair.context_ended().map(|since| (since, number)) {
                Some(running) if first.is_none_or(|first| running < first) => {
                    if let Some((_, other)) = first.replace(running) {
                        limiter.lost(other);
                    }
                }
                _ => limiter.lost(number),
            }
        }
        let (Some((since, number)), Some(ground)) = (first, ground) else { return };
        let now = sys::now();
        limiter.cut_short(ground, number, now.saturating_sub(since));
    }
}

/// `context` is about to end, or one of its users releases it. Call [`context_ended`] or [`context_stays`]
/// afterwards.
pub(super) fn context_ends(here: Here, context: Context) {
    here.state.launches.each(|line, launcher| {
        launcher.asked.lock().context_ends(launcher.ground(here, line).as_ref(), context);
    });
}

/// `context` has ended, and its events and streams with it.
pub(super) fn context_ended(here: Here, context: Context) {
    here.state.captures.context_ended(context);
    here.state.launches.streams.iter().for_each(|place| place.store(0, Relaxed));
    here.state.launches.each(|line, launcher| {
        launcher.asked.lock().context_ended(launcher.ground(here, line).as_ref(), context);
    });
}

/// `context` has not ended after all.
pub(super) fn context_stays(here: Here, context: Context) {
    here.state.launches.each(|_, launcher| {
        let pairs = &mut launcher.asked.lock().pairs;
        pairs.iter_mut().filter(|pair| pair.is_in(context)).for_each(Pair::context_stays);
    });
}

/// `stream` is about to end, and its handle may be reused for another stream.
pub(super) fn forget_stream(here: Here, stream: Stream) {
    if let Some(place) = here.state.launches.place_of_stream(stream) {
        place.store(0, Relaxed);
    }
}

/// `executable` is about to end, and its handle may be reused for another graph.
pub(super) fn graph_ends(here: Here, executable: usize) {
    if !is_open() {
        for launcher in &here.state.launches.devices {
            launcher.asked.lock().limiter.forget(&launcher.credit, Key::graph(executable));
        }
    }
}

/// Takes all credit back, so that every launch asks from now on. Called when a capture begins.
pub(super) fn close(here: Here) {
    for launcher in &here.state.launches.devices {
        launcher.asked.lock().limiter.close(&launcher.credit);
    }
}

impl Launches {
    /// Calls `act` with every line and its launcher.
    fn each(&self, mut act: impl FnMut(usize, &Launcher)) {
        self.devices.iter().enumerate().for_each(|(line, launcher)| act(line, launcher));
    }

    fn place_of_stream(&self, stream: Stream) -> Option<&AtomicU64> {
        self.streams.get((stream >> 4) % STREAMS)
    }

    pub(super) fn shape(&self, function: usize) -> Option<&AtomicU32> {
        self.shapes.get((function >> 4) % SHAPES)
    }
}

/// Whether it is known that nothing is limited for this container.
#[inline(always)]
pub(super) fn is_open() -> bool {
    // SAFETY: the gate always points to one of the two words here, or to one in the limits mapping, which is
    // never unmapped.
    unsafe { &*GATE.load(Relaxed) }.load(Relaxed) == 0
}

/// Launches an executable graph with `call`.
pub(super) fn graph(
    executable: usize,
    stream: Stream,
    per_thread: bool,
    mut call: impl FnMut() -> Status,
) -> Status {
    let key = Key::graph(executable);
    if is_open() || is_paid(key, stream) {
        return call();
    }
    launch_slowly(key, StreamHandle { stream, per_thread }, &mut call)
}

/// Waits until a launch that cannot be timed may go, and charges its estimated cost.
pub(super) fn pay(here: Here, line: usize, key: Key) {
    let limited = Some(line).filter(|line| is_limited(here, *line));
    let Some(launcher) = limited.and_then(|line| here.state.launches.devices.get(line)) else { return };
    if let Some(number) = launcher.admit(here, line, key) {
        launcher.launched(here, line, number, None, Some(None));
    }
}
