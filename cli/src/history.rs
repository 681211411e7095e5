//! `gpushare history`: the shares that were given back and those that were refused, one by one or summed up by
//! who used them.

mod sums;

use std::io;
use std::time::{Duration, SystemTime};

use anyhow::Result;
use clap::Args;
use gpushare_config::Config;
use gpushare_inject::used;
use gpushare_inventory::DeviceMemory;
use gpushare_quota::{Lease, PastLease, Reason, Refused};
use schemars::JsonSchema;
use serde::Serialize;

use self::sums::By;
pub use self::sums::{Sums, living_as_past};
use crate::answer::{self, Format};
use crate::container::{PodName, listed, name, short};
use crate::failure::Failure;
use crate::filter::{self, Filter, Key, fits};
use crate::node::GpuNames;
use crate::table::{age, span};
use crate::{node, table};

/// How many of the last refusals a table shows one by one where no time is named.
const REFUSALS: usize = 100;

/// What to tell, and how.
#[derive(Args)]
pub struct History {
    /// Only what ended since: a time ago as 7d or 12h, or a moment as 2026-11-20 or 2026-11-20T08:00:00Z.
    #[arg(long, value_name = "TIME", value_parser = moment)]
    since: Option<u64>,
    /// Only what ended before then.
    #[arg(long, value_name = "TIME", value_parser = moment)]
    until: Option<u64>,
    /// Sums, with the shares that are held now.
    #[arg(long, value_name = "WHAT")]
    by: Option<By>,
    /// Only what fits: name, id, image, namespace, project, gpu or reason, as image=*torch*. Of several values
    /// of one key any will do. Of refusals name, id and reason are known.
    #[arg(short, long = "filter", value_name = "KEY=VALUE", value_parser = filter::by(&KEYS))]
    filters: Vec<Filter>,
    /// How answers are printed.
    #[arg(long, value_name = "FORMAT", default_value = "table")]
    format: Format,
    /// The same as `--format json`.
    #[arg(long, conflicts_with = "format")]
    json: bool,
}

/// Shares that were given back, and containers that were refused.
#[derive(Serialize, JsonSchema)]
pub struct Past {
    /// Newest first.
    shares: Vec<Ended>,
    /// Newest first.
    refusals: Vec<Refusal>,
}

/// A share that was given back.
#[derive(Serialize, JsonSchema)]
struct Ended {
    /// The runtime root of the container that held it last; empty where the engine named none.
    root: String,
    /// The id of that container.
    id: String,
    /// What it was called, or its id.
    name: String,
    pod: Option<PodName>,
    image: Option<String>,
    /// The compose project.
    project: Option<String>,
    /// Ids of the last other containers of its pod, at most 8.
    others: Vec<String>,
    /// GPUs and memory as text.
    grants: String,
    /// Seconds since 1970.
    granted_at: u64,
    /// Seconds since 1970.
    released_at: u64,
    /// Why it ended.
    reason: String,
    /// What its containers used; null where nobody could tell.
    used: Option<UsedUp>,
}

/// What containers used of their share.
#[derive(Serialize, JsonSchema)]
struct UsedUp {
    /// GPU time in nanoseconds; null where no meter ran.
    gpu_nanoseconds: Option<u64>,
    /// How long launches were held back, in nanoseconds over all threads.
    throttled_nanoseconds: u64,
    /// Allocations that the limit refused.
    allocations_refused: u64,
    /// The most memory that was held, in bytes; null where no meter ran.
    peak_bytes: Option<u64>,
    /// The memory that was held on average, in bytes; null where no meter ran.
    mean_bytes: Option<u64>,
}

/// A container that was refused.
#[derive(Serialize, JsonSchema)]
struct Refusal {
    /// The container's id.
    id: String,
    /// What it was called, or its id.
    name: String,
    /// Seconds since 1970.
    at: u64,
    /// `room`, `rules`, `request`, `image`, `settings` or `node`; null in notes of earlier versions.
    kind: Option<&'static str>,
    /// Why, as the engine was told.
    text: String,
}

impl History {
    /// Whether something was left out on purpose.
    fn is_narrowed(&self) -> bool {
        self.since.is_some() || self.until.is_some() || !self.filters.is_empty()
    }
}

/// Prints past leases and refusals.
pub fn history(asked: &History) -> Result<()> {
    let config = Config::load()?;
    let (state, store) = node::store(&config)?;
    if let (Some(since), Some(until)) = (asked.since, asked.until)
        && since >= until
    {
        return Err(Failure::usage("--until is not after --since: nothing ended between them").into());
    }
    // Of two windows that touch, one has what ended where they do.
    let is_within = |at: u64| asked.since.is_none_or(|s| at >= s) && asked.until.is_none_or(|u| at < u);
    // Read first: what ends meanwhile is in the history then.
    let living = store.leases()?;
    let mut past = store.history();
    past.retain(|lease| is_within(lease.released_at));
    let mut refusals = state.refusals();
    refusals.retain(|refused| is_within(refused.at));
    let names = GpuNames::of(&config);
    let format = if asked.json { Format::Json } else { asked.format };
    let fits_lease = |lease: &PastLease| fits(&asked.filters, |key| values(lease, key, &names));
    past.retain(fits_lease);
    refusals.retain(|refused| fits(&asked.filters, |key| values_of_refusal(refused, key)));
    if let Some(by) = asked.by {
        let has_ended = |lease: &&Lease| {
            past.iter().any(|past| past.key == lease.member.key && past.granted_at == lease.granted_at)
        };
        let living = living.iter().filter(|lease| asked.until.is_none() && !has_ended(lease));
        let mut living: Vec<_> =
            living.map(|lease| (living_as_past(lease), used(state.path(), lease))).collect();
        living.retain(|(lease, _)| fits_lease(lease));
        let past = past.iter().map(|lease| (lease, lease.used.unwrap_or_default()));
        let all = past.chain(living.iter().map(|(lease, used)| (lease, *used)));
        return Ok(sums::print(by, all, &state.deeds(), &names, format, asked.is_narrowed())?);
    }
    // A container that starts again and again is refused each time, and would hide the shares.
    let shown = if asked.since.is_none() { REFUSALS.min(refusals.len()) } else { refusals.len() };
    match format {
        Format::Json => Ok(answer::print(Past {
            shares: past.iter().map(entry).collect(),
            refusals: refusals.iter().map(refusal).collect(),
        })?),
        Format::Csv => Ok(csv(&past, &refusals)?),
        Format::Table => {
            print(&past, &refusals[..shown], &names, asked.is_narrowed())?;
            let more = refusals.len() - shown;
            if more > 0 {
                table::line(&format!("{more} earlier refusals are left out: --since shows them"))?;
            }
            Ok(())
        }
    }
}

/// What leases and refusals are chosen by.
const KEYS: [Key; 7] = [
    ("name", &[]),
    ("id", &[]),
    ("image", &[]),
    ("namespace", &[]),
    ("project", &[]),
    ("gpu", &[]),
    ("reason", &[]),
];

/// What a lease that ended has under one of [`KEYS`].
fn values(lease: &PastLease, key: &str, names: &GpuNames) -> Vec<String> {
    let one = |text: Option<&String>| text.cloned().into_iter().collect();
    match key {
        "name" => {
            let title = name(lease.name.as_ref(), &lease.called, &lease.key.container);
            [Some(title), lease.called.name.clone()].into_iter().flatten().collect()
        }
        "id" => lease.others.iter().chain([&lease.key.container]).cloned().collect(),
        "image" => one(lease.called.image.as_ref()),
        "namespace" => one(lease.name.as_ref().map(|name| &name.namespace)),
        "project" => one(lease.called.project.as_ref()),
        "gpu" => lease.shares.iter().flat_map(|grant| names.words(grant.gpu)).collect(),
        "reason" => vec![lease.reason.clone()],
        _ => Vec::new(),
    }
}

/// The same of a container that was refused.
fn values_of_refusal(refused: &Refused, key: &str) -> Vec<String> {
    match key {
        "name" => vec![called(refused)],
        "id" => vec![refused.container.clone()],
        "reason" => refused.kind.map(|kind| kind.name().to_owned()).into_iter().collect(),
        _ => Vec::new(),
    }
}

/// A moment in seconds since 1970.
pub fn moment(text: &str) -> Result<u64, String> {
    let now = SystemTime::now();
    let ago = humantime::parse_duration(text).ok().and_then(|ago| now.checked_sub(ago));
    let day = || humantime::parse_rfc3339_weak(&format!("{text} 00:00:00")).ok();
    let at = ago.or_else(|| humantime::parse_rfc3339_weak(text).ok()).or_else(day);
    let since = at.and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok());
    since
        .map(|since| since.as_secs())
        .ok_or_else(|| "must be a time ago as 7d, or a moment as 2026-11-20".to_owned())
}

fn entry(lease: &PastLease) -> Ended {
    Ended {
        root: lease.key.root.clone(),
        id: lease.key.container.clone(),
        name: name(lease.name.as_ref(), &lease.called, &lease.key.container),
        pod: lease.name.as_ref().map(PodName::of),
        image: lease.called.image.clone(),
        project: lease.called.project.clone(),
        others: lease.others.clone(),
        grants: lease.grants.clone(),
        granted_at: lease.granted_at,
        released_at: lease.released_at,
        reason: lease.reason.clone(),
        used: lease.used.map(|used| UsedUp {
            gpu_nanoseconds: used.gpu_nanoseconds,
            throttled_nanoseconds: used.throttled_nanoseconds,
            allocations_refused: used.refused,
            peak_bytes: used.peak_bytes,
            mean_bytes: used.mean_bytes,
        }),
    }
}

fn called(refused: &Refused) -> String {
    refused.name.clone().unwrap_or_else(|| short(&refused.container))
}

fn refusal(refused: &Refused) -> Refusal {
    Refusal {
        id: refused.container.clone(),
        name: called(refused),
        at: refused.at,
        kind: refused.kind.map(Reason::name),
        text: refused.reason.clone(),
    }
}

/// The columns of single shares and refusals.
const COLUMNS: [&str; 13] = [
    "id",
    "name",
    "image",
    "namespace",
    "grants",
    "granted_at",
    "ended_at",
    "reason",
    "gpu_seconds",
    "throttled_seconds",
    "allocations_refused",
    "peak_bytes",
    "mean_bytes",
];

fn csv(past: &[PastLease], refusals: &[Refused]) -> io::Result<()> {
    let ended = past.iter().map(|lease| {
        let used = lease.used.unwrap_or_default();
        let number = |number: Option<u64>| number.map_or_else(String::new, |number| number.to_string());
        let seconds = |nanoseconds: u64| format!("{:.3}", Duration::from_nanos(nanoseconds).as_secs_f64());
        vec![
            lease.key.container.clone(),
            name(lease.name.as_ref(), &lease.called, &lease.key.container),
            lease.called.image.clone().unwrap_or_default(),
            lease.name.as_ref().map(|name| name.namespace.clone()).unwrap_or_default(),
            lease.grants.clone(),
            lease.granted_at.to_string(),
            lease.released_at.to_string(),
            lease.reason.clone(),
            used.gpu_nanoseconds.map_or_else(String::new, seconds),
            seconds(used.throttled_nanoseconds),
            used.refused.to_string(),
            number(used.peak_bytes),
            number(used.mean_bytes),
        ]
    });
    let refused = refusals.iter().map(|refused| {
        let reason = format!("refused: {}", refused.reason);
        let mut row = vec![String::new(); COLUMNS.len()];
        row[0].clone_from(&refused.container);
        row[1] = called(refused);
        row[6] = refused.at.to_string();
        row[7] = reason;
        row
    });
    table::csv(&COLUMNS, ended.chain(refused))
}

fn print(past: &[PastLease], refusals: &[Refused], names: &GpuNames, is_narrowed: bool) -> io::Result<()> {
    if past.is_empty() && refusals.is_empty() {
        return table::line(match is_narrowed {
            false => "no share was given back yet, and none refused",
            true => "nothing that ended fits",
        });
    }
    let none = || "-".to_owned();
    let ended = past.iter().map(|lease| {
        let held = Duration::from_secs(lease.released_at.saturating_sub(lease.granted_at));
        let first = name(lease.name.as_ref(), &lease.called, &lease.key.container);
        let others = listed(lease.others.iter().map(String::as_str));
        let used = lease.used.unwrap_or_default();
        let seconds = |time: u64| format!("{:.1}s", Duration::from_nanos(time).as_secs_f64());
        let row = [
            if others.is_empty() { first } else { format!("{first}, {others}") },
            names.in_text(&lease.grants),
            span(held),
            used.gpu_nanoseconds.map_or_else(none, seconds),
            used.peak_bytes.map_or_else(none, |peak| DeviceMemory::from_bytes(peak).to_string()),
            age(lease.released_at),
            lease.reason.clone(),
        ];
        (lease.released_at, row)
    });
    let refused = refusals.iter().map(|refused| {
        let reason = format!("refused: {}", refused.reason);
        (refused.at, [called(refused), none(), none(), none(), none(), age(refused.at), reason])
    });
    let mut rows: Vec<_> = ended.chain(refused).collect();
    rows.sort_by_key(|(at, _)| std::cmp::Reverse(*at));
    let rows = rows.into_iter().map(|(_, row)| row);
    table::print(["CONTAINER", "SHARE", "HELD", "GPU TIME", "PEAK", "ENDED AGO", "REASON"], rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_is_a_time_ago_or_a_date() {
        let now = table::now();
        assert!(moment("1h").is_ok_and(|at| (now - 3601..=now - 3599).contains(&at)));
        assert_eq!(moment("2026-11-20"), moment("2026-11-20T00:00:00Z"));
        assert_eq!(moment("1970-01-02"), Ok(86400));
        for wrong in ["", "yesterday", "-1h", "2026-13-01", "99999999999999y"] {
            assert!(moment(wrong).is_err(), "{wrong}");
        }
    }
}
