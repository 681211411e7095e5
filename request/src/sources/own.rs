//! Reads gpushare's own keys: annotations `alloc.gpushare.io/NAME` (trusted), `gpushare.io/NAME` and
//! `gpushare.io/CONTAINER.NAME`, and variables `GPUSHARE_NAME`.
//!
//! All occurrences count. Differing values of one rank are a conflict on every node, even on a node that cuts
//! other systems' values.

use gpushare_inventory::{DeviceMemory, Gpu, Profile};

use crate::dialects;
use crate::sources::cdi;
use crate::sources::entry::Entry;
use gpushare_claims::{
    Amount, Cap, Claim, ComputePolicy, Container, Cores, Devices, GrammarError, MemoryRequest, Mode,
    NodeGpus, Rank, RequestError, Scope, Span, Told, ValueError, Word, Words, conflict, count,
    rank_of_annotation, shortened,
};

const NAMES: [&str; 15] = [
    "memory",
    "memory-limit",
    POD_MEMORY,
    "cores",
    "count",
    "devices",
    "model",
    "mig",
    "mode",
    "compute-policy",
    "capabilities",
    "host-memory",
    "priority",
    "scope",
    "supervisor",
];
/// Memory of one share that the whole pod holds: `memory` and `scope` in one key.
const POD_MEMORY: &str = "pod-memory";
/// The GPU whose compute a device plugin gave while another of its resources gave the memory. Kubelet lets a
/// plugin choose each independently, and if both wrote the same annotation, only one would take effect.
const CORES_DEVICES: &str = "cores-devices";
/// GPUs that a device plugin gave whole. The plugin's other resources then say nothing.
const WHOLE_DEVICES: &str = "whole-devices";
/// The system in whose words programs in the container read their grant.
const TOLD: &str = "words";
const TRUSTED: &str = "alloc.gpushare.io/";
/// The prefix of the annotations with which a pod's author makes a request.
pub const ANNOTATION: &str = "gpushare.io/";
const VARIABLE: &str = "GPUSHARE_";
/// Prefixes of variables that are not request keys: they configure gpushare's tools and the simulated driver,
/// or they hold CDI names, which are read in [`cdi`].
const OUR_VARIABLES: [&str; 3] = ["GPUSHARE_CONFIG", "GPUSHARE_SIMULATOR", cdi::VARIABLE];

/// Whether the bundle holds one of gpushare's keys, valid or not.
pub(crate) fn asks(words: &Words) -> bool {
    entries(words).map_or(true, |entries| !entries.is_empty())
}

/// The words without those of a system whose resources a gpushare device plugin serves: the plugin's own keys
/// state the grant, and the container's programs read it in the words of that system.
pub(crate) fn untold<'a>(words: Words<'a>) -> Words<'a> {
    match told(&words) {
        None => words,
        Some(told) => words.without(dialects::tells(told)),
    }
}

/// The system in whose words the container reads its grant.
pub(crate) fn told(words: &Words) -> Option<Told> {
    let key = format!("{TRUSTED}{TOLD}");
    let value = words.container.annotations().get(&key)?;
    if rank_of_annotation(&key, words.container, words.policy) != Rank::Granted {
        return None;
    }
    match value.as_str() {
        "aliyun" => Some(Told::Aliyun { unit: words.policy.dialects.aliyun_unit.unwrap_or(1 << 30) }),
        "hami" => Some(Told::Hami),
        _ => None,
    }
}

/// The first of gpushare's variables, if the settings say that variables are not read.
pub(crate) fn unread<'a>(words: &Words<'a>) -> Option<Word<'a>> {
    let named = |word: &Word| is_variable(word.key) || word.key.starts_with(cdi::VARIABLE);
    words.variables().find(named).filter(|_| words.policy.ignore_env)
}

/// One claim for each of gpushare's keys, most trusted first.
pub(crate) fn claims<'a>(words: &Words<'a>, node: NodeGpus<'a>) -> Result<Vec<Claim>, RequestError> {
    let entries = entries(words)?;
    let mut claims = Vec::new();
    for rank in [Rank::Granted, Rank::Pod, Rank::Environment] {
        let keys = Keys::of(entries.iter().filter(|entry| entry.rank == rank))?;
        claims.extend(keys.claims(words, node)?);
    }
    Ok(claims)
}

/// The keys of one rank, one entry for each name.
struct Keys<'a, 'b>(Vec<&'b Entry<'a>>);

impl<'a, 'b> Keys<'a, 'b> {
    fn of(entries: impl Iterator<Item = &'b Entry<'a>>) -> Result<Self, RequestError> {
        let mut keys: Vec<&Entry> = Vec::new();
        for entry in entries {
            match keys.iter().find(|key| key.name == entry.name) {
                None => keys.push(entry),
                Some(first) if is_same(first, entry)? => {}
                Some(first) => return Err(conflict(first, entry)),
            }
        }
        // `count` comes before `devices`, and must be the number of explicit devices.
        keys.sort_by_key(|key| NAMES.iter().position(|name| *name == key.name));
        Ok(Self(keys))
    }

    fn named(&self, name: &str) -> Option<&'b Entry<'a>> {
        self.0.iter().copied().find(|key| key.name == name)
    }

    fn parsed<T>(&self, name: &str) -> Result<Option<T>, RequestError>
    where
        T: std::str::FromStr,
        T::Err: Into<ValueError>,
    {
        self.named(name).map(Entry::parse).transpose()
    }

    fn claims(&self, words: &Words, node: NodeGpus) -> Result<Vec<Claim>, RequestError> {
        self.refuse_part_of_whole(words)?;
        if let (Some(memory), Some(scope)) = (self.named(POD_MEMORY), self.named("scope"))
            && scope.value != "pod"
        {
            return Err(conflict(memory, scope));
        }
        self.0.iter().map(|key| self.claim(key, words, node)).collect()
    }

    fn claim(&self, key: &Entry, words: &Words, node: NodeGpus) -> Result<Claim, RequestError> {
        let claim = blank(key);
        Ok(match key.name {
            "memory" => claim.each(Amount { memory: Some(key.parse()?), cores: None }),
            "cores" => {
                // 100 % stays a percentage here, so it takes precedence over another system's word for no
                // limit.
                let cap = Cap::Percent(key.parse()?);
                Claim { burst: self.lifted()?, ..claim.each(Amount::cores(cap)) }
            }
            "mode" => Claim { mode: Some(key.parse()?), ..claim },
            "model" => Claim { model: Some(key.parse()?), ..claim },
            "mig" => Claim { profile: Some(key.parse()?), ..claim },
            "compute-policy" => {
                let burst = self.lifted()?.filter(|_| self.named("cores").is_none());
                Claim { compute_policy: Some(key.parse()?), burst, ..claim }
            }
            "capabilities" => Claim { capabilities: Some(key.parse()?), ..claim },
            "host-memory" => Claim { host_memory: Some(bytes(key)?), ..claim },
            "memory-limit" => Claim { memory_limit: Some(bytes(key)?), ..claim },
            "priority" => Claim { priority: Some(key.parse()?), ..claim },
            "count" => {
                let count = count(&key.value).map_err(|error| key.malformed(error))?;
                Claim { count: Some(count.into()), ..claim }
            }
            "supervisor" => Claim { supervisor: Some(key.parse()?), ..claim },
            "scope" => {
                let scope = key.parse()?;
                of_pod(key, scope, words.container)?;
                Claim { scope: Some(scope), ..claim }
            }
            POD_MEMORY => {
                of_pod(key, Scope::Pod, words.container)?;
                let claim = claim.each(Amount { memory: Some(key.parse()?), cores: None });
                Claim { scope: Some(Scope::Pod), ..claim }
            }
            WHOLE_DEVICES => Claim { mode: Some(Mode::Exclusive), ..claim.naming(&self.devices(key, node)?) },
            _ => claim.naming(&self.devices(key, node)?),
        })
    }

    /// The idle compute that the compute policy allows: all of it, unless the policy is `fixed`.
    fn lifted(&self) -> Result<Option<Cores>, RequestError> {
        let policy = self.parsed("compute-policy")?.unwrap_or(ComputePolicy::Fixed);
        Ok((policy != ComputePolicy::Fixed).then_some(Cores::ALL))
    }

    fn devices<'n>(&self, key: &Entry, node: NodeGpus<'n>) -> Result<Vec<&'n Gpu>, RequestError> {
        let Devices::These(list) = key.parse()? else {
            let Some(profile) = self.parsed::<Profile>("mig")? else { return Ok(node.unnamed()) };
            let is_of_size = |gpu: &&Gpu| gpu.instance.as_ref().is_some_and(|part| part.profile == profile);
            return Ok(node.all().into_iter().filter(is_of_size).collect());
        };
        if let Some(count) = self.named("count").filter(|count| count.value != list.len().to_string()) {
            return Err(conflict(count, key));
        }
        let mut gpus: Vec<&Gpu> = Vec::new();
        for selector in &list {
            let gpu = node.find(&key.to_string(), selector)?;
            if gpushare_claims::contains(&gpus, gpu) {
                let why = format!("{selector} names a GPU that the list names already: write each GPU once");
                return Err(key.malformed(ValueError::Foreign(why)));
            }
            gpus.push(gpu);
        }
        Ok(gpus)
    }

    /// Refuses `mode=exclusive` together with a part of memory or compute, and `mode=time-slice` together
    /// with a limit, which nothing would enforce. Memory with time-slice is an expected need if a pod's
    /// author wrote both. Elsewhere one of them may come from the image, whose annotations podman passes on.
    fn refuse_part_of_whole(&self, words: &Words) -> Result<(), RequestError> {
        if let Some(mode) = self.named("mode").filter(|mode| mode.value == Mode::TimeSlice.name())
            && let Some(limit) = self
                .named("cores")
                .or(self.named("compute-policy"))
                .or(self.named("memory").filter(|_| words.container.sandbox().is_none()))
        {
            return Err(conflict(mode, limit));
        }
        let Some(mode) = self.named("mode").filter(|mode| mode.value == "exclusive") else { return Ok(()) };
        let cores = self.parsed::<Cores>("cores")?.filter(|cores| *cores != Cores::ALL);
        let memory =
            self.parsed::<MemoryRequest>("memory")?.filter(|memory| *memory != MemoryRequest::Percent(100));
        let cores = cores.and_then(|_| self.named("cores"));
        let part = cores.or_else(|| memory.and_then(|_| self.named("memory"))).or(self.named(POD_MEMORY));
        part.map_or(Ok(()), |part| Err(conflict(mode, part)))
    }
}

/// An amount in bytes.
fn bytes(key: &Entry) -> Result<DeviceMemory, RequestError> {
    let memory = key.parse::<MemoryRequest>()?.bytes();
    memory.ok_or_else(|| key.malformed(GrammarError::NotAnAmount))
}

fn blank(key: &Entry) -> Claim {
    let word = Word { key: "", value: "", rank: key.rank, is_variable: false };
    Claim { by: key.to_string(), span: Span::One, takes_defaults: true, ..Claim::by(word) }
}

/// Refuses a key that speaks for the whole pod in a variable, since the image's author could write it, and in
/// a bundle that names no pod.
fn of_pod(key: &Entry, scope: Scope, container: &Container) -> Result<(), RequestError> {
    let wrong = |why: String| Err(key.malformed(ValueError::Foreign(why)));
    match (scope, container.sandbox()) {
        _ if key.is_variable => {
            wrong(format!("a variable cannot speak for the pod: annotate it with gpushare.io/{}", key.name))
        }
        (Scope::Pod, None) => wrong(
            "the bundle names no pod: only containerd and CRI-O write one, each under keys of its own; leave it out"
                .to_owned(),
        ),
        _ => Ok(()),
    }
}

/// Whether two entries of one key mean the same, such as 4Gi and 4GiB, or 30 and 30%.
fn is_same(first: &Entry, second: &Entry) -> Result<bool, RequestError> {
    Ok(match first.name {
        _ if first.value == second.value => true,
        "memory" | POD_MEMORY => first.parse::<MemoryRequest>()? == second.parse()?,
        "cores" => first.parse::<Cores>()? == second.parse()?,
        _ => false,
    })
}

/// Every entry of gpushare's keys. An annotation for this container replaces the pod's unqualified one with
/// the same name.
fn entries<'a>(words: &Words<'a>) -> Result<Vec<Entry<'a>>, RequestError> {
    let container = words.container;
    let mut entries = Vec::new();
    let listed = container.annotations().get("gpushare.io/containers");
    let name = container.name_in_pod();
    let unqualified = listed.is_none_or(|list| list.split(',').any(|item| Some(item.trim()) == name));
    for (key, value) in container.annotations() {
        let rest = match (key.strip_prefix(TRUSTED), key.strip_prefix(ANNOTATION)) {
            (Some(rest), _) => rest,
            (None, Some("containers")) => continue,
            (None, Some(rest)) => rest,
            (None, None) if is_nearly_ours(key) => return Err(unknown(key)),
            (None, None) => continue,
        };
        let alloc = key.starts_with(TRUSTED);
        let rank = rank_of_annotation(key, container, words.policy);
        // Overly broad patterns in the setting for trusted keys must not turn these keys into a plugin's.
        let rank = if alloc { rank } else { rank.min(Rank::Pod) };
        let known = match rest.split_once('.') {
            Some((other, _)) if Some(other) != name => continue,
            Some((_, rest)) => known(rest),
            None if !alloc && (!unqualified || overridden(container, name, rest)) => continue,
            None => known(rest),
        };
        let of_plugin = || [CORES_DEVICES, WHOLE_DEVICES].into_iter().find(|name| alloc && rest == *name);
        if alloc && rest == TOLD {
            continue;
        }
        let known = known.or_else(of_plugin);
        let name = known.ok_or_else(|| unknown(key))?;
        entries.push(Entry { key: key.clone(), name, value: value.into(), rank, is_variable: false });
    }
    let is_whole = |entry: &Entry| entry.name == WHOLE_DEVICES && entry.rank == Rank::Granted;
    if entries.iter().any(is_whole) {
        let is_beside = |entry: &Entry| {
            entry.rank == Rank::Granted
                && entry.key.starts_with(TRUSTED)
                && ["memory", "devices"].contains(&entry.name)
        };
        entries.retain(|entry| !is_beside(entry));
    }
    entries.extend(cdi::entries(words)?);
    if !words.policy.ignore_env {
        entries.extend(variables(words)?);
    }
    Ok(entries)
}

fn variables<'a>(words: &Words<'a>) -> Result<Vec<Entry<'a>>, RequestError> {
    let mut entries = Vec::new();
    for Word { key, value, rank, .. } in words.variables().filter(|word| is_variable(word.key)) {
        let rest = key.strip_prefix(VARIABLE).unwrap_or_default();
        let plain = rest.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_');
        let name = known(&rest.to_ascii_lowercase().replace('_', "-"))
            .filter(|_| plain)
            .ok_or_else(|| unknown(key))?;
        entries.push(Entry { key: key.to_owned(), name, value: value.into(), rank, is_variable: true });
    }
    Ok(entries)
}

/// Whether the variable is one of gpushare's keys, in upper or lower case: `gpushare_memory` is a request for
/// a share, too. Kubernetes sets variables named after every service; those of a service called gpushare do
/// not count.
pub(crate) fn is_variable(key: &str) -> bool {
    const LENGTH: usize = VARIABLE.len();
    let Some(head) = key.get(..LENGTH.min(key.len())) else { return false };
    let is_ours = head.eq_ignore_ascii_case(VARIABLE) || key.eq_ignore_ascii_case("GPUSHARE");
    let rest = key.get(LENGTH..).unwrap_or_default();
    is_ours && !OUR_VARIABLES.iter().any(|ours| key.starts_with(ours)) && !is_of_service(rest)
}

/// Whether it is a variable that kubelet creates for a service: `_SERVICE_HOST`, `_SERVICE_PORT…`, `_PORT`,
/// `_PORT_80_TCP…`.
fn is_of_service(rest: &str) -> bool {
    let mut parts = rest.split('_');
    rest.ends_with("SERVICE_HOST") || rest.contains("SERVICE_PORT") || parts.any(|part| part == "PORT")
}

/// Whether the annotation is one of gpushare's keys with a wrong prefix: `gpushare/memory`,
/// `gpushare.io.memory`, `GPUSHARE_MEMORY`.
fn is_nearly_ours(key: &str) -> bool {
    let lower = key.get(..key.len().min(40)).map(str::to_ascii_lowercase).unwrap_or_default();
    let rest =
        ["gpushare/", "gpushare.io.", "gpushare_", "gpushare.io/", "gpushare-io/", "alloc.gpushare.io/"]
            .iter()
            .find_map(|prefix| lower.strip_prefix(prefix));
    rest.is_some_and(|rest| likely(rest.rsplit('.').next().unwrap_or(rest)).is_some())
}

fn overridden(container: &Container, name: Option<&str>, key: &str) -> bool {
    name.is_some_and(|name| container.annotations().contains_key(&format!("{ANNOTATION}{name}.{key}")))
}

fn known(name: &str) -> Option<&'static str> {
    NAMES.into_iter().find(|known| *known == name)
}

fn unknown(key: &str) -> RequestError {
    let rest = key.rsplit(['/', '.']).next().unwrap_or(key);
    let before = &key[..key.len() - rest.len()];
    let variable = before.is_empty();
    let rest = if variable { rest.get(VARIABLE.len()..).unwrap_or("memory") } else { rest };
    let meant = likely(rest).map(|name| match (variable, before) {
        (true, _) => format!("{VARIABLE}{}", name.to_uppercase().replace('-', "_")),
        (false, before) if before.starts_with(TRUSTED) || before.starts_with(ANNOTATION) => {
            format!("{}{name}", shortened(before).escape_debug())
        }
        (false, _) => format!("{ANNOTATION}{name}"),
    });
    RequestError::UnknownKey { key: format!("{:?}", shortened(key)), meant, known: NAMES.join(", ") }
}

/// The key name that `text` probably means: at most two letters inserted, left out, changed or swapped with a
/// neighbour, or the beginning of a name.
fn likely(text: &str) -> Option<&'static str> {
    let text = text.to_ascii_lowercase().replace('_', "-");
    // Compare the length first, because the distance is slow to compute for a long text.
    let near = |name: &&str| text.len() <= name.len() + 2 && strsim::osa_distance(&text, name) <= 2;
    let nearest = NAMES.into_iter().filter(near).min_by_key(|name| strsim::osa_distance(&text, name));
    let beginning = || NAMES.into_iter().find(|name| name.starts_with(&text));
    if text.len() > 2 { beginning().or(nearest) } else { None }
}

#[cfg(test)]
mod tests;
