//! SIGKILL at random moments among processes that launch, and that allocate in every way. KILLS sets the
//! number of kills (default 300; 10,000 take some minutes).
//!
//! The simulated GPU has exactly as much memory as the limit grants, and counts it under its own lock. It
//! therefore refuses anything that the books grant beyond the limit, and no sum has to be read while it
//! changes.

mod client;
mod ways;

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use client::Client;
use ways::{Held, WAYS, allocate};

use crate::OUT_OF_MEMORY;
use crate::client::{MIB, really_held};
use crate::compute::Program;
use crate::place::{CONTEXT, Share, books, inside};
use crate::processes::{fork, wait};

const PROCESSES: usize = 8;
/// Eight contexts, and 1 GiB for all processes together.
const LIMIT: u64 = PROCESSES as u64 * CONTEXT + 1024;
/// Percent of the GPU. The processes use less, so none waits for the share: any wait has another cause.
const CORES: u32 = 80;

fn kills() -> u64 {
    std::env::var("KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(300)
}

/// The state that all processes of the test share.
struct Shared {
    own: [Own; PROCESSES],
    /// Allocations that the books granted and the driver refused.
    granted_too_much: AtomicU64,
    /// Kills so far.
    kills: AtomicU64,
}

/// The report of one process.
struct Own {
    /// 1 once the driver has accepted the process.
    joined: AtomicU64,
    /// The number of rounds since it started.
    done: AtomicU64,
    /// The longest calls since the last kill, by kind: total nanoseconds, and nanoseconds without the time in
    /// which a runnable thread had no processor. Only the second can be caused by a kill.
    longest: [[AtomicU64; 2]; KINDS.len()],
}

/// Calls that may be blocked.
#[derive(Clone, Copy)]
enum Blocked {
    /// Calls that got or freed memory.
    Memory,
    /// Refusals, which first wait for the memory of dying processes, ten milliseconds at most.
    Refusal,
    /// Launches, which also wait if the share is used up.
    Launch,
}
const KINDS: [&str; 3] = ["memory calls", "refusals", "launches"];
/// The contents of [`Own::longest`].
type Longest = [[Duration; 2]; KINDS.len()];

fn shared() -> &'static Shared {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping.
    let address = unsafe { libc::mmap(std::ptr::null_mut(), 4096, protection, flags, -1, 0) };
    assert_ne!(address, libc::MAP_FAILED);
    // SAFETY: zeroed words, never unmapped.
    unsafe { &*address.cast() }
}

impl Shared {
    fn done(&self) -> [u64; PROCESSES] {
        std::array::from_fn(|at| self.own[at].done.load(SeqCst))
    }

    fn wait_until(&self, what: &str, holds: impl Fn(usize) -> bool) {
        let start = Instant::now();
        while !(0..PROCESSES).all(&holds) {
            let kills = self.kills.load(SeqCst);
            assert!(start.elapsed() < Duration::from_secs(5), "after {kills} kills, waiting until {what}");
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// The longest calls of any process except `victim` since the last call.
    fn take_longest(&self, victim: usize) -> Longest {
        let mut longest = Longest::default();
        for (at, own) in self.own.iter().enumerate() {
            for (all, time) in longest.as_flattened_mut().iter_mut().zip(own.longest.as_flattened()) {
                let time = Duration::from_nanos(time.swap(0, SeqCst));
                *all = if at == victim { *all } else { time.max(*all) };
            }
        }
        longest
    }
}

fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

fn churn(shared: &'static Shared, at: usize, seed: u64) {
    let cuda = Client::start(shared, at);
    let free = |held: Held| {
        for (name, arguments) in held {
            assert_eq!(cuda.timed(name, &arguments), 0, "{name}");
        }
    };
    let (mut state, mut all) = (0x9e37_79b9 + seed, Vec::<Held>::new());
    loop {
        if all.len() > 6 || random(&mut state).is_multiple_of(3) {
            all.drain(..).for_each(free);
            assert_eq!(cuda.call("cuCtxSynchronize", &[]), 0);
        }
        match allocate(&cuda, random(&mut state) % WAYS, (random(&mut state) % 48 + 1) * 2) {
            Ok(held) => all.push(held),
            Err((status, held)) => {
                assert_eq!(status, OUT_OF_MEMORY);
                free(held);
            }
        }
        (0..random(&mut state) % 4).for_each(|_| cuda.launch());
        shared.own[at].done.fetch_add(1, SeqCst);
        std::thread::sleep(Duration::from_micros(random(&mut state) % 300));
    }
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn processes_killed_at_random_moments_cost_the_others_nothing() {
    // The driver's contexts cost as much as the books charge for them, so that the two sums are comparable.
    let share = Share {
        limits: &[LIMIT],
        memory: LIMIT,
        context: Some(CONTEXT),
        cores: &[CORES],
        ..Share::default()
    };
    if !inside("kills::processes_killed_at_random_moments_cost_the_others_nothing", &share) {
        return;
    }
    let (shared, mut state, mut seed) = (shared(), 42u64, 0u64);
    let mut spawn = |at: usize| {
        seed += 1;
        let seed = seed;
        shared.own[at].joined.store(0, SeqCst);
        shared.own[at].done.store(0, SeqCst);
        fork(|| churn(shared, at, seed))
    };
    let mut children: Vec<_> = (0..PROCESSES).map(&mut spawn).collect();
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(shared.granted_too_much.load(SeqCst), 0, "beyond the limit, and nobody was killed yet");
    assert!(books().devices[0].launches > 100, "no launch was paid: {:?}", books());
    shared.take_longest(PROCESSES);
    // The same measurement without kills, in windows of similar length. It shows the effect of a busy machine
    // and of the share.
    let quiet: Vec<_> = (0..kills().clamp(100, 1000))
        .map(|_| {
            std::thread::sleep(Duration::from_millis(3));
            shared.take_longest(PROCESSES)
        })
        .collect();
    let mut longest = Vec::new();
    for kill in 0..kills() {
        std::thread::sleep(Duration::from_micros(random(&mut state) % 3000));
        let victim = usize::try_from(random(&mut state)).unwrap() % PROCESSES;
        // A process that joins takes over the simulated driver's entry of a dead process, whose memory is
        // held until that entry is cleared. So no process may join while another is dead.
        shared.wait_until("all have joined", |at| at == victim || shared.own[at].joined.load(SeqCst) == 1);
        longest.push(shared.take_longest(victim));
        let before = shared.done();
        shared.kills.fetch_add(1, SeqCst);
        // SAFETY: a child of ours that has not been reaped.
        assert_eq!(unsafe { libc::kill(children[victim], libc::SIGKILL) }, 0);
        // A process that has only just started may be slow for other reasons.
        shared.wait_until("the others go on", |at| {
            at == victim || before[at] == 0 || shared.done()[at] > before[at]
        });
        assert_eq!(libc::WTERMSIG(wait(children[victim])), libc::SIGKILL, "kill {kill}: it ended by itself");
        assert_eq!(shared.granted_too_much.load(SeqCst), 0, "kill {kill}: beyond the limit");
        really_held(0); // clears the memory of the dead process
        children[victim] = spawn(victim);
    }
    for child in children {
        // SAFETY: a child of ours that has not been reaped.
        assert_eq!(unsafe { libc::kill(child, libc::SIGKILL) }, 0);
        assert_eq!(libc::WTERMSIG(wait(child)), libc::SIGKILL);
    }
    assert!(books().refused > kills(), "nobody met the limit: {:?}", books());
    afterwards();
    for (kind, what) in KINDS.iter().enumerate() {
        print(&format!("{what} without kills"), &quiet, kind);
        let [most_kills, any_kill] = print(&format!("{what} beside kills"), &longest, kind);
        // A virtual machine stands still now and then, and no kernel counter shows it: one kill in a hundred
        // may coincide with such a moment.
        assert!(most_kills < Duration::from_millis(10), "kills hold {what} up for {most_kills:?}");
        assert!(any_kill < Duration::from_secs(1), "a kill held {what} up for {any_kill:?}");
    }
    let books = books();
    println!("{} refused, {} slots reclaimed, {} locks stolen", books.refused, books.reclaimed, books.stolen);
}

/// Checks that everything that dead processes held is available again, memory and time.
fn afterwards() {
    let program = Program::start();
    program.cuda.allocate(LIMIT - CONTEXT).unwrap();
    let books = books();
    assert_eq!((books.processes, books.devices[0].bytes / MIB, really_held(0)), (1, LIMIT, LIMIT));
    let (kernel, length) = (program.kernel(c"busy_1ms"), Duration::from_millis(1));
    let share = program.share_of(Duration::from_secs(1), length, || program.launch(kernel));
    assert!((share - f64::from(CORES)).abs() < 6.0, "{share:.1} % of {CORES} %");
}

/// Prints the distribution of one kind of call. Returns the longest time for which a call was blocked: among
/// ninety-nine windows of a hundred, and of all.
fn print(what: &str, longest: &[Longest], kind: usize) -> [Duration; 2] {
    let [took, blocked] = [0, 1].map(|which| {
        let mut times: Vec<_> = longest.iter().map(|times| times[kind][which]).collect();
        times.sort_unstable();
        [50, 99, 100].map(|percent| times[(times.len() - 1) * percent / 100])
    });
    println!("{what}, median, 99 % and most: {took:?}, of that blocked {blocked:?}");
    [blocked[1], blocked[2]]
}
