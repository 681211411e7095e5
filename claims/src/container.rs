//! The part of a bundle's config.json from which requests are read.
//!
//! This module does not use the `Spec` of the crate `oci-spec`: `Spec` rejects the whole file for one
//! enumeration value that it does not know, but a container that asks for no GPU must start no matter what
//! its file holds.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;

use gpushare_inventory::CdiDevice;
use serde_json::Value;

use crate::allocated::Allocated;
use crate::reserved::Reserved;

/// Annotations, environment, mounts and device nodes of one container, as its engine wrote them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Container {
    annotations: BTreeMap<String, String>,
    /// See [`Container::cri_o_annotations`]; parsed on first use.
    cri_o: OnceLock<BTreeMap<String, String>>,
    env: Vec<Variable>,
    mounts: Vec<Mount>,
    nodes: Vec<Node>,
    /// The entries of the node's CDI files for the CDI devices that the bundle names, by qualified name.
    cdi: BTreeMap<String, CdiDevice>,
    /// The shares that the node reserved for the resource claim that the bundle names.
    reserved: Option<Reserved>,
    /// The GPUs that kubelet allocated to the container; `None` if unknown.
    allocated: Option<Allocated>,
    /// See [`Container::ran_before()`].
    ran_before: bool,
    /// Whether the engine gave the container every device of the host. A GPU's node then does not mean that
    /// the GPU was handed over.
    has_hosts_nodes: bool,
    /// Minors of NVIDIA devices that have a device rule of their own. CDI writes such a rule for each device
    /// that it adds.
    ruled: BTreeSet<i64>,
}

/// An entry of the environment. The position of `=` is kept because every dialect scans all entries.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Variable {
    entry: String,
    /// Length of the name: bytes before the `=`.
    name: usize,
}

impl Variable {
    /// Returns `None` for an entry without `=`.
    fn of(entry: &str) -> Option<Self> {
        let name = entry.find('=')?;
        Some(Self { entry: entry.to_owned(), name })
    }

    fn split(&self) -> (&str, &str) {
        (&self.entry[..self.name], &self.entry[self.name + 1..])
    }
}

/// A mount of the bundle.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mount {
    /// Path on the host; empty if the mount has no source.
    pub source: String,
    /// Path in the container, as the bundle has it: not normalised.
    pub target: String,
}

/// A device node of the bundle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Path in the container.
    pub path: String,
    /// Major number as written, unchecked; it may be negative.
    pub major: i64,
    /// Minor number as written, unchecked; it may be negative.
    pub minor: i64,
    /// Whether its type is `b`.
    pub is_block: bool,
}

/// The annotations with which one CRI engine describes a container.
struct CriKeys {
    kind: &'static str,
    name: &'static str,
    sandbox: &'static str,
    pod: &'static str,
    namespace: &'static str,
    uid: &'static str,
}

const CRI_KEYS: [CriKeys; 2] = [
    CriKeys {
        kind: "io.kubernetes.cri-o.ContainerType",
        name: "io.kubernetes.container.name",
        sandbox: "io.kubernetes.cri-o.SandboxID",
        pod: "io.kubernetes.pod.name",
        namespace: "io.kubernetes.pod.namespace",
        uid: "io.kubernetes.pod.uid",
    },
    CriKeys {
        kind: "io.kubernetes.cri.container-type",
        name: "io.kubernetes.cri.container-name",
        sandbox: "io.kubernetes.cri.sandbox-id",
        pod: "io.kubernetes.cri.sandbox-name",
        namespace: "io.kubernetes.cri.sandbox-namespace",
        uid: "io.kubernetes.cri.sandbox-uid",
    },
];

/// The engine's family, as far as the meaning of a key depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// containerd's CRI or CRI-O: a pod's container.
    Cri,
    /// docker, podman, ctr, or a bundle run by hand.
    Other,
}

/// The engine that wrote the bundle. It decides who may have written an annotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writer {
    /// containerd's CRI: a pod's container.
    Containerd,
    /// CRI-O: a pod's container.
    CriO,
    /// podman: its annotations may come from the image.
    Podman,
    /// docker, ctr, or a bundle run by hand.
    Other,
}

/// The annotation that podman sets last, so that neither an image nor a caller can remove it.
const PODMAN: (&str, &str) = ("io.container.manager", "libpod");

impl Container {
    /// A container with these annotations and `NAME=value` entries, without mounts and device nodes.
    pub fn new(annotations: BTreeMap<String, String>, env: Vec<String>) -> Self {
        let env = env.iter().filter_map(|entry| Variable::of(entry)).collect();
        Self { annotations, env, ..Self::default() }
    }

    /// Reads the container from a config.json. Skips any part of an unexpected JSON type; the low-level
    /// runtime reports it.
    pub fn from_json(json: &Value) -> Self {
        let annotations = json["annotations"].as_object().into_iter().flatten();
        let text = |(key, value): (&String, &Value)| Some((key.clone(), value.as_str()?.to_owned()));
        let nodes: Vec<Node> = list(&json["linux"]["devices"]).filter_map(node).collect();
        Self {
            annotations: annotations.filter_map(text).collect(),
            env: list(&json["process"]["env"]).filter_map(Value::as_str).filter_map(Variable::of).collect(),
            mounts: list(&json["mounts"]).filter_map(mount).collect(),
            ran_before: ran_before(json),
            has_hosts_nodes: is_privileged(json) && nodes.iter().any(Node::is_null),
            ruled: rules(json).filter(|rule| lets_use(rule)).filter_map(ruled_gpu).collect(),
            nodes,
            ..Self::default()
        }
    }

    /// Adds the entries of the node's CDI files for the CDI devices, by qualified name.
    pub fn specified(self, cdi: BTreeMap<String, CdiDevice>) -> Self {
        Self { cdi, ..self }
    }

    /// Adds the shares that the node reserved for the resource claim that the bundle names.
    pub fn with_reserved(self, reserved: Reserved) -> Self {
        Self { reserved: Some(reserved), ..self }
    }

    /// The shares that the node reserved for the container; `None` if its bundle names no claim, or if they
    /// were not looked up.
    pub fn reserved(&self) -> Option<&Reserved> {
        self.reserved.as_ref()
    }

    /// Adds the GPUs that kubelet allocated to the container.
    pub fn with_allocated(self, allocated: Allocated) -> Self {
        Self { allocated: Some(allocated), ..self }
    }

    /// The GPUs that kubelet allocated to the container; `None` if it does not belong to a pod, or if they
    /// were not looked up.
    pub fn allocated(&self) -> Option<&Allocated> {
        self.allocated.as_ref()
    }

    /// The entry of the node's CDI files for the CDI device `name`; `None` if it was not looked up.
    pub fn cdi_device(&self, name: &str) -> Option<&CdiDevice> {
        self.cdi.get(name)
    }

    /// The minors of all GPUs that the node's CDI files list for the container's CDI devices.
    pub fn specified_minors(&self) -> impl Iterator<Item = u32> {
        let whole = self.cdi.values().filter(|device| !device.is_part);
        whole.flat_map(|device| &device.minors).copied()
    }

    /// All annotations, regardless of their author; see [`crate::rank_of_annotation`].
    pub fn annotations(&self) -> &BTreeMap<String, String> {
        &self.annotations
    }

    /// The family of the engine that wrote the file. Compare the whole key, not its prefix: podman sets other
    /// `io.kubernetes.cri-o.*` keys.
    pub fn engine(&self) -> Engine {
        if self.cri().is_some() { Engine::Cri } else { Engine::Other }
    }

    /// The engine that wrote the file.
    pub fn writer(&self) -> Writer {
        let (key, value) = PODMAN;
        match self.cri() {
            _ if self.annotations.get(key).is_some_and(|found| found == value) => Writer::Podman,
            Some(keys) if keys.kind == CRI_KEYS[0].kind => Writer::CriO,
            Some(_) => Writer::Containerd,
            None => Writer::Other,
        }
    }

    /// The keys of the CRI engine that wrote the file. CRI-O is checked first because it passes every
    /// annotation of a pod, including those under containerd's names. containerd passes only those that match
    /// patterns in its settings.
    fn cri(&self) -> Option<&'static CriKeys> {
        CRI_KEYS.iter().find(|keys| self.annotations.contains_key(keys.kind))
    }

    /// The container's own annotations under CRI-O. CRI-O merges the annotations of pod and container and the
    /// labels into one map. It also keeps the container's annotations, which only kubelet writes, as JSON
    /// under a separate key. The JSON is parsed once: every lookup of a key may need it, and there may be a
    /// hundred thousand keys.
    pub fn cri_o_annotations(&self) -> &BTreeMap<String, String> {
        self.cri_o.get_or_init(|| {
            let own = self.annotations.get("io.kubernetes.cri-o.Annotations");
            own.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
        })
    }

    /// Whether this is a pod's pause container, whose request is not read. podman sets none of these marks
    /// itself, so in a podman bundle they come from the pod's author and do not count.
    pub fn is_sandbox(&self) -> bool {
        self.of_pod(|keys| keys.kind) == Some("sandbox")
            && self.writer() != Writer::Podman
            && self.engines().len() < 2
    }

    /// For each CRI engine whose marks the bundle has, one of its keys. An engine writes its own marks last.
    /// A second engine's marks come from the pod: CRI-O passes all of a pod's annotations, containerd those
    /// that its settings list.
    pub fn engines(&self) -> Vec<&'static str> {
        let mark = |keys: &CriKeys| {
            [keys.kind, keys.sandbox].into_iter().find(|key| self.annotations.contains_key(*key))
        };
        CRI_KEYS.iter().filter(|_| self.writer() != Writer::Podman).filter_map(mark).collect()
    }

    fn of_pod(&self, key: fn(&CriKeys) -> &'static str) -> Option<&str> {
        self.cri().and_then(|keys| self.annotations.get(key(keys))).map(String::as_str)
    }

    /// The sandbox id of the container's pod: the same for all containers of the pod, and unique to it.
    /// `None` for a bundle with the keys of two engines, and for a podman bundle, whose annotations may come
    /// from the image.
    pub fn sandbox(&self) -> Option<&str> {
        let is_pods = self.engines().len() == 1 && !self.is_sandbox();
        self.of_pod(|keys| keys.sandbox).filter(|id| is_pods && !id.is_empty())
    }

    /// The container's name inside its pod; `None` outside a CRI engine.
    pub fn name_in_pod(&self) -> Option<&str> {
        self.of_pod(|keys| keys.name)
    }

    /// The pod's name; `None` outside a CRI engine.
    pub fn pod_name(&self) -> Option<&str> {
        self.of_pod(|keys| keys.pod)
    }

    /// The pod's Kubernetes namespace; `None` outside a CRI engine.
    pub fn pod_namespace(&self) -> Option<&str> {
        self.of_pod(|keys| keys.namespace)
    }

    /// The UID of the container's pod in the cluster; `None` outside a CRI engine.
    pub fn pod_uid(&self) -> Option<&str> {
        self.of_pod(|keys| keys.uid)
    }

    /// Whether a Kubernetes engine wrote the bundle for a pod's container. An image could write podman's
    /// annotations.
    pub fn is_in_cluster(&self) -> bool {
        self.engines().len() == 1 && !self.is_sandbox()
    }

    /// The UID of the pod, and the container's name in it; `None` if the bundle lacks one of them.
    pub fn in_cluster(&self) -> Option<(&str, &str)> {
        self.pod_uid().zip(self.name_in_pod()).filter(|_| self.is_in_cluster())
    }

    /// Whether the bundle holds the hook of an earlier lease: the wrapper edited it then, and no engine has
    /// rewritten it since. Neither image nor pod can write a hook.
    pub fn ran_before(&self) -> bool {
        self.ran_before
    }

    /// All environment entries that have a `=`, in order, duplicates included.
    pub fn env(&self) -> impl Iterator<Item = (&str, &str)> {
        self.env.iter().map(Variable::split)
    }

    /// The entries with this name, in order. Compares lengths first for speed: a pod has a variable for each
    /// port of each service around it, and dialects look up a hundred names.
    pub fn named<'a>(&'a self, name: &str) -> impl DoubleEndedIterator<Item = (&'a str, &'a str)> {
        let is_one = move |variable: &&Variable| {
            variable.name == name.len() && variable.entry.as_bytes().starts_with(name.as_bytes())
        };
        self.env.iter().filter(is_one).map(Variable::split)
    }

    /// The mounts in the order of the bundle; a later mount covers an earlier one.
    pub fn mounts(&self) -> &[Mount] {
        &self.mounts
    }

    /// The device nodes of `linux.devices`, duplicates included.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The GPU device nodes that the engine was handed for this container, as path and minor number.
    ///
    /// A bundle that ran before also holds the nodes of its lease, so the annotation [`HANDED`] lists the
    /// nodes that were handed over. In a bundle with every device of the host, a node counts if it has its
    /// own device rule, which CDI writes, or if it is listed twice, which a device plugin causes.
    pub fn handed(&self) -> Vec<(&str, u32)> {
        if self.ran_before {
            let minors = self.annotations.get(HANDED).into_iter().flat_map(|note| note.split(','));
            return minors.filter_map(|minor| Some((HANDED, minor.parse().ok()?))).collect();
        }
        let gpus: Vec<(&str, u32)> =
            self.nodes.iter().filter_map(|node| Some((node.path.as_str(), gpu_minor(node)?))).collect();
        if !self.has_hosts_nodes {
            return gpus;
        }
        let mut found: BTreeMap<u32, usize> = BTreeMap::new();
        gpus.iter().for_each(|(_, minor)| *found.entry(*minor).or_default() += 1);
        let is_handed = |minor: &u32| self.ruled.contains(&i64::from(*minor)) || found[minor] > 1;
        gpus.into_iter().filter(|(_, minor)| is_handed(minor)).collect()
    }

    /// Minors of the nodes below `/dev/nvidia-caps` that the bundle has in addition to GPU nodes. Two such
    /// nodes make up a MIG instance. If the bundle ran before, the minors come from the annotation, as in
    /// [`Container::handed`].
    pub fn handed_capabilities(&self) -> Vec<u32> {
        if self.ran_before {
            let items = self.annotations.get(HANDED).into_iter().flat_map(|note| note.split(','));
            return items.filter_map(|item| item.strip_prefix(CAPABILITY)?.parse().ok()).collect();
        }
        let named = |node: &Node| node.path.strip_prefix(CAPABILITIES)?.parse().ok();
        let is_its = |node: &&Node| !node.is_block && named(node) == Some(node.minor);
        self.nodes.iter().filter(is_its).filter_map(|node| u32::try_from(node.minor).ok()).collect()
    }
}

impl Node {
    /// Whether this is /dev/null (1:3). The runtime always creates that node itself. A bundle lists it only
    /// if the engine added all nodes of the host.
    fn is_null(&self) -> bool {
        (self.major, self.minor, self.is_block) == (1, 3, false)
    }
}

/// The part before the minor in the path of a node that opens a MIG instance.
const CAPABILITIES: &str = "/dev/nvidia-caps/nvidia-cap";
/// The prefix of the minor of such a node in [`HANDED`].
pub const CAPABILITY: &str = "cap";

/// The annotation that keeps the minors of the GPUs that a bundle was handed, and those of the nodes of MIG
/// instances (`0,cap30,cap31`), for a later run of the same bundle. A pod can write it too, so it counts only
/// together with the hook of an earlier lease.
pub const HANDED: &str = "granted.gpushare.io/handed";

/// The NVIDIA driver's major number. Minors from 254 up are control nodes.
const MAJOR: i64 = 195;
const FIRST_CONTROL_MINOR: i64 = 254;

/// The minor of a GPU's device node; `None` for any other node.
pub fn gpu_minor(node: &Node) -> Option<u32> {
    let is_gpu = node.major == MAJOR && (0..FIRST_CONTROL_MINOR).contains(&node.minor) && !node.is_block;
    u32::try_from(node.minor).ok().filter(|_| is_gpu)
}

/// Whether the bundle allows every character device, so that it has those of the whole host. If several rules
/// cover all devices, the last one counts.
pub fn is_privileged(json: &Value) -> bool {
    rules(json)
        .filter(|rule| is_for_all(rule))
        .fold(false, |before, rule| lets_use(rule) || before && (rule["allow"] == true || !takes_use(rule)))
}

/// Whether a device rule applies to all character devices.
fn is_for_all(rule: &Value) -> bool {
    let kind = rule["type"].as_str().unwrap_or("a");
    matches!(kind, "a" | "" | "c") && number(rule, "major").is_none() && number(rule, "minor").is_none()
}

/// Whether a denying rule removes both reading and writing.
fn takes_use(rule: &Value) -> bool {
    access(rule).contains('r') && access(rule).contains('w')
}

/// The access that a device rule covers: reading, writing and `mknod`.
fn access(rule: &Value) -> &str {
    rule["access"].as_str().unwrap_or("rwm")
}

fn rules(json: &Value) -> impl Iterator<Item = &Value> {
    list(&json["linux"]["resources"]["devices"])
}

/// The items of a JSON list; none if the value is not a list.
fn list(json: &Value) -> impl Iterator<Item = &Value> {
    json.as_array().into_iter().flatten()
}

/// Whether a device rule allows reading or writing, not only `mknod`.
pub fn lets_use(rule: &Value) -> bool {
    rule["allow"] == true && access(rule).contains(['r', 'w'])
}

/// A number in a device rule. `None` stands for every number: the field is absent or -1.
fn number(rule: &Value, field: &str) -> Option<i64> {
    rule[field].as_i64().filter(|number| *number >= 0)
}

/// The minor of the single NVIDIA device that a rule names.
fn ruled_gpu(rule: &Value) -> Option<i64> {
    number(rule, "minor").filter(|_| number(rule, "major") == Some(MAJOR) && rule["type"] != "b")
}

fn mount(json: &Value) -> Option<Mount> {
    let text = |field: &str| json[field].as_str().map(str::to_owned);
    Some(Mount { source: text("source").unwrap_or_default(), target: text("destination")? })
}

fn node(json: &Value) -> Option<Node> {
    let number = |field: &str| json[field].as_i64();
    let path = json["path"].as_str()?.to_owned();
    Some(Node { path, major: number("major")?, minor: number("minor")?, is_block: json["type"] == "b" })
}

/// Whether this config.json holds the hook of an earlier lease: the wrapper edited it then, and no engine has
/// rewritten it since.
pub fn ran_before(json: &Value) -> bool {
    list(&json["hooks"]["prestart"]).any(is_of_a_lease)
}

/// Whether this is gpushare's hook as the wrapper writes it. The hook of hook-only mode names no lease.
fn is_of_a_lease(hook: &Value) -> bool {
    hook["args"][0] == "gpushare-hook" && list(&hook["args"]).any(|word| word == "--lease")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_what_its_engine_says_and_nobody_else() {
        const CONTAINERD: [(&str, &str); 2] =
            [("io.kubernetes.cri.container-type", "container"), ("io.kubernetes.cri.sandbox-id", "c")];
        const CRI_O: [(&str, &str); 2] =
            [("io.kubernetes.cri-o.ContainerType", "container"), ("io.kubernetes.cri-o.SandboxID", "o")];
        let sandbox = [("io.kubernetes.cri.container-type", "sandbox"), CONTAINERD[1]];
        for (name, annotations, want) in [
            ("containerd", vec![CONTAINERD[0], CONTAINERD[1]], Some("c")),
            ("CRI-O", vec![CRI_O[0], CRI_O[1]], Some("o")),
            ("a bundle by hand", vec![CONTAINERD[1]], None),
            ("a sandbox", sandbox.to_vec(), None),
            ("an empty id", vec![CONTAINERD[0], ("io.kubernetes.cri.sandbox-id", "")], None),
            ("both", [CONTAINERD, CRI_O].concat(), None),
            ("containerd, and a pod with one key of CRI-O's", [&CONTAINERD[..], &CRI_O[1..]].concat(), None),
            ("CRI-O, and a pod with one key of containerd's", [&CRI_O[..], &CONTAINERD[1..]].concat(), None),
            ("an image, by podman", [&CONTAINERD[..], &[PODMAN]].concat(), None),
        ] {
            let annotations = annotations.iter().map(|(key, value)| (key.to_string(), value.to_string()));
            let container = Container::new(annotations.collect(), Vec::new());
            assert_eq!(container.sandbox(), want, "{name}");
        }
    }

    #[test]
    fn of_all_of_the_hosts_nodes_those_were_handed_over_that_have_a_rule_or_stand_twice() {
        use serde_json::json;

        let every = json!({"allow": true, "access": "rwm"});
        let rule =
            |minor: i64| json!({"allow": true, "type": "c", "major": 195, "minor": minor, "access": "rwm"});
        let gpu = |minor: i64| json!({"path": format!("/dev/nvidia{minor}"), "type": "c", "major": 195, "minor": minor});
        let null = json!({"path": "/dev/null", "type": "c", "major": 1, "minor": 3});
        let none = json!({"allow": false, "access": "rwm"});
        for (nodes, rules, want) in [
            (vec![gpu(1), gpu(3)], vec![none.clone(), rule(1), rule(3)], &[1, 3][..]),
            (vec![gpu(1), gpu(3), null.clone()], vec![every.clone()], &[]),
            (vec![gpu(1), gpu(3), null.clone()], vec![every.clone(), rule(3)], &[3]),
            // A device plugin's node, followed by all nodes of the host.
            (vec![gpu(3), gpu(1), gpu(3), null.clone()], vec![every.clone()], &[3, 3]),
            // Full access, but no node of the host (containerd's privileged_without_host_devices).
            (vec![gpu(3)], vec![every.clone()], &[3]),
            // The last rule for all devices counts.
            (vec![gpu(1), gpu(3), null.clone()], vec![every.clone(), none.clone(), rule(1)], &[1, 3]),
        ] {
            let json = json!({"linux": {"devices": nodes, "resources": {"devices": rules}}});
            let container = Container::from_json(&json);
            let handed: Vec<u32> = container.handed().into_iter().map(|(_, minor)| minor).collect();
            assert_eq!(handed, want, "{json}");
        }
    }
}
