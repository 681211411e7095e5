//! What NVML tells about a GPU and the processes that use it.

#[macro_use]
mod support;

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::process::Command;
use std::time::{Duration, SystemTime};

use support::client::{self, Library};
use support::{Node, Running, real_driver};

/// The body of the client processes; see [`support::Node::run`].
#[test]
#[ignore = "not a test: the client that the tests start"]
fn client() {
    match std::env::var("SCRIPT").as_deref() {
        Ok("observe") => observe(),
        Ok("collect") => collect(),
        Ok("draws") => draws(),
        Ok("delay") => delay(),
        Ok(script) => client::run(script),
        Err(_) => {}
    }
}

/// The simulated libnvidia-ml with its first device.
struct Nvml {
    library: Library,
    device: usize,
}

/// nvmlProcessUtilizationSample_t of NVML's header.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Sample {
    pid: u32,
    time: u64,
    cores: u32,
    others: [u32; 3],
}

/// nvmlProcessUtilizationInfo_v1_t of NVML's header.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Entry {
    time: u64,
    pid: u32,
    cores: u32,
    others: [u32; 5],
}

/// nvmlProcessesUtilizationInfo_v1_t of NVML's header.
#[repr(C)]
struct Entries {
    version: u32,
    count: u32,
    last_seen: u64,
    list: *mut Entry,
}

impl Nvml {
    fn open() -> Self {
        let library = Library::open(c"libnvidia-ml.so.1");
        let mut device = 0;
        assert_eq!(call!(library, c"nvmlInit_v2",), 0);
        assert_eq!(call!(library, c"nvmlDeviceGetHandleByIndex_v2", 0 => u32, &mut device => &mut usize), 0);
        Self { library, device }
    }

    fn utilisation(&self) -> u32 {
        let mut rates = [0_u32; 2];
        call!(
            self.library, c"nvmlDeviceGetUtilizationRates",
            self.device => usize, &mut rates => &mut [u32; 2],
        );
        rates[0]
    }

    /// Result, and the pid and memory of each process.
    fn processes(&self) -> (u32, Vec<[u64; 2]>) {
        let (mut entries, mut count) = ([[0_u64; 2]; 8], 8_u32);
        let code = call!(
            self.library, c"nvmlDeviceGetComputeRunningProcesses",
            self.device => usize, &mut count => &mut u32, entries.as_mut_ptr() => *mut [u64; 2],
        );
        (code, entries[..count.min(8) as usize].to_vec())
    }

    fn samples(&self, last_seen: u64) -> (u32, Vec<Sample>) {
        let (mut samples, mut count) = ([Sample::default(); 64], 64_u32);
        let code = call!(
            self.library, c"nvmlDeviceGetProcessUtilization",
            self.device => usize, samples.as_mut_ptr() => *mut Sample, &mut count => &mut u32, last_seen => u64,
        );
        (code, if code == 0 { samples[..count as usize].to_vec() } else { Vec::new() })
    }

    /// The processes' samples by the newer call.
    fn entries(&self, last_seen: u64, version: u32) -> (u32, Vec<Entry>) {
        let mut list = [Entry::default(); 64];
        let mut entries = Entries { version, count: 64, last_seen, list: list.as_mut_ptr() };
        let code = call!(
            self.library, c"nvmlDeviceGetProcessesUtilizationInfo",
            self.device => usize, &mut entries => &mut Entries,
        );
        (code, if code == 0 { list[..entries.count as usize].to_vec() } else { Vec::new() })
    }

    /// Time stamp and percent of each sample of the whole GPU.
    fn device_samples(&self, last_seen: u64) -> Vec<[u64; 2]> {
        let (mut samples, mut count, mut kind) = ([[0_u64; 2]; 16], 16_u32, 0_u32);
        let code = call!(
            self.library, c"nvmlDeviceGetSamples",
            self.device => usize, 1 => u32, last_seen => u64, &mut kind => &mut u32, &mut count => &mut u32,
            samples.as_mut_ptr() => *mut [u64; 2],
        );
        if code == 0 { samples[..count as usize].to_vec() } else { Vec::new() }
    }
}

/// Prints utilisation, the processes, and their samples.
fn observe() {
    let nvml = Nvml::open();
    println!("utilisation: {}", nvml.utilisation());
    let (code, list) = nvml.processes();
    let first = list.first().copied().unwrap_or_default();
    println!("processes: {code} {} {} {}", list.len(), first[0], first[1]);
    let (code, list) = nvml.samples(0);
    let first = list.first().copied().unwrap_or_default();
    println!("samples: {code} {} {}", first.pid, first.cores);
    if nvml.library.address(c"nvmlDeviceGetProcessesUtilizationInfo").is_none() {
        println!("entries: absent\nmismatch: absent");
        return;
    }
    let (code, same) = nvml.entries(0, 0x0100_0018);
    let first = same.first().copied().unwrap_or_default();
    println!("entries: {code} {} {}", first.pid, first.cores);
    println!("mismatch: {}", nvml.entries(0, 0x0200_0018).0);
}

/// Reads sixteen windows one at a time as they come, then all that NVML keeps at once.
fn draws() {
    let nvml = Nvml::open();
    let mut seen = nvml.device_samples(0).iter().map(|sample| sample[0]).max().unwrap_or(0);
    let mut each = Vec::new();
    while each.len() < 16 {
        let found = nvml.samples(seen).1;
        if let Some(newest) = found.iter().map(|sample| sample.time).max() {
            seen = newest;
            each.push(
                found.iter().map(|sample| format!("{}:{}", sample.pid, sample.cores)).collect::<Vec<_>>(),
            );
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    println!("each: {}", each.iter().map(|found| found.join(",")).collect::<Vec<_>>().join(" "));
    let all: Vec<String> = nvml.samples(0).1.iter().map(|sample| sample.cores.to_string()).collect();
    println!("mean: {}", all.join(" "));
}

/// Reads every sample as it comes, until a line arrives on standard input. Prints the sums of percents: of
/// the whole GPU, and by pid.
fn collect() {
    let nvml = Nvml::open();
    let (mut sums, mut whole, mut windows) = (BTreeMap::<u32, u32>::new(), 0, 0);
    let newest = |samples: &[[u64; 2]]| samples.iter().map(|sample| sample[0]).max().unwrap_or(0);
    let (mut seen, mut seen_whole) = (newest(&nvml.device_samples(0)), newest(&nvml.device_samples(0)));
    println!("ready: 1");
    let line = std::thread::spawn(|| std::io::stdin().read_line(&mut String::new()));
    while !line.is_finished() {
        for sample in nvml.samples(seen).1 {
            *sums.entry(sample.pid).or_default() += sample.cores;
            seen = seen.max(sample.time);
        }
        for [time, percent] in nvml.device_samples(seen_whole) {
            whole += percent;
            windows += u32::from(percent > 0);
            seen_whole = seen_whole.max(time);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    println!("windows: {windows}");
    println!("whole: {whole}");
    for (pid, sum) in sums {
        println!("{pid}: {sum}");
    }
}

/// Waits for the next window, and prints how many milliseconds after its end it could be read.
fn delay() {
    let nvml = Nvml::open();
    let last = |seen| nvml.device_samples(seen).last().map(|sample| sample[0]);
    let before = last(0).unwrap_or(0);
    let seen = std::iter::repeat_with(|| {
        std::thread::sleep(Duration::from_millis(1));
        last(before)
    });
    let seen = seen.flatten().next().unwrap_or(0);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("it is after 1970");
    println!("delay: {}", now.as_millis().saturating_sub(u128::from(seen / 1000)));
}

fn observed(node: &Node) -> [String; 5] {
    let mut observer = node.run("observe");
    ["utilisation", "processes", "samples", "entries", "mismatch"].map(|key| observer.value(key))
}

#[test]
fn a_busy_process_is_seen_with_its_pid_memory_and_share() {
    let node = Node::new(&["--context", "64MiB", "--driver", "550.54.15"]);
    let mut busy = node.run("context\nallocate 1073741824\nlaunch busy_50ms 20\nfree\nsleep 60000");
    busy.number("free");
    std::thread::sleep(Duration::from_millis(500));
    let pid = busy.pid();
    let [utilisation, processes, samples, entries, mismatch] = observed(&node);
    assert_eq!(utilisation, "100");
    assert_eq!((samples.as_str(), mismatch.as_str()), (entries.as_str(), "25"));
    assert_eq!(processes, format!("0 1 {pid} {}", (1024 + 64) << 20));
    let expected = samples.split(' ').collect::<Vec<_>>();
    assert_eq!(expected[..2], ["0", &pid.to_string()], "{samples}");
    Running::kill(busy);
    let [_, processes, ..] = observed(&node);
    assert!(processes.starts_with("0 0 "), "{processes}");
}

/// An H200 with driver 580: each window named one of two equally busy processes, and a question about all windows
/// was answered with means.
#[test]
fn a_drawn_window_names_one_process_and_the_mean_over_windows_all() {
    let node = Node::new(&["--profile", "h200-580", "--driver", "580.65.06"]);
    let busy = "context\nlaunch busy_50ms 400\nclock\nelapsed\nsleep 60000";
    let mut clients = [node.run(busy), node.run(busy)];
    for client in &mut clients {
        client.number("elapsed");
    }
    let pids = clients.each_ref().map(Running::pid);
    let mut observer = node.run("draws");
    let (each, mean) = (observer.value("each"), observer.value("mean"));
    // Work fills less of a window in which it began, or in which a loaded machine was late to submit it.
    let named = |pid: u32| each.split(' ').filter(|window| window.starts_with(&format!("{pid}:"))).count();
    assert_eq!(named(pids[0]) + named(pids[1]), 16, "{each}");
    let full = each.split(' ').filter(|window| window.ends_with(":99")).count();
    assert!(full >= 8, "{each}");
    let means: Vec<u64> = mean.split(' ').map(|cores| cores.parse().expect("a number")).collect();
    assert!(means.len() <= 2 && (50..=99).contains(&means.iter().sum::<u64>()), "{mean}");
}

#[test]
fn an_idle_gpu_has_no_samples() {
    let node = Node::new(&["--driver", "580.65.06"]);
    let [utilisation, _, samples, entries, _] = observed(&node);
    assert_eq!(utilisation, "0");
    assert!(samples.starts_with("6 ") && entries.starts_with("6 "), "{samples} {entries}");
}

/// What `collect` saw of three processes that kept the GPU busy for 700, 400 and 200 ms: the number of
/// windows with work, the sum of percents of the whole GPU, and that of each process.
fn sums_of_three(arguments: &[&str]) -> (u64, u64, [u64; 3]) {
    let node = Node::new(arguments);
    let mut collector = node.run("collect");
    collector.number("ready");
    let work = |count| format!("context\nlaunch busy_10ms {count}\nsynchronize\nsleep 60000");
    let mut clients: Vec<Running> = [70, 40, 20].map(|count| node.run(&work(count))).into_iter().collect();
    clients.iter_mut().for_each(|client| assert_eq!(client.number("synchronize"), 0));
    // Wait until the last window has ended and was read.
    std::thread::sleep(Duration::from_millis(500));
    collector.send();
    let windows = collector.number("windows");
    let whole = collector.number("whole");
    let mut pids: Vec<u32> = clients.iter().map(Running::pid).collect();
    pids.sort_unstable();
    let sums: BTreeMap<u32, u64> =
        pids.into_iter().map(|pid| (pid, collector.number(&pid.to_string()))).collect();
    (windows, whole, [0, 1, 2].map(|index| sums[&clients[index].pid()]))
}

#[test]
fn samples_add_up_to_the_time_that_was_worked() {
    for (arguments, period) in [
        (&["--device", "slices"][..], 1000.0 / 6.0),
        (&["--device", "fifo"], 1000.0 / 6.0),
        (&["--device", "slices", "--sample-period", "100", "--sample-rounding", "nearest"], 100.0),
    ] {
        let (windows, whole, sums) = sums_of_three(arguments);
        let percents = |ms: f64| ms * 100.0 / period;
        let near = arguments.contains(&"nearest");
        let fits = |sum: u64, ms: f64| {
            let wrong = sum as f64 - percents(ms);
            // Each window with work loses less than one percent, or if rounded to the nearest, at most half
            // of one either way.
            let most = windows as f64;
            if near { wrong.abs() <= most / 2.0 } else { (-most..=0.01).contains(&wrong) }
        };
        assert!(fits(whole, 1300.0), "{arguments:?}: {whole} in {windows} windows");
        for (sum, ms) in sums.into_iter().zip([700.0, 400.0, 200.0]) {
            assert!(fits(sum, ms), "{arguments:?}: {sum} in {windows} windows for {ms} ms");
        }
        let parts: u64 = sums.iter().sum();
        assert!(parts.abs_diff(whole) <= 2 * windows, "{arguments:?}: {sums:?} of {whole}");
    }
}

#[test]
fn a_window_can_be_read_after_its_delay() {
    for (delay, late) in [("0", 0..40), ("150", 150..190)] {
        let node = Node::new(&["--sample-period", "200", "--sample-delay", delay]);
        // No window is early. A busy machine may tell one late, but not most of them.
        let mut told = [(); 5].map(|()| node.run("delay").number("delay"));
        told.sort_unstable();
        assert!(
            told[0] >= late.start && told[2] < late.end,
            "{told:?} ms after the end, with a delay of {delay} ms"
        );
    }
}

#[test]
fn percents_are_rounded_as_the_node_was_made() {
    for (rounding, want) in [("down", "0"), ("nearest", "1")] {
        let node = Node::new(&["--sample-period", "1500", "--sample-rounding", rounding]);
        // Start at the begin of a window: the work then lies in that window alone and is read in the next.
        node.run("delay").number("delay");
        let mut busy = node.run("context\nlaunch busy_10ms 1\nsynchronize\nsleep 60000");
        busy.number("synchronize");
        node.run("delay").number("delay");
        let pid = busy.pid();
        let [_, _, samples, ..] = observed(&node);
        assert_eq!(samples, format!("0 {pid} {want}"), "rounded {rounding}");
    }
}

#[test]
fn the_time_of_a_dead_process_counts_and_its_pid_is_gone() {
    for device in ["fifo", "slices"] {
        let node = Node::new(&["--device", device, "--sample-period", "1000"]);
        // Start at the begin of a window.
        node.run("delay").number("delay");
        // It holds the slot that the observer takes later, so the other's death is found only by a look at
        // its slot.
        let mut early = node.run("context\nfree\nsleep 60000");
        early.number("free");
        let mut busy = node.run("context\nlaunch busy_50ms 100\nfree\nsleep 60000");
        busy.number("free");
        early.kill();
        std::thread::sleep(Duration::from_millis(400));
        busy.kill();
        observed(&node);
        node.run("delay").number("delay");
        let [utilisation, _, samples, ..] = observed(&node);
        let percent: u32 = utilisation.parse().expect("a number");
        assert!((25..=60).contains(&percent), "{percent} % of a second for 400 ms, {device}");
        assert!(samples.starts_with("6 "), "{samples}, {device}");
    }
}

#[test]
fn nvml_tells_what_the_node_was_made_to_tell() {
    let node = Node::new(&["--nvml", "no-processes", "--driver", "550.54.15"]);
    let mut busy = node.run("context\nlaunch busy_50ms 20\nfree\nsleep 60000");
    busy.number("free");
    std::thread::sleep(Duration::from_millis(400));
    let [utilisation, processes, samples, entries, _] = observed(&node);
    assert_eq!(utilisation, "100");
    assert!(
        [&processes, &samples, &entries].iter().all(|told| told.starts_with("3 ")),
        "{processes} {samples}"
    );
    let node = Node::new(&["--nvml", "absent"]);
    assert!(!node.path("driver/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1").exists());
    assert_eq!(node.run("context").number("context"), 0);
}

#[test]
#[ignore = "needs root: makes a pid namespace"]
fn in_a_pid_namespace_pids_are_those_of_the_node_if_it_was_made_so() {
    for (pids, want) in [("namespace", "0 0 0 0"), ("host", "0 1")] {
        let node = Node::new(&["--nvml-pids", pids, "--context", "64MiB"]);
        let mut busy = node.run("context\nlaunch busy_50ms 100\nfree\nsleep 60000");
        busy.number("free");
        std::thread::sleep(Duration::from_millis(400));
        let inside = || {
            let mut observer =
                node.run_under(&["unshare", "--pid", "--fork", "--kill-child"], "observe", &[]);
            ["processes", "samples"].map(|key| observer.value(key))
        };
        // No process in the node's own pid namespace has seen the client yet.
        assert_eq!(inside(), ["0 0 0 0", "6 0 0"], "{pids}");
        observed(&node);
        let [processes, samples] = inside();
        if pids == "host" {
            let pid = busy.pid();
            assert_eq!(processes, format!("{want} {pid} {}", 64 << 20));
            assert!(samples.starts_with(&format!("0 {pid} ")), "{samples}");
        } else {
            assert_eq!((processes.as_str(), samples.as_str()), (want, "6 0 0"));
        }
    }
}

#[test]
fn nvidia_smi_watches_processes() {
    let program =
        real_driver().map(|(version, folder)| (version, folder.join("../../../nvidia/current/nvidia-smi")));
    let Some((version, program)) = program.filter(|(_, program)| program.exists()) else {
        eprintln!("skipped: NVIDIA's nvidia-smi is not here; tests/setup/driver-libraries.sh fetches it");
        return;
    };
    let node = Node::new(&["--driver", &version, "--nvidia-smi", &program.display().to_string()]);
    let mut busy = node.run("context\nlaunch busy_50ms 100\nfree\nsleep 60000");
    busy.number("free");
    // Longer than pmon looks back, and longer than windows are kept.
    std::thread::sleep(Duration::from_millis(1400));
    let run = |what: &str| {
        let mut command = node.client(Command::new(node.path("driver/usr/bin/nvidia-smi")));
        let output = command.args([what, "-c", "1"]).output().expect("it runs");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let told = run("pmon");
    let line = told.lines().find(|line| line.contains(&busy.pid().to_string())).unwrap_or_default();
    let words: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(words.get(2..4), Some(&["C", "100"][..]), "{told}");
    let told = run("dmon");
    let line = told.lines().find(|line| !line.starts_with('#')).unwrap_or_default();
    assert_eq!(line.split_whitespace().nth(4), Some("100"), "{told}");
}
