//! Elastic GPU agent: `GPU=<hash>` beside device nodes `/host/dev/elastic-gpu-<hash>-<i>`, whose minors are the GPUs'
//! (elastic-ai/elastic-gpu-agent pkg/plugins/gpushare.go).
//!
//! The amounts are in no channel of the bundle: the container gets the node's default share, or what an annotation of
//! gpushare's own says. The nodes are kubelet's; the pod's annotations with indexes say nothing beyond them.

use std::collections::{BTreeMap, BTreeSet};

use super::Dialect;
use crate::cards::Cards;
use crate::channel::Trust;
use crate::claim::Claim;
use crate::container::Node;
use crate::device_list::{lists, minor};
use crate::error::RequestError;
use crate::grammar::DeviceSelector;
use crate::nvidia::DEVICES;
use crate::quantity;
use crate::reading::{Reading, Said, conflict};

pub(super) static DIALECT: Dialect = Dialect { name: "elastic", detects, read, owns, by_position: false };

const HASH: &str = "GPU";
const NODE: &str = "/host/dev/elastic-gpu-";

/// All three, since other programs have a variable of that name, too.
fn detects(reading: &Reading) -> bool {
    let mut hashes = reading.named(HASH).map(|said| said.value).filter(|value| is_hash(value)).peekable();
    if hashes.peek().is_none() {
        return false; // as with nearly every bundle
    }
    // A bundle may hold a hundred thousand of each.
    let of_nodes: BTreeSet<&str> =
        nodes(reading).filter_map(|(_, name)| Some(name.split_once('-')?.0)).collect();
    hashes.any(|hash| of_nodes.contains(hash))
        && lists(reading.container).iter().any(|said| said.value == "none")
}

/// The list, too: it says `none` to keep NVIDIA's runtime away.
fn owns(key: &str) -> bool {
    matches!(key, HASH | DEVICES)
}

fn is_hash(text: &str) -> bool {
    text.len() == 8 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// The agent's nodes, each with what is behind the common part of its path.
fn nodes<'a>(reading: &Reading<'a>) -> impl Iterator<Item = (&'a Node, &'a str)> {
    let nodes = reading.container.nodes().iter();
    nodes.filter_map(|node| Some((node, node.path.strip_prefix(NODE)?)))
}

/// The agent has a plugin for compute and one for memory, each with a hash of its own: the GPUs of both are the container's,
/// and each index is one GPU.
fn read<'a>(reading: &Reading<'a>, cards: Cards<'a>) -> Result<Vec<Claim>, RequestError> {
    let mut found: BTreeMap<u64, (Said, u32)> = BTreeMap::new();
    for (node, name) in nodes(reading) {
        let said = Said { key: "linux.devices", value: &node.path, trust: Trust::Environment };
        let index = name
            .split_once('-')
            .filter(|(hash, _)| is_hash(hash))
            .and_then(|(_, index)| quantity::whole(index));
        let index = index
            .ok_or_else(|| said.wrong(format!("the agent's nodes are {NODE}<hash>-<index>: remove it")))?;
        let number = format!("{}:{}", node.major, node.minor);
        let minor = minor(node).ok_or_else(|| {
            said.wrong(format!(
                "{number} is no GPU's node (195:<minor>): delete the pod, and see the agent's log"
            ))
        })?;
        match found.get(&index) {
            Some((other, same)) if *same != minor => return Err(conflict(other, said)),
            _ => found.insert(index, (said, minor)),
        };
    }
    let Some((said, _)) = found.values().next().copied() else { return Ok(Vec::new()) };
    let find = |(said, minor): &(Said, u32)| cards.find(said.value, &DeviceSelector::Minor(*minor));
    let gpus = found.values().map(find).collect::<Result<Vec<_>, _>>()?;
    reading.note("Elastic GPU's amounts are not in the bundle: the node's default share counts where nothing else states one");
    Ok(vec![Claim::by(said).naming(&gpus)])
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use serde_json::{Value, json};

    use super::*;
    use crate::{Container, Policy};

    #[test]
    fn twenty_thousand_hashes_and_as_many_nodes_of_others_are_looked_at_in_no_time() {
        const MANY: u32 = 20_000;
        let env = (0..MANY).map(|n| format!("GPU={n:08x}")).chain(["NVIDIA_VISIBLE_DEVICES=none".to_owned()]);
        let node = |n| json!({"path": format!("{NODE}{n:08x}-0"), "major": 195, "minor": 0});
        let nodes: Vec<Value> = (MANY..2 * MANY).map(node).collect();
        let env: Vec<String> = env.collect();
        let bundle = json!({"process": {"env": env}, "linux": {"devices": nodes}});
        let (container, policy) = (Container::from_json(&bundle), Policy::default());
        let start = Instant::now();
        assert!(!detects(&Reading::new(&container, &policy)));
        assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    }
}
