//! What commands print for scripts: one JSON object each, with the version of its form. JSON Schemas of all forms
//! come from the types themselves.

use std::io::{self, Write};

use clap::ValueEnum;
use schemars::{JsonSchema, Schema, schema_for};
use serde::Serialize;

use crate::{
    cdi, configure, describe, devices, doctor, failure, history, leases, logs, overview, plan, ps, system,
    table, update,
};

/// Version of every form. Fields may come without a new one; it counts up when one goes or means something else.
pub const VERSION: u32 = 1;

/// How answers are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Columns for people.
    Table,
    /// One object.
    Json,
    /// Comma-separated values under their names (RFC 4180).
    Csv,
}

/// A form with its version.
#[derive(Serialize, JsonSchema)]
pub struct Versioned<T> {
    /// Version of this form.
    version: u32,
    #[serde(flatten)]
    answer: T,
}

impl<T> Versioned<T> {
    /// `answer` in the form of this version.
    pub const fn of(answer: T) -> Self {
        Self { version: VERSION, answer }
    }
}

/// Prints an answer as indented JSON.
///
/// # Errors
/// When stdout fails.
pub fn print<T: Serialize>(answer: T) -> io::Result<()> {
    table::json(&serde_json::to_value(Versioned::of(answer))?)
}

/// Prints an answer as one line of JSON, for answers that go on.
///
/// # Errors
/// When stdout fails.
pub fn print_line<T: Serialize>(answer: T) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{}", table::shown(&serde_json::to_string(&Versioned::of(answer))?))?;
    out.flush()
}

/// The JSON Schemas of all answers, by the names of their files.
pub fn schemas() -> Vec<(&'static str, Schema)> {
    vec![
        ("cdi-list", schema_for!(Versioned<cdi::Devices>)),
        ("configure", schema_for!(Versioned<configure::Configured>)),
        ("describe", schema_for!(Versioned<describe::Description>)),
        ("devices", schema_for!(Versioned<devices::Devices>)),
        ("devices-topology", schema_for!(Versioned<devices::Topology>)),
        ("doctor", schema_for!(Versioned<doctor::Findings>)),
        ("error", schema_for!(Versioned<failure::Failed>)),
        ("history", schema_for!(Versioned<history::Past>)),
        ("history-by", schema_for!(Versioned<history::Sums>)),
        ("logs", schema_for!(Versioned<logs::Events>)),
        ("plan", schema_for!(Versioned<plan::Planned>)),
        ("ps", schema_for!(Versioned<ps::Shares>)),
        ("sweep", schema_for!(Versioned<leases::SweptShares>)),
        ("system", schema_for!(Versioned<system::Items>)),
        ("top", schema_for!(Versioned<overview::Overview>)),
        ("update", schema_for!(Versioned<update::Updated>)),
    ]
}
