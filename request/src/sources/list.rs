//! Reads the list of GPUs in `NVIDIA_VISIBLE_DEVICES`, which nearly every system writes.
//!
//! Grammar and precedence are those of NVIDIA's toolkit (internal/config/image/cuda_image.go, devices.go):
//! `void` anywhere wins, then the first of `all` and `none`. Items are trimmed, and empty ones are dropped.
//! docker puts its own entry after those of image and user, so outside CRI only the last entry counts. CUDA
//! images set `all`, so it names no particular GPU: it means every GPU that other words allow.

use std::collections::BTreeSet;

use gpushare_inventory::{Gpu, GpuUuid};

use crate::sources::handed::{self, UNREAD_VOLUMES, VOLUMES};
use crate::sources::names::{self, DEVICES, Gpus, each_once, items, refuse_sentinel, selector, word};
use crate::sources::qualified;
use gpushare_claims::{
    Claim, Container, DeviceSelector, Engine, IndexMeaning, Kept, NodeGpus, NvidiaPolicy, Rank, RequestError,
    Word, Words, conflict, contains,
};

/// Variables for devices other than GPUs that NVIDIA's toolkit gives. A share does not include them.
const UNGIVEN: [&str; 7] = [
    "NVIDIA_GDS",
    "NVIDIA_MOFED",
    "NVIDIA_GDRCOPY",
    "NVIDIA_NVSWITCH",
    "NVIDIA_IMEX_CHANNELS",
    "NVIDIA_MIG_CONFIG_DEVICES",
    "NVIDIA_MIG_MONITOR_DEVICES",
];

/// The annotation that keeps a granted bundle's list, which the wrapper replaced with `void`. A later run of
/// the same bundle reads it and so asks for the same.
pub const GRANTED_LIST: &str = "granted.gpushare.io/nvidia-visible-devices";
/// The annotation's value for [`Kept::Nothing`].
const NOT_KEPT: &str = "write-the-bundle-anew";

/// The value of [`GRANTED_LIST`] for the entries as they were `written`; `None` if no entry says anything. In
/// a pod every entry counts, elsewhere only the last.
pub fn kept_list(written: &[String], engine: Engine, kept: &Kept) -> Option<String> {
    let is_word = |list: &&String| !matches!(list.as_str(), "" | "void");
    let last = written.last().filter(is_word);
    let chosen = match engine {
        Engine::Other => last,
        Engine::Cri => {
            let mut lists = written.iter().filter(is_word);
            lists.clone().find(|list| word(list).is_none()).or(lists.next_back())
        }
    };
    chosen.map(|list| kept_of(list, kept))
}

/// Names of gpushare's own CDI devices stay in the list, since they may state a limit.
fn kept_of(written: &str, kept: &Kept) -> String {
    match kept {
        Kept::AsWritten => written.to_owned(),
        // The list is a word such as `all`. It names no particular GPU, and the meaning of other words may
        // depend on it.
        _ if word(written).is_some() => written.to_owned(),
        // The mounts stay in the bundle too, and they name the GPUs.
        Kept::Granted(_) if is_volumes(written) => written.to_owned(),
        Kept::Granted(gpus) => {
            let ours = items(written).filter(|item| names::is_ours(item)).map(str::to_owned);
            ours.chain(gpus.iter().map(GpuUuid::to_string)).collect::<Vec<_>>().join(",")
        }
        Kept::Nothing => NOT_KEPT.to_owned(),
    }
}

/// The list that an earlier grant kept. A pod can write the annotation too, so it counts only together with
/// the hook of that grant.
fn granted_list(container: &Container) -> Option<&str> {
    container.annotations().get(GRANTED_LIST).filter(|_| container.ran_before()).map(String::as_str)
}

/// The distinct lists that count. In a bundle that runs again, `void` is replaced with the list from before
/// the grant.
pub(crate) fn lists<'a>(words: &Words<'a>) -> Vec<Word<'a>> {
    let granted = granted_list(words.container);
    let kept = |word: Word<'a>| Word {
        value: granted.filter(|_| word.value == "void").unwrap_or(word.value),
        ..word
    };
    let mut all = words.named(DEVICES).map(kept);
    if words.container.engine() == Engine::Other {
        return all.next_back().into_iter().collect();
    }
    let mut met = BTreeSet::new(); // a bundle may hold a hundred thousand
    all.filter(|word| met.insert(word.value)).collect()
}

/// The meaning of one list, before it is compared with the node's GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Listed {
    /// The list names no GPU by itself: it is empty, or other sources read its names.
    Nothing,
    /// `none` or `void`. `void` is also written if CDI gives the devices.
    NoGpu,
    All,
    /// These GPUs, without duplicates.
    These(Vec<DeviceSelector>),
}

/// The container's GPUs in the order by which limits count positions: those of an explicit list, else those
/// that were handed over, else all if the list says `all`. `None` if nothing names a GPU.
pub(crate) fn named<'a>(
    words: &Words<'a>,
    node: NodeGpus<'a>,
    meaning: IndexMeaning,
) -> Result<Option<Gpus<'a>>, RequestError> {
    let (mut found, mut all) = (None, None);
    for word in lists(words) {
        match parsed(words, word, meaning)? {
            Listed::Nothing | Listed::NoGpu => {}
            Listed::All => all = all.or(Some(word)),
            Listed::These(selectors) => {
                let next = node.find_each(DEVICES, &selectors)?;
                found = Some(match found {
                    None => (word, next),
                    Some(first) => both(first, (word, next))?,
                });
            }
        }
    }
    let handed = handed::gpus(words, node)?;
    match (found.or(handed), all) {
        (None, Some(word)) => Ok(Some((word, every(word, node)?))),
        (found, _) => Ok(found),
    }
}

/// The GPUs that are in both lists, in the order of the first.
fn both<'a>(first: Gpus<'a>, second: Gpus<'a>) -> Result<Gpus<'a>, RequestError> {
    let (word, gpus) = first;
    let common: Vec<&Gpu> = gpus.into_iter().filter(|gpu| contains(&second.1, gpu)).collect();
    if common.is_empty() { Err(conflict(word, second.0)) } else { Ok((word, common)) }
}

fn every<'a>(word: Word, node: NodeGpus<'a>) -> Result<Vec<&'a Gpu>, RequestError> {
    if node.0.is_empty() { Err(word.wrong("this node has no GPU")) } else { Ok(node.unnamed()) }
}

/// The GPUs to which `limit` applies, and the word that names them. A limit without a GPU is an error.
pub(crate) fn limited<'a>(
    words: &Words<'a>,
    node: NodeGpus<'a>,
    meaning: IndexMeaning,
    limit: Word,
) -> Result<Gpus<'a>, RequestError> {
    let named = named(words, node, meaning)?;
    named.ok_or_else(|| RequestError::LimitWithoutGpu { by: limit.to_string() })
}

/// Refuses limits that differ between GPUs if only device nodes name the GPUs. The order of nodes does not
/// show which limit belongs to which GPU, so a list is needed.
pub(crate) fn refuse_order(
    claims: &[Claim],
    (list, limit): (Word, Word),
    gpus: &[&Gpu],
) -> Result<(), RequestError> {
    let amounts = |gpu: &Gpu| {
        let stated = claims.iter().map(|claim| claim.amount_on(Some(gpu.uuid)));
        let memory = stated.clone().filter_map(|amount| amount.memory?.bytes()).min();
        (memory, stated.filter_map(|amount| amount.cores).min())
    };
    if list.rank != Rank::Handed || gpus.windows(2).all(|pair| amounts(pair[0]) == amounts(pair[1])) {
        return Ok(());
    }
    Err(limit.wrong(
        "only device nodes name the GPUs, and their order does not tell whose limit this is: give all the same limits, \
         or name the GPUs in NVIDIA_VISIBLE_DEVICES",
    ))
}

/// Whether a list, or a handed-over device, names particular GPUs. Reads only the bundle.
pub(crate) fn names_particular_gpus(words: &Words) -> bool {
    let names = |list: &str| word(list).is_none() && items(list).next().is_some();
    handed::is_handed(words) || lists(words).iter().any(|list| names(list.value))
}

/// Whether a list names GPUs or `all`. Another writer's empty list then says nothing.
pub(crate) fn names_gpus(words: &Words) -> bool {
    names_particular_gpus(words) || lists(words).iter().any(|list| word(list.value) == Some("all"))
}

/// Whether the lists alone are a request for GPUs.
pub(crate) fn asks(words: &Words) -> bool {
    let foreign = |list: &str| items(list).any(|item| !names::is_ours(item));
    let asks = |list: &str| match word(list) {
        Some(word) => word == "all",
        None => foreign(list),
    };
    words.policy.nvidia != NvidiaPolicy::Ignore && lists(words).iter().any(|list| asks(list.value))
}

/// The claims of the lists: which GPUs, no amounts. Skips a device plugin's sentinel if another source names
/// the GPU (`is_named`).
pub(crate) fn claims<'a>(
    words: &Words<'a>,
    node: NodeGpus<'a>,
    meaning: IndexMeaning,
    is_named: bool,
) -> Result<Vec<Claim>, RequestError> {
    let is_list = |word: &Word| !is_named || names::is_sentinel(word.value).is_none();
    let lists: Vec<Word> = lists(words).into_iter().filter(is_list).collect();
    let parsed = lists.iter().map(|word| Ok((*word, parsed(words, *word, meaning)?)));
    let parsed: Vec<_> = parsed.collect::<Result<_, RequestError>>()?;
    refuse_contradiction(words, &parsed)?;
    let asks = words.policy.nvidia != NvidiaPolicy::Ignore;
    let naming = parsed.iter().filter(|(_, listed)| matches!(listed, Listed::These(_) | Listed::All)).count();
    let mut claims = Vec::new();
    for (word, listed) in &parsed {
        let claim = Claim { asks, ..Claim::by(*word) };
        match listed {
            // Together with another list, `all` is the pod's own wish for more than the plugin gave. Together
            // with `void` it comes from the image.
            Listed::All if naming > 1 => {
                every(*word, node)?;
                claims.push(claim.naming(&node.all())); // a bound, regardless of the other list
            }
            Listed::All => every(*word, node).map(|_| claims.push(claim))?,
            Listed::These(selectors) => claims.push(claim.naming(&node.find_each(DEVICES, selectors)?)),
            Listed::Nothing | Listed::NoGpu => {}
        }
    }
    let ungiven = UNGIVEN.iter().filter_map(|key| words.named(key).next());
    if let Some(first) = claims.first_mut() {
        first.notes.extend(ungiven.map(|word| format!("{word} is ignored: a share brings GPUs alone")));
    }
    Ok(claims)
}

/// Refuses a bundle in which one entry wants GPUs and another wants none. `void` may accompany a list if
/// nodes were handed over.
fn refuse_contradiction(words: &Words, lists: &[(Word, Listed)]) -> Result<(), RequestError> {
    let names = lists.iter().find(|(_, listed)| matches!(listed, Listed::These(_) | Listed::All));
    let denies = lists.iter().find(|(_, listed)| *listed == Listed::NoGpu);
    match (names, denies) {
        (Some((named, _)), Some((denied, _))) if !handed::is_handed(words) => Err(conflict(named, denied)),
        _ => Ok(()),
    }
}

/// The list that says `none`, unless a GPU was handed over.
pub(crate) fn denial<'a>(words: &Words<'a>) -> Option<Word<'a>> {
    let lists = lists(words).into_iter();
    lists.filter(|list| word(list.value) == Some("none")).find(|_| !handed::is_handed(words))
}

/// Whether `granted` are the list's GPUs in the list's order, whether its numbers are read as indexes or as
/// minors. Limits may count by position.
pub(crate) fn is_in_order<'a>(words: &Words<'a>, node: NodeGpus<'a>, granted: &[GpuUuid]) -> bool {
    let list = |meaning| {
        let (_, gpus) = named(words, node, meaning).ok()??;
        Some(gpus.iter().map(|gpu| gpu.uuid).collect::<Vec<_>>())
    };
    let lists = [IndexMeaning::Pci, IndexMeaning::Minor].map(list);
    // A single GPU is always at the first position.
    let mut lengths = lists.iter().flatten().map(Vec::len).peekable();
    let single = lengths.peek().is_some() && lengths.all(|length| length == 1);
    single && granted.len() == 1 || lists.iter().all(|list| list.as_deref() == Some(granted))
}

/// Whether a list is the folder whose mounts name GPUs. Only two spellings count, because each match reads
/// every mount.
pub(crate) fn is_volumes(list: &str) -> bool {
    list.strip_suffix('/').unwrap_or(list) == VOLUMES
}

/// Parses the list `said`. [`super::cdi`] reads the names of gpushare's own CDI devices in it.
fn parsed(words: &Words, said: Word, meaning: IndexMeaning) -> Result<Listed, RequestError> {
    refuse_sentinel(said)?;
    if said.value == NOT_KEPT {
        return Err(said.wrong(
            "this bundle was granted other GPUs than its list named, or in another order, so its limits cannot be told \
             apart when it is run again: write the bundle anew",
        ));
    }
    match word(said.value) {
        Some("all") => return Ok(Listed::All),
        Some(_) => return Ok(Listed::NoGpu),
        None => {}
    }
    if is_volumes(said.value) {
        if !words.policy.volume_mounts {
            return Err(said.wrong(UNREAD_VOLUMES));
        }
        return match handed::volumes(words)?.is_empty() {
            true => Err(said.wrong("no mount below that folder names a GPU; see the device plugin's log")),
            false => Ok(Listed::Nothing), // the mounts are a separate source
        };
    }
    let others = items(said.value).filter(|item| !names::is_ours(item));
    let list = each_once(
        said,
        others.map(|item| match qualified::specified(words, said, item)? {
            Some(nodes) => Ok(nodes),
            // The device nodes that came with the name identify the GPU.
            None if names::device(item).is_some_and(|device| !names::tells_gpu(device))
                && handed::is_handed(words) =>
            {
                Ok(Vec::new())
            }
            None => Ok(vec![selector(said, item, meaning)?]),
        }),
    )?;
    Ok(if list.is_empty() { Listed::Nothing } else { Listed::These(list) })
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use serde_json::{Value, json};

    use gpushare_claims::{Container, Policy, four};

    #[test]
    fn lists_that_only_begin_as_the_folder_of_mounts_are_refused_without_a_look_at_every_mount_for_each() {
        const MANY: u32 = 20_000;
        let folder = "/var/run/nvidia-container-devices";
        let list = |name: &str| format!("NVIDIA_VISIBLE_DEVICES={folder}{name}");
        let more = (0..MANY).map(|n| list(&n.to_string()));
        let env: Vec<String> = [list("")].into_iter().chain(more).collect();
        let mount = |name: String| json!({"source": "/dev/null", "destination": format!("{folder}{name}")});
        let others = (0..MANY).map(|n| mount(format!("X/{n}")));
        let mounts: Vec<Value> = others.chain([mount(format!("/{}", four()[1].uuid))]).collect();
        let bundle = json!({
            "annotations": {"io.kubernetes.cri.container-type": "container"},
            "mounts": mounts,
            "process": {"env": env},
        });
        let container = Container::from_json(&bundle);
        let policy = Policy { volume_mounts: true, ..Policy::default() };
        let start = Instant::now();
        let told = crate::read::read(&container, &policy, &four()).unwrap_err().to_string();
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
        assert!(told.contains("a list of GPUs holds indexes"), "{told}");
    }
}
