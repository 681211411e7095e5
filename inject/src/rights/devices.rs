//! Device nodes and rules of a bundle that reach the machine: its memory, and the disks with the host's file
//! systems.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use gpushare_claims::lets_use;
use nix::sys::stat::{major, minor};
use serde_json::Value;

use crate::parts::{DeviceNumbers, device_numbers, entries, numbers_text, text};

/// The node or rule for a character device with one of the numbers `wanted`, as text.
pub(super) fn character(json: &Value, wanted: &[(u64, Option<u64>)]) -> Option<String> {
    let is_wanted = |(major, minor): DeviceNumbers| {
        wanted.iter().any(|(of, one)| {
            let is_minor = minor.is_none() || one.is_none() || minor == *one;
            major.is_none_or(|major| major == *of) && is_minor
        })
    };
    find(json, &["c", "u", "a", ""], is_wanted)
}

/// The node or rule for a block device of the host's file systems, as text.
pub(super) fn disk(json: &Value) -> Option<String> {
    let mut disks = None;
    find(json, &["b", "a", ""], |(major, minor)| {
        let disks = disks.get_or_insert_with(host_disks);
        major.is_none()
            || disks.iter().any(|disk| Some(disk.0) == major && minor.is_none_or(|minor| minor == disk.1))
    })
}

/// Whether `path` is a block device of the host's file systems.
pub(super) fn is_host_disk(path: &Path) -> bool {
    let Ok(file) = fs::metadata(path) else { return false };
    file.file_type().is_block_device() && host_disks().contains(&numbers_of(file.rdev()))
}

/// The first node or rule of one of the `kinds` whose numbers are wanted, as text. A rule for every device is
/// not looked for here: such a container is privileged.
fn find(json: &Value, kinds: &[&str], mut is_wanted: impl FnMut(DeviceNumbers) -> bool) -> Option<String> {
    let mut of = |entry: &&Value| kinds.contains(&text(entry, "type")) && is_wanted(device_numbers(entry));
    if let Some(node) = entries(json, "/linux/devices").find(&mut of) {
        return Some(format!("device {}", text(node, "path").escape_debug()));
    }
    let mut rules = entries(json, "/linux/resources/devices").filter(|rule| lets_use(rule));
    rules.find(&mut of).map(told)
}

fn told(rule: &Value) -> String {
    let kind = rule.get("type").and_then(Value::as_str).unwrap_or("a");
    format!("device rule {} {}", kind.escape_debug(), numbers_text(device_numbers(rule)))
}

/// The block devices under the host's mounts: the mounted ones, and the disks that they are parts of or lie
/// on.
fn host_disks() -> BTreeSet<(u64, u64)> {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mut found = BTreeSet::new();
    for line in table.lines() {
        // A btrfs shows a number that belongs to no device; its source is the device.
        let source = line.split_once(" - ").and_then(|(_, rest)| rest.split(' ').nth(1));
        let mounted = line.split(' ').nth(2).and_then(parsed);
        let behind = source.and_then(|source| fs::metadata(source).ok()).map(|file| numbers_of(file.rdev()));
        mounted.into_iter().chain(behind).for_each(|number| add(number, &mut found));
    }
    found
}

/// Adds a block device, and what it is a part of (a partition's disk) or lies on (`slaves`: LVM, RAID,
/// dm-crypt).
fn add(number: (u64, u64), found: &mut BTreeSet<(u64, u64)>) {
    let Ok(folder) = fs::canonicalize(format!("/sys/dev/block/{}:{}", number.0, number.1)) else { return };
    if !found.insert(number) {
        return;
    }
    let slaves =
        fs::read_dir(folder.join("slaves")).into_iter().flatten().flatten().map(|entry| entry.path());
    let below: Vec<PathBuf> = slaves.chain(folder.parent().map(Path::to_path_buf)).collect();
    for device in below {
        let number = fs::read_to_string(device.join("dev")).ok().and_then(|text| parsed(text.trim()));
        number.into_iter().for_each(|number| add(number, found));
    }
}

fn parsed(text: &str) -> Option<(u64, u64)> {
    let (major, minor) = text.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

fn numbers_of(device: u64) -> (u64, u64) {
    (major(device), minor(device))
}
