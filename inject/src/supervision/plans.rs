//! How the leases of a node share the time of its GPUs: the places of their windows.
//!
//! A lease keeps its place while it has its size. One that comes takes the first place that is free, the same
//! on all of its GPUs where that can be, so that their programs do not wait for each other.

use gpushare_inventory::GpuUuid;
use gpushare_quota::{Grant, Lease};
use gpushare_request::ComputePolicy;
use gpushare_schedule::Policy;
use gpushare_schedule::frame::{Frame, Piece, Place};
use gpushare_supervisor::plan::Plan;

/// One line of a lease, as it is planned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned {
    /// The lease.
    pub lease: i64,
    /// Its line for this GPU.
    pub line: usize,
    /// The GPU.
    pub gpu: GpuUuid,
    /// How it shares that.
    pub plan: Plan,
}

/// What becomes of a node's plans when a lease comes, or changes.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Of its own lines, in their order.
    pub own: Vec<Plan>,
    /// Of other leases, which had to make room.
    pub others: Vec<Planned>,
}

/// Plans `lease`, which has these plans so far, beside the others of the node.
pub fn plan(lease: &Lease, before: &[Option<Plan>], others: &[Planned]) -> Changes {
    let wanted: Vec<Wanted> = lease.grants.iter().map(|grant| Wanted::of(lease, grant)).collect();
    let fixed = |gpu: GpuUuid| windows(others, gpu).count();
    let own_windows = || lease.grants.iter().zip(&wanted).filter(|(_, wanted)| wanted.window().is_some());
    let here = own_windows().map(|(grant, _)| fixed(grant.gpu) + 1);
    let most = here.chain(others.iter().map(|one| fixed(one.gpu))).max().unwrap_or(0);
    let frame = Frame::for_windows(most);
    let is_other_frame = |plan: &Plan| plan.frame != frame;
    let mut changes = Changes { own: Vec::new(), others: Vec::new() };
    if others.iter().any(|one| is_other_frame(&one.plan)) {
        return packed_anew(lease, &wanted, others, frame);
    }
    let taken: Vec<Vec<Piece>> = lease.grants.iter().map(|grant| pieces(others, grant.gpu)).collect();
    let lengths: Vec<Option<u32>> =
        wanted.iter().map(|one| one.window().map(|percent| frame.share(percent))).collect();
    let common = match lengths.iter().flatten().collect::<Vec<_>>()[..] {
        [first, ref rest @ ..] if rest.iter().all(|length| *length == first) => {
            let cards: Vec<&[Piece]> = taken.iter().map(Vec::as_slice).collect();
            frame.first_common_fit(&cards, *first)
        }
        _ => None,
    };
    for (line, want) in wanted.iter().enumerate() {
        let Some(length) = lengths[line] else {
            changes.own.push(Plan { policy: want.policy(), frame });
            continue;
        };
        let kept = before.get(line).and_then(Option::as_ref).and_then(|plan| match &plan.policy {
            Policy::Fixed(place) if plan.frame == frame && keeps(place, length, &taken[line]) => {
                Some(place.clone())
            }
            _ => None,
        });
        match kept.or_else(|| common.clone()).or_else(|| frame.first_fit(&taken[line], length)) {
            Some(place) => changes.own.push(Plan { policy: Policy::Fixed(place), frame }),
            None => return packed_anew(lease, &wanted, others, frame),
        }
    }
    changes
}

/// What a grant asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Window(u32),
    Burst { share: u32, ceiling: u32 },
    Latency { share: u32 },
    Unlimited,
}

impl Wanted {
    fn of(lease: &Lease, grant: &Grant) -> Self {
        let Some(cores) = grant.cores else { return Self::Unlimited };
        let share = u32::from(cores.percent());
        match lease.compute_policy {
            ComputePolicy::Fixed => Self::Window(share),
            ComputePolicy::Burst => {
                Self::Burst { share, ceiling: u32::from(lease.ceiling.percent()).max(share) }
            }
            ComputePolicy::Latency => Self::Latency { share },
            ComputePolicy::None => Self::Unlimited,
        }
    }

    fn window(self) -> Option<u32> {
        match self {
            Self::Window(percent) => Some(percent),
            _ => None,
        }
    }

    /// Without a place for a window, which there is not where a node promises more than it has, it is a cap.
    fn policy(self) -> Policy {
        match self {
            Self::Window(share) => Policy::Burst { share, ceiling: share },
            Self::Burst { share, ceiling } => Policy::Burst { share, ceiling },
            Self::Latency { share } => Policy::Latency { share },
            Self::Unlimited => Policy::Unlimited,
        }
    }
}

fn windows(others: &[Planned], gpu: GpuUuid) -> impl Iterator<Item = (&Planned, &Place)> {
    others.iter().filter(move |one| one.gpu == gpu).filter_map(|one| match &one.plan.policy {
        Policy::Fixed(place) => Some((one, place)),
        _ => None,
    })
}

fn pieces(others: &[Planned], gpu: GpuUuid) -> Vec<Piece> {
    windows(others, gpu).flat_map(|(_, place)| place.iter().copied()).collect()
}

fn length(place: &Place) -> u32 {
    place.iter().map(|piece| piece.length).sum()
}

/// Whether a place is of this length and beside those that are taken.
fn keeps(place: &Place, length: u32, taken: &[Piece]) -> bool {
    let meets = |one: &Piece, other: &Piece| one.start < other.end() && other.start < one.end();
    self::length(place) == length && !place.iter().any(|one| taken.iter().any(|other| meets(one, other)))
}

/// Packs the windows of all GPUs one behind the other, in the order of leases.
fn packed_anew(lease: &Lease, wanted: &[Wanted], others: &[Planned], frame: Frame) -> Changes {
    let own = wanted.iter().map(|one| Plan { policy: one.policy(), frame }).collect();
    let mut changes = Changes { own, others: others.to_vec() };
    changes.others.iter_mut().for_each(|one| one.plan.frame = frame);
    let mut gpus: Vec<GpuUuid> = others.iter().map(|one| one.gpu).collect();
    gpus.extend(lease.grants.iter().map(|grant| grant.gpu));
    gpus.sort_unstable();
    gpus.dedup();
    for gpu in gpus {
        // Those of others by their part of the frame that they had; the own one comes where its lease does.
        let mut all: Vec<(i64, u32, Option<usize>)> = Vec::new();
        for (at, one) in others.iter().enumerate().filter(|(_, one)| one.gpu == gpu) {
            if let Policy::Fixed(place) = &one.plan.policy {
                let percent = u64::from(length(place)) * 100 / u64::from(one.plan.frame.length());
                all.push((one.lease, frame.share(u32::try_from(percent).unwrap_or(100)), Some(at)));
            }
        }
        let line = lease.grants.iter().position(|grant| grant.gpu == gpu);
        let own = line.and_then(|line| wanted[line].window().map(|percent| (line, percent)));
        all.extend(own.map(|(_, percent)| (lease.id, frame.share(percent), None)));
        all.sort_by_key(|(lease, ..)| *lease);
        let lengths: Vec<u32> = all.iter().map(|(_, length, _)| *length).collect();
        let Some(places) = frame.packed(&lengths) else { continue };
        for ((_, _, at), place) in all.into_iter().zip(places) {
            let policy = Policy::Fixed(place);
            match (at, own) {
                (Some(at), _) => changes.others[at].plan.policy = policy,
                (None, Some((line, _))) => changes.own[line].policy = policy,
                (None, None) => {}
            }
        }
    }
    let is_new = |one: &Planned| !others.contains(one);
    changes.others.retain(is_new);
    changes
}

#[cfg(test)]
mod tests {
    use gpushare_inventory::DeviceMemory;
    use gpushare_quota::{Holder, LeaseKey, Member};
    use gpushare_request::{Cores, Devices, Request};

    use super::*;

    const CARDS: [GpuUuid; 3] =
        [GpuUuid::from_bytes([1; 16]), GpuUuid::from_bytes([2; 16]), GpuUuid::from_bytes([3; 16])];

    fn lease(id: i64, policy: ComputePolicy, percent: u8, cards: &[usize]) -> Lease {
        let key = LeaseKey::new(String::new(), format!("c{id}")).unwrap();
        let holder = Holder { pid: 1, start_time: 1, cgroup: None, leads: false };
        let grants = cards.iter().map(|card| Grant {
            gpu: CARDS[*card],
            card: None,
            memory: DeviceMemory::from_bytes(1 << 30),
            cores: Cores::new(percent),
        });
        let lease =
            Lease::new(Member::reserved(key, holder), &Request::whole(Devices::Any(1)), grants.collect());
        Lease { id, compute_policy: policy, ..lease }
    }

    /// A node on which leases come one after the other.
    #[derive(Default)]
    struct Node(Vec<Planned>);

    impl Node {
        fn come(&mut self, lease: &Lease) -> Vec<Plan> {
            let before: Vec<Option<Plan>> = (0..lease.grants.len())
                .map(|line| {
                    let own = self.0.iter().find(|one| (one.lease, one.line) == (lease.id, line));
                    own.map(|one| one.plan.clone())
                })
                .collect();
            self.0.retain(|one| one.lease != lease.id);
            let changes = plan(lease, &before, &self.0);
            for changed in changes.others {
                let is_it = |one: &&mut Planned| (one.lease, one.line) == (changed.lease, changed.line);
                self.0.iter_mut().filter(is_it).for_each(|one| one.plan = changed.plan.clone());
            }
            for (line, (plan, grant)) in changes.own.iter().zip(&lease.grants).enumerate() {
                self.0.push(Planned { lease: lease.id, line, gpu: grant.gpu, plan: plan.clone() });
            }
            changes.own
        }

        fn go(&mut self, lease: i64) {
            self.0.retain(|one| one.lease != lease);
        }

        /// Starts and lengths of all windows of a GPU in ms, by lease.
        fn windows(&self, card: usize) -> Vec<(i64, Vec<(u32, u32)>)> {
            let all = windows(&self.0, CARDS[card]);
            let ms = |place: &Place| place.iter().map(|one| (one.start / 1000, one.length / 1000)).collect();
            all.map(|(one, place)| (one.lease, ms(place))).collect()
        }
    }

    #[test]
    fn windows_lie_beside_each_other_and_stay_where_they_are() {
        let mut node = Node::default();
        let fixed = |id, percent| lease(id, ComputePolicy::Fixed, percent, &[0]);
        let _ = node.come(&fixed(1, 30));
        let _ = node.come(&fixed(2, 40));
        let _ = node.come(&fixed(3, 20));
        assert_eq!(node.windows(0), [(1, vec![(0, 15)]), (2, vec![(15, 20)]), (3, vec![(35, 10)])]);
        // The same again changes nothing, and who comes later takes what is free, if need be in two pieces.
        let _ = node.come(&fixed(3, 20));
        node.go(2);
        let _ = node.come(&fixed(4, 50));
        let want = [(1, vec![(0, 15)]), (3, vec![(35, 10)]), (4, vec![(15, 20), (45, 5)])];
        assert_eq!(node.windows(0), want);
        // A smaller share has another window; one of three pieces would be one too many, so all are packed.
        let _ = node.come(&fixed(4, 10));
        assert_eq!(node.windows(0)[2], (4, vec![(15, 5)]));
        let _ = node.come(&fixed(5, 10));
        node.go(4);
        let _ = node.come(&fixed(6, 5));
        let _ = node.come(&fixed(7, 25));
        assert!(node.windows(0).iter().all(|(_, place)| place.len() <= 2), "{:?}", node.windows(0));
    }

    #[test]
    fn what_is_no_window_takes_no_place() {
        let mut node = Node::default();
        let burst = lease(1, ComputePolicy::Burst, 30, &[0]);
        let policy = Policy::Burst { share: 30, ceiling: 100 };
        assert_eq!(node.come(&burst), [Plan { policy, frame: Frame::SHORT }]);
        let latency = lease(5, ComputePolicy::Latency, 20, &[0]);
        assert_eq!(node.come(&latency)[0].policy, Policy::Latency { share: 20 });
        let none = lease(2, ComputePolicy::None, 30, &[0]);
        assert_eq!(node.come(&none)[0].policy, Policy::Unlimited);
        // More than there is: a cap without a promise.
        let _ = node.come(&lease(3, ComputePolicy::Fixed, 70, &[0]));
        let more = lease(4, ComputePolicy::Fixed, 40, &[0]);
        assert_eq!(node.come(&more)[0].policy, Policy::Burst { share: 40, ceiling: 40 });
        assert_eq!(node.windows(0), [(3, vec![(0, 35)])]);
    }

    #[test]
    fn windows_of_one_container_lie_at_one_place_on_all_of_its_cards_where_they_can() {
        let mut node = Node::default();
        let half = |id, cards: &[usize]| lease(id, ComputePolicy::Fixed, 50, cards);
        let _ = node.come(&half(1, &[0, 1]));
        let _ = node.come(&half(2, &[1, 2]));
        assert_eq!(node.windows(1), [(1, vec![(0, 25)]), (2, vec![(25, 25)])]);
        assert_eq!(node.windows(2), [(2, vec![(25, 25)])]);
        // A and C have no place in common.
        let _ = node.come(&half(3, &[0, 2]));
        assert_eq!(
            (node.windows(0)[1].clone(), node.windows(2)[1].clone()),
            ((3, vec![(25, 25)]), (3, vec![(0, 25)]))
        );
    }

    #[test]
    fn the_seventh_window_makes_all_frames_longer() {
        let mut node = Node::default();
        for id in 1..=6 {
            let _ = node.come(&lease(id, ComputePolicy::Fixed, 10, &[0]));
        }
        let _ = node.come(&lease(7, ComputePolicy::Fixed, 20, &[1]));
        assert!(node.0.iter().all(|one| one.plan.frame == Frame::SHORT));
        let _ = node.come(&lease(8, ComputePolicy::Fixed, 12, &[0]));
        assert!(node.0.iter().all(|one| one.plan.frame == Frame::LONG));
        let want: Vec<(i64, Vec<(u32, u32)>)> = (1..=6)
            .map(|id| (id, vec![((u32::try_from(id).unwrap() - 1) * 10, 10)]))
            .chain([(8, vec![(60, 12)])])
            .collect();
        assert_eq!(node.windows(0), want);
        assert_eq!(node.windows(1), [(7, vec![(0, 20)])]);
    }
}
