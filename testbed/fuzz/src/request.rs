//! The reader of requests: annotations and environment, which anybody may have written.

use std::collections::BTreeMap;

use gpushare_inventory::{DeviceMemory, DeviceNode, Gpu, GpuUuid};
use gpushare_request::{Container, Cores, MemoryRequest, NvidiaPolicy, Policy, Request, read};

/// Reads a container. The lines `@NAME=VALUE` of `data` are its annotations, all others its environment.
pub fn request(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let mut annotations = BTreeMap::new();
    let mut env = Vec::new();
    for line in text.split('\n') {
        match line.strip_prefix('@').and_then(|line| line.split_once('=')) {
            Some((name, value)) => drop(annotations.insert(name.to_owned(), value.to_owned())),
            None => env.push(line.to_owned()),
        }
    }
    let trusted = annotations.keys().any(|key| key.starts_with("alloc.gpushare.io/"));
    let annotated = !annotations.is_empty();
    let container = Container::new(annotations, env);
    for policy in policies() {
        match read(&container, &policy, &gpus()) {
            Ok(None) => {}
            Ok(Some(request)) => {
                assert!(!container.is_sandbox(), "a sandbox passes unread");
                assert!(
                    trusted || !policy.strict || request.dialects.contains(&"tke-vcuda"),
                    "granted by a channel that nobody trusts: {policy:?}"
                );
                let variable = !policy.ignore_env || policy.nvidia != NvidiaPolicy::Ignore;
                assert!(annotated || variable, "granted by what is not read: {policy:?}");
                bounded(&request, &policy);
            }
            Err(error) => {
                let line = gpushare_inject::one_line(&error);
                assert!(line.len() < 2048 && !line.contains(char::is_control), "{line:?}");
            }
        }
    }
}

/// Three GPUs whose minor numbers differ from their indexes.
fn gpus() -> Vec<Gpu> {
    [(0, 1), (1, 0), (2, 2)].map(|(index, minor)| gpu(index, minor)).to_vec()
}

fn gpu(index: u8, minor: u32) -> Gpu {
    let node = DeviceNode {
        path: format!("/dev/nvidia{minor}").into(),
        host_path: format!("/dev/nvidia{minor}").into(),
        major: 195,
        minor,
        mode: 0o666,
        uid: 0,
        gid: 0,
    };
    let uuid = GpuUuid::from_bytes([index; 16]);
    let memory = Some(DeviceMemory::from_bytes(15360 << 20));
    Gpu {
        index: index.into(),
        uuid,
        minor,
        model: "NVIDIA T4".to_owned(),
        memory,
        node,
        place: gpushare_inventory::Place::default(),
        instance: None,
    }
}

fn policies() -> [Policy; 4] {
    let nothing = Policy { ignore_env: true, nvidia: NvidiaPolicy::Ignore, ..Policy::default() };
    let refuse = Policy { nvidia: NvidiaPolicy::Refuse, ..Policy::default() };
    [Policy::default(), Policy { strict: true, ..Policy::default() }, nothing, refuse]
}

fn bounded(request: &Request, policy: &Policy) {
    match request.memory {
        MemoryRequest::Bytes(memory) => assert!(memory.bytes() >= 1 << 20, "{request:?}"),
        MemoryRequest::Percent(percent) => assert!((1..=100).contains(&percent), "{request:?}"),
        // Only a container that names no size has this, and only without a default size from the
        // administrator.
        MemoryRequest::Rest => assert!(policy.default_memory.is_none(), "{request:?}"),
    }
    assert!(request.cores.map(Cores::percent).is_none_or(|cores| (1..=100).contains(&cores)), "{request:?}");
    assert!(request.priority.level() <= 9, "{request:?}");
}
