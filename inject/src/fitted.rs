//! Fits our libraries to this node's driver. The fitted copies, in the cache folder, lack what the driver
//! lacks, and programs can be linked with them as with the driver's own (see [`gpushare_inventory::elf`]).
//!
//! The name of a copy has a hash of the two files that it was made of. So a creation only looks whether the
//! copy is there, and a container learns nothing of the host's files. `gpushare inventory refresh` makes the
//! copies, and they outlive the boot.

use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::time::Duration;

use gpushare_inventory::elf::{self, ElfError};
use gpushare_inventory::{Driver, NOBODYS, open_now, read_now};
use nix::sys::statvfs::{FsFlags, statvfs};

/// The beginning of the name of every file that we keep in the cache folder.
const PREFIX: &str = "fitted-";

/// How long the copies for another driver are kept.
const KEPT: Duration = Duration::from_secs(24 * 3600);

/// Why our libraries could not be fitted.
#[derive(Debug, thiserror::Error)]
pub enum FitError {
    /// The cache folder or a file in it cannot be used.
    #[error("cannot use {path}; see paths.cache")]
    Io {
        /// The folder or file that failed.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Somebody else could change what containers run.
    #[error("the cache folder {path} must belong to root and be writable by nobody else (paths.cache)")]
    Untrusted {
        /// The cache folder, as configured.
        path: PathBuf,
    },
    /// A library could not be loaded from the cache folder.
    #[error("the cache folder {path} is on a file system that is mounted noexec; set paths.cache")]
    NoExec {
        /// The cache folder, as configured.
        path: PathBuf,
    },
    /// One of the two libraries is not of a form that can be fitted.
    #[error("cannot fit {ours} to {driver}")]
    Elf {
        /// Path of our library as it was built.
        ours: PathBuf,
        /// Path of the driver's library.
        driver: PathBuf,
        /// What is wrong with one of them.
        source: ElfError,
    },
}

/// The fitted copies that a node needs.
#[derive(Clone, Copy, Debug)]
pub struct Fitted<'a> {
    /// The folder with the copies.
    pub cache: &'a Path,
    /// The folder with our libraries as they were built.
    pub libraries: &'a Path,
    /// The driver that they are for.
    pub driver: &'a Driver,
    /// The state folder. Makers of copies take their lock in it, because everybody may open the cache folder.
    pub state: &'a Path,
}

/// One copy, made or not.
struct Copy {
    ours: PathBuf,
    driver: PathBuf,
    path: PathBuf,
}

impl Fitted<'_> {
    /// Whether every copy that could be made is there, in a folder that may be used.
    pub fn is_complete(&self) -> bool {
        self.check_folder().is_ok() && self.copies().iter().all(|copy| is_sound(&copy.path))
    }

    /// Makes the copies that are missing, and removes old ones of former drivers. A container that runs keeps
    /// its own.
    ///
    /// # Errors
    /// When the cache folder cannot be used, or a library cannot be fitted.
    pub fn refresh(&self) -> Result<(), FitError> {
        self.check_folder()?;
        let _turn = self.turn()?;
        let copies = self.copies();
        for copy in copies.iter().filter(|copy| !is_sound(&copy.path)) {
            copy.make()?;
        }
        for entry in fs::read_dir(self.cache).into_iter().flatten().filter_map(Result::ok) {
            let ours = entry.file_name().to_str().is_some_and(|name| name.starts_with(PREFIX));
            if ours && copies.iter().all(|copy| copy.path != entry.path()) && is_old(&entry.path()) {
                let _ = fs::remove_file(entry.path());
            }
        }
        Ok(())
    }

    /// Takes the lock of those who make copies: two at once would remove each other's unfinished files.
    fn turn(&self) -> Result<File, FitError> {
        let path = self.state.join("cache.lock");
        let open = || OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&path);
        let locked = open().and_then(|file| file.lock().map(|()| file));
        locked.map_err(|source| FitError::Io { path, source })
    }

    /// The copies that are there, for a caller that keeps them open.
    pub fn files(&self) -> Vec<PathBuf> {
        self.copies().into_iter().map(|copy| copy.path).filter(|path| is_sound(path)).collect()
    }

    /// All copies that could be made. A library that is not installed needs none: a container that asks for
    /// it gets a better error elsewhere.
    fn copies(&self) -> Vec<Copy> {
        let both =
            [("libcuda.so.1", self.driver.libcuda()), ("libnvidia-ml.so.1", self.driver.libnvidia_ml())];
        let copy = |(soname, driver)| {
            let ours = self.libraries.join(soname);
            let driver: PathBuf = Result::ok(driver)?;
            let path = copy_of(self.cache, &ours, &driver).ok()?;
            Some(Copy { ours, driver, path })
        };
        both.into_iter().filter_map(copy).collect()
    }

    /// Makes the cache folder if needed, and checks that copies in it can be trusted and loaded.
    fn check_folder(&self) -> Result<(), FitError> {
        let path = || self.cache.to_path_buf();
        let io = |source| FitError::Io { path: path(), source };
        DirBuilder::new().recursive(true).mode(0o755).create(self.cache).map_err(io)?;
        let folder = File::open(self.cache).map_err(io)?;
        let metadata = folder.metadata().map_err(io)?;
        if metadata.uid() != 0 || metadata.mode() & 0o022 != 0 {
            return Err(FitError::Untrusted { path: path() });
        }
        let flags = statvfs(self.cache).map_err(|errno| io(errno.into()))?.flags();
        if flags.contains(FsFlags::ST_NOEXEC) {
            return Err(FitError::NoExec { path: path() });
        }
        Ok(())
    }
}

/// Whether `copy` is a file as [`Copy::make`] leaves it. A link, or a file that others can write, may hold
/// anything.
pub(crate) fn is_sound(copy: &Path) -> bool {
    let is_ours =
        |file: Metadata| file.is_file() && [0, NOBODYS].contains(&file.uid()) && file.mode() & 0o022 == 0;
    fs::symlink_metadata(copy).is_ok_and(is_ours)
}

/// Whether `copy` is so old that no creation can be about to mount it. Other settings may share the folder,
/// and a driver may be replaced between a plan and its mount.
fn is_old(copy: &Path) -> bool {
    let changed = fs::symlink_metadata(copy).and_then(|file| file.modified());
    changed.is_ok_and(|changed| changed.elapsed().is_ok_and(|age| age > KEPT))
}

/// Path of the copy of our library `ours` for the driver's library `driver`.
///
/// # Errors
/// When one of the two files cannot be read.
pub(crate) fn copy_of(cache: &Path, ours: &Path, driver: &Path) -> io::Result<PathBuf> {
    // Named by the build id, so that a reinstalled equal build needs no other copies.
    let ours_is = match build_id(ours)? {
        Some(id) => id,
        None => identity(&fs::metadata(ours)?).into_bytes(),
    };
    let mut hasher = DefaultHasher::new();
    (ours_is, identity(&fs::metadata(driver)?)).hash(&mut hasher);
    let name = ours.file_name().unwrap_or_default().to_string_lossy();
    Ok(cache.join(format!("{PREFIX}{:016x}-{name}", hasher.finish())))
}

/// The build id, by which the linker names the contents of a library.
fn build_id(library: &Path) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = [0; elf::BUILD_ID_BYTES];
    let read = open_now(library)?.read_at(&mut bytes, 0)?;
    Ok(bytes.get(..read).and_then(elf::build_id))
}

/// A text that changes when the file is replaced or written.
fn identity(file: &Metadata) -> String {
    let (seconds, nanoseconds) = (file.ctime(), file.ctime_nsec());
    format!("{:x}.{:x}.{:x}.{seconds:x}.{nanoseconds:x}", file.dev(), file.ino(), file.size())
}

impl Copy {
    fn make(&self) -> Result<(), FitError> {
        let io = |path: &Path| {
            let path = path.to_path_buf();
            move |source| FitError::Io { path, source }
        };
        let ours = read_now(&self.ours).map_err(io(&self.ours))?;
        let driver = read_now(&self.driver).map_err(io(&self.driver))?;
        let fitted = elf::fit(&ours, &driver).map_err(|source| FitError::Elf {
            ours: self.ours.clone(),
            driver: self.driver.clone(),
            source,
        })?;
        let unfinished = self.path.with_extension("new");
        let written = write(&unfinished, &fitted).and_then(|()| fs::rename(&unfinished, &self.path));
        written.map_err(io(&self.path))
    }
}

/// Writes the file to the disk before it gets its name: else an empty library could be found after a power
/// cut.
fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let mut file = options.write(true).create(true).truncate(true).mode(0o644).open(path)?;
    file.set_permissions(fs::Permissions::from_mode(0o644))?; // whatever the umask
    file.write_all(bytes)?;
    // A hook's child may not change the owner. The copy then stays root's, and only the meter keeps
    // containers from file leases on it.
    match fchown(&file, Some(NOBODYS), Some(NOBODYS)) {
        Err(error) if error.kind() != io::ErrorKind::PermissionDenied => Err(error),
        _ => file.sync_all(),
    }
}
