//! The budget of a lease: a file that the supervisors of its containers share, and no container sees.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use gpushare_quota::Lease;
use gpushare_supervisor::budget::{Page, Passed};
use gpushare_supervisor::memory::OpenBudget;
use nix::fcntl::OFlag;

use crate::region::make_private;

/// Name of the folder of all budgets, in the state folder.
const FOLDER: &str = "budgets";

/// The budgets of all leases.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Budgets(PathBuf);

impl Budgets {
    /// Those of this state folder.
    pub fn of(state: &Path) -> Self {
        Self(state.join(FOLDER))
    }

    /// The file of a lease, whether it exists or not.
    pub fn path(&self, lease: i64) -> PathBuf {
        self.0.join(lease.to_string())
    }

    /// Makes the budget of a lease.
    ///
    /// # Errors
    /// When there is one already, or it cannot be made.
    pub fn make(&self, lease: &Lease) -> io::Result<()> {
        make_private(&self.0)?;
        let path = self.path(lease.id);
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        file.write_all(Page::new().as_bytes())?;
        self.grant(lease)
    }

    /// Writes what the lease grants into its budget. A lease that no supervisor holds has none.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn grant(&self, lease: &Lease) -> io::Result<()> {
        let file = match open(&self.path(lease.id)) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            found => found?,
        };
        let page = OpenBudget::of(file)?;
        for (line, grant) in lease.grants.iter().enumerate() {
            page.grant(line, &grant.gpu.bytes(), grant.memory.bytes());
        }
        Ok(())
    }

    /// What went past the supervisors of a lease; `None` where none holds it.
    ///
    /// # Errors
    /// When its budget cannot be read.
    pub fn passed(&self, lease: i64) -> io::Result<Option<Passed>> {
        match open(&self.path(lease)) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            found => Ok(Some(OpenBudget::of(found?)?.passed())),
        }
    }

    /// Removes the budget of a lease; succeeds also if there is none.
    pub fn remove(&self, lease: i64) {
        let _ = std::fs::remove_file(self.path(lease));
    }

    /// The folder, which has one file for each lease.
    pub fn folder(&self) -> &Path {
        &self.0
    }
}

fn open(path: &Path) -> io::Result<File> {
    let flags = OFlag::O_NOFOLLOW.bits();
    OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)
}
