//! The driver's user-space files: which version, which folder, which files a capability needs.
//!
//! Files are looked up at each creation, never from a stored list: a list goes stale when the driver is upgraded.
//! All of one container's files have the version of the kernel module. Nothing here trusts `ld.so.cache`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::capability::Capabilities;
use crate::elf;
use crate::file_lease::open_now;
use crate::root::Root;
use crate::roots::Roots;

mod search;
mod sets;

pub use sets::Extent;
use sets::Library;

/// A shared library of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverLibrary {
    /// The names that programs open, relative to the container's library folder; the SONAME first.
    pub names: Vec<String>,
    /// The real file on this host, links followed.
    pub host_path: PathBuf,
}

/// A program of the driver, or a file that tells others where the driver is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverFile {
    /// Where it appears in the container.
    pub container_path: PathBuf,
    /// The real file on this host, links followed.
    pub host_path: PathBuf,
}

/// The driver's version and the folders its files were found in.
#[derive(Clone, Debug)]
pub struct Driver {
    /// The version of kernel module and libraries, as `535.309.01`.
    pub version: String,
    root: Root,
    /// Folders to take libraries from: the one that holds libcuda or libnvidia-ml first, then those around it.
    folders: Vec<PathBuf>,
    /// The real files of [`STEMS`], once they were found and checked: one creation asks for them several times.
    required: [OnceLock<PathBuf>; 2],
}

/// Why the driver's files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// No library of the kernel module's version anywhere.
    #[error(
        "no libcuda.so.{version} or libnvidia-ml.so.{version} below {root}{others}; install the driver's libraries of \
         that version, or set node.driver_root"
    )]
    NotFound {
        /// The kernel module's version.
        version: String,
        /// The driver root.
        root: PathBuf,
        /// Other versions that were met, as text for the message.
        others: String,
    },
    /// A library that the request cannot do without is missing.
    #[error("the driver's {library} is missing in {folder}; reinstall the driver's libraries")]
    Missing {
        /// The file's name.
        library: String,
        /// The folder where it should be.
        folder: PathBuf,
    },
    /// The name that programs open leads to another version than the kernel module's: half an upgrade.
    #[error(
        "{link} leads to version {found}, and the kernel module has {version}: libraries of two drivers are mixed; reinstall \
         the driver's libraries of one version, and reboot if the module is the older one"
    )]
    Mixed {
        /// The link.
        link: PathBuf,
        /// The version that it leads to.
        found: String,
        /// The kernel module's version.
        version: String,
    },
    /// A file that everybody may write is no part of a driver.
    #[error("{path} is not owned by root or writable by others; correct its owner and mode")]
    Untrusted {
        /// The file or folder.
        path: PathBuf,
    },
}

/// The two libraries by which a driver is known.
const STEMS: [&str; 2] = ["libcuda", "libnvidia-ml"];

/// Where a driver's data files lie below its root, and the folder that they appear in.
const DATA_PLACES: [(&str, &str); 3] =
    [("etc", "/etc"), ("usr/share", "/usr/share"), ("run/opengl-driver/share", "/usr/share")];

impl Driver {
    /// Finds the folder with the libraries of `version`.
    ///
    /// # Errors
    /// When no folder has them, or their files could be written by somebody else than root.
    pub(crate) fn locate(roots: &Roots, version: &str) -> Result<Self, DriverError> {
        let root = Root::open(&roots.driver);
        let mut others = BTreeMap::new();
        let mut mixed = None;
        for folder in search::library_folders(roots, &root) {
            let names = STEMS.map(|stem| folder.join(format!("{stem}.so.{version}")));
            let mut present = (0..).zip(&names).filter_map(|(at, name)| Some((at, library(&root, name)?)));
            let Some((which, file)) = present.next() else {
                note_other_versions(&folder, &mut others);
                continue;
            };
            if let Some(link) = mixed_link(&root, &folder, version) {
                mixed.get_or_insert(link);
                continue;
            }
            Trust::of(&root).check(&file)?;
            let folders = around(&root, &folder, &file);
            let mut required = <[OnceLock<PathBuf>; 2]>::default();
            if file.file_name() == names[which].file_name() {
                required[which] = OnceLock::from(file);
            }
            return Ok(Self { version: version.to_owned(), root: root.clone(), folders, required });
        }
        if let Some(error) = mixed {
            return Err(error);
        }
        let others = others.into_iter().next().map(|(version, folder)| {
            format!(" (version {version} lies in {}: kernel module and libraries differ)", folder.display())
        });
        Err(DriverError::NotFound {
            version: version.to_owned(),
            root: roots.driver.clone(),
            others: others.unwrap_or_default(),
        })
    }

    /// The real libcuda.
    ///
    /// # Errors
    /// When it is missing or not to be trusted.
    pub fn libcuda(&self) -> Result<PathBuf, DriverError> {
        self.required(0)
    }

    /// The real libnvidia-ml.
    ///
    /// # Errors
    /// When it is missing or not to be trusted.
    pub fn libnvidia_ml(&self) -> Result<PathBuf, DriverError> {
        self.required(1)
    }

    /// The libraries beside libcuda and libnvidia-ml that `capabilities` need and that this driver has. Which ones a
    /// driver has differs between versions, so an absent one is no error.
    ///
    /// # Errors
    /// When one could be written by somebody else than root.
    pub fn companions(
        &self,
        capabilities: &Capabilities,
        extent: Extent,
    ) -> Result<Vec<DriverLibrary>, DriverError> {
        let mut found: Vec<DriverLibrary> = Vec::new();
        let mut trust = Trust::of(&self.root);
        for wanted in capabilities.iter().flat_map(|capability| sets::libraries(capability, extent)) {
            let (file, names) = self.names(wanted);
            let Some(host_path) = self.find(&file) else { continue };
            trust.check(&host_path)?;
            if found.iter().all(|library| library.names != names) {
                found.push(DriverLibrary { names, host_path });
            }
        }
        Ok(found)
    }

    /// Every file of the driver's that a container may have mounted, whatever it asks for; none that cannot be trusted.
    pub fn mounted(&self) -> Vec<PathBuf> {
        let all = Capabilities::all();
        let libraries = self.companions(&all, Extent::Whole).unwrap_or_default();
        let files = self.files(&all, Extent::Whole).unwrap_or_default();
        let both = [self.libcuda(), self.libnvidia_ml()].into_iter().filter_map(Result::ok);
        let libraries = libraries.into_iter().map(|library| library.host_path);
        both.chain(libraries).chain(files.into_iter().map(|file| file.host_path)).collect()
    }

    /// The programs and further files that `capabilities` bring, where the host has them.
    ///
    /// # Errors
    /// When one could be written by somebody else than root.
    pub fn files(&self, capabilities: &Capabilities, extent: Extent) -> Result<Vec<DriverFile>, DriverError> {
        let mut found: Vec<DriverFile> = Vec::new();
        let libraries = self.folders.first().map(PathBuf::as_path).unwrap_or(Path::new("/"));
        let folders = search::program_folders(self.root.path(), libraries);
        for capability in capabilities.iter() {
            for name in sets::programs(capability, extent) {
                let host_path = folders.iter().find_map(|folder| self.root.file(&folder.join(name)));
                let container_path = Path::new("/usr/bin").join(name);
                found.extend(host_path.map(|host_path| DriverFile { container_path, host_path }));
            }
            for name in sets::data(capability, extent) {
                found.extend(self.data(name, libraries));
            }
        }
        let mut trust = Trust::of(&self.root);
        for file in &found {
            trust.check(&file.host_path)?;
        }
        found.sort_by(|one, other| one.container_path.cmp(&other.container_path));
        found.dedup();
        Ok(found)
    }

    /// The folders that all of these files lie in, or below.
    pub fn sources(&self) -> Vec<PathBuf> {
        let libraries = self.folders.first().map(PathBuf::as_path).unwrap_or(Path::new("/"));
        let root = self.root.real().unwrap_or(self.root.path());
        let data = DATA_PLACES.map(|(place, _)| root.join(place));
        let programs = search::program_folders(self.root.path(), libraries);
        self.folders.iter().cloned().chain(programs).chain(data).collect()
    }

    /// A file below `/etc` or `/usr/share`, or one that Debian keeps beside the libraries.
    fn data(&self, name: &str, libraries: &Path) -> Option<DriverFile> {
        for (place, folder) in DATA_PLACES {
            if let Some(host_path) = self.root.file(&self.root.path().join(place).join(name)) {
                return Some(DriverFile { container_path: Path::new(folder).join(name), host_path });
            }
        }
        let file = Path::new(name).file_name()?;
        let host_path = self.root.file(&libraries.join(file))?;
        Some(DriverFile { container_path: Path::new("/usr/share").join(name), host_path })
    }

    /// The file of a library here, and its names in a container.
    fn names(&self, library: Library) -> (String, Vec<String>) {
        let versioned = |stem: &str| format!("{stem}.so.{}", self.version);
        match library {
            Library::Short(stem, end) => (versioned(stem), vec![format!("{stem}{end}")]),
            Library::Linked(stem, end) => {
                (versioned(stem), vec![format!("{stem}{end}"), format!("{stem}.so")])
            }
            Library::Full(stem) => (versioned(stem), vec![versioned(stem)]),
            Library::Named(file, "") => (file.to_owned(), vec![file.to_owned()]),
            Library::Named(file, folder) => (file.to_owned(), vec![format!("{folder}/{file}")]),
        }
    }

    fn required(&self, which: usize) -> Result<PathBuf, DriverError> {
        if let Some(path) = self.required[which].get() {
            return Ok(path.clone());
        }
        let library = format!("{}.so.{}", STEMS[which], self.version);
        let folder = self.folders.first().cloned().unwrap_or_default();
        let path = self.find(&library).ok_or(DriverError::Missing { library, folder })?;
        Trust::of(&self.root).check(&path)?;
        Ok(self.required[which].get_or_init(|| path).clone())
    }

    fn find(&self, name: &str) -> Option<PathBuf> {
        self.folders.iter().find_map(|folder| library(&self.root, &folder.join(name)))
    }
}

/// The real file of a library at `path`, if it is one for this machine: 32-bit builds have the same names. One on which a
/// container holds a lease is taken by its name: nobody waits for it.
fn library(root: &Root, path: &Path) -> Option<PathBuf> {
    let file = root.file(path)?;
    let mut header = [0; elf::HEADER_BYTES];
    match open_now(&file).and_then(|mut file| file.read_exact(&mut header)) {
        Ok(()) => elf::is_for_this_machine(&header).then_some(file),
        Err(error) => (error.kind() == io::ErrorKind::WouldBlock).then_some(file),
    }
}

/// Folders that together hold a driver's libraries: where `file` was found and where it really lies, `vdpau` and `gbm`
/// within, and the folders above, in which Debian has a part of the set. Those that are not there need no look at each name.
fn around(root: &Root, folder: &Path, file: &Path) -> Vec<PathBuf> {
    let real = file.parent().unwrap_or(folder);
    let mut folders = vec![real.to_path_buf(), folder.to_path_buf()];
    for folder in [real, folder] {
        folders.extend(["vdpau", "gbm"].map(|inner| folder.join(inner)));
    }
    for above in [real.parent(), real.parent().and_then(Path::parent)].into_iter().flatten() {
        folders.extend([above.to_path_buf(), above.join("vdpau"), above.join("gbm")]);
    }
    let mut seen = BTreeSet::new();
    folders.retain(|folder| seen.insert(folder.clone()) && root.has_folder(folder));
    folders
}

/// A name in `folder` that programs would open, and that leads to another version.
fn mixed_link(root: &Root, folder: &Path, version: &str) -> Option<DriverError> {
    STEMS.iter().find_map(|stem| {
        let link = folder.join(format!("{stem}.so.1"));
        let real = root.file(&link)?;
        let found = real.file_name()?.to_str()?.strip_prefix(stem)?.strip_prefix(".so.")?.to_owned();
        let other = found.contains('.') && found != version;
        other.then(|| DriverError::Mixed { link, found, version: version.to_owned() })
    })
}

/// Which files of a driver root can be relied on. Many lie in one folder, so each folder is looked at once.
struct Trust<'a> {
    root: &'a Root,
    /// Paths that were found safe, and what nobody but root has there.
    safe: BTreeSet<(PathBuf, u32)>,
}

impl<'a> Trust<'a> {
    fn of(root: &'a Root) -> Self {
        Self { root, safe: BTreeSet::new() }
    }

    /// A driver file belongs to root and is writable by nobody else, and so is its folder: containers will run it. No folder
    /// up to the driver root may be everybody's either, in which the next one could be replaced. Groups are let pass there:
    /// Debian's `/usr/local` is its group's.
    fn check(&mut self, file: &Path) -> Result<(), DriverError> {
        let root = self.root.real();
        let above = file.ancestors().take_while(|path| root.is_some_and(|root| path.starts_with(root)));
        for (depth, path) in above.enumerate() {
            let looked_at = (path.to_path_buf(), if depth < 2 { 0o022 } else { 0o002 });
            if self.safe.contains(&looked_at) {
                continue;
            }
            let writers = looked_at.1;
            let is_safe = fs::metadata(path)
                .is_ok_and(|metadata| metadata.uid() == 0 && metadata.mode() & writers == 0);
            if !is_safe {
                return Err(DriverError::Untrusted { path: path.into() });
            }
            self.safe.insert(looked_at);
        }
        Ok(())
    }
}

/// Remembers versions of libcuda that lie in `folder`, to tell a mismatch from a missing driver.
fn note_other_versions(folder: &Path, others: &mut BTreeMap<String, PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok) {
        let name = entry.file_name();
        let version = name.to_str().and_then(|name| name.strip_prefix("libcuda.so."));
        if let Some(version) = version.filter(|version| version.contains('.')) {
            others.insert(version.to_owned(), folder.to_path_buf());
        }
    }
}

#[cfg(test)]
mod tests;
