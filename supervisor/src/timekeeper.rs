//! The timekeeper of one GPU: stops and starts the container's channels there by the schedule.
//!
//! It is a thread of the worker, so that calls that the worker serves do not delay windows. It sleeps while
//! the container has no channel, and between window edges.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::thread::Builder;
use std::time::Duration;

use gpushare_schedule::Card;
use gpushare_schedule::controller::{Controller, Running};
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::time::TimeSpec;

use crate::abi::Era;
use crate::board::{Board, name_of};
use crate::books::{Gpu, MOST_GPUS};
use crate::budget::Page;
use crate::calls::{Compute, Engines};
use crate::handles::Handles;
use crate::kernel::Kernel;
use crate::sys;
use crate::tasks::now;

/// Retry delay in microseconds for a call that RM did not perform, or whose effect a program may have undone.
const RETRY: u64 = 2_000;
/// How many microseconds channels may stay unreachable before their process is killed.
const PATIENCE: u64 = 1_000_000;

/// The state that all timekeepers of a container share.
#[derive(Clone)]
pub struct Ground {
    /// The driver's interface.
    pub era: &'static Era,
    /// RM.
    pub kernel: Kernel,
    /// The lease's plans.
    pub page: &'static Page,
}

struct Timekeeper {
    gpu: Gpu,
    lease: i64,
    ground: Ground,
    engines: Engines<OwnedFd>,
    board: Board,
    wake: Arc<EventFd>,
    handles: Handles,
    controller: Controller,
    /// Time since which some channels cannot be reached.
    failing: Option<u64>,
    /// Time of the next repeated stop, because a call that was let through may have started channels.
    again: Option<u64>,
}

/// Starts a timekeeper for each GPU for which the lease has a plan. Returns `None` if there is no plan.
/// `boards` is the directory of all GPUs' boards.
///
/// # Errors
/// If a board cannot be used, or a thread cannot be started.
pub fn start(ground: &Ground, boards: &Path) -> io::Result<Option<Compute<OwnedFd>>> {
    let engines = Engines::default();
    let mut wakes = Vec::new();
    for gpu in (0..MOST_GPUS).filter(|gpu| ground.page.plan(*gpu).is_some()) {
        let Some(uuid) = ground.page.uuid(gpu) else { continue };
        let board = Board::join(&boards.join(name_of(&uuid)))?;
        let wake = Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?);
        wakes.push((gpu, Arc::clone(&wake)));
        let timekeeper = Timekeeper {
            gpu,
            lease: ground.page.lease(),
            ground: ground.clone(),
            engines: engines.clone(),
            board,
            wake,
            handles: Handles::new(sys::random()),
            controller: Controller::default(),
            failing: None,
            again: None,
        };
        let _detached = Builder::new().name(format!("timekeeper{gpu}")).spawn(move || timekeeper.run())?;
    }
    if wakes.is_empty() {
        return Ok(None);
    }
    let wake = Box::new(move |gpu| {
        for (_, wake) in wakes.iter().filter(|(one, _)| *one == gpu) {
            let _ = wake.write(1);
        }
    });
    Ok(Some(Compute { engines, wake }))
}

/// Checks that the boards of a lease's GPUs can be used.
///
/// # Errors
/// The errors of [`Board::join`].
pub fn check(page: &Page, boards: &Path) -> io::Result<()> {
    let held = (0..MOST_GPUS).filter(|gpu| page.plan(*gpu).is_some());
    held.filter_map(|gpu| page.uuid(gpu))
        .try_for_each(|uuid| Board::join(&boards.join(name_of(&uuid))).map(drop))
}

impl Timekeeper {
    fn run(mut self) {
        let _ = sys::wake_precisely(); // without it, windows are off by some 50 microseconds more
        loop {
            let until = self.step();
            let watched: Vec<OwnedFd> =
                self.engines.on(self.gpu).watched().filter_map(|one| one.try_clone().ok()).collect();
            let mut asked: Vec<PollFd> = std::iter::once(self.wake.as_fd())
                .chain(watched.iter().map(AsFd::as_fd))
                .map(|one| PollFd::new(one, PollFlags::POLLIN))
                .collect();
            let left = until.map(|until| TimeSpec::from(Duration::from_micros(until.saturating_sub(now()))));
            let _ = ppoll(&mut asked, left, None); // whatever woke it, the next step checks everything
            let _ = self.wake.read();
        }
    }

    /// Performs the schedule's current orders, and returns when they expire; `None`: valid until something
    /// changes.
    fn step(&mut self) -> Option<u64> {
        let Self { gpu, lease, .. } = *self;
        let Ground { era, mut kernel, page } = self.ground.clone();
        let engines = self.engines.clone();
        let mut engine = engines.on(gpu);
        engine.drop_ended(&mut kernel, (era, &mut self.handles), has_ended);
        let Some(plan) = page.plan(gpu).filter(|_| !engine.is_empty()) else {
            self.board.leave();
            self.controller.leave();
            (self.failing, self.again) = (None, None);
            return None;
        };
        // The other containers get the time of a paused one.
        let is_paused = page.is_paused();
        let groups = if is_paused { 0 } else { engine.groups() };
        self.board.publish(lease, &plan, groups, engine.is_nameless());
        let began = now();
        let (frame, tenants) = self.board.read(began);
        let card = Card { frame, tenants: &tenants };
        let orders = if is_paused {
            self.controller.pause(&card, began)
        } else {
            self.controller.step(&card, lease, began, (engine.groups(), engine.calls()))
        };
        self.board.publish_terms(self.controller.pays(), self.controller.stint());
        if let Some(slice) = orders.slice {
            engine.set_slices(&mut kernel, slice);
        }
        let is_due = self.again.is_some_and(|again| again <= began);
        self.again = self.again.filter(|_| !is_due);
        if engine.take_disturbance() {
            let _ = self.again.get_or_insert(began + RETRY);
        }
        if is_due && orders.running != Running::All {
            engine.doubt();
        }
        if engine.running() != orders.running || !engine.is_settled() {
            let calls = engine.set(&mut kernel, era, &mut self.handles, orders.running);
            match orders.running {
                Running::Stopped => {
                    let ended = now();
                    let (frame, tenants) = self.board.read(ended);
                    self.controller.stopped(&Card { frame, tenants: &tenants }, lease, (began, ended), calls);
                    self.board.publish_terms(self.controller.pays(), self.controller.stint());
                }
                Running::Paused => {}
                Running::All | Running::Turn { .. } => self.board.publish_start(now()),
            }
            self.failing = (!engine.is_settled()).then(|| self.failing.unwrap_or(began));
            if self.failing.is_some_and(|since| began.saturating_sub(since) > PATIENCE) {
                // Programs that cannot be stopped take others' time.
                for watch in engine.unreached() {
                    let _ = sys::kill(watch.as_fd());
                }
            }
        }
        let retry = (!engine.is_settled()).then(|| now() + RETRY);
        [Some(orders.until), retry, self.again].into_iter().flatten().min()
    }
}

fn has_ended(watch: &OwnedFd) -> bool {
    let mut asked = [PollFd::new(watch.as_fd(), PollFlags::POLLIN)];
    ppoll(&mut asked, Some(TimeSpec::from(Duration::ZERO)), None).is_ok_and(|ready| ready > 0)
}
