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
    /// Only trusted channels grant. Variables and pod annotations may lower what a trusted channel granted.
    pub strict: bool,
    /// The annotations that only a device plugin or the engine's caller can write.
    pub trusted_annotations: KeyPatterns,
    /// Whether the engine is CRI-O. Only then is CRI-O's list of the container's own annotations believed.
    pub crio: bool,
    /// The most that less trusted channels may grant.
    pub ceilings: Ceilings,
    /// Whether mounts that name GPUs are a request (the device plugin's strategy `volume-mounts`).
    pub volume_mounts: bool,
    /// Names of the dialects that are not read.
    pub unread_dialects: Vec<String>,
    /// What happens to another system's interception library in a bundle.
    pub interceptor: InterceptorPolicy,
    /// Values that single dialects cannot tell from the bundle.
    pub dialects: DialectSettings,
    /// Keys of other systems' off switches that count here too (`switch_names` of gpushare-request lists
    /// them). A container that sets one of them asks for whole GPUs.
    pub switches: Vec<String>,
    /// Whether gpushare's own keys in the environment are ignored.
    pub ignore_env: bool,
    /// Memory on each GPU for a container that names no size, in bytes or percent. `None` gives all that is
    /// left on the GPU.
    pub default_memory: Option<MemoryRequest>,
    /// Whether a container that names no size is refused instead.
    pub needs_memory: bool,
    /// Compute on each GPU for a container that names none; `None` is no limit.
    pub default_cores: Option<Cores>,
    /// What a container gets that names GPUs, but no share of them.
    pub nvidia: NvidiaPolicy,
    /// The driver capabilities that containers may have; `None` allows all of them.
    pub capabilities: Option<Capabilities>,
    /// Whether what kubelet allocated to a pod's container is asked for.
    pub kubelet: KubeletPolicy,
}

/// Whether what kubelet allocated bounds the requests of pods. The node's agent notes it for each pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KubeletPolicy {
    /// It is not looked up.
    #[default]
    Off,
    /// It is, and where the agent is away and noted nothing, `create` fails.
    Refuse,
    /// It is, and where the agent is away and noted nothing, the bundle's words are believed as without it.
    Believe,
}

/// The node's answers to what other systems' requests leave open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DialectSettings {
    /// How to read the GPU numbers of Aliyun's device plugin. The plugin itself writes minors.
    pub aliyun_index: IndexMeaning,
    /// The unit in which Aliyun's plugin counts memory, in bytes. `None`: it is inferred from the GPUs'
    /// sizes.
    pub aliyun_unit: Option<u64>,
    /// Whether a limit of 0 in HAMi's keys means that none is stated, as in some forks. If not, it is an
    /// error.
    pub hami_zero_unstated: bool,
    /// The number of shards that Slurm has on each GPU. A job's environment does not tell it.
    pub slurm_shards_per_gpu: Option<u32>,
    /// Whether Slurm's percentage under MPS limits memory too, not only compute.
    pub slurm_mps_memory: bool,
    /// Whether other systems' words for MPS ask for mode `mps`; if not, for a share with the same limits.
    pub mps: bool,
}

/// The most that less trusted channels may grant on each GPU by themselves. `None` means under
/// [`Policy::strict`] that the channel may grant nothing, and elsewhere that it has no bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ceilings {
    /// For annotations that the pod's author can write.
    pub pod: Option<MemoryRequest>,
    /// For variables, which the image's author can set too.
    pub env: Option<MemoryRequest>,
}

/// What it means to name GPUs without a share. The bundle does not tell the image's environment from the
/// user's, so an image can set `NVIDIA_VISIBLE_DEVICES`. Its list of GPUs therefore never grants more than
/// the node's default share. The name of one of gpushare's own CDI devices in that variable counts like a
/// variable of gpushare's: [`Policy::ignore_env`] and [`Policy::strict`] apply, and where it is not read it
/// is an error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NvidiaPolicy {
    /// The default share on the GPUs that it names.
    #[default]
    DefaultShare,
    /// The whole GPUs, of which no other container gets a share.
    Whole,
    /// `create` fails, and the message names the keys to set.
    Refuse,
    /// A list in a variable is no request. GPUs that kubelet or the engine's caller handed over still are
    /// one.
    Ignore,
}

/// What happens to another system's interception library in a bundle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InterceptorPolicy {
    /// The library is removed from the bundle, and gpushare's library enforces the limit.
    #[default]
    Replace,
    /// The library stays and enforces the limit; gpushare only accounts for it in the quota store.
    StandDown,
}

/// The most that one channel may grant on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ceiling {
    memory: MemoryRequest,
    cores: Cap,
    /// Name of the setting that holds it, for the message.
    pub setting: &'static str,
}

impl Policy {
    /// The rules for this container. On a strict node its variables grant what kubelet allocated to it,
    /// whatever the ceiling of variables is, and nothing where it got nothing in any way.
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

    /// The ceilings of words of this rank, all of which apply. `None` where such words may only lower what
    /// others grant.
    pub fn authority(&self, rank: Rank) -> Option<Vec<Ceiling>> {
        let named = self.ceiling(rank);
        let grants = named.is_some() || !self.strict || rank >= Rank::Granted;
        grants.then(|| named.into_iter().chain(self.of_unchecked_images(rank)).collect())
    }

    /// The ceiling that the settings name for words of this rank; `None` where they name none.
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

    /// Whether a word of this rank may come from an image that nobody checked.
    pub fn is_unchecked(&self, rank: Rank) -> bool {
        self.ignore_env && rank == Rank::Environment
    }
}

impl Ceiling {
    /// The bound in bytes on this GPU; `None` is no bound.
    pub fn on(self, gpu: &Gpu) -> Result<Option<DeviceMemory>, RequestError> {
        Ok(match self.memory {
            MemoryRequest::Bytes(memory) => Some(memory),
            MemoryRequest::Percent(percent) => Some(total(gpu)?.percent(percent)),
            MemoryRequest::Rest => None,
        })
    }

    /// Refuses `memory` where it is above this ceiling; `by` is the word that asks.
    pub fn hold_memory(self, by: &str, memory: DeviceMemory, gpu: &Gpu) -> Result<(), RequestError> {
        match self.on(gpu)? {
            Some(most) if memory > most => Err(self.passed(by, most.to_string())),
            _ => Ok(()),
        }
    }

    /// Refuses `most` where it is above this ceiling; `by` is the word that asks.
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
