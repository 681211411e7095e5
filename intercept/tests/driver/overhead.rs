//! The charge for contexts, and the effect of the host's figure near the limit.

use std::os::unix::fs::FileExt;

use gpushare_region::{LIMITS_LEN, charged_at, set_supervised};

use crate::OUT_OF_MEMORY;
use crate::client::{Cuda, Library, MIB, bytes, out};
use crate::place::{Share, charged, inside, limits_file};

/// The offset of a line's figures in the limits file, for the first GPU.
const COST: u64 = 64 + 48;
const FIGURE: u64 = 64 + 56;

fn write(bytes: &[u8], at: u64) {
    limits_file().write_all_at(bytes, at).unwrap();
}

/// Writes the cost of contexts, in MiB, the way the host does.
fn set_cost(bare: u32, most: u32) {
    write(&[bare.to_ne_bytes(), most.to_ne_bytes()].concat(), COST);
}

/// Writes, the way the host does, that contexts use `taken` of `charged` MiB, measured `age` nanoseconds ago.
fn set_figure(taken: u64, charged: u64, age: u64) {
    let part = (taken << 16).div_ceil(charged);
    let at = (monotonic() - age) >> 20 & u64::from(u32::MAX);
    write(&(at << 32 | part).to_ne_bytes(), FIGURE);
}

fn monotonic() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one timespec.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) }, 0);
    u64::try_from(time.tv_sec).unwrap() * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap()
}

/// Creates a context on the first GPU; false: there is no memory for it.
fn retain(library: &Library) -> bool {
    let mut context = 0usize;
    match library.call("cuDevicePrimaryCtxRetain", &[out(&mut context), 0]) {
        0 => true,
        status => {
            assert_eq!(status, OUT_OF_MEMORY);
            false
        }
    }
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn a_context_is_charged_the_most_that_was_seen_or_all_that_is_left() {
    let name = "overhead::a_context_is_charged_the_most_that_was_seen_or_all_that_is_left";
    if !inside(name, &Share { limits: &[2048], ..Share::default() }) {
        return;
    }
    let library = Library::open("libcuda.so.1");
    assert_eq!(library.call("cuInit", &[0]), 0);
    for (bare, most, limit, want) in [
        (520, 776, 2048, Some(776)),
        (520, 776, 776, Some(776)),
        (520, 776, 600, Some(600)),
        (520, 776, 520, Some(520)),
        (520, 776, 519, None),
        (105, 200, 256, Some(200)),
        (0, 0, 2048, Some(776)), // unknown to the host
    ] {
        set_cost(bare, most);
        write(&(limit * MIB).to_ne_bytes(), 64 + 16);
        let context = retain(&library);
        let got = context.then(charged);
        assert_eq!(got, want, "{bare} to {most} MiB in {limit}");
        if context {
            assert_eq!(library.call("cuDevicePrimaryCtxRelease_v2", &[0]), 0);
            assert_eq!(charged(), 0, "{bare} to {most} MiB in {limit}: given back");
        }
    }
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn near_the_limit_the_hosts_figure_replaces_the_charge() {
    let name = "overhead::near_the_limit_the_hosts_figure_replaces_the_charge";
    if !inside(name, &Share { limits: &[4096], ..Share::default() }) {
        return;
    }
    set_cost(520, 776);
    let cuda = Cuda::start();
    let fits = |mib: u64| match cuda.allocate(mib) {
        Ok(pointer) => {
            assert_eq!(cuda.free(pointer), 0);
            true
        }
        Err(status) => {
            assert_eq!(status, OUT_OF_MEMORY);
            false
        }
    };
    assert_eq!(charged(), 776);
    let second = 1_000_000_000;
    for (taken, age, want) in [
        (None, 0, 4096 - 776),
        (Some(612), 0, 4096 - 612),
        (Some(612), 2 * second, 4096 - 776), // too old to allow more
        (Some(1000), 0, 4096 - 1000),
        (Some(1000), 100 * second, 4096 - 1000), // loaded code does not go away
        (Some(3000), 0, 4096 - 3000),
    ] {
        match taken {
            Some(taken) => set_figure(taken, 776, age),
            None => write(&[0; 8], FIGURE),
        }
        assert!(!fits(want + 2), "{taken:?}, {age} ns old: more than {want}");
        // The figure is in units of 1/65,536, rounded up.
        assert!(fits(want - 2), "{taken:?}, {age} ns old: {want}");
        if age == 0 {
            let free = cuda.memory().0;
            assert!((want - 1..=want).contains(&free), "{taken:?}: {free} are shown as free");
        }
    }
}

/// A figure for two contexts says nothing about the one that has since ended.
#[test]
#[ignore = "needs root: makes a mount namespace"]
fn what_an_ended_context_did_not_use_is_given_to_nobody() {
    let name = "overhead::what_an_ended_context_did_not_use_is_given_to_nobody";
    if !inside(name, &Share { gpus: 1, limits: &[4096], ..Share::default() }) {
        return;
    }
    set_cost(520, 776);
    let cuda = Cuda::start();
    // Eight processes were counted; only this one is left.
    set_figure(8 * 600, 8 * 776, 0);
    assert_eq!(cuda.allocate(4096 - 600 + 2), Err(OUT_OF_MEMORY));
    assert!(cuda.allocate(4096 - 602).is_ok());
}

/// A supervisor does not charge managed memory, in whatever way it is allocated and freed.
#[test]
#[ignore = "needs root: makes a mount namespace"]
fn managed_memory_lowers_what_a_supervisor_leaves_while_it_is_there() {
    let name = "overhead::managed_memory_lowers_what_a_supervisor_leaves_while_it_is_there";
    if !inside(name, &Share { limits: &[2048], ..Share::default() }) {
        return;
    }
    let cuda = Cuda::start();
    let mut limits = [0; LIMITS_LEN];
    limits_file().read_exact_at(&mut limits, 0).unwrap();
    set_supervised(&mut limits);
    write(&limits, 0);
    write(&(520 * MIB).to_ne_bytes(), charged_at(0) as u64);
    let free = || cuda.memory().0;
    assert_eq!(free(), 1528);
    let mut pointer = 0usize;
    let mut managed = |mib| cuda.call("cuMemAllocManaged", &[out(&mut pointer), bytes(mib), 1]);
    assert_eq!(managed(1529), OUT_OF_MEMORY);
    assert_eq!((managed(512), free()), (0, 1016));
    assert_eq!((managed(1017), free()), (OUT_OF_MEMORY, 1016));
    assert_eq!((cuda.call("cuMemFree_v2", &[pointer]), free()), (0, 1528));

    let mut managed = |mib| cuda.call("cuMemAllocManaged", &[out(&mut pointer), bytes(mib), 1]);
    assert_eq!((managed(512), free()), (0, 1016));
    assert_eq!(cuda.call("cuMemFreeAsync", &[pointer, 0]), 0);
    assert_eq!((cuda.call("cuCtxSynchronize", &[]), free()), (0, 1528), "freed in a stream");

    // A pool that prefers the GPU.
    let (mut pool, mut properties) = (0usize, [0u32; 22]);
    (properties[0], properties[2]) = (2, 1);
    assert_eq!(cuda.call("cuMemPoolCreate", &[out(&mut pool), out(&mut properties)]), 0);
    let mut pooled = |mib| cuda.call("cuMemAllocFromPoolAsync", &[out(&mut pointer), bytes(mib), pool, 0]);
    assert_eq!((pooled(512), free()), (0, 1016), "a pool");
    assert_eq!(cuda.call("cuMemPoolDestroy", &[pool]), 0);
    assert_eq!(cuda.call("cuMemFreeAsync", &[pointer, 0]), 0);
    assert_eq!((cuda.call("cuCtxSynchronize", &[]), free()), (0, 1528), "a destroyed pool");
}
