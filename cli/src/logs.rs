//! `gpushare logs`: what happened on this node, newest last: shares that were given, changed and given back, containers
//! that were refused, and GPUs that failed. It is read from the history, which is always kept.

use std::collections::BTreeSet;
use std::io;

use anyhow::Result;
use gpushare_config::Config;
use gpushare_inventory::Faults;
use gpushare_quota::{Deed, Deeds, Done, Lease, PastLease};
use schemars::JsonSchema;
use serde::Serialize;

use crate::container::{containers, name, named, short};
use crate::failure::Failure;
use crate::filter::{self, Filter, Key, fits};
use crate::history::{living_as_past, moment};
use crate::node::GpuNames;
use crate::{answer, node, table};

/// What to tell.
#[derive(clap::Args)]
pub struct Logs {
    /// Only what concerns this container: its name, its id or the beginning of that.
    container: Option<String>,
    /// Only what happened since: a time ago as 7d or 12h, or a moment as 2026-11-20.
    #[arg(long, value_name = "TIME", value_parser = moment)]
    since: Option<u64>,
    /// Only events that fit: name, id or event, as event=refused. Of several values of one key any will do.
    #[arg(short, long = "filter", value_name = "KEY=VALUE", value_parser = filter::by(&KEYS))]
    filters: Vec<Filter>,
    /// How many of the last lines.
    #[arg(short = 'n', long, value_name = "COUNT", default_value_t = 100)]
    lines: usize,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// What events are chosen by.
const KEYS: [Key; 3] = [
    ("name", &[]),
    ("id", &[]),
    (
        "event",
        &[
            "granted",
            "resized",
            "capped",
            "stopped",
            "goes on",
            "ended",
            "given back",
            "refused",
            "cheated",
            "stranger",
            "failed",
        ],
    ),
];

/// What happened on this node.
#[derive(Serialize, JsonSchema)]
pub struct Events {
    /// Newest last.
    events: Vec<Event>,
}

/// Something that happened.
#[derive(Serialize, JsonSchema)]
struct Event {
    /// Seconds since 1970.
    at: u64,
    /// `granted`, `resized`, `capped`, `stopped`, `goes on`, `ended`, `given back`, `refused`, `cheated`,
    /// `stranger` or `failed`.
    #[serde(rename = "event")]
    what: &'static str,
    /// The container's id; empty where it is none's.
    id: String,
    /// What it is called.
    name: String,
    text: String,
}

/// Prints what happened.
pub fn logs(asked: &Logs) -> Result<()> {
    let config = Config::load()?;
    let (state, store) = node::store(&config)?;
    let names = GpuNames::of(&config);
    let (past, living) = (store.history(), store.leases()?);
    // Notes of refusals and of the meter have ids alone.
    let title = |id: &str| {
        let of_living = living.iter().flat_map(Lease::members).find(|member| member.key.container == id);
        let of_past = || past.iter().find(|lease| lease.key.container == id);
        of_living.map(named).or_else(|| of_past().map(called)).unwrap_or_else(|| short(id))
    };
    let deeds = state.deeds();
    // Times are in seconds: what happened in one of them stays in the order in which it is added here.
    let mut events = Vec::new();
    let mut told = BTreeSet::new();
    let mut done_to = |lease: &PastLease| -> Vec<Event> {
        let new = deeds.of(lease).filter(|deed| told.insert(std::ptr::from_ref::<Deed>(*deed)));
        new.map(|deed| done(deed, title(&deed.container), &names)).collect()
    };
    for lease in past.iter().rev() {
        events.push(granted(lease, called(lease), &lease.grants, &deeds, &names));
        events.extend(done_to(lease));
        events.push(given_back(lease));
    }
    for lease in &living {
        let past = living_as_past(lease);
        events.push(granted(&past, containers(lease), &lease.summary(), &deeds, &names));
        events.extend(done_to(&past));
    }
    let others = deeds.all().filter(|deed| !told.contains(&std::ptr::from_ref::<Deed>(*deed)));
    events.extend(others.map(|deed| done(deed, title(&deed.container), &names)));
    events.extend(state.refusals().into_iter().rev().map(|refused| Event {
        at: refused.at,
        what: "refused",
        name: refused.name.unwrap_or_else(|| title(&refused.container)),
        id: refused.container,
        text: refused.reason,
    }));
    events.extend(state.found().into_iter().rev().map(|found| Event {
        at: found.at,
        what: if found.lease.is_some() { "cheated" } else { "stranger" },
        name: title(&found.container),
        id: found.container,
        text: found.text,
    }));
    events.extend(Faults::load(state.path()).all().filter_map(|(gpu, why)| {
        let (at, name) = (Faults::noted_at(state.path(), gpu)?, names.name(gpu));
        Some(Event { at, what: "failed", id: String::new(), name, text: why.to_owned() })
    }));
    // As for a share: a whole id or name comes before the beginning of another's id.
    let is_whole =
        asked.container.as_ref().is_some_and(|asked| events.iter().any(|event| is_called(event, asked)));
    let is_meant = |event: &Event| {
        let its = |asked: &String| match is_whole {
            true => is_called(event, asked),
            false => !asked.is_empty() && event.id.starts_with(asked.as_str()),
        };
        let values = |key: &str| match key {
            "name" => names_of(event).chain([event.name.as_str()]).map(str::to_owned).collect(),
            "id" => vec![event.id.clone()],
            _ => vec![event.what.to_owned()],
        };
        asked.container.as_ref().is_none_or(its)
            && asked.since.is_none_or(|since| event.at >= since)
            && fits(&asked.filters, values)
    };
    events.retain(is_meant);
    if let (Some(container), None, true, true) =
        (&asked.container, asked.since, asked.filters.is_empty(), events.is_empty())
    {
        return Err(Failure::not_found(format!(
            "nothing is known of a container {container:?}: give its name, its id or the beginning of that"
        ))
        .into());
    }
    events.sort_by_key(|event| event.at);
    let skipped = events.len().saturating_sub(asked.lines);
    events.drain(..skipped);
    let told = if asked.json { answer::print(Events { events }) } else { print(&events) };
    Ok(told?)
}

/// The containers of an event: a pod's have one share.
fn names_of(event: &Event) -> impl Iterator<Item = &str> {
    event.name.split(", ")
}

fn is_called(event: &Event, asked: &str) -> bool {
    event.id == asked || event.name == asked || names_of(event).any(|name| name == asked)
}

/// A lease stands as it was `last`: what it granted at first is known from its first change.
fn granted(lease: &PastLease, name: String, last: &str, deeds: &Deeds, names: &GpuNames) -> Event {
    let before = |deed: &Deed| match &deed.what {
        Done::Resized { before, .. } => Some(before.clone()),
        _ => None,
    };
    let first = deeds.of(lease).find_map(before);
    let text = names.in_text(first.as_deref().unwrap_or(last));
    Event { at: lease.granted_at, what: "granted", id: lease.key.container.clone(), name, text }
}

fn done(deed: &Deed, name: String, names: &GpuNames) -> Event {
    let (what, text) = match &deed.what {
        Done::Resized { before, after, .. } => {
            ("resized", format!("{}; before {}", names.in_text(after), names.in_text(before)))
        }
        Done::Capped { why } => ("capped", why.clone()),
        Done::Stopped { why } => ("stopped", why.clone()),
        Done::Continued => ("goes on", "it keeps to its share".to_owned()),
        Done::Ended { why } => ("ended", why.clone()),
    };
    Event { at: deed.at, what, id: deed.container.clone(), name, text }
}

fn called(lease: &PastLease) -> String {
    name(lease.name.as_ref(), &lease.called, &lease.key.container)
}

fn given_back(lease: &PastLease) -> Event {
    let used = lease.used.unwrap_or_default();
    let time = used
        .gpu_nanoseconds
        .map(|time| format!("; GPU time {:.1} s", std::time::Duration::from_nanos(time).as_secs_f64()));
    let refused = (used.refused > 0).then(|| format!("; {} allocations refused by its limit", used.refused));
    Event {
        at: lease.released_at,
        what: "given back",
        id: lease.key.container.clone(),
        name: called(lease),
        text: format!("{}{}{}", lease.reason, time.unwrap_or_default(), refused.unwrap_or_default()),
    }
}

fn print(events: &[Event]) -> io::Result<()> {
    if events.is_empty() {
        return table::line("nothing is known to have happened");
    }
    for event in events {
        let at = std::time::UNIX_EPOCH + std::time::Duration::from_secs(event.at);
        let at = humantime::format_rfc3339_seconds(at);
        table::line(&format!("{at}  {:<10}  {}: {}", event.what, event.name, event.text))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_whole_name_is_one_containers_and_a_pods_share_has_several() {
        let event = |id: &str, name: &str| Event {
            at: 0,
            what: "granted",
            id: id.to_owned(),
            name: name.to_owned(),
            text: String::new(),
        };
        let shared = event("4f00", "team/pod/main, team/pod/sidecar");
        for (asked, want) in
            [("4f00", true), ("4f", false), ("team/pod/sidecar", true), ("team/pod", false), ("", false)]
        {
            assert_eq!(is_called(&shared, asked), want, "{asked:?}");
        }
    }
}
