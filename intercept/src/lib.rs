//! The code of the two interception libraries, without the parts that make them libraries: the container's
//! books, the driver's real functions, and the hooks between a program and the driver.
//!
//! Everything here runs in another program's process. It never panics, never ends the program, sets no signal
//! handler and needs no C library. It prints at most one line: a warning that the limits file has another
//! version. The cdylibs `intercept/cuda` and `intercept/nvml` only add exported names.

#![cfg_attr(not(test), no_std)]

#[macro_use]
pub mod driver; // the first: its macros are used in the others

pub mod book;
pub mod compute;
pub mod cuda;
pub mod elf;
pub mod identity;
mod lock;
pub mod mutex;
pub mod nvml;
mod overhead;
mod pointer;
pub mod process;
mod slot;
pub mod sys;
pub mod table;
