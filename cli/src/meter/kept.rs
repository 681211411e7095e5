//! Files that the meter keeps open, so that no container gets a lease (fcntl(2)) on them, for which others
//! would wait: the driver's and our own libraries, which containers share, and the two files of each region.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use gpushare_config::Config;
use gpushare_inject::{Fitted, Region};
use gpushare_inventory::{FileIdentity, Node, open_now};
use gpushare_quota::Lease;
use gpushare_region::path as inner;

/// The open files with their paths.
#[derive(Debug)]
pub struct Kept {
    /// `None` where a library could not be opened yet.
    libraries: Vec<(PathBuf, Option<File>)>,
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
        Self { libraries, regions: HashMap::new(), state: state.into() }
    }

    /// Opens the files that are not open yet, without waiting, and closes those of leases that ended.
    pub fn hold(&mut self, leases: &[Lease]) {
        for (path, file) in self.libraries.iter_mut().filter(|(_, file)| file.is_none()) {
            *file = open_now(path).ok();
        }
        self.regions.retain(|id, files| files.is_some() && leases.iter().any(|lease| lease.id == *id));
        for lease in leases {
            self.regions.entry(lease.id).or_insert_with(|| Region::of(&self.state, lease.id).hold().ok());
        }
    }

    /// The `usage` file of a lease; `None` while the container is being created.
    pub fn usage(&self, lease: i64) -> Option<&File> {
        self.regions.get(&lease)?.as_ref().map(|[_, usage]| usage)
    }

    /// All these files, by device and inode.
    pub fn watched(&self) -> HashMap<FileIdentity, PathBuf> {
        let libraries = self.libraries.iter().map(|(path, _)| (FileIdentity::of(path).ok(), path.clone()));
        let regions = self.regions.keys().flat_map(|id| {
            let region = Region::of(&self.state, *id);
            let usage = PathBuf::from(inner::USAGE.to_string_lossy().into_owned());
            region.identities().into_iter().zip([region.limits(), usage])
        });
        libraries.chain(regions).filter_map(|(identity, path)| Some((identity?, path))).collect()
    }
}
