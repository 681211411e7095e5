//! The list of GPUs in `NVIDIA_VISIBLE_DEVICES`, which nearly every system writes.
//!
//! Grammar and precedence are those of NVIDIA's toolkit (internal/config/image/cuda_image.go, devices.go): `void` anywhere
//! wins, then the first of `all` and `none`; items are trimmed and empty ones dropped.

use std::collections::BTreeSet;

use gpushare_inventory::{Gpu, GpuUuid};

use crate::NvidiaPolicy;
use crate::cards::{Cards, IndexMeaning};
use crate::cdi;
use crate::channel::Trust;
use crate::claim::Claim;
use crate::container::{Container, Engine, Node};
use crate::error::{RequestError, shortened};
use crate::grammar::DeviceSelector;
use crate::nvidia::{DEVICES, NOT_KEPT, granted_list};
use crate::reading::{Reading, Said, conflict};
use crate::whole;

/// The driver's major number; from 254 up its minors are control nodes.
const MAJOR: i64 = 195;
const FIRST_CONTROL_MINOR: i64 = 254;
/// The GPUs of a container.
const MOST: usize = 16;

/// What the lists of a bundle name.
#[derive(Clone, Debug)]
pub(crate) enum Named<'a> {
    /// Nothing at all: no list, an empty one, or `void` and no node.
    Nothing,
    /// `none`: no GPU, in so many words.
    NoGpu(Said<'a>),
    /// GPUs, in the list's order, each once.
    Gpus(Said<'a>, Vec<&'a Gpu>),
}

/// What one list says, before anybody looked at the node's GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Listed {
    /// Empty, or `void`.
    Nothing,
    /// `none`.
    NoGpu,
    /// `all`.
    All,
    /// These, each once.
    These(Vec<DeviceSelector>),
}

/// What makes the lists of a bundle a request by themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Carrier {
    /// A list that names GPUs.
    List,
    /// GPUs' nodes beside a list that is `void`.
    Nodes,
}

/// By what the lists ask for GPUs. Looks at the bundle alone: most containers ask for nothing.
pub(crate) fn carrier(reading: &Reading) -> Option<Carrier> {
    if reading.policy.nvidia == NvidiaPolicy::Ignore {
        return None;
    }
    let of_list = |said: &Said| match word(said.value) {
        Some("all") => Some(Carrier::List),
        Some("void") => gpu_nodes(reading.container).next().map(|_| Carrier::Nodes),
        Some(_) => None,
        None => items(said.value).any(|item| !cdi::is_ours(item)).then_some(Carrier::List),
    };
    let carriers: Vec<Carrier> = lists(reading.container).iter().filter_map(of_list).collect();
    carriers.iter().copied().find(|carrier| *carrier == Carrier::List).or(carriers.first().copied())
}

/// Whether GPUs are named by mounts.
pub(crate) fn is_in_mounts(reading: &Reading) -> bool {
    reading.policy.volume_mounts && lists(reading.container).iter().any(|said| is_volumes(said.value))
}

/// Whether a list is the folder whose mounts name GPUs: no more than two spellings, since each is a look at every mount.
pub(crate) fn is_volumes(list: &str) -> bool {
    list.strip_suffix('/').unwrap_or(list) == whole::VOLUMES
}

/// The GPUs that the lists name. A list that is `void` beside nodes of GPUs names those: so CDI leaves a bundle.
pub(crate) fn named<'a>(
    reading: &Reading<'a>,
    cards: Cards<'a>,
    meaning: IndexMeaning,
) -> Result<Named<'a>, RequestError> {
    let nodes = nodes(reading, cards)?;
    let mut found: Option<Named> = None;
    let mut void = None;
    for said in lists(reading.container) {
        if word(said.value) == Some("void") {
            void = Some(said);
            continue;
        }
        let next = match of_list(reading, cards, meaning, said)? {
            Named::Nothing => continue,
            next => next,
        };
        found = Some(match found {
            None => next,
            Some(first) => both(reading, first, next)?,
        });
    }
    match (found, nodes, void) {
        (Some(Named::Gpus(said, _)), None, Some(void)) => Err(conflict(said, void)),
        // CDI's mark stands for its nodes, which are kubelet's: a pod's own entry must not name others.
        (Some(named), Some((said, gpus)), Some(_)) => both(reading, named, Named::Gpus(said, gpus)),
        (Some(named), ..) => Ok(named),
        (None, Some((said, gpus)), _) => Ok(Named::Gpus(said, gpus)),
        (None, None, _) => Ok(Named::Nothing),
    }
}

/// Whether `granted` are the list's GPUs in its order, whichever its numbers mean: limits may count by position.
pub(crate) fn is_in_order<'a>(reading: &Reading<'a>, cards: Cards<'a>, granted: &[GpuUuid]) -> bool {
    let list = |meaning| match named(reading, cards, meaning) {
        Ok(Named::Gpus(_, gpus)) => Some(gpus.iter().map(|gpu| gpu.uuid).collect::<Vec<_>>()),
        _ => None,
    };
    let lists = [IndexMeaning::Pci, IndexMeaning::Minor].map(list);
    // Of a single GPU the position is known.
    let mut lengths = lists.iter().flatten().map(Vec::len).peekable();
    let single = lengths.peek().is_some() && lengths.all(|length| length == 1);
    single && granted.len() == 1 || lists.iter().all(|list| list.as_deref() == Some(granted))
}

/// What the lists claim, and the GPUs; nothing where they name none. `none` contradicts the limits that stand beside it.
pub(crate) fn claimed<'a>(
    reading: &Reading<'a>,
    cards: Cards<'a>,
    meaning: IndexMeaning,
) -> Result<Option<(Claim, Vec<&'a Gpu>)>, RequestError> {
    let remedy = "asks for no GPU beside a request for a share: name its GPUs, or remove the request";
    match named(reading, cards, meaning)? {
        Named::Gpus(said, gpus) => Ok(Some((Claim::by(said).naming(&gpus), gpus))),
        Named::NoGpu(said) => Err(said.wrong(remedy)),
        Named::Nothing => Ok(None),
    }
}

/// Whether a list or a node names GPUs. Looks at nothing but the bundle.
pub(crate) fn names_gpus(reading: &Reading) -> bool {
    let names = |list: &str| word(list).map_or_else(|| items(list).next().is_some(), |word| word == "all");
    gpu_nodes(reading.container).next().is_some()
        || lists(reading.container).iter().any(|said| names(said.value))
}

/// The different lists that count, each as it was before its request was granted where the bundle is run again. docker appends
/// its own, so outside CRI the last one counts alone.
pub(crate) fn lists(container: &Container) -> Vec<Said<'_>> {
    let granted = granted_list(container);
    let said = |value| {
        let value = granted.filter(|_| value == "void").unwrap_or(value);
        Said { key: DEVICES, value, trust: Trust::Environment }
    };
    let mut all = container.named(DEVICES).map(|(_, value)| said(value));
    if container.engine() == Engine::Other {
        return all.next_back().into_iter().collect();
    }
    let mut met = BTreeSet::new(); // a bundle may hold a hundred thousand
    all.filter(|said| met.insert(said.value)).collect()
}

fn of_list<'a>(
    reading: &Reading,
    cards: Cards<'a>,
    meaning: IndexMeaning,
    said: Said<'a>,
) -> Result<Named<'a>, RequestError> {
    let selectors = match parsed(reading, said, meaning)? {
        Listed::Nothing => return Ok(Named::Nothing),
        Listed::NoGpu => return Ok(Named::NoGpu(said)),
        Listed::All if cards.all().is_empty() => return Err(said.wrong("this node has no GPU")),
        Listed::All => return Ok(Named::Gpus(said, cards.all())),
        Listed::These(selectors) => selectors,
    };
    found(cards, said, &selectors).map(|gpus| Named::Gpus(said, gpus))
}

/// The GPUs of these names, which `said` holds, each once.
pub(crate) fn found<'a>(
    cards: Cards<'a>,
    said: Said,
    selectors: &[DeviceSelector],
) -> Result<Vec<&'a Gpu>, RequestError> {
    let mut gpus: Vec<&Gpu> = Vec::new();
    for selector in selectors {
        let gpu = cards.find(said.key, selector)?;
        if !gpus.iter().any(|other| other.uuid == gpu.uuid) {
            gpus.push(gpu);
        }
    }
    Ok(gpus)
}

/// What the list `said` says. Names of gpushare's own CDI devices in it are read elsewhere.
pub(crate) fn parsed(reading: &Reading, said: Said, meaning: IndexMeaning) -> Result<Listed, RequestError> {
    refuse_sentinel(said)?;
    if said.value == NOT_KEPT {
        return Err(said.wrong(
            "this bundle was granted other GPUs than its list named, or in another order, so its limits cannot be told \
             apart when it is run again: write the bundle anew",
        ));
    }
    match word(said.value) {
        Some("all") => return Ok(Listed::All),
        Some("none") => return Ok(Listed::NoGpu),
        Some(_) => return Ok(Listed::Nothing),
        None => {}
    }
    if is_volumes(said.value) {
        refuse_volumes(reading, said)?;
        let list = selectors(said, whole::below_volumes(reading.container), meaning)?;
        return match list.is_empty() {
            true => Err(said.wrong("no mount below that folder names a GPU; see the device plugin's log")),
            false => Ok(Listed::These(list)),
        };
    }
    let list = selectors(said, items(said.value).filter(|item| !cdi::is_ours(item)), meaning)?;
    Ok(if list.is_empty() { Listed::Nothing } else { Listed::These(list) })
}

/// Refuses the device plugin's strategy `volume-mounts`, which makes mounts of the GPUs' names, where it is not read.
fn refuse_volumes(reading: &Reading, said: Said) -> Result<(), RequestError> {
    if reading.policy.volume_mounts {
        return Ok(());
    }
    Err(said.wrong(
        "requests by volume mounts are not read here: have the administrator set request.volume_mounts, or name \
         GPUs by index or UUID (device plugin: deviceListStrategy envvar)",
    ))
}

/// The names of GPUs, each once.
pub(crate) fn selectors<'a>(
    said: Said,
    names: impl Iterator<Item = &'a str>,
    meaning: IndexMeaning,
) -> Result<Vec<DeviceSelector>, RequestError> {
    let mut list = Vec::new();
    for name in names {
        let selector = selector(said, name, meaning)?;
        if list.contains(&selector) {
            continue;
        }
        if list.len() == MOST {
            return Err(said.wrong(format!("a list names at most {MOST} GPUs: name fewer, or write all")));
        }
        list.push(selector);
    }
    Ok(list)
}

/// Two lists of one bundle, which under a CRI engine may be a plugin's and a pod's.
fn both<'a>(reading: &Reading, first: Named<'a>, second: Named<'a>) -> Result<Named<'a>, RequestError> {
    match (first, second) {
        (Named::Gpus(first, ours), Named::Gpus(second, theirs)) => {
            let is_in = |gpu: &&Gpu, list: &[&Gpu]| list.iter().any(|other| other.uuid == gpu.uuid);
            let common: Vec<&Gpu> = ours.iter().filter(|gpu| is_in(gpu, &theirs)).copied().collect();
            if common.len() == ours.len() && common.len() == theirs.len() {
                return Ok(Named::Gpus(first, ours));
            }
            if reading.policy.strict || common.is_empty() {
                return Err(conflict(first, second));
            }
            reading.note(format!("{first} and {second} differ: the GPUs of both count"));
            Ok(Named::Gpus(first, common))
        }
        (Named::NoGpu(first), Named::Gpus(second, _)) | (Named::Gpus(first, _), Named::NoGpu(second)) => {
            Err(conflict(first, second))
        }
        (first, Named::Nothing | Named::NoGpu(_)) => Ok(first),
        (Named::Nothing, second) => Ok(second),
    }
}

/// The nodes of GPUs, without those of the driver itself.
fn gpu_nodes(container: &Container) -> impl Iterator<Item = &Node> {
    let is_gpu = |node: &&Node| node.major == MAJOR && (0..FIRST_CONTROL_MINOR).contains(&node.minor);
    container.nodes().iter().filter(is_gpu)
}

/// The GPUs whose nodes the bundle holds, and the word for messages.
pub(crate) fn nodes<'a>(
    reading: &Reading<'a>,
    cards: Cards<'a>,
) -> Result<Option<(Said<'a>, Vec<&'a Gpu>)>, RequestError> {
    let mut found = None;
    for node in gpu_nodes(reading.container) {
        let selector = DeviceSelector::Minor(u32::try_from(node.minor).unwrap_or(u32::MAX));
        let gpu = cards.find("linux.devices", &selector)?;
        let said = Said { key: "linux.devices", value: &node.path, trust: Trust::Environment };
        let (_, gpus) = found.get_or_insert((said, Vec::<&Gpu>::new()));
        if !gpus.iter().any(|other| other.uuid == gpu.uuid) {
            gpus.push(gpu);
        }
    }
    Ok(found)
}

pub(crate) fn selector(
    said: Said,
    item: &str,
    meaning: IndexMeaning,
) -> Result<DeviceSelector, RequestError> {
    if item.starts_with("MIG-") || item.split_once(':').is_some_and(|(gpu, _)| gpu.parse::<u32>().is_ok()) {
        return Err(
            said.wrong("gpushare shares whole cards, not MIG instances: name the GPU by index or UUID")
        );
    }
    if let Some(docker) = said.value.trim_matches('"').strip_prefix("device=") {
        let docker = shortened(docker);
        return Err(said.wrong(format!("that is docker's --gpus syntax: write {}", docker.escape_debug())));
    }
    if let Some((_, name)) = item.split_once('=').filter(|(kind, _)| kind.contains('/')) {
        let name = shortened(name);
        return Err(
            said.wrong(format!("gpushare reads no CDI names of others: write {}", name.escape_debug()))
        );
    }
    let remedy = "a list of GPUs holds indexes, UUIDs or unique beginnings of UUIDs (GPU-…), or is `all`";
    match (item.parse().map_err(|_| said.wrong(remedy))?, meaning) {
        (DeviceSelector::Index(number), IndexMeaning::Minor) => Ok(DeviceSelector::Minor(number)),
        (selector, _) => Ok(selector),
    }
}

/// What Aliyun's device plugin writes where it found no pod for an allocation: it succeeds towards kubelet, and a runtime
/// that takes the text for a list gives nothing, or everything.
fn refuse_sentinel(said: Said) -> Result<(), RequestError> {
    let amount = said.value.strip_prefix("no-gpu-has-").and_then(|rest| rest.strip_suffix("-to-run"));
    let amount = amount.filter(|amount| amount.starts_with(|c: char| c.is_ascii_digit()));
    match amount {
        Some(amount) => Err(said.wrong(format!(
            "the device plugin found no pod that waits for {}: delete the pod and start it anew; usual causes are a scheduler \
             extender that is not set up, several GPU containers in one pod, or an annotation that could not be written",
            shortened(amount).escape_debug()
        ))),
        None => Ok(()),
    }
}

/// The items of a list that are not empty.
pub(crate) fn items(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|item| !item.is_empty())
}

/// The word in a list that counts for the whole of it.
pub(crate) fn word(text: &str) -> Option<&str> {
    let void = items(text).find(|item| *item == "void");
    void.or_else(|| items(text).find(|item| matches!(*item, "all" | "none")))
}

/// The GPUs of a `limit`, which is nothing without one, and the word that names them.
pub(crate) fn limited<'a>(
    reading: &Reading<'a>,
    cards: Cards<'a>,
    meaning: IndexMeaning,
    limit: Said,
) -> Result<(Said<'a>, Vec<&'a Gpu>), RequestError> {
    match named(reading, cards, meaning)? {
        Named::Gpus(list, gpus) => Ok((list, gpus)),
        Named::Nothing | Named::NoGpu(_) => Err(RequestError::LimitWithoutGpu { by: limit.to_string() }),
    }
}

/// The minor of a GPU's node; `None` for any other node.
pub(crate) fn minor(node: &crate::container::Node) -> Option<u32> {
    let is_gpu = node.major == MAJOR && (0..FIRST_CONTROL_MINOR).contains(&node.minor);
    u32::try_from(node.minor).ok().filter(|_| is_gpu)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use serde_json::{Value, json};

    use crate::cards::four;
    use crate::{Container, Policy};

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
        let told = crate::read(&container, &policy, &four()).unwrap_err().to_string();
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
        assert!(told.contains("a list of GPUs holds indexes"), "{told}");
    }
}
