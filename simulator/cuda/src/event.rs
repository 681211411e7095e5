//! Events: moments in the order of a GPU's work, stamped by the device clock.

use std::sync::{Arc, Mutex};

use gpushare_simulator::clock;
use gpushare_simulator::timeline::{Stamp, stamp};

use crate::abi::{Code, Handle, Out, Result};
use crate::capture::Capturing;
use crate::context::current;
use crate::driver::{Driver, driver, locked};
use crate::registry::Registry;
use crate::stream::{Stream, Tail};
use crate::work::Work;

#[derive(Default)]
enum Moment {
    #[default]
    Never,
    At(i32, Stamp, Tail),
    /// Inside a capture: joins another stream to it.
    Captured(Capturing),
}

/// An event.
pub struct Event {
    handle: Handle,
    context: Handle,
    ordinal: i32,
    flags: u32,
    moment: Mutex<Moment>,
}

/// All events of the process.
#[derive(Default)]
pub struct Events {
    registry: Registry<Event>,
}

const DISABLE_TIMING: u32 = 2;

impl Events {
    /// The event of a handle.
    pub fn get(&self, handle: Handle) -> Result<Arc<Event>> {
        self.registry.get(handle)
    }

    /// Forgets the events of a dying context.
    pub fn forget(&self, context: Handle) {
        self.registry.remove_all(|event| event.context == context);
    }
}

impl Event {
    /// Stamps the event at its place in the GPU's queue.
    pub fn record(&self, driver: &Driver, stream: &Stream) -> Result {
        let gpu = driver.gpu(stream.context.ordinal)?;
        let mut tail = locked(&stream.tail);
        let asked = &driver.queue(stream.context.ordinal)?.asked;
        let stamp = stamp(gpu, &driver.session, asked, tail.floor);
        tail.mark = stamp.mark;
        *locked(&stream.context.last) = tail.mark;
        *locked(&self.moment) = Moment::At(stream.context.ordinal, stamp, *tail);
        Ok(())
    }

    /// Lets `stream` wait for the event.
    pub fn hold(&self, driver: &Driver, stream: &Stream) -> Result {
        // Copied out first: recording takes the two locks in the other order.
        let found = match &*locked(&self.moment) {
            Moment::At(ordinal, _, moment) => Some((*ordinal, *moment)),
            Moment::Never | Moment::Captured(_) => None,
        };
        let Some((ordinal, moment)) = found else { return Ok(()) };
        let gpu = driver.gpu(ordinal)?;
        if let Some(end) = moment.end(gpu) {
            let mut tail = locked(&stream.tail);
            tail.floor = tail.floor.max(end);
        } else if ordinal != stream.context.ordinal {
            // On one slicing GPU a process's work keeps its order anyway; of two, neither knows the other's future.
            moment.wait(gpu, &driver.session);
        }
        Ok(())
    }

    /// GPU and end of what the event stands for; `None` before the first record.
    fn tail(&self) -> Result<Option<(i32, Tail)>> {
        match &*locked(&self.moment) {
            Moment::Never => Ok(None),
            Moment::At(ordinal, _, tail) => Ok(Some((*ordinal, *tail))),
            Moment::Captured(_) => Err(Code::CAPTURED_EVENT),
        }
    }

    /// When the GPU came to the event.
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
    /// Records `event` in `stream`; in a captured stream it marks a place in the graph instead.
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

    /// Lets `stream` wait for `event`; a captured event pulls the stream into its capture.
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
        if flags > 7 {
            return Err(Code::INVALID_VALUE);
        }
        let make = |handle| Event {
            handle, context: context.handle, ordinal: context.ordinal, flags, moment: Mutex::default(),
        };
        out.set(driver.events.registry.add_with(make))
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
