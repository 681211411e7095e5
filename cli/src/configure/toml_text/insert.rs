//! Puts settings into a text. Existing values are replaced, lines go below their table's header, and what has
//! no table yet goes into the block at the end.

use std::ops::Range;

use toml_edit::{Document, Item};

use super::{
    Mistake, Setting, Wanted, begin, end, find, former, lines_of, mark, masked, newline, parse, quoted,
};

pub fn insert(text: &str, name: &str, settings: &[Setting]) -> Result<String, Mistake> {
    let masked = masked(text);
    let document = parse(text, &masked)?;
    let newline = newline(text);
    let mut edits: Vec<(Range<usize>, String)> = Vec::new();
    let mut tables: Vec<(&[String], String)> = Vec::new();
    for setting in settings {
        let table = find(text, &document, &setting.table)?;
        let old = table.and_then(|table| table.get_key_value(&setting.key));
        match (&setting.wanted, old) {
            (Wanted::Value(value), Some((key, old))) => {
                edits.extend(replace_line(text, name, key, old, value)?)
            }
            (Wanted::Elements(elements), Some((_, old))) => edits.extend(add_elements(text, old, elements)?),
            (Wanted::Value(value), None) if setting.table.is_empty() => {
                edits.push(first_line(text, &format!("{} = {value}", bare_or_quoted(&setting.key)), name));
            }
            (Wanted::Value(value), None) => {
                let line = format!("{} = {value}", bare_or_quoted(&setting.key));
                match header(&document, &setting.table) {
                    Some(header) => edits.push(line_below(text, &header, &line, name)),
                    None => match tables.iter_mut().find(|(table, _)| *table == setting.table) {
                        Some((_, lines)) => *lines += &format!("{line}\n"),
                        None => tables.push((&setting.table, format!("{line}\n"))),
                    },
                }
            }
            (Wanted::Elements(_), None) => {
                return Err(Mistake::at(text, 0, format!("no list {}", setting.key)));
            }
        }
    }
    // Applied from the end on. Of two edits at one place, the replaced line comes before the one that is put
    // above it.
    edits.sort_by_key(|(range, _)| (range.start, range.end));
    let mut new = text.to_owned();
    for (range, replacement) in edits.into_iter().rev() {
        new.replace_range(range, &replacement);
    }
    if !tables.is_empty() {
        append(&mut new, &block_of(name, &tables).replace('\n', newline), newline);
    }
    Ok(new)
}

fn block_of(name: &str, tables: &[(&[String], String)]) -> String {
    let mut block = format!("{}: written and removed as a whole by `gpushare configure`\n", begin(name));
    for (number, (table, lines)) in tables.iter().enumerate() {
        if number > 0 {
            block += "\n";
        }
        let names: Vec<String> = table.iter().map(|name| bare_or_quoted(name)).collect();
        block += &format!("[{}]\n{lines}", names.join("."));
    }
    block + &end(name)
}

/// Appends lines of ours. If the last line has no line ending, ours go without one too, so that removing them
/// restores the text.
fn append(text: &mut String, ours: &str, newline: &str) {
    let empty = text.trim_start_matches('\u{feff}').is_empty();
    if empty || text.ends_with('\n') {
        *text += &format!("{ours}{newline}");
    } else {
        *text += &format!("{newline}{ours}");
    }
}

fn bare_or_quoted(name: &str) -> String {
    let bare = |letter: u8| letter.is_ascii_alphanumeric() || b"_-".contains(&letter);
    if !name.is_empty() && name.bytes().all(bare) { name.to_owned() } else { format!("{name:?}") }
}

/// The lines of `key = old` become comments, and our line follows them.
fn replace_line(
    text: &str,
    name: &str,
    key: &toml_edit::Key,
    old: &Item,
    value: &str,
) -> Result<Option<(Range<usize>, String)>, Mistake> {
    let (Some(key), Some(span)) = (key.span(), old.as_value().and_then(toml_edit::Value::span)) else {
        let start = key.span().map_or(0, |span| span.start);
        return Err(Mistake::at(text, start, "a table stands where a single value is expected"));
    };
    if text[span.clone()] == *value {
        return Ok(None);
    }
    let old = lines_of(text, key.start, span.end);
    let mut lines: String = text[old.clone()].split_inclusive('\n').map(|line| former(name) + line).collect();
    let ours = format!("{}{value} {}", &text[old.start..span.start], mark(name));
    append(&mut lines, &ours, newline(text));
    Ok(Some((old, lines)))
}

/// A key of no table has to stand before all tables.
fn first_line(text: &str, line: &str, name: &str) -> (Range<usize>, String) {
    let at = text.len() - text.trim_start_matches('\u{feff}').len();
    (at..at, format!("{line} {}{}", mark(name), newline(text)))
}

/// Puts a line below a table's header, with the header's indentation.
fn line_below(text: &str, header: &Range<usize>, line: &str, name: &str) -> (Range<usize>, String) {
    let start = text[..header.start].rfind('\n').map_or(0, |at| at + 1);
    let indent = text[start..header.start].trim_start_matches('\u{feff}');
    let newline = newline(text);
    let line = format!("{indent}{line} {}", mark(name));
    match text[header.end..].find('\n') {
        Some(at) => {
            let at = header.end + at + 1;
            (at..at, line + newline)
        }
        None => (text.len()..text.len(), format!("{newline}{line}")),
    }
}

fn add_elements(
    text: &str,
    old: &Item,
    elements: &[String],
) -> Result<Option<(Range<usize>, String)>, Mistake> {
    let list = old.as_array().and_then(|list| Some((list, list.span()?)));
    let Some((list, span)) = list else {
        let start = old.span().map_or(0, |span| span.start);
        return Err(Mistake::at(text, start, "a list is expected here"));
    };
    let has = |element: &str| list.iter().any(|value| value.as_str() == Some(element));
    let missing: Vec<String> =
        elements.iter().filter(|element| !has(element)).map(|text| quoted(text)).collect();
    if missing.is_empty() {
        return Ok(None);
    }
    let tail = if list.is_empty() { "" } else { ", " };
    let at = span.start + 1;
    Ok(Some((at..at, missing.join(", ") + tail)))
}

/// The bytes of the header `[path]`, if the table has one.
fn header(document: &Document<&str>, path: &[String]) -> Option<Range<usize>> {
    let table = path.iter().try_fold(document.as_table(), |table, name| table.get(name)?.as_table())?;
    (!path.is_empty() && !table.is_implicit() && !table.is_dotted()).then(|| table.span())?
}
