//! `gpushare cdi list`: the devices that engines find, and whether what they name on the host still exists.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use super::{FOLDERS, Kind};
use crate::{answer, table};

/// The devices of gpushare that engines find.
#[derive(Serialize, JsonSchema)]
pub struct Devices {
    devices: Vec<Row>,
}

/// One device of a file.
#[derive(Serialize, JsonSchema)]
struct Row {
    /// Kind and name, as engines are asked for it.
    device: String,
    file: PathBuf,
    /// Host paths that the device names and that do not exist.
    missing: Vec<String>,
}

/// Prints one row per device, in the order in which engines read the folders.
pub fn list(folders: &[PathBuf], as_json: bool) -> Result<()> {
    let shipped = FOLDERS.map(PathBuf::from);
    let folders = if folders.is_empty() { &shipped[..] } else { folders };
    let rows = folders.iter().flat_map(|folder| files(folder)).flat_map(|file| rows(&file));
    if as_json {
        return Ok(answer::print(Devices { devices: rows.collect() })?);
    }
    let cells = rows.map(|row| {
        let state = match row.missing.is_empty() {
            true => "ok".to_owned(),
            false => format!("{} missing: run gpushare cdi generate", row.missing.join(", ")),
        };
        [row.device, row.file.display().to_string(), state]
    });
    Ok(table::print(["DEVICE", "FILE", "STATE"], cells)?)
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok).map(|entry| entry.path());
    let mut files: Vec<PathBuf> =
        entries.filter(|path| path.extension().is_some_and(|end| end == "json")).collect();
    files.sort();
    files
}

/// The devices of a specification of gpushare. Empty for other vendors' files, and for a file that is no
/// specification.
fn rows(file: &Path) -> Vec<Row> {
    let text = fs::read(file).unwrap_or_default();
    let spec: Value = serde_json::from_slice(&text).unwrap_or_default();
    let kind = spec["kind"].as_str().unwrap_or_default();
    if ![Kind::Share, Kind::Gpu].iter().any(|ours| ours.name() == kind) {
        return Vec::new();
    }
    let devices = spec["devices"].as_array().into_iter().flatten();
    let row = |device: &Value| {
        let name = device["name"].as_str()?;
        let edits = [&spec["containerEdits"], &device["containerEdits"]];
        let mut missing: Vec<String> = edits.into_iter().flat_map(host_paths).collect();
        missing.retain(|path| !Path::new(path).exists());
        missing.dedup();
        Some(Row { device: format!("{kind}={name}"), file: file.to_path_buf(), missing })
    };
    devices.filter_map(row).collect()
}

/// The host paths of the device nodes and hooks in the edits.
fn host_paths(edits: &Value) -> Vec<String> {
    let list = |name: &str| edits[name].as_array().cloned().unwrap_or_default();
    let nodes = list("deviceNodes").into_iter().map(|node| {
        let path = if node["hostPath"].is_string() { &node["hostPath"] } else { &node["path"] };
        path.clone()
    });
    let hooks = list("hooks").into_iter().map(|hook| hook["path"].clone());
    nodes.chain(hooks).filter_map(|path| path.as_str().map(str::to_owned)).collect()
}
