//! The node's rules for requests, as the settings file states them.

use std::borrow::Cow;

use gpushare_inventory::{Capabilities, DeviceMemory, Gpu};

use crate::amount::Cap;
use crate::container::Container;
use crate::error::RequestError;
use crate::gpus::total;
use crate::grammar::{Cores, MemoryRequest};
use crate::patterns::KeyPatterns;
use crate::rank::Rank;
use crate::selector::IndexMeaning;

/// The administrator's rules for requests. The default is a node without settings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// Only trusted channels grant. Variables and pod annotations may only lower what a trusted channel
    /// granted.
    pub strict: bool,
    /// The annotations that only a device plugin or the engine's caller can write.
    pub trusted_annotations: KeyPatterns,
    /// Whether the engine is CRI-O. Only then is CRI-O's list of the container's own annotations trusted.
    pub crio: bool,
    /// The most that less trusted channels may grant.
    pub ceilings: Ceilings,
    /// Whether mounts that name GPUs are a request (the device plugin's strategy `volume-mounts`).
    pub volume_mounts: bool,
    /// Names of the dialects that are not read.
    pub unread_dialects: Vec<String>,
    /// How to treat another system's interception library in a bundle.
    pub interceptor: InterceptorPolicy,
    /// Values that individual dialects cannot read from the bundle.
    pub dialects: DialectSettings,
    /// Keys of other systems' off switches that this node honours (`switch_names` of gpushare-request lists
    /// them). A container that sets one of them asks for whole GPUs.
    pub switches: Vec<String>,
    /// Whether gpushare's own keys in the environment are ignored.
    pub ignore_env: bool,
    /// Memory on each GPU for a container that names no size, in bytes or percent. `None` gives all that is
    /// left on the GPU.
    pub default_memory: Option<MemoryRequest>,
    /// Whether to refuse a container that names no size.
    pub needs_memory: bool,
    /// Compute on each GPU for a container that names none; `None` means no limit.
    pub default_cores: Option<Cores>,
    /// The treatment of a container that names GPUs but no share of them.
    pub nvidia: NvidiaPolicy,
    /// The driver capabilities that containers may have; `None` allows all of them.
    pub capabilities: Option<Capabilities>,
    /// Whether a pod's container asks for the GPUs that kubelet allocated to it.
    pub kubelet: KubeletPolicy,
}

/// Whether kubelet's allocations limit the requests of pods. The node's agent records them for each pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KubeletPolicy {
    /// Ignore kubelet's allocations.
    #[default]
    Off,
    /// Use them; if the agent is away and has recorded nothing, `create` fails.
    Refuse,
    /// Use them; if the agent is away and has recorded nothing, trust the bundle's words as with `Off`.
    Believe,
}

/// The node's answers to questions that other systems' requests leave open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DialectSettings {
    /// How to read the GPU numbers of Aliyun's device plugin. The plugin itself writes minors.
    pub aliyun_index: IndexMeaning,
    /// The unit in which Aliyun's plugin counts memory, in bytes. `None` infers it from the GPUs' sizes.
    pub aliyun_unit: Option<u64>,
    /// Whether a limit of 0 in HAMi's keys means that none is stated, as in some forks. Otherwise it is an
    /// error.
    pub hami_zero_unstated: bool,
    /// The number of shards that Slurm has on each GPU. A job's environment does not contain it.
    pub slurm_shards_per_gpu: Option<u32>,
    /// Whether Slurm's percentage under MPS limits memory too, not only compute.
    pub slurm_mps_memory: bool,
    /// Whether other systems' words for MPS ask for mode `mps`; otherwise they ask for a share with the same
    /// limits.
    pub mps: bool,
}

/// The most that less trusted channels may grant on each GPU by themselves. `None` means that the channel may
/// grant nothing under [`Policy::strict`], and that it has no limit otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ceilings {
    /// For annotations that the pod's author can write.
    pub pod: Option<MemoryRequest>,
    /// For variables, which the image's author can set too.
    pub env: Option<MemoryRequest>,
}

/// The meaning of a list of GPUs without a share. A bundle does not distinguish the image's environment from
/// the user's, so an image can set `NVIDIA_VISIBLE_DEVICES`. The list therefore never grants more than the
/// node's default share. The name of a gpushare CDI device in that variable counts like a gpushare variable:
/// [`Policy::ignore_env`] and [`Policy::strict`] apply, and if the node does not read it, it is an error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NvidiaPolicy {
    /// The default share on the named GPUs.
    #[default]
    DefaultShare,
    /// The whole GPUs, which are never shared with other containers.
    Whole,
    /// `create` fails, and the message names the keys to set.
    Refuse,
    /// A list in a variable is no request. GPUs that kubelet or the engine's caller handed over still are.
    Ignore,
}

/// How to treat another system's interception library in a bundle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InterceptorPolicy {
    /// The library is removed from the bundle, and gpushare's library enforces the limit.
    #[default]
    Replace,
    /// The library stays and enforces the limit; gpushare only records the share in the quota store.
    StandDown,
}

/// The most that one channel may grant on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ceiling {
    memory: MemoryRequest,
    cores: Cap,
    /// Name of the setting that holds the ceiling, for the message.
    pub setting: &'static str,
}

impl Policy {
    /// The rules for this container. On a strict node its variables grant what kubelet allocated to it,
    /// regardless of the ceiling for variables. If the container got no GPU in any way, its variables grant
    /// nothing.
    pub fn within(&self, container: &Container) -> Cow<'_, Self> {
        let Some(allocated) = container.allocated().filter(|_| self.strict) else {
            return Cow::Borrowed(self);
        };
        let env = match allocated.is_empty() {
            true if container.reserved().is_some() || !container.handed().is_empty() => {
                return Cow::Borrowed(self);
            }
            true => None,
            false => Some(MemoryRequest::Percent(100)),
        };
        Cow::Owned(Self { ceilings: Ceilings { env, ..self.ceilings }, ..self.clone() })
    }

    /// All ceilings that apply to words of this rank. `None` if such words may only lower what others grant.
    pub fn authority(&self, rank: Rank) -> Option<Vec<Ceiling>> {
        let named = self.ceiling(rank);
        let grants = named.is_some() || !self.strict || rank >= Rank::Granted;
        grants.then(|| named.into_iter().chain(self.of_unchecked_images(rank)).collect())
    }

    /// The ceiling that the settings define for words of this rank; `None` if they define none.
    pub fn ceiling(&self, rank: Rank) -> Option<Ceiling> {
        let (memory, setting) = match rank {
            Rank::Environment => (self.ceilings.env, "request.env_ceiling"),
            Rank::Pod => (self.ceilings.pod, "request.pod_ceiling"),
            Rank::Granted | Rank::Handed | Rank::Node => return None,
        };
        Some(Ceiling { memory: memory?, cores: Cap::Unlimited, setting })
    }

    /// The ceilings of words that may come from an unchecked image: the node's default memory and compute.
    fn of_unchecked_images(&self, rank: Rank) -> impl Iterator<Item = Ceiling> {
        let of_memory = |memory| Ceiling { memory, cores: Cap::Unlimited, setting: "request.default_memory" };
        let of_cores = |cores: Cores| Ceiling {
            memory: MemoryRequest::Rest,
            cores: cores.into(),
            setting: "request.default_cores",
        };
        let ceilings = [self.default_memory.map(of_memory), self.default_cores.map(of_cores)];
        ceilings.into_iter().flatten().filter(move |_| self.is_unchecked(rank))
    }

    /// Whether a word of this rank may come from an unchecked image.
    pub fn is_unchecked(&self, rank: Rank) -> bool {
        self.ignore_env && rank == Rank::Environment
    }
}

impl Ceiling {
    /// The limit in bytes on this GPU; `None` means no limit.
    pub fn on(self, gpu: &Gpu) -> Result<Option<DeviceMemory>, RequestError> {
        Ok(match self.memory {
            MemoryRequest::Bytes(memory) => Some(memory),
            MemoryRequest::Percent(percent) => Some(total(gpu)?.percent(percent)),
            MemoryRequest::Rest => None,
        })
    }

    /// Refuses `memory` if it is above this ceiling; `by` is the word that asks.
    pub fn hold_memory(self, by: &str, memory: DeviceMemory, gpu: &Gpu) -> Result<(), RequestError> {
        match self.on(gpu)? {
            Some(most) if memory > most => Err(self.passed(by, most.to_string())),
            _ => Ok(()),
        }
    }

    /// Refuses `most` if it is above this ceiling; `by` is the word that asks.
    pub fn hold_compute(self, by: &str, most: Cap) -> Result<(), RequestError> {
        match self.cores {
            Cap::Percent(cores) if most > self.cores => Err(self.passed(by, format!("{cores} of compute"))),
            _ => Ok(()),
        }
    }

    fn passed(self, by: &str, ceiling: String) -> RequestError {
        RequestError::AboveCeiling { by: by.to_owned(), ceiling, setting: self.setting }
    }
}
