//! Computes the new state of a living lease from changed figures. Pure functions, without I/O.

use std::collections::BTreeMap;

use gpushare_claims::{ComputePolicy, Cores, MemoryRequest, Priority};
use gpushare_inventory::{DeviceMemory, Gpu, GpuUuid};

use crate::lease::{Grant, Lease};
use crate::place::{
    Admission, GpuLoad, Refusal, Runs, is_before_others, latency_misfit, reserve_misfit, resize,
};

/// A share of a GPU's compute, or no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compute {
    /// At most this much, reserved for this lease.
    AtMost(Cores),
    /// No limit, and no compute of the GPU is reserved.
    Unlimited,
}

impl From<Option<Cores>> for Compute {
    fn from(cores: Option<Cores>) -> Self {
        cores.map_or(Self::Unlimited, Self::AtMost)
    }
}

impl Compute {
    /// Converts to the form in a grant: `None` means no limit.
    pub(crate) fn cores(self) -> Option<Cores> {
        match self {
            Self::AtMost(cores) => Some(cores),
            Self::Unlimited => None,
        }
    }
}

/// Changes to a lease; `None` leaves a value unchanged.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// Memory on each GPU, or on the one named.
    pub memory: Option<MemoryRequest>,
    /// Compute on each GPU, or on the one named.
    pub cores: Option<Compute>,
    /// How the compute share is enforced, on all GPUs.
    pub compute_policy: Option<ComputePolicy>,
    /// 0 (low) to 9, on all GPUs.
    pub priority: Option<Priority>,
    /// The only GPU whose memory and compute change.
    pub gpu: Option<GpuUuid>,
    /// The annotations that requested the change, for [`Lease::restated`].
    pub restated: Option<BTreeMap<String, String>>,
    /// The request of a restarted container after the change, in the form of [`crate::words`], if containers
    /// of a pod share the lease.
    pub pod_request: Option<String>,
}

/// Applies the changes to the lease in order, if the node has room for the growth. `load` is the sum of all
/// leases on a GPU, including this one.
///
/// # Errors
/// The same as for a new lease: the refusal names the requested amount and the amount that other leases leave
/// free.
pub(crate) fn changed(
    lease: &Lease,
    changes: &[Change],
    gpus: &[Gpu],
    load: impl Fn(GpuUuid) -> GpuLoad,
    rules: &Admission,
) -> Result<Lease, Refusal> {
    let stated = changes.iter().rev().find_map(|one| one.compute_policy);
    let policy = stated.unwrap_or(lease.compute_policy);
    let is_before = is_before_others(lease.enforcement, policy);
    // A claim's lease keeps the requested policy, regardless of how its containers are enforced.
    if stated == Some(ComputePolicy::Latency) && !is_before {
        return Err(Refusal::LatencyWithoutSupervisor);
    }
    if is_before && (lease.ceiling < Cores::ALL || lease.grants.iter().any(|grant| grant.cores.is_none())) {
        return Err(Refusal::LatencyUnbounded);
    }
    let grants = lease.grants.iter().map(|old| {
        let is_meant = |change: &&Change| {
            let is_figure = change.memory.is_some() || change.cores.is_some();
            is_figure && change.gpu.is_none_or(|wanted| wanted == old.gpu)
        };
        let mut others = load(old.gpu);
        others.remove(old, lease.enforcement, lease.compute_policy);
        let found = gpus.iter().find(|gpu| gpu.uuid == old.gpu);
        let new = changes.iter().filter(is_meant).try_fold(old.clone(), |grant, change| {
            let gpu = found.ok_or_else(|| Refusal::OutOfService { place: grant.gpu.to_string() })?;
            resize(&grant, change.memory, change.cores, gpu, others, rules)
        })?;
        let runs = |policy, grant: &Grant| Runs::of(lease.enforcement, policy, grant.cores);
        match (runs(lease.compute_policy, old), runs(policy, &new)) {
            // A window may shrink even on a node that has granted too much.
            (Some(Runs::InWindow(before)), Some(Runs::InWindow(now))) if now <= before => Ok(new),
            (before, Some(now)) if before != Some(now) => {
                let misfit = found.and_then(|gpu| reserve_misfit(now, others, rules, gpu));
                misfit.map_or(Ok(new), Err)
            }
            _ => Ok(new),
        }
        .and_then(|new| found.and_then(|gpu| latency_misfit(is_before, others, gpu)).map_or(Ok(new), Err))
    });
    let grants: Vec<Grant> = grants.collect::<Result<_, _>>()?;
    Ok(Lease {
        shrunk_from: shrunk_from(lease, &grants),
        grants,
        compute_policy: policy,
        priority: changes.iter().rev().find_map(|one| one.priority).unwrap_or(lease.priority),
        restated: changes
            .iter()
            .rev()
            .find_map(|one| one.restated.clone())
            .unwrap_or_else(|| lease.restated.clone()),
        ..lease.clone()
    })
}

/// Returns the peak memory of each grant, where the new grant is smaller than that.
fn shrunk_from(lease: &Lease, grants: &[Grant]) -> Vec<DeviceMemory> {
    let most = |line: usize, now: &Grant| {
        let before = lease.grants.get(line).map_or(DeviceMemory::ZERO, |old| old.memory);
        let most = lease.most_memory(line).max(before);
        if most > now.memory { most } else { DeviceMemory::ZERO }
    };
    let all: Vec<DeviceMemory> = grants.iter().enumerate().map(|(line, now)| most(line, now)).collect();
    if all.iter().all(|most| *most == DeviceMemory::ZERO) { Vec::new() } else { all }
}

/// Returns a lease that grants no more than either of two states of one lease. It is safe in the container's
/// file while the store has either state.
pub(crate) fn narrower(one: &Lease, other: &Lease) -> Lease {
    let narrow = |(a, b): (&Grant, &Grant)| Grant {
        gpu: a.gpu,
        card: a.card,
        memory: a.memory.min(b.memory),
        cores: cores(one, a).into_iter().chain(cores(other, b)).min(),
    };
    Lease {
        grants: one.grants.iter().zip(&other.grants).map(narrow).collect(),
        compute_policy: match (one.compute_policy, other.compute_policy) {
            (ComputePolicy::None, policy) | (policy, ComputePolicy::None) => policy,
            (ComputePolicy::Fixed, _) | (_, ComputePolicy::Fixed) => ComputePolicy::Fixed,
            (ComputePolicy::Latency, ComputePolicy::Latency) => ComputePolicy::Latency,
            _ => ComputePolicy::Burst,
        },
        ..other.clone()
    }
}

/// The compute limit of a grant; `None` means no limit.
fn cores(lease: &Lease, grant: &Grant) -> Option<Cores> {
    grant.cores.filter(|_| lease.compute_policy != ComputePolicy::None)
}

#[cfg(test)]
mod tests {
    use crate::enforcement::{Company, Enforcement};
    use gpushare_inventory::DeviceMemory;

    use super::*;
    use crate::place::tests::gpu;
    use crate::{Holder, LeaseKey, LeaseState, Member};

    const GIB: u64 = 1 << 30;

    fn gib(count: u64) -> DeviceMemory {
        DeviceMemory::from_bytes(count * GIB)
    }

    fn lease(memory: u64, cores: Option<u8>, compute_policy: ComputePolicy) -> Lease {
        let cores = cores.and_then(Cores::new);
        Lease {
            id: 1,
            member: Member {
                key: LeaseKey { root: String::new(), container: "a".into() },
                state: LeaseState::Active,
                holder: Holder::this_process().unwrap(),
                name: None,
                called: crate::called::Called::default(),
                has_driver_limit: false,
            },
            others: Vec::new(),
            grants: (0..2)
                .map(|index| Grant { gpu: gpu(index, 80).uuid, card: None, memory: gib(memory), cores })
                .collect(),
            enforcement: Enforcement::Intercepted,
            compute_policy,
            ceiling: Cores::ALL,
            elastic: None,
            host_memory: DeviceMemory::ZERO,
            priority: Priority::default(),
            granted_at: 0,
            restated: std::collections::BTreeMap::new(),
            shrunk_from: Vec::new(),
        }
    }

    /// Changes a lease of 20 GiB and 30 % on each of two GPUs of 80 GiB. Other leases have `others`, in GiB
    /// and percent, on the first GPU.
    fn outcome(changes: &[Change], others: (u64, u64)) -> Result<Vec<(u64, Option<u8>)>, String> {
        let load = |uuid| {
            let others = if uuid == gpu(0, 80).uuid { others } else { (0, 0) };
            GpuLoad {
                memory: gib(20 + others.0),
                cores: 30 + others.1,
                leases: 2,
                company: Some(Company::Shares),
                of_instances: 0,
                ..GpuLoad::default()
            }
        };
        let gpus = [gpu(0, 80), gpu(1, 80)];
        let new =
            changed(&lease(20, Some(30), ComputePolicy::Fixed), changes, &gpus, load, &Admission::default());
        let figures = |grant: &Grant| (grant.memory.bytes() / GIB, grant.cores.map(Cores::percent));
        new.map(|new| new.grants.iter().map(figures).collect()).map_err(|refusal| refusal.to_string())
    }

    #[test]
    fn a_lease_grows_into_what_the_others_leave_and_no_further() {
        let memory = |text: &str| Change { memory: Some(text.parse().unwrap()), ..Change::default() };
        let at_most = |percent| Cores::new(percent).map(Compute::AtMost);
        let cores = |percent| Change { cores: at_most(percent), ..Change::default() };
        let unlimited = Change { cores: Some(Compute::Unlimited), ..Change::default() };
        let first = Change { gpu: Some(gpu(0, 80).uuid), ..memory("50GiB") };
        for (change, others, want) in [
            (memory("50GiB"), (30, 0), Ok([(50, Some(30)), (50, Some(30))])),
            (memory("51GiB"), (30, 0), Err("51 GiB requested, 50 GiB free on GPU 0")),
            (memory("81GiB"), (0, 0), Err("has 80 GiB")),
            (memory("25%"), (60, 70), Ok([(20, Some(30)), (20, Some(30))])),
            (first, (0, 0), Ok([(50, Some(30)), (20, Some(30))])),
            (cores(60), (0, 40), Ok([(20, Some(60)), (20, Some(60))])),
            (cores(61), (0, 40), Err("60% free on GPU 0")),
            (memory("1GiB"), (99, 99), Ok([(1, Some(30)), (1, Some(30))])),
            (cores(1), (99, 99), Ok([(20, Some(1)), (20, Some(1))])),
            (unlimited, (99, 99), Ok([(20, None), (20, None)])),
            (Change::default(), (99, 99), Ok([(20, Some(30)), (20, Some(30))])),
        ] {
            let new = outcome(std::slice::from_ref(&change), others);
            match want {
                Ok(want) => assert_eq!(new.as_deref(), Ok(&want[..]), "{change:?} beside {others:?}"),
                Err(part) => {
                    let text = new.expect_err(part);
                    assert!(text.contains(part), "{change:?} beside {others:?}: {text}");
                }
            }
        }
    }

    #[test]
    fn a_window_grows_into_what_the_reserve_leaves_and_shrinks_in_any_case() {
        let scheduled = |policy| Lease { enforcement: Enforcement::Scheduled, ..lease(20, Some(30), policy) };
        let cores = |percent| Change { cores: Cores::new(percent).map(Compute::AtMost), ..Change::default() };
        let policy = |policy| Change { compute_policy: Some(policy), ..Change::default() };
        for (lease, change, (windows, between), is_granted) in [
            (scheduled(ComputePolicy::Fixed), cores(35), (60, 1), true),
            (scheduled(ComputePolicy::Fixed), cores(36), (60, 1), false),
            (scheduled(ComputePolicy::Fixed), cores(29), (70, 1), true),
            (scheduled(ComputePolicy::Fixed), policy(ComputePolicy::Burst), (70, 0), true),
            (scheduled(ComputePolicy::Fixed), policy(ComputePolicy::Burst), (96, 0), false),
            (scheduled(ComputePolicy::Burst), policy(ComputePolicy::Fixed), (66, 1), false),
            (scheduled(ComputePolicy::Burst), policy(ComputePolicy::Fixed), (66, 0), true),
        ] {
            // The load of all leases, including this one.
            let load = |_| {
                let mut all = GpuLoad { windows, between, cores: windows, leases: 1, ..GpuLoad::default() };
                all.add(&lease.grants[0], lease.enforcement, lease.compute_policy);
                all
            };
            let gpus = [gpu(0, 80), gpu(1, 80)];
            let new = changed(&lease, std::slice::from_ref(&change), &gpus, load, &Admission::default());
            assert_eq!(new.is_ok(), is_granted, "{change:?} beside {windows} and {between}: {new:?}");
        }
    }

    #[test]
    fn one_lease_of_a_gpu_is_answered_before_others_and_a_supervisor_holds_it() {
        let change = Change { compute_policy: Some(ComputePolicy::Latency), ..Change::default() };
        let gpus = [gpu(0, 80), gpu(1, 80)];
        for (enforcement, latency, want) in [
            (Enforcement::Scheduled, 0, None),
            (Enforcement::Scheduled, 1, Some("is on GPU 0")),
            (Enforcement::Supervised, 0, Some("no supervisor holds the compute")),
        ] {
            let lease = Lease { enforcement, ..lease(20, Some(30), ComputePolicy::Burst) };
            let load = |_| {
                let mut all = GpuLoad { latency, leases: latency, ..GpuLoad::default() };
                all.add(&lease.grants[0], lease.enforcement, lease.compute_policy);
                all
            };
            let new = changed(&lease, std::slice::from_ref(&change), &gpus, load, &Admission::default());
            let told = new.err().map(|refusal| refusal.to_string());
            assert_eq!(told.is_some(), want.is_some(), "{enforcement:?}, {latency}: {told:?}");
            assert!(want.is_none_or(|want| told.unwrap_or_default().contains(want)));
        }
        // A lease that already has the latency policy may keep it and grow.
        let lease =
            Lease { enforcement: Enforcement::Scheduled, ..lease(20, Some(30), ComputePolicy::Latency) };
        let load = |_| {
            let mut all = GpuLoad::default();
            all.add(&lease.grants[0], lease.enforcement, lease.compute_policy);
            all
        };
        let larger = Change { cores: Cores::new(40).map(Compute::AtMost), ..Change::default() };
        assert!(changed(&lease, &[larger], &gpus, load, &Admission::default()).is_ok());
    }

    #[test]
    fn several_changes_are_one() {
        let of = |index, size: &str, percent| Change {
            memory: Some(size.parse().unwrap()),
            cores: Cores::new(percent).map(Compute::AtMost),
            gpu: Some(gpu(index, 80).uuid),
            ..Change::default()
        };
        let both = [of(0, "50GiB", 10), of(1, "5GiB", 90)];
        assert_eq!(outcome(&both, (30, 0)).as_deref(), Ok(&[(50, Some(10)), (5, Some(90))][..]));
        assert!(outcome(&both, (31, 0)).is_err(), "none of them without the other");
        // A later change of the same GPU wins, and the lease's own share never counts against it.
        let again = [of(0, "60GiB", 60), of(0, "50GiB", 70)];
        assert_eq!(outcome(&again, (20, 30)).as_deref(), Ok(&[(50, Some(70)), (20, Some(30))][..]));
    }

    #[test]
    fn between_two_states_a_container_has_no_more_than_either() {
        use ComputePolicy::{Burst, Fixed, None as NoLimit};
        for (one, other, want) in [
            ((4, Some(30), Fixed), (6, Some(50), Fixed), (4, Some(30), Fixed)),
            ((4, Some(50), Burst), (6, Some(30), Fixed), (4, Some(30), Fixed)),
            ((4, Some(50), NoLimit), (4, Some(30), Burst), (4, Some(30), Burst)),
            ((9, Some(20), NoLimit), (4, Some(30), Burst), (4, Some(30), Burst)),
            ((4, None, Fixed), (6, Some(30), Burst), (4, Some(30), Fixed)),
            ((4, None, Burst), (4, None, Burst), (4, None, Burst)),
            ((4, Some(10), NoLimit), (4, Some(10), NoLimit), (4, None, NoLimit)),
        ] {
            let state = |(memory, cores, policy)| lease(memory, cores, policy);
            for (a, b) in [(one, other), (other, one)] {
                let got = narrower(&state(a), &state(b));
                assert_eq!((got.grants, got.compute_policy), (state(want).grants, want.2), "{a:?}, {b:?}");
            }
        }
    }
}
