//! Names and lists of GPUs as gpushare's own keys write them.

use std::fmt;
use std::str::FromStr;

use gpushare_inventory::{GpuUuid, InstanceId};

use crate::grammar::{GrammarError, whole};

/// The GPUs that a container asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Devices {
    /// This number of GPUs, 1 to 16, chosen by placement.
    Any(u8),
    /// All of these GPUs.
    These(Vec<DeviceSelector>),
    /// This number of GPUs out of these, chosen by placement.
    Among(u8, Vec<GpuUuid>),
    /// Every GPU of the node.
    All,
}

impl Devices {
    /// The number of GPUs on a node that has `all` of them.
    pub fn count(&self, all: usize) -> usize {
        match self {
            Self::Any(count) | Self::Among(count, _) => usize::from(*count),
            Self::These(list) => list.len(),
            Self::All => all,
        }
    }
}

/// A name for one GPU or MIG instance, as users write it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceSelector {
    /// NVML's index, in the order of PCI addresses.
    Index(u32),
    /// A MIG instance by the index of its GPU and NVML's index of the instance on that GPU: `0:1`.
    Part(u32, u32),
    /// A MIG instance by its GPU and its ids, the form that drivers before 470 used: `MIG-GPU-…/1/0`.
    Instance(GpuUuid, InstanceId),
    /// The N of `/dev/nvidiaN`. Only dialects of other systems produce this; gpushare's own keys cannot
    /// express it.
    Minor(u32),
    /// A full UUID of a GPU or of a MIG instance.
    Uuid(GpuUuid),
    /// The beginning of a UUID: `GPU-` or `MIG-`, and at least one more character.
    Prefix(String),
}

impl FromStr for DeviceSelector {
    type Err = GrammarError;

    fn from_str(text: &str) -> Result<Self, GrammarError> {
        if text.bytes().all(|byte| byte.is_ascii_digit()) {
            return whole(text).map(Self::Index).ok_or(GrammarError::NotDevices);
        }
        if let Ok(uuid) = text.parse() {
            return Ok(Self::Uuid(uuid));
        }
        if let Some((gpu, part)) = text.split_once(':') {
            let part = whole(gpu).zip(whole(part));
            return part.map(|(gpu, part)| Self::Part(gpu, part)).ok_or(GrammarError::NotDevices);
        }
        if let Some(names) = text.strip_prefix("MIG-").filter(|rest| rest.contains('/')) {
            return instance(names).ok_or(GrammarError::NotDevices);
        }
        let hex = text.strip_prefix("GPU-").or_else(|| text.strip_prefix("MIG-"));
        let hex = hex.filter(|hex| !hex.is_empty() && hex.len() < 36);
        let plain = hex.is_some_and(|hex| hex.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-'));
        if plain { Ok(Self::Prefix(text.to_owned())) } else { Err(GrammarError::NotDevices) }
    }
}

/// Reads `GPU-…/1/0`.
fn instance(text: &str) -> Option<DeviceSelector> {
    let mut parts = text.split('/');
    let card = parts.next()?.parse().ok().filter(|card: &GpuUuid| !card.is_instance())?;
    let (gpu, compute) = (whole(parts.next()?)?, whole(parts.next()?)?);
    parts.next().is_none().then_some(DeviceSelector::Instance(card, InstanceId { gpu, compute }))
}

impl fmt::Display for DeviceSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Index(index) => index.fmt(f),
            Self::Part(gpu, part) => write!(f, "{gpu}:{part}"),
            Self::Instance(card, id) => write!(f, "MIG-{card}/{id}"),
            Self::Minor(minor) => write!(f, "/dev/nvidia{minor}"),
            Self::Uuid(uuid) => uuid.fmt(f),
            Self::Prefix(prefix) => f.write_str(prefix),
        }
    }
}

impl FromStr for Devices {
    type Err = GrammarError;

    /// Reads a comma-separated list or `all`. The number of GPUs has its own key: see [`count`].
    fn from_str(text: &str) -> Result<Self, GrammarError> {
        if text == "all" {
            return Ok(Self::All);
        }
        let mut selectors: Vec<DeviceSelector> = Vec::new();
        for item in text.split(',').map(str::trim) {
            let selector = item.parse()?;
            if item.is_empty() || selectors.contains(&selector) || selectors.len() == 16 {
                return Err(GrammarError::NotDevices);
            }
            selectors.push(selector);
        }
        Ok(Self::These(selectors))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_a_list_without_doubles_or_all() {
        assert_eq!("all".parse::<Devices>(), Ok(Devices::All));
        let list = Devices::These(vec![
            DeviceSelector::Index(0),
            DeviceSelector::Uuid("GPU-5f2e0a11-0102-0304-0506-0708090a0bff".parse().unwrap()),
            DeviceSelector::Prefix("GPU-5F".into()),
        ]);
        assert_eq!("0, GPU-5f2e0a11-0102-0304-0506-0708090a0bff,GPU-5F".parse::<Devices>(), Ok(list));
        for text in [
            "",
            "0,,1",
            "0,0",
            "00",
            "010",
            "all,0",
            "-1",
            "GPU-",
            "GPU-xyz",
            "99999999999",
            "0:",
            "0:1:2",
            "0:01",
            "MIG-",
        ] {
            assert_eq!(text.parse::<Devices>(), Err(GrammarError::NotDevices), "parsing {text:?}");
        }
    }

    #[test]
    fn a_mig_instance_is_named_by_uuid_or_by_its_gpu() {
        let card = "GPU-5f2e0a11-0102-0304-0506-0708090a0bff";
        for (text, want) in [
            ("0:1", Some(DeviceSelector::Part(0, 1))),
            ("MIG-5f2e", Some(DeviceSelector::Prefix("MIG-5f2e".into()))),
            (
                &format!("MIG-{card}/7/0"),
                Some(DeviceSelector::Instance(card.parse().unwrap(), InstanceId { gpu: 7, compute: 0 })),
            ),
            (&format!("MIG-{card}/7"), None),
            (&format!("MIG-{card}/7/0/0"), None),
            (&format!("MIG-{}/7/0", card.replace("GPU", "MIG")), None),
            ("MIG-GPU-5f2e/1/0", None),
        ] {
            let found = text.parse::<DeviceSelector>().ok();
            assert_eq!(found, want, "{text}");
            assert!(found.is_none_or(|found| found.to_string() == text), "{text}");
        }
    }
}
