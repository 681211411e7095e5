//! A look at the container's root folder: where its loader finds libraries, and whether mount targets are sane.
//!
//! The runtime resolves targets inside the root and is the boundary; this look is a courtesy for good errors and a
//! good choice of folder. Every path is resolved as inside the container, by the kernel.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use nix::sys::stat::{SFlag, fstat};
use serde_json::Value;

mod copies;

/// The image's side of the plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Image {
    /// The folder that the image's loader searches without a cache.
    pub library_folder: PathBuf,
    /// Driver libraries that the image brings along (cuda-compat, a committed container), by their paths in it.
    pub driver_copies: Vec<PathBuf>,
}

/// Why nothing can be put into this container.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// No root folder.
    #[error("the container's root folder {path} cannot be opened")]
    NoRoot {
        /// The folder on the host.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A target is no place for a file.
    #[error("the image has {what} at {target}, where a driver file must appear; remove it from the image")]
    BadTarget {
        /// The path in the container.
        target: PathBuf,
        /// What is there.
        what: &'static str,
    },
    /// A volume of the user lies over the target: the mount would leave an empty file on the host.
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

/// The loader's default folders: where a multiarch folder exists the image is of the Debian family, whose glibc
/// searches it first; then RHEL's; then what every loader has.
const FOLDERS: [(&str, &str); 5] = [
    ("usr/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu"),
    ("lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu"),
    ("usr/lib64", "/usr/lib64"),
    ("lib64", "/lib64"),
    ("usr/lib", "/usr/lib"),
];

impl Image {
    /// Looks at the root folder of the bundle with this config.json.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn look(root: &Path, json: &Value) -> Result<Self, ImageError> {
        let root = open_root(root)?;
        let found = FOLDERS.iter().find(|(folder, _)| {
            let seen = seen(&root, Path::new(folder));
            seen.is_some_and(|(kind, resolved)| kind == SFlag::S_IFDIR && !is_kernel_tree(&resolved))
        });
        let library_folder = PathBuf::from(found.map_or("/usr/lib", |(_, folder)| folder));
        Ok(Self { library_folder, driver_copies: copies::find(&root, json) })
    }

    /// Checks that each target can take what is mounted there (a folder where the second part says so), and that no
    /// volume of the bundle lies over it.
    ///
    /// # Errors
    /// Names the first target that cannot.
    pub fn check<'a>(
        root: &Path,
        json: &Value,
        targets: impl Iterator<Item = (&'a Path, bool)>,
    ) -> Result<(), ImageError> {
        let root = open_root(root)?;
        let volumes: Vec<_> =
            volumes(json).into_iter().map(|volume| (place(&root, &volume), volume)).collect();
        for (target, is_folder) in targets {
            let bad = |what| ImageError::BadTarget { target: target.into(), what };
            let resolved = match seen(&root, relative(target)) {
                None => place(&root, target),
                Some((SFlag::S_IFDIR, resolved)) if is_folder => resolved,
                Some((SFlag::S_IFREG, resolved)) if !is_folder => resolved,
                Some((SFlag::S_IFDIR, _)) => return Err(bad("a folder")),
                Some(_) => return Err(bad("a special file")),
            };
            if is_kernel_tree(&resolved) {
                return Err(bad("a link out of its file system"));
            }
            let hides = |(place, written): &&(PathBuf, PathBuf)| {
                let over = target.starts_with(written) || resolved.starts_with(place);
                over && *place != resolved && written != target
            };
            if let Some((_, volume)) = volumes.iter().find(hides) {
                return Err(ImageError::Hidden { target: target.into(), volume: volume.clone() });
            }
        }
        Ok(())
    }
}

fn relative(path: &Path) -> &Path {
    path.strip_prefix("/").unwrap_or(path)
}

/// The root folder, held open, and its path without links.
struct Root {
    folder: File,
    path: PathBuf,
}

fn open_root(root: &Path) -> Result<Root, ImageError> {
    let no_root = |source| ImageError::NoRoot { path: root.into(), source };
    let folder = File::open(root).map_err(no_root)?;
    let path = path_of(folder.as_raw_fd()).map_err(no_root)?;
    Ok(Root { folder, path })
}

fn path_of(fd: i32) -> std::io::Result<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{fd}"))
}

/// Where the bundle mounts folders of the host. A tmpfs hides nothing that matters: targets are made in it.
fn volumes(json: &Value) -> Vec<PathBuf> {
    let mounts = json.get("mounts").and_then(Value::as_array).into_iter().flatten();
    let bound = mounts.filter(|mount| {
        let option = |wanted: &str| {
            let options = mount.get("options").and_then(Value::as_array).into_iter().flatten();
            options.filter_map(Value::as_str).any(|option| option == wanted)
        };
        mount.get("type").and_then(Value::as_str) == Some("bind") || option("bind") || option("rbind")
    });
    let paths = bound.filter_map(|mount| mount.get("destination").and_then(Value::as_str));
    paths.map(PathBuf::from).filter(|path| path != Path::new("/")).collect()
}

/// What `path` is inside the root, and where it lies there once links are followed.
fn seen(root: &Root, path: &Path) -> Option<(SFlag, PathBuf)> {
    let fd = resolve(root, path).ok()?;
    let kind = SFlag::from_bits_truncate(fstat(&fd).ok()?.st_mode & SFlag::S_IFMT.bits());
    Some((kind, inner_path(root, &fd)?))
}

/// Where `path` lies inside the root once links are followed; what does not exist yet lies below its nearest existing
/// folder.
fn place(root: &Root, path: &Path) -> PathBuf {
    let path = relative(path);
    let existing = path.ancestors().find_map(|folder| Some((folder, seen(root, folder)?.1)));
    match existing {
        Some((folder, resolved)) => resolved.join(path.strip_prefix(folder).unwrap_or(Path::new(""))),
        None => Path::new("/").join(path),
    }
}

fn resolve(root: &Root, path: &Path) -> Result<OwnedFd, Errno> {
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    openat2(root.folder.as_fd(), path, how)
}

/// The path below the root, as the container sees it.
fn inner_path(root: &Root, fd: &OwnedFd) -> Option<PathBuf> {
    let outer = path_of(fd.as_raw_fd()).ok()?;
    Some(Path::new("/").join(outer.strip_prefix(&root.path).ok()?))
}

/// runc refuses a target inside these, crun mounts over the kernel's file.
fn is_kernel_tree(path: &Path) -> bool {
    ["/proc", "/sys", "/dev"].iter().any(|tree| path.starts_with(tree))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use serde_json::json;

    use super::*;

    fn image(folders: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for folder in folders {
            fs::create_dir_all(root.path().join(folder)).unwrap();
        }
        root
    }

    fn folder(root: &Path) -> PathBuf {
        Image::look(root, &json!({})).unwrap().library_folder
    }

    #[test]
    fn the_folder_is_the_one_that_the_images_loader_searches() {
        for (folders, want) in [
            (&["usr/lib/x86_64-linux-gnu", "usr/lib64"][..], "/usr/lib/x86_64-linux-gnu"),
            (&["usr/lib64", "usr/lib"], "/usr/lib64"),
            (&["lib/x86_64-linux-gnu"], "/usr/lib/x86_64-linux-gnu"),
            (&["usr/lib"], "/usr/lib"),
            (&[], "/usr/lib"),
        ] {
            assert_eq!(folder(image(folders).path()), Path::new(want), "{folders:?}");
        }
    }

    #[test]
    fn links_are_followed_inside_the_root_and_kernel_trees_are_avoided() {
        let root = image(&["usr/lib", "data/libs"]);
        symlink("/data/libs", root.path().join("usr/lib64")).unwrap();
        assert_eq!(folder(root.path()), Path::new("/usr/lib64"));
        let root = image(&["usr/lib", "proc/self"]);
        symlink("/proc/self", root.path().join("usr/lib64")).unwrap();
        assert_eq!(folder(root.path()), Path::new("/usr/lib"));
        let root = image(&["usr"]);
        symlink("/usr/lib/x86_64-linux-gnu", root.path().join("usr/lib64")).unwrap();
        assert_eq!(folder(root.path()), Path::new("/usr/lib"), "a link to nowhere is no folder");
    }

    #[test]
    fn targets_must_be_able_to_take_a_file() {
        let root = image(&["usr/lib", "proc"]);
        let target = Path::new("/usr/lib/libcuda.so.1");
        let check = |json: &Value| Image::check(root.path(), json, [(target, false)].into_iter());
        check(&json!({})).unwrap();
        check(&json!({"mounts": [{"destination": "/usr/lib", "type": "tmpfs"}]})).unwrap();
        let volume = json!({"mounts": [{"destination": "/usr", "type": "bind", "source": "/x"}]});
        assert!(matches!(check(&volume), Err(ImageError::Hidden { .. })));
        let own = json!({"destination": "/usr/lib/libcuda.so.1", "options": ["rbind"]});
        check(&json!({"mounts": [own]})).unwrap();
        let over = json!({"destination": "/usr/lib/", "options": ["bind"]});
        assert!(matches!(check(&json!({"mounts": [own, over]})), Err(ImageError::Hidden { .. })));
        symlink("usr/lib", root.path().join("lib")).unwrap();
        for written in ["/lib", "/usr/lib/../lib", "/lib/."] {
            let volume = json!({"mounts": [{"destination": written, "type": "bind"}]});
            assert!(matches!(check(&volume), Err(ImageError::Hidden { .. })), "{written}");
        }
        fs::create_dir(root.path().join("usr/lib/libcuda.so.1")).unwrap();
        assert!(matches!(check(&json!({})), Err(ImageError::BadTarget { what: "a folder", .. })));
        fs::remove_dir(root.path().join("usr/lib/libcuda.so.1")).unwrap();
        fs::write(root.path().join("proc/environ"), "").unwrap();
        symlink("/proc/environ", root.path().join("usr/lib/libcuda.so.1")).unwrap();
        assert!(matches!(check(&json!({})), Err(ImageError::BadTarget { .. })));
        fs::remove_file(root.path().join("usr/lib/libcuda.so.1")).unwrap();
        nix::unistd::mkfifo(&root.path().join("usr/lib/libcuda.so.1"), nix::sys::stat::Mode::S_IRWXU)
            .unwrap();
        assert!(matches!(check(&json!({})), Err(ImageError::BadTarget { .. })));
    }
}
