//! The state of a simulated GPU node, shared by every process that uses one of its GPUs.
//!
//! The simulated libcuda and libnvidia-ml and the program that creates a node are built on this crate. It
//! owns the mapped state file: the GPUs, their memory books, their time lines, and the slots of the
//! processes. It does not depend on the interfaces of CUDA and NVML.

pub mod cgroup;
pub mod clock;
pub mod fault;
pub mod lock;
pub mod memory;
pub mod mig;
pub mod model;
pub mod physics;
pub mod place;
pub mod session;
pub mod size;
pub mod span;
pub mod state;
pub mod timeline;
pub mod virtual_gpu;
