//! All nodes with what pods hold of them, and what each node is worth to another pod.
//!
//! What is left of a node is computed from the pods that hold something, again whenever one comes or goes: a
//! sum that is carried along would drift.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::machine::{Machine, Misfit, Needs, Part, Places, Share, State};
use crate::node::{Node, Place, Task};

/// What a place is worth to a task: the highest is taken.
pub trait Policy {
    /// The worth of `place` for `task` on `node`, which is as it was before.
    fn worth(&mut self, node: &Node, task: &Task, place: Place) -> f64;
}

impl<P: Policy + ?Sized> Policy for Box<P> {
    fn worth(&mut self, node: &Node, task: &Task, place: Place) -> f64 {
        (**self).worth(node, task, place)
    }
}

/// Whether processors and memory of nodes decide what fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Host {
    /// They do.
    Decides,
    /// Another scheduler decides that: they only make a node worth more or less.
    Counts,
}

/// Kinds of needs of which the worth of each node is kept.
const KINDS: usize = 1024;
/// Ways that are tried to put a pod's containers on one node.
const TRIES: u32 = 256;

/// The nodes by number, and the pods on them by a key of their own.
pub struct Ledger<K, P> {
    nodes: Vec<Ledgered<K>>,
    policy: P,
    host: Host,
    /// What each node is worth by kind of needs.
    known: HashMap<Needs, Kind>,
    asked: u64,
}

struct Ledgered<K> {
    machine: Machine,
    held: BTreeMap<K, (Needs, Places)>,
    state: State,
    /// Of what is left: nodes with the same are worth the same.
    fingerprint: u64,
    /// Counts its changes.
    changes: u32,
}

struct Kind {
    nodes: Vec<Known>,
    /// When it was last asked for, among all asking.
    asked: u64,
}

#[derive(Clone, Copy)]
struct Known {
    changes: u32,
    worth: Option<f64>,
}

impl<K: Ord + Clone, P: Policy> Ledger<K, P> {
    /// A ledger of no nodes.
    pub fn new(policy: P, host: Host) -> Self {
        Self { nodes: Vec::new(), policy, host, known: HashMap::new(), asked: 0 }
    }

    /// Another policy from now on.
    pub fn judge_by(&mut self, policy: P) {
        self.policy = policy;
        self.known.clear();
    }

    /// What a node is from now on. A node that is gone is an empty machine.
    pub fn set(&mut self, number: usize, machine: Machine) {
        let node = self.node(number);
        if node.machine != machine {
            node.machine = machine;
            node.count();
        }
    }

    /// A pod holds what it needs at these places of a node, in place of what it held there before.
    pub fn hold(&mut self, number: usize, pod: K, needs: Needs, places: Places) {
        let node = self.node(number);
        node.held.insert(pod, (needs, places));
        node.count();
    }

    /// All that pods hold of a node from now on.
    pub fn hold_all(&mut self, number: usize, held: BTreeMap<K, (Needs, Places)>) {
        let node = self.node(number);
        node.held = held;
        node.count();
    }

    /// A pod holds nothing of a node any more.
    pub fn release(&mut self, number: usize, pod: &K) {
        if let Some(node) = self.nodes.get_mut(number)
            && node.held.remove(pod).is_some()
        {
            node.count();
        }
    }

    fn node(&mut self, number: usize) -> &mut Ledgered<K> {
        while self.nodes.len() <= number {
            let (machine, held, state) = Default::default();
            self.nodes.push(Ledgered { machine, held, state, fingerprint: 0, changes: 1 });
        }
        &mut self.nodes[number]
    }

    /// What is left of each node, in thousandths.
    pub fn views(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter().map(|node| &node.state.view)
    }

    /// The pods on a node, each with what it needs and where.
    pub fn held(&self, number: usize) -> impl Iterator<Item = (&K, &Needs, &Places)> {
        let node = self.nodes.get(number).into_iter();
        node.flat_map(|node| node.held.iter().map(|(pod, (needs, places))| (pod, needs, places)))
    }

    /// Bytes and percent that are left of each GPU of a node.
    pub fn left(&self, number: usize) -> Vec<(u64, u16)> {
        self.nodes.get(number).map(|node| node.state.left().collect()).unwrap_or_default()
    }

    /// What each of these nodes is worth to the pod; `None` where it does not fit.
    pub fn worths(&mut self, needs: &Needs, numbers: impl Iterator<Item = usize>) -> Vec<Option<f64>> {
        self.asked += 1;
        if !self.known.contains_key(needs) {
            self.forget_oldest();
            self.known.insert(needs.clone(), Kind { nodes: Vec::new(), asked: 0 });
        }
        let Self { nodes, policy, host, known, asked } = self;
        let Some(kind) = known.get_mut(needs) else { return Vec::new() };
        kind.asked = *asked;
        kind.nodes.resize(nodes.len(), Known { changes: 0, worth: None });
        let mut alike: HashMap<u64, Option<f64>> = HashMap::new();
        let worth = |number: usize| {
            let (node, known) = (nodes.get(number)?, &mut kind.nodes[number]);
            if known.changes != node.changes {
                let judged = || placed(policy, *host, &node.state, needs).map(|(worth, _)| worth);
                let worth = *alike.entry(node.fingerprint).or_insert_with(judged);
                *known = Known { changes: node.changes, worth };
            }
            known.worth
        };
        numbers.map(worth).collect()
    }

    fn forget_oldest(&mut self) {
        let oldest = self.known.iter().min_by_key(|(_, kind)| kind.asked).map(|(needs, _)| needs.clone());
        if let Some(oldest) = oldest.filter(|_| self.known.len() >= KINDS) {
            self.known.remove(&oldest);
        }
    }

    /// The best places for the pod on one node.
    ///
    /// # Errors
    /// When it does not fit there.
    pub fn places(&mut self, number: usize, needs: &Needs) -> Result<Places, Misfit> {
        let Some(node) = self.nodes.get(number) else { return Err(Misfit::NoGpu) };
        placed(&mut self.policy, self.host, &node.state, needs)
            .map(|(_, places)| places)
            .ok_or_else(|| node.state.misfit(needs))
    }

    /// The best places for the pod on one node if `gone` held nothing there.
    ///
    /// # Errors
    /// When it would not fit there either.
    pub fn places_without(
        &mut self,
        number: usize,
        needs: &Needs,
        gone: impl Fn(&K) -> bool,
    ) -> Result<Places, Misfit> {
        let Some(node) = self.nodes.get(number) else { return Err(Misfit::NoGpu) };
        let state = node.left_by(gone);
        placed(&mut self.policy, self.host, &state, needs)
            .map(|(_, places)| places)
            .ok_or_else(|| state.misfit(needs))
    }

    /// Why the pod does not fit on a node where it does not.
    #[must_use]
    pub fn misfit(&self, number: usize, needs: &Needs) -> Misfit {
        self.nodes.get(number).map_or(Misfit::NoGpu, |node| node.state.misfit(needs))
    }

    /// The node that is worth most; of equals the first.
    pub fn best(&mut self, needs: &Needs) -> Option<usize> {
        let worths = self.worths(needs, 0..self.nodes.len());
        let mut best: Option<(f64, usize)> = None;
        for (number, worth) in worths.into_iter().enumerate().filter_map(|(at, worth)| Some((at, worth?))) {
            if best.is_none_or(|(most, _)| worth > most) {
                best = Some((worth, number));
            }
        }
        best.map(|(_, number)| number)
    }

    /// Puts the pod on the best node, and returns its number. `None` where it fits nowhere.
    pub fn put(&mut self, pod: K, needs: &Needs) -> Option<usize> {
        let number = self.best(needs)?;
        let places = self.places(number, needs).ok()?;
        self.hold(number, pod, needs.clone(), places);
        Some(number)
    }
}

impl<K: Ord> Ledgered<K> {
    /// Computes what is left.
    fn count(&mut self) {
        self.state = self.left_by(|_| false);
        let mut hasher = DefaultHasher::new();
        self.state.hash(&mut hasher);
        self.fingerprint = hasher.finish();
        self.changes = self.changes.wrapping_add(1).max(1);
    }

    /// What is left if `gone` held nothing.
    fn left_by(&self, gone: impl Fn(&K) -> bool) -> State {
        let mut state = State::idle(&self.machine);
        let staying = self.held.iter().filter(|(pod, _)| !gone(pod));
        staying.for_each(|(_, (needs, places))| state.hold(needs, places));
        state
    }
}

/// Where the pod's shares are best on the node, and what that is worth.
fn placed<P: Policy>(policy: &mut P, host: Host, node: &State, needs: &Needs) -> Option<(f64, Places)> {
    let has_room = node.view.cpu >= needs.cpu && node.view.memory >= needs.memory;
    let has_gpus = !needs.shares.is_empty() || !needs.first.is_empty();
    if (host == Host::Decides && !has_room) || (has_gpus && !needs.models.has(node.view.model)) {
        return None;
    }
    if !has_gpus {
        let task = Task { cpu: needs.cpu, memory: needs.memory, ..Task::default() };
        return Some((policy.worth(&node.view, &task, Place::default()), Vec::new()));
    }
    // The largest first: they have the fewest places.
    let mut order: Vec<usize> = (0..needs.shares.len()).collect();
    order.sort_by_key(|number| std::cmp::Reverse(size(&needs.shares[*number])));
    let mut search =
        Search { policy, needs, tries: TRIES, places: vec![Place::default(); needs.shares.len()] };
    let mut worth = search.put(node, &order)?;
    let Search { mut places, policy, .. } = search;
    for share in &needs.first {
        let (its, place) = best(policy, node, needs, share, &places)?;
        worth += if needs.shares.is_empty() { its } else { 0.0 };
        places.push(place);
    }
    Some((worth, places))
}

fn size(share: &Share) -> (u8, bool, Part) {
    (share.gpus, share.part == Part::Whole, share.part)
}

/// Looks for places of a pod's shares that hold at the same time.
struct Search<'a, P> {
    policy: &'a mut P,
    needs: &'a Needs,
    /// How many more places are tried.
    tries: u32,
    places: Places,
}

impl<P: Policy> Search<'_, P> {
    /// Puts the shares `order` on the node, each at its best place at which the others fit too.
    fn put(&mut self, node: &State, order: &[usize]) -> Option<f64> {
        let Some((number, rest)) = order.split_first() else { return Some(0.0) };
        let share = &self.needs.shares[*number];
        let known: Places = self.places.clone();
        for (worth, place) in ranked(self.policy, node, self.needs, share, &known) {
            self.tries = self.tries.checked_sub(1)?;
            self.places[*number] = place;
            if rest.is_empty() {
                return Some(worth);
            }
            if let Some(others) = self.put(&node.after(share, place), rest) {
                return Some(worth + others);
            }
            self.places[*number] = Place::default();
        }
        None
    }
}

/// The places of one share, the best first: GPUs that the pod has already come before all others.
fn ranked<P: Policy>(
    policy: &mut P,
    node: &State,
    needs: &Needs,
    share: &Share,
    of_pod: &[Place],
) -> Vec<(f64, Place)> {
    let task = node.task(needs, share);
    let its = of_pod.iter().fold(Place::default(), |all, place| all.and(*place));
    let mut places: Vec<(f64, Place)> =
        node.places(share).into_iter().map(|place| (policy.worth(&node.view, &task, place), place)).collect();
    // A stable sort: of equals the first.
    places.sort_by(|one, other| {
        let is_its = |place: Place| place.is_within(its);
        is_its(other.1).cmp(&is_its(one.1)).then(other.0.total_cmp(&one.0))
    });
    places
}

fn best<P: Policy>(
    policy: &mut P,
    node: &State,
    needs: &Needs,
    share: &Share,
    of_pod: &[Place],
) -> Option<(f64, Place)> {
    ranked(policy, node, needs, share, of_pod).into_iter().next()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::fill::Fill;
    use crate::machine::{Gpu, Memory, Taken};
    use crate::node::{Models, WHOLE};
    use crate::simple::{Binpack, Spread};

    /// Nodes whose GPUs have a byte for each thousandth.
    pub fn ledger<P: Policy>(nodes: &[Node], policy: P) -> Ledger<u64, P> {
        let mut ledger = Ledger::new(policy, Host::Decides);
        for (number, node) in nodes.iter().enumerate() {
            let whole = u64::from(WHOLE);
            let gpu = Gpu { memory: whole, per_share: whole, cores: 0, is_open: true, ..Gpu::default() };
            let gpus = vec![gpu; usize::from(node.gpus)];
            ledger.set(number, Machine { cpu: node.cpu, memory: node.memory, model: node.model, gpus });
        }
        ledger
    }

    /// Has other pods leave so much of a node's GPUs.
    pub fn left<P: Policy>(ledger: &mut Ledger<u64, P>, number: usize, rest: &[u16]) {
        for (index, rest) in rest.iter().enumerate() {
            let needs = needs(&Task { gpus: 1, share: WHOLE - rest, ..Task::default() });
            ledger.hold(number, 1 << 40 | index as u64, needs, vec![Place::of(index)]);
        }
    }

    /// What a task of thousandths needs.
    pub fn needs(task: &Task) -> Needs {
        let part = Part::Of(Memory::Bytes(task.share.into()), 0);
        let shares = (task.gpus > 0).then_some(Share { gpus: task.gpus, part });
        let (cpu, memory, models) = (task.cpu, task.memory, task.models);
        Needs { cpu, memory, models, shares: shares.into_iter().collect(), first: Vec::new() }
    }

    /// Puts the task somewhere: the node, and the GPUs there.
    pub fn placed<P: Policy>(ledger: &mut Ledger<u64, P>, needs: &Needs) -> Option<(usize, Vec<usize>)> {
        let pod = ledger.asked;
        let number = ledger.put(pod, needs)?;
        let (.., places) = ledger.held(number).find(|(held, ..)| **held == pod)?;
        Some((number, places.iter().flat_map(|place| place.gpus()).collect()))
    }

    fn pods(random: &mut fastrand::Rng, count: usize) -> Vec<Needs> {
        let share = |random: &mut fastrand::Rng| {
            let gpus = [1, 1, 1, 2, 4, 8][random.usize(..6)];
            let part = match random.u8(..6) {
                0 => Part::Whole,
                1 => Part::Of(Memory::Part { count: random.u16(1..=3), of: 3 }, 0),
                2 => Part::Of(Memory::Default, random.u16(1..=100)),
                _ => Part::Of(Memory::Bytes(random.u64(1..=1000) << 20), random.u16(..40)),
            };
            Share { gpus, part }
        };
        let any = |_| {
            let models = if random.u8(..4) == 0 { Models::ANY.with(random.u8(..3)) } else { Models::ANY };
            let (count, first) = ([0, 1, 1, 1, 2, 3][random.usize(..6)], usize::from(random.u8(..8) == 0));
            Needs {
                cpu: random.u64(500..16_000),
                memory: random.u64(1..65_536),
                models,
                shares: (0..count).map(|_| share(random)).collect(),
                first: (0..first).map(|_| share(random)).collect(),
            }
        };
        (0..count).map(any).collect()
    }

    fn machines() -> Vec<Machine> {
        let machine = |number: usize| {
            let group = |index: usize| u8::try_from(1 + index / 2 % 2).unwrap();
            let gpu = |index| Gpu {
                memory: 1000 << 20,
                per_share: 950 << 20,
                default_memory: 100 << 20,
                cores: 100,
                shares: u16::try_from(number % 5).unwrap(),
                group: if number.is_multiple_of(2) { group(index) } else { 0 },
                is_open: index != 3,
            };
            let gpus = (0..[1, 2, 4, 8][number % 4]).map(gpu).collect();
            Machine { cpu: 96_000, memory: 262_144, model: u8::try_from(number % 3).unwrap(), gpus }
        };
        (0..12).map(machine).collect()
    }

    type Any = Ledger<u64, Box<dyn Policy>>;

    fn ledgers() -> [Any; 3] {
        let task = |gpus, share| Task { cpu: 2000, memory: 0, gpus, share, models: Models::ANY };
        let demand = vec![(task(1, 300), 4.0), (task(2, WHOLE), 1.0), (task(0, 0), 1.0)];
        let of = |policy: Box<dyn Policy>| {
            let mut ledger = Ledger::new(policy, Host::Decides);
            machines().into_iter().enumerate().for_each(|(number, machine)| ledger.set(number, machine));
            ledger
        };
        [of(Box::new(Fill::new(&demand))), of(Box::new(Binpack)), of(Box::new(Spread))]
    }

    /// Places and ends pods at random. Returns where each went.
    fn run(ledger: &mut Any, pods: &[Needs], seed: u64) -> Vec<Option<(usize, Places)>> {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut running: Vec<(usize, u64)> = Vec::new();
        let mut decided = Vec::new();
        for (needs, pod) in pods.iter().zip(0..) {
            let number = ledger.put(pod, needs);
            let places = number.map(|number| {
                let its = ledger.held(number).find(|(held, ..)| **held == pod);
                its.map(|(.., places)| places.clone()).unwrap_or_default()
            });
            decided.push(number.zip(places));
            running.extend(number.map(|number| (number, pod)));
            if random.u8(..3) == 0 && !running.is_empty() {
                let (number, pod) = running.swap_remove(random.usize(..running.len()));
                ledger.release(number, &pod);
            }
            (0..machines().len()).for_each(|number| assert_sound(ledger, number));
        }
        decided
    }

    /// What the pods of a node hold is within every GPU, and each has what it needs.
    fn assert_sound(ledger: &Any, number: usize) {
        let machine = &machines()[number];
        let mut sums = vec![Taken::default(); machine.gpus.len()];
        let mut wholes = vec![0; machine.gpus.len()];
        let mut holders = vec![0; machine.gpus.len()];
        let state = State::idle(machine);
        for (_, needs, places) in ledger.held(number) {
            let shares: Vec<&Share> = needs.shares.iter().chain(&needs.first).collect();
            assert_eq!(shares.len(), places.len());
            for (share, place) in shares.iter().zip(places) {
                assert_eq!(place.gpus().count(), usize::from(share.gpus));
                assert!(place.gpus().all(|index| machine.gpus[index].is_open), "{place:?}");
            }
            for (share, place) in needs.shares.iter().zip(places) {
                for index in place.gpus() {
                    wholes[index] += usize::from(share.part == Part::Whole);
                    holders[index] += 1;
                }
            }
            for (index, taken) in state.used(needs, places) {
                sums[index].memory += taken.memory;
                sums[index].cores += taken.cores;
                sums[index].shares += taken.shares;
            }
        }
        for (index, Taken { memory, cores, shares }) in sums.iter().enumerate() {
            let gpu = &machine.gpus[index];
            assert!(*memory <= gpu.memory && *cores <= gpu.cores, "GPU {index} of node {number}: {sums:?}");
            assert!(gpu.shares == 0 || *shares <= gpu.shares, "GPU {index} of node {number}: {sums:?}");
            assert!(wholes[index] == 0 || holders[index] == 1, "a whole GPU is shared: node {number}");
            let left = ledger.left(number)[index];
            assert_eq!(left, (gpu.memory - memory, gpu.cores - cores));
        }
    }

    #[test]
    fn no_policy_gives_more_than_there_is_or_refuses_a_share_that_fits() {
        for seed in 0..20 {
            let pods = pods(&mut fastrand::Rng::with_seed(seed), 150);
            for mut ledger in ledgers() {
                run(&mut ledger, &pods, seed);
                // Of pods with one container it is plain whether one fits.
                for needs in pods.iter().filter(|needs| needs.shares.len() == 1 && needs.first.is_empty()) {
                    let fits = ledger.nodes.iter().any(|node| {
                        let view = &node.state.view;
                        let has_room = view.cpu >= needs.cpu && view.memory >= needs.memory;
                        has_room
                            && needs.models.has(view.model)
                            && !node.state.places(&needs.shares[0]).is_empty()
                    });
                    assert_eq!(ledger.best(needs).is_some(), fits, "{needs:?}");
                }
            }
        }
    }

    #[test]
    fn the_same_pods_are_placed_the_same_again_after_a_new_start_and_in_any_order() {
        let pods = pods(&mut fastrand::Rng::with_seed(7), 150);
        for ((mut one, mut other), mut anew) in ledgers().into_iter().zip(ledgers()).zip(ledgers()) {
            assert_eq!(run(&mut one, &pods, 7), run(&mut other, &pods, 7));
            // Whoever starts anew hears of what is held in another order, some of it twice.
            let mut held: Vec<(usize, u64, Needs, Places)> = Vec::new();
            for number in 0..machines().len() {
                let its = one.held(number);
                held.extend(its.map(|(pod, needs, places)| (number, *pod, needs.clone(), places.clone())));
            }
            let again = held.clone();
            fastrand::Rng::with_seed(3).shuffle(&mut held);
            for (number, pod, needs, places) in held.into_iter().chain(again) {
                anew.hold(number, pod, needs, places);
            }
            for needs in &pods {
                let chosen = one.best(needs);
                assert_eq!(anew.best(needs), chosen, "{needs:?}");
                if let Some(number) = chosen {
                    assert_eq!(anew.places(number, needs), one.places(number, needs));
                }
            }
        }
    }

    #[test]
    fn containers_that_fit_only_one_way_are_put_that_way() {
        let mut ledger = ledger(&[Node::idle(8000, 1 << 20, 2, 0)], Binpack);
        left(&mut ledger, 0, &[600, 500]);
        let share = |bytes| Share { gpus: 1, part: Part::Of(Memory::Bytes(bytes), 0) };
        // The fullest GPU for the first leaves no room for the third.
        let needs = Needs { shares: vec![share(300), share(300), share(500)], ..Needs::default() };
        assert_eq!(placed(&mut ledger, &needs), Some((0, vec![0, 0, 1])));
        let over = Needs { shares: vec![share(300), share(301), share(500)], ..Needs::default() };
        assert_eq!(placed(&mut ledger, &over), None);
    }

    #[test]
    fn a_pods_containers_are_on_one_gpu_where_they_fit() {
        for policy in [Box::new(Binpack) as Box<dyn Policy>, Box::new(Spread)] {
            let mut ledger = ledger(&[Node::idle(8000, 1 << 20, 3, 0)], policy);
            let share = Share { gpus: 1, part: Part::Of(Memory::Bytes(300), 0) };
            let needs = Needs { shares: vec![share; 2], first: vec![share], ..Needs::default() };
            let (_, gpus) = placed(&mut ledger, &needs).unwrap();
            assert!(gpus.iter().all(|gpu| *gpu == gpus[0]), "{gpus:?}");
        }
    }

    #[test]
    fn without_some_pods_another_fits() {
        let mut ledger = ledger(&[Node::idle(8000, 1 << 20, 2, 0)], Binpack);
        left(&mut ledger, 0, &[100, 200]);
        let needs = needs(&Task { gpus: 1, share: 500, ..Task::default() });
        assert_eq!(ledger.places(0, &needs), Err(Misfit::Full));
        assert_eq!(ledger.places_without(0, &needs, |pod| *pod == (1 << 40 | 1)), Ok(vec![Place::of(1)]));
        assert_eq!(ledger.places(7, &needs), Err(Misfit::NoGpu));
    }
}
