//! Events: moments in the order of a GPU's work, stamped with the device clock.

use std::sync::{Arc, Mutex, OnceLock};

use gpushare_simulator::clock;
use gpushare_simulator::timeline::{Stamp, stamp};

use crate::abi::{Code, Handle, Out, Result};
use crate::capture::Capturing;
use crate::context::{Context, current};
use crate::driver::{Driver, driver, locked};
use crate::ipc_event::SharedMark;
use crate::registry::Registry;
use crate::stream::{Stream, Tail};
use crate::work::Work;

#[derive(Default)]
enum Moment {
    #[default]
    Never,
    At(i32, Stamp, Tail),
    /// Recorded in a capture: a stream that waits for it joins the capture.
    Captured(Capturing),
}

/// An event, of this process or of another.
pub struct Event {
    handle: Handle,
    context: Handle,
    ordinal: i32,
    flags: u32,
    moment: Mutex<Moment>,
    /// For an event between processes: the file through which they share its position.
    shared: OnceLock<SharedMark>,
}

/// All events of the process.
#[derive(Default)]
pub struct Events {
    registry: Registry<Event>,
}

const DISABLE_TIMING: u32 = 2;
const INTERPROCESS: u32 = 4;

impl Events {
    /// The event of a handle; INVALID_HANDLE if there is none.
    pub fn get(&self, handle: Handle) -> Result<Arc<Event>> {
        self.registry.get(handle)
    }

    /// Adds another process's event, known through `shared`. Returns its handle here.
    pub fn adopt(&self, context: &Context, shared: SharedMark) -> Handle {
        self.registry.add_with(|handle| Event {
            shared: OnceLock::from(shared),
            ..Event::new(handle, context, DISABLE_TIMING | INTERPROCESS)
        })
    }

    /// Forgets the events of a dying context.
    pub fn forget(&self, context: Handle) {
        self.registry.remove_all(|event| event.context == context);
    }
}

impl Event {
    fn new(handle: Handle, context: &Context, flags: u32) -> Self {
        Self {
            handle,
            context: context.handle,
            ordinal: context.ordinal,
            flags,
            moment: Mutex::default(),
            shared: OnceLock::new(),
        }
    }

    /// Returns the file through which other processes see the event. If there is none, `make` creates it from
    /// the event's handle and GPU.
    pub fn shared(&self, make: impl FnOnce(Handle, i32) -> Result<SharedMark>) -> Result<&SharedMark> {
        if self.flags & INTERPROCESS == 0 {
            return Err(Code::INVALID_HANDLE);
        }
        if self.shared.get().is_none() {
            let new = make(self.handle, self.ordinal)?;
            if let Some((_, tail)) = self.tail()? {
                new.write(tail.mark)?;
            }
            let _ = self.shared.set(new);
        }
        self.shared.get().ok_or(Code::INVALID_HANDLE)
    }

    fn set(&self, ordinal: i32, stamp: Stamp, tail: Tail) -> Result {
        *locked(&self.moment) = Moment::At(ordinal, stamp, tail);
        self.shared.get().map_or(Ok(()), |shared| shared.write(tail.mark))
    }

    /// Stamps the event at the end of `stream`, in the GPU's queue.
    pub fn record(&self, driver: &Driver, stream: &Stream) -> Result {
        let gpu = driver.gpu(stream.context.ordinal)?;
        let mut tail = locked(&stream.tail);
        let asked = &driver.queue(stream.context.ordinal)?.asked;
        let stamp = stamp(gpu, &driver.session, asked, tail.floor);
        tail.mark = stamp.mark;
        *locked(&stream.context.last) = tail.mark;
        self.set(stream.context.ordinal, stamp, *tail)
    }

    /// Stamps the event at the end of all work of a context.
    pub fn record_end(&self, driver: &Driver, context: &Context) -> Result {
        if self.ordinal != context.ordinal {
            return Err(Code::INVALID_HANDLE);
        }
        let gpu = driver.gpu(context.ordinal)?;
        let stamp = stamp(gpu, &driver.session, &driver.queue(context.ordinal)?.asked, 0);
        let tail = Tail { mark: stamp.mark, floor: 0 };
        self.set(context.ordinal, stamp, tail)
    }

    /// Makes later work in `stream` start after the event.
    pub fn hold(&self, driver: &Driver, stream: &Stream) -> Result {
        // The tail is copied out first, because recording takes the two locks in the other order.
        let Ok(Some((ordinal, moment))) = self.tail() else { return Ok(()) };
        let gpu = driver.gpu(ordinal)?;
        if let Some(end) = moment.end(gpu) {
            let mut tail = locked(&stream.tail);
            tail.floor = tail.floor.max(end);
        } else if ordinal != stream.context.ordinal || !moment.mark.precedes(&driver.session) {
            // On one slicing GPU, work of one process keeps its order anyway. In all other cases the end is
            // unknown until it happens.
            moment.wait(gpu, &driver.session);
        }
        Ok(())
    }

    /// GPU of the event, and the end of the work before it; `None` before the first record.
    fn tail(&self) -> Result<Option<(i32, Tail)>> {
        if let Some(shared) = self.shared.get() {
            return Ok(Some((self.ordinal, Tail { mark: shared.read()?, floor: 0 })));
        }
        match &*locked(&self.moment) {
            Moment::Never => Ok(None),
            Moment::At(ordinal, _, tail) => Ok(Some((*ordinal, *tail))),
            Moment::Captured(_) => Err(Code::CAPTURED_EVENT),
        }
    }

    /// When the GPU reached the event, in nanoseconds of the device clock; NOT_READY before that.
    fn time(&self, driver: &Driver) -> Result<u64> {
        let (ordinal, stamp, tail) = match &*locked(&self.moment) {
            Moment::Never => return Err(Code::INVALID_HANDLE),
            Moment::At(ordinal, stamp, tail) => (*ordinal, stamp.clone(), *tail),
            Moment::Captured(_) => return Err(Code::CAPTURED_EVENT),
        };
        let time = stamp.time(driver.gpu(ordinal)?, &driver.session, &driver.queue(ordinal)?.asked);
        time.map(|time| time.max(tail.floor)).filter(|time| *time <= clock::now()).ok_or(Code::NOT_READY)
    }
}

impl Driver {
    /// Records `event` in `stream`. In a captured stream it marks a place in the graph instead.
    fn record_in(&self, stream: &Stream, event: &Event, external: bool) -> Result {
        if let Some(capturing) = &mut *locked(&stream.capture) {
            if external {
                return capturing.record(self, Work::Record(event.handle)).map(|_| ());
            }
            capturing.check()?;
            *locked(&event.moment) = Moment::Captured(capturing.clone());
            return Ok(());
        }
        if event.ordinal != stream.context.ordinal {
            return Err(Code::INVALID_HANDLE);
        }
        event.record(self, stream)
    }

    /// Makes `stream` wait for `event`. An event recorded in a capture adds the stream to that capture.
    pub fn wait_in(&self, stream: &Stream, event: &Event) -> Result {
        let other = match &*locked(&event.moment) {
            Moment::Captured(other) => Some(other.clone()),
            _ => None,
        };
        let mut capture = locked(&stream.capture);
        match (&mut *capture, other) {
            (Some(own), Some(other)) => own.join(&other),
            (None, Some(other)) => {
                if stream.legacy {
                    return Err(Code::STREAM_CAPTURE_IMPLICIT);
                }
                other.check()?;
                *capture = Some(other);
                stream.captured.store(true, std::sync::atomic::Ordering::Release);
                Ok(())
            }
            (Some(own), None) => {
                own.invalidate();
                Err(Code::STREAM_CAPTURE_ISOLATION)
            }
            (None, None) => event.hold(self, stream),
        }
    }
}

fn elapsed(out: Out<f32>, start: Handle, end: Handle) -> Result {
    out.given()?;
    let driver = driver()?;
    let (start, end) = (driver.events.get(start)?, driver.events.get(end)?);
    if (start.flags | end.flags) & DISABLE_TIMING != 0 {
        return Err(Code::INVALID_HANDLE);
    }
    let (from, to) = (start.time(driver)?, end.time(driver)?);
    let milliseconds = |ns: u64| std::time::Duration::from_nanos(ns).as_secs_f32() * 1000.0;
    out.set(if to >= from { milliseconds(to - from) } else { -milliseconds(from - to) })
}

exports! {
    fn cuEventCreate(out: Out<Handle>, flags: u32) {
        out.given()?;
        let driver = driver()?;
        let context = current()?;
        let timed_and_shared = flags & (INTERPROCESS | DISABLE_TIMING) == INTERPROCESS;
        if flags > 7 || timed_and_shared {
            return Err(Code::INVALID_VALUE);
        }
        out.set(driver.events.registry.add_with(|handle| Event::new(handle, &context, flags)))
    }

    fn cuEventDestroy_v2 also cuEventDestroy (handle: Handle) {
        driver()?.events.registry.remove(handle).map(|_| ())
    }

    fn cuEventRecord thread cuEventRecord_ptsz (event: Handle, stream: Handle) {
        let driver = driver()?;
        driver.record_in(&*driver.stream(stream)?, &*driver.events.get(event)?, false)
    }

    fn cuEventRecordWithFlags thread cuEventRecordWithFlags_ptsz (event: Handle, stream: Handle, flags: u32) {
        let driver = driver()?;
        driver.record_in(&*driver.stream(stream)?, &*driver.events.get(event)?, flags == 1)
    }

    fn cuEventQuery(handle: Handle) {
        let driver = driver()?;
        match driver.events.get(handle)?.tail()? {
            Some((ordinal, tail)) if !tail.done(driver.gpu(ordinal)?, &driver.session) => Err(Code::NOT_READY),
            _ => Ok(()),
        }
    }

    fn cuEventSynchronize(handle: Handle) {
        let driver = driver()?;
        if let Some((ordinal, tail)) = driver.events.get(handle)?.tail()? {
            tail.wait(driver.gpu(ordinal)?, &driver.session);
            driver.settle_pools(ordinal);
        }
        Ok(())
    }

    fn cuEventElapsedTime also cuEventElapsedTime_v2 (out: Out<f32>, start: Handle, end: Handle) {
        elapsed(out, start, end)
    }
}
