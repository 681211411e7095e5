//! Which device nodes a container can open. The kernel tells it without a GPU: a node of the driver's major number that the
//! rules allow is "no such device" (there is no driver behind it), one that they deny is "not permitted".

use gpushare_tests::bundle::Bundle;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::{MODEL, SimulatedNode};
use gpushare_tests::runtime::{Container, LowLevel, Runtime};

const ALLOWED: &str = "No such device or address";
const DENIED: &str = "Operation not permitted";

fn opened(container: &Container<'_>, script: &str) -> String {
    container.exec(&["/bin/busybox", "sh", "-c", script]).stderr
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_container_opens_the_gpus_it_was_granted_and_no_other() {
    if !met(&[Need::Root, Need::Runc, Need::Crun, Need::Busybox]) {
        return;
    }
    for low_level in LowLevel::ALL {
        let node = SimulatedNode::create(2, MODEL, "80GiB");
        let runtime = Runtime::wrapped(low_level, &node);
        let bundle = Bundle::small().env("GPUSHARE_MEMORY", "4GiB").env("GPUSHARE_DEVICES", "0");
        let container = runtime.run(&bundle);
        for (script, want) in [
            ("cat /dev/nvidia0", ALLOWED),
            (": <>/dev/nvidia0", ALLOWED),
            ("cat /dev/nvidiactl", ALLOWED),
            ("cat /dev/nvidia-uvm", ALLOWED),
            ("cat /dev/nvidia1", "No such file or directory"),
            ("busybox mknod /tmp/other c 195 1 && cat /tmp/other", DENIED),
            ("busybox mknod /tmp/modeset c 195 254 && cat /tmp/modeset", DENIED),
        ] {
            let told = opened(&container, script);
            assert!(told.contains(want), "{low_level:?}: {script}: {told}");
        }
    }
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_container_without_a_request_opens_none() {
    if !met(&[Need::Root, Need::Runc, Need::Crun, Need::Busybox]) {
        return;
    }
    for low_level in LowLevel::ALL {
        let node = SimulatedNode::one_gpu();
        let runtime = Runtime::wrapped(low_level, &node);
        let bundle = Bundle::small();
        let container = runtime.run(&bundle);
        assert!(
            opened(&container, "cat /dev/nvidia0").contains("No such file or directory"),
            "{low_level:?}"
        );
        let told = opened(&container, "busybox mknod /tmp/gpu c 195 0 && cat /tmp/gpu");
        assert!(told.contains(DENIED), "{low_level:?}: {told}");
    }
}
