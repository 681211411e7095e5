//! Qualified names of CDI devices, `vendor/class=name`: in annotations `cdi.k8s.io/*` and in lists of GPUs.
//!
//! An engine that applied a name has left the device's nodes behind, and the annotation says the same again. Where nobody
//! did (containerd 1.6 passes the annotations and applies none), the name is the request.

use gpushare_inventory::Gpu;

use crate::sources::{handed, names};
use gpushare_claims::{Claim, IndexMeaning, NodeGpus, Rank, RequestError, Word, Words, contains, shortened};

/// What device plugins begin their annotations with; the second is the older one.
const ANNOTATIONS: [&str; 2] = ["cdi.k8s.io/", "nvidia.cdi.k8s.io/"];
const OUR_VENDOR: &str = "gpushare.io/";

/// Whether an item of a list is the name of a CDI device of gpushare.
pub(crate) fn is_ours(item: &str) -> bool {
    item.starts_with(OUR_VENDOR)
}

/// The name of the GPU in a qualified name of NVIDIA's, by whichever of its vendor names; `None` for anything else. What a
/// GPU is used with beside it (gds, mofed, gdrcopy, nvswitch, imex-channel) is none.
pub(crate) fn device(item: &str) -> Option<&str> {
    let (kind, name) = item.split_once('=')?;
    let (vendor, class) = kind.split_once('/')?;
    let is_nvidias = vendor == "nvidia.com" || vendor.ends_with(".nvidia.com");
    let is_dras = vendor == "k8s.gpu.nvidia.com" && matches!(class, "device" | "claim");
    let is_gpu = class == "gpu" || class.starts_with("mig") || class.starts_with("pgpu") || is_dras;
    // nvidia-ctk's strategy `type-index` says gpu0, the DRA driver gpu-0.
    let index = name.strip_prefix("gpu-").or_else(|| name.strip_prefix("gpu"));
    let index = index.filter(|rest| rest.bytes().all(|byte| byte.is_ascii_digit()));
    (is_nvidias && is_gpu).then(|| index.filter(|rest| !rest.is_empty()).unwrap_or(name))
}

/// The names in annotations, of every vendor, each with its annotation.
pub(crate) fn annotated<'a>(words: &Words<'a>) -> impl Iterator<Item = (Word<'a>, &'a str)> {
    let is_of_cdi = |word: &Word| ANNOTATIONS.iter().any(|prefix| word.key.starts_with(prefix));
    let annotations = words.annotations().filter(is_of_cdi);
    annotations.flat_map(|word| word.value.split(',').map(move |name| (word, name.trim())))
}

/// Whether an annotation asks for a GPU of NVIDIA's. Looks at nothing but the bundle.
pub(crate) fn asks(words: &Words) -> bool {
    annotated(words).any(|(_, name)| device(name).is_some())
}

/// What the annotations say: of the GPUs alone. Two of one rank add up, as the devices that they name do.
pub(crate) fn claims<'a>(words: &Words<'a>, node: NodeGpus<'a>) -> Result<Vec<Claim>, RequestError> {
    let mut by_rank: Vec<(Rank, Word, Vec<&Gpu>)> = Vec::new();
    for (word, name) in annotated(words) {
        let Some(device) = device(name) else { continue };
        let Some(gpus) = named(words, node, word, name, device)? else { continue };
        match by_rank.iter_mut().find(|(rank, ..)| *rank == word.rank) {
            Some((_, _, known)) => {
                let new: Vec<_> = gpus.into_iter().filter(|gpu| !contains(known, gpu)).collect();
                known.extend(new);
            }
            None => by_rank.push((word.rank, word, gpus)),
        }
    }
    Ok(by_rank.into_iter().map(|(_, word, gpus)| Claim::by(word).naming(&gpus)).collect())
}

/// The GPUs of one name; nothing for a name of the driver's own making whose nodes are there to tell.
fn named<'a>(
    words: &Words,
    node: NodeGpus<'a>,
    word: Word,
    name: &str,
    device: &str,
) -> Result<Option<Vec<&'a Gpu>>, RequestError> {
    if device == "all" {
        return Ok(Some(node.all()));
    }
    let selector = match names::selector(word, device, IndexMeaning::Pci) {
        Err(_) if handed::is_handed(words) => return Ok(None),
        Err(_) if !device.starts_with("MIG-") && !device.contains(':') => {
            let name = shortened(name).escape_debug().to_string();
            return Err(word.wrong(format!(
                "nobody has put CDI device {name} into the container, and its name tells no GPU: use an engine that applies \
                 CDI devices, or name a GPU by index or UUID"
            )));
        }
        other => other?,
    };
    Ok(Some(vec![node.find(word.key, &selector)?]))
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
            ("nvidia.com/mig-1g.10gb=0", Some("0")),
            ("nvidia.com/gds=all", None),
            ("nvidia.com/imex-channel=0", None),
            ("xnvidia.com/gpu=0", None),
            ("gpushare.io/gpu=0", None),
            ("gpu=0", None),
            ("0", None),
        ] {
            assert_eq!(device(name), want, "{name}");
        }
    }
}
