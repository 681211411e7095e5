//! MIG instances: parts into which the hardware itself divides a GPU. A GPU instance has memory and
//! multiprocessors of its own; programs run on a compute instance.
//!
//! `/proc` shows the existing instances and the device nodes that open them. Their UUIDs, sizes and profiles
//! come from NVML through [`Totals`](crate::Totals).

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use crate::device_node::{DeviceNode, nvidias_node};
use crate::error::NodeError;
use crate::folder;
use crate::proc::{self, ProcError};
use crate::roots::Roots;
use crate::uuid::GpuUuid;

/// Ids of a GPU instance and of a compute instance in it, as assigned by the driver. Ids have gaps, and an id
/// is reused after its instance was destroyed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InstanceId {
    /// Id of the GPU instance on its GPU.
    pub gpu: u32,
    /// Id of the compute instance in the GPU instance.
    pub compute: u32,
}

/// The data about one instance in `/proc`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// The instance's ids.
    pub id: InstanceId,
    /// Minors of the nodes below `/dev/nvidia-caps`: that of the GPU instance, then that of the compute
    /// instance.
    pub minors: [u32; 2],
}

/// The data that a MIG instance has in addition to a [`Gpu`](crate::Gpu) of the inventory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instance {
    /// UUID of the GPU that contains the instance.
    pub card: GpuUuid,
    /// The instance's ids.
    pub id: InstanceId,
    /// NVML's index of the instance on its GPU: the second number of `0:1`.
    pub position: u32,
    /// Size of the instance.
    pub profile: Profile,
    /// Whether a request that names no GPU means instances: all GPUs of the node are divided, including those
    /// that are out of service.
    pub stands_for_gpu: bool,
    /// The nodes below `/dev/nvidia-caps` that open it, in addition to the GPU's own: that of the GPU
    /// instance, then that of the compute instance.
    pub nodes: [DeviceNode; 2],
}

/// Name of an instance's size in the format of `nvidia-smi mig -lgip`: `1g.10gb`, `1g.10gb+me`, or
/// `1c.3g.40gb` for a compute instance that is a part of its GPU instance. In lower case.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Profile(String);

/// The text is not the name of a profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a MIG profile is written as `nvidia-smi mig -lgip` shows it: 1g.10gb, 3g.40gb, 1g.10gb+me, 1c.3g.40gb"
)]
pub struct ProfileError;

impl FromStr for Profile {
    type Err = ProfileError;

    fn from_str(text: &str) -> Result<Self, ProfileError> {
        let text = text.to_ascii_lowercase();
        let number = |part: &str, unit: &str| {
            let digits = part.strip_suffix(unit)?;
            let plain = !digits.is_empty() && digits.len() < 4 && digits.bytes().all(|b| b.is_ascii_digit());
            (plain && !digits.starts_with('0')).then_some(())
        };
        let (size, extra) = match text.split_once(['+', '-']) {
            Some((size, extra)) => (size, Some(extra)),
            None => (text.as_str(), None),
        };
        let is_word =
            |word: &str| !word.is_empty() && word.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'.');
        let mut parts: Vec<&str> = size.split('.').collect();
        let memory = parts.pop().and_then(|part| number(part, "gb"));
        let slices = parts.pop().and_then(|part| number(part, "g"));
        let compute = parts.pop().is_none_or(|part| number(part, "c").is_some());
        let is_whole = parts.is_empty() && extra.is_none_or(|extra| extra.len() < 16 && is_word(extra));
        match (memory, slices, compute && is_whole) {
            (Some(()), Some(()), true) => Ok(Self(text)),
            _ => Err(ProfileError),
        }
    }
}

impl Profile {
    /// Parses the profile at the end of an instance's name in NVML (`NVIDIA H100 80GB HBM3 MIG 1g.10gb`).
    ///
    /// # Errors
    /// When the name has no profile at its end.
    pub fn of_name(name: &str) -> Result<Self, ProfileError> {
        name.rsplit_once("MIG ").ok_or(ProfileError)?.1.trim().parse()
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.gpu, self.compute)
    }
}

/// Returns the compute instances of the GPU with this minor number, by their ids. Empty without MIG.
///
/// # Errors
/// When the file of an instance is empty or has another format. Skips an instance that vanishes meanwhile.
pub(crate) fn layout(proc_root: &Path, minor: u32) -> Result<Vec<Layout>, NodeError> {
    let folder = proc_root.join(format!("proc/driver/nvidia/capabilities/gpu{minor}/mig"));
    let mut found = Vec::new();
    for (gpu, gpu_folder) in numbered(&folder, "gi") {
        let Some(gpu_minor) = capability_minor(&gpu_folder)? else { continue };
        for (compute, folder) in numbered(&gpu_folder, "ci") {
            let Some(compute_minor) = capability_minor(&folder)? else { continue };
            found.push(Layout { id: InstanceId { gpu, compute }, minors: [gpu_minor, compute_minor] });
        }
    }
    found.sort_by_key(|layout| layout.id);
    Ok(found)
}

/// The folders in `folder` whose names are `prefix` and a number.
fn numbered(folder: &Path, prefix: &str) -> Vec<(u32, std::path::PathBuf)> {
    let number = |path: &Path| path.file_name()?.to_str()?.strip_prefix(prefix)?.parse().ok();
    folder::paths(folder).filter_map(|path| Some((number(&path)?, path))).collect()
}

/// The minor number in the file `access`; `None` if there is no such file.
fn capability_minor(folder: &Path) -> Result<Option<u32>, NodeError> {
    let path = folder.join("access");
    let text = match proc::read(&path) {
        Err(ProcError::Read { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            return Ok(None);
        }
        other => other?,
    };
    let minor = proc::number(&text, "DeviceFileMinor");
    let minor = minor.ok_or(ProcError::Format { path, what: "DeviceFileMinor" })?;
    Ok(Some(minor))
}

/// Returns the nodes that open an instance, with this boot's numbers.
///
/// # Errors
/// When a node is missing or has another number.
pub(crate) fn nodes(roots: &Roots, major: Option<u32>, layout: Layout) -> Result<[DeviceNode; 2], NodeError> {
    let node = |minor: u32| {
        let name = format!("nvidia-caps/nvidia-cap{minor}");
        let path = roots.dev.join("dev").join(&name);
        let major = major.ok_or(NodeError::NoDeviceNode { path })?;
        nvidias_node(&roots.dev, &name, (major, minor))
    };
    let [gpu, compute] = layout.minors;
    Ok([node(gpu)?, node(compute)?])
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_profile_is_slices_and_memory_with_what_nvidia_adds() {
        for (text, want) in [
            ("1g.10gb", Some("1g.10gb")),
            ("7G.80GB", Some("7g.80gb")),
            ("1g.10gb+me", Some("1g.10gb+me")),
            ("1g.5gb+me.all", Some("1g.5gb+me.all")),
            ("1c.3g.40gb", Some("1c.3g.40gb")),
            ("1g.10gb+", None),
            ("1g", None),
            ("10gb", None),
            ("0g.10gb", None),
            ("1g.10gb.1g", None),
            ("2x1c.3g.40gb", None),
            ("1c.2c.3g.40gb", None),
            ("g.gb", None),
            ("1g.10gb+m\u{1b}", None),
            ("", None),
        ] {
            assert_eq!(
                text.parse::<Profile>().ok().map(|profile| profile.0),
                want.map(str::to_owned),
                "{text:?}"
            );
        }
        let of = |name| Profile::of_name(name).map(|profile| profile.0);
        assert_eq!(of("NVIDIA A100-SXM4-40GB MIG 1g.5gb"), Ok("1g.5gb".to_owned()));
        assert_eq!(of("NVIDIA A100-SXM4-40GB"), Err(ProfileError));
    }

    #[test]
    fn the_layout_is_that_of_the_capabilities_of_this_minor() {
        let root = tempfile::tempdir().unwrap();
        let capabilities = root.path().join("proc/driver/nvidia/capabilities");
        for (name, text) in [
            ("gpu1/mig/gi9/access", "DeviceFileMinor: 30\nDeviceFileMode: 292\n"),
            ("gpu1/mig/gi9/ci0/access", "DeviceFileMinor: 31\n"),
            ("gpu1/mig/gi2/access", "DeviceFileMinor: 12\n"),
            ("gpu1/mig/gi2/ci1/access", "DeviceFileMinor: 14\n"),
            ("gpu1/mig/gi2/ci0/access", "DeviceFileMinor: 13\n"),
            ("gpu1/mig/gi3/access", "DeviceFileMinor: 21\n"), // no compute instance
            ("gpu1/mig/gix/access", "DeviceFileMinor: 99\n"),
            ("gpu10/mig/gi1/access", "DeviceFileMinor: 40\n"),
            ("gpu10/mig/gi1/ci0/access", "DeviceFileMinor: 41\n"),
            ("mig/config", "DeviceFileMinor: 1\n"),
        ] {
            let path = capabilities.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let found: Vec<_> = layout(root.path(), 1).unwrap();
        let found: Vec<_> = found.iter().map(|one| (one.id.gpu, one.id.compute, one.minors)).collect();
        assert_eq!(found, [(2, 0, [12, 13]), (2, 1, [12, 14]), (9, 0, [30, 31])]);
        assert_eq!(layout(root.path(), 0).unwrap(), []);
        fs::write(capabilities.join("gpu1/mig/gi2/ci0/access"), "").unwrap();
        assert!(layout(root.path(), 1).is_err(), "an empty file is no missing instance");
    }
}
