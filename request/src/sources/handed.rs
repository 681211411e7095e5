//! GPUs that the engine was handed for the container: device nodes in the bundle, and the mounts by which NVIDIA's device
//! plugin names GPUs (strategy `volume-mounts`). Neither an image nor a pod's specification can write a device node. Such a
//! mount is one of the host's /dev/null: a pod that may mount paths of the host can imitate it, and names no GPU beyond the
//! nodes that were handed over.

use gpushare_inventory::Gpu;

use crate::sources::names::selectors;
use gpushare_claims::{
    Claim, DeviceSelector, IndexMeaning, Mount, NodeGpus, RequestError, Word, Words, contains,
};

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
    words.container.mounts().iter().any(|mount| named_by(mount).is_some())
}

/// The GPUs that were handed over, and the first word for it. Their order says nothing.
pub(crate) fn gpus<'a>(
    words: &Words<'a>,
    node: NodeGpus<'a>,
) -> Result<Option<(Word<'a>, Vec<&'a Gpu>)>, RequestError> {
    Ok(named(words, node)?.into_iter().next())
}

type Named<'a> = (Word<'a>, Vec<&'a Gpu>);

/// The GPUs of the nodes, and those of the mounts.
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
/// When the settings have nobody read them.
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

/// What a mount of the plugin's names.
fn named_by(mount: &Mount) -> Option<&str> {
    below(&mount.target).filter(|_| mount.source == "/dev/null")
}

/// The path below the folder, which itself is mounted by nobody; `/run` is where `/var/run` leads.
fn below(target: &str) -> Option<&str> {
    let tail = VOLUMES.trim_start_matches("/var");
    let folder = target.strip_prefix("/var").unwrap_or(target);
    folder.strip_prefix(tail)?.strip_prefix('/').filter(|rest| !rest.is_empty())
}

/// What they say: these GPUs and no other.
pub(crate) fn claims<'a>(words: &Words<'a>, node: NodeGpus<'a>) -> Result<Vec<Claim>, RequestError> {
    Ok(named(words, node)?.into_iter().map(|(word, gpus)| Claim::by(word).naming(&gpus)).collect())
}
