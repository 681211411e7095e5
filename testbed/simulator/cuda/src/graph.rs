//! Graphs: work that is recorded once and launched many times.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};

use crate::abi::{Code, Handle, In, Out, Result};
use crate::driver::{Driver, driver, locked};
use crate::registry::{Registry, new_handle};
use crate::work::Work;

/// A node: its work, and the nodes after which it runs.
#[derive(Clone)]
pub struct Node {
    handle: Handle,
    work: Work,
    depends: Vec<Handle>,
}

/// A graph, whose nodes can still change.
pub struct Graph {
    handle: Handle,
    nodes: Mutex<Vec<Node>>,
    index: Arc<Mutex<HashMap<Handle, Handle>>>,
}

/// A graph that is ready to launch. Its nodes are in an order that respects the edges.
pub struct Executable {
    nodes: Mutex<Vec<Node>>,
    flags: u64,
}

/// All graphs and executable graphs of the process.
#[derive(Default)]
pub struct Graphs {
    registry: Registry<Graph>,
    executables: Registry<Executable>,
    /// Handle of the graph that each node belongs to.
    owners: Arc<Mutex<HashMap<Handle, Handle>>>,
}

const UPDATE_FAILURE: Code = Code(910);
const FREE_ON_LAUNCH: u64 = 1;

impl Graph {
    /// Adds a node that runs after `depends`; INVALID_VALUE if one of those is not in the graph.
    pub fn add(&self, work: Work, depends: Vec<Handle>) -> Result<Handle> {
        let handle = new_handle();
        let mut nodes = locked(&self.nodes);
        if depends.iter().any(|wanted| !nodes.iter().any(|node| node.handle == *wanted)) {
            return Err(Code::INVALID_VALUE);
        }
        nodes.push(Node { handle, work, depends });
        locked(&self.index).insert(handle, self.handle);
        Ok(handle)
    }

    /// The nodes, each after those it depends on; INVALID_VALUE if they form a cycle.
    fn ordered(&self) -> Result<Vec<Node>> {
        let mut left = locked(&self.nodes).clone();
        let mut done = HashSet::new();
        let mut ordered = Vec::with_capacity(left.len());
        while !left.is_empty() {
            let before = left.len();
            left.retain(|node| {
                let ready = node.depends.iter().all(|wanted| done.contains(wanted));
                if ready {
                    done.insert(node.handle);
                    ordered.push(node.clone());
                }
                !ready
            });
            if left.len() == before {
                return Err(Code::INVALID_VALUE);
            }
        }
        Ok(ordered)
    }
}

impl Graphs {
    /// Makes an empty graph.
    pub fn create(&self) -> Handle {
        let index = Arc::clone(&self.owners);
        self.registry.add_with(|handle| Graph { handle, nodes: Mutex::default(), index })
    }

    /// The graph of a handle; INVALID_HANDLE if there is none.
    pub fn get(&self, handle: Handle) -> Result<Arc<Graph>> {
        self.registry.get(handle)
    }

    fn of_node(&self, node: Handle) -> Result<Arc<Graph>> {
        let owner = locked(&self.owners).get(&node).copied().ok_or(Code::INVALID_VALUE)?;
        self.get(owner)
    }

    /// Returns the nodes of a graph in order. A child graph node contains the current works of its graph.
    fn resolved(&self, graph: Handle) -> Result<Vec<Node>> {
        let mut nodes = self.get(graph)?.ordered()?;
        for node in &mut nodes {
            if let Work::Graph(child) = node.work {
                node.work = Work::Child(Arc::new(self.works(child)?));
            }
        }
        Ok(nodes)
    }

    /// The works of a graph's nodes, in order.
    pub fn works(&self, graph: Handle) -> Result<Vec<Work>> {
        Ok(self.resolved(graph)?.into_iter().map(|node| node.work).collect())
    }

    /// A copy of a graph and of the graphs of its nodes.
    pub fn copy(&self, graph: Handle) -> Result<Handle> {
        let nodes = self.get(graph)?.ordered()?;
        let copy = self.create();
        let new = self.get(copy)?;
        let mut names = HashMap::new();
        for node in nodes {
            let depends = node.depends.iter().filter_map(|old| names.get(old).copied()).collect();
            let work =
                if let Work::Graph(child) = node.work { Work::Graph(self.copy(child)?) } else { node.work };
            names.insert(node.handle, new.add(work, depends)?);
        }
        Ok(copy)
    }

    /// Returns the graph of a child graph node. For a captured launch, the first call creates it.
    pub fn child(&self, node: Handle) -> Result<Handle> {
        let mut graph = None;
        self.change(node, |found| {
            if let Work::Child(works) = found.work() {
                let (made, mut last) = (self.create(), Vec::new());
                for work in works.iter() {
                    last = vec![self.get(made)?.add(work.clone(), last)?];
                }
                *found.work() = Work::Graph(made);
            }
            if let Work::Graph(child) = found.work() {
                graph = Some(*child);
            }
            Ok(())
        })?;
        graph.ok_or(Code::INVALID_VALUE)
    }

    /// Destroys a graph and the graphs of its child graph nodes.
    fn destroy(&self, graph: Handle) -> Result {
        let ended = self.registry.remove(graph)?;
        locked(&self.owners).retain(|_, owner| *owner != graph);
        for node in locked(&ended.nodes).iter() {
            if let Work::Graph(child) = node.work {
                self.destroy(child)?;
            }
        }
        Ok(())
    }

    /// Calls `change` with a node of a graph.
    pub fn change(&self, node: Handle, change: impl FnOnce(&mut Node) -> Result) -> Result {
        let graph = self.of_node(node)?;
        let mut nodes = locked(&graph.nodes);
        change(nodes.iter_mut().find(|other| other.handle == node).ok_or(Code::INVALID_VALUE)?)
    }

    /// Replaces the work of a node of an executable graph; its type must stay the same.
    pub fn replace(&self, executable: Handle, node: Handle, work: Work) -> Result {
        let executable = self.executables.get(executable)?;
        let mut nodes = locked(&executable.nodes);
        let found = nodes.iter_mut().find(|other| other.handle == node).ok_or(Code::INVALID_VALUE)?;
        if found.work.node_type() != work.node_type() {
            return Err(Code::INVALID_VALUE);
        }
        found.work = work;
        Ok(())
    }
}

impl Node {
    /// Returns the node's work.
    pub fn work(&mut self) -> &mut Work {
        &mut self.work
    }
}

/// Adds a node with `work` after the given dependencies, and writes its handle.
pub fn add(out: Out<Handle>, graph: Handle, depends: In<Handle>, count: usize, work: Work) -> Result {
    out.given()?;
    let graph = driver()?.graphs.get(graph)?;
    out.set(graph.add(work, depends.list(count)?)?)
}

fn instantiate(graph: Handle, flags: u64) -> Result<Handle> {
    let driver = driver()?;
    let nodes = driver.graphs.resolved(graph)?;
    Ok(driver.graphs.executables.add(Executable { nodes: Mutex::new(nodes), flags }))
}

fn launch(driver: &Driver, executable: Handle, stream: Handle) -> Result {
    let executable = driver.graphs.executables.get(executable)?;
    let works: Vec<Work> = locked(&executable.nodes).iter().map(|node| node.work.clone()).collect();
    if executable.flags & FREE_ON_LAUNCH != 0 {
        for work in &works {
            if let Work::Allocate(start) = work {
                let _ = driver.graph_memory.give(driver, *start);
            }
        }
    }
    driver.stream(stream)?.enqueue(driver, Work::Child(Arc::new(works)))
}

/// Updates an executable graph from `graph`. Returns the result (CUgraphExecUpdateResult) and the node that
/// does not match.
fn update(executable: Handle, graph: Handle) -> Result<(u32, Handle)> {
    let driver = driver()?;
    let executable = driver.graphs.executables.get(executable)?;
    let new = driver.graphs.resolved(graph)?;
    let mut nodes = locked(&executable.nodes);
    if nodes.len() != new.len() {
        return Ok((2, new.last().map_or(0, |node| node.handle)));
    }
    let changed = nodes.iter().zip(&new).find(|(old, new)| old.work.node_type() != new.work.node_type());
    if let Some((_, new)) = changed {
        return Ok((3, new.handle));
    }
    for (old, new) in nodes.iter_mut().zip(new) {
        old.work = new.work;
    }
    Ok((0, 0))
}

/// Writes a list by the protocol of two calls: the first, without a list, gets only the length.
fn write_list(list: &[Handle], out: Out<Handle>, count: Out<usize>) -> Result {
    if out.is_null() {
        return count.set(list.len());
    }
    let room = count.get()?;
    for index in 0..room {
        out.set_at(index, list.get(index).copied().unwrap_or(0))?;
    }
    count.set(list.len().min(room))
}

fn edges(graph: Handle) -> Result<Vec<(Handle, Handle)>> {
    let graph = driver()?.graphs.get(graph)?;
    let nodes = locked(&graph.nodes);
    Ok(nodes.iter().flat_map(|node| node.depends.iter().map(|from| (*from, node.handle))).collect())
}

fn write_edges(graph: Handle, from: Out<Handle>, to: Out<Handle>, count: Out<usize>) -> Result {
    let (sources, targets): (Vec<Handle>, Vec<Handle>) = edges(graph)?.into_iter().unzip();
    if from.is_null() || to.is_null() {
        return count.set(sources.len());
    }
    let room = count.get()?;
    write_list(&sources, from, count)?;
    count.set(room)?;
    write_list(&targets, to, count)
}

fn neighbours(node: Handle, before: bool) -> Result<Vec<Handle>> {
    let graph = driver()?.graphs.of_node(node)?;
    let all = edges(graph.handle)?;
    let found = all.into_iter().filter(|(from, to)| if before { *to == node } else { *from == node });
    Ok(found.map(|(from, to)| if before { from } else { to }).collect())
}

fn link(graph: Handle, from: In<Handle>, to: In<Handle>, count: usize, join: bool) -> Result {
    let graph = driver()?.graphs.get(graph)?;
    let mut nodes = locked(&graph.nodes);
    for index in 0..count {
        let (source, target) = (from.at(index)?, to.at(index)?);
        let node = nodes.iter_mut().find(|node| node.handle == target).ok_or(Code::INVALID_VALUE)?;
        node.depends.retain(|other| *other != source);
        if join {
            node.depends.push(source);
        }
    }
    Ok(())
}

exports! {
    fn cuGraphCreate(out: Out<Handle>, _flags: u32) {
        out.given()?;
        out.set(driver()?.graphs.create())
    }

    fn cuGraphDestroy(handle: Handle) {
        driver()?.graphs.destroy(handle)
    }

    fn cuGraphClone(out: Out<Handle>, handle: Handle) {
        out.given()?;
        out.set(driver()?.graphs.copy(handle)?)
    }

    fn cuGraphInstantiate_v2 also cuGraphInstantiate
    (out: Out<Handle>, graph: Handle, node: Out<Handle>, log: Out<u8>, length: usize) {
        node.set_if_given(0);
        if length > 0 {
            log.set_if_given(0);
        }
        out.set(instantiate(graph, 0)?)
    }

    fn cuGraphInstantiateWithFlags(out: Out<Handle>, graph: Handle, flags: u64) {
        out.set(instantiate(graph, flags)?)
    }

    /// The parameters are flags, upload stream, error node and result.
    fn cuGraphInstantiateWithParams thread cuGraphInstantiateWithParams_ptsz
    (out: Out<Handle>, graph: Handle, parameters: Out<[u64; 4]>) {
        let [flags, stream, ..] = parameters.get()?;
        out.set(instantiate(graph, flags)?)?;
        parameters.set([flags, stream, 0, 0])
    }

    fn cuGraphExecDestroy(executable: Handle) {
        driver()?.graphs.executables.remove(executable).map(|_| ())
    }

    fn cuGraphExecGetFlags(executable: Handle, out: Out<u64>) {
        out.set(driver()?.graphs.executables.get(executable)?.flags)
    }

    fn cuGraphUpload thread cuGraphUpload_ptsz (executable: Handle, stream: Handle) {
        let driver = driver()?;
        driver.graphs.executables.get(executable)?;
        driver.stream(stream).map(|_| ())
    }

    fn cuGraphLaunch thread cuGraphLaunch_ptsz (executable: Handle, stream: Handle) {
        launch(driver()?, executable, stream)
    }

    fn cuGraphExecUpdate(executable: Handle, graph: Handle, node: Out<Handle>, result: Out<u32>) {
        let (told, wrong) = update(executable, graph)?;
        node.set_if_given(wrong);
        result.set_if_given(told);
        if told == 0 { Ok(()) } else { Err(UPDATE_FAILURE) }
    }

    /// The result consists of its number, the error node, and the node before it.
    fn cuGraphExecUpdate_v2(executable: Handle, graph: Handle, result: Out<[u64; 3]>) {
        let (told, wrong) = update(executable, graph)?;
        result.set_if_given([u64::from(told), wrong as u64, 0]);
        if told == 0 { Ok(()) } else { Err(UPDATE_FAILURE) }
    }

    fn cuGraphGetNodes(graph: Handle, out: Out<Handle>, count: Out<usize>) {
        let graph = driver()?.graphs.get(graph)?;
        let list: Vec<Handle> = locked(&graph.nodes).iter().map(|node| node.handle).collect();
        write_list(&list, out, count)
    }

    fn cuGraphGetRootNodes(graph: Handle, out: Out<Handle>, count: Out<usize>) {
        let graph = driver()?.graphs.get(graph)?;
        let nodes = locked(&graph.nodes);
        let roots = nodes.iter().filter(|node| node.depends.is_empty());
        write_list(&roots.map(|node| node.handle).collect::<Vec<_>>(), out, count)
    }

    fn cuGraphGetEdges(graph: Handle, from: Out<Handle>, to: Out<Handle>, count: Out<usize>) {
        write_edges(graph, from, to, count)
    }

    fn cuGraphGetEdges_v2(graph: Handle, from: Out<Handle>, to: Out<Handle>, _edges: Out<u8>, count: Out<usize>) {
        write_edges(graph, from, to, count)
    }

    fn cuGraphNodeGetType(node: Handle, out: Out<u32>) {
        driver()?.graphs.change(node, |node| out.set(node.work.node_type()))
    }

    fn cuGraphNodeGetDependencies(node: Handle, out: Out<Handle>, count: Out<usize>) {
        write_list(&neighbours(node, true)?, out, count)
    }

    fn cuGraphNodeGetDependencies_v2(node: Handle, out: Out<Handle>, _edges: Out<u8>, count: Out<usize>) {
        write_list(&neighbours(node, true)?, out, count)
    }

    fn cuGraphNodeGetDependentNodes(node: Handle, out: Out<Handle>, count: Out<usize>) {
        write_list(&neighbours(node, false)?, out, count)
    }

    fn cuGraphNodeGetDependentNodes_v2(node: Handle, out: Out<Handle>, _edges: Out<u8>, count: Out<usize>) {
        write_list(&neighbours(node, false)?, out, count)
    }

    fn cuGraphAddDependencies(graph: Handle, from: In<Handle>, to: In<Handle>, count: usize) {
        link(graph, from, to, count, true)
    }

    fn cuGraphAddDependencies_v2
    (graph: Handle, from: In<Handle>, to: In<Handle>, _edges: In<u8>, count: usize) {
        link(graph, from, to, count, true)
    }

    fn cuGraphRemoveDependencies(graph: Handle, from: In<Handle>, to: In<Handle>, count: usize) {
        link(graph, from, to, count, false)
    }

    fn cuGraphRemoveDependencies_v2
    (graph: Handle, from: In<Handle>, to: In<Handle>, _edges: In<u8>, count: usize) {
        link(graph, from, to, count, false)
    }

    fn cuGraphDestroyNode(node: Handle) {
        let driver = driver()?;
        let graph = driver.graphs.of_node(node)?;
        let mut nodes = locked(&graph.nodes);
        nodes.retain(|other| other.handle != node);
        nodes.iter_mut().for_each(|other| other.depends.retain(|from| *from != node));
        locked(&driver.graphs.owners).remove(&node);
        Ok(())
    }
}
