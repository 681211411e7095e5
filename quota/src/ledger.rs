//! The ledger: one text file with all living leases. It lies in the state folder, and its name has the boot
//! id.
//!
//! A writer takes the turn, reads the file, writes the whole text into a second file, and exchanges the two.
//! So the file with the ledger's name is always complete, and a process that is killed leaves it unchanged.
//! Leases do not outlive a boot, so the writer never syncs to disk: after a power cut the file belongs to an
//! earlier boot.

mod page;
mod text;

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, FallocateFlags, OFlag, RenameFlags, fallocate, renameat2};
use serde::{Deserialize, Serialize};

use crate::boot::Boot;
use crate::claim::ResourceClaim;
use crate::database::{database, holds_leases};
use crate::ended;
use crate::error::StoreError;
use crate::lease::{Lease, PastLease, ReleaseReason};
use crate::state::REGIONS;
use crate::turn::{Turn, is_at};
pub(crate) use page::{Held, Page, quoted};
use text::Fault;

/// Prefix of every ledger's name. The boot id follows.
const NAME: &str = "leases-";
/// How many times a reader tries without taking the turn. An attempt fails only if a writer commits during
/// it.
const LOOKS: usize = 16;
/// Both files grow by whole kernel pages, in bytes.
const PAGE: usize = 4096;

/// The ledger of one boot in one state folder.
#[derive(Debug)]
pub(crate) struct Ledger {
    state: PathBuf,
    path: PathBuf,
    boot: Boot,
}

/// Data about the whole ledger.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Head {
    /// The namespaces in which the leases' holders are valid; see [`Boot::namespaces`].
    pub namespaces: String,
    /// The id of the next lease. Ids are never reused, since regions are named by them.
    pub next: i64,
}

/// A lease, and its data that only the store uses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// The lease; its members are in the order in which they joined.
    pub lease: Lease,
    /// The runtime root below which the lease was made.
    pub root: String,
    /// The pod of its containers, by sandbox id.
    pub sandbox: Option<String>,
    /// The pod's request in words, if the lease covers the whole pod.
    pub pod_request: Option<String>,
    /// The resource claim that the lease was made for. Version 1 did not have this field.
    #[serde(default)]
    pub claim: Option<ResourceClaim>,
    /// Ids of the containers that most recently left it.
    pub former: Vec<String>,
}

impl Ledger {
    /// Opens the ledger of the running boot below the state folder. Creates it if this boot has none, and
    /// then moves leases of an earlier boot to the history.
    ///
    /// # Errors
    /// When it cannot be created, leases may be in a database of an earlier version, or regions of containers
    /// with unknown leases are left.
    pub fn open(state: &Path) -> Result<Self, StoreError> {
        let ledger = Self::at(state, Boot::here()?);
        match ledger.is_behind() {
            true => Err(StoreError::Earlier { path: database(state) }),
            false if ledger.is_absent() => ledger.begin_boot().map(|()| ledger),
            false => Ok(ledger),
        }
    }

    /// Returns the ledger of the boot, whether the file exists or not.
    pub fn at(state: &Path, boot: Boot) -> Self {
        Self { state: state.into(), path: state.join(format!("{NAME}{}", boot.id)), boot }
    }

    /// Whether this boot has no ledger file yet.
    fn is_absent(&self) -> bool {
        is_absent(&self.path)
    }

    /// Whether a database of an earlier version has leases that are not in the ledger yet.
    pub fn is_behind(&self) -> bool {
        holds_leases(&self.state)
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The state folder.
    pub fn state(&self) -> &Path {
        &self.state
    }

    /// Reads the current ledger. Does not wait for writers, unless one commits during every attempt.
    ///
    /// # Errors
    /// When the file is gone, damaged, of another version or from other namespaces.
    pub fn read(&self) -> Result<Page, StoreError> {
        for _ in 0..LOOKS {
            if let Some(found) = self.in_force(&self.file(false)?)? {
                return self.checked(found);
            }
        }
        self.write().map(|writing| writing.page)
    }

    /// Waits for this process's turn to write.
    ///
    /// # Errors
    /// The same as for [`Ledger::read`], and when others hold the turn past the deadline.
    pub fn write(&self) -> Result<Writing<'_>, StoreError> {
        let turn = Turn::take(&self.state)?;
        let file = self.file(true)?;
        let mut page = self.look(&file).and_then(|found| self.checked(found))?;
        page.head.namespaces.clone_from(&self.boot.namespaces);
        Ok(Writing { ledger: self, file, page, turn })
    }

    /// Checks that this process may rely on the page. From other namespaces, each holder would seem gone. A
    /// ledger without leases moves to the namespaces of the next writer.
    fn checked(&self, found: Result<Page, Fault>) -> Result<Page, StoreError> {
        let page = found.map_err(|fault| match fault {
            Fault::Torn => StoreError::Damaged { path: self.path.clone() },
            Fault::Version(version) => StoreError::Version { path: self.path.clone(), version },
        })?;
        match page.head.namespaces == self.boot.namespaces || page.is_empty() {
            true => Ok(page),
            false => Err(StoreError::Stranger {
                path: self.path.clone(),
                theirs: page.head.namespaces,
                ours: self.boot.namespaces.clone(),
            }),
        }
    }

    /// Reads the open file, if it is still the ledger after the read. Otherwise a writer may have been
    /// writing it: the text may be partial, or complete but never committed.
    pub fn in_force(&self, file: &File) -> Result<Option<Result<Page, Fault>>, StoreError> {
        let found = self.look(file)?;
        let is_ledger = is_at(file, &self.path).map_err(|error| StoreError::io(&self.path, error))?;
        Ok(Some(found).filter(|found| is_ledger && !matches!(found, Err(Fault::Torn))))
    }

    fn look(&self, mut file: &File) -> Result<Result<Page, Fault>, StoreError> {
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(|error| StoreError::io(&self.path, error))?;
        Ok(text::read(&self.path, bytes))
    }

    fn file(&self, writable: bool) -> Result<File, StoreError> {
        open(&self.path, writable).map_err(|error| match error.kind() {
            ErrorKind::NotFound => self.missing(),
            _ => StoreError::io(&self.path, error),
        })
    }

    fn missing(&self) -> StoreError {
        StoreError::Missing { path: self.path.clone(), regions: self.state.join(REGIONS) }
    }

    /// Creates the ledger of this boot, unless another process was faster.
    fn begin_boot(&self) -> Result<(), StoreError> {
        let turn = Turn::take(&self.state)?;
        if !self.is_absent() {
            return Ok(());
        }
        if self.is_behind() {
            return Err(StoreError::Earlier { path: database(&self.state) });
        }
        self.forbid_regions()?;
        self.make(&turn)?;
        // Retire earlier ledgers last: until the new ledger exists, they prove that the regions belong to an
        // earlier boot.
        self.retire_earlier(&turn)
    }

    /// Moves the leases of earlier boots to the history.
    fn retire_earlier(&self, _turn: &Turn) -> Result<(), StoreError> {
        for path in self.earlier_boots()? {
            self.retire(&path);
            fs::remove_file(&path).map_err(|error| StoreError::io(&path, error))?;
        }
        Ok(())
    }

    /// Creates the file, without leases. Ids start at the clock in microseconds, so that regions of an
    /// earlier ledger never belong to new leases.
    fn make(&self, _turn: &Turn) -> Result<(), StoreError> {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let clock = i64::try_from(since.as_micros()).unwrap_or(i64::MAX / 2);
        let head = Head { namespaces: self.boot.namespaces.clone(), next: clock };
        let io = |error| StoreError::io(&self.path, error);
        let spare = self.spare();
        let file = open_new(&spare).map_err(io)?;
        let text = text::of(&Page::new(&self.path, head), PAGE);
        file.write_all_at(&text, 0).map_err(io)?;
        fs::rename(&spare, &self.path).map_err(io)?;
        reserve(&open_new(&spare).map_err(io)?, text.len()).map_err(io).map(drop)
    }

    /// Finds ledgers of earlier boots, and their second files.
    fn earlier_boots(&self) -> Result<Vec<PathBuf>, StoreError> {
        let io = |error| StoreError::io(&self.state, error);
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.state).map_err(io)? {
            let path = entry.map_err(io)?.path();
            let name =
                path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_prefix(NAME));
            let boot = name.map(|name| name.strip_suffix(SPARE).unwrap_or(name));
            // Ignore copies that an editor made.
            let is_boot =
                |id: &str| id.len() == self.boot.id.len() && id != self.boot.id && !id.contains('.');
            if boot.is_some_and(is_boot) {
                found.push(path);
            }
        }
        Ok(found)
    }

    /// Records the leases of an earlier boot as ended. Ignores a file that a power cut damaged: its
    /// containers ended with their boot.
    fn retire(&self, path: &Path) {
        let text = open(path, false).and_then(|mut file| {
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes).map(|_| bytes)
        });
        let is_spare = path.to_string_lossy().ends_with(SPARE);
        let page = text.ok().filter(|_| !is_spare).and_then(|bytes| text::read(path, bytes).ok());
        for entry in page.and_then(|page| page.entries().ok()).into_iter().flatten() {
            ended::note(&self.state, &PastLease::of(&entry.lease, &entry.former, ReleaseReason::Reboot));
        }
    }

    /// Fails if a container's region exists without a ledger. The grants are unknown then, and an empty
    /// ledger would grant the same memory twice. If a ledger of an earlier boot exists, the regions belong to
    /// that boot.
    ///
    /// # Errors
    /// When there is a region, or the folder cannot be read.
    pub fn forbid_regions(&self) -> Result<(), StoreError> {
        match fs::read_dir(self.state.join(REGIONS)).map(|mut entries| entries.next()) {
            Ok(None) => Ok(()),
            Ok(Some(_)) if !self.earlier_boots()?.is_empty() => Ok(()),
            Ok(Some(_)) => Err(self.missing()),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            Err(error) => Err(StoreError::io(&self.state, error)),
        }
    }

    /// The second file, which is exchanged with the first.
    fn spare(&self) -> PathBuf {
        let mut path = self.path.clone().into_os_string();
        path.push(SPARE);
        path.into()
    }
}

/// Suffix of the second file's name.
const SPARE: &str = ".spare";

/// The turn to write, and the ledger's content when the turn began. Dropping it without [`Writing::commit`]
/// changes nothing.
pub(crate) struct Writing<'ledger> {
    ledger: &'ledger Ledger,
    file: File,
    pub page: Page,
    turn: Turn,
}

impl Writing<'_> {
    /// Writes [`Writing::page`]. The turn lasts as long as the returned value.
    ///
    /// # Errors
    /// When the disk has no room. The ledger is then unchanged. A page that is no longer than one written
    /// before always has room.
    pub fn commit(self) -> Result<Turn, StoreError> {
        self.put().map_err(|error| StoreError::io(&self.ledger.path, error))?;
        Ok(self.turn)
    }

    fn put(&self) -> io::Result<()> {
        let (path, spare) = (&self.ledger.path, self.ledger.spare());
        let text = text::of(&self.page, PAGE);
        let file = open_new(&spare)?;
        // Reserve room in both files: then a lease can end on a full disk, whichever file comes next.
        let room = [&file, &self.file].map(|file| reserve(file, text.len()));
        let room = room.into_iter().collect::<io::Result<Vec<u64>>>()?[0];
        file.write_all_at(&text, 0)?;
        // Old text after the new text would be harmless, but confusing to read.
        let rest = usize::try_from(room).unwrap_or(0).saturating_sub(text.len());
        file.write_all_at(&vec![b'\n'; rest], text.len() as u64)?;
        match renameat2(AT_FDCWD, &spare, AT_FDCWD, path, RenameFlags::RENAME_EXCHANGE) {
            // This file system cannot exchange two files.
            Err(Errno::EINVAL | Errno::ENOSYS) => fs::rename(&spare, path),
            done => done.map_err(io::Error::from),
        }
    }
}

/// Reserves room for `length` bytes, and returns the length of the file afterwards.
fn reserve(file: &File, length: usize) -> io::Result<u64> {
    let (old, new) = (file.metadata()?.len(), length as u64);
    if old >= new {
        return Ok(old);
    }
    match fallocate(file, FallocateFlags::empty(), 0, i64::try_from(new).unwrap_or(i64::MAX)) {
        // Not supported here: the write itself reports a full disk.
        Err(Errno::EOPNOTSUPP) => Ok(new),
        done => done.map(|()| new).map_err(io::Error::from),
    }
}

fn open(path: &Path, writable: bool) -> io::Result<File> {
    OpenOptions::new().read(true).write(writable).custom_flags(OFlag::O_NOFOLLOW.bits()).open(path)
}

fn open_new(path: &Path) -> io::Result<File> {
    let flags = OFlag::O_NOFOLLOW.bits();
    OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).custom_flags(flags).open(path)
}

/// A dangling link is not absent: the disk that it points to may be missing, with leases on it.
fn is_absent(path: &Path) -> bool {
    fs::symlink_metadata(path).is_err_and(|error| error.kind() == ErrorKind::NotFound)
}
