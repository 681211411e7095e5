//! Lookup of the node's GPUs by the names that a request uses.

#[cfg(any(test, feature = "testing"))]
use gpushare_inventory::GpuUuid;
use gpushare_inventory::{DeviceMemory, Gpu};

use crate::devices::DeviceSelector;
use crate::error::{RequestError, shortened};
use crate::selector::find_gpu;

/// The node's GPUs, in the order of their indexes.
#[derive(Clone, Copy, Debug)]
pub struct NodeGpus<'a>(pub &'a [Gpu]);

impl<'a> NodeGpus<'a> {
    /// Every GPU and MIG instance of the node, in the order of the indexes.
    pub fn all(self) -> Vec<&'a Gpu> {
        self.0.iter().collect()
    }

    /// The GPUs meant by a request that names none: the whole GPUs. On a node where all GPUs are divided, its
    /// MIG instances.
    pub fn unnamed(self) -> Vec<&'a Gpu> {
        let is_meant = |gpu: &&Gpu| gpu.instance.as_ref().is_none_or(|instance| instance.stands_for_gpu);
        self.0.iter().filter(is_meant).collect()
    }

    /// The GPU that `selector` names; `key` is its origin, for the error.
    pub fn find(self, key: &str, selector: &DeviceSelector) -> Result<&'a Gpu, RequestError> {
        let named = |source| RequestError::NoSuchGpu { key: shortened(key), source };
        find_gpu(selector, self.0).map_err(named)
    }

    /// The GPUs that `selectors` name, in order, without duplicates; `key` is for the error.
    pub fn find_each(self, key: &str, selectors: &[DeviceSelector]) -> Result<Vec<&'a Gpu>, RequestError> {
        each_once(selectors.iter().map(|selector| self.find(key, selector)))
    }
}

/// The GPUs in order, without duplicates.
pub fn each_once<'a>(
    gpus: impl Iterator<Item = Result<&'a Gpu, RequestError>>,
) -> Result<Vec<&'a Gpu>, RequestError> {
    let mut known = Vec::new();
    for gpu in gpus {
        let gpu = gpu?;
        if !contains(&known, gpu) {
            known.push(gpu);
        }
    }
    Ok(known)
}

/// Whether `gpus` contains `gpu`, compared by UUID.
pub fn contains(gpus: &[&Gpu], gpu: &Gpu) -> bool {
    gpus.iter().any(|other| other.uuid == gpu.uuid)
}

/// Whether the list holds the same GPU twice.
pub fn has_double(gpus: &[&Gpu]) -> bool {
    gpus.iter().enumerate().any(|(place, gpu)| contains(&gpus[..place], gpu))
}

/// The GPU's total memory, or an error if the inventory does not know it.
pub fn total(gpu: &Gpu) -> Result<DeviceMemory, RequestError> {
    gpu.memory.ok_or(RequestError::UnknownSize { gpu: gpu.uuid })
}

/// Four GPUs of 15360 MiB whose minors differ from their indexes, for tests.
#[cfg(any(test, feature = "testing"))]
pub fn four() -> Vec<Gpu> {
    let gpu = |(index, minor): (u8, u32)| {
        let path = std::path::PathBuf::from(format!("/dev/nvidia{minor}"));
        let host_path = path.clone();
        Gpu {
            index: index.into(),
            uuid: GpuUuid::from_bytes([0xa0 + index; 16]),
            minor,
            model: "Tesla T4".to_owned(),
            memory: Some(DeviceMemory::from_bytes(15360 << 20)),
            node: gpushare_inventory::DeviceNode {
                path,
                host_path,
                major: 195,
                minor,
                mode: 0o666,
                uid: 0,
                gid: 0,
            },
            place: gpushare_inventory::Place::default(),
            instance: None,
        }
    };
    [(0, 1), (1, 0), (2, 3), (3, 2)].map(gpu).to_vec()
}
