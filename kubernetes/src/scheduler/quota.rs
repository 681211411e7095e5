//! What namespaces may have of GPUs in all, as Tencent's gpu-quota-admission has it: a ConfigMap says for
//! each namespace how many GPUs of which model, and of which pools of nodes.
//!
//! Pods count that are bound, and those whose binding is asked for. What a namespace has already stays; more
//! is refused. A namespace without an entry is not bounded.

use std::collections::{BTreeMap, HashMap};

use gpushare_inventory::DeviceMemory;
use gpushare_placement::{Part, Share};
use gpushare_request::kubernetes_quantity;
use k8s_openapi::api::core::v1::ConfigMap;
use serde::Deserialize;
use serde_json::Value;

use super::state::{State, Wanted};
use crate::asks::Asking;
use crate::gpus::{NodeGpus, ShownGpu};

/// The key of the ConfigMap.
const KEY: &str = "gpu_quota";
/// The name that stands for all models together.
const ALL: &str = "*";

/// What a ConfigMap says.
#[derive(Default)]
pub struct Quota {
    /// Namespace and name of the ConfigMap.
    name: String,
    /// By namespace; the error of a ConfigMap that is none, before one was.
    bounds: Option<Result<BTreeMap<String, Bounds>, String>>,
}

/// What one namespace may have, by model.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
struct Bounds {
    /// Whole GPUs' worth of compute.
    #[serde(default)]
    quota: Option<BTreeMap<String, u64>>,
    /// Percent of compute.
    #[serde(default)]
    cores: Option<BTreeMap<String, u64>>,
    /// Memory, as a quantity.
    #[serde(default, deserialize_with = "quantities")]
    memory: Option<BTreeMap<String, u64>>,
    /// Shares of GPUs.
    #[serde(default)]
    shares: Option<BTreeMap<String, u64>>,
    /// The pools of nodes that it may use; none is all of them.
    #[serde(default)]
    pool: Option<Vec<String>>,
}

fn quantities<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<BTreeMap<String, u64>>, D::Error> {
    let read: Option<BTreeMap<String, Value>> = Option::deserialize(from)?;
    let quantity = |(model, value): (String, Value)| {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let bytes = kubernetes_quantity(&text);
        let wrong = || serde::de::Error::custom(format!("{text:?} is no amount of memory, as 160Gi"));
        Ok((model, bytes.ok_or_else(wrong)?))
    };
    read.map(|map| map.into_iter().map(quantity).collect()).transpose()
}

/// What pods have of GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Used {
    cores: u64,
    memory: u64,
    shares: u64,
}

/// One of the amounts that are bounded.
struct Kind<'a> {
    bound: &'a Option<BTreeMap<String, u64>>,
    /// What one of the bound is.
    times: u64,
    of: fn(&Used) -> u64,
    what: &'static str,
    written: &'a dyn Fn(u64) -> String,
}

impl Used {
    fn and(self, other: Self) -> Self {
        Self {
            cores: self.cores.saturating_add(other.cores),
            memory: self.memory.saturating_add(other.memory),
            shares: self.shares.saturating_add(other.shares),
        }
    }
}

impl Quota {
    /// Says from now on what the ConfigMap `name` says. One that cannot be read changes nothing, and bounds
    /// everything where none could be read before.
    pub fn learn(&mut self, name: &str, map: Option<&ConfigMap>) {
        name.clone_into(&mut self.name);
        let Some(map) = map else {
            if !name.is_empty() {
                tracing::warn!(name, "there is no such ConfigMap: no namespace is bounded");
            }
            self.bounds = None;
            return;
        };
        match read(map) {
            Ok(bounds) => {
                tracing::info!(name, namespaces = bounds.len(), "the quotas of namespaces are known");
                self.bounds = Some(Ok(bounds));
            }
            Err(error) => {
                tracing::error!(name, error, "the ConfigMap says no quota: what was known before holds");
                if !matches!(self.bounds, Some(Ok(_))) {
                    self.bounds = Some(Err(error));
                }
            }
        }
    }

    /// For each of these nodes why the pod's namespace may not have there what it wants.
    pub fn refusals(
        &self,
        state: &State,
        labels: &Labels,
        namespace: &str,
        uid: &str,
        wanted: &Wanted,
        nodes: &[&str],
    ) -> Vec<Option<String>> {
        let bounds = match &self.bounds {
            None => return vec![None; nodes.len()],
            Some(Err(error)) => {
                let why = format!("the ConfigMap {} says no quota ({error}): mend it", self.name);
                return vec![Some(why); nodes.len()];
            }
            Some(Ok(all)) => match all.get(namespace) {
                None => return vec![None; nodes.len()],
                Some(bounds) => bounds,
            },
        };
        let used = used(state, labels, namespace, uid);
        let mut known: HashMap<(String, Used), Option<String>> = HashMap::new();
        let mut refusal = |node: &&str| {
            let its = state.labels(node);
            let model = its.and_then(|its| labels.model(its)).unwrap_or_default();
            let pool = its.and_then(|its| labels.pool(its)).unwrap_or_default();
            let pools = bounds.pool.iter().flatten().collect::<Vec<_>>();
            if !pools.is_empty() && !pools.contains(&&pool) {
                let pools = bounds.pool.iter().flatten().cloned().collect::<Vec<_>>().join(", ");
                return Some(format!(
                    "namespace {namespace} has a quota of GPUs on nodes of pool {pools} alone (ConfigMap {})",
                    self.name
                ));
            }
            let gpus = state.gpus(node)?;
            let wants = wants(&wanted.asking, gpus);
            let over = || self.over(bounds, namespace, &model, &used, wants);
            let key = (model.clone(), wants);
            known.entry(key).or_insert_with(over).clone()
        };
        nodes.iter().map(&mut refusal).collect()
    }

    /// What of the bounds would be exceeded on nodes of one model.
    fn over(
        &self,
        bounds: &Bounds,
        namespace: &str,
        model: &str,
        used: &BTreeMap<String, Used>,
        wanted: Used,
    ) -> Option<String> {
        let of_model = used.get(model).copied().unwrap_or_default();
        let of_all = used.values().fold(Used::default(), |sum, used| sum.and(*used));
        let percent = |percent: u64| format!("{percent} %");
        let gpus = |percent: u64| match percent % 100 {
            0 => format!("{}", percent / 100),
            _ => format!("{}.{:02}", percent / 100, percent % 100),
        };
        let size = |bytes: u64| DeviceMemory::from_bytes(bytes).to_string();
        let count = |count: u64| count.to_string();
        let kinds = [
            Kind { bound: &bounds.quota, times: 100, of: |used| used.cores, what: "GPUs", written: &gpus },
            Kind {
                bound: &bounds.cores,
                times: 1,
                of: |used| used.cores,
                what: "of compute",
                written: &percent,
            },
            Kind {
                bound: &bounds.memory,
                times: 1,
                of: |used| used.memory,
                what: "of GPU memory",
                written: &size,
            },
            Kind {
                bound: &bounds.shares,
                times: 1,
                of: |used| used.shares,
                what: "shares of GPUs",
                written: &count,
            },
        ];
        if kinds.iter().all(|kind| kind.bound.is_none()) {
            return Some(format!("namespace {namespace} has no quota of GPUs (ConfigMap {})", self.name));
        }
        for Kind { bound, times, of, what, written } in kinds {
            let Some(bound) = bound else { continue };
            let of_kind = |name: &str| if name == ALL { of_all } else { of_model };
            let its: Vec<(&str, u64)> = [model, ALL]
                .into_iter()
                .filter_map(|name| Some((name, bound.get(name)?.saturating_mul(times))))
                .collect();
            if its.is_empty() {
                let known: Vec<&str> = bound.keys().map(String::as_str).collect();
                return Some(format!(
                    "namespace {namespace} has no quota of GPUs of model {model:?}, but of {} (ConfigMap {})",
                    if known.is_empty() { "none".to_owned() } else { known.join(", ") },
                    self.name
                ));
            }
            for (name, most) in its {
                let has = of(&of_kind(name));
                if has.saturating_add(of(&wanted)) > most {
                    let of_model = if name == ALL { String::new() } else { format!(" of model {name}") };
                    return Some(format!(
                        "namespace {namespace} has {} of its quota of {} {what}{of_model}, and {} more are too many (ConfigMap {})",
                        written(has),
                        written(most),
                        written(of(&wanted)),
                        self.name
                    ));
                }
            }
        }
        None
    }
}

/// The labels of nodes that tell model and pool, the first that a node has.
#[derive(clap::Args, Clone, Debug)]
pub struct Labels {
    /// A label of nodes that tells the model of their GPUs to quotas; of several the first that a node has.
    #[arg(long = "model-label", value_name = "LABEL", default_values_t = [
        "tkestack.io/gpu-model".to_owned(), "gaia.tencent.com/gpu-model".to_owned(), "nvidia.com/gpu.product".to_owned()])]
    models: Vec<String>,
    /// A label of nodes that tells their pool to quotas; of several the first that a node has.
    #[arg(long = "pool-label", value_name = "LABEL", default_values_t = [
        "tkestack.io/gpu-pool".to_owned(), "gaia.tencent.com/gpu-pool".to_owned()])]
    pools: Vec<String>,
}

impl Labels {
    fn model(&self, of_node: &BTreeMap<String, String>) -> Option<String> {
        self.models.iter().find_map(|label| of_node.get(label)).cloned()
    }

    fn pool(&self, of_node: &BTreeMap<String, String>) -> Option<String> {
        self.pools.iter().find_map(|label| of_node.get(label)).cloned()
    }
}

fn read(map: &ConfigMap) -> Result<BTreeMap<String, Bounds>, String> {
    let text = map.data.as_ref().and_then(|data| data.get(KEY));
    let text = text.ok_or_else(|| format!("it has no key {KEY}"))?;
    serde_json::from_str(text).map_err(|error| format!("{KEY}: {error}"))
}

/// What the namespace has by model, without the pod itself.
fn used(state: &State, labels: &Labels, namespace: &str, uid: &str) -> BTreeMap<String, Used> {
    let mut used: BTreeMap<String, Used> = BTreeMap::new();
    for (node, gpus, asking) in state.bound_in(namespace, uid) {
        let model = state.labels(node).and_then(|its| labels.model(its)).unwrap_or_default();
        let its = used.entry(model).or_default();
        *its = its.and(wants(&asking, gpus));
    }
    used
}

/// What containers ask for, on GPUs like the first of a node.
fn wants(asking: &[Asking], gpus: &NodeGpus) -> Used {
    let terms = gpus.terms();
    let first = gpus.gpus.first().cloned().unwrap_or_default();
    let of = |ends_first: bool| {
        let its = asking.iter().filter(move |one| one.ends_first == ends_first);
        let (needs, _) = terms.held(&its.cloned().collect::<Vec<_>>());
        needs.shares.iter().chain(&needs.first).map(|share| of_share(share, &first)).collect::<Vec<Used>>()
    };
    let together = of(false).into_iter().fold(Used::default(), Used::and);
    of(true).into_iter().fold(together, |most, one| Used {
        cores: most.cores.max(one.cores),
        memory: most.memory.max(one.memory),
        shares: most.shares.max(one.shares),
    })
}

fn of_share(share: &Share, gpu: &ShownGpu) -> Used {
    let count = u64::from(share.gpus);
    let (memory, cores) = match share.part {
        Part::Whole => (gpu.per_share, 100),
        Part::Of(..) => {
            let (memory, cores) = share.part.of(&gpu.gpu());
            // Who limits no compute takes as much of a GPU as of its memory.
            let of_memory = (u128::from(memory) * 100).div_ceil(u128::from(gpu.per_share.max(1)));
            let of_memory = u64::try_from(of_memory).unwrap_or(100).min(100);
            (memory, if cores == 0 { of_memory } else { u64::from(cores) })
        }
    };
    Used { cores: cores * count, memory: memory.saturating_mul(count), shares: count }
}
