//! The sections `request` and `dialects`: which channels and dialects are read, and how much they may grant.

use gpushare_inventory::{CapabilityError, DeviceMemory};
use gpushare_request::{
    Ceilings, Cores, DialectSettings, IndexMeaning, InterceptorPolicy, KeyPatterns, MemoryRequest,
    NvidiaPolicy, Policy, dialect_names, switch_names,
};
use serde::Deserialize;

use crate::error::{ConfigError, value};

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
    pub unread_dialects: Vec<String>,
    pub honoured_switches: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct DialectsSection {
    pub aliyun: AliyunSection,
    pub hami: HamiSection,
    pub slurm: SlurmSection,
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct AliyunSection {
    pub index: String,
    pub unit: String,
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct HamiSection {
    pub zero: String,
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct SlurmSection {
    pub shards_per_gpu: u32,
    pub mps_memory: String,
}

/// Checks both sections and makes the rules for requests.
pub(crate) fn policy(section: &RequestSection, dialects: &DialectsSection) -> Result<Policy, ConfigError> {
    let nvidia = match section.nvidia.as_str() {
        "default-share" => NvidiaPolicy::DefaultShare,
        "whole" => NvidiaPolicy::Whole,
        "refuse" => NvidiaPolicy::Refuse,
        "ignore" => NvidiaPolicy::Ignore,
        other => {
            return Err(value("request.nvidia", other, "known are default-share, whole, refuse and ignore"));
        }
    };
    Ok(Policy {
        strict: section.strict,
        trusted_annotations: KeyPatterns::new(section.trusted_annotations.clone()),
        crio: section.crio,
        ceilings: Ceilings {
            pod: ceiling("request.pod_ceiling", &section.pod_ceiling)?,
            env: ceiling("request.env_ceiling", &section.env_ceiling)?,
        },
        volume_mounts: section.volume_mounts,
        interceptor: match section.interceptor.as_str() {
            "replace" => InterceptorPolicy::Replace,
            "stand-down" => InterceptorPolicy::StandDown,
            other => return Err(value("request.interceptor", other, "known are replace and stand-down")),
        },
        unread_dialects: known("request.unread_dialects", &section.unread_dialects, &mut dialect_names())?,
        switches: known("request.honoured_switches", &section.honoured_switches, &mut switch_names())?,
        dialects: settings(dialects)?,
        ignore_env: !section.env,
        default_memory: ceiling("request.default_memory", &section.default_memory)?,
        default_cores: match section.default_cores.as_str() {
            "" => None,
            text => Some(text.parse::<Cores>().map_err(|error| value("request.default_cores", text, error))?),
        },
        nvidia,
        capabilities: match section.capabilities.as_str() {
            "all" => None,
            text => Some(
                text.parse().map_err(|error: CapabilityError| value("request.capabilities", text, error))?,
            ),
        },
    })
}

/// Parses a size of memory; `None` for an empty text. A percentage is an error.
pub(crate) fn size(key: &'static str, text: &str) -> Result<Option<DeviceMemory>, ConfigError> {
    match text.parse::<MemoryRequest>() {
        _ if text.is_empty() => Ok(None),
        Ok(MemoryRequest::Bytes(memory)) => Ok(Some(memory)),
        Ok(_) => Err(value(key, text, "a percentage has no meaning here; write a size as 8GiB")),
        Err(error) => Err(value(key, text, error)),
    }
}

fn settings(section: &DialectsSection) -> Result<DialectSettings, ConfigError> {
    Ok(DialectSettings {
        aliyun_index: match section.aliyun.index.as_str() {
            "minor" => IndexMeaning::Minor,
            "pci" => IndexMeaning::Pci,
            other => return Err(value("dialects.aliyun.index", other, "known are minor and pci")),
        },
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
        hami_zero_unstated: match section.hami.zero.as_str() {
            "refuse" => false,
            "unstated" => true,
            other => return Err(value("dialects.hami.zero", other, "known are refuse and unstated")),
        },
        slurm_shards_per_gpu: Some(section.slurm.shards_per_gpu).filter(|shards| *shards > 0),
        slurm_mps_memory: match section.slurm.mps_memory.as_str() {
            "none" => false,
            "percent" => true,
            other => return Err(value("dialects.slurm.mps_memory", other, "known are none and percent")),
        },
    })
}

/// Parses a size or a percentage of each GPU; `None` for an empty text.
fn ceiling(key: &'static str, text: &str) -> Result<Option<MemoryRequest>, ConfigError> {
    let parsed = || text.parse().map(Some).map_err(|error| value(key, text, error));
    if text.is_empty() { Ok(None) } else { parsed() }
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
