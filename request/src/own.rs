//! gpushare's own dialect: annotations `alloc.gpushare.io/NAME` (trusted), `gpushare.io/NAME` and
//! `gpushare.io/CONTAINER.NAME`, and environment `GPUSHARE_NAME`.
//!
//! All occurrences count. Within one channel, and between channels of equal trust, differing values are a conflict;
//! under `strict` the untrusted ones may only lower what the trusted ones granted.

use std::borrow::Cow;
use std::fmt::Display;

use gpushare_inventory::{Capabilities, Gpu};

use crate::cards::{Cards, total};
use crate::cdi;
use crate::channel::Trust;
use crate::claim::{Amount, Cap, Claim};
use crate::container::Container;
use crate::error::{RequestError, ValueError, shortened};
use crate::grammar::{Cores, DeviceSelector, Devices, MemoryAsk, Mode, Priority, count};
use crate::model::ModelFilter;
use crate::nvidia::Nvidia;
use crate::reading::{self, Said};
use crate::{ComputePolicy, Policy, Request};

const NAMES: [&str; 9] =
    ["memory", "cores", "count", "devices", "model", "mode", "compute-policy", "capabilities", "priority"];
const TRUSTED: &str = "alloc.gpushare.io/";
const ANNOTATION: &str = "gpushare.io/";
const VARIABLE: &str = "GPUSHARE_";
/// Beginnings of variables that steer gpushare's own tools and the simulated driver, which is no request, or that hold
/// CDI names, which are read elsewhere.
const OUR_VARIABLES: [&str; 3] = ["GPUSHARE_CONFIG", "GPUSHARE_SIMULATOR", cdi::VARIABLE];

/// One key as it was met.
#[derive(Clone, Debug)]
pub(crate) struct Entry<'a> {
    /// As the user wrote it.
    pub key: String,
    pub name: &'static str,
    pub value: Cow<'a, str>,
    pub trust: Trust,
}

impl Display for Entry<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}={:?}", shortened(&self.key), shortened(&self.value))
    }
}

/// What gpushare's own keys say; everything else is default.
#[derive(Debug, Default)]
pub(crate) struct Asked {
    /// One of the keys, for messages.
    pub by: String,
    /// How far the most trusted of them that may grant is believed.
    pub trust: Trust,
    /// The same of those that state memory.
    pub stating: Trust,
    /// The key that states memory, or the whole card.
    pub stated: Option<String>,
    memory: Option<MemoryAsk>,
    cores: Option<Cores>,
    devices: Option<Devices>,
    devices_text: String,
    model: ModelFilter,
    mode: Mode,
    compute_policy: Option<ComputePolicy>,
    capabilities: Option<Capabilities>,
    priority: Option<Priority>,
}

/// What our keys say. Where nobody's may grant, they may lower what another system's granted (`beside`), and are an error alone.
pub(crate) fn read(
    container: &Container,
    policy: &Policy,
    beside: bool,
) -> Result<Option<Asked>, RequestError> {
    let entries = entries(container, policy)?;
    let Some(first) = entries.first() else { return Ok(None) };
    let trusts = || entries.iter().map(|entry| entry.trust);
    let granting = trusts().filter(|trust| trust.grants(policy)).max();
    let Some(trust) = granting.or_else(|| trusts().max().filter(|_| beside)) else {
        return Err(RequestError::Untrusted { key: shortened(&first.key) });
    };
    let mut asked = Asked { by: first.to_string(), trust, stating: trust, ..Asked::default() };
    for name in NAMES {
        let of_name: Vec<&Entry> = entries.iter().filter(|entry| entry.name == name).collect();
        if let Some(entry) = chosen(&of_name, trust, policy)? {
            asked.set(entry)?;
            let states = name == "memory" || name == "mode" && asked.is_whole() && asked.memory.is_none();
            // Who may not grant has only lowered it.
            let stating = of_name.iter().map(|entry| entry.trust).filter(|trust| trust.grants(policy)).max();
            asked.stating = stating.filter(|_| states).unwrap_or(asked.stating);
        }
    }
    refuse_lifting(&entries, &asked)?;
    Ok(Some(asked))
}

/// A plugin's cap is no cap where anybody's compute policy lets the container use more.
fn refuse_lifting(entries: &[Entry], asked: &Asked) -> Result<(), RequestError> {
    let of = |name, granted| {
        let is_of = |entry: &&Entry| entry.name == name && (entry.trust == Trust::Granted) == granted;
        entries.iter().find(is_of)
    };
    match (of("cores", true), of("compute-policy", false), of("compute-policy", true)) {
        (Some(cap), Some(policy), None) if asked.lifts() => {
            Err(RequestError::Raised { key: policy.to_string(), trusted: cap.to_string() })
        }
        _ => Ok(()),
    }
}

/// Every entry of ours, an annotation for this container before the pod's unqualified one of the same name.
fn entries<'a>(container: &'a Container, policy: &Policy) -> Result<Vec<Entry<'a>>, RequestError> {
    let mut entries = Vec::new();
    let listed = container.annotations().get("gpushare.io/containers");
    let name = container.name_in_pod();
    let unqualified = listed.is_none_or(|list| list.split(',').any(|item| Some(item.trim()) == name));
    for (key, value) in container.annotations() {
        let rest = match (key.strip_prefix(TRUSTED), key.strip_prefix(ANNOTATION)) {
            (Some(rest), _) => rest,
            (None, Some("containers")) | (None, None) => continue,
            (None, Some(rest)) => rest,
        };
        let alloc = key.starts_with(TRUSTED);
        let trust = Trust::of_annotation(key, container, policy);
        // A list of trusted keys that reaches further does not make these a plugin's.
        let trust = if alloc { trust } else { trust.min(Trust::Pod) };
        let known = match rest.split_once('.') {
            Some((other, _)) if Some(other) != name => continue,
            Some((_, rest)) => known(rest),
            None if !alloc && (!unqualified || overridden(container, name, rest)) => continue,
            None => known(rest),
        };
        let name = known.ok_or_else(|| unknown(key))?;
        entries.push(Entry { key: key.clone(), name, value: value.into(), trust });
    }
    entries.extend(cdi::entries(container, policy)?);
    if policy.ignore_env {
        return Ok(entries);
    }
    for (key, value) in container.env() {
        let Some(rest) = key.strip_prefix(VARIABLE) else { continue };
        if OUR_VARIABLES.iter().any(|ours| key.starts_with(ours)) {
            continue;
        }
        let plain = rest.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_');
        let name = known(&rest.to_ascii_lowercase().replace('_', "-"))
            .filter(|_| plain)
            .ok_or_else(|| unknown(key))?;
        entries.push(Entry { key: key.to_owned(), name, value: value.into(), trust: Trust::Environment });
    }
    Ok(entries)
}

fn overridden(container: &Container, name: Option<&str>, key: &str) -> bool {
    name.is_some_and(|name| container.annotations().contains_key(&format!("{ANNOTATION}{name}.{key}")))
}

fn known(name: &str) -> Option<&'static str> {
    NAMES.into_iter().find(|known| *known == name)
}

fn unknown(key: &str) -> RequestError {
    let meant = match (key.strip_prefix(VARIABLE), key.rsplit_once(['/', '.'])) {
        (Some(rest), _) => {
            likely(rest).map(|name| format!("{VARIABLE}{}", name.to_uppercase().replace('-', "_")))
        }
        (None, Some((_, rest))) => {
            let before = &key[..key.len() - rest.len()];
            likely(rest).map(|name| format!("{}{name}", shortened(before).escape_debug()))
        }
        (None, None) => None,
    };
    RequestError::UnknownKey { key: format!("{:?}", shortened(key)), meant, known: NAMES.join(", ") }
}

/// The name that somebody meant who wrote `text`.
fn likely(text: &str) -> Option<&'static str> {
    let text = text.to_ascii_lowercase().replace('_', "-");
    let distance = |name: &&'static str| slips(text.as_bytes(), name.as_bytes());
    let nearest = NAMES.into_iter().min_by_key(distance)?;
    let beginning = || NAMES.into_iter().find(|name| text.len() > 2 && name.starts_with(&text));
    if distance(&nearest) <= 2 && text.len() > 2 { Some(nearest) } else { beginning() }
}

/// How many letters must be put in, left out, changed or swapped with their neighbour to make `wanted` of `written`
/// (optimal string alignment). A text far too long is not looked at.
fn slips(written: &[u8], wanted: &[u8]) -> usize {
    if written.len() > wanted.len() + 2 {
        return written.len();
    }
    let mut rows = vec![(0..=wanted.len()).collect::<Vec<_>>()];
    for (i, &letter) in written.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, &other) in wanted.iter().enumerate() {
            let changed = rows[i][j] + usize::from(letter != other);
            let mut least = changed.min(rows[i][j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && letter == wanted[j - 1] && written[i - 1] == other {
                least = least.min(rows[i - 1][j - 1] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[written.len()][wanted.len()]
}

/// The one entry that counts among those of one name; entries of `trust` grant on a strict node, and no others.
fn chosen<'a, 'b>(
    entries: &[&'b Entry<'a>],
    trust: Trust,
    policy: &Policy,
) -> Result<Option<&'b Entry<'a>>, RequestError> {
    let trusted: Vec<_> = entries.iter().copied().filter(|entry| entry.trust == trust).collect();
    let others: Vec<_> = entries.iter().copied().filter(|entry| entry.trust != trust).collect();
    if !policy.strict {
        return agreed(entries.iter().copied());
    }
    match (agreed(trusted.into_iter())?, agreed(others.into_iter())?) {
        (Some(trusted), Some(other)) if lowers(trusted, other)? => Ok(Some(other)),
        (Some(trusted), Some(other)) => {
            Err(RequestError::Raised { key: other.to_string(), trusted: trusted.to_string() })
        }
        (Some(trusted), None) => Ok(Some(trusted)),
        (None, Some(other)) if lowers_default(other, policy)? => Ok(Some(other)),
        (None, Some(other)) => Err(RequestError::AboveDefault { key: other.to_string() }),
        (None, None) => Ok(None),
    }
}

fn agreed<'a, 'b>(
    mut entries: impl Iterator<Item = &'b Entry<'a>>,
) -> Result<Option<&'b Entry<'a>>, RequestError>
where
    'a: 'b,
{
    let Some(first) = entries.next() else { return Ok(None) };
    for second in entries {
        if !same(first, second)? {
            let (first, second) = (first.to_string(), second.to_string());
            return Err(RequestError::Conflict { first, second });
        }
    }
    Ok(Some(first))
}

/// Whether two entries of one name say the same: 4Gi and 4GiB do, and 30 and 30%.
fn same(first: &Entry, second: &Entry) -> Result<bool, RequestError> {
    if first.value == second.value {
        return Ok(true);
    }
    Ok(match first.name {
        "memory" => parse::<MemoryAsk>(first)? == parse(second)?,
        "cores" => parse::<Cores>(first)? == parse(second)?,
        _ => false,
    })
}

/// Whether the untrusted entry asks for no more than the trusted one of the same name.
fn lowers(trusted: &Entry, other: &Entry) -> Result<bool, RequestError> {
    if trusted.value == other.value {
        return Ok(true);
    }
    Ok(match trusted.name {
        "memory" => match (parse(trusted)?, parse(other)?) {
            (MemoryAsk::Bytes(most), MemoryAsk::Bytes(bytes)) => bytes <= most,
            (MemoryAsk::Percent(most), MemoryAsk::Percent(percent)) => percent <= most,
            _ => false,
        },
        "cores" => parse::<Cores>(other)? <= parse::<Cores>(trusted)?,
        "priority" => parse::<Priority>(other)? <= parse::<Priority>(trusted)?,
        _ => false,
    })
}

/// Whether the untrusted entry asks for no more than a grant has whose trusted keys leave this one out.
fn lowers_default(other: &Entry, policy: &Policy) -> Result<bool, RequestError> {
    Ok(match other.name {
        "memory" => match (parse(other)?, policy.default_memory) {
            (MemoryAsk::Bytes(bytes), Some(most)) => bytes <= most,
            (_, Some(_)) => false,
            (_, None) => true, // all that is left: every size is less
        },
        "cores" => {
            policy.default_cores.is_none_or(|most| parse::<Cores>(other).is_ok_and(|cores| cores <= most))
        }
        "capabilities" => {
            let default = Capabilities::default();
            parse::<Capabilities>(other)?.iter().all(|capability| default.has(capability))
        }
        "priority" => parse::<Priority>(other)? <= Priority::default(),
        _ => false,
    })
}

fn parse<T>(entry: &Entry) -> Result<T, RequestError>
where
    T: std::str::FromStr,
    T::Err: Into<ValueError>,
{
    entry.value.parse().map_err(|error: T::Err| malformed(entry, error))
}

fn malformed(entry: &Entry, error: impl Into<ValueError>) -> RequestError {
    RequestError::Malformed {
        key: shortened(&entry.key),
        value: shortened(&entry.value),
        source: error.into(),
    }
}

impl Asked {
    fn set(&mut self, entry: &Entry) -> Result<(), RequestError> {
        match entry.name {
            "memory" => {
                self.memory = Some(parse(entry)?);
                self.stated = Some(entry.to_string());
            }
            "cores" => self.cores = Some(parse(entry)?),
            "model" => self.model = parse(entry)?,
            "mode" => {
                self.mode = parse(entry)?;
                self.stated = self.stated.take().or_else(|| self.is_whole().then(|| entry.to_string()));
            }
            "compute-policy" => self.compute_policy = Some(parse(entry)?),
            "capabilities" => self.capabilities = Some(parse(entry)?),
            "priority" => self.priority = Some(parse(entry)?),
            "count" => {
                let count = count(&entry.value).map_err(|error| malformed(entry, error))?;
                self.devices = Some(Devices::Any(count));
                self.devices_text = entry.to_string();
            }
            _ => self.set_devices(entry)?,
        }
        Ok(())
    }

    /// Explicit devices; a count beside them (read before, see `NAMES`) must be theirs.
    fn set_devices(&mut self, entry: &Entry) -> Result<(), RequestError> {
        let devices: Devices = parse(entry)?;
        let same = match (&self.devices, &devices) {
            (Some(Devices::Any(count)), Devices::These(list)) => usize::from(*count) == list.len(),
            (Some(_), _) => false,
            (None, _) => true,
        };
        if !same {
            return Err(RequestError::Conflict {
                first: self.devices_text.clone(),
                second: entry.to_string(),
            });
        }
        self.devices = Some(devices);
        self.devices_text = entry.to_string();
        Ok(())
    }

    /// Whether a key of gpushare's own names driver capabilities; NVIDIA's variable may be the image's.
    pub fn chooses_capabilities(&self) -> bool {
        self.capabilities.is_some()
    }

    /// What our keys say beside another system's: of memory as its channel is believed, and of all else.
    pub fn claims(&self, cards: Cards) -> Result<[Claim; 2], RequestError> {
        self.refuse_part_of_whole()?;
        let of = |trust| {
            let said = Said { key: "", value: "", trust };
            Claim { by: self.stated.clone().unwrap_or_else(|| self.by.clone()), ..Claim::by(said) }
        };
        let gpus = match &self.devices {
            None | Some(Devices::Any(_)) => None,
            Some(Devices::All) => Some(cards.all()),
            Some(Devices::These(list)) => Some(
                list.iter()
                    .map(|selector| cards.find(&self.devices_text, selector))
                    .collect::<Result<_, _>>()?,
            ),
        };
        let memory = |_: usize, gpu: &Gpu| {
            let memory = match self.memory {
                Some(MemoryAsk::Bytes(memory)) => Some(memory),
                Some(MemoryAsk::Percent(percent)) => Some(total(gpu)?.percent(percent)),
                Some(MemoryAsk::Rest) | None => None,
            };
            Ok(Amount { memory, cores: None })
        };
        let memory = of(self.stating).stating(&cards.all(), memory)?;
        let rest = of(self.trust).each(Amount { memory: None, cores: self.cores.map(Cap::from) });
        let gpus = gpus.map(|gpus: Vec<&Gpu>| gpus.iter().map(|gpu| gpu.uuid).collect());
        let burst = self.lifts().then_some(Cores::ALL);
        Ok([
            Claim { exclusive: self.is_whole(), ..memory },
            Claim { by: self.by.clone(), gpus, count: self.counted(), burst, ..rest },
        ])
    }

    /// The number of GPUs that is asked for, where one is said.
    pub fn counted(&self) -> Option<usize> {
        match self.devices {
            Some(Devices::Any(count)) => Some(usize::from(count)),
            _ => None,
        }
    }

    /// Whether more compute may be used than the share.
    pub fn lifts(&self) -> bool {
        matches!(self.compute_policy, Some(ComputePolicy::Burst | ComputePolicy::None))
    }

    /// Puts into `request` what only our keys can say, as far as no source of a higher rank is there (`outranked`). A cap that
    /// another one states (`capped`) stays one.
    ///
    /// # Errors
    /// On a strict node when the compute policy would lift such a cap.
    pub fn fill(
        self,
        request: &mut Request,
        outranked: bool,
        capped: bool,
        strict: bool,
    ) -> Result<(), RequestError> {
        let lifts = self.lifts() && (capped || outranked);
        if let Some(policy) = self.compute_policy {
            let first = format!("compute-policy={:?}", policy.name());
            let second = "another system's limit on compute";
            match lifts {
                true if strict => return Err(reading::conflict(first, second)),
                true => request.notes.push(format!("{first} is ignored: {second} stays")),
                false => {
                    request.compute_policy = policy;
                    request.burst = request.burst.filter(|_| policy == ComputePolicy::Burst);
                }
            }
        }
        request.model = self.model;
        if let Some(priority) = self.priority.filter(|_| !outranked) {
            request.priority = priority;
        }
        let fits = |capabilities: &Capabilities| {
            !outranked || capabilities.iter().all(|capability| request.capabilities.has(capability))
        };
        if let Some(capabilities) = self.capabilities.filter(fits) {
            request.capabilities = capabilities;
        }
        Ok(())
    }

    fn is_whole(&self) -> bool {
        self.mode == Mode::Exclusive
    }

    /// A whole card and a part of one contradict each other.
    fn refuse_part_of_whole(&self) -> Result<(), RequestError> {
        if !self.is_whole() {
            return Ok(());
        }
        let cores = self.cores.filter(|cores| cores.percent() < 100).map(|cores| format!("cores={cores}"));
        let memory = self.memory.filter(|memory| *memory != MemoryAsk::Percent(100));
        match cores.or_else(|| memory.map(|memory| format!("memory={memory}"))) {
            Some(second) => Err(RequestError::Conflict { first: "mode=\"exclusive\"".to_owned(), second }),
            None => Ok(()),
        }
    }

    /// Whether our keys ask for another number of GPUs than the list of these has.
    pub fn contradicts(&self, list: usize, strict: bool) -> bool {
        match &self.devices {
            Some(Devices::Any(count)) => usize::from(*count) != list,
            None if strict && self.trust == Trust::Granted => list > 1,
            _ => false,
        }
    }

    /// The whole request. NVIDIA's variables beside ours fill in what ours leave open: a list names the GPUs, `all`
    /// (which CUDA images set) nothing in particular. `none` says in so many words that there shall be no GPU, and so
    /// contradicts ours; `void` or an empty list only keeps NVIDIA's own parts away, as CDI specifications and gpushare
    /// itself have it.
    pub fn with_nvidia(self, nvidia: Nvidia, policy: &Policy) -> Result<Request, RequestError> {
        if nvidia.wants_none {
            return Err(RequestError::Conflict {
                first: self.by,
                second: format!("NVIDIA_VISIBLE_DEVICES={:?}", shortened(&nvidia.devices_text)),
            });
        }
        self.refuse_part_of_whole()?;
        let exclusive = self.is_whole();
        // An image's list may choose the GPU where variables grant nothing, and never makes more of it.
        let chooses = |list: &[DeviceSelector]| !policy.strict && (!policy.ignore_env || list.len() == 1);
        let devices = match (self.devices, nvidia.devices) {
            (None, Some(Devices::These(list))) if chooses(&list) => Devices::These(list),
            (None, _) => Devices::Any(1),
            (Some(Devices::These(ours)), Some(Devices::These(theirs))) if ours != theirs => {
                return Err(RequestError::Conflict {
                    first: self.devices_text,
                    second: format!("NVIDIA_VISIBLE_DEVICES={:?}", shortened(&nvidia.devices_text)),
                });
            }
            (Some(Devices::Any(count)), Some(Devices::These(list))) if usize::from(count) != list.len() => {
                return Err(RequestError::Conflict {
                    first: self.devices_text,
                    second: format!("NVIDIA_VISIBLE_DEVICES={:?}", shortened(&nvidia.devices_text)),
                });
            }
            (Some(Devices::Any(_)), Some(list @ Devices::These(_))) if !policy.strict => list,
            (Some(ours), _) => ours,
        };
        let whole = if exclusive { MemoryAsk::Percent(100) } else { MemoryAsk::Rest };
        let default_memory = policy.default_memory.filter(|_| !exclusive).map_or(whole, MemoryAsk::Bytes);
        Ok(Request {
            cores: self.cores.or(policy.default_cores.filter(|_| !exclusive)),
            model: self.model,
            mode: self.mode,
            compute_policy: self.compute_policy.unwrap_or_default(),
            capabilities: self
                .capabilities
                .or(nvidia.capabilities.filter(|_| !policy.strict))
                .unwrap_or_default(),
            priority: self.priority.unwrap_or_default(),
            ..Request::new(devices, self.memory.unwrap_or(default_memory))
        })
    }
}

#[cfg(test)]
mod tests;
