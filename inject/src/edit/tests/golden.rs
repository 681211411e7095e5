//! Compares what an edit changes in each bundle that a real engine wrote with a file to read,
//! `inject/golden/NAME.diff`. It has one line per entry that goes (`-`) or comes (`+`).
//! `GPUSHARE_UPDATE_GOLDEN=1 cargo test -p gpushare-inject` writes the files anew; look at them before you
//! commit them.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::{edited, fixtures, leased, plan};
use crate::edit::take_out_driver;
use crate::outside_plan::OutsidePlan;
use crate::plan::Plan;

/// The entries of `before` and `after` that differ, by their place. Lists are compared as they stand from the
/// first difference on, so that order counts.
fn difference(place: &str, before: &Value, after: &Value, told: &mut String) {
    match (before, after) {
        (Value::Object(before), Value::Object(after)) => {
            for key in before.keys().chain(after.keys().filter(|key| !before.contains_key(*key))) {
                let place = format!("{place}/{key}");
                match (before.get(key), after.get(key)) {
                    (Some(before), Some(after)) => difference(&place, before, after, told),
                    (before, after) => line(&place, before, after, told),
                }
            }
        }
        (Value::Array(before), Value::Array(after)) => {
            let same = before.iter().zip(after).take_while(|(before, after)| before == after).count();
            let gone = before[same..].iter().filter(|entry| !after[same..].contains(entry));
            gone.for_each(|entry| line(&format!("{place}[]"), Some(entry), None, told));
            for (at, entry) in after.iter().enumerate().skip(same) {
                line(&format!("{place}[{at}]"), None, Some(entry), told);
            }
        }
        _ if before == after => {}
        _ => line(place, Some(before), Some(after), told),
    }
}

fn line(place: &str, before: Option<&Value>, after: Option<&Value>, told: &mut String) {
    for (sign, value) in [('-', before), ('+', after)] {
        if let Some(value) = value {
            writeln!(told, "{sign} {place} {value}").expect("a string takes any text");
        }
    }
}

/// Compares what was `told` with the golden file, or writes that file anew.
fn reviewed(golden: &Path, told: &str) {
    if std::env::var_os("GPUSHARE_UPDATE_GOLDEN").is_some() {
        fs::create_dir_all(golden.parent().unwrap()).unwrap();
        fs::write(golden, told).unwrap();
    }
    let want = fs::read_to_string(golden).unwrap_or_default();
    assert_eq!(told, want, "{}; if this is as it should be: GPUSHARE_UPDATE_GOLDEN=1", golden.display());
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden")
}

#[test]
fn each_engines_bundle_is_changed_as_was_reviewed() {
    let plan = Plan { additional_gids: vec![44], ..plan() };
    let mut names = Vec::new();
    for (path, text) in fixtures() {
        let before: Value = serde_json::from_str(&text).unwrap();
        let mut told = String::new();
        difference("", &before, &edited(&text, &plan).unwrap(), &mut told);
        let name = path.with_extension("diff").file_name().unwrap().to_owned();
        reviewed(&folder().join(&name), &told);
        names.push(name);
    }
    names.sort();
    let files = fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path());
    let mut kept: Vec<_> =
        files.filter(|path| path.is_file()).map(|path| path.file_name().unwrap().to_owned()).collect();
    kept.sort();
    assert_eq!(kept, names, "a file without its bundle");
}

/// A plan of the second GPU of a node whose GPUs have nodes for displays, too.
fn second_gpu() -> Plan {
    let display_nodes = [(0, 0), (0, 128), (1, 1), (1, 129)].map(|(card, minor)| (card, (226, minor)));
    let mut plan = leased();
    plan.devices[0] =
        serde_json::from_value(json!({"path": "/dev/nvidia1", "type": "c", "major": 195, "minor": 1}))
            .unwrap();
    let rule = json!({"allow": true, "type": "c", "major": 195, "minor": 1, "access": "rw"});
    plan.device_rules[0] = serde_json::from_value(rule).unwrap();
    plan.outside = OutsidePlan {
        other_nodes: vec![(195, 0), (226, 0), (226, 128)],
        display_nodes: display_nodes.to_vec(),
        ..OutsidePlan::default()
    };
    plan
}

#[test]
fn a_bundle_with_nvidias_cdi_device_is_changed_as_was_reviewed_and_once() {
    let bundle = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/cdi/podman-nvidia-gpu.json");
    let before: Value = serde_json::from_str(&fs::read_to_string(bundle).unwrap()).unwrap();
    let folders = ["/usr/lib/x86_64-linux-gnu", "/usr/bin", "/usr/share", "/etc"].map(PathBuf::from);
    let run = |mut json: Value| {
        take_out_driver(&mut json, &folders);
        edited(&json.to_string(), &second_gpu()).unwrap()
    };
    let after = run(before.clone());
    let mut told = String::new();
    difference("", &before, &after, &mut told);
    reviewed(&folder().join("cdi/podman-nvidia-gpu.diff"), &told);
    assert_eq!(run(after.clone()).to_string(), after.to_string());
}
