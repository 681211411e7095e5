//! A program that contains the hooks, so that the test can watch the calls between hooks and driver, and can
//! time the program's calls.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use gpushare_intercept::cuda::{DRIVER, NAMES, hooks, load};
use gpushare_region::path;

use super::ways::graph_of;
use super::{Blocked, Own, Shared};
use crate::OUT_OF_MEMORY;
use crate::client::{Library, call, call_long, out};
use crate::processes::Schedule;

/// How often to retry a call that the driver refuses, once there are dead processes. While one process
/// releases their memory, the simulated driver refuses others for some microseconds.
const PATIENCE: u32 = 10;

/// The driver's functions that allocate, and their addresses.
const WATCHED: [&str; 11] = [
    "cuDevicePrimaryCtxRetain",
    "cuMemAlloc_v2",
    "cuMemAllocPitch_v2",
    "cuMemAllocManaged",
    "cuMemAllocAsync",
    "cuMemAllocFromPoolAsync",
    "cuMemCreate",
    "cuArrayCreate_v2",
    "cuMipmappedArrayCreate",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
];
static REAL: [AtomicUsize; WATCHED.len()] = [const { AtomicUsize::new(0) }; WATCHED.len()];
/// Address of [`Shared`].
static SHARED: AtomicUsize = AtomicUsize::new(0);

/// Wraps the driver's function number `AT`; the hook calls this instead.
extern "C" fn watched<const AT: usize>(a: usize, b: usize, c: usize, d: usize, e: usize) -> i32 {
    let pointer = std::ptr::with_exposed_provenance::<Shared>(SHARED.load(SeqCst));
    // SAFETY: the shared mapping is never unmapped.
    let shared = unsafe { &*pointer };
    let ask = || call(REAL[AT].load(SeqCst), &[a, b, c, d, e]);
    let mut status = ask();
    let patience = if shared.kills.load(SeqCst) > 0 { PATIENCE } else { 0 };
    for _ in 0..patience {
        if status == OUT_OF_MEMORY {
            std::thread::sleep(Duration::from_micros(20));
            status = ask();
        }
    }
    if status == OUT_OF_MEMORY {
        shared.granted_too_much.fetch_add(1, SeqCst);
    }
    status
}

const PTX: &std::ffi::CStr =
    c".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry busy_20us() { ret; }";

/// A process of the test.
pub struct Client {
    driver: Library,
    own: &'static Own,
    schedule: Schedule,
    pub pool: usize,
    pub graph: usize,
    kernel: usize,
}

impl Client {
    /// Initialises the driver and waits until there is room for a context.
    pub fn start(shared: &'static Shared, at: usize) -> Self {
        let driver = Library::open(path::DRIVER_CUDA);
        load();
        SHARED.store(std::ptr::from_ref(shared).expose_provenance(), SeqCst);
        let watches: [extern "C" fn(usize, usize, usize, usize, usize) -> i32; WATCHED.len()] = [
            watched::<0>,
            watched::<1>,
            watched::<2>,
            watched::<3>,
            watched::<4>,
            watched::<5>,
            watched::<6>,
            watched::<7>,
            watched::<8>,
            watched::<9>,
            watched::<10>,
        ];
        for ((name, real), watch) in WATCHED.iter().zip(&REAL).zip(watches) {
            real.store(driver.symbol(name), SeqCst);
            DRIVER.set(NAMES.iter().position(|known| known == name).unwrap(), watch as *const () as usize);
        }
        let schedule = Schedule::of_this_thread();
        let mut client = Self { driver, own: &shared.own[at], schedule, pool: 0, graph: 0, kernel: 0 };
        client.enter();
        client
    }

    fn enter(&mut self) {
        assert_eq!(self.call("cuInit", &[0]), 0);
        self.own.joined.store(1, SeqCst);
        let (mut context, mut module, mut properties) = (0usize, 0usize, [0u32; 22]);
        // If there is no room for the context, another process took it before this one had restarted.
        while self.call("cuDevicePrimaryCtxRetain", &[out(&mut context), 0]) != 0 {
            self.own.done.fetch_add(1, SeqCst);
            std::thread::sleep(Duration::from_micros(500));
        }
        assert_eq!(self.call("cuCtxSetCurrent", &[context]), 0);
        (properties[0], properties[2]) = (1, 1);
        let (mut pool, mut kernel) = (0usize, 0usize);
        assert_eq!(self.call("cuMemPoolCreate", &[out(&mut pool), out(&mut properties)]), 0);
        assert_eq!(self.call("cuModuleLoadData", &[out(&mut module), PTX.as_ptr().expose_provenance()]), 0);
        let name = c"busy_20us".as_ptr().expose_provenance();
        assert_eq!(self.call("cuModuleGetFunction", &[out(&mut kernel), module, name]), 0);
        (self.pool, self.graph, self.kernel) = (pool, graph_of(self, 64), kernel);
    }

    fn address(&self, name: &str) -> usize {
        macro_rules! hooked {
            ($($hook:ident)*) => {
                match name {
                    $(stringify!($hook) => hooks::$hook as *const () as usize,)*
                    _ => self.driver.symbol(name),
                }
            };
        }
        hooked!(
            cuInit cuDevicePrimaryCtxRetain cuCtxSynchronize cuMemAlloc_v2 cuMemAllocPitch_v2 cuMemAllocManaged
            cuMemFree_v2 cuMemPoolCreate cuMemAllocAsync cuMemAllocFromPoolAsync cuMemFreeAsync cuMemCreate cuMemMap
            cuMemUnmap cuMemRelease cuArrayCreate_v2 cuArrayDestroy cuMipmappedArrayCreate cuMipmappedArrayDestroy
            cuGraphInstantiateWithFlags cuGraphLaunch cuGraphExecDestroy cuDeviceGraphMemTrim cuLaunchKernel
        )
    }

    pub fn call(&self, name: &str, arguments: &[usize]) -> i32 {
        call(self.address(name), arguments)
    }

    /// Like [`call`](Self::call), and records its time: the process may have been blocked.
    pub fn timed(&self, name: &str, arguments: &[usize]) -> i32 {
        let address = self.address(name);
        let of = |status| match status {
            _ if name == "cuGraphLaunch" => Blocked::Launch,
            OUT_OF_MEMORY => Blocked::Refusal,
            _ => Blocked::Memory,
        };
        self.time(of, || call(address, arguments))
    }

    /// Launches a kernel of 20 microseconds.
    pub fn launch(&self) {
        let address = hooks::cuLaunchKernel as *const () as usize;
        let call = || call_long(address, &[self.kernel, 1, 1, 1, 1, 1, 1]);
        assert_eq!(self.time(|_| Blocked::Launch, call), 0);
    }

    /// Keeps the longest times of `act`: by the clock, and without the wait for a processor.
    fn time(&self, of: impl FnOnce(i32) -> Blocked, act: impl FnOnce() -> i32) -> i32 {
        let (status, took, blocked) = self.schedule.time(act);
        if took > Duration::from_millis(1) {
            let places = &self.own.longest[of(status) as usize];
            for (place, time) in places.iter().zip([took, blocked]) {
                place.fetch_max(u64::try_from(time.as_nanos()).unwrap(), SeqCst);
            }
        }
        status
    }
}
