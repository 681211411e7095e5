//! `gpushare ps`: the living leases, and what each container uses of its share. There are three sources: the
//! store, the driver by way of the meter, and the container's own books. Only the books can lie, so they are
//! shown under a name of their own.

mod form;
mod keys;
mod seen;

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

use anyhow::Result;
use gpushare_config::Config;
use gpushare_inventory::DeviceMemory;
use gpushare_quota::{Enforcement, Grant, Holder, Lease, Member, ResourceClaim, Running, Store};
use gpushare_request::{ComputePolicy, Cores, Mode};

pub use self::form::Shares;
use self::form::{CSV, Share};
use self::keys::{KEYS, values};
pub use self::seen::{Seen, is_paused};
use crate::answer::{self, Format};
use crate::container::{is_claim, named};
use crate::filter::{self, Filter, fits};
use crate::node::GpuNames;
use crate::table::age;
use crate::violation::{self, Violation};
use crate::{lock, meter, node, table, top};

/// Which leases to show, and how.
#[derive(clap::Args)]
pub struct Ps {
    /// Only leases that fit: name, id, image, namespace, project, gpu, mode or state, as image=*torch*. Of
    /// several values of one key any will do.
    #[arg(short, long = "filter", value_name = "KEY=VALUE", value_parser = filter::by(&KEYS))]
    filters: Vec<Filter>,
    /// Print the ids of the containers alone.
    #[arg(short, long, conflicts_with_all = ["format", "json"])]
    quiet: bool,
    /// How answers are printed.
    #[arg(long, value_name = "FORMAT", default_value = "table")]
    format: Format,
    /// The same as `--format json`.
    #[arg(long, conflicts_with = "format")]
    json: bool,
    /// Print again every 2s, or as often as is said; JSON in one line each.
    #[arg(short, long, value_name = "TIME", num_args = 0..=1, require_equals = true, default_missing_value = "2s",
          value_parser = top::interval)]
    watch: Option<Duration>,
}

/// Prints the living leases.
pub fn ps(asked: &Ps) -> Result<()> {
    let config = Config::load()?;
    let (state, store) = node::store(&config)?;
    let state = state.path().to_owned();
    let looker = Looker { config, state, store };
    let Some(interval) = asked.watch else { return looker.print(asked) };
    loop {
        // Into a pipe or a file the looks follow each other.
        if io::stdout().is_terminal() && !asked.is_json() {
            io::stdout().write_all(b"\x1b[H\x1b[2J")?;
        }
        looker.print(asked)?;
        io::stdout().flush()?;
        sleep(interval);
    }
}

impl Ps {
    fn is_json(&self) -> bool {
        self.json || self.format == Format::Json
    }
}

struct Looker {
    config: Config,
    state: PathBuf,
    store: Store,
}

impl Looker {
    fn print(&self, asked: &Ps) -> Result<()> {
        let names = GpuNames::of(&self.config);
        let (mut leases, claims) = (self.store.leases()?, self.store.claims()?);
        leases.retain(|lease| fits(&asked.filters, |key| values(&self.state, lease, key, &names)));
        if asked.quiet {
            let mut ids = leases.iter().flat_map(Lease::members).map(|member| &*member.key.container);
            return Ok(ids.try_for_each(table::line)?);
        }
        let claim_of = |lease: &Lease| {
            let its = |claim: &&_| lease.members().any(|member| is_claim(member, claim));
            claims.iter().map(|(claim, _)| claim).rfind(its)
        };
        let running = Running::default();
        let seen = leases.iter().map(|lease| (lease, Seen::of(&self.state, lease, &running)));
        let violations = violation::read(&self.state);
        let of = |lease: Option<&Lease>| -> Vec<Violation> {
            let its = |violation: &&Violation| violation.lease == lease.map(|lease| lease.id);
            violations.iter().filter(its).cloned().collect()
        };
        if asked.is_json() || asked.format == Format::Csv {
            let shares: Vec<Share> =
                seen.map(|(lease, seen)| Share::of(lease, &seen, of(Some(lease)), claim_of(lease))).collect();
            let told = match (asked.format, asked.watch) {
                (Format::Csv, _) => table::csv(&CSV, shares.iter().flat_map(Share::rows)),
                (_, None) => answer::print(Shares { shares, strangers: of(None) }),
                (_, Some(_)) => answer::print_line(Shares { shares, strangers: of(None) }),
            };
            return Ok(told?);
        }
        if leases.is_empty() {
            return Ok(table::line(match asked.filters.is_empty() {
                true => "no shares held",
                false => "no share fits the filter",
            })?);
        }
        let headings = ["CONTAINER", "STATE", "PID", "GPU", "MEMORY", "USED", "COMPUTE", "GPU TIME", "AGE"];
        let rows = seen.flat_map(|(lease, seen)| {
            let cheats = of(Some(lease)).iter().any(Violation::is_cheating);
            rows(&held_by(lease, claim_of(lease)), lease, &seen, &names, cheats)
        });
        table::print(headings, rows)?;
        let shown = |violation: &&Violation| {
            violation.lease.is_none_or(|id| leases.iter().any(|lease| lease.id == id))
        };
        for violation in violations.iter().filter(shown) {
            let word = match violation.lease {
                _ if !violation.is_cheating() => "UNSEARCHED",
                Some(_) => "CHEATING",
                None => "STRANGER",
            };
            table::line(&format!("{word}: {violation}"))?;
        }
        if !lock::is_held(&meter::lock_file(&self.state)) {
            // Whoever cannot be told it has his table all the same.
            let _ = writeln!(
                io::stderr(),
                "gpushare: no meter runs: used memory is by the containers' own books, GPU time as it last was"
            );
        }
        Ok(())
    }
}

/// Who holds a lease: the containers, and the resource claim by its name in the cluster.
fn held_by(lease: &Lease, claim: Option<&ResourceClaim>) -> String {
    let claims = |member: &Member| claim.filter(|claim| is_claim(member, claim));
    let holder = |member: &Member| match claims(member) {
        Some(claim) => format!("claim {} ({})", claim.name, claim.name.uid),
        None => named(member),
    };
    lease.members().map(holder).collect::<Vec<_>>().join(", ")
}

/// Whether host memory may stand in for the GPUs'.
fn lends(lease: &Lease) -> bool {
    lease.host_memory > DeviceMemory::ZERO
}

/// Whether the memory of a grant is a limit, and not what the container says that it needs.
pub fn is_limited(lease: &Lease) -> bool {
    lease.enforcement != Enforcement::TimeSliced
}

fn memory(lease: &Lease, grant: &Grant) -> String {
    match grant.memory {
        memory if let Some(bounds) = lease.elastic => {
            let host = if lends(lease) { format!(" + {} host", lease.host_memory) } else { String::new() };
            format!("{memory} ({} to {}){host}", bounds.least, bounds.most)
        }
        memory if lends(lease) => format!("{memory} + {} host", lease.host_memory),
        memory if is_limited(lease) => memory.to_string(),
        DeviceMemory::ZERO => "no limit".to_owned(),
        needed => format!("no limit ({needed})"),
    }
}

fn rows(holders: &str, lease: &Lease, seen: &Seen, names: &GpuNames, cheats: bool) -> Vec<[String; 9]> {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let rows = lease.grants.iter().enumerate().map(|(line, grant)| {
        let host = seen.host_used(lease).filter(|_| line == 0);
        let host = host.map_or_else(String::new, |host| format!(" + {host} host"));
        let contexts = seen.contexts(line).map_or_else(String::new, |taken| format!(", contexts {taken}"));
        let used = seen.used_with_contexts(line).map(|used| format!("{used}{host}{contexts}"));
        let seconds = seen.gpu_time(line).map(|time| Duration::from_nanos(time).as_secs_f64());
        [
            holders.to_owned(),
            if cheats { "CHEATING".to_owned() } else { state(lease, seen.is_paused()).to_owned() },
            or_dash(first_pid(lease).map(|pid| pid.to_string())),
            names.name(grant.gpu),
            memory(lease, grant),
            if seen.is_damaged() { "damaged".to_owned() } else { or_dash(used) },
            match (lease.enforcement, grant.cores) {
                (unlimited @ (Enforcement::WholeGpu | Enforcement::TimeSliced), _) => {
                    unlimited.terms().company.mode().name().to_owned()
                }
                (Enforcement::Mps, None) => Mode::Mps.name().to_owned(),
                (Enforcement::Mps, Some(cores)) => format!("{cores} {}", Mode::Mps.name()),
                (_, None) => "no limit".to_owned(),
                (_, Some(cores)) => match lease.compute_policy {
                    ComputePolicy::Fixed => cores.to_string(),
                    ComputePolicy::Burst if lease.ceiling < Cores::ALL => {
                        format!("{cores} burst {}", lease.ceiling)
                    }
                    ComputePolicy::Burst => format!("{cores} burst"),
                    ComputePolicy::Latency => format!("{cores} latency"),
                    // The percent is granted to nobody else, and does not limit the container.
                    ComputePolicy::None => format!("{cores} kept"),
                },
            },
            or_dash(seconds.map(|seconds| format!("{seconds:.1}s"))),
            age(lease.granted_at),
        ]
    });
    rows.collect()
}

/// The first process of the container that holds the lease longest; `None` for a claim without containers.
pub fn first_pid(lease: &Lease) -> Option<i32> {
    lease.members().find_map(|member| pid(&member.holder))
}

fn pid(holder: &Holder) -> Option<i32> {
    Some(holder.pid).filter(|_| !holder.is_agent())
}

/// The lease's state; "gone" once all its containers are, until the next sweep.
pub fn state(lease: &Lease, is_paused: bool) -> &'static str {
    match lease.is_gone() {
        true => "gone",
        false if is_paused => "paused",
        false => lease.state().name(),
    }
}
