//! The budget of a lease: a file that the supervisors of its containers share, and no container sees.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use gpushare_inventory::GpuUuid;
use gpushare_quota::{Enforcement, Lease};
use gpushare_supervisor::books::MOST_GPUS;
use gpushare_supervisor::budget::Page;
use gpushare_supervisor::memory::{OpenBudget, is_in_use};
use nix::fcntl::OFlag;

use super::Supervision;
use super::plans::{self, Planned};
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
        make_private(&self.0.with_file_name(super::BOARDS))?;
        let path = self.path(lease.id);
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        file.write_all(Page::new().as_bytes())?;
        self.grant(lease)
    }

    /// Writes what the lease grants into its budget. A lease that no supervisor holds has none.
    ///
    /// # Errors
    /// When there is none where there should be one, or it cannot be written.
    pub fn grant(&self, lease: &Lease) -> io::Result<()> {
        if !lease.enforcement.is_supervised() {
            return Ok(());
        }
        let page = self.open(lease.id)?;
        for (line, grant) in lease.grants.iter().enumerate() {
            page.grant(line, &grant.gpu.bytes(), grant.memory.bytes());
        }
        page.set_lease(lease.id);
        if lease.enforcement == Enforcement::Scheduled { self.plan(lease, &page) } else { Ok(()) }
    }

    /// Gives the lease its part of its GPUs' time, beside all others.
    fn plan(&self, lease: &Lease, page: &Page) -> io::Result<()> {
        let before: Vec<_> = (0..lease.grants.len()).map(|line| page.plan(line)).collect();
        let changes = plans::plan(lease, &before, &self.others(lease.id)?);
        for changed in &changes.others {
            // One that has ended meanwhile needs none.
            if let Ok(other) = self.open(changed.lease) {
                other.set_plan(changed.line, Some(&changed.plan));
            }
        }
        changes.own.iter().enumerate().for_each(|(line, plan)| page.set_plan(line, Some(plan)));
        Ok(())
    }

    /// The plans of all leases but this one.
    fn others(&self, lease: i64) -> io::Result<Vec<Planned>> {
        let mut all = Vec::new();
        for entry in std::fs::read_dir(&self.0)? {
            let id = entry?.file_name().to_str().and_then(|name| name.parse::<i64>().ok());
            let Some(page) = id.filter(|id| *id != lease).and_then(|id| self.open(id).ok()) else { continue };
            for line in 0..MOST_GPUS {
                let planned = page.uuid(line).zip(page.plan(line));
                all.extend(planned.map(|(uuid, plan)| Planned {
                    lease: id.unwrap_or(0),
                    line,
                    gpu: GpuUuid::from_bytes(uuid),
                    plan,
                }));
            }
        }
        Ok(all)
    }

    /// Whether the budget of a lease grants what the lease says.
    ///
    /// # Errors
    /// As [`Budgets::grant`].
    pub fn grants_are(&self, lease: &Lease) -> io::Result<bool> {
        if !lease.enforcement.is_supervised() {
            return Ok(true);
        }
        let page = self.open(lease.id)?;
        let mut grants = lease.grants.iter().enumerate();
        Ok(grants.all(|(line, grant)| page.granted(line) == grant.memory.bytes()))
    }

    /// Reads the figures of a lease's supervisors; `None` where none holds it.
    ///
    /// # Errors
    /// When its budget cannot be read.
    pub fn supervision(&self, lease: i64) -> io::Result<Option<Supervision>> {
        match self.open(lease) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            found => {
                let page = found?;
                Ok(Some(Supervision {
                    passed: page.passed(),
                    charged: page.charged(),
                    is_paused: page.is_paused(),
                }))
            }
        }
    }

    /// Pauses a lease's programs, or lets them run again.
    ///
    /// # Errors
    /// When there is no budget, or it cannot be written.
    pub fn pause(&self, lease: i64, is_paused: bool) -> io::Result<()> {
        self.open(lease)?.pause(is_paused);
        Ok(())
    }

    /// Whether a supervisor of the lease lives.
    ///
    /// # Errors
    /// When its budget cannot be opened.
    pub fn is_in_use(&self, lease: i64) -> io::Result<bool> {
        Ok(is_in_use(self.file(lease)?)?)
    }

    /// Removes the budget of a lease; succeeds also if there is none. A supervisor that still has it, since
    /// somebody left a process behind, allocates nothing any more.
    pub fn remove(&self, lease: i64) {
        if let Ok(page) = self.open(lease) {
            page.revoke();
        }
        let _ = std::fs::remove_file(self.path(lease));
    }

    /// The folder, which has one file for each lease.
    pub fn folder(&self) -> &Path {
        &self.0
    }

    fn open(&self, lease: i64) -> io::Result<OpenBudget> {
        Ok(OpenBudget::open(self.file(lease)?)?)
    }

    fn file(&self, lease: i64) -> io::Result<File> {
        let flags = (OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits();
        OpenOptions::new().read(true).write(true).custom_flags(flags).open(self.path(lease))
    }
}
