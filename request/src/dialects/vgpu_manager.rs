//! vgpu-manager: `CUDA_MEM_LIMIT_<h>`, `CUDA_CORE_LIMIT_<h>` and `CUDA_CORE_SOFT_LIMIT_<h>` by the host's index, for which
//! `MANAGER_VISIBLE_DEVICES` or `MANAGER_VISIBLE_DEVICE_<h>` has the UUID (vgpu-manager pkg/deviceplugin/vgpu/vnum_plugin.go,
//! pkg/kubeletplugin/vgpu.go), and the pod's annotations `nvidia.com/real-allocated` and `/pre-allocated`, which name the
//! container (pkg/device/types.go). An empty variable is an unset one: the plugin writes them.

use gpushare_inventory::Gpu;

use super::Dialect;
use crate::cards::{Cards, IndexMeaning};
use crate::claim::{Amount, Cap, Claim};
use crate::device_list::{claimed, selector};
use crate::error::RequestError;
use crate::grammar::Cores;
use crate::reading::{Reading, Said, conflict};
use crate::{limit, quantity};

mod allocated;

pub(super) static DIALECT: Dialect = Dialect { name: "vgpu-manager", detects, read, owns, by_position: true };

const MEMORY: &str = "CUDA_MEM_LIMIT";
const CORES: &str = "CUDA_CORE_LIMIT";
/// The most that idle time gives; above the other it makes that one a guarantee.
const SOFT: &str = "CUDA_CORE_SOFT_LIMIT";
const RATIO: &str = "CUDA_MEM_RATIO";
/// UUIDs, by position.
const TABLE: &str = "MANAGER_VISIBLE_DEVICES";
/// With `_<h>`, one UUID.
const ENTRY: &str = "MANAGER_VISIBLE_DEVICE";
/// Of an index that is not the container's.
const FILLER: &str = "GPU-00000000-0000-0000-0000-000000000000";
/// The length of the table.
const INDEXES: u64 = 16;

fn detects(reading: &Reading) -> bool {
    stated(reading).any(|said| asks(said.key)) || allocated::entry(reading).is_some()
}

/// Whether the variable by itself says that its writer is this system.
fn asks(key: &str) -> bool {
    is_of(key, MEMORY) || key == TABLE || index(key, ENTRY).is_some()
}

fn owns(key: &str) -> bool {
    asks(key) || is_of(key, CORES) || is_of(key, SOFT)
}

/// `name`, or `name` and an index.
fn is_of(key: &str, name: &str) -> bool {
    key == name || index(key, name).is_some()
}

fn index(key: &str, name: &str) -> Option<u64> {
    quantity::whole(key.strip_prefix(name)?.strip_prefix('_')?)
}

/// Whether it says nothing. Of a table the two quotes do not, either, which earlier DRA drivers write.
fn is_unset(said: &Said) -> bool {
    said.value.is_empty() || said.key == TABLE && said.value == "''"
}

fn stated<'a>(reading: &Reading<'a>) -> impl Iterator<Item = Said<'a>> {
    reading.variables().filter(|said| !is_unset(said))
}

fn read<'a>(reading: &Reading<'a>, cards: Cards<'a>) -> Result<Vec<Claim>, RequestError> {
    refuse_overflow(reading)?;
    let list = claimed(reading, cards, IndexMeaning::Pci)?;
    let mut note = allocated::claim(reading, cards)?;
    let mut variables = None;
    if let Some(first) = stated(reading).find(|said| asks(said.key)) {
        let listed = list.iter().flat_map(|(_, gpus)| gpus.iter().copied());
        let gpus = table(reading, cards)?.unwrap_or_else(|| (0..).zip(listed).collect());
        variables = Some(limits(reading, first, gpus)?);
    }
    if let (Some(note), Some(variables)) = (&mut note, &variables) {
        note.burst = idle_beside(reading, note, variables);
    }
    Ok(note.into_iter().chain(variables).chain(list.map(|(claim, _)| claim)).collect())
}

/// What the variables say of idle time, for the note, which has no place for it: only beside the same caps, and where the
/// variables may grant it themselves. On a strict node they raise nothing that a note grants there.
fn idle_beside(reading: &Reading, note: &Claim, variables: &Claim) -> Option<Cores> {
    let policy = reading.policy;
    let only_lower = policy.ignore_env || policy.strict && note.trust.grants(policy);
    let grants = variables.trust.grants(policy) && !only_lower;
    let mut gpus = note.particular.iter().chain(&variables.particular).map(|(gpu, _)| *gpu);
    let same = gpus.all(|gpu| note.amount_on(gpu).cores == variables.amount_on(gpu).cores);
    variables.burst.filter(|_| grants && same)
}

/// The container's GPUs by the host's indexes; nothing where there is no table. The device plugin writes the list, and the DRA
/// driver the single ones beside an empty list: both forms together are another writer's.
fn table<'a>(reading: &Reading<'a>, cards: Cards<'a>) -> Result<Option<Vec<(u64, &'a Gpu)>>, RequestError> {
    let table = reading.one(TABLE)?.filter(|said| !is_unset(said));
    let listed = table.into_iter().flat_map(|said| {
        (0..).zip(said.value.split(',').map(str::trim)).map(move |(h, uuid)| (said, h, uuid))
    });
    let mut entries = stated(reading).filter(|said| index(said.key, ENTRY).is_some());
    if let (Some(list), Some(entry)) = (table, entries.next()) {
        return Err(conflict(list, entry));
    }
    let single = stated(reading).filter_map(|said| Some((said, index(said.key, ENTRY)?, said.value)));
    let mut found: Option<Vec<(u64, &Gpu)>> = None;
    for (said, h, uuid) in listed.chain(single) {
        let found = found.get_or_insert_default();
        if uuid.is_empty() || uuid == FILLER {
            continue;
        }
        if h >= INDEXES {
            return Err(said.wrong(format!("there are {INDEXES} indexes, from 0: remove the others")));
        }
        let gpu = cards.find(said.key, &selector(said, uuid, IndexMeaning::Pci)?)?;
        match found.iter().find(|(other, before)| *other == h || before.uuid == gpu.uuid) {
            Some((other, before)) if *other != h || before.uuid != gpu.uuid => {
                return Err(conflict(said, format!("{before} at index {other}", before = before.uuid)));
            }
            Some(_) => {}
            None => found.push((h, gpu)),
        }
    }
    Ok(found)
}

/// What the variables say, of which `first` is one.
fn limits(reading: &Reading, first: Said, gpus: Vec<(u64, &Gpu)>) -> Result<Claim, RequestError> {
    let is_beyond = |h| !gpus.iter().any(|(other, _)| *other == h);
    for said in stated(reading) {
        if let Some(h) =
            [MEMORY, CORES, SOFT].iter().find_map(|name| index(said.key, name)).filter(|h| is_beyond(*h))
        {
            return Err(said.wrong(format!("no GPU of the container has index {h} in {TABLE}: remove it")));
        }
    }
    if gpus.is_empty() {
        return Err(RequestError::LimitWithoutGpu { by: first.to_string() });
    }
    let (indexes, cards): (Vec<u64>, Vec<&Gpu>) = gpus.into_iter().unzip();
    let claim = Claim::by(first).on(&cards, |position, _| {
        let memory = at(reading, MEMORY, indexes[position], limit::memory)?;
        let cores = at(reading, CORES, indexes[position], limit::cores)?;
        Ok(Amount {
            memory: memory.map(|(_, memory)| memory),
            cores: cores.map(|(_, cores)| Cap::from(cores)),
        })
    })?;
    let limited = claim.particular.iter().filter(|(_, amount)| amount.memory.is_some()).count();
    if limited != 0 && limited != cards.len() {
        let missing = cards.len() - limited;
        return Err(first.wrong(format!(
            "{missing} of {} GPUs have no memory limit: give each its own, or set {MEMORY}",
            cards.len()
        )));
    }
    let caps = claim.particular.iter().map(|(_, amount)| amount.cores);
    Ok(Claim { burst: burst(reading, &indexes, caps)?, ..claim })
}

/// The limit at an index; the plain key is for those that have none of their own.
fn at<'a, T: Ord>(
    reading: &Reading<'a>,
    name: &str,
    h: u64,
    parse: impl Fn(Said<'a>) -> Result<T, RequestError>,
) -> Result<Option<(Said<'a>, T)>, RequestError> {
    let own = reading.least_of(stated(reading).filter(|said| index(said.key, name) == Some(h)), &parse)?;
    if own.is_some() {
        Ok(own)
    } else {
        reading.least_of(stated(reading).filter(|said| said.key == name), &parse)
    }
}

/// The most that idle time gives: there is one bound for all GPUs, the smallest, where it is above the cap of each.
fn burst(
    reading: &Reading,
    indexes: &[u64],
    caps: impl Iterator<Item = Option<Cap>>,
) -> Result<Option<Cores>, RequestError> {
    let mut softs = Vec::new();
    let mut highest: Option<Cap> = None;
    for (h, cap) in indexes.iter().zip(caps) {
        let soft = at(reading, SOFT, *h, limit::cores)?;
        match (soft, cap) {
            (Some((said, _)), None) => {
                return Err(said.wrong(format!("a soft limit alone limits nothing: set {CORES}, too")));
            }
            (Some((said, soft)), Some(cap)) if Cap::from(soft) < cap => {
                return Err(said.wrong(format!("below {CORES}: the soft limit is the upper one, raise it")));
            }
            _ => {}
        }
        highest = highest.max(cap);
        softs.push(soft.map(|(_, soft)| soft));
    }
    let least = softs.into_iter().min().flatten();
    Ok(least.filter(|soft| highest.is_some_and(|highest| Cap::from(*soft) > highest)))
}

/// A ratio above 1 lets memory lie in the host's, which nothing here limits or gives.
fn refuse_overflow(reading: &Reading) -> Result<(), RequestError> {
    for said in stated(reading).filter(|said| is_of(said.key, RATIO)) {
        let ratio =
            quantity::decimal(said.value).ok_or_else(|| said.wrong("a ratio is a number, as 1.00"))?;
        if ratio.numerator > ratio.denominator {
            return Err(said.wrong(
                "gpushare gives no host memory in place of a card's: set the node's memory scaling to 1",
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::cards::four;
    use crate::{Ceilings, Container, Policy, Request};

    /// The plugin's note beside the variables of policy `balance`.
    fn balanced(policy: &Policy) -> Result<Request, RequestError> {
        let gpu = four()[0].uuid;
        let container = Container::from_json(&json!({
            "annotations": {
                "io.kubernetes.cri.container-type": "container",
                "io.kubernetes.cri.container-name": "train",
                "nvidia.com/real-allocated": format!("train[0_{gpu}_30_3000]"),
            },
            "process": {"env": [
                format!("{TABLE}={gpu}"), "CUDA_MEM_LIMIT_0=3000m", "CUDA_CORE_LIMIT_0=30",
                "CUDA_CORE_SOFT_LIMIT_0=100", format!("NVIDIA_VISIBLE_DEVICES={gpu}"),
            ]},
        }));
        crate::read(&container, policy, &four()).map(Option::unwrap)
    }

    fn strict(env: Option<&str>, pod: Option<&str>) -> Policy {
        let ceiling = |most: Option<&str>| most.map(|most| most.parse().unwrap());
        Policy {
            strict: true,
            ceilings: Ceilings { env: ceiling(env), pod: ceiling(pod) },
            ..Policy::default()
        }
    }

    #[test]
    fn idle_time_beside_the_note_is_given_where_the_variables_may_state_it() {
        for policy in [Policy::default(), strict(Some("100%"), None)] {
            let request = balanced(&policy).unwrap();
            assert_eq!((request.cores, request.burst), (Cores::new(30), Cores::new(100)), "{policy:?}");
        }
    }

    #[test]
    fn variables_that_may_only_lower_the_note_lift_it_to_no_idle_time() {
        for env in [None, Some("100%")] {
            let told = balanced(&strict(env, Some("100%")));
            assert!(matches!(told, Err(RequestError::Raised { .. })), "{told:?}");
        }
        let unread = Policy { ignore_env: true, default_cores: Cores::new(50), ..Policy::default() };
        assert_eq!(balanced(&unread).unwrap().burst, None);
    }
}
