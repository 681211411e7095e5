//! How far a word of a bundle is trusted. This depends on its possible authors.

/// The possible author of a word, from least to most trusted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rank {
    /// An environment variable. The bundle merges the entries of image, pod and device plugin into one list
    /// without saying which is which.
    #[default]
    Environment,
    /// An annotation that the pod's author can write.
    Pod,
    /// An annotation that only a device plugin or the engine's caller can write.
    Granted,
    /// A device node or mount that is already in the bundle: kubelet or the engine's caller put it there.
    Handed,
    /// A reservation by the node: its own agent wrote it, and the bundle shows a secret of the node.
    Node,
}
