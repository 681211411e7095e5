//! Finds the GPUs that the engine was handed for the container: device nodes in the bundle, and the mounts by
//! which NVIDIA's device plugin names GPUs (strategy `volume-mounts`). Neither an image nor a pod's
//! specification can write a device node. Such a mount has /dev/null of the host as its source. A pod that
//! may mount paths of the host can imitate one, but where nodes were handed over it names no GPU beyond them.

use gpushare_inventory::Gpu;

use crate::sources::names::selectors;
use gpushare_claims::{
    Claim, DeviceSelector, IndexMeaning, Mount, NodeGpus, RequestError, Word, Words, contains,
};

/// The name for device nodes in messages: where they are in config.json.
pub(crate) const NODES: &str = "linux.devices";
/// Each mount below this folder names a GPU. This is a convention of NVIDIA's toolkit and device plugin.
pub(crate) const VOLUMES: &str = "/var/run/nvidia-container-devices";
/// The remedy where the settings forbid such mounts.
pub(crate) const UNREAD_VOLUMES: &str = "requests by volume mounts are not read here: have the administrator set \
     request.volume_mounts = true, or name GPUs by index or UUID (device plugin: deviceListStrategy envvar)";

/// Whether the engine was handed any GPU. It reads only the bundle.
pub(crate) fn is_handed(words: &Words) -> bool {
    !words.container.handed().is_empty() || has_volumes(words)
}

/// Whether a mount names a GPU. By the settings this is a request or an error.
pub(crate) fn has_volumes(words: &Words) -> bool {
    words.container.mounts().iter().any(|mount| named_by(mount).is_some())
}

/// The GPUs that were handed over, and the first word that says so. Nodes count before mounts. The order of
/// the GPUs has no meaning.
pub(crate) fn gpus<'a>(
    words: &Words<'a>,
    node: NodeGpus<'a>,
) -> Result<Option<(Word<'a>, Vec<&'a Gpu>)>, RequestError> {
    Ok(named(words, node)?.into_iter().next())
}

type Named<'a> = (Word<'a>, Vec<&'a Gpu>);

/// The GPUs of the nodes and those of the mounts, as separate items; an empty group is left out.
fn named<'a>(words: &Words<'a>, node: NodeGpus<'a>) -> Result<Vec<Named<'a>>, RequestError> {
    let nodes = words.container.handed().into_iter();
    let nodes = nodes.map(|(path, minor)| (Word::handed(NODES, path), DeviceSelector::Minor(minor)));
    let both = [nodes.collect(), volumes(words)?];
    both.into_iter().filter(|words| !words.is_empty()).map(|words| together(words, node)).collect()
}

fn together<'a>(
    words: Vec<(Word<'a>, DeviceSelector)>,
    node: NodeGpus<'a>,
) -> Result<Named<'a>, RequestError> {
    let mut known: Vec<&Gpu> = Vec::new();
    for (word, selector) in &words {
        let gpus = node.find_each(word.key, std::slice::from_ref(selector))?;
        let new: Vec<&Gpu> = gpus.into_iter().filter(|gpu| !contains(&known, gpu)).collect();
        known.extend(new);
    }
    Ok((words[0].0, known))
}

/// The GPUs that mounts name.
///
/// # Errors
/// When the settings forbid such mounts, or the name is malformed.
pub(crate) fn volumes<'a>(words: &Words<'a>) -> Result<Vec<(Word<'a>, DeviceSelector)>, RequestError> {
    let mut named = Vec::new();
    for (target, name) in
        words.container.mounts().iter().filter_map(|mount| Some((mount.target.as_str(), named_by(mount)?)))
    {
        let word = Word::handed("mount", target);
        if !words.policy.volume_mounts {
            return Err(word.wrong(UNREAD_VOLUMES));
        }
        let selectors = selectors(word, std::iter::once(name), IndexMeaning::Pci)?;
        named.extend(selectors.into_iter().map(|selector| (word, selector)));
    }
    Ok(named)
}

/// The name of the GPU if this is one of the device plugin's mounts.
fn named_by(mount: &Mount) -> Option<&str> {
    below(&mount.target).filter(|_| mount.source == "/dev/null")
}

/// The path below [`VOLUMES`]; `None` elsewhere and for the folder itself, which is never a mount. `/run` is
/// accepted too, since `/var/run` is a link to it.
fn below(target: &str) -> Option<&str> {
    let tail = VOLUMES.trim_start_matches("/var");
    let folder = target.strip_prefix("/var").unwrap_or(target);
    folder.strip_prefix(tail)?.strip_prefix('/').filter(|rest| !rest.is_empty())
}

/// The claims: the container has these GPUs and no other.
pub(crate) fn claims<'a>(words: &Words<'a>, node: NodeGpus<'a>) -> Result<Vec<Claim>, RequestError> {
    Ok(named(words, node)?.into_iter().map(|(word, gpus)| Claim::by(word).naming(&gpus)).collect())
}
