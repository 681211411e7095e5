//! What the extender knows of the cluster: nodes, their GPUs, and pods with what they hold. It is what the
//! API server says, and the bindings that were asked of it and have not been told back yet.

mod demand;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use gpushare_placement::{GPUS, Host, Ledger, Misfit, Needs, Place, Places, Policy, Share};
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};

use crate::asks::{self, Asking, Terms};
use crate::gpus::{NodeGpus, Placement, placement};
use crate::scheduler::words;

pub use demand::looking_ahead;

/// A pod's UID.
pub type Uid = String;

/// All of it.
pub struct State {
    ledger: Ledger<Uid, Box<dyn Policy + Send>>,
    numbers: HashMap<String, usize>,
    nodes: Vec<Known>,
    /// Numbers of nodes that are gone.
    free: Vec<usize>,
    pods: HashMap<Uid, Tracked>,
    /// The pods that ask for GPUs, by namespace.
    asking: HashMap<String, BTreeSet<Uid>>,
    /// What nodes make of resources. Most nodes make the same of them.
    terms: Vec<Terms>,
}

/// What is known of a node.
#[derive(Default)]
struct Known {
    name: String,
    /// What its agent tells.
    gpus: Option<NodeGpus>,
    /// Thousandths of processors that pods may have.
    cpu: u64,
    labels: BTreeMap<String, String>,
    terms: Option<usize>,
    pods: BTreeSet<Uid>,
    /// Whether the cluster has it. A pod may name one that there is not.
    is_there: bool,
    /// What its agent told last: what pods have stays while it tells nothing.
    last: Option<NodeGpus>,
}

/// What is known of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tracked {
    /// Its Kubernetes namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// What its containers ask for.
    pub asking: Vec<Asking>,
    /// Thousandths of processors that it requests.
    pub cpu: u64,
    /// Its priority.
    pub priority: i32,
    /// Its node, if it is bound to one.
    pub node: Option<String>,
    /// The GPUs that its annotation names.
    pub placement: Option<Placement>,
    /// Whether its binding is asked for and not told back yet.
    pub is_assumed: bool,
}

/// A share of a GPU that a container holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// The UID of its pod.
    pub uid: Uid,
    /// The container's name.
    pub container: String,
    /// The GPU's index on its node.
    pub gpu: u32,
    /// Bytes.
    pub memory: u64,
    /// Percent of compute; 0 is no limit.
    pub cores: u16,
}

/// Why a pod does not get on a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unfit {
    /// For the pod's author.
    pub why: String,
    /// Whether other pods would have to end.
    pub is_full: bool,
}

impl State {
    /// Nothing known yet.
    pub fn new(policy: Box<dyn Policy + Send>) -> Self {
        let (numbers, nodes, free, pods, asking, terms) = Default::default();
        Self { ledger: Ledger::new(policy, Host::Counts), numbers, nodes, free, pods, asking, terms }
    }

    /// Another policy from now on.
    pub fn judge_by(&mut self, policy: Box<dyn Policy + Send>) {
        self.ledger.judge_by(policy);
    }

    /// The number of a node, which is known from now on.
    fn number(&mut self, name: &str) -> usize {
        if let Some(number) = self.numbers.get(name) {
            return *number;
        }
        let number = self.free.pop().unwrap_or_else(|| {
            self.nodes.push(Known::default());
            self.nodes.len() - 1
        });
        name.clone_into(&mut self.nodes[number].name);
        self.numbers.insert(name.to_owned(), number);
        number
    }

    /// The cluster has a node no more. Its number is another one's once nothing is known of it.
    pub fn forget_node(&mut self, name: &str) {
        if let Some(number) = self.numbers.get(name).copied() {
            self.nodes[number].is_there = false;
            self.drop_gone(number);
        }
    }

    fn drop_gone(&mut self, number: usize) {
        let known = &self.nodes[number];
        if !known.is_there && known.gpus.is_none() && known.pods.is_empty() {
            self.numbers.remove(&known.name);
            self.nodes[number] = Known::default();
            self.count(number);
            self.free.push(number);
        }
    }

    /// What the cluster says of a node.
    pub fn learn_node(&mut self, node: &Node) {
        let Some(name) = &node.metadata.name else { return };
        let number = self.number(name);
        let allocatable = node.status.as_ref().and_then(|status| status.allocatable.as_ref());
        let cpu = allocatable.and_then(|all| asks::milli(&all.get("cpu")?.0)).unwrap_or(0);
        let known = &mut self.nodes[number];
        known.labels = node.metadata.labels.clone().unwrap_or_default();
        let is_new = known.cpu != cpu;
        (known.cpu, known.is_there) = (cpu, true);
        if is_new {
            self.count(number);
        }
    }

    /// The labels of a node.
    pub fn labels(&self, name: &str) -> Option<&BTreeMap<String, String>> {
        self.numbers.get(name).map(|number| &self.nodes[*number].labels)
    }

    /// What an agent tells of its node's GPUs.
    ///
    /// # Errors
    /// When it is not what agents write; what was known before stays.
    pub fn learn_gpus(&mut self, map: &ConfigMap) -> Result<(), serde_json::Error> {
        let Some(name) = map.metadata.name.as_deref().and_then(NodeGpus::node_of) else { return Ok(()) };
        let gpus = NodeGpus::read(map)?;
        let number = self.number(name);
        if self.nodes[number].gpus.as_ref() != Some(&gpus) {
            let terms = gpus.terms();
            let at = self.number_of(terms);
            self.nodes[number].last = Some(gpus.clone());
            (self.nodes[number].gpus, self.nodes[number].terms) = (Some(gpus), Some(at));
            self.count(number);
        }
        Ok(())
    }

    /// The number of these terms, which are known from now on.
    fn number_of(&mut self, terms: Terms) -> usize {
        if let Some(at) = self.terms.iter().position(|known| *known == terms) {
            return at;
        }
        let is_free = |at: &usize| self.nodes.iter().all(|node| node.terms != Some(*at));
        match (0..self.terms.len()).find(is_free) {
            Some(free) => {
                self.terms[free] = terms;
                free
            }
            None => {
                self.terms.push(terms);
                self.terms.len() - 1
            }
        }
    }

    /// A node's agent tells nothing any more.
    pub fn forget_gpus(&mut self, map_name: &str) {
        let number = NodeGpus::node_of(map_name).and_then(|name| self.numbers.get(name)).copied();
        if let Some(number) = number {
            (self.nodes[number].gpus, self.nodes[number].terms) = (None, None);
            self.count(number);
            self.drop_gone(number);
        }
    }

    /// The names of the nodes that the cluster has.
    pub fn nodes_there(&self) -> impl Iterator<Item = &str> {
        self.nodes.iter().filter(|node| node.is_there).map(|node| node.name.as_str())
    }

    /// The names of the nodes whose agents tell something.
    pub fn nodes_with_gpus(&self) -> impl Iterator<Item = &str> {
        self.nodes.iter().filter(|node| node.gpus.is_some()).map(|node| node.name.as_str())
    }

    /// What a pod is now. One that has ended holds nothing.
    pub fn learn_pod(&mut self, pod: &Pod) {
        let Some(uid) = pod.metadata.uid.clone() else { return };
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        if matches!(phase, Some("Succeeded" | "Failed")) {
            return self.forget_pod(&uid);
        }
        let tracked = tracked(pod);
        let before = self.pods.get(&uid);
        // A list or a watch may still tell of the time before a binding; no pod is ever unbound.
        let is_older = |before: &Tracked| before.node.is_some() && tracked.node.is_none();
        if before.is_some_and(is_older) || before == Some(&tracked) {
            return;
        }
        self.track(uid, tracked);
    }

    /// Holds for a pod what it will have, before the API server is asked to bind it.
    pub fn assume(&mut self, pod: &Pod, node: &str, placement: Placement) {
        if let Some(uid) = pod.metadata.uid.clone() {
            let (node, placement) = (Some(node.to_owned()), Some(placement));
            self.track(uid, Tracked { node, placement, is_assumed: true, ..tracked(pod) });
        }
    }

    /// Whether there are bindings that are asked for and not told back yet.
    pub fn has_assumed(&self) -> bool {
        self.pods.values().any(|pod| pod.is_assumed)
    }

    /// The API server did not bind the pod.
    pub fn disclaim(&mut self, uid: &str) {
        if let Some(tracked) = self.pods.get(uid).cloned().filter(|tracked| tracked.is_assumed) {
            let unbound = Tracked { node: None, placement: None, is_assumed: false, ..tracked };
            self.track(uid.to_owned(), unbound);
        }
    }

    fn track(&mut self, uid: Uid, tracked: Tracked) {
        if !tracked.asking.is_empty() {
            self.asking.entry(tracked.namespace.clone()).or_default().insert(uid.clone());
        }
        let before = self.pods.insert(uid.clone(), tracked.clone()).and_then(|before| before.node);
        if before != tracked.node
            && let Some(before) = before
        {
            self.leave(&before, &uid);
        }
        if let Some(node) = &tracked.node {
            let number = self.number(node);
            self.nodes[number].pods.insert(uid.clone());
            match self.known_places(number, &uid, &tracked) {
                Some(places) if self.are_all_known(number) => {
                    let needs = self.needs_on(number, &uid, &tracked);
                    self.ledger.hold(number, uid, needs, places);
                }
                _ => self.count(number),
            }
        }
    }

    /// A pod is gone, or has ended.
    pub fn forget_pod(&mut self, uid: &str) {
        let Some(tracked) = self.pods.remove(uid) else { return };
        if let Some(its) = self.asking.get_mut(&tracked.namespace) {
            its.remove(uid);
            if its.is_empty() {
                self.asking.remove(&tracked.namespace);
            }
        }
        if let Some(node) = tracked.node {
            self.leave(&node, uid);
        }
    }

    fn leave(&mut self, node: &str, uid: &str) {
        let Some(number) = self.numbers.get(node).copied() else { return };
        self.nodes[number].pods.remove(uid);
        match self.are_all_known(number) {
            true => self.ledger.release(number, &uid.to_owned()),
            false => self.count(number),
        }
        self.drop_gone(number);
    }

    /// The UIDs of all pods that the API server has told of.
    pub fn told_pods(&self) -> impl Iterator<Item = &Uid> {
        self.pods.iter().filter(|(_, tracked)| !tracked.is_assumed).map(|(uid, _)| uid)
    }

    /// What is known of the pod with this UID.
    pub fn pod(&self, uid: &str) -> Option<&Tracked> {
        self.pods.get(uid)
    }

    /// All pods.
    pub fn pods(&self) -> impl Iterator<Item = (&Uid, &Tracked)> {
        self.pods.iter()
    }

    /// Counts a node anew. Pods whose GPUs nobody tells are taken to be where they would be put now, after
    /// all others.
    fn count(&mut self, number: usize) {
        let known = &self.nodes[number];
        let machine = known.gpus.as_ref().map(|gpus| gpus.machine(known.cpu)).unwrap_or_default();
        let uids: Vec<Uid> = known.pods.iter().cloned().collect();
        self.ledger.set(number, machine);
        let (mut held, mut unknown) = (BTreeMap::new(), Vec::new());
        for uid in uids {
            let Some(tracked) = self.pods.get(&uid) else { continue };
            let needs = self.needs_on(number, &uid, tracked);
            match self.known_places(number, &uid, tracked) {
                Some(places) => drop(held.insert(uid, (needs, places))),
                None => unknown.push((uid, needs)),
            }
        }
        self.ledger.hold_all(number, held);
        for (uid, needs) in unknown {
            let places = match self.ledger.places(number, &needs) {
                Ok(places) => places,
                // More is given than there is: each container where it would be alone.
                Err(_) => {
                    let alone = |share: &Share| Needs { shares: vec![*share], ..Needs::default() };
                    let shares: Vec<Share> = needs.shares.iter().chain(&needs.first).copied().collect();
                    let of = |share: &Share| {
                        let places = self.ledger.places(number, &alone(share)).unwrap_or_default();
                        places.first().copied().unwrap_or_else(|| Place::of(0))
                    };
                    shares.iter().map(of).collect()
                }
            };
            self.ledger.hold(number, uid, needs, places);
        }
    }

    fn are_all_known(&self, number: usize) -> bool {
        let mut its = self.nodes[number].pods.iter().filter_map(|uid| Some((uid, self.pods.get(uid)?)));
        its.all(|(uid, tracked)| self.known_places(number, uid, tracked).is_some())
    }

    /// What a pod has on a node: of one that does not serve its resources, nothing but processors.
    fn needs_on(&self, number: usize, uid: &str, tracked: &Tracked) -> Needs {
        let needs = self.held_on(number, uid, tracked).map(|(needs, _)| needs);
        Needs { cpu: tracked.cpu, ..needs.unwrap_or_default() }
    }

    /// What the containers of a pod have on a node, and their names.
    fn held_on(&self, number: usize, uid: &str, tracked: &Tracked) -> Option<(Needs, Vec<String>)> {
        let node = &self.nodes[number];
        let terms = self.terms.get(node.terms?)?;
        Some(terms.held(&pinned(node.gpus.as_ref(), uid, tracked)))
    }

    /// The pods of a namespace that ask for GPUs, but for this one, each with what the agent of its node told
    /// last, and with what it asks for there.
    pub fn bound_in(
        &self,
        namespace: &str,
        but: &str,
    ) -> impl Iterator<Item = (&str, &NodeGpus, Vec<Asking>)> {
        let its = self.asking.get(namespace).into_iter().flatten().filter(move |uid| *uid != but);
        its.filter_map(|uid| {
            let pod = self.pods.get(uid)?;
            let node = pod.node.as_deref()?;
            let gpus = self.nodes[*self.numbers.get(node)?].last.as_ref()?;
            Some((node, gpus, pinned(Some(gpus), uid, pod)))
        })
    }

    /// Where a pod's shares are on its node, as its agent or the pod's annotation says.
    fn known_places(&self, number: usize, uid: &str, tracked: &Tracked) -> Option<Places> {
        let node = &self.nodes[number];
        let Some((gpus, (needs, containers))) = node.gpus.as_ref().zip(self.held_on(number, uid, tracked))
        else {
            return Some(Vec::new());
        };
        let placed = gpus.placed.get(uid);
        let told = |container: &String| {
            let given = placed.and_then(|placed| placed.get(container));
            given.or_else(|| tracked.placement.as_ref()?.get(container))
        };
        // Whoever writes an annotation of his own takes no more than his pod asks for.
        let place = |(container, share): (&String, &Share)| {
            let indexes = told(container)?;
            let places = indexes.iter().map(|index| gpus.at(*index).filter(|at| *at < GPUS).map(Place::of));
            let all: Vec<Place> = places.collect::<Option<_>>()?;
            let place = all.into_iter().fold(Place::default(), Place::and);
            (place.gpus().count() == usize::from(share.gpus)).then_some(place)
        };
        let shares = || needs.shares.iter().chain(&needs.first);
        let known: Vec<Option<Place>> = containers.iter().zip(shares()).map(place).collect();
        // kubelet lists no init container that has ended: it was where the others are.
        let of_first = |at: usize, share: &Share| {
            let its =
                known.iter().zip(shares()).find(|(place, other)| place.is_some() && other.gpus == share.gpus);
            (at >= needs.shares.len()).then_some(*its?.0)?
        };
        known
            .iter()
            .zip(shares())
            .enumerate()
            .map(|(at, (place, share))| place.or_else(|| of_first(at, share)))
            .collect()
    }

    /// What each of these nodes is worth to a pod, in their order, or why the pod does not get there.
    pub fn worths(&mut self, pod: &Wanted, nodes: &[&str]) -> Vec<Result<f64, Unfit>> {
        let mut found: Vec<Option<Result<f64, Unfit>>> = Vec::new();
        found.resize_with(nodes.len(), || None);
        let mut by_terms: HashMap<usize, Vec<(usize, usize)>> = HashMap::new();
        for (at, name) in nodes.iter().enumerate() {
            let number = self.numbers.get(*name).copied();
            let terms = number.and_then(|number| self.nodes[number].terms);
            if let Some((number, terms)) = number.zip(terms) {
                by_terms.entry(terms).or_default().push((at, number));
            }
        }
        for (terms, its) in by_terms {
            let (needs, _) = match self.terms[terms].needs(&pod.asking) {
                Ok(needs) => needs,
                Err(why) => {
                    for (at, _) in its {
                        found[at] = Some(Err(Unfit { why: why.clone(), is_full: false }));
                    }
                    continue;
                }
            };
            let needs = Needs { cpu: rounded(pod.cpu), ..needs };
            let worths = self.ledger.worths(&needs, its.iter().map(|(_, number)| *number));
            for ((at, number), worth) in its.into_iter().zip(worths) {
                let unfit = || unfit(self.ledger.misfit(number, &needs), &needs);
                found[at] = Some(worth.ok_or_else(unfit));
            }
        }
        let unknown = || {
            let why = "the node's agent of gpushare shows no GPU as a countable resource".to_owned();
            Err(Unfit { why, is_full: false })
        };
        found.into_iter().map(|found| found.unwrap_or_else(unknown)).collect()
    }

    /// The best GPUs of a node for a pod, if the pods `gone` held nothing there.
    ///
    /// # Errors
    /// When it does not get there.
    pub fn place(&mut self, pod: &Wanted, node: &str, gone: &BTreeSet<Uid>) -> Result<Placement, Unfit> {
        let fixed = |why: String| Unfit { why, is_full: false };
        let number = self.numbers.get(node).copied();
        let known = number.and_then(|number| Some((number, self.nodes[number].terms?)));
        let Some((number, terms)) = known else {
            return Err(fixed(format!("the agent of node {node} shows no GPU as a countable resource")));
        };
        let (needs, containers) = self.terms[terms].needs(&pod.asking).map_err(fixed)?;
        let needs = Needs { cpu: rounded(pod.cpu), ..needs };
        let placed = match gone.is_empty() {
            true => self.ledger.places(number, &needs),
            false => self.ledger.places_without(number, &needs, |uid| gone.contains(uid)),
        };
        let places = placed.map_err(|misfit| unfit(misfit, &needs))?;
        let gpus = self.nodes[number].gpus.as_ref();
        let index = |at: usize| gpus.and_then(|gpus| gpus.gpus.get(at)).map(|gpu| gpu.index);
        let of = |place: &Place| place.gpus().filter_map(index).collect::<Vec<u32>>();
        Ok(containers.into_iter().zip(places.iter().map(of)).collect())
    }

    /// The pods that hold GPUs of a node and are less important, the least important first. Whether one that
    /// is being bound will be there nobody knows.
    pub fn below(&self, node: &str, priority: i32) -> Vec<(i32, Uid)> {
        let Some(number) = self.numbers.get(node) else { return Vec::new() };
        let its = self.nodes[*number].pods.iter().filter_map(|uid| Some((uid, self.pods.get(uid)?)));
        let mut below: Vec<(i32, Uid)> = its
            .filter(|(_, pod)| pod.priority < priority && !pod.asking.is_empty() && !pod.is_assumed)
            .map(|(uid, pod)| (pod.priority, uid.clone()))
            .collect();
        below.sort();
        below
    }

    /// What a node's agent tells.
    pub fn gpus(&self, node: &str) -> Option<&NodeGpus> {
        self.nodes[*self.numbers.get(node)?].gpus.as_ref()
    }

    /// Bytes and percent that are left of each GPU of a node, in the order in which its agent tells them.
    pub fn left(&self, node: &str) -> Vec<(u64, u16)> {
        self.numbers.get(node).map(|number| self.ledger.left(*number)).unwrap_or_default()
    }

    /// The shares of a node's GPUs.
    pub fn shares(&self, node: &str) -> Vec<Held> {
        let Some(number) = self.numbers.get(node).copied() else { return Vec::new() };
        let (known, mut shares) = (&self.nodes[number], Vec::new());
        let Some(gpus) = known.gpus.as_ref() else { return shares };
        let machine = gpus.machine(0);
        for (uid, needs, places) in self.ledger.held(number) {
            let held = self.pods.get(uid).and_then(|pod| self.held_on(number, uid, pod));
            let Some((_, containers)) = held else { continue };
            let all = needs.shares.iter().chain(&needs.first).zip(places).zip(containers);
            for ((share, place), container) in all {
                for at in place.gpus() {
                    let Some((gpu, shown)) = machine.gpus.get(at).zip(gpus.gpus.get(at)) else { continue };
                    let (memory, cores) = share.part.of(gpu);
                    let (uid, container) = (uid.clone(), container.clone());
                    shares.push(Held { uid, container, gpu: shown.index, memory, cores });
                }
            }
        }
        shares
    }
}

/// A pod that is to be placed.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// What its containers ask for.
    pub asking: Vec<Asking>,
    /// Thousandths of processors.
    pub cpu: u64,
}

impl Wanted {
    /// What this pod wants.
    pub fn of(pod: &Pod) -> Self {
        Self { asking: asks::asking(pod), cpu: asks::cpu(pod) }
    }
}

/// Processors in steps of a tenth of one: fewer kinds of pods are judged, each on every node.
fn rounded(milli: u64) -> u64 {
    milli.div_ceil(100) * 100
}

/// What a pod's containers ask for on a node, of as many GPUs as kubelet gave or the extender chose: a label
/// of the pod may have been changed since.
fn pinned(gpus: Option<&NodeGpus>, uid: &str, tracked: &Tracked) -> Vec<Asking> {
    let placed = gpus.and_then(|gpus| gpus.placed.get(uid));
    let pinned = tracked.asking.iter().cloned().map(|mut one| {
        let given = placed.and_then(|placed| placed.get(&one.container));
        let chosen = tracked.placement.as_ref().and_then(|chosen| chosen.get(&one.container));
        let of = given.or(chosen.filter(|chosen| one.gpus > 1 || chosen.len() > 1)).map(Vec::len);
        one.gpus = of.and_then(|of| u8::try_from(of).ok()).unwrap_or(one.gpus);
        one
    });
    pinned.collect()
}

fn tracked(pod: &Pod) -> Tracked {
    let text = |part: &Option<String>| part.clone().unwrap_or_default();
    let spec = pod.spec.as_ref();
    Tracked {
        namespace: text(&pod.metadata.namespace),
        name: text(&pod.metadata.name),
        asking: asks::asking(pod),
        cpu: asks::cpu(pod),
        priority: spec.and_then(|spec| spec.priority).unwrap_or(0),
        node: spec.and_then(|spec| spec.node_name.clone()).filter(|name| !name.is_empty()),
        placement: placement(pod),
        is_assumed: false,
    }
}

fn unfit(misfit: Misfit, needs: &Needs) -> Unfit {
    let asked = words::asked(needs);
    let (why, is_full) = match misfit {
        Misfit::NoGpu => ("the node has no GPU".to_owned(), false),
        Misfit::TooFew => (format!("the node has fewer GPUs than {asked}"), false),
        Misfit::TooLarge => (format!("{asked} are more than the node's GPUs have: ask for less"), false),
        Misfit::Full => (format!("{asked} are not free on one node's GPUs"), true),
    };
    Unfit { why, is_full }
}

#[cfg(test)]
mod tests;
