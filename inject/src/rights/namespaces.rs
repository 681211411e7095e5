//! Tells which namespaces a container has for itself.

use std::fs;
use std::os::unix::fs::MetadataExt;

use serde_json::Value;

/// Whether the container is in a user namespace without the host's root. Its capabilities then reach nothing
/// outside, and files of the host's root are not its own.
pub(super) fn is_apart(json: &Value) -> bool {
    has_namespace_of_its_own(json, "user") && !maps_hosts_root(json)
}

fn maps_hosts_root(json: &Value) -> bool {
    let mappings = json.pointer("/linux/uidMappings").and_then(Value::as_array).into_iter().flatten();
    let mut first = mappings.map(|mapping| mapping.get("hostID").and_then(Value::as_u64));
    first.any(|host| host.is_none_or(|host| host == 0))
}

/// Whether the bundle has a namespace of this kind, and does not join the host's. A path that cannot be
/// looked at cannot be joined either: the low-level runtime fails.
pub(super) fn has_namespace_of_its_own(json: &Value, kind: &str) -> bool {
    let namespaces = json.pointer("/linux/namespaces").and_then(Value::as_array).into_iter().flatten();
    let mut of_kind =
        namespaces.filter(|one| one.get("type").and_then(Value::as_str) == Some(kind)).peekable();
    let path = |one: &Value| one.get("path").and_then(Value::as_str).map(str::to_owned);
    of_kind.peek().is_some() && of_kind.filter_map(path).all(|path| !is_hosts(&path, kind))
}

fn is_hosts(path: &str, kind: &str) -> bool {
    let identity = |path: &str| fs::metadata(path).ok().map(|file| (file.dev(), file.ino()));
    let name = if kind == "mount" { "mnt" } else { kind };
    !path.is_empty()
        && identity(path).is_some_and(|joined| Some(joined) == identity(&format!("/proc/self/ns/{name}")))
}
