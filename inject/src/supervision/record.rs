//! The state folder's records of the containers that supervisors hold. `exec` reads them, to put a new
//! process under the container's own supervisor.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use gpushare_inventory::FileIdentity;
use gpushare_quota::LeaseKey;
use nix::fcntl::OFlag;
use serde::{Deserialize, Serialize};

use crate::region::make_private;

/// Name of the folder of all records, in the state folder. It has a folder for each container id, and that a
/// record for each lease: containers of one id may live below several runtime roots.
const FOLDER: &str = "supervised";
/// The longest record, in bytes: a runtime root is a path.
const LONGEST: u64 = 8192;

/// What is known of one container that a supervisor holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The driver's version when it was created.
    pub driver: String,
    /// Where its supervisor takes listeners.
    pub socket: PathBuf,
}

/// A record as it is written.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    root: String,
    driver: String,
}

impl Record {
    /// Of the container `key` with this lease, which is not written yet.
    ///
    /// # Errors
    /// When its folder cannot be made.
    pub fn prepare(state: &Path, key: &LeaseKey, lease: i64, driver: &str) -> io::Result<Self> {
        let all = state.join(FOLDER);
        make_private(&all)?;
        let folder = all.join(&key.container);
        make_private(&folder)?;
        Ok(Self { driver: driver.to_owned(), socket: folder.join(format!("{lease}.socket")) })
    }

    /// Writes it.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, key: &LeaseKey) -> io::Result<()> {
        let text = Text { root: key.root.clone(), driver: self.driver.clone() };
        // Complete, or not there.
        let new = self.socket.with_extension("new");
        fs::write(&new, serde_json::to_vec(&text)?)?;
        fs::rename(new, self.socket.with_extension(""))
    }

    /// That of the container `key`; `None` where no supervisor holds it.
    ///
    /// # Errors
    /// When it is there and cannot be read.
    pub fn of(state: &Path, key: &LeaseKey) -> io::Result<Option<Self>> {
        let folder = state.join(FOLDER).join(&key.container);
        // What an earlier container of this id left behind has a smaller number.
        let mut found = None;
        for lease in leases(&folder)? {
            let text = read(&folder.join(lease.to_string()))?;
            if text.root == key.root && found.as_ref().is_none_or(|(last, _)| *last < lease) {
                found = Some((lease, text.driver));
            }
        }
        Ok(found.map(|(lease, driver)| Self { driver, socket: folder.join(format!("{lease}.socket")) }))
    }

    /// Whether a record of this container id names the folder below which `key` has its container, by another
    /// path.
    pub fn is_at(state: &Path, key: &LeaseKey) -> bool {
        let folder = state.join(FOLDER).join(&key.container);
        let identity = |root: &str| FileIdentity::of(&Path::new(root).join(&key.container)).ok();
        let here = identity(&key.root);
        let records = leases(&folder)
            .unwrap_or_default()
            .into_iter()
            .map(|lease| read(&folder.join(lease.to_string())));
        // One that cannot be read may be it.
        records
            .into_iter()
            .any(|text| text.map_or(true, |text| here.is_some() && identity(&text.root) == here))
    }

    /// Whether a supervisor holds a container of any of these ids, or, without ids, any container at all.
    pub fn any(state: &Path, ids: Option<&[&str]>) -> bool {
        let is_held = |id: &str| leases(&state.join(FOLDER).join(id)).is_ok_and(|found| !found.is_empty());
        match ids {
            Some(ids) => ids.iter().any(|id| is_held(id)),
            None => {
                let entries = fs::read_dir(state.join(FOLDER)).into_iter().flatten().flatten();
                entries.filter_map(|entry| entry.file_name().into_string().ok()).any(|id| is_held(&id))
            }
        }
    }

    /// Removes what is kept of the container `key` with this lease; succeeds also if there is nothing.
    pub(crate) fn remove(state: &Path, key: &LeaseKey, lease: i64) {
        remove_from(&state.join(FOLDER).join(&key.container), lease);
    }

    /// Removes what is kept of any container with this lease.
    pub(crate) fn remove_all(state: &Path, lease: i64) {
        for folder in fs::read_dir(state.join(FOLDER)).into_iter().flatten().flatten() {
            remove_from(&folder.path(), lease);
        }
    }
}

fn remove_from(folder: &Path, lease: i64) {
    let names = [format!("{lease}"), format!("{lease}.socket"), format!("{lease}.new")];
    let removed = names.iter().filter(|name| fs::remove_file(folder.join(name)).is_ok()).count();
    // A folder without any may be one that is being filled.
    if removed > 0 {
        let _ = fs::remove_dir(folder); // there may be others'
    }
}

/// The leases of the records in a container's folder.
fn leases(folder: &Path) -> io::Result<Vec<i64>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let names = entries.map(|entry| entry.map(|entry| entry.file_name()));
    let leases = names.map(|name| Ok(name?.to_str().and_then(|name| name.parse().ok())));
    leases.filter_map(Result::transpose).collect()
}

fn read(path: &Path) -> io::Result<Text> {
    let file = File::options().read(true).custom_flags(OFlag::O_NOFOLLOW.bits()).open(path)?;
    let mut text = Vec::new();
    file.take(LONGEST).read_to_end(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(root: &str, id: &str) -> LeaseKey {
        LeaseKey::new(root.to_owned(), id.to_owned()).unwrap()
    }

    #[test]
    fn a_container_is_found_by_root_and_id_and_gone_when_it_is_removed() {
        let state = tempfile::tempdir().unwrap();
        let state = state.path();
        let (one, other) = (key("/run/a", "x"), key("/run/b", "x"));
        assert_eq!(Record::of(state, &one).unwrap(), None);
        let made = Record::prepare(state, &one, 7, "580.142").unwrap();
        assert_eq!(Record::of(state, &one).unwrap(), None, "until it is written");
        made.write(&one).unwrap();
        assert_eq!(Record::of(state, &one).unwrap(), Some(made));
        assert_eq!(Record::of(state, &other).unwrap(), None);
        Record::prepare(state, &other, 8, "580.142").unwrap().write(&other).unwrap();
        assert!(Record::of(state, &other).unwrap().unwrap().socket.ends_with("x/8.socket"));
        // Left by a container of an earlier boot.
        Record::prepare(state, &one, 6, "570.1").unwrap().write(&one).unwrap();
        assert_eq!(Record::of(state, &one).unwrap().unwrap().driver, "580.142");
        assert!(Record::any(state, None) && Record::any(state, Some(&["y", "x"])));
        assert!(!Record::any(state, Some(&["y"])));
        Record::remove(state, &one, 7);
        Record::remove_all(state, 6);
        assert_eq!(Record::of(state, &one).unwrap(), None);
        Record::remove(state, &other, 8);
        assert!(!Record::any(state, None));
        assert_eq!(fs::read_dir(state.join(FOLDER)).unwrap().count(), 0);
    }

    #[test]
    fn a_record_that_cannot_be_read_is_an_error_and_no_container_without_one() {
        let state = tempfile::tempdir().unwrap();
        let key = key("", "x");
        let made = Record::prepare(state.path(), &key, 1, "580.142").unwrap();
        fs::write(made.socket.with_extension(""), "{}").unwrap();
        assert!(Record::of(state.path(), &key).is_err());
    }
}
