//! The node as the commands see it: settings, inventory with memory sizes, quota store.

use std::path::PathBuf;

use anyhow::{Context, Result};
use gpushare_config::{Config, ENVIRONMENT};
use gpushare_inject::open_measured;
use gpushare_inventory::{Faults, GpuUuid, Node, NodeError, Totals, boot_id};
use gpushare_quota::{StateFolder, Store};

/// The node's inventory, without the GPUs that are out of service. See [`all`].
pub fn inventory(config: &Config, state: &StateFolder) -> Result<Node> {
    Ok(all(config, state)?.without_faulty(&Faults::load(state.path()))?)
}

/// The node's inventory with the GPUs on which faults were noted: containers that have them keep them. A
/// cache that does not fit is renewed first, so that no command shows the GPUs of an earlier boot or driver.
pub fn all(config: &Config, state: &StateFolder) -> Result<Node> {
    let node = Node::open(&config.roots)?;
    let known = Totals::load(&Totals::path(state.path()));
    let boot = boot_id()?;
    let totals = match known.filter(|totals| totals.fits(&boot, &node)) {
        Some(totals) => totals,
        None => crate::inventory::ask(&node, state)?,
    };
    Ok(node.with_totals(&totals))
}

/// The GPUs and MIG instances that the driver shows now, with what is known of them already: NVML is not
/// asked.
///
/// # Errors
/// When there is no driver, or no GPU in service.
pub fn shown(config: &Config) -> Result<Node, NodeError> {
    let node = Node::open(&config.roots)?;
    let known = Totals::load(&Totals::path(&config.paths.state));
    let known = known.filter(|totals| boot_id().is_ok_and(|boot| totals.fits(&boot, &node)));
    Ok(match known {
        Some(totals) => node.with_totals(&totals),
        None => node,
    })
}

/// Opens the state folder and the store.
pub fn store(config: &Config) -> Result<(StateFolder, Store)> {
    let state = StateFolder::open(&config.paths.state)?;
    state.keep_history_in(&config.paths.history);
    let store = open_measured(&state).context("cannot open the quota store")?;
    Ok((state, store))
}

/// The settings file that the environment names in place of the default one.
pub fn settings_file() -> Option<PathBuf> {
    std::env::var_os(ENVIRONMENT).map(PathBuf::from)
}

/// How many letters of a UUID tables show, which tell it from the node's other UUIDs.
const SHORT: usize = 12;

/// What GPUs are called in tables: by index and the beginning of the UUID, as `0 GPU-d6a9bc01`, or
/// `0:1 MIG-5f2e0a11`.
#[derive(Default)]
pub struct GpuNames(Vec<(GpuUuid, String)>);

impl GpuNames {
    /// The names of the GPUs that the driver shows now.
    pub fn of(config: &Config) -> Self {
        let gpus = shown(config).map(|node| node.gpus).unwrap_or_default();
        Self(gpus.iter().map(|gpu| (gpu.uuid, gpu.number())).collect())
    }

    /// The GPU's name; its whole UUID where the driver does not show it any more.
    pub fn name(&self, uuid: GpuUuid) -> String {
        let text = uuid.to_string();
        match self.number(uuid) {
            Some(number) => format!("{number} {}", text.get(..SHORT).unwrap_or(&text)),
            None => text,
        }
    }

    /// The GPU's number; `None` where the driver does not show it any more.
    pub fn number(&self, uuid: GpuUuid) -> Option<&str> {
        self.0.iter().find(|(known, _)| *known == uuid).map(|(_, number)| &**number)
    }

    /// All that names the GPU: its number, if the driver shows it, and its UUID.
    pub fn words(&self, uuid: GpuUuid) -> Vec<String> {
        self.number(uuid).map(str::to_owned).into_iter().chain([uuid.to_string()]).collect()
    }

    /// `text` with these names in place of UUIDs.
    pub fn in_text(&self, text: &str) -> String {
        let named =
            |text: String, (uuid, _): &(GpuUuid, String)| text.replace(&uuid.to_string(), &self.name(*uuid));
        self.0.iter().fold(text.to_owned(), named)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_called_by_index_and_the_beginning_of_its_uuid_while_it_is_there() {
        let [first, second, gone] = [1, 2, 3].map(|byte| GpuUuid::from_bytes([byte; 16]));
        let instance = GpuUuid::of_instance([2; 16]);
        let named = [(first, "0"), (second, "1"), (instance, "2:5")];
        let names = GpuNames(named.map(|(uuid, number)| (uuid, number.to_owned())).into());
        assert_eq!(names.name(second), "1 GPU-02020202");
        assert_eq!(names.name(instance), "2:5 MIG-02020202");
        assert_eq!(names.name(gone), gone.to_string());
        assert_eq!(
            names.in_text(&format!("{first}: 4 GiB; {gone}: 1 GiB, 30%")),
            format!("0 GPU-01010101: 4 GiB; {gone}: 1 GiB, 30%")
        );
    }
}
