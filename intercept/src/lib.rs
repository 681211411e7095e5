//! What the two interception libraries do, without what makes them libraries: the books of the container, the driver's
//! real functions, and the hooks that stand between a program and the driver.
//!
//! Everything here runs in somebody else's process: it never panics, prints, ends the program or sets a handler, and it
//! needs no C library. The cdylibs `intercept/cuda` and `intercept/nvml` add exported names and nothing else.

#![cfg_attr(not(test), no_std)]

pub mod book;
pub mod compute;
pub mod cuda;
pub mod driver;
pub mod elf;
pub mod identity;
mod lock;
pub mod mutex;
pub mod nvml;
mod pointer;
pub mod process;
mod slot;
pub mod sys;
pub mod table;
