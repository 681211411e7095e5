//! Contexts: one primary context for each GPU, any number of others, and each thread's stack of contexts.
//!
//! The process's first live context on a GPU takes the node's context memory, which grows as modules are
//! loaded; the last one releases that memory.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use gpushare_simulator::timeline::Mark;

use crate::abi::{Code, Handle, In, Out, Result};
use crate::driver::{Driver, driver, locked};
use crate::limits::Limits;
use crate::mps;
use crate::registry::Registry;

/// A context.
pub struct Context {
    /// Its handle in C.
    pub handle: Handle,
    /// CUDA ordinal of its GPU.
    pub ordinal: i32,
    /// Context that its memory belongs to: itself, or for a green context the primary one.
    pub home: Handle,
    /// Number of multiprocessors of a green context; `None` for all of the GPU's.
    pub cores: Option<u32>,
    /// Limits that cuCtxSetLimit changed.
    pub limits: Mutex<Limits>,
    /// End of the last work queued in the context.
    pub last: Mutex<Mark>,
    /// Whether cuCtxCreate made it. Only such a context ends by cuCtxDestroy.
    own: bool,
    /// References: one for cuCtxCreate and one for each cuCtxAttach.
    users: AtomicU32,
    flags: AtomicU32,
    alive: AtomicBool,
    settings: Mutex<HashMap<u32, usize>>,
}

#[derive(Default)]
struct OnDevice {
    primary: Handle,
    retained: u32,
    primary_flags: u32,
    live: u32,
    /// Modules that were loaded while a context was alive.
    modules: usize,
}

impl OnDevice {
    /// Bytes of the GPU that the contexts take.
    fn cost(&self, driver: &Driver) -> u64 {
        driver.session.state().physics.context_with(self.modules)
    }
}

/// All contexts of the process, and the references to each GPU's primary one.
pub struct Contexts {
    registry: Registry<Context>,
    devices: Vec<Mutex<OnDevice>>,
}

thread_local! {
    static STACK: RefCell<Vec<Arc<Context>>> = const { RefCell::new(Vec::new()) };
}

impl Contexts {
    /// A table without contexts for `devices` GPUs.
    pub fn new(devices: usize) -> Self {
        let devices = (0..devices).map(|_| Mutex::default()).collect();
        Self { registry: Registry::default(), devices }
    }

    fn on(&self, ordinal: i32) -> Result<&Mutex<OnDevice>> {
        usize::try_from(ordinal).ok().and_then(|index| self.devices.get(index)).ok_or(Code::INVALID_DEVICE)
    }

    /// The context of a handle; INVALID_CONTEXT if there is none.
    pub fn get(&self, handle: Handle) -> Result<Arc<Context>> {
        self.registry.get(handle).map_err(|_| Code::INVALID_CONTEXT)
    }
}

/// Takes the memory by which the contexts of a GPU grow with one more loaded module. The last context
/// releases it, not the module.
pub fn grow_by_module(driver: &Driver, ordinal: i32) -> Result {
    let mut on = locked(driver.contexts.on(ordinal)?);
    if on.live == 0 {
        return Ok(());
    }
    let before = on.cost(driver);
    on.modules += 1;
    if driver.take(ordinal, on.cost(driver) - before)? {
        return Ok(());
    }
    on.modules -= 1;
    Err(Code::OUT_OF_MEMORY)
}

/// The calling thread's current context.
pub fn current() -> Result<Arc<Context>> {
    let top = STACK.with_borrow(|stack| stack.last().cloned()).ok_or(Code::INVALID_CONTEXT)?;
    if top.alive.load(Ordering::Acquire) { Ok(top) } else { Err(Code::CONTEXT_IS_DESTROYED) }
}

/// The context of `handle`; 0 stands for the current one.
fn given_or_current(handle: Handle) -> Result<Arc<Context>> {
    if handle == 0 { current() } else { driver()?.contexts.get(handle) }
}

/// Kind of a new context.
#[derive(Clone, Copy)]
enum Form {
    Own,
    Primary,
    /// A green context with this many multiprocessors, over the primary context with this handle.
    Green(u32, Handle),
}

fn open(driver: &Driver, ordinal: i32, on: &mut OnDevice, flags: u32, form: Form) -> Result<Handle> {
    if on.live == 0 {
        mps::admit(driver.mps, driver.gpu(ordinal)?, driver.session.index())?;
        if !driver.take_for_context(ordinal, on.cost(driver))? {
            return Err(Code::OUT_OF_MEMORY);
        }
    }
    on.live += 1;
    Ok(driver.contexts.registry.add_with(|handle| Context {
        handle,
        ordinal,
        home: if let Form::Green(_, primary) = form { primary } else { handle },
        cores: if let Form::Green(cores, _) = form { Some(cores) } else { None },
        limits: Mutex::default(),
        last: Mutex::default(),
        own: matches!(form, Form::Own),
        users: AtomicU32::new(1),
        flags: AtomicU32::new(flags),
        alive: AtomicBool::new(true),
        settings: Mutex::default(),
    }))
}

fn close(driver: &Driver, on: &mut OnDevice, handle: Handle) -> Result {
    let context = driver.contexts.registry.remove(handle).map_err(|_| Code::INVALID_CONTEXT)?;
    context.alive.store(false, Ordering::Release);
    driver.forget_context(&context);
    driver.forget_limits(&context);
    on.live = on.live.saturating_sub(1);
    if on.live == 0 {
        driver.forget_device(context.ordinal);
        driver.give_contexts(context.ordinal, on.cost(driver))?;
        on.modules = 0;
    }
    Ok(())
}

fn push(context: Arc<Context>) {
    STACK.with_borrow_mut(|stack| stack.push(context));
}

fn create(out: Out<Handle>, flags: u32, ordinal: i32) -> Result {
    out.given()?;
    let driver = driver()?;
    let mut on = locked(driver.contexts.on(ordinal)?);
    let handle = open(driver, ordinal, &mut on, flags, Form::Own)?;
    push(driver.contexts.get(handle)?);
    out.set(handle)
}

fn destroy(handle: Handle) -> Result {
    let driver = driver()?;
    let context = driver.contexts.get(handle)?;
    if !context.own {
        return Err(Code::INVALID_CONTEXT);
    }
    STACK.with_borrow_mut(|stack| {
        if stack.last().is_some_and(|top| top.handle == handle) {
            stack.pop();
        }
    });
    close(driver, &mut locked(driver.contexts.on(context.ordinal)?), handle)
}

fn retain(driver: &Driver, ordinal: i32, on: &mut OnDevice) -> Result<Handle> {
    if on.retained == 0 {
        on.primary = open(driver, ordinal, on, on.primary_flags, Form::Primary)?;
    }
    on.retained += 1;
    Ok(on.primary)
}

/// Makes a context with `cores` multiprocessors, which holds a reference to the primary context.
pub fn retain_green(ordinal: i32, cores: u32) -> Result<Arc<Context>> {
    let driver = driver()?;
    let mut on = locked(driver.contexts.on(ordinal)?);
    let primary = retain(driver, ordinal, &mut on)?;
    let handle = open(driver, ordinal, &mut on, 0, Form::Green(cores, primary))?;
    driver.contexts.get(handle)
}

/// Drops a reference to the primary context. Closes the green context that held it first, if one did.
pub fn release_primary(ordinal: i32, green: Option<Handle>) -> Result {
    let driver = driver()?;
    let mut on = locked(driver.contexts.on(ordinal)?);
    if let Some(green) = green {
        close(driver, &mut on, green)?;
    }
    on.retained = on.retained.checked_sub(1).ok_or(Code::INVALID_CONTEXT)?;
    if on.retained == 0 {
        let handle = std::mem::take(&mut on.primary);
        close(driver, &mut on, handle)?;
    }
    Ok(())
}

/// Drops a user of the current context. The last one destroys the context.
fn detach(handle: Handle) -> Result {
    let top = current()?;
    if top.handle != handle || !top.own {
        return Err(Code::INVALID_CONTEXT);
    }
    if top.users.fetch_sub(1, Ordering::AcqRel) > 1 { Ok(()) } else { destroy(handle) }
}

fn synchronize(context: &Context) -> Result {
    let driver = driver()?;
    driver.refuse_while_capturing(context)?;
    let mark = *locked(&context.last);
    mark.wait(driver.gpu(context.ordinal)?, &driver.session);
    driver.settle_pools(context.ordinal);
    Ok(())
}

const CACHE_CONFIG: u32 = 100;
const SHARED_CONFIG: u32 = 101;

fn setting(context: &Context, key: u32, default: usize) -> usize {
    locked(&context.settings).get(&key).copied().unwrap_or(default)
}

exports! {
    fn cuDevicePrimaryCtxRetain(out: Out<Handle>, ordinal: i32) {
        out.given()?;
        let driver = driver()?;
        let mut on = locked(driver.contexts.on(ordinal)?);
        out.set(retain(driver, ordinal, &mut on)?)
    }

    fn cuDevicePrimaryCtxRelease_v2 also cuDevicePrimaryCtxRelease (ordinal: i32) {
        release_primary(ordinal, None)
    }

    fn cuDevicePrimaryCtxReset_v2 also cuDevicePrimaryCtxReset (ordinal: i32) {
        let driver = driver()?;
        let mut on = locked(driver.contexts.on(ordinal)?);
        if on.retained > 0 {
            on.retained = 0;
            let handle = std::mem::take(&mut on.primary);
            close(driver, &mut on, handle)?;
        }
        Ok(())
    }

    fn cuDevicePrimaryCtxSetFlags_v2 also cuDevicePrimaryCtxSetFlags (ordinal: i32, flags: u32) {
        let driver = driver()?;
        let mut on = locked(driver.contexts.on(ordinal)?);
        on.primary_flags = flags;
        if on.retained > 0 {
            driver.contexts.get(on.primary)?.flags.store(flags, Ordering::Relaxed);
        }
        Ok(())
    }

    fn cuDevicePrimaryCtxGetState(ordinal: i32, flags: Out<u32>, active: Out<i32>) {
        let on = locked(driver()?.contexts.on(ordinal)?);
        flags.set_if_given(on.primary_flags);
        active.set_if_given(i32::from(on.retained > 0));
        Ok(())
    }

    fn cuCtxCreate_v2 also cuCtxCreate (out: Out<Handle>, flags: u32, ordinal: i32) {
        create(out, flags, ordinal)
    }

    fn cuCtxCreate_v3(out: Out<Handle>, _affinity: In<u8>, _count: i32, flags: u32, ordinal: i32) {
        create(out, flags, ordinal)
    }

    fn cuCtxCreate_v4(out: Out<Handle>, _parameters: In<u8>, flags: u32, ordinal: i32) {
        create(out, flags, ordinal)
    }

    fn cuCtxDestroy_v2 also cuCtxDestroy (handle: Handle) {
        destroy(handle)
    }

    fn cuCtxAttach(out: Out<Handle>, flags: u32) {
        out.given()?;
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let top = current()?;
        top.users.fetch_add(1, Ordering::AcqRel);
        out.set(top.handle)
    }

    fn cuCtxDetach(handle: Handle) {
        driver()?;
        detach(handle)
    }

    fn cuCtxPushCurrent_v2 also cuCtxPushCurrent (handle: Handle) {
        push(driver()?.contexts.get(handle)?);
        Ok(())
    }

    fn cuCtxPopCurrent_v2 also cuCtxPopCurrent (out: Out<Handle>) {
        driver()?;
        let top = STACK.with_borrow_mut(Vec::pop).ok_or(Code::INVALID_CONTEXT)?;
        out.set_if_given(top.handle);
        Ok(())
    }

    fn cuCtxSetCurrent(handle: Handle) {
        let driver = driver()?;
        let new = if handle == 0 { None } else { Some(driver.contexts.get(handle)?) };
        STACK.with_borrow_mut(|stack| {
            stack.pop();
            stack.extend(new);
        });
        Ok(())
    }

    fn cuCtxGetCurrent(out: Out<Handle>) {
        driver()?;
        out.set(STACK.with_borrow(|stack| stack.last().map_or(0, |top| top.handle)))
    }

    fn cuCtxGetDevice(out: Out<i32>) {
        driver()?;
        out.set(current()?.ordinal)
    }

    fn cuCtxGetDevice_v2(out: Out<i32>, handle: Handle) {
        out.set(given_or_current(handle)?.ordinal)
    }

    fn cuCtxSynchronize() {
        driver()?;
        synchronize(&*current()?)
    }

    fn cuCtxSynchronize_v2(handle: Handle) {
        synchronize(&*given_or_current(handle)?)
    }

    fn cuCtxGetApiVersion(handle: Handle, out: Out<u32>) {
        given_or_current(handle)?;
        out.set(3020)
    }

    fn cuCtxGetId(handle: Handle, out: Out<u64>) {
        out.set(given_or_current(handle)?.handle as u64)
    }

    fn cuCtxGetFlags(out: Out<u32>) {
        driver()?;
        out.set(current()?.flags.load(Ordering::Relaxed))
    }

    fn cuCtxSetFlags(flags: u32) {
        driver()?;
        current()?.flags.store(flags, Ordering::Relaxed);
        Ok(())
    }

    fn cuCtxSetCacheConfig(value: u32) {
        driver()?;
        locked(&current()?.settings).insert(CACHE_CONFIG, value as usize);
        Ok(())
    }

    fn cuCtxGetCacheConfig(out: Out<u32>) {
        driver()?;
        out.set(u32::try_from(setting(&*current()?, CACHE_CONFIG, 0)).unwrap_or(0))
    }

    fn cuCtxSetSharedMemConfig(value: u32) {
        driver()?;
        locked(&current()?.settings).insert(SHARED_CONFIG, value as usize);
        Ok(())
    }

    fn cuCtxGetSharedMemConfig(out: Out<u32>) {
        driver()?;
        out.set(u32::try_from(setting(&*current()?, SHARED_CONFIG, 1)).unwrap_or(1))
    }

    fn cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) {
        driver()?;
        current()?;
        least.set_if_given(0);
        greatest.set_if_given(-5);
        Ok(())
    }

    fn cuCtxResetPersistingL2Cache() {
        driver()?;
        current().map(|_| ())
    }
}
