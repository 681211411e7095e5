//! How often each kind of pod is there: by that a policy looks ahead.

use std::collections::{BTreeMap, HashMap};

use gpushare_placement::{Fill, Needs, Policy, Task};

use super::{State, rounded};
use crate::gpus::NodeGpus;

impl State {
    /// How often each kind of pod is there, for a policy that looks ahead. All GPUs are taken to be like the
    /// most frequent ones.
    pub fn demand(&self) -> gpushare_placement::Demand {
        let with_gpus = || self.nodes.iter().filter_map(|node| Some((node.gpus.as_ref()?, node.terms?)));
        let mut counts: HashMap<(usize, u64), (usize, &NodeGpus)> = HashMap::new();
        for (gpus, terms) in with_gpus() {
            if let Some(first) = gpus.gpus.first() {
                counts.entry((terms, first.memory)).or_insert((0, gpus)).0 += 1;
            }
        }
        let usual = counts.into_iter().max_by_key(|((terms, memory), (count, _))| (*count, *terms, *memory));
        let Some(((terms, _), (_, gpus))) = usual else { return Vec::new() };
        let Some(gpu) = gpus.machine(0).gpus.first().copied() else { return Vec::new() };
        let mut kinds: BTreeMap<Task, f64> = BTreeMap::new();
        for tracked in self.pods.values() {
            let Ok((needs, _)) = self.terms[terms].needs(&tracked.asking) else { continue };
            let needs = Needs { cpu: rounded(tracked.cpu), ..needs };
            *kinds.entry(needs.task(&gpu)).or_default() += 1.0;
        }
        let mut kinds: Vec<(Task, f64)> = kinds.into_iter().collect();
        kinds.sort_by(|one, other| other.1.total_cmp(&one.1).then(one.0.cmp(&other.0)));
        kinds.truncate(FREQUENT);
        kinds
    }
}

/// How many kinds of pods a policy looks ahead by: the most frequent ones.
const FREQUENT: usize = 400;

/// The policy that looks ahead by these kinds.
pub fn looking_ahead(demand: &gpushare_placement::Demand) -> Box<dyn Policy + Send> {
    Box::new(Fill::new(demand))
}
