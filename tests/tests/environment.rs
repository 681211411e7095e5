//! A limit holds whatever the environment of the program is: its variables, its user and its parent.

use gpushare_tests::bundle::Bundle;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::probe::{GIB, OUT_OF_MEMORY, Report, SUCCESS};
use gpushare_tests::runtime::{LowLevel, Runtime};

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Busybox];

const PROBE: &str = "/bin/gpushare-simulator probe --json --allocate 9GiB --allocate 7GiB";

/// Variables that turn such limits off, or state them, in other products; and those by which a limit is asked
/// for here.
const VARIABLES: &[&str] = &[
    "CUDA_DISABLE_CONTROL=true",
    "CUDA_DEVICE_MEMORY_LIMIT=80g",
    "CUDA_DEVICE_SM_LIMIT=100",
    "CUDA_OVERSUBSCRIBE=true",
    "GPU_CORE_UTILIZATION_POLICY=disable",
    "DISABLE_GPU_LIMITER=1",
    "ENABLE_CUDA_HOOK=false",
    "LD_PRELOAD=",
    "LD_LIBRARY_PATH=",
    "LD_BIND_NOW=1",
    "GPUSHARE_MEMORY=80GiB",
    "GPUSHARE_CORES=100",
    "NVIDIA_VISIBLE_DEVICES=all",
];

/// Case 37 of intercept/tests/README.md: a limit could be lost after ssh, `su` or `env -i`, or be turned off
/// by a tenant's variable.
#[test]
#[ignore = "needs root and runc: runs a container"]
fn case_37_the_limit_holds_whatever_the_environment_user_and_parent_of_a_program() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let bundle = Bundle::with_probe().env("GPUSHARE_MEMORY", "8GiB");
    let container = runtime.run(&bundle);
    let busybox = "/bin/busybox";
    let (probe, variables) = (PROBE.split(' ').collect::<Vec<_>>(), VARIABLES.join(" "));
    let with_variables = format!("exec /bin/env {variables} {PROBE}");
    let as_other = format!("exec {busybox} su -s /bin/sh -c '{PROBE}' other");
    let orphan = format!(
        "({busybox} setsid {PROBE} >/tmp/told 2>&1 &); until grep -q '}}$' /tmp/told; do :; done; cat /tmp/told"
    );
    let add = "echo other:x:4242:4242::/:/bin/sh >>/etc/passwd";
    let _ = container.exec(&["/bin/sh", "-c", add]).expect_success("a user is added");
    for (what, words) in [
        ("an empty environment", [&["/bin/env", "-i"], &probe[..]].concat()),
        ("variables of other libraries", vec!["/bin/sh", "-c", &with_variables]),
        ("another user", vec!["/bin/sh", "-c", &as_other]),
        ("another session, and no parent", vec!["/bin/sh", "-c", &orphan]),
    ] {
        let report = Report::parse(&container.exec(&words).expect_success(what).stdout);
        report.assert_size(8 * GIB);
        assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS], "{what}");
    }
    // The limit cannot be overwritten either.
    let write = container.exec(&["/bin/sh", "-c", "echo >/usr/lib/gpushare/limits"]);
    assert!(!write.success(), "{write:?}");
}
