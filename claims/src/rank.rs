//! How far a word of a bundle is believed, which is decided by who can write it.

/// Who can write a word; a later rank is believed more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rank {
    /// A variable: entries of the image, the pod and the plugin stand in one list.
    #[default]
    Environment,
    /// An annotation that the pod's author can write.
    Pod,
    /// An annotation that only a device plugin can write, or the engine's caller.
    Granted,
    /// A device node or mount that is in the bundle already: kubelet or the engine's caller put it there.
    Handed,
}
