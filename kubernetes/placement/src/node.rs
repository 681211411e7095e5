//! Nodes, tasks, and what of a node a task can get.

/// The most GPUs of a node.
pub const GPUS: usize = 16;
/// All of one GPU, in thousandths.
pub const WHOLE: u16 = 1000;

/// A set of GPU models, by their numbers below 64.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Models(u64);

impl Models {
    /// Every model.
    pub const ANY: Self = Self(0);

    /// This set with the model `number` too. [`Models::ANY`] is a set of none here.
    #[must_use]
    pub const fn with(self, number: u8) -> Self {
        Self(self.0 | 1 << (number % 64))
    }

    pub(crate) const fn has(self, number: u8) -> bool {
        self.0 == 0 || self.0 & 1 << (number % 64) != 0
    }
}

/// What a task needs of one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Task {
    /// Thousandths of a processor.
    pub cpu: u64,
    /// Memory of the node in MiB.
    pub memory: u64,
    /// How many GPUs; 0 is none.
    pub gpus: u8,
    /// Thousandths of each GPU, 1 to [`WHOLE`].
    pub share: u16,
    /// The models that it may get.
    pub models: Models,
}

impl Task {
    /// Thousandths of GPUs in all.
    #[must_use]
    pub fn demand(&self) -> u64 {
        u64::from(self.gpus) * u64::from(self.share)
    }

    /// Whether it may get GPUs of this model.
    pub(crate) const fn allows(&self, model: u8) -> bool {
        self.models.has(model)
    }
}

/// What is left of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Node {
    /// Thousandths of processors.
    pub cpu: u64,
    /// Memory in MiB.
    pub memory: u64,
    /// The number of its GPUs' model.
    pub model: u8,
    /// How many GPUs it has, at most [`GPUS`].
    pub gpus: u8,
    /// What is left of each GPU, in thousandths. Those beyond `gpus` are 0.
    pub rest: [u16; GPUS],
}

/// The GPUs of a node that a task would get, a bit for each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Place(u16);

impl Place {
    /// The GPU `index` alone.
    #[must_use]
    pub fn of(index: usize) -> Self {
        Self(1 << (index % GPUS))
    }

    /// The GPUs of both.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether it has GPUs, and all of them are of the other's.
    pub(crate) const fn is_within(self, other: Self) -> bool {
        self.0 != 0 && self.0 & !other.0 == 0
    }

    /// The indexes of the GPUs.
    pub fn gpus(self) -> impl Iterator<Item = usize> {
        (0..GPUS).filter(move |index| self.0 & 1 << index != 0)
    }
}

impl Node {
    /// A node of which nothing is given: `gpus` GPUs (at most [`GPUS`] count) of the model `model`.
    #[must_use]
    pub fn idle(cpu: u64, memory: u64, gpus: usize, model: u8) -> Self {
        let mut rest = [0; GPUS];
        rest.iter_mut().take(gpus).for_each(|rest| *rest = WHOLE);
        let gpus = u8::try_from(gpus.min(GPUS)).unwrap_or_default();
        Self { cpu, memory, model, gpus, rest }
    }

    /// What is left of its GPUs.
    pub fn gpus(&self) -> &[u16] {
        &self.rest[..usize::from(self.gpus)]
    }

    /// What is left of all its GPUs together.
    #[must_use]
    pub fn idle_share(&self) -> u64 {
        self.gpus().iter().map(|rest| u64::from(*rest)).sum()
    }

    /// Whether the task fits in any way.
    #[must_use]
    pub fn fits(&self, task: &Task) -> bool {
        let free = self.gpus().iter().filter(|rest| **rest >= task.share).count();
        let has_gpus = task.gpus == 0 || (free >= usize::from(task.gpus) && task.models.has(self.model));
        self.cpu >= task.cpu && self.memory >= task.memory && has_gpus
    }

    /// The node after the task came.
    #[must_use]
    pub fn after(&self, task: &Task, place: Place) -> Self {
        let mut after = *self;
        after.cpu = after.cpu.saturating_sub(task.cpu);
        after.memory = after.memory.saturating_sub(task.memory);
        place.gpus().for_each(|index| after.rest[index] = after.rest[index].saturating_sub(task.share));
        after
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_fits_where_each_of_its_needs_is_met() {
        let mut node = Node::idle(8000, 1024, 5, 1);
        node.rest[..5].copy_from_slice(&[300, 1000, 300, 600, 1000]);
        let one = Task { cpu: 1000, memory: 10, gpus: 1, share: 300, models: Models::ANY };
        for (task, want) in [
            (one, true),
            (Task { share: WHOLE, ..one }, true),
            (Task { gpus: 2, share: WHOLE, ..one }, true),
            (Task { gpus: 3, share: 500, ..one }, true),
            (Task { gpus: 3, share: WHOLE, ..one }, false),
            (Task { gpus: 0, share: 0, ..one }, true),
            (Task { cpu: 8001, ..one }, false),
            (Task { memory: 1025, gpus: 0, share: 0, ..one }, false),
            (Task { models: Models::ANY.with(1), ..one }, true),
            (Task { models: Models::ANY.with(2).with(3), ..one }, false),
            (Task { gpus: 0, share: 0, models: Models::ANY.with(2), ..one }, true),
        ] {
            assert_eq!(node.fits(&task), want, "{task:?}");
        }
    }
}
