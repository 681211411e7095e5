//! Other systems' interception libraries in a bundle. Two of them, or one and ours, hook the same calls and count twice.

use std::path::Path;

use crate::container::{Container, Mount};
use crate::error::shortened;

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
/// Why an administrator's stand-down does not count.
pub(crate) const UNPROVED: &str = "what looks like another system's interception library is not proved to hold this limit \
     (owner's mounts, its own dialect alone): it is taken out, and gpushare holds the limit";
/// The dynamic loader's list; items are split at colons and blanks.
const PRELOAD: &str = "LD_PRELOAD";

/// A library that limits memory by itself, and what proves that its owner brought it.
struct Owner {
    /// The dialect that states its limits.
    dialect: &'static str,
    /// The variables that it reads the memory limit from; some end in a position.
    limit: &'static str,
    /// Where it is mounted.
    library: &'static str,
    /// The owner's folder on the host.
    folder: &'static str,
}

/// nvshare's is not among them: it limits no memory. Nor is gpu-manager's, whose folder does not show the library.
const OWNERS: [Owner; 3] = [
    Owner {
        dialect: "hami",
        limit: "CUDA_DEVICE_MEMORY_LIMIT",
        library: "/usr/local/vgpu/libvgpu.so",
        folder: "/usr/local/vgpu",
    },
    Owner {
        dialect: "koordinator",
        limit: "CUDA_DEVICE_MEMORY_LIMIT",
        library: "/usr/local/vgpu/libvgpu.so",
        folder: "/usr/local/vgpu",
    },
    Owner {
        dialect: "vgpu-manager",
        limit: "CUDA_MEM_LIMIT",
        library: "/etc/vgpu-manager/driver/libvgpu-control.so",
        folder: "/etc/vgpu-manager",
    },
];

impl Owner {
    /// Whether the owner's library is loaded into every program, and is told a limit.
    fn holds(&self, container: &Container) -> bool {
        let last = container.named(PRELOAD).next_back();
        let in_variable =
            last.is_some_and(|(_, list)| list.split([':', ' ']).any(|item| item == self.library));
        let is_loaded = in_variable || self.mounts(PRELOAD_FILE, container);
        // 0 is no limit to it, and the plugins write variables without a value.
        let mut limits =
            container.env().filter(|(key, value)| key.starts_with(self.limit) && !value.is_empty());
        let states = limits.next().is_some_and(is_limit) && limits.all(is_limit);
        self.mounts(self.library, container) && is_loaded && states
    }

    /// Whether the owner's file is at `target`, and no later mount, such as a pod's volume, lies over it.
    fn mounts(&self, target: &str, container: &Container) -> bool {
        let over = |mount: &&Mount| {
            // A target that is not plain may be any.
            let plain = mount.target.starts_with('/') && !mount.target.contains("..");
            !plain || Path::new(target).starts_with(&mount.target)
        };
        let top = container.mounts().iter().rev().find(over);
        top.is_some_and(|mount| {
            mount.target == target && !mount.source.contains("..") && is_below(&mount.source, self.folder)
        })
    }
}

fn is_limit((_, limit): (&str, &str)) -> bool {
    limit.bytes().any(|byte| matches!(byte, b'1'..=b'9'))
}

impl Interceptor {
    /// Its mounts and its items in the loader's list.
    pub fn count(&self) -> usize {
        self.mounts.len() + self.preloads.len()
    }

    /// The first of them, cut to what a line can hold.
    pub fn first(&self) -> Option<String> {
        self.mounts.iter().chain(&self.preloads).next().map(|what| shortened(what))
    }

    /// What becomes of it: `policy`, but that a library is left the limit only where its owner's mounts and the one dialect
    /// that the bundle speaks prove whose it is. `alone` is whether nothing else states the limit, which it would not hold.
    pub(crate) fn ruled(
        policy: InterceptorPolicy,
        container: &Container,
        dialects: &[&'static str],
        alone: bool,
    ) -> InterceptorPolicy {
        let holds =
            |dialect: &str| OWNERS.iter().any(|owner| owner.dialect == dialect && owner.holds(container));
        match (policy, dialects) {
            (InterceptorPolicy::StandDown, [dialect]) if alone && holds(dialect) => policy,
            _ => InterceptorPolicy::Replace,
        }
    }

    /// What of one is in the bundle; `None` when there is nothing.
    pub(crate) fn of(container: &Container) -> Option<Self> {
        let targets = container.mounts().iter().map(|mount| mount.target.as_str());
        let mounts: Vec<String> = targets.filter(|target| is_target(target)).map(str::to_owned).collect();
        let lists = container.named(PRELOAD).map(|(_, value)| value);
        let items = lists.flat_map(|list| list.split([':', ' '])).filter(|item| is_library(item));
        let preloads: Vec<String> = items.map(str::to_owned).collect();
        let found = !mounts.is_empty() || !preloads.is_empty();
        found.then_some(Self { mounts, preloads })
    }
}

fn is_target(target: &str) -> bool {
    target == PRELOAD_FILE || is_library(target) || FOLDERS.iter().any(|folder| is_below(target, folder))
}

fn is_below(path: &str, folder: &str) -> bool {
    path.strip_prefix(folder).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
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
            }
        }
        for library in ["libvgpu.so", "libvgpu-control.so", "libcuda-control.so", "libnvshare.so"] {
            assert!(found(&format!("/x/{library}")).is_some(), "{library}");
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
        assert_eq!((found.count(), found.first().as_deref()), (5, Some("/usr/local/vgpu/libvgpu.so")));
        let long = Interceptor { mounts: vec!["/x".repeat(1 << 20)], preloads: Vec::new() };
        assert!(long.first().is_some_and(|what| what.len() < 100));
        assert_eq!(
            Interceptor::of(&Container::from_json(&json!({"process": {"env": ["LD_PRELOAD=/x.so"]}}))),
            None
        );
    }

    #[test]
    fn a_library_is_left_the_limit_only_where_its_owner_is_proved() {
        let library = ["/usr/local/vgpu/libvgpu.so.v2", "/usr/local/vgpu/libvgpu.so"];
        let file = ["/usr/local/vgpu/ld.so.preload", "/etc/ld.so.preload"];
        let volume = "/var/lib/kubelet/pods/1/volumes/kubernetes.io~empty-dir/v";
        let limit = "CUDA_DEVICE_MEMORY_LIMIT_0=1g";
        let preload = "LD_PRELOAD=/usr/local/vgpu/libvgpu.so";
        for (dialects, mounts, env, alone, stays) in [
            (&["hami"][..], &[library, file][..], &[limit][..], true, true),
            (&["hami"], &[library], &[limit, preload], true, true),
            (&["koordinator"], &[library], &[limit, preload], true, true),
            (
                &["hami"],
                &[["/usr/local/vgpu/containers/1", "/usr/local/vgpu"], library, file],
                &[limit],
                true,
                true,
            ),
            (&["hami"], &[library, file], &[limit], false, false),
            (&["hami"], &[library, file], &[], true, false),
            (&["hami"], &[library], &[limit], true, false),
            (&["hami"], &[library], &[limit, preload, "LD_PRELOAD="], true, false),
            (&["hami"], &[[volume, "/usr/local/vgpu/libvgpu.so"], file], &[limit], true, false),
            (
                &["hami"],
                &[["/usr/local/vgpu/../../x", "/usr/local/vgpu/libvgpu.so"], file],
                &[limit],
                true,
                false,
            ),
            (&["hami"], &[["/usr/local/vgpu/libvgpu.so", "/data/libvgpu.so"], file], &[limit], true, false),
            (&["hami"], &[library, [volume, "/etc/ld.so.preload"]], &[limit], true, false),
            (&["hami"], &[library, file, [volume, "/usr/local/vgpu"]], &[limit], true, false),
            (&["hami"], &[library, file, [volume, "/usr/local/vgpu/"]], &[limit], true, false),
            (&["hami"], &[library, file, [volume, "usr/local/vgpu"]], &[limit], true, false),
            (&["hami"], &[library, file], &[limit, "CUDA_DEVICE_MEMORY_LIMIT_1=0"], true, false),
            (&["hami"], &[library, file], &[limit, "CUDA_DEVICE_MEMORY_LIMIT_1="], true, true),
            (&["hami"], &[library, file, [volume, "/data/../usr/local/vgpu"]], &[limit], true, false),
            (&["hami", "kai"], &[library, file], &[limit], true, false),
            (&["aliyun"], &[library, file], &[limit], true, false),
            (&["nvshare"], &[["/usr/lib/nvshare/libnvshare.so"; 2]], &[limit], true, false),
        ] {
            let list: Vec<_> = mounts.iter().map(|[s, t]| json!({"source": s, "destination": t})).collect();
            let container = Container::from_json(&json!({"mounts": list, "process": {"env": env}}));
            let ruled = Interceptor::ruled(InterceptorPolicy::StandDown, &container, dialects, alone);
            assert_eq!(ruled == InterceptorPolicy::StandDown, stays, "{dialects:?} {mounts:?} {env:?}");
        }
    }
}
