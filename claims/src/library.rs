//! Finds other systems' interception libraries in a bundle. If two such libraries are loaded, or one together
//! with gpushare's, both hook the same calls and count each allocation twice.
//!
//! Each dialect's file describes its library.

use std::path::Path;

use crate::container::Container;
use crate::error::shortened;

/// How to recognize one system's library in a bundle.
#[derive(Clone, Copy, Debug)]
pub struct Library {
    /// Mount targets of the library's owner. A mount at or below one of them belongs to the library.
    pub folders: &'static [&'static str],
    /// File names of the library, without folders.
    pub files: &'static [&'static str],
    /// The proof that the library's owner installed it. `None` for a library that does not limit memory by
    /// itself.
    pub owner: Option<Owner>,
}

/// The proof that the owner of a memory-limiting library installed it.
#[derive(Clone, Copy, Debug)]
pub struct Owner {
    /// Prefix of the variables from which the library reads the memory limit; some end in a GPU's position.
    pub limit: &'static str,
    /// The library's path in the container.
    pub library: &'static str,
    /// The owner's folder on the host.
    pub folder: &'static str,
}

/// Other systems' libraries found in one bundle.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Interceptor {
    /// Mount targets of the libraries and of /etc/ld.so.preload.
    pub mounts: Vec<String>,
    /// The libraries' items in `LD_PRELOAD`.
    pub preloads: Vec<String>,
}

/// A file whose libraries the dynamic loader loads into every program. HAMi's plugin mounts one.
const PRELOAD_FILE: &str = "/etc/ld.so.preload";
/// The variable with the dynamic loader's list. Colons and blanks separate its items.
const PRELOAD: &str = "LD_PRELOAD";
/// The note for a library that is not proved, so that the setting `StandDown` does not apply.
pub const UNPROVED: &str = "what looks like another system's interception library is not proved to hold this limit \
     (owner's mounts, its own dialect alone): it is taken out, and gpushare holds the limit";

impl Owner {
    /// Whether the owner's library is mounted, is loaded into every program, and has a limit.
    pub fn holds(&self, container: &Container) -> bool {
        let last = container.named(PRELOAD).next_back();
        let in_variable = last.is_some_and(|(_, list)| items(list).any(|item| item == self.library));
        let is_loaded = in_variable || self.mounts(PRELOAD_FILE, container);
        // The library treats 0 as no limit. The plugins also write variables with an empty value.
        let mut limits =
            container.env().filter(|(key, value)| key.starts_with(self.limit) && !value.is_empty());
        let states = limits.next().is_some_and(is_limit) && limits.all(is_limit);
        self.mounts(self.library, container) && is_loaded && states
    }

    /// Whether the owner's file is at `target` and no later mount, such as a pod's volume, covers it.
    fn mounts(&self, target: &str, container: &Container) -> bool {
        let over = |target_of_mount: &str| {
            // A relative target or one with `..` can resolve to any path.
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
    /// The number of mounts and of items in `LD_PRELOAD`.
    pub fn count(&self) -> usize {
        self.mounts.len() + self.preloads.len()
    }

    /// The first mount target or item, shortened for a message.
    pub fn first(&self) -> Option<String> {
        self.mounts.iter().chain(&self.preloads).next().map(|what| shortened(what))
    }

    /// Finds the `known` libraries in the bundle; `None` if it contains none of them.
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
