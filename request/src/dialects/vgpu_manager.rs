//! vgpu-manager: `CUDA_MEM_LIMIT_<h>`, `CUDA_CORE_LIMIT_<h>` and `CUDA_CORE_SOFT_LIMIT_<h>` by the host's
//! index h. `MANAGER_VISIBLE_DEVICES` or `MANAGER_VISIBLE_DEVICE_<h>` has the UUID of each index
//! (vgpu-manager pkg/deviceplugin/vgpu/vnum_plugin.go, pkg/kubeletplugin/vgpu.go). The pod's annotations
//! `nvidia.com/real-allocated` and `/pre-allocated` name the container (pkg/device/types.go). An empty
//! variable counts as unset: the plugin writes empty ones.

use gpushare_inventory::Gpu;

use crate::dialect::{Dialect, Off, Speech, Switch, is_enabled};
use crate::sources::list::named;
use crate::sources::names;
use crate::{limit, quantity};
use gpushare_claims::{
    Amount, Cap, Claim, Cores, IndexMeaning, Library, NodeGpus, Owner, Rank, RequestError, Word, Words,
    conflict,
};

mod allocated;

pub(super) static DIALECT: Dialect = Dialect {
    name: "vgpu-manager",
    speech,
    read,
    owns: |key| asks(key) || is_of(key, CORES) || is_of(key, SOFT),
    by_position: true,
    switches: &SWITCHES,
    library: Some(Library {
        folders: &["/etc/vgpu-manager"],
        files: &["libvgpu-control.so"],
        owner: Some(Owner {
            limit: MEMORY,
            library: "/etc/vgpu-manager/driver/libvgpu-control.so",
            folder: "/etc/vgpu-manager",
        }),
    }),
    ..Dialect::PLAIN
};

/// The switches of vgpu-manager (pkg/util/util.go and pkg/util/consts.go). With the ratio a node promises
/// more memory than its GPUs have. Here a limit always applies to the GPU's own memory.
const SWITCHES: [Switch; 3] = [
    Switch { key: "DISABLE_VGPU_CONTROL", is_on: |value, _| is_enabled(value), turns_off: Off::Limits },
    Switch { key: "CUDA_MEM_OVERSOLD", is_on: |value, _| is_enabled(value), turns_off: Off::Hardness },
    Switch {
        key: RATIO,
        is_on: |value, _| value.parse().is_ok_and(|ratio: f64| ratio > 1.0),
        turns_off: Off::Hardness,
    },
];

const MEMORY: &str = "CUDA_MEM_LIMIT";
const CORES: &str = "CUDA_CORE_LIMIT";
/// The most compute, idle time included. If it is above `CUDA_CORE_LIMIT`, the latter is a guarantee.
const SOFT: &str = "CUDA_CORE_SOFT_LIMIT";
const RATIO: &str = "CUDA_MEM_RATIO";
/// A list of UUIDs; the position is the host's index.
const TABLE: &str = "MANAGER_VISIBLE_DEVICES";
/// Followed by `_<h>`: the UUID for one index.
const ENTRY: &str = "MANAGER_VISIBLE_DEVICE";
/// The UUID for an index whose GPU the container does not have.
const FILLER: &str = "GPU-00000000-0000-0000-0000-000000000000";
/// The number of indexes in the table.
const INDEXES: u64 = 16;

fn speech(words: &Words) -> Speech {
    Speech::asking(stated(words).any(|word| asks(word.key)) || !allocated::entries(words).is_empty())
}

/// Whether only vgpu-manager writes this variable.
fn asks(key: &str) -> bool {
    is_of(key, MEMORY) || key == TABLE || index(key, ENTRY).is_some()
}

/// Whether `key` is `name`, alone or with an index.
fn is_of(key: &str, name: &str) -> bool {
    key == name || index(key, name).is_some()
}

fn index(key: &str, name: &str) -> Option<u64> {
    quantity::whole(key.strip_prefix(name)?.strip_prefix('_')?)
}

/// Whether the variable is empty. A table of two quotes counts as empty too: earlier DRA drivers write it.
fn is_unset(word: &Word) -> bool {
    word.value.is_empty() || word.key == TABLE && word.value == "''"
}

fn stated<'a>(words: &Words<'a>) -> impl Iterator<Item = Word<'a>> {
    words.variables().filter(|word| !is_unset(word))
}

fn read<'a>(words: &Words<'a>, node: NodeGpus<'a>) -> Result<Vec<Claim>, RequestError> {
    refuse_unreadable_ratio(words)?;
    let mut notes = allocated::claims(words, node)?;
    let mut variables = Vec::new();
    if let Some(first) = stated(words).find(|word| asks(word.key)) {
        let gpus = match table(words, node)? {
            Some(table) => table,
            None => {
                let listed = named(words, node, IndexMeaning::Pci)?.map(|(_, gpus)| gpus);
                (0..).zip(listed.unwrap_or_default()).collect()
            }
        };
        variables = limits(words, first, &gpus)?;
    }
    for note in &mut notes {
        note.burst = idle_beside(words, note, &variables);
    }
    Ok(notes.into_iter().chain(variables).collect())
}

/// The idle compute that the variables state, for the note, which has no field for it. It counts only if the
/// variables state the same limits as the note and may grant by themselves. It never raises a plugin's note.
/// On a strict node it does not raise a note that may itself grant.
fn idle_beside(words: &Words, note: &Claim, variables: &[Claim]) -> Option<Cores> {
    let policy = words.policy;
    let only_lower = policy.ignore_env
        || note.rank >= Rank::Granted
        || policy.strict && policy.authority(note.rank).is_some();
    let grants = variables.first().is_some_and(|claim| policy.authority(claim.rank).is_some()) && !only_lower;
    let burst = variables.iter().find_map(|claim| claim.burst)?;
    let cap = |claim: &Claim, gpu| claim.amount_on(Some(gpu)).cores;
    let stated = |gpu| variables.iter().find_map(|claim| cap(claim, gpu));
    let same = note.particular.iter().all(|(gpu, amount)| amount.cores == stated(*gpu));
    (grants && same).then_some(burst)
}

/// The container's GPUs by the host's indexes; `None` if there is no table. The device plugin writes the
/// list. The DRA driver writes the single entries and an empty list. Both forms together come from two
/// writers and are refused.
fn table<'a>(words: &Words<'a>, node: NodeGpus<'a>) -> Result<Option<Vec<(u64, &'a Gpu)>>, RequestError> {
    let table = words.one(TABLE)?.filter(|word| !is_unset(word));
    let listed = table.into_iter().flat_map(|word| {
        (0..).zip(word.value.split(',').map(str::trim)).map(move |(h, uuid)| (word, h, uuid))
    });
    let mut entries = stated(words).filter(|word| index(word.key, ENTRY).is_some());
    if let (Some(list), Some(entry)) = (table, entries.next()) {
        return Err(conflict(list, entry));
    }
    let single = stated(words).filter_map(|word| Some((word, index(word.key, ENTRY)?, word.value)));
    let mut found: Option<Vec<(u64, &Gpu)>> = None;
    for (word, h, uuid) in listed.chain(single) {
        let found = found.get_or_insert_default();
        if uuid.is_empty() || uuid == FILLER {
            continue;
        }
        if h >= INDEXES {
            return Err(word.wrong(format!("there are {INDEXES} indexes, from 0: remove the others")));
        }
        let gpu = names::gpu(word, uuid, node)?;
        match found.iter().find(|(other, before)| *other == h || before.uuid == gpu.uuid) {
            Some((other, before)) if *other != h || before.uuid != gpu.uuid => {
                return Err(conflict(word, format!("{before} at index {other}", before = before.uuid)));
            }
            Some(_) => {}
            None => found.push((h, gpu)),
        }
    }
    Ok(found)
}

/// One claim for each amount in the variables, and one that names the GPUs. `first` is one of the variables.
fn limits(words: &Words, first: Word, gpus: &[(u64, &Gpu)]) -> Result<Vec<Claim>, RequestError> {
    let is_beyond = |h| !gpus.iter().any(|(other, _)| *other == h);
    for word in stated(words) {
        let h = [MEMORY, CORES, SOFT].iter().find_map(|name| index(word.key, name));
        if let Some(h) = h.filter(|h| is_beyond(*h)) {
            return Err(word.wrong(format!("no GPU of the container has index {h} in {TABLE}: remove it")));
        }
    }
    if gpus.is_empty() {
        return Err(RequestError::LimitWithoutGpu { by: first.to_string() });
    }
    let named: Vec<&Gpu> = gpus.iter().map(|(_, gpu)| *gpu).collect();
    // The table also names the container's GPUs.
    let mut claims = vec![Claim::by(first).naming(&named)];
    for (name, is_memory) in [(MEMORY, true), (CORES, false)] {
        for word in stated(words).filter(|word| is_of(word.key, name)) {
            let amount = match is_memory {
                true => Amount::memory(limit::memory(word)?),
                false => Amount::cores(limit::cores(word)?.into()),
            };
            claims.push(Claim::by(word).on_each(of_word(words, word, name, gpus), amount));
        }
    }
    limit::refuse_half(&claims, first, named.len(), MEMORY)?;
    let burst = burst(words, gpus, &claims)?;
    let capped = |claim: &Claim| claim.particular.iter().any(|(_, amount)| amount.cores.is_some());
    let claims = claims.into_iter().map(|claim| Claim { burst: burst.filter(|_| capped(&claim)), ..claim });
    Ok(claims.collect())
}

/// The GPUs to which a limit applies: the GPU with its index. A key without an index applies to all GPUs that
/// have no limit of their own.
fn of_word<'a>(words: &Words, word: Word, name: &str, gpus: &[(u64, &'a Gpu)]) -> Vec<&'a Gpu> {
    let has_own = |h: u64| stated(words).any(|other| index(other.key, name) == Some(h));
    let is_its = |h: u64| index(word.key, name) == Some(h) || word.key == name && !has_own(h);
    gpus.iter().filter(|(h, _)| is_its(*h)).map(|(_, gpu)| *gpu).collect()
}

/// The smallest soft limit for an index. The key without an index applies if there is none with it.
fn soft<'a>(words: &Words<'a>, h: u64) -> Result<Option<(Word<'a>, Cores)>, RequestError> {
    let own: Vec<Word> = stated(words).filter(|word| index(word.key, SOFT) == Some(h)).collect();
    let plain = || stated(words).filter(|word| word.key == SOFT).collect();
    let all = if own.is_empty() { plain() } else { own };
    let parsed = limit::each(all.into_iter(), limit::cores)?;
    match parsed.iter().find(|(_, cores)| *cores != parsed[0].1) {
        Some((other, _)) if words.policy.strict => Err(conflict(parsed[0].0, other)),
        _ => Ok(parsed.into_iter().min_by_key(|(_, cores)| *cores)),
    }
}

/// The most compute that idle time gives. There is one value for all GPUs: the smallest soft limit, if it is
/// above the compute limit of each GPU.
fn burst(words: &Words, gpus: &[(u64, &Gpu)], claims: &[Claim]) -> Result<Option<Cores>, RequestError> {
    let mut softs = Vec::new();
    let mut highest: Option<Cap> = None;
    for (h, gpu) in gpus {
        let cap = claims.iter().filter_map(|claim| claim.amount_on(Some(gpu.uuid)).cores).min();
        let soft = soft(words, *h)?;
        match (soft, cap) {
            (Some((word, _)), None) => {
                return Err(word.wrong(format!("a soft limit alone limits nothing: set {CORES}, too")));
            }
            (Some((word, soft)), Some(cap)) if Cap::from(soft) < cap => {
                return Err(word.wrong(format!("below {CORES}: the soft limit is the upper one, raise it")));
            }
            _ => {}
        }
        highest = highest.max(cap);
        softs.push(soft.map(|(_, soft)| soft));
    }
    let least = softs.into_iter().min().flatten();
    Ok(least.filter(|soft| highest.is_some_and(|highest| Cap::from(*soft) > highest)))
}

/// Refuses a ratio that is not a number. A ratio above 1 promises host memory, which gpushare neither limits
/// nor gives, so the limits stay those of the GPU.
fn refuse_unreadable_ratio(words: &Words) -> Result<(), RequestError> {
    let mut ratios = stated(words).filter(|word| is_of(word.key, RATIO));
    let unreadable = ratios.find(|word| quantity::decimal(word.value).is_none());
    unreadable.map_or(Ok(()), |word| Err(word.wrong("a ratio is a number, as 1.00")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{Ceilings, Container, Policy, Request};
    use gpushare_claims::four;

    /// Reads a bundle with the plugin's note and the variables of its policy `balance`.
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
        crate::read::read(&container, policy, &four()).map(Option::unwrap)
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
