//! The sections `request` and `dialects`: which channels and dialects are read, and how much they may grant.

use std::str::FromStr;

use gpushare_inventory::DeviceMemory;
use gpushare_request::{
    Ceilings, DialectSettings, IndexMeaning, InterceptorPolicy, KeyPatterns, KubeletPolicy, MemoryRequest,
    NvidiaPolicy, Policy, dialect_names, switch_names,
};
use serde::Deserialize;

use crate::error::{ConfigError, value};
use crate::word::checked;

const NVIDIA: [(&str, NvidiaPolicy); 4] = [
    ("default-share", NvidiaPolicy::DefaultShare),
    ("whole", NvidiaPolicy::Whole),
    ("refuse", NvidiaPolicy::Refuse),
    ("ignore", NvidiaPolicy::Ignore),
];
const INTERCEPTOR: [(&str, InterceptorPolicy); 2] =
    [("replace", InterceptorPolicy::Replace), ("stand-down", InterceptorPolicy::StandDown)];
const KUBELET: [(&str, KubeletPolicy); 3] =
    [("off", KubeletPolicy::Off), ("refuse", KubeletPolicy::Refuse), ("believe", KubeletPolicy::Believe)];
const ALIYUN_INDEX: [(&str, IndexMeaning); 2] = [("minor", IndexMeaning::Minor), ("pci", IndexMeaning::Pci)];
/// Whether a zero in HAMi's keys counts as unstated.
const HAMI_ZERO: [(&str, bool); 2] = [("refuse", false), ("unstated", true)];
/// Whether other systems' words for MPS ask for mode `mps`.
const MPS_MODE: [(&str, bool); 2] = [("share", false), ("mps", true)];
/// Whether Slurm's percentage under MPS limits memory too.
const SLURM_MPS_MEMORY: [(&str, bool); 2] = [("none", false), ("percent", true)];

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct RequestSection {
    pub strict: bool,
    pub env: bool,
    pub nvidia: String,
    pub capabilities: String,
    pub default_memory: String,
    pub default_cores: String,
    pub trusted_annotations: Vec<String>,
    pub crio: bool,
    pub pod_ceiling: String,
    pub env_ceiling: String,
    pub volume_mounts: bool,
    pub interceptor: String,
    pub kubelet: String,
    pub unread_dialects: Vec<String>,
    pub honoured_switches: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct DialectsSection {
    pub aliyun: DialectsAliyunSection,
    pub hami: DialectsHamiSection,
    pub mps: DialectsMpsSection,
    pub slurm: DialectsSlurmSection,
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct DialectsAliyunSection {
    pub index: String,
    pub unit: String,
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct DialectsHamiSection {
    pub zero: String,
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct DialectsMpsSection {
    pub mode: String,
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct DialectsSlurmSection {
    pub shards_per_gpu: u32,
    pub mps_memory: String,
}

/// Checks both sections and makes the rules for requests.
pub(crate) fn policy(section: &RequestSection, dialects: &DialectsSection) -> Result<Policy, ConfigError> {
    let nvidia = checked("request.nvidia", &section.nvidia, &NVIDIA)?;
    Ok(Policy {
        strict: section.strict,
        trusted_annotations: KeyPatterns::new(section.trusted_annotations.clone()),
        crio: section.crio,
        ceilings: Ceilings {
            pod: parsed("request.pod_ceiling", &section.pod_ceiling, "")?,
            env: parsed("request.env_ceiling", &section.env_ceiling, "")?,
        },
        volume_mounts: section.volume_mounts,
        interceptor: checked("request.interceptor", &section.interceptor, &INTERCEPTOR)?,
        unread_dialects: known("request.unread_dialects", &section.unread_dialects, &mut dialect_names())?,
        switches: known("request.honoured_switches", &section.honoured_switches, &mut switch_names())?,
        dialects: settings(dialects)?,
        ignore_env: !section.env,
        default_memory: match &*section.default_memory {
            REFUSE => None,
            text => parsed("request.default_memory", text, "")?,
        },
        needs_memory: section.default_memory == REFUSE,
        default_cores: parsed("request.default_cores", &section.default_cores, "")?,
        kubelet: checked("request.kubelet", &section.kubelet, &KUBELET)?,
        nvidia,
        capabilities: parsed("request.capabilities", &section.capabilities, "all")?,
    })
}

/// Parses a memory size; an empty string is 0, and so is 0 with any unit. A percentage is an error.
pub(crate) fn size(key: &'static str, text: &str) -> Result<DeviceMemory, ConfigError> {
    if is_zero(text) {
        return Ok(DeviceMemory::ZERO);
    }
    match parsed(key, text, "")? {
        None => Ok(DeviceMemory::ZERO),
        Some(MemoryRequest::Bytes(memory)) => Ok(memory),
        Some(_) => Err(value(key, text, "a percentage has no meaning here; write a size as 8GiB")),
    }
}

/// Whether this is the number 0, with or without a memory unit.
fn is_zero(text: &str) -> bool {
    let unit = text.trim_start_matches('0');
    let is_unit = || matches!(format!("1048576{unit}").parse(), Ok(MemoryRequest::Bytes(_)));
    unit.len() < text.len()
        && !unit.starts_with(|next: char| next.is_ascii_digit())
        && (unit.is_empty() || is_unit())
}

fn settings(section: &DialectsSection) -> Result<DialectSettings, ConfigError> {
    Ok(DialectSettings {
        aliyun_index: checked("dialects.aliyun.index", &section.aliyun.index, &ALIYUN_INDEX)?,
        aliyun_unit: match section.aliyun.unit.as_str() {
            "" => None,
            "GiB" => Some(1 << 30),
            "MiB" => Some(1 << 20),
            other => {
                return Err(value(
                    "dialects.aliyun.unit",
                    other,
                    "known are GiB and MiB, and nothing for either",
                ));
            }
        },
        hami_zero_unstated: checked("dialects.hami.zero", &section.hami.zero, &HAMI_ZERO)?,
        mps: checked("dialects.mps.mode", &section.mps.mode, &MPS_MODE)?,
        slurm_shards_per_gpu: Some(section.slurm.shards_per_gpu).filter(|shards| *shards > 0),
        slurm_mps_memory: checked("dialects.slurm.mps_memory", &section.slurm.mps_memory, &SLURM_MPS_MEMORY)?,
    })
}

/// The word that stands for an amount on a node that gives none by default.
const REFUSE: &str = "refuse";

/// Parses the value of `key`; `None` if it is `nothing`.
fn parsed<T: FromStr>(key: &'static str, text: &str, nothing: &str) -> Result<Option<T>, ConfigError>
where
    T::Err: ToString,
{
    if text == nothing {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|error: T::Err| value(key, text, error))
}

fn known(
    key: &'static str,
    names: &[String],
    known: &mut dyn Iterator<Item = &'static str>,
) -> Result<Vec<String>, ConfigError> {
    let known: Vec<&str> = known.collect();
    match names.iter().find(|name| !known.contains(&name.as_str())) {
        Some(name) => Err(value(key, name, format!("known are {}", known.join(", ")))),
        None => Ok(names.to_vec()),
    }
}
