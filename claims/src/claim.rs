//! What one source says of the share, in values of this node: which GPUs, how many, and how much of each.

use gpushare_inventory::{Capabilities, Gpu, GpuUuid};

use crate::amount::{Amount, Cap};
use crate::error::RequestError;
use crate::grammar::{ComputePolicy, Cores, MemoryRequest, Mode, Priority, Scope};
use crate::model::ModelFilter;
use crate::rank::Rank;
use crate::words::Word;

/// What a source means that names no GPU and no number of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Span {
    /// One GPU, which placement chooses.
    One,
    /// Every GPU that the others leave.
    #[default]
    All,
}

/// What one word says.
#[derive(Clone, Debug)]
pub struct Claim {
    /// The word that says it, for messages.
    pub by: String,
    /// Who can have written it.
    pub rank: Rank,
    /// Name and value, where the word is a variable.
    pub variable: Option<(String, String)>,
    /// Whether it asks for a share; else it only bounds what another asks for.
    pub asks: bool,
    /// The GPUs, in the container's order; `None` where it names none.
    pub gpus: Option<Vec<GpuUuid>>,
    /// How many, where it says a number.
    pub count: Option<usize>,
    /// What it means where it names no GPU and no number.
    pub span: Span,
    /// Of every GPU that `particular` does not have.
    pub each: Amount,
    /// Of single GPUs.
    pub particular: Vec<(GpuUuid, Amount)>,
    /// How the GPUs are given, where it says so.
    pub mode: Option<Mode>,
    /// How much of idle time may be used beyond the cap.
    pub burst: Option<Cores>,
    /// The share's priority.
    pub priority: Option<Priority>,
    /// How its compute is held.
    pub compute_policy: Option<ComputePolicy>,
    /// Which models will do. Two claims that differ are a contradiction.
    pub model: Option<ModelFilter>,
    /// Parts of the driver.
    pub capabilities: Option<Capabilities>,
    /// Whose the share is.
    pub scope: Option<Scope>,
    /// Whether its writer knows gpushare, and takes the node's default for what is left out.
    pub takes_defaults: bool,
    /// What whoever asked, or the administrator, should know.
    pub notes: Vec<String>,
}

impl Claim {
    /// What `word` says, so far nothing.
    pub fn by(word: Word) -> Self {
        Self {
            by: word.to_string(),
            rank: word.rank,
            variable: word.is_variable.then(|| (word.key.to_owned(), word.value.to_owned())),
            asks: true,
            gpus: None,
            count: None,
            span: Span::All,
            each: Amount::default(),
            particular: Vec::new(),
            mode: None,
            burst: None,
            priority: None,
            compute_policy: None,
            model: None,
            capabilities: None,
            scope: None,
            takes_defaults: false,
            notes: Vec::new(),
        }
    }

    /// A claim for each of `words`, of the same amount of each GPU.
    pub fn each_of<'a>(
        words: impl Iterator<Item = Word<'a>>,
        amount: impl Fn(Word<'a>) -> Result<Amount, RequestError>,
    ) -> Result<Vec<Self>, RequestError> {
        words.map(|word| Ok(Self::by(word).each(amount(word)?))).collect()
    }

    /// The same as a bound of what others ask for.
    pub fn bounding(self) -> Self {
        Self { asks: false, ..self }
    }

    /// The same, and a note.
    pub fn noting(mut self, note: impl Into<String>) -> Self {
        self.notes.push(note.into());
        self
    }

    /// The same of these GPUs, each once.
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

    /// The same amount of each GPU.
    pub fn each(self, amount: Amount) -> Self {
        Self { each: amount, ..self }
    }

    /// Of each of these GPUs what `amount` makes of its position and of it. Which GPUs the container has is not said.
    pub fn on(
        self,
        gpus: &[&Gpu],
        amount: impl Fn(usize, &Gpu) -> Result<Amount, RequestError>,
    ) -> Result<Self, RequestError> {
        let of = |(position, gpu): (usize, &&Gpu)| Ok((gpu.uuid, amount(position, gpu)?));
        let particular = gpus.iter().enumerate().map(of).collect::<Result<_, RequestError>>()?;
        Ok(Self { particular, ..self })
    }

    /// The same for whole cards, which nobody else has a share of.
    pub fn exclusive(self) -> Self {
        Self { mode: Some(Mode::Exclusive), ..self }
    }

    /// Whether it is for whole cards.
    pub fn is_exclusive(&self) -> bool {
        self.mode == Some(Mode::Exclusive)
    }

    /// Whether another system wrote it.
    pub fn is_foreign(&self) -> bool {
        !self.takes_defaults
    }

    /// Whether it speaks of amounts at all.
    pub fn states_amounts(&self) -> bool {
        let states = |amount: &Amount| amount.memory.is_some() || amount.cores.is_some();
        self.mode.is_some() || states(&self.each) || self.particular.iter().any(|(_, amount)| states(amount))
    }

    /// What it says of one GPU; of none known, what it says of each.
    pub fn amount_on(&self, gpu: Option<GpuUuid>) -> Amount {
        let particular = self.particular.iter().find(|(other, _)| Some(*other) == gpu);
        particular.map_or(self.each, |(_, amount)| *amount)
    }

    /// The most compute that may be used of one GPU, idle time included; `None` where it states no cap.
    pub fn most_compute_on(&self, gpu: Option<GpuUuid>) -> Option<Cap> {
        let burst = self.burst.map(Cap::from);
        match self.amount_on(gpu).cores {
            Some(cap) => Some(burst.map_or(cap, |burst| cap.max(burst))),
            None => burst,
        }
    }

    /// Whether it speaks of every GPU that `other` does.
    pub fn covers(&self, other: &Self) -> bool {
        let speaks = |gpu: &GpuUuid| self.particular.iter().any(|(own, _)| own == gpu);
        self.particular.is_empty() || other.particular.iter().all(|(gpu, _)| speaks(gpu))
    }

    /// What it states, for an order among words for one thing: the more, the later.
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
