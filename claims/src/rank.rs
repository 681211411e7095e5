//! How far a word of a bundle is believed: this depends on who can have written it.

/// Who can have written a word. The later in this list, the more it is believed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rank {
    /// An environment variable. The bundle has the entries of image, pod and device plugin in one list and
    /// does not tell them apart.
    #[default]
    Environment,
    /// An annotation that the pod's author can write.
    Pod,
    /// An annotation that only a device plugin or the engine's caller can write.
    Granted,
    /// A device node or mount that is already in the bundle: kubelet or the engine's caller put it there.
    Handed,
    /// What the node reserved: its own agent wrote it, and the bundle shows a secret of the node's.
    Node,
}
