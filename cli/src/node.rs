//! The node as the commands see it: settings, inventory with memory sizes, quota store.

use anyhow::{Context, Result};
use gpushare_config::Config;
use gpushare_inventory::{Node, Totals, boot_id};
use gpushare_quota::{StateFolder, Store};

/// The node's inventory. A cache that does not fit is renewed first, so that no command shows yesterday's GPUs.
pub fn inventory(config: &Config, state: &StateFolder) -> Result<Node> {
    let node = Node::open(&config.roots)?;
    let known = Totals::load(&Totals::path(state.path()));
    let boot = boot_id()?;
    let totals = match known.filter(|totals| totals.fits(&boot, &node.driver.version, &node.gpus)) {
        Some(totals) => totals,
        None => crate::inventory::ask(&node, state)?,
    };
    Ok(node.with_totals(&totals))
}

/// State folder and store.
pub fn store(config: &Config) -> Result<(StateFolder, Store)> {
    let state = StateFolder::open(&config.paths.state)?;
    let store = Store::open(state.path()).context("cannot open the quota store")?;
    Ok((state, store))
}
