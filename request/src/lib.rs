//! What a container asks for: its bundle's annotations, environment, device nodes and mounts in, a [`Request`] out.
//!
//! Pure: no file and no store is looked at, and of the node only the GPUs that the caller hands over. Each source turns
//! the words that it knows into claims, which say who can have written them; one merge makes a request of the claims.
//! gpushare's own keys, lists of GPUs, CDI names and handed nodes are below `sources`, other systems' words below
//! `dialects`, a file each. docs/trust.md says who is believed how far. Nothing here falls back: a malformed or
//! contradictory request is an error that names the words, where they come from and the remedy.
#![forbid(unsafe_code)]

mod amount;
mod claim;
mod container;
mod dialect;
mod dialects;
mod error;
mod gpus;
mod grammar;
mod library;
mod limit;
mod merge;
mod model;
mod patterns;
mod policy;
mod quantity;
mod rank;
mod read;
mod request;
mod requirement;
mod selector;
mod sources;
mod switches;
mod words;

pub use container::{Container, Engine, HANDED, is_privileged, ran_before};
pub use dialects::names as dialect_names;
pub use dialects::switch_names;
pub use error::RequestError;
pub use grammar::{
    ComputePolicy, Cores, DeviceSelector, Devices, GrammarError, MemoryAsk, Mode, Priority, Scope,
};
pub use library::Interceptor;
pub use model::ModelFilter;
pub use patterns::KeyPatterns;
pub use policy::{Ceilings, DialectSettings, InterceptorPolicy, NvidiaPolicy, Policy};
pub use read::{is_request, read};
pub use request::{Kept, Request, Share};
pub use requirement::{Offer, Requirements};
pub use selector::{IndexMeaning, SelectorError, find_gpu};
pub use sources::cdi::{GPU_KIND, SHARE_KIND, ShareName, VARIABLE as CDI_VARIABLE};
pub use sources::list::{GRANTED_LIST, kept_list};

#[cfg(test)]
mod tests;
