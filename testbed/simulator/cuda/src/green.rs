//! Green contexts: a part of a GPU's multiprocessors, as a context over the GPU's primary one.
//!
//! A kernel in a green context has fewer multiprocessors for its blocks. Parts may overlap. Memory belongs to
//! the primary context.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use gpushare_simulator::state::Gpu;

use crate::abi::{Code, Handle, In, Out, Result};
use crate::context::{Context, current, release_primary, retain_green};
use crate::driver::driver;
use crate::registry::Registry;

/// CUdevResource: its kind, and for multiprocessors their count and the sizes into which they can be split.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Resource {
    kind: u32,
    padding: [u32; 23],
    cores: u32,
    least: u32,
    step: u32,
    flags: u32,
    rest: [u32; 8],
}

const _: () = assert!(size_of::<Resource>() == 144);

const CORES: u32 = 1;
/// CU_GREEN_CTX_DEFAULT_STREAM, a required flag.
const DEFAULT_STREAM: u32 = 1;
/// CU_STREAM_NON_BLOCKING, a required flag.
const NON_BLOCKING: u32 = 1;

/// A green context, which holds a reference to the primary one.
pub struct Green {
    context: Arc<Context>,
}

/// All green contexts of the process, and the descriptions from which they are made.
#[derive(Default)]
pub struct Greens {
    contexts: Registry<Green>,
    descriptions: Registry<u32>,
}

/// Returns the fewest multiprocessors of a part, and the step to larger parts, by compute capability.
fn parts(gpu: &Gpu) -> (u32, u32) {
    match gpushare_simulator::model::of(&gpu.model.get()).capability.0 {
        ..=6 => (1, 1),
        7 => (2, 2),
        8 => (4, 2),
        _ => (8, 8),
    }
}

fn resource(gpu: &Gpu, cores: u32) -> Resource {
    let (least, step) = parts(gpu);
    Resource { kind: CORES, padding: [0; 23], cores, least, step, flags: 0, rest: [0; 8] }
}

fn of_context(context: &Context, kind: u32) -> Result<Resource> {
    let gpu = driver()?.gpu(context.ordinal)?;
    if kind != CORES {
        return Err(Code::INVALID_VALUE);
    }
    Ok(resource(gpu, context.cores.unwrap_or(gpu.cores.load(Ordering::Relaxed))))
}

/// Number of groups of at least `least` multiprocessors that fit, and the size of each.
fn groups(input: &Resource, least: u32) -> (u32, u32) {
    let step = input.step.max(1);
    let size = least.max(input.least).div_ceil(step).saturating_mul(step).max(1);
    (input.cores / size, size)
}

fn create(description: Handle, ordinal: i32, flags: u32) -> Result<Handle> {
    let driver = driver()?;
    if flags & DEFAULT_STREAM == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let cores = *driver.greens.descriptions.get(description)?;
    let context = retain_green(ordinal, cores)?;
    Ok(driver.greens.contexts.add(Green { context }))
}

fn context_of(green: Handle) -> Result<Arc<Context>> {
    Ok(Arc::clone(&driver()?.greens.contexts.get(green)?.context))
}

exports! {
    fn cuDeviceGetDevResource(ordinal: i32, out: Out<Resource>, kind: u32) {
        let gpu = driver()?.gpu(ordinal)?;
        if kind != CORES {
            return Err(Code::INVALID_VALUE);
        }
        out.set(resource(gpu, gpu.cores.load(Ordering::Relaxed)))
    }

    fn cuCtxGetDevResource(handle: Handle, out: Out<Resource>, kind: u32) {
        out.set(of_context(&*driver()?.contexts.get(handle)?, kind)?)
    }

    fn cuGreenCtxGetDevResource(green: Handle, out: Out<Resource>, kind: u32) {
        out.set(of_context(&*context_of(green)?, kind)?)
    }

    /// Without a list, writes only the number of groups. `rest` gets the multiprocessors that are in no
    /// group.
    fn cuDevSmResourceSplitByCount (
        list: Out<Resource>, count: Out<u32>, input: In<Resource>, rest: Out<Resource>, _flags: u32, least: u32,
    ) {
        driver()?;
        let (whole, wanted) = (input.get()?, count.get()?);
        if whole.kind != CORES {
            return Err(Code::INVALID_VALUE);
        }
        let (room, size) = groups(&whole, least);
        if list.is_null() {
            return count.set(room);
        }
        let made = room.min(wanted);
        if made == 0 {
            return Err(Code::INVALID_VALUE);
        }
        (0..made as usize).try_for_each(|index| list.set_at(index, Resource { cores: size, ..whole }))?;
        rest.set_if_given(Resource { cores: whole.cores - made * size, ..whole });
        count.set(made)
    }

    fn cuDevResourceGenerateDesc(out: Out<Handle>, list: In<Resource>, count: u32) {
        out.given()?;
        let driver = driver()?;
        let parts = list.list(count as usize)?;
        let cores: u32 = parts.iter().map(|part| part.cores).sum();
        if cores == 0 || parts.iter().any(|part| part.kind != CORES) {
            return Err(Code::INVALID_VALUE);
        }
        out.set(driver.greens.descriptions.add(cores))
    }

    fn cuGreenCtxCreate(out: Out<Handle>, description: Handle, ordinal: i32, flags: u32) {
        out.given()?;
        out.set(create(description, ordinal, flags)?)
    }

    fn cuGreenCtxDestroy(green: Handle) {
        let gone = driver()?.greens.contexts.remove(green)?;
        release_primary(gone.context.ordinal, Some(gone.context.handle))
    }

    fn cuCtxFromGreenCtx(out: Out<Handle>, green: Handle) {
        out.set(context_of(green)?.handle)
    }

    fn cuGreenCtxGetId(green: Handle, out: Out<u64>) {
        out.set(context_of(green)?.handle as u64)
    }

    fn cuGreenCtxStreamCreate(out: Out<Handle>, green: Handle, flags: u32, priority: i32) {
        out.given()?;
        if flags != NON_BLOCKING {
            return Err(Code::INVALID_VALUE);
        }
        out.set(driver()?.streams.add(context_of(green)?, flags, priority))
    }

    /// Writes 0 for a stream of an ordinary context.
    fn cuStreamGetGreenCtx(stream: Handle, out: Out<Handle>) {
        let driver = driver()?;
        let context = driver.stream(stream)?.context.handle;
        let found = driver.greens.contexts.find(|green| green.context.handle == context);
        out.set(found.unwrap_or(0))
    }

    fn cuGreenCtxRecordEvent(green: Handle, event: Handle) {
        let context = context_of(green)?;
        let driver = driver()?;
        driver.events.get(event)?.record_end(driver, &context)
    }

    fn cuGreenCtxWaitEvent(green: Handle, event: Handle) {
        let context = context_of(green)?;
        let driver = driver()?;
        let event = driver.events.get(event)?;
        driver.streams.of(context.handle).iter().try_for_each(|stream| event.hold(driver, stream))
    }

    fn cuCtxRecordEvent(handle: Handle, event: Handle) {
        let driver = driver()?;
        let context = if handle == 0 { current()? } else { driver.contexts.get(handle)? };
        driver.events.get(event)?.record_end(driver, &context)
    }

    fn cuCtxWaitEvent(handle: Handle, event: Handle) {
        let driver = driver()?;
        let context = if handle == 0 { current()? } else { driver.contexts.get(handle)? };
        let event = driver.events.get(event)?;
        driver.streams.of(context.handle).iter().try_for_each(|stream| event.hold(driver, stream))
    }
}
