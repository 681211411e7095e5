//! When memory is released: not before the driver has really freed it, and as soon as it can be known that it
//! has.

use crate::OUT_OF_MEMORY;
use crate::client::{Cuda, MIB, bytes, out, really_held};
use crate::compute::green_stream;
use crate::families::create;
use crate::graphs::graph_of;
use crate::place::{CONTEXT, Share, books, charged, inside};
use crate::pools::pool_of;

fn stream(cuda: &Cuda) -> usize {
    let mut stream = 0usize;
    assert_eq!(cuda.call("cuStreamCreate", &[out(&mut stream), 1]), 0);
    stream
}

fn instantiate(cuda: &Cuda, mib: u64) -> usize {
    let mut executable = 0usize;
    let arguments = [out(&mut executable), graph_of(cuda, mib), 0];
    assert_eq!(cuda.call("cuGraphInstantiateWithFlags", &arguments), 0);
    executable
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn a_reset_ends_the_charge_of_pools_and_graphs() {
    if !inside("endings::a_reset_ends_the_charge_of_pools_and_graphs", &Share::default()) {
        return;
    }
    let mut cuda = Cuda::start();
    for round in 0..3 {
        let (mut pointer, mut keep, mut pool) = (0usize, u64::MAX, 0usize);
        assert_eq!(cuda.call("cuDeviceGetDefaultMemPool", &[out(&mut pool), 0]), 0);
        assert_eq!(cuda.call("cuMemPoolSetAttribute", &[pool, 4, out(&mut keep)]), 0);
        assert_eq!(cuda.call("cuMemAllocAsync", &[out(&mut pointer), bytes(320), 0]), 0);
        let lost = pool_of(&cuda, 1);
        assert_eq!(cuda.call("cuMemAllocFromPoolAsync", &[out(&mut pointer), bytes(64), lost, 0]), 0);
        assert_eq!(cuda.call("cuMemPoolDestroy", &[lost]), 0);
        let executable = instantiate(&cuda, 100);
        assert_eq!(cuda.call("cuGraphLaunch", &[executable, 0]), 0);
        assert_eq!((charged(), really_held(0)), (CONTEXT + 484, CONTEXT + 484), "round {round}");
        assert_eq!(cuda.call("cuDevicePrimaryCtxReset_v2", &[0]), 0);
        assert_eq!((charged(), really_held(0)), (0, 0), "round {round}");
        cuda = Cuda::start();
    }
    let mut pointer = 0usize;
    assert_eq!(cuda.call("cuMemAllocAsync", &[out(&mut pointer), bytes(1024), 0]), 0);
    assert_eq!(cuda.call("cuMemFreeAsync", &[pointer, 0]), 0);
    assert_eq!(cuda.call("cuStreamSynchronize", &[0]), 0);
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn a_graph_that_its_stream_was_waited_for_costs_what_the_driver_keeps() {
    let name = "endings::a_graph_that_its_stream_was_waited_for_costs_what_the_driver_keeps";
    if !inside(name, &Share::default()) {
        return;
    }
    let cuda = Cuda::start();
    let (first, second) = (stream(&cuda), stream(&cuda));
    let executables = [instantiate(&cuda, 400), instantiate(&cuda, 400), instantiate(&cuda, 400)];
    for (round, executable) in executables.iter().cycle().take(9).enumerate() {
        assert_eq!(cuda.call("cuGraphLaunch", &[*executable, first]), 0, "round {round}");
        assert_eq!(cuda.call("cuStreamSynchronize", &[first]), 0);
        assert_eq!((charged(), really_held(0)), (CONTEXT + 400, CONTEXT + 400), "round {round}");
    }
    let launch = |executable: usize, stream| cuda.call("cuGraphLaunch", &[executables[executable], stream]);
    assert_eq!((launch(0, first), launch(1, second), launch(1, second)), (0, 0, 0));
    assert_eq!(charged(), CONTEXT + 800, "both may run at once, and one twice in a row");
    assert_eq!(cuda.call("cuDeviceGraphMemTrim", &[0]), 0);
    assert_eq!(charged(), CONTEXT + 800, "a trim waits for nobody");
    assert_eq!(cuda.call("cuGraphExecDestroy", &[executables[0]]), 0);
    assert_eq!(charged(), CONTEXT + 800, "it may still run");
    assert_eq!(cuda.call("cuStreamSynchronize", &[second]), 0);
    assert_eq!(charged(), CONTEXT + 400, "the other stream says nothing");
    assert_eq!((launch(1, first), launch(1, second)), (0, 0));
    assert_eq!(cuda.call("cuStreamSynchronize", &[second]), 0);
    assert_eq!(charged(), CONTEXT + 800, "of one that was launched in two streams one alone says nothing");
    assert_eq!(cuda.call("cuCtxSynchronize", &[]), 0);
    assert_eq!(cuda.call("cuDeviceGraphMemTrim", &[0]), 0);
    assert_eq!((charged(), really_held(0)), (CONTEXT, CONTEXT));
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn what_nobody_waited_for_by_its_stream_is_there_before_a_refusal() {
    let name = "endings::what_nobody_waited_for_by_its_stream_is_there_before_a_refusal";
    if !inside(name, &Share::default()) {
        return;
    }
    let cuda = Cuda::start();
    let stream = stream(&cuda);
    let mut event = 0usize;
    assert_eq!(cuda.call("cuEventCreate", &[out(&mut event), 0]), 0);
    let await_event = || {
        assert_eq!(cuda.call("cuEventRecord", &[event, stream]), 0);
        assert_eq!(cuda.call("cuEventSynchronize", &[event]), 0);
    };
    let whole = |what: &str| {
        let pointer = cuda.allocate(1024);
        let pointer = pointer.unwrap_or_else(|_| panic!("{what}: beside a context nothing is held"));
        assert_eq!(cuda.free(pointer), 0);
    };
    whole("at first");
    let executable = instantiate(&cuda, 600);
    assert_eq!(cuda.call("cuGraphLaunch", &[executable, stream]), 0);
    await_event();
    assert_eq!(charged(), CONTEXT + 600, "an event says nothing");
    whole("a graph");
    assert_eq!(charged(), CONTEXT);

    let (pool, mut pointer) = (pool_of(&cuda, 1), 0u64);
    let allocated = cuda.call("cuMemAllocFromPoolAsync", &[out(&mut pointer), bytes(600), pool, stream]);
    assert_eq!(allocated, 0);
    assert_eq!(cuda.call("cuMemPoolDestroy", &[pool]), 0);
    assert_eq!(cuda.call("cuMemFreeAsync", &[usize::try_from(pointer).unwrap(), stream]), 0);
    await_event();
    assert!(charged() >= CONTEXT + 600, "{} MiB", charged());
    whole("a destroyed pool");
    assert_eq!(charged(), CONTEXT);
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn what_was_freed_under_a_green_context_is_there_after_its_synchronisation() {
    let name = "endings::what_was_freed_under_a_green_context_is_there_after_its_synchronisation";
    if !inside(name, &Share::default()) {
        return;
    }
    let cuda = Cuda::start();
    let (green, _) = green_stream(&cuda);
    let mut context = 0usize;
    assert_eq!(cuda.call("cuCtxFromGreenCtx", &[out(&mut context), green]), 0);
    assert_eq!(cuda.call("cuCtxSetCurrent", &[context]), 0);
    for stream in [0, 1] {
        let pointer = usize::try_from(cuda.allocate(600).unwrap()).unwrap();
        assert_eq!(cuda.call("cuMemFreeAsync", &[pointer, stream]), 0);
        assert_eq!(charged(), CONTEXT + 600);
        assert_eq!(cuda.call("cuCtxSynchronize", &[]), 0);
        assert_eq!(charged(), CONTEXT, "stream {stream}");
    }
    assert_eq!(cuda.call("cuCtxSetCurrent", &[cuda.context]), 0);
    assert_eq!(cuda.call("cuGreenCtxDestroy", &[green]), 0);
    assert_eq!(charged(), CONTEXT);
}

/// A host function that keeps a stream busy for 300 ms.
extern "C" fn nap(_: usize) {
    std::thread::sleep(std::time::Duration::from_millis(300));
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn memory_freed_in_a_stream_is_paid_until_that_stream_has_run() {
    let name = "endings::memory_freed_in_a_stream_is_paid_until_that_stream_has_run";
    if !inside(name, &Share::default()) {
        return;
    }
    let cuda = Cuda::start();
    let (first, second) = (stream(&cuda), stream(&cuda));
    let free_in = |stream: usize| {
        let pointer = usize::try_from(cuda.allocate(600).unwrap()).unwrap();
        assert_eq!(cuda.call("cuMemFreeAsync", &[pointer, stream]), 0);
        assert_eq!(charged(), CONTEXT + 600, "in stream {stream:#x}");
    };
    let synchronise = |stream: usize| assert_eq!(cuda.call("cuStreamSynchronize", &[stream]), 0);
    free_in(first);
    synchronise(second);
    synchronise(0);
    assert_eq!(charged(), CONTEXT + 600, "other streams say nothing");
    synchronise(first);
    assert_eq!(charged(), CONTEXT);
    for default in [0, 1] {
        free_in(0);
        synchronise(default);
        assert_eq!(charged(), CONTEXT, "the default stream's other name");
    }
    free_in(first);
    assert_eq!(cuda.call("cuCtxSynchronize", &[]), 0);
    assert_eq!(charged(), CONTEXT);
    // A stream that ends loses its handle, but its work still runs.
    assert_eq!(cuda.call("cuLaunchHostFunc", &[second, nap as *const () as usize, 0]), 0);
    free_in(second);
    assert_eq!(cuda.call("cuStreamDestroy_v2", &[second]), 0);
    let again = stream(&cuda);
    synchronise(again);
    assert_eq!(charged(), CONTEXT + 600);
    assert_eq!(cuda.call("cuCtxSynchronize_v2", &[0]), 0);
    assert_eq!(charged(), CONTEXT);
    // Before a refusal, the library asks the driver which work has run.
    for stream in [first, 0] {
        free_in(stream);
        let other = cuda.allocate(1024).unwrap();
        assert_eq!((charged(), really_held(0)), (CONTEXT + 1024, CONTEXT + 1024));
        assert_eq!(cuda.free(other), 0);
    }
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn a_threads_own_stream_says_nothing_about_another_threads() {
    let name = "endings::a_threads_own_stream_says_nothing_about_another_threads";
    if !inside(name, &Share::default()) {
        return;
    }
    let cuda = Cuda::start();
    let pool = pool_of(&cuda, 1);
    let mut pointer = 0usize;
    let arguments = [out(&mut pointer), bytes(320), pool, 0];
    assert_eq!(cuda.call("cuMemAllocFromPoolAsync_ptsz", &arguments), 0);
    assert_eq!(cuda.call("cuMemPoolDestroy", &[pool]), 0);
    assert_eq!(cuda.call("cuMemFreeAsync_ptsz", &[pointer, 0]), 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(cuda.call("cuCtxSetCurrent", &[cuda.context]), 0);
            assert_eq!(cuda.call("cuStreamSynchronize_ptsz", &[0]), 0);
            assert_eq!(cuda.call("cuStreamSynchronize", &[2]), 0);
        });
    });
    assert_eq!(charged(), CONTEXT + 320);
    assert_eq!(cuda.call("cuStreamSynchronize", &[2]), 0);
    assert_eq!((charged(), really_held(0)), (CONTEXT, CONTEXT));
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn limits_of_a_context_that_take_memory_are_charged_while_it_lives() {
    let name = "endings::limits_of_a_context_that_take_memory_are_charged_while_it_lives";
    if !inside(name, &Share { limits: &[2344], ..Share::default() }) {
        return;
    }
    let cuda = Cuda::start();
    let get = |limit: usize| {
        let mut value = 0usize;
        assert_eq!(cuda.call("cuCtxGetLimit", &[out(&mut value), limit]), 0);
        value
    };
    let attribute = |number: usize| {
        let mut value = 0i32;
        assert_eq!(cuda.call("cuDeviceGetAttribute", &[out(&mut value), number, 0]), 0);
        u64::try_from(value).unwrap()
    };
    let stacks = attribute(16) * attribute(39);
    for (limit, more, want) in
        [(0, 1024, stacks * 1024), (1, bytes(64), 64 * MIB), (2, bytes(100), 100 * MIB)]
    {
        let default = get(limit);
        let set = |value: usize| cuda.call("cuCtxSetLimit", &[limit, value]);
        assert_eq!(set(default + bytes(4096)), OUT_OF_MEMORY, "limit {limit}");
        assert_eq!(get(limit), default, "limit {limit}");
        assert_eq!(set(default + more), 0, "limit {limit}");
        assert_eq!(books().devices[0].bytes, CONTEXT * MIB + want, "limit {limit}");
        assert_eq!(set(default), 0, "limit {limit}");
        assert_eq!(charged(), CONTEXT, "limit {limit}");
        assert_eq!(set(default + more), 0, "limit {limit}");
        assert_eq!(cuda.call("cuDevicePrimaryCtxReset_v2", &[0]), 0);
        assert_eq!(charged(), 0, "limit {limit}");
        Cuda::start();
    }
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn memory_that_left_the_process_and_came_back_is_paid_until_the_last_way_to_it_is_gone() {
    let name = "endings::memory_that_left_the_process_and_came_back_is_paid_until_the_last_way_to_it_is_gone";
    if !inside(name, &Share::default()) {
        return;
    }
    let cuda = Cuda::start();
    let export = |handle: usize| {
        let mut descriptor = -1i32;
        let arguments = [out(&mut descriptor), handle, 1, 0];
        assert_eq!(cuda.call("cuMemExportToShareableHandle", &arguments), 0);
        usize::try_from(descriptor).unwrap()
    };
    // SAFETY: a descriptor that the test received and no longer uses.
    let close = |descriptor: usize| unsafe { libc::close(i32::try_from(descriptor).unwrap()) };
    let import = |descriptor: usize| {
        let mut handle = 0usize;
        assert_eq!(cuda.call("cuMemImportFromShareableHandle", &[out(&mut handle), descriptor, 1]), 0);
        handle
    };
    let release = |handle: usize| assert_eq!(cuda.call("cuMemRelease", &[handle]), 0);
    let (_, first) = create(&cuda, 512);
    let descriptor = export(first);
    let second = import(descriptor);
    close(descriptor);
    release(first);
    assert_eq!(charged(), CONTEXT + 512, "the import holds it");
    release(second);
    assert_eq!(charged(), CONTEXT);
    // The descriptor alone keeps the memory alive. If it were not charged, programs could use descriptors to
    // hold memory for free.
    let (_, third) = create(&cuda, 512);
    let descriptor = export(third);
    release(third);
    assert_eq!(charged(), CONTEXT + 512, "the descriptor holds it");
    assert_eq!(create(&cuda, 600).0, OUT_OF_MEMORY);
    close(descriptor);
    let (status, fourth) = create(&cuda, 1024);
    assert_eq!((status, charged()), (0, CONTEXT + 1024), "closed: found before the refusal");
    release(fourth);
    assert_eq!(charged(), CONTEXT);
    let (_, fifth) = create(&cuda, 512);
    let descriptor = export(fifth);
    release(fifth);
    assert_eq!(cuda.memory().0, 512);
    close(descriptor);
    assert_eq!((cuda.memory().0, charged()), (1024, CONTEXT), "closed: found by a look");
    for _ in 0..600 {
        let (_, handle) = create(&cuda, 2);
        let descriptor = export(handle);
        close(descriptor);
        release(handle);
    }
    assert_eq!(charged(), CONTEXT);
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn hundreds_of_pools_are_each_paid() {
    let name = "endings::hundreds_of_pools_are_each_paid";
    if !inside(name, &Share { limits: &[CONTEXT + 300 * 32], ..Share::default() }) {
        return;
    }
    let cuda = Cuda::start();
    let mut pointer = 0usize;
    let pools: Vec<_> = (0..301).map(|_| pool_of(&cuda, 1)).collect();
    let mut allocate = |pool| cuda.call("cuMemAllocFromPoolAsync", &[out(&mut pointer), bytes(32), pool, 0]);
    for (index, pool) in pools.iter().enumerate() {
        assert_eq!(allocate(*pool), if index < 300 { 0 } else { OUT_OF_MEMORY }, "pool {index}");
    }
    assert_eq!((charged(), really_held(0)), (CONTEXT + 9600, CONTEXT + 9600));
}
