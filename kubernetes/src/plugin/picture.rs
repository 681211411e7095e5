//! The cluster's GPUs and the shares of them, as ResourceSlices and claims tell.

use std::collections::BTreeMap;

use gpushare_inventory::DeviceMemory;
use gpushare_request::kubernetes_quantity;
use k8s_openapi::api::resource::v1::{
    Device, DeviceRequestAllocationResult, DeviceTaint, ResourceClaim, ResourceSlice, ResourceSliceSpec,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde::Serialize;

use crate::node::{CORES, DRIVER, MEMORY};

/// All of it.
#[derive(Debug, Default)]
pub struct Picture {
    /// By node and index.
    pub gpus: Vec<Gpu>,
    /// By namespace and claim.
    pub shares: Vec<Share>,
    /// Whether the shares of all namespaces are counted.
    pub sees_all: bool,
    /// Whether the GPUs are known.
    pub sees_gpus: bool,
}

/// One GPU, and how much of it is given.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Gpu {
    /// The node's name.
    pub node: String,
    /// The device's name in the node's slice.
    pub device: String,
    pub index: i64,
    pub model: String,
    pub memory_bytes: u64,
    pub memory_given_bytes: u64,
    /// What a claim gets that names no memory.
    pub memory_default_bytes: u64,
    pub cores_percent: u64,
    pub cores_given_percent: u64,
    /// What a claim gets that names no compute; 0 is no limit.
    pub cores_default_percent: u64,
    pub shares: usize,
    /// Why nothing new is placed on it: the keys of its taints.
    pub taints: Vec<String>,
}

/// One share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Share {
    pub namespace: String,
    /// The claim's name; empty where the pod asks by countable resources.
    pub claim: String,
    /// The names of those resources.
    pub resources: String,
    /// The pods that may use it.
    pub pods: Vec<String>,
    pub node: String,
    pub device: String,
    pub index: Option<i64>,
    pub memory_bytes: u64,
    pub cores_percent: u64,
}

impl Gpu {
    /// Whether the scheduler gives shares of it to claims without a toleration.
    pub fn is_open(&self) -> bool {
        self.taints.is_empty()
    }

    /// Why it is not open, in a word where a taint is gpushare's own.
    pub fn state(&self) -> String {
        let own =
            |key: &String| key.strip_prefix(DRIVER).and_then(|key| key.strip_prefix('/')).map(str::to_owned);
        let words = self.taints.iter().map(|key| own(key).unwrap_or_else(|| key.clone()));
        if self.is_open() { "open".to_owned() } else { words.collect::<Vec<_>>().join(", ") }
    }

    /// Bytes that are not given.
    pub fn free(&self) -> u64 {
        self.memory_bytes.saturating_sub(self.memory_given_bytes)
    }

    /// Percent of the compute that are not given.
    pub fn free_cores(&self) -> u64 {
        self.cores_percent.saturating_sub(self.cores_given_percent)
    }
}

impl Picture {
    /// The picture that these make. Of a pool only the newest generation counts.
    pub fn of(slices: &[ResourceSlice], claims: &[ResourceClaim]) -> Self {
        let mut newest: BTreeMap<&str, i64> = BTreeMap::new();
        let specs = || slices.iter().map(|slice| &slice.spec).filter(|spec| spec.driver == DRIVER);
        for spec in specs() {
            let generation = newest.entry(&spec.pool.name).or_insert(spec.pool.generation);
            *generation = spec.pool.generation.max(*generation);
        }
        let current = specs().filter(|spec| newest.get(&*spec.pool.name) == Some(&spec.pool.generation));
        let devices = current.flat_map(|spec| spec.devices.iter().flatten().map(move |its| gpu(spec, its)));
        let mut gpus: Vec<Gpu> = devices.collect();
        gpus.sort_by(|one, other| (&one.node, one.index).cmp(&(&other.node, other.index)));
        let mut shares: Vec<Share> = claims.iter().flat_map(shares_of).collect();
        for share in &mut shares {
            let its = gpus.iter_mut().find(|gpu| gpu.node == share.node && gpu.device == share.device);
            if let Some(gpu) = its {
                share.index = Some(gpu.index);
                gpu.memory_given_bytes += share.memory_bytes;
                gpu.cores_given_percent += share.cores_percent;
                gpu.shares += 1;
            }
        }
        shares.sort_by(|one, other| (&one.namespace, &one.claim).cmp(&(&other.namespace, &other.claim)));
        Self { gpus, shares, sees_all: true, sees_gpus: true }
    }

    /// A line for each GPU.
    pub fn gpus_table(&self) -> String {
        let rows = self.gpus.iter().map(|gpu| {
            [
                gpu.node.clone(),
                gpu.index.to_string(),
                gpu.model.clone(),
                size(gpu.memory_given_bytes),
                size(gpu.memory_bytes),
                format!("{} %", gpu.cores_given_percent),
                gpu.shares.to_string(),
                gpu.state(),
            ]
        });
        table(["NODE", "GPU", "MODEL", "GIVEN", "MEMORY", "COMPUTE", "SHARES", "STATE"], rows)
    }

    /// A line for each share of the namespaces that `is_shown` chooses.
    pub fn shares_table(&self, is_shown: impl Fn(&str) -> bool) -> String {
        let shares = self.shares.iter().filter(|share| is_shown(&share.namespace));
        let rows = shares.map(|share| {
            [
                share.namespace.clone(),
                if share.claim.is_empty() { share.resources.clone() } else { share.claim.clone() },
                if share.pods.is_empty() { "-".to_owned() } else { share.pods.join(", ") },
                share.node.clone(),
                share.index.map_or_else(|| share.device.clone(), |index| index.to_string()),
                size(share.memory_bytes),
                if share.cores_percent == 0 { "-".to_owned() } else { format!("{} %", share.cores_percent) },
            ]
        });
        table(["NAMESPACE", "BY", "PODS", "NODE", "GPU", "MEMORY", "COMPUTE"], rows)
    }
}

/// Bytes for people.
pub fn size(bytes: u64) -> String {
    DeviceMemory::from_bytes(bytes).to_string()
}

/// The amount of a capacity; 0 where it is not stated.
pub fn amount(capacity: &BTreeMap<String, Quantity>, name: &str) -> u64 {
    capacity.get(name).and_then(|Quantity(text)| kubernetes_quantity(text)).unwrap_or(0)
}

fn gpu(spec: &ResourceSliceSpec, device: &Device) -> Gpu {
    let attribute = |name: &str| device.attributes.as_ref().and_then(|all| all.get(name));
    let capacity = |name: &str| device.capacity.as_ref().and_then(|all| all.get(name));
    let read = |quantity: Option<&Quantity>| quantity.and_then(|it| kubernetes_quantity(&it.0)).unwrap_or(0);
    // Of the other effects none keeps a claim away.
    let keeps = |taint: &&DeviceTaint| ["NoSchedule", "NoExecute"].contains(&&*taint.effect);
    let taints = device.taints.iter().flatten().filter(keeps).map(|taint| taint.key.clone());
    let default = |name: &str| capacity(name).and_then(|it| it.request_policy.as_ref()?.default.as_ref());
    Gpu {
        node: spec.node_name.clone().unwrap_or_else(|| spec.pool.name.clone()),
        device: device.name.clone(),
        index: attribute("index").and_then(|value| value.int).unwrap_or(-1),
        model: attribute("model").and_then(|value| value.string.clone()).unwrap_or_default(),
        memory_bytes: read(capacity(MEMORY).map(|memory| &memory.value)),
        memory_default_bytes: read(default(MEMORY)),
        cores_default_percent: read(default(CORES)),
        cores_percent: read(capacity(CORES).map(|cores| &cores.value)),
        taints: taints.collect(),
        ..Gpu::default()
    }
}

fn shares_of(claim: &ResourceClaim) -> Vec<Share> {
    let status = claim.status.as_ref();
    let allocation = status.and_then(|status| status.allocation.as_ref()?.devices.as_ref());
    let results = allocation.and_then(|devices| devices.results.as_ref()).into_iter().flatten();
    let consumers = status.and_then(|status| status.reserved_for.as_ref()).into_iter().flatten();
    let pods: Vec<String> = consumers.map(|consumer| consumer.name.clone()).collect();
    let text = |part: &Option<String>| part.clone().unwrap_or_default();
    let share = |result: &DeviceRequestAllocationResult| {
        let consumed = result.consumed_capacity.clone().unwrap_or_default();
        Share {
            namespace: text(&claim.metadata.namespace),
            claim: text(&claim.metadata.name),
            resources: String::new(),
            pods: pods.clone(),
            node: result.pool.clone(),
            device: result.device.clone(),
            index: None,
            memory_bytes: amount(&consumed, MEMORY),
            cores_percent: amount(&consumed, CORES),
        }
    };
    results.filter(|result| result.driver == DRIVER).map(share).collect()
}

/// Columns as wide as their widest cell. The API server lets no control character into these texts, but for
/// what a node's agent writes as a model.
fn table<const COLUMNS: usize>(
    headings: [&str; COLUMNS],
    rows: impl Iterator<Item = [String; COLUMNS]>,
) -> String {
    let clean = |cell: String| cell.chars().filter(|c| !c.is_control()).collect::<String>();
    let rows: Vec<_> =
        std::iter::once(headings.map(str::to_owned)).chain(rows).map(|row| row.map(clean)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; COLUMNS] = std::array::from_fn(width);
    let line = |row: &[String; COLUMNS]| {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}"));
        format!("{}\n", cells.collect::<Vec<_>>().join("  ").trim_end())
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
pub mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// The claim `team/NAME` with a share of each of these GPUs of `node-a`, for the pod of its name.
    pub fn claim(name: &str, gpus: &[usize], memory: &str) -> ResourceClaim {
        let result = |gpu: &usize| {
            json!({"request": "gpu", "driver": DRIVER, "pool": "node-a", "device": format!("gpu-{gpu}"),
                "consumedCapacity": {"memory": memory, "cores": "40"}})
        };
        let results: Vec<Value> = gpus.iter().map(result).collect();
        let status = match results.is_empty() {
            true => json!({}),
            false => json!({"allocation": {"devices": {"results": results}},
                "reservedFor": [{"resource": "pods", "name": name, "uid": "u"}]}),
        };
        let exactly = json!({"deviceClassName": DRIVER, "capacity": {"requests": {"memory": memory}}});
        serde_json::from_value(json!({"metadata": {"name": name, "namespace": "team"},
            "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}, "status": status}))
        .unwrap()
    }

    /// The slice of `node-a`: two GPUs of 80 GiB.
    pub fn slice(generation: i64) -> ResourceSlice {
        let device = |number: i64| {
            json!({"name": format!("gpu-{number}"),
                "attributes": {"index": {"int": number}, "model": {"string": "NVIDIA H100"}},
                "capacity": {"cores": {"value": "100"},
                    "memory": {"value": "80Gi", "requestPolicy": {"default": "20Gi"}}}})
        };
        serde_json::from_value(json!({"metadata": {}, "spec": {"driver": DRIVER, "nodeName": "node-a",
            "pool": {"name": "node-a", "generation": generation, "resourceSliceCount": 1},
            "devices": [device(0), device(1)]}}))
        .unwrap()
    }

    #[test]
    fn shares_are_counted_on_their_gpus() {
        let claims = [claim("b", &[1], "30Gi"), claim("a", &[0, 1], "20Gi"), claim("waiting", &[], "70Gi")];
        let picture = Picture::of(&[slice(1), slice(2)], &claims);
        let given: Vec<_> =
            picture.gpus.iter().map(|gpu| (gpu.index, size(gpu.memory_given_bytes), gpu.shares)).collect();
        assert_eq!(given, [(0, "20 GiB".to_owned(), 1), (1, "50 GiB".to_owned(), 2)]);
        assert_eq!(
            picture.gpus_table(),
            "NODE    GPU  MODEL        GIVEN   MEMORY  COMPUTE  SHARES  STATE\n\
             node-a  0    NVIDIA H100  20 GiB  80 GiB  40 %     1       open\n\
             node-a  1    NVIDIA H100  50 GiB  80 GiB  80 %     2       open\n"
        );
        assert_eq!(
            picture.shares_table(|namespace| namespace == "team"),
            "NAMESPACE  BY  PODS  NODE    GPU  MEMORY  COMPUTE\n\
             team       a   a     node-a  0    20 GiB  40 %\n\
             team       a   a     node-a  1    20 GiB  40 %\n\
             team       b   b     node-a  1    30 GiB  40 %\n"
        );
        assert_eq!(picture.shares_table(|_| false).lines().count(), 1);
    }
}
