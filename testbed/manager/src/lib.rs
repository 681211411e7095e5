//! A resource manager (RM) in user space that replaces NVIDIA's kernel module: a file system whose files
//! nvidiactl, nvidia0 … and nvidia-uvm accept RM's ioctls.
//!
//! The kernel forwards the calls, identifies the calling task, and reports when the last descriptor of a file
//! is closed, as it does for a driver. Supervisors and attackers therefore run against it unmodified.

mod model;
mod node;
mod serve;

pub use model::{Began, Caller, Engine, Gpu, Manager, Memory, ReadError};
pub use node::serve;
pub use serve::{Files, mount};
