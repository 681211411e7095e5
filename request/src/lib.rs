//! Reads the request of a container: takes the annotations, environment, device nodes and mounts of its
//! bundle, and returns a [`Request`].
//!
//! This crate reads no file and no store; it knows only the GPUs that the caller passes. Each source turns
//! the words that it knows into claims, and one merge turns them into a request. `sources` has gpushare's own
//! keys, lists of GPUs, CDI names and handed nodes; `dialects` has a file for each other system. There is no
//! fallback: a malformed or contradictory request is an error that names the words, their origin and the
//! remedy. docs/trust.md describes how far each author is trusted.
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
    Allocated, AllocatedPart, Ceilings, ComputePolicy, Container, Cores, DeviceSelector, Devices,
    DialectSettings, Engine, GrammarError, HANDED, IndexMeaning, Interceptor, InterceptorPolicy, Kept,
    KeyPatterns, KubeletPolicy, MemoryRequest, Mode, ModelFilter, NodeGpus, NvidiaPolicy, Policy, Priority,
    Request, RequestError, Reserved, ReservedShare, Scope, SelectorError, Share, Told, Writer, find_gpu,
    is_privileged, ran_before,
};
pub use quantity::kubernetes as kubernetes_quantity;
pub use read::{is_request, is_request_variable, read};
pub use sources::cdi::{GPU_KIND, SHARE_KIND, ShareName, VARIABLE as CDI_VARIABLE};
pub use sources::list::{GRANTED_LIST, kept_list};
pub use sources::own::ANNOTATION as POD_ANNOTATION;
pub use sources::qualified::cdi_names;
pub use sources::reserved::{CLAIM_KIND, NamedClaim, claim_value, named_claim};

#[cfg(test)]
mod tests;
