//! Other systems' interception libraries in a bundle. Two of them, or one and ours, hook the same calls and count twice.

use crate::container::Container;

/// What an administrator wants where another system's library is in the bundle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InterceptorPolicy {
    /// It is taken out, and gpushare's holds the limit.
    #[default]
    Replace,
    /// It stays and holds the limit; gpushare only keeps the books.
    StandDown,
}

/// Another system's library, as far as a bundle shows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Interceptor {
    /// Targets of its mounts.
    pub mounts: Vec<String>,
    /// Its items in `LD_PRELOAD`.
    pub preloads: Vec<String>,
}

/// Targets that their owners mount themselves at, or below: gpu-manager's, vgpu-manager's, KAI's, nvshare's.
const FOLDERS: [&str; 6] = [
    "/etc/vcuda",
    "/usr/local/nvidia",
    "/etc/vgpu-manager",
    "/opt/gpu-fractioning/lib",
    "/usr/lib/nvshare",
    "/var/run/nvshare",
];
/// File names of their libraries: HAMi's, Volcano's and Koordinator's, vgpu-manager's, gpu-manager's, nvshare's.
const LIBRARIES: [&str; 4] = ["libvgpu.so", "libvgpu-control.so", "libcuda-control.so", "libnvshare.so"];
/// HAMi's plugin mounts a file here that names its library.
const PRELOAD_FILE: &str = "/etc/ld.so.preload";
/// The dynamic loader's list; items are split at colons and blanks.
const PRELOAD: &str = "LD_PRELOAD";

impl Interceptor {
    /// Whether a library itself is mounted, which a variable of an image cannot imitate.
    pub fn is_mounted(&self) -> bool {
        self.mounts.iter().any(|target| is_library(target))
    }

    /// What of one is in the bundle; `None` when there is nothing.
    pub(crate) fn of(container: &Container) -> Option<Self> {
        let targets = container.mounts().iter().map(|mount| mount.target.as_str());
        let mounts: Vec<String> = targets.filter(|target| is_target(target)).map(str::to_owned).collect();
        let lists = container.env().filter(|(key, _)| *key == PRELOAD).map(|(_, value)| value);
        let items = lists.flat_map(|list| list.split([':', ' '])).filter(|item| is_library(item));
        let preloads: Vec<String> = items.map(str::to_owned).collect();
        let found = !mounts.is_empty() || !preloads.is_empty();
        found.then_some(Self { mounts, preloads })
    }
}

fn is_target(target: &str) -> bool {
    let is_below = |folder: &&str| {
        target.strip_prefix(*folder).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    target == PRELOAD_FILE || is_library(target) || FOLDERS.iter().any(is_below)
}

fn is_library(path: &str) -> bool {
    path.rsplit('/').next().is_some_and(|name| LIBRARIES.contains(&name))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_systems_folders_and_libraries_are_known() {
        let found = |destination: &str| {
            Interceptor::of(&Container::from_json(&json!({"mounts": [{"destination": destination}]})))
        };
        for folder in [
            "/etc/vcuda",
            "/usr/local/nvidia",
            "/etc/vgpu-manager",
            "/opt/gpu-fractioning/lib",
            "/usr/lib/nvshare",
            "/var/run/nvshare",
        ] {
            for target in [folder.to_owned(), format!("{folder}/below")] {
                let found = found(&target);
                assert_eq!(found.as_ref().map(|found| found.mounts.as_slice()), Some(&[target][..]));
                assert!(!found.unwrap().is_mounted(), "{folder}: the folder is not the library");
            }
        }
        for library in ["libvgpu.so", "libvgpu-control.so", "libcuda-control.so", "libnvshare.so"] {
            assert!(found(&format!("/x/{library}")).unwrap().is_mounted(), "{library}");
        }
    }

    #[test]
    fn a_library_is_known_by_its_mounts_and_by_the_loaders_list() {
        let container = Container::from_json(&json!({
            "mounts": [
                {"destination": "/usr/local/vgpu/libvgpu.so"},
                {"destination": "/etc/ld.so.preload"},
                {"destination": "/etc/vcuda"},
                {"destination": "/etc/vcudas"},
                {"destination": "/data/libvgpu.so.txt"},
            ],
            "process": {"env": ["LD_PRELOAD=/lib/mine.so:/usr/local/vgpu/libvgpu.so /x/libnvshare.so", "PATH=/usr/lib/nvshare"]},
        }));
        let found = Interceptor::of(&container).unwrap();
        assert_eq!(found.mounts, ["/usr/local/vgpu/libvgpu.so", "/etc/ld.so.preload", "/etc/vcuda"]);
        assert_eq!(found.preloads, ["/usr/local/vgpu/libvgpu.so", "/x/libnvshare.so"]);
        assert_eq!(
            Interceptor::of(&Container::from_json(&json!({"process": {"env": ["LD_PRELOAD=/x.so"]}}))),
            None
        );
    }
}
