//! What a plan is made of.

use gpushare_inventory::{Gpu, SharedNodes};

use crate::host_files::HostFiles;
use crate::image::Image;
use crate::settings::Programs;

/// What a plan is made of besides the request and the lease. All of it was read before.
#[derive(Clone, Copy, Debug)]
pub struct PlanParts<'a> {
    /// The node's GPUs.
    pub gpus: &'a [Gpu],
    /// Its other device nodes.
    pub nodes: &'a SharedNodes,
    /// The host's files that the container gets.
    pub files: &'a HostFiles,
    /// What its image has.
    pub image: &'a Image,
    /// Our own folders, and what the hooks are told. The state folder is the one of the lease.
    pub programs: &'a Programs<'a>,
}
