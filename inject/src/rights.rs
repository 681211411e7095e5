//! One table of the rights by which a container could undo its limit. `request.strict` refuses each of them.
//!
//! A right is in the table if it reaches the limit, the GPUs' device rules, a neighbour's files, or the
//! programs of the host that hold them. In a user namespace without the host's root none of them reaches
//! these. docs/rights.md has the same table.

use std::fmt;
use std::path::{Path, PathBuf};

use gpushare_inventory::Node;
use serde_json::Value;

use crate::settings::Programs;

mod devices;
mod mounts;
mod namespaces;

use mounts::{Mounts, Reach};
use namespaces::{has_namespace_of_its_own, is_apart};

/// A right by which a container could undo its limit.
#[derive(Clone, Copy, Debug)]
pub struct Right {
    /// Name of the right in messages and in docs/rights.md.
    pub name: &'static str,
    /// How it undoes a limit.
    pub reason: &'static str,
    /// What the container's owner can change.
    pub remedy: &'static str,
    sign: Sign,
}

/// How a right is recognised in a bundle.
#[derive(Clone, Copy, Debug)]
enum Sign {
    /// A capability, without `CAP_`, in any of the sets.
    Capability(&'static str),
    /// Character devices of these major and minor numbers (`None`: all): a node, or a rule that lets use one.
    Characters(&'static [(u64, Option<u64>)]),
    /// A block device that holds a file system of the host: a node, a rule that lets use it, or a mount of
    /// it.
    HostDisk,
    /// A namespace of this kind that is the host's.
    HostNamespace(&'static str),
    /// A mount that reaches something.
    Mount(Reach),
}

const DROP: &str = "drop that capability";
const READ_ONLY: &str = "mount it read-only, or another folder";
const NO_MOUNT: &str = "leave that mount out";
const NO_DEVICE: &str = "leave that device out";

const fn capability(name: &'static str, plain: &'static str, reason: &'static str) -> Right {
    Right { name, reason, remedy: DROP, sign: Sign::Capability(plain) }
}

const fn mount(name: &'static str, reach: Reach, reason: &'static str, remedy: &'static str) -> Right {
    Right { name, reason, remedy, sign: Sign::Mount(reach) }
}

/// Every right that `request.strict` refuses, in the order in which they are looked for.
pub const RIGHTS: [Right; 21] = [
    capability(
        "CAP_SYS_ADMIN",
        "SYS_ADMIN",
        "it unmounts its limits and its libraries, or mounts others over them",
    ),
    capability(
        "CAP_DAC_READ_SEARCH",
        "DAC_READ_SEARCH",
        "it opens any file of a mounted file system by its handle",
    ),
    capability("CAP_SYS_MODULE", "SYS_MODULE", "it loads code into the host's kernel"),
    capability("CAP_SYS_RAWIO", "SYS_RAWIO", "it reaches ports and memory of the machine"),
    capability("CAP_SYS_BOOT", "SYS_BOOT", "it loads another kernel"),
    capability("CAP_BPF", "BPF", "it loads programs into the host's kernel"),
    capability("CAP_PERFMON", "PERFMON", "it reads memory of the kernel and of every process of the host"),
    Right {
        name: "the machine's memory",
        reason: "it reads and writes the kernel through /dev/mem, /dev/kmem or /dev/port",
        remedy: NO_DEVICE,
        sign: Sign::Characters(&[(1, Some(1)), (1, Some(2)), (1, Some(4))]),
    },
    Right {
        name: "SCSI commands",
        reason: "it writes the host's disks past their file systems",
        remedy: NO_DEVICE,
        sign: Sign::Characters(&[(21, None)]),
    },
    Right {
        name: "a disk of the host",
        reason: "it writes the host's files past their file system",
        remedy: "leave that disk out",
        sign: Sign::HostDisk,
    },
    Right {
        name: "the host's pid namespace",
        reason: "it ends gpushare's meter, and opens the host's files through processes of its users",
        remedy: "give it a pid namespace of its own",
        sign: Sign::HostNamespace("pid"),
    },
    Right {
        name: "the host's mount namespace",
        reason: "its mounts are the host's",
        remedy: "give it a mount namespace of its own",
        sign: Sign::HostNamespace("mount"),
    },
    mount(
        "the state folder",
        Reach::State,
        "it writes every container's limits and the quota store",
        READ_ONLY,
    ),
    mount(
        "gpushare's files",
        Reach::Programs,
        "it changes what runs as root or in every container",
        READ_ONLY,
    ),
    mount(
        "the driver's files",
        Reach::Driver,
        "it changes the libraries that every container loads",
        READ_ONLY,
    ),
    mount(
        "an engine's socket",
        Reach::Socket,
        "who may call an engine or systemd is root on the host",
        NO_MOUNT,
    ),
    mount(
        "the host's /proc",
        Reach::Proc,
        "it sets what the kernel runs, and reaches the host's files",
        NO_MOUNT,
    ),
    mount("the host's /sys", Reach::Sys, "it writes the GPUs' registers and rebinds their driver", READ_ONLY),
    mount("the host's cgroups", Reach::Cgroups, "it moves itself to where no device rules hold", READ_ONLY),
    mount(
        "the host's /dev",
        Reach::Dev,
        "it puts another GPU's node in the place of a neighbour's",
        READ_ONLY,
    ),
    mount(
        "shared propagation",
        Reach::Shared,
        "what is mounted below it appears on the host",
        "use private or slave",
    ),
];

/// A right that a bundle gives.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub(crate) right: &'static Right,
    /// Its place in the bundle: a device or a mount, escaped; empty for the others.
    pub(crate) place: String,
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { right: Right { name, reason, .. }, place } = self;
        let place = if place.is_empty() { String::new() } else { format!(" ({place})") };
        write!(f, "{name}{place} can take its limit away: {reason}")
    }
}

/// Whether what is mounted for the container is mounted for it alone.
pub(crate) fn has_mounts_of_its_own(json: &Value) -> bool {
    is_apart(json) || has_namespace_of_its_own(json, "mount")
}

/// The folders of the driver's files, and the paths of libcuda and libnvidia-ml.
pub(crate) fn driver_places(node: &Node) -> Vec<PathBuf> {
    let files = [node.driver.libcuda(), node.driver.libnvidia_ml()].into_iter().filter_map(Result::ok);
    node.driver.sources().into_iter().chain(files).collect()
}

/// The first right of the table that this config.json gives. `bundle` is the bundle's folder, `driver` are
/// the places of the driver's files.
pub(crate) fn right_over_limit(
    json: &Value,
    bundle: &Path,
    programs: &Programs,
    driver: &[PathBuf],
) -> Option<Found> {
    if is_apart(json) {
        return None;
    }
    let mounts = Mounts::of(json, bundle, programs, driver);
    RIGHTS.iter().find_map(|right| {
        let place = right.sign.place(json, &mounts)?;
        Some(Found { right, place })
    })
}

impl Sign {
    /// The place where the bundle gives it; `None` if it does not.
    fn place(self, json: &Value, mounts: &Mounts) -> Option<String> {
        match self {
            Self::Capability(name) => has_capability(json, name).then(String::new),
            Self::Characters(numbers) => devices::character(json, numbers),
            Self::HostDisk => devices::disk(json).or_else(|| mounts.of_disk()),
            Self::HostNamespace(kind) => (!has_namespace_of_its_own(json, kind)).then(String::new),
            Self::Mount(reach) => mounts.reaching(reach),
        }
    }
}

/// Whether any set holds the capability: a process can raise what is inheritable, and runtimes add what is
/// ambient. Upper and lower case are the same, as runtimes take them.
fn has_capability(json: &Value, wanted: &str) -> bool {
    let sets = json.pointer("/process/capabilities").and_then(Value::as_object).into_iter().flatten();
    let mut held = sets.filter_map(|(_, set)| set.as_array()).flatten().filter_map(Value::as_str);
    held.any(|name| name.to_ascii_uppercase().trim_start_matches("CAP_") == wanted)
}

#[cfg(test)]
mod tests;
