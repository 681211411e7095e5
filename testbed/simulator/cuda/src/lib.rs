//! A libcuda without a GPU: the driver's own interface on the state of a simulated node.
//!
//! Memory is counted against the simulated GPU and backed by ordinary memory, so copies really copy. Kernels
//! take time on the GPU's time line; those whose image is PTX text really run. A name that `names.txt` lists
//! and no module defines answers CUDA_ERROR_NOT_SUPPORTED.
// The functions have the names of the C interface.
#![allow(non_snake_case)]

// The unwinder comes from the static library, so that the driver can be loaded on systems with only glibc.
#[link(name = "gcc_eh", kind = "static", modifiers = "+whole-archive,-bundle")]
unsafe extern "C" {}

#[macro_use]
mod abi;
mod array;
mod bounds;
mod callback;
mod capture;
mod context;
mod copy;
mod debugger;
mod device;
mod driver;
mod entry;
mod event;
mod graph;
mod graphmem;
mod green;
mod heap;
mod host;
mod image;
mod ipc_event;
mod launch;
mod limits;
mod linear;
mod link;
mod manager;
mod module;
mod mps;
mod multicast;
mod narrow;
mod nodes;
mod pool;
mod registry;
mod shape;
mod shared;
mod sparse;
mod stream;
mod vmm;
mod work;
