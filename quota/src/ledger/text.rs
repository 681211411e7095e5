//! The ledger as text: a line with length and checksum of what follows, the head, and one line for each
//! lease. Blank lines may follow.

use std::io::Write;

use crate::ledger::{Entry, Head, Page};

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
    let mut body = Vec::new();
    line(&mut body, &page.head);
    for entry in &page.entries {
        line(&mut body, entry);
    }
    let sum = crc32fast::hash(&body);
    let mut text = format!("{TITLE}{VERSION}: {} bytes, crc32 {sum:08x}\n", body.len()).into_bytes();
    text.append(&mut body);
    text.resize(text.len().next_multiple_of(unit), b'\n');
    text
}

fn line(body: &mut Vec<u8>, value: &impl serde::Serialize) {
    // Writing into memory fails for no value of ours: none has a map whose keys are not strings.
    serde_json::to_writer(&mut *body, value).expect("a value of ours is JSON");
    let _ = body.write(b"\n");
}

pub(super) fn read(text: &[u8]) -> Result<Page, Fault> {
    let end = text.iter().position(|byte| *byte == b'\n').ok_or(Fault::Torn)?;
    let (first, rest) = text.split_at(end + 1);
    let first = str::from_utf8(&first[..end]).ok().and_then(|first| first.strip_prefix(TITLE));
    let (version, first) = first.and_then(|first| first.split_once(": ")).ok_or(Fault::Torn)?;
    match version.parse::<u32>() {
        Ok(version) if version == VERSION => {}
        Ok(version) => return Err(Fault::Version(version)),
        Err(_) => return Err(Fault::Torn),
    }
    page(first, rest).ok_or(Fault::Torn)
}

fn page(first: &str, rest: &[u8]) -> Option<Page> {
    let (length, sum) = first.split_once(" bytes, crc32 ")?;
    let body = rest.get(..length.parse().ok()?)?;
    if format!("{:08x}", crc32fast::hash(body)) != sum {
        return None;
    }
    let mut lines = body.split_inclusive(|byte| *byte == b'\n');
    let head: Head = serde_json::from_slice(lines.next()?).ok()?;
    let entries: Result<Vec<Entry>, _> = lines.map(serde_json::from_slice).collect();
    Some(Page { head, entries: entries.ok()? })
}
