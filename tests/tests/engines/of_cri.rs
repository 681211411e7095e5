//! Scenarios that only Kubernetes has: runtime handlers, whose annotations arrive, and the pod's sandbox.

use gpushare_tests::probe::GIB;

use crate::column::Filling;
use crate::cri::Cri;
use crate::engine::{Engine, Wanted, report};
use crate::place::Place;
use crate::scenarios::{Scene, assert_untouched};
use crate::table::Row;

/// Fills the rows that need calls which no other engine has.
pub fn fill(filling: &mut Filling, cri: &mut Cri, place: &Place) {
    filling.check(Row::ContainerAnnotation, cri, place, grants_what_the_device_plugin_allocated);
    for (row, scenario) in [
        (Row::RuntimeClass, under_the_handler_alone as fn(&mut Cri, &Place)),
        (Row::UnlistedAnnotation, asks_for_nothing_by_what_is_not_listed),
        (Row::Sandbox, leaves_the_sandbox_alone),
    ] {
        filling.check_alone(row, || {
            scenario(cri, place);
            for name in ["one", "other"] {
                cri.remove(name);
            }
            Scene { engine: cri, place, restarts: 0, names: Vec::new() }.clear();
        });
    }
}

fn grants_what_the_device_plugin_allocated(scene: &mut Scene<'_>) {
    // Under `strict` the pod's author can only lower the allocation.
    let wanted = Wanted::client("one", &[]).annotation("alloc.gpushare.io/memory", "4GiB").share("3GiB");
    let place = scene.place;
    place.under("[request]\nstrict = true", || scene.start(&wanted));
    scene.report("one").assert_size(3 * GIB);
    let alone = Wanted::waiting("alone").share("3GiB");
    let said = place.under("[request]\nstrict = true", || scene.try_start(&alone));
    assert!(said.is_err(), "an environment grants nothing by itself");
}

fn under_the_handler_alone(cri: &mut Cri, place: &Place) {
    let asks = [("gpushare.io/memory", "4GiB")];
    let unknown =
        cri.run_under(&Wanted::waiting("one"), "gpushare-misspelt", &asks).expect_err("no such handler");
    assert!(unknown.contains("gpushare-misspelt"), "{unknown}");

    cri.run_under(&Wanted::waiting("other"), "runc", &asks).expect("runc runs whatever the pod asks for");
    assert_untouched(cri.pid("other"));
    assert_eq!(gpushare_tests::leases::leases(&place.config), []);

    cri.run_under(&Wanted::client("one", &[]), "gpushare", &asks).expect("the handler grants");
    report(cri, "one").assert_size(4 * GIB);
}

fn asks_for_nothing_by_what_is_not_listed(cri: &mut Cri, _place: &Place) {
    // A container annotation with the pod's prefix, and a pod annotation with the plugin's prefix: neither
    // list has them.
    let wanted = Wanted::waiting("one").annotation("gpushare.io/memory", "4GiB");
    let forged = [("alloc.gpushare.io/memory", "4GiB")];
    cri.run_under(&wanted, "gpushare", &forged).expect("it asks for nothing");
    assert_untouched(cri.pid("one"));
}

fn leaves_the_sandbox_alone(cri: &mut Cri, place: &Place) {
    // A sandbox is not refused for a request for which its containers will be refused: a kubelet would try
    // for ever.
    for asks in ["4GiB", "plenty"] {
        let annotations = [("gpushare.io/memory", asks)];
        let (sandbox, _) =
            cri.sandbox("alone", "gpushare", &annotations, &[]).expect("a sandbox is never refused");
        assert_untouched(cri.sandbox_pid(&sandbox));
        assert_eq!(gpushare_tests::leases::leases(&place.config), []);
        cri.remove_sandbox(&sandbox);
    }
    let said = cri.run_under(&Wanted::waiting("one"), "gpushare", &[("gpushare.io/memory", "plenty")]);
    let said = said.expect_err("the container is refused");
    assert!(said.contains("plenty"), "{said}");
    assert!(cri.message("one").contains("plenty"), "the pod's event: {}", cri.message("one"));
    cri.remove("one");
    // The pod's annotations may name one of its containers.
    let asks = [("gpushare.io/memory", "4GiB"), ("gpushare.io/main.memory", "2GiB")];
    cri.run_under(&Wanted::client("other", &[]), "gpushare", &asks).expect("the container is granted");
    report(cri, "other").assert_size(2 * GIB);
}
