//! A library opened at run time.

use std::ffi::{CStr, CString, c_void};

use anyhow::{Context, Result, bail};

/// An open library. It stays open until the program ends.
pub struct Library(*mut c_void);

impl Library {
    /// Opens `name`: a path, or a name for the loader's ordinary search.
    ///
    /// # Errors
    /// When the loader cannot open it; the text is the loader's.
    pub fn open(name: &str) -> Result<Self> {
        let text = CString::new(name).context("a name with a zero byte")?;
        // SAFETY: a C string; the library's initialisers are what every program that links it runs.
        let handle = unsafe { libc::dlopen(text.as_ptr(), libc::RTLD_NOW) };
        if !handle.is_null() {
            return Ok(Self(handle));
        }
        // SAFETY: asks for the last error of this thread.
        let error = unsafe { libc::dlerror() };
        if error.is_null() {
            bail!("{name} cannot be opened");
        }
        // SAFETY: a text of the loader, alive until its next call in this thread.
        let error = unsafe { CStr::from_ptr(error) };
        bail!("{}", error.to_string_lossy());
    }

    /// Address of `name`, if the library or one that it depends on has it.
    pub fn symbol(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: an open handle and a C string.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        (!address.is_null()).then_some(address)
    }
}

/// Declares a table of a library's functions, all of the form `int f(...)`. A function that the library lacks
/// returns `absent`, a status of the library's own kind.
#[macro_export]
macro_rules! functions {
    (
        $(#[$about:meta])*
        $table:ident, absent = $absent:expr;
        $($field:ident = $name:ident($($parameter:ident: $kind:ty),*);)*
    ) => {
        $(#[$about])*
        pub struct $table {
            $(pub $field: extern "C" fn($($kind),*) -> i32,)*
        }

        impl $table {
            /// The functions of the library `name`.
            ///
            /// # Errors
            /// When the library cannot be opened.
            pub fn open(name: &str) -> anyhow::Result<Self> {
                let library = $crate::library::Library::open(name)?;
                Ok(Self { $($field: {
                    extern "C" fn absent($(_: $kind),*) -> i32 {
                        $absent
                    }
                    let symbol = std::ffi::CString::new(stringify!($name))?;
                    library.symbol(&symbol).map_or(absent as extern "C" fn($($kind),*) -> i32, |address| {
                        // SAFETY: the form that the public headers give for this name.
                        unsafe { std::mem::transmute::<*mut std::ffi::c_void, extern "C" fn($($kind),*) -> i32>(address) }
                    })
                },)* })
            }
        }
    };
}
