//! The inputs of a plan.

use gpushare_inventory::{Gpu, SharedNodes};

use crate::driver_limit::DriverLimiter;
use crate::host_files::HostFiles;
use crate::image::Image;
use crate::settings::Programs;

/// The inputs of [`crate::Plan::new`] besides the request and the lease. They were read before: making a plan
/// reads no file.
#[derive(Clone, Copy, Debug)]
pub struct PlanParts<'a> {
    /// Every usable GPU of the node, granted or not.
    pub gpus: &'a [Gpu],
    /// The node's other device nodes, such as `/dev/nvidiactl` and those below `/dev/dri`.
    pub nodes: &'a SharedNodes,
    /// Version of the node's driver.
    pub driver_version: &'a str,
    /// Host files that the container gets, already looked up and checked.
    pub files: &'a HostFiles,
    /// The container's library folder, and the driver libraries that its image brings.
    pub image: &'a Image,
    /// Our own folders, and what the hooks are told. `state` must be the state folder whose store holds the
    /// lease.
    pub programs: &'a Programs<'a>,
    /// What sets the driver's own limit, if the container gets one.
    pub limiter: Option<&'a DriverLimiter>,
    /// As [`crate::Requester::needs_poststop`].
    pub needs_poststop: bool,
}
