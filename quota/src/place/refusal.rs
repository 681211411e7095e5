//! Why a request is not granted.

use gpushare_claims::{Cores, SelectorError};
use gpushare_inventory::DeviceMemory;

use crate::refusals::Reason;

/// Why a request is not granted, in words for the user who made the request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Not enough free memory now.
    #[error(
        "{asked} requested, {free} free on {place} ({total} in all); ask for less, or wait until another container ends \
         (`gpushare ps`)"
    )]
    Memory {
        /// The requested memory on each GPU.
        asked: String,
        /// The most that is free on one of the candidate GPUs.
        free: DeviceMemory,
        /// Index and UUID of that GPU.
        place: String,
        /// The memory that all leases together may have on that GPU.
        total: DeviceMemory,
    },
    /// More memory than any candidate GPU has.
    #[error("{asked} requested, but {place} has {total}; ask for at most that")]
    LargerThanGpu {
        /// The requested memory.
        asked: DeviceMemory,
        /// Index and UUID of the GPU that comes nearest.
        place: String,
        /// The largest share that one lease may have on it.
        total: DeviceMemory,
    },
    /// Not enough free compute now.
    #[error(
        "{asked} of compute requested, {free}% free on {place}; ask for less, or wait until another container ends \
         (`gpushare ps`)"
    )]
    Cores {
        /// The requested compute.
        asked: Cores,
        /// Free compute in percent.
        free: u64,
        /// Index and UUID of the GPU that comes nearest.
        place: String,
    },
    /// Windows would take all of a GPU's time while a container without a window uses it.
    #[error("{}", compute_reserve(*asked, *free, *held, *reserve, place))]
    ComputeReserve {
        /// The requested window, in percent; `None` for a lease that runs between windows.
        asked: Option<u64>,
        /// The largest window that could be granted, in percent.
        free: u64,
        /// Compute that windows already take, in percent.
        held: u64,
        /// Compute that windows must leave free, in percent.
        reserve: u8,
        /// Index and UUID of the GPU that comes nearest.
        place: String,
    },
    /// Another container with the latency policy already uses the GPU.
    #[error(
        "a container with compute-policy=latency is on {place} already, and there can be one on a GPU; ask for burst or \
         another GPU, or wait until that one ends (`gpushare ps`)"
    )]
    Latency {
        /// Index and UUID of the GPU that comes nearest.
        place: String,
    },
    /// A policy that needs a supervisor, for a container without one.
    #[error(
        "no supervisor holds the compute of this container, and compute-policy=latency needs one: set supervisor.compute, \
         and start the container anew"
    )]
    LatencyWithoutSupervisor,
    /// A policy that falls back to a share, for a container that has no share, or has a ceiling.
    #[error(
        "compute-policy=latency falls back to a share of compute, which this container does not have on each GPU, or has with \
         a ceiling: start it anew with cores and without another word's ceiling"
    )]
    LatencyUnbounded,
    /// The GPU is shared in another mode.
    #[error(
        "{place} is held in mode {held}, which mode {asked} does not meet on one GPU; ask for another GPU, or wait until those \
         containers end (`gpushare ps`)"
    )]
    Company {
        /// The requested mode.
        asked: &'static str,
        /// The mode of the leases on it.
        held: &'static str,
        /// Index and UUID of the GPU.
        place: String,
    },
    /// A lease of the card while its instances are in use, or the reverse.
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
        /// The number of GPUs and instances requested.
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
    /// The GPU has the maximum number of time-slice containers.
    #[error(
        "{most} containers, or pods whose containers share one lease, may take turns on a GPU (quota.replicas), and so many do on \
         {place}; wait until one ends (`gpushare ps`)"
    )]
    Replicas {
        /// The maximum number.
        most: u16,
        /// Index and UUID of the GPU.
        place: String,
    },
    /// The node does not allow time slices.
    #[error(
        "this node gives no time slices (quota.replicas = 0); ask for a share, or have the administrator change it"
    )]
    NoReplicas,
    /// The node does not lend host memory.
    #[error(
        "this node lends no host memory in place of a GPU's (quota.host_memory); leave host-memory out, or have the \
         administrator change it"
    )]
    NoHostMemory,
    /// Host memory for a container that uses another system's library.
    #[error(
        "host-memory is lent by gpushare's libraries, and another system's library holds this container \
         (request.interceptor); leave one of them out"
    )]
    ForeignHostMemory,
    /// Growing memory for a container that uses another system's library.
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
        /// The requested host memory.
        asked: DeviceMemory,
        /// The free host memory.
        free: DeviceMemory,
        /// The host memory that all leases together may have.
        total: DeviceMemory,
    },
    /// Whole GPUs were requested, and too few GPUs have no lease.
    #[error(
        "{wanted} whole GPU(s) requested, {empty} without a lease; wait until other containers end (`gpushare ps`)"
    )]
    NotEmpty {
        /// The number of GPUs requested.
        wanted: usize,
        /// How many GPUs have no lease.
        empty: usize,
    },
    /// Too few GPUs have room.
    #[error(
        "{wanted} GPUs requested, {fitting} of {candidates} can hold the share now; ask for fewer, or for less on each"
    )]
    Count {
        /// The number of GPUs requested.
        wanted: usize,
        /// How many can hold the share now.
        fitting: usize,
        /// How many could be chosen.
        candidates: usize,
    },
    /// Too few GPUs exist.
    #[error(
        "{wanted} GPUs requested, but this node has {here} that may be chosen (`gpushare devices`); ask for fewer"
    )]
    TooFewGpus {
        /// The number of GPUs requested.
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
        /// The models of the candidate GPUs.
        here: String,
    },
    /// An update changes a share on a GPU that the driver does not show, or shows only in part.
    #[error("{place} is out of service or gone (`gpushare devices`), so a share of it cannot be changed now")]
    OutOfService {
        /// UUID of the GPU.
        place: String,
    },
    /// A named GPU is cordoned, or all are.
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
    /// Returns the kind of refusal.
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

    /// Whether it could be granted once other containers end.
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
