//! The content of a ledger. Leases are parsed on demand, since most turns concern one lease.

use std::ops::Range;
use std::path::{Path, PathBuf};

use gpushare_claims::ComputePolicy;
use gpushare_inventory::DeviceMemory;
use serde::Deserialize;
use serde_json::to_string;

use crate::enforcement::Enforcement;
use crate::error::StoreError;
use crate::lease::{Grant, Lease, LeaseKey};
use crate::ledger::{Entry, Head};

/// The content of the ledger.
#[derive(Clone, Debug)]
pub(crate) struct Page {
    pub head: Head,
    /// The ledger's path, for errors.
    path: PathBuf,
    /// The text that contains the lines of [`Row::Read`].
    text: String,
    /// Oldest first.
    rows: Vec<Row>,
}

/// One lease.
#[derive(Clone, Debug)]
enum Row {
    /// Unchanged; the range of its line in the text.
    Read(Range<usize>),
    /// New, or possibly changed.
    Written(Box<Entry>),
}

/// The node resources that a lease uses.
#[derive(Debug, Deserialize)]
pub(crate) struct Held {
    pub grants: Vec<Grant>,
    pub enforcement: Enforcement,
    pub compute_policy: ComputePolicy,
    #[serde(default)]
    pub host_memory: DeviceMemory,
}

impl Held {
    pub(crate) fn of(lease: &Lease) -> Self {
        let Lease { enforcement, compute_policy, host_memory, .. } = *lease;
        Self { grants: lease.grants.clone(), enforcement, compute_policy, host_memory }
    }
}

/// The part of an entry that affects other leases. The rest of its line is skipped.
#[derive(Deserialize)]
struct Brief {
    lease: Held,
}

impl Page {
    /// Returns a page without leases.
    pub fn new(path: &Path, head: Head) -> Self {
        Self { head, path: path.into(), text: String::new(), rows: Vec::new() }
    }

    /// Returns a page whose leases are the lines of `text` from `start` on.
    pub fn in_text(path: &Path, head: Head, text: String, mut start: usize) -> Self {
        let lines = text[start..].lines().map(|line| {
            let end = start + line.len();
            let range = start..end;
            start = end + 1;
            Row::Read(range)
        });
        let rows = lines.collect();
        Self { head, path: path.into(), text, rows }
    }

    /// Estimated length of its text in bytes.
    pub(super) fn length(&self) -> usize {
        /// Upper bound for a lease of eight GPUs.
        const ENTRY: usize = 2048;
        let new = self.rows.iter().filter(|row| matches!(row, Row::Written(_))).count();
        self.text.len() + new * ENTRY
    }

    /// Whether it has no leases.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Returns all leases, oldest first.
    ///
    /// # Errors
    /// When a line is invalid.
    pub fn entries(&self) -> Result<Vec<Entry>, StoreError> {
        self.rows.iter().map(|row| self.entry(row)).collect()
    }

    /// Returns the node resources that each lease uses.
    ///
    /// # Errors
    /// When a line is invalid.
    pub fn held(&self) -> impl Iterator<Item = Result<Held, StoreError>> {
        self.rows.iter().map(|row| match row {
            Row::Read(line) => self.parsed(line).map(|brief: Brief| brief.lease),
            Row::Written(entry) => Ok(Held::of(&entry.lease)),
        })
    }

    /// Returns the entry of the lease of a container.
    ///
    /// # Errors
    /// When its line is invalid.
    pub fn of(&mut self, key: &LeaseKey) -> Result<Option<&mut Entry>, StoreError> {
        self.find(&quoted(&key.container), |entry| entry.lease.members().any(|member| member.key == *key))
    }

    /// Returns the entry of the lease with this id.
    ///
    /// # Errors
    /// When its line is invalid.
    pub fn lease(&mut self, id: i64) -> Result<Option<&mut Entry>, StoreError> {
        self.find(&format!("\"id\":{id},"), |entry| entry.lease.id == id)
    }

    /// Returns the first entry for which `wanted` returns true. Skips lines that do not contain `mark`.
    ///
    /// # Errors
    /// When a line with the mark is invalid.
    pub fn find(
        &mut self,
        mark: &str,
        wanted: impl Fn(&Entry) -> bool,
    ) -> Result<Option<&mut Entry>, StoreError> {
        for at in 0..self.rows.len() {
            let newly_read: Option<Entry> = match &self.rows[at] {
                Row::Written(entry) if wanted(entry) => None,
                Row::Read(line) if self.text[line.clone()].contains(mark) => Some(self.parsed(line)?),
                _ => continue,
            };
            if let Some(entry) = newly_read {
                if !wanted(&entry) {
                    continue;
                }
                self.rows[at] = Row::Written(Box::new(entry));
            }
            let Row::Written(entry) = &mut self.rows[at] else { return Ok(None) };
            return Ok(Some(entry));
        }
        Ok(None)
    }

    /// Returns all entries for which `wanted` returns true. Skips lines that do not contain `mark`.
    ///
    /// # Errors
    /// When a line with the mark is invalid.
    pub fn all(&self, mark: &str, wanted: impl Fn(&Entry) -> bool) -> Result<Vec<Entry>, StoreError> {
        let may_be = |row: &&Row| match row {
            Row::Written(_) => true,
            Row::Read(line) => self.text[line.clone()].contains(mark),
        };
        let mut found: Vec<Entry> =
            self.rows.iter().filter(may_be).map(|row| self.entry(row)).collect::<Result<_, _>>()?;
        found.retain(wanted);
        Ok(found)
    }

    /// Adds a lease.
    pub fn push(&mut self, entry: Entry) {
        self.rows.push(Row::Written(Box::new(entry)));
    }

    /// Removes the lease with this id.
    ///
    /// # Errors
    /// When its line is invalid.
    pub fn remove(&mut self, id: i64) -> Result<(), StoreError> {
        // The lookup parses the row into an entry, which the next line compares.
        self.lease(id)?;
        self.rows.retain(|row| !matches!(row, Row::Written(entry) if entry.lease.id == id));
        Ok(())
    }

    /// Returns each lease's line as written, without the newline.
    pub(super) fn lines(&self) -> impl Iterator<Item = Line<'_>> {
        self.rows.iter().map(|row| match row {
            Row::Read(line) => Line::Old(&self.text[line.clone()]),
            Row::Written(entry) => Line::New(entry),
        })
    }

    fn entry(&self, row: &Row) -> Result<Entry, StoreError> {
        match row {
            Row::Read(line) => self.parsed(line),
            Row::Written(entry) => Ok(Entry::clone(entry)),
        }
    }

    /// The checksum matched, so this version cannot have written a line that does not parse.
    fn parsed<'a, T: Deserialize<'a>>(&'a self, line: &Range<usize>) -> Result<T, StoreError> {
        let line = &self.text[line.clone()];
        serde_json::from_str(line).map_err(|_| StoreError::Damaged { path: self.path.clone() })
    }
}

/// A line to write.
pub(super) enum Line<'a> {
    /// Unchanged text.
    Old(&'a str),
    /// An entry to serialize.
    New(&'a Entry),
}

/// Returns `text` as it appears in a line.
pub(crate) fn quoted(text: &str) -> String {
    // A string always serializes.
    to_string(text).unwrap_or_default()
}
