//! A resource manager (RM) in user space, in place of NVIDIA's kernel module: a file system whose files nvidiactl,
//! nvidia0 … and nvidia-uvm take RM's ioctls.
//!
//! The kernel passes the calls on, names the calling task, and reports when the last descriptor of a file is
//! closed, as it does for a driver. So supervisors and attackers run against it as they are.

mod model;
mod node;
mod serve;

pub use model::{Began, Caller, Engine, Gpu, Manager, Memory, ReadError};
pub use node::serve;
pub use serve::{Files, mount};
