//! Every launch entry of the driver: which of its arguments form its key, and which stream it goes to.

use core::ffi::c_void;
use core::sync::atomic::Ordering::Relaxed;

use gpushare_region::MAX_DEVICES;

use super::context::{current_handle, line_of_context};
use super::functions::number;
use super::launch::{is_open, is_paid, launch, launch_slowly, pay};
use super::stream_handle::{StreamHandle, owner};
use super::{DRIVER, Status, Stream, after_success, here, read, real};
use crate::compute::Key;

/// The part of `CUlaunchConfig` that we read.
#[derive(Clone, Copy)]
#[repr(C)]
struct Configuration {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: Stream,
}

/// `CUDA_LAUNCH_PARAMS`.
#[derive(Clone, Copy)]
#[repr(C)]
struct OneOfMany {
    function: usize,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: Stream,
    parameters: usize,
}

/// The launches behind the gate, for containers in which a GPU may be limited.
#[allow(non_snake_case, clippy::too_many_arguments, reason = "the driver's names and arguments")]
pub(super) mod limited {
    use super::*;

    macro_rules! kernels {
        ($($name:ident, $per_thread:literal ($($last:ident)?);)*) => { $(
            /// The arguments on the stack are declared as whole words, so that the calls can be jumps that
            /// leave them in place.
            pub unsafe extern "C" fn $name(
                function: usize, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: usize,
                shared: usize, stream: Stream, parameters: *mut c_void $(, $last: *mut c_void)?
            ) -> Status {
                let [low, ..] = half_words(block_z);
                let key = Key::kernel(function, [grid_x, grid_y, grid_z], [block_x, block_y, low]);
                let address = DRIVER.get(const { number(stringify!($name)) });
                if let Some(address) = address.filter(|_| is_paid(key, stream)) {
                    type Driver = unsafe extern "C" fn(
                        usize, u32, u32, u32, u32, u32, usize, usize, Stream, *mut c_void $(, words!($last))?
                    ) -> Status;
                    let address = core::ptr::with_exposed_provenance::<()>(address);
                    // SAFETY: the driver's function of this name, which reads the lower half of the two
                    // words.
                    let driver = unsafe { core::mem::transmute::<*const (), Driver>(address) };
                    // SAFETY: our caller's arguments, unchanged.
                    return unsafe {
                        driver(
                            function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, parameters
                            $(, $last)?
                        )
                    };
                }
                // SAFETY: our caller's arguments, unchanged.
                unsafe {
                    slow::$name(
                        function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, parameters
                        $(, $last)?
                    )
                }
            }
        )*

        /// The rest of a launch that credit did not pay for.
        mod slow {
            use super::*;

            $(
                #[cold]
                #[inline(never)]
                pub unsafe extern "C" fn $name(
                    function: usize, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32,
                    block_z: usize, shared: usize, stream: Stream, parameters: *mut c_void $(, $last: *mut c_void)?
                ) -> Status {
                    let [[block_z, _], [shared, _]] = [half_words(block_z), half_words(shared)];
                    let key = Key::kernel(function, [grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
                    // SAFETY: our caller's arguments, unchanged.
                    let mut call = || unsafe {
                        real::$name(
                            function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, parameters
                            $(, $last)?
                        )
                    };
                    launch_slowly(key, StreamHandle { stream, per_thread: $per_thread }, &mut call)
                }
            )*
        } };
    }

    macro_rules! words {
        ($name:ident) => { *mut c_void };
    }

    /// The lower and the upper half.
    const fn half_words(word: usize) -> [u32; 2] {
        let [a, b, c, d, e, f, g, h] = word.to_le_bytes();
        [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h])]
    }
    kernels! {
        cuLaunchKernel, false (extra);
        cuLaunchKernel_ptsz, true (extra);
        cuLaunchCooperativeKernel, false ();
        cuLaunchCooperativeKernel_ptsz, true ();
    }

    macro_rules! configured {
        ($($name:ident, $per_thread:literal;)*) => { $(
            pub unsafe extern "C" fn $name(
                configuration: *const c_void, function: usize, parameters: *mut c_void, extra: *mut c_void,
            ) -> Status {
                // SAFETY: our caller's arguments, unchanged.
                let mut call = || unsafe { real::$name(configuration, function, parameters, extra) };
                // SAFETY: null, or a configuration as the driver reads it.
                let Some(wanted) = (unsafe { read(configuration.cast::<Configuration>()) }) else { return call() };
                let key = Key::kernel(function, wanted.grid, wanted.block);
                launch(key, StreamHandle { stream: wanted.stream, per_thread: $per_thread }, &mut call)
            }
        )* };
    }
    configured! {
        cuLaunchKernelEx, false;
        cuLaunchKernelEx_ptsz, true;
    }
}

/// One launch on each of several devices. The launch in the current context can be timed. The others are
/// charged an estimate, which the meter settles.
///
/// The caller's count may be wrong. The driver takes one launch per device, so no more are read.
///
/// # Safety
/// `list` is null or holds `count` launches, or as many as there are devices.
unsafe fn launch_many(list: *const OneOfMany, count: u32, mut call: impl FnMut() -> Status) -> Status {
    let Some(here) = here().filter(|_| !is_open() && !list.is_null()) else { return call() };
    let current = current_handle();
    let mut own = None;
    for index in 0..(count as usize).min(MAX_DEVICES) {
        // SAFETY: `index` is below the length of the list, which the caller guarantees.
        let launch = unsafe { list.wrapping_add(index).read_unaligned() };
        let owner = owner(launch.stream);
        if owner.is_some() && owner == current {
            own = Some(launch);
        } else if let Some(line) = owner.and_then(|owner| line_of_context(here, owner)) {
            pay(here, line.into(), launch.key());
        }
    }
    let Some(own) = own else { return call() };
    launch(own.key(), StreamHandle { stream: own.stream, per_thread: false }, &mut call)
}

impl OneOfMany {
    fn key(&self) -> Key {
        Key::kernel(self.function, self.grid, self.block)
    }
}

/// A launch that names a grid but no block.
fn launch_old(function: usize, grid: [i32; 2], stream: Stream, mut call: impl FnMut() -> Status) -> Status {
    if is_open() {
        return call();
    }
    let shape =
        here().and_then(|here| here.state.launches.shape(function)).map_or(0, |word| word.load(Relaxed));
    let key = Key::kernel(function, [grid[0].cast_unsigned(), grid[1].cast_unsigned(), 1], [shape, 1, 1]);
    launch(key, StreamHandle { stream, per_thread: false }, &mut call)
}

/// Caches the block shape of `function`, for the launches that do not name it.
fn remember_shape(function: usize, shape: [i32; 3]) {
    if let Some(word) = here().and_then(|here| here.state.launches.shape(function)) {
        let [x, y, z] = shape.map(i32::cast_unsigned); // at most 1024, 1024 and 64
        word.store(x | y << 11 | z << 22, Relaxed);
    }
}

hooks! { |call|
    cuLaunchCooperativeKernelMultiDevice(list: *mut c_void, count: u32, flags: u32) =>
        // SAFETY: as the driver reads it.
        unsafe { launch_many(list.cast(), count, call) };
    cuFuncSetBlockShape(function: usize, x: i32, y: i32, z: i32) =>
        after_success(call, || remember_shape(function, [x, y, z]));
    cuLaunch(function: usize) => launch_old(function, [1, 1], 0, call);
    cuLaunchGrid(function: usize, width: i32, height: i32) => launch_old(function, [width, height], 0, call);
    cuLaunchGridAsync(function: usize, width: i32, height: i32, stream: Stream) =>
        launch_old(function, [width, height], stream, call);
}
