//! Memory nodes of graphs: the driver keeps one reserve per device for all graphs of the process.
//!
//! An executable graph needs at most the sum of its nodes. The possible growth of the reserve is charged
//! before the graph is instantiated, uploaded or launched. It stays charged until the launch has run; then
//! the driver's own figure counts. Until then graphs may run concurrently, each with its own memory.
//!
//! Nodes are found when a graph is instantiated, wherever they come from (`cuGraphAddMemAllocNode`,
//! `cuGraphAddNode*`, captures, clones), so the functions that create them need no hook. Neither does
//! `cuGraphExecUpdate`: it cannot change memory nodes; bodies of conditional nodes cannot hold any (CUDA
//! driver API, graph management).

pub(super) mod nodes;

use core::ffi::{c_char, c_void};
use core::sync::atomic::Ordering;

use gpushare_region::MAX_DEVICES;

use self::nodes::{MEMORY_NODES, Needs};
use super::charge::Charge;
use super::queue::{self, Holders, Queue, Ran};
use super::{
    Cuda, Device, Graph, Here, OUT_OF_MEMORY, SUCCESS, Status, Stream, here, launch, line_of, read, real,
};
use crate::mutex::Mutex;
use crate::table::{Entry, Kind};

const USED: i32 = 0; // CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT
const RESERVED: i32 = 2; // CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT
/// How many launches are tracked separately. Further launches are waited for together.
const LAUNCHES: usize = 128;

/// Memory that the graphs of this process hold.
#[repr(C)]
pub(super) struct Graphs {
    books: Mutex<Books>,
    /// Locked while a graph with memory nodes is launched, so that two launches do not count on the same free
    /// memory.
    launching: Mutex<()>,
}

#[repr(C)]
struct Books {
    /// By line of the limits file.
    reserves: [Reserve; MAX_DEVICES],
    launches: [Launch; LAUNCHES],
}

/// The driver's reserve on one device.
#[derive(Clone, Copy)]
#[repr(C)]
struct Reserve {
    charged: u64,
    /// The most that graphs can hold that have already run, in bytes.
    base: u64,
    /// The most that the launched graphs need if all run at once, in bytes.
    launched: u64,
    device: Device,
    /// Whether `device` is known.
    known: bool,
}

/// Graphs that may not have run yet.
#[derive(Clone, Copy)]
#[repr(C)]
struct Launch {
    /// The executable graph; 0: it was destroyed, or this place stands for several graphs.
    executable: usize,
    /// 0: this place is free.
    bytes: u64,
    queue: Queue,
    line: u8,
}

pub(super) fn is_unused() -> bool {
    MEMORY_NODES.load(Ordering::Relaxed) == 0
}

fn attribute(device: Device, attribute: i32) -> Option<u64> {
    let mut value = 0u64;
    // SAFETY: both attributes that we ask for are 64-bit numbers.
    let status = unsafe {
        real::cuDeviceGetGraphMemAttribute(device, attribute, core::ptr::from_mut(&mut value).cast())
    };
    (status == SUCCESS).then_some(value)
}

impl Reserve {
    /// Charges the driver's reserve for graphs, but at least the amount that launched graphs may still take.
    fn settle(&mut self, here: Here, line: usize) {
        let Some(reserved) = attribute(self.device, RESERVED).filter(|_| self.known) else { return };
        let running = if self.launched == 0 { 0 } else { self.base.saturating_add(self.launched) };
        let now = reserved.max(running);
        here.book().settle(line, self.charged, now);
        self.charged = now;
    }

    /// Launches that needed `bytes` have run. They may have left memory behind, but at most the amount that
    /// graphs hold now.
    fn ran(&mut self, here: Here, line: usize, bytes: u64) {
        self.launched = self.launched.saturating_sub(bytes);
        let left = self.base.saturating_add(bytes);
        self.base = attribute(self.device, USED).map_or(left, |used| used.min(left));
        self.settle(here, line);
    }
}

impl Books {
    /// Records a launch for which room is charged.
    fn launch(&mut self, executable: usize, bytes: u64, queue: Queue, line: u8) {
        let same =
            |launch: &Launch| launch.bytes > 0 && launch.executable == executable && launch.line == line;
        let free = |launch: &Launch| launch.bytes == 0;
        let on_line = |launch: &Launch| launch.line == line;
        let list = &self.launches;
        let at = list.iter().position(same).or_else(|| list.iter().position(free));
        let Some(at) = at.or_else(|| list.iter().position(on_line)) else { return };
        let Some(launch) = self.launches.get_mut(at) else { return };
        let before = launch.bytes;
        *launch = if free(launch) {
            Launch { executable, bytes, queue, line }
        } else if same(launch) {
            // A graph runs again only after its last run has ended, in any stream.
            Launch { bytes: before.max(bytes), queue: launch.queue.and(queue), ..*launch }
        } else {
            let bytes = before.saturating_add(bytes);
            Launch { executable: 0, bytes, queue: launch.queue.and(queue), ..*launch }
        };
        let more = launch.bytes - before;
        if let Some(reserve) = self.reserves.get_mut(usize::from(line)) {
            reserve.launched = reserve.launched.saturating_add(more);
        }
    }

    /// The charge for a launch of `executable` that may not have run yet.
    fn launched(&self, executable: usize, line: u8) -> u64 {
        let mut all = self.launches.iter();
        all.find(|launch| launch.executable == executable && launch.line == line)
            .map_or(0, |launch| launch.bytes)
    }

    /// Ends the launches for which `has_run` is true.
    fn end(&mut self, here: Here, has_run: impl Fn(&Launch) -> bool) {
        for (line, reserve) in self.reserves.iter_mut().enumerate() {
            let mut bytes = 0u64;
            for launch in self.launches.iter_mut().filter(|launch| usize::from(launch.line) == line) {
                if launch.bytes > 0 && has_run(launch) {
                    bytes = bytes.saturating_add(core::mem::take(&mut launch.bytes));
                }
            }
            if reserve.known {
                reserve.ran(here, line, bytes);
            }
        }
    }
}

pub(super) fn ran(here: Here, work: Ran) {
    if !is_unused() {
        here.state.graphs.books.lock().end(here, |launch| work.covers(launch.queue));
    }
}

pub(super) fn line_ended(here: Here, line: u8) {
    if !is_unused() {
        here.state.graphs.books.lock().end(here, |launch| launch.line == line);
    }
}

pub(super) fn forget(here: Here, stream: Stream) {
    if !is_unused() {
        let mut books = here.state.graphs.books.lock();
        books.launches.iter_mut().for_each(|launch| launch.queue = launch.queue.without(stream));
    }
}

/// Asks the driver which launches have run.
pub(super) fn ask_driver(here: Here) {
    if !is_unused() {
        queue::ask_driver(here, LAUNCHES, |at, found| {
            let books = here.state.graphs.books.lock();
            if let Some(launch) = books.launches.get(at).filter(|launch| launch.bytes > 0) {
                found(launch.queue);
            }
        });
    }
}

/// Returns unused reserves to the driver.
pub(super) fn trim_all(here: Here) {
    if is_unused() {
        return;
    }
    let mut books = here.state.graphs.books.lock();
    for reserve in books.reserves.iter().filter(|reserve| reserve.known) {
        // SAFETY: the driver gave the device.
        unsafe { real::cuDeviceGraphMemTrim(reserve.device) };
    }
    books.end(here, |_| false);
}

/// Charges the possible growth of the reserve when a new graph, which needs `bytes`, runs concurrently with
/// earlier launches.
fn charge_growth(here: Here, line: u8, bytes: u64) -> Option<Charge> {
    let take = || {
        let reserve = here.state.graphs.books.lock().reserves.get(usize::from(line)).copied()?;
        let needed = reserve.base.saturating_add(reserve.launched).saturating_add(bytes);
        Charge::take(here, line, needed.saturating_sub(reserve.charged))
    };
    // A refusal has trimmed the reserve and checked which launches have run, so the growth that must fit has
    // changed.
    take().or_else(take)
}

/// Charges a launch and records it before the driver takes it. No other thread can release the room that it
/// counts on, from its last run or from the reserve, in the meantime.
fn admit(here: Here, executable: usize, line: u8, bytes: u64, queue: Queue) -> bool {
    let admitted = || {
        let books = &mut *here.state.graphs.books.lock();
        let Some(reserve) = books.reserves.get(usize::from(line)).copied() else { return false };
        let more = bytes.saturating_sub(books.launched(executable, line));
        let needed = reserve.base.saturating_add(reserve.launched).saturating_add(more);
        let growth = needed.saturating_sub(reserve.charged);
        let Some(_charge) = Charge::take_once(here, line, growth) else { return false };
        books.launch(executable, bytes, queue.being_taken(), line);
        if let Some(reserve) = books.reserves.get_mut(usize::from(line)) {
            reserve.settle(here, usize::from(line)); // before the charge goes
        }
        true
    };
    let growth = || {
        let books = here.state.graphs.books.lock();
        let reserve = books.reserves.get(usize::from(line)).copied();
        reserve.map_or(0, |reserve| {
            let needed = reserve.base.saturating_add(reserve.launched).saturating_add(bytes);
            needed.saturating_sub(reserve.charged)
        })
    };
    // Ask the node without holding the lock: it may take a while.
    let more = || here.book().ask_for_more(line.into(), growth());
    let fits = admitted() || Cuda::give_back_unused(here) && admitted() || more() && admitted();
    if !fits {
        here.book().count_refusal();
    }
    fits
}

/// Ends the records of [`admit`]: the driver has taken the launch, or never will.
fn taken(here: Here) {
    here.state.graphs.books.lock().launches.iter_mut().for_each(|launch| launch.queue.taken(here));
}

fn key(executable: usize, line: u8) -> u64 {
    (executable as u64).rotate_left(8) ^ u64::from(line)
}

type Charges = [Option<Charge>; MAX_DEVICES];

fn instantiate(
    graph: Graph,
    executable: impl Fn() -> Option<usize>,
    call: impl FnOnce() -> Status,
) -> Status {
    let Some(here) = here() else { return OUT_OF_MEMORY };
    let Some(needs) = Needs::of(here, graph) else { return OUT_OF_MEMORY };
    let mut charges: Charges = Default::default();
    for ((line, _, bytes), place) in needs.each().zip(&mut charges) {
        *place = charge_growth(here, line, bytes);
        if place.is_none() {
            return OUT_OF_MEMORY;
        }
    }
    let status = call();
    let Some(executable) = executable().filter(|_| status == SUCCESS) else { return status };
    for (line, device, size) in needs.each() {
        let entry =
            Entry { key: key(executable, line), size, extra: 0, kind: Kind::Graph, device: line, context: 0 };
        // Without an entry, launches would not be charged.
        if here.state.table.put(entry).is_err() {
            // SAFETY: just created, and not yet known to the caller.
            unsafe { real::cuGraphExecDestroy(executable) };
            return OUT_OF_MEMORY;
        }
        settle(here, line, |_, reserve| (reserve.device, reserve.known) = (device, true));
    }
    status
}

/// Settles `line` after `change`.
fn settle(here: Here, line: u8, change: impl FnOnce(&mut [Launch], &mut Reserve)) {
    let books = &mut *here.state.graphs.books.lock();
    if let Some(reserve) = books.reserves.get_mut(usize::from(line)) {
        change(&mut books.launches, reserve);
        reserve.settle(here, usize::from(line));
    }
}

fn lines() -> impl Iterator<Item = u8> {
    (0u8..).zip(0..MAX_DEVICES).map(|(line, _)| line)
}

/// Uploads or launches with `call`.
fn run(executable: usize, stream: Stream, per_thread: bool, call: impl FnOnce() -> Status) -> Status {
    let Some(here) = here().filter(|_| !is_unused()) else { return call() };
    let graphs = &here.state.graphs;
    let find = |line: u8| here.state.table.get(Kind::Graph, key(executable, line));
    if !lines().any(|line| find(line).is_some()) {
        return call();
    }
    let queue = Queue::of(here, stream, per_thread);
    let _launching = graphs.launching.lock();
    let fits =
        lines().all(|line| find(line).is_none_or(|entry| admit(here, executable, line, entry.size, queue)));
    let status = if fits { call() } else { OUT_OF_MEMORY };
    taken(here);
    for line in lines().filter(|line| find(*line).is_some()) {
        settle(here, line, |_, _| {}); // the reserve may have grown
    }
    status
}

fn destroy(executable: usize, call: impl FnOnce() -> Status) -> Status {
    let Some(here) = here() else { return call() };
    launch::graph_ends(here, executable); // first: the driver may give its handle to another graph
    if is_unused() {
        return call();
    }
    let table = &here.state.table;
    // Take the entries first: the driver may give the handle to another graph. The graph may still run.
    let entries: [Option<Entry>; MAX_DEVICES] =
        core::array::from_fn(|line| table.take(Kind::Graph, key(executable, u8::try_from(line).ok()?)));
    let status = call();
    for entry in entries.into_iter().flatten() {
        if status != SUCCESS {
            let _ = table.put(entry); // the graph still exists; if this fails, its launches are not charged
            continue;
        }
        settle(here, entry.device, |launches, _| {
            let own = launches.iter_mut().filter(|launch| launch.executable == executable);
            own.for_each(|launch| launch.executable = 0);
        });
    }
    status
}

fn trim(device: Device, call: impl FnOnce() -> Status) -> Status {
    let status = call();
    if let Some(here) = here().filter(|_| !is_unused()) {
        settle(here, line_of(here, device), |_, _| {});
    }
    status
}

/// The launches that the [gate](super::gate) does not pass straight to the driver.
#[allow(non_snake_case, reason = "the driver's names")]
pub(super) mod limited {
    use super::*;

    macro_rules! launchers {
        ($($name:ident, $per_thread:literal;)*) => { $(
            pub unsafe extern "C" fn $name(executable: usize, stream: Stream) -> Status {
                // SAFETY: our caller's arguments, unchanged.
                let call = || run(executable, stream, $per_thread, || unsafe { real::$name(executable, stream) });
                launch::graph(executable, stream, $per_thread, call)
            }
        )* };
    }
    launchers! {
        cuGraphLaunch, false;
        cuGraphLaunch_ptsz, true;
    }
}

hooks! { |call|
    cuGraphInstantiate(
        executable: *mut usize, graph: Graph, bad: *mut usize, text: *mut c_char, length: usize,
    ) =>
        // SAFETY: written by the driver when it succeeded.
        instantiate(graph, || unsafe { read(executable) }, call);
    cuGraphInstantiate_v2(
        executable: *mut usize, graph: Graph, bad: *mut usize, text: *mut c_char, length: usize,
    ) =>
        // SAFETY: as above.
        instantiate(graph, || unsafe { read(executable) }, call);
    cuGraphInstantiateWithFlags(executable: *mut usize, graph: Graph, flags: u64) =>
        // SAFETY: as above.
        instantiate(graph, || unsafe { read(executable) }, call);
    cuGraphInstantiateWithParams(executable: *mut usize, graph: Graph, parameters: *mut c_void) =>
        // SAFETY: as above.
        instantiate(graph, || unsafe { read(executable) }, call);
    cuGraphInstantiateWithParams_ptsz(executable: *mut usize, graph: Graph, parameters: *mut c_void) =>
        // SAFETY: as above.
        instantiate(graph, || unsafe { read(executable) }, call);
    cuGraphUpload(executable: usize, stream: Stream) => run(executable, stream, false, call);
    cuGraphUpload_ptsz(executable: usize, stream: Stream) => run(executable, stream, true, call);
    cuGraphExecDestroy(executable: usize) => destroy(executable, call);
    cuDeviceGraphMemTrim(device: Device) => trim(device, call);
}
