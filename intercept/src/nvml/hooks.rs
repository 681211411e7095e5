//! All hooks, under the driver's names. The exported symbols of the library jump to them.

pub use super::list::hooks::*;
pub use super::memory::hooks::*;
pub use super::sample::hooks::*;
pub use super::table::hooks::*;
