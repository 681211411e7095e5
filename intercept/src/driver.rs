//! The real driver's functions, by number. Their addresses are looked up once, when the library is loaded.

use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering};

use crate::elf::Library;

/// The address range at which the real library is mapped: begin and end.
static MAPPED: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];

/// Addresses at which the real library's first part is mapped; empty if it is not loaded.
pub fn mapped() -> Range<usize> {
    MAPPED[0].load(Ordering::Relaxed)..MAPPED[1].load(Ordering::Relaxed)
}

/// Addresses of the real functions; 0: the driver has no function with that name.
#[repr(transparent)]
pub struct Addresses<const N: usize>([AtomicUsize; N]);

impl<const N: usize> Default for Addresses<N> {
    fn default() -> Self {
        Self::new()
    }
}

impl<const N: usize> Addresses<N> {
    /// A driver without functions.
    pub const fn new() -> Self {
        Self([const { AtomicUsize::new(0) }; N])
    }

    /// Looks up `names` in the library that the loader opened as `path`. False: there is no such library.
    pub fn fill(&self, path: &str, names: &[&str; N]) -> bool {
        let Some(library) = Library::loaded(path) else { return false };
        let mapped = library.mapped();
        for (word, end) in MAPPED.iter().zip([mapped.start, mapped.end]) {
            word.store(end, Ordering::Relaxed);
        }
        for (place, name) in self.0.iter().zip(names) {
            place.store(library.function(name).unwrap_or(0), Ordering::Relaxed);
        }
        true
    }

    /// The address of function `number`.
    pub fn get(&self, number: usize) -> Option<usize> {
        self.0.get(number).map(|address| address.load(Ordering::Relaxed)).filter(|address| *address != 0)
    }

    /// Sets the address of function `number`.
    pub fn set(&self, number: usize, address: usize) {
        if let Some(place) = self.0.get(number) {
            place.store(address, Ordering::Relaxed);
        }
    }

    /// The number of the function at `address`.
    pub fn number(&self, address: usize) -> Option<usize> {
        if address == 0 {
            return None; // the place of an absent name
        }
        self.0.iter().position(|place| place.load(Ordering::Relaxed) == address)
    }
}

/// The hooks of a family, in their own module. Each is a driver function with its arguments and the hook's
/// answer. The macro's user names `call`, which makes the driver's call there.
macro_rules! hooks {
    (|$call:ident| $($name:ident($($argument:ident: $type:ty),* $(,)?) => $answer:expr;)*) => {
        /// The hooks of this family.
        #[allow(
            non_snake_case,
            missing_docs,
            clippy::missing_safety_doc,
            reason = "the driver's library names and documents them"
        )]
        pub mod hooks {
            use super::*;

            $(
                pub unsafe extern "C" fn $name($($argument: $type),*) -> Status {
                    // SAFETY: our caller's arguments, unchanged.
                    let $call = || unsafe { real::$name($($argument),*) };
                    $answer
                }
            )*
        }
    };
}

/// Declares driver functions once: their names, their callers in `real`, and, for the hooked ones, the table
/// of hooks.
///
/// ```
/// mod driver {
///     pub type Status = i32;
///     pub mod hooks {
///         pub unsafe extern "C" fn cuInit(_flags: u32) -> i32 { 0 }
///     }
///     pub mod functions {
///         use super::Status;
///         gpushare_intercept::driver_functions! { missing: 500; hooked { cuInit(flags: u32); } used {} }
///     }
/// }
/// assert_eq!(driver::functions::HOOKED, ["cuInit"]);
/// ```
///
/// Case 35: a hook in the Rust calling convention does not compile.
///
/// ```compile_fail,E0308
/// mod driver {
///     pub type Status = i32;
///     pub mod hooks {
///         pub unsafe fn cuInit(_flags: u32) -> i32 { 0 }
///     }
///     pub mod functions {
///         use super::Status;
///         gpushare_intercept::driver_functions! { missing: 500; hooked { cuInit(flags: u32); } used {} }
///     }
/// }
/// assert_eq!(driver::functions::HOOKED, ["cuInit"]);
/// ```
#[macro_export]
#[doc(hidden)]
macro_rules! driver_functions {
    (
        missing: $missing:expr;
        hooked { $($hook:ident ( $($hook_arg:ident : $hook_type:ty),* $(,)? ) ;)* }
        used { $($used:ident ( $($used_arg:ident : $used_type:ty),* $(,)? ) ;)* }
    ) => {
        /// Number of a driver function.
        #[allow(non_camel_case_types)]
        #[derive(Clone, Copy)]
        #[repr(usize)]
        enum Name { $($hook,)* $($used,)* Count }

        /// Names of all functions that are called, the hooked ones first.
        pub const NAMES: [&str; Name::Count as usize] = [$(stringify!($hook),)* $(stringify!($used),)*];
        /// Names of the hooked functions: all that the library exports.
        pub const HOOKED: &[&str] = &[$(stringify!($hook),)*];
        /// The real driver.
        pub static DRIVER: $crate::driver::Addresses<{ Name::Count as usize }> = $crate::driver::Addresses::new();

        /// Our function for the hooked function `number`.
        #[allow(dead_code, reason = "NVML has no way to ask for a function by name")]
        pub fn hook(number: usize) -> Option<usize> {
            // The types also prove that every hook has the C calling convention and the driver's signature.
            let hooks: [*const (); HOOKED.len()] = [$({
                let hook: unsafe extern "C" fn($($hook_type),*) -> Status = super::hooks::$hook;
                hook as *const ()
            },)*];
            hooks.get(number).map(|hook| hook.addr())
        }

        /// The real functions. A function that the driver lacks returns the driver's status for an unknown
        /// name.
        pub mod real {
            #![expect(non_snake_case, reason = "the driver's names")]
            #![allow(clippy::missing_safety_doc, reason = "the contract is the driver's own, function by function")]
            #![allow(missing_docs, reason = "the driver documents them")]
            use super::*;
            $crate::driver_functions!(@callers $missing; $($hook($($hook_arg: $hook_type),*);)* $($used($($used_arg: $used_type),*);)*);
        }
    };
    (@callers $missing:expr; $($name:ident ( $($arg:ident : $type:ty),* ) ;)*) => {
        $(
            #[allow(clippy::too_many_arguments)]
            pub unsafe fn $name($($arg: $type),*) -> Status {
                let Some(address) = DRIVER.get(Name::$name as usize) else { return $missing };
                let address = core::ptr::with_exposed_provenance::<()>(address);
                // SAFETY: the driver's function of this name has this signature.
                let function = unsafe { core::mem::transmute::<*const (), unsafe extern "C" fn($($type),*) -> Status>(address) };
                // SAFETY: our caller upholds the driver's contract for these arguments.
                unsafe { function($($arg),*) }
            }
        )*
    };
}
