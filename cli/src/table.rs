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

/// Prints rows as CSV (RFC 4180) under the names of their columns.
pub fn csv(columns: &[&str], rows: impl Iterator<Item = Vec<String>>) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{}", columns.join(","))?;
    for row in rows {
        let cells: Vec<String> = row.iter().map(|cell| quoted(&escaped(cell))).collect();
        writeln!(out, "{}", cells.join(","))?;
    }
    Ok(())
}

/// A cell of CSV. One that a spreadsheet would take for a formula is text there, too.
fn quoted(cell: &str) -> String {
    let cell = if cell.starts_with(['=', '+', '-', '@']) && cell != "-" {
        format!("'{cell}")
    } else {
        cell.to_owned()
    };
    if cell.contains(['"', ',', '\n']) { format!("\"{}\"", cell.replace('"', "\"\"")) } else { cell }
}

/// Prints a value as indented JSON.
pub fn json(value: &Value) -> io::Result<()> {
    writeln!(io::stdout().lock(), "{}", shown(&format!("{value:#}")))
}

/// JSON without the characters that it leaves inside strings as they are, but on which a terminal may act.
pub fn shown(json: &str) -> String {
    let shown = json.chars().map(|c| match c {
        '\u{7f}'..='\u{9f}' => format!("\\u{:04x}", u32::from(c)),
        c => c.to_string(),
    });
    shown.collect()
}

/// `text` with control characters written out, on which a terminal may act.
pub fn escaped(text: &str) -> String {
    let shown = |c: char| match c.is_control() || is_unseen(c) {
        true => c.escape_default().to_string(),
        false => c.to_string(),
    };
    text.chars().map(shown).collect()
}

/// Whether a character takes no room, breaks the line, or turns the direction of what follows (Unicode, annex
/// 9): names with it would look like others.
fn is_unseen(c: char) -> bool {
    matches!(c, '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// How long ago `since` was; `since` in seconds since 1970.
pub fn age(since: u64) -> String {
    span(Duration::from_secs(now().saturating_sub(since)))
}

/// A time in its two largest units, as `3days 4h`.
pub fn span(time: Duration) -> String {
    let text = humantime::format_duration(time).to_string();
    text.split(' ').take(2).collect::<Vec<_>>().join(" ")
}

/// Seconds since 1970.
pub fn now() -> u64 {
    Clock::now().wall / 1_000_000_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_of_csv_is_one_cell_and_no_formula() {
        for (cell, want) in [
            ("web", "web"),
            ("a,b", "\"a,b\""),
            ("say \"x\"", "\"say \"\"x\"\"\""),
            ("=HYPERLINK(1,2)", "\"'=HYPERLINK(1,2)\""),
            ("", ""),
        ] {
            assert_eq!(quoted(cell), want);
        }
    }

    #[test]
    fn what_cannot_be_seen_in_a_name_is_written_out() {
        for (text, want) in [
            ("team/web ü", "team/web ü"),
            ("a\nb\u{1b}[31m", "a\\nb\\u{1b}[31m"),
            ("we\u{200b}b\u{202e}", "we\\u{200b}b\\u{202e}"),
        ] {
            assert_eq!(escaped(text), want);
        }
    }

    #[test]
    fn a_span_has_its_two_largest_units() {
        for (seconds, want) in [(0, "0s"), (59, "59s"), (3_725, "1h 2m"), (273_601, "3days 4h")] {
            assert_eq!(span(Duration::from_secs(seconds)), want);
        }
    }
}
