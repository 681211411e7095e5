//! What is taken of settings that are refused: that by which containers are stopped.

use std::path::PathBuf;

use toml::{Table, Value};

use super::{File, line, read, shipped};

/// The shipped settings with the low-level runtimes and the state folder of `files`, whatever other mistakes
/// these have. `None` if a file cannot be read, or is so far from TOML that these two may be lost in it.
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

/// What is salvaged: sections and keys.
const SALVAGED: [(&str, &str); 2] = [("runtime", "candidates"), ("paths", "state")];
/// How many lines of a file may be no TOML.
const MOST_SLIPS: usize = 8;

/// `text` without the lines that are no TOML, if they are lines of other sections than those from which something is
/// salvaged, and nothing of it is lost with them.
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

/// Whether a key that is salvaged stands in another section.
fn is_misplaced(table: &Table) -> bool {
    let has = |section: &str, values: &Value| {
        let keys = SALVAGED.iter().filter(|place| place.0 != section).map(|place| place.1);
        values.as_table().is_some_and(|values| keys.into_iter().any(|key| values.contains_key(key)))
    };
    table
        .iter()
        .any(|(section, values)| has(section, values) || SALVAGED.iter().any(|place| place.1 == section))
}

/// Whether a section from which something is salvaged has a key that nobody knows: it may be meant.
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

/// Whether a key stands in `table`, in its section, if any line speaks of it.
fn is_kept(lines: &[&str], table: &Table, (section, key): &(&str, &str)) -> bool {
    let speaks = |line: &&&str| !line.trim_start().starts_with('#') && line.contains(key);
    let has = table.get(*section).and_then(|section| section.get(*key)).is_some();
    lines.iter().filter(speaks).count() == usize::from(has)
}
