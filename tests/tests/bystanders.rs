//! Those who want nothing of gpushare have nothing of it: programs in a limited container that do not use the
//! GPU, and the node's other containers.

use std::fs;

use gpushare_tests::bundle::Bundle;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::python;
use gpushare_tests::runtime::{LowLevel, Runtime};
use gpushare_tests::scratch::Scratch;
use serde_json::json;

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Busybox, Need::Python, Need::Curl];

/// Each command prints the maps of a process while it runs: its own, or those of `ls`, which waits for a
/// reader of its pipe.
const CURL: &str = "curl --silent --show-error file:///proc/self/maps";
const LS: &str = "mkfifo /tmp/pipe; ls -R /usr >/tmp/pipe & exec 3</tmp/pipe; head -c 100 <&3 >/dev/null; \
                  cat /proc/$!/maps; kill $!";
const PYTHON: &str = "print(open('/proc/self/maps').read())";

/// Case 29 of intercept/tests/README.md.
#[test]
#[ignore = "needs root, runc, Python and curl: runs a container"]
fn case_29_programs_without_cuda_never_map_a_file_of_ours() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let bundle = Bundle::host_root().env("GPUSHARE_MEMORY", "8GiB");
    let container = runtime.run(&bundle);
    let interpreter = python::interpreter();
    let interpreter = interpreter.to_str().expect("paths are UTF-8");
    let maps = |words: &[&str]| container.exec(words).expect_success("a program that prints maps").stdout;
    let ours = |maps: &str| {
        let strange = |line: &&str| {
            line.contains("/usr/lib/gpushare/") || line.contains("libcuda") || line.contains("libnvidia-ml")
        };
        maps.lines().filter(strange).map(str::to_owned).collect::<Vec<_>>()
    };
    for (program, words) in [
        ("bin/curl", &["/bin/sh", "-c", CURL][..]),
        ("bin/ls", &["/bin/sh", "-c", LS]),
        ("python", &[interpreter, "-c", PYTHON]),
    ] {
        let maps = maps(words);
        assert!(maps.contains(program) && maps.contains("libc.so"), "{program}: {maps}");
        assert_eq!(ours(&maps), [""; 0], "{program}");
    }
    // The same check does find our files where a program opens CUDA.
    let opens = format!("import ctypes; ctypes.CDLL('libcuda.so.1'); {PYTHON}");
    assert!(ours(&maps(&[interpreter, "-c", &opens])).len() > 4);
}

/// The mounts that a share needs, as hooks of the container see them on the host: before and after ours.
#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_created_container_has_left_no_mount_of_its_share_on_the_host() {
    if !met(&[Need::Root, Need::Runc, Need::Crun, Need::Busybox]) {
        return;
    }
    for low_level in LowLevel::ALL {
        let node = SimulatedNode::one_gpu();
        let runtime = Runtime::wrapped(low_level, &node);
        let scratch = Scratch::new("mounts");
        let (before, after) = (scratch.path().join("before"), scratch.path().join("after"));
        let regions = node.state().join("regions");
        let hook = |file| {
            let script = format!("grep -F ' {}/' /proc/self/mountinfo > {file:?}; true", regions.display());
            json!({"path": "/bin/sh", "args": ["sh", "-c", script]})
        };
        // The wrapper puts its own hook behind those that are there.
        let bundle = Bundle::small().env("GPUSHARE_MEMORY", "4GiB").edit(|spec| {
            spec["hooks"] = json!({"prestart": [hook(&before)], "createRuntime": [hook(&after)]});
        });
        let container = runtime.run(&bundle);
        let seen = [before, after].map(|file| fs::read_to_string(file).expect("the hook ran"));
        assert_eq!(seen.clone().map(|mounts| mounts.lines().count()), [1, 0], "{low_level:?}: {seen:?}");
        drop(container);
    }
}
