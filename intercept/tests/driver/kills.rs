//! SIGKILL at random moments among processes that allocate in every way. KILLS says how often (300; 10,000 take some
//! minutes).
//!
//! The simulated GPU has exactly as much memory as the limit grants, and counts under a lock of its own. Whatever the
//! books grant beyond the limit, it must therefore refuse: no sum has to be read while it changes.

use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::time::{Duration, Instant};

use gpushare_intercept::cuda::{DRIVER, NAMES, hooks, load};
use gpushare_region::path;

use crate::OUT_OF_MEMORY;
use crate::client::{Cuda, Library, MIB, bytes, call, out, really_held};
use crate::place::{Share, books, inside};
use crate::processes::{fork, wait};

const PROCESSES: usize = 8;
/// Eight contexts, and 1 GiB for all.
const LIMIT: u64 = PROCESSES as u64 * 320 + 1024;

fn kills() -> u64 {
    std::env::var("KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(300)
}

/// What all processes of the test share.
struct Shared {
    /// What each process has done since it started.
    done: [AtomicU64; PROCESSES],
    /// Allocations that the books granted and the driver refused.
    granted_too_much: AtomicU64,
    /// Kills so far.
    kills: AtomicU64,
}

fn shared() -> &'static Shared {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping.
    let address = unsafe { libc::mmap(std::ptr::null_mut(), 4096, protection, flags, -1, 0) };
    assert_ne!(address, libc::MAP_FAILED);
    // SAFETY: zeroed words, never unmapped.
    unsafe { &*address.cast() }
}

/// Times that a refusal of the driver is looked into once there are dead processes: while one process gives back what
/// they held, the simulated driver refuses others for some microseconds.
const PATIENCE: u32 = 10;

/// The driver's functions that allocate, and their addresses.
const WATCHED: [&str; 6] = [
    "cuDevicePrimaryCtxRetain",
    "cuMemAlloc_v2",
    "cuMemAllocManaged",
    "cuMemAllocFromPoolAsync",
    "cuMemCreate",
    "cuArrayCreate_v2",
];
static REAL: [AtomicUsize; WATCHED.len()] = [const { AtomicUsize::new(0) }; WATCHED.len()];
/// Address of [`Shared`].
static SHARED: AtomicUsize = AtomicUsize::new(0);

/// The driver's function number `AT`, behind the hook.
extern "C" fn watched<const AT: usize>(a: usize, b: usize, c: usize, d: usize) -> i32 {
    let pointer = std::ptr::with_exposed_provenance::<Shared>(SHARED.load(SeqCst));
    // SAFETY: the shared mapping is never unmapped.
    let shared = unsafe { &*pointer };
    let ask = || call(REAL[AT].load(SeqCst), &[a, b, c, d]);
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

/// A program of which the hooks are a part, so that a watch can stand between them and the driver.
struct Client {
    driver: Library,
}

impl Client {
    fn start(shared: &'static Shared) -> Self {
        let driver = Library::open(path::DRIVER_CUDA);
        load();
        SHARED.store(std::ptr::from_ref(shared).expose_provenance(), SeqCst);
        let watches: [extern "C" fn(usize, usize, usize, usize) -> i32; WATCHED.len()] =
            [watched::<0>, watched::<1>, watched::<2>, watched::<3>, watched::<4>, watched::<5>];
        for ((name, real), watch) in WATCHED.iter().zip(&REAL).zip(watches) {
            real.store(driver.symbol(name), SeqCst);
            DRIVER.set(NAMES.iter().position(|known| known == name).unwrap(), watch as *const () as usize);
        }
        Self { driver }
    }

    fn call(&self, name: &str, arguments: &[usize]) -> i32 {
        macro_rules! hooked {
            ($($hook:ident)*) => {
                match name {
                    $(stringify!($hook) => hooks::$hook as *const () as usize,)*
                    _ => self.driver.symbol(name),
                }
            };
        }
        let address = hooked!(
            cuInit cuDevicePrimaryCtxRetain cuCtxSynchronize cuMemAlloc_v2 cuMemAllocManaged cuMemFree_v2
            cuMemPoolCreate cuMemAllocFromPoolAsync cuMemFreeAsync cuMemCreate cuMemRelease cuArrayCreate_v2
            cuArrayDestroy
        );
        call(address, arguments)
    }
}

fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// Memory that a process holds, with the function that frees it.
type Held = (&'static str, Vec<usize>);

/// Allocates `mib` in one of five ways; the status and what frees it.
fn allocate(cuda: &Client, pool: usize, way: u64, mib: u64) -> (i32, Held) {
    let mut place = 0usize;
    match way {
        0 => (cuda.call("cuMemAlloc_v2", &[out(&mut place), bytes(mib)]), ("cuMemFree_v2", vec![place])),
        1 => {
            let status = cuda.call("cuMemAllocManaged", &[out(&mut place), bytes(mib), 1]);
            (status, ("cuMemFree_v2", vec![place]))
        }
        2 => {
            let status = cuda.call("cuMemAllocFromPoolAsync", &[out(&mut place), bytes(mib), pool, 0]);
            (status, ("cuMemFreeAsync", vec![place, 0]))
        }
        3 => {
            let (size, mut properties) = (bytes(mib.next_multiple_of(2)), [1u32, 0, 1, 0, 0, 0, 0, 0]);
            let status = cuda.call("cuMemCreate", &[out(&mut place), size, out(&mut properties), 0]);
            (status, ("cuMemRelease", vec![place]))
        }
        _ => {
            let mut shape = [1024u64, mib * 256, 1 << 32 | 0x20];
            let status = cuda.call("cuArrayCreate_v2", &[out(&mut place), out(&mut shape)]);
            (status, ("cuArrayDestroy", vec![place]))
        }
    }
}

fn churn(shared: &'static Shared, at: usize, seed: u64) {
    let cuda = Client::start(shared);
    let done = || shared.done[at].fetch_add(1, SeqCst);
    assert_eq!(cuda.call("cuInit", &[0]), 0);
    let (mut context, mut pool, mut properties) = (0usize, 0usize, [0u32; 22]);
    // A context that finds no room: somebody took it who was faster than this one's restart.
    while cuda.call("cuDevicePrimaryCtxRetain", &[out(&mut context), 0]) != 0 {
        done();
        std::thread::sleep(Duration::from_micros(500));
    }
    assert_eq!(cuda.call("cuCtxSetCurrent", &[context]), 0);
    (properties[0], properties[2]) = (1, 1);
    assert_eq!(cuda.call("cuMemPoolCreate", &[out(&mut pool), out(&mut properties)]), 0);
    let (mut state, mut held) = (0x9e37_79b9 + seed, Vec::<Held>::new());
    loop {
        if held.len() > 6 || random(&mut state).is_multiple_of(3) {
            for (free, arguments) in held.drain(..) {
                assert_eq!(cuda.call(free, &arguments), 0, "{free}");
            }
            assert_eq!(cuda.call("cuCtxSynchronize", &[]), 0);
        }
        match allocate(&cuda, pool, random(&mut state) % 5, random(&mut state) % 96 + 1) {
            (0, memory) => held.push(memory),
            (status, (free, _)) => assert_eq!(status, OUT_OF_MEMORY, "what {free} would have freed"),
        }
        done();
        std::thread::sleep(Duration::from_micros(random(&mut state) % 300));
    }
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn processes_killed_at_random_moments_cost_the_others_nothing() {
    // The driver's contexts cost what the books charge for them, so that the two sums can be compared.
    let share = Share { limits: &[LIMIT], memory: LIMIT, context: 320, ..Share::default() };
    if !inside("kills::processes_killed_at_random_moments_cost_the_others_nothing", &share) {
        return;
    }
    let (shared, mut state, mut seed) = (shared(), 42u64, 0u64);
    let mut spawn = |at: usize| {
        seed += 1;
        let seed = seed;
        shared.done[at].store(0, SeqCst);
        fork(|| churn(shared, at, seed))
    };
    let mut children: Vec<_> = (0..PROCESSES).map(&mut spawn).collect();
    let mut waits = Vec::new();
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(shared.granted_too_much.load(SeqCst), 0, "beyond the limit, and nobody was killed yet");
    for kill in 0..kills() {
        std::thread::sleep(Duration::from_micros(random(&mut state) % 3000));
        let victim = usize::try_from(random(&mut state)).unwrap() % PROCESSES;
        let before: Vec<_> = shared.done.iter().map(|done| done.load(SeqCst)).collect();
        shared.kills.fetch_add(1, SeqCst);
        // SAFETY: a child of ours that was not waited for.
        assert_eq!(unsafe { libc::kill(children[victim], libc::SIGKILL) }, 0);
        let killed = Instant::now();
        // One that was started just now has its own reasons to be slow.
        let goes_on =
            |at: usize| at == victim || before[at] == 0 || shared.done[at].load(SeqCst) > before[at];
        while !(0..PROCESSES).all(goes_on) {
            assert!(killed.elapsed() < Duration::from_secs(5), "kill {kill}: the others stand still");
            std::thread::sleep(Duration::from_micros(50));
        }
        waits.push(killed.elapsed());
        assert_eq!(libc::WTERMSIG(wait(children[victim])), libc::SIGKILL, "kill {kill}: it ended by itself");
        assert_eq!(shared.granted_too_much.load(SeqCst), 0, "kill {kill}: beyond the limit");
        children[victim] = spawn(victim);
    }
    for child in children {
        // SAFETY: a child of ours that was not waited for.
        assert_eq!(unsafe { libc::kill(child, libc::SIGKILL) }, 0);
        assert_eq!(libc::WTERMSIG(wait(child)), libc::SIGKILL);
    }
    assert!(books().refused > kills(), "nobody met the limit: {:?}", books());
    let cuda = Cuda::start();
    cuda.allocate(LIMIT - 320).unwrap();
    let books = books();
    assert_eq!((books.processes, books.devices[0].bytes / MIB, really_held(0)), (1, LIMIT, LIMIT));
    waits.sort_unstable();
    let quantile = |percent: usize| waits[(waits.len() - 1) * percent / 100];
    println!(
        "the others went on after {:?} (median), {:?} (99 %), {:?}",
        quantile(50),
        quantile(99),
        quantile(100)
    );
    println!("{} refused, {} slots reclaimed, {} locks stolen", books.refused, books.reclaimed, books.stolen);
}
