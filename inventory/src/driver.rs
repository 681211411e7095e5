//! Finds the driver's user-space files: the version, the folders, and the files that a capability needs.
//!
//! Files are looked up for each container, not in a stored list, which would be wrong after a driver upgrade.
//! All files of one container have the version of the kernel module. `ld.so.cache` is never trusted; it only
//! adds folders to search.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::capability::Capabilities;
use crate::elf;
use crate::file_lease::open_now;
use crate::folder;
use crate::root::Root;
use crate::roots::Roots;

mod search;
mod sets;

pub use sets::Extent;
use sets::Library;

/// A shared library of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverLibrary {
    /// Names that programs open, relative to the container's library folder; the SONAME comes first.
    pub names: Vec<String>,
    /// Path of the real file on this host, after following links.
    pub host_path: PathBuf,
}

/// A program of the driver, or a file that lets other programs find the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverFile {
    /// Absolute path in the container.
    pub container_path: PathBuf,
    /// Path of the real file on this host, after following links.
    pub host_path: PathBuf,
    /// Absolute path of a program's ELF interpreter, which the container must have, too. `None` for a data
    /// file, a static program, and a file that cannot be read now.
    pub interpreter: Option<PathBuf>,
}

/// Names of driver files that containers do not get. A name that ends with `*` matches all names with that
/// prefix.
#[derive(Clone, Copy, Debug, Default)]
pub struct LeftOut<'a>(pub &'a [String]);

impl LeftOut<'_> {
    /// Whether the file of this name is left out.
    pub fn has(&self, name: &str) -> bool {
        self.0.iter().any(|pattern| match pattern.strip_suffix('*') {
            Some(begin) => name.starts_with(begin),
            None => name == pattern,
        })
    }
}

/// The driver's version and the folders in which its files were found.
#[derive(Clone, Debug)]
pub struct Driver {
    /// Version of both kernel module and libraries, for example `535.309.01`.
    pub version: String,
    root: Root,
    /// Folders from which libraries are taken: first the one with libcuda or libnvidia-ml, then those around
    /// it.
    folders: Vec<PathBuf>,
    /// The real files of [`STEMS`], cached after they were found and checked, since one container needs them
    /// several times.
    required: [OnceLock<PathBuf>; 2],
}

/// Why the driver's files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// No folder has a library of the kernel module's version.
    #[error(
        "no libcuda.so.{version} or libnvidia-ml.so.{version} below {root}{others}; install the driver's libraries of \
         that version, or set node.driver_root"
    )]
    NotFound {
        /// Version of the kernel module.
        version: String,
        /// The driver root that was searched.
        root: PathBuf,
        /// Another version that was found, as text for the message; may be empty.
        others: String,
    },
    /// libcuda or libnvidia-ml is missing.
    #[error("the driver's {library} is missing in {folder}; reinstall the driver's libraries")]
    Missing {
        /// File name of the library.
        library: String,
        /// The folder in which it was expected.
        folder: PathBuf,
    },
    /// The link that programs open points to a version other than the kernel module's: an upgrade is
    /// incomplete.
    #[error(
        "{link} leads to version {found}, and the kernel module has {version}: libraries of two drivers are mixed; reinstall \
         the driver's libraries of one version, and reboot if the module is the older one"
    )]
    Mixed {
        /// Path of the link.
        link: PathBuf,
        /// Version of the file to which the link leads.
        found: String,
        /// Version of the kernel module.
        version: String,
    },
    /// A file or folder of the driver does not belong to root, or other users may write to it.
    #[error("{path} is not owned by root or writable by others; correct its owner and mode")]
    Untrusted {
        /// Path of the unsafe file or folder.
        path: PathBuf,
    },
}

/// The two libraries that identify a driver's folder.
const STEMS: [&str; 2] = ["libcuda", "libnvidia-ml"];

/// Folders of the driver's data files below its root, and the folder in the container for each.
const DATA_PLACES: [(&str, &str); 3] =
    [("etc", "/etc"), ("usr/share", "/usr/share"), ("run/opengl-driver/share", "/usr/share")];

impl Driver {
    /// Finds the folder with the libraries of `version`.
    ///
    /// # Errors
    /// When no folder has them, versions are mixed, or users other than root may write to the files.
    pub(crate) fn locate(roots: &Roots, version: &str) -> Result<Self, DriverError> {
        let root = Root::open(&roots.driver);
        let mut others = BTreeMap::new();
        let mut mixed = None;
        for folder in search::library_folders(roots, &root) {
            let names = STEMS.map(|stem| folder.join(format!("{stem}.so.{version}")));
            let mut present =
                (0..).zip(&names).filter_map(|(at, name)| Some((at, for_this_machine(&root, name)?)));
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

    /// Returns the path of the real libcuda.
    ///
    /// # Errors
    /// When it is missing, or users other than root may write to it.
    pub fn libcuda(&self) -> Result<PathBuf, DriverError> {
        self.required(0)
    }

    /// Returns the path of the real libnvidia-ml.
    ///
    /// # Errors
    /// When it is missing, or users other than root may write to it.
    pub fn libnvidia_ml(&self) -> Result<PathBuf, DriverError> {
        self.required(1)
    }

    /// Returns the libraries, other than libcuda and libnvidia-ml, that `capabilities` need and this driver
    /// has. Driver versions have different libraries, so a missing one is not an error.
    ///
    /// # Errors
    /// When users other than root may write to one of them that is not left out.
    pub fn companions(
        &self,
        capabilities: &Capabilities,
        extent: Extent,
        left_out: LeftOut<'_>,
    ) -> Result<Vec<DriverLibrary>, DriverError> {
        let mut found: Vec<DriverLibrary> = Vec::new();
        let mut trust = Trust::of(&self.root);
        for wanted in capabilities.iter().flat_map(|capability| sets::libraries(capability, extent)) {
            let (file, names) = self.names(wanted);
            if left_out.has(&file) || names.iter().any(|name| left_out.has(name)) {
                continue;
            }
            let Some(host_path) = self.find(&file) else { continue };
            trust.check(&host_path)?;
            if found.iter().all(|library| library.names != names) {
                found.push(DriverLibrary { names, host_path });
            }
        }
        Ok(found)
    }

    /// Returns every driver file that a container may have mounted. Skips untrusted files.
    pub fn mounted(&self) -> Vec<PathBuf> {
        let all = Capabilities::all();
        let libraries = self.companions(&all, Extent::Whole, LeftOut::default()).unwrap_or_default();
        let files = self.files(&all, Extent::Whole, LeftOut::default()).unwrap_or_default();
        let both = [self.libcuda(), self.libnvidia_ml()].into_iter().filter_map(Result::ok);
        let libraries = libraries.into_iter().map(|library| library.host_path);
        both.chain(libraries).chain(files.into_iter().map(|file| file.host_path)).collect()
    }

    /// Returns the programs and data files that belong to `capabilities` and exist on the host.
    ///
    /// # Errors
    /// When users other than root may write to one of them that is not left out.
    pub fn files(
        &self,
        capabilities: &Capabilities,
        extent: Extent,
        left_out: LeftOut<'_>,
    ) -> Result<Vec<DriverFile>, DriverError> {
        let mut found: Vec<DriverFile> = Vec::new();
        let folders = search::program_folders(&self.root, &self.folders);
        for capability in capabilities.iter() {
            for name in sets::programs(capability, extent) {
                found.extend(folders.iter().find_map(|folder| self.program(&folder.join(name))));
            }
            for name in sets::data(capability, extent) {
                found.extend(self.data(name));
            }
        }
        let name = |file: &DriverFile| {
            file.container_path.file_name().unwrap_or_default().to_string_lossy().into_owned()
        };
        found.retain(|file| !left_out.has(&name(file)));
        let mut trust = Trust::of(&self.root);
        for file in &found {
            trust.check(&file.host_path)?;
        }
        found.sort_by(|one, other| one.container_path.cmp(&other.container_path));
        found.dedup();
        Ok(found)
    }

    /// The folders that contain all of the driver's files, directly or in subfolders.
    pub fn sources(&self) -> Vec<PathBuf> {
        let root = self.root.real().unwrap_or(self.root.path());
        let data = DATA_PLACES.map(|(place, _)| root.join(place));
        let programs = search::program_folders(&self.root, &self.folders);
        self.folders.iter().cloned().chain(programs).chain(data).collect()
    }

    /// The program at `path`. Ignores scripts: the programs that a script runs are not in the container.
    fn program(&self, path: &Path) -> Option<DriverFile> {
        let host_path = for_this_machine(&self.root, path)?;
        let interpreter = open_now(&host_path).and_then(|file| elf::interpreter(&file)).ok().flatten();
        Some(DriverFile {
            container_path: Path::new("/usr/bin").join(path.file_name()?),
            host_path,
            interpreter,
        })
    }

    /// A data file below `/etc` or `/usr/share`, or one that Debian stores next to the libraries.
    fn data(&self, name: &str) -> Option<DriverFile> {
        let places = DATA_PLACES.map(|(place, folder)| (self.root.path().join(place).join(name), folder));
        let libraries = self.folders.first().map_or(Path::new("/"), PathBuf::as_path);
        let beside = (libraries.join(Path::new(name).file_name()?), "/usr/share");
        places.into_iter().chain([beside]).find_map(|(path, folder)| {
            let container_path = Path::new(folder).join(name);
            Some(DriverFile { container_path, host_path: self.root.file(&path)?, interpreter: None })
        })
    }

    /// A library's file name on the host, and its names in a container.
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
        self.folders.iter().find_map(|folder| for_this_machine(&self.root, &folder.join(name)))
    }
}

/// The real file of the library or program at `path` if it is an ELF file for this machine: 32-bit builds and
/// scripts have the same names. A file on which a container holds a file lease cannot be read without
/// waiting, so its name alone decides.
fn for_this_machine(root: &Root, path: &Path) -> Option<PathBuf> {
    let file = root.file(path)?;
    let mut header = [0; elf::HEADER_BYTES];
    match open_now(&file).and_then(|mut file| file.read_exact(&mut header)) {
        Ok(()) => elf::is_for_this_machine(&header).then_some(file),
        Err(error) => (error.kind() == io::ErrorKind::WouldBlock).then_some(file),
    }
}

/// The folders that together contain a driver's libraries: where `file` was found and where it really is,
/// `vdpau` and `gbm` in them, and the library folders above, where Debian stores some of the libraries. Drops
/// missing folders, so that no library is looked up in them.
fn around(root: &Root, folder: &Path, file: &Path) -> Vec<PathBuf> {
    let real = file.parent().unwrap_or(folder);
    let mut folders = vec![real.to_path_buf(), folder.to_path_buf()];
    for folder in [real, folder] {
        folders.extend(["vdpau", "gbm"].map(|inner| folder.join(inner)));
    }
    for above in real.ancestors().skip(1).take(2).take_while(|above| is_of_libraries(root, above)) {
        folders.extend([above.to_path_buf(), above.join("vdpau"), above.join("gbm")]);
    }
    let mut seen = BTreeSet::new();
    folders.retain(|folder| seen.insert(folder.clone()) && root.has_folder(folder));
    folders
}

/// Whether it is a folder `lib…` or lies in one.
fn is_of_libraries(root: &Root, folder: &Path) -> bool {
    let below = folder.strip_prefix(root.path()).unwrap_or(folder);
    below.iter().any(|name| name.as_encoded_bytes().starts_with(b"lib"))
}

/// The error for a link in `folder` that programs open and that points to another version.
fn mixed_link(root: &Root, folder: &Path, version: &str) -> Option<DriverError> {
    STEMS.iter().find_map(|stem| {
        let link = folder.join(format!("{stem}.so.1"));
        let real = root.file(&link)?;
        let found = real.file_name()?.to_str()?.strip_prefix(stem)?.strip_prefix(".so.")?.to_owned();
        let other = found.contains('.') && found != version;
        other.then(|| DriverError::Mixed { link, found, version: version.to_owned() })
    })
}

/// Checks which files of a driver root are safe from other users. Checks each folder only once, since it
/// contains many files.
struct Trust<'a> {
    root: &'a Root,
    /// Paths that were found safe, each with the write bits that were checked.
    safe: BTreeSet<(PathBuf, u32)>,
}

impl<'a> Trust<'a> {
    fn of(root: &'a Root) -> Self {
        Self { root, safe: BTreeSet::new() }
    }

    /// Rejects a driver file that users other than root could change or replace, since containers will run
    /// it. The file and every folder up to the driver root must be root's. The file and its own folder may be
    /// writable by root only. The folders above may also be writable by their group, as Debian's `/usr/local`
    /// is, but not by everybody.
    fn check(&mut self, file: &Path) -> Result<(), DriverError> {
        let root = self.root.real();
        let above = file.ancestors().take_while(|path| root.is_some_and(|root| path.starts_with(root)));
        for (depth, path) in above.enumerate() {
            let writers = if depth < 2 { 0o022 } else { 0o002 };
            let looked_at = (path.to_path_buf(), writers);
            if self.safe.contains(&looked_at) {
                continue;
            }
            let is_safe = |metadata: Metadata| metadata.uid() == 0 && metadata.mode() & writers == 0;
            if !fs::metadata(path).is_ok_and(is_safe) {
                return Err(DriverError::Untrusted { path: path.into() });
            }
            self.safe.insert(looked_at);
        }
        Ok(())
    }
}

/// Records the versions of libcuda in `folder`, so that the error can distinguish a wrong version from a
/// missing driver.
fn note_other_versions(folder: &Path, others: &mut BTreeMap<String, PathBuf>) {
    for name in folder::names(folder) {
        let version = name.strip_prefix("libcuda.so.").filter(|version| version.contains('.'));
        others.extend(version.map(|version| (version.to_owned(), folder.to_path_buf())));
    }
}

#[cfg(test)]
mod tests;
