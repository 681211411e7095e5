//! All hooks, under the driver's names: what the exported symbols of the library jump to.

pub use super::list::hooks::*;
pub use super::memory::hooks::*;
pub use super::sample::hooks::*;
pub use super::table::hooks::*;
