//! Stream capture: streams that record into a graph, and the calls that are forbidden while they do.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};

use crate::abi::{Code, Handle, In, Out, Result};
use crate::context::Context;
use crate::driver::{Driver, driver, locked};
use crate::stream::Stream;
use crate::work::Work;

const GLOBAL: u32 = 0;
const THREAD_LOCAL: u32 = 1;
const RELAXED: u32 = 2;

/// One capture, shared by the streams that take part in it.
pub struct Capture {
    id: u64,
    mode: u32,
    thread: ThreadId,
    origin: Handle,
    context: Handle,
    graph: Handle,
    invalid: AtomicBool,
}

/// A stream's part in a capture: the capture, and the nodes that its next node depends on.
#[derive(Clone)]
pub struct Capturing {
    capture: Arc<Capture>,
    depends: Vec<Handle>,
}

/// All active captures.
#[derive(Default)]
pub struct Captures {
    count: AtomicUsize,
    active: Mutex<Vec<Arc<Capture>>>,
    next: AtomicU64,
}

thread_local! {
    static MODE: Cell<u32> = const { Cell::new(GLOBAL) };
}

impl Capturing {
    /// Adds `work` to the graph after the stream's last nodes, and returns its node.
    pub fn record(&mut self, driver: &Driver, work: Work) -> Result<Handle> {
        self.check()?;
        let graph = driver.graphs.get(self.capture.graph)?;
        let node = graph.add(work, self.depends.clone())?;
        self.depends = vec![node];
        Ok(node)
    }

    /// Returns STREAM_CAPTURE_INVALIDATED if the capture was invalidated.
    pub fn check(&self) -> Result {
        if self.capture.invalid.load(Ordering::Acquire) {
            Err(Code::STREAM_CAPTURE_INVALIDATED)
        } else {
            Ok(())
        }
    }

    /// Marks the capture as invalid, so that it cannot end in a graph.
    pub fn invalidate(&self) {
        self.capture.invalid.store(true, Ordering::Release);
    }

    /// Lets the stream's next node depend on `other`'s last nodes too. A stream of another capture
    /// invalidates this one.
    pub fn join(&mut self, other: &Self) -> Result {
        self.check()?;
        if !Arc::ptr_eq(&self.capture, &other.capture) {
            self.invalidate();
            return Err(Code::STREAM_CAPTURE_ISOLATION);
        }
        for &node in &other.depends {
            if !self.depends.contains(&node) {
                self.depends.push(node);
            }
        }
        Ok(())
    }
}

impl Captures {
    fn any(&self) -> bool {
        self.count.load(Ordering::Acquire) > 0
    }

    /// Invalidates the capture of a stream that a call would wait for or query. Returns the call's result.
    pub fn spoil(&self, stream: &Stream) -> Code {
        if let Some(capturing) = &*locked(&stream.capture) {
            capturing.invalidate();
        }
        Code::STREAM_CAPTURE_UNSUPPORTED
    }

    /// Refuses work in the legacy stream, which would wait for a captured stream of the same context.
    pub fn refuse_implicit(&self, stream: &Stream) -> Result {
        if !self.any() {
            return Ok(());
        }
        let active = locked(&self.active);
        let hit =
            active.iter().find(|capture| capture.context == stream.context.handle && capture.mode != RELAXED);
        hit.map_or(Ok(()), |capture| {
            capture.invalid.store(true, Ordering::Release);
            Err(Code::STREAM_CAPTURE_IMPLICIT)
        })
    }

    fn finish(&self, capture: &Arc<Capture>) {
        locked(&self.active).retain(|other| !Arc::ptr_eq(other, capture));
        self.count.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Driver {
    /// Refuses calls that may act at once, such as cuMemAlloc, during captures from which the thread's mode
    /// does not exempt them.
    pub fn refuse_unsafe_while_capturing(&self) -> Result {
        if !self.captures.any() || MODE.get() == RELAXED {
            return Ok(());
        }
        let own = thread::current().id();
        let active = locked(&self.captures.active);
        let hit = active.iter().find(|capture| match capture.mode {
            GLOBAL => MODE.get() == GLOBAL || capture.thread == own,
            THREAD_LOCAL => capture.thread == own,
            _ => false,
        });
        hit.map_or(Ok(()), |capture| {
            capture.invalid.store(true, Ordering::Release);
            Err(Code::STREAM_CAPTURE_UNSUPPORTED)
        })
    }

    /// Refuses to wait for a context with a captured stream.
    pub fn refuse_while_capturing(&self, context: &Context) -> Result {
        let active = locked(&self.captures.active);
        active.iter().find(|capture| capture.context == context.handle).map_or(Ok(()), |capture| {
            capture.invalid.store(true, Ordering::Release);
            Err(Code::STREAM_CAPTURE_UNSUPPORTED)
        })
    }
}

fn begin(handle: Handle, mode: u32, graph: Option<Handle>, depends: Vec<Handle>) -> Result {
    let driver = driver()?;
    let stream = driver.stream(handle)?;
    if mode > RELAXED {
        return Err(Code::INVALID_VALUE);
    }
    let mut place = locked(&stream.capture);
    if stream.legacy || place.is_some() {
        return Err(if stream.legacy { Code::STREAM_CAPTURE_UNSUPPORTED } else { Code::ILLEGAL_STATE });
    }
    let capture = Arc::new(Capture {
        id: driver.captures.next.fetch_add(1, Ordering::Relaxed) + 1,
        mode,
        thread: thread::current().id(),
        origin: stream.handle,
        context: stream.context.handle,
        graph: graph.unwrap_or_else(|| driver.graphs.create()),
        invalid: AtomicBool::new(false),
    });
    locked(&driver.captures.active).push(Arc::clone(&capture));
    driver.captures.count.fetch_add(1, Ordering::AcqRel);
    *place = Some(Capturing { capture, depends });
    stream.captured.store(true, Ordering::Release);
    Ok(())
}

fn end(handle: Handle, out: Out<Handle>) -> Result {
    out.given()?;
    let driver = driver()?;
    let stream = driver.stream(handle)?;
    let capture = match &*locked(&stream.capture) {
        Some(capturing) => Arc::clone(&capturing.capture),
        None => return Err(Code::ILLEGAL_STATE),
    };
    if capture.origin != stream.handle {
        return Err(Code::STREAM_CAPTURE_UNMATCHED);
    }
    if capture.mode != RELAXED && capture.thread != thread::current().id() {
        return Err(Code::STREAM_CAPTURE_WRONG_THREAD);
    }
    for other in driver.streams.of(capture.context) {
        let mut place = locked(&other.capture);
        if place.as_ref().is_some_and(|capturing| Arc::ptr_eq(&capturing.capture, &capture)) {
            *place = None;
            other.captured.store(false, Ordering::Release);
        }
    }
    driver.captures.finish(&capture);
    if capture.invalid.load(Ordering::Acquire) {
        out.set(0)?;
        return Err(Code::STREAM_CAPTURE_INVALIDATED);
    }
    out.set(capture.graph)
}

/// Status, id, graph and last nodes of a stream's capture. The status is 0 for none, 1 for active, 2 for
/// invalidated.
fn info(handle: Handle) -> Result<(u32, u64, Handle, Vec<Handle>)> {
    let driver = driver()?;
    let stream = driver.stream(handle)?;
    if stream.legacy && driver.captures.any() {
        driver.captures.refuse_implicit(&stream)?;
    }
    let place = locked(&stream.capture);
    Ok(place.as_ref().map_or((0, 0, 0, Vec::new()), |capturing| {
        let status = if capturing.check().is_ok() { 1 } else { 2 };
        (status, capturing.capture.id, capturing.capture.graph, capturing.depends.clone())
    }))
}

thread_local! {
    /// The list that the last result of cuStreamGetCaptureInfo in this thread points to.
    static LISTED: std::cell::RefCell<Vec<Handle>> = const { std::cell::RefCell::new(Vec::new()) };
}

fn long_info(
    handle: Handle,
    status: Out<u32>,
    id: Out<u64>,
    graph: Out<Handle>,
    nodes: Out<*const Handle>,
    count: Out<usize>,
) -> Result {
    let (state, number, of, depends) = info(handle)?;
    status.set(state)?;
    if state == 1 {
        id.set_if_given(number);
        graph.set_if_given(of);
        count.set_if_given(depends.len());
        nodes.set_if_given(LISTED.with_borrow_mut(|list| {
            *list = depends;
            list.as_ptr()
        }));
    }
    Ok(())
}

fn update(handle: Handle, nodes: In<Handle>, count: usize, flags: u32) -> Result {
    let driver = driver()?;
    let stream = driver.stream(handle)?;
    let list = nodes.list(count)?;
    let mut place = locked(&stream.capture);
    let capturing = place.as_mut().ok_or(Code::ILLEGAL_STATE)?;
    if flags & 1 != 0 {
        capturing.depends = list;
    } else {
        capturing.depends.extend(list);
    }
    Ok(())
}

exports! {
    fn cuStreamBeginCapture_v2 thread cuStreamBeginCapture_v2_ptsz (stream: Handle, mode: u32) {
        begin(stream, mode, None, Vec::new())
    }

    /// The oldest form takes no mode and means the global one.
    fn cuStreamBeginCapture thread cuStreamBeginCapture_ptsz (stream: Handle) {
        begin(stream, GLOBAL, None, Vec::new())
    }

    fn cuStreamBeginCaptureToGraph thread cuStreamBeginCaptureToGraph_ptsz
    (stream: Handle, graph: Handle, nodes: In<Handle>, _edges: In<u8>, count: usize, mode: u32) {
        driver()?.graphs.get(graph)?;
        begin(stream, mode, Some(graph), nodes.list(count)?)
    }

    fn cuStreamEndCapture thread cuStreamEndCapture_ptsz (stream: Handle, out: Out<Handle>) {
        end(stream, out)
    }

    fn cuStreamIsCapturing thread cuStreamIsCapturing_ptsz (stream: Handle, out: Out<u32>) {
        out.set(info(stream)?.0)
    }

    fn cuStreamGetCaptureInfo thread cuStreamGetCaptureInfo_ptsz (stream: Handle, status: Out<u32>, id: Out<u64>) {
        let (state, number, ..) = info(stream)?;
        id.set_if_given(number);
        status.set(state)
    }

    fn cuStreamGetCaptureInfo_v2 thread cuStreamGetCaptureInfo_v2_ptsz (
        stream: Handle, status: Out<u32>, id: Out<u64>, graph: Out<Handle>, nodes: Out<*const Handle>, count: Out<usize>,
    ) {
        long_info(stream, status, id, graph, nodes, count)
    }

    fn cuStreamGetCaptureInfo_v3 thread cuStreamGetCaptureInfo_v3_ptsz (
        stream: Handle, status: Out<u32>, id: Out<u64>, graph: Out<Handle>, nodes: Out<*const Handle>,
        edges: Out<usize>, count: Out<usize>,
    ) {
        edges.set_if_given(0);
        long_info(stream, status, id, graph, nodes, count)
    }

    fn cuStreamUpdateCaptureDependencies thread cuStreamUpdateCaptureDependencies_ptsz
    (stream: Handle, nodes: In<Handle>, count: usize, flags: u32) {
        update(stream, nodes, count, flags)
    }

    fn cuStreamUpdateCaptureDependencies_v2 thread cuStreamUpdateCaptureDependencies_v2_ptsz
    (stream: Handle, nodes: In<Handle>, _edges: In<u8>, count: usize, flags: u32) {
        update(stream, nodes, count, flags)
    }

    fn cuThreadExchangeStreamCaptureMode(mode: Out<u32>) {
        driver()?;
        let new = mode.get()?;
        if new > RELAXED {
            return Err(Code::INVALID_VALUE);
        }
        mode.set(MODE.replace(new))
    }
}
