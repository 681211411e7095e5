//! What one source says of the share, in values of this node.

use gpushare_inventory::{DeviceMemory, Gpu, GpuUuid};

use crate::Policy;
use crate::channel::Trust;
use crate::error::RequestError;
use crate::grammar::{Cores, Priority};
use crate::reading::Said;

/// A limit on compute as it was stated. Its order is that of what may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Cap {
    Percent(Cores),
    /// Stated in so many words that there is none.
    Unlimited,
}

impl Cap {
    /// `percent` of a GPU, of which 100 are no limit; `None` outside 1 to 100.
    pub fn of(percent: u64) -> Option<Self> {
        match percent {
            100 => Some(Self::Unlimited),
            _ => u8::try_from(percent).ok().and_then(Cores::new).map(Self::Percent),
        }
    }
}

impl From<Cores> for Cap {
    fn from(cores: Cores) -> Self {
        if cores.percent() == 100 { Self::Unlimited } else { Self::Percent(cores) }
    }
}

/// What is said of one GPU; `None` is nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Amount {
    pub memory: Option<DeviceMemory>,
    pub cores: Option<Cap>,
}

/// What one source says.
#[derive(Clone, Debug)]
pub(crate) struct Claim {
    /// The word that says it, for messages.
    pub by: String,
    pub trust: Trust,
    /// The GPUs, in the container's order; `None` where it names none.
    pub gpus: Option<Vec<GpuUuid>>,
    /// How many it asks for, where it says a number.
    pub count: Option<usize>,
    /// Of every GPU that `particular` does not have.
    pub each: Amount,
    pub particular: Vec<(GpuUuid, Amount)>,
    /// Whole cards, which nobody else has a share of.
    pub exclusive: bool,
    /// How much of idle time may be used beyond the cap.
    pub burst: Option<Cores>,
    pub priority: Option<Priority>,
}

impl Claim {
    /// What `said` says, so far nothing.
    pub fn by(said: Said) -> Self {
        Self {
            by: said.to_string(),
            trust: said.trust,
            gpus: None,
            count: None,
            each: Amount::default(),
            particular: Vec::new(),
            exclusive: false,
            burst: None,
            priority: None,
        }
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
    pub fn each(mut self, amount: Amount) -> Self {
        self.each = amount;
        self
    }

    /// Of each of these GPUs what `amount` makes of its position and of it.
    pub fn on(
        mut self,
        gpus: &[&Gpu],
        amount: impl Fn(usize, &Gpu) -> Result<Amount, RequestError>,
    ) -> Result<Self, RequestError> {
        let of = |(position, gpu): (usize, &&Gpu)| Ok((gpu.uuid, amount(position, gpu)?));
        self.particular = gpus.iter().enumerate().map(of).collect::<Result<_, RequestError>>()?;
        Ok(self.naming(gpus))
    }

    /// The same, where it does not name the GPUs itself.
    pub fn stating(
        self,
        gpus: &[&Gpu],
        amount: impl Fn(usize, &Gpu) -> Result<Amount, RequestError>,
    ) -> Result<Self, RequestError> {
        Ok(Self { gpus: None, ..self.on(gpus, amount)? })
    }

    /// The order of sources: one that may grant before one that may only lower, and the more trusted before the less.
    pub fn rank(&self, policy: &Policy) -> (bool, Trust) {
        (self.trust.grants(policy), self.trust)
    }

    /// Whether it states a cap on compute of any GPU.
    pub fn caps_compute(&self) -> bool {
        let is_cap = |amount: &Amount| matches!(amount.cores, Some(Cap::Percent(_)));
        is_cap(&self.each) || self.particular.iter().any(|(_, amount)| is_cap(amount))
    }

    /// The most compute that may be used of one GPU, idle time included; `None` where it states no cap.
    pub fn most_compute_on(&self, gpu: GpuUuid) -> Option<Cap> {
        let cap = self.amount_on(gpu).cores?;
        Some(self.burst.map_or(cap, |burst| cap.max(burst.into())))
    }

    /// What it says of one GPU.
    pub fn amount_on(&self, gpu: GpuUuid) -> Amount {
        self.particular.iter().find(|(other, _)| *other == gpu).map_or(self.each, |(_, amount)| *amount)
    }
}
