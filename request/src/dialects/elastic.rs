//! Elastic GPU agent: `GPU=<hash>` and device nodes `/host/dev/elastic-gpu-<hash>-<i>`, which have the GPUs'
//! minors (elastic-ai/elastic-gpu-agent pkg/plugins/gpushare.go).
//!
//! The bundle does not hold the amounts. The container gets the node's default share, or the share that a
//! gpushare annotation states. kubelet hands over the nodes. The pod's annotations with indexes are not read;
//! the nodes identify the GPUs.

use std::collections::{BTreeMap, BTreeSet};

use crate::dialect::{Dialect, Speech};
use crate::quantity;
use crate::sources::handed::NODES;
use crate::sources::list::lists;
use crate::sources::names::DEVICES;
use gpushare_claims::{
    Claim, DeviceSelector, Node, NodeGpus, RequestError, Word, Words, conflict, gpu_minor,
};

/// The dialect owns the list of GPUs: the agent writes `none` there to keep NVIDIA's runtime away.
pub(super) static DIALECT: Dialect =
    Dialect { name: "elastic", speech, read, owns, over: &["nvidia-plain"], ..Dialect::PLAIN };

const HASH: &str = "GPU";
const NODE: &str = "/host/dev/elastic-gpu-";

/// Asks only if the variable, a node with its hash and the list `none` are all present. Other programs also
/// use a variable `GPU`.
fn speech(words: &Words) -> Speech {
    let mut hashes = words.named(HASH).map(|word| word.value).filter(|value| is_hash(value)).peekable();
    if hashes.peek().is_none() {
        return Speech::Silent; // true for nearly every bundle
    }
    // A set, since a bundle may hold a hundred thousand of each.
    let of_nodes: BTreeSet<&str> =
        nodes(words).filter_map(|(_, name)| Some(name.split_once('-')?.0)).collect();
    let is_none = lists(words).iter().any(|list| list.value == "none");
    Speech::asking(hashes.any(|hash| of_nodes.contains(hash)) && is_none)
}

fn owns(key: &str) -> bool {
    matches!(key, HASH | DEVICES)
}

fn is_hash(text: &str) -> bool {
    text.len() == 8 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// The agent's device nodes, each with its path after the common prefix.
fn nodes<'a>(words: &Words<'a>) -> impl Iterator<Item = (&'a Node, &'a str)> {
    let nodes = words.container.nodes().iter();
    nodes.filter_map(|node| Some((node, node.path.strip_prefix(NODE)?)))
}

/// Reads the GPUs from the nodes. The agent has one plugin for compute and one for memory, each with its own
/// hash. The container has the GPUs of both, and nodes with the same index must be the same GPU.
fn read<'a>(words: &Words<'a>, node: NodeGpus<'a>) -> Result<Vec<Claim>, RequestError> {
    let mut found: BTreeMap<u64, (Word, u32)> = BTreeMap::new();
    for (device, name) in nodes(words) {
        let word = Word::handed(NODES, &device.path);
        let index = name
            .split_once('-')
            .filter(|(hash, _)| is_hash(hash))
            .and_then(|(_, index)| quantity::whole(index));
        let index = index
            .ok_or_else(|| word.wrong(format!("the agent's nodes are {NODE}<hash>-<index>: remove it")))?;
        let number = format!("{}:{}", device.major, device.minor);
        let minor = gpu_minor(device).ok_or_else(|| {
            word.wrong(format!(
                "{number} is no GPU's node (195:<minor>): delete the pod, and see the agent's log"
            ))
        })?;
        match found.get(&index) {
            Some((other, same)) if *same != minor => return Err(conflict(other, word)),
            _ => found.insert(index, (word, minor)),
        };
    }
    let Some((word, _)) = found.values().next().copied() else { return Ok(Vec::new()) };
    let find = |(word, minor): &(Word, u32)| node.find(word.value, &DeviceSelector::Minor(*minor));
    let gpus = found.values().map(find).collect::<Result<Vec<_>, _>>()?;
    let note = "Elastic GPU's amounts are not in the bundle: the node's default share counts where nothing else states one";
    Ok(vec![Claim::by(word).naming(&gpus).noting([note.to_owned()])])
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use serde_json::{Value, json};

    use super::*;
    use gpushare_claims::{Container, Policy};

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
        assert_eq!(speech(&Words::new(&container, &policy)), Speech::Silent);
        assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    }
}
