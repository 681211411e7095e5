//! Resolves paths inside a folder as if it were `/`. The kernel does this (`openat2`), so links cannot point
//! outside of the folder.

use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use nix::sys::stat::{SFlag, fstat};

/// The driver root, as an open descriptor.
#[derive(Clone, Debug)]
pub(crate) struct Root {
    path: PathBuf,
    /// The open folder and its path without links. `None` if it cannot be opened; then lookups find no files.
    folder: Option<Arc<(File, PathBuf)>>,
}

impl Root {
    pub fn open(path: &Path) -> Self {
        let folder = File::open(path).ok().and_then(|file| {
            let real = path_of(&file)?;
            Some(Arc::new((file, real)))
        });
        Self { path: path.into(), folder }
    }

    /// The folder's path as passed to `open`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The folder's path without links; `None` if it cannot be opened.
    pub fn real(&self) -> Option<&Path> {
        self.folder.as_ref().map(|folder| folder.1.as_path())
    }

    /// The real path of the regular file at `path`, a path below this root; `None` if there is none.
    pub fn file(&self, path: &Path) -> Option<PathBuf> {
        let (_, real) = &**self.folder.as_ref()?;
        let (fd, kind) = self.open_inside(path)?;
        path_of(&fd).filter(|found| kind == SFlag::S_IFREG && found.starts_with(real))
    }

    /// Whether there is a folder at `path`, a path below this root.
    pub fn has_folder(&self, path: &Path) -> bool {
        self.open_inside(path).is_some_and(|(_, kind)| kind == SFlag::S_IFDIR)
    }

    fn open_inside(&self, path: &Path) -> Option<(OwnedFd, SFlag)> {
        let (folder, real) = &**self.folder.as_ref()?;
        let inner = path.strip_prefix(&self.path).or_else(|_| path.strip_prefix(real)).unwrap_or(path);
        let inner = if inner.as_os_str().is_empty() { Path::new(".") } else { inner };
        let how = OpenHow::new()
            .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
            .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
        let fd = openat2(folder.as_fd(), inner, how).ok()?;
        let kind = SFlag::from_bits_truncate(fstat(&fd).ok()?.st_mode & SFlag::S_IFMT.bits());
        Some((fd, kind))
    }
}

fn path_of(fd: &impl AsRawFd) -> Option<PathBuf> {
    fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok()
}
