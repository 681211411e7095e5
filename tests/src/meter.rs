//! `gpushare meter` of a node, as its service manager runs it.

use std::path::Path;

use serde_json::Value;

use crate::leases::shares;
use crate::service::Service;

/// Starts the meter under the settings file `config`, and waits until it says that it runs.
///
/// # Panics
/// When it does not.
#[must_use]
pub fn start(config: &Path) -> Service {
    Service::start(&["meter"], config, "meter started")
}

/// What `gpushare ps --json` says of the container `id` on its GPU number `line`.
///
/// # Panics
/// When it is not listed.
#[must_use]
pub fn listed(config: &Path, id: &str, line: usize) -> Value {
    let shares = shares(config);
    let found = shares.iter().find(|lease| lease["id"] == id);
    found.unwrap_or_else(|| panic!("{id} is not in {shares:?}"))["gpus"][line].clone()
}
