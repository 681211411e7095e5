//! Tells which namespaces a container has for itself.

use serde_json::Value;

use crate::host_files::is_same_file;
use crate::parts::{entries, number, text};

/// Whether the container is in a user namespace without the host's root. Its capabilities then reach nothing
/// outside, and files of the host's root are not its own.
pub(super) fn is_apart(json: &Value) -> bool {
    has_namespace_of_its_own(json, "user") && !maps_hosts_root(json)
}

fn maps_hosts_root(json: &Value) -> bool {
    let mut first = entries(json, "/linux/uidMappings").map(|mapping| number(mapping, "hostID"));
    first.any(|host| host.is_none_or(|host| host == 0))
}

/// Whether the bundle has a namespace of this kind, and does not join the host's. A path that cannot be
/// looked at cannot be joined either: the low-level runtime fails.
pub(super) fn has_namespace_of_its_own(json: &Value, kind: &str) -> bool {
    let mut of_kind = entries(json, "/linux/namespaces").filter(|one| text(one, "type") == kind).peekable();
    of_kind.peek().is_some() && of_kind.all(|one| !is_hosts(text(one, "path"), kind))
}

fn is_hosts(path: &str, kind: &str) -> bool {
    let name = if kind == "mount" { "mnt" } else { kind };
    !path.is_empty() && is_same_file(path.as_ref(), format!("/proc/self/ns/{name}").as_ref())
}
