//! `gpushare plan`: a dry run of `create`.

use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context, Result};
use gpushare_config::Config;
use gpushare_inject::{Bundle, Image, Plan, Programs, admit};
use gpushare_inventory::Node;
use gpushare_quota::{Grant, Holder, Lease, LeaseKey, LeaseState};
use gpushare_request::{Container, Request, Requirements};
use serde_json::{Value, json};

use crate::{inventory, node, table};

/// Prints what the bundle asks for, what it would be granted now and what would change in its config.json. Neither
/// the bundle nor the store is changed.
pub fn plan(path: &Path, as_json: bool) -> Result<()> {
    let config = Config::load()?;
    let bundle = Bundle::open(path, None)?;
    let json = bundle.json()?;
    let container = Container::from_json(&json);
    let Some(request) = gpushare_request::read(&container, &config.request)? else {
        return nothing(as_json);
    };
    if config.request.strict {
        admit(&json)?;
    }
    let (state, store) = node::store(&config)?;
    let node = node::inventory(&config, &state)?;
    inventory::fit(&config, &node)?;
    let lease = lease(&request, store.preview(&request, &node.gpus, &config.quota)?)?;
    Requirements::of(&container)?.check(&gpushare_inject::offer(&node, &lease))?;
    let root = bundle.root(&json);
    let image = Image::look(&root, bundle.path(), &json)?;
    let plan = Plan::new(&request, &lease, &node, &programs(&config, state.path()), &image)?;
    Image::check(&root, &json, plan.targets())?;
    plan.edit(&mut json.clone()).context("config.json cannot be changed")?;
    if as_json {
        let grants: Vec<Value> = lease.grants.iter().map(grant).collect();
        return Ok(table::json(&json!({ "grants": grants, "edits": serde_json::to_value(&plan)? }))?);
    }
    Ok(print(&request, &lease, &plan, &node)?)
}

/// Our own files, as the settings say.
pub fn programs<'a>(config: &'a Config, state: &'a Path) -> Programs<'a> {
    Programs {
        hook: &config.paths.hook,
        libraries: &config.paths.libraries,
        cache: &config.paths.cache,
        state,
        extra_mounts: &config.mounts,
    }
}

fn nothing(as_json: bool) -> Result<()> {
    if as_json {
        return Ok(table::json(&json!({ "grants": [], "edits": null }))?);
    }
    Ok(writeln!(io::stdout(), "no request: the bundle reaches the low-level runtime as it is")?)
}

/// The lease that `create` would make; 0 is no lease's number.
pub fn lease(request: &Request, grants: Vec<Grant>) -> Result<Lease> {
    Ok(Lease {
        id: 0,
        key: LeaseKey { root: "ROOT".to_owned(), container: "CONTAINER".to_owned() },
        grants,
        mode: request.mode,
        compute_policy: request.compute_policy,
        priority: request.priority,
        state: LeaseState::Reserved,
        holder: Holder::this_process().context("cannot plan")?,
        granted_at: 0,
    })
}

fn grant(grant: &Grant) -> Value {
    json!({
        "uuid": grant.gpu.to_string(),
        "memory_bytes": grant.memory.bytes(),
        "cores": grant.cores.map(|cores| cores.percent()),
    })
}

fn print(request: &Request, lease: &Lease, plan: &Plan, node: &Node) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "asked     memory {}, capabilities {}", request.memory, request.capabilities)?;
    for grant in &lease.grants {
        let gpu = node.gpus.iter().find(|gpu| gpu.uuid == grant.gpu);
        let (index, model) = gpu.map_or((0, ""), |gpu| (gpu.index, gpu.model.as_str()));
        let cores =
            grant.cores.map_or_else(|| "no compute limit".to_owned(), |cores| format!("{cores} of compute"));
        writeln!(out, "granted   {} and {cores} on GPU {index} ({model}, {})", grant.memory, grant.gpu)?;
    }
    for device in &plan.devices {
        writeln!(out, "device    {} ({}:{} rw)", device.path().display(), device.major(), device.minor())?;
    }
    for mount in &plan.mounts {
        let source = mount.source().as_deref().unwrap_or(Path::new(""));
        let options = mount.options().as_deref().unwrap_or_default().join(",");
        writeln!(out, "mount     {} <- {} ({options})", mount.destination().display(), source.display())?;
    }
    for hook in [&plan.prestart, &plan.poststop] {
        let arguments = hook.args().as_deref().unwrap_or_default();
        writeln!(
            out,
            "hook      {} {}",
            hook.path().display(),
            arguments.get(1..).unwrap_or_default().join(" ")
        )?;
    }
    Ok(())
}
