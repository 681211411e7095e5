//! GPUs that are counted by resources, and the pods that hold shares of them, whatever the names of the
//! resources: what agents tell in their ConfigMaps, and what pods say, in the scheduler extender's own books.

use gpushare_placement::Binpack;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};

use super::picture::{Gpu, Picture, Share};
use crate::asks;
use crate::scheduler::{State, Wanted};

/// The books that these make.
pub fn books(maps: &[ConfigMap], pods: &[Pod]) -> State {
    let mut state = State::new(Box::new(Binpack));
    for map in maps {
        if let Err(error) = state.learn_gpus(map) {
            let name = map.metadata.name.as_deref().unwrap_or_default();
            eprintln!("note: the ConfigMap {name} is none of an agent of this version: {error}");
        }
    }
    pods.iter().for_each(|pod| state.learn_pod(pod));
    state
}

/// Adds the GPUs and shares of the books to a picture.
pub fn add(state: &State, picture: &mut Picture) {
    let mut nodes: Vec<&str> = state.nodes_with_gpus().collect();
    nodes.sort_unstable();
    for node in nodes {
        let Some(gpus) = state.gpus(node) else { continue };
        let shares = state.shares(node);
        for (shown, (memory, cores)) in gpus.gpus.iter().zip(state.left(node)) {
            let taints = if shown.is_open { Vec::new() } else { vec!["closed".to_owned()] };
            picture.gpus.push(Gpu {
                node: node.to_owned(),
                device: shown.uuid.clone(),
                index: shown.index.into(),
                model: shown.model.clone(),
                memory_bytes: shown.memory,
                memory_given_bytes: shown.memory.saturating_sub(memory),
                memory_default_bytes: shown.default_memory,
                cores_percent: shown.cores.into(),
                cores_given_percent: shown.cores.saturating_sub(cores).into(),
                cores_default_percent: gpus.default_cores.into(),
                shares: shares.iter().filter(|share| share.gpu == shown.index).count(),
                taints,
            });
        }
        for share in shares {
            let Some(pod) = state.pod(&share.uid) else { continue };
            let asked = pod.asking.iter().find(|asking| asking.container == share.container);
            let names = asked.map(|asking| asking.amounts.keys().cloned().collect::<Vec<_>>().join(", "));
            picture.shares.push(Share {
                namespace: pod.namespace.clone(),
                claim: String::new(),
                resources: names.unwrap_or_default(),
                pods: vec![pod.name.clone()],
                node: node.to_owned(),
                device: gpus
                    .gpus
                    .iter()
                    .find(|gpu| gpu.index == share.gpu)
                    .map(|gpu| gpu.uuid.clone())
                    .unwrap_or_default(),
                index: Some(share.gpu.into()),
                memory_bytes: share.memory,
                cores_percent: share.cores.into(),
            });
        }
    }
    picture.gpus.sort_by(|one, other| (&one.node, one.index).cmp(&(&other.node, other.index)));
    picture.shares.sort_by(|one, other| {
        (&one.namespace, &one.pods, &one.claim).cmp(&(&other.namespace, &other.pods, &other.claim))
    });
}

/// What the pod has of GPUs, or why the nodes do not take it; nothing for one that asks for no such resource.
pub fn lines(state: &mut State, pod: &Pod) -> Vec<String> {
    let wanted = Wanted::of(pod);
    if wanted.asking.is_empty() {
        return Vec::new();
    }
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
    let uid = pod.metadata.uid.as_deref().unwrap_or_default();
    if let Some(node) = node {
        let its = state.shares(&node).into_iter().filter(|share| share.uid == uid);
        let lines = its.map(|share| {
            let compute =
                if share.cores == 0 { String::new() } else { format!(" and {} % of compute", share.cores) };
            let memory = super::picture::size(share.memory);
            format!(
                "Container {} has {memory}{compute} of GPU {} on node {node}.",
                share.container, share.gpu
            )
        });
        let lines: Vec<String> = lines.collect();
        return if lines.is_empty() {
            vec![format!("Node {node} tells of no GPU that is counted by {}.", names(&wanted.asking))]
        } else {
            lines
        };
    }
    let mut nodes: Vec<String> = state.nodes_with_gpus().map(str::to_owned).collect();
    nodes.sort_unstable();
    if nodes.is_empty() {
        return vec![format!(
            "It asks for {}, and no node's agent shows GPUs as such resources.",
            names(&wanted.asking)
        )];
    }
    let list: Vec<&str> = nodes.iter().map(String::as_str).collect();
    let worths = state.worths(&wanted, &list);
    nodes
        .iter()
        .zip(worths)
        .map(|(node, worth)| match worth {
            Ok(_) => format!("Node {node} has room for it."),
            Err(unfit) => format!("Node {node}: {}.", unfit.why),
        })
        .collect()
}

fn names(asking: &[asks::Asking]) -> String {
    let mut names: Vec<&str> = asking.iter().flat_map(|one| one.amounts.keys()).map(String::as_str).collect();
    names.sort_unstable();
    names.dedup();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn map() -> ConfigMap {
        let gpu = |index: u32| {
            json!({"uuid": format!("GPU-{index}"), "index": index, "minor": index, "model": "A",
            "memory": 80_u64 << 30, "per_share": 80_u64 << 30, "default_memory": 8_u64 << 30, "cores": 100,
            "is_open": index == 0})
        };
        let resources =
            json!([{"name": "aliyun.com/gpu-mem", "unit": {"Memory": 1 << 30}, "system": "Aliyun"}]);
        let gpus = json!({"gpus": [gpu(0), gpu(1)], "resources": resources, "default_cores": 0});
        serde_json::from_value(
            json!({"metadata": {"name": "gpus.node-a"}, "data": {"gpus": gpus.to_string()}}),
        )
        .unwrap()
    }

    fn pod(name: &str, node: Option<&str>, gib: u64) -> Pod {
        let limits = json!({"aliyun.com/gpu-mem": gib.to_string()});
        let pod: Value = json!({"metadata": {"name": name, "namespace": "team", "uid": name},
            "spec": {"nodeName": node, "containers": [{"name": "main", "resources": {"limits": limits}}]}});
        serde_json::from_value(pod).unwrap()
    }

    #[test]
    fn gpus_and_shares_of_any_names_are_shown_and_why_a_pod_waits() {
        let pods = [pod("a", Some("node-a"), 30), pod("b", Some("node-a"), 20), pod("c", None, 40)];
        let mut state = books(&[map()], &pods);
        let mut picture = Picture::default();
        add(&state, &mut picture);
        let given: Vec<_> =
            picture.gpus.iter().map(|gpu| (gpu.memory_given_bytes >> 30, gpu.shares, gpu.state())).collect();
        assert_eq!(given, [(50, 2, "open".to_owned()), (0, 0, "closed".to_owned())]);
        let shares: Vec<_> =
            picture.shares.iter().map(|share| (&*share.pods[0], share.memory_bytes >> 30)).collect();
        assert_eq!(shares, [("a", 30), ("b", 20)]);
        assert_eq!(picture.shares[0].resources, "aliyun.com/gpu-mem");
        assert_eq!(lines(&mut state, &pods[0]), ["Container main has 30 GiB of GPU 0 on node node-a."]);
        assert_eq!(
            lines(&mut state, &pods[2]),
            ["Node node-a: 40 GiB of a GPU are not free on one node's GPUs."]
        );
        assert_eq!(lines(&mut state, &pod("d", None, 10)), ["Node node-a has room for it."]);
        assert!(lines(&mut State::new(Box::new(Binpack)), &pods[2])[0].contains("no node's agent"));
    }
}
