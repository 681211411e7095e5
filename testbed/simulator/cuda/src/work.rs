//! Work for a GPU: a stream performs it at once, or records it into a graph while the stream is captured.
//!
//! Its effects on memory happen when it is queued; its time passes on the GPU's time line afterwards. In one
//! stream, and between streams joined by events, effects therefore happen in the order of the calls.

use std::ffi::c_void;
use std::sync::Arc;

use gpushare_simulator::timeline::submit;

use crate::abi::{Handle, Result};
use crate::callback::HostCall;
use crate::copy::{Fill, Shape};
use crate::driver::{Driver, locked};
use crate::launch::Kernel;
use crate::stream::Stream;

/// A piece of work.
#[derive(Clone)]
pub enum Work {
    /// Does nothing, and joins the work before it with the work after it.
    Empty,
    /// A kernel.
    Kernel(Kernel),
    /// A copy.
    Copy(Shape),
    /// A memset.
    Fill(Fill),
    /// A function of the host program.
    Host(HostCall),
    /// Takes the memory of a graph's allocation node, whose address is fixed.
    Allocate(u64),
    /// Frees memory of a graph or a pool.
    Free(u64),
    /// Stamps an event.
    Record(Handle),
    /// Waits for an event.
    Wait(Handle),
    /// The works of another graph's nodes, in order.
    Child(Arc<Vec<Work>>),
    /// The graph of a child graph node. An executable graph holds [`Work::Child`] in its place.
    Graph(Handle),
}

impl Work {
    /// CUDA's number for this type of graph node (CUgraphNodeType).
    pub fn node_type(&self) -> u32 {
        match self {
            Self::Kernel(_) => 0,
            Self::Copy(_) => 1,
            Self::Fill(_) => 2,
            Self::Host(_) => 3,
            Self::Child(_) | Self::Graph(_) => 4,
            Self::Empty => 5,
            Self::Wait(_) => 6,
            Self::Record(_) => 7,
            Self::Allocate(_) => 10,
            Self::Free(_) => 11,
        }
    }
}

impl Driver {
    /// Performs `work` at the end of `stream`.
    pub fn perform(&self, stream: &Stream, work: &Work) -> Result {
        match work {
            Work::Empty => Ok(()),
            Work::Kernel(kernel) => self.perform_kernel(stream, kernel),
            Work::Copy(shape) => shape.perform(self),
            Work::Fill(fill) => fill.perform(self),
            Work::Host(call) => {
                self.callbacks.queue(self, stream, *call);
                Ok(())
            }
            Work::Allocate(start) => self.graph_memory.take(self, *start),
            Work::Free(start) => self.free_ordered(*start),
            Work::Record(event) => self.events.get(*event)?.record(self, stream),
            Work::Wait(event) => self.events.get(*event)?.hold(self, stream),
            Work::Child(works) => works.iter().try_for_each(|work| self.perform(stream, work)),
            Work::Graph(graph) => {
                let works = self.graphs.works(*graph)?;
                works.iter().try_for_each(|work| self.perform(stream, work))
            }
        }
    }

    fn perform_kernel(&self, stream: &Stream, kernel: &Kernel) -> Result {
        let ordinal = stream.context.ordinal;
        let gpu = self.gpu(ordinal)?;
        kernel.run(self)?;
        let queue = self.queue(ordinal)?;
        queue.make_room(gpu, &self.session);
        let mut tail = locked(&stream.tail);
        tail.mark = submit(gpu, &self.session, kernel.duration(self, gpu, stream.context.cores), tail.floor);
        *locked(&stream.context.last) = tail.mark;
        queue.add(tail.mark);
        Ok(())
    }
}

/// A pointer from the host program, which this driver never dereferences.
#[derive(Clone, Copy)]
pub struct Opaque(usize);

impl Opaque {
    /// Keeps the pointer's address.
    pub fn new(pointer: *mut c_void) -> Self {
        Self(pointer.expose_provenance())
    }

    /// Returns the original pointer.
    pub fn pointer(self) -> *mut c_void {
        std::ptr::with_exposed_provenance_mut(self.0)
    }
}
