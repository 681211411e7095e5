//! A library opened at run time. No other module of this program calls foreign code.

use std::ffi::{CStr, CString, c_void};

use anyhow::{Context, Result, bail};

/// An open library, which stays open until the program ends.
pub struct Library {
    handle: *mut c_void,
    name: &'static str,
}

impl Library {
    /// Opens `name` by the loader's ordinary search.
    ///
    /// # Errors
    /// If the library cannot be opened; the text is the loader's.
    pub fn open(name: &'static str) -> Result<Self> {
        let text = CString::new(name).context("a name with a zero byte")?;
        // SAFETY: every program that links the driver runs the same initialisers.
        let handle = unsafe { libc::dlopen(text.as_ptr(), libc::RTLD_NOW) };
        if handle.is_null() {
            // SAFETY: only reads the last error of this thread.
            let error = unsafe { libc::dlerror() };
            if error.is_null() {
                bail!("{name} cannot be opened");
            }
            // SAFETY: the loader owns the text, which stays valid until its next call in this thread.
            let error = unsafe { CStr::from_ptr(error) };
            bail!("{}", error.to_string_lossy());
        }
        Ok(Self { handle, name })
    }

    fn address(&self, symbol: &CStr) -> Result<*mut c_void> {
        // SAFETY: an open handle and a zero-terminated name.
        let address = unsafe { libc::dlsym(self.handle, symbol.as_ptr()) };
        if address.is_null() {
            bail!("{} has no {}", self.name, symbol.to_string_lossy());
        }
        Ok(address)
    }
}

/// Makes a method that calls a function of the library with the given parameters and an `int` as its result.
macro_rules! function {
    ($method:ident($($parameter:ident: $kind:ty),*)) => {
        #[doc = concat!("A function of the form `int f(", stringify!($($kind),*), ")`, by name; the result as it is.")]
        pub fn $method(&self, symbol: &CStr, $($parameter: $kind),*) -> Result<u32> {
            let address = self.address(symbol)?;
            // SAFETY: the driver's documentation gives this form for the names requested here.
            let function = unsafe { std::mem::transmute::<*mut c_void, extern "C" fn($($kind),*) -> u32>(address) };
            Ok(function($($parameter),*))
        }
    };
}

impl Library {
    function!(call());
    function!(with_flags(flags: u32));
    function!(with_number(out: &mut i32));
    function!(with_device(out: &mut i32, index: i32));
    function!(with_name(text: &mut [u8; 128], length: i32, device: i32));
    function!(with_size(out: &mut usize, device: i32));
    function!(with_context(out: &mut usize, device: i32));
    function!(with_handle(handle: usize));
    function!(with_sizes(free: &mut usize, total: &mut usize));
    function!(with_allocation(out: &mut u64, bytes: usize));
    function!(with_error_name(code: u32, out: &mut Option<&'static std::ffi::c_char>));
    function!(with_nvml_device(index: u32, out: &mut usize));
    function!(with_nvml_text(device: usize, text: &mut [u8; 128], length: u32));
    function!(with_nvml_instance(device: usize, index: u32, out: &mut usize));
    function!(with_nvml_memory(device: usize, out: &mut [u64; 3]));

    /// Returns the name of a CUDA result, for example `CUDA_ERROR_OUT_OF_MEMORY`.
    pub fn result_name(&self, code: u32) -> String {
        let mut text = None;
        match (self.with_error_name(c"cuGetErrorName", code, &mut text), text) {
            (Ok(0), Some(text)) => {
                // SAFETY: the driver returns a zero-terminated text of its own that lives as long as the
                // driver is loaded.
                let text = unsafe { CStr::from_ptr(text) };
                text.to_string_lossy().into_owned()
            }
            _ => format!("CUDA error {code}"),
        }
    }
}
