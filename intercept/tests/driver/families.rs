//! Every family of allocation meets the limit, and gives back what it took.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString};

use gpushare_intercept::cuda::HOOKED;

use crate::client::{Cuda, Library, MIB, bytes, call, out, really_held};
use crate::place::{Share, books, inside};
use crate::{INVALID_VALUE, OUT_OF_MEMORY};

pub fn charged() -> u64 {
    books().devices[0].bytes / MIB
}

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
    assert_eq!((charged(), really_held(0)), (1344, 1324));
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
    assert_eq!((charged(), really_held(0)), (1320, 1300));
    assert_eq!(cuda.free(pointer), 0);
    let managed = |pointer: &mut u64, mib| cuda.call("cuMemAllocManaged", &[out(pointer), bytes(mib), 1]);
    assert_eq!(managed(&mut pointer, 2048), OUT_OF_MEMORY);
    assert_eq!(managed(&mut pointer, 1024), 0);
    assert_eq!(charged(), 1344);
    assert_eq!(cuda.free(pointer), 0);
    assert_eq!(charged(), 320);
    // The driver refuses what fits the limit: the charge is taken back.
    assert_eq!(cuda.call("cuMemAllocManaged", &[out(&mut pointer), bytes(8), 77]), INVALID_VALUE);
    assert_eq!(cuda.allocate(0), Err(INVALID_VALUE));
    assert_eq!(charged(), 320);
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
    assert_eq!(charged(), 320);
    let pointer = cuda.allocate(8).unwrap();
    assert_eq!(cuda.free(pointer), 0);
    assert_eq!(cuda.free(pointer), INVALID_VALUE, "twice");
    assert_eq!(charged(), 320);
}

/// Case 50: out of memory after a resize under managed memory, because the new size was charged before the old was freed.
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
        assert_eq!(charged(), 320 + mib);
        assert_eq!(cuda.free(pointer), 0);
    }
}

/// Case 48: calls between GPUs blocked.
#[test]
#[ignore = "needs root: makes a mount namespace"]
fn case_48_calls_between_gpus_reach_the_driver() {
    let share = Share { gpus: 2, limits: &[1344, 1344], ..Share::default() };
    if !inside("families::case_48_calls_between_gpus_reach_the_driver", &share) {
        return;
    }
    assert_eq!(HOOKED.iter().find(|name| name.contains("Peer")), None);
    let cuda = Cuda::start();
    let bare = Library::open("/usr/lib/gpushare/driver/libcuda.so.1");
    let (mut ours, mut theirs) = (7i32, 8i32);
    let ask =
        |library: &Library, answer: &mut i32| library.call("cuDeviceCanAccessPeer", &[out(answer), 0, 1]);
    assert_eq!(ask(&cuda.library, &mut ours), ask(&bare, &mut theirs));
    assert_eq!(ours, theirs);
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn cases_3_4_pools_are_charged_what_they_reserve_and_once() {
    if !inside("families::cases_3_4_pools_are_charged_what_they_reserve_and_once", &Share::default()) {
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
    assert_eq!((charged(), really_held(0)), (320 + 128, 300 + 128), "in chunks of 32 MiB, once");
    let mut second = 0u64;
    assert_eq!(cuda.call("cuMemAllocAsync", &[out(&mut second), bytes(20), 0]), 0);
    assert_eq!((charged(), really_held(0)), (320 + 128, 300 + 128), "the chunk had room");
    for pointer in [pointer, second] {
        assert_eq!(cuda.call("cuMemFreeAsync", &[usize::try_from(pointer).unwrap(), 0]), 0);
    }
    assert_eq!(cuda.call("cuStreamSynchronize", &[0]), 0);
    assert_eq!((charged(), really_held(0)), (320 + 128, 300 + 128), "the pool keeps it");
    assert!(cuda.allocate(1024).is_ok(), "before refusing, unused pool memory goes back");
    assert_eq!((charged(), really_held(0)), (1344, 1324));
    assert_eq!(from_pool(&mut pointer, 1), OUT_OF_MEMORY);
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn case_3_a_pool_shrinks_at_synchronisation_trim_and_destruction() {
    if !inside("families::case_3_a_pool_shrinks_at_synchronisation_trim_and_destruction", &Share::default()) {
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
        assert_eq!((charged(), really_held(0)), (320 + 960, 300 + 960));
        assert_eq!(cuda.call("cuMemFreeAsync", &[usize::try_from(pointer).unwrap(), 0]), 0);
        assert_eq!(cuda.call("cuCtxSynchronize", &[]), 0);
        assert_eq!((charged(), really_held(0)), (320, 300));
    }
    assert_eq!(cuda.call("cuMemAllocFromPoolAsync", &[out(&mut pointer), bytes(960), pool, 0]), 0);
    assert_eq!(cuda.free(pointer), 0, "cuMemFree takes stream-ordered memory too");
    assert_eq!(cuda.call("cuMemPoolTrimTo", &[pool, 0]), 0);
    assert_eq!(charged(), 320);
    assert_eq!(cuda.call("cuMemPoolDestroy", &[pool]), 0);
    assert_eq!((charged(), really_held(0)), (320, 300));
    // A pool of the host's memory costs nothing.
    properties[2] = 2;
    assert_eq!(cuda.call("cuMemPoolCreate", &[out(&mut pool), out(&mut properties)]), 0);
    assert_eq!(cuda.call("cuMemAllocFromPoolAsync", &[out(&mut pointer), bytes(2048), pool, 0]), 0);
    assert_eq!((charged(), really_held(0)), (320, 300));
}

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
    assert_eq!((charged(), really_held(0)), (1344, 1324));
    assert_eq!(cuda.call("cuArrayDestroy", &[array]), 0);
    let mut line = [16384u64, 0, 1 << 32 | 0x20];
    assert_eq!(cuda.call("cuArrayCreate_v2", &[out(&mut array), out(&mut line)]), 0, "one dimension");
    assert_eq!(books().devices[0].bytes - 320 * MIB, 65536);
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
    assert_eq!(charged() - 320, really_held(0) - 300);
    assert_eq!(cuda.call("cuMipmappedArrayDestroy", &[array]), 0);
    assert_eq!((charged(), really_held(0)), (320, 300));
}

/// Physical memory of `mib`, on the GPU; the status and the handle.
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
            assert_eq!((status, charged()), (0, 1344));
            assert_eq!(create(cuda, 2).0, OUT_OF_MEMORY);
            assert_eq!(cuda.call("cuMemRelease", &[handle]), 0);
            assert_eq!(charged(), 320);
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
    assert_eq!((charged(), really_held(0)), (1344, 1324));
    assert_eq!(create(&cuda, 256).0, OUT_OF_MEMORY);
    // A handle from the middle of a mapping keeps it alive beyond the unmapping.
    let mut handle = 0usize;
    assert_eq!(cuda.call("cuMemRetainAllocationHandle", &[out(&mut handle), range + step / 2]), 0);
    assert_eq!(cuda.call("cuMemUnmap", &[range, 2 * step]), 0);
    assert_eq!((charged(), really_held(0)), (1344 - 256, 1324 - 256));
    assert_eq!(cuda.call("cuMemRelease", &[handle]), 0);
    assert_eq!(cuda.call("cuMemUnmap", &[range + 2 * step, 2 * step]), 0);
    assert_eq!((charged(), really_held(0)), (320, 300));
}

/// A graph that allocates `mib` and frees them again.
pub fn graph_of(cuda: &Cuda, mib: u64) -> usize {
    let (mut graph, mut node, mut parameters) = (0usize, 0usize, [0u64; 16]);
    assert_eq!(cuda.call("cuGraphCreate", &[out(&mut graph), 0]), 0);
    (parameters[0], parameters[1], parameters[13]) = (1, 1, mib * MIB);
    assert_eq!(cuda.call("cuGraphAddMemAllocNode", &[out(&mut node), graph, 0, 0, out(&mut parameters)]), 0);
    let (mut after, mut last) = (node, 0usize);
    let pointer = usize::try_from(parameters[14]).unwrap();
    assert_eq!(cuda.call("cuGraphAddMemFreeNode", &[out(&mut last), graph, out(&mut after), 1, pointer]), 0);
    graph
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn memory_nodes_of_graphs_meet_the_limit() {
    if !inside("families::memory_nodes_of_graphs_meet_the_limit", &Share::default()) {
        return;
    }
    let cuda = Cuda::start();
    let mut executable = 0usize;
    let instantiate = |executable: &mut usize, mib| {
        cuda.call("cuGraphInstantiateWithFlags", &[out(executable), graph_of(&cuda, mib), 0])
    };
    assert_eq!(instantiate(&mut executable, 2048), OUT_OF_MEMORY);
    assert_eq!(instantiate(&mut executable, 600), 0);
    for round in 0..3 {
        assert_eq!(cuda.call("cuGraphLaunch", &[executable, 0]), 0, "launch {round}");
        assert_eq!(cuda.call("cuCtxSynchronize", &[]), 0);
        assert!(charged() >= really_held(0) && charged() <= 320 + 600, "{} {}", charged(), really_held(0));
    }
    let whole = cuda.allocate(1024).unwrap(); // takes back what the idle graph holds
    assert_eq!(cuda.call("cuGraphLaunch", &[executable, 0]), OUT_OF_MEMORY);
    assert_eq!(cuda.free(whole), 0);
    assert_eq!(cuda.call("cuGraphLaunch", &[executable, 0]), 0);
    assert_eq!(cuda.call("cuCtxSynchronize", &[]), 0);
    assert_eq!(cuda.call("cuGraphExecDestroy", &[executable]), 0);
    assert_eq!(cuda.call("cuDeviceGraphMemTrim", &[0]), 0);
    assert_eq!((charged(), really_held(0)), (320, 300));
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
        assert_eq!(charged(), 1320, "{round}");
        assert_eq!(cuda.call("cuCtxDestroy_v2", &[context]), 0);
        assert_eq!(charged(), 0, "{round}");
    }
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn memory_nodes_in_child_graphs_meet_the_limit() {
    if !inside("families::memory_nodes_in_child_graphs_meet_the_limit", &Share::default()) {
        return;
    }
    let cuda = Cuda::start();
    let (mut executable, mut node) = (0usize, 0usize);
    let mut instantiate = |graph| cuda.call("cuGraphInstantiateWithFlags", &[out(&mut executable), graph, 0]);
    let (mut small, mut large) = (graph_of(&cuda, 100), graph_of(&cuda, 4096));
    for depth in 1..12 {
        for graph in [&mut small, &mut large] {
            let mut parent = 0usize;
            assert_eq!(cuda.call("cuGraphCreate", &[out(&mut parent), 0]), 0);
            assert_eq!(cuda.call("cuGraphAddChildGraphNode", &[out(&mut node), parent, 0, 0, *graph]), 0);
            *graph = parent;
        }
        assert_eq!(instantiate(large), OUT_OF_MEMORY, "depth {depth}");
        // Deeper than is searched nothing is known to be paid.
        assert_eq!(instantiate(small), if depth <= 8 { 0 } else { OUT_OF_MEMORY }, "depth {depth}");
    }
    let mut copy = 0usize;
    assert_eq!(cuda.call("cuGraphClone", &[out(&mut copy), graph_of(&cuda, 4096)]), 0);
    assert_eq!(instantiate(copy), OUT_OF_MEMORY, "a clone");
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn unknown_pools_take_no_place() {
    if !inside("families::unknown_pools_take_no_place", &Share::default()) {
        return;
    }
    let cuda = Cuda::start();
    let mut pointer = 0u64;
    for index in 0..200 {
        let status = cuda.call("cuMemAllocFromPoolAsync", &[out(&mut pointer), bytes(1), 0x7000 + index, 0]);
        assert!(![0, OUT_OF_MEMORY].contains(&status), "{index}: {status}");
    }
    assert_eq!(cuda.call("cuMemAllocAsync", &[out(&mut pointer), bytes(1), 0]), 0);
    assert_eq!((charged(), really_held(0)), (352, 332));
}

/// A pool of the GPU's memory; `kind` 1 is ordinary, 2 managed.
pub fn pool_of(cuda: &Cuda, kind: u32) -> usize {
    let (mut pool, mut properties) = (0usize, [0u32; 22]);
    (properties[0], properties[2]) = (kind, u32::from(kind == 1));
    assert_eq!(cuda.call("cuMemPoolCreate", &[out(&mut pool), out(&mut properties)]), 0);
    pool
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn a_destroyed_pool_is_paid_until_its_last_free_has_run() {
    if !inside("families::a_destroyed_pool_is_paid_until_its_last_free_has_run", &Share::default()) {
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
    assert_eq!((charged(), really_held(0)), (960, 940), "both live");
    assert_eq!(cuda.call("cuMemFreeAsync", &[first, stream]), 0);
    assert_eq!(cuda.call("cuStreamSynchronize", &[stream]), 0);
    assert_eq!(charged(), 960, "one lives, and what the pool keeps beside it cannot be asked");
    assert_eq!(cuda.call("cuMemFreeAsync", &[second, stream]), 0);
    assert_eq!(charged(), 960, "the free may still have to run");
    assert_eq!(cuda.call("cuStreamSynchronize", &[other]), 0);
    assert_eq!(charged(), 960, "another stream says nothing");
    assert_eq!(cuda.call("cuStreamSynchronize", &[stream]), 0);
    assert_eq!((charged(), really_held(0)), (320, 300));
    // Destroyed while frees are pending on two streams.
    let pool = pool_of(&cuda, 1);
    let (first, second) = (allocate(pool, 320), allocate(pool, 320));
    assert_eq!(cuda.call("cuMemFreeAsync", &[first, stream]), 0);
    assert_eq!(cuda.call("cuMemFreeAsync", &[second, other]), 0);
    assert_eq!(cuda.call("cuMemPoolDestroy", &[pool]), 0);
    for stream in streams {
        assert_eq!(charged(), 960);
        assert_eq!(cuda.call("cuStreamSynchronize", &[stream]), 0);
    }
    assert_eq!(cuda.call("cuCtxSynchronize_v2", &[0]), 0);
    assert_eq!((charged(), really_held(0)), (320, 300));
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn a_pool_of_managed_memory_is_paid_on_the_current_gpu() {
    if !inside("families::a_pool_of_managed_memory_is_paid_on_the_current_gpu", &Share::default()) {
        return;
    }
    let cuda = Cuda::start();
    let (pool, mut pointer) = (pool_of(&cuda, 2), 0u64);
    let mut allocate = |mib| cuda.call("cuMemAllocFromPoolAsync", &[out(&mut pointer), bytes(mib), pool, 0]);
    assert_eq!(allocate(2048), OUT_OF_MEMORY);
    assert_eq!(allocate(640), 0);
    assert_eq!((charged(), really_held(0)), (960, 940));
}

/// Path of the library in which `address` lies.
fn library_of(address: usize) -> String {
    let mut found = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: the loader looks for the address without using it, and writes one structure.
    let known = unsafe { libc::dladdr(std::ptr::without_provenance(address), found.as_mut_ptr()) };
    assert_ne!(known, 0, "{address:#x} is in no library");
    // SAFETY: zeroed above, which is valid for null pointers, or written by the loader.
    let found = unsafe { found.assume_init() };
    // SAFETY: the loader found the library, whose name is a C string.
    unsafe { CStr::from_ptr(found.dli_fname) }.to_string_lossy().into_owned()
}

/// The name by which programs ask for `export`: without its version and the default stream's mark.
fn base_name(export: &str) -> &str {
    let name = export.strip_suffix("_ptsz").unwrap_or(export);
    match name.rsplit_once("_v") {
        Some((base, version)) if version.parse::<u32>().is_ok() => base,
        _ => name,
    }
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn the_newest_version_of_every_hooked_name_is_ours() {
    if !inside("families::the_newest_version_of_every_hooked_name_is_ours", &Share::default()) {
        return;
    }
    let cuda = Cuda::start();
    let mut newest = 0i32;
    assert_eq!(cuda.call("cuDriverGetVersion", &[out(&mut newest)]), 0);
    assert!(newest >= 13000, "{newest}");
    let newest = usize::try_from(newest).unwrap();
    let names: BTreeSet<&str> = HOOKED.iter().map(|export| base_name(export)).collect();
    let ask = |base: &str, version: usize, flags: usize| {
        let (name, mut address, mut found) = (CString::new(base).unwrap(), 0usize, 0i32);
        let name = name.as_ptr().expose_provenance();
        let arguments = [name, out(&mut address), version, flags, out(&mut found)];
        assert_eq!(cuda.call("cuGetProcAddress_v2", &arguments), 0, "{base}");
        address
    };
    let mut missed = Vec::new();
    for base in names {
        for (version, flags) in [(newest, 0), (newest, 2), (12000, 0), (12000, 2)] {
            let address = ask(base, version, flags);
            if address != 0 && !library_of(address).contains("/shim/") {
                missed.push((base, version, flags));
            }
        }
    }
    assert!(missed.is_empty(), "not ours: {missed:?}");
    let mut pointer = 0usize;
    assert_eq!(cuda.call("cuMemAllocAsync", &[out(&mut pointer), bytes(640), 0]), 0);
    assert_eq!(cuda.call("cuMemFreeAsync", &[pointer, 0]), 0);
    assert_eq!(call(ask("cuCtxSynchronize", newest, 0), &[0]), 0);
    assert_eq!((charged(), really_held(0)), (320, 300), "its newest form settles pools");
}
