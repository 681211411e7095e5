//! Tells whether a root folder is the layer that an engine made for this one container, and that goes with it.
//! What is written there reaches no other container and no folder of a user.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use nix::sys::statfs::{OVERLAYFS_SUPER_MAGIC, fstatfs};
use nix::sys::statvfs::{FsFlags, fstatvfs};
use serde_json::Value;

use super::Root;
use crate::mount_table::Table;

/// Bytes of the mount table that are read. A line has some hundred bytes, and the kernel allows 100,000
/// mounts.
const LONGEST_TABLE: u64 = 32 << 20;
/// The beginning of the name of the folder in which a snapshotter of containerd's keeps its layers.
const SNAPSHOTTER: &str = "io.containerd.snapshotter.";

/// Whether the root is an overlay whose upper folder lies in an engine's storage, and that the bundle leaves
/// writable.
pub(super) fn is_engines_own(root: &Root, json: &Value) -> bool {
    let read_only = json.pointer("/root/readonly").and_then(Value::as_bool).unwrap_or_default();
    !read_only && is_writable_overlay(root) && is_in_storage(root).unwrap_or_default()
}

fn is_writable_overlay(root: &Root) -> bool {
    let kind = fstatfs(&root.folder).map(|system| system.filesystem_type());
    let flags = fstatvfs(&root.folder).map(|system| system.flags());
    kind == Ok(OVERLAYFS_SUPER_MAGIC) && flags.is_ok_and(|flags| !flags.contains(FsFlags::ST_RDONLY))
}

fn is_in_storage(root: &Root) -> Option<bool> {
    let mut table = Vec::new();
    let file = File::open("/proc/self/mountinfo").ok()?;
    file.take(LONGEST_TABLE).read_to_end(&mut table).ok()?;
    let table = Table::parse(&table);
    let upper = table.find(&root.folder).ok()??.upper.as_deref()?;
    Some(is_of_storage(&root.path, upper) || is_of_snapshotter(upper))
}

/// docker and podman, CRI-O: `ID/merged` is the root and `ID/diff` the upper folder, which may be relative.
fn is_of_storage(root: &Path, upper: &Path) -> bool {
    let (Some(home), Some(layer)) = (root.parent(), upper.parent()) else { return false };
    let is_layer =
        root.file_name() == Some(OsStr::new("merged")) && upper.file_name() == Some(OsStr::new("diff"));
    is_layer && layer.file_name().is_some() && home.ends_with(layer)
}

/// containerd, also docker's image store in it: `…/io.containerd.snapshotter.v1.NAME/…/snapshots/NUMBER/fs`.
fn is_of_snapshotter(upper: &Path) -> bool {
    let names: Option<Vec<&str>> = upper.iter().map(OsStr::to_str).collect();
    let Some([storage @ .., "snapshots", number, "fs"]) = names.as_deref() else { return false };
    let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    is_number && storage.iter().any(|name| name.starts_with(SNAPSHOTTER))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engines_own_layer_is_known_by_where_its_upper_folder_lies() {
        let containerd = "/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs/snapshots/77/fs";
        let bundle = "/run/containerd/io.containerd.runtime.v2.task/k8s.io/x/rootfs";
        let stargz = "/s/io.containerd.snapshotter.v1.stargz/snapshotter/snapshots/5/fs";
        for (root, upper, want) in [
            ("/var/lib/docker/overlay2/ab/merged", "/var/lib/docker/overlay2/ab/diff", true),
            ("/var/lib/docker/overlay2/ab/merged", "ab/diff", true),
            (
                "/var/lib/containers/storage/overlay/c/merged",
                "/var/lib/containers/storage/overlay/c/diff",
                true,
            ),
            (bundle, containerd, true),
            (bundle, stargz, true),
            ("/var/lib/docker/overlay2/ab/merged", "/var/lib/docker/overlay2/cd/diff", false),
            ("/home/u/merged", "diff", false),
            ("/home/u/merged", "/home/u/upper", false),
            ("/home/u/root", "/home/u/diff", false),
            (bundle, "/var/lib/buildkit/runc-overlayfs/snapshots/snapshots/7/fs", false),
            (bundle, "/x/io.containerd.snapshotter.v1.overlayfs/snapshots/../fs", false),
            (bundle, "/x/io.containerd.snapshotter.v1.overlayfs/snapshots/fs", false),
        ] {
            let found = is_of_storage(root.as_ref(), upper.as_ref()) || is_of_snapshotter(upper.as_ref());
            assert_eq!(found, want, "{root} {upper}");
        }
    }
}
