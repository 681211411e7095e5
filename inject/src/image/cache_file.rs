//! The file of the loader's cache in the container's root. It is the image's, so nothing on the way to it may
//! be a link or another file system, and only a regular file is opened.

use std::fs::{File, Permissions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2, renameat};
use nix::sys::stat::{Mode, SFlag, fstat};
use nix::unistd::{UnlinkatFlags, unlinkat};
use serde_json::Value;

use super::{Root, Volumes, family_of_glibc, kind, layer, relative};
use crate::parts::{entries, text};
use crate::region::is_loader_cache;

/// Path of the cache in a container with glibc.
pub(crate) const LOADER_CACHE: &str = "/etc/ld.so.cache";
const FOLDER: &str = "/etc";
const NAME: &str = "ld.so.cache";
/// ldconfig writes the new cache under this name, too, and removes what it finds there.
const UNFINISHED: &str = "ld.so.cache~";

/// Bytes; a cache of ten thousand libraries has about one MiB.
const MAX_BYTES: u64 = 2 << 20;

/// The loader's cache of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheFile {
    /// What it holds, or why that was not read.
    pub bytes: Result<Vec<u8>, &'static str>,
    /// Whether the file may be replaced, because the root is the engine's own layer for this container.
    pub is_replaceable: bool,
}

/// Reads the cache of an image with glibc; `None` without one, or where the bundle mounts something over it.
pub(super) fn read(root: &Root, volumes: &Volumes, json: &Value) -> Option<CacheFile> {
    if is_hidden(volumes, json) || family_of_glibc(root).is_none() {
        return None;
    }
    let bytes = match open(root, LOADER_CACHE, OFlag::O_PATH) {
        Ok(file) => contents(&file),
        Err(Errno::ENOENT | Errno::ENOTDIR) => return None,
        Err(Errno::ELOOP) => Err("a link leads to it"),
        Err(_) => Err("it cannot be opened"),
    };
    Some(CacheFile { is_replaceable: bytes.is_ok() && layer::is_engines_own(root, json), bytes })
}

/// Whether the bundle mounts something over the cache. The mount of an earlier start in the same bundle is
/// ours, and is replaced.
fn is_hidden(volumes: &Volumes, json: &Value) -> bool {
    let is_mount = |path: &&Path| volumes.written.contains_key(*path) || volumes.others.contains(*path);
    let path = Path::new(LOADER_CACHE);
    let Some(place) = path.ancestors().find(is_mount) else { return false };
    let mut here = entries(json, "/mounts").filter(|mount| text(mount, "destination") == LOADER_CACHE);
    place != path || !here.any(|mount| is_loader_cache(Path::new(text(mount, "source"))))
}

fn contents(file: &OwnedFd) -> Result<Vec<u8>, &'static str> {
    const UNREADABLE: &str = "it cannot be read";
    let stat = fstat(file).map_err(|_| UNREADABLE)?;
    // A FIFO or a device is not opened: that could block, or do something.
    if kind(&stat) != SFlag::S_IFREG {
        return Err("it is no regular file");
    }
    let mut bytes = Vec::new();
    let file = File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).map_err(|_| UNREADABLE)?;
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(|_| UNREADABLE)?;
    match u64::try_from(bytes.len()) {
        Ok(length) if length <= MAX_BYTES => Ok(bytes),
        _ => Err("it has more than 2 MiB"),
    }
}

/// Replaces the cache by a file with these bytes, and with the mode and owner of the one before. It is
/// written under another name first: no program sees half of it, and other names of the old file keep theirs.
pub(super) fn write(root: &Root, bytes: &[u8]) -> io::Result<()> {
    let folder = open(root, FOLDER, OFlag::O_PATH | OFlag::O_DIRECTORY)?;
    let _ = unlinkat(&folder, UNFINISHED, UnlinkatFlags::NoRemoveDir);
    let written = fill(root, &folder, bytes);
    let renamed = written.and_then(|()| Ok(renameat(&folder, UNFINISHED, &folder, NAME)?));
    if renamed.is_err() {
        let _ = unlinkat(&folder, UNFINISHED, UnlinkatFlags::NoRemoveDir);
    }
    renamed
}

fn fill(root: &Root, folder: &OwnedFd, bytes: &[u8]) -> io::Result<()> {
    let before = File::from(open(root, LOADER_CACHE, OFlag::O_PATH)?).metadata()?;
    let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL;
    let mut file = File::from(plain(folder, Path::new(UNFINISHED), flags, Mode::from_bits_truncate(0o600))?);
    file.write_all(bytes)?;
    fchown(&file, Some(before.uid()), Some(before.gid()))?;
    // The owner's bits for set-user-id mean nothing here.
    file.set_permissions(Permissions::from_mode(before.mode() & 0o777))
}

/// Opens `path` inside the root, by folders that are no links and no mounts.
fn open(root: &Root, path: &str, flags: OFlag) -> Result<OwnedFd, Errno> {
    plain(&root.folder, relative(Path::new(path)), flags, Mode::empty())
}

fn plain(folder: impl AsFd, path: &Path, flags: OFlag, mode: Mode) -> Result<OwnedFd, Errno> {
    let resolve =
        ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_XDEV;
    let how = OpenHow::new().flags(flags | OFlag::O_CLOEXEC).mode(mode);
    openat2(folder, path, how.resolve(resolve))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use serde_json::json;

    use super::*;
    use crate::image::open_root;

    /// A root with a glibc, and with the cache if it is given.
    fn root(cache: Option<&[u8]>) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for folder in ["etc", "usr/lib64"] {
            fs::create_dir_all(root.path().join(folder)).unwrap();
        }
        fs::write(root.path().join("usr/lib64/libc.so.6"), "").unwrap();
        if let Some(cache) = cache {
            fs::write(root.path().join("etc/ld.so.cache"), cache).unwrap();
        }
        root
    }

    fn read_in(root: &Path, json: &Value) -> Option<CacheFile> {
        let root = open_root(root).unwrap();
        read(&root, &Volumes::of(&root, json), json)
    }

    #[test]
    fn the_cache_of_an_image_with_glibc_is_read() {
        let folder = root(Some(b"x"));
        let file = read_in(folder.path(), &json!({})).unwrap();
        assert_eq!(file, CacheFile { bytes: Ok(b"x".to_vec()), is_replaceable: false }, "a plain folder");
        fs::remove_file(folder.path().join("usr/lib64/libc.so.6")).unwrap();
        assert_eq!(read_in(folder.path(), &json!({})), None, "musl, or none");
        assert_eq!(read_in(root(None).path(), &json!({})), None, "no cache");
    }

    #[test]
    fn a_cache_under_a_mount_of_the_bundle_is_not_the_containers() {
        let folder = root(Some(b"x"));
        let mount =
            |source: &str, target: &str| json!({"mounts": [{"source": source, "destination": target}]});
        for (source, target, is_read) in [
            ("/srv/etc", "/etc", false),
            ("tmpfs", "/etc/", false),
            ("/srv/cache", "/etc/ld.so.cache", false),
            ("/run/gpushare/regions/7.caches/c", "/etc", false),
            ("/run/gpushare/regions/7.caches/c", "/etc/ld.so.cache", true),
            ("/srv/conf", "/etc/ld.so.conf.d", true),
            ("/srv/root", "/", true),
        ] {
            let found = read_in(folder.path(), &mount(source, target));
            assert_eq!(found.is_some(), is_read, "{source} {target}");
        }
    }

    #[test]
    fn what_is_no_plain_file_of_a_sane_size_is_named_at_once() {
        let folder = root(None);
        let path = folder.path().join("etc/ld.so.cache");
        let why = || read_in(folder.path(), &json!({})).unwrap().bytes.unwrap_err();
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(why(), "it is no regular file");
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert_eq!(why(), "it is no regular file");
        fs::remove_dir(&path).unwrap();
        symlink("/etc/ld.so.cache", &path).unwrap();
        assert_eq!(why(), "a link leads to it");
        fs::remove_file(&path).unwrap();
        File::create(&path).unwrap().set_len(100 << 20).unwrap();
        assert_eq!(why(), "it has more than 2 MiB");
        fs::rename(folder.path().join("etc"), folder.path().join("x")).unwrap();
        symlink("x", folder.path().join("etc")).unwrap();
        assert_eq!(why(), "a link leads to it");
    }

    #[test]
    fn a_cache_is_replaced_with_its_mode_and_other_names_keep_the_old_one() {
        let folder = root(Some(b"old"));
        let file = |name: &str| folder.path().join("etc").join(name);
        fs::set_permissions(file(NAME), Permissions::from_mode(0o604)).unwrap();
        fs::hard_link(file(NAME), file("other")).unwrap();
        let outside = tempfile::NamedTempFile::new().unwrap();
        symlink(outside.path(), file(UNFINISHED)).unwrap();
        write(&open_root(folder.path()).unwrap(), b"new").unwrap();
        assert_eq!(fs::read(file(NAME)).unwrap(), b"new");
        assert_eq!(fs::metadata(file(NAME)).unwrap().mode() & 0o7777, 0o604);
        assert_eq!(fs::read(file("other")).unwrap(), b"old");
        assert_eq!(fs::read(outside.path()).unwrap(), b"", "what the unfinished name led to");
        assert_eq!(fs::read_dir(folder.path().join("etc")).unwrap().count(), 2);
    }

    #[test]
    fn a_cache_that_cannot_be_replaced_stays_and_nothing_is_left_beside_it() {
        let folder = root(Some(b"old"));
        let unfinished = folder.path().join("etc").join(UNFINISHED);
        fs::create_dir(&unfinished).unwrap();
        assert!(write(&open_root(folder.path()).unwrap(), b"new").is_err());
        fs::remove_dir(&unfinished).unwrap();
        let outside = tempfile::tempdir().unwrap();
        fs::rename(folder.path().join("etc"), outside.path().join("etc")).unwrap();
        symlink(outside.path().join("etc"), folder.path().join("etc")).unwrap();
        assert!(write(&open_root(folder.path()).unwrap(), b"new").is_err());
        let left = fs::read_dir(outside.path().join("etc")).unwrap().count();
        assert_eq!((left, fs::read(outside.path().join("etc").join(NAME)).unwrap()), (1, b"old".to_vec()));
    }
}
