//! Tests the harness itself on the low-level runtimes alone. What fails here is wrong in the tests or the
//! machine, not in gpushare.

use std::time::Duration;

use gpushare_tests::bundle::Bundle;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::runtime::{LowLevel, Runtime};

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_bare_low_level_runtime_runs_our_bundles() {
    if !met(&[Need::Root, Need::Runc, Need::Crun, Need::Busybox]) {
        return;
    }
    for low_level in LowLevel::ALL {
        let runtime = Runtime::bare(low_level);
        let bundle = Bundle::small();
        let container = runtime.run(&bundle);
        assert_eq!(container.status().as_deref(), Some("running"), "{low_level:?}");
        let told = container.exec(&["/bin/id", "-u"]).expect_success("exec");
        assert_eq!(told.stdout.trim(), "0", "{low_level:?}");
        container.stop();
        assert_eq!(container.status(), None, "{low_level:?}");
    }
}

#[test]
#[ignore = "needs root, runc and crun: mounts an overlay"]
fn a_container_can_stand_on_the_machines_own_root() {
    if !met(&[Need::Root, Need::Runc, Need::Crun, Need::Busybox]) {
        return;
    }
    for low_level in LowLevel::ALL {
        let runtime = Runtime::bare(low_level);
        let bundle = Bundle::host_root().args(&[
            "/bin/sh",
            "-c",
            "test -x /usr/bin/ldd && touch /etc/left-by-a-test && echo fine",
        ]);
        let container = runtime.run(&bundle);
        assert!(container.wait_stopped(Duration::from_secs(20)), "{low_level:?}");
        assert_eq!(container.stdout().trim(), "fine", "{low_level:?}: {}", container.stderr());
        assert!(!std::path::Path::new("/etc/left-by-a-test").exists());
    }
}

#[test]
#[ignore = "needs root and runc: runs a container"]
fn the_cuda_client_starts_in_its_image_and_misses_the_driver() {
    if !met(&[Need::Root, Need::Runc, Need::Busybox]) {
        return;
    }
    let runtime = Runtime::bare(LowLevel::Runc);
    let bundle = Bundle::with_probe();
    let container = runtime.run(&bundle);
    let told = container.exec(&["/bin/gpushare-simulator", "probe"]);
    assert!(!told.success());
    assert!(told.stderr.contains("libcuda.so.1"), "{told:?}");
}
