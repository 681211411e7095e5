//! The part of a bundle's config.json that requests are read from.
//!
//! Not `oci-spec`'s `Spec`: that refuses a whole file for one enumeration value newer than itself, and a container
//! that asks for nothing must start whatever its file holds.

use std::collections::BTreeMap;

use serde_json::Value;

/// Annotations, environment and mount targets of one container, as its engine wrote them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Container {
    annotations: BTreeMap<String, String>,
    env: Vec<String>,
    mount_targets: Vec<String>,
}

/// HAMi's and Volcano's, Alibaba's cGPU's, Tencent's vgpu-manager's, nvshare's.
const FOREIGN_SWITCHES: [&str; 9] = [
    "CUDA_DISABLE_CONTROL",
    "CUDA_MEM_OVERSOLD",
    "CUDA_MEM_RATIO",
    "CUDA_OVERSUBSCRIBE",
    "CGPU_DISABLE",
    "DISABLE_VGPU_CONTROL",
    "GPU_CORE_UTILIZATION_POLICY",
    "NVSHARE_ENABLE_SINGLE_OVERSUB",
    "AMP_VGPU_ENABLE",
];

/// Where a CRI engine writes what a container is.
struct CriKeys {
    kind: &'static str,
    name: &'static str,
}

const CRI_KEYS: [CriKeys; 2] = [
    CriKeys { kind: "io.kubernetes.cri-o.ContainerType", name: "io.kubernetes.container.name" },
    CriKeys { kind: "io.kubernetes.cri.container-type", name: "io.kubernetes.cri.container-name" },
];

/// The family of the engine, as far as it changes what a key means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// containerd's CRI or CRI-O: a pod's container.
    Cri,
    /// docker, podman, ctr, or a bundle run by hand.
    Other,
}

impl Container {
    /// A container with these annotations and `NAME=value` entries, and without mounts.
    pub fn new(annotations: BTreeMap<String, String>, env: Vec<String>) -> Self {
        Self { annotations, env, mount_targets: Vec::new() }
    }

    /// The container of this config.json. A part of an unexpected kind holds no request; the low-level runtime will
    /// say what it thinks of it.
    pub fn from_json(json: &Value) -> Self {
        let annotations = json.get("annotations").and_then(Value::as_object).into_iter().flatten();
        let text = |(key, value): (&String, &Value)| Some((key.clone(), value.as_str()?.to_owned()));
        let env = json.pointer("/process/env").and_then(Value::as_array).into_iter().flatten();
        let mounts = json.get("mounts").and_then(Value::as_array).into_iter().flatten();
        let targets = mounts.filter_map(|mount| mount.get("destination")?.as_str());
        Self {
            annotations: annotations.filter_map(text).collect(),
            env: env.filter_map(Value::as_str).map(str::to_owned).collect(),
            mount_targets: targets.map(str::to_owned).collect(),
        }
    }

    /// The annotations.
    pub fn annotations(&self) -> &BTreeMap<String, String> {
        &self.annotations
    }

    /// Which family of engines wrote the file. podman sets other `io.kubernetes.cri-o.*` keys, so the prefix proves
    /// nothing.
    pub fn engine(&self) -> Engine {
        if self.cri().is_some() { Engine::Cri } else { Engine::Other }
    }

    /// The keys of the CRI engine that wrote the file. CRI-O's count first: it passes every annotation of a pod, those under
    /// containerd's names included, where containerd passes none but the patterns that its settings list.
    fn cri(&self) -> Option<&'static CriKeys> {
        CRI_KEYS.iter().find(|keys| self.annotations.contains_key(keys.kind))
    }

    /// Whether this is a pod's pause container, which passes unread.
    pub fn is_sandbox(&self) -> bool {
        let kind = self.cri().and_then(|keys| self.annotations.get(keys.kind));
        kind.is_some_and(|kind| kind == "sandbox")
    }

    /// The container's name inside its pod.
    pub(crate) fn name_in_pod(&self) -> Option<&str> {
        self.cri().and_then(|keys| self.annotations.get(keys.name)).map(String::as_str)
    }

    /// Variables that switch other GPU-sharing systems off, each once. They switch nothing off here, which whoever set them
    /// may like to learn.
    pub fn foreign_switches(&self) -> impl Iterator<Item = &'static str> {
        let set = |switch: &&str| self.env().any(|(name, _)| name == *switch);
        FOREIGN_SWITCHES.into_iter().filter(set)
    }

    /// All environment entries that have a `=`, in order, doubles included.
    pub(crate) fn env(&self) -> impl Iterator<Item = (&str, &str)> {
        self.env.iter().filter_map(|entry| entry.split_once('='))
    }

    /// Where something is mounted, as written.
    pub(crate) fn mount_targets(&self) -> impl Iterator<Item = &str> {
        self.mount_targets.iter().map(String::as_str)
    }
}
