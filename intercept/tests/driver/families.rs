//! Every family of allocations obeys the limit, and returns the memory that it took.

use gpushare_region::path;

use crate::client::{Cuda, Library, MIB, bytes, out, really_held};
use crate::place::{CONTEXT, Share, books, charged, inside};
use crate::{INVALID_VALUE, OUT_OF_MEMORY};

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn case_15_a_refusal_is_error_2_with_outputs_untouched() {
    if !inside("families::case_15_a_refusal_is_error_2_with_outputs_untouched", &Share::default()) {
        return;
    }
    let cuda = Cuda::start();
    let mut pointer = 0x5a5a_u64;
    assert_eq!(cuda.call("cuMemAlloc_v2", &[out(&mut pointer), bytes(1025)]), OUT_OF_MEMORY);
    assert_eq!(pointer, 0x5a5a);
    let whole = cuda.allocate(1024).unwrap();
    assert_eq!(cuda.allocate(1), Err(OUT_OF_MEMORY));
    assert_eq!((charged(), really_held(0)), (CONTEXT + 1024, CONTEXT + 1024));
    assert_eq!(books().refused, 2);
    assert_eq!(cuda.free(whole), 0);
    assert!(cuda.allocate(1024).is_ok());
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn case_11_pitched_managed_and_virtual_memory_is_charged_before_the_driver() {
    if !inside(
        "families::case_11_pitched_managed_and_virtual_memory_is_charged_before_the_driver",
        &Share::default(),
    ) {
        return;
    }
    let cuda = Cuda::start();
    let (mut pointer, mut pitch) = (0u64, 0usize);
    let pitched = |pointer: &mut u64, pitch: &mut usize, rows: usize| {
        cuda.call("cuMemAllocPitch_v2", &[out(pointer), out(pitch), 1 << 20, rows, 4])
    };
    assert_eq!(pitched(&mut pointer, &mut pitch, 2048), OUT_OF_MEMORY);
    assert_eq!(pitched(&mut pointer, &mut pitch, 1000), 0);
    assert_eq!((charged(), really_held(0)), (CONTEXT + 1000, CONTEXT + 1000));
    assert_eq!(cuda.free(pointer), 0);
    let managed = |pointer: &mut u64, mib| cuda.call("cuMemAllocManaged", &[out(pointer), bytes(mib), 1]);
    assert_eq!(managed(&mut pointer, 2048), OUT_OF_MEMORY);
    assert_eq!(managed(&mut pointer, 1024), 0);
    assert_eq!(charged(), CONTEXT + 1024);
    assert_eq!(cuda.free(pointer), 0);
    assert_eq!(charged(), CONTEXT);
    // The driver refuses an allocation that fits the limit: the charge is released.
    assert_eq!(cuda.call("cuMemAllocManaged", &[out(&mut pointer), bytes(8), 77]), INVALID_VALUE);
    assert_eq!(cuda.allocate(0), Err(INVALID_VALUE));
    assert_eq!(charged(), CONTEXT);
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn case_13_unknown_pointers_are_the_drivers_business() {
    if !inside("families::case_13_unknown_pointers_are_the_drivers_business", &Share::default()) {
        return;
    }
    let cuda = Cuda::start();
    assert_eq!(cuda.free(0x1234_5000), INVALID_VALUE);
    assert_eq!(cuda.free(0), 0, "freeing null is allowed");
    assert_eq!(cuda.call("cuArrayDestroy", &[0x1234_5000]), cuda.call("cuArrayDestroy", &[0x1234_6000]));
    assert_eq!(charged(), CONTEXT);
    let pointer = cuda.allocate(8).unwrap();
    assert_eq!(cuda.free(pointer), 0);
    assert_eq!(cuda.free(pointer), INVALID_VALUE, "twice");
    assert_eq!(charged(), CONTEXT);
}

/// Case 14: managed pointers reported as not managed.
#[test]
#[ignore = "needs root: makes a mount namespace"]
fn case_14_pointers_are_what_the_driver_says_they_are() {
    if !inside("families::case_14_pointers_are_what_the_driver_says_they_are", &Share::default()) {
        return;
    }
    let cuda = Cuda::start();
    let (mut linear, mut managed, mut ordered) = (cuda.allocate(8).unwrap(), 0u64, 0u64);
    assert_eq!(cuda.call("cuMemAllocManaged", &[out(&mut managed), bytes(8), 1]), 0);
    assert_eq!(cuda.call("cuMemAllocAsync", &[out(&mut ordered), bytes(8), 0]), 0);
    let bare = Library::open(path::DRIVER_CUDA);
    for (what, pointer, is_managed) in
        [("linear", &mut linear, 0), ("managed", &mut managed, 1), ("ordered", &mut ordered, 0)]
    {
        let place = usize::try_from(*pointer).unwrap();
        // CU_POINTER_ATTRIBUTE_IS_MANAGED, and all attributes that one word holds.
        let mut word = 7u32;
        assert_eq!(cuda.call("cuPointerGetAttribute", &[out(&mut word), 8, place]), 0, "{what}");
        assert_eq!(word & 0xff, is_managed, "{what}");
        for attribute in (1..=20).filter(|attribute| *attribute != 5) {
            let (mut ours, mut theirs) = ([7u64; 2], [7u64; 2]);
            let status = cuda.call("cuPointerGetAttribute", &[out(&mut ours), attribute, place]);
            let expected = bare.call("cuPointerGetAttribute", &[out(&mut theirs), attribute, place]);
            assert_eq!((status, ours), (expected, theirs), "{what}, attribute {attribute}");
        }
    }
}

/// Case 50: out of memory after a resize under managed memory, because the new size was charged before the
/// old one was freed.
#[test]
#[ignore = "needs root: makes a mount namespace"]
fn case_50_memory_that_was_freed_makes_room_for_a_larger_piece() {
    if !inside("families::case_50_memory_that_was_freed_makes_room_for_a_larger_piece", &Share::default()) {
        return;
    }
    let cuda = Cuda::start();
    let mut pointer = 0u64;
    for mib in (64..=1024).step_by(64) {
        assert_eq!(cuda.call("cuMemAllocManaged", &[out(&mut pointer), bytes(mib), 1]), 0, "{mib} MiB");
        assert_eq!(charged(), CONTEXT + mib);
        assert_eq!(cuda.free(pointer), 0);
    }
}

/// Case 48: calls between GPUs blocked.
#[test]
#[ignore = "needs root: makes a mount namespace"]
fn case_48_calls_between_gpus_reach_the_driver() {
    let share = Share { gpus: 2, limits: &[CONTEXT + 1024, CONTEXT + 1024], ..Share::default() };
    if !inside("families::case_48_calls_between_gpus_reach_the_driver", &share) {
        return;
    }
    let cuda = Cuda::start();
    let nvml = Library::open("libnvidia-ml.so.1");
    for (library, driver, names) in [
        (&cuda.library, path::DRIVER_CUDA, &BETWEEN_GPUS[..]),
        (&nvml, path::DRIVER_NVML, &["nvmlDeviceGetP2PStatus"]),
    ] {
        let bare = Library::open(driver);
        for name in names {
            assert_ne!(bare.symbol(name), 0, "the simulated driver has no {name}");
            assert_eq!(library.symbol(name), bare.symbol(name), "{name} does not reach the driver");
        }
    }
    let (mut other, mut answer) = (0usize, 7i32);
    assert_eq!(cuda.call("cuDeviceCanAccessPeer", &[out(&mut answer), 0, 1]), 0);
    assert_eq!(answer, 1, "the simulated GPUs reach each other");
    assert_eq!(cuda.call("cuDevicePrimaryCtxRetain", &[out(&mut other), 1]), 0);
    assert_eq!(cuda.call("cuCtxEnablePeerAccess", &[other, 0]), 0);
    let here = usize::try_from(cuda.allocate(8).unwrap()).unwrap();
    assert_eq!(cuda.call("cuCtxSetCurrent", &[other]), 0);
    let there = usize::try_from(cuda.allocate(8).unwrap()).unwrap();
    assert_eq!(cuda.call("cuMemcpyPeer", &[there, other, here, cuda.context, bytes(8)]), 0);
    assert_eq!(
        (charged(), books().devices[1].bytes / MIB),
        (CONTEXT + 8, CONTEXT + 8),
        "a copy is no allocation"
    );
}

/// Functions that multi-GPU programs call. Each must be the driver's own.
const BETWEEN_GPUS: [&str; 11] = [
    "cuDeviceCanAccessPeer",
    "cuDeviceGetP2PAttribute",
    "cuCtxEnablePeerAccess",
    "cuCtxDisablePeerAccess",
    "cuMemcpyPeer",
    "cuMemcpyPeer_ptds",
    "cuMemcpyPeerAsync",
    "cuMemcpyPeerAsync_ptsz",
    "cuMemcpy3DPeer",
    "cuMemcpy3DPeerAsync",
    "cuMemPoolSetAccess",
];

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn cases_5_6_7_arrays_and_mipmaps_meet_the_limit() {
    if !inside("families::cases_5_6_7_arrays_and_mipmaps_meet_the_limit", &Share::default()) {
        return;
    }
    let cuda = Cuda::start();
    let mut array = 0usize;
    // width, height, format float and one channel in one word
    let mut flat = [16384u64, 32768, 1 << 32 | 0x20];
    assert_eq!(cuda.call("cuArrayCreate_v2", &[out(&mut array), out(&mut flat)]), OUT_OF_MEMORY, "2 GiB");
    flat[1] = 16384;
    assert_eq!(
        cuda.call("cuArrayCreate_v2", &[out(&mut array), out(&mut flat)]),
        0,
        "1 GiB: bytes, not bits"
    );
    assert_eq!((charged(), really_held(0)), (CONTEXT + 1024, CONTEXT + 1024));
    assert_eq!(cuda.call("cuArrayDestroy", &[array]), 0);
    let mut line = [16384u64, 0, 1 << 32 | 0x20];
    assert_eq!(cuda.call("cuArrayCreate_v2", &[out(&mut array), out(&mut line)]), 0, "one dimension");
    assert_eq!(books().devices[0].bytes - CONTEXT * MIB, 65536);
    assert_eq!(cuda.call("cuArrayDestroy", &[array]), 0);
    // width, height, depth, format and channels, flags
    let mut solid = [16384u64, 16384, 0, 1 << 32 | 0x20, 0];
    assert_eq!(
        cuda.call("cuMipmappedArrayCreate", &[out(&mut array), out(&mut solid), 99]),
        OUT_OF_MEMORY,
        "1.33 GiB"
    );
    assert_eq!(cuda.call("cuMipmappedArrayCreate", &[out(&mut array), out(&mut solid), 1]), 0, "one level");
    assert_eq!(cuda.call("cuMipmappedArrayDestroy", &[array]), 0);
    solid[1] = 8192;
    assert_eq!(cuda.call("cuMipmappedArrayCreate", &[out(&mut array), out(&mut solid), 99]), 0, "0.67 GiB");
    assert_eq!(charged() - CONTEXT, really_held(0) - CONTEXT);
    assert_eq!(cuda.call("cuMipmappedArrayDestroy", &[array]), 0);
    assert_eq!((charged(), really_held(0)), (CONTEXT, CONTEXT));
}

/// Creates physical memory of `mib` on the GPU. Returns the status and the handle.
pub fn create(cuda: &Cuda, mib: u64) -> (i32, usize) {
    let (mut handle, mut properties) = (0usize, [1u32, 0, 1, 0, 0, 0, 0, 0]);
    (cuda.call("cuMemCreate", &[out(&mut handle), bytes(mib), out(&mut properties), 0]), handle)
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn case_12_physical_memory_is_of_the_device_it_names_without_a_context() {
    if !inside(
        "families::case_12_physical_memory_is_of_the_device_it_names_without_a_context",
        &Share::default(),
    ) {
        return;
    }
    let cuda = Cuda::start();
    let cuda = &cuda;
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let (status, handle) = create(cuda, 1024);
            assert_eq!((status, charged()), (0, CONTEXT + 1024));
            assert_eq!(create(cuda, 2).0, OUT_OF_MEMORY);
            assert_eq!(cuda.call("cuMemRelease", &[handle]), 0);
            assert_eq!(charged(), CONTEXT);
        });
        thread.join().unwrap();
    });
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn case_51_create_map_release_again_and_again_meets_the_limit() {
    if !inside("families::case_51_create_map_release_again_and_again_meets_the_limit", &Share::default()) {
        return;
    }
    let cuda = Cuda::start();
    let mut range = 0usize;
    assert_eq!(cuda.call("cuMemAddressReserve", &[out(&mut range), bytes(4096), 0, 0, 0]), 0);
    let step = bytes(256);
    for index in 0..4 {
        let (status, handle) = create(&cuda, 256);
        assert_eq!(status, 0, "{index}");
        assert_eq!(cuda.call("cuMemMap", &[range + index * step, step, 0, handle, 0]), 0);
        assert_eq!(cuda.call("cuMemRelease", &[handle]), 0);
    }
    assert_eq!((charged(), really_held(0)), (CONTEXT + 1024, CONTEXT + 1024));
    assert_eq!(create(&cuda, 256).0, OUT_OF_MEMORY);
    // A handle from the middle of a mapping keeps the memory alive after it is unmapped.
    let mut handle = 0usize;
    assert_eq!(cuda.call("cuMemRetainAllocationHandle", &[out(&mut handle), range + step / 2]), 0);
    assert_eq!(cuda.call("cuMemUnmap", &[range, 2 * step]), 0);
    assert_eq!((charged(), really_held(0)), (CONTEXT + 768, CONTEXT + 768));
    assert_eq!(cuda.call("cuMemRelease", &[handle]), 0);
    assert_eq!(cuda.call("cuMemUnmap", &[range + 2 * step, 2 * step]), 0);
    assert_eq!((charged(), really_held(0)), (CONTEXT, CONTEXT));
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn what_lived_in_a_context_ends_with_it() {
    if !inside("families::what_lived_in_a_context_ends_with_it", &Share::default()) {
        return;
    }
    let cuda = Cuda::start();
    cuda.allocate(500).unwrap();
    assert_eq!(cuda.call("cuDevicePrimaryCtxReset_v2", &[0]), 0);
    assert_eq!((charged(), really_held(0)), (0, 0));
    let mut context = 0usize;
    for round in 0..5 {
        assert_eq!(cuda.call("cuCtxCreate_v2", &[out(&mut context), 0, 0]), 0, "{round}");
        cuda.allocate(1000).unwrap();
        assert_eq!(charged(), CONTEXT + 1000, "{round}");
        assert_eq!(cuda.call("cuCtxDestroy_v2", &[context]), 0);
        assert_eq!(charged(), 0, "{round}");
    }
}
