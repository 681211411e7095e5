//! The parameters of the C interface as Rust types, and the results of its functions.
//!
//! Only C callers make values of these types. They promise what NVML's documentation asks of them: a pointer
//! is null, or valid for what the function does with it. Everything that uses this module is safe code.

use std::ffi::{CStr, c_char};

/// An NVML result other than success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code(pub u32);

/// Result of every operation of the library.
pub type Result<T = ()> = std::result::Result<T, Code>;

impl Code {
    pub const UNINITIALIZED: Self = Self(1);
    pub const INVALID_ARGUMENT: Self = Self(2);
    pub const NOT_SUPPORTED: Self = Self(3);
    pub const NO_PERMISSION: Self = Self(4);
    pub const NOT_FOUND: Self = Self(6);
    pub const INSUFFICIENT_SIZE: Self = Self(7);
    pub const DRIVER_NOT_LOADED: Self = Self(9);
    pub const TIMEOUT: Self = Self(10);
    pub const ARGUMENT_VERSION_MISMATCH: Self = Self(25);
    pub const UNKNOWN: Self = Self(999);
}

/// The text of nvmlErrorString for a result.
pub fn words(code: u32) -> &'static CStr {
    match code {
        0 => c"Success",
        1 => c"Uninitialized",
        2 => c"Invalid Argument",
        3 => c"Not Supported",
        4 => c"Insufficient Permissions",
        6 => c"Not Found",
        7 => c"Insufficient Size",
        9 => c"Driver Not Loaded",
        10 => c"Timeout",
        13 => c"Function Not Found",
        25 => c"Argument version mismatch",
        _ => c"Unknown Error",
    }
}

/// The nvmlReturn_t of an operation as C sees it; 0 for success.
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
    /// Writes `value`; INVALID_ARGUMENT if the caller gave null.
    pub fn set(self, value: T) -> Result {
        self.set_at(0, value)
    }

    /// Writes `value` as element `index` of the caller's array; INVALID_ARGUMENT if the caller gave null.
    pub fn set_at(self, index: usize, value: T) -> Result {
        if self.0.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        let element = self.0.wrapping_add(index);
        // SAFETY: not null, so the caller promised a place for that many values of this type.
        unsafe { element.write_unaligned(value) };
        Ok(())
    }

    /// The value that stands there now, for parameters that are read and written.
    pub fn get(self) -> Result<T>
    where
        T: Copy,
    {
        if self.0.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        // SAFETY: not null, so the caller promised a value of this type.
        Ok(unsafe { self.0.read_unaligned() })
    }

    /// Whether the caller gave null.
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// The place at an address that the caller wrote into a structure.
    pub fn from_address(address: usize) -> Self {
        Self(std::ptr::with_exposed_provenance_mut(address))
    }

    /// The place `bytes` further on, for a value of another type.
    pub fn offset<U>(self, bytes: usize) -> Out<U> {
        Out(self.0.wrapping_byte_add(bytes).cast())
    }
}

/// A text that the caller gives.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Text(*const c_char);

impl Text {
    /// The text; INVALID_ARGUMENT if the caller gave null.
    pub fn get(self) -> Result<String> {
        if self.0.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        // SAFETY: not null, so the caller promised a terminated text.
        let text = unsafe { CStr::from_ptr(self.0) };
        Ok(text.to_string_lossy().into_owned())
    }
}

/// Writes `text` with a zero at its end into a buffer of `length` bytes; INSUFFICIENT_SIZE if it does not
/// fit.
pub fn set_text(out: Out<u8>, length: u32, text: &str) -> Result {
    if text.len() >= length as usize {
        return Err(Code::INSUFFICIENT_SIZE);
    }
    for (index, byte) in text.bytes().chain([0]).enumerate() {
        out.set_at(index, byte)?;
    }
    Ok(())
}

/// `text` as an array padded with zeros, cut so that at least one zero remains.
pub fn padded<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [0; N];
    let length = text.len().min(N - 1);
    bytes[..length].copy_from_slice(&text.as_bytes()[..length]);
    bytes
}

/// A device as C holds it; see [`crate::node`].
pub type Handle = usize;

/// Defines functions of the C interface. The `also` names take the same parameters and do the same. Each name
/// gets a body of its own: it must not call another exported name, which a driver of an older version lacks.
macro_rules! exports {
    ($(
        $(#[$meta:meta])*
        fn $name:ident $(also $also:ident)* ($($parameter:ident: $kind:ty),* $(,)?) $body:block
    )*) => {$(
        exports! { @export [$(#[$meta])*] $name $name ($($parameter: $kind),*) $body }
        exports! { @also $name [$($also)*] ($($parameter: $kind),*) $body }
    )*};
    (@also $name:ident [] $parameters:tt $body:block) => {};
    (@also $name:ident [$first:ident $($rest:ident)*] $parameters:tt $body:block) => {
        exports! { @export [] $first $name $parameters $body }
        exports! { @also $name [$($rest)*] $parameters $body }
    };
    (@export [$($meta:tt)*] $name:ident $known:ident ($($parameter:ident: $kind:ty),*) $body:block) => {
        $($meta)*
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($parameter: $kind),*) -> u32 {
            fn body($($parameter: $kind),*) -> $crate::abi::Result $body
            gpushare_simulator::fault::around(stringify!($known), || $crate::abi::number(body($($parameter),*)))
        }
    };
}
