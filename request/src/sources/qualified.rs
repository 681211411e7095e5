//! Reads qualified names of CDI devices, `vendor/class=name`, in annotations `cdi.k8s.io/*` and in lists of
//! GPUs.
//!
//! An engine that applied a name has put the device's nodes into the bundle, and the annotation repeats it.
//! containerd 1.6 passes the annotations and applies none; then the name is the request. Most names identify
//! their GPU by index or UUID; the node's CDI files identify the rest.

use std::collections::BTreeSet;

use gpushare_inventory::Gpu;

use gpushare_claims::{
    Claim, Container, DeviceSelector, IndexMeaning, NodeGpus, RequestError, Word, Words, contains, shortened,
};

use crate::sources::handed;
use crate::sources::names::{self, Gpus};

/// Prefixes of the annotations that device plugins write; the second is the older one.
const ANNOTATIONS: [&str; 2] = ["cdi.k8s.io/", "nvidia.cdi.k8s.io/"];

fn is_of_cdi(annotation: &str) -> bool {
    ANNOTATIONS.iter().any(|prefix| annotation.starts_with(prefix))
}

/// The names in annotations, of every vendor, each with the annotation that holds it.
pub(crate) fn annotated<'a>(words: &Words<'a>) -> impl Iterator<Item = (Word<'a>, &'a str)> {
    let annotations = words.annotations().filter(|word| is_of_cdi(word.key));
    annotations.flat_map(|word| word.value.split(',').map(move |name| (word, name.trim())))
}

/// The names in annotations and lists whose GPUs only a CDI file can identify, each once. The number of names
/// is unlimited: an omitted name would count for nothing.
pub fn cdi_names(container: &Container) -> BTreeSet<&str> {
    let annotations = container.annotations().iter().map(|(key, value)| (key.as_str(), value.as_str()));
    let texts = annotations.filter(|(key, _)| is_of_cdi(key)).chain(container.named(names::DEVICES));
    let names = texts.flat_map(|(_, text)| names::items(text)).filter(|name| name.contains('='));
    names.filter(|name| !names::is_ours(name) && !names::device(name).is_some_and(names::tells_gpu)).collect()
}

/// The GPUs, by minor, that the node's CDI files list for the CDI device `name`; `None` if they do not know
/// it.
///
/// # Errors
/// If the device is a MIG instance that the name does not identify, or if it has no GPU node and none was
/// handed over.
pub(crate) fn specified(
    words: &Words,
    word: Word,
    name: &str,
) -> Result<Option<Vec<DeviceSelector>>, RequestError> {
    match words.container.cdi_device(name) {
        Some(device) if device.is_part => match names::device(name).is_some_and(names::is_part) {
            true => Ok(None), // the name itself identifies it
            false => Err(word.wrong(names::NO_PART)),
        },
        // The handed device nodes identify the GPUs instead.
        Some(device) if device.minors.is_empty() && handed::is_handed(words) => Ok(None),
        Some(device) if device.minors.is_empty() => Err(untold(word, name)),
        device => Ok(device.map(|device| device.minors.iter().copied().map(DeviceSelector::Minor).collect())),
    }
}

fn untold(word: Word, name: &str) -> RequestError {
    let name = shortened(name).escape_debug().to_string();
    word.wrong(format!(
        "nobody has put CDI device {name} into the container, and neither its name nor a specification (cdi.spec_dirs) tells \
         its GPU: use an engine that applies CDI devices, or name a GPU by index or UUID"
    ))
}

/// Whether an annotation asks for a GPU: by one of NVIDIA's names, or by a name that has a GPU in the node's
/// CDI files.
pub(crate) fn asks(words: &Words) -> bool {
    annotated(words)
        .any(|(_, name)| names::device(name).is_some() || words.container.cdi_device(name).is_some())
}

/// The claims of the annotations: which GPUs, no amounts. Annotations of one rank add up, as their devices
/// do.
pub(crate) fn claims<'a>(words: &Words<'a>, node: NodeGpus<'a>) -> Result<Vec<Claim>, RequestError> {
    let mut by_rank: Vec<Gpus> = Vec::new();
    for (word, name) in annotated(words) {
        let gpus = match (specified(words, word, name)?, names::device(name)) {
            (Some(selectors), _) => node.find_each(word.key, &selectors)?,
            (None, Some(device)) => match named(words, node, word, name, device)? {
                Some(gpus) => gpus,
                None => continue,
            },
            (None, None) => continue,
        };
        match by_rank.iter_mut().find(|(known, _)| known.rank == word.rank) {
            Some((_, known)) => {
                let new: Vec<_> = gpus.into_iter().filter(|gpu| !contains(known, gpu)).collect();
                known.extend(new);
            }
            None => by_rank.push((word, gpus)),
        }
    }
    Ok(by_rank.into_iter().map(|(word, gpus)| Claim::by(word).naming(&gpus)).collect())
}

/// The GPUs of one name. `None` for a name that does not identify a GPU, such as one that a DRA driver made,
/// if handed nodes identify the GPU.
fn named<'a>(
    words: &Words,
    node: NodeGpus<'a>,
    word: Word,
    name: &str,
    device: &str,
) -> Result<Option<Vec<&'a Gpu>>, RequestError> {
    if device == "all" {
        return Ok(Some(node.unnamed()));
    }
    let selector = match names::selector(word, device, IndexMeaning::Pci) {
        Err(_) if handed::is_handed(words) => return Ok(None),
        Err(_) if !names::tells_gpu(device) => return Err(untold(word, name)),
        other => other?,
    };
    Ok(Some(vec![node.find(word.key, &selector)?]))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use gpushare_claims::{Devices, Policy, Request, four};
    use gpushare_inventory::CdiDevice;

    use super::*;

    const ANNOTATION: &str = "cdi.k8s.io/plugin_0";

    fn container(annotation: &str, list: &str) -> Container {
        let annotations = [(ANNOTATION, annotation)].into_iter().filter(|(_, value)| !value.is_empty());
        let env =
            Some(list).filter(|list| !list.is_empty()).map(|list| format!("NVIDIA_VISIBLE_DEVICES={list}"));
        let owned = annotations.map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
        Container::new(owned, env.into_iter().collect())
    }

    /// Reads a container on a node whose CDI files list the nodes of these minors for `name`.
    fn read(
        container: Container,
        name: &str,
        minors: &[u32],
        is_part: bool,
    ) -> Result<Option<Request>, RequestError> {
        let device = CdiDevice { minors: minors.to_vec(), is_part };
        let container = container.specified(BTreeMap::from([(name.to_owned(), device)]));
        crate::read::read(&container, &Policy::default(), &four())
    }

    #[test]
    fn a_name_that_tells_no_gpu_is_looked_up_and_no_other() {
        for (annotation, list, want) in [
            ("nvidia.com/gpu=0", "", &[][..]),
            ("nvidia.com/gpu=all,k8s.device-plugin.nvidia.com/gpu=GPU-0a", "all", &[]),
            ("nvidia.com/gpu=0:1,gpushare.io/share=4GiB", "nvidia.com/gpu=gpu1", &[]),
            (
                "nvidia.com/gpu=card7, other.org/fpga=a",
                "0,nvidia.com/gpu=left",
                &["nvidia.com/gpu=card7", "nvidia.com/gpu=left", "other.org/fpga=a"],
            ),
            ("k8s.gpu.nvidia.com/claim=0b5c-gpu-1", "", &["k8s.gpu.nvidia.com/claim=0b5c-gpu-1"]),
        ] {
            assert_eq!(
                cdi_names(&container(annotation, list)).into_iter().collect::<Vec<_>>(),
                want,
                "{annotation} {list}"
            );
        }
        let many: Vec<String> = (0..100_000).map(|number| format!("other.org/x=n{number}")).collect();
        assert_eq!(cdi_names(&container(&many.join(","), "")).len(), 100_000, "none hides another");
    }

    #[test]
    fn a_specified_name_is_the_gpus_of_its_nodes() {
        let gpus = |minors: &[u32]| -> Vec<DeviceSelector> {
            let gpu = |minor: &u32| four().into_iter().find(|gpu| gpu.minor == *minor).unwrap().uuid;
            minors.iter().map(gpu).map(DeviceSelector::Uuid).collect()
        };
        for name in ["nvidia.com/gpu=card7", "k8s.gpu.nvidia.com/claim=0b5c-gpu-1", "other.org/card=a"] {
            for (annotation, list, minors) in
                [(name, "", &[3][..]), ("", name, &[1]), (name, "all", &[0]), (name, name, &[2, 0])]
            {
                let request = read(container(annotation, list), name, minors, false).unwrap().unwrap();
                assert_eq!(request.devices, Devices::These(gpus(minors)), "{annotation} {list}");
            }
            let part = read(container(name, ""), name, &[0], true).unwrap_err().to_string();
            assert!(part.contains("MIG"), "{part}");
            let gone = read(container(name, ""), name, &[9], false).unwrap_err().to_string();
            assert!(gone.contains("no GPU /dev/nvidia9"), "{gone}");
        }
        let others = container("other.org/fpga=a", "");
        assert!(crate::read::read(&others, &Policy::default(), &four()).unwrap().is_none(), "no GPU's name");
    }
}
