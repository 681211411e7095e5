//! The ledger as text: a line with length and checksum of what follows, the head, and one line for each
//! lease. Blank lines may follow.

use std::io::Write;
use std::path::Path;

use super::Page;
use super::page::Line;

/// Raised with every change to what follows it. 5: leases that a supervisor holds. 6: limits that shrank.
const VERSION: u32 = 6;
/// The earliest version that can be read. A running node has such a ledger after an upgrade.
/// packaging/lifecycle.sh has the same number.
const READABLE: u32 = 4;
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
    let first = first_line(body.len(), checksum(VERSION, body));
    text[..start].copy_from_slice(first.as_bytes());
    text.resize(text.len().next_multiple_of(unit), b'\n');
    text
}

/// The first line, always of the same length: no ledger has ten digits of bytes.
fn first_line(length: usize, sum: u32) -> String {
    format!("{TITLE}{VERSION}: {length:010} bytes, crc32 {sum:08x}\n")
}

/// The checksum of a body. It covers the version, so that a damaged one is not taken for an earlier one.
fn checksum(version: u32, body: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&version.to_le_bytes());
    hasher.update(body);
    hasher.finalize()
}

fn line(body: &mut Vec<u8>, value: &impl serde::Serialize) {
    // Writing into memory fails for no value of ours: none has a map whose keys are not strings.
    serde_json::to_writer(&mut *body, value).expect("a value of ours is JSON");
    let _ = body.write(b"\n");
}

/// Reads the text of the ledger at `path`.
pub(super) fn read(path: &Path, text: Vec<u8>) -> Result<Page, Fault> {
    let end = text.iter().position(|byte| *byte == b'\n').ok_or(Fault::Torn)?;
    let first = str::from_utf8(&text[..end]).ok().and_then(|first| first.strip_prefix(TITLE));
    let (version, first) = first.and_then(|first| first.split_once(": ")).ok_or(Fault::Torn)?;
    let version = match version.parse::<u32>() {
        Ok(version @ READABLE..=VERSION) => version,
        Ok(version) => return Err(Fault::Version(version)),
        Err(_) => return Err(Fault::Torn),
    };
    let (length, sum) = first.split_once(" bytes, crc32 ").ok_or(Fault::Torn)?;
    let (length, sum) = (length.parse().map_err(|_| Fault::Torn)?, sum.to_owned());
    page(path, text, end + 1, length, (version, &sum)).ok_or(Fault::Torn)
}

/// The page whose body begins at `start`. What follows the body is left of an earlier text.
fn page(
    path: &Path,
    mut text: Vec<u8>,
    start: usize,
    length: usize,
    (version, sum): (u32, &str),
) -> Option<Page> {
    let body = text.get(start..start.checked_add(length)?)?;
    if format!("{:08x}", checksum(version, body)) != sum || body.last() != Some(&b'\n') {
        return None;
    }
    text.truncate(start + length);
    let text = String::from_utf8(text).ok()?;
    let head = start + text[start..].find('\n')?;
    Some(Page::in_text(path, serde_json::from_str(&text[start..head]).ok()?, text, head + 1))
}
