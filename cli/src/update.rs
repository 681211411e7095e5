//! `gpushare update`: changes the figures of a living container's share.

use std::io::{self, Write};

use anyhow::{Context, Result};
use gpushare_config::Config;
use gpushare_inject::change_share;
use gpushare_inventory::{GpuUuid, Node};
use gpushare_quota::{Change, Compute, Lease, Running};
use gpushare_request::{ComputePolicy, Cores, DeviceSelector, MemoryRequest, Priority, find_gpu};
use schemars::JsonSchema;
use serde::Serialize;

use crate::container::{containers, find, ids};
use crate::failure::Failure;
use crate::node::GpuNames;
use crate::ps::Seen;
use crate::{Output, answer, node, table};

/// What to change, and of which container.
#[derive(clap::Args)]
pub struct Update {
    /// The container's name, its id or the beginning of that; in a cluster NAMESPACE/POD/CONTAINER.
    id: String,
    /// The runtime root, where the id alone is not unique.
    #[arg(long)]
    root: Option<String>,
    /// Only the share of this GPU, by index, UUID or the beginning of one; else that of all the container's
    /// GPUs.
    #[arg(long, value_name = "GPU")]
    device: Option<DeviceSelector>,
    #[command(flatten)]
    figures: Figures,
    #[command(flatten)]
    output: Output,
}

/// At least one of them.
#[derive(clap::Args)]
#[group(required = true, multiple = true)]
struct Figures {
    /// Memory per GPU, as 6GiB or 25%. Less than the container uses takes nothing from it: it gets no more
    /// until it has freed enough.
    #[arg(long, value_name = "SIZE")]
    memory: Option<MemoryRequest>,
    /// Compute per GPU in percent.
    #[arg(long, value_name = "PERCENT")]
    cores: Option<Cores>,
    /// fixed (hard cap), burst (idle time may be used), latency (burst, and before others) or none (no compute
    /// limit), on all GPUs.
    #[arg(long, value_name = "POLICY")]
    compute_policy: Option<ComputePolicy>,
    /// 0 (low) to 9, on all GPUs.
    #[arg(long, value_name = "LEVEL")]
    priority: Option<Priority>,
}

/// A share after its change.
#[derive(Serialize, JsonSchema)]
pub struct Updated {
    /// The container's runtime root; empty where the engine named none.
    root: String,
    /// The container's id.
    id: String,
    /// The ids of all containers that hold the share.
    containers: Vec<String>,
    /// `fixed`, `burst`, `latency` or `none`.
    compute_policy: &'static str,
    /// 0 (low) to 9.
    priority: u8,
    /// One for each GPU.
    gpus: Vec<UpdatedPart>,
}

/// The share on one GPU.
#[derive(Serialize, JsonSchema)]
struct UpdatedPart {
    /// UUID of the GPU or MIG instance.
    uuid: String,
    /// The limit in bytes.
    memory_bytes: u64,
    /// Bytes that the container holds, by its own books or its supervisor's.
    used_bytes: Option<u64>,
    /// Whether it holds more than the limit: nothing is taken from it, and it gets no more.
    over: bool,
    /// Compute share in percent; null without one.
    cores: Option<u8>,
}

/// Changes the lease and the container's limits, and prints the new figures.
pub fn update(asked: &Update) -> Result<()> {
    let config = Config::load()?;
    config.log.start();
    let (state, store) = node::store(&config)?;
    let lease = find(&store, &asked.id, asked.root.as_deref())?;
    if lease.is_gone() {
        let message =
            format!("container {} is gone: its share goes with `gpushare sweep`", containers(&lease));
        return Err(Failure::not_found(message).into());
    }
    let node = node::all(&config, &state)?;
    let change = Change {
        memory: asked.figures.memory,
        cores: asked.figures.cores.map(Compute::AtMost),
        compute_policy: asked.figures.compute_policy,
        priority: asked.figures.priority,
        gpu: asked.device.as_ref().map(|selector| gpu(selector, &lease, &node)).transpose()?,
        ..Change::default()
    };
    let changed =
        change_share(&state, &store, &lease, &[change], &node, &config.settings(node::settings_file()));
    let (_, new) = changed.with_context(|| format!("cannot update container {}", containers(&lease)))?;
    let seen = Seen::of(state.path(), &new, &Running::default());
    if asked.output.json {
        return Ok(answer::print(Updated::of(&new, &seen))?);
    }
    Ok(print(&new, &seen, &GpuNames::of(&config))?)
}

fn gpu(selector: &DeviceSelector, lease: &Lease, node: &Node) -> Result<GpuUuid> {
    let gpu = find_gpu(selector, &node.gpus)?;
    if !lease.grants.iter().any(|grant| grant.gpu == gpu.uuid) {
        let message = format!("container {} holds no share of GPU {}", containers(lease), gpu.index);
        return Err(Failure::not_found(message).into());
    }
    Ok(gpu.uuid)
}

impl Updated {
    fn of(lease: &Lease, seen: &Seen) -> Self {
        let parts = lease.grants.iter().enumerate().map(|(line, grant)| {
            let used = seen.used(line);
            UpdatedPart {
                uuid: grant.gpu.to_string(),
                memory_bytes: grant.memory.bytes(),
                used_bytes: used.map(|used| used.bytes()),
                over: used.is_some_and(|used| used > grant.memory),
                cores: grant.cores.map(|cores| cores.percent()),
            }
        });
        Self {
            root: lease.member.key.root.clone(),
            id: lease.member.key.container.clone(),
            containers: ids(lease).into_iter().map(str::to_owned).collect(),
            compute_policy: lease.compute_policy.name(),
            priority: lease.priority.level(),
            gpus: parts.collect(),
        }
    }
}

fn print(lease: &Lease, seen: &Seen, names: &GpuNames) -> io::Result<()> {
    let cores = |cores: Option<Cores>| cores.map_or_else(|| "no limit".to_owned(), |cores| cores.to_string());
    let rows = lease.grants.iter().map(|grant| {
        [
            containers(lease),
            names.name(grant.gpu),
            grant.memory.to_string(),
            cores(grant.cores),
            lease.compute_policy.name().to_owned(),
            lease.priority.level().to_string(),
        ]
    });
    table::print(["CONTAINER", "GPU", "MEMORY", "COMPUTE", "POLICY", "PRIORITY"], rows)?;
    let mut out = io::stdout().lock();
    for (line, grant) in lease.grants.iter().enumerate() {
        if let Some(used) = seen.used(line).filter(|used| *used > grant.memory) {
            let gpu = names.name(grant.gpu);
            writeln!(
                out,
                "it holds {used} on GPU {gpu}: nothing is taken away, and it gets no more until it holds less"
            )?;
        }
    }
    if lease.compute_policy == ComputePolicy::None && lease.grants.iter().any(|grant| grant.cores.is_some()) {
        writeln!(out, "its compute policy is none: the compute share is kept for it, and does not limit it")?;
    }
    Ok(())
}
