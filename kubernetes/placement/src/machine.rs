//! What the GPUs of one node have, what is left of them, and what a pod needs of them: in bytes and percent.

use crate::node::{GPUS, Models, Node, Place, Task, WHOLE};

const MIB: u64 = 1 << 20;

/// What shares may have of one GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Gpu {
    /// Bytes that all shares together may have.
    pub memory: u64,
    /// Bytes that one share may have at most.
    pub per_share: u64,
    /// Bytes of a share that names no memory.
    pub default_memory: u64,
    /// Percent of its compute that all shares together may have.
    pub cores: u16,
    /// How many shares there may be of it; 0 is no bound.
    pub shares: u16,
    /// GPUs of one group reach each other fast; 0 is no group.
    pub group: u8,
    /// Whether new shares of it are given.
    pub is_open: bool,
}

/// What a node has when it is idle.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// Thousandths of processors.
    pub cpu: u64,
    /// Memory in MiB.
    pub memory: u64,
    /// The number of its GPUs' model.
    pub model: u8,
    /// Its GPUs. Those beyond [`GPUS`] are not given.
    pub gpus: Vec<Gpu>,
}

/// What one container needs of GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Share {
    /// How many GPUs, at least 1.
    pub gpus: u8,
    /// What of each.
    pub part: Part,
}

/// What of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Part {
    /// All of it: nobody else may have a share of it.
    Whole,
    /// Memory, and compute in percent. Without compute there is no limit, and none of it is taken.
    Of(Memory, u16),
}

/// How much memory of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Memory {
    /// What the node gives to a share that names none.
    Default,
    /// So many bytes.
    Bytes(u64),
    /// `count` of `of` equal parts of the most that one share may have, in whole MiB.
    Part {
        /// How many.
        count: u16,
        /// Of how many, at least 1.
        of: u16,
    },
}

/// What a pod needs of one node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Needs {
    /// Thousandths of a processor.
    pub cpu: u64,
    /// Memory of the node in MiB.
    pub memory: u64,
    /// The models that it may get.
    pub models: Models,
    /// What its containers have at the same time.
    pub shares: Vec<Share>,
    /// What containers have that end before the others begin, each by itself.
    pub first: Vec<Share>,
}

/// Where each share of a pod is: those of [`Needs::shares`], then those of [`Needs::first`].
pub type Places = Vec<Place>;

/// Why a pod does not fit on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Misfit {
    /// The node is not known, has no GPU, or none of the models.
    NoGpu,
    /// A container asks for more GPUs than the node has.
    TooFew,
    /// A container asks for more of a GPU than it gets of any.
    TooLarge,
    /// It would fit if less was given of the GPUs.
    Full,
}

/// What is left of a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Left {
    memory: u64,
    cores: u16,
    /// Shares; where their number has no bound it stays as it is.
    shares: u16,
    is_idle: bool,
}

/// What shares have of a GPU together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Taken {
    pub memory: u64,
    pub cores: u16,
    pub shares: u16,
}

impl Taken {
    fn one(part: Part, gpu: &Gpu) -> Self {
        let (memory, cores) = part.of(gpu);
        Self { memory, cores, shares: 1 }
    }

    /// At the same time.
    fn and(self, other: Self) -> Self {
        Self {
            memory: self.memory.saturating_add(other.memory),
            cores: self.cores.saturating_add(other.cores),
            shares: self.shares.saturating_add(other.shares),
        }
    }

    /// One after the other.
    fn or(self, other: Self) -> Self {
        Self {
            memory: self.memory.max(other.memory),
            cores: self.cores.max(other.cores),
            shares: self.shares.max(other.shares),
        }
    }
}

/// What is left of a node.
#[derive(Clone, Debug, Default, Hash)]
pub(crate) struct State {
    gpus: Vec<(Gpu, Left)>,
    /// The same in thousandths.
    pub view: Node,
}

impl Needs {
    /// The first of its shares as a task, on GPUs like this one.
    #[must_use]
    pub fn task(&self, gpu: &Gpu) -> Task {
        let first = self.shares.first().or(self.first.first());
        let gpus = first.map_or(0, |share| share.gpus);
        let share = first.map_or(0, |share| share.thousandths(gpu));
        Task { cpu: self.cpu, memory: self.memory, gpus, share, models: self.models }
    }
}

impl Share {
    /// Thousandths of a GPU, of the one of which it is the most.
    fn thousandths(&self, gpu: &Gpu) -> u16 {
        let (memory, cores) = self.part.of(gpu);
        let of_memory = part(memory, gpu.memory, u64::div_ceil);
        let of_cores = part(cores.into(), gpu.cores.into(), u64::div_ceil);
        of_memory.max(of_cores)
    }
}

impl Left {
    /// Whether there may be one more share of the GPU.
    fn has_shares(&self, gpu: &Gpu) -> bool {
        gpu.shares == 0 || self.shares > 0
    }
}

impl Part {
    /// Bytes and percent of this GPU.
    #[must_use]
    pub fn of(self, gpu: &Gpu) -> (u64, u16) {
        match self {
            Self::Whole => (gpu.memory, gpu.cores),
            Self::Of(Memory::Default, cores) => (gpu.default_memory, cores),
            Self::Of(Memory::Bytes(bytes), cores) => (bytes, cores),
            Self::Of(Memory::Part { count, of }, cores) => {
                let bytes = u128::from(gpu.per_share) * u128::from(count.min(of)) / u128::from(of.max(1));
                (u64::try_from(bytes).unwrap_or(u64::MAX) & !(MIB - 1), cores)
            }
        }
    }

    /// Whether a share may have so much of it at all.
    fn is_possible(self, gpu: &Gpu) -> bool {
        let (memory, cores) = self.of(gpu);
        gpu.is_open && (self == Self::Whole || (memory <= gpu.per_share && cores <= gpu.cores))
    }
}

/// A part in thousandths of what there is; all of nothing.
fn part(amount: u64, of: u64, divided: impl Fn(u64, u64) -> u64) -> u16 {
    let whole = u64::from(WHOLE);
    let thousandths = match amount.checked_mul(whole) {
        _ if of == 0 => whole * u64::from(amount > 0),
        Some(product) => divided(product, of),
        None => divided(amount, (of / whole).max(1)),
    };
    u16::try_from(thousandths.min(whole)).unwrap_or(WHOLE)
}

impl State {
    /// The node with nothing given of it.
    pub fn idle(machine: &Machine) -> Self {
        let left = |gpu: &Gpu| {
            let Gpu { memory, cores, shares, .. } = *gpu;
            (*gpu, Left { memory, cores, shares, is_idle: true })
        };
        let gpus: Vec<(Gpu, Left)> = machine.gpus.iter().take(GPUS).map(left).collect();
        let view = Node::idle(machine.cpu, machine.memory, gpus.len(), machine.model);
        let mut state = Self { gpus, view };
        (0..state.gpus.len()).for_each(|index| state.look(index));
        state
    }

    /// Writes the view of one GPU anew.
    fn look(&mut self, index: usize) {
        let (gpu, left) = &self.gpus[index];
        let divided = |amount, of| amount / of;
        let of_memory = part(left.memory, gpu.memory, divided);
        let of_cores =
            if gpu.cores == 0 { WHOLE } else { part(left.cores.into(), gpu.cores.into(), divided) };
        let is_given = gpu.is_open && left.has_shares(gpu);
        self.view.rest[index] = if is_given { of_memory.min(of_cores) } else { 0 };
    }

    /// Takes amounts of GPUs, by index, and something of the host. What is given already may be more than
    /// there is.
    fn take(&mut self, amounts: &[(usize, Taken)]) {
        for (index, taken) in amounts {
            let Some((_, left)) = self.gpus.get_mut(*index) else { continue };
            left.memory = left.memory.saturating_sub(taken.memory);
            left.cores = left.cores.saturating_sub(taken.cores);
            left.shares = left.shares.saturating_sub(taken.shares);
            left.is_idle = false;
            self.look(*index);
        }
    }

    /// Takes what a pod has at these places.
    pub fn hold(&mut self, needs: &Needs, places: &[Place]) {
        self.view.cpu = self.view.cpu.saturating_sub(needs.cpu);
        self.view.memory = self.view.memory.saturating_sub(needs.memory);
        let used = self.used(needs, places);
        self.take(&used);
    }

    /// What a pod has of each GPU at these places: containers that end before the others leave theirs to
    /// them.
    pub fn used(&self, needs: &Needs, places: &[Place]) -> Vec<(usize, Taken)> {
        let mut used: Vec<Option<Taken>> = vec![None; self.gpus.len()];
        let amounts = |share: &Share, place: &Place| -> Vec<(usize, Taken)> {
            let known = place.gpus().filter_map(|index| Some((index, self.gpus.get(index)?)));
            known.map(|(index, (gpu, _))| (index, Taken::one(share.part, gpu))).collect()
        };
        for (share, place) in needs.shares.iter().zip(places) {
            for (index, taken) in amounts(share, place) {
                used[index] = Some(used[index].unwrap_or_default().and(taken));
            }
        }
        for (share, place) in needs.first.iter().zip(places.iter().skip(needs.shares.len())) {
            for (index, taken) in amounts(share, place) {
                used[index] = Some(used[index].unwrap_or_default().or(taken));
            }
        }
        used.iter().enumerate().filter_map(|(index, used)| Some((index, (*used)?))).collect()
    }

    /// Bytes and percent that are left of each GPU.
    pub fn left(&self) -> impl Iterator<Item = (u64, u16)> {
        self.gpus.iter().map(|(_, left)| (left.memory, left.cores))
    }

    fn fits(&self, share: &Share, index: usize) -> bool {
        let (gpu, left) = &self.gpus[index];
        let (memory, cores) = share.part.of(gpu);
        let is_free = left.memory >= memory && left.cores >= cores && left.has_shares(gpu);
        share.part.is_possible(gpu) && is_free && (share.part != Part::Whole || left.is_idle)
    }

    /// Each way in which a share fits, but for those that leave the same behind. Several GPUs are taken the
    /// fullest first, of one group where one has so many.
    pub fn places(&self, share: &Share) -> Vec<Place> {
        let fitting: Vec<usize> = (0..self.gpus.len()).filter(|index| self.fits(share, *index)).collect();
        if share.gpus <= 1 {
            let is_new = |index: &&usize| {
                let before = fitting.iter().take_while(|other| *other < *index);
                before.clone().all(|other| self.gpus[*other] != self.gpus[**index])
            };
            return fitting.iter().filter(is_new).map(|index| Place::of(*index)).collect();
        }
        let mut groups: Vec<u8> = fitting.iter().map(|index| self.gpus[*index].0.group).collect();
        groups.sort_unstable();
        groups.dedup();
        let of_groups = groups.iter().filter(|group| **group != 0).filter_map(|group| {
            let its = fitting.iter().filter(|index| self.gpus[**index].0.group == *group);
            self.fullest(its.copied().collect(), share)
        });
        let of_groups: Vec<Place> = of_groups.collect();
        if of_groups.is_empty() { self.fullest(fitting, share).into_iter().collect() } else { of_groups }
    }

    fn fullest(&self, mut of: Vec<usize>, share: &Share) -> Option<Place> {
        of.sort_by_key(|index| self.view.rest[*index]);
        let chosen = of.get(..usize::from(share.gpus))?;
        Some(chosen.iter().map(|index| Place::of(*index)).fold(Place::default(), Place::and))
    }

    /// The share as a task of the node's thousandths.
    pub fn task(&self, needs: &Needs, share: &Share) -> Task {
        let of = |(gpu, _): &(Gpu, Left)| share.thousandths(gpu);
        let largest = self.gpus.iter().map(of).max().unwrap_or(WHOLE);
        Task { cpu: needs.cpu, memory: needs.memory, gpus: share.gpus, share: largest, models: needs.models }
    }

    /// The node after a share came to a place.
    pub fn after(&self, share: &Share, place: Place) -> Self {
        let mut after = self.clone();
        let amounts: Vec<_> =
            place.gpus().map(|index| (index, Taken::one(share.part, &self.gpus[index].0))).collect();
        after.take(&amounts);
        after
    }

    /// Why the pod does not fit, where it does not.
    pub fn misfit(&self, needs: &Needs) -> Misfit {
        let shares = || needs.shares.iter().chain(&needs.first);
        let possible = |share: &Share| {
            let its = self.gpus.iter().filter(|(gpu, _)| share.part.is_possible(gpu));
            its.count()
        };
        if self.gpus.is_empty() || !needs.models.has(self.view.model) {
            return Misfit::NoGpu;
        }
        if shares().any(|share| usize::from(share.gpus) > self.gpus.len()) {
            return Misfit::TooFew;
        }
        let is_too_large = |share: &Share| possible(share) < usize::from(share.gpus.max(1));
        if shares().any(is_too_large) { Misfit::TooLarge } else { Misfit::Full }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// A GPU of so many GiB.
    pub fn gpu(gib: u64) -> Gpu {
        let memory = gib * GIB;
        Gpu {
            memory,
            per_share: memory,
            default_memory: memory / 10,
            cores: 100,
            is_open: true,
            ..Gpu::default()
        }
    }

    /// A share of one GPU.
    pub fn share(gib: u64, cores: u16) -> Share {
        Share { gpus: 1, part: Part::Of(Memory::Bytes(gib * GIB), cores) }
    }

    fn machine(gpus: Vec<Gpu>) -> Machine {
        Machine { cpu: 64_000, memory: 1 << 20, model: 0, gpus }
    }

    fn indexes(places: &[Place]) -> Vec<Vec<usize>> {
        places.iter().map(|place| place.gpus().collect()).collect()
    }

    #[test]
    fn a_share_fits_where_memory_and_compute_are_left_to_the_byte() {
        let mut state = State::idle(&machine(vec![gpu(80), gpu(24), Gpu { is_open: false, ..gpu(80) }]));
        let needs = Needs { shares: vec![share(50, 30)], ..Needs::default() };
        assert_eq!(indexes(&state.places(&share(50, 30))), [vec![0]]);
        state.hold(&needs, &[Place::of(0)]);
        let exactly = Share { gpus: 1, part: Part::Of(Memory::Bytes(30 * GIB), 70) };
        assert_eq!(indexes(&state.places(&exactly)), [vec![0]]);
        for (memory, cores) in [(30 * GIB + 1, 70), (30 * GIB, 71)] {
            let over = Share { gpus: 1, part: Part::Of(Memory::Bytes(memory), cores) };
            assert!(state.places(&over).is_empty(), "{memory} {cores}");
        }
        assert_eq!(indexes(&state.places(&share(24, 100))), [vec![1]]);
        let percent = Share { gpus: 1, part: Part::Of(Memory::Part { count: 37, of: 100 }, 0) };
        assert_eq!(indexes(&state.places(&percent)), [vec![0], vec![1]]);
        assert_eq!(indexes(&state.places(&Share { gpus: 1, part: Part::Whole })), [vec![1]]);
        // 30 of 80 GiB are left, and 70 of 100 %.
        assert_eq!(state.view.gpus(), [375, 1000, 0]);
    }

    #[test]
    fn there_are_no_more_shares_of_a_gpu_than_it_may_have() {
        let mut state = State::idle(&machine(vec![Gpu { shares: 2, ..gpu(80) }, gpu(24)]));
        let both = Needs { shares: vec![share(1, 0); 2], ..Needs::default() };
        // A container that has ended before another one begins has left its share to it.
        let first = Needs { shares: vec![share(1, 0)], first: vec![share(30, 0); 3], ..Needs::default() };
        state.hold(&first, &[Place::of(0); 4]);
        assert_eq!(indexes(&state.places(&share(1, 0))), [vec![0], vec![1]]);
        state.hold(&Needs { shares: vec![share(1, 0)], ..Needs::default() }, &[Place::of(0)]);
        assert_eq!(indexes(&state.places(&share(1, 0))), [vec![1]]);
        assert_eq!((state.view.gpus(), state.misfit(&both)), (&[0, 1000][..], Misfit::Full));
    }

    #[test]
    fn why_a_pod_does_not_fit_is_told_by_what_would_help() {
        let mut state = State::idle(&machine(vec![gpu(80), gpu(80)]));
        let needs = |share: Share| Needs { shares: vec![share], ..Needs::default() };
        state.hold(&needs(share(50, 0)), &[Place::of(0)]);
        state.hold(&needs(share(50, 0)), &[Place::of(1)]);
        for (share, want) in [
            (share(40, 0), Misfit::Full),
            (share(81, 0), Misfit::TooLarge),
            (share(1, 101), Misfit::TooLarge),
            (Share { gpus: 3, part: Part::Whole }, Misfit::TooFew),
            (Share { gpus: 2, part: Part::Whole }, Misfit::Full),
        ] {
            assert_eq!(state.misfit(&needs(share)), want, "{share:?}");
        }
        assert_eq!(State::default().misfit(&needs(share(1, 0))), Misfit::NoGpu);
    }

    #[test]
    fn several_gpus_are_of_one_group_where_one_has_so_many() {
        let of = |group| Gpu { group, ..gpu(80) };
        let mut state = State::idle(&machine(vec![of(1), of(2), of(1), of(2)]));
        let pair = Share { gpus: 2, part: Part::Whole };
        assert_eq!(indexes(&state.places(&pair)), [vec![0, 2], vec![1, 3]]);
        let one = Needs { shares: vec![share(1, 0)], ..Needs::default() };
        state.hold(&one, &[Place::of(0)]);
        assert_eq!(indexes(&state.places(&pair)), [vec![1, 3]]);
        state.hold(&one, &[Place::of(1)]);
        assert_eq!(indexes(&state.places(&pair)), [vec![2, 3]], "of two groups rather than not at all");
    }

    #[test]
    fn containers_that_end_before_the_others_take_only_what_those_do_not() {
        let state = State::idle(&machine(vec![gpu(80), gpu(80)]));
        let needs = Needs {
            shares: vec![share(10, 20), share(20, 0)],
            first: vec![share(40, 5), share(5, 0)],
            ..Needs::default()
        };
        let places = [Place::of(0), Place::of(0), Place::of(0), Place::of(1)];
        let used = state.used(&needs, &places);
        let taken = |memory, cores, shares| Taken { memory, cores, shares };
        assert_eq!(used, [(0, taken(40 * GIB, 20, 2)), (1, taken(5 * GIB, 0, 1))]);
    }

    #[test]
    fn thousandths_are_rounded_so_that_no_policy_sees_room_where_there_is_none() {
        let odd = Gpu { memory: 81_559 << 20, per_share: 81_559 << 20, ..gpu(0) };
        assert_eq!(share(1, 0).thousandths(&odd), 13);
        assert_eq!(share(1, 30).thousandths(&odd), 300);
        assert_eq!(part(u64::MAX, u64::MAX, u64::div_ceil), WHOLE);
        assert_eq!((part(0, 0, u64::div_ceil), part(1, 0, u64::div_ceil)), (0, WHOLE));
    }
}
