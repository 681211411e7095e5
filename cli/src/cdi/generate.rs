//! `gpushare cdi generate`: writes the CDI specifications of this node's shares and GPUs.

use std::env;
use std::io::{self, Write};
use std::path::{self, Path, PathBuf};

use anyhow::{Context, Result, bail};
use gpushare_config::Config;
use gpushare_inject::{CdiDevice, CdiSpec, Image, Plan};
use gpushare_inventory::{DeviceMemory, Gpu, Node};
use gpushare_quota::{Grant, StateFolder};
use gpushare_request::{Devices, MemoryRequest, NodeGpus, Request, ShareName};

use super::{Generate, Kind};
use crate::{inventory, node, plan};

/// Writes the specifications that were asked for, or prints one.
pub fn generate(asked: &Generate) -> Result<()> {
    let config = Config::load()?;
    refuse_unread(&config)?;
    let state = StateFolder::open(&config.paths.state)?;
    let node = node::inventory(&config, &state)?;
    inventory::fit(&config, &node, &state)?;
    let kinds = asked.kind.map_or_else(|| vec![Kind::Share, Kind::Gpu], |kind| vec![kind]);
    if asked.output == Path::new("-") {
        let [kind] = kinds[..] else {
            bail!("one file holds one kind of device: say --kind share or --kind gpu")
        };
        let spec = spec(kind, asked, &config, &node, &state)?;
        return Ok(writeln!(io::stdout().lock(), "{}", serde_json::to_string_pretty(&spec)?)?);
    }
    for kind in kinds {
        let spec = spec(kind, asked, &config, &node, &state)?;
        let path = asked.output.join(kind.file());
        spec.write(&path, 0o644).with_context(|| format!("cannot write {}", path.display()))?;
        writeln!(
            io::stdout().lock(),
            "{}: {} devices of {}",
            path.display(),
            spec.devices().len(),
            spec.kind()
        )?;
    }
    Ok(())
}

/// Fails if this node reads no requests from the environment: a CDI device can leave a request nowhere else.
fn refuse_unread(config: &Config) -> Result<()> {
    let setting = match (config.request.strict, config.request.ignore_env) {
        (true, _) => "request.strict = true",
        (false, true) => "request.env = false",
        (false, false) => return Ok(()),
    };
    bail!(
        "CDI devices ask by the environment, by which this node grants nothing ({setting}); use annotations instead"
    )
}

fn spec(kind: Kind, asked: &Generate, config: &Config, node: &Node, state: &StateFolder) -> Result<CdiSpec> {
    let hook = &config.paths.hook;
    let settings = settings()?;
    Ok(match kind {
        Kind::Share => CdiSpec::shares(shares(asked, config, node)?, hook, settings.as_deref())?,
        Kind::Gpu => CdiSpec::gpus(gpus(config, node, state)?, hook, settings.as_deref())?,
    })
}

/// The settings file that the environment names. It is written into the specification, since engines do not
/// hand the variable on to hooks.
fn settings() -> Result<Option<PathBuf>> {
    let named = env::var_os(gpushare_config::ENVIRONMENT).filter(|path| !path.is_empty());
    Ok(named.map(path::absolute).transpose()?)
}

/// The shares that one of the node's GPUs can hold. A share that was named on the command line must fit.
fn shares(asked: &Generate, config: &Config, node: &Node) -> Result<Vec<CdiDevice>> {
    let sizes = node.gpus.iter().filter_map(|gpu| gpu.memory);
    let largest = sizes.map(|memory| config.quota.per_lease(memory)).max().unwrap_or(DeviceMemory::ZERO);
    let fits = |name: &str| -> Result<bool> {
        let share: ShareName = name.parse().with_context(|| format!("{name:?}"))?;
        Ok(!matches!(share.memory, MemoryRequest::Bytes(memory) if memory > largest))
    };
    let names = if asked.share.is_empty() { &config.cdi_shares } else { &asked.share };
    let mut devices: Vec<CdiDevice> = Vec::new();
    for name in names {
        let known = devices.iter().any(|device| device.name() == name);
        match fits(name)? {
            true if !known => devices.push(CdiDevice::share(name)),
            false if !asked.share.is_empty() => {
                bail!("no GPU of this node can hold {name}: the largest share is {largest}")
            }
            _ => {}
        }
    }
    if devices.is_empty() {
        bail!("none of cdi.shares fits a GPU of this node, whose largest share is {largest}");
    }
    Ok(devices)
}

/// One device for each GPU by its index, one by its UUID, and the device `all`.
fn gpus(config: &Config, node: &Node, state: &StateFolder) -> Result<Vec<CdiDevice>> {
    let mut devices = Vec::new();
    for gpu in &node.gpus {
        let plan = whole(&[gpu], config, node, state)?;
        devices.push(CdiDevice::gpu(&gpu.number(), &plan));
        devices.push(CdiDevice::gpu(&gpu.uuid.to_string(), &plan));
    }
    let all = NodeGpus(&node.gpus).unnamed();
    devices.push(CdiDevice::gpu("all", &whole(&all, config, node, state)?));
    Ok(devices)
}

/// The plan of whole GPUs, as a container without a library folder of its own would get it.
fn whole(gpus: &[&Gpu], config: &Config, node: &Node, state: &StateFolder) -> Result<Plan> {
    let request = Request::whole(Devices::All);
    let grant = |gpu: &&Gpu| Grant {
        gpu: gpu.uuid,
        card: None,
        memory: gpu.memory.unwrap_or(DeviceMemory::ZERO),
        cores: None,
    };
    let lease = plan::lease(&request, gpus.iter().map(grant).collect())?;
    plan::of(&request, &lease, node, &config.programs(state.path(), None), &Image::default())
}
