//! Reasons why a request is refused. Each message names the remedy and fits an engine's one-line message.

use crate::grammar::GrammarError;
use crate::model::ModelError;
use crate::selector::SelectorError;
use gpushare_inventory::{CapabilityError, GpuUuid, ProfileError};

/// The reason why a container's request is refused before placement.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The key does not accept this value.
    #[error("{key}={value:?}: {source}")]
    Malformed {
        /// Name of the annotation or variable.
        key: String,
        /// The value, cut by [`shortened`].
        value: String,
        /// Why the value cannot be parsed.
        source: ValueError,
    },
    /// A key under gpushare's own prefix that gpushare does not know.
    #[error(
        "{key} is no key of gpushare; {}known are {known}",
        meant.as_ref().map(|key| format!("did you mean {key}? ")).unwrap_or_default()
    )]
    UnknownKey {
        /// Name of the annotation or variable.
        key: String,
        /// The known key nearest to it, if one is near enough.
        meant: Option<String>,
        /// All names that exist, for the message.
        known: String,
    },
    /// A CDI device of a kind that gpushare does not have.
    #[error(
        "{name} is no CDI device of gpushare; known are gpushare.io/share=MEMORY and gpushare.io/gpu=DEVICE"
    )]
    UnknownCdiDevice {
        /// Qualified name (vendor/class=device), escaped.
        name: String,
    },
    /// A gpushare CDI device in a place where the settings forbid reading it.
    #[error(
        "NVIDIA_VISIBLE_DEVICES names CDI device {name}, but this node does not read it there ({setting}); ask by \
         annotation, or have the administrator change {setting}"
    )]
    UnreadCdiDevice {
        /// Qualified name (vendor/class=device), escaped.
        name: String,
        /// Name of the setting that forbids it.
        setting: &'static str,
    },
    /// One key twice, or two keys for the same thing, with different values.
    #[error("{first} and {second} contradict each other: remove one of them")]
    Conflict {
        /// One of the words, as key and value.
        first: String,
        /// The contradicting item: usually another word, as key and value.
        second: String,
    },
    /// A variable for resource claims that none of this node's CDI files has written.
    #[error("{key} names no resource claim: only gpushare's CDI files set it; take it out of pod and image")]
    MalformedClaim {
        /// Name of the variable, escaped.
        key: String,
    },
    /// A container names two resource claims.
    #[error(
        "the container names several resource claims of gpushare's; put their requests into one claim, whose shares it          gets together"
    )]
    SeveralClaims,
    /// The claim that the bundle names holds nothing on this node.
    #[error(
        "its resource claim holds nothing on this node: it was not prepared here, or was released already; delete the pod, so          that it is prepared anew"
    )]
    UnpreparedClaim,
    /// The driver no longer shows a claim's GPU.
    #[error(
        "{claim} holds a share of {gpu}, which this node has no more (`gpushare devices`); delete its pods"
    )]
    ClaimedGpuGone {
        /// Namespace and name of the claim.
        claim: String,
        /// The GPU.
        gpu: GpuUuid,
    },
    /// Other words of the bundle ask for less than the claim's share.
    #[error(
        "the container has a share by claim {claim}, and asks for less of it by other words; the containers of \
         a claim hold one share together: remove the other words, or let the claim ask for less"
    )]
    BelowClaim {
        /// Namespace and name of the claim.
        claim: String,
    },
    /// Only channels that may not grant ask for a GPU (strict nodes).
    #[error(
        "{key} asks for a GPU, but only trusted annotations, handed devices and channels with a ceiling grant here \
         (request.strict): ask through alloc.gpushare.io annotations, or have the administrator set {setting}"
    )]
    Untrusted {
        /// The most trusted of the words that ask, as key and value.
        key: String,
        /// The setting that would give the channel a ceiling.
        setting: &'static str,
    },
    /// Only variables ask for a GPU, in a container to which kubelet allocated none.
    #[error(
        "{key} asks for a GPU, but kubelet allocated none to this container, and variables grant nothing \
         without (request.kubelet): ask for one in its resources, or set NVIDIA_VISIBLE_DEVICES=void if it wants none"
    )]
    NotAllocated {
        /// The word that asks, as key and value.
        key: String,
    },
    /// A container asks to run ahead of others, but without a compute limit.
    #[error("{key} needs a share of compute, beyond which it falls back: ask for cores, too")]
    LatencyWithoutCores {
        /// The word that asks, as key and value.
        key: String,
    },
    /// A channel that may only lower a share states more than the node's default, and no trusted channel
    /// states that amount.
    #[error(
        "{key} asks for more than this node gives beside the trusted words, which leave it out (request.strict): remove it, or \
         have them say it"
    )]
    AboveDefault {
        /// The word that asks, as key and value.
        key: String,
    },
    /// A less trusted channel asks for more than a trusted one granted.
    #[error(
        "{key} asks for more than the trusted {trusted}: this node lets it only lower the share (request.strict)"
    )]
    Raised {
        /// The less trusted word, as key and value.
        key: String,
        /// The more trusted word, as key and value.
        trusted: String,
    },
    /// A channel asks for more than the ceiling that the settings give it.
    #[error(
        "{by} asks for more than {ceiling}, the most that this node grants by that channel; ask for less, or have the \
             administrator change {setting}"
    )]
    AboveCeiling {
        /// The word that asks, as key and value.
        by: String,
        /// The most that the channel may grant, with its unit.
        ceiling: String,
        /// Name of the setting that holds the ceiling.
        setting: &'static str,
    },
    /// The container asks only through gpushare's own variables, and this node does not read them.
    #[error(
        "its GPUSHARE_ variables are no request on this node (request.env); ask by annotation as gpushare.io/memory (docker \
         run --annotation, from docker 24 on), leave them and gpushare's CDI devices out, or have the administrator change \
         request.env"
    )]
    UnreadVariables,
    /// The container asks only through variables, and this node accepts no variable.
    #[error(
        "{by} asks by variables, which are no request on this node (request.env and request.nvidia); ask by annotation, or have \
         the administrator change these settings"
    )]
    Unread {
        /// The word that asks, as key and value.
        by: String,
    },
    /// The bundle states a limit, but no word says for which GPU.
    #[error("{by} is a limit without a GPU: name GPUs in NVIDIA_VISIBLE_DEVICES, or remove it")]
    LimitWithoutGpu {
        /// The word that states the limit, as key and value.
        by: String,
    },
    /// Several GPUs under MPS.
    #[error(
        "{key} is for one GPU, since a program reaches the MPS control daemon of one only: ask for one GPU, or for \
         mode share, time-slice or exclusive"
    )]
    SeveralUnderMps {
        /// The word that asks for MPS, as key and value.
        key: String,
    },
    /// A compute policy under MPS, which does not support one.
    #[error(
        "{key} and {mode} contradict each other: MPS holds compute by its active thread percentage alone; leave one out"
    )]
    PolicyUnderMps {
        /// The word that names the policy, as key and value.
        key: String,
        /// The word that asks for MPS, as key and value.
        mode: String,
    },
    /// A limit above a share whose memory is not one number of bytes, the same on every GPU.
    #[error(
        "{key} needs memory in bytes beside it, the same on each GPU and at most as much: write memory 4GiB and memory-limit \
         10GiB"
    )]
    LimitWithoutMemory {
        /// The word that states the limit, as key and value.
        key: String,
    },
    /// Another system's memory limit amounts to less than 1 MiB.
    #[error("{by} comes to less than 1 MiB: ask for more")]
    TooSmall {
        /// The word that states the limit, as key and value.
        by: String,
    },
    /// The name of a GPU matches none of the node's GPUs, or several.
    #[error("{key}: {source}")]
    NoSuchGpu {
        /// Name of the annotation or variable.
        key: String,
        /// Whether no GPU or several GPUs match the name.
        source: SelectorError,
    },
    /// The node has no MIG instance of the requested size.
    #[error("{key}: this node has no such MIG instance (`gpushare devices`); it has {here}")]
    NoSuchInstance {
        /// The word that asks, as key and value.
        key: String,
        /// The instances that the node has.
        here: String,
    },
    /// The inventory does not know how much memory the GPU has.
    #[error(
        "the memory size of {gpu} is unknown; run `gpushare inventory refresh` and see `gpushare doctor`"
    )]
    UnknownSize {
        /// The GPU without a known size.
        gpu: GpuUuid,
    },
    /// Driver capabilities that are unknown or that this node does not give.
    #[error(transparent)]
    Capabilities(#[from] CapabilityError),
    /// The container names GPUs but no share, and this node requires a share.
    #[error(
        "the container names GPUs but no share (by NVIDIA_VISIBLE_DEVICES, a CDI device or a device node): set GPUSHARE_MEMORY \
         (as 4GiB or 25%) or annotate gpushare.io/memory, or have the administrator change request.nvidia"
    )]
    NoShare,
    /// The container names no size, and the node has no default size.
    #[error(
        "the container names no memory, and this node gives none by itself (request.default_memory): set GPUSHARE_MEMORY (as \
         4GiB or 25%) or annotate gpushare.io/memory"
    )]
    NoMemory,
}

/// The mistake in the value of a key.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ValueError {
    /// The value breaks the grammar of gpushare's own key.
    #[error(transparent)]
    Grammar(#[from] GrammarError),
    /// The value is not valid for another system's key; the text gives the reason.
    #[error("{0}")]
    Foreign(String),
    /// The value is not a model filter.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The value is not the name of a MIG instance size.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// The value is not a list of driver capabilities, or it includes one that this node does not give.
    #[error(transparent)]
    Capability(#[from] CapabilityError),
}

/// Cuts a value to 80 characters for a message, since a bundle may hold a megabyte. The formatter escapes it
/// (`{:?}`).
pub fn shortened(value: &str) -> String {
    const LONGEST: usize = 80;
    match value.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &value[..end]),
        None => value.to_owned(),
    }
}
