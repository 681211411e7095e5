//! `ps --filter KEY=VALUE`: which leases are shown.

use std::str::FromStr;

use gpushare_quota::{Lease, Member};

use super::state;
use crate::node::GpuNames;

/// What leases are chosen by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Key {
    Name,
    Id,
    Image,
    Namespace,
    Project,
    Gpu,
    Mode,
    State,
}

const KEYS: [(&str, Key); 8] = [
    ("name", Key::Name),
    ("id", Key::Id),
    ("image", Key::Image),
    ("namespace", Key::Namespace),
    ("project", Key::Project),
    ("gpu", Key::Gpu),
    ("mode", Key::Mode),
    ("state", Key::State),
];

const MODES: [&str; 4] = ["share", "mps", "time-slice", "exclusive"];
const STATES: [&str; 3] = ["reserved", "active", "gone"];

/// A key, and the value that it must have; `*` in it stands for any text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    key: Key,
    value: String,
}

impl FromStr for Filter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let keys = || KEYS.map(|(name, _)| name).join(", ");
        let (name, value) =
            text.split_once('=').ok_or_else(|| format!("must be KEY=VALUE; keys: {}", keys()))?;
        let key = KEYS.iter().find(|(known, _)| *known == name).map(|(_, key)| *key);
        let key = key.ok_or_else(|| format!("{name:?} is no key; there are {}", keys()))?;
        let words: &[&str] = match key {
            Key::Mode => &MODES,
            Key::State => &STATES,
            _ => &[],
        };
        if !words.is_empty() && !words.iter().any(|word| is_like(word, value)) {
            return Err(format!("{name} is one of {}", words.join(", ")));
        }
        Ok(Self { key, value: value.to_owned() })
    }
}

/// Whether `lease` fits: of several values of one key any, and each key that is named.
pub fn fits(filters: &[Filter], lease: &Lease, names: &GpuNames) -> bool {
    let of_key = |key: Key| filters.iter().filter(move |filter| filter.key == key);
    filters.iter().all(|filter| of_key(filter.key).any(|filter| filter.fits(lease, names)))
}

impl Filter {
    fn fits(&self, lease: &Lease, names: &GpuNames) -> bool {
        let of_members = |of: &dyn Fn(&Member) -> Vec<String>| lease.members().flat_map(of).collect();
        let values: Vec<String> = match self.key {
            Key::Name => of_members(&|member| {
                [Some(member.title()), member.called.name.clone()].into_iter().flatten().collect()
            }),
            // The beginning of an id will do, as everywhere.
            Key::Id => {
                return lease
                    .members()
                    .any(|member| is_like(&member.key.container, &format!("{}*", self.value)));
            }
            Key::Image => of_members(&|member| member.called.image.iter().cloned().collect()),
            Key::Namespace => {
                of_members(&|member| member.name.iter().map(|name| name.namespace.clone()).collect())
            }
            Key::Project => of_members(&|member| member.called.project.iter().cloned().collect()),
            Key::Gpu => lease
                .grants
                .iter()
                .flat_map(|grant| {
                    [names.number(grant.gpu).unwrap_or_default().to_owned(), grant.gpu.to_string()]
                })
                .collect(),
            Key::Mode => vec![lease.enforcement.terms().company.mode().name().to_owned()],
            Key::State => vec![state(lease).to_owned()],
        };
        values.iter().any(|value| is_like(value, &self.value))
    }
}

/// Whether `text` is the pattern, in which `*` stands for any text.
fn is_like(text: &str, pattern: &str) -> bool {
    let Some((begin, rest)) = pattern.split_once('*') else { return text == pattern };
    let Some(text) = text.strip_prefix(begin) else { return false };
    let mut ends = text.char_indices().map(|(index, _)| index).chain([text.len()]);
    ends.any(|index| text.get(index..).is_some_and(|text| is_like(text, rest)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_any_text() {
        for (text, pattern, want) in [
            ("web", "web", true),
            ("web", "we", false),
            ("team/web", "team/*", true),
            ("team/web", "*/web", true),
            ("pytorch:2.4", "*torch*", true),
            ("pytorch:2.4", "*torch", false),
            ("", "*", true),
            ("ü", "*ü*", true),
            ("a*b", "a*b", true),
        ] {
            assert_eq!(is_like(text, pattern), want, "{text} {pattern}");
        }
    }

    #[test]
    fn an_unknown_key_is_told_with_those_that_there_are() {
        assert!("name=web".parse::<Filter>().is_ok() && "image=a=b".parse::<Filter>().is_ok());
        assert!("state=running".parse::<Filter>().unwrap_err().contains("active"));
        assert!("mode=*-slice".parse::<Filter>().is_ok());
        for wrong in ["web", "owner=me", "=x", ""] {
            assert!(wrong.parse::<Filter>().unwrap_err().contains("namespace"), "{wrong}");
        }
    }
}
