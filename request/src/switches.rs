//! Variables by which other systems turn their limits off, or let memory spill to the host.
//!
//! They are anybody's words, so they switch nothing off here unless the settings list them; then the container asks for whole
//! cards and passes admission as such. Each is on for the values that its own system takes for on.

use crate::channel::Trust;
use crate::claim::{Amount, Cap, Claim};
use crate::reading::{Reading, Said};

/// One of them.
struct Switch {
    key: &'static str,
    /// Of a value; the second is whether Volcano's fork of HAMi speaks.
    is_on: fn(&str, bool) -> bool,
    turns_off: Off,
}

/// What its own system turns off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Off {
    /// Every limit.
    Limits,
    /// The limit on compute.
    Compute,
    /// The limit's hardness: what is too much lies in the host's memory. There is no such memory here to be honoured.
    Hardness,
}

const SWITCHES: [Switch; 8] = [
    // cGPU's README.
    Switch { key: "CGPU_DISABLE", is_on: |value, _| matches!(value, "true" | "1"), turns_off: Off::Limits },
    // HAMi pkg/device-plugin/nvidiadevice/nvinternal/plugin/server.go; volcano-vgpu-device-plugin pkg/plugin/server.go.
    Switch {
        key: "CUDA_DISABLE_CONTROL",
        is_on: |value, volcano| is_go_true(value) || volcano,
        turns_off: Off::Limits,
    },
    // vgpu-manager pkg/util/util.go.
    Switch { key: "DISABLE_VGPU_CONTROL", is_on: |value, _| is_enabled(value), turns_off: Off::Limits },
    // HAMi-core.
    Switch {
        key: "GPU_CORE_UTILIZATION_POLICY",
        is_on: |value, _| value.eq_ignore_ascii_case("disable"),
        turns_off: Off::Compute,
    },
    Switch { key: "CUDA_OVERSUBSCRIBE", is_on: |value, _| is_go_true(value), turns_off: Off::Hardness },
    // vgpu-manager pkg/util/consts.go.
    Switch { key: "CUDA_MEM_OVERSOLD", is_on: |value, _| is_enabled(value), turns_off: Off::Hardness },
    Switch {
        key: "CUDA_MEM_RATIO",
        is_on: |value, _| value.parse().is_ok_and(|ratio: f64| ratio > 1.0),
        turns_off: Off::Hardness,
    },
    // nvshare's README.
    Switch {
        key: "NVSHARE_ENABLE_SINGLE_OVERSUB",
        is_on: |value, _| !matches!(value, "" | "0"),
        turns_off: Off::Hardness,
    },
];

/// The names of those that settings can have honoured.
pub fn names() -> impl Iterator<Item = &'static str> {
    SWITCHES.iter().filter(|switch| switch.turns_off != Off::Hardness).map(|switch| switch.key)
}

/// Go's strconv.ParseBool.
fn is_go_true(value: &str) -> bool {
    matches!(value, "1" | "t" | "T" | "TRUE" | "true" | "True")
}

fn is_enabled(value: &str) -> bool {
    ["1", "true", "enabled"].iter().any(|on| value.eq_ignore_ascii_case(on))
}

/// Volcano's fork of HAMi takes any value for on, and is known by the path of its cache.
fn is_volcanos(reading: &Reading) -> bool {
    let mut caches = reading.container.named("CUDA_DEVICE_MEMORY_SHARED_CACHE");
    caches.any(|(_, value)| value.starts_with("/tmp/vgpu/"))
}

/// Does to the claims of other systems what the honoured switches say, and notes every switch that is on. A switch is a
/// variable: it takes nothing from what a more trusted channel says.
pub(crate) fn apply(reading: &Reading, claims: &mut [Claim]) {
    for (switch, said) in on(reading) {
        let honoured =
            switch.turns_off != Off::Hardness && reading.policy.switches.iter().any(|key| key == switch.key);
        if !honoured {
            reading.note(ignored(switch, said));
            continue;
        }
        reading.note(format!("{said} is honoured (request.honoured_switches)"));
        for claim in claims.iter_mut().filter(|claim| claim.trust == Trust::Environment) {
            match switch.turns_off {
                Off::Limits => make_whole(claim),
                Off::Compute => free_compute(claim),
                Off::Hardness => {}
            }
        }
    }
}

/// What is said of the switches of a container that asks by gpushare's own keys, which no other system's switch turns off.
pub(crate) fn ignored_all(reading: &Reading) -> Vec<String> {
    on(reading).map(|(switch, said)| ignored(switch, said)).collect()
}

/// Whether one of them is on, honoured or not.
pub(crate) fn any_is_on(reading: &Reading) -> bool {
    let volcano = is_volcanos(reading);
    SWITCHES
        .iter()
        .any(|switch| reading.container.named(switch.key).any(|(_, value)| (switch.is_on)(value, volcano)))
}

fn ignored(switch: &Switch, said: Said) -> String {
    match switch.turns_off {
        Off::Hardness => {
            format!("{said} is ignored: a limit is hard, and no memory of the host stands behind it")
        }
        Off::Limits | Off::Compute => {
            format!("{said} is ignored: the limits stay (request.honoured_switches)")
        }
    }
}

/// The switches that are on, each once, in every entry that there is of it.
fn on<'a>(reading: &'a Reading) -> impl Iterator<Item = (&'static Switch, Said<'a>)> {
    SWITCHES.iter().filter_map(|switch| {
        let mut all = reading.container.named(switch.key).map(|(_, value)| value);
        let value = all.next()?;
        let volcano = is_volcanos(reading);
        let is_on = |value: &str| (switch.is_on)(value, volcano);
        let said = Said { key: switch.key, value, trust: Trust::Environment };
        (is_on(value) && all.all(is_on)).then_some((switch, said))
    })
}

fn make_whole(claim: &mut Claim) {
    claim.exclusive = true;
    claim.each = Amount::default();
    claim.particular.clear();
    claim.burst = None;
}

fn free_compute(claim: &mut Claim) {
    let amounts = claim.particular.iter_mut().map(|(_, amount)| amount).chain([&mut claim.each]);
    for amount in amounts {
        amount.cores = amount.cores.map(|_| Cap::Unlimited);
    }
    claim.burst = None;
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use gpushare_inventory::DeviceMemory;

    use super::*;
    use crate::cards::four;
    use crate::{Ceilings, Container, Cores, MemoryAsk, Mode, Policy, Request, RequestError};

    const LIMITS: [&str; 3] =
        ["NVIDIA_VISIBLE_DEVICES=0,1", "CUDA_DEVICE_MEMORY_LIMIT=3000m", "CUDA_DEVICE_SM_LIMIT=30"];

    fn read(more: &[&str], policy: &Policy) -> Result<Request, RequestError> {
        let env = LIMITS.iter().chain(more).map(|entry| entry.to_string()).collect();
        crate::read(&Container::new(BTreeMap::new(), env), policy, &four()).map(Option::unwrap)
    }

    fn honouring(key: &str) -> Policy {
        let default_cores = Cores::new(50);
        Policy { switches: vec![key.to_owned()], default_cores, ..Policy::default() }
    }

    fn mib(count: u64) -> MemoryAsk {
        MemoryAsk::Bytes(DeviceMemory::from_bytes(count << 20))
    }

    #[test]
    fn a_switch_that_the_settings_do_not_list_is_told_once_and_switches_nothing_off() {
        for switch in [
            "CUDA_DISABLE_CONTROL=true",
            "CGPU_DISABLE=1",
            "GPU_CORE_UTILIZATION_POLICY=disable",
            "CUDA_OVERSUBSCRIBE=true",
        ] {
            let (key, _) = switch.split_once('=').unwrap();
            let request = read(&[switch, switch], &honouring("DISABLE_VGPU_CONTROL")).unwrap();
            assert_eq!(
                (request.memory, request.cores, request.mode),
                (mib(3000), Cores::new(30), Mode::Share)
            );
            let told =
                request.notes.iter().filter(|note| note.contains(key) && note.contains("ignored")).count();
            assert_eq!(told, 1, "{switch}: {:?}", request.notes);
        }
    }

    #[test]
    fn an_honoured_switch_asks_for_whole_cards_and_nothing_beyond_the_ceiling() {
        let policy = honouring("CUDA_DISABLE_CONTROL");
        let request = read(&["CUDA_DISABLE_CONTROL=true"], &policy).unwrap();
        assert_eq!(
            (request.mode, request.memory, request.cores),
            (Mode::Exclusive, MemoryAsk::Percent(100), None)
        );
        assert!(request.notes.iter().any(|note| note.contains("honoured")), "{:?}", request.notes);
        for (more, mode) in [
            (&["CUDA_DISABLE_CONTROL=false"][..], Mode::Share),
            (
                &["CUDA_DISABLE_CONTROL=false", "CUDA_DEVICE_MEMORY_SHARED_CACHE=/usr/local/vgpu/x.cache"],
                Mode::Share,
            ),
            (
                &["CUDA_DISABLE_CONTROL=false", "CUDA_DEVICE_MEMORY_SHARED_CACHE=/tmp/vgpu/x.cache"],
                Mode::Exclusive,
            ),
            (&["CUDA_DISABLE_CONTROL=true", "CUDA_DISABLE_CONTROL=false"], Mode::Share),
        ] {
            assert_eq!(read(more, &policy).unwrap().mode, mode, "{more:?}");
        }
        let ceilings = Ceilings { env: "8GiB".parse().ok(), ..Ceilings::default() };
        let told = read(&["CUDA_DISABLE_CONTROL=true"], &Policy { strict: true, ceilings, ..policy });
        assert!(matches!(told, Err(RequestError::AboveCeiling { .. })), "{told:?}");
    }

    #[test]
    fn the_switch_of_compute_leaves_memory_as_it_is() {
        let request =
            read(&["GPU_CORE_UTILIZATION_POLICY=disable"], &honouring("GPU_CORE_UTILIZATION_POLICY"))
                .unwrap();
        assert_eq!((request.memory, request.cores, request.mode), (mib(3000), None, Mode::Share));
        assert_eq!(request.particular, []);
    }

    #[test]
    fn a_variable_switches_off_nothing_that_a_more_trusted_channel_or_a_key_of_our_own_says() {
        let policy = honouring("CUDA_DISABLE_CONTROL");
        let trusted = BTreeMap::from([("alloc.gpushare.io/memory".to_owned(), "4GiB".to_owned())]);
        let env: Vec<String> =
            LIMITS.iter().chain(&["CUDA_DISABLE_CONTROL=true"]).map(|entry| entry.to_string()).collect();
        let container = Container::new(trusted, env);
        let request = crate::read(&container, &policy, &four()).unwrap().unwrap();
        assert_eq!((request.memory, request.mode), (mib(4096), Mode::Share));
        let strict = Policy {
            strict: true,
            ceilings: Ceilings { env: "100%".parse().ok(), ..Ceilings::default() },
            ..policy.clone()
        };
        let told = crate::read(&container, &strict, &four());
        assert!(matches!(told, Err(RequestError::Raised { .. })), "{told:?}");
        let own = ["GPUSHARE_MEMORY=4GiB", "CUDA_DISABLE_CONTROL=true"].map(str::to_owned).to_vec();
        let request = crate::read(&Container::new(BTreeMap::new(), own), &policy, &four()).unwrap().unwrap();
        assert_eq!((request.memory, request.mode, request.notes.len()), (mib(4096), Mode::Share, 1));
    }

    #[test]
    fn a_switch_is_on_for_the_values_of_its_own_system() {
        for (key, on, off) in [
            ("CGPU_DISABLE", &["true", "1"][..], &["", "0", "false", "yes", "TRUE"][..]),
            ("CUDA_DISABLE_CONTROL", &["true", "1", "T", "True"], &["", "0", "false", "yes", "tRUE"]),
            ("DISABLE_VGPU_CONTROL", &["1", "True", "ENABLED"], &["", "0", "yes", "disabled"]),
            ("GPU_CORE_UTILIZATION_POLICY", &["disable", "DISABLE"], &["", "force", "default"]),
            ("CUDA_OVERSUBSCRIBE", &["true"], &["false", ""]),
            ("CUDA_MEM_RATIO", &["2.00", "1.5"], &["1.00", "0.5", "", "x", "NaN"]),
            ("CUDA_MEM_OVERSOLD", &["true"], &["", "false"]),
            ("NVSHARE_ENABLE_SINGLE_OVERSUB", &["1"], &["", "0"]),
        ] {
            for (values, want) in [(on, 1), (off, 0)] {
                for value in values {
                    let container = Container::new(BTreeMap::new(), vec![format!("{key}={value}")]);
                    let policy = Policy::default();
                    let told = ignored_all(&Reading::new(&container, &policy));
                    assert_eq!(told.len(), want, "{key}={value}: {told:?}");
                }
            }
        }
    }

    #[test]
    fn a_switch_that_is_also_off_is_off() {
        let env = ["CGPU_DISABLE=1", "CGPU_DISABLE=0"].map(str::to_owned).to_vec();
        let container = Container::new(BTreeMap::new(), env);
        assert_eq!(ignored_all(&Reading::new(&container, &Policy::default())), Vec::<String>::new());
    }
}
