//! The node's rules for requests, as its settings have them.

use gpushare_inventory::{Capabilities, DeviceMemory};

use crate::{Cores, IndexMeaning, InterceptorPolicy, KeyPatterns, MemoryAsk};

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
    /// Switches of other systems that turn their limits off, and do so here too, by their keys ([`switch_names`]): such a
    /// container asks for whole cards.
    pub switches: Vec<String>,
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

/// The most that channels of little trust may grant on a GPU by themselves; `None` is nothing under [`Policy::strict`], and no
/// bound elsewhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ceilings {
    /// Annotations of pods.
    pub pod: Option<MemoryAsk>,
    /// Variables: the image's author can use it, too.
    pub env: Option<MemoryAsk>,
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
    /// The whole cards, which nobody else gets a share of.
    Whole,
    /// `create` fails and names the keys to set.
    Refuse,
    /// No request: the container gets no GPU from gpushare.
    Ignore,
}
