//! What an edit changes in each bundle that a real engine wrote, as files to read: `inject/golden/NAME.diff`, one line per
//! entry that goes (`-`) or comes (`+`). `GPUSHARE_UPDATE_GOLDEN=1 cargo test -p gpushare-inject` writes them anew, to be
//! looked at before they are committed.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use serde_json::Value;

use super::{edited, fixtures, plan};
use crate::plan::Plan;

/// The entries of `before` and `after` that differ, by their place. Lists are compared as they stand from the first
/// difference on, so that order counts.
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

#[test]
fn each_engines_bundle_is_changed_as_was_reviewed() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden");
    let update = std::env::var_os("GPUSHARE_UPDATE_GOLDEN").is_some();
    let plan = Plan { additional_gids: vec![44], ..plan() };
    let mut names = Vec::new();
    for (path, text) in fixtures() {
        let before: Value = serde_json::from_str(&text).unwrap();
        let mut told = String::new();
        difference("", &before, &edited(&text, &plan).unwrap(), &mut told);
        let name = path.with_extension("diff").file_name().unwrap().to_owned();
        let golden = folder.join(&name);
        if update {
            fs::create_dir_all(&folder).unwrap();
            fs::write(&golden, &told).unwrap();
        }
        let want = fs::read_to_string(&golden).unwrap_or_default();
        assert_eq!(told, want, "{}; if this is as it should be: GPUSHARE_UPDATE_GOLDEN=1", golden.display());
        names.push(name);
    }
    names.sort();
    let mut kept: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    kept.sort();
    assert_eq!(kept, names, "a file without its bundle");
}
