//! Reads names of GPUs in a list. Lists, mounts and other systems' keys share this grammar.

use gpushare_inventory::{Gpu, GpuUuid};

use gpushare_claims::{DeviceSelector, IndexMeaning, NodeGpus, RequestError, Word, shortened};

const OUR_VENDOR: &str = "gpushare.io/";
/// A word that names GPUs, and the GPUs, without duplicates.
pub(crate) type Gpus<'a> = (Word<'a>, Vec<&'a Gpu>);

/// NVIDIA's variable with the list of GPUs. Its items may also be names of CDI devices.
pub(crate) const DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";
/// The most GPUs that one container can have.
const MOST: usize = 16;

/// The remedy for a name that refers to a MIG instance without saying which.
pub(crate) const NO_PART: &str =
    "it means a MIG instance and does not tell which: name it by UUID (MIG-…) or as GPU:INSTANCE (0:1)";

/// Parses names of GPUs, without duplicates.
pub(crate) fn selectors<'a>(
    said: Word,
    names: impl Iterator<Item = &'a str>,
    meaning: IndexMeaning,
) -> Result<Vec<DeviceSelector>, RequestError> {
    each_once(said, names.map(|name| Ok(vec![selector(said, name, meaning)?])))
}

/// The GPU with this name; a number is an index.
pub(crate) fn gpu<'a>(said: Word, name: &str, node: NodeGpus<'a>) -> Result<&'a Gpu, RequestError> {
    node.find(said.key, &selector(said, name, IndexMeaning::Pci)?)
}

/// The GPUs in the word's list, without duplicates.
pub(crate) fn gpus<'a>(
    said: Word,
    node: NodeGpus<'a>,
    meaning: IndexMeaning,
) -> Result<Vec<&'a Gpu>, RequestError> {
    node.find_each(said.key, &selectors(said, items(said.value), meaning)?)
}

/// Joins the GPUs that the items name, without duplicates. More than [`MOST`] GPUs are an error.
pub(crate) fn each_once(
    said: Word,
    items: impl Iterator<Item = Result<Vec<DeviceSelector>, RequestError>>,
) -> Result<Vec<DeviceSelector>, RequestError> {
    let mut list = Vec::new();
    for item in items {
        for selector in item? {
            if list.contains(&selector) {
                continue;
            }
            if list.len() == MOST {
                return Err(said.wrong(format!("a list names at most {MOST} GPUs: name fewer, or write all")));
            }
            list.push(selector);
        }
    }
    Ok(list)
}

/// Parses the name of one GPU: an index, a UUID or its prefix, or a CDI name that ends in one of these.
pub(crate) fn selector(
    said: Word,
    item: &str,
    meaning: IndexMeaning,
) -> Result<DeviceSelector, RequestError> {
    let (item, meaning) = match device(item) {
        Some(device) => (device, IndexMeaning::Pci),
        None => (item, meaning),
    };
    if item == PART {
        return Err(said.wrong(NO_PART));
    }
    if let Some(docker) = said.value.trim_matches('"').strip_prefix("device=") {
        let docker = shortened(docker);
        return Err(said.wrong(format!("that is docker's --gpus syntax: write {}", docker.escape_debug())));
    }
    let remedy = "a list of GPUs holds indexes, UUIDs or unique beginnings of UUIDs (GPU-…, MIG-…; 0:1 is a MIG \
         instance), or is `all`";
    match (item.parse().map_err(|_| said.wrong(remedy))?, meaning) {
        (DeviceSelector::Index(number), IndexMeaning::Minor) => Ok(DeviceSelector::Minor(number)),
        (selector, _) => Ok(selector),
    }
}

/// The amount in the text that Aliyun's device plugin writes as the list of GPUs if it found no pod for an
/// allocation: `no-gpu-has-8MiB-to-run`. `None` for any other list.
pub(crate) fn is_sentinel(list: &str) -> Option<&str> {
    let amount = list.strip_prefix("no-gpu-has-").and_then(|rest| rest.strip_suffix("-to-run"));
    amount.filter(|amount| amount.starts_with(|c: char| c.is_ascii_digit()))
}

/// Refuses that text as a list of GPUs. Kubelet treats such an allocation as a success, and a runtime that
/// reads the text as a list would give the container no GPU or every GPU.
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

/// The items of a comma-separated list, trimmed, without empty ones.
pub(crate) fn items(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|item| !item.is_empty())
}

/// The word (`void`, `all` or `none`) that decides the meaning of the whole list. A CDI name for all GPUs
/// counts as `all`.
pub(crate) fn word(text: &str) -> Option<&str> {
    let plain = |item| device(item).filter(|device| *device == "all").unwrap_or(item);
    let void = items(text).find(|item| *item == "void");
    void.or_else(|| items(text).map(plain).find(|item| matches!(*item, "all" | "none")))
}

/// Whether an item of a list is the name of one of gpushare's CDI devices.
pub(crate) fn is_ours(item: &str) -> bool {
    item.starts_with(OUR_VENDOR)
}

/// The GPU's name in a qualified CDI name. For NVIDIA's names, under any of its vendor names, this is the
/// part after `=`. For another vendor's it is only a UUID. `None` for anything else, such as gds, mofed,
/// gdrcopy, nvswitch or imex-channel, which are used together with GPUs.
pub(crate) fn device(item: &str) -> Option<&str> {
    let (kind, name) = item.split_once('=')?;
    let (vendor, class) = kind.split_once('/')?;
    let is_nvidias = vendor == "nvidia.com" || vendor.ends_with(".nvidia.com");
    let is_dras = vendor == "k8s.gpu.nvidia.com" && matches!(class, "device" | "claim");
    // nvidia-ctk's strategy `type-index` writes gpu0, the DRA driver gpu-0.
    let index = name.strip_prefix("gpu-").or_else(|| name.strip_prefix("gpu"));
    let index = index.filter(|rest| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit()));
    let index = index.or_else(|| name.strip_prefix("mig").filter(|part| is_part(part))); // mig0:1 of type-index
    match class {
        // In another vendor's device only a UUID identifies the GPU. A number may be that of a network card.
        _ if !is_nvidias => {
            Some(name).filter(|name| name.parse::<GpuUuid>().is_ok() || name.starts_with("MIG-"))
        }
        _ if class == "gpu" || is_dras => Some(index.unwrap_or(name)),
        // A single number is that of a MIG instance on an unspecified GPU.
        _ if class.starts_with("mig") => Some(if is_part(name) { name } else { PART }),
        // These GPUs are passed through to virtual machines. The whole item is no valid name, so it is
        // refused later.
        _ if class.starts_with("pgpu") => Some(item),
        _ => None,
    }
}

/// Prefix of the names of MIG instances.
const PART: &str = "MIG-";

/// Whether the name refers to a MIG instance: `MIG-…`, or `0:1` for the second instance of the first GPU.
pub(crate) fn is_part(name: &str) -> bool {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    name.strip_prefix(PART).is_some_and(|rest| !rest.is_empty())
        || name.split_once(':').is_some_and(|(gpu, part)| digits(gpu) && digits(part))
}

/// Whether a name that [`device`] returned identifies the GPU by itself, or says that it is a MIG instance.
pub(crate) fn tells_gpu(device: &str) -> bool {
    device == "all" || device == PART || device.parse::<DeviceSelector>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_a_gpus_by_its_vendor_and_class() {
        for (name, want) in [
            ("nvidia.com/gpu=0", Some("0")),
            ("nvidia.com/gpu=gpu3", Some("3")),
            ("nvidia.com/gpu=all", Some("all")),
            ("k8s.device-plugin.nvidia.com/gpu=GPU-a", Some("GPU-a")),
            ("management.nvidia.com/gpu=all", Some("all")),
            ("k8s.gpu.nvidia.com/device=gpu-1", Some("1")),
            ("k8s.gpu.nvidia.com/claim=0b5c-gpu-1", Some("0b5c-gpu-1")),
            ("k8s.compute-domain.nvidia.com/device=channel-0", None),
            ("nvidia.com/mig-1g.10gb=0", Some("MIG-")),
            ("nvidia.com/mig-1g.10gb=0:2", Some("0:2")),
            ("nvidia.com/gpu=0:2", Some("0:2")),
            ("nvidia.com/gpu=mig0:2", Some("0:2")),
            ("nvidia.com/gpu=MIG-5f2e", Some("MIG-5f2e")),
            ("nvidia.com/pgpu=0", Some("nvidia.com/pgpu=0")),
            ("nvidia.com/gds=all", None),
            ("nvidia.com/imex-channel=0", None),
            ("xnvidia.com/gpu=0", None),
            ("gpushare.io/gpu=0", None),
            (
                "lab.example/card=GPU-5f2e0a11-0102-0304-0506-0708090a0bff",
                Some("GPU-5f2e0a11-0102-0304-0506-0708090a0bff"),
            ),
            ("lab.example/card=GPU-5f2e", None),
            ("gpu=0", None),
            ("0", None),
        ] {
            assert_eq!(device(name), want, "{name}");
        }
    }
}
