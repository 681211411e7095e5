//! What holds of every reader of foreign bytes, whatever the bytes: one function per reader, which takes them and panics
//! when a promise is broken.
//!
//! Two programs call these functions: the test beside them replays the corpus and many small changes of it with the
//! ordinary compiler, in every `make test`; `make fuzz` hands them to libFuzzer for as long as one likes.

mod edit;
mod elf;
mod proc;
mod region;
mod request;
mod settings;
mod state;

pub use edit::edit;
pub use elf::elf;
pub use proc::proc;
pub use region::{limits, usage};
pub use request::request;
pub use settings::settings;
pub use state::state;

/// A reader under test, by the name of its folder in the corpus.
pub type Target = (&'static str, fn(&[u8]));

/// All of them.
pub const TARGETS: [Target; 8] = [
    ("edit", edit),
    ("elf", elf),
    ("limits", limits),
    ("proc", proc),
    ("request", request),
    ("settings", settings),
    ("state", state),
    ("usage", usage),
];
