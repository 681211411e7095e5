//! Finds the GPUs that the engine was handed for the container: device nodes in the bundle, and the mounts
//! with which NVIDIA's device plugin names GPUs (strategy `volume-mounts`). Neither an image nor a pod's
//! specification can write a device node. The plugin's mounts have the host's /dev/null as their source. A
//! pod that may mount host paths can imitate one, but if nodes were handed over, a mount adds no GPU beyond
//! them.

use gpushare_inventory::{DeviceNode, Gpu};

use crate::sources::names::{Gpus, selector};
use gpushare_claims::{
    Claim, DeviceSelector, IndexMeaning, Mount, NodeGpus, RequestError, Word, Words, each_once,
};

/// The name for device nodes in messages: their place in config.json.
pub(crate) const NODES: &str = "linux.devices";
/// Each mount below this folder names a GPU. This is a convention of NVIDIA's toolkit and device plugin.
pub(crate) const VOLUMES: &str = "/var/run/nvidia-container-devices";
/// The remedy if the settings forbid such mounts.
pub(crate) const UNREAD_VOLUMES: &str = "requests by volume mounts are not read here: have the administrator set \
     request.volume_mounts = true, or name GPUs by index or UUID (device plugin: deviceListStrategy envvar)";

/// Whether the engine was handed any GPU: by a node, or by a mount, which is a request or an error depending
/// on the settings. Reads only the bundle.
pub(crate) fn is_handed(words: &Words) -> bool {
    let mut mounts = words.container.mounts().iter();
    !words.container.handed().is_empty() || mounts.any(|mount| named_by(mount).is_some())
}

/// The GPUs that were handed over, and the first word that says so. Nodes take precedence over mounts. The
/// order of the GPUs has no meaning.
pub(crate) fn gpus<'a>(words: &Words<'a>, node: NodeGpus<'a>) -> Result<Option<Gpus<'a>>, RequestError> {
    Ok(named(words, node)?.into_iter().next())
}

/// The GPUs of the nodes and those of the mounts, as separate items; an empty group is left out.
fn named<'a>(words: &Words<'a>, node: NodeGpus<'a>) -> Result<Vec<Gpus<'a>>, RequestError> {
    let capabilities = words.container.handed_capabilities();
    let nodes = words.container.handed().into_iter().flat_map(|(path, minor)| {
        let word = Word::handed(NODES, path);
        gpu_or_parts(minor, &capabilities, node).into_iter().map(move |selector| (word, selector))
    });
    let both = [nodes.collect(), volumes(words)?];
    let together = |words: Vec<(Word<'a>, DeviceSelector)>| {
        let gpus = each_once(words.iter().map(|(word, selector)| node.find(word.key, selector)))?;
        Ok((words[0].0, gpus))
    };
    both.into_iter().filter(|words| !words.is_empty()).map(together).collect()
}

/// The devices that the node of a GPU with this minor hands over: the GPU or, if it is divided, the instances
/// whose own nodes are also present.
fn gpu_or_parts(minor: u32, capabilities: &[u32], node: NodeGpus) -> Vec<DeviceSelector> {
    let opens = |gpu: &&Gpu| {
        let has = |node: &DeviceNode| capabilities.contains(&node.minor);
        gpu.minor == minor && gpu.instance.as_ref().is_some_and(|part| part.nodes.iter().all(has))
    };
    let parts: Vec<_> = node.0.iter().filter(opens).map(|gpu| DeviceSelector::Uuid(gpu.uuid)).collect();
    if parts.is_empty() { vec![DeviceSelector::Minor(minor)] } else { parts }
}

/// The GPUs that mounts name.
///
/// # Errors
/// If the settings forbid such mounts, or the name is malformed.
pub(crate) fn volumes<'a>(words: &Words<'a>) -> Result<Vec<(Word<'a>, DeviceSelector)>, RequestError> {
    let mut named = Vec::new();
    let mounts = words.container.mounts().iter();
    for (target, name) in mounts.filter_map(|mount| Some((mount.target.as_str(), named_by(mount)?))) {
        let word = Word::handed("mount", target);
        if !words.policy.volume_mounts {
            return Err(word.wrong(UNREAD_VOLUMES));
        }
        named.push((word, selector(word, name, IndexMeaning::Pci)?));
    }
    Ok(named)
}

/// The name of the GPU if this is one of the device plugin's mounts.
fn named_by(mount: &Mount) -> Option<&str> {
    below(&mount.target).filter(|_| mount.source == "/dev/null")
}

/// The path below [`VOLUMES`]; `None` elsewhere and for the folder itself, which is never a mount. Accepts
/// `/run` too, since `/var/run` is a link to it.
fn below(target: &str) -> Option<&str> {
    let tail = VOLUMES.trim_start_matches("/var");
    let folder = target.strip_prefix("/var").unwrap_or(target);
    folder.strip_prefix(tail)?.strip_prefix('/').filter(|rest| !rest.is_empty())
}

/// The claims: the container has these GPUs and no others.
pub(crate) fn claims<'a>(words: &Words<'a>, node: NodeGpus<'a>) -> Result<Vec<Claim>, RequestError> {
    Ok(named(words, node)?.into_iter().map(|(word, gpus)| Claim::by(word).naming(&gpus)).collect())
}
