//! What a container asks for: its bundle's annotations, environment, device nodes and mounts in, a [`Request`] out.
//!
//! Pure: no file and no store is looked at, and of the node only the GPUs that the caller hands over. Each source turns
//! the words that it knows into claims, which say who can have written them; one merge makes a request of the claims.
//! gpushare's own keys, lists of GPUs, CDI names and handed nodes are below `sources`, other systems' words below
//! `dialects`, a file each. docs/trust.md says who is believed how far. Nothing here falls back: a malformed or
//! contradictory request is an error that names the words, where they come from and the remedy.
#![forbid(unsafe_code)]

mod dialect;
mod dialects;
mod limit;
mod quantity;
mod read;
mod sources;
mod switches;

pub use dialects::names as dialect_names;
pub use dialects::switch_names;
pub use gpushare_claims::{
    Ceilings, ComputePolicy, Container, Cores, DeviceSelector, Devices, DialectSettings, Engine,
    GrammarError, HANDED, IndexMeaning, Interceptor, InterceptorPolicy, Kept, KeyPatterns, MemoryRequest,
    Mode, ModelFilter, NvidiaPolicy, Policy, Priority, Request, RequestError, Scope, SelectorError, Share,
    find_gpu, is_privileged, ran_before,
};
pub use read::{is_request, read};
pub use sources::cdi::{GPU_KIND, SHARE_KIND, ShareName, VARIABLE as CDI_VARIABLE};
pub use sources::list::{GRANTED_LIST, kept_list};
pub use sources::qualified::cdi_names;

#[cfg(test)]
mod tests;
