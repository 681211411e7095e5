//! Other systems' interception libraries in a bundle. Two of them, or one and ours, hook the same calls and count twice.
//!
//! What a library looks like stands in its dialect's file.

use std::path::Path;

use crate::container::Container;
use crate::error::shortened;

/// One system's library, as a bundle shows it.
#[derive(Clone, Copy, Debug)]
pub struct Library {
    /// Targets that its owner mounts itself at, or below.
    pub folders: &'static [&'static str],
    /// File names of the library.
    pub files: &'static [&'static str],
    /// What proves that its owner brought it, where it limits memory by itself.
    pub owner: Option<Owner>,
}

/// What proves a library that limits memory by itself.
#[derive(Clone, Copy, Debug)]
pub struct Owner {
    /// The variables that it reads the memory limit from; some end in a position.
    pub limit: &'static str,
    /// Where it is mounted.
    pub library: &'static str,
    /// The owner's folder on the host.
    pub folder: &'static str,
}

/// Another system's library, as far as a bundle shows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Interceptor {
    /// Targets of its mounts.
    pub mounts: Vec<String>,
    /// Its items in `LD_PRELOAD`.
    pub preloads: Vec<String>,
}

/// A file that names libraries for every program; HAMi's plugin mounts one.
const PRELOAD_FILE: &str = "/etc/ld.so.preload";
/// The dynamic loader's list; items are split at colons and blanks.
const PRELOAD: &str = "LD_PRELOAD";
/// Why an administrator's stand-down does not count.
pub const UNPROVED: &str = "what looks like another system's interception library is not proved to hold this limit \
     (owner's mounts, its own dialect alone): it is taken out, and gpushare holds the limit";

impl Owner {
    /// Whether the owner's library is loaded into every program, and is told a limit.
    pub fn holds(&self, container: &Container) -> bool {
        let last = container.named(PRELOAD).next_back();
        let in_variable = last.is_some_and(|(_, list)| items(list).any(|item| item == self.library));
        let is_loaded = in_variable || self.mounts(PRELOAD_FILE, container);
        // 0 is no limit to it, and the plugins write variables without a value.
        let mut limits =
            container.env().filter(|(key, value)| key.starts_with(self.limit) && !value.is_empty());
        let states = limits.next().is_some_and(is_limit) && limits.all(is_limit);
        self.mounts(self.library, container) && is_loaded && states
    }

    /// Whether the owner's file is at `target`, and no later mount, such as a pod's volume, lies over it.
    fn mounts(&self, target: &str, container: &Container) -> bool {
        let over = |target_of_mount: &str| {
            // A target that is not plain may be any.
            let plain = target_of_mount.starts_with('/') && !target_of_mount.contains("..");
            !plain || Path::new(target).starts_with(target_of_mount)
        };
        let top = container.mounts().iter().rev().find(|mount| over(&mount.target));
        top.is_some_and(|mount| {
            mount.target == target && !mount.source.contains("..") && is_below(&mount.source, self.folder)
        })
    }
}

fn is_limit((_, limit): (&str, &str)) -> bool {
    limit.bytes().any(|byte| matches!(byte, b'1'..=b'9'))
}

fn items(list: &str) -> impl Iterator<Item = &str> {
    list.split([':', ' '])
}

impl Library {
    fn is_at(&self, target: &str) -> bool {
        self.is_file(target) || self.folders.iter().any(|folder| is_below(target, folder))
    }

    fn is_file(&self, path: &str) -> bool {
        path.rsplit('/').next().is_some_and(|name| self.files.contains(&name))
    }
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

    /// What of the `known` libraries is in the bundle; `None` when there is nothing.
    pub fn of(container: &Container, known: &[Library]) -> Option<Self> {
        let is_known = |target: &str| known.iter().any(|library| library.is_at(target));
        let targets = container.mounts().iter().map(|mount| mount.target.as_str());
        let mounts = targets.filter(|target| *target == PRELOAD_FILE || is_known(target));
        let lists = container.named(PRELOAD).map(|(_, value)| value);
        let preloads = lists.flat_map(items).filter(|item| known.iter().any(|library| library.is_file(item)));
        let found = Self {
            mounts: mounts.map(str::to_owned).collect(),
            preloads: preloads.map(str::to_owned).collect(),
        };
        (found.count() > 0).then_some(found)
    }
}

fn is_below(path: &str, folder: &str) -> bool {
    path.strip_prefix(folder).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const OWNER: Owner =
        Owner { limit: "LIMIT", library: "/usr/local/vgpu/libvgpu.so", folder: "/usr/local/vgpu" };
    const KNOWN: [Library; 1] =
        [Library { folders: &["/etc/vcuda"], files: &["libvgpu.so", "libnvshare.so"], owner: Some(OWNER) }];

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
        let found = Interceptor::of(&container, &KNOWN).unwrap();
        assert_eq!(found.mounts, ["/usr/local/vgpu/libvgpu.so", "/etc/ld.so.preload", "/etc/vcuda"]);
        assert_eq!(found.preloads, ["/usr/local/vgpu/libvgpu.so", "/x/libnvshare.so"]);
        assert_eq!((found.count(), found.first().as_deref()), (5, Some("/usr/local/vgpu/libvgpu.so")));
        let long = Interceptor { mounts: vec!["/x".repeat(1 << 20)], preloads: Vec::new() };
        assert!(long.first().is_some_and(|what| what.len() < 100));
        assert_eq!(
            Interceptor::of(
                &Container::from_json(&json!({"process": {"env": ["LD_PRELOAD=/x.so"]}})),
                &KNOWN
            ),
            None
        );
    }

    #[test]
    fn a_library_is_left_the_limit_only_where_its_owner_is_proved() {
        let library = ["/usr/local/vgpu/libvgpu.so.v2", "/usr/local/vgpu/libvgpu.so"];
        let file = ["/usr/local/vgpu/ld.so.preload", "/etc/ld.so.preload"];
        let volume = "/var/lib/kubelet/pods/1/volumes/kubernetes.io~empty-dir/v";
        let limit = "LIMIT_0=1g";
        let preload = "LD_PRELOAD=/usr/local/vgpu/libvgpu.so";
        for (mounts, env, stays) in [
            (&[library, file][..], &[limit][..], true),
            (&[library], &[limit, preload], true),
            (&[library], &[limit, preload], true),
            (&[["/usr/local/vgpu/containers/1", "/usr/local/vgpu"], library, file], &[limit], true),
            (&[library, file], &[], false),
            (&[library], &[limit], false),
            (&[library], &[limit, preload, "LD_PRELOAD="], false),
            (&[[volume, "/usr/local/vgpu/libvgpu.so"], file], &[limit], false),
            (&[["/usr/local/vgpu/../../x", "/usr/local/vgpu/libvgpu.so"], file], &[limit], false),
            (&[["/usr/local/vgpu/libvgpu.so", "/data/libvgpu.so"], file], &[limit], false),
            (&[library, [volume, "/etc/ld.so.preload"]], &[limit], false),
            (&[library, file, [volume, "/usr/local/vgpu"]], &[limit], false),
            (&[library, file, [volume, "/usr/local/vgpu/"]], &[limit], false),
            (&[library, file, [volume, "usr/local/vgpu"]], &[limit], false),
            (&[library, file], &[limit, "LIMIT_1=0"], false),
            (&[library, file], &[limit, "LIMIT_1="], true),
            (&[library, file, [volume, "/data/../usr/local/vgpu"]], &[limit], false),
        ] {
            let list: Vec<_> = mounts.iter().map(|[s, t]| json!({"source": s, "destination": t})).collect();
            let container = Container::from_json(&json!({"mounts": list, "process": {"env": env}}));
            assert_eq!(OWNER.holds(&container), stays, "{mounts:?} {env:?}");
        }
    }
}
