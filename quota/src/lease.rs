//! Leases as values: the resources that containers hold.

use std::collections::BTreeMap;
use std::fmt;
use std::iter;
use std::time::{SystemTime, UNIX_EPOCH};

use gpushare_claims::{ComputePolicy, Cores, Priority, Request, ReservedShare};
use gpushare_inventory::{DeviceMemory, GpuUuid};
use serde::{Deserialize, Serialize};

use crate::called::Called;
use crate::enforcement::{Enforcement, HeldBy};
use crate::holder::Holder;
use crate::pod::PodContainer;

/// Identifies a container that may hold a lease. A container id is unique only below its runtime root.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeaseKey {
    /// The low-level runtime's state folder, as the engine named it; empty if the engine named none.
    pub root: String,
    /// The container's id.
    pub container: String,
}

/// The rejected container id, cut to its first 64 characters.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("container id {0:?} must be 1 to 255 of the characters A-Z a-z 0-9 _ . + -")]
pub struct BadContainerId(String);

impl LeaseKey {
    /// The root in keys of hook-only mode. A hook's state has no runtime root, and no real root is a relative
    /// path.
    pub const HOOK_ONLY: &str = "hook-only";
    /// The root in keys of resource claims. A claim is not a container, and no real root is a relative path.
    pub const CLAIM: &str = "claim";

    /// Returns the key of a resource claim with this UID.
    ///
    /// # Errors
    /// The same as for [`LeaseKey::new`].
    pub fn of_claim(uid: &str) -> Result<Self, BadContainerId> {
        Self::new(Self::CLAIM.to_owned(), uid.to_owned())
    }

    /// Returns the key of a container. Checks the id before any path or argument is built from it.
    ///
    /// # Errors
    /// When the id is empty, longer than 255 bytes, begins with a dot, or contains a character outside of
    /// runc's own set.
    pub fn new(root: String, container: String) -> Result<Self, BadContainerId> {
        let plain = |c: char| c.is_ascii_alphanumeric() || "_.+-".contains(c);
        let length = 1..=255;
        let sound = length.contains(&container.len()) && container.chars().all(plain);
        if !sound || container.starts_with('.') {
            return Err(BadContainerId(container.chars().take(64).collect()));
        }
        Ok(Self { root, container })
    }
}

impl fmt::Display for LeaseKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.container)
    }
}

/// A share of one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Grant {
    /// UUID of the GPU, or of a MIG instance.
    pub gpu: GpuUuid,
    /// UUID of the GPU whose instance `gpu` is; `None` for a whole GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub card: Option<GpuUuid>,
    /// Memory that the container may use on it. Without a limit, this is the memory that the container says
    /// it needs, or 0 if it says nothing.
    pub memory: DeviceMemory,
    /// Compute share on it; `None` means no limit.
    pub cores: Option<Cores>,
}

impl From<&ReservedShare> for Grant {
    fn from(share: &ReservedShare) -> Self {
        Self { gpu: share.gpu, card: None, memory: share.memory, cores: share.cores }
    }
}

/// The bounds of memory that grows and shrinks, on each GPU of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Elastic {
    /// The guaranteed memory: the lease never has less.
    pub least: DeviceMemory,
    /// The limit to which it may grow while the GPU has free memory.
    pub most: DeviceMemory,
}

impl Elastic {
    /// The bounds in a request.
    fn of(request: &Request) -> Option<Self> {
        Some(Self { least: request.memory.bytes()?, most: request.memory_limit? })
    }
}

/// Progress of the creation of a container with a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LeaseState {
    /// Granted; the process that holds it is creating the container.
    Reserved,
    /// The container's init holds it.
    Active,
}

impl LeaseState {
    /// The name in the store and in listings.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Reserved => "reserved",
            Self::Active => "active",
        }
    }
}

/// A container or a resource claim that holds a lease, alone or with others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Member {
    /// Identifies the container.
    pub key: LeaseKey,
    /// Whether the container is still being created.
    pub state: LeaseState,
    /// The process whose end proves that the container no longer uses the lease.
    pub holder: Holder,
    /// The container's name in a cluster; `None` outside of one. Names are for display and search, never an
    /// identity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<PodContainer>,
    /// Its names from the engine.
    #[serde(default, skip_serializing_if = "Called::is_nothing")]
    pub called: Called,
    /// Whether the driver limits its cgroup, too. The driver's limit then follows the lease.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_driver_limit: bool,
}

impl Member {
    /// Returns a container that `holder` is creating.
    pub fn reserved(key: LeaseKey, holder: Holder) -> Self {
        Self {
            key,
            state: LeaseState::Reserved,
            holder,
            name: None,
            called: Called::default(),
            has_driver_limit: false,
        }
    }

    /// Returns the same container with these names.
    #[must_use]
    pub fn named(self, name: Option<PodContainer>, called: Called) -> Self {
        Self { name, called, ..self }
    }

    /// The name to display: its name in a cluster, else its name in the engine, else its id. The first 12 of
    /// an engine's 64 digits are enough.
    pub fn title(&self) -> String {
        let id = &self.key.container;
        match (&self.name, &self.called.name) {
            (Some(pod), _) => pod.to_string(),
            (None, Some(name)) => name.clone(),
            (None, None) => id.get(..12).filter(|_| id.len() == 64).unwrap_or(id).to_owned(),
        }
    }

    /// Whether it is the resource claim with this UID, not a container.
    pub(crate) fn is_claim(&self, uid: &str) -> bool {
        self.key.root == LeaseKey::CLAIM && self.key.container == uid
    }
}

/// The grants to one container, or to several of one pod together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lease {
    /// Unique within the store and never reused. It names the lease's region folder.
    pub id: i64,
    /// The container that was queried; in a list of leases, the one that has held it longest.
    pub member: Member,
    /// The other members, oldest first.
    pub others: Vec<Member>,
    /// One grant per GPU, in the order in which the container numbers them.
    pub grants: Vec<Grant>,
    /// The component that enforces the limits of its containers.
    pub enforcement: Enforcement,
    /// How the compute share is enforced.
    pub compute_policy: ComputePolicy,
    /// Upper bound on the compute that [`ComputePolicy::Burst`] may use of each GPU.
    pub ceiling: Cores,
    /// The bounds within which the memory of each grant grows and shrinks while the containers run; `None` if
    /// memory is fixed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub elastic: Option<Elastic>,
    /// Host memory that may be used instead of GPU memory, over all GPUs.
    #[serde(default, skip_serializing_if = "is_none")]
    pub host_memory: DeviceMemory,
    /// 0 (low) to 9.
    pub priority: Priority,
    /// Seconds since 1970, for display.
    pub granted_at: u64,
    /// The annotations, by key, of the last change while its containers ran; empty before. Code that applies
    /// annotations compares them with the current ones.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub restated: BTreeMap<String, String>,
    /// The peak memory of each grant, if `gpushare update` or a cluster reduced it since; 0 for a grant that
    /// still has its peak, and empty if all do. Containers keep memory that they allocated before.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shrunk_from: Vec<DeviceMemory>,
}

impl Lease {
    /// Describes the grants in words, for display.
    pub fn summary(&self) -> String {
        summary(self)
    }

    /// The peak memory of grant `line` before it shrank; 0 if it did not shrink.
    pub fn most_memory(&self, line: usize) -> DeviceMemory {
        self.shrunk_from.get(line).copied().unwrap_or(DeviceMemory::ZERO)
    }

    /// The granted memory over all GPUs, in MiB.
    pub fn mebibytes(&self) -> u64 {
        self.grants.iter().map(|grant| grant.memory.bytes() >> 20).sum()
    }

    /// Returns a lease for `request`, without an id and a time.
    pub fn new(member: Member, request: &Request, grants: Vec<Grant>) -> Self {
        Self {
            id: 0,
            member,
            others: Vec::new(),
            grants,
            enforcement: Enforcement::of(request),
            compute_policy: request.compute_policy,
            ceiling: request.burst.unwrap_or(Cores::ALL),
            elastic: Elastic::of(request),
            host_memory: request.host_memory,
            priority: request.priority,
            granted_at: 0,
            restated: BTreeMap::new(),
            shrunk_from: Vec::new(),
        }
    }

    /// Returns the lease with the compute policy that can be enforced: only a supervisor can enforce the
    /// latency policy.
    #[must_use]
    pub(crate) fn with_held_policy(mut self) -> Self {
        if self.compute_policy == ComputePolicy::Latency && self.enforcement != Enforcement::Scheduled {
            self.compute_policy = ComputePolicy::Burst;
        }
        self
    }

    /// Returns the enforcement for a container of the lease with this request. A container that joins the
    /// lease of another one, as an ephemeral container joins its target's, gets no more of the GPU than the
    /// lease gives, regardless of its request.
    pub fn enforcement_for(&self, request: &Request) -> Enforcement {
        self.enforcement.joined_by(request)
    }

    /// The component that enforces the memory limit of its containers.
    pub fn held_by(&self) -> HeldBy {
        match self.enforcement.terms().held_by {
            HeldBy::Library if self.members().all(|member| member.has_driver_limit) => HeldBy::Driver,
            held => held,
        }
    }

    /// The component that enforces the compute share of its containers; for MPS, the driver's MPS server.
    pub fn compute_held_by(&self) -> HeldBy {
        match self.enforcement {
            Enforcement::Scheduled => HeldBy::Supervisor,
            _ if self.grants.iter().all(|grant| grant.cores.is_none()) => HeldBy::Nobody,
            Enforcement::Mps => HeldBy::Driver,
            Enforcement::TimeSliced | Enforcement::WholeGpu => HeldBy::Nobody,
            _ if self.compute_policy == ComputePolicy::None => HeldBy::Nobody,
            Enforcement::Intercepted | Enforcement::Supervised | Enforcement::Foreign => HeldBy::Library,
        }
    }

    /// Whether a process that did not load our libraries bypasses a limit: the memory limit if it depends on
    /// their usage files, or the compute limit if there is one.
    pub fn needs_libraries(&self) -> bool {
        let terms = self.enforcement.terms();
        let has_cores = || self.grants.iter().any(|grant| grant.cores.is_some());
        terms.is_held_by_books || (terms.is_intercepted && has_cores())
    }

    /// Logs that a container released it.
    pub(crate) fn log_release(&self, left: Release, reason: ReleaseReason) {
        let (container, reason) = (&self.member.key.container, reason.name());
        let pod = self.member.name.as_ref().map(tracing::field::display);
        match left {
            Release::Nothing => {}
            Release::Left => {
                tracing::info!(%container, pod, reason, "lease left to the pod's other containers")
            }
            Release::Ended => tracing::info!(%container, pod, reason, "lease released"),
        }
    }

    /// Returns the lease without the container `key`; `None` if no other member is left.
    pub(crate) fn without(&self, key: &LeaseKey) -> Option<Self> {
        let mut left = self.members().filter(|member| member.key != *key).cloned();
        let member = left.next()?;
        Some(Self { member, others: left.collect(), ..self.clone() })
    }

    /// Returns its member with this key.
    pub(crate) fn member_mut(&mut self, key: &LeaseKey) -> Option<&mut Member> {
        iter::once(&mut self.member).chain(&mut self.others).find(|member| member.key == *key)
    }

    /// Returns all members.
    pub fn members(&self) -> impl Iterator<Item = &Member> {
        iter::once(&self.member).chain(&self.others)
    }

    /// Whether a container holds it, not only the resource claim that it was made for.
    pub fn has_containers(&self) -> bool {
        self.members().any(|member| !member.holder.is_agent())
    }

    /// [`LeaseState::Active`] once one of its containers is active.
    pub fn state(&self) -> LeaseState {
        let active = self.members().any(|member| member.state == LeaseState::Active);
        if active { LeaseState::Active } else { LeaseState::Reserved }
    }

    /// Whether all its containers are proved gone.
    pub fn is_gone(&self) -> bool {
        self.members().all(|member| member.holder.is_gone())
    }

    /// Makes the first member for which `wanted` returns true [`Lease::member`]; `None` if there is none.
    #[must_use]
    pub fn asked_by(mut self, wanted: impl Fn(&LeaseKey) -> bool) -> Option<Self> {
        if wanted(&self.member.key) {
            return Some(self);
        }
        let position = self.others.iter().position(|member| wanted(&member.key))?;
        let found = self.others.remove(position);
        self.others.insert(0, std::mem::replace(&mut self.member, found));
        Some(self)
    }
}

/// The effect on a lease when a container released it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// The container did not hold such a lease.
    Nothing,
    /// Other containers of the pod still hold the lease.
    Left,
    /// The lease ended. Its region must be removed now.
    Ended,
}

/// Why a lease ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleaseReason {
    /// Released by the poststop hook or `delete`.
    Ended,
    /// `create` failed.
    Failed,
    /// The sweep found its holder gone.
    Swept,
    /// The node was restarted.
    Reboot,
    /// The administrator forced its release.
    Forced,
}

impl ReleaseReason {
    /// All reasons.
    pub const ALL: [Self; 5] = [Self::Ended, Self::Failed, Self::Swept, Self::Reboot, Self::Forced];

    /// The name in the store and in listings.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ended => "ended",
            Self::Failed => "failed",
            Self::Swept => "swept",
            Self::Reboot => "reboot",
            Self::Forced => "forced",
        }
    }
}

fn is_none(memory: &DeviceMemory) -> bool {
    *memory == DeviceMemory::ZERO
}

/// Describes the grants of a lease in words, for display.
pub(crate) fn summary(lease: &Lease) -> String {
    let growing = lease.elastic.map(|bounds| format!("growing to {}", bounds.most));
    let grants = lease.grants.iter().map(|grant| match grant.cores {
        _ if lease.enforcement == Enforcement::TimeSliced => format!("{}: time slices", grant.gpu),
        Some(cores) => format!("{}: {}, {cores}", grant.gpu, grant.memory),
        None => format!("{}: {}", grant.gpu, grant.memory),
    });
    let host = (!is_none(&lease.host_memory)).then(|| format!("{} of host memory", lease.host_memory));
    grants.chain(growing).chain(host).collect::<Vec<_>>().join("; ")
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// A lease that has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PastLease {
    /// The last container that held it.
    pub key: LeaseKey,
    /// Ids of the other containers of its pod that most recently held it, at most 8.
    pub others: Vec<String>,
    /// GPUs and memory as text, for display.
    pub grants: String,
    /// Seconds since 1970.
    pub granted_at: u64,
    /// Seconds since 1970.
    pub released_at: u64,
    /// Why it ended; see [`ReleaseReason::name`].
    pub reason: String,
    /// The cluster name of the last container that held it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<PodContainer>,
    /// Its names from the engine.
    #[serde(default, skip_serializing_if = "Called::is_nothing")]
    pub called: Called,
    /// The grants on each GPU.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shares: Vec<Grant>,
    /// The usage of its containers; `None` if it is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used: Option<Used>,
}

/// Usage of the containers of a lease, over all of its GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Used {
    /// GPU time that the meter measured, in nanoseconds; `None` if no meter ran.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_nanoseconds: Option<u64>,
    /// Total time for which launches were delayed for the compute share, in nanoseconds, over all threads.
    /// From the container's own usage files.
    pub throttled_nanoseconds: u64,
    /// Allocations that the limit refused. From the container's own usage files.
    pub refused: u64,
    /// Peak memory use that the meter saw, in bytes; `None` if no meter ran.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_bytes: Option<u64>,
    /// Average memory use, in bytes; `None` if no meter ran.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mean_bytes: Option<u64>,
}

impl PastLease {
    /// Converts `lease`, which ends now. `former` are the ids of containers that left it earlier, oldest
    /// first.
    pub(crate) fn of(lease: &Lease, former: &[String], reason: ReleaseReason) -> Self {
        let others = lease.others.iter().map(|member| &member.key.container);
        Self {
            key: lease.member.key.clone(),
            others: last(former.iter().chain(others)),
            grants: summary(lease),
            granted_at: lease.granted_at,
            released_at: now(),
            reason: reason.name().to_owned(),
            name: lease.member.name.clone(),
            called: lease.member.called.clone(),
            shares: lease.grants.clone(),
            used: None,
        }
    }
}

/// Limit on the former containers of a lease that the history names. Without a limit, a container that fails
/// and restarts repeatedly, next to another one of its pod, would add an id each time.
const REMEMBERED: usize = 8;

/// The last of these ids, at most [`REMEMBERED`].
pub(crate) fn last<'a>(ids: impl Iterator<Item = &'a String>) -> Vec<String> {
    let mut ids: Vec<String> = ids.cloned().collect();
    ids.split_off(ids.len().saturating_sub(REMEMBERED))
}
