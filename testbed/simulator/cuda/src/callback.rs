//! Functions of the host program that streams call. One thread calls them in the order in which they were
//! queued.

use std::ffi::c_void;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crate::abi::{Handle, Out};
use crate::driver::{Driver, driver, locked};
use crate::stream::{Stream, Tail};
use crate::work::Opaque;

/// A function and its argument.
#[derive(Clone, Copy)]
pub enum HostCall {
    /// cuLaunchHostFunc.
    Plain(extern "C" fn(Out<c_void>), Opaque),
    /// cuStreamAddCallback, which also receives the stream and its status.
    WithStream(extern "C" fn(Handle, u32, Out<c_void>), Handle, Opaque),
}

impl HostCall {
    fn call(self) {
        match self {
            Self::Plain(function, data) => function(Out::from_pointer(data.pointer())),
            Self::WithStream(function, stream, data) => {
                function(stream, 0, Out::from_pointer(data.pointer()))
            }
        }
    }
}

/// Count of a stream's calls that have not returned.
#[derive(Default)]
pub struct Pending {
    count: Mutex<u32>,
    changed: Condvar,
}

impl Pending {
    /// Waits until every call has returned.
    pub fn wait(&self) {
        let mut count = locked(&self.count);
        while *count > 0 {
            count = self.changed.wait(count).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Whether every call has returned.
    pub fn done(&self) -> bool {
        *locked(&self.count) == 0
    }
}

struct Queued {
    call: HostCall,
    ordinal: i32,
    tail: Tail,
    pending: Arc<Pending>,
}

/// Queue to the calling thread, which starts with the first call.
#[derive(Default)]
pub struct Callbacks {
    sender: Mutex<Option<Sender<Queued>>>,
}

fn serve(queued: &Queued) {
    if let Ok(driver) = driver()
        && let Ok(gpu) = driver.gpu(queued.ordinal)
    {
        queued.tail.wait(gpu, &driver.session);
        queued.call.call();
    }
    *locked(&queued.pending.count) -= 1;
    queued.pending.changed.notify_all();
}

impl Callbacks {
    /// Queues `call`, to be made after the work that is in `stream` now.
    pub fn queue(&self, driver: &Driver, stream: &Stream, call: HostCall) {
        let _ = driver;
        *locked(&stream.pending.count) += 1;
        let tail = *locked(&stream.tail);
        let queued =
            Queued { call, ordinal: stream.context.ordinal, tail, pending: Arc::clone(&stream.pending) };
        let mut sender = locked(&self.sender);
        let sender = sender.get_or_insert_with(|| {
            let (sender, receiver) = channel::<Queued>();
            std::thread::spawn(move || receiver.into_iter().for_each(|queued| serve(&queued)));
            sender
        });
        if let Err(refused) = sender.send(queued) {
            serve(&refused.0);
        }
    }
}
