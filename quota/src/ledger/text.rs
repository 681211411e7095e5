//! The ledger as text: a line with the length and checksum of the body, then the head and one line per lease.
//! Blank lines may follow.

use std::io::Write;
use std::path::Path;

use super::Page;
use super::page::Line;

/// Increased with every change to the format. 5: leases that a supervisor enforces. 6: limits that shrank.
const VERSION: u32 = 6;
/// The earliest readable version. A running node has such a ledger after an upgrade. packaging/lifecycle.sh
/// has the same number.
const READABLE: u32 = 4;
/// The first line up to the version.
const TITLE: &str = "gpushare leases, version ";

/// Why a text is not readable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// It is incomplete, or not a ledger.
    Torn,
    /// Another version of gpushare wrote it.
    Version(u32),
}

/// Serializes a page, padded with blank lines to a multiple of `unit` bytes.
pub(super) fn of(page: &Page, unit: usize) -> Vec<u8> {
    // Allocate once: a large buffer gets fresh pages from the kernel whenever it grows.
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

/// The first line, which always has the same length: ten digits are enough for any ledger's size.
fn first_line(length: usize, sum: u32) -> String {
    format!("{TITLE}{VERSION}: {length:010} bytes, crc32 {sum:08x}\n")
}

/// The checksum of a body. It covers the version, so that a damaged version is not mistaken for an earlier
/// one.
fn checksum(version: u32, body: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&version.to_le_bytes());
    hasher.update(body);
    hasher.finalize()
}

fn line(body: &mut Vec<u8>, value: &impl serde::Serialize) {
    // Serializing to memory cannot fail for our values: none has a map whose keys are not strings.
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

/// Parses the body that begins at `start`. Anything after the body is a remainder of an earlier text.
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
