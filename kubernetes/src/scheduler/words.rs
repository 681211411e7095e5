//! What the extender writes to pods that it binds: the GPUs, in gpushare's words and in those of the system
//! whose resources the pod names, for the tools of that system.

use std::collections::BTreeMap;

use gpushare_inventory::DeviceMemory;
use gpushare_placement::{Memory, Needs, Part, Share};
use k8s_openapi::jiff::Timestamp;

use crate::asks::Asking;
use crate::gpus::{NodeGpus, PLACEMENT, Placement, ShownGpu};
use crate::resource::{System, Unit};

/// What the largest container of a pod asks for.
pub fn asked(needs: &Needs) -> String {
    let largest = needs.shares.iter().chain(&needs.first).max();
    largest.map_or_else(|| "none".to_owned(), share)
}

fn share(share: &Share) -> String {
    let of_one = match share.part {
        Part::Whole => "whole".to_owned(),
        Part::Of(memory, cores) => {
            let memory = match memory {
                Memory::Default => "the node's default memory".to_owned(),
                Memory::Bytes(bytes) => DeviceMemory::from_bytes(bytes).to_string(),
                Memory::Part { count, of } if count == of => "all memory".to_owned(),
                Memory::Part { count, of } => format!("{count}/{of} of the memory"),
            };
            if cores == 0 { memory } else { format!("{memory} and {cores} % of compute") }
        }
    };
    match (share.gpus, share.part) {
        (1, Part::Whole) => "a whole GPU".to_owned(),
        (1, _) => format!("{of_one} of a GPU"),
        (count, _) => format!("{count} GPUs ({of_one} each)"),
    }
}

/// The annotations of a pod that is bound to a node with these GPUs. `containers` are all of the pod's by
/// name: other systems count by their place.
pub fn annotations(
    asking: &[Asking],
    containers: &[String],
    placement: &Placement,
    node: &str,
    gpus: &NodeGpus,
    now: Timestamp,
) -> BTreeMap<String, String> {
    let json = serde_json::to_string(placement).unwrap_or_default();
    let mut written = BTreeMap::from([(PLACEMENT.to_owned(), json)]);
    let named = |name: &str| gpus.resources.iter().find(|resource| resource.name == name);
    let names = asking.iter().flat_map(|one| one.amounts.keys());
    let system = names.filter_map(|name| named(name)).map(|resource| resource.system).next();
    let words = Words { asking, containers, placement, node, gpus, now };
    written.extend(match system {
        Some(System::Aliyun) => words.aliyun(),
        Some(System::GpuManager) => words.gpu_manager(),
        Some(System::Elastic) => words.elastic(),
        Some(System::Hami) => words.hami(),
        Some(System::Own | System::Qgpu | System::Volcano | System::Nvidia) | None => BTreeMap::new(),
    });
    written
}

struct Words<'a> {
    asking: &'a [Asking],
    containers: &'a [String],
    placement: &'a Placement,
    node: &'a str,
    gpus: &'a NodeGpus,
    now: Timestamp,
}

impl Words<'_> {
    fn gpu(&self, index: u32) -> Option<&ShownGpu> {
        self.gpus.gpus.iter().find(|gpu| gpu.index == index)
    }

    fn its(&self, container: &str) -> Vec<&ShownGpu> {
        let indexes = self.placement.get(container).into_iter().flatten();
        indexes.filter_map(|index| self.gpu(*index)).collect()
    }

    /// Nanoseconds since 1970.
    fn nanoseconds(&self) -> String {
        self.now.as_nanosecond().to_string()
    }

    /// Alibaba's extender counts whole pods, on one GPU (gpushare-scheduler-extender, pkg/utils/pod.go).
    fn aliyun(&self) -> BTreeMap<String, String> {
        const MEMORY: &str = "aliyun.com/gpu-mem";
        let first = self.asking.first().map(|one| self.its(&one.container));
        let Some(gpu) = first.and_then(|gpus| gpus.first().copied()) else { return BTreeMap::new() };
        let asked: u64 = self.asking.iter().filter_map(|one| one.amounts.get(MEMORY)).sum();
        let unit = self.gpus.resources.iter().find_map(|resource| match resource.unit {
            Unit::Memory(bytes) if resource.name == MEMORY => Some(bytes),
            _ => None,
        });
        let of_gpu = gpu.per_share / unit.unwrap_or(1 << 30).max(1);
        // Containers by their place, each with its units by GPU.
        let of = |(at, name): (usize, &String)| {
            let one = self.asking.iter().find(|one| one.container == *name)?;
            let indexes = self.placement.get(name)?;
            let each = one.amounts.get(MEMORY)? / indexes.len().max(1) as u64;
            let units: BTreeMap<String, u64> =
                indexes.iter().map(|index| (index.to_string(), each)).collect();
            Some((at.to_string(), units))
        };
        let allocation: BTreeMap<_, _> = self.containers.iter().enumerate().filter_map(of).collect();
        owned([
            ("ALIYUN_COM_GPU_MEM_IDX", gpu.index.to_string()),
            ("ALIYUN_COM_GPU_MEM_DEV", of_gpu.to_string()),
            ("ALIYUN_COM_GPU_MEM_POD", asked.to_string()),
            // The agent knows which GPU it is: no plugin of Alibaba's is waiting for the pod.
            ("ALIYUN_COM_GPU_MEM_ASSIGNED", "true".to_owned()),
            ("ALIYUN_COM_GPU_MEM_ASSUME_TIME", self.nanoseconds()),
            (
                "scheduler.framework.gpushare.allocation",
                serde_json::to_string(&allocation).unwrap_or_default(),
            ),
        ])
    }

    /// gpu-admission, pkg/util/util.go.
    fn gpu_manager(&self) -> BTreeMap<String, String> {
        let mut written = owned([
            ("tencent.com/predicate-node", self.node.to_owned()),
            ("tencent.com/predicate-time", self.nanoseconds()),
            ("tencent.com/gpu-assigned", "true".to_owned()),
        ]);
        for (at, name) in
            self.containers.iter().enumerate().filter(|(_, name)| self.placement.contains_key(*name))
        {
            written.insert(format!("tencent.com/predicate-gpu-idx-{at}"), self.indexes(name));
        }
        written
    }

    /// elastic-gpu-scheduler, pkg/utils/types.go.
    fn elastic(&self) -> BTreeMap<String, String> {
        let mut written = owned([("elasticgpu.io/assumed", "true".to_owned())]);
        for name in self.placement.keys() {
            written.insert(format!("elasticgpu.io/container-{name}"), self.indexes(name));
        }
        written
    }

    /// HAMi, docs/develop/protocol.md: for each container, each GPU with MiB and percent.
    fn hami(&self) -> BTreeMap<String, String> {
        let terms = self.gpus.terms();
        let device = |gpu: &ShownGpu, share: &Share| {
            let (bytes, percent) = match share.part {
                Part::Whole => (gpu.per_share, 100),
                Part::Of(..) => share.part.of(&gpu.gpu()),
            };
            format!("{},NVIDIA,{},{percent}:", gpu.uuid, bytes >> 20)
        };
        let of_container = |name: &String| {
            let asking = self.asking.iter().find(|one| one.container == *name);
            let share = asking.and_then(|one| terms.share(&one.amounts, one.gpus).ok());
            let share = share.as_ref();
            let devices = self.its(name).into_iter().filter_map(|gpu| Some(device(gpu, share?)));
            format!("{};", devices.collect::<String>())
        };
        let devices: String = self.containers.iter().map(of_container).collect();
        owned([
            ("hami.io/vgpu-node", self.node.to_owned()),
            ("hami.io/vgpu-time", self.now.as_second().to_string()),
            ("hami.io/bind-time", self.now.as_second().to_string()),
            ("hami.io/bind-phase", "success".to_owned()),
            ("hami.io/vgpu-devices-allocated", devices),
        ])
    }

    fn indexes(&self, container: &str) -> String {
        let indexes = self.placement.get(container).into_iter().flatten();
        indexes.map(u32::to_string).collect::<Vec<_>>().join(",")
    }
}

fn owned<const N: usize>(pairs: [(&str, String); N]) -> BTreeMap<String, String> {
    pairs.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}
