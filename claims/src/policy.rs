//! The node's rules for requests, as its settings have them.

use gpushare_inventory::{Capabilities, DeviceMemory, Gpu};

use crate::amount::Cap;
use crate::error::RequestError;
use crate::gpus::total;
use crate::grammar::{Cores, MemoryRequest};
use crate::patterns::KeyPatterns;
use crate::rank::Rank;
use crate::selector::IndexMeaning;

/// The administrator's rules for requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// Only trusted channels grant; env and pod annotations may lower what one of them granted.
    pub strict: bool,
    /// The annotations that only a device plugin writes, or whoever calls the engine.
    pub trusted_annotations: KeyPatterns,
    /// Whether the engine is CRI-O, whose word counts then for which annotations are the container's own.
    pub crio: bool,
    /// What other channels may grant under `strict`.
    pub ceilings: Ceilings,
    /// Whether GPUs that mounts name are a request (the device plugin's strategy `volume-mounts`).
    pub volume_mounts: bool,
    /// Dialects that are not read, by their names.
    pub unread_dialects: Vec<String>,
    /// What becomes of another system's interception library.
    pub interceptor: InterceptorPolicy,
    /// What single dialects leave to the node.
    pub dialects: DialectSettings,
    /// Switches of other systems that turn their limits off, and do so here too, by their keys
    /// ([`switch_names`](crate::switch_names)): such a container asks for whole cards.
    pub switches: Vec<String>,
    /// Whether the environment is read for gpushare's own keys at all.
    pub ignore_env: bool,
    /// Memory for a container that names no size, a size or a part of each GPU; `None` is all that is left on the GPU.
    pub default_memory: Option<MemoryRequest>,
    /// Compute for a container that names none; `None` is no limit.
    pub default_cores: Option<Cores>,
    /// What a container gets that names GPUs by NVIDIA's variables and no limit.
    pub nvidia: NvidiaPolicy,
    /// The driver capabilities that containers may have; `None` is every one.
    pub capabilities: Option<Capabilities>,
}

/// What other systems' requests leave open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DialectSettings {
    /// What the numbers of Aliyun's device plugin mean; it writes minors.
    pub aliyun_index: IndexMeaning,
    /// What Aliyun's plugin counts memory in, in bytes; `None` is found out by the GPUs' sizes.
    pub aliyun_unit: Option<u64>,
    /// Whether a limit of 0 in HAMi's keys says nothing, as in some forks; else it is an error.
    pub hami_zero_unstated: bool,
    /// How many shards Slurm has on each GPU; the environment of a job does not tell.
    pub slurm_shards_per_gpu: Option<u32>,
    /// Whether Slurm's percentage under MPS is one of memory, too.
    pub slurm_mps_memory: bool,
}

/// The most that channels of little trust may grant on a GPU by themselves; `None` is nothing under [`Policy::strict`],
/// and no bound elsewhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ceilings {
    /// Annotations of pods.
    pub pod: Option<MemoryRequest>,
    /// Variables: the image's author can use it, too.
    pub env: Option<MemoryRequest>,
}

/// What naming GPUs without a share means. The bundle does not tell the image's environment from the user's, so an
/// image can set `NVIDIA_VISIBLE_DEVICES`: its list of GPUs never grants more than the node's default share. A name of
/// gpushare's own CDI devices in it is as much as a variable of gpushare's, for which [`Policy::ignore_env`] and
/// [`Policy::strict`] are the rules; where it is not read, it is an error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NvidiaPolicy {
    /// The default share on the GPUs it names.
    #[default]
    DefaultShare,
    /// The whole cards, which nobody else gets a share of.
    Whole,
    /// `create` fails and names the keys to set.
    Refuse,
    /// A list in a variable is no request. GPUs that kubelet or the engine's caller handed over are one all the same.
    Ignore,
}

/// What an administrator wants where another system's library is in the bundle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InterceptorPolicy {
    /// It is taken out, and gpushare's holds the limit.
    #[default]
    Replace,
    /// It stays and holds the limit; gpushare only keeps the books.
    StandDown,
}

/// The most that one channel may grant on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ceiling {
    memory: MemoryRequest,
    cores: Cap,
    /// What an administrator would change.
    setting: &'static str,
}

impl Policy {
    /// What holds the sources of this rank; `None` where they may only lower what others grant.
    pub fn authority(&self, rank: Rank) -> Option<Vec<Ceiling>> {
        let named = self.ceiling(rank);
        let grants = named.is_some() || !self.strict || rank >= Rank::Granted;
        grants.then(|| named.into_iter().chain(self.of_unchecked_images(rank)).collect())
    }

    /// What the settings let the sources of this rank grant at most; `None` where they name nothing.
    pub fn ceiling(&self, rank: Rank) -> Option<Ceiling> {
        let (memory, setting) = match rank {
            Rank::Environment => (self.ceilings.env, "request.env_ceiling"),
            Rank::Pod => (self.ceilings.pod, "request.pod_ceiling"),
            Rank::Granted | Rank::Handed => return None,
        };
        Some(Ceiling { memory: memory?, cores: Cap::Unlimited, setting })
    }

    /// What every container may have is the most for words of images that nobody checked.
    fn of_unchecked_images(&self, rank: Rank) -> impl Iterator<Item = Ceiling> {
        let is_unchecked = self.is_unchecked(rank);
        let memory = self.default_memory.filter(|_| is_unchecked);
        let memory =
            memory.map(|memory| Ceiling { memory, cores: Cap::Unlimited, setting: "request.default_memory" });
        let cores = self.default_cores.filter(|_| is_unchecked).map(Cap::from);
        let cores = cores.map(|cores| Ceiling {
            memory: MemoryRequest::Rest,
            cores,
            setting: "request.default_cores",
        });
        memory.into_iter().chain(cores)
    }

    /// Whether a word of this rank may be that of an image which nobody checked.
    pub fn is_unchecked(&self, rank: Rank) -> bool {
        self.ignore_env && rank == Rank::Environment
    }
}

impl Ceiling {
    /// In memory of this GPU; `None` is no bound.
    pub fn on(self, gpu: &Gpu) -> Result<Option<DeviceMemory>, RequestError> {
        Ok(match self.memory {
            MemoryRequest::Bytes(memory) => Some(memory),
            MemoryRequest::Percent(percent) => Some(total(gpu)?.percent(percent)),
            MemoryRequest::Rest => None,
        })
    }

    /// What an administrator would change.
    pub fn setting(self) -> &'static str {
        self.setting
    }

    /// Refuses more memory than this, which `by` states.
    pub fn hold_memory(self, by: &str, memory: DeviceMemory, gpu: &Gpu) -> Result<(), RequestError> {
        match self.on(gpu)? {
            Some(most) if memory > most => Err(self.passed(by, most.to_string())),
            _ => Ok(()),
        }
    }

    /// Refuses more compute than this, which `by` states.
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
