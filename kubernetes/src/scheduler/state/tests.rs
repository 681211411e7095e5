use gpushare_placement::Binpack;
use serde_json::{Value, json};

use super::*;

fn map(node: &str, gpus: u32, placed: &Value) -> ConfigMap {
    let gpu = |index: u32| {
        json!({"uuid": format!("GPU-{index}"), "index": index, "minor": index, "model": "A", "cores": 100,
            "memory": 80_u64 << 30, "per_share": 80_u64 << 30, "default_memory": 8_u64 << 30, "is_open": true})
    };
    let resources = json!([{"name": "aliyun.com/gpu-mem", "unit": {"Memory": 1 << 30}, "system": "Aliyun"}]);
    let gpus: Vec<Value> = (0..gpus).map(gpu).collect();
    let gpus = json!({"gpus": gpus, "resources": resources, "default_cores": 0});
    let data = json!({"gpus": gpus.to_string(), "placed": placed.to_string()});
    serde_json::from_value(json!({"metadata": {"name": format!("gpus.{node}")}, "data": data})).unwrap()
}

fn pod(name: &str, node: Option<&str>, gib: u64, gpus: Option<&str>) -> Pod {
    let limits = json!({"aliyun.com/gpu-mem": gib.to_string()});
    let annotations = gpus.map(|gpus| json!({crate::gpus::PLACEMENT: gpus}));
    serde_json::from_value(json!({
        "metadata": {"name": name, "namespace": "team", "uid": name, "annotations": annotations},
        "spec": {"nodeName": node, "containers": [{"name": "main", "resources": {"limits": limits}}]}}))
    .unwrap()
}

fn left(state: &State, node: &str) -> Vec<u64> {
    state.left(node).into_iter().map(|(memory, _)| memory >> 30).collect()
}

#[test]
fn what_is_left_is_the_same_in_whatever_order_it_is_told() {
    type Telling = Box<dyn Fn(&mut State)>;
    let told: Vec<Telling> = vec![
        Box::new(|state| state.learn_gpus(&map("a", 3, &json!({"moved": {"main": [2]}}))).unwrap()),
        Box::new(|state| state.learn_pod(&pod("chosen", Some("a"), 30, Some("{\"main\":[1]}")))),
        Box::new(|state| state.learn_pod(&pod("moved", Some("a"), 20, Some("{\"main\":[1]}")))),
        Box::new(|state| state.learn_pod(&pod("unknown", Some("a"), 60, None))),
        Box::new(|state| state.learn_pod(&pod("other", Some("a"), 5, None))),
        Box::new(|state| state.learn_pod(&pod("elsewhere", Some("b"), 5, None))),
        Box::new(|state| {
            state.learn_pod(&pod("gone", Some("a"), 70, Some("{\"main\":[0]}")));
            state.forget_pod("gone");
        }),
    ];
    let mut random = fastrand::Rng::with_seed(1);
    let mut order: Vec<usize> = (0..told.len()).collect();
    let mut first: Option<Vec<u64>> = None;
    for _ in 0..50 {
        random.shuffle(&mut order);
        let mut state = State::new(Box::new(Binpack));
        order.iter().for_each(|number| told[*number](&mut state));
        order.iter().for_each(|number| told[*number](&mut state));
        let left = left(&state, "a");
        assert_eq!(left.iter().sum::<u64>(), 240 - 115, "{order:?}");
        assert_eq!(*first.get_or_insert_with(|| left.clone()), left, "{order:?}");
    }
}

#[test]
fn a_forged_annotation_takes_no_more_than_its_pod_asks_for() {
    let mut state = State::new(Box::new(Binpack));
    state.learn_gpus(&map("a", 4, &json!({}))).unwrap();
    for forged in [
        "{\"main\":[0,1,2,3]}",
        "{\"main\":[7]}",
        "{\"main\":[]}",
        "{\"main\":\"x\"}",
        "x",
        "{\"other\":[1]}",
    ] {
        state.learn_pod(&pod("forger", Some("a"), 60, Some(forged)));
        assert_eq!(left(&state, "a").iter().sum::<u64>(), 260, "{forged}");
    }
}

#[test]
fn a_binding_is_held_until_the_api_server_says_that_there_is_none() {
    let mut state = State::new(Box::new(Binpack));
    state.learn_gpus(&map("a", 1, &json!({}))).unwrap();
    let (unbound, bound) = (pod("p", None, 60, None), pod("p", Some("a"), 60, Some("{\"main\":[0]}")));
    state.learn_pod(&unbound);
    state.assume(&unbound, "a", Placement::from([("main".to_owned(), vec![0])]));
    // What was written before the binding comes late.
    state.learn_pod(&unbound);
    assert_eq!((left(&state, "a"), state.told_pods().count()), (vec![20], 0));
    assert!(state.has_assumed() && state.below("a", 1).is_empty(), "nobody may end what is not there yet");
    state.learn_pod(&bound);
    state.learn_pod(&unbound);
    assert_eq!((left(&state, "a"), state.told_pods().count()), (vec![20], 1));
    assert!(!state.has_assumed() && state.below("a", 1).len() == 1);
    // It is bound: nobody may disclaim it.
    state.disclaim("p");
    assert_eq!(left(&state, "a"), [20]);
    state.forget_pod("p");
    assert_eq!(left(&state, "a"), [80]);
    state.learn_pod(&unbound);
    state.assume(&unbound, "a", Placement::from([("main".to_owned(), vec![0])]));
    state.disclaim("p");
    assert_eq!(left(&state, "a"), [80]);
}

#[test]
fn what_a_pod_says_later_or_wrongly_hides_nothing_of_what_it_has() {
    let mut state = State::new(Box::new(Binpack));
    state.learn_gpus(&map("a", 2, &json!({}))).unwrap();
    let mut labelled = pod("p", Some("a"), 80, Some("{\"main\":[0]}"));
    state.learn_pod(&labelled);
    // A label that would make it a sixteenth of each of many GPUs.
    labelled.metadata.labels = Some([("aliyun.com/gpu-count".to_owned(), "16".to_owned())].into());
    state.learn_pod(&labelled);
    assert_eq!(left(&state, "a"), [0, 80]);
    let counted: Vec<u8> = state.bound_in("team", "other").map(|(.., asking)| asking[0].gpus).collect();
    assert_eq!(counted, [1], "nor of a quota");
    // One that loses the label has parts of as many GPUs as before.
    let mut split = pod("s", Some("b"), 80, Some("{\"main\":[0,1,2,3]}"));
    state.learn_gpus(&map("b", 4, &json!({}))).unwrap();
    split.metadata.labels = Some([("aliyun.com/gpu-count".to_owned(), "4".to_owned())].into());
    state.learn_pod(&split);
    assert_eq!(left(&state, "b"), [60; 4]);
    split.metadata.labels = None;
    state.learn_pod(&split);
    assert_eq!(left(&state, "b"), [60; 4]);
    state.forget_pod("s");
    // A container whose amounts make no share, beside one whose do.
    let limits = |amount: &str| json!({"limits": {"aliyun.com/gpu-mem": amount}});
    let two: Pod = serde_json::from_value(json!({"metadata": {"name": "q", "namespace": "team", "uid": "q"},
        "spec": {"nodeName": "a", "containers": [{"name": "main", "resources": limits("1e99")}, {"name": "n", "resources": limits("9e0")}]}}))
    .unwrap();
    state.learn_pod(&two);
    assert_eq!(left(&state, "a"), [0, 0]);
    let wanted = Wanted::of(&two);
    assert!(
        state.worths(&wanted, &["a"])[0].as_ref().is_err_and(|unfit| unfit.why.contains("without a suffix"))
    );
}

#[test]
fn kubelets_word_of_some_containers_counts_beside_an_init_container_that_has_ended() {
    let mut state = State::new(Box::new(Binpack));
    state.learn_gpus(&map("a", 2, &json!({"p": {"main": [1]}}))).unwrap();
    let limits = |amount: &str| json!({"limits": {"aliyun.com/gpu-mem": amount}});
    let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "team", "uid": "p"},
        "spec": {"nodeName": "a", "initContainers": [{"name": "first", "resources": limits("70")}],
            "containers": [{"name": "main", "resources": limits("60")}]}}))
    .unwrap();
    state.learn_pod(&pod);
    assert_eq!(left(&state, "a"), [80, 10]);
}

#[test]
fn settings_of_before_leave_nothing() {
    let mut state = State::new(Box::new(Binpack));
    for number in 0..50 {
        for node in ["a", "b"] {
            let mut map = map(node, 1, &json!({}));
            let gpus = map.data.as_mut().unwrap().get_mut("gpus").unwrap();
            *gpus = gpus.replace("\"default_cores\":0", &format!("\"default_cores\":{number}"));
            state.learn_gpus(&map).unwrap();
        }
    }
    assert!(state.terms.len() <= 3, "{}", state.terms.len());
}

#[test]
fn invented_nodes_leave_nothing() {
    let mut state = State::new(Box::new(Binpack));
    for number in 0..50 {
        let name = format!("invented-{number}");
        state.learn_pod(&pod("p", Some(&name), 60, None));
        state.forget_pod("p");
    }
    assert_eq!((state.nodes.len(), state.numbers.len()), (1, 0));
}

#[test]
fn a_node_that_is_gone_leaves_nothing() {
    let mut state = State::new(Box::new(Binpack));
    for number in 0..100 {
        let name = format!("node-{number}");
        let node = json!({"metadata": {"name": name}, "status": {"allocatable": {"cpu": "8"}}});
        state.learn_node(&serde_json::from_value(node).unwrap());
        state.learn_gpus(&map(&name, 1, &json!({}))).unwrap();
        state.learn_pod(&pod("p", Some(&name), 60, None));
        assert_eq!(left(&state, &name), [20]);
        state.forget_node(&name);
        state.forget_gpus(&NodeGpus::name_of(&name));
        state.forget_pod("p");
    }
    assert_eq!((state.nodes.len(), state.numbers.len()), (1, 0));
}
