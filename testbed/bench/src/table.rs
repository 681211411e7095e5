//! Writes figures as a Markdown table, one row for each figure with its target, aligned for terminals too.

use std::fmt;

use crate::measure::{self, Sample};

/// Written if nothing was measured.
const NONE: &str = "-";

/// The figures of one section, and the notes below them.
#[derive(Debug, Default)]
pub struct Table {
    rows: Vec<Row>,
    notes: Vec<String>,
}

/// One figure.
#[derive(Debug)]
pub struct Row {
    what: String,
    value: String,
    spread: String,
    runs: String,
    target: String,
    met: Option<bool>,
    peer: Option<String>,
}

impl Row {
    /// Creates a row with a figure in words: a count, a size, a ratio.
    pub fn plain(what: &str, value: impl Into<String>) -> Self {
        let none = || NONE.to_owned();
        let (what, value) = (what.to_owned(), value.into());
        Self { what, value, spread: none(), runs: none(), target: none(), met: None, peer: None }
    }

    /// Creates a row with a duration: its median and quartiles, in milliseconds.
    pub fn duration(what: &str, sample: &Sample) -> Self {
        Self::of(what, sample, sample.median(), measure::milliseconds)
    }

    /// Creates a row with the difference of pairs: its median and quartiles with their signs, in
    /// milliseconds.
    pub fn difference(what: &str, sample: &Sample) -> Self {
        Self::of(what, sample, sample.median(), measure::difference)
    }

    /// Creates a row with the 99th percentile of a duration, in milliseconds.
    pub fn slowest_of_hundred(what: &str, sample: &Sample) -> Self {
        Self::of(what, sample, sample.percentile(99), measure::milliseconds)
    }

    /// Creates a row with the time added to a call: the median of a sample of picoseconds, written in
    /// nanoseconds.
    pub fn added(what: &str, sample: &Sample) -> Self {
        let row = Self::of(what, sample, sample.median(), measure::added);
        Self { value: format!("{} ns", measure::added(sample.median())), ..row }
    }

    fn of(what: &str, sample: &Sample, value: i64, write: fn(i64) -> String) -> Self {
        let spread = format!("{} .. {}", write(sample.percentile(25)), write(sample.percentile(75)));
        Self { spread, ..Self::plain(what, format!("{} ms", write(value))) }.runs(sample.runs())
    }

    /// Sets the spread: the values around the figure, or other words in that column.
    pub fn spread(self, words: impl Into<String>) -> Self {
        Self { spread: words.into(), ..self }
    }

    /// Sets how often the figure was measured.
    pub fn runs(self, runs: usize) -> Self {
        Self { runs: runs.to_string(), ..self }
    }

    /// Sets the target in words, and whether it is met.
    pub fn target(self, target: &str, met: bool) -> Self {
        Self { target: target.to_owned(), met: Some(met), ..self }
    }

    /// Sets the same figure of the peer; `None` leaves the cell empty.
    pub fn peer(self, value: Option<String>) -> Self {
        Self { peer: value, ..self }
    }

    fn cells(&self, with_peer: bool) -> Vec<String> {
        let verdict = self.met.map_or(NONE, |met| if met { "met" } else { "OVER" });
        let mut cells = vec![self.what.clone(), self.value.clone(), self.spread.clone(), self.runs.clone()];
        cells.extend([self.target.clone(), verdict.to_owned()]);
        cells.extend(with_peer.then(|| self.peer.clone().unwrap_or_else(|| NONE.to_owned())));
        cells
    }
}

impl Table {
    /// Adds a row.
    pub fn push(&mut self, row: Row) {
        self.rows.push(row);
    }

    /// Adds a line of text below the table.
    pub fn note(&mut self, text: impl Into<String>) {
        self.notes.push(text.into());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let with_peer = self.rows.iter().any(|row| row.peer.is_some());
        let mut head = vec!["what", "measured", "spread", "runs", "target", "verdict"];
        head.extend(with_peer.then_some("peer"));
        let head: Vec<String> = head.into_iter().map(str::to_owned).collect();
        let rows: Vec<Vec<String>> = self.rows.iter().map(|row| row.cells(with_peer)).collect();
        let width = |column: usize| {
            let cells = rows.iter().chain([&head]).map(|row| row[column].chars().count());
            cells.max().unwrap_or_default()
        };
        let widths: Vec<usize> = (0..head.len()).map(width).collect();
        let rule = widths.iter().map(|width| "-".repeat(*width)).collect();
        for row in [head, rule].into_iter().chain(rows) {
            let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
            writeln!(f, "| {} |", cells.collect::<Vec<_>>().join(" | "))?;
        }
        self.notes.iter().try_for_each(|note| write!(f, "\n{note}\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_a_figure_over_its_target_says_so() {
        let mut table = Table::default();
        let sample = Sample::new(vec![1_000_000, 2_000_000, 4_000_000]).unwrap();
        table.push(Row::duration("start", &sample).target("<= 1.5 ms", sample.median() <= 1_500_000));
        table.push(Row::plain("hooks run", "1").target("1", true));
        let text = table.to_string();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4);
        assert!(lines.iter().all(|line| line.len() == lines[0].len()), "{text}");
        assert!(lines[2].contains("| 2.000 ms | 1.000 .. 4.000 | 3    | <= 1.5 ms | OVER"), "{text}");
        assert!(lines[3].contains("met") && !text.contains("peer"), "{text}");
    }
}
