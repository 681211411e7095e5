//! `gpushare inventory refresh`: asks NVML about the GPUs and fits our libraries to the driver, once per
//! boot, driver version and set of GPUs.

mod memory;
mod mig;
mod nvlink;

use std::path::Path;

use anyhow::{Context, Result};
use gpushare_config::{Config, Paths};
use gpushare_inject::{Fitted, out_of_service};
use gpushare_inventory::{GpuTotals, Node, Totals, boot_id, open_now};
use gpushare_quota::StateFolder;
use nvml_wrapper::Nvml;

use crate::table;
use memory::Memory;
use nvlink::Links;

/// Asks NVML and writes the answer into the cache.
pub fn refresh() -> Result<()> {
    let config = Config::load()?;
    let state = StateFolder::open(&config.paths.state)?;
    let node = Node::open(&config.roots)?;
    fit(&config, &node, &state)?;
    let totals = ask(&node, &state)?;
    let known = totals.gpus.iter().filter(|gpu| gpu.memory_bytes > 0).count();
    let (count, version) = (node.gpus.len() + node.sick.len(), &totals.driver_version);
    table::line(&format!("driver {version}: the memory of {known} of {count} GPU(s) is known"))?;
    for sick in &node.sick {
        eprintln!("gpushare: {}", out_of_service(sick));
    }
    Ok(())
}

/// Makes the copies of our libraries that containers of this node get, where they are missing.
pub fn fit(config: &Config, node: &Node, state: &StateFolder) -> Result<()> {
    let Paths { cache, libraries, .. } = &config.paths;
    let fitted = Fitted { cache, libraries, driver: &node.driver, state: state.path() };
    if fitted.is_complete() { Ok(()) } else { Ok(fitted.refresh()?) }
}

/// Asks NVML about the GPUs of `node`, and keeps the answer for the runtime.
pub fn ask(node: &Node, state: &StateFolder) -> Result<Totals> {
    let nvml = nvml_of(node)?;
    let cuda =
        nvml.sys_cuda_driver_version().map(|version| format!("{}.{}", version / 1000, version % 1000 / 10));
    let mut gpus = told(&nvml)?;
    // A GPU that NVML cannot open gets the size 0 and takes no leases. The other GPUs still do.
    for gpu in &node.gpus {
        let uuid = gpu.uuid.to_string();
        if gpus.iter().all(|told| told.uuid != uuid) {
            gpus.push(GpuTotals { uuid, brand: "unknown".to_owned(), ..GpuTotals::default() });
        }
    }
    for gpu in &node.gpus {
        let uuid = gpu.uuid.to_string();
        for told in gpus.iter_mut().filter(|told| told.uuid == uuid) {
            told.shown = node.instances_shown(gpu);
        }
    }
    let totals = Totals {
        boot_id: boot_id()?,
        driver_version: node.driver.version.clone(),
        cuda_version: cuda.unwrap_or_default(),
        gpus,
    };
    totals.store(&Totals::path(state.path()))?;
    Ok(totals)
}

/// Starts NVML from the driver's own library.
///
/// # Errors
/// When the library is missing or does not start, or another process has a lease (fcntl(2)) on its file: the
/// loader would wait for that.
pub fn nvml_of(node: &Node) -> Result<Nvml> {
    let library = node.driver.libnvidia_ml()?;
    // While it is open here, nobody gets a lease on it.
    let _held = open_now(&library)
        .with_context(|| format!("cannot open {} now; see `gpushare doctor`", library.display()))?;
    nvml(&library)
}

/// Starts NVML from the driver's own `library`.
pub fn nvml(library: &Path) -> Result<Nvml> {
    let nvml = Nvml::builder().lib_path(library.as_os_str()).init();
    nvml.with_context(|| format!("cannot start NVML from {}; see `gpushare doctor`", library.display()))
}

/// NVML's answers for each GPU that it can open.
fn told(nvml: &Nvml) -> Result<Vec<GpuTotals>> {
    let count = nvml.device_count().context("NVML cannot count the GPUs")?;
    let mut gpus = Vec::new();
    let mut links = Vec::new();
    let mut failed = None;
    for index in 0..count {
        let opened = nvml.device_by_index(index).and_then(|gpu| Ok((gpu.uuid()?, gpu)));
        let (uuid, gpu) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                eprintln!("gpushare: NVML cannot open GPU {index}: {error}");
                failed = Some(error);
                continue;
            }
        };
        // A GPU without a known size takes no leases.
        let Memory { total: memory_bytes, reserved: reserved_bytes } = Memory::of(&gpu);
        let brand =
            gpu.brand().map_or_else(|_| "unknown".to_owned(), |brand| format!("{brand:?}").to_lowercase());
        let architecture =
            gpu.cuda_compute_capability().map(|found| format!("{}.{}", found.major, found.minor));
        let architecture = architecture.unwrap_or_default();
        links.push(Links::of(&gpu));
        let is_mig = mig::is_on(&gpu);
        let instances = if is_mig { mig::instances(&gpu) } else { Vec::new() };
        let nvlink_group = String::new();
        gpus.push(GpuTotals {
            uuid,
            memory_bytes,
            reserved_bytes,
            brand,
            architecture,
            nvlink_group,
            is_mig,
            instances,
            shown: Vec::new(),
        });
    }
    for (gpu, group) in gpus.iter_mut().zip(nvlink::groups(&links)) {
        gpu.nvlink_group = group;
    }
    // If no GPU could be asked, there is no answer to keep.
    match failed {
        Some(error) if gpus.is_empty() => Err(error).context("NVML cannot open any GPU"),
        _ => Ok(gpus),
    }
}
