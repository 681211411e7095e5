//! Handles other systems' switches that turn their limits off.
//!
//! Image and pod can set them, so they turn nothing off here unless the settings list them. A listed switch
//! makes the container ask for whole GPUs, which are granted like any other request. A switch is on for the
//! values that its own system treats as on.

use crate::dialect::{Off, Switch};
use crate::dialects;
use gpushare_claims::{Amount, Cap, Claim, Mode, Rank, Word, Words};

/// Applies the switches that the settings list to the claims of other systems' variables. Returns a note for
/// every switch that is on. A switch is a variable, so it changes no claim of a more trusted channel.
pub(crate) fn apply(words: &Words, claims: &mut [Claim]) -> Vec<String> {
    on(words).map(|(switch, word)| apply_one(switch, word, words, claims)).collect()
}

fn apply_one(switch: &Switch, word: Word, words: &Words, claims: &mut [Claim]) -> String {
    let turn_off: fn(&mut Claim) = match switch.turns_off {
        Off::Limits => make_whole,
        Off::Compute => free_compute,
        Off::Hardness => {
            return format!("{word} is ignored: a limit is hard, and no memory of the host stands behind it");
        }
    };
    let mut is_honoured = false;
    if words.policy.switches.iter().any(|key| key == switch.key) {
        for claim in claims.iter_mut().filter(|claim| claim.rank == Rank::Environment && claim.is_foreign()) {
            turn_off(claim);
            is_honoured = true;
        }
    }
    match is_honoured {
        true => format!("{word} is honoured (request.honoured_switches)"),
        false => format!("{word} is ignored: the limits stay (request.honoured_switches)"),
    }
}

/// Whether any switch is on in any of its entries, honoured or not.
pub(crate) fn any_is_on(words: &Words) -> bool {
    let is_on =
        |switch: &Switch| words.container.named(switch.key).any(|(_, value)| (switch.is_on)(value, words));
    dialects::switches().any(is_on)
}

/// The switches that are on in all of their entries, each once, with the first entry.
fn on<'a>(words: &Words<'a>) -> impl Iterator<Item = (&'static Switch, Word<'a>)> {
    dialects::switches().filter_map(|switch| {
        let mut all = words.container.named(switch.key);
        let (key, value) = all.next()?;
        let is_on = |value: &str| (switch.is_on)(value, words);
        (is_on(value) && all.all(|(_, value)| is_on(value))).then_some((switch, Word::variable(key, value)))
    })
}

fn make_whole(claim: &mut Claim) {
    claim.mode = Some(Mode::Exclusive);
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
    use crate::{Ceilings, Container, Cores, MemoryRequest, Mode, Policy, Request, RequestError};
    use gpushare_claims::four;

    const LIMITS: [&str; 3] =
        ["NVIDIA_VISIBLE_DEVICES=0,1", "CUDA_DEVICE_MEMORY_LIMIT=3000m", "CUDA_DEVICE_SM_LIMIT=30"];

    fn read(more: &[&str], policy: &Policy) -> Result<Request, RequestError> {
        let env = LIMITS.iter().chain(more).map(|entry| entry.to_string()).collect();
        crate::read::read(&Container::new(BTreeMap::new(), env), policy, &four()).map(Option::unwrap)
    }

    fn honouring(key: &str) -> Policy {
        let default_cores = Cores::new(50);
        Policy { switches: vec![key.to_owned()], default_cores, ..Policy::default() }
    }

    fn mib(count: u64) -> MemoryRequest {
        MemoryRequest::Bytes(DeviceMemory::from_bytes(count << 20))
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
            (Mode::Exclusive, MemoryRequest::Percent(100), None)
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
        let request = crate::read::read(&container, &policy, &four()).unwrap().unwrap();
        assert_eq!((request.memory, request.mode), (mib(4096), Mode::Share));
        let strict = Policy {
            strict: true,
            ceilings: Ceilings { env: "100%".parse().ok(), ..Ceilings::default() },
            ..policy.clone()
        };
        let told = crate::read::read(&container, &strict, &four());
        assert!(matches!(told, Err(RequestError::Raised { .. })), "{told:?}");
        let own = ["GPUSHARE_MEMORY=4GiB", "CUDA_DISABLE_CONTROL=true"].map(str::to_owned).to_vec();
        let request =
            crate::read::read(&Container::new(BTreeMap::new(), own), &policy, &four()).unwrap().unwrap();
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
                    let told = apply(&Words::new(&container, &policy), &mut []);
                    assert_eq!(told.len(), want, "{key}={value}: {told:?}");
                }
            }
        }
    }

    #[test]
    fn a_switch_that_is_also_off_is_off() {
        let env = ["CGPU_DISABLE=1", "CGPU_DISABLE=0"].map(str::to_owned).to_vec();
        let container = Container::new(BTreeMap::new(), env);
        let policy = Policy::default();
        let told = apply(&Words::new(&container, &policy), &mut []);
        assert_eq!(told, Vec::<String>::new());
    }
}
