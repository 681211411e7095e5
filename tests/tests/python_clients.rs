//! Programs as users write them, on the simulated GPU of a limited container: nvidia-smi, nvidia-ml-py, cuda-bindings and
//! numba-cuda, none of which knows of gpushare.

use gpushare_tests::bundle::Bundle;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::{SimulatedNode, driver_version};
use gpushare_tests::probe::GIB;
use gpushare_tests::python;
use gpushare_tests::runtime::{Container, LowLevel, Runtime};

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
