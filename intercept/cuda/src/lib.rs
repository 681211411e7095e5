//! The container's `libcuda.so.1`: exported names over the hooks of `gpushare_intercept::cuda`, and nothing
//! else.
//!
//! Only the profile `shim` builds it (see `intercept/link.rs`); every other profile produces an empty
//! library.

#![cfg_attr(shim, no_std)]

#[cfg(shim)]
#[path = "../../exports.rs"]
mod exports;
