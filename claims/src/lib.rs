//! Turns a bundle's words about GPUs into one [`Request`]. A [`Word`] is one variable, annotation or device,
//! with the [`Rank`] of its possible authors. Sources turn words into [`Claim`]s. [`merge()`] combines all
//! claims into one request.
//!
//! This crate only computes: it reads no files and knows no other system's keys. The sources live in the
//! crate above, `gpushare-request`. docs/trust.md describes how far each author is trusted.
#![forbid(unsafe_code)]

mod allocated;
mod amount;
mod claim;
mod container;
mod devices;
mod error;
mod gpus;
mod grammar;
mod library;
mod merge;
mod model;
mod patterns;
mod policy;
mod rank;
mod request;
mod reserved;
mod selector;
mod words;

pub use allocated::{Allocated, AllocatedPart};
pub use amount::{Amount, Cap};
pub use claim::{Claim, Span};
pub use container::{
    CAPABILITY, Container, Engine, HANDED, Mount, Node, Writer, gpu_minor, is_privileged, lets_use,
    ran_before,
};
pub use devices::{DeviceSelector, Devices};
pub use error::{RequestError, ValueError, shortened};
#[cfg(any(test, feature = "testing"))]
pub use gpus::four;
pub use gpus::{NodeGpus, contains, each_once, has_double, total};
pub use grammar::{
    ComputePolicy, Cores, GrammarError, MemoryRequest, Mode, Priority, Scope, SupervisorRequired, count,
    whole,
};
pub use library::{Interceptor, Library, Owner, UNPROVED};
pub use merge::merge;
pub use model::ModelFilter;
pub use patterns::KeyPatterns;
pub use policy::{Ceilings, DialectSettings, InterceptorPolicy, KubeletPolicy, NvidiaPolicy, Policy};
pub use rank::Rank;
pub use request::{Kept, Request, Share, Told};
pub use reserved::{Reserved, ReservedShare};
pub use selector::{IndexMeaning, SelectorError, find_gpu};
pub use words::{Word, Words, conflict, rank_of_annotation};
