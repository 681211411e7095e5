//! Programs in a limited container that have nothing to do with a GPU have no file of gpushare in their
//! memory.

use gpushare_tests::bundle::Bundle;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::python;
use gpushare_tests::runtime::{LowLevel, Runtime};

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
