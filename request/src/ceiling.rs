//! The most that channels of little trust may grant by themselves. Other systems' claims are held to it where they are
//! merged, requests by our own keys here.

use gpushare_inventory::{DeviceMemory, Gpu};

use crate::cards::{Cards, total};
use crate::channel::Trust;
use crate::claim::Cap;
use crate::error::RequestError;
use crate::grammar::{Devices, MemoryAsk};
use crate::{Ceilings, NvidiaPolicy, Policy, Request, Share};

/// What one channel may grant on a GPU at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ceiling {
    pub most: MemoryAsk,
    /// What an administrator would change.
    pub setting: &'static str,
}

impl Ceilings {
    /// That of the channels of this trust; `None` where nobody set one.
    pub(crate) fn of(&self, trust: Trust) -> Option<Ceiling> {
        let (most, setting) = match trust {
            Trust::Environment => (self.env, "request.env_ceiling"),
            Trust::Pod => (self.pod, "request.pod_ceiling"),
            Trust::Granted => return None,
        };
        Some(Ceiling { most: most?, setting })
    }
}

impl Policy {
    /// Whether a word of this trust may be that of an image which nobody checked.
    pub(crate) fn is_unchecked(&self, trust: Trust) -> bool {
        self.ignore_env && trust == Trust::Environment
    }

    /// What bounds the sources of this trust: what the settings name, and for words of images that nobody checked what every
    /// container may have.
    pub(crate) fn ceilings_of(&self, trust: Trust, unchecked: bool) -> impl Iterator<Item = Ceiling> {
        let default = self.default_memory.filter(|_| unchecked);
        let default =
            default.map(|most| Ceiling { most: MemoryAsk::Bytes(most), setting: "request.default_memory" });
        self.ceilings.of(trust).into_iter().chain(default)
    }

    /// Holds compute that such a word, `by`, states to what every container may have.
    pub(crate) fn hold_compute(&self, by: &str, most: Cap) -> Result<(), RequestError> {
        match self.default_cores {
            Some(default) if most > Cap::from(default) => Err(RequestError::AboveCeiling {
                by: by.to_owned(),
                ceiling: format!("{default} of compute"),
                setting: "request.default_cores",
            }),
            _ => Ok(()),
        }
    }

    /// Refuses such a word where it is no request.
    pub(crate) fn refuse_unread(&self, by: &str) -> Result<(), RequestError> {
        match self.nvidia {
            NvidiaPolicy::Ignore | NvidiaPolicy::Refuse => Err(RequestError::Unread { by: by.to_owned() }),
            NvidiaPolicy::DefaultShare | NvidiaPolicy::Whole => Ok(()),
        }
    }
}

impl Ceiling {
    /// In memory of this GPU; `None` is no bound.
    pub fn on(self, gpu: &Gpu) -> Result<Option<DeviceMemory>, RequestError> {
        Ok(match self.most {
            MemoryAsk::Bytes(memory) => Some(memory),
            MemoryAsk::Percent(percent) => Some(total(gpu)?.percent(percent)),
            MemoryAsk::Rest => None,
        })
    }

    /// The request on GPUs of `cards`, on none of which it gets more. Memory that `by` states is refused above it, the node's
    /// default is lowered.
    pub fn hold(self, mut request: Request, by: Option<&str>, cards: Cards) -> Result<Request, RequestError> {
        let named = match &request.devices {
            Devices::Any(_) | Devices::All => cards.all(),
            Devices::These(list) => list
                .iter()
                .map(|selector| cards.find("the list of GPUs", selector))
                .collect::<Result<_, _>>()?,
        };
        for gpu in named.into_iter().filter(|gpu| request.model.takes(&gpu.model)) {
            let asked = match request.memory {
                MemoryAsk::Bytes(memory) => memory,
                MemoryAsk::Percent(percent) => total(gpu)?.percent(percent),
                MemoryAsk::Rest => total(gpu)?,
            };
            let Some(most) = self.on(gpu)?.filter(|most| asked > *most) else { continue };
            if let Some(by) = by {
                return Err(self.passed(by, most));
            }
            let note = format!("no memory was asked for: {most} counts ({})", self.setting);
            if !request.notes.contains(&note) {
                request.notes.push(note);
            }
            let share = Share { memory: MemoryAsk::Bytes(most), cores: request.cores };
            request.particular.push((gpu.uuid, share));
        }
        Ok(request)
    }

    /// What to say of `by`, which asks for more.
    pub fn passed(self, by: &str, most: DeviceMemory) -> RequestError {
        RequestError::AboveCeiling { by: by.to_owned(), ceiling: most.to_string(), setting: self.setting }
    }
}
