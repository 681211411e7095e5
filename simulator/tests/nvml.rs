//! What NVML tells of the processes that use a GPU.

mod support;

use std::ffi::c_void;
use std::time::Duration;

use support::client::{self, Library};
use support::{Node, Running};

/// The body of the client processes; see [`support::Node::run`].
#[test]
#[ignore = "not a test: the client that the tests start"]
fn client() {
    match std::env::var("SCRIPT").as_deref() {
        Ok("observe") => observe(),
        Ok(script) => client::run(script),
        Err(_) => {}
    }
}

/// Prints utilisation, the processes and their samples.
fn observe() {
    let nvml = Library::open(c"libnvidia-ml.so.1");
    let call = |name, device: usize, out: *mut c_void, count: *mut u32| {
        let address = nvml.address(name).expect("a name of NVML");
        // SAFETY: the names asked below take a device and two pointers in this order, or ignore the last.
        let function = unsafe {
            std::mem::transmute::<*mut c_void, extern "C" fn(usize, *mut c_void, *mut u32, u64) -> u32>(
                address,
            )
        };
        function(device, out, count, 0)
    };
    let mut device = 0_usize;
    call(c"nvmlInit_v2", 0, std::ptr::null_mut(), std::ptr::null_mut());
    call(c"nvmlDeviceGetHandleByIndex_v2", 0, (&raw mut device).cast(), std::ptr::null_mut());
    let mut rates = [0_u32; 2];
    call(c"nvmlDeviceGetUtilizationRates", device, (&raw mut rates).cast(), std::ptr::null_mut());
    println!("utilisation: {}", rates[0]);
    let (mut entries, mut count) = ([0_u64; 16], 8_u32);
    let code = call(
        c"nvmlDeviceGetComputeRunningProcesses",
        device,
        (&raw mut count).cast(),
        (&raw mut entries).cast::<u32>(),
    );
    println!("processes: {code} {count} {} {}", entries[0], entries[1]);
    let (mut samples, mut count) = ([0_u32; 8 * 64], 64_u32);
    let code = call(c"nvmlDeviceGetProcessUtilization", device, (&raw mut samples).cast(), &raw mut count);
    println!("samples: {code} {} {}", samples[0], samples[4]);
}

fn observed(node: &Node) -> [String; 3] {
    let mut observer = node.run("observe");
    ["utilisation", "processes", "samples"].map(|key| observer.value(key))
}

#[test]
fn a_busy_process_is_seen_with_its_pid_memory_and_share() {
    let node = Node::new(&["--context", "64MiB"]);
    let mut busy = node.run("context\nallocate 1073741824\nlaunch busy_50ms 20\nfree\nsleep 60000");
    busy.number("free");
    std::thread::sleep(Duration::from_millis(500));
    let pid = busy.pid();
    let [utilisation, processes, samples] = observed(&node);
    assert_eq!(utilisation, "100");
    assert_eq!(processes, format!("0 1 {pid} {}", (1024 + 64) << 20));
    let expected = samples.split(' ').collect::<Vec<_>>();
    assert_eq!(expected[..2], ["0", &pid.to_string()], "{samples}");
    Running::kill(busy);
    let [_, processes, _] = observed(&node);
    assert!(processes.starts_with("0 0 "), "{processes}");
}

#[test]
fn an_idle_gpu_has_no_samples() {
    let node = Node::new(&[]);
    let [utilisation, _, samples] = observed(&node);
    assert_eq!(utilisation, "0");
    assert!(samples.starts_with("6 "), "{samples}");
}
