//! Looks at the container's root folder: where its loader finds libraries, and whether mount targets can take
//! a file.
//!
//! The low-level runtime resolves the targets inside the root, and it is the boundary for security. This look
//! only gives good errors and a good choice of folder. The kernel resolves every path here as inside the
//! container.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2, readlinkat};
use nix::sys::stat::{FileStat, SFlag, fstat};
use nix::sys::statvfs::{FsFlags, fstatvfs};
use serde_json::Value;

use crate::mps::SHARED_MEMORY;
use crate::parts::{entries, text, texts};

mod cache_file;
mod copies;
mod layer;
mod place;

pub use cache_file::CacheFile;
pub(crate) use cache_file::LOADER_CACHE;
use place::place;

/// What a plan must know of the image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Image {
    /// Path in the container of the folder that the image's loader searches without a cache.
    pub library_folder: PathBuf,
    /// Paths in the container of driver libraries that the image brings along (cuda-compat, a committed
    /// container).
    pub driver_copies: Vec<PathBuf>,
    /// Path in the container of a folder that its loader searches and where a volume brings a driver.
    pub driver_volume: Option<PathBuf>,
    /// The loader's cache of an image with glibc; `None` where there is none, or where the bundle mounts
    /// something over it.
    pub loader_cache: Option<CacheFile>,
}

impl Image {
    /// The image's own copies of the library `stem`.so, of any version.
    pub(crate) fn copies_of<'a>(&'a self, stem: &'a str) -> impl Iterator<Item = &'a PathBuf> {
        self.driver_copies.iter().filter(move |copy| {
            let name = copy.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            copies::is_of(&[stem], name)
        })
    }
}

/// Why nothing can be put into this container.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The root folder cannot be opened.
    #[error("the container's root folder {path} cannot be opened")]
    NoRoot {
        /// The root folder's path on the host.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Something at a target cannot take a mounted file.
    #[error("the image has {what} at {target}, where a driver file must appear; remove it from the image")]
    BadTarget {
        /// The path in the container.
        target: PathBuf,
        /// What is there.
        what: &'static str,
    },
    /// The target does not exist and cannot be made.
    #[error(
        "the image has no {target}, where a driver file must appear, and its file system is read-only; add empty files to the \
         image at the places that `gpushare plan` lists, or mount it writable with a read-only root setting"
    )]
    ReadOnly {
        /// The path in the container.
        target: PathBuf,
    },
    /// A volume lies over the target: to mount there would leave an empty file on the host.
    #[error(
        "the volume mounted at {volume} hides {target}, where a driver file must appear; mount it elsewhere"
    )]
    Hidden {
        /// The path in the container.
        target: PathBuf,
        /// The volume's path in the container.
        volume: PathBuf,
    },
}

/// The default library folders with Debian's name for this machine's architecture.
pub(crate) const TRIPLET_FOLDERS: [&str; 4] = if cfg!(target_arch = "aarch64") {
    ["/usr/lib/aarch64-linux-gnu", "/lib/aarch64-linux-gnu", "/usr/lib", "/lib"]
} else {
    ["/usr/lib/x86_64-linux-gnu", "/lib/x86_64-linux-gnu", "/usr/lib", "/lib"]
};

/// The folders that a glibc searches without a cache. Each distribution builds its list into the library:
/// Debian's family, then Red Hat's and SUSE's, then those without either. The first two folders tell the
/// family.
const FAMILIES: [&[&str]; 3] = [&TRIPLET_FOLDERS, &["/usr/lib64", "/lib64"], &["/usr/lib", "/lib"]];

/// The folders of the image's family. The C library's own file tells the family; without a glibc, the folders
/// that exist do.
fn family(root: &Root) -> &'static [&'static str] {
    let exists = |folder: &str| usable(root, Path::new(folder)).is_some();
    family_of_glibc(root).or_else(|| family_with(exists)).unwrap_or_default()
}

/// The folders of the family of the image's glibc, if it has one.
fn family_of_glibc(root: &Root) -> Option<&'static [&'static str]> {
    family_with(|folder| {
        let file = Path::new(folder).join("libc.so.6");
        seen(root, &file).is_some_and(|(kind, _)| kind == SFlag::S_IFREG)
    })
}

/// The first family of whose first two folders one `is` so.
fn family_with(is: impl Fn(&str) -> bool) -> Option<&'static [&'static str]> {
    FAMILIES.into_iter().find(|folders| folders.iter().take(2).any(|folder| is(folder)))
}

/// Where `folder` lies in the root, if files can be put there.
fn usable(root: &Root, folder: &Path) -> Option<PathBuf> {
    let (kind, resolved) = seen(root, folder)?;
    (kind == SFlag::S_IFDIR && !is_kernel_tree(&resolved)).then_some(resolved)
}

/// The container's root folder with what its bundle mounts over it. It is held open for the whole creation.
#[derive(Debug)]
pub struct RootFolder {
    root: Root,
    volumes: Volumes,
}

impl RootFolder {
    /// Opens the folder `root` (on the host) of the bundle with this config.json.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn open(root: &Path, json: &Value) -> Result<Self, ImageError> {
        let root = open_root(root)?;
        let volumes = Volumes::of(&root, json);
        Ok(Self { root, volumes })
    }

    /// Looks at the image. `bundle` is the folder of the bundle with this config.json.
    pub fn look(&self, bundle: &Path, json: &Value) -> Image {
        let Self { root, volumes } = self;
        let folders = family(root).iter().map(Path::new);
        let found: Vec<_> = folders.filter_map(|folder| Some((folder, usable(root, folder)?))).collect();
        // If a volume lies over one of these folders, another one is taken. If volumes lie over all, `check`
        // names one.
        let hidden = |(folder, resolved): &(&Path, PathBuf)| {
            volumes.over(&folder.join("libcuda.so.1"), &resolved.join("libcuda.so.1")).is_some()
        };
        let open = found.iter().find(|folder| !hidden(folder));
        let library_folder = open.or(found.first()).map_or(Path::new("/usr/lib"), |(folder, _)| *folder);
        // A loader does not find what a volume hides.
        let seen = |copy: &PathBuf| volumes.over(copy, &led(root, copy)).is_none();
        let searched = copies::searched(root, json);
        let driver_copies = copies::find(root, &searched).into_iter().filter(seen).collect();
        let driver_volume = copies::volume(root, bundle, json, &searched);
        let loader_cache = cache_file::read(root, volumes, json);
        Image { library_folder: library_folder.into(), driver_copies, driver_volume, loader_cache }
    }

    /// Replaces the loader's cache by a file with these bytes.
    ///
    /// # Errors
    /// What the system says. The cache stays as it was then.
    pub(crate) fn write_loader_cache(&self, bytes: &[u8]) -> std::io::Result<()> {
        cache_file::write(&self.root, bytes)
    }

    /// Checks that each target can take what is mounted there, and that no volume of the bundle lies over it.
    /// The second part of a target says whether it is a folder.
    ///
    /// # Errors
    /// Names the first target that fails.
    pub fn check<'a>(&self, targets: impl Iterator<Item = (&'a Path, bool)>) -> Result<(), ImageError> {
        let Self { root, volumes } = self;
        // The runtime makes /dev anew, with what lies in it: nothing there is the image's.
        for (target, is_folder) in targets.filter(|(target, _)| *target != Path::new(SHARED_MEMORY)) {
            let bad = |what| ImageError::BadTarget { target: target.into(), what };
            let found = seen(root, target);
            let resolved = match &found {
                None => place(root, target).ok_or_else(|| bad("links that lead nowhere"))?,
                Some((SFlag::S_IFDIR, resolved)) if is_folder => resolved.clone(),
                Some((SFlag::S_IFREG, resolved)) if !is_folder => resolved.clone(),
                Some((SFlag::S_IFDIR, _)) => return Err(bad("a folder")),
                Some(_) => return Err(bad("a special file")),
            };
            if is_kernel_tree(&resolved) {
                return Err(bad("a link out of its file system"));
            }
            if let Some(volume) = volumes.over(target, &resolved) {
                return Err(ImageError::Hidden { target: target.into(), volume: volume.into() });
            }
            if found.is_none() && !volumes.on_tmpfs(&resolved) && root.is_read_only(&resolved) {
                return Err(ImageError::ReadOnly { target: target.into() });
            }
        }
        Ok(())
    }

    /// Whether the container will have no file at `path`: the image has none, and no mount of the bundle
    /// could bring it.
    pub(crate) fn lacks(&self, path: &Path) -> bool {
        let Self { root, volumes } = self;
        match seen(root, path) {
            Some((SFlag::S_IFREG, _)) => false,
            _ => !volumes.reach(path, &led(root, path)),
        }
    }
}

/// Where `path` leads once links are followed, or `path` itself if that is nowhere.
fn led(root: &Root, path: &Path) -> PathBuf {
    place(root, path).unwrap_or_else(|| path.to_path_buf())
}

/// What the bundle mounts below its root: the path of each as it was written, and with links followed.
#[derive(Debug)]
struct Volumes {
    /// Folders of the host: from the path as written to the path with links followed.
    places: BTreeMap<PathBuf, PathBuf>,
    /// The same, from the followed path to the written one.
    written: BTreeMap<PathBuf, PathBuf>,
    /// Followed paths of file systems of the container's own.
    others: BTreeSet<PathBuf>,
}

impl Volumes {
    fn of(root: &Root, json: &Value) -> Self {
        let (bound, others) = mounts(json);
        let places: BTreeMap<_, _> =
            bound.into_iter().map(|written| (written.clone(), led(root, &written))).collect();
        let written = places.iter().map(|(written, place)| (place.clone(), written.clone())).collect();
        Self { places, written, others: others.iter().map(|written| led(root, written)).collect() }
    }

    /// The path as written of a folder of the host that lies over `target`, which resolves to `resolved`. A
    /// volume mounted exactly there is no obstacle: our mount lies on top of it.
    fn over(&self, target: &Path, resolved: &Path) -> Option<&Path> {
        let named = |folder| self.places.get_key_value(folder).filter(|(_, place)| *place != resolved);
        let by_name = target.ancestors().skip(1).find_map(named).map(|(written, _)| written);
        let by_place = || resolved.ancestors().skip(1).find_map(|folder| self.written.get(folder));
        by_name.or_else(by_place).map(PathBuf::as_path)
    }

    /// Whether something of the bundle is mounted at or over `path`, which resolves to `resolved`.
    fn reach(&self, path: &Path, resolved: &Path) -> bool {
        path.ancestors().any(|folder| self.places.contains_key(folder))
            || resolved.ancestors().any(|folder| self.written.contains_key(folder))
            || self.on_tmpfs(resolved)
    }

    /// Whether a target is made in a file system of the container's own.
    fn on_tmpfs(&self, resolved: &Path) -> bool {
        resolved.ancestors().any(|folder| self.others.contains(folder))
    }
}

/// A path of the container for a look-up that begins at the root folder.
pub(crate) fn relative(path: &Path) -> &Path {
    let path = path.strip_prefix("/").unwrap_or(path);
    if path.as_os_str().is_empty() { Path::new(".") } else { path }
}

/// The root folder, held open, and its path without links. What was found at a name is remembered, because
/// driver files share few folders. Nobody's safety depends on what is remembered.
#[derive(Debug)]
struct Root {
    folder: File,
    path: PathBuf,
    names: RefCell<BTreeMap<PathBuf, Name>>,
    /// Folders that exist, and whether their file system is read-only.
    read_only: RefCell<BTreeMap<PathBuf, bool>>,
}

/// What is at a path whose folders are no links.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Name {
    /// Nothing, so there is nothing below it either.
    Absent,
    /// A link with this target.
    Link(PathBuf),
    /// Anything else.
    Other,
}

/// Names that are remembered at most: an ordinary image with its volumes has fewer. Further names of a
/// hostile one are looked up each time.
const MAX_REMEMBERED: usize = 4096;

impl Root {
    /// What is at `path`, whose folders are no links.
    fn name(&self, path: &Path) -> Name {
        if let Some(known) = self.names.borrow().get(path) {
            return known.clone();
        }
        let found = if self.is_absent_below(path) { Name::Absent } else { self.look_up(path) };
        let mut names = self.names.borrow_mut();
        if names.len() < MAX_REMEMBERED {
            names.insert(path.to_path_buf(), found.clone());
        }
        found
    }

    fn is_absent_below(&self, path: &Path) -> bool {
        let names = self.names.borrow();
        path.parent().is_some_and(|folder| names.get(folder) == Some(&Name::Absent))
    }

    fn look_up(&self, path: &Path) -> Name {
        match self.open(path, OFlag::O_NOFOLLOW) {
            Ok(found) => readlinkat(&found, "").map_or(Name::Other, |target| Name::Link(target.into())),
            Err(Errno::ENOENT) => Name::Absent,
            Err(_) => Name::Other,
        }
    }

    /// What is at `path` inside the root, for looking only.
    fn open(&self, path: &Path, flags: OFlag) -> Result<OwnedFd, Errno> {
        let how = OpenHow::new()
            .flags(flags | OFlag::O_PATH | OFlag::O_CLOEXEC)
            .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
        openat2(self.folder.as_fd(), relative(path), how)
    }

    /// Whether nothing can be made at `path`, which does not exist yet and whose folders are no links.
    fn is_read_only(&self, path: &Path) -> bool {
        let exists = |folder: &&Path| self.names.borrow().get(*folder) != Some(&Name::Absent);
        path.ancestors().skip(1).filter(exists).find_map(|folder| self.has_read_only(folder)).unwrap_or(false)
    }

    /// Whether the file system of `folder` is read-only; `None` when there is no such folder.
    fn has_read_only(&self, folder: &Path) -> Option<bool> {
        if let Some(known) = self.read_only.borrow().get(folder) {
            return Some(*known);
        }
        let system = fstatvfs(&resolve(self, folder).ok()?).ok();
        let read_only = system.is_some_and(|system| system.flags().contains(FsFlags::ST_RDONLY));
        self.read_only.borrow_mut().insert(folder.to_path_buf(), read_only);
        Some(read_only)
    }
}

fn open_root(root: &Path) -> Result<Root, ImageError> {
    let no_root = |source| ImageError::NoRoot { path: root.into(), source };
    let folder = File::open(root).map_err(no_root)?;
    let path = path_of(folder.as_raw_fd()).map_err(no_root)?;
    Ok(Root { folder, path, names: RefCell::default(), read_only: RefCell::default() })
}

fn path_of(fd: i32) -> std::io::Result<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{fd}"))
}

/// The targets of the bundle's mounts: those of folders of the host, and those of file systems of the
/// container's own. The latter hide nothing that matters: targets are made in them.
fn mounts(json: &Value) -> (Vec<PathBuf>, Vec<PathBuf>) {
    let (bound, others): (Vec<&Value>, Vec<&Value>) =
        entries(json, "/mounts").partition(|mount| is_bind(mount));
    let paths = |mounts: Vec<&Value>| -> Vec<PathBuf> {
        let written = mounts.into_iter().filter_map(|mount| mount.get("destination")?.as_str());
        written.map(PathBuf::from).filter(|path| path != Path::new("/")).collect()
    };
    (paths(bound), paths(others))
}

pub(crate) fn is_bind(mount: &Value) -> bool {
    text(mount, "type") == "bind" || texts(mount, "/options").any(|option| matches!(option, "bind" | "rbind"))
}

/// The kind of file at `path` inside the root, and its path there once links are followed.
fn seen(root: &Root, path: &Path) -> Option<(SFlag, PathBuf)> {
    let fd = resolve(root, path).ok()?;
    Some((kind(&fstat(&fd).ok()?), inner_path(root, &fd)?))
}

/// What kind of file it is.
pub(crate) fn kind(stat: &FileStat) -> SFlag {
    SFlag::from_bits_truncate(stat.st_mode & SFlag::S_IFMT.bits())
}

fn resolve(root: &Root, path: &Path) -> Result<OwnedFd, Errno> {
    root.open(path, OFlag::empty())
}

/// The path of `fd` as the container sees it; `None` outside of the root.
fn inner_path(root: &Root, fd: &OwnedFd) -> Option<PathBuf> {
    let outer = path_of(fd.as_raw_fd()).ok()?;
    Some(Path::new("/").join(outer.strip_prefix(&root.path).ok()?))
}

/// Whether the path is in a tree of the kernel: runc refuses a target there, crun mounts over the kernel's
/// file.
fn is_kernel_tree(path: &Path) -> bool {
    ["/proc", "/sys", "/dev"].iter().any(|tree| path.starts_with(tree))
}

#[cfg(test)]
mod tests;
