//! Why a request is refused, each with the remedy, in words that fit an engine's one-line message.

use crate::grammar::GrammarError;
use crate::model::ModelError;
use crate::selector::SelectorError;
use gpushare_inventory::{CapabilityError, GpuUuid};

/// Why a container's request cannot be read.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// A value is not in its key's grammar.
    #[error("{key}={value:?}: {source}")]
    Malformed {
        /// The annotation or variable.
        key: String,
        /// The value, shortened.
        value: String,
        /// What is wrong with it.
        source: ValueError,
    },
    /// A key that gpushare does not know, under its own prefix.
    #[error(
        "{key} is no key of gpushare; {}known are {known}",
        meant.as_ref().map(|key| format!("did you mean {key}? ")).unwrap_or_default()
    )]
    UnknownKey {
        /// The annotation or variable.
        key: String,
        /// The key that was probably meant.
        meant: Option<String>,
        /// The names that exist.
        known: String,
    },
    /// A kind of CDI device that gpushare does not have.
    #[error(
        "{name} is no CDI device of gpushare; known are gpushare.io/share=MEMORY and gpushare.io/gpu=DEVICE"
    )]
    UnknownCdiDevice {
        /// The qualified name, escaped.
        name: String,
    },
    /// A CDI device of gpushare's, where the settings have nobody look for it.
    #[error(
        "NVIDIA_VISIBLE_DEVICES names CDI device {name}, but this node does not read it there ({setting}); ask by \
         annotation, or have the administrator change {setting}"
    )]
    UnreadCdiDevice {
        /// The qualified name, escaped.
        name: String,
        /// The setting that says so.
        setting: &'static str,
    },
    /// One key, or two names of one thing, with different values.
    #[error("{first} and {second} contradict each other: remove one of them")]
    Conflict {
        /// Key and value.
        first: String,
        /// Key and value.
        second: String,
    },
    /// A channel that may not grant asked for a GPU.
    #[error(
        "{key} asks for a GPU, but only trusted annotations, handed devices and channels with a ceiling grant here \
         (request.strict): ask through alloc.gpushare.io annotations, or have the administrator set {setting}"
    )]
    Untrusted {
        /// The annotation or variable.
        key: String,
        /// The ceiling of its channel.
        setting: &'static str,
    },
    /// A channel that may only lower stated more than the node's default, of which nobody else speaks.
    #[error(
        "{key} asks for more than this node gives beside the trusted words, which leave it out (request.strict): remove it, or \
         have them say it"
    )]
    AboveDefault {
        /// The key and value.
        key: String,
    },
    /// A less trusted channel asked for more than a trusted one granted.
    #[error(
        "{key} asks for more than the trusted {trusted}: this node lets it only lower the share (request.strict)"
    )]
    Raised {
        /// The less trusted key and value.
        key: String,
        /// The trusted key and value.
        trusted: String,
    },
    /// A channel granted more than the settings let it.
    #[error(
        "{by} asks for more than {ceiling}, the most that this node grants by that channel; ask for less, or have the \
             administrator change {setting}"
    )]
    AboveCeiling {
        /// The key and value.
        by: String,
        /// The most.
        ceiling: String,
        /// The setting that says so.
        setting: &'static str,
    },
    /// gpushare's own variables alone, where they are not read.
    #[error(
        "its GPUSHARE_ variables are no request on this node (request.env); ask by annotation as gpushare.io/memory (docker \
         run --annotation, from docker 24 on), leave them and gpushare's CDI devices out, or have the administrator change \
         request.env"
    )]
    UnreadVariables,
    /// Variables where nobody's count.
    #[error(
        "{by} asks by variables, which are no request on this node (request.env and request.nvidia); ask by annotation, or have \
         the administrator change these settings"
    )]
    Unread {
        /// The key and value.
        by: String,
    },
    /// A limit, and nobody says of which GPU.
    #[error("{by} is a limit without a GPU: name GPUs in NVIDIA_VISIBLE_DEVICES, or remove it")]
    LimitWithoutGpu {
        /// The key and value.
        by: String,
    },
    /// So little that nothing fits.
    #[error("{by} comes to less than 1 MiB: ask for more")]
    TooSmall {
        /// The key and value.
        by: String,
    },
    /// A GPU that is not there.
    #[error("{key}: {source}")]
    NoSuchGpu {
        /// The annotation or variable.
        key: String,
        /// What is wrong with the name.
        source: SelectorError,
    },
    /// Nobody could tell how much memory a GPU has.
    #[error(
        "the memory size of {gpu} is unknown; run `gpushare inventory refresh` and see `gpushare doctor`"
    )]
    UnknownSize {
        /// The GPU.
        gpu: GpuUuid,
    },
    /// Parts of the driver that this node does not give.
    #[error(transparent)]
    Capabilities(#[from] CapabilityError),
    /// GPUs and no share, where the node wants one.
    #[error(
        "the container names GPUs but no share (by NVIDIA_VISIBLE_DEVICES, a CDI device or a device node): set GPUSHARE_MEMORY \
         (as 4GiB or 25%) or annotate gpushare.io/memory, or have the administrator change request.nvidia"
    )]
    NoShare,
}

/// What is wrong with a value.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ValueError {
    /// Not in the key's grammar.
    #[error(transparent)]
    Grammar(#[from] GrammarError),
    /// Not what another system's key holds.
    #[error("{0}")]
    Foreign(String),
    /// Not a model filter.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Not a list of capabilities, or more than can be had.
    #[error(transparent)]
    Capability(#[from] CapabilityError),
}

/// A value for a message: bounded, since a bundle may hold a megabyte of it. Escaping is the formatter's (`{:?}`).
pub fn shortened(value: &str) -> String {
    const LONGEST: usize = 80;
    if value.chars().count() <= LONGEST {
        return value.to_owned();
    }
    let head: String = value.chars().take(LONGEST).collect();
    format!("{head}…")
}
