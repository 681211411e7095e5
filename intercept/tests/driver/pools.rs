//! Stream-ordered memory obeys the limit, pool by pool.

use std::time::{Duration, Instant};

use crate::OUT_OF_MEMORY;
use crate::client::{Cuda, MIB, bytes, out, really_held};
use crate::place::{CONTEXT, Share, books, charged, inside};

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn cases_3_4_pools_are_charged_what_they_reserve_and_once() {
    if !inside("pools::cases_3_4_pools_are_charged_what_they_reserve_and_once", &Share::default()) {
        return;
    }
    let cuda = Cuda::start();
    let (mut pool, mut pointer, mut keep) = (0usize, 0u64, u64::MAX);
    assert_eq!(cuda.call("cuDeviceGetDefaultMemPool", &[out(&mut pool), 0]), 0);
    assert_eq!(cuda.call("cuMemPoolSetAttribute", &[pool, 4, out(&mut keep)]), 0);
    let from_pool =
        |pointer: &mut u64, mib| cuda.call("cuMemAllocFromPoolAsync", &[out(pointer), bytes(mib), pool, 0]);
    assert_eq!(from_pool(&mut pointer, 2048), OUT_OF_MEMORY);
    assert_eq!(from_pool(&mut pointer, 100), 0);
    assert_eq!((charged(), really_held(0)), (CONTEXT + 128, CONTEXT + 128), "in chunks of 32 MiB, once");
    let mut second = 0u64;
    assert_eq!(cuda.call("cuMemAllocAsync", &[out(&mut second), bytes(20), 0]), 0);
    assert_eq!((charged(), really_held(0)), (CONTEXT + 128, CONTEXT + 128), "the chunk had room");
    for pointer in [pointer, second] {
        assert_eq!(cuda.call("cuMemFreeAsync", &[usize::try_from(pointer).unwrap(), 0]), 0);
    }
    assert_eq!(cuda.call("cuStreamSynchronize", &[0]), 0);
    assert_eq!((charged(), really_held(0)), (CONTEXT + 128, CONTEXT + 128), "the pool keeps it");
    assert!(cuda.allocate(1024).is_ok(), "before refusing, unused pool memory goes back");
    assert_eq!((charged(), really_held(0)), (CONTEXT + 1024, CONTEXT + 1024));
    assert_eq!(from_pool(&mut pointer, 1), OUT_OF_MEMORY);
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn case_3_a_pool_shrinks_at_synchronisation_trim_and_destruction() {
    if !inside("pools::case_3_a_pool_shrinks_at_synchronisation_trim_and_destruction", &Share::default()) {
        return;
    }
    let cuda = Cuda::start();
    let (mut pool, mut pointer) = (0usize, 0u64);
    let mut properties = [0u32; 22];
    (properties[0], properties[2]) = (1, 1);
    assert_eq!(cuda.call("cuMemPoolCreate", &[out(&mut pool), out(&mut properties)]), 0);
    for round in 0..20 {
        assert_eq!(
            cuda.call("cuMemAllocFromPoolAsync", &[out(&mut pointer), bytes(960), pool, 0]),
            0,
            "{round}"
        );
        assert_eq!((charged(), really_held(0)), (CONTEXT + 960, CONTEXT + 960));
        assert_eq!(cuda.call("cuMemFreeAsync", &[usize::try_from(pointer).unwrap(), 0]), 0);
        assert_eq!(cuda.call("cuCtxSynchronize", &[]), 0);
        assert_eq!((charged(), really_held(0)), (CONTEXT, CONTEXT));
    }
    assert_eq!(cuda.call("cuMemAllocFromPoolAsync", &[out(&mut pointer), bytes(960), pool, 0]), 0);
    assert_eq!(cuda.free(pointer), 0, "cuMemFree takes stream-ordered memory too");
    assert_eq!(cuda.call("cuMemPoolTrimTo", &[pool, 0]), 0);
    assert_eq!(charged(), CONTEXT);
    assert_eq!(cuda.call("cuMemPoolDestroy", &[pool]), 0);
    assert_eq!((charged(), really_held(0)), (CONTEXT, CONTEXT));
    // A pool of host memory costs nothing.
    properties[2] = 2;
    assert_eq!(cuda.call("cuMemPoolCreate", &[out(&mut pool), out(&mut properties)]), 0);
    assert_eq!(cuda.call("cuMemAllocFromPoolAsync", &[out(&mut pointer), bytes(2048), pool, 0]), 0);
    assert_eq!((charged(), really_held(0)), (CONTEXT, CONTEXT));
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn unknown_pools_take_no_place() {
    if !inside("pools::unknown_pools_take_no_place", &Share::default()) {
        return;
    }
    let cuda = Cuda::start();
    let mut pointer = 0u64;
    for index in 0..200 {
        let status = cuda.call("cuMemAllocFromPoolAsync", &[out(&mut pointer), bytes(1), 0x7000 + index, 0]);
        assert!(![0, OUT_OF_MEMORY].contains(&status), "{index}: {status}");
    }
    assert_eq!(cuda.call("cuMemAllocAsync", &[out(&mut pointer), bytes(1), 0]), 0);
    assert_eq!((charged(), really_held(0)), (CONTEXT + 32, CONTEXT + 32));
}

/// A pool of GPU memory; `kind` 1 is ordinary, 2 managed.
pub fn pool_of(cuda: &Cuda, kind: u32) -> usize {
    let (mut pool, mut properties) = (0usize, [0u32; 22]);
    (properties[0], properties[2]) = (kind, u32::from(kind == 1));
    assert_eq!(cuda.call("cuMemPoolCreate", &[out(&mut pool), out(&mut properties)]), 0);
    pool
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn a_destroyed_pool_is_paid_until_its_last_free_has_run() {
    if !inside("pools::a_destroyed_pool_is_paid_until_its_last_free_has_run", &Share::default()) {
        return;
    }
    let cuda = Cuda::start();
    let mut streams = [0usize; 2];
    for stream in &mut streams {
        assert_eq!(cuda.call("cuStreamCreate", &[out(stream), 1]), 0);
    }
    let [stream, other] = streams;
    let allocate = |pool, mib| {
        let mut pointer = 0usize;
        let status = cuda.call("cuMemAllocFromPoolAsync", &[out(&mut pointer), bytes(mib), pool, stream]);
        assert_eq!(status, 0);
        pointer
    };
    let pool = pool_of(&cuda, 1);
    let (first, second) = (allocate(pool, 320), allocate(pool, 320));
    assert_eq!(cuda.call("cuMemPoolDestroy", &[pool]), 0);
    assert_eq!((charged(), really_held(0)), (CONTEXT + 640, CONTEXT + 640), "both live");
    assert_eq!(cuda.call("cuMemFreeAsync", &[first, stream]), 0);
    assert_eq!(cuda.call("cuStreamSynchronize", &[stream]), 0);
    assert_eq!(charged(), CONTEXT + 640, "one lives, and what the pool keeps beside it cannot be asked");
    assert_eq!(cuda.call("cuMemFreeAsync", &[second, stream]), 0);
    assert_eq!(charged(), CONTEXT + 640, "the free may still have to run");
    assert_eq!(cuda.call("cuStreamSynchronize", &[other]), 0);
    assert_eq!(charged(), CONTEXT + 640, "another stream says nothing");
    assert_eq!(cuda.call("cuStreamSynchronize", &[stream]), 0);
    assert_eq!((charged(), really_held(0)), (CONTEXT, CONTEXT));
    // Destroyed while frees are pending on two streams.
    let pool = pool_of(&cuda, 1);
    let (first, second) = (allocate(pool, 320), allocate(pool, 320));
    assert_eq!(cuda.call("cuMemFreeAsync", &[first, stream]), 0);
    assert_eq!(cuda.call("cuMemFreeAsync", &[second, other]), 0);
    assert_eq!(cuda.call("cuMemPoolDestroy", &[pool]), 0);
    for stream in streams {
        assert_eq!(charged(), CONTEXT + 640);
        assert_eq!(cuda.call("cuStreamSynchronize", &[stream]), 0);
    }
    assert_eq!(cuda.call("cuCtxSynchronize_v2", &[0]), 0);
    assert_eq!((charged(), really_held(0)), (CONTEXT, CONTEXT));
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn a_pool_of_managed_memory_is_paid_on_the_current_gpu() {
    if !inside("pools::a_pool_of_managed_memory_is_paid_on_the_current_gpu", &Share::default()) {
        return;
    }
    let cuda = Cuda::start();
    let (pool, mut pointer) = (pool_of(&cuda, 2), 0u64);
    let mut allocate = |mib| cuda.call("cuMemAllocFromPoolAsync", &[out(&mut pointer), bytes(mib), pool, 0]);
    assert_eq!(allocate(2048), OUT_OF_MEMORY);
    assert_eq!(allocate(640), 0);
    assert_eq!((charged(), really_held(0)), (CONTEXT + 640, CONTEXT + 640));
}

/// The default pool, which keeps all memory that it gets.
fn keeping_pool(cuda: &Cuda) -> usize {
    let (mut pool, mut keep) = (0usize, u64::MAX);
    assert_eq!(cuda.call("cuDeviceGetDefaultMemPool", &[out(&mut pool), 0]), 0);
    assert_eq!(cuda.call("cuMemPoolSetAttribute", &[pool, 4, out(&mut keep)]), 0);
    pool
}

fn allocate(cuda: &Cuda, mib: u64) -> Result<usize, i32> {
    let mut pointer = 0usize;
    match cuda.call("cuMemAllocAsync", &[out(&mut pointer), bytes(mib), 0]) {
        0 => Ok(pointer),
        status => Err(status),
    }
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn room_of_a_pool_that_is_paid_needs_no_further_room() {
    let full = Share { limits: &[CONTEXT + 992], ..Share::default() };
    if !inside("pools::room_of_a_pool_that_is_paid_needs_no_further_room", &full) {
        return;
    }
    let cuda = Cuda::start();
    keeping_pool(&cuda);
    let most = allocate(&cuda, 970).unwrap();
    let rest = allocate(&cuda, 20).expect("22 MiB of the last chunk are free");
    for pointer in [most, rest] {
        assert_eq!(cuda.call("cuMemFreeAsync", &[pointer, 0]), 0);
    }
    for round in 0..20 {
        let pointers = [320, 320, 320].map(|mib| allocate(&cuda, mib).unwrap());
        assert_eq!(charged(), CONTEXT + 992, "round {round}: the pool keeps what it has");
        for pointer in pointers {
            assert_eq!(cuda.call("cuMemFreeAsync", &[pointer, 0]), 0);
        }
    }
    assert_eq!(books().refused, 0);
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn a_pool_whose_room_is_in_pieces_gives_it_back_before_a_refusal() {
    let full = Share { limits: &[CONTEXT + 96], ..Share::default() };
    if !inside("pools::a_pool_whose_room_is_in_pieces_gives_it_back_before_a_refusal", &full) {
        return;
    }
    let cuda = Cuda::start();
    keeping_pool(&cuda);
    let [first, _, third] = [32, 32, 32].map(|mib| allocate(&cuda, mib).unwrap());
    for pointer in [first, third] {
        assert_eq!(cuda.call("cuMemFreeAsync", &[pointer, 0]), 0);
    }
    allocate(&cuda, 64).expect("64 MiB are free, if not in one piece");
    assert_eq!((charged(), really_held(0), books().refused), (CONTEXT + 96, CONTEXT + 96, 0));
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn two_threads_do_not_count_on_the_same_room() {
    // One chunk, and the rest of a chunk that was returned around the first allocation.
    let full = Share { limits: &[CONTEXT + 32 + 2], ..Share::default() };
    if !inside("pools::two_threads_do_not_count_on_the_same_room", &full) {
        return;
    }
    let cuda = Cuda::start();
    let pool = keeping_pool(&cuda);
    allocate(&cuda, 1).unwrap();
    let end = Instant::now() + Duration::from_secs(2);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                assert_eq!(cuda.call("cuCtxSetCurrent", &[cuda.context]), 0);
                while Instant::now() < end {
                    if let Ok(pointer) = allocate(&cuda, 20) {
                        assert_eq!(cuda.call("cuMemFreeAsync", &[pointer, 0]), 0);
                    }
                }
            });
        }
    });
    let mut most = 0u64;
    assert_eq!(cuda.call("cuMemPoolGetAttribute", &[pool, 6, out(&mut most)]), 0);
    assert!(most <= 34 * MIB, "the most that was reserved: {most}");
}
