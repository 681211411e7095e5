//! Adds settings to somebody else's TOML file and removes them, without touching a byte of the rest.
//!
//! The text itself tells what was there, so removing needs no other memory. New tables stand in one block
//! between two comment lines at the end. A line within an existing table ends in a mark. A line that was
//! replaced stays above the new one as a comment. Every edit is checked before it is returned: the result
//! parses, differs by the settings alone, and removing them again gives the old bytes.

mod insert;
mod remove;

use std::fmt;
use std::ops::Range;

use toml::{Table, Value};
use toml_edit::{Document, Item, TableLike};

use insert::insert;
use remove::{ours, without_block, without_elements, without_lines};

/// One setting that shall hold in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// The names of the tables around the key, outermost first.
    pub table: Vec<String>,
    /// The key.
    pub key: String,
    /// What shall be at the key.
    pub wanted: Wanted,
}

impl Setting {
    /// The `value`, as TOML text, at `key` of `table`.
    pub fn value(table: &[String], key: &str, value: String) -> Self {
        Self { table: table.to_vec(), key: key.to_owned(), wanted: Wanted::Value(value) }
    }
}

/// What shall be at a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// This value, as TOML text.
    Value(String),
    /// These strings, among the elements that the list has already.
    Elements(Vec<String>),
}

/// What may be ours in a file. It is taken away without knowing how it was put there.
#[derive(Clone, Debug, Default)]
pub struct Owned {
    /// Tables and keys that our block may hold.
    pub paths: Vec<Vec<String>>,
    /// Lists that may have elements of ours.
    pub lists: Vec<Vec<String>>,
    /// The elements that are ours.
    pub elements: Vec<String>,
}

/// Why a text is not edited, and at which line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake {
    /// The line, counted from 1.
    pub line: usize,
    /// What is wrong there, and what to do.
    pub message: String,
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.message)
    }
}

impl std::error::Error for Mistake {}

impl Mistake {
    /// A mistake at a byte of `text`.
    pub fn at(text: &str, byte: usize, message: impl Into<String>) -> Self {
        let before = &text.as_bytes()[..byte.min(text.len())];
        let line = before.iter().filter(|byte| **byte == b'\n').count() + 1;
        Self { line, message: message.into() }
    }

    /// A mistake at the key or table header at `path`.
    pub fn at_key(text: &str, path: &[String], message: impl Into<String>) -> Self {
        Self::at(text, place(text, path).unwrap_or(0), message)
    }

    /// A mistake that a parser of TOML found in `text`.
    fn of_parser(text: &str, span: Option<Range<usize>>, message: &str) -> Self {
        Self::at(text, span.map_or(0, |span| span.start), message.replace('\n', ", "))
    }
}

/// `text` with `settings` in it. A text in which they stand already as we write them is returned as it is.
pub fn with(text: &str, name: &str, settings: &[Setting], owned: &Owned) -> Result<String, Mistake> {
    let plain = without(text, name, owned)?;
    let new = insert(&plain, name, settings)?;
    prove(&plain, &new, name, settings, owned)?;
    // Others may have written text after our block since. The block's place does not matter.
    Ok(if ours(text, name) == ours(&new, name) { text.to_owned() } else { new })
}

/// `text` without what [`with`] put there.
pub fn without(text: &str, name: &str, owned: &Owned) -> Result<String, Mistake> {
    let text = without_block(text, name, owned)?;
    let text = without_lines(&text, name);
    without_elements(&text, owned)
}

/// The values of a text. Go templates in it count as blanks or numbers.
pub fn values(text: &str) -> Result<Table, Mistake> {
    toml::from_str(&masked(text)).map_err(|error| Mistake::of_parser(text, error.span(), error.message()))
}

/// The values of a text without what is ours. Nobody else may have put something at the runtime's `entry`.
pub fn values_of_others(text: &str, name: &str, owned: &Owned, entry: &[String]) -> Result<Table, Mistake> {
    let plain = without(text, name, owned)?;
    let values = values(&plain)?;
    refuse_foreign(&plain, &values, name, entry)?;
    Ok(values)
}

/// Fails if something is at the runtime's `entry` in a text without what is ours.
pub fn refuse_foreign(plain: &str, values: &Table, name: &str, entry: &[String]) -> Result<(), Mistake> {
    if value(values, entry).is_none() {
        return Ok(());
    }
    let message = format!(
        "the runtime {name:?} is here already, and not by gpushare configure: take it out, or choose another name \
         (--name)"
    );
    Err(Mistake::at_key(plain, entry, message))
}

/// The value at `path`.
pub fn value<'a>(table: &'a Table, path: &[String]) -> Option<&'a Value> {
    let (last, tables) = path.split_last()?;
    tables.iter().try_fold(table, |table, name| table.get(name)?.as_table())?.get(last)
}

/// The string at `path`.
pub fn string<'a>(table: &'a Table, path: &[String]) -> Option<&'a str> {
    value(table, path)?.as_str()
}

/// The strings in the list at `path`.
pub fn strings<'a>(table: &'a Table, path: &[String]) -> impl Iterator<Item = &'a str> {
    value(table, path).and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str)
}

/// Whether `text` is TOML with the string `wanted` at `path`.
pub fn says(text: &str, path: &[String], wanted: &str) -> bool {
    values(text).is_ok_and(|values| string(&values, path) == Some(wanted))
}

/// The byte at which the key or table header at `path` begins.
fn place(text: &str, path: &[String]) -> Option<usize> {
    let masked = masked(text);
    let document = Document::parse(masked.as_str()).ok()?;
    let (last, tables) = path.split_last()?;
    let whole: &dyn TableLike = document.as_table();
    let table = tables.iter().try_fold(whole, |table, name| table.get(name)?.as_table_like())?;
    let (key, item) = table.get_key_value(last)?;
    item.as_table().and_then(toml_edit::Table::span).or_else(|| key.span()).map(|span| span.start)
}

/// `text` without the lines of the key at `path`, or as it is where that is no single value.
pub fn without_key(text: &str, path: &[String]) -> String {
    let masked = masked(text);
    let lines = || {
        let document = Document::parse(masked.as_str()).ok()?;
        let (last, tables) = path.split_last()?;
        let whole: &dyn TableLike = document.as_table();
        let table = tables.iter().try_fold(whole, |table, name| table.get(name)?.as_table_like())?;
        let (key, item) = table.get_key_value(last)?;
        Some(lines_of(text, key.span()?.start, item.as_value()?.span()?.end))
    };
    lines().map_or_else(|| text.to_owned(), |lines| format!("{}{}", &text[..lines.start], &text[lines.end..]))
}

/// The bytes of the whole lines from the one with the byte `start` to the one with the byte `end`.
fn lines_of(text: &str, start: usize, end: usize) -> Range<usize> {
    let start = text[..start].rfind('\n').map_or(0, |at| at + 1);
    let end = text[end..].find('\n').map_or(text.len(), |at| end + at + 1);
    start..end
}

/// The text as a TOML string.
pub fn quoted(text: &str) -> String {
    Value::String(text.to_owned()).to_string()
}

/// The names of a path as owned strings.
pub fn path<const LENGTH: usize>(names: [&str; LENGTH]) -> Vec<String> {
    names.map(str::to_owned).to_vec()
}

/// How the first line of a block of ours begins, whatever the runtime's name.
pub const BEGIN: &str = "# BEGIN gpushare";

fn begin(name: &str) -> String {
    format!("{BEGIN} \"{name}\"")
}

fn end(name: &str) -> String {
    format!("# END gpushare \"{name}\"")
}

/// Ends a line of ours within a table that is not ours.
fn mark(name: &str) -> String {
    format!("# set by gpushare configure for \"{name}\"")
}

/// Begins a line that was replaced by ours.
fn former(name: &str) -> String {
    format!("# before gpushare configure for \"{name}\": ")
}

fn newline(text: &str) -> &'static str {
    match text.find('\n') {
        Some(at) if text[..at].ends_with('\r') => "\r\n",
        _ => "\n",
    }
}

fn parse<'a>(text: &str, masked: &'a str) -> Result<Document<&'a str>, Mistake> {
    Document::parse(masked).map_err(|error| Mistake::of_parser(text, error.span(), error.message()))
}

/// The table at `path`, or `None` if it is not there. A table that is written as a value is a mistake, since
/// it cannot be added to.
fn find<'a>(
    text: &str,
    document: &'a Document<&str>,
    path: &[String],
) -> Result<Option<&'a toml_edit::Table>, Mistake> {
    let mut table = document.as_table();
    for name in path {
        table = match table.get(name) {
            None => return Ok(None),
            Some(Item::Table(table)) => table,
            Some(item) => {
                let start = item.span().map_or(0, |span| span.start);
                let message = format!(
                    "{} is written as a value: write it as a table of its own, [{}]",
                    path.join("."),
                    name
                );
                return Err(Mistake::at(text, start, message));
            }
        };
    }
    Ok(Some(table))
}

/// Replaces Go templates (k3s, rke2) byte for byte, so that the rest can be parsed as TOML: by blanks at the
/// beginning of a line, by digits elsewhere.
fn masked(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find("{{") {
        let (before, template) = rest.split_at(start);
        let Some(end) = template.find("}}").map(|end| end + 2) else { break };
        out.push_str(before);
        let first = out.rsplit('\n').next().is_none_or(|line| line.trim().is_empty());
        for (number, byte) in template.as_bytes()[..end].iter().enumerate() {
            out.push(match (byte, number) {
                (b'\n' | b'\r', _) => char::from(*byte),
                _ if first => ' ',
                // Digits of a fraction: there may be any number of them.
                (_, 0) => '1',
                (_, 1) => '.',
                _ => '0',
            });
        }
        rest = &template[end..];
    }
    out + rest
}

/// Checks that the edit does what it should and can be undone. Otherwise it is not made.
fn prove(old: &str, new: &str, name: &str, settings: &[Setting], owned: &Owned) -> Result<(), Mistake> {
    let unusual = |why: &str| {
        let message = format!(
            "this file is written in a form that gpushare configure cannot add to ({why}): add the runtime by hand"
        );
        Mistake { line: 1, message }
    };
    let new_values = values(new).map_err(|mistake| unusual(&mistake.message))?;
    let holds = settings.iter().all(|setting| {
        let path = [&setting.table[..], std::slice::from_ref(&setting.key)].concat();
        match &setting.wanted {
            Wanted::Value(text) => {
                let found = value(&new_values, &path);
                let wanted: Option<Table> = toml::from_str(&format!("x = {text}")).ok();
                found.is_some() && found == wanted.as_ref().and_then(|table| table.get("x"))
            }
            Wanted::Elements(elements) => {
                elements.iter().all(|element| strings(&new_values, &path).any(|value| value == element))
            }
        }
    });
    if !holds {
        return Err(unusual("the settings do not take hold"));
    }
    let mut both = [values(old)?, new_values];
    for table in &mut both {
        settings.iter().for_each(|setting| take(table, &setting.table, setting));
    }
    if both[0] != both[1] {
        return Err(unusual("another setting would change"));
    }
    if without(new, name, owned)? != old {
        return Err(unusual("the file could not be brought back"));
    }
    Ok(())
}

/// Takes a setting out of parsed values, together with tables that are empty without it.
fn take(table: &mut Table, path: &[String], setting: &Setting) {
    let Some((name, inner)) = path.split_first() else {
        match (&setting.wanted, table.get_mut(&setting.key)) {
            (Wanted::Elements(elements), Some(Value::Array(list))) => {
                list.retain(|value| !elements.iter().any(|element| value.as_str() == Some(element.as_str())));
            }
            _ => {
                table.remove(&setting.key);
            }
        }
        return;
    };
    let Some(Value::Table(next)) = table.get_mut(name) else { return };
    take(next, inner, setting);
    if next.is_empty() {
        table.remove(name);
    }
}
