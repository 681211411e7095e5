//! Bindings: each pod once, nothing twice, and nothing forgotten, whatever fails meanwhile.

use std::path::Path;

use gpushare_tests::cluster::api::Api;
use gpushare_tests::cluster::extender::Extender;
use gpushare_tests::command::eventually;
use serde_json::{Value, json};

use crate::{PROGRAM, SOON, cluster, extender, given, node, path, placed, pod};

fn gib(count: u64) -> Value {
    json!({"aliyun.com/gpu-mem": count})
}

/// GPUs of 80 GiB have no more than that.
fn assert_sound(api: &Api) {
    let given = given(api);
    assert!(given.values().all(|gib| *gib <= 80), "{given:?}");
}

#[test]
fn gpus_are_filled_one_after_the_other_and_never_over() {
    let api = cluster(&[("a", 2), ("b", 1)]);
    let extender = extender(&api);
    for number in 0..8 {
        let pod = pod(&api, &format!("p{number}"), &gib(30));
        let scheduled = extender.schedule(&pod, &["a", "b"]);
        assert_eq!(scheduled.is_ok(), number < 6, "{scheduled:?}");
    }
    assert_eq!(given(&api).values().copied().collect::<Vec<_>>(), [60, 60, 60]);
    let waits = pod(&api, "waits", &gib(30));
    assert!(extender.filter(&waits, &["a", "b"]).0.is_empty());
    let (node, _) = placed(&api, "p3").expect("it is bound");
    api.remove(&path("p3"));
    assert!(eventually(SOON, || extender.filter(&waits, &["a", "b"]).0 == [node.clone()]));
}

#[test]
fn where_kubelet_counts_shares_a_gpu_gets_no_more_of_them() {
    let api = Api::start("node-of-nothing");
    let resources = [("nvidia.com/gpu", r#"{"Slot":2}"#), ("nvidia.com/gpumem", r#"{"Memory":1048576}"#)];
    node(&api, "a", 2, &resources, "Hami");
    let extender = extender(&api);
    let mut gpus = Vec::new();
    for number in 0..5 {
        let limits = json!({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 1000});
        let pod = pod(&api, &format!("p{number}"), &limits);
        let scheduled = extender.schedule(&pod, &["a"]);
        assert_eq!(scheduled.is_ok(), number < 4, "{scheduled:?}");
        gpus.extend(placed(&api, &format!("p{number}")).map(|(_, gpus)| gpus));
    }
    assert_eq!(gpus, [[0], [0], [1], [1]]);
}

#[test]
fn what_is_known_is_the_api_servers_alone() {
    let api = cluster(&[("a", 2)]);
    let mut first = extender(&api);
    for (name, count) in [("p0", 50), ("p1", 20), ("p2", 40)] {
        first.schedule(&pod(&api, name, &gib(count)), &["a"]).expect("it fits");
    }
    let fits = |extender: &Extender, count: u64| {
        !extender.filter(&pod(&api, "asks", &gib(count)), &["a"]).0.is_empty()
    };
    let known: Vec<bool> = (1..=80).map(|count| fits(&first, count)).collect();
    first.kill();
    let anew = extender(&api);
    assert_eq!((1..=80).map(|count| fits(&anew, count)).collect::<Vec<bool>>(), known);
    assert_eq!(known.iter().filter(|fits| **fits).count(), 40);
    // Pods that another scheduler bound, and of which nobody tells the GPU, take room all the same.
    let mut foreign = pod(&api, "foreign", &gib(35));
    foreign["spec"]["nodeName"] = json!("a");
    api.put(&path("foreign"), foreign);
    assert!(eventually(SOON, || !fits(&anew, 40) && fits(&anew, 10)));
    // Then the node's agent tells where kubelet has put it.
    let map = "/api/v1/namespaces/gpushare/configmaps/gpus.a";
    let mut told = api.get(map).expect("it is there");
    told["data"]["placed"] = json!(json!({"uid-of-foreign": {"main": [1]}}).to_string());
    api.put(map, told);
    assert!(eventually(SOON, || !fits(&anew, 11) && fits(&anew, 10)), "5 and 10 are left");
}

#[test]
fn of_two_extenders_one_decides_and_the_other_takes_over_when_it_ends() {
    let api = cluster(&[("a", 1)]);
    let mut first = extender(&api);
    let wide = pod(&api, "wide", &gib(50));
    first.bind(&wide, "a").expect("it fits");
    let second = Extender::start(Path::new(PROGRAM), &api.kubeconfig(), &["--policy=binpack"]);
    let refuses = || {
        let told = second.call("POST", "/filter", Some(&json!({"Pod": wide, "NodeNames": ["a"]})));
        told.is_some_and(|(status, why)| status == 503 && why.contains("decides"))
    };
    assert!(eventually(SOON, refuses), "not ready is no answer");
    assert_eq!(second.call("GET", "/readyz", None).expect("an answer").0, 503);
    let bound = second.call(
        "POST",
        "/bind",
        Some(&json!({"PodName": "wide", "PodNamespace": "team",
        "PodUID": "uid-of-wide", "Node": "a"})),
    );
    assert!(bound.is_some_and(|(_, told)| told.contains("decides")));
    assert!(first.end(), "it ends in order, and gives the Lease up");
    let other = pod(&api, "other", &gib(40));
    assert!(second.filter(&other, &["a"]).0.is_empty(), "it knows what the first has bound");
    assert!(second.filter(&pod(&api, "small", &gib(30)), &["a"]).0 == ["a"]);
}

#[test]
fn an_api_server_that_answers_409_429_or_nothing_has_nothing_bound_twice() {
    let api = cluster(&[("a", 1)]);
    let extender = extender(&api);
    let first = pod(&api, "first", &gib(50));
    let second = pod(&api, "second", &gib(50));
    api.refuse(&[409]);
    let told = extender.bind(&first, "a").expect_err("it is refused");
    assert!(placed(&api, "first").is_none(), "{told}");
    assert!(!extender.filter(&second, &["a"]).0.is_empty(), "nothing is held for it: {told}");
    // It is bound, and nobody hears of it.
    api.lose_answer();
    let told = extender.bind(&first, "a");
    assert!(placed(&api, "first").is_some(), "{told:?}");
    assert!(extender.filter(&second, &["a"]).0.is_empty(), "what may be bound is held");
    let told = extender.bind(&first, "a").expect_err("it is bound");
    assert!(told.contains("bound"), "{told}");
    // Too much at once is tried again.
    api.remove(&path("first"));
    assert!(eventually(SOON, || !extender.filter(&second, &["a"]).0.is_empty()));
    api.refuse(&[429]);
    assert!(eventually(SOON, || extender.bind(&second, "a").is_ok() || placed(&api, "second").is_some()));
    api.remove(&path("second"));
    let second = pod(&api, "third", &gib(50));
    // Nothing answers.
    assert!(eventually(SOON, || !extender.filter(&second, &["a"]).0.is_empty()));
    api.set_away(true);
    assert!(extender.bind(&second, "a").is_err());
    api.set_away(false);
    assert!(eventually(SOON, || extender.bind(&second, "a").is_ok()));
    assert_sound(&api);
}

#[test]
fn a_pod_that_is_deleted_or_made_anew_between_filter_and_bind_is_not_bound() {
    let api = cluster(&[("a", 1)]);
    let extender = extender(&api);
    let gone = pod(&api, "gone", &gib(50));
    assert_eq!(extender.filter(&gone, &["a"]).0, ["a"]);
    api.remove(&path("gone"));
    let told = extender.bind(&gone, "a").expect_err("it is gone");
    assert!(told.contains("NotFound"), "{told}");
    let mut anew = pod(&api, "gone", &gib(50));
    anew["metadata"]["uid"] = json!("another");
    api.put(&path("gone"), anew);
    let told = extender.bind(&gone, "a").expect_err("it is another");
    assert!(told.contains("another one"), "{told}");
    // Two that fitted alone.
    let (one, other) = (pod(&api, "one", &gib(50)), pod(&api, "other", &gib(50)));
    assert_eq!((extender.filter(&one, &["a"]).0.len(), extender.filter(&other, &["a"]).0.len()), (1, 1));
    extender.bind(&one, "a").expect("it fits");
    let told = extender.bind(&other, "a").expect_err("it does not any more");
    assert!(told.contains("50 GiB of a GPU are not free"), "{told}");
    assert_sound(&api);
}

#[test]
fn a_hundred_pods_come_and_go_while_the_api_server_and_the_extender_do_not_stay() {
    let nodes = ["a", "b", "c"];
    let api = cluster(&[("a", 2), ("b", 4), ("c", 1)]);
    let mut extender = extender(&api);
    let mut random = fastrand::Rng::with_seed(5);
    let mut waiting: Vec<String> = (0..100).map(|number| format!("p{number}")).collect();
    for name in &waiting {
        pod(&api, name, &gib(random.u64(1..60)));
    }
    let (mut rounds, mut bound) = (0, Vec::new());
    while !waiting.is_empty() {
        rounds += 1;
        assert!(rounds < 2000, "{} pods are never placed", waiting.len());
        if rounds % 40 == 0 {
            assert!(extender.end(), "it ends in order");
            extender = self::extender(&api);
        }
        if rounds % 17 == 0 {
            api.set_away(true);
            api.set_away(false);
        }
        let name = waiting.remove(random.usize(..waiting.len()));
        let pod = api.get(&path(&name)).expect("it is there");
        let _ = extender.schedule(&pod, &nodes);
        assert_sound(&api);
        match placed(&api, &name) {
            Some(_) => bound.push(name),
            None => waiting.push(name),
        }
        if bound.len() > 8 {
            api.remove(&path(&bound.remove(random.usize(..bound.len()))));
        }
    }
}
