//! What a lease on this node offers an image that states requirements.

use gpushare_inventory::{GpuTotals, Node};
use gpushare_quota::{Grant, Lease};
use gpushare_request::Mode;

use crate::requirement::Offer;

/// What the container of `lease` finds on `node`.
pub fn offer(node: &Node, lease: &Lease) -> Offer {
    let totals = node.totals.as_ref();
    let cuda = totals.map(|totals| totals.cuda_version.clone()).filter(|cuda| !cuda.is_empty());
    let known = |grant: &Grant| -> Option<&GpuTotals> {
        let uuid = grant.gpu.to_string();
        totals?.gpus.iter().find(|gpu| gpu.uuid == uuid)
    };
    let gpus = lease.grants.iter().map(|grant| {
        known(grant).map_or_else(
            || ("unknown".to_owned(), String::new()),
            |gpu| (gpu.brand.clone(), gpu.architecture.clone()),
        )
    });
    Offer {
        driver: node.driver.version.clone(),
        cuda,
        gpus: gpus.collect(),
        forward_compatible: lease.mode != Mode::Share,
    }
}
