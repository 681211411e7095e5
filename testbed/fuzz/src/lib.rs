//! Properties that every reader of foreign bytes has, whatever the bytes are. There is one function for each
//! reader; it takes the bytes and panics if a property is broken.
//!
//! Two programs call these functions. The test beside them runs the corpus and many small changes of it,
//! built by the ordinary compiler, in every `make test`. `make fuzz` hands the functions to libFuzzer for as
//! long as the caller wants.

mod calls;
mod edit;
mod elf;
mod loader_cache;
mod proc;
mod region;
mod request;
mod settings;
mod state;

pub use calls::calls;
pub use edit::edit;
pub use elf::elf;
pub use loader_cache::loader_cache;
pub use proc::proc;
pub use region::{limits, usage};
pub use request::request;
pub use settings::settings;
pub use state::state;

/// Name of the reader's folder in the corpus, and the function that checks the reader.
pub type Target = (&'static str, fn(&[u8]));

/// All readers.
pub const TARGETS: [Target; 10] = [
    ("calls", calls),
    ("edit", edit),
    ("elf", elf),
    ("limits", limits),
    ("loader_cache", loader_cache),
    ("proc", proc),
    ("request", request),
    ("settings", settings),
    ("state", state),
    ("usage", usage),
];
