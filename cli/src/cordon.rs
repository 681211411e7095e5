//! `gpushare cordon` and `uncordon`: GPUs of which no new share is given. The list is the setting
//! `quota.cordoned_by_command` in a drop-in of its own: it outlives a boot, and no byte of the
//! administrator's files changes.

use std::collections::BTreeSet;
use std::fs::{DirBuilder, Permissions, set_permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use gpushare_config::Config;
use gpushare_inject::one_line;
use gpushare_inventory::{Faults, Gpu, GpuUuid};
use gpushare_request::{DeviceSelector, find_gpu};

use crate::failure::Failure;
use crate::file::{self, FileChange};
use crate::meter::newest_record;
use crate::{node, table};

/// The drop-in's name.
const NAME: &str = "cordoned.toml";
/// What stands before the list.
const HEAD: &str = "# Written by `gpushare cordon` and `gpushare uncordon`.\n";

/// What becomes of the GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// No new share of them is given.
    Cordon,
    /// New shares of them are given again.
    Uncordon,
}

/// Cordons or uncordons the GPUs that are named by index, UUID or the beginning of one: all or none.
pub fn cordon(change: Change, names: &[String]) -> Result<()> {
    let _turn = file::turn();
    let path = file::drop_in(NAME);
    // Read before the settings: whoever writes in between is noticed.
    let before = file::read(&path)?;
    let config = Config::load()?;
    // A GPU that is divided is cordoned with all its instances.
    let shown = node::shown(&config).map(|node| [node.gpus, node.divided].concat());
    let mut cordoned = config.cordoned_by_command.clone();
    let mut named = Vec::new();
    for name in names {
        let gpu = match name.parse().ok().filter(|uuid| cordoned.contains(uuid)) {
            // The driver may not show it any more.
            Some(known) => known,
            None => named_gpu(name, shown.as_ref().map_err(|why| anyhow!("{}", one_line(why)))?)?,
        };
        match change {
            Change::Cordon => cordoned.insert(gpu),
            Change::Uncordon => cordoned.remove(&gpu),
        };
        named.push(gpu);
    }
    let gpus = shown.unwrap_or_default();
    make_folder(&path)?;
    file::apply(&[FileChange { path, before, after: text(&cordoned) }])?;
    let now = Config::load()?.quota.cordoned;
    let (state, store) = node::store(&config)?;
    let loads = store.living_loads()?;
    for gpu in named {
        let known = gpus.iter().find(|known| known.uuid == gpu);
        let name = known.map_or_else(|| gpu.to_string(), |known| known.to_string());
        let card = known.map_or(gpu, Gpu::card);
        match (change, now.contains(&gpu) || now.contains(&card)) {
            (Change::Cordon, _) => {
                let held = loads.get(&gpu).map_or(0, |load| load.leases + load.of_instances);
                table::line(&format!(
                    "{name} is cordoned: no new share of it is given; {held} lease(s) stay"
                ))?;
            }
            (Change::Uncordon, false) => {
                let mended = Faults::forget(state.path(), card, newest_record(&config))?;
                let after = if mended { "; its fault is forgotten" } else { "" };
                table::line(&format!("{name} gives new shares{after}"))?;
            }
            (Change::Uncordon, true) => {
                let what = if now.contains(&gpu) { "it" } else { "its card" };
                return Err(Failure::refused(format!(
                    "{name} stays cordoned: quota.cordoned of the settings names {what}; take it out there"
                ))
                .into());
            }
        }
    }
    Ok(())
}

fn named_gpu(name: &str, gpus: &[Gpu]) -> Result<GpuUuid> {
    let selector: DeviceSelector = name
        .parse()
        .map_err(|why| Failure::not_found(format!("{name:?} names no GPU: {}", one_line(&why))))?;
    Ok(find_gpu(&selector, gpus)?.uuid)
}

/// Makes the folder of drop-ins, whatever the umask: settings that others may write are not read.
fn make_folder(file: &Path) -> Result<()> {
    let Some(folder) = file.parent() else { return Ok(()) };
    let made = DirBuilder::new().mode(0o755).create(folder);
    match made.and_then(|()| set_permissions(folder, Permissions::from_mode(0o755))) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            Err(error).with_context(|| format!("cannot make {}", folder.display()))
        }
        _ => Ok(()),
    }
}

/// The drop-in; `None` without a GPU.
fn text(cordoned: &BTreeSet<GpuUuid>) -> Option<String> {
    let list: Vec<String> = cordoned.iter().map(|gpu| format!("\"{gpu}\"")).collect();
    (!list.is_empty()).then(|| format!("{HEAD}[quota]\ncordoned_by_command = [{}]\n", list.join(", ")))
}
