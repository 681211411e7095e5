//! Finds the pod of a container in what its engine wrote into the bundle.

use std::path::Path;

use gpushare_quota::{PidNamespace, Pod, PodContainer};
use gpushare_request::Container;
use serde_json::Value;

/// What the cluster calls `container`; `None` where the engine does not say it.
pub fn name(container: &Container) -> Option<PodContainer> {
    let (uid, name) = container.in_cluster()?;
    PodContainer::new(container.pod_namespace()?, container.pod_name()?, uid, name)
}

/// The pod of `container`, whose config.json is `json`. `None` where the engine names no sandbox.
pub fn of(container: &Container, json: &Value) -> Option<Pod> {
    let sandbox = container.sandbox()?.to_owned();
    Some(Pod { sandbox, joins: joins(json) })
}

/// The pid namespace that the container joins by path. The last entry counts, as in low-level runtimes.
fn joins(json: &Value) -> Option<PidNamespace> {
    let namespaces = json.pointer("/linux/namespaces")?.as_array()?;
    let pid = namespaces.iter().rfind(|one| one.get("type").is_some_and(|kind| kind == "pid"))?;
    PidNamespace::at(Path::new(pid.get("path")?.as_str()?))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_container_joins_the_pid_namespace_that_its_bundle_names_by_path() {
        let here = PidNamespace::at(Path::new("/proc/self/ns/pid"));
        assert!(here.is_some());
        for (namespaces, want) in [
            (json!([{"type": "pid", "path": "/proc/self/ns/pid"}]), here),
            (json!([{"type": "pid"}]), None),
            (json!([{"type": "ipc", "path": "/proc/self/ns/pid"}]), None),
            (json!([{"type": "pid", "path": "/nowhere"}]), None),
            (json!([{"type": "pid"}, {"type": "pid", "path": "/proc/self/ns/pid"}]), here),
            (json!("pid"), None),
        ] {
            assert_eq!(joins(&json!({"linux": {"namespaces": namespaces}})), want, "{namespaces}");
        }
    }
}
