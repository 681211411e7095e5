//! All hooks, under the driver's names. The exported symbols of the library jump to them.

pub use super::array::hooks::*;
pub use super::context_limit::hooks::*;
pub use super::entry::hooks::*;
pub use super::external::hooks::*;
pub use super::gate::hooks::*;
pub use super::graph::hooks::*;
pub use super::launch_entry::hooks::*;
pub use super::lifetime::green::hooks::*;
pub use super::lifetime::hooks::*;
pub use super::linear::hooks::*;
pub use super::pool::hooks::*;
pub use super::pool::memory::hooks::*;
pub use super::query::hooks::*;
pub use super::stream::hooks::*;
pub use super::virtual_memory::hooks::*;
pub use super::virtual_memory::multicast::hooks::*;
pub use super::virtual_memory::share::hooks::*;
