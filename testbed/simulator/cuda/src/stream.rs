//! Streams: the order of work in a context, and each stream's end.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;

use gpushare_simulator::clock;
use gpushare_simulator::session::Session;
use gpushare_simulator::state::Gpu;
use gpushare_simulator::timeline::Mark;

use crate::abi::{Code, Handle, In, Out, Result, thread_stream};
use crate::callback::{HostCall, Pending};
use crate::capture::Capturing;
use crate::context::{Context, current};
use crate::driver::{Driver, driver, locked};
use crate::registry::{Registry, new_handle};
use crate::work::{Opaque, Work};

/// The end of a stream's queued work.
#[derive(Clone, Copy, Default)]
pub struct Tail {
    /// End of the last work on the stream's own GPU.
    pub mark: Mark,
    /// Moment before which nothing starts, in nanoseconds of the device clock; set by events whose moment is
    /// known.
    pub floor: u64,
}

impl Tail {
    /// Returns when all work has ended, if that is known before it has run.
    pub fn end(&self, gpu: &Gpu) -> Option<u64> {
        Some(self.mark.end(gpu)?.max(self.floor))
    }

    /// Whether all work has ended.
    pub fn done(&self, gpu: &Gpu, session: &Session) -> bool {
        self.mark.done(gpu, session) && self.floor <= clock::now()
    }

    /// Waits until all work has ended.
    pub fn wait(&self, gpu: &Gpu, session: &Session) {
        self.mark.wait(gpu, session);
        let left = self.floor.saturating_sub(clock::now());
        if left > 0 {
            std::thread::sleep(std::time::Duration::from_nanos(left));
        }
    }
}

/// A stream.
pub struct Stream {
    /// Its handle in C.
    pub handle: Handle,
    /// Context in which its work runs.
    pub context: Arc<Context>,
    /// Whether it is the context's legacy default stream, which may not be captured.
    pub legacy: bool,
    /// End of its queued work.
    pub tail: Mutex<Tail>,
    /// Its host functions that have not returned.
    pub pending: Arc<Pending>,
    /// Whether `capture` is set. It is an atomic because every launch reads it.
    pub captured: AtomicBool,
    /// The capture in which it takes part.
    pub capture: Mutex<Option<Capturing>>,
    /// Flags of cuStreamCreate: 1 for a stream that does not wait for the legacy stream.
    pub flags: u32,
    priority: i32,
}

type DefaultKey = (Handle, Option<ThreadId>);

/// All streams of the process.
#[derive(Default)]
pub struct Streams {
    registry: Registry<Stream>,
    /// Default streams by context, and per-thread ones by thread too.
    defaults: Mutex<HashMap<DefaultKey, Arc<Stream>>>,
}

const LEGACY: Handle = 1;
const PER_THREAD: Handle = 2;

impl Stream {
    fn new(handle: Handle, context: Arc<Context>, legacy: bool, flags: u32, priority: i32) -> Self {
        Self {
            handle,
            context,
            legacy,
            tail: Mutex::default(),
            pending: Arc::default(),
            captured: AtomicBool::new(false),
            capture: Mutex::new(None),
            flags,
            priority,
        }
    }

    /// Performs `work`, or records it while the stream is captured.
    pub fn enqueue(&self, driver: &Driver, work: Work) -> Result {
        if self.captured.load(Ordering::Acquire)
            && let Some(capturing) = &mut *locked(&self.capture)
        {
            return capturing.record(driver, work).map(|_| ());
        }
        if self.legacy {
            driver.captures.refuse_implicit(self)?;
        }
        driver.perform(self, &work)
    }

    /// End of the stream's work. The legacy stream waits for all blocking streams, so its end is that of the
    /// context.
    pub fn end(&self) -> Tail {
        let tail = *locked(&self.tail);
        if self.legacy { Tail { mark: *locked(&self.context.last), floor: tail.floor } } else { tail }
    }

    fn synchronize(&self, driver: &Driver) -> Result {
        if self.captured.load(Ordering::Acquire) {
            return Err(driver.captures.spoil(self));
        }
        self.end().wait(driver.gpu(self.context.ordinal)?, &driver.session);
        self.pending.wait();
        driver.settle_pools(self.context.ordinal);
        Ok(())
    }
}

impl Streams {
    /// Makes a stream in `context` and returns its handle.
    pub fn add(&self, context: Arc<Context>, flags: u32, priority: i32) -> Handle {
        let make = |handle| Stream::new(handle, context, false, flags, priority.clamp(-5, 0));
        self.registry.add_with(make)
    }

    /// All streams of `context`, its default streams included.
    pub fn of(&self, context: Handle) -> Vec<Arc<Stream>> {
        let defaults: Vec<Arc<Stream>> = locked(&self.defaults).values().cloned().collect();
        let all = self.registry.all().into_iter().chain(defaults);
        all.filter(|stream| stream.context.handle == context).collect()
    }

    /// Forgets the streams of a dying context.
    pub fn forget(&self, context: Handle) {
        self.registry.remove_all(|stream| stream.context.handle == context);
        locked(&self.defaults).retain(|key, _| key.0 != context);
    }

    fn default_of(&self, context: Arc<Context>, legacy: bool) -> Arc<Stream> {
        let key = (context.handle, (!legacy).then(|| std::thread::current().id()));
        let make = || Arc::new(Stream::new(new_handle(), context, legacy, 0, 0));
        Arc::clone(locked(&self.defaults).entry(key).or_insert_with(make))
    }
}

impl Driver {
    /// The stream of a handle; 0 stands for the default stream of the caller's entry point, legacy or
    /// per-thread.
    pub fn stream(&self, handle: Handle) -> Result<Arc<Stream>> {
        match handle {
            0 => Ok(self.streams.default_of(current()?, !thread_stream())),
            LEGACY => Ok(self.streams.default_of(current()?, true)),
            PER_THREAD => Ok(self.streams.default_of(current()?, false)),
            _ => self.streams.registry.get(handle),
        }
    }
}

fn create(out: Out<Handle>, flags: u32, priority: i32) -> Result {
    out.given()?;
    let driver = driver()?;
    let context = current()?;
    if flags > 1 {
        return Err(Code::INVALID_VALUE);
    }
    out.set(driver.streams.add(context, flags, priority))
}

fn ordinal_of(handle: Handle) -> Result<i32> {
    Ok(driver()?.stream(handle)?.context.ordinal)
}

exports! {
    fn cuStreamCreate(out: Out<Handle>, flags: u32) {
        create(out, flags, 0)
    }

    fn cuStreamCreateWithPriority(out: Out<Handle>, flags: u32, priority: i32) {
        create(out, flags, priority)
    }

    fn cuStreamDestroy_v2 also cuStreamDestroy (handle: Handle) {
        driver()?.streams.registry.remove(handle).map(|_| ())
    }

    fn cuStreamSynchronize thread cuStreamSynchronize_ptsz (handle: Handle) {
        let driver = driver()?;
        driver.stream(handle)?.synchronize(driver)
    }

    fn cuStreamQuery thread cuStreamQuery_ptsz (handle: Handle) {
        let driver = driver()?;
        let stream = driver.stream(handle)?;
        if stream.captured.load(Ordering::Acquire) {
            return Err(driver.captures.spoil(&stream));
        }
        let done = stream.end().done(driver.gpu(stream.context.ordinal)?, &driver.session) && stream.pending.done();
        if done { Ok(()) } else { Err(Code::NOT_READY) }
    }

    fn cuStreamWaitEvent thread cuStreamWaitEvent_ptsz (handle: Handle, event: Handle, _flags: u32) {
        let driver = driver()?;
        let stream = driver.stream(handle)?;
        let event = driver.events.get(event)?;
        driver.wait_in(&stream, &event)
    }

    fn cuStreamGetFlags thread cuStreamGetFlags_ptsz (handle: Handle, out: Out<u32>) {
        out.set(driver()?.stream(handle)?.flags)
    }

    fn cuStreamGetPriority thread cuStreamGetPriority_ptsz (handle: Handle, out: Out<i32>) {
        out.set(driver()?.stream(handle)?.priority)
    }

    fn cuStreamGetId thread cuStreamGetId_ptsz (handle: Handle, out: Out<u64>) {
        out.set(driver()?.stream(handle)?.handle as u64)
    }

    fn cuStreamGetCtx thread cuStreamGetCtx_ptsz (handle: Handle, out: Out<Handle>) {
        out.set(driver()?.stream(handle)?.context.handle)
    }

    fn cuStreamGetCtx_v2 thread cuStreamGetCtx_v2_ptsz (handle: Handle, out: Out<Handle>, green: Out<Handle>) {
        green.set_if_given(0);
        out.set(driver()?.stream(handle)?.context.handle)
    }

    fn cuStreamGetDevice thread cuStreamGetDevice_ptsz (handle: Handle, out: Out<i32>) {
        out.set(ordinal_of(handle)?)
    }

    fn cuStreamAttachMemAsync thread cuStreamAttachMemAsync_ptsz
    (handle: Handle, address: u64, _length: usize, _flags: u32) {
        ordinal_of(handle)?;
        driver()?.check(address, 1)
    }

    fn cuStreamGetAttribute thread cuStreamGetAttribute_ptsz (handle: Handle, _number: u32, value: Out<[u8; 64]>) {
        ordinal_of(handle)?;
        value.set([0; 64])
    }

    /// Attributes are hints to the hardware, so they are accepted and ignored.
    fn cuStreamSetAttribute thread cuStreamSetAttribute_ptsz (handle: Handle, _number: u32, value: In<u8>) {
        ordinal_of(handle)?;
        value.get().map(|_| ())
    }

    fn cuStreamCopyAttributes thread cuStreamCopyAttributes_ptsz (to: Handle, from: Handle) {
        ordinal_of(from)?;
        ordinal_of(to).map(|_| ())
    }

    fn cuLaunchHostFunc thread cuLaunchHostFunc_ptsz
    (handle: Handle, function: Option<extern "C" fn(Out<std::ffi::c_void>)>, data: *mut std::ffi::c_void) {
        let driver = driver()?;
        let call = HostCall::Plain(function.ok_or(Code::INVALID_VALUE)?, Opaque::new(data));
        driver.stream(handle)?.enqueue(driver, Work::Host(call))
    }

    fn cuStreamAddCallback thread cuStreamAddCallback_ptsz (
        handle: Handle,
        function: Option<extern "C" fn(Handle, u32, Out<std::ffi::c_void>)>,
        data: *mut std::ffi::c_void,
        _flags: u32,
    ) {
        let driver = driver()?;
        let call = HostCall::WithStream(function.ok_or(Code::INVALID_VALUE)?, handle, Opaque::new(data));
        driver.stream(handle)?.enqueue(driver, Work::Host(call))
    }
}
