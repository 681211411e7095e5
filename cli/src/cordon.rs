//! `gpushare cordon` and `uncordon`: GPUs of which no new share is given. The list is the setting
//! `quota.cordoned`, which outlives a boot, kept in a drop-in of its own.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use gpushare_config::{Config, DEFAULT_PATH, ENVIRONMENT};
use gpushare_inventory::{Gpu, GpuUuid, Node};
use gpushare_quota::Store;
use gpushare_request::{DeviceSelector, find_gpu};

use crate::{node, table};

/// The drop-in's name. Of several files that set the list the last one counts.
const NAME: &str = "zz-cordoned.toml";
const HEAD: &str = "# Written by `gpushare cordon` and `uncordon`.\n";

/// What becomes of the GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// No new share of them is given.
    Cordon,
    /// New shares of them are given again.
    Uncordon,
}

/// Cordons or uncordons the GPUs that are named by index, UUID or the beginning of one.
pub fn cordon(change: Change, names: &[String]) -> Result<()> {
    let before = Config::load()?;
    let gpus = Node::open(&before.roots)?.gpus;
    let mut cordoned = before.quota.cordoned.clone();
    let mut named = Vec::new();
    for name in names {
        let gpu = named_gpu(name, &gpus, &cordoned)?;
        match change {
            Change::Cordon => cordoned.insert(gpu),
            Change::Uncordon => cordoned.remove(&gpu),
        };
        named.push(gpu);
    }
    write(&drop_in(), &cordoned)?;
    let now = Config::load()?.quota.cordoned;
    ensure!(
        now == cordoned,
        "a settings file that is read after {} sets quota.cordoned, too: take it out there",
        drop_in().display()
    );
    let (_, store) = node::store(&before)?;
    named.iter().try_for_each(|gpu| tell(change, *gpu, &gpus, &store))
}

/// The GPU of this name; also one that the driver does not show, by its whole UUID.
fn named_gpu(name: &str, gpus: &[Gpu], cordoned: &BTreeSet<GpuUuid>) -> Result<GpuUuid> {
    if let Some(known) = name.parse().ok().filter(|uuid| cordoned.contains(uuid)) {
        return Ok(known);
    }
    let selector: DeviceSelector = name.parse().with_context(|| format!("{name:?} names no GPU"))?;
    Ok(find_gpu(&selector, gpus)?.uuid)
}

fn drop_in() -> PathBuf {
    let file = std::env::var_os(ENVIRONMENT).map_or_else(|| PathBuf::from(DEFAULT_PATH), PathBuf::from);
    let mut folder = file.into_os_string();
    folder.push(".d");
    PathBuf::from(folder).join(NAME)
}

/// Writes the list as a whole, so that nobody ever reads half of it.
fn write(path: &Path, cordoned: &BTreeSet<GpuUuid>) -> Result<()> {
    let list: Vec<String> = cordoned.iter().map(|gpu| format!("\"{gpu}\"")).collect();
    let text = format!("{HEAD}[quota]\ncordoned = [{}]\n", list.join(", "));
    let io = || format!("cannot write {}", path.display());
    match path.parent().map(fs::create_dir) {
        Some(Err(error)) if error.kind() != ErrorKind::AlreadyExists => return Err(error).with_context(io),
        _ => {}
    }
    let temporary = path.with_extension("new");
    fs::write(&temporary, text).and_then(|()| fs::rename(&temporary, path)).with_context(io)
}

fn tell(change: Change, gpu: GpuUuid, gpus: &[Gpu], store: &Store) -> Result<()> {
    let index = gpus
        .iter()
        .find(|known| known.uuid == gpu)
        .map(|gpu| format!("GPU {} ({gpu})", gpu.index, gpu = gpu.uuid));
    let name = index.unwrap_or_else(|| gpu.to_string());
    let held = store.living_loads()?.get(&gpu).map_or(0, |load| load.leases);
    let text = match change {
        Change::Cordon => {
            format!("{name} is cordoned: no new share of it is given; {held} container(s) keep theirs")
        }
        Change::Uncordon => format!("{name} gives new shares"),
    };
    Ok(table::line(&text)?)
}
