//! Events: moments in the order of a GPU's work, stamped by the device clock.

use std::sync::{Arc, Mutex};

use gpushare_simulator::timeline::submit;

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
    At(i32, Tail),
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
        tail.mark = submit(gpu, &driver.session, 0, tail.floor);
        *locked(&stream.context.last) = tail.mark;
        *locked(&self.moment) = Moment::At(stream.context.ordinal, *tail);
        Ok(())
    }

    /// Lets `stream` wait for the event.
    pub fn hold(&self, driver: &Driver, stream: &Stream) -> Result {
        // Copied out first: recording takes the two locks in the other order.
        let found = match &*locked(&self.moment) {
            Moment::At(ordinal, moment) => Some((*ordinal, *moment)),
            Moment::Never | Moment::Captured(_) => None,
        };
        if let Some((ordinal, moment)) = found {
            let end = moment.end(driver.gpu(ordinal)?);
            let mut tail = locked(&stream.tail);
            tail.floor = tail.floor.max(end);
        }
        Ok(())
    }

    /// GPU and end of what the event stands for; `None` before the first record.
    fn tail(&self) -> Result<Option<(i32, Tail)>> {
        match &*locked(&self.moment) {
            Moment::Never => Ok(None),
            Moment::At(ordinal, tail) => Ok(Some((*ordinal, *tail))),
            Moment::Captured(_) => Err(Code::CAPTURED_EVENT),
        }
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
    let moment = |event: &Event| -> Result<u64> {
        let (ordinal, tail) = event.tail()?.ok_or(Code::INVALID_HANDLE)?;
        let gpu = driver.gpu(ordinal)?;
        if tail.done(gpu) { Ok(tail.end(gpu)) } else { Err(Code::NOT_READY) }
    };
    let (from, to) = (moment(&start)?, moment(&end)?);
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
            Some((ordinal, tail)) if !tail.done(driver.gpu(ordinal)?) => Err(Code::NOT_READY),
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
