//! What a container asks for: its bundle's annotations and environment in, a [`Request`] out.
//!
//! Pure: no file, no node, no store is looked at. One file per dialect ([`own`] is gpushare's, [`cdi`] the same by names of
//! CDI devices, [`nvidia`] the plain NVIDIA variables); [`read`] puts the dialects together. Nothing here falls back: a malformed or contradictory
//! request is an error that names the key, the value and the remedy.
#![forbid(unsafe_code)]

mod cdi;
mod container;
mod error;
mod grammar;
mod model;
mod nvidia;
mod own;
mod requirement;
mod whole;

use gpushare_inventory::{Capabilities, DeviceMemory};

pub use cdi::{GPU_KIND, SHARE_KIND, ShareName, VARIABLE as CDI_VARIABLE};
pub use container::{Container, Engine};
pub use error::RequestError;
pub use grammar::{Cores, DeviceSelector, Devices, GrammarError, MemoryAsk, Mode, Priority};
pub use model::ModelFilter;
pub use nvidia::GRANTED_LIST;
pub use requirement::{Offer, Requirements};

/// How a container's compute share is held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ComputePolicy {
    /// A hard cap, also on an idle GPU.
    #[default]
    Fixed,
    /// The share is guaranteed; idle time may be used.
    Burst,
    /// No compute limit.
    None,
}

impl ComputePolicy {
    /// The word in requests, in the store and in listings.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fixed => "fixed",
            Self::Burst => "burst",
            Self::None => "none",
        }
    }
}

/// What one container asks for, dialect forgotten.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Memory on each GPU.
    pub memory: MemoryAsk,
    /// Compute on each GPU; `None` is no limit.
    pub cores: Option<Cores>,
    /// Which GPUs, or how many.
    pub devices: Devices,
    /// Which models will do.
    pub model: ModelFilter,
    /// How GPUs are given.
    pub mode: Mode,
    /// How the compute share is held.
    pub compute_policy: ComputePolicy,
    /// Parts of the driver.
    pub capabilities: Capabilities,
    /// 0 (low) to 9.
    pub priority: Priority,
}

/// The administrator's rules for requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// Only trusted channels grant; env and pod annotations may lower what one of them granted.
    pub strict: bool,
    /// Whether the environment is read for gpushare's own keys at all.
    pub ignore_env: bool,
    /// Memory for a container that names no size; `None` is the whole memory left on the GPU.
    pub default_memory: Option<DeviceMemory>,
    /// Compute for a container that names none; `None` is no limit.
    pub default_cores: Option<Cores>,
    /// What a container gets that names GPUs by NVIDIA's variables and no limit.
    pub nvidia: NvidiaPolicy,
    /// The driver capabilities that containers may have; `None` is every one.
    pub capabilities: Option<Capabilities>,
}

/// What `NVIDIA_VISIBLE_DEVICES` without a share means. The bundle does not tell the image's environment from the
/// user's, so an image can set it: its list of GPUs never grants more than the node's default share. A name of gpushare's
/// own CDI devices in it is as much as a variable of gpushare's, for which [`Policy::ignore_env`] and [`Policy::strict`]
/// are the rules; where it is not read, it is an error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NvidiaPolicy {
    /// The default share on the GPUs it names.
    #[default]
    DefaultShare,
    /// `create` fails and names the keys to set.
    Refuse,
    /// No request: the container gets no GPU from gpushare.
    Ignore,
}

/// Reads what `container` asks for; `None` when it asks for nothing (or is a pod's sandbox), and its bundle must
/// reach the low-level runtime as it came.
///
/// # Errors
/// When the request is malformed, contradictory or asks by a channel that the policy does not let grant.
pub fn read(container: &Container, policy: &Policy) -> Result<Option<Request>, RequestError> {
    if container.is_sandbox() {
        return Ok(None);
    }
    let mut chosen = false;
    let request = match own::read(container, policy)? {
        Some(asked) => {
            whole::refuse_beside(&asked.by, container)?;
            chosen = asked.chooses_capabilities();
            Some(asked.with_nvidia(nvidia::read(container)?, policy)?)
        }
        None if policy.nvidia == NvidiaPolicy::Ignore => None,
        None => {
            let request = nvidia::read(container)?.into_request(policy)?;
            if request.is_some() {
                whole::refuse_beside(nvidia::DEVICES, container)?;
            }
            request
        }
    };
    let Some(mut request) = request else { return Ok(None) };
    if let Some(allowed) = &policy.capabilities {
        let asked = &request.capabilities;
        request.capabilities = if chosen { asked.within(allowed)? } else { asked.cut(allowed)? };
    }
    Ok(Some(request))
}
