//! The parameters of the C interface as Rust types, and the results of its functions.
//!
//! Only C callers make values of these types. They guarantee the requirements in CUDA's documentation: a
//! pointer is null, or valid for the function's use of it. Everything that uses this module is safe code.

use std::cell::Cell;
use std::ffi::{CStr, c_char};

/// A CUDA result other than success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code(pub u32);

/// Result of every operation of the driver.
pub type Result<T = ()> = std::result::Result<T, Code>;

macro_rules! codes {
    ($($name:ident = $value:literal),* $(,)?) => {
        impl Code {
            // The list also serves to name results, so this library does not return every one of them.
            $(#[allow(dead_code)] pub const $name: Code = Code($value);)*
        }
        /// Name of a result; `None` for a number that is not in the list.
        pub fn code_name(code: u32) -> Option<&'static CStr> {
            let name: &'static [u8] = match code {
                0 => b"CUDA_SUCCESS\0",
                $($value => concat!("CUDA_ERROR_", stringify!($name), "\0").as_bytes(),)*
                _ => return None,
            };
            CStr::from_bytes_with_nul(name).ok()
        }
    };
}

codes! {
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    DEINITIALIZED = 4,
    DEVICE_UNAVAILABLE = 46,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    MAP_FAILED = 205,
    UNMAP_FAILED = 206,
    ALREADY_MAPPED = 208,
    NOT_MAPPED = 211,
    CONTEXT_ALREADY_IN_USE = 216,
    PEER_ACCESS_UNSUPPORTED = 217,
    INVALID_PTX = 218,
    FILE_NOT_FOUND = 301,
    OPERATING_SYSTEM = 304,
    INVALID_HANDLE = 400,
    ILLEGAL_STATE = 401,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_TIMEOUT = 702,
    PEER_ACCESS_ALREADY_ENABLED = 704,
    PEER_ACCESS_NOT_ENABLED = 705,
    PRIMARY_CONTEXT_ACTIVE = 708,
    CONTEXT_IS_DESTROYED = 709,
    ASSERT = 710,
    HOST_MEMORY_ALREADY_REGISTERED = 712,
    HOST_MEMORY_NOT_REGISTERED = 713,
    HARDWARE_STACK_ERROR = 714,
    ILLEGAL_INSTRUCTION = 715,
    MISALIGNED_ADDRESS = 716,
    INVALID_PC = 718,
    LAUNCH_FAILED = 719,
    NOT_PERMITTED = 800,
    NOT_SUPPORTED = 801,
    STREAM_CAPTURE_UNSUPPORTED = 900,
    STREAM_CAPTURE_INVALIDATED = 901,
    STREAM_CAPTURE_UNMATCHED = 903,
    STREAM_CAPTURE_ISOLATION = 905,
    STREAM_CAPTURE_IMPLICIT = 906,
    CAPTURED_EVENT = 907,
    STREAM_CAPTURE_WRONG_THREAD = 908,
    UNKNOWN = 999,
}

/// The CUresult of an operation as C sees it; 0 for success.
pub fn number(result: Result) -> u32 {
    result.err().map_or(0, |code| code.0)
}

/// Pointer to the place where a function writes one value or an array.
#[repr(transparent)]
pub struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Out<T> {}

impl<T> Out<T> {
    /// Writes `value`; INVALID_VALUE if the caller gave null.
    pub fn set(self, value: T) -> Result {
        self.given()?;
        self.set_if_given(value);
        Ok(())
    }

    /// Writes `value` unless the caller gave null.
    pub fn set_if_given(self, value: T) {
        if !self.0.is_null() {
            // SAFETY: not null, so the caller guarantees a place for a value of this type.
            unsafe { self.0.write_unaligned(value) }
        }
    }

    /// INVALID_VALUE if the caller gave null. Functions call it before they have any effect.
    pub fn given(self) -> Result {
        if self.0.is_null() { Err(Code::INVALID_VALUE) } else { Ok(()) }
    }

    /// Whether the caller gave null.
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Returns the current value, for parameters that are read and written.
    pub fn get(self) -> Result<T>
    where
        T: Copy,
    {
        self.given()?;
        // SAFETY: not null, so the caller guarantees a value of this type.
        Ok(unsafe { self.0.read_unaligned() })
    }

    /// Writes `value` as element `index` of the caller's array.
    pub fn set_at(self, index: usize, value: T) -> Result {
        self.given()?;
        Self(self.0.wrapping_add(index)).set(value)
    }

    /// The same place for a value of another type.
    pub fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }

    /// Wraps a pointer from the caller.
    pub fn from_pointer(pointer: *mut T) -> Self {
        Self(pointer)
    }

    /// The place `bytes` further on, for a value of another type; null stays null.
    pub fn offset<U>(self, bytes: usize) -> Out<U> {
        if self.0.is_null() { Out(std::ptr::null_mut()) } else { Out(self.0.wrapping_byte_add(bytes).cast()) }
    }

    /// The place at an address that the caller wrote into an array or a structure.
    pub fn from_address(address: u64) -> Self {
        Self(std::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap_or(0)))
    }
}

/// Pointer to one value or an array that a function reads.
#[repr(transparent)]
pub struct In<T>(*const T);

impl<T> Clone for In<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for In<T> {}

impl<T: Copy> In<T> {
    /// The value; INVALID_VALUE if the caller gave null.
    pub fn get(self) -> Result<T> {
        self.at(0)
    }

    /// Element `index`; INVALID_VALUE if the caller gave null.
    pub fn at(self, index: usize) -> Result<T> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let element = self.0.wrapping_add(index);
        // SAFETY: not null, so the caller guarantees that many values of this type.
        Ok(unsafe { element.read_unaligned() })
    }

    /// The first `count` elements; null is allowed only where `count` is 0.
    pub fn list(self, count: usize) -> Result<Vec<T>> {
        (0..count).map(|index| self.at(index)).collect()
    }

    /// Whether the caller gave null.
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// The address as a number.
    pub fn address(self) -> u64 {
        self.0.addr() as u64
    }

    /// Returns a pointer to the object at `address`, which is in a structure of the caller.
    pub fn from_address(address: u64) -> Self {
        Self(std::ptr::with_exposed_provenance(usize::try_from(address).unwrap_or(0)))
    }
}

impl In<c_char> {
    /// The text; INVALID_VALUE if the caller gave null.
    pub fn text(self) -> Result<String> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: not null, so the caller guarantees a zero-terminated text.
        let text = unsafe { CStr::from_ptr(self.0) };
        Ok(text.to_string_lossy().into_owned())
    }
}

/// Reads `length` bytes at an address that the caller guarantees to be valid.
pub fn bytes_at(address: u64, length: usize) -> Result<Vec<u8>> {
    In::<u8>::from_address(address).list(length)
}

/// Writes `text` with a terminating zero, truncated to `length` bytes in total.
pub fn set_text(out: Out<u8>, length: usize, text: &str) -> Result {
    let room = length.checked_sub(1).ok_or(Code::INVALID_VALUE)?;
    out.given()?;
    let cut = &text.as_bytes()[..text.len().min(room)];
    for (index, &byte) in cut.iter().chain(&[0]).enumerate() {
        out.set_at(index, byte)?;
    }
    Ok(())
}

/// The handle of a driver object in C; see `registry`.
pub type Handle = usize;
/// An address in a GPU's memory, which is also its address in this process.
pub type DevicePointer = u64;

thread_local! {
    static PER_THREAD: Cell<bool> = const { Cell::new(false) };
}

/// Runs `call` with stream 0 as the per-thread default stream in place of the legacy one, as the `_ptsz`
/// forms do.
pub fn with_thread_stream<T>(call: impl FnOnce() -> T) -> T {
    let before = PER_THREAD.replace(true);
    let result = call();
    PER_THREAD.set(before);
    result
}

/// Whether stream 0 means the per-thread default stream in this call.
pub fn thread_stream() -> bool {
    PER_THREAD.get()
}

/// Defines functions of the C interface. The `also` names take the same parameters and do the same. The
/// `thread` names are the forms for the per-thread default stream.
macro_rules! exports {
    ($(
        $(#[$meta:meta])*
        fn $name:ident $(also $also:ident)* $(thread $thread:ident)* ($($parameter:ident: $kind:ty),* $(,)?) $body:block
    )*) => {$(
        $(#[$meta])*
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($parameter: $kind),*) -> u32 {
            #[allow(clippy::too_many_arguments)]
            fn body($($parameter: $kind),*) -> $crate::abi::Result $body
            gpushare_simulator::fault::around(stringify!($name), || $crate::abi::number(body($($parameter),*)))
        }
        exports! { @also $name [$($also)*] ($($parameter: $kind),*) }
        exports! { @thread $name [$($thread)*] ($($parameter: $kind),*) }
    )*};
    (@also $name:ident [] $parameters:tt) => {};
    (@also $name:ident [$first:ident $($rest:ident)*] ($($parameter:ident: $kind:ty),*)) => {
        #[unsafe(no_mangle)]
        pub extern "C" fn $first($($parameter: $kind),*) -> u32 { $name($($parameter),*) }
        exports! { @also $name [$($rest)*] ($($parameter: $kind),*) }
    };
    (@thread $name:ident [] $parameters:tt) => {};
    (@thread $name:ident [$first:ident $($rest:ident)*] ($($parameter:ident: $kind:ty),*)) => {
        #[unsafe(no_mangle)]
        pub extern "C" fn $first($($parameter: $kind),*) -> u32 {
            $crate::abi::with_thread_stream(|| $name($($parameter),*))
        }
        exports! { @thread $name [$($rest)*] ($($parameter: $kind),*) }
    };
}
