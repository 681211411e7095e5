//! The ledger as text: a line with length and checksum of what follows, the head, and one line for each
//! lease. Blank lines may follow.

use std::io::Write;
use std::ops::Range;
use std::path::Path;

use super::page::Line;
use super::{Head, Page};

/// Raised with every change to what follows it.
const VERSION: u32 = 1;
/// What the first line says before the version.
const TITLE: &str = "gpushare leases, version ";

/// Why a text says nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// It is not whole, or not ours.
    Torn,
    /// Another version of gpushare wrote it.
    Version(u32),
}

/// The text of a page, filled up with blank lines to a multiple of `unit` bytes.
pub(super) fn of(page: &Page, unit: usize) -> Vec<u8> {
    // One buffer that need not grow: a large one is made of fresh pages of the kernel's each time.
    let mut text = Vec::with_capacity((page.length() + unit).next_multiple_of(unit));
    text.extend_from_slice(first_line(0, 0).as_bytes());
    let start = text.len();
    line(&mut text, &page.head);
    for old_or_new in page.lines() {
        match old_or_new {
            Line::Old(old) => {
                text.extend_from_slice(old.as_bytes());
                text.push(b'\n');
            }
            Line::New(entry) => line(&mut text, entry),
        }
    }
    let body = &text[start..];
    let first = first_line(body.len(), crc32fast::hash(body));
    text[..start].copy_from_slice(first.as_bytes());
    text.resize(text.len().next_multiple_of(unit), b'\n');
    text
}

/// The first line, always of the same length: no ledger has ten digits of bytes.
fn first_line(length: usize, sum: u32) -> String {
    format!("{TITLE}{VERSION}: {length:010} bytes, crc32 {sum:08x}\n")
}

fn line(body: &mut Vec<u8>, value: &impl serde::Serialize) {
    // Writing into memory fails for no value of ours: none has a map whose keys are not strings.
    serde_json::to_writer(&mut *body, value).expect("a value of ours is JSON");
    let _ = body.write(b"\n");
}

/// Reads the text of the ledger at `path`.
pub(super) fn read(path: &Path, text: Vec<u8>) -> Result<Page, Fault> {
    let text = String::from_utf8(text).map_err(|_| Fault::Torn)?;
    let end = text.find('\n').ok_or(Fault::Torn)?;
    let first = text[..end].strip_prefix(TITLE);
    let (version, first) = first.and_then(|first| first.split_once(": ")).ok_or(Fault::Torn)?;
    match version.parse::<u32>() {
        Ok(version) if version == VERSION => {}
        Ok(version) => return Err(Fault::Version(version)),
        Err(_) => return Err(Fault::Torn),
    }
    let (head, lines) = body(first, &text, end + 1).ok_or(Fault::Torn)?;
    Ok(Page::in_text(path, head, text, lines))
}

/// The head, and the place of the leases' lines. `first` tells the length and sum of what begins at `start`.
fn body(first: &str, text: &str, start: usize) -> Option<(Head, Range<usize>)> {
    let (length, sum) = first.split_once(" bytes, crc32 ")?;
    let end = start.checked_add(length.parse().ok()?)?;
    let body = text.get(start..end)?;
    if format!("{:08x}", crc32fast::hash(body.as_bytes())) != sum || !body.ends_with('\n') {
        return None;
    }
    let head = body.find('\n')?;
    Some((serde_json::from_str(&body[..head]).ok()?, start + head + 1..end))
}
