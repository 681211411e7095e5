//! Finds what is ours in a text, and takes it away.

use std::ops::Range;

use toml::{Table, Value};
use toml_edit::Item;

use super::{Mistake, Owned, begin, end, find, former, mark, masked, parse, values};

/// Every line of ours, without its line ending.
pub fn ours<'a>(text: &'a str, name: &str) -> Vec<&'a str> {
    let (begin, end, mark, former) = (begin(name), end(name), mark(name), former(name));
    let mut inside = false;
    let lines = text.lines().map(str::trim_end).filter(|line| {
        inside |= line.starts_with(&begin);
        let mine = inside || line.ends_with(&mark) || line.starts_with(&former);
        inside &= *line != end;
        mine
    });
    lines.collect()
}

pub fn without_block(text: &str, name: &str, owned: &Owned) -> Result<String, Mistake> {
    let Some(block) = block(text, name)? else { return Ok(text.to_owned()) };
    check_owned(text, &block, owned)?;
    let (before, after) = (&text[..block.start], &text[block.end..]);
    // A block that ends the file without a line ending took over the missing one of the line before it.
    let before = match text[block.clone()].ends_with('\n') {
        true => before,
        false => without_line_ending(before),
    };
    Ok(format!("{before}{after}"))
}

fn without_line_ending(text: &str) -> &str {
    text.strip_suffix("\r\n").or_else(|| text.strip_suffix('\n')).unwrap_or(text)
}

/// The bytes from the line BEGIN through the line END.
fn block(text: &str, name: &str) -> Result<Option<Range<usize>>, Mistake> {
    let (begin, end) = (begin(name), end(name));
    let mut start = None;
    let mut whole = None;
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        let bare = line.trim_end();
        if bare.trim_start_matches('\u{feff}').starts_with(&begin) {
            if start.is_some() || whole.is_some() {
                return Err(Mistake::at(text, at, format!("a second {begin:?}: keep one of the two blocks")));
            }
            start = Some(at + line.find('#').unwrap_or(0));
        } else if bare == end {
            let Some(start) = start.take() else {
                return Err(Mistake::at(text, at, format!("{end:?} without {begin:?} above it")));
            };
            whole = Some(start..at + line.len());
        }
        at += line.len();
    }
    match start {
        Some(start) => Err(Mistake::at(text, start, format!("{begin:?} without {end:?} below it"))),
        None => Ok(whole),
    }
}

/// Fails if the block holds a key that is not ours: it must not be removed with the block.
fn check_owned(text: &str, block: &Range<usize>, owned: &Owned) -> Result<(), Mistake> {
    let inside = values(&text[block.clone()]).map_err(|mistake| Mistake {
        line: mistake.line + Mistake::at(text, block.start, "").line - 1,
        message: mistake.message,
    })?;
    let mut foreign = None;
    each_leaf(&inside, &mut Vec::new(), &mut |path| {
        if !owned.paths.iter().any(|owned| path.starts_with(owned)) {
            foreign = Some(path.join("."));
        }
    });
    match foreign {
        None => Ok(()),
        Some(key) => Err(Mistake::at(
            text,
            block.start,
            format!("{key} in this block is not of gpushare: move it below the line END"),
        )),
    }
}

fn each_leaf(table: &Table, path: &mut Vec<String>, seen: &mut impl FnMut(&[String])) {
    for (key, value) in table {
        path.push(key.clone());
        match value {
            Value::Table(inner) if !inner.is_empty() => each_leaf(inner, path, seen),
            _ => seen(path),
        }
        path.pop();
    }
}

/// Removes our lines and restores those that they replaced. A line whose value somebody has changed since
/// belongs to him and stays.
pub fn without_lines(text: &str, name: &str) -> String {
    let (mark, former) = (mark(name), former(name));
    let mut out = String::with_capacity(text.len());
    let mut gave_way = String::new();
    for line in text.split_inclusive('\n') {
        if let Some(old) = line.strip_prefix(&former) {
            gave_way.push_str(old);
            continue;
        }
        match line.trim_end().strip_suffix(&mark) {
            Some(setting) if is_ours(setting, name) => {
                out.push_str(&gave_way);
                if !line.ends_with('\n') {
                    out.truncate(without_line_ending(&out).len());
                }
            }
            Some(setting) => {
                out.push_str(setting.trim_end());
                out.push_str(&line[line.trim_end().len()..]);
            }
            None => out.push_str(line),
        }
        gave_way.clear();
    }
    out
}

/// Whether a line that carries our mark still says what we wrote: the runtime's name as key, as value or in a
/// list, or the version that our tables need.
fn is_ours(line: &str, name: &str) -> bool {
    let Ok(table) = toml::from_str::<Table>(line.trim()) else { return false };
    let mut mine = false;
    let mut level = Some(&table);
    while let Some((key, value)) = level.and_then(|table| table.iter().next()) {
        let list = value.as_array().map(Vec::as_slice).unwrap_or_default();
        mine |= key == "version" && value.as_integer() == Some(2);
        mine |= key == name || list.iter().chain([value]).any(|value| value.as_str() == Some(name));
        level = value.as_table();
    }
    mine
}

pub fn without_elements(text: &str, owned: &Owned) -> Result<String, Mistake> {
    let mut text = text.to_owned();
    for list in &owned.lists {
        for element in &owned.elements {
            let Some(span) = element_span(&text, list, element)? else { continue };
            let after = &text[span.end..];
            let comma = after.strip_prefix(", ").or_else(|| after.strip_prefix(','));
            let end = text.len() - comma.unwrap_or(after).len();
            text.replace_range(span.start..end, "");
        }
    }
    Ok(text)
}

fn element_span(text: &str, list: &[String], element: &str) -> Result<Option<Range<usize>>, Mistake> {
    let masked = masked(text);
    let document = parse(text, &masked)?;
    let Some((key, tables)) = list.split_last() else { return Ok(None) };
    let array = find(text, &document, tables)?.and_then(|table| table.get(key)).and_then(Item::as_array);
    let found = array.and_then(|array| array.iter().find(|value| value.as_str() == Some(element)));
    Ok(found.and_then(toml_edit::Value::span))
}
