//! Output for people: tables with columns as wide as their widest cell, lines and JSON. Text from bundles is
//! escaped, so that a container's name cannot move the cursor.

use std::io::{self, Write};
use std::time::Duration;

use serde_json::Value;

use crate::clock::Clock;

/// Prints a table; a heading alone when there is no row.
pub fn print<const COLUMNS: usize>(
    headings: [&str; COLUMNS],
    rows: impl Iterator<Item = [String; COLUMNS]>,
) -> io::Result<()> {
    let rows: Vec<[String; COLUMNS]> = rows.map(|row| row.map(|cell| escaped(&cell))).collect();
    let headings = headings.map(str::to_owned);
    let all = || std::iter::once(&headings).chain(&rows);
    let width = |column: usize| all().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; COLUMNS] = std::array::from_fn(width);
    let mut out = io::stdout().lock();
    for row in all() {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}"));
        writeln!(out, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
    }
    Ok(())
}

/// Prints one line, in place of a table without rows.
pub fn line(text: &str) -> io::Result<()> {
    writeln!(io::stdout().lock(), "{}", escaped(text))
}

/// Prints a value as indented JSON.
pub fn json(value: &Value) -> io::Result<()> {
    let text = format!("{value:#}");
    // JSON leaves these characters inside strings as they are, but a terminal may act on them.
    let shown = text.chars().map(|c| match c {
        '\u{7f}'..='\u{9f}' => format!("\\u{:04x}", u32::from(c)),
        c => c.to_string(),
    });
    writeln!(io::stdout().lock(), "{}", shown.collect::<String>())
}

/// `text` with control characters written out, on which a terminal may act.
pub fn escaped(text: &str) -> String {
    let shown = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.to_string() };
    text.chars().map(shown).collect()
}

/// How long ago `since` was; `since` in seconds since 1970.
pub fn age(since: u64) -> String {
    let now = Clock::now().wall / 1_000_000_000;
    humantime::format_duration(Duration::from_secs(now.saturating_sub(since))).to_string()
}
