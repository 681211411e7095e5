//! `gpushare plan`: a dry run of `create`.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::iter;
use std::path::Path;

use crate::overview::holders;
use anyhow::{Context, Result};
use gpushare_config::Config;
use gpushare_inject::{
    Bundle, DriverLimiter, HostFiles, Image, Offer, Plan, PlanParts, Programs, Requirements, RootFolder,
    admit, admit_mode, beside_sick, check_lease, clear, decide, is_bystander, look_up_allocation,
    look_up_claim, missing_interpreters, pod_of, refuse_previous_plan, take_out_driver, too_little,
};
use gpushare_inventory::{DeviceMemory, Node};
use gpushare_quota::{Grant, Holder, Lease, LeaseKey, Member, Store};
use gpushare_request::{
    Devices, InterceptorPolicy, MemoryRequest, Mode, Request, RequestError, Scope, is_request, read,
};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use crate::{answer, inventory, node, table};

/// Notes on what a dry run cannot show.
const NO_USER_NAMESPACES: &str = "its seccomp filter will deny user namespaces (inject.user_namespaces)";
const OF_THE_POD: &str =
    "this is what the pod's first container would be granted: the others join that share, whatever is free";

/// What a bundle would get. Of a bundle that asks for nothing all is null or empty.
#[derive(Default, Serialize, JsonSchema)]
pub struct Planned {
    /// The whole request, as keys of gpushare's own dialect.
    asked: Option<BTreeMap<String, String>>,
    /// In whose words it was asked for.
    dialects: Vec<&'static str>,
    /// What was decided about the request, and why.
    notes: Vec<String>,
    grants: Vec<PlannedGrant>,
    /// Host memory that may stand in for the GPUs', in bytes.
    host_memory_bytes: Option<u64>,
    /// What the memory may grow to on each GPU, in bytes; null where it does not grow.
    memory_limit_bytes: Option<u64>,
    /// 0 (low) to 9.
    priority: Option<u8>,
    /// `fixed`, `burst` or `none`.
    compute_policy: Option<&'static str>,
    /// Future holder of its memory within the limit: `supervisor`, `library` or `nobody`.
    held_by: Option<&'static str>,
    /// Whether the driver's own limit would be set, too.
    driver_limit: bool,
    /// What would change in config.json: devices, mounts, hooks, variables.
    edits: Option<Value>,
}

/// What would be granted on one GPU.
#[derive(Serialize, JsonSchema)]
struct PlannedGrant {
    /// UUID of the GPU or MIG instance.
    uuid: String,
    memory_bytes: u64,
    /// Compute share in percent; null without one.
    cores: Option<u8>,
}

impl PlannedGrant {
    fn of(grant: &Grant) -> Self {
        Self {
            uuid: grant.gpu.to_string(),
            memory_bytes: grant.memory.bytes(),
            cores: grant.cores.map(|cores| cores.percent()),
        }
    }
}

/// Prints what the bundle asks for, what it would be granted now and what would change in its config.json.
/// Neither the bundle nor the store is changed.
pub fn plan(path: &Path, as_json: bool) -> Result<()> {
    let config = Config::load()?;
    let bundle = Bundle::open(path, None)?;
    let mut json = bundle.json()?;
    let container = config.container(&json);
    if !is_request(&container, &config.request) {
        refuse_previous_plan(&json, &config.paths.hook)?;
        return nothing(as_json, config.denies_bystanders && is_bystander(&json, &config.roots));
    }
    let (state, store) = node::store(&config)?;
    let node = node::inventory(&config, &state)?;
    let programs = config.programs(state.path(), node::settings_file());
    admit(&json, bundle.path(), &programs, &node, config.request.strict)?;
    inventory::fit(&config, &node, &state)?;
    let claimed = look_up_claim(&container, || anyhow::Ok(Store::open(state.path())?))?;
    let container = claimed.unwrap_or(container);
    let container = look_up_allocation(&container, &state, config.request.kubelet)?.unwrap_or(container);
    let request = read(&container, &config.request, &node.gpus);
    let request = request.map_err(|error| beside_sick(error.into(), &node))?;
    let mut request = request.ok_or(RequestError::NoShare)?;
    if config.denies_user_namespaces {
        request.notes.push(NO_USER_NAMESPACES.to_owned());
    }
    if request.scope == Scope::Pod {
        request.notes.push(OF_THE_POD.to_owned());
    }
    admit_mode(&json, &request, &state)?;
    decide(&mut request, programs.supervisor, &node, (&json, false))?;
    clear(&mut json, &request, false)?;
    take_out_driver(&mut json, &node.driver.sources());
    let grants = match container.reserved() {
        Some(reserved) => reserved.shares.iter().map(Grant::from).collect(),
        None => {
            let grants =
                store.preview(pod_of(&container, &json).as_ref(), &request, &node.gpus, &config.quota);
            grants.map_err(|error| beside_sick(error.into(), &node))?
        }
    };
    let mut lease = lease(&request, grants)?;
    if let Some(id) = request.reserved
        && let Some(joined) = store.leases()?.into_iter().find(|lease| lease.id == id)
    {
        // Who holds it is settled while containers have it.
        lease.enforcement = match joined.has_containers() {
            true => joined.enforcement,
            false => joined.enforcement.begun_by(&request),
        };
        check_lease(&lease, &request, programs.supervisor, &node, (&json, false))?;
    }
    request.notes.extend(too_little(&lease));
    Requirements::of(&container)?.check(&Offer::of(&node, &lease))?;
    let root = RootFolder::open(&bundle.root(&json), &json)?;
    let image = root.look(bundle.path(), &json);
    let plan = of(&request, &lease, &node, &programs, &image)?;
    request.notes.extend(plan.loader_cache.note());
    root.check(plan.targets())?;
    request.notes.extend(missing_interpreters(&plan, &root));
    plan.edit(&mut json.clone()).context("config.json cannot be changed")?;
    if as_json {
        let asked = keys(&request).into_iter().map(|(key, value)| (key.to_owned(), value));
        return Ok(answer::print(Planned {
            asked: Some(asked.collect()),
            dialects: request.dialects.clone(),
            notes: request.notes.clone(),
            grants: lease.grants.iter().map(PlannedGrant::of).collect(),
            host_memory_bytes: Some(lease.host_memory.bytes()),
            memory_limit_bytes: lease.elastic.map(|bounds| bounds.most.bytes()),
            priority: Some(lease.priority.level()),
            compute_policy: Some(lease.compute_policy.name()),
            held_by: Some(lease.enforcement_for(&request).terms().held_by.name()),
            driver_limit: plan.limiter.is_some(),
            edits: Some(serde_json::to_value(&plan)?),
        })?);
    }
    Ok(print(&request, &lease, &plan, &node)?)
}

/// The plan for `lease`, with the host's files that it needs.
pub fn of(request: &Request, lease: &Lease, node: &Node, programs: &Programs, image: &Image) -> Result<Plan> {
    let extent = lease.enforcement_for(request).terms().extent;
    let files = HostFiles::gather(request, extent, &node.driver, programs, image)?;
    let limiter = DriverLimiter::of(programs, &node.driver.version, lease, request)?;
    let parts = PlanParts {
        driver_version: &node.driver.version,
        gpus: &node.gpus,
        nodes: &node.nodes,
        files: &files,
        image,
        programs,
        limiter: limiter.as_ref(),
        needs_poststop: false,
    };
    Ok(Plan::new(request, lease, parts)?)
}

fn nothing(as_json: bool, is_denied: bool) -> Result<()> {
    if as_json {
        return Ok(answer::print(Planned::default())?);
    }
    let around =
        if is_denied { ", in a filter in which the driver's calls fail (supervisor.bystanders)" } else { "" };
    Ok(writeln!(io::stdout(), "no request: the bundle reaches the low-level runtime as it is{around}")?)
}

/// The lease that `create` would make. Its id is 0, which no real lease has.
pub fn lease(request: &Request, grants: Vec<Grant>) -> Result<Lease> {
    let key = LeaseKey { root: "ROOT".to_owned(), container: "CONTAINER".to_owned() };
    let member = Member::reserved(key, Holder::this_process().context("cannot plan")?);
    Ok(Lease::new(member, request, grants))
}

/// The whole request, as keys of gpushare's own dialect and their values. Keys that were not set have their
/// default.
fn keys(request: &Request) -> Vec<(&'static str, String)> {
    let devices = match &request.devices {
        Devices::Any(count) => ("count", count.to_string()),
        Devices::These(list) => ("devices", joined(list)),
        Devices::Among(count, of) => ("count", format!("{count} of {}", joined(of))),
        Devices::All => ("devices", "all".to_owned()),
    };
    let model = match request.model.to_string() {
        any if any.is_empty() => "any".to_owned(),
        filter => filter.escape_debug().to_string(),
    };
    let memory = match (request.mode, request.memory) {
        (Mode::TimeSlice, MemoryRequest::Rest) => "no limit".to_owned(),
        (_, memory) => memory.to_string(),
    };
    let scope = (request.scope == Scope::Pod).then(|| ("scope", "pod".to_owned()));
    let rest = vec![
        ("memory", memory),
        ("cores", request.cores.map_or_else(|| "no limit".to_owned(), |cores| cores.to_string())),
        devices,
        ("model", model),
        ("mode", request.mode.name().to_owned()),
        ("compute-policy", request.compute_policy.name().to_owned()),
        ("capabilities", request.capabilities.to_string()),
        ("priority", request.priority.level().to_string()),
    ];
    let host =
        (request.host_memory > DeviceMemory::ZERO).then(|| ("host-memory", request.host_memory.to_string()));
    let supervisor = request.needs_supervisor.then(|| ("supervisor", "required".to_owned()));
    let limit = request.memory_limit.map(|limit| ("memory-limit", limit.to_string()));
    rest.into_iter().chain(limit).chain(host).chain(scope).chain(supervisor).collect()
}

fn joined(items: &[impl ToString]) -> String {
    items.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

fn print(request: &Request, lease: &Lease, plan: &Plan, node: &Node) -> io::Result<()> {
    let mut out = io::stdout().lock();
    for (key, value) in keys(request) {
        writeln!(out, "asked     {key} {value}")?;
    }
    if !request.dialects.is_empty() {
        writeln!(out, "asked by  {}", request.dialects.join(", "))?;
    }
    for note in &request.notes {
        writeln!(out, "note      {}", table::escaped(note))?;
    }
    if let Some((found, policy)) = &request.interceptor {
        let what = found.mounts.iter().chain(&found.preloads).map(|what| table::escaped(what));
        let done = match policy {
            InterceptorPolicy::Replace => "taken out",
            InterceptorPolicy::StandDown => "left; gpushare only keeps the books",
        };
        writeln!(out, "other     {}: {done}", what.collect::<Vec<_>>().join(", "))?;
    }
    for grant in &lease.grants {
        let gpu = node.gpus.iter().find(|gpu| gpu.uuid == grant.gpu);
        let (place, model) = match gpu.map(|gpu| (gpu, &gpu.instance)) {
            Some((gpu, Some(instance))) => {
                (format!("MIG {} {}", gpu.number(), instance.profile), &*gpu.model)
            }
            Some((gpu, None)) => (format!("GPU {}", gpu.index), &*gpu.model),
            None => ("GPU 0".to_owned(), ""),
        };
        let cores =
            grant.cores.map_or_else(|| "no compute limit".to_owned(), |cores| format!("{cores} of compute"));
        let memory = match request.mode {
            Mode::TimeSlice => "turns, no limit of memory,".to_owned(),
            Mode::Share | Mode::Mps | Mode::Exclusive => grant.memory.to_string(),
        };
        writeln!(out, "granted   {memory} and {cores} on {place} ({model}, {})", grant.gpu)?;
    }
    if let Some(bounds) = lease.elastic {
        let most = bounds.most;
        writeln!(out, "granted   up to {most} on each GPU while it has that (needs gpushare meter)")?;
    }
    let enforcement = lease.enforcement_for(request);
    let compute = Lease { enforcement, ..lease.clone() }.compute_held_by();
    writeln!(out, "held by   {}", holders(enforcement.terms().held_by.name(), compute.name()))?;
    if let Some(limiter) = &plan.limiter {
        let else_what = if limiter.is_required { "is refused" } else { "goes without" };
        writeln!(
            out,
            "granted   the driver's own limit too; if that cannot be set, the container {else_what}"
        )?;
    }
    if lease.host_memory > DeviceMemory::ZERO {
        writeln!(out, "granted   {} of host memory in place of a full GPU's", lease.host_memory)?;
    }
    let (priority, policy) = (lease.priority.level(), lease.compute_policy.name());
    writeln!(out, "granted   priority {priority} and compute policy {policy}")?;
    for device in &plan.devices {
        writeln!(out, "device    {} ({}:{} rw)", device.path().display(), device.major(), device.minor())?;
    }
    for mount in &plan.mounts {
        let source = mount.source().as_deref().unwrap_or(Path::new(""));
        let options = mount.options().as_deref().unwrap_or_default().join(",");
        writeln!(out, "mount     {} <- {} ({options})", mount.destination().display(), source.display())?;
    }
    for hook in iter::once(&plan.prestart).chain(&plan.poststop) {
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

#[cfg(test)]
mod tests {
    use gpushare_inventory::{DeviceMemory, DeviceNode, Gpu, GpuUuid};
    use gpushare_request::Policy;

    use super::*;

    fn gpu(index: u8) -> Gpu {
        let path = std::path::PathBuf::from(format!("/dev/nvidia{index}"));
        let (host_path, minor) = (path.clone(), u32::from(index));
        Gpu {
            index: minor,
            uuid: GpuUuid::from_bytes([index; 16]),
            minor,
            model: "NVIDIA H100".to_owned(),
            memory: Some(DeviceMemory::from_bytes(80 << 30)),
            node: DeviceNode { path, host_path, major: 195, minor, mode: 0o666, uid: 0, gid: 0 },
            place: gpushare_inventory::Place::default(),
            instance: None,
        }
    }

    fn told(env: &[&str]) -> Vec<String> {
        let env = env.iter().map(|entry| (*entry).to_owned()).collect();
        let gpus = [gpu(0), gpu(1)];
        let request =
            read(&gpushare_request::Container::new(BTreeMap::new(), env), &Policy::default(), &gpus);
        keys(&request.unwrap().unwrap()).into_iter().map(|(key, value)| format!("{key} {value}")).collect()
    }

    #[test]
    fn every_key_that_was_set_is_told() {
        let rest = ["mode share", "compute-policy fixed", "capabilities compute,utility", "priority 5"];
        let plain = [&["memory 4 GiB", "cores no limit", "count 1", "model any"][..], &rest].concat();
        assert_eq!(told(&["GPUSHARE_MEMORY=4GiB"]), plain);
        for (entry, want) in [
            ("GPUSHARE_MEMORY=25%", "memory 25%"),
            ("GPUSHARE_CORES=30", "cores 30%"),
            ("GPUSHARE_COUNT=2", "count 2"),
            ("GPUSHARE_DEVICES=1", "devices GPU-01010101-0101-0101-0101-010101010101"),
            (
                "GPUSHARE_DEVICES=all",
                "devices GPU-00000000-0000-0000-0000-000000000000,GPU-01010101-0101-0101-0101-010101010101",
            ),
            ("GPUSHARE_MODEL=H100*,!\u{1b}*", "model H100*,!\\u{1b}*"),
            ("GPUSHARE_MODE=exclusive", "mode exclusive"),
            ("GPUSHARE_COMPUTE_POLICY=burst", "compute-policy burst"),
            ("GPUSHARE_CAPABILITIES=video", "capabilities video"),
            ("GPUSHARE_PRIORITY=9", "priority 9"),
        ] {
            let told = told(&[entry]);
            assert!(told.iter().any(|line| line == want), "{entry}: {told:?}");
        }
    }
}
