//! The JSON of calls and answers, with capitals, as kube-scheduler writes and reads it.

use gpushare_tests::command::eventually;
use serde_json::{Value, json};

use crate::{SOON, cluster, extender, pod, pod_of};

#[test]
fn answers_have_the_fields_of_kube_schedulers_types_and_no_others() {
    let api = cluster(&[("a", 2), ("b", 1)]);
    let extender = extender(&api);
    let small = pod(&api, "small", &json!({"aliyun.com/gpu-mem": 8}));
    let names = json!(["a", "b", "node-of-nothing"]);
    let told = extender.ask("filter", &json!({"Pod": small, "Nodes": null, "NodeNames": names}));
    let nothing = "the node's agent of gpushare shows no GPU as a countable resource";
    assert_eq!(
        told,
        json!({"Nodes": null, "NodeNames": ["a", "b"], "FailedNodes": {},
            "FailedAndUnresolvableNodes": {"node-of-nothing": nothing}, "Error": ""})
    );
    let told = extender.ask("prioritize", &json!({"Pod": small, "NodeNames": ["a", "b"]}));
    assert_eq!(
        told,
        json!([{"Host": "a", "Score": 0}, {"Host": "b", "Score": 10}]),
        "the fullest node first"
    );
    let whole =
        |name: &str| json!({"metadata": {"name": name, "labels": {"kept": "yes"}}, "status": {"phase": "x"}});
    let nodes =
        json!({"metadata": {"resourceVersion": "7"}, "items": [whole("a"), whole("node-of-nothing")]});
    let told = extender.ask("filter", &json!({"Pod": small, "Nodes": nodes, "NodeNames": null}));
    assert_eq!(told["Nodes"], json!({"metadata": {"resourceVersion": "7"}, "items": [whole("a")]}));
    assert_eq!(told["NodeNames"], Value::Null);
    let asked = json!({"PodName": "small", "PodNamespace": "team", "PodUID": "uid-of-small", "Node": "b"});
    assert_eq!(extender.ask("bind", &asked), json!({"Error": ""}));
    let again = extender.ask("bind", &asked);
    assert!(again["Error"].as_str().is_some_and(|why| why.contains("bound")), "{again}");
}

#[test]
fn a_pod_without_a_gpu_gets_everywhere_and_nonsense_is_no_call() {
    let api = cluster(&[("a", 1)]);
    let extender = extender(&api);
    let plain = pod(&api, "plain", &json!({"cpu": "1"}));
    assert_eq!(extender.filter(&plain, &["a", "node-of-nothing"]).0, ["a", "node-of-nothing"]);
    for (body, want) in [(json!({"Nodes": 7}), 400), (json!("x"), 400)] {
        assert_eq!(extender.call("POST", "/filter", Some(&body)).expect("an answer").0, want);
    }
    assert_eq!(extender.call("POST", "/other", None).expect("an answer").0, 404);
    assert_eq!(extender.call("GET", "/filter", None).expect("an answer").0, 404);
    let metrics = extender.call("GET", "/metrics", None).expect("an answer").1;
    assert!(metrics.contains("gpushare_scheduler_decision_seconds_count"), "{metrics}");
}

#[test]
fn wrong_amounts_are_refused_in_words_that_tell_the_remedy() {
    let api = cluster(&[("a", 2)]);
    let extender = extender(&api);
    for (limits, want) in [
        (json!({"aliyun.com/gpu-mem": "10G"}), "one is 1 GiB: that is more than any GPU has"),
        (
            json!({"aliyun.com/gpu-mem": 81}),
            "81 GiB of a GPU are more than the node's GPUs have: ask for less",
        ),
        (json!({"aliyun.com/gpu-core.percentage": 120}), "at most 100 % of a GPU's compute"),
        (
            json!({"aliyun.com/gpu-mem": 8, "tencent.com/vcuda-core": 20}),
            "the node serves no tencent.com/vcuda-core",
        ),
    ] {
        let (names, why) = extender.filter(&pod(&api, "wrong", &limits), &["a"]);
        assert!(names.is_empty(), "{limits}");
        assert!(why["a"].as_str().is_some_and(|text| text.contains(want)), "{limits}: {why}");
    }
}

#[test]
fn a_victim_is_added_where_those_that_were_chosen_free_no_single_gpu() {
    let api = cluster(&[("a", 2), ("b", 2)]);
    let extender = extender(&api);
    for (name, node) in [("one", "a"), ("two", "a"), ("three", "a"), ("four", "b")] {
        let its = pod(&api, name, &json!({"aliyun.com/gpu-mem": if name == "three" { 60 } else { 30 }}));
        extender.bind(&its, node).expect("it fits");
    }
    // On a, GPU 0 has one and two, GPU 1 three; a pod of 60 needs both of GPU 0 or the third to end.
    let mut large = pod(&api, "large", &json!({"aliyun.com/gpu-mem": 60}));
    large["spec"]["priority"] = json!(5);
    assert_eq!(extender.filter(&large, &["a", "b"]).0, ["b"]);
    let victims = |uid: &str| json!({"Pods": [{"UID": uid}], "NumPDBViolations": 1});
    let asked = json!({"Pod": large, "NodeNameToVictims": null,
        "NodeNameToMetaVictims": {"a": victims("uid-of-one"), "b": victims("uid-of-four")}});
    // Those that are not told yet are no victims.
    let mut told = json!({});
    assert!(eventually(SOON, || {
        told = extender.ask("preempt", &asked)["NodeNameToMetaVictims"].clone();
        told["a"].is_object()
    }));
    assert_eq!(told["b"], json!({"Pods": [{"UID": "uid-of-four"}], "NumPDBViolations": 1}));
    let added = told["a"]["Pods"].as_array().expect("a list").clone();
    assert!(added.contains(&json!({"UID": "uid-of-one"})) && added.len() == 2, "{added:?}");
    // The most important one comes first: kube-scheduler takes it for the whole.
    let both = json!({"Pods": [{"UID": "uid-of-one"}, {"UID": "uid-of-three"}], "NumPDBViolations": 0});
    let told = extender.ask("preempt", &json!({"Pod": large, "NodeNameToMetaVictims": {"a": both}}));
    assert_eq!(told["NodeNameToMetaVictims"]["a"]["Pods"][0]["UID"], "uid-of-one");
    // Of pods that matter as much none ends.
    large["spec"]["priority"] = json!(0);
    let asked = json!({"Pod": large, "NodeNameToMetaVictims": {"a": victims("uid-of-one")}});
    assert_eq!(extender.ask("preempt", &asked)["NodeNameToMetaVictims"], json!({}));
}

#[test]
fn containers_of_a_pod_fit_together_or_not_at_all() {
    let api = cluster(&[("a", 2)]);
    let extender = extender(&api);
    let container = |name: &str, gib: u64| json!({"name": name, "image": "none", "resources": {"limits": {"aliyun.com/gpu-mem": gib}}});
    let two = pod_of(&api, "two", &json!([container("main", 50), container("other", 60)]));
    extender.bind(&two, "a").expect("one on each GPU");
    let gpus = api.get(&crate::path("two")).expect("it is there")["metadata"]["annotations"].clone();
    assert_eq!(gpus["scheduler.gpushare.io/gpus"], r#"{"main":[1],"other":[0]}"#);
    assert_eq!(gpus["scheduler.framework.gpushare.allocation"], r#"{"0":{"1":50},"1":{"0":60}}"#);
    assert_eq!(
        (&gpus["ALIYUN_COM_GPU_MEM_POD"], &gpus["ALIYUN_COM_GPU_MEM_DEV"]),
        (&json!("110"), &json!("80"))
    );
    let more = pod_of(&api, "more", &json!([container("main", 20), container("other", 31)]));
    let (names, why) = extender.filter(&more, &["a"]);
    assert!(names.is_empty() && why["a"].as_str().is_some_and(|why| why.contains("not free")), "{why}");
}
