//! Finds what an engine calls a container: in the bundle, or in the engine's own files beside it. Whatever is
//! not found or not readable is left out, since names are for people alone.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use gpushare_quota::Called;
use gpushare_request::{Container, Writer};
use nix::fcntl::OFlag;
use serde_json::Value;

use crate::pod;

/// The label by which compose marks its containers, docker's and podman's alike.
const PROJECT: &str = "com.docker.compose.project";
/// Files in a container's own folder of docker, which docker mounts into it.
const DOCKER_MOUNTS: [&str; 3] = ["/etc/hostname", "/etc/hosts", "/etc/resolv.conf"];
/// More than docker or podman write of a container.
const LARGEST: u64 = 16 << 20;

/// What the engine calls the container `id`, whose bundle is the folder `bundle`.
pub fn of(container: &Container, id: &str, bundle: &Path) -> Called {
    let annotation = |key: &str| container.annotations().get(key).map(String::as_str);
    match container.writer() {
        Writer::Containerd => Called::new(None, annotation("io.kubernetes.cri.image-name"), None),
        Writer::CriO => {
            let keys = ["io.kubernetes.cri-o.UserRequestedImage", "io.kubernetes.cri-o.ImageName"];
            Called::new(None, keys.into_iter().find_map(annotation), None)
        }
        Writer::Podman => podmans(id, bundle).unwrap_or_default(),
        Writer::Other => dockers(container, id).unwrap_or_else(|| {
            let project = annotation("nerdctl/compose-project").or_else(|| annotation(PROJECT));
            Called::new(annotation("nerdctl/name"), annotation("nerdctl/image"), project)
        }),
    }
}

/// What people call the container `id`, whose bundle is the folder `bundle`: in a cluster
/// `NAMESPACE/POD/CONTAINER`. `None` where nobody gave it a name.
pub fn title(container: &Container, id: &str, bundle: &Path) -> Option<String> {
    let of_pod = pod::name(container).map(|name| name.to_string());
    of_pod.or_else(|| of(container, id, bundle).name)
}

/// docker keeps a container's state beside the files that it mounts: `containers/ID/config.v2.json`.
fn dockers(container: &Container, id: &str) -> Option<Called> {
    let sources = container.mounts().iter().filter(|mount| DOCKER_MOUNTS.contains(&&*mount.target));
    let mut folders = sources.filter_map(|mount| Path::new(&mount.source).parent());
    let own = folders.find(|folder| folder.ends_with(Path::new("containers").join(id)))?;
    let state = json(own.join("config.v2.json"))?;
    let image = state.pointer("/Config/Image").and_then(Value::as_str);
    let project = state.pointer("/Config/Labels").and_then(|labels| labels[PROJECT].as_str());
    Some(Called::new(state["Name"].as_str().map(|name| name.trim_start_matches('/')), image, project))
}

/// podman's bundle is the folder `ID/userdata` beside its storage's list of containers. Those that podman
/// removes by itself (`--rm`) have a list of their own.
fn podmans(id: &str, bundle: &Path) -> Option<Called> {
    let storage = bundle.parent()?.parent()?;
    let entry = ["containers.json", "volatile-containers.json"].into_iter().find_map(|list| {
        let Value::Array(entries) = json(storage.join(list))? else { return None };
        entries.into_iter().find(|entry| entry["id"] == id)
    })?;
    let more: Value = entry["metadata"].as_str().and_then(|text| serde_json::from_str(text).ok())?;
    Some(Called::new(entry["names"][0].as_str(), more["image-name"].as_str(), None))
}

/// The JSON of a regular file that is no link; opening a pipe in its place must not hang the engine.
fn json(path: PathBuf) -> Option<Value> {
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits()).open(path).ok()?;
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    let mut text = Vec::new();
    file.take(LARGEST).read_to_end(&mut text).ok()?;
    serde_json::from_slice(&text).ok()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;

    fn container(value: &Value) -> Container {
        Container::from_json(value)
    }

    #[test]
    fn docker_tells_name_image_and_project_beside_the_files_that_it_mounts() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("containers/c1");
        fs::create_dir_all(&folder).unwrap();
        let state = json!({"Name": "/web", "Config": {"Image": "torch:2", "Labels": {PROJECT: "shop"}}});
        fs::write(folder.join("config.v2.json"), state.to_string()).unwrap();
        let mounted = |source: &Path| {
            let mounts = json!([{"destination": "/etc/hosts", "source": source.join("hosts")}]);
            of(&container(&json!({ "mounts": mounts })), "c1", Path::new("/nowhere"))
        };
        assert_eq!(mounted(&folder), Called::new(Some("web"), Some("torch:2"), Some("shop")));
        for other in [root.path().join("containers/c2"), root.path().join("c1")] {
            assert!(mounted(&other).is_nothing(), "{other:?}");
        }
        // What a bundle can name is not followed out of its folder.
        fs::rename(folder.join("config.v2.json"), root.path().join("elsewhere")).unwrap();
        std::os::unix::fs::symlink(root.path().join("elsewhere"), folder.join("config.v2.json")).unwrap();
        assert!(mounted(&folder).is_nothing());
        fs::remove_file(folder.join("config.v2.json")).unwrap();
        nix::unistd::mkfifo(&folder.join("config.v2.json"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(mounted(&folder).is_nothing());
    }

    #[test]
    fn podman_tells_it_in_its_storage() {
        let root = tempfile::tempdir().unwrap();
        let storage = root.path().join("overlay-containers");
        fs::create_dir_all(&storage).unwrap();
        let entry = |id: &str, name: &str| json!({"id": id, "names": [name], "metadata": json!({"image-name": "x:1"}).to_string()});
        fs::write(storage.join("containers.json"), json!([entry("a", "one")]).to_string()).unwrap();
        fs::write(storage.join("volatile-containers.json"), json!([entry("b", "two")]).to_string()).unwrap();
        let podmans = container(&json!({"annotations": {"io.container.manager": "libpod"}}));
        let named = |id: &str| of(&podmans, id, &storage.join(id).join("userdata")).name;
        assert_eq!(["a", "b", "c"].map(named), [Some("one".to_owned()), Some("two".to_owned()), None]);
    }

    #[test]
    fn others_tell_it_in_annotations() {
        for (annotations, want) in [
            (json!({"nerdctl/name": "web"}), Called::new(Some("web"), None, None)),
            (
                json!({"io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.image-name": "a/b:1"}),
                Called::new(None, Some("a/b:1"), None),
            ),
            (json!({}), Called::default()),
        ] {
            let found = of(&container(&json!({ "annotations": annotations })), "c", Path::new("/nowhere"));
            assert_eq!(found, want, "{annotations}");
        }
    }
}
