//! Nodes of GPUs that somebody handed to the container before the wrapper saw it.

use gpushare_region::path as inner;
use oci_spec::runtime::MountBuilder;
use serde_json::{Value, json};

use super::{edited, leased, one_of_two, plan};
use crate::edit::EditError;
use crate::plan::Plan;
use gpushare_request::HANDED;

fn node(path: &str, major: u64, minor: u64) -> Value {
    json!({"path": path, "type": "c", "major": major, "minor": minor, "fileMode": 438})
}

fn rule(major: u64, minor: u64, access: &str) -> Value {
    json!({"allow": true, "type": "c", "major": major, "minor": minor, "access": access})
}

/// A bundle with `nodes`, and a rule for each as device plugins and CDI write it.
fn with(nodes: &[Value]) -> Value {
    let number = |node: &Value, field: &str| node[field].as_u64().unwrap();
    let rules = nodes.iter().map(|node| rule(number(node, "major"), number(node, "minor"), "rwm"));
    let rules: Vec<Value> = std::iter::once(json!({"allow": false, "access": "rwm"})).chain(rules).collect();
    json!({"linux": {"devices": nodes, "resources": {"devices": rules}}})
}

fn leased_one_of_two() -> Plan {
    Plan { outside: one_of_two().outside, ..leased() }
}

/// What the edit leaves of GPUs: nodes by path, and rules as `MAJOR:MINOR ACCESS`.
fn of_gpus(json: &Value) -> (Vec<String>, Vec<String>) {
    let devices = json["linux"]["devices"].as_array().unwrap().iter();
    let rules = json["linux"]["resources"]["devices"].as_array().unwrap().iter();
    let rules = rules.filter(|rule| rule["allow"] == true);
    let text =
        |rule: &Value| format!("{}:{} {}", rule["major"], rule["minor"], rule["access"].as_str().unwrap());
    (devices.map(|node| node["path"].as_str().unwrap().to_owned()).collect(), rules.map(text).collect())
}

#[test]
fn nodes_of_gpus_that_were_handed_over_give_way_to_those_that_were_granted() {
    let bundle = with(&[
        node("/dev/nvidiactl", 195, 255),
        node("/dev/nvidia0", 195, 0),
        node("/dev/dri/renderD128", 226, 128),
        node("/dev/nvidia1", 195, 1),
        node("/dev/dri/renderD129", 226, 129),
        node("/dev/fuse", 10, 229),
    ]);
    let after = edited(&bundle.to_string(), &one_of_two()).unwrap();
    let (nodes, rules) = of_gpus(&after);
    assert_eq!(nodes, ["/dev/fuse", "/dev/nvidia0", "/dev/nvidiactl"]);
    assert_eq!(rules, ["195:255 rwm", "10:229 rwm", "195:0 rw", "195:255 rw"]);
}

#[test]
fn a_gpus_node_under_any_name_is_known_by_its_number() {
    for path in ["/dev/nvidia1", "/dev/gpu", "/data/nvidia0"] {
        let bundle = with(&[node(path, 195, 1), node("/dev/nvidia0", 195, 0)]);
        let after = edited(&bundle.to_string(), &one_of_two()).unwrap();
        assert_eq!(of_gpus(&after).0, ["/dev/nvidia0", "/dev/nvidiactl"], "{path}");
        assert_eq!(of_gpus(&after).1, ["195:0 rw", "195:255 rw"], "{path}");
    }
}

#[test]
fn a_share_reaches_no_further_than_the_gpus_that_were_handed_over() {
    let second = node("/dev/nvidia1", 195, 1);
    let refused = edited(&with(std::slice::from_ref(&second)).to_string(), &one_of_two()).unwrap_err();
    let told = refused.to_string();
    assert!(
        told.contains("share is of /dev/nvidia0, and") && told.contains("handed over /dev/nvidia1"),
        "{told}"
    );
    let mut both = leased_one_of_two();
    both.devices.push(serde_json::from_value(second).unwrap());
    let first = with(&[node("/dev/nvidia0", 195, 0)]);
    assert!(matches!(edited(&first.to_string(), &both), Err(EditError::NotHanded { .. })));
    let again = edited(&first.to_string(), &leased_one_of_two()).unwrap();
    assert!(
        matches!(edited(&again.to_string(), &both), Err(EditError::NotHanded { .. })),
        "the second run, too"
    );
}

#[test]
fn what_reaches_beyond_the_nodes_that_were_handed_over_is_refused() {
    let handed = [node("/dev/nvidia1", 195, 1), node("/dev/nvidia0", 195, 0)];
    for more in [
        json!({"allow": true, "type": "c", "major": 195, "access": "rw"}),
        json!({"allow": true, "type": "c", "major": 195, "minor": -1, "access": "rwm"}),
        json!({"allow": true, "type": "c", "minor": 1, "access": "rw"}),
        rule(195, 2, "rw"),
        rule(226, 129, "rw"),
        rule(237, 1, "r"),
    ] {
        let mut bundle = with(&handed);
        bundle["linux"]["resources"]["devices"].as_array_mut().unwrap().push(more.clone());
        let refused = edited(&bundle.to_string(), &one_of_two());
        assert!(
            matches!(refused, Err(EditError::OtherGpu { .. } | EditError::Mig { .. })),
            "{more}: {refused:?}"
        );
    }
    let mig = with(&[node("/dev/nvidia0", 195, 0), node("/dev/nvidia-caps/nvidia-cap1", 237, 1)]);
    assert!(matches!(edited(&mig.to_string(), &one_of_two()), Err(EditError::Mig { .. })));
    let display = with(&[node("/dev/nvidia0", 195, 0), node("/dev/dri/renderD129", 226, 129)]);
    assert!(matches!(edited(&display.to_string(), &one_of_two()), Err(EditError::OtherGpu { .. })));
}

#[test]
fn of_a_privileged_containers_nodes_those_with_a_rule_were_handed_over() {
    let every = json!({"allow": true, "access": "rwm"});
    let all = |rules: Value| {
        let hosts = [node("/dev/null", 1, 3), node("/dev/nvidia0", 195, 0), node("/dev/nvidia1", 195, 1)];
        let mut bundle = with(&hosts);
        bundle["linux"]["resources"]["devices"] = rules;
        bundle.to_string()
    };
    let after = edited(&all(json!([every])), &leased_one_of_two()).unwrap();
    assert!(of_gpus(&after).0.contains(&"/dev/nvidia1".to_owned()));
    assert_eq!(after["annotations"].get(HANDED), None, "nobody can tell them apart");
    assert_eq!(edited(&after.to_string(), &leased_one_of_two()).unwrap(), after);

    let after = edited(&all(json!([every, rule(195, 0, "rwm")])), &leased_one_of_two()).unwrap();
    assert!(of_gpus(&after).0.contains(&"/dev/nvidia1".to_owned()));
    assert_eq!(after["annotations"][HANDED], "0");
    assert_eq!(edited(&after.to_string(), &leased_one_of_two()).unwrap(), after);
    let other = edited(&all(json!([every, rule(195, 1, "rwm")])), &leased_one_of_two());
    assert!(matches!(other, Err(EditError::NotHanded { .. })), "{other:?}");
}

#[test]
fn a_share_takes_the_place_of_the_control_nodes_that_came_with_its_gpu() {
    let control = [
        node("/dev/nvidiactl", 195, 255),
        node("/dev/nvidia-modeset", 195, 254),
        node("/dev/nvidia-uvm-tools", 511, 1),
    ];
    let paths = |json: &Value| -> Vec<String> {
        json["linux"]["devices"]
            .as_array()
            .unwrap()
            .iter()
            .map(|device| device["path"].as_str().unwrap().to_owned())
            .collect()
    };
    let limits =
        MountBuilder::default().source("/l").destination(inner::LIMITS.to_str().unwrap()).build().unwrap();
    let mut share = leased_one_of_two();
    share.mounts.push(limits);
    share.devices.push(serde_json::from_value(node("/dev/nvidia-uvm", 511, 0)).unwrap());
    let handed = [&control[..], &[node("/dev/nvidia0", 195, 0)]].concat();
    let after = edited(&with(&handed).to_string(), &share).unwrap();
    let (_, rules) = of_gpus(&after);
    assert_eq!(rules, ["195:0 rw", "195:255 rw"]);
    assert!(!paths(&after).iter().any(|path| path.contains("tools") || path.contains("modeset")), "{after}");
    // Control nodes without a GPU are the caller's own wish.
    let after = edited(&with(&control).to_string(), &share).unwrap();
    assert!(paths(&after).iter().any(|path| path.contains("modeset")), "{after}");
}

#[test]
fn a_bundle_that_runs_again_keeps_which_gpus_were_handed_over() {
    let nodes =
        [node("/dev/nvidia1", 195, 1), node("/dev/nvidia0", 195, 0), node("/dev/dri/card1", 226, 129)];
    for (nodes, kept) in [(&nodes[..], Some("0,1")), (&nodes[1..2], Some("0")), (&[], None)] {
        let once = edited(&with(nodes).to_string(), &leased_one_of_two()).unwrap();
        let list = once.pointer("/annotations").and_then(|all| all.get(HANDED));
        assert_eq!(list.and_then(Value::as_str), kept, "{nodes:?}");
        let twice = edited(&once.to_string(), &leased_one_of_two()).unwrap();
        assert_eq!(once.to_string(), twice.to_string(), "{nodes:?}");
    }
}

#[test]
fn a_pods_word_for_what_was_handed_over_does_not_outlive_the_first_run() {
    for nodes in [&[][..], &[node("/dev/nvidia0", 195, 0)]] {
        let mut bundle = with(nodes);
        bundle["annotations"] = json!({HANDED: "0,1,2", "mine": "x"});
        let after = edited(&bundle.to_string(), &leased_one_of_two()).unwrap();
        let kept = after["annotations"].get(HANDED).and_then(Value::as_str);
        assert_eq!(kept, (!nodes.is_empty()).then_some("0"));
        assert_eq!(after["annotations"]["mine"], "x");
    }
}

#[test]
fn a_hook_finds_the_nodes_of_other_gpus_and_refuses_them() {
    let bundle = with(&[node("/dev/nvidia1", 195, 1)]);
    assert!(matches!(crate::edit::check(&bundle, &plan()), Err(EditError::OtherGpu { .. })));
    let own = with(&[node("/dev/nvidia0", 195, 0)]);
    assert_eq!(crate::edit::check(&own, &plan()), Ok(()));
}
