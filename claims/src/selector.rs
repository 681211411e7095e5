//! Finds the GPU that a name in a request refers to.

use gpushare_inventory::{Gpu, GpuUuid};

use crate::devices::DeviceSelector;

/// The reason why a name does not match exactly one GPU.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SelectorError {
    /// No GPU of the node has that name.
    #[error("this node has no GPU {selector}: see `gpushare devices`; it has {here}")]
    Unknown {
        /// The name as the user wrote it.
        selector: String,
        /// Index and UUID of every GPU of the node.
        here: String,
    },
    /// The GPU is divided, so that only its instances can be given out.
    #[error(
        "{selector} is divided into MIG instances, which are given in its place; name one of them, or ask by size with \
         GPUSHARE_MIG: {here}"
    )]
    Divided {
        /// The name as the user wrote it.
        selector: String,
        /// Its instances.
        here: String,
    },
    /// The name is a prefix of several GPUs' UUIDs.
    #[error(
        "{selector} is the beginning of several GPUs' UUIDs; write more of it (`gpushare devices`): {here}"
    )]
    Ambiguous {
        /// The name as the user wrote it.
        selector: String,
        /// Index and UUID of every GPU that it matches.
        here: String,
    },
}

/// The one GPU that `selector` names.
///
/// If there is none, or more than one.
/// When there is none, or more than one.
pub fn find_gpu<'a>(selector: &DeviceSelector, gpus: &'a [Gpu]) -> Result<&'a Gpu, SelectorError> {
    let fits = |gpu: &&Gpu| match selector {
        DeviceSelector::Index(index) => gpu.instance.is_none() && gpu.index == *index,
        DeviceSelector::Part(index, part) => {
            gpu.index == *index && gpu.instance.as_ref().is_some_and(|found| found.position == *part)
        }
        DeviceSelector::Instance(card, id) => {
            gpu.instance.as_ref().is_some_and(|found| (found.card, found.id) == (*card, *id))
        }
        DeviceSelector::Minor(minor) => gpu.instance.is_none() && gpu.minor == *minor,
        DeviceSelector::Uuid(uuid) => gpu.uuid == *uuid,
        DeviceSelector::Prefix(prefix) => begins(gpu.uuid, prefix),
    };
    let found: Vec<&Gpu> = gpus.iter().filter(fits).collect();
    let parts = || gpus.iter().filter(|gpu| is_part_of(gpu, selector));
    match found[..] {
        [gpu] => Ok(gpu),
        [] if parts().next().is_some() => {
            Err(SelectorError::Divided { selector: selector.to_string(), here: names(parts()) })
        }
        [] => Err(SelectorError::Unknown { selector: selector.to_string(), here: names(gpus.iter()) }),
        _ => Err(SelectorError::Ambiguous { selector: selector.to_string(), here: names(found.into_iter()) }),
    }
}

/// Whether the UUID starts with `prefix`, ignoring case.
fn begins(uuid: GpuUuid, prefix: &str) -> bool {
    uuid.to_string().to_ascii_lowercase().starts_with(&prefix.to_ascii_lowercase())
}

/// Whether the selector names the whole GPU to which this instance belongs.
fn is_part_of(gpu: &Gpu, selector: &DeviceSelector) -> bool {
    gpu.instance.is_some()
        && match selector {
            DeviceSelector::Index(index) => gpu.index == *index,
            DeviceSelector::Minor(minor) => gpu.minor == *minor,
            DeviceSelector::Uuid(uuid) => gpu.card() == *uuid,
            DeviceSelector::Prefix(prefix) => begins(gpu.card(), prefix),
            DeviceSelector::Part(..) | DeviceSelector::Instance(..) => false,
        }
}

fn names<'a>(gpus: impl Iterator<Item = &'a Gpu>) -> String {
    gpus.map(Gpu::to_string).collect::<Vec<_>>().join(", ")
}

/// How a bare number names a GPU. Systems differ in this, and a wrong guess gives the container another
/// tenant's GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IndexMeaning {
    /// NVML's index, in the order of PCI addresses.
    Pci,
    /// The N of `/dev/nvidiaN`.
    #[default]
    Minor,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpus::four;

    #[test]
    fn the_beginning_of_two_uuids_is_refused_with_both() {
        let selector = |text: &str| text.parse::<DeviceSelector>().unwrap();
        let told = find_gpu(&selector("GPU-a"), &four()).unwrap_err();
        assert!(
            matches!(&told, SelectorError::Ambiguous { here, .. } if here.contains("GPU-a0") && here.contains("GPU-a3")),
            "{told}"
        );
        assert_eq!(find_gpu(&selector("GPU-A2"), &four()).map(|gpu| gpu.index), Ok(2));
        let gpus = four();
        let told = find_gpu(&selector("GPU-2a"), &gpus);
        assert!(matches!(told, Err(SelectorError::Unknown { .. })), "its middle: {told:?}");
    }
}
