//! What a ledger says. A lease's line is read when somebody asks for it, since most turns are about one
//! lease.

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

/// What the ledger says.
#[derive(Clone, Debug)]
pub(crate) struct Page {
    pub head: Head,
    /// The ledger's path, for errors.
    path: PathBuf,
    /// The text in which the lines of [`Row::Read`] stand.
    text: String,
    /// Oldest first.
    rows: Vec<Row>,
}

/// One lease.
#[derive(Clone, Debug)]
enum Row {
    /// As the text says, in this range.
    Read(Range<usize>),
    /// New, or perhaps changed.
    Written(Box<Entry>),
}

/// What a lease takes from the node.
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

/// The part of an entry that counts for others. The rest of its line is passed over.
#[derive(Deserialize)]
struct Brief {
    lease: Held,
}

impl Page {
    /// A page without leases.
    pub fn new(path: &Path, head: Head) -> Self {
        Self { head, path: path.into(), text: String::new(), rows: Vec::new() }
    }

    /// A page whose leases stand in `text` from `start` on, a line each.
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

    /// About how many bytes it takes as text.
    pub(super) fn length(&self) -> usize {
        /// More than a lease of eight GPUs takes.
        const ENTRY: usize = 2048;
        let new = self.rows.iter().filter(|row| matches!(row, Row::Written(_))).count();
        self.text.len() + new * ENTRY
    }

    /// Whether it has no lease.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// All leases, oldest first.
    ///
    /// # Errors
    /// When a line is none of ours.
    pub fn entries(&self) -> Result<Vec<Entry>, StoreError> {
        self.rows.iter().map(|row| self.entry(row)).collect()
    }

    /// What each lease takes from the node.
    ///
    /// # Errors
    /// When a line is none of ours.
    pub fn held(&self) -> impl Iterator<Item = Result<Held, StoreError>> {
        self.rows.iter().map(|row| match row {
            Row::Read(line) => self.parsed(line).map(|brief: Brief| brief.lease),
            Row::Written(entry) => Ok(Held::of(&entry.lease)),
        })
    }

    /// The entry of the lease that a container holds.
    ///
    /// # Errors
    /// When its line is none of ours.
    pub fn of(&mut self, key: &LeaseKey) -> Result<Option<&mut Entry>, StoreError> {
        self.find(&quoted(&key.container), |entry| entry.lease.members().any(|member| member.key == *key))
    }

    /// The entry of the lease with this id.
    ///
    /// # Errors
    /// When its line is none of ours.
    pub fn lease(&mut self, id: i64) -> Result<Option<&mut Entry>, StoreError> {
        self.find(&format!("\"id\":{id},"), |entry| entry.lease.id == id)
    }

    /// The first entry for which `wanted` holds, of those in whose line the text `mark` stands.
    ///
    /// # Errors
    /// When a line with the mark is none of ours.
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

    /// All entries for which `wanted` holds, of those in whose line the text `mark` stands.
    ///
    /// # Errors
    /// When a line with the mark is none of ours.
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
    /// When its line is none of ours.
    pub fn remove(&mut self, id: i64) -> Result<(), StoreError> {
        // It is found as an entry, which tells it from the other rows.
        self.lease(id)?;
        self.rows.retain(|row| !matches!(row, Row::Written(entry) if entry.lease.id == id));
        Ok(())
    }

    /// Each lease's line without its end, as it is written.
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

    /// The checksum holds, so a line that cannot be read was never written by this version.
    fn parsed<'a, T: Deserialize<'a>>(&'a self, line: &Range<usize>) -> Result<T, StoreError> {
        let line = &self.text[line.clone()];
        serde_json::from_str(line).map_err(|_| StoreError::Damaged { path: self.path.clone() })
    }
}

/// A line to write.
pub(super) enum Line<'a> {
    /// The same as before.
    Old(&'a str),
    /// What serde makes of it.
    New(&'a Entry),
}

/// A text as it stands in a line.
pub(crate) fn quoted(text: &str) -> String {
    // Text always is JSON.
    to_string(text).unwrap_or_default()
}
