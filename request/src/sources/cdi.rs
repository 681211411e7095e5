//! Reads gpushare's own CDI names as requests: `gpushare.io/share=4GiB`, `gpushare.io/gpu=0`.
//!
//! They appear in annotations `cdi.k8s.io/*`, in `NVIDIA_VISIBLE_DEVICES`, and in variables `GPUSHARE_CDI_*`.
//! gpushare's CDI files set the latter, so that the name remains after an engine has applied it; the same
//! name may then appear twice. A name becomes entries of gpushare's own keys, and the same contradiction
//! rules apply. No name is trusted: CRI-O passes every annotation of a pod, and anybody can set variables.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use crate::sources::entry::Entry;
use crate::sources::list;
use crate::sources::names::{DEVICES, is_ours, items, word};
use crate::sources::{qualified, reserved};
use gpushare_claims::{
    Cores, GrammarError, MemoryRequest, NvidiaPolicy, Policy, Rank, RequestError, Words, conflict, shortened,
};

/// The CDI kind of a share of a GPU.
pub const SHARE_KIND: &str = "gpushare.io/share";
/// The CDI kind of a whole GPU.
pub const GPU_KIND: &str = "gpushare.io/gpu";
/// Prefix of the variables that gpushare's CDI files set. Each device has its own variable, so several
/// devices add up even if an engine keeps only one entry for each name.
pub const VARIABLE: &str = "GPUSHARE_CDI_";

/// The name of a share: its memory, optionally followed by a dash and its compute in percent. CDI allows no
/// `%` in names, so `25pct` stands for a quarter of the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShareName {
    /// Memory in bytes or in percent of the GPU.
    pub memory: MemoryRequest,
    /// Percent of compute; `None` uses the node's default.
    pub cores: Option<Cores>,
}

impl FromStr for ShareName {
    type Err = GrammarError;

    fn from_str(text: &str) -> Result<Self, GrammarError> {
        let (memory, cores) = values(text);
        let memory = memory.parse().ok().filter(|_| !text.contains('%'));
        let cores = cores.map(str::parse).transpose().map_err(|_| GrammarError::NotAShareName)?;
        Ok(Self { memory: memory.ok_or(GrammarError::NotAShareName)?, cores })
    }
}

/// Splits a share's name into memory and compute, in the grammar of gpushare's own keys.
fn values(name: &str) -> (String, Option<&str>) {
    let (memory, cores) = name.split_once('-').map_or((name, None), |(memory, cores)| (memory, Some(cores)));
    let memory = match memory.strip_suffix("pct") {
        Some(number) => format!("{number}%"),
        None => memory.to_owned(),
    };
    (memory, cores)
}

/// A CDI name under gpushare's vendor, `gpushare.io`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Name<'a> {
    /// [`SHARE_KIND`] or [`GPU_KIND`].
    kind: &'static str,
    name: &'a str,
}

impl fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CDI device {}={}", self.kind, shortened(self.name).escape_debug())
    }
}

/// The entries of gpushare's own keys that the names in the bundle stand for.
pub(crate) fn entries<'a>(words: &Words<'a>) -> Result<Vec<Entry<'a>>, RequestError> {
    let names = names(words)?;
    let Some(first) = names.first() else { return Ok(Vec::new()) };
    let contradiction = names.iter().skip(1).find(|name| match (first.kind, name.kind) {
        (GPU_KIND, GPU_KIND) => first.name == "all" || name.name == "all",
        _ => first != *name,
    });
    if let Some(second) = contradiction {
        return Err(conflict(first, second));
    }
    let entry = |name, value| Entry {
        key: first.kind.to_owned(),
        name,
        value,
        rank: Rank::Environment,
        is_variable: false,
    };
    if first.kind == GPU_KIND {
        let gpus: Vec<&str> = names.iter().map(|name| name.name).collect();
        return Ok(vec![entry("devices", gpus.join(",").into()), entry("mode", "exclusive".into())]);
    }
    first.name.parse::<ShareName>().map_err(|source| RequestError::Malformed {
        key: SHARE_KIND.to_owned(),
        value: shortened(first.name),
        source: source.into(),
    })?;
    let (memory, cores) = values(first.name);
    let mut entries = vec![entry("memory", memory.into())];
    entries.extend(cores.map(|cores| entry("cores", cores.into())));
    Ok(entries)
}

/// Whether the bundle names one of gpushare's CDI devices. Reads only the bundle.
pub(crate) fn is_named(words: &Words) -> bool {
    qualified::annotated(words).any(|(_, name)| is_ours(name))
        || !words.policy.ignore_env && words.variables().any(|word| is_its(word.key))
        || list::lists(words).iter().any(|word| items(word.value).any(is_ours))
}

/// Whether a variable belongs to one of these devices. Variables of claims are read elsewhere, under other
/// rules.
fn is_its(variable: &str) -> bool {
    variable.starts_with(VARIABLE) && !variable.starts_with(reserved::VARIABLE)
}

/// The names of gpushare's CDI devices, each once, in the order found.
fn names<'a>(words: &Words<'a>) -> Result<Vec<Name<'a>>, RequestError> {
    let mut texts: Vec<&str> =
        qualified::annotated(words).map(|(_, name)| name).filter(|name| is_ours(name)).collect();
    let is_read = !words.policy.ignore_env;
    for word in words.variables().filter(|word| is_read && is_its(word.key)) {
        if !is_ours(word.value) {
            return Err(RequestError::UnknownCdiDevice { name: word.to_string() });
        }
        texts.push(word.value);
    }
    texts.extend(listed(words)?);
    let mut names = Vec::new();
    let mut met = BTreeSet::new(); // a bundle may hold a hundred thousand
    for text in texts {
        let name = match text.split_once('=') {
            Some((SHARE_KIND, name)) => Name { kind: SHARE_KIND, name },
            Some((GPU_KIND, name)) => Name { kind: GPU_KIND, name },
            _ => {
                let name = shortened(text).escape_debug().to_string();
                return Err(RequestError::UnknownCdiDevice { name });
            }
        };
        if met.insert(name) {
            names.push(name);
        }
    }
    Ok(names)
}

/// The names in lists of GPUs. If the settings forbid reading them there, a name is an error: the container
/// must not start without the GPU that it names, or with all of another one.
fn listed<'a>(words: &Words<'a>) -> Result<Vec<&'a str>, RequestError> {
    let unread = match words.policy {
        Policy { ignore_env: true, .. } => Some("request.env"),
        Policy { nvidia: NvidiaPolicy::Ignore, .. } => Some("request.nvidia"),
        _ => None,
    };
    let mut ours = Vec::new();
    for list in list::lists(words) {
        let before = ours.len();
        ours.extend(items(list.value).filter(|item| is_ours(item)));
        let Some(first) = ours.get(before) else { continue };
        let name = shortened(first).escape_debug().to_string();
        if let Some(setting) = unread {
            return Err(RequestError::UnreadCdiDevice { name, setting });
        }
        if let Some(word @ ("void" | "none")) = word(list.value) {
            let second = format!("CDI device {name} in the same list");
            return Err(conflict(format!("{DEVICES}={word:?}"), second));
        }
    }
    Ok(ours)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::{Duration, Instant};

    use gpushare_inventory::DeviceMemory;

    use super::*;
    use gpushare_claims::{Container, DeviceSelector, Devices, Mode, Request, four};

    fn read(
        annotations: &[(&str, &str)],
        env: &[&str],
        policy: &Policy,
    ) -> Result<Option<Request>, RequestError> {
        let annotations: BTreeMap<_, _> =
            annotations.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
        let env = env.iter().map(|entry| entry.to_string()).collect();
        crate::read::read(&Container::new(annotations, env), policy, &four())
    }

    fn granted(annotations: &[(&str, &str)], env: &[&str]) -> Request {
        let read = read(annotations, env, &Policy::default());
        read.unwrap_or_else(|error| panic!("{annotations:?} {env:?}: {error}")).unwrap()
    }

    fn refused(annotations: &[(&str, &str)], env: &[&str]) -> String {
        read(annotations, env, &Policy::default()).expect_err(&format!("{annotations:?} {env:?}")).to_string()
    }

    const GIB: u64 = 1 << 30;

    #[test]
    fn a_share_is_asked_for_by_its_name_on_each_way() {
        let own = granted(&[], &["GPUSHARE_MEMORY=4GiB"]);
        for (annotations, env) in [
            (&[("cdi.k8s.io/plugin_0", "gpushare.io/share=4GiB")][..], &[][..]),
            (&[("cdi.k8s.io/a", "other.org/nic=1, gpushare.io/share=4GiB")], &[]),
            (&[], &["NVIDIA_VISIBLE_DEVICES=gpushare.io/share=4GiB"]),
            (&[], &["GPUSHARE_CDI_SHARE_4GIB=gpushare.io/share=4GiB"]),
            // An engine applied the device and also passed its annotation on.
            (
                &[("cdi.k8s.io/a", "gpushare.io/share=4GiB")],
                &["GPUSHARE_CDI_SHARE_4GIB=gpushare.io/share=4GiB", "GPUSHARE_MEMORY=4GiB"],
            ),
        ] {
            assert_eq!(granted(annotations, env), own, "{annotations:?} {env:?}");
        }
        let beside = granted(&[], &["NVIDIA_VISIBLE_DEVICES=gpushare.io/share=4GiB,1"]);
        assert_eq!(beside.devices, Devices::These(vec![DeviceSelector::Uuid(four()[1].uuid)]));
    }

    #[test]
    fn the_name_of_a_share_holds_memory_and_compute() {
        let bytes = |bytes| MemoryRequest::Bytes(DeviceMemory::from_bytes(bytes));
        for (name, memory, cores) in [
            ("4GiB", bytes(4 * GIB), None),
            ("1.5GiB-30", bytes(3 * GIB / 2), Cores::new(30)),
            ("25pct", MemoryRequest::Percent(25), None),
            ("25pct-100", MemoryRequest::Percent(25), Cores::new(100)),
        ] {
            assert_eq!(name.parse(), Ok(ShareName { memory, cores }), "{name}");
            let request = granted(&[("cdi.k8s.io/a", &format!("gpushare.io/share={name}"))], &[]);
            assert_eq!((request.memory, request.cores), (memory, cores), "{name}");
        }
        for name in
            ["", "4", "4GiB-", "4GiB-0", "4GiB-30%", "25%", "-30", "4GiB-30-1", "pct", "101pct", "all"]
        {
            assert_eq!(name.parse::<ShareName>(), Err(GrammarError::NotAShareName), "{name:?}");
            let told = refused(&[("cdi.k8s.io/a", &format!("gpushare.io/share={name}"))], &[]);
            assert!(told.contains("gpushare.io/share") && told.contains("25pct"), "{name:?}: {told}");
        }
    }

    #[test]
    fn whole_gpus_add_up_and_are_exclusive() {
        let of = |env: &[&str]| {
            let request = granted(&[], env);
            assert_eq!(request.mode, Mode::Exclusive, "{env:?}");
            assert_eq!(request.memory, MemoryRequest::Percent(100), "{env:?}");
            request.devices
        };
        let index = |index: usize| DeviceSelector::Uuid(four()[index].uuid);
        assert_eq!(of(&["GPUSHARE_CDI_GPU_0=gpushare.io/gpu=0"]), Devices::These(vec![index(0)]));
        assert_eq!(
            of(&["GPUSHARE_CDI_GPU_0=gpushare.io/gpu=0", "GPUSHARE_CDI_GPU_1=gpushare.io/gpu=1"]),
            Devices::These(vec![index(0), index(1)])
        );
        assert_eq!(
            of(&["NVIDIA_VISIBLE_DEVICES=gpushare.io/gpu=all"]),
            Devices::These([0, 1, 2, 3].map(index).to_vec())
        );
    }

    #[test]
    fn names_that_contradict_each_other_or_other_keys_are_a_conflict_naming_both() {
        let annotation = |value: &'static str| [("cdi.k8s.io/a", value)];
        for (annotations, env, parts) in [
            (
                annotation("gpushare.io/share=4GiB"),
                "GPUSHARE_MEMORY=8GiB",
                ["gpushare.io/share=\"4GiB\"", "8GiB"],
            ),
            (annotation("gpushare.io/share=4GiB-30"), "GPUSHARE_CORES=40", ["\"30\"", "\"40\""]),
            (annotation("gpushare.io/share=4GiB,gpushare.io/share=8GiB"), "", ["share=4GiB", "share=8GiB"]),
            (annotation("gpushare.io/share=4GiB,gpushare.io/gpu=0"), "", ["share=4GiB", "gpu=0"]),
            (annotation("gpushare.io/gpu=all,gpushare.io/gpu=0"), "", ["gpu=all", "gpu=0"]),
            (
                annotation("gpushare.io/gpu=0"),
                "GPUSHARE_MODE=share",
                ["gpushare.io/gpu=\"exclusive\"", "share"],
            ),
            (
                annotation("gpushare.io/gpu=0"),
                "GPUSHARE_DEVICES=1",
                ["gpushare.io/gpu=\"0\"", "GPUSHARE_DEVICES"],
            ),
            (annotation("gpushare.io/gpu=0"), "GPUSHARE_MEMORY=4GiB", ["exclusive", "4GiB"]),
            (
                annotation("gpushare.io/share=4GiB"),
                "NVIDIA_VISIBLE_DEVICES=gpushare.io/gpu=0",
                ["4GiB", "gpu=0"],
            ),
        ] {
            let env: Vec<&str> = Some(env).filter(|entry| !entry.is_empty()).into_iter().collect();
            let told = refused(&annotations, &env);
            let missing = parts.iter().find(|part| !told.contains(*part));
            assert!(told.contains("contradict") && missing.is_none(), "{annotations:?} {env:?}: {told}");
        }
        let told = refused(&[("cdi.k8s.io/a", "gpushare.io/slice=1\u{1b}")], &[]);
        assert!(told.contains("gpushare.io/slice=1\\u{1b} is no CDI device of gpushare"), "{told}");
    }

    #[test]
    fn a_hundred_thousand_names_are_read_in_no_time() {
        let many: Vec<String> = (0..100_000).map(|number| format!("gpushare.io/gpu={number}")).collect();
        let annotations = (0..100_000).map(|number| (format!("cdi.k8s.io/x{number}"), many[number].clone()));
        let list = format!("NVIDIA_VISIBLE_DEVICES={}", many.join(","));
        let start = Instant::now();
        for container in
            [Container::new(annotations.collect(), Vec::new()), Container::new(BTreeMap::new(), vec![list])]
        {
            let told = crate::read::read(&container, &Policy::default(), &four()).unwrap_err().to_string();
            assert!(told.contains("device list") && told.len() < 400, "{told}");
        }
        assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    }

    #[test]
    fn a_name_in_a_list_that_is_not_read_for_names_is_an_error_and_never_no_gpu_or_all_of_one() {
        let ignore_env = Policy { ignore_env: true, ..Policy::default() };
        let ignore_nvidia = Policy { nvidia: NvidiaPolicy::Ignore, ..Policy::default() };
        for (policy, setting) in [(ignore_env, "request.env"), (ignore_nvidia, "request.nvidia")] {
            for list in ["gpushare.io/share=4GiB", "1, gpushare.io/share=4GiB", "gpushare.io/gpu=all"] {
                let entry = format!("NVIDIA_VISIBLE_DEVICES={list}");
                let told = read(&[], &[&entry], &policy).unwrap_err().to_string();
                assert!(told.contains("gpushare.io/") && told.contains(setting), "{list}: {told}");
            }
            assert_eq!(read(&[], &["NVIDIA_VISIBLE_DEVICES=none"], &policy), Ok(None));
        }
    }

    #[test]
    fn a_variable_of_our_cdi_devices_that_holds_no_name_of_one_is_an_error() {
        for value in ["4GiB", "=share=4GiB", "share=4GiB", "", "nvidia.com/gpu=0"] {
            let told = refused(&[], &[&format!("GPUSHARE_CDI_SHARE={value}")]);
            assert!(told.contains("GPUSHARE_CDI_SHARE=") && told.contains("share=MEMORY"), "{value}: {told}");
        }
    }

    #[test]
    fn a_list_that_wants_nothing_and_names_a_device_of_ours_contradicts_itself() {
        for (word, list) in [
            ("void", "void,gpushare.io/share=4GiB"),
            ("void", "gpushare.io/gpu=0, void"),
            ("none", "none,gpushare.io/share=4GiB,all"),
        ] {
            let told = refused(&[], &[&format!("NVIDIA_VISIBLE_DEVICES={list}")]);
            assert!(told.contains("contradict") && told.contains(&format!("{word:?}")), "{list}: {told}");
        }
        assert!(
            read(&[], &["NVIDIA_VISIBLE_DEVICES=all,none,gpushare.io/share=4GiB"], &Policy::default())
                .is_ok()
        );
    }

    #[test]
    fn names_ask_by_channels_that_are_not_trusted() {
        let strict = Policy { strict: true, ..Policy::default() };
        let name = "gpushare.io/share=4GiB";
        for (annotations, env) in [
            (&[("cdi.k8s.io/a", name)][..], &[][..]),
            (&[], &["GPUSHARE_CDI_SHARE_4GIB=gpushare.io/share=4GiB"]),
            (&[], &["NVIDIA_VISIBLE_DEVICES=gpushare.io/share=4GiB"]),
        ] {
            let told = read(annotations, env, &strict).unwrap_err();
            assert!(matches!(told, RequestError::Untrusted { .. }), "{annotations:?} {env:?}: {told}");
        }
        let trusted = ("alloc.gpushare.io/memory", "8GiB");
        let lowered = read(&[trusted, ("cdi.k8s.io/a", name)], &[], &strict).unwrap().unwrap();
        assert_eq!(lowered.memory, MemoryRequest::Bytes(DeviceMemory::from_bytes(4 * GIB)));
        let env_is_not_read = Policy { ignore_env: true, ..Policy::default() };
        for variable in ["GPUSHARE_CDI_SHARE_4GIB=gpushare.io/share=4GiB", "GPUSHARE_CDI_SHARE=4GiB"] {
            assert_eq!(
                read(&[], &[variable], &env_is_not_read),
                Err(RequestError::UnreadVariables),
                "{variable}"
            );
        }
    }
}
