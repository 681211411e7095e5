//! Other systems' dialects, each with a file and a line in the table. No dialect takes precedence over
//! another: each says which keys it owns and what they mean, and the merge compares the claims. A dialect
//! that gives another dialect's keys its own meaning names that dialect in `over`.

use crate::dialect::{Dialect, Off, Speech, Switch};
use gpushare_claims::{Library, Told, Words};

mod aliyun;
mod aliyun_off;
mod cgpu;
mod elastic;
mod hami;
mod kai;
mod koordinator;
mod mps;
mod nvfractions;
mod nvidia_mps;
mod nvshare;
mod pai_egpu;
mod slurm;
mod slurm_gpu;
mod slurm_mps;
mod slurm_shard;
mod tke_vcuda;
mod vgpu_manager;
mod volcano_legacy;
mod xgpu;

static DIALECTS: [&Dialect; 17] = [
    &aliyun::DIALECT,
    &aliyun_off::DIALECT,
    &elastic::DIALECT,
    &hami::DIALECT,
    &kai::DIALECT,
    &koordinator::DIALECT,
    &nvfractions::DIALECT,
    &nvidia_mps::DIALECT,
    &nvshare::DIALECT,
    &pai_egpu::DIALECT,
    &slurm_gpu::DIALECT,
    &slurm_mps::DIALECT,
    &slurm_shard::DIALECT,
    &tke_vcuda::DIALECT,
    &vgpu_manager::DIALECT,
    &volcano_legacy::DIALECT,
    &xgpu::DIALECT,
];

/// The name for the plain list of GPUs in [`Dialect::over`]. The list belongs to no single system.
pub(crate) const PLAIN_LIST: &str = "nvidia-plain";

/// Whether a variable with this name belongs to a dialect, or turns its limits off.
pub(crate) fn own(name: &str) -> bool {
    let is_switch = |dialect: &&Dialect| dialect.switches.iter().any(|switch| switch.key == name);
    DIALECTS.iter().any(|dialect| (dialect.owns)(name) || is_switch(dialect))
}

/// Whether a variable or annotation belongs to those with which the system shows programs in a container
/// their grant.
pub(crate) fn tells(told: Told) -> fn(&str) -> bool {
    match told {
        Told::Aliyun { .. } => cgpu::owns,
        Told::Hami => |key| hami::owns(key) || key.starts_with("hami.io/"),
    }
}

/// A dialect whose words the bundle has, and the words that are visible to it.
pub(crate) struct Spoken<'a> {
    pub dialect: &'static Dialect,
    pub speech: Speech,
    pub words: Words<'a>,
}

/// The dialects whose words the bundle has, except those that the settings turn off.
pub(crate) fn spoken<'a>(words: &Words<'a>) -> Vec<Spoken<'a>> {
    let mut known = [const { None }; DIALECTS.len()];
    for place in 0..DIALECTS.len() {
        look(place, words, &mut known);
    }
    known.into_iter().flatten().filter(|spoken| spoken.speech != Speech::Silent).collect()
}

/// Fills in one dialect's entry of `known`. Looks up the dialects that hide keys from it first.
fn look<'a>(place: usize, words: &Words<'a>, known: &mut [Option<Spoken<'a>>; DIALECTS.len()]) {
    if known[place].is_some() {
        return;
    }
    let dialect = DIALECTS[place];
    let mut seen = words.clone();
    for (above, other) in DIALECTS.iter().enumerate().filter(|(_, other)| other.over.contains(&dialect.name))
    {
        look(above, words, known);
        if known[above].as_ref().is_some_and(|spoken| spoken.speech == Speech::Asks) {
            seen = seen.without(other.owns);
        }
    }
    let is_unread = words.policy.unread_dialects.iter().any(|name| name == dialect.name);
    let speech = if is_unread { Speech::Silent } else { (dialect.speech)(&seen) };
    known[place] = Some(Spoken { dialect, speech, words: seen });
}

/// The names of all dialects as used in the settings.
pub fn names() -> impl Iterator<Item = &'static str> {
    DIALECTS.iter().map(|dialect| dialect.name)
}

/// The names of the switches that the settings may honour.
pub fn switch_names() -> impl Iterator<Item = &'static str> {
    switches().filter(|switch| switch.turns_off != Off::Hardness).map(|switch| switch.key)
}

/// The off switches of all systems.
pub(crate) fn switches() -> impl Iterator<Item = &'static Switch> {
    DIALECTS.iter().flat_map(|dialect| dialect.switches)
}

/// The interception libraries of all systems.
pub(crate) fn libraries() -> impl Iterator<Item = Library> {
    DIALECTS.iter().filter_map(|dialect| dialect.library)
}

/// Keys that look like a request but are not, each with the text of its note.
pub(crate) fn near_misses() -> impl Iterator<Item = (&'static str, &'static str)> {
    DIALECTS.iter().flat_map(|dialect| dialect.near_misses).copied()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use gpushare_claims::{Container, Interceptor};

    #[test]
    fn whoever_takes_keys_from_a_dialect_names_one_that_exists_and_no_two_take_from_each_other() {
        let of = |name: &str| DIALECTS.iter().find(|dialect| dialect.name == name);
        fn reaches(from: &Dialect, to: &str, of: &dyn Fn(&str) -> Option<&'static Dialect>) -> bool {
            from.over.iter().any(|name| *name == to || of(name).is_some_and(|next| reaches(next, to, of)))
        }
        for dialect in DIALECTS {
            for name in dialect.over {
                assert!(*name == PLAIN_LIST || of(name).is_some(), "{} over {name}", dialect.name);
            }
            assert!(!reaches(dialect, dialect.name, &|name| of(name).copied()), "{}", dialect.name);
        }
    }

    #[test]
    fn every_systems_folders_and_libraries_are_known() {
        let found = |destination: &str| {
            let json = json!({"mounts": [{"destination": destination}]});
            Interceptor::of(&Container::from_json(&json), &libraries().collect::<Vec<_>>())
        };
        for folder in [
            "/etc/vcuda",
            "/usr/local/nvidia",
            "/etc/vgpu-manager",
            "/opt/gpu-fractioning/lib",
            "/usr/lib/nvshare",
            "/var/run/nvshare",
        ] {
            for target in [folder.to_owned(), format!("{folder}/below")] {
                let found = found(&target);
                assert_eq!(found.as_ref().map(|found| found.mounts.as_slice()), Some(&[target][..]));
            }
        }
        for library in ["libvgpu.so", "libvgpu-control.so", "libcuda-control.so", "libnvshare.so"] {
            assert!(found(&format!("/x/{library}")).is_some(), "{library}");
        }
    }
}
