//! Actions of another thread during a call: the fake driver makes them happen at exactly that moment.

use core::ffi::c_void;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64};

use gpushare_intercept::cuda::hooks;

use crate::OUT_OF_MEMORY;
use crate::client::{MIB, bytes};
use crate::fake::{CHOSEN, allocate_from_another, end, free_on_thread, give, install, install_as, reserved};
use crate::place::{CONTEXT, Share, charged, inside};

const POINTER: u64 = 0xa0_0000;

/// The other thread's driver has already chosen pool 2, but its call has not returned.
unsafe extern "C" fn allocate_from_pool_2(pointer: *mut u64, _: usize, _: usize) -> i32 {
    CHOSEN.store(2, SeqCst);
    reserved(2).fetch_add(32 * MIB, SeqCst);
    // SAFETY: a place of the caller's.
    unsafe { give(pointer, POINTER) }
}

unsafe extern "C" fn choose_while_another_thread_allocates(_: i32, _: usize) -> i32 {
    std::thread::spawn(|| {
        let mut pointer = 0u64;
        // SAFETY: a place for the pointer.
        assert_eq!(unsafe { hooks::cuMemAllocAsync(&mut pointer, bytes(1), 0) }, 0);
    })
    .join()
    .map_or(1, |()| 0)
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn an_allocation_within_a_choice_of_another_thread_is_paid() {
    if !inside("fake_races::an_allocation_within_a_choice_of_another_thread_is_paid", &Share::default()) {
        return;
    }
    install();
    install_as("cuDeviceSetMemPool", choose_while_another_thread_allocates as *const () as usize);
    install_as("cuMemAllocAsync", allocate_from_pool_2 as *const () as usize);
    // SAFETY: plain numbers.
    assert_eq!(unsafe { hooks::cuDeviceSetMemPool(0, 2) }, 0);
    assert_eq!(charged(), 32);
}

/// Pool 1 has its free room between allocations, pool 2 has none elsewhere.
unsafe extern "C" fn trim_pool_2(pool: usize, _: usize) -> i32 {
    if pool == 2 {
        reserved(pool).store(0, SeqCst);
    }
    0
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn room_of_one_pool_lets_no_other_pool_grow_past_the_limit() {
    let share = Share { limits: &[CONTEXT + 64 + 10], ..Share::default() };
    if !inside("fake_races::room_of_one_pool_lets_no_other_pool_grow_past_the_limit", &share) {
        return;
    }
    install();
    install_as("cuMemAllocAsync", allocate_from_another as *const () as usize);
    install_as("cuMemFreeAsync", free_on_thread as *const () as usize);
    install_as("cuStreamSynchronize", end as *const () as usize);
    install_as("cuMemPoolTrimTo", trim_pool_2 as *const () as usize);
    reserved(1).store(64 * MIB, SeqCst);
    let mut pointer = 0u64;
    // SAFETY: a place for the pointer.
    assert_eq!(unsafe { hooks::cuMemAlloc_v2(&mut pointer, bytes(10)) }, 0);
    pointer = 0x5a5a;
    // SAFETY: a place for the pointer.
    let status = unsafe { hooks::cuMemAllocAsync(&mut pointer, bytes(40), 0) };
    assert_eq!((status, pointer), (OUT_OF_MEMORY, 0x5a5a));
    assert_eq!((reserved(2).load(SeqCst), charged() <= CONTEXT + 64 + 10), (0, true), "{} MiB", charged());
}

/// Without its own choice a device returns to its default pool, number 2 here.
unsafe extern "C" fn destroy_pool(_: usize) -> i32 {
    CHOSEN.store(2, SeqCst);
    0
}

unsafe extern "C" fn allocate_after_the_chosen_pool_ended(
    pointer: *mut u64,
    size: usize,
    stream: usize,
) -> i32 {
    // SAFETY: a plain number.
    assert_eq!(unsafe { hooks::cuMemPoolDestroy(1) }, 0);
    // SAFETY: our caller's arguments, unchanged.
    unsafe { allocate_from_pool_2(pointer, size, stream) }
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn the_default_pool_pays_when_the_chosen_one_is_destroyed_meanwhile() {
    let name = "fake_races::the_default_pool_pays_when_the_chosen_one_is_destroyed_meanwhile";
    if !inside(name, &Share::default()) {
        return;
    }
    install();
    install_as("cuMemPoolDestroy", destroy_pool as *const () as usize);
    install_as("cuMemAllocAsync", allocate_after_the_chosen_pool_ended as *const () as usize);
    let mut pointer = 0u64;
    // SAFETY: a place for the pointer.
    assert_eq!(unsafe { hooks::cuMemAllocAsync(&mut pointer, bytes(1), 0) }, 0);
    assert_eq!((pointer, charged()), (POINTER, 32));
    reserved(2).store(0, SeqCst);
    // SAFETY: a plain number.
    assert_eq!(unsafe { hooks::cuMemPoolTrimTo(2, 0) }, 0);
    assert_eq!(charged(), 0, "and it is pool 2 that is asked afterwards");
}

unsafe extern "C" fn allocate_and_destroy(pointer: *mut u64, _: usize, pool: usize, _: usize) -> i32 {
    // SAFETY: a plain number.
    assert_eq!(unsafe { hooks::cuMemPoolDestroy(pool) }, 0);
    // The pool grows now, and the growth can no longer be found out.
    // SAFETY: a place of the caller's.
    unsafe { give(pointer, POINTER) }
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn an_allocation_that_outlives_its_pool_is_paid_until_its_free_has_run() {
    let name = "fake_races::an_allocation_that_outlives_its_pool_is_paid_until_its_free_has_run";
    if !inside(name, &Share::default()) {
        return;
    }
    install();
    install_as("cuMemPoolDestroy", end as *const () as usize);
    install_as("cuMemAllocFromPoolAsync", allocate_and_destroy as *const () as usize);
    install_as("cuMemFreeAsync", free_on_thread as *const () as usize);
    install_as("cuStreamSynchronize", end as *const () as usize);
    let mut pointer = 0u64;
    // SAFETY: a place for the pointer.
    assert_eq!(unsafe { hooks::cuMemAlloc_v2(&mut pointer, bytes(10)) }, 0);
    // SAFETY: a place for the pointer.
    assert_eq!(unsafe { hooks::cuMemAllocFromPoolAsync(&mut pointer, bytes(1), 1, STREAM) }, 0);
    assert_eq!(charged(), CONTEXT + 10 + 32);
    // SAFETY: plain numbers.
    assert_eq!(unsafe { hooks::cuMemFreeAsync(pointer, STREAM) }, 0);
    assert_eq!(charged(), CONTEXT + 10 + 32, "the free may still have to run");
    // SAFETY: a plain number.
    assert_eq!(unsafe { hooks::cuStreamSynchronize(STREAM) }, 0);
    assert_eq!(charged(), CONTEXT + 10);
}

const STREAM: usize = 0x7777;

unsafe extern "C" fn wait_while_another_thread_frees(_: usize) -> i32 {
    // SAFETY: plain numbers.
    std::thread::spawn(|| assert_eq!(unsafe { hooks::cuMemFreeAsync(0x70_0000, STREAM) }, 0))
        .join()
        .map_or(1, |()| 0)
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn a_wait_says_nothing_about_what_came_into_the_stream_meanwhile() {
    if !inside("fake_races::a_wait_says_nothing_about_what_came_into_the_stream_meanwhile", &Share::default())
    {
        return;
    }
    install();
    install_as("cuMemFreeAsync", free_on_thread as *const () as usize);
    install_as("cuStreamSynchronize", wait_while_another_thread_frees as *const () as usize);
    let mut pointer = 0u64;
    // A free that is already waiting, so that the library checks the wait.
    for _ in 0..2 {
        // SAFETY: a place for the pointer.
        assert_eq!(unsafe { hooks::cuMemAlloc_v2(&mut pointer, bytes(10)) }, 0);
        // SAFETY: plain numbers.
        assert_eq!(unsafe { hooks::cuMemFreeAsync(pointer, STREAM) }, 0);
    }
    // SAFETY: a place for the pointer.
    assert_eq!(unsafe { hooks::cuMemAlloc_v2(&mut pointer, bytes(10)) }, 0);
    assert_eq!(charged(), CONTEXT + 30);
    // SAFETY: a plain number.
    assert_eq!(unsafe { hooks::cuStreamSynchronize(STREAM) }, 0);
    assert_eq!(
        charged(),
        CONTEXT + 20,
        "the last free may have come later than the wait; another waits with it"
    );
    install_as("cuStreamSynchronize", end as *const () as usize);
    // SAFETY: a plain number.
    assert_eq!(unsafe { hooks::cuStreamSynchronize(STREAM) }, 0);
    assert_eq!(charged(), CONTEXT);
}

unsafe extern "C" fn busy(_: usize) -> i32 {
    600 // CUDA_ERROR_NOT_READY
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn frees_that_come_into_a_stream_at_every_wait_do_not_keep_the_older_ones() {
    let name = "fake_races::frees_that_come_into_a_stream_at_every_wait_do_not_keep_the_older_ones";
    if !inside(name, &Share::default()) {
        return;
    }
    install();
    install_as("cuMemFreeAsync", free_on_thread as *const () as usize);
    install_as("cuStreamQuery", busy as *const () as usize);
    install_as("cuStreamSynchronize", wait_while_another_thread_frees as *const () as usize);
    let mut pointer = 0u64;
    // SAFETY: a place for the pointer.
    assert_eq!(unsafe { hooks::cuMemAlloc_v2(&mut pointer, bytes(100)) }, 0);
    // SAFETY: plain numbers.
    assert_eq!(unsafe { hooks::cuMemFreeAsync(pointer, STREAM) }, 0);
    for round in 0..20 {
        // SAFETY: a place for the pointer.
        assert_eq!(unsafe { hooks::cuMemAlloc_v2(&mut pointer, bytes(100)) }, 0, "round {round}");
        // SAFETY: a plain number.
        assert_eq!(unsafe { hooks::cuStreamSynchronize(STREAM) }, 0);
        assert!(charged() <= CONTEXT + 300, "round {round}: {} MiB", charged());
    }
}

/// Whether the driver has destroyed pool 1, and whether its call may return.
static DESTROYING: [AtomicBool; 2] = [const { AtomicBool::new(false) }; 2];

fn until(flag: &AtomicBool) {
    while !flag.load(SeqCst) {
        std::thread::yield_now();
    }
}

unsafe extern "C" fn destroy_slowly(_: usize) -> i32 {
    DESTROYING[0].store(true, SeqCst);
    until(&DESTROYING[1]);
    0
}

unsafe extern "C" fn attribute_of_living(pool: usize, number: i32, value: *mut c_void) -> i32 {
    if DESTROYING[0].load(SeqCst) {
        return 1; // CUDA_ERROR_INVALID_VALUE
    }
    let reserved = if number == 5 { reserved(pool).load(SeqCst) } else { 0 };
    // SAFETY: a place of the caller's.
    unsafe { give(value.cast(), reserved) }
}

unsafe extern "C" fn allocate_before_the_destruction(pointer: *mut u64, _: usize, _: usize, _: usize) -> i32 {
    // SAFETY: a plain number.
    std::thread::spawn(|| unsafe { hooks::cuMemPoolDestroy(1) });
    until(&DESTROYING[0]);
    // SAFETY: a place of the caller's.
    unsafe { give(pointer, POINTER) }
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn an_allocation_is_paid_while_another_thread_destroys_its_pool() {
    let name = "fake_races::an_allocation_is_paid_while_another_thread_destroys_its_pool";
    if !inside(name, &Share::default()) {
        return;
    }
    install();
    install_as("cuMemPoolGetAttribute", attribute_of_living as *const () as usize);
    install_as("cuMemPoolDestroy", destroy_slowly as *const () as usize);
    install_as("cuMemAllocFromPoolAsync", allocate_before_the_destruction as *const () as usize);
    let mut pointer = 0u64;
    // SAFETY: a place for the pointer.
    assert_eq!(unsafe { hooks::cuMemAlloc_v2(&mut pointer, bytes(10)) }, 0);
    // SAFETY: a place for the pointer.
    assert_eq!(unsafe { hooks::cuMemAllocFromPoolAsync(&mut pointer, bytes(1), 1, STREAM) }, 0);
    assert_eq!(charged(), CONTEXT + 10 + 32);
    DESTROYING[1].store(true, SeqCst);
}

/// The driver's reserve for graphs.
static GRAPHS: AtomicU64 = AtomicU64::new(0);
static UPLOADS: AtomicU64 = AtomicU64::new(0);

unsafe extern "C" fn one_node(_: usize, nodes: *mut usize, count: *mut usize) -> i32 {
    if !nodes.is_null() {
        // SAFETY: a place of the caller's.
        unsafe { give(nodes, 1) };
    }
    // SAFETY: a place of the caller's.
    unsafe { give(count, 1) }
}

unsafe extern "C" fn is_allocation(_: usize, kind: *mut i32) -> i32 {
    // SAFETY: a place of the caller's.
    unsafe { give(kind, 10) }
}

unsafe extern "C" fn of_600_mib(_: usize, parameters: *mut u64) -> i32 {
    // SAFETY: bytes of CUDA_MEM_ALLOC_NODE_PARAMS.
    let bytes = unsafe { parameters.add(13) };
    // SAFETY: as above.
    unsafe { give(bytes, 600 * MIB) }
}

unsafe extern "C" fn instantiate(executable: *mut usize, _: usize, _: u64) -> i32 {
    // SAFETY: a place of the caller's.
    unsafe { give(executable, 0x9990) }
}

unsafe extern "C" fn graph_memory(_: i32, number: i32, value: *mut c_void) -> i32 {
    // SAFETY: a place of the caller's.
    unsafe { give(value.cast(), if number == 2 { GRAPHS.load(SeqCst) } else { 0 }) }
}

unsafe extern "C" fn trim_graphs(_: i32) -> i32 {
    GRAPHS.store(0, SeqCst);
    0
}

/// Before the second upload another thread allocates: the stream is idle by then.
unsafe extern "C" fn upload(_: usize, _: usize) -> i32 {
    if UPLOADS.fetch_add(1, SeqCst) == 1 {
        let other = std::thread::spawn(|| {
            let mut pointer = 0u64;
            // SAFETY: a place for the pointer.
            unsafe { hooks::cuMemAlloc_v2(&mut pointer, bytes(1000)) }
        });
        assert_eq!(other.join().unwrap(), OUT_OF_MEMORY);
    }
    GRAPHS.store(600 * MIB, SeqCst);
    0
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn room_that_a_launch_counts_on_is_not_given_to_another_thread() {
    let name = "fake_races::room_that_a_launch_counts_on_is_not_given_to_another_thread";
    if !inside(name, &Share::default()) {
        return;
    }
    install();
    for (name, address) in [
        ("cuGraphGetNodes", one_node as *const () as usize),
        ("cuGraphNodeGetType", is_allocation as *const () as usize),
        ("cuGraphMemAllocNodeGetParams", of_600_mib as *const () as usize),
        ("cuGraphInstantiateWithFlags", instantiate as *const () as usize),
        ("cuDeviceGetGraphMemAttribute", graph_memory as *const () as usize),
        ("cuDeviceGraphMemTrim", trim_graphs as *const () as usize),
        ("cuGraphUpload", upload as *const () as usize),
        ("cuStreamQuery", end as *const () as usize),
    ] {
        install_as(name, address);
    }
    let (mut pointer, mut executable) = (0u64, 0usize);
    // SAFETY: a place for the pointer.
    assert_eq!(unsafe { hooks::cuMemAlloc_v2(&mut pointer, bytes(1)) }, 0);
    // SAFETY: a place for the handle.
    assert_eq!(unsafe { hooks::cuGraphInstantiateWithFlags(&mut executable, 5, 0) }, 0);
    for _ in 0..2 {
        // SAFETY: plain numbers.
        assert_eq!(unsafe { hooks::cuGraphUpload(executable, STREAM) }, 0);
        assert_eq!(charged(), CONTEXT + 2 + 600);
    }
}
