//! Quotas of namespaces, with the examples of gpu-quota-admission (tkestack/gpu-admission, docs/gpu-quota.md
//! and test/gpu_quota.json) by their numbers.

use std::path::Path;
use std::time::Duration;

use gpushare_tests::cluster::api::Api;
use gpushare_tests::cluster::extender::Extender;
use gpushare_tests::command::eventually;
use serde_json::{Value, json};

use crate::{PROGRAM, SOON, node};

const TENCENT: [(&str, &str); 2] =
    [("tencent.com/vcuda-core", "\"Percent\""), ("tencent.com/vcuda-memory", r#"{"Memory":268435456}"#)];

/// Nodes by name, model, pool and number of GPUs, and what namespaces may have.
fn cluster(nodes: &[(&str, &str, &str, usize)], quota: &Value) -> (Api, Extender) {
    let api = Api::start("node-of-nothing");
    for (name, model, pool, gpus) in nodes {
        node(&api, name, *gpus, &TENCENT, "GpuManager");
        let path = format!("/api/v1/nodes/{name}");
        let mut node = api.get(&path).expect("it is there");
        node["metadata"]["labels"] =
            json!({"tkestack.io/gpu-model": model, "gaia.tencent.com/gpu-pool": pool});
        api.put(&path, node);
    }
    write(&api, &quota.to_string());
    let extender = Extender::start(Path::new(PROGRAM), &api.kubeconfig(), &["--quota=kube-system/gpuquota"]);
    extender.wait();
    (api, extender)
}

fn write(api: &Api, quota: &str) {
    let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "data": {"gpu_quota": quota},
        "metadata": {"name": "gpuquota", "namespace": "kube-system"}});
    api.put("/api/v1/namespaces/kube-system/configmaps/gpuquota", map);
}

/// A pod of a namespace that asks for so much.
fn pod(api: &Api, namespace: &str, name: &str, core: u64, memory: u64) -> Value {
    let mut limits = json!({"tencent.com/vcuda-core": core});
    if memory > 0 {
        limits["tencent.com/vcuda-memory"] = json!(memory);
    }
    let metadata = json!({"name": name, "namespace": namespace, "uid": format!("uid-of-{namespace}-{name}")});
    let containers = json!([{"name": "main", "image": "none", "resources": {"limits": limits}}]);
    let pod =
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": containers}});
    api.put(&format!("/api/v1/namespaces/{namespace}/pods/{name}"), pod.clone());
    pod
}

#[test]
fn a_namespace_is_stopped_at_the_pod_at_which_gpu_quota_admission_stops_it() {
    let (api, extender) = cluster(
        &[("m0", "M40", "public", 8), ("m1", "M40", "public", 8), ("p0", "P100", "public", 8)],
        &json!({"foo": {"quota": {"M40": 8}, "pool": ["public"]}}),
    );
    let nodes = ["m0", "m1", "p0"];
    for number in 0..7 {
        let pod = pod(&api, "foo", &format!("whole{number}"), 100, 0);
        assert_eq!(extender.filter(&pod, &nodes).0, ["m0", "m1"], "{number}");
        extender.bind(&pod, "m0").expect("it is within the quota");
    }
    // 7.5 of 8, then all of it.
    for name in ["half", "other-half"] {
        let half = pod(&api, "foo", name, 50, 1);
        extender.schedule(&half, &nodes).expect("it is within the quota");
    }
    let ninth = pod(&api, "foo", "ninth", 10, 1);
    let (names, why) = extender.filter(&ninth, &nodes);
    assert!(names.is_empty());
    let told = why["m1"].as_str().expect("text");
    assert!(
        told.contains("namespace foo has 8 of its quota of 8 GPUs of model M40, and 0.10 more are too many"),
        "{told}"
    );
    assert!(
        why["p0"].as_str().is_some_and(|told| told.contains("no quota of GPUs of model \"P100\"")),
        "{why}"
    );
    let told = extender.bind(&ninth, "m1").expect_err("nor is it bound");
    assert!(told.contains("kube-system/gpuquota"), "{told}");
    // A namespace without an entry is not bounded.
    let other = pod(&api, "bar", "any", 100, 0);
    assert_eq!(extender.filter(&other, &nodes).0, ["m1", "p0"], "where GPUs are free");
    // When one ends, the ninth fits.
    api.remove("/api/v1/namespaces/foo/pods/half");
    assert!(eventually(SOON, || extender.filter(&ninth, &nodes).0 == ["m0", "m1"]));
}

#[test]
fn quotas_of_models_are_not_added_and_pools_bound_nodes() {
    let entry =
        |pool: &str, m40: u64, p100: u64| json!({"quota": {"M40": m40, "P100": p100}, "pool": [pool]});
    let (api, extender) = cluster(
        &[
            ("m0", "M40", "public", 8),
            ("p0", "P100", "public", 8),
            ("mw", "M40", "wx", 8),
            ("pw", "P100", "wx", 8),
        ],
        &json!({"default": entry("public", 4, 4), "B": entry("wx", 8, 2)}),
    );
    let nodes = ["m0", "p0", "mw", "pw"];
    extender.bind(&pod(&api, "default", "one", 100, 0), "m0").expect("it is within the quota");
    let four = pod(&api, "default", "four", 400, 0);
    assert_eq!(extender.filter(&four, &nodes).0, ["p0"]);
    assert!(extender.filter(&pod(&api, "default", "five", 500, 0), &nodes).0.is_empty());
    extender.bind(&pod(&api, "B", "two", 200, 0), "pw").expect("it is within the quota");
    assert_eq!(extender.filter(&pod(&api, "B", "more", 100, 0), &nodes).0, ["mw"]);
    assert_eq!(extender.filter(&pod(&api, "C", "any", 100, 0), &nodes).0, nodes);
}

#[test]
fn of_two_pods_that_were_chosen_within_the_quota_the_second_is_not_bound() {
    let (api, extender) = cluster(&[("p0", "P40", "public", 8)], &json!({"foo": {"quota": {"P40": 1}}}));
    let (first, second) = (pod(&api, "foo", "pod0", 100, 0), pod(&api, "foo", "pod1", 100, 0));
    assert_eq!((extender.filter(&first, &["p0"]).0.len(), extender.filter(&second, &["p0"]).0.len()), (1, 1));
    extender.bind(&first, "p0").expect("it is within the quota");
    let told = extender.bind(&second, "p0").expect_err("it is not");
    assert!(told.contains("1 of its quota of 1 GPUs"), "{told}");
}

#[test]
fn memory_compute_and_numbers_of_shares_are_bounded_too() {
    for (bound, fits, why) in [
        (json!({"memory": {"*": "8Gi"}}), 1, "4 GiB of its quota of 8 GiB of GPU memory, and 5 GiB more"),
        (json!({"cores": {"M40": 55}}), 1, "30 % of its quota of 55 % of compute of model M40"),
        (json!({"shares": {"M40": 2}}), 2, "2 of its quota of 2 shares of GPUs of model M40"),
        (json!({"quota": {}}), 0, "but of none"),
        (json!({"pool": ["public"]}), 0, "has no quota of GPUs"),
        (json!({"quota": {"M40": 1}, "pool": null}), 3, ""),
    ] {
        let (api, extender) = cluster(&[("m0", "M40", "public", 8)], &json!({"foo": bound}));
        let mut told = String::new();
        for number in 0..3 {
            let pod = pod(&api, "foo", &format!("p{number}"), 30, if number == 0 { 16 } else { 20 });
            match extender.schedule(&pod, &["m0"]) {
                Ok(_) => assert!(number < fits, "{bound}"),
                Err(why) => {
                    assert_eq!(number, fits, "{bound}: {why}");
                    told = why;
                    break;
                }
            }
        }
        assert!(told.contains(why), "{bound}: {told}");
    }
}

#[test]
fn a_config_map_that_is_no_quota_changes_nothing_and_opens_nothing() {
    let (api, extender) = cluster(&[("m0", "M40", "public", 8)], &json!("nonsense"));
    let one = pod(&api, "foo", "one", 100, 0);
    let why = extender.filter(&one, &["m0"]).1;
    assert!(why["m0"].as_str().is_some_and(|why| why.contains("says no quota")), "{why}");
    write(&api, r#"{"foo": {"quota": {"M40": 1}}}"#);
    assert!(eventually(SOON, || !extender.filter(&one, &["m0"]).0.is_empty()));
    extender.bind(&one, "m0").expect("it is within the quota");
    for nonsense in [
        r#"{"foo": {"quota": {"M40": 1.5}}}"#,
        r#"{"foo": {"qutoa": {}}}"#,
        "{",
        r#"{"foo": {"quota": {"M40": -1}}}"#,
    ] {
        write(&api, nonsense);
        let other = pod(&api, "foo", "other", 100, 0);
        assert!(
            !eventually(Duration::from_millis(300), || !extender.filter(&other, &["m0"]).0.is_empty()),
            "{nonsense}"
        );
    }
    // Below what is used: what is there stays, and more is refused.
    write(&api, r#"{"foo": {"quota": {"M40": 0}}}"#);
    let other = pod(&api, "foo", "other", 10, 1);
    assert!(eventually(SOON, || {
        let why = extender.filter(&other, &["m0"]).1;
        why["m0"].as_str().is_some_and(|why| why.contains("has 1 of its quota of 0 GPUs"))
    }));
    api.remove("/api/v1/namespaces/kube-system/configmaps/gpuquota");
    assert!(
        eventually(SOON, || !extender.filter(&other, &["m0"]).0.is_empty()),
        "without one nothing is bounded"
    );
}
