//! `gpushare devices`: the node's GPUs and what is free on them.

use anyhow::Result;
use gpushare_config::Config;
use gpushare_inject::{one_line, out_of_service};
use gpushare_inventory::{DeviceMemory, Gpu, SickGpu};
use gpushare_quota::{Admission, Company, GpuLoad};
use gpushare_request::Mode;
use schemars::JsonSchema;
use serde::Serialize;

use crate::{answer, node, table};

/// The node's GPUs.
#[derive(Serialize, JsonSchema)]
pub struct Devices {
    driver_version: String,
    /// GPUs and MIG instances in service, by their numbers.
    gpus: Vec<Device>,
    out_of_service: Vec<OutOfService>,
}

/// A GPU or MIG instance, and what is free on it.
#[derive(Serialize, JsonSchema)]
struct Device {
    index: u32,
    uuid: String,
    /// Number of its device node.
    minor: u32,
    model: String,
    /// Its memory in bytes; null where that is not known.
    memory_bytes: Option<u64>,
    /// Memory that leases hold, in bytes.
    granted_bytes: u64,
    /// The most memory that a new share can get now, in bytes.
    free_bytes: Option<u64>,
    /// Compute that leases hold, in percent.
    granted_cores: u64,
    /// How many leases there are on it.
    shares: u64,
    /// Whether one container has it whole.
    exclusive: bool,
    /// The mode of the leases on it; null without any.
    mode: Option<&'static str>,
    /// Whether it takes no new shares.
    cordoned: bool,
    /// What it is of a divided card; null for a whole GPU.
    mig: Option<Instance>,
}

/// A MIG instance.
#[derive(Serialize, JsonSchema)]
struct Instance {
    /// UUID of the card.
    card: String,
    /// Its size, as 1g.10gb.
    profile: String,
    gpu_instance: u32,
    compute_instance: u32,
    /// Its position among the card's instances.
    position: u32,
}

/// A GPU that is out of service.
#[derive(Serialize, JsonSchema)]
struct OutOfService {
    index: u32,
    /// Its PCI address.
    address: String,
    why: String,
}

/// How GPUs reach each other.
#[derive(Serialize, JsonSchema)]
pub struct Topology {
    gpus: Vec<Place>,
}

/// Where a GPU is.
#[derive(Serialize, JsonSchema)]
struct Place {
    index: u32,
    uuid: String,
    pci_bus_id: String,
    numa_node: Option<u32>,
    /// GPUs that have the same reach each other over NVLink; null without it.
    nvlink_group: Option<String>,
    /// The way to each GPU, in their order; X is the GPU itself.
    ways: Vec<&'static str>,
}

/// Prints one row per GPU.
pub fn devices(as_json: bool) -> Result<()> {
    let config = Config::load()?;
    let (state, store) = node::store(&config)?;
    let node = node::inventory(&config, &state)?;
    let loads = store.living_loads()?;
    let rows = node.gpus.iter().map(|gpu| (gpu, loads.get(&gpu.uuid).copied().unwrap_or_default()));
    if as_json {
        return Ok(answer::print(Devices {
            gpus: rows.map(|(gpu, load)| entry(gpu, &load, &config.quota)).collect(),
            out_of_service: node.sick.iter().map(sick_entry).collect(),
            driver_version: node.driver.version,
        })?);
    }
    let rules = &config.quota;
    let headings = ["GPU", "MODEL", "MEMORY", "GRANTED", "FREE", "COMPUTE", "SHARES", "UUID"];
    table::print(headings, rows.map(|(gpu, load)| row(gpu, &load, rules)))?;
    for sick in &node.sick {
        table::line(&out_of_service(sick))?;
    }
    Ok(())
}

/// Prints by which way each GPU reaches each other one.
pub fn topology(as_json: bool) -> Result<()> {
    let config = Config::load()?;
    let (state, _) = node::store(&config)?;
    let node = node::inventory(&config, &state)?;
    let mut gpus: Vec<Gpu> = node.gpus.into_iter().filter(|gpu| gpu.instance.is_none()).collect();
    gpus.extend(node.divided);
    gpus.sort_by_key(|gpu| gpu.index);
    let ways = |gpu: &Gpu| -> Vec<&'static str> {
        let way = |other: &Gpu| if other.uuid == gpu.uuid { "X" } else { gpu.place.way(&other.place).name() };
        gpus.iter().map(way).collect()
    };
    if as_json {
        let place = |gpu: &Gpu| Place {
            index: gpu.index,
            uuid: gpu.uuid.to_string(),
            pci_bus_id: gpu.place.pci_bus_id.clone(),
            numa_node: gpu.place.numa_node,
            nvlink_group: Some(gpu.place.nvlink_group.clone()).filter(|group| !group.is_empty()),
            ways: ways(gpu),
        };
        return Ok(answer::print(Topology { gpus: gpus.iter().map(place).collect() })?);
    }
    let headings = gpus.iter().map(|gpu| format!("GPU {}", gpu.index)).collect::<Vec<_>>().join("  ");
    let row = |gpu: &Gpu| {
        let cells = ways(gpu)
            .into_iter()
            .zip(&gpus)
            .map(|(way, other)| format!("{way:width$}", width = format!("GPU {}", other.index).len()));
        let numa = gpu.place.numa_node.map_or_else(|| "-".to_owned(), |node| node.to_string());
        let (bus, cells) = (gpu.place.pci_bus_id.clone(), cells.collect::<Vec<_>>().join("  "));
        [gpu.index.to_string(), cells, numa, bus]
    };
    Ok(table::print(["GPU", &headings, "NUMA", "PCI"], gpus.iter().map(row))?)
}

/// Whether a share may stand beside what is granted.
fn is_open(load: &GpuLoad) -> bool {
    load.company.is_none_or(|company| company == Company::Shares)
}

/// The most memory that a new share can get now; `None` where the GPU's memory size is unknown.
fn free(gpu: &Gpu, load: &GpuLoad, rules: &Admission) -> Option<DeviceMemory> {
    let memory = gpu.memory.filter(|_| is_open(load) && !rules.is_cordoned(gpu));
    let free =
        memory.map(|memory| rules.total(memory).saturating_sub(load.memory).min(rules.per_lease(memory)));
    free.or(gpu.memory.map(|_| DeviceMemory::ZERO))
}

fn row(gpu: &Gpu, load: &GpuLoad, rules: &Admission) -> [String; 8] {
    let size = |memory: Option<DeviceMemory>| {
        memory.map_or_else(|| "unknown".to_owned(), |memory| memory.to_string())
    };
    let shares = match load.company {
        None | Some(Company::Shares) => load.leases.to_string(),
        Some(Company::Nobody) => Mode::Exclusive.name().to_owned(),
        Some(other) => format!("{} {}", load.leases, other.mode().name()),
    };
    [
        gpu.number(),
        match &gpu.instance {
            Some(instance) => format!("{} MIG {}", gpu.model, instance.profile),
            None => gpu.model.clone(),
        },
        size(gpu.memory),
        load.memory.to_string(),
        match rules.is_cordoned(gpu) {
            true => "cordoned".to_owned(),
            false => size(free(gpu, load, rules)),
        },
        format!("{}%", load.cores),
        shares,
        gpu.uuid.to_string(),
    ]
}

fn sick_entry(sick: &SickGpu) -> OutOfService {
    OutOfService { index: sick.index, address: sick.address.clone(), why: one_line(&sick.why) }
}

fn entry(gpu: &Gpu, load: &GpuLoad, rules: &Admission) -> Device {
    Device {
        index: gpu.index,
        uuid: gpu.uuid.to_string(),
        minor: gpu.minor,
        model: gpu.model.clone(),
        memory_bytes: gpu.memory.map(DeviceMemory::bytes),
        granted_bytes: load.memory.bytes(),
        free_bytes: free(gpu, load, rules).map(DeviceMemory::bytes),
        granted_cores: load.cores,
        shares: load.leases,
        exclusive: load.company == Some(Company::Nobody),
        mode: load.company.map(|company| company.mode().name()),
        cordoned: rules.is_cordoned(gpu),
        mig: gpu.instance.as_ref().map(|instance| Instance {
            card: instance.card.to_string(),
            profile: instance.profile.to_string(),
            gpu_instance: instance.id.gpu,
            compute_instance: instance.id.compute,
            position: instance.position,
        }),
    }
}
