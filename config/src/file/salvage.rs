//! Salvages the parts of refused settings that are needed to stop containers.

use std::path::PathBuf;

use toml::{Table, Value};

use super::{File, line, read, shipped};

/// The shipped settings with the low-level runtimes and the state folder of `files`, despite any other
/// mistakes in them. `None` if a file cannot be read, or is so far from valid TOML that these two may be
/// lost.
pub(crate) fn salvage(files: &[PathBuf]) -> Option<File> {
    let mut saved = File::default();
    for path in files {
        let text = read(path).ok()?;
        let mut table = toml::from_str(&text).ok().or_else(|| without_slips(&text))?;
        if is_misplaced(&table) || is_misspelt(&table) {
            return None;
        }
        let mut take =
            |section: &str, key: &str| table.get_mut(section).and_then(Value::as_table_mut)?.remove(key);
        if let Some(candidates) = take("runtime", "candidates") {
            saved.runtime.candidates = candidates.try_into().ok()?;
        }
        if let Some(state) = take("paths", "state") {
            saved.paths.state = state.try_into().ok()?;
        }
    }
    Some(saved)
}

/// The salvaged sections and keys.
const SALVAGED: [(&str, &str); 2] = [("runtime", "candidates"), ("paths", "state")];
/// How many lines of a file may be invalid TOML.
const MOST_SLIPS: usize = 8;

/// `text` without its invalid lines, if these are outside the salvaged sections and removing them loses no
/// salvaged key.
pub(super) fn without_slips(text: &str) -> Option<Table> {
    // Lines inside a string mean nothing by themselves.
    if text.contains("\"\"\"") || text.contains("'''") {
        return None;
    }
    let whole: Vec<&str> = text.lines().collect();
    let mut lines = whole.clone();
    for _ in 0..MOST_SLIPS {
        let text = lines.join("\n");
        let error = match toml::from_str::<Table>(&text) {
            Ok(table) => return SALVAGED.iter().all(|place| is_kept(&whole, &table, place)).then_some(table),
            Err(error) => error,
        };
        let slip = line(&text, error.span()?.start) - 1;
        let above = whole.get(..=slip)?.iter().rposition(|line| line.trim_start().starts_with('['))?;
        let is_salvaged = SALVAGED.iter().any(|(section, _)| whole[above].contains(section));
        if above == slip || is_salvaged || lines[slip].is_empty() {
            return None;
        }
        lines[slip] = "";
    }
    None
}

/// Whether a salvaged key is in the wrong section.
fn is_misplaced(table: &Table) -> bool {
    let has = |section: &str, values: &Value| {
        let keys = SALVAGED.iter().filter(|place| place.0 != section).map(|place| place.1);
        values.as_table().is_some_and(|values| keys.into_iter().any(|key| values.contains_key(key)))
    };
    table
        .iter()
        .any(|(section, values)| has(section, values) || SALVAGED.iter().any(|place| place.1 == section))
}

/// Whether a salvaged section has an unknown key: it may be a misspelt one.
fn is_misspelt(table: &Table) -> bool {
    let shipped = shipped().unwrap_or_default();
    let known = |section: &str, key: &String| {
        shipped.get(section).and_then(Value::as_table).is_some_and(|values| values.contains_key(key))
    };
    SALVAGED.iter().any(|(section, _)| {
        let values = table.get(*section).and_then(Value::as_table);
        values.is_some_and(|values| !values.keys().all(|key| known(section, key)))
    })
}

/// Whether `table` has a key in its section if any line mentions it.
fn is_kept(lines: &[&str], table: &Table, (section, key): &(&str, &str)) -> bool {
    let speaks = |line: &&&str| !line.trim_start().starts_with('#') && line.contains(key);
    let has = table.get(*section).and_then(|section| section.get(*key)).is_some();
    lines.iter().filter(speaks).count() == usize::from(has)
}
