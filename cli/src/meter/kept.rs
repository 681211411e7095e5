//! Files that the meter keeps open, so that no container gets a lease (fcntl(2)) on them, for which others
//! would wait: the driver's and our own libraries, which containers share, and the two files of each region.

use std::collections::HashMap;
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread::Builder;

use gpushare_config::Config;
use gpushare_inject::{Fitted, Region};
use gpushare_inventory::{FileIdentity, Node, open_now};
use gpushare_quota::Lease;

use crate::violation::{Kind, Violation};

/// The open files with their paths.
#[derive(Debug)]
pub struct Kept {
    /// `None` where a library could not be opened yet.
    libraries: Vec<(PathBuf, Option<File>)>,
    /// Those that somebody has a lease on, and who waits for its end: the kernel ends it in 45 seconds as
    /// shipped, and gives nobody another one while somebody waits.
    leased: HashMap<PathBuf, Receiver<File>>,
    regions: HashMap<i64, Option<[File; 2]>>,
    state: PathBuf,
}

impl Kept {
    /// The files that containers of this node have mounted. Nothing is opened yet.
    pub fn of(node: &Node, config: &Config, state: &Path) -> Self {
        let (cache, libraries) = (&config.paths.cache, &config.paths.libraries);
        let fitted = Fitted { cache, libraries, driver: &node.driver, state };
        let files = node.driver.mounted().into_iter().chain(fitted.files());
        let libraries = files.map(|path| (path, None)).collect();
        Self { libraries, leased: HashMap::new(), regions: HashMap::new(), state: state.into() }
    }

    /// Opens the files that are not open yet, without waiting, and closes those of leases that ended.
    pub fn hold(&mut self, leases: &[Lease]) {
        for (path, file) in self.libraries.iter_mut().filter(|(_, file)| file.is_none()) {
            match self.leased.get(path).map(Receiver::try_recv) {
                Some(Err(TryRecvError::Empty)) => continue,
                Some(Ok(opened)) => *file = Some(opened),
                Some(Err(TryRecvError::Disconnected)) | None => match open_now(path) {
                    Ok(opened) => *file = Some(opened),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {
                        self.leased.insert(path.clone(), await_end(path.clone()));
                        continue;
                    }
                    Err(_) => {}
                },
            }
            self.leased.remove(path);
        }
        self.regions.retain(|id, files| files.is_some() && leases.iter().any(|lease| lease.id == *id));
        for lease in leases {
            self.regions.entry(lease.id).or_insert_with(|| Region::of(&self.state, lease.id).hold().ok());
        }
    }

    /// Leases on libraries of which `found` does not tell who has them.
    pub fn leased_by_nobody(&self, found: &[Violation]) -> Vec<Violation> {
        let is_told = |path: &str| {
            found.iter().any(|one| one.kind == Kind::FileLease.name() && one.text.contains(path))
        };
        let paths = self.leased.keys().map(|path| path.display().to_string()).filter(|path| !is_told(path));
        let told = paths.map(|path| Violation {
            lease: None,
            container: "somebody".to_owned(),
            pid: None,
            kind: Kind::FileLease.name().to_owned(),
            text: format!("has a lease (F_SETLEASE) on {path}, and is not found: others wait for it"),
            born: None,
            is_hint: false,
        });
        told.collect()
    }

    /// The `usage` file of a lease; `None` while the container is being created.
    pub fn usage(&self, lease: i64) -> Option<&File> {
        self.regions.get(&lease)?.as_ref().map(|[_, usage]| usage)
    }

    /// Those of these files for which others would wait, by device and inode: for its own `usage` a container
    /// waits alone, and the kernel tells of leases on it after all locks, of which there may be millions.
    pub fn watched(&self) -> HashMap<FileIdentity, PathBuf> {
        let libraries = self.libraries.iter().map(|(path, _)| path.clone());
        let limits = self.regions.keys().map(|id| Region::of(&self.state, *id).limits());
        libraries.chain(limits).filter_map(|path| Some((FileIdentity::of(&path).ok()?, path))).collect()
    }
}

/// Opens a file that somebody has a lease on, in a thread that waits for its end.
fn await_end(path: PathBuf) -> Receiver<File> {
    let (opened, answer) = channel();
    // Without room for a thread it is tried again.
    drop(Builder::new().spawn(move || {
        if path.is_file()
            && let Ok(file) = File::open(path)
        {
            let _ = opened.send(file); // nobody may want it any more
        }
    }));
    answer
}
