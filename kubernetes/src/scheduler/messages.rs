//! The calls of kube-scheduler and their answers, as JSON (kube-scheduler, extender/v1/types.go). The types
//! there have no tags, so the fields begin with capitals; pods and nodes inside are as everywhere.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Of filter and prioritize.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Arguments {
    /// The pod that is to be placed.
    pub pod: Pod,
    /// The nodes, where kube-scheduler sends them whole (`nodeCacheCapable: false`).
    #[serde(default)]
    pub nodes: Option<NodeList>,
    /// Their names, else.
    #[serde(default)]
    pub node_names: Option<Vec<String>>,
}

/// Nodes, which are handed back as they came.
#[derive(Debug, Deserialize, Serialize)]
pub struct NodeList {
    /// Each of them.
    #[serde(default)]
    pub items: Vec<Value>,
    /// What else there is.
    #[serde(flatten)]
    pub rest: serde_json::Map<String, Value>,
}

impl Arguments {
    /// The names of the nodes.
    pub fn names(&self) -> Vec<&str> {
        match (&self.node_names, &self.nodes) {
            (Some(names), _) => names.iter().map(String::as_str).collect(),
            (None, Some(nodes)) => nodes.items.iter().map(name).collect(),
            (None, None) => Vec::new(),
        }
    }
}

/// The name of a node.
pub fn name(node: &Value) -> &str {
    node["metadata"]["name"].as_str().unwrap_or_default()
}

/// Of filter.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct Filtered {
    /// The nodes that stay, if they came whole.
    pub nodes: Option<NodeList>,
    /// Their names, else.
    pub node_names: Option<Vec<String>>,
    /// Why others do not, where it would help if pods ended.
    pub failed_nodes: BTreeMap<String, String>,
    /// Why others do not, where it would not.
    pub failed_and_unresolvable_nodes: BTreeMap<String, String>,
    /// Why nothing can be said.
    pub error: String,
}

/// One of prioritize.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct Priority {
    /// The node's name.
    pub host: String,
    /// 0 to 10.
    pub score: i64,
}

/// Of bind.
#[derive(Debug, Deserialize)]
pub struct Binding {
    /// The pod's name.
    #[serde(rename = "PodName")]
    pub pod_name: String,
    /// Its namespace.
    #[serde(rename = "PodNamespace")]
    pub pod_namespace: String,
    /// Its UID.
    #[serde(rename = "PodUID")]
    pub pod_uid: String,
    /// The node's name.
    #[serde(rename = "Node")]
    pub node: String,
}

/// Of bind.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct Bound {
    /// Why it is not; empty if it is.
    pub error: String,
}

/// Of preempt.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Preemption {
    /// The pod for which others are to end.
    pub pod: Pod,
    /// The pods that would, by node, where kube-scheduler sends them whole.
    #[serde(default)]
    pub node_name_to_victims: Option<BTreeMap<String, Victims>>,
    /// By their UIDs, else.
    #[serde(default)]
    pub node_name_to_meta_victims: Option<BTreeMap<String, MetaVictims>>,
}

/// The pods that would end on a node.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Victims {
    /// Each of them.
    #[serde(default)]
    pub pods: Option<Vec<Pod>>,
    /// How many of them should not, by their budgets for disruption.
    #[serde(default, rename = "NumPDBViolations")]
    pub violations: i64,
}

/// The pods that would end on a node.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct MetaVictims {
    /// Each of them.
    #[serde(default)]
    pub pods: Option<Vec<MetaPod>>,
    /// How many of them should not, by their budgets for disruption.
    #[serde(default, rename = "NumPDBViolations")]
    pub violations: i64,
}

/// A pod by its UID.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct MetaPod {
    /// It.
    #[serde(rename = "UID")]
    pub uid: String,
}

/// Of preempt.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct Preempted {
    /// The pods that are to end, on each node where that helps.
    pub node_name_to_meta_victims: BTreeMap<String, MetaVictims>,
}

impl Preemption {
    /// The victims by their UIDs.
    pub fn victims(&self) -> BTreeMap<String, MetaVictims> {
        if let Some(meta) = &self.node_name_to_meta_victims {
            return meta.clone();
        }
        let whole = self.node_name_to_victims.iter().flatten();
        let uid = |pod: &Pod| MetaPod { uid: pod.metadata.uid.clone().unwrap_or_default() };
        whole
            .map(|(node, victims)| {
                let pods = victims.pods.iter().flatten().map(uid).collect();
                (node.clone(), MetaVictims { pods: Some(pods), violations: victims.violations })
            })
            .collect()
    }
}
