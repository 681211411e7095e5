//! Pods of several containers, by containerd's CRI: one share for a pod, and none of its own for an ephemeral
//! container.

use gpushare_tests::leases::leases;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::probe::{GIB, OUT_OF_MEMORY, SUCCESS};
use gpushare_tests::runtime::LowLevel;

use crate::cri::Cri;
use crate::engine::{Engine, Wanted, report};
use crate::place::Place;

fn start() -> Option<(Place, Cri)> {
    let needs = [Need::Root, Need::Runc, Need::Busybox, Need::Containerd];
    met(&needs).then(|| {
        let place = Place::new(LowLevel::Runc);
        let cri = Cri::start(&place.installed.wrapper(), &place.config);
        (place, cri)
    })
}

#[test]
#[ignore = "needs root and containerd: starts a daemon"]
fn the_containers_of_a_pod_that_asks_for_them_all_share_by_cri() {
    let Some((place, mut cri)) = start() else { return };
    let asks = [("gpushare.io/scope", "pod"), ("gpushare.io/memory", "60GiB")];
    cri.run_under(&Wanted::client("one", &["50GiB"]), "gpushare", &asks).expect("the pod's share is granted");
    report(&cri, "one").assert_size(60 * GIB);
    cri.run_beside("one", &Wanted::client("sidecar", &["11GiB", "9GiB"]), false).expect("it joins");
    let told = report(&cri, "sidecar");
    told.assert_size(60 * GIB);
    assert_eq!(leases(&place.config).len(), 1);
    cri.kill("one");
    cri.restart("sidecar");
    assert_eq!(report(&cri, "sidecar").allocations(), [SUCCESS, SUCCESS], "it is alone");
    cri.remove("one");
    assert_eq!((leases(&place.config).len(), place.regions()), (0, 0));
}

#[test]
#[ignore = "needs root and containerd: starts a daemon"]
fn an_ephemeral_container_uses_its_targets_share_by_cri() {
    let Some((place, mut cri)) = start() else { return };
    let asks = [("gpushare.io/memory", "60GiB")];
    cri.run_under(&Wanted::client("one", &[]), "gpushare", &asks).expect("the share is granted");
    let apart = cri.run_beside("one", &Wanted::waiting("apart"), false);
    assert!(apart.expect_err("60 GiB more do not fit").contains("20 GiB free"));
    cri.run_beside("one", &Wanted::client("debugger", &["61GiB", "59GiB"]), true)
        .expect("it joins its target");
    let told = report(&cri, "debugger");
    told.assert_size(60 * GIB);
    assert_eq!(told.allocations(), [OUT_OF_MEMORY, SUCCESS]);
    assert_eq!(leases(&place.config).len(), 1);
    cri.remove("one");
    assert_eq!((leases(&place.config).len(), place.regions()), (0, 0));
}
