//! Why a request is not granted.

use gpushare_claims::{Cores, SelectorError};
use gpushare_inventory::DeviceMemory;

use crate::refusals::Reason;

/// Why a request is not granted, in words for the user who asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Not enough memory free now.
    #[error(
        "{asked} requested, {free} free on {place} ({total} in all); ask for less, or wait until another container ends \
         (`gpushare ps`)"
    )]
    Memory {
        /// What was asked for on each GPU.
        asked: String,
        /// The most that is free on one GPU in question.
        free: DeviceMemory,
        /// That GPU's index and UUID.
        place: String,
        /// What all leases together may hold of that GPU.
        total: DeviceMemory,
    },
    /// More memory than any GPU in question has.
    #[error("{asked} requested, but {place} has {total}; ask for at most that")]
    LargerThanGpu {
        /// What was asked for.
        asked: DeviceMemory,
        /// Index and UUID of the GPU that comes nearest.
        place: String,
        /// What one lease may hold of it.
        total: DeviceMemory,
    },
    /// Not enough compute free now.
    #[error(
        "{asked} of compute requested, {free}% free on {place}; ask for less, or wait until another container ends \
         (`gpushare ps`)"
    )]
    Cores {
        /// What was asked for.
        asked: Cores,
        /// Free compute in percent.
        free: u64,
        /// Index and UUID of the GPU that comes nearest.
        place: String,
    },
    /// Windows would take all of a GPU's time while a container without one is on it.
    #[error("{}", compute_reserve(*asked, *free, *held, *reserve, place))]
    ComputeReserve {
        /// The window that was asked for, in percent; `None`: one that runs between the others'.
        asked: Option<u64>,
        /// The largest window that it could have, in percent.
        free: u64,
        /// Compute that windows take already, in percent.
        held: u64,
        /// Compute that they leave, in percent.
        reserve: u8,
        /// Index and UUID of the GPU that comes nearest.
        place: String,
    },
    /// Another container is answered before others already.
    #[error(
        "a container with compute-policy=latency is on {place} already, and there can be one on a GPU; ask for burst or \
         another GPU, or wait until that one ends (`gpushare ps`)"
    )]
    Latency {
        /// Index and UUID of the GPU that comes nearest.
        place: String,
    },
    /// A policy that supervisors alone hold, for a container whose time none holds.
    #[error(
        "no supervisor holds the compute of this container, and compute-policy=latency needs one: set supervisor.compute, \
         and start the container anew"
    )]
    LatencyWithoutSupervisor,
    /// A policy that falls back to a share, for a container that has none, or has a ceiling.
    #[error(
        "compute-policy=latency falls back to a share of compute, which this container does not have on each GPU, or has with \
         a ceiling: start it anew with cores and without another word's ceiling"
    )]
    LatencyUnbounded,
    /// The GPU is shared in another way.
    #[error(
        "{place} is held in mode {held}, which mode {asked} does not meet on one GPU; ask for another GPU, or wait until those \
         containers end (`gpushare ps`)"
    )]
    Company {
        /// The mode that was asked for.
        asked: &'static str,
        /// The mode of the leases on it.
        held: &'static str,
        /// Index and UUID of the GPU.
        place: String,
    },
    /// A lease of the card while its instances are held, or the other way.
    #[error(
        "{place} cannot be given beside what containers held of the same card before it was divided, or while it was; wait until \
         they end (`gpushare ps`)"
    )]
    Divided {
        /// The GPU or instance.
        place: String,
    },
    /// More GPUs and instances than a container can have.
    #[error("{wanted} GPUs or MIG instances requested, and a container gets at most 16; name fewer")]
    TooMany {
        /// How many are wanted.
        wanted: usize,
    },
    /// MPS on a MIG instance.
    #[error(
        "{place} is a MIG instance, for which gpushare runs no MPS control daemon; ask for a share of it, or for another GPU"
    )]
    MpsOnInstance {
        /// Position, size and UUID of the instance.
        place: String,
    },
    /// As many containers take turns on the GPU as may.
    #[error(
        "{most} containers, or pods whose containers share one lease, may take turns on a GPU (quota.replicas), and so many do on \
         {place}; wait until one ends (`gpushare ps`)"
    )]
    Replicas {
        /// How many may.
        most: u16,
        /// Index and UUID of the GPU.
        place: String,
    },
    /// No container may take turns on a GPU.
    #[error(
        "this node gives no time slices (quota.replicas = 0); ask for a share, or have the administrator change it"
    )]
    NoReplicas,
    /// No lease gets host memory.
    #[error(
        "this node lends no host memory in place of a GPU's (quota.host_memory); leave host-memory out, or have the \
         administrator change it"
    )]
    NoHostMemory,
    /// Host memory for a container that another system's library holds.
    #[error(
        "host-memory is lent by gpushare's libraries, and another system's library holds this container \
         (request.interceptor); leave one of them out"
    )]
    ForeignHostMemory,
    /// Memory that grows for a container that another system's library holds.
    #[error(
        "a memory-limit is held by gpushare's libraries, and another system's library holds this container \
         (request.interceptor); leave one of them out"
    )]
    ForeignMemoryLimit,
    /// Not enough host memory left.
    #[error(
        "{asked} of host memory requested, {free} of {total} free (quota.host_memory); ask for less, or wait until another \
         container ends (`gpushare ps`)"
    )]
    HostMemory {
        /// What was asked for.
        asked: DeviceMemory,
        /// What is left.
        free: DeviceMemory,
        /// What all leases together may hold.
        total: DeviceMemory,
    },
    /// Whole GPUs were asked for, and fewer than wanted have no lease.
    #[error(
        "{wanted} whole GPU(s) requested, {empty} without a lease; wait until other containers end (`gpushare ps`)"
    )]
    NotEmpty {
        /// How many are wanted.
        wanted: usize,
        /// How many GPUs have no lease.
        empty: usize,
    },
    /// Fewer GPUs fit than were asked for.
    #[error(
        "{wanted} GPUs requested, {fitting} of {candidates} can hold the share now; ask for fewer, or for less on each"
    )]
    Count {
        /// How many are wanted.
        wanted: usize,
        /// How many can hold the share now.
        fitting: usize,
        /// How many could be chosen.
        candidates: usize,
    },
    /// Fewer GPUs exist than were asked for.
    #[error(
        "{wanted} GPUs requested, but this node has {here} that may be chosen (`gpushare devices`); ask for fewer"
    )]
    TooFewGpus {
        /// How many are wanted.
        wanted: usize,
        /// How many may be chosen.
        here: usize,
    },
    /// A selector that names no GPU, or more than one.
    #[error(transparent)]
    Device(#[from] SelectorError),
    /// One list names the same GPU twice.
    #[error("{selector} names a GPU that the list names already; write each GPU once")]
    NamedTwice {
        /// The second name, as the user wrote it.
        selector: String,
    },
    /// A named GPU does not pass the model filter, or no GPU does.
    #[error("no GPU of this node fits the model filter {filter:?}; it has {here}")]
    Model {
        /// The patterns of the filter.
        filter: String,
        /// The models of the GPUs that could be chosen.
        here: String,
    },
    /// An update changes a share of a GPU that the driver does not show, or does not show wholly.
    #[error("{place} is out of service or gone (`gpushare devices`), so a share of it cannot be changed now")]
    OutOfService {
        /// UUID of the GPU.
        place: String,
    },
    /// The administrator gives no new share of a GPU that is named, or of any.
    #[error(
        "{place} is cordoned (quota.cordoned), so no new share is given of it; ask for another GPU, or have the administrator \
         run `gpushare uncordon`"
    )]
    Cordoned {
        /// Index and UUID of the GPU, or of all of them.
        place: String,
    },
    /// The inventory does not know how much memory the GPU has.
    #[error(
        "the memory size of {place} is unknown; run `gpushare inventory refresh` and see `gpushare doctor`"
    )]
    UnknownSize {
        /// Index and UUID of the GPU.
        place: String,
    },
}

impl Refusal {
    /// Its kind.
    pub fn reason(&self) -> Reason {
        match self {
            Self::Memory { .. }
            | Self::Cores { .. }
            | Self::ComputeReserve { .. }
            | Self::Latency { .. }
            | Self::Company { .. }
            | Self::Divided { .. }
            | Self::Replicas { .. }
            | Self::HostMemory { .. }
            | Self::NotEmpty { .. }
            | Self::Count { .. } => Reason::Room,
            Self::LatencyWithoutSupervisor
            | Self::LatencyUnbounded
            | Self::NoReplicas
            | Self::NoHostMemory
            | Self::Cordoned { .. } => Reason::Rules,
            Self::OutOfService { .. } | Self::UnknownSize { .. } => Reason::Node,
            Self::LargerThanGpu { .. }
            | Self::TooMany { .. }
            | Self::MpsOnInstance { .. }
            | Self::ForeignHostMemory
            | Self::ForeignMemoryLimit
            | Self::TooFewGpus { .. }
            | Self::Device(_)
            | Self::NamedTwice { .. }
            | Self::Model { .. } => Reason::Request,
        }
    }

    /// Whether it would be granted once other containers end.
    pub fn is_for_room(&self) -> bool {
        self.reason() == Reason::Room && !matches!(self, Self::HostMemory { .. })
    }
}

fn compute_reserve(asked: Option<u64>, free: u64, held: u64, reserve: u8, place: &str) -> String {
    match asked {
        Some(asked) => format!(
            "a window of {asked}% of compute requested, {free}% free for windows on {place}, where {reserve}% \
             are kept (quota.compute_reserve) for containers without one; ask for less or for \
             compute-policy=burst, or wait until another container ends (`gpushare ps`)"
        ),
        None => format!(
            "windows of other containers take {held}% of {place}, which leaves less than {reserve}% \
             (quota.compute_reserve) for one without; ask for cores and the policy fixed, or for another GPU, \
             or wait until another container ends (`gpushare ps`)"
        ),
    }
}
