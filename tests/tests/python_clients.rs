//! Programs as users write them, on the simulated GPU of a limited container: nvidia-smi, nvidia-ml-py,
//! gpustat, nvitop, cuda-bindings and numba-cuda. None of them knows gpushare.

use std::time::Duration;

use gpushare_tests::artifacts;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::command::eventually;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::{SimulatedNode, driver_version};
use gpushare_tests::probe::GIB;
use gpushare_tests::python;
use gpushare_tests::runtime::{Container, LowLevel, Runtime};

use serde_json::Value;

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Busybox, Need::Python];

/// Runs `body` in a container on this machine's root with 8 GiB of one GPU.
fn limited(needs: &[Need], body: impl FnOnce(&Container<'_>)) {
    if !met(needs) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let bundle = Bundle::host_root()
        .env("GPUSHARE_MEMORY", "8GiB")
        .env("NUMBA_CACHE_DIR", "/tmp")
        .env("PYTHONDONTWRITEBYTECODE", "1");
    body(&runtime.run(&bundle));
}

/// Runs `body` in a container whose own program holds 2 GiB, beside another that holds 1 GiB of the same GPU.
fn beside_another(body: impl FnOnce(&Container<'_>)) {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let client = artifacts::simulator();
    let client = client.to_str().expect("paths are UTF-8");
    let holding = |size| {
        let words = [client, "probe", "--json", "--allocate", size, "--hold", "600"];
        Bundle::host_root().env("GPUSHARE_MEMORY", "8GiB").args(&words)
    };
    let (other, ours) = (holding("1GiB"), holding("2GiB"));
    let (other, ours) = (runtime.run(&other), runtime.run(&ours));
    for container in [&other, &ours] {
        let holds = || container.stdout().contains("CUDA_SUCCESS");
        assert!(eventually(Duration::from_secs(20), holds), "{}", container.stderr());
    }
    body(&ours);
}

/// What a program of a Python package prints in the container.
fn command(container: &Container<'_>, words: &[&str]) -> String {
    let program = python::interpreter().with_file_name(words[0]);
    let mut command = vec!["/usr/bin/env", "TERM=xterm", "COLUMNS=120", "LC_ALL=C.UTF-8"];
    command.push(program.to_str().expect("paths are UTF-8"));
    command.extend(&words[1..]);
    container.exec(&command).expect_success(words[0]).stdout
}

fn run(container: &Container<'_>, program: &str, args: &[&str]) -> String {
    let (python, program) = (python::interpreter(), python::program(program));
    let mut words =
        vec![python.to_str().expect("paths are UTF-8"), program.to_str().expect("paths are UTF-8")];
    words.extend(args);
    container.exec(&words).expect_success("a Python program in the container").stdout
}

#[test]
#[ignore = "needs root, runc and nvidia-ml-py: runs a container"]
fn nvidia_ml_py_sees_a_gpu_of_the_shares_size() {
    limited(NEEDS, |container| {
        let told = run(container, "nvml_sizes.py", &[]);
        let lines: Vec<Vec<&str>> = told.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines.len(), 2, "{told}");
        assert_eq!(lines[0], ["driver", &driver_version()], "{told}");
        assert_eq!(lines[1][1], (8 * GIB).to_string(), "{told}");
    });
}

#[test]
#[ignore = "needs root, runc and cuda-bindings: runs a container"]
fn cuda_bindings_compiles_loads_and_runs_a_kernel() {
    limited(NEEDS, |container| {
        let told = run(container, "bindings_saxpy.py", &[]);
        assert_eq!(told.lines().collect::<Vec<_>>(), [&*format!("total {}", 8 * GIB), "result right"]);
    });
}

#[test]
#[ignore = "needs root, runc and cuda-bindings: runs a container"]
fn cuda_bindings_runs_with_a_default_stream_for_each_thread() {
    limited(NEEDS, |container| {
        let (python, program) = (python::interpreter(), python::program("bindings_threads.py"));
        let limit = (8 * GIB).to_string();
        let words = [
            "/usr/bin/env",
            "CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM=1",
            python.to_str().expect("paths are UTF-8"),
            program.to_str().expect("paths are UTF-8"),
            &limit,
        ];
        let told = container.exec(&words).expect_success("a Python program in the container").stdout;
        assert_eq!(told, "4 threads right\nmore refused\n");
    });
}

#[test]
#[ignore = "needs root, runc and gpustat: runs two containers"]
fn gpustat_shows_the_share_and_its_own_process_alone() {
    beside_another(|container| {
        let told = command(container, &["gpustat", "--json"]);
        let told: Value = serde_json::from_str(&told).unwrap_or_else(|error| panic!("{error}: {told}"));
        let gpus = told["gpus"].as_array().expect("a list of GPUs");
        assert_eq!(gpus.len(), 1, "{told}");
        assert_eq!(gpus[0]["memory.total"], 8192, "{told}");
        let used = gpus[0]["memory.used"].as_u64().expect("used MiB");
        assert!((2048..3072).contains(&used), "{told}");
        let processes = gpus[0]["processes"].as_array().expect("a list of processes");
        assert_eq!(processes.len(), 1, "{told}");
        assert_eq!(
            (&processes[0]["pid"], &processes[0]["command"]),
            (&1.into(), &"gpushare-simulator".into())
        );
    });
}

#[test]
#[ignore = "needs root, runc and nvitop: runs two containers"]
fn nvitop_shows_the_share_and_its_own_process_alone() {
    beside_another(|container| {
        let told = command(container, &["nvitop", "--once", "--ascii", "--colorful"]);
        assert!(told.contains("8.00GiB") || told.contains("8192MiB"), "{told}");
        let processes: Vec<&str> = told.lines().filter(|line| line.contains("gpushare-simulator")).collect();
        assert_eq!(processes.len(), 1, "{told}");
        let words: Vec<&str> = processes[0].split_whitespace().collect();
        assert_eq!(&words[1..3], ["0", "1"], "GPU and pid: {told}");
    });
}

#[test]
#[ignore = "needs root, runc and numba-cuda: runs a container"]
fn numba_cuda_runs_its_kernels() {
    limited(NEEDS, |container| {
        let told = run(container, "numba_kernels.py", &[]);
        let lines: Vec<&str> = told.lines().collect();
        assert_eq!(lines[0], format!("total {}", 8 * GIB));
        assert_eq!(lines.len(), 11, "{told}");
        assert!(lines[1..].iter().all(|line| line.ends_with(" right")), "{told}");
    });
}

#[test]
#[ignore = "needs root, runc and numba-cuda: runs a container"]
fn numba_cuda_is_told_out_of_memory_at_the_limit() {
    limited(NEEDS, |container| {
        let told = run(container, "numba_beyond_the_limit.py", &[&(8 * GIB).to_string()]);
        assert!(told.ends_with("more refused\n"), "{told}");
    });
}

#[test]
#[ignore = "needs root, runc and NVIDIA's nvidia-smi: runs a container"]
fn nvidia_smi_shows_a_gpu_of_the_shares_size() {
    let needs = &[Need::Root, Need::Runc, Need::Busybox, Need::DriverLibraries];
    limited(needs, |container| {
        let query = [
            "nvidia-smi",
            "--query-gpu=memory.total,memory.used,driver_version",
            "--format=csv,noheader,nounits",
        ];
        let told = container.exec(&query).expect_success("nvidia-smi in the container").stdout;
        let fields: Vec<&str> = told.trim().split(", ").collect();
        assert_eq!((fields[0], fields[2]), ("8192", &*driver_version()), "{told}");
        let table = container.exec(&["nvidia-smi"]).expect_success("nvidia-smi in the container").stdout;
        assert!(table.contains("/  8192MiB"), "{table}");
        let listed = container.exec(&["nvidia-smi", "-L"]).expect_success("nvidia-smi -L").stdout;
        assert_eq!(listed.lines().count(), 1, "{listed}");
    });
}
