//! Names of GPUs in a list: the grammar that lists, mounts and other systems' keys share.

use crate::sources::qualified;
use gpushare_claims::{DeviceSelector, IndexMeaning, RequestError, Word, shortened};

/// The GPUs of a container.
const MOST: usize = 16;

/// The names of GPUs, each once.
pub(crate) fn selectors<'a>(
    said: Word,
    names: impl Iterator<Item = &'a str>,
    meaning: IndexMeaning,
) -> Result<Vec<DeviceSelector>, RequestError> {
    let mut list = Vec::new();
    for name in names {
        let selector = selector(said, name, meaning)?;
        if list.contains(&selector) {
            continue;
        }
        if list.len() == MOST {
            return Err(said.wrong(format!("a list names at most {MOST} GPUs: name fewer, or write all")));
        }
        list.push(selector);
    }
    Ok(list)
}

/// The name of one GPU: an index, a UUID or its beginning, or a CDI name that ends in one of these.
pub(crate) fn selector(
    said: Word,
    item: &str,
    meaning: IndexMeaning,
) -> Result<DeviceSelector, RequestError> {
    let (item, meaning) = match qualified::device(item) {
        Some(device) => (device, IndexMeaning::Pci),
        None => (item, meaning),
    };
    if item.starts_with("MIG-") || item.split_once(':').is_some_and(|(gpu, _)| gpu.parse::<u32>().is_ok()) {
        return Err(
            said.wrong("gpushare shares whole cards, not MIG instances: name the GPU by index or UUID")
        );
    }
    if let Some(docker) = said.value.trim_matches('"').strip_prefix("device=") {
        let docker = shortened(docker);
        return Err(said.wrong(format!("that is docker's --gpus syntax: write {}", docker.escape_debug())));
    }
    let remedy = "a list of GPUs holds indexes, UUIDs or unique beginnings of UUIDs (GPU-…), or is `all`";
    match (item.parse().map_err(|_| said.wrong(remedy))?, meaning) {
        (DeviceSelector::Index(number), IndexMeaning::Minor) => Ok(DeviceSelector::Minor(number)),
        (selector, _) => Ok(selector),
    }
}

/// What Aliyun's device plugin writes where it found no pod for an allocation.
pub(crate) fn is_sentinel(list: &str) -> Option<&str> {
    let amount = list.strip_prefix("no-gpu-has-").and_then(|rest| rest.strip_suffix("-to-run"));
    amount.filter(|amount| amount.starts_with(|c: char| c.is_ascii_digit()))
}

/// Allocation succeeds towards kubelet all the same, and a runtime that takes the text for a list gives nothing, or
/// everything.
pub(crate) fn refuse_sentinel(said: Word) -> Result<(), RequestError> {
    match is_sentinel(said.value) {
        Some(amount) => Err(said.wrong(format!(
            "the device plugin found no pod that waits for {}: delete the pod and start it anew; usual causes are a scheduler \
             extender that is not set up, several GPU containers in one pod, or an annotation that could not be written",
            shortened(amount).escape_debug()
        ))),
        None => Ok(()),
    }
}

/// The items of a list that are not empty.
pub(crate) fn items(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|item| !item.is_empty())
}

/// The word in a list that counts for the whole of it; a CDI name of all GPUs is one.
pub(crate) fn word(text: &str) -> Option<&str> {
    let plain = |item| qualified::device(item).filter(|device| *device == "all").unwrap_or(item);
    let void = items(text).find(|item| *item == "void");
    void.or_else(|| items(text).map(plain).find(|item| matches!(*item, "all" | "none")))
}
