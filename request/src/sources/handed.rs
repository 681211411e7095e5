//! GPUs that the engine was handed for the container: device nodes in the bundle, and the mounts by which NVIDIA's device
//! plugin names GPUs (strategy `volume-mounts`). Neither an image nor a pod's specification can write a device node.

use gpushare_inventory::Gpu;

use crate::claim::Claim;
use crate::error::RequestError;
use crate::gpus::{NodeGpus, contains, found};
use crate::grammar::DeviceSelector;
use crate::selector::IndexMeaning;
use crate::sources::names::selectors;
use crate::words::{Word, Words};

/// The key of device nodes in messages.
pub(crate) const NODES: &str = "linux.devices";
/// Mounts below this folder name GPUs, one each: NVIDIA's toolkit and device plugin know the convention.
pub(crate) const VOLUMES: &str = "/var/run/nvidia-container-devices";
/// The remedy where the settings have nobody read them.
pub(crate) const UNREAD_VOLUMES: &str = "requests by volume mounts are not read here: have the administrator set \
     request.volume_mounts = true, or name GPUs by index or UUID (device plugin: deviceListStrategy envvar)";

/// Whether there is any. Looks at nothing but the bundle.
pub(crate) fn is_handed(words: &Words) -> bool {
    !words.container.handed().is_empty() || has_volumes(words)
}

/// Whether a mount names a GPU, which is a request or an error.
pub(crate) fn has_volumes(words: &Words) -> bool {
    words.container.mounts().iter().any(|mount| below(&mount.target).is_some())
}

/// The GPUs that were handed over, and the first word for it. Their order says nothing.
pub(crate) fn gpus<'a>(
    words: &Words<'a>,
    node: NodeGpus<'a>,
) -> Result<Option<(Word<'a>, Vec<&'a Gpu>)>, RequestError> {
    let mut all: Option<(Word, Vec<&Gpu>)> = None;
    let volumes = volumes(words)?.into_iter().map(|(word, selector)| (word, vec![selector]));
    for (word, selectors) in nodes(words).chain(volumes) {
        let gpus = found(node, word.key, &selectors)?;
        let (_, known) = all.get_or_insert((word, Vec::new()));
        let new: Vec<&Gpu> = gpus.into_iter().filter(|gpu| !contains(known, gpu)).collect();
        known.extend(new);
    }
    Ok(all)
}

fn nodes<'a>(words: &Words<'a>) -> impl Iterator<Item = (Word<'a>, Vec<DeviceSelector>)> + use<'a> {
    let nodes = words.container.handed().into_iter();
    nodes.map(|(path, minor)| (Word::handed(NODES, path), vec![DeviceSelector::Minor(minor)]))
}

/// The GPUs that mounts name.
///
/// # Errors
/// When the settings have nobody read them.
pub(crate) fn volumes<'a>(words: &Words<'a>) -> Result<Vec<(Word<'a>, DeviceSelector)>, RequestError> {
    let mut named = Vec::new();
    for (target, name) in words
        .container
        .mounts()
        .iter()
        .filter_map(|mount| Some((mount.target.as_str(), below(&mount.target)?)))
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

/// The path below the folder, which itself is mounted by nobody; `/run` is where `/var/run` leads.
fn below(target: &str) -> Option<&str> {
    let tail = VOLUMES.trim_start_matches("/var");
    let folder = target.strip_prefix("/var").unwrap_or(target);
    folder.strip_prefix(tail)?.strip_prefix('/').filter(|rest| !rest.is_empty())
}

/// What it says: these GPUs and no other.
pub(crate) fn claims<'a>(words: &Words<'a>, node: NodeGpus<'a>) -> Result<Vec<Claim>, RequestError> {
    Ok(gpus(words, node)?.map(|(word, gpus)| Claim::by(word).naming(&gpus)).into_iter().collect())
}
