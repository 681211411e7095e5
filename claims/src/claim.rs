//! The claim that one source makes, resolved for this node: which GPUs, how many, and how much of each.

use gpushare_inventory::{Capabilities, DeviceMemory, Gpu, GpuUuid, Profile};

use crate::amount::{Amount, Cap};
use crate::error::RequestError;
use crate::grammar::{ComputePolicy, Cores, MemoryRequest, Mode, Priority, Scope, SupervisorRequired};
use crate::model::ModelFilter;
use crate::rank::Rank;
use crate::words::Word;

/// How many GPUs a claim means when it gives neither names nor a number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Span {
    /// One GPU, which placement chooses.
    One,
    /// Every GPU that the other claims allow.
    #[default]
    All,
}

/// The claim that one word of a bundle makes.
#[derive(Clone, Debug, Default)]
pub struct Claim {
    /// The word as `key="value"`, shortened, for messages.
    pub by: String,
    /// How far the word is trusted.
    pub rank: Rank,
    /// Name and full value if the word is an environment variable.
    pub variable: Option<(String, String)>,
    /// Whether it asks for a share. If not, it only bounds what another claim asks for.
    pub asks: bool,
    /// The GPUs in the container's order; `None` if it names none.
    pub gpus: Option<Vec<GpuUuid>>,
    /// The number of GPUs, if the claim states one.
    pub count: Option<usize>,
    /// Used only if both `gpus` and `count` are `None`.
    pub span: Span,
    /// The amount on every GPU that `particular` does not list.
    pub each: Amount,
    /// Amounts that apply to single GPUs only.
    pub particular: Vec<(GpuUuid, Amount)>,
    /// `None` if the word does not choose between a share and whole GPUs.
    pub mode: Option<Mode>,
    /// The most compute that may be used while the GPU is otherwise idle, in percent of the GPU.
    pub burst: Option<Cores>,
    /// The most memory that the container may hold on each GPU, including memory above its guaranteed share
    /// while the GPU has it free. The smallest value that any claim states wins.
    pub memory_limit: Option<DeviceMemory>,
    /// Total host memory that may stand in for GPU memory. The smallest value that any claim states wins.
    pub host_memory: Option<DeviceMemory>,
    /// The share's priority, 0 (low) to 9. The lowest that any claim states wins.
    pub priority: Option<Priority>,
    /// How the compute limit is enforced. The policy of the most trusted claim wins.
    pub compute_policy: Option<ComputePolicy>,
    /// The GPU models that the container accepts. Two claims with different filters are a contradiction.
    pub model: Option<ModelFilter>,
    /// The requested MIG instance size. Two claims with different sizes are a contradiction.
    pub profile: Option<Profile>,
    /// The parts of the driver (compute, video and so on) that the container asks for.
    pub capabilities: Option<Capabilities>,
    /// Whether the container or its whole pod holds the share.
    pub scope: Option<Scope>,
    /// Whether a supervisor must hold the share. One claim that says so is enough.
    pub supervisor: Option<SupervisorRequired>,
    /// Whether the author knows gpushare and so accepts the node's defaults for anything left out. False for
    /// words of other systems.
    pub takes_defaults: bool,
    /// Messages for the requesting user and for the administrator.
    pub notes: Vec<String>,
}

impl Claim {
    /// A claim by `word` that asks for a share and states nothing else yet.
    pub fn by(word: Word) -> Self {
        Self {
            by: word.to_string(),
            rank: word.rank,
            variable: word.is_variable.then(|| (word.key.to_owned(), word.value.to_owned())),
            asks: true,
            ..Self::default()
        }
    }

    /// Makes one claim for each of `words`. `amount` reads the amount from the word; it applies to every GPU.
    pub fn each_of<'a>(
        words: impl Iterator<Item = Word<'a>>,
        amount: impl Fn(Word<'a>) -> Result<Amount, RequestError>,
    ) -> Result<Vec<Self>, RequestError> {
        words.map(|word| Ok(Self::by(word).each(amount(word)?))).collect()
    }

    /// Turns the claim into a bound on what other claims ask for.
    pub fn bounding(self) -> Self {
        Self { asks: false, ..self }
    }

    /// Adds these notes.
    pub fn noting(mut self, notes: impl IntoIterator<Item = String>) -> Self {
        self.notes.extend(notes);
        self
    }

    /// Names these GPUs and drops duplicates.
    pub fn naming(mut self, gpus: &[&Gpu]) -> Self {
        let mut named = Vec::new();
        for gpu in gpus {
            if !named.contains(&gpu.uuid) {
                named.push(gpu.uuid);
            }
        }
        self.gpus = Some(named);
        self
    }

    /// States this amount for every GPU that has no amount of its own.
    pub fn each(self, amount: Amount) -> Self {
        Self { each: amount, ..self }
    }

    /// States an amount for each of these GPUs, computed by `amount` from its position and the GPU. This does
    /// not decide which GPUs the container gets.
    pub fn on(
        self,
        gpus: &[&Gpu],
        amount: impl Fn(usize, &Gpu) -> Result<Amount, RequestError>,
    ) -> Result<Self, RequestError> {
        let of = |(position, gpu): (usize, &&Gpu)| Ok((gpu.uuid, amount(position, gpu)?));
        let particular = gpus.iter().enumerate().map(of).collect::<Result<_, RequestError>>()?;
        Ok(Self { particular, ..self })
    }

    /// States this amount for each of these GPUs, like [`Claim::on`].
    pub fn on_each<'a>(self, gpus: impl IntoIterator<Item = &'a Gpu>, amount: Amount) -> Self {
        Self { particular: gpus.into_iter().map(|gpu| (gpu.uuid, amount)).collect(), ..self }
    }

    /// Asks for whole GPUs, which are never shared with other containers.
    pub fn exclusive(self) -> Self {
        Self { mode: Some(Mode::Exclusive), ..self }
    }

    /// Whether it asks for whole GPUs.
    pub fn is_exclusive(&self) -> bool {
        self.mode == Some(Mode::Exclusive)
    }

    /// Whether the word belongs to a system other than gpushare.
    pub fn is_foreign(&self) -> bool {
        !self.takes_defaults
    }

    /// Whether it states a mode or an amount of memory or compute.
    pub fn states_amounts(&self) -> bool {
        let states = |amount: &Amount| amount.memory.is_some() || amount.cores.is_some();
        self.mode.is_some() || states(&self.each) || self.particular.iter().any(|(_, amount)| states(amount))
    }

    /// The amount that the claim states for `gpu`; with `None`, the amount for every GPU.
    pub fn amount_on(&self, gpu: Option<GpuUuid>) -> Amount {
        let particular = self.particular.iter().find(|(other, _)| Some(*other) == gpu);
        particular.map_or(self.each, |(_, amount)| *amount)
    }

    /// The most compute of one GPU that may be used, idle time included; `None` if the claim states no cap.
    pub fn most_compute_on(&self, gpu: Option<GpuUuid>) -> Option<Cap> {
        let burst = self.burst.map(Cap::from);
        match self.amount_on(gpu).cores {
            Some(cap) => Some(burst.map_or(cap, |burst| cap.max(burst))),
            None => burst,
        }
    }

    /// Whether the claim's amounts apply to every GPU for which `other` states one.
    pub fn covers(&self, other: &Self) -> bool {
        let speaks = |gpu: &GpuUuid| self.particular.iter().any(|(own, _)| own == gpu);
        self.particular.is_empty() || other.particular.iter().all(|(gpu, _)| speaks(gpu))
    }

    /// Sort key for claims that state the same thing: more memory sorts higher, then more compute. Memory
    /// counts only in bytes; a percentage or no memory sorts as the most.
    pub fn size(&self) -> (u64, Cap) {
        let amounts = self.particular.iter().map(|(_, amount)| amount).chain([&self.each]);
        let memory = amounts.clone().filter_map(|amount| match amount.memory {
            Some(MemoryRequest::Bytes(memory)) => Some(memory.bytes()),
            _ => None,
        });
        let cores = amounts.filter_map(|amount| amount.cores).max();
        (memory.max().unwrap_or(u64::MAX), cores.unwrap_or(Cap::Unlimited))
    }
}
