//! Memory nodes of graphs obey the limit.

use crate::OUT_OF_MEMORY;
use crate::client::{Cuda, MIB, out, really_held};
use crate::place::{CONTEXT, Share, charged, inside};

/// A graph that allocates `mib` and frees it again.
pub fn graph_of(cuda: &Cuda, mib: u64) -> usize {
    let (mut graph, mut node, mut parameters) = (0usize, 0usize, [0u64; 16]);
    assert_eq!(cuda.call("cuGraphCreate", &[out(&mut graph), 0]), 0);
    (parameters[0], parameters[1], parameters[13]) = (1, 1, mib * MIB);
    assert_eq!(cuda.call("cuGraphAddMemAllocNode", &[out(&mut node), graph, 0, 0, out(&mut parameters)]), 0);
    let (mut after, mut last) = (node, 0usize);
    let pointer = usize::try_from(parameters[14]).unwrap();
    assert_eq!(cuda.call("cuGraphAddMemFreeNode", &[out(&mut last), graph, out(&mut after), 1, pointer]), 0);
    graph
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn memory_nodes_of_graphs_meet_the_limit() {
    if !inside("graphs::memory_nodes_of_graphs_meet_the_limit", &Share::default()) {
        return;
    }
    let cuda = Cuda::start();
    let mut executable = 0usize;
    let instantiate = |executable: &mut usize, mib| {
        cuda.call("cuGraphInstantiateWithFlags", &[out(executable), graph_of(&cuda, mib), 0])
    };
    assert_eq!(instantiate(&mut executable, 2048), OUT_OF_MEMORY);
    assert_eq!(instantiate(&mut executable, 600), 0);
    for round in 0..3 {
        assert_eq!(cuda.call("cuGraphLaunch", &[executable, 0]), 0, "launch {round}");
        assert_eq!(cuda.call("cuCtxSynchronize", &[]), 0);
        assert!(
            charged() >= really_held(0) && charged() <= CONTEXT + 600,
            "{} {}",
            charged(),
            really_held(0)
        );
    }
    let whole = cuda.allocate(1024).unwrap(); // takes what the idle graph held
    assert_eq!(cuda.call("cuGraphLaunch", &[executable, 0]), OUT_OF_MEMORY);
    assert_eq!(cuda.free(whole), 0);
    assert_eq!(cuda.call("cuGraphLaunch", &[executable, 0]), 0);
    assert_eq!(cuda.call("cuCtxSynchronize", &[]), 0);
    assert_eq!(cuda.call("cuGraphExecDestroy", &[executable]), 0);
    assert_eq!(cuda.call("cuDeviceGraphMemTrim", &[0]), 0);
    assert_eq!((charged(), really_held(0)), (CONTEXT, CONTEXT));
}

#[test]
#[ignore = "needs root: makes a mount namespace"]
fn memory_nodes_in_child_graphs_meet_the_limit() {
    if !inside("graphs::memory_nodes_in_child_graphs_meet_the_limit", &Share::default()) {
        return;
    }
    let cuda = Cuda::start();
    let (mut executable, mut node) = (0usize, 0usize);
    let mut instantiate = |graph| cuda.call("cuGraphInstantiateWithFlags", &[out(&mut executable), graph, 0]);
    let (mut small, mut large) = (graph_of(&cuda, 100), graph_of(&cuda, 4096));
    for depth in 1..12 {
        for graph in [&mut small, &mut large] {
            let mut parent = 0usize;
            assert_eq!(cuda.call("cuGraphCreate", &[out(&mut parent), 0]), 0);
            assert_eq!(cuda.call("cuGraphAddChildGraphNode", &[out(&mut node), parent, 0, 0, *graph]), 0);
            *graph = parent;
        }
        assert_eq!(instantiate(large), OUT_OF_MEMORY, "depth {depth}");
        // Graphs that are nested more deeply than the search goes are refused: their nodes would not be
        // charged.
        assert_eq!(instantiate(small), if depth <= 8 { 0 } else { OUT_OF_MEMORY }, "depth {depth}");
    }
    let mut copy = 0usize;
    assert_eq!(cuda.call("cuGraphClone", &[out(&mut copy), graph_of(&cuda, 4096)]), 0);
    assert_eq!(instantiate(copy), OUT_OF_MEMORY, "a clone");
}
