//! Behaviour that the simulated driver does not show by itself. The hooks call functions of a fake driver,
//! which exists only here, and the tests call the hooks in their own process.

use core::ffi::c_void;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize};
use std::sync::mpsc;
use std::time::Duration;

use gpushare_intercept::cuda::hooks;
use gpushare_intercept::cuda::{DRIVER, NAMES};

use crate::OUT_OF_MEMORY;
use crate::client::{MIB, bytes};
use crate::place::{CONTEXT, Share, books, charged, inside};
use crate::processes::{fork, wait};

/// Reserved bytes of pools 1 and 2.
static RESERVED: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];
/// The current pool of the device.
pub static CHOSEN: AtomicUsize = AtomicUsize::new(1);
/// The current context.
static CURRENT: AtomicUsize = AtomicUsize::new(0x1000);
static FREED_ON: AtomicUsize = AtomicUsize::new(0);
static SYNCHRONISED: AtomicI32 = AtomicI32::new(0);
/// How often the driver was asked whether a stream is captured: once per launch that credit did not pay for.
static ASKED: AtomicUsize = AtomicUsize::new(0);

pub fn reserved(pool: usize) -> &'static AtomicU64 {
    &RESERVED[pool - 1]
}

/// Writes `value` to the place that the caller of a driver function passed.
pub unsafe fn give<T>(to: *mut T, value: T) -> i32 {
    // SAFETY: the hooks and these tests pass valid places.
    unsafe { to.write(value) };
    0
}

unsafe extern "C" fn current(context: *mut usize) -> i32 {
    // SAFETY: a place of the caller's.
    unsafe { give(context, CURRENT.load(SeqCst)) }
}

unsafe extern "C" fn zero(place: *mut i32) -> i32 {
    // SAFETY: a place of the caller's.
    unsafe { give(place, 0) }
}

unsafe extern "C" fn one_device(count: *mut i32) -> i32 {
    // SAFETY: a place of the caller's.
    unsafe { give(count, 1) }
}

unsafe extern "C" fn not_captured(_: usize, status: *mut i32) -> i32 {
    ASKED.fetch_add(1, SeqCst);
    // SAFETY: a place of the caller's.
    unsafe { give(status, 0) }
}

unsafe extern "C" fn owner(_: usize, context: *mut usize) -> i32 {
    // SAFETY: a place of the caller's.
    unsafe { give(context, CURRENT.load(SeqCst)) }
}

unsafe extern "C" fn uuid(uuid: *mut [u8; 16], _: i32) -> i32 {
    let limits = std::fs::read("/usr/lib/gpushare/limits").unwrap();
    // SAFETY: a place of the caller's.
    unsafe { give(uuid, limits[64..80].try_into().unwrap()) }
}

unsafe extern "C" fn inactive(_: i32, flags: *mut u32, active: *mut i32) -> i32 {
    // SAFETY: a place of the caller's.
    unsafe { give(flags, 0) };
    // SAFETY: a place of the caller's.
    unsafe { give(active, 0) }
}

unsafe extern "C" fn pool_of_device(pool: *mut usize, _: i32) -> i32 {
    // SAFETY: a place of the caller's.
    unsafe { give(pool, CHOSEN.load(SeqCst)) }
}

unsafe extern "C" fn set_pool(_: i32, pool: usize) -> i32 {
    CHOSEN.store(pool, SeqCst);
    0
}

unsafe extern "C" fn pool_attribute(pool: usize, number: i32, value: *mut c_void) -> i32 {
    let reserved = if number == 5 { reserved(pool).load(SeqCst) } else { 0 };
    // SAFETY: a place of the caller's.
    unsafe { give(value.cast(), reserved) }
}

unsafe extern "C" fn pool_of_pointer(pool: *mut c_void, _: i32, _: u64) -> i32 {
    // SAFETY: a place of the caller's.
    unsafe { give(pool.cast(), CHOSEN.load(SeqCst)) }
}

unsafe extern "C" fn allocate(pointer: *mut u64, _: usize) -> i32 {
    // SAFETY: a place of the caller's.
    unsafe { give(pointer, 0x70_0000) }
}

/// Allocates as if another thread had chosen pool 2 before the driver looked it up.
pub unsafe extern "C" fn allocate_from_another(pointer: *mut u64, _: usize, _: usize) -> i32 {
    // SAFETY: plain numbers.
    unsafe { hooks::cuDeviceSetMemPool(0, 2) };
    reserved(2).fetch_add(32 * MIB, SeqCst);
    // SAFETY: a place of the caller's.
    unsafe { give(pointer, 0x80_0000) }
}

/// Allocates from a pool whose free room is fragmented, so that the pool grows.
unsafe extern "C" fn allocate_in_pieces(pointer: *mut u64, _: usize, pool: usize, _: usize) -> i32 {
    reserved(pool).fetch_add(64 * MIB, SeqCst);
    // SAFETY: a place of the caller's.
    unsafe { give(pointer, 0x90_0000) }
}

pub unsafe extern "C" fn free_on_thread(_: u64, stream: usize) -> i32 {
    FREED_ON.store(stream + 1, SeqCst);
    0
}

unsafe extern "C" fn wait_on_thread(_: usize) -> i32 {
    SYNCHRONISED.fetch_add(1, SeqCst);
    0
}

unsafe extern "C" fn trim(pool: usize, _: usize) -> i32 {
    reserved(pool).fetch_min(64 * MIB, SeqCst);
    0
}

unsafe extern "C" fn green(context: *mut usize, _: *mut c_void, _: i32, _: u32) -> i32 {
    // SAFETY: a place of the caller's.
    unsafe { give(context, 0x2000) }
}

unsafe extern "C" fn convert(context: *mut usize, _: usize) -> i32 {
    // SAFETY: a place of the caller's.
    unsafe { give(context, 0x3000) }
}

pub unsafe extern "C" fn end(_: usize) -> i32 {
    0
}

/// Installs these functions behind the hooks, and no others.
pub fn install() {
    for (name, address) in [
        ("cuCtxGetCurrent", current as *const () as usize),
        ("cuCtxGetDevice", zero as *const () as usize),
        ("cuDeviceGet", zero as *const () as usize),
        ("cuDeviceGetCount", one_device as *const () as usize),
        ("cuDeviceGetUuid", uuid as *const () as usize),
        ("cuDevicePrimaryCtxGetState", inactive as *const () as usize),
        ("cuStreamIsCapturing", not_captured as *const () as usize),
        ("cuStreamGetCtx", owner as *const () as usize),
        ("cuDeviceGetMemPool", pool_of_device as *const () as usize),
        ("cuDeviceSetMemPool", set_pool as *const () as usize),
        ("cuMemPoolGetAttribute", pool_attribute as *const () as usize),
        ("cuPointerGetAttribute", pool_of_pointer as *const () as usize),
        ("cuMemAlloc_v2", allocate as *const () as usize),
        ("cuMemAllocAsync", allocate_from_another as *const () as usize),
        ("cuMemAllocFromPoolAsync_ptsz", allocate_in_pieces as *const () as usize),
        ("cuMemFreeAsync_ptsz", free_on_thread as *const () as usize),
        ("cuStreamSynchronize_ptsz", wait_on_thread as *const () as usize),
        ("cuMemPoolTrimTo", trim as *const () as usize),
        ("cuGreenCtxCreate", green as *const () as usize),
        ("cuCtxFromGreenCtx", convert as *const () as usize),
        ("cuGreenCtxDestroy", end as *const () as usize),
    ] {
        install_as(name, address);
    }
}

/// Installs one function behind the hook with this name.
pub fn install_as(name: &str, address: usize) {
    DRIVER.set(NAMES.iter().position(|known| *known == name).unwrap(), address);
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn a_pool_chosen_during_an_allocation_is_the_one_that_pays() {
    let name = "fake::a_pool_chosen_during_an_allocation_is_the_one_that_pays";
    if !inside(name, &Share::default()) {
        return;
    }
    install();
    let mut pointer = 0u64;
    // SAFETY: a place for the pointer.
    assert_eq!(unsafe { hooks::cuMemAllocAsync(&mut pointer, bytes(1), 0) }, 0);
    assert_eq!((pointer, charged()), (0x80_0000, 32));
    reserved(2).store(0, SeqCst);
    // SAFETY: a plain number.
    assert_eq!(unsafe { hooks::cuMemPoolTrimTo(2, 0) }, 0);
    assert_eq!(charged(), 0, "and it is pool 2 that is asked afterwards");
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn a_refusal_after_the_driver_allocated_leaves_the_output_untouched() {
    let name = "fake::a_refusal_after_the_driver_allocated_leaves_the_output_untouched";
    if !inside(name, &Share { limits: &[CONTEXT + 64 + 10], ..Share::default() }) {
        return;
    }
    install();
    reserved(1).store(64 * MIB, SeqCst);
    let mut pointer = 0u64;
    // SAFETY: a place for the pointer.
    assert_eq!(unsafe { hooks::cuMemAlloc_v2(&mut pointer, bytes(10)) }, 0);
    pointer = 0x5a5a;
    // SAFETY: a place for the pointer.
    let status = unsafe { hooks::cuMemAllocFromPoolAsync_ptsz(&mut pointer, bytes(40), 1, 0x7777) };
    assert_eq!((status, pointer), (OUT_OF_MEMORY, 0x5a5a));
    assert_eq!(
        (FREED_ON.load(SeqCst), SYNCHRONISED.load(SeqCst)),
        (0x7778, 1),
        "by its own stream's functions"
    );
    assert_eq!(charged(), CONTEXT + 64 + 10);
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn a_green_context_costs_one_context_and_only_while_it_lives() {
    let name = "fake::a_green_context_costs_one_context_and_only_while_it_lives";
    if !inside(name, &Share::default()) {
        return;
    }
    install();
    for round in 0..200 {
        let (mut green, mut context, mut pointer) = (0usize, 0usize, 0u64);
        // SAFETY: a place for the handle.
        assert_eq!(unsafe { hooks::cuGreenCtxCreate(&mut green, core::ptr::null_mut(), 0, 1) }, 0);
        assert_eq!((green, charged()), (0x2000, CONTEXT), "round {round}");
        // SAFETY: a place for the handle.
        assert_eq!(unsafe { hooks::cuCtxFromGreenCtx(&mut context, green) }, 0);
        CURRENT.store(context, SeqCst);
        // SAFETY: a place for the pointer.
        assert_eq!(unsafe { hooks::cuMemAlloc_v2(&mut pointer, bytes(100)) }, 0);
        assert_eq!(charged(), CONTEXT + 100, "round {round}");
        // SAFETY: a plain number.
        assert_eq!(unsafe { hooks::cuGreenCtxDestroy(green) }, 0);
        assert_eq!(charged(), 0, "round {round}");
    }
}

/// The simulated driver refuses all calls of a forked child. Another driver may serve them.
#[test]
#[ignore = "needs root: makes a mount namespace"]
fn a_forked_child_whose_driver_serves_it_has_a_slot_of_its_own() {
    let name = "fake::a_forked_child_whose_driver_serves_it_has_a_slot_of_its_own";
    if !inside(name, &Share { limits: &[4096], ..Share::default() }) {
        return;
    }
    install();
    let allocate = |mib| {
        let mut pointer = 0u64;
        // SAFETY: a place for the pointer.
        assert_eq!(unsafe { hooks::cuMemAlloc_v2(&mut pointer, bytes(mib)) }, 0);
    };
    allocate(500);
    let own = charged();
    let child = fork(|| {
        allocate(100);
        assert_eq!(books().processes, 2, "the parent's slot and the child's");
    });
    assert_eq!(wait(child), 0);
    allocate(4096 - own); // all that is left once the child's memory is reclaimed
    assert_eq!(books().processes, 1);
}

/// The number of launches that are in the driver now.
static INSIDE: AtomicUsize = AtomicUsize::new(0);
/// The number of launches that the driver has had.
static LAUNCHES: AtomicUsize = AtomicUsize::new(0);

fn launch(function: usize) -> i32 {
    let null = core::ptr::null_mut();
    // SAFETY: plain numbers.
    unsafe { hooks::cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, null, null) }
}

/// Launches as if the driver called back into a profiler, which launches its own kernel and destroys a graph.
unsafe extern "C" fn launch_and_call_back(_: usize, _: u32, _: u32, _: u32) -> i32 {
    LAUNCHES.fetch_add(1, SeqCst);
    if INSIDE.fetch_add(1, SeqCst) == 0 {
        assert_eq!(launch(0x2222), 0);
        // SAFETY: a plain number.
        assert_eq!(unsafe { hooks::cuGraphExecDestroy(0x3333) }, 0);
    }
    INSIDE.fetch_sub(1, SeqCst);
    0
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn a_profiler_may_launch_from_within_a_launch() {
    let share = Share { cores: &[25], ..Share::default() };
    if !inside("fake::a_profiler_may_launch_from_within_a_launch", &share) {
        return;
    }
    install();
    for (name, address) in [
        ("cuLaunchKernel", launch_and_call_back as *const () as usize),
        ("cuGraphExecDestroy", end as *const () as usize),
    ] {
        install_as(name, address);
    }
    let (done, is_done) = mpsc::channel();
    std::thread::spawn(move || done.send((0..5).map(|_| launch(0x1111)).sum::<i32>()).unwrap());
    let statuses = is_done.recv_timeout(Duration::from_secs(10));
    assert_eq!(statuses, Ok(0), "launches hang, or are refused");
    assert_eq!(LAUNCHES.load(SeqCst), 10);
}

unsafe extern "C" fn event(event: *mut usize, _: u32) -> i32 {
    // SAFETY: a place of the caller's.
    unsafe { give(event, 0x4000) }
}

unsafe extern "C" fn ten_microseconds(milliseconds: *mut f32, _: usize, _: usize) -> i32 {
    // SAFETY: a place of the caller's.
    unsafe { give(milliseconds, 0.01) }
}

unsafe extern "C" fn retain(context: *mut usize, _: i32) -> i32 {
    // SAFETY: a place of the caller's.
    unsafe { give(context, 0x1000) }
}

/// The number of launches, of a hundred, that credit did not pay for.
fn unpaid() -> usize {
    (0..20).for_each(|_| assert_eq!(launch(0x1111), 0)); // its kind becomes known
    let before = ASKED.load(SeqCst);
    (0..100).for_each(|_| assert_eq!(launch(0x1111), 0));
    ASKED.load(SeqCst) - before
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn a_capture_that_goes_with_its_stream_or_context_leaves_launches_fast() {
    let share = Share { cores: &[90], ..Share::default() };
    if !inside("fake::a_capture_that_goes_with_its_stream_or_context_leaves_launches_fast", &share) {
        return;
    }
    install();
    for (name, address) in [
        ("cuLaunchKernel", end as *const () as usize),
        ("cuEventCreate", event as *const () as usize),
        ("cuEventRecord", end as *const () as usize),
        ("cuEventQuery", end as *const () as usize),
        ("cuEventElapsedTime", ten_microseconds as *const () as usize),
        ("cuStreamBeginCapture_v2", end as *const () as usize),
        ("cuStreamDestroy_v2", end as *const () as usize),
        ("cuDevicePrimaryCtxRetain", retain as *const () as usize),
        ("cuDevicePrimaryCtxReset_v2", end as *const () as usize),
    ] {
        install_as(name, address);
    }
    let mut context = 0usize;
    // SAFETY: a place for the handle.
    assert_eq!(unsafe { hooks::cuDevicePrimaryCtxRetain(&mut context, 0) }, 0);
    assert!(unpaid() < 50, "before");
    for round in 0..2 {
        // SAFETY: plain numbers.
        assert_eq!(unsafe { hooks::cuStreamBeginCapture_v2(0x7777, 0) }, 0);
        assert_eq!(unpaid(), 100, "during a capture each launch has to ask");
        let ended = if round == 0 {
            // SAFETY: a plain number.
            unsafe { hooks::cuStreamDestroy_v2(0x7777) }
        } else {
            // SAFETY: a plain number.
            unsafe { hooks::cuDevicePrimaryCtxReset_v2(0) }
        };
        assert_eq!(ended, 0);
        assert!(unpaid() < 50, "afterwards, round {round}");
    }
}
