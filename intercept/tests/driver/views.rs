//! The program's view: sizes, entry points, devices, processes.

use std::ffi::CString;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;

use gpushare_region::path;

use crate::client::{Cuda, Library, MIB, bytes, call, memory_info, out};
use crate::place::{CONTEXT, Share, books, inside, limits_file};
use crate::processes::{fork, wait};
use crate::{INVALID_VALUE, OUT_OF_MEMORY};

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn cases_1_2_17_every_size_is_the_limit_and_null_outputs_are_the_drivers_business() {
    let name = "views::cases_1_2_17_every_size_is_the_limit_and_null_outputs_are_the_drivers_business";
    if !inside(name, &Share { gpus: 3, limits: &[CONTEXT + 1024, 8000], ..Share::default() }) {
        return;
    }
    let cuda = Cuda::start();
    let bare = Library::open(path::DRIVER_CUDA);
    let mut word = 7u64;
    for (free, total) in [(0, 0), (out(&mut word), 0), (0, out(&mut word))] {
        let (ours, theirs) =
            (cuda.call("cuMemGetInfo_v2", &[free, total]), bare.call("cuMemGetInfo_v2", &[free, total]));
        assert_eq!(ours, theirs, "{free:x} {total:x}");
    }
    assert_eq!(cuda.call("cuDeviceTotalMem_v2", &[0, 0]), bare.call("cuDeviceTotalMem_v2", &[0, 0]));
    let nvml = Library::open("libnvidia-ml.so.1");
    for (device, limit) in [(0, CONTEXT + 1024), (1, 8000)] {
        let mut total = 0u64;
        assert_eq!(cuda.call("cuDeviceTotalMem_v2", &[out(&mut total), device]), 0);
        assert_eq!((total / MIB, memory_info(&nvml, device)[0] / MIB), (limit, limit));
    }
    // A GPU that is not granted has no limit: it shows its own size, with nothing free.
    for library in [&cuda.library, &bare] {
        let (mut total, mut half) = (0u64, 0u32);
        assert_eq!(library.call("cuDeviceTotalMem_v2", &[out(&mut total), 2]), 0);
        assert_eq!(library.call("cuDeviceTotalMem", &[out(&mut half), 2]), 0);
        assert_eq!((total / MIB, half), (16400, u32::MAX));
    }
    assert_eq!(memory_info(&nvml, 2).map(|bytes| bytes / MIB), [17016, 0, 17016]);
    assert_eq!(cuda.memory(), (1024, CONTEXT + 1024));
    cuda.allocate(1000).unwrap();
    assert_eq!(cuda.memory(), (24, CONTEXT + 1024));
    assert_eq!(memory_info(&nvml, 0).map(|bytes| bytes / MIB), [CONTEXT + 1024, 24, CONTEXT + 1000]);
    let mut second = [0x0200_0028u64, 0, 9, 0, 0];
    let mut device = 0usize;
    assert_eq!(nvml.call("nvmlDeviceGetHandleByIndex_v2", &[0, out(&mut device)]), 0);
    assert_eq!(nvml.call("nvmlDeviceGetMemoryInfo_v2", &[device, out(&mut second)]), 0);
    assert_eq!(
        second,
        [0x0200_0028, (CONTEXT + 1024) * MIB, 0, 24 * MIB, (CONTEXT + 1000) * MIB],
        "version, total, reserved, free, used"
    );
    second[0] = 5;
    assert_ne!(nvml.call("nvmlDeviceGetMemoryInfo_v2", &[device, out(&mut second)]), 0, "another version");
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn case_2_use_above_a_limit_that_was_lowered_saturates() {
    if !inside("views::case_2_use_above_a_limit_that_was_lowered_saturates", &Share::default()) {
        return;
    }
    let cuda = Cuda::start();
    cuda.allocate(1000).unwrap();
    change_limit(512);
    assert_eq!(cuda.memory(), (0, 512));
    assert_eq!(cuda.allocate(1), Err(OUT_OF_MEMORY));
    let nvml = Library::open("libnvidia-ml.so.1");
    assert_eq!(memory_info(&nvml, 0).map(|bytes| bytes / MIB), [512, 0, 512]);
}

/// Sets the limit of line 0 of the limits file to `mib`, under its sequence counter, as the host does.
fn change_limit(mib: u64) {
    let file = limits_file();
    let write = |bytes: &[u8], at: u64| std::os::unix::fs::FileExt::write_all_at(&file, bytes, at).unwrap();
    let mut sequence = [0; 4];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut sequence, 16).unwrap();
    let sequence = u32::from_ne_bytes(sequence);
    write(&(sequence + 1).to_ne_bytes(), 16);
    write(&(mib * MIB).to_ne_bytes(), 64 + 16);
    write(&(sequence + 2).to_ne_bytes(), 16);
}

/// Cases 20 and 21: a new limit was ignored because of a stale file, and processes were killed because of a
/// new limit.
#[test]
#[ignore = "needs root: makes a mount namespace"]
fn cases_20_21_a_limit_changed_in_place_counts_at_once_in_every_process_and_view() {
    let name = "views::cases_20_21_a_limit_changed_in_place_counts_at_once_in_every_process_and_view";
    if !inside(name, &Share { limits: &[2 * CONTEXT + 1704], ..Share::default() }) {
        return;
    }
    let step = shared_word();
    let child = fork(|| {
        let cuda = Cuda::start();
        let pointer = cuda.allocate(704).unwrap();
        step.store(1, SeqCst);
        let until = |wanted| while step.load(SeqCst) != wanted {};
        until(2); // the limit is below what both hold
        assert_eq!((cuda.memory(), cuda.allocate(1)), ((0, 1000), Err(OUT_OF_MEMORY)));
        let mut pool = 0usize;
        assert_eq!(cuda.call("cuMemAllocAsync", &[out(&mut pool), bytes(2), 0]), OUT_OF_MEMORY);
        assert_eq!(cuda.free(pointer), 0, "what it holds is still its own");
        step.store(3, SeqCst);
        until(4); // the limit is above it again
        assert_eq!(cuda.memory(), (2000, 2 * CONTEXT + 2704));
        assert!(cuda.allocate(2000).is_ok());
        step.store(5, SeqCst);
        until(6);
    });
    let until = |wanted| {
        while step.load(SeqCst) != wanted {
            assert!(is_running(child), "the child failed before step {wanted}");
            std::thread::yield_now();
        }
    };
    until(1);
    let cuda = Cuda::start();
    cuda.allocate(704).unwrap();
    let nvml = Library::open("libnvidia-ml.so.1");
    let views = || {
        let mut total = 0u64;
        assert_eq!(cuda.call("cuDeviceTotalMem_v2", &[out(&mut total), 0]), 0);
        (cuda.memory(), total / MIB, memory_info(&nvml, 0).map(|bytes| bytes / MIB))
    };
    let limit = 2 * CONTEXT + 1704;
    assert_eq!(views(), ((296, limit), limit, [limit, 296, 2 * CONTEXT + 1408]));
    change_limit(1000);
    assert_eq!(views(), ((0, 1000), 1000, [1000, 0, 1000]), "what is above the limit is not shown");
    step.store(2, SeqCst);
    until(3);
    assert_eq!(cuda.allocate(1), Err(OUT_OF_MEMORY), "two contexts and 704 MiB are still held");
    let limit = 2 * CONTEXT + 2704;
    change_limit(limit);
    assert_eq!(views(), ((2000, limit), limit, [limit, 2000, 2 * CONTEXT + 704]));
    step.store(4, SeqCst);
    until(5);
    assert_eq!(views(), ((0, limit), limit, [limit, 0, limit]));
    step.store(6, SeqCst);
    assert_eq!(wait(child), 0);
}

/// Case 18: the figure of used memory came from a host program every 100 ms, and stopped changing when that
/// program died. Here no such program runs.
#[test]
#[ignore = "needs root: makes a mount namespace"]
fn case_18_what_another_process_takes_is_seen_and_refused_at_once() {
    let name = "views::case_18_what_another_process_takes_is_seen_and_refused_at_once";
    if !inside(name, &Share { limits: &[2 * CONTEXT + 1024], ..Share::default() }) {
        return;
    }
    let step = shared_word();
    // Even steps are this process's turn.
    step.store(1, SeqCst);
    let child = fork(|| {
        let cuda = Cuda::start();
        for round in 1.. {
            let pointer = cuda.allocate(1000).unwrap();
            step.store(4 * round, SeqCst);
            while step.load(SeqCst) != 4 * round + 1 {}
            assert_eq!(cuda.free(pointer), 0);
            step.store(4 * round + 2, SeqCst);
            while step.load(SeqCst) != 4 * round + 3 {}
        }
    });
    let cuda = Cuda::start();
    let turn = |at| {
        while step.load(SeqCst) != at {
            assert!(is_running(child), "the child failed before step {at}");
        }
    };
    for round in 1..=200 {
        turn(4 * round);
        assert_eq!(
            (cuda.memory(), cuda.allocate(26)),
            ((24, 2 * CONTEXT + 1024), Err(OUT_OF_MEMORY)),
            "round {round}"
        );
        step.store(4 * round + 1, SeqCst);
        turn(4 * round + 2);
        assert_eq!(cuda.memory(), (1024, 2 * CONTEXT + 1024), "round {round}");
        let pointer = cuda.allocate(1024).unwrap();
        assert_eq!(cuda.free(pointer), 0);
        step.store(4 * round + 3, SeqCst);
    }
    turn(4 * 201);
    // SAFETY: a child of ours that has not been reaped.
    assert_eq!(unsafe { libc::kill(child, libc::SIGKILL) }, 0);
    wait(child);
    let killed = std::time::Instant::now();
    while cuda.memory() != (CONTEXT + 1024, 2 * CONTEXT + 1024) {
        assert!(killed.elapsed() < std::time::Duration::from_secs(1), "the dead hold {:?}", cuda.memory());
    }
}

/// A word that forked processes share.
pub fn shared_word() -> &'static AtomicU32 {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping.
    let address = unsafe { libc::mmap(std::ptr::null_mut(), 4096, protection, flags, -1, 0) };
    assert_ne!(address, libc::MAP_FAILED);
    // SAFETY: a zeroed word, never unmapped.
    unsafe { &*address.cast() }
}

/// Whether a child of this process is still running.
fn is_running(pid: libc::pid_t) -> bool {
    let mut found = std::mem::MaybeUninit::<libc::siginfo_t>::zeroed();
    let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: a child of ours; the kernel writes one structure.
    let asked = unsafe { libc::waitid(libc::P_PID, pid.cast_unsigned(), found.as_mut_ptr(), flags) };
    // SAFETY: zeroed above, and all zero bytes are valid.
    let found = unsafe { found.assume_init() };
    asked == 0 && found.si_signo == 0
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn case_16_limits_follow_the_gpu_whatever_its_number() {
    let share = Share {
        gpus: 3,
        limits: &[CONTEXT + 1024, CONTEXT + 2024],
        variables: &[("CUDA_VISIBLE_DEVICES", "2,1,0")],
        ..Share::default()
    };
    if !inside("views::case_16_limits_follow_the_gpu_whatever_its_number", &share) {
        return;
    }
    let cuda = Cuda::start_on(1);
    assert_eq!(cuda.memory(), (2024, CONTEXT + 2024), "CUDA's device 1 is the node's GPU 1");
    let mut total = 0u64;
    assert_eq!(cuda.call("cuDeviceTotalMem_v2", &[out(&mut total), 2]), 0);
    assert_eq!(total / MIB, CONTEXT + 1024, "CUDA's device 2 is the node's GPU 0");
    let mut context = 0usize;
    assert_eq!(
        cuda.call("cuCtxCreate_v2", &[out(&mut context), 0, 0]),
        OUT_OF_MEMORY,
        "GPU 2 is not granted"
    );
    let (mut handle, mut properties) = (0usize, [1u32, 0, 1, 0, 0, 0, 0, 0]);
    let created = cuda.call("cuMemCreate", &[out(&mut handle), bytes(2), out(&mut properties), 0]);
    assert_eq!(created, OUT_OF_MEMORY, "GPU 2 is not granted");
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn case_28_a_missing_limits_file_refuses_and_never_ends_the_program() {
    if !inside("views::case_28_a_missing_limits_file_refuses_and_never_ends_the_program", &Share::default()) {
        return;
    }
    std::fs::remove_file("/usr/lib/gpushare/limits").unwrap();
    let cuda = Library::open("libcuda.so.1");
    assert_eq!(cuda.call("cuInit", &[0]), 0);
    let mut context = 0usize;
    assert_eq!(cuda.call("cuDevicePrimaryCtxRetain", &[out(&mut context), 0]), OUT_OF_MEMORY);
    assert_eq!(
        cuda.call("cuMemAlloc_v2", &[out(&mut context), bytes(1)]),
        201,
        "no context: the driver's error"
    );
}

/// Names with version and flags to look up with `cuGetProcAddress_v2`.
const QUESTIONS: [(&str, i32, usize); 10] = [
    ("cuMemAlloc", 3020, 0),
    ("cuMemAlloc", 2000, 0),
    ("cuMemFree", 13000, 0),
    ("cuMemGetInfo", 13000, 0),
    ("cuMemAllocAsync", 11020, 0),
    ("cuMemAllocAsync", 11020, 2),
    ("cuDevicePrimaryCtxRetain", 7000, 0),
    ("cuGetProcAddress", 13000, 0),
    ("cuArray3DCreate", 3020, 1),
    ("cuGraphLaunch", 10000, 2),
];

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn case_32_entry_points_are_replaced_by_pointer_whatever_name_version_and_flags() {
    let name = "views::case_32_entry_points_are_replaced_by_pointer_whatever_name_version_and_flags";
    if !inside(name, &Share::default()) {
        return;
    }
    let cuda = Cuda::start();
    let bare = Library::open(path::DRIVER_CUDA);
    let ask = |address: usize, name: &str, version: i32, flags: usize| {
        let (text, mut found, mut status) = (CString::new(name).unwrap(), 0x77usize, 0x77i32);
        let version = usize::try_from(version).unwrap();
        let result = call(
            address,
            &[text.as_ptr().expose_provenance(), out(&mut found), version, flags, out(&mut status)],
        );
        (result, found, status)
    };
    let (ours, theirs) = (cuda.library.symbol("cuGetProcAddress_v2"), bare.symbol("cuGetProcAddress_v2"));
    assert_ne!(ours, theirs);
    for (name, version, flags) in QUESTIONS {
        let (mine, real) = (ask(ours, name, version, flags), ask(theirs, name, version, flags));
        assert_eq!((mine.0, mine.2), (real.0, real.2), "{name} {version} {flags}");
        assert_ne!(mine.1, real.1, "{name} {version} {flags} leads past us");
    }
    for (name, version, flags) in [
        ("cuDeviceGetName", 13000, 0),
        ("cuNoSuchThing", 13000, 0),
        ("cuMemAlloc", 1000, 0),
        ("cuMemAlloc", 13000, 4),
    ] {
        assert_eq!(
            ask(ours, name, version, flags),
            ask(theirs, name, version, flags),
            "{name} {version} {flags}"
        );
    }
    // Functions found in this way charge like the exported ones.
    let (_, allocate, _) = ask(ours, "cuMemAllocAsync", 11020, 2);
    let mut pointer = 0u64;
    assert_eq!(call(allocate, &[out(&mut pointer), bytes(2048), 0]), OUT_OF_MEMORY);
    let (_, again, _) = ask(ours, "cuGetProcAddress", 13000, 0);
    assert_ne!(
        ask(again, "cuMemAlloc", 3020, 0).1,
        ask(theirs, "cuMemAlloc", 3020, 0).1,
        "also by way of itself"
    );
    assert_eq!(books().unhooked, 0);
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn case_49_process_lists_hold_the_containers_own_processes() {
    if !inside(
        "views::case_49_process_lists_hold_the_containers_own_processes",
        &Share { driver: "535.309.01", ..Share::default() },
    ) {
        return;
    }
    // A process of another container: it uses the same GPU but is not in this container's books.
    let step = shared_word();
    let other = fork(|| {
        let bare = Library::open(path::DRIVER_CUDA);
        let mut context = 0usize;
        assert_eq!(bare.call("cuInit", &[0]), 0);
        assert_eq!(bare.call("cuDevicePrimaryCtxRetain", &[out(&mut context), 0]), 0);
        step.store(1, SeqCst);
        std::thread::sleep(std::time::Duration::from_secs(60));
    });
    while step.load(SeqCst) == 0 {
        assert!(is_running(other), "no context on the bare driver");
    }
    let cuda = Cuda::start();
    cuda.allocate(100).unwrap();
    let nvml = Library::open("libnvidia-ml.so.1");
    let mut device = 0usize;
    memory_info(&nvml, 0);
    assert_eq!(nvml.call("nvmlDeviceGetHandleByIndex_v2", &[0, out(&mut device)]), 0);
    for (name, words) in [("", 2), ("_v2", 3), ("_v3", 3)] {
        let name = format!("nvmlDeviceGetComputeRunningProcesses{name}");
        let (mut count, mut list) = (0u32, [0u64; 6]);
        assert_eq!(nvml.call(&name, &[device, out(&mut count), 0]), 7, "{name} without room");
        assert_eq!(count, 1);
        assert_eq!(nvml.call(&name, &[device, out(&mut count), out(&mut list)]), 0);
        assert_eq!(list[..2], [u64::from(std::process::id()), (CONTEXT + 100) * MIB], "{name}");
        assert_eq!(list[2] == u64::MAX, words == 3, "{name}: the instances");
    }
    let mut count = 9u32;
    assert_eq!(nvml.call("nvmlDeviceGetGraphicsRunningProcesses_v3", &[device, out(&mut count), 0]), 0);
    assert_eq!(count, 0);
    // The table that nvidia-smi asks for.
    let (mut table, mut id) = (0usize, 0xc4fe_3e6c_c98f_6c4e_a327_ee69_6e12_f7c4_u128.to_be_bytes());
    assert_eq!(nvml.call("nvmlInternalGetExportTable", &[out(&mut table), out(&mut id)]), 0);
    // SAFETY: the table has more than 216 words.
    let slot = unsafe { std::ptr::with_exposed_provenance::<usize>(table).wrapping_add(213).read() };
    let (mut count, mut entries) = (2u32, vec![0u8; 2 * 4128]);
    assert_eq!(call(slot, &[device, out(&mut count), entries.as_mut_ptr().expose_provenance()]), 0);
    assert_eq!((count, u32::from_ne_bytes(entries[..4].try_into().unwrap())), (1, std::process::id()));
    assert!(entries[32..].starts_with(std::env::current_exe().unwrap().as_os_str().as_encoded_bytes()));
    // SAFETY: a child of ours that has not been reaped.
    assert_eq!(unsafe { libc::kill(other, libc::SIGKILL) }, 0);
    wait(other);
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn case_33_old_drivers_keep_their_missing_functions_missing_from_answers() {
    let name = "views::case_33_old_drivers_keep_their_missing_functions_missing_from_answers";
    if !inside(name, &Share { driver: "470.256.02", ..Share::default() }) {
        return;
    }
    let cuda = Cuda::start();
    assert!(cuda.allocate(100).is_ok());
    let mut found = 0usize;
    assert_eq!(cuda.library.symbol("cuCtxCreate_v4"), 0, "newer than this driver");
    let text = CString::new("cuMemAlloc").unwrap();
    assert_eq!(
        cuda.call("cuGetProcAddress", &[text.as_ptr().expose_provenance(), out(&mut found), 11040, 0]),
        0
    );
    let mut pointer = 0u64;
    assert_eq!(call(found, &[out(&mut pointer), bytes(4096)]), OUT_OF_MEMORY);
    let text = CString::new("cuNoSuchThing").unwrap();
    assert_eq!(
        cuda.call("cuGetProcAddress", &[text.as_ptr().expose_provenance(), out(&mut found), 11040, 0]),
        500
    );
    assert_eq!(cuda.call("cuMemAlloc_v2", &[out(&mut pointer), 0]), INVALID_VALUE);
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn without_proc_a_process_is_not_dead_to_its_own_nvml() {
    let name = "views::without_proc_a_process_is_not_dead_to_its_own_nvml";
    if !inside(name, &Share::default()) {
        return;
    }
    // SAFETY: C strings; the mount namespace is this test's own.
    let mounted =
        unsafe { libc::mount(c"none".as_ptr(), c"/proc".as_ptr(), c"tmpfs".as_ptr(), 0, std::ptr::null()) };
    assert_eq!(mounted, 0);
    let cuda = Cuda::start();
    cuda.allocate(500).unwrap();
    let nvml = Library::open("libnvidia-ml.so.1");
    assert_eq!(memory_info(&nvml, 0).map(|bytes| bytes / MIB), [CONTEXT + 1024, 524, CONTEXT + 500]);
    assert_eq!(cuda.memory(), (524, CONTEXT + 1024));
    assert_eq!(books().processes, 1);
}
