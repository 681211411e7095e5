//! The command line as an administrator uses it: which leases stand, and the ways to take them back.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::artifacts;
use crate::command::{self, Outcome};

/// One lease, as `gpushare ps --json` tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// The container's id.
    pub id: String,
    /// `reserved` or `active`.
    pub state: String,
    /// The process that holds it: the wrapper while it is reserved, then the container's init.
    pub pid: Option<u64>,
    /// Bytes of each GPU.
    pub memory: Vec<u64>,
    /// UUIDs of the GPUs.
    pub gpus: Vec<String>,
}

/// Runs `gpushare ARGS...` under the settings file `config`.
#[must_use]
pub fn cli(config: &Path, args: &[&str]) -> Outcome {
    command::run(Command::new(artifacts::cli()).args(args).env("GPUSHARE_CONFIG", config))
}

/// What `gpushare ARGS...` tells in JSON.
///
/// # Panics
/// When the command line fails or its answer is no JSON.
#[must_use]
pub fn told(config: &Path, args: &[&str]) -> Value {
    let command = args.join(" ");
    let outcome = cli(config, args).expect_success(&command);
    serde_json::from_str(&outcome.stdout).unwrap_or_else(|error| panic!("{command}: {error}: {outcome:?}"))
}

/// What `gpushare ps --json` tells of each lease, in its order.
///
/// # Panics
/// When the command line fails or its answer has another form.
#[must_use]
pub fn shares(config: &Path) -> Vec<Value> {
    let told = told(config, &["ps", "--json"]);
    told["shares"].as_array().unwrap_or_else(|| panic!("no shares in {told}")).clone()
}

/// The leases that stand, in the order in which the command line lists them.
///
/// # Panics
/// When the command line fails or its answer has another form.
#[must_use]
pub fn leases(config: &Path) -> Vec<Lease> {
    shares(config).iter().map(lease).collect()
}

/// The leases of the container `id`: none or one.
#[must_use]
pub fn leases_of(config: &Path, id: &str) -> Vec<Lease> {
    leases(config).into_iter().filter(|lease| lease.id == id).collect()
}

/// `gpushare sweep`.
///
/// # Panics
/// When it fails.
pub fn sweep(config: &Path) {
    let _ = cli(config, &["sweep", "--json"]).expect_success("gpushare sweep --json");
}

fn lease(value: &Value) -> Lease {
    let word = |name: &str| value[name].as_str().unwrap_or_else(|| panic!("no {name} in {value}")).to_owned();
    let gpus = value["gpus"].as_array().unwrap_or_else(|| panic!("no gpus in {value}"));
    // Where nothing limits it, the command says what the container needs.
    let memory = |gpu: &Value| {
        let either = gpu["memory_bytes"].as_u64().or_else(|| gpu["needed_bytes"].as_u64());
        either.unwrap_or_else(|| panic!("no memory_bytes in {gpu}"))
    };
    Lease {
        id: word("id"),
        state: word("state"),
        pid: value["pid"].as_u64(),
        memory: gpus.iter().map(memory).collect(),
        gpus: gpus.iter().filter_map(|gpu| gpu["uuid"].as_str()).map(str::to_owned).collect(),
    }
}
