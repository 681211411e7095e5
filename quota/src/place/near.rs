//! Chooses GPUs that are close together.

use gpushare_inventory::{Gpu, Way};

/// Cost of using two GPUs with this connection. The differences are those of NVIDIA's device plugin
/// (go-gpuallocator, gpuallocator/besteffort_policy.go): each level of PCI is one step, and NVLink is far
/// better than all of them.
fn cost(way: Way) -> u32 {
    match way {
        Way::NvLink => 0,
        Way::Switch => 50,
        Way::Switches => 60,
        Way::HostBridge => 70,
        Way::NumaNode => 80,
        Way::System => 90,
    }
}

/// Limit on the GPUs whose combinations are compared: choosing 8 of 16 gives 12,870. Beyond that, the first
/// GPUs are used.
const MOST: usize = 16;

/// Returns the positions of `wanted` of these GPUs, which are sorted best first: those with the lowest cost
/// among each other; on a tie, those farthest from the remaining GPUs, so that a group stays whole for
/// another request; then the first ones.
pub(super) fn together(gpus: &[&Gpu], wanted: usize) -> Vec<usize> {
    let gpus = &gpus[..gpus.len().min(MOST.max(wanted))];
    let between = |one: &Gpu, other: &Gpu| match one.uuid == other.uuid {
        true => 0,
        false => cost(one.place.way(&other.place)),
    };
    let cost: Vec<Vec<u32>> =
        gpus.iter().map(|one| gpus.iter().map(|other| between(one, other)).collect()).collect();
    let mut all = (0..gpus.len()).flat_map(|one| (0..one).map(move |other| (one, other)));
    let first = cost.get(1).map_or(0, |costs| costs[0]);
    if all.all(|(one, other)| cost[one][other] == first) {
        return (0..wanted.min(gpus.len())).collect();
    }
    let mut best: Option<((u32, u32, usize), Vec<usize>)> = None;
    let mut chosen = Vec::with_capacity(wanted);
    choose(gpus.len(), wanted, &mut chosen, &mut |chosen| {
        let inside: u32 = chosen.iter().flat_map(|one| chosen.iter().map(|other| cost[*one][*other])).sum();
        let left = |at: &usize| !chosen.contains(at);
        let to_left = |one: &usize| (0..gpus.len()).filter(left).map(|other| cost[*one][other]).sum::<u32>();
        let across: u32 = chosen.iter().map(to_left).sum();
        let key = (inside, u32::MAX - across, chosen.iter().sum());
        if best.as_ref().is_none_or(|(least, _)| key < *least) {
            best = Some((key, chosen.to_vec()));
        }
    });
    best.map(|(_, chosen)| chosen).unwrap_or_default()
}

/// Calls `act` with each choice of `wanted` of the first `of` numbers, in lexicographic order.
fn choose(of: usize, wanted: usize, chosen: &mut Vec<usize>, act: &mut impl FnMut(&[usize])) {
    if chosen.len() == wanted {
        return act(chosen);
    }
    let first = chosen.last().map_or(0, |last| last + 1);
    for next in first..(of + chosen.len() + 1).saturating_sub(wanted) {
        chosen.push(next);
        choose(of, wanted, chosen, act);
        chosen.pop();
    }
}

#[cfg(test)]
mod tests {
    use gpushare_inventory::Place;

    use super::*;
    use crate::place::tests::gpu;

    /// Makes GPUs in these NVLink groups, each behind the named switch.
    fn gpus(places: &[(&str, &str)]) -> Vec<Gpu> {
        let at = |(index, (nvlink, switch)): (u32, &(&str, &str))| Gpu {
            place: Place {
                nvlink_group: (*nvlink).to_owned(),
                bridges: vec!["pci0000:00".into(), (*switch).into(), format!("port-{index}")],
                ..Place::default()
            },
            ..gpu(index, 80)
        };
        (0..).zip(places).map(at).collect()
    }

    fn chosen(gpus: &[Gpu], wanted: usize) -> Vec<usize> {
        together(&gpus.iter().collect::<Vec<_>>(), wanted)
    }

    #[test]
    fn gpus_that_are_near_each_other_are_taken_and_groups_are_left_whole() {
        let pairs = gpus(&[("", "a"), ("x", "a"), ("", "b"), ("x", "b")]);
        assert_eq!(chosen(&pairs, 2), [1, 3], "by NVLink");
        assert_eq!(chosen(&pairs, 1), [0], "the pair is left");
        let switches = gpus(&[("", "a"), ("", "b"), ("", "a"), ("", "b")]);
        assert_eq!(chosen(&switches, 2), [0, 2], "behind one switch");
        assert_eq!(chosen(&switches, 3), [0, 1, 2]);
        // Taking one of the three behind a switch would break up that group; the fourth stands alone.
        let alone = gpus(&[("", "a"), ("", "a"), ("", "b"), ("", "a")]);
        assert_eq!(chosen(&alone, 1), [2]);
        let alike: Vec<Gpu> = (0..16).map(|index| gpu(index, 80)).collect();
        assert_eq!(chosen(&alike, 3), [0, 1, 2], "the first where nothing tells them apart");
        assert_eq!(chosen(&alike, 16).len(), 16);
        let many: Vec<Gpu> = (0..32).map(|index| gpu(index, 80)).chain(pairs).collect();
        assert_eq!(chosen(&many, 16).len(), 16);
    }
}
