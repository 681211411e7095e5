//! Finds where a path of the container leads once links are followed. The path need not exist yet: the
//! runtime makes it, and also what a link to nowhere names.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};

use super::{Name, Root};

/// Names looked at for one path, including those that links bring: an image may hold any tangle of links.
const MAX_NAMES: usize = 1024;
/// Bytes of a path that the kernel takes, with the closing NUL.
const PATH_MAX: usize = 4096;

/// The path below the root. `None` when it is too long or its links form a circle, so that nothing can be
/// mounted there.
pub(super) fn place(root: &Root, path: &Path) -> Option<PathBuf> {
    if path.as_os_str().len() >= PATH_MAX {
        return None;
    }
    let mut names = names(path);
    let mut at = PathBuf::from("/");
    for _ in 0..MAX_NAMES {
        let Some(name) = names.pop_front() else { return Some(at) };
        if name == ".." {
            at.pop();
            continue;
        }
        let next = at.join(&name);
        match root.name(&next) {
            Name::Link(target) => {
                if target.is_absolute() {
                    at = PathBuf::from("/");
                }
                for name in self::names(&target).into_iter().rev() {
                    names.push_front(name);
                }
            }
            Name::Absent | Name::Other => at = next,
        }
    }
    None
}

fn names(path: &Path) -> VecDeque<OsString> {
    let named = path.components().filter_map(|component| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        _ => None,
    });
    named.collect()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::image::open_root;

    #[test]
    fn links_lead_inside_the_root_whether_their_ends_exist_or_not() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("usr/lib")).unwrap();
        for (link, target) in [
            ("lib", "usr/lib"),
            ("usr/out", "../../../../etc/x"),
            ("usr/absolute", "/data/./lib//"),
            ("usr/twice", "absolute/../z"),
            ("usr/round", "around"),
            ("usr/around", "round"),
            ("usr/itself", "itself/x"),
        ] {
            symlink(target, folder.path().join(link)).unwrap();
        }
        let root = open_root(folder.path()).unwrap();
        for (path, want) in [
            ("/", Some("/")),
            ("/lib/libcuda.so.1", Some("/usr/lib/libcuda.so.1")),
            ("/lib/../../../x", Some("/x")),
            ("/usr/lib/../lib/./a", Some("/usr/lib/a")),
            ("/usr/out", Some("/etc/x")),
            ("/usr/absolute/libcuda.so.1", Some("/data/lib/libcuda.so.1")),
            ("/usr/twice", Some("/data/z")),
            ("/none/../none/a", Some("/none/a")),
            ("/usr/round", None),
            ("/usr/itself", None),
            (&"/a".repeat(2000), None),
            (&"/a".repeat(3000), None),
        ] {
            assert_eq!(place(&root, Path::new(path)), want.map(PathBuf::from), "{path:.40}");
        }
    }
}
