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

    const fn has(self, number: u8) -> bool {
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

    /// Each way in which the task fits, but for those that leave the same behind. Several GPUs are taken the
    /// fullest first.
    pub fn places(&self, task: &Task) -> impl Iterator<Item = Place> + use<> {
        let fits = self.cpu >= task.cpu && self.memory >= task.memory;
        let node = *self;
        let share = task.share;
        let one = move |index: usize| {
            let rest = node.rest[index];
            rest >= share && !node.rest[..index].contains(&rest)
        };
        let ones = (0..usize::from(self.gpus)).filter(move |index| one(*index)).map(Place::of);
        let (alone, several) = match task.gpus {
            _ if !fits || (task.gpus > 0 && !task.models.has(self.model)) => (None, None),
            0 => (None, Some(Place::default())),
            1 => (Some(ones), None),
            count => (None, self.fullest(count, share)),
        };
        alone.into_iter().flatten().chain(several)
    }

    /// The `count` fullest GPUs that have a share free.
    fn fullest(&self, count: u8, share: u16) -> Option<Place> {
        let mut fitting: Vec<usize> =
            (0..usize::from(self.gpus)).filter(|index| self.rest[*index] >= share).collect();
        fitting.sort_by_key(|index| self.rest[*index]);
        let chosen = fitting.get(..usize::from(count))?;
        Some(Place(chosen.iter().fold(0, |all, index| all | Place::of(*index).0)))
    }

    /// Takes what the task needs, at a place that [`Node::places`] gave.
    pub fn take(&mut self, task: &Task, place: Place) {
        self.cpu = self.cpu.saturating_sub(task.cpu);
        self.memory = self.memory.saturating_sub(task.memory);
        place.gpus().for_each(|index| self.rest[index] = self.rest[index].saturating_sub(task.share));
    }

    /// Gives back what [`Node::take`] took.
    pub fn give_back(&mut self, task: &Task, place: Place) {
        self.cpu += task.cpu;
        self.memory += task.memory;
        place.gpus().for_each(|index| self.rest[index] = (self.rest[index] + task.share).min(WHOLE));
    }

    /// The node after the task came.
    #[must_use]
    pub fn after(&self, task: &Task, place: Place) -> Self {
        let mut after = *self;
        after.take(task, place);
        after
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(rest: &[u16]) -> Node {
        let mut node = Node::idle(8000, 1024, rest.len(), 1);
        node.rest[..rest.len()].copy_from_slice(rest);
        node
    }

    #[test]
    fn a_task_fits_where_each_of_its_needs_is_met() {
        let rest = [300, 1000, 300, 600, 1000];
        let one = Task { cpu: 1000, memory: 10, gpus: 1, share: 300, models: Models::ANY };
        let indexes = |task: Task| -> Vec<Vec<usize>> {
            node(&rest).places(&task).map(|place| place.gpus().collect()).collect()
        };
        for (task, want) in [
            (one, vec![vec![0], vec![1], vec![3]]),
            (Task { share: 301, ..one }, vec![vec![1], vec![3]]),
            (Task { share: WHOLE, ..one }, vec![vec![1]]),
            (Task { gpus: 2, share: WHOLE, ..one }, vec![vec![1, 4]]),
            (Task { gpus: 3, share: 500, ..one }, vec![vec![1, 3, 4]]),
            (Task { gpus: 3, share: WHOLE, ..one }, vec![]),
            (Task { gpus: 0, share: 0, ..one }, vec![vec![]]),
            (Task { cpu: 8001, ..one }, vec![]),
            (Task { memory: 1025, gpus: 0, share: 0, ..one }, vec![]),
            (Task { models: Models::ANY.with(1), ..one }, vec![vec![0], vec![1], vec![3]]),
            (Task { models: Models::ANY.with(2).with(3), ..one }, vec![]),
            (Task { gpus: 0, share: 0, models: Models::ANY.with(2), ..one }, vec![vec![]]),
        ] {
            assert_eq!(indexes(task), want, "{task:?}");
        }
    }

    #[test]
    fn what_is_taken_comes_back() {
        let before = node(&[1000, 400]);
        let task = Task { cpu: 500, memory: 24, gpus: 2, share: 400, models: Models::ANY };
        let place = before.places(&task).next().unwrap();
        let mut after = before.after(&task, place);
        assert_eq!((after.gpus(), after.cpu, after.memory), (&[600, 0][..], 7500, 1000));
        after.give_back(&task, place);
        assert_eq!(after, before);
    }
}
