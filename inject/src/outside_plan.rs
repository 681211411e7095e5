//! Parts of the node that a plan does not give. An edit refuses them in a bundle, and finds by them what an
//! earlier plan left there.

use std::path::{Path, PathBuf};

use gpushare_inventory::DeviceNode;
use gpushare_quota::Lease;

use crate::plan_parts::PlanParts;

/// The parts of the node that a plan does not give.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OutsidePlan {
    /// Major and minor numbers of the nodes of GPUs that the lease does not grant.
    pub other_nodes: Vec<(u32, u32)>,
    /// The nodes below /dev/dri of every GPU. First the minor number of the GPU's own node, then major and
    /// minor number of the node below /dev/dri.
    pub display_nodes: Vec<(u32, (u32, u32))>,
    /// The major number of MIG's nodes; `None` where the node has none.
    pub mig_major: Option<u32>,
    /// The folders that plans mount from: the driver's, and our cache and state.
    pub sources: Vec<PathBuf>,
}

impl OutsidePlan {
    /// The parts of the node that `lease` does not grant.
    pub(crate) fn of(lease: &Lease, parts: PlanParts) -> Self {
        let PlanParts { gpus, nodes, files, programs, .. } = parts;
        let granted = |uuid| lease.grants.iter().any(|grant| grant.gpu == uuid);
        let number = |node: &DeviceNode| (node.major, node.minor);
        let of_gpus = || gpus.iter().flat_map(|gpu| gpu.nodes().map(|node| (gpu.uuid, node)));
        // Instances of one GPU have its node in common.
        let is_given =
            |node: &DeviceNode| of_gpus().any(|(gpu, given)| granted(gpu) && number(given) == number(node));
        let render = nodes.render.iter().map(|(uuid, node)| (*uuid, node));
        let others = of_gpus().chain(render).filter(|(uuid, node)| !granted(*uuid) && !is_given(node));
        let minor = |uuid| gpus.iter().find(|gpu| gpu.uuid == uuid).map(|gpu| gpu.node.minor);
        let ours = [programs.cache, programs.state].map(Path::to_path_buf);
        let display = nodes.render.iter().filter_map(|(uuid, node)| Some((minor(*uuid)?, number(node))));
        Self {
            display_nodes: display.collect(),
            other_nodes: others.map(|(_, node)| number(node)).collect(),
            mig_major: nodes.capabilities_major,
            sources: [&ours[..], &files.sources].concat(),
        }
    }
}
