//! MIG instances of a simulated GPU. In the state each is a separate GPU with its own memory, multiprocessors
//! and time line; it only shares the card's device node.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::state::{Gpu, State};

/// An instance's relation to its card, and the numbers to open it. All zero for a whole GPU.
#[repr(C)]
pub struct Part {
    /// Index of its card in the state, plus 1; 0 for a whole GPU.
    pub card: AtomicU32,
    /// Id of its GPU instance; that of its compute instance is 0.
    pub gpu_instance: AtomicU32,
    /// Minor of the GPU instance's node below `/dev/nvidia-caps`; the compute instance's is the next.
    pub capability: AtomicU32,
    /// Slices of the card's multiprocessors, of which a card has 8.
    pub slices: AtomicU32,
}

/// The size of an instance: slices of multiprocessors and bytes of memory, as in the name `1g.10gb`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Size {
    /// Its name in NVML, as `1g.10gb`.
    pub name: String,
    /// Slices of the card's multiprocessors, of which a card has 8.
    pub slices: u32,
    /// Memory in bytes.
    pub memory: u64,
}

impl Size {
    /// Parses `1g.10gb`; `None` for anything else.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        let (slices, memory) = name.strip_suffix("gb")?.split_once("g.")?;
        let (slices, memory) = (slices.parse().ok()?, memory.parse::<u64>().ok()?);
        (1..=7).contains(&slices).then(|| Self { name: name.to_owned(), slices, memory: memory << 30 })
    }
}

impl Gpu {
    /// Returns the index of the card to which this instance belongs.
    #[must_use]
    pub fn card(&self) -> Option<usize> {
        (self.part.card.load(Ordering::Relaxed) as usize).checked_sub(1)
    }

    /// Returns the minors of the nodes below `/dev/nvidia-caps` that open it.
    #[must_use]
    pub fn capabilities(&self) -> [u32; 2] {
        let first = self.part.capability.load(Ordering::Relaxed);
        [first, first + 1]
    }
}

impl State {
    /// Whether the GPU with this index is divided, or in MIG mode without any instance.
    #[must_use]
    pub fn is_mig(&self, index: usize) -> bool {
        self.gpus().get(index).is_some_and(|gpu| gpu.mig_mode.load(Ordering::Relaxed) == 1)
    }

    /// Lists the indexes of the instances of the card with this index, in NVML's order.
    pub fn instances(&self, card: usize) -> impl Iterator<Item = usize> + '_ {
        let gpus = self.gpus().iter().enumerate();
        let of_card = gpus.filter(move |(_, gpu)| gpu.card() == Some(card));
        of_card.filter(|(_, gpu)| gpu.excluded.load(Ordering::Relaxed) == 0).map(|(index, _)| index)
    }
}

#[cfg(test)]
mod tests {
    use super::Size;

    #[test]
    fn a_size_is_slices_and_gigabytes() {
        let size = Size::parse("3g.40gb").map(|size| (size.slices, size.memory));
        assert_eq!(size, Some((3, 40 << 30)));
        for text in ["", "3g", "40gb", "0g.5gb", "8g.80gb", "1g.gb", "1g.10GB"] {
            assert_eq!(Size::parse(text), None, "{text:?}");
        }
    }
}
