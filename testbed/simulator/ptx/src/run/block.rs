//! A block of threads: runs its threads in turns and lets them through barriers.

use super::thread::{Place, Stop, Thread, Wait};
use super::{Failure, Launch, address_of, warp};
use crate::alu::scalar::Scalar;
use crate::code::{Barrier, BarrierKind, Op, Reduction};
use crate::error::Fault;

/// Instructions that a thread executes before another thread of its block may run.
const SLICE: u64 = 4096;

/// Rounds over its threads that a block runs before another block may run.
const ROUNDS: usize = 16;

/// Alignment of shared memory in bytes; bulk copies need this much.
const SHARED_ALIGN: u16 = 128;

/// How a block's turn ended.
pub(super) enum Turn {
    Ended,
    /// Threads still have work.
    Busy,
    /// All threads that have not exited wait for the rest of the grid.
    AtGridBarrier,
}

/// Arrivals at one of a block's sixteen barriers.
#[derive(Clone, Copy, Default)]
struct Arrivals {
    threads: u32,
    /// Number of threads to wait for, if the instruction gives one.
    wanted: Option<u32>,
    /// How many threads gave a predicate that was set; `predicates` counts those that gave one.
    set: u32,
    predicates: u32,
}

/// The state of a block that has started and not ended.
pub(super) struct Block {
    place: Place,
    threads: Vec<Thread>,
    barriers: [Arrivals; 16],
    /// Threads that have not exited.
    live: u32,
    /// Shared memory and the threads' stacks. They are reached by address only; this field keeps them
    /// allocated.
    _memory: [Vec<u64>; 2],
}

impl Block {
    pub(super) fn new(launch: &Launch<'_>) -> Self {
        let threads: usize = launch.block.iter().map(|&size| size as usize).product();
        let bytes = launch.shared_static + launch.shared_dynamic as usize;
        let mut shared = vec![0; (bytes + usize::from(SHARED_ALIGN)).div_ceil(8) + 1];
        let mut stacks = vec![0; threads * launch.stack / 8 + 2];
        let shared_start = address_of(shared.as_mut_ptr()).next_multiple_of(u64::from(SHARED_ALIGN));
        let stack_start = address_of(stacks.as_mut_ptr()).next_multiple_of(16);
        let size = u64::try_from(bytes).unwrap_or(0);
        let mut block = Self {
            place: Place { index: [0; 3], shared_start, shared_size: size },
            threads: Vec::with_capacity(threads),
            barriers: [Arrivals::default(); 16],
            live: 0,
            _memory: [shared, stacks],
        };
        let [width, height, depth] = launch.block;
        let mut stack = stack_start;
        for z in 0..depth {
            for y in 0..height {
                for x in 0..width {
                    block.threads.push(Thread::new([x, y, z], stack));
                    stack += u64::try_from(launch.stack).unwrap_or(0);
                }
            }
        }
        block
    }

    /// Begins block `index`, and uses the memory of an earlier block again.
    pub(super) fn start(&mut self, launch: &Launch<'_>, index: [u32; 3]) -> Result<(), Box<Failure>> {
        self.place.index = index;
        self.barriers = [Arrivals::default(); 16];
        self.live = u32::try_from(self.threads.len()).unwrap_or(u32::MAX);
        for number in 0..self.threads.len() {
            let started = self.threads[number].start(launch, &self.place, number);
            started.map_err(|fault| self.failure(number, fault))?;
        }
        Ok(())
    }

    pub(super) fn failure(&self, thread: usize, fault: Fault) -> Box<Failure> {
        let place = self.place.index;
        let thread = &self.threads[thread];
        let (function, at) = thread.position();
        Box::new(Failure { function, at, block: place, thread: thread.index, fault })
    }

    /// # Safety
    /// The contract of [`crate::Module::run`].
    pub(super) unsafe fn turn(&mut self, launch: &Launch<'_>) -> Result<Turn, Box<Failure>> {
        for _ in 0..ROUNDS {
            let mut ran = false;
            for first in (0..self.threads.len()).step_by(32) {
                // SAFETY: the caller's contract, passed on.
                while unsafe { self.run_warp(launch, first, &mut ran) }? {}
            }
            if self.live == 0 {
                return Ok(Turn::Ended);
            }
            if self.release_barriers(launch) || ran {
                continue;
            }
            if self.threads.iter().all(|thread| matches!(thread.wait, Wait::Grid | Wait::Ended)) {
                return Ok(Turn::AtGridBarrier);
            }
            let stuck = self.threads.iter().position(|thread| thread.wait != Wait::Ended).unwrap_or(0);
            return Err(self.failure(stuck, Fault::Deadlock));
        }
        Ok(Turn::Busy)
    }

    /// Runs the ready threads of a warp once. Returns whether warp instructions made more of them ready.
    ///
    /// # Safety
    /// The contract of [`crate::Module::run`].
    unsafe fn run_warp(
        &mut self,
        launch: &Launch<'_>,
        first: usize,
        ran: &mut bool,
    ) -> Result<bool, Box<Failure>> {
        let last = (first + 32).min(self.threads.len());
        let mut waiting = false;
        for number in first..last {
            let thread = &mut self.threads[number];
            if thread.wait == Wait::Ready {
                *ran = true;
                // SAFETY: the caller's contract, passed on.
                let stop = unsafe { thread.run(launch, &self.place, SLICE) };
                let stop = stop.map_err(|fault| self.failure(number, fault))?;
                self.stopped(launch, number, stop).map_err(|fault| self.failure(number, fault))?;
            }
            waiting |= self.threads[number].wait == Wait::Warp;
        }
        Ok(waiting && warp::resolve(launch.functions, &mut self.threads[first..last]))
    }

    fn stopped(&mut self, launch: &Launch<'_>, number: usize, stop: Stop) -> Result<(), Fault> {
        let thread = &mut self.threads[number];
        match stop {
            Stop::Slice => {}
            Stop::Warp => thread.wait = Wait::Warp,
            Stop::Grid => thread.wait = Wait::Grid,
            Stop::Ended => {
                thread.wait = Wait::Ended;
                self.live -= 1;
            }
            Stop::Barrier => {
                let Some(barrier) = barrier_of(launch, thread) else { return Ok(()) };
                let id = thread.value(barrier.number);
                let index = usize::try_from(id).unwrap_or(usize::MAX);
                let arrivals = self.barriers.get_mut(index).ok_or(Fault::NoBarrier(id))?;
                arrivals.threads += 1;
                arrivals.wanted = barrier.threads.map(|slot| u32::of(thread.value(slot)));
                if let BarrierKind::Reduce { predicate, .. } = barrier.kind {
                    arrivals.predicates += 1;
                    arrivals.set += u32::from(thread.value(predicate) != 0);
                }
                if barrier.kind != BarrierKind::Arrive {
                    thread.wait = Wait::Barrier(index);
                }
            }
        }
        Ok(())
    }

    /// Releases the barriers that all of their threads have reached. Returns whether there was one.
    fn release_barriers(&mut self, launch: &Launch<'_>) -> bool {
        let mut released = false;
        for id in 0..self.barriers.len() {
            let arrivals = self.barriers[id];
            if arrivals.threads == 0 || arrivals.threads < arrivals.wanted.unwrap_or(self.live) {
                continue;
            }
            self.barriers[id] = Arrivals::default();
            released = true;
            for thread in self.threads.iter_mut().filter(|thread| thread.wait == Wait::Barrier(id)) {
                thread.wait = Wait::Ready;
                let Some(Barrier { kind: BarrierKind::Reduce { reduction, d, .. }, .. }) =
                    barrier_of(launch, thread)
                else {
                    continue;
                };
                thread.set(
                    *d,
                    match reduction {
                        Reduction::Count => u64::from(arrivals.set),
                        Reduction::And => u64::from(arrivals.set == arrivals.predicates),
                        Reduction::Or => u64::from(arrivals.set > 0),
                    },
                );
            }
        }
        released
    }

    pub(super) fn release_grid_barrier(&mut self) {
        for thread in self.threads.iter_mut().filter(|thread| thread.wait == Wait::Grid) {
            thread.wait = Wait::Ready;
        }
    }
}

/// The barrier instruction that the thread executed last.
fn barrier_of<'m>(launch: &Launch<'m>, thread: &Thread) -> Option<&'m Barrier> {
    let (function, at) = thread.position();
    match &launch.functions[function as usize].code[at as usize].op {
        Op::Barrier(barrier) => Some(barrier),
        _ => None,
    }
}
