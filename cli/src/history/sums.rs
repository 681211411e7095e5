//! `gpushare history --by`: what shares cost together, those too that are held now.

use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

use clap::ValueEnum;
use gpushare_inventory::DeviceMemory;
use gpushare_quota::{Deeds, Done, Lease, PastLease, Used};
use schemars::JsonSchema;
use serde::Serialize;

use crate::answer::{self, Format};
use crate::container::name;
use crate::node::GpuNames;
use crate::table::{self, span};

/// What shares are summed up by.
#[derive(Clone, Copy, ValueEnum)]
pub enum By {
    /// The container's name.
    Name,
    /// The image, as its user named it.
    Image,
    /// The Kubernetes namespace, or the compose project where there is none.
    Namespace,
    /// The compose project.
    Project,
    /// The GPUs.
    Gpu,
}

/// Shares summed up.
#[derive(Serialize, JsonSchema)]
pub struct Sums {
    /// What they are summed up by: `name`, `image`, `namespace`, `project` or `gpu`.
    by: &'static str,
    sums: Vec<Total>,
}

/// What several shares cost together.
#[derive(Serialize, JsonSchema)]
struct Total {
    /// The name, image, namespace or GPU; `-` where it is not known.
    of: String,
    /// How many they are.
    shares: u64,
    held_seconds: u64,
    gpu_seconds: f64,
    throttled_seconds: f64,
    /// Allocations that their limits refused.
    allocations_refused: u64,
    /// The most memory that one of them held, in bytes.
    peak_bytes: u64,
    /// Granted memory times the time for which it was held. What `gpushare update` changed counts as it was
    /// then; memory that grows by itself counts as it was last.
    memory_gibibyte_hours: f64,
}

fn key(by: By, lease: &PastLease, names: &GpuNames) -> String {
    let unknown = || "-".to_owned();
    match by {
        By::Name => name(lease.name.as_ref(), &lease.called, &lease.key.container),
        By::Image => lease.called.image.clone().unwrap_or_else(unknown),
        By::Namespace => {
            let namespace = lease.name.as_ref().map(|name| name.namespace.clone());
            namespace.or_else(|| lease.called.project.clone()).unwrap_or_else(unknown)
        }
        By::Project => lease.called.project.clone().unwrap_or_else(unknown),
        By::Gpu if lease.shares.is_empty() => unknown(),
        By::Gpu => lease.shares.iter().map(|grant| names.name(grant.gpu)).collect::<Vec<_>>().join(", "),
    }
}

/// What several leases cost together.
#[derive(Default)]
struct Sum {
    shares: u64,
    held_seconds: u64,
    gpu_nanoseconds: u64,
    throttled_nanoseconds: u64,
    refused: u64,
    peak_bytes: u64,
    /// Granted memory times the time for which it was held, in MiB seconds.
    memory_seconds: u64,
}

impl Sum {
    fn add(&mut self, lease: &PastLease, used: &Used, deeds: &Deeds) {
        let held = lease.released_at.saturating_sub(lease.granted_at);
        self.shares += 1;
        self.held_seconds = self.held_seconds.saturating_add(held);
        self.gpu_nanoseconds = self.gpu_nanoseconds.saturating_add(used.gpu_nanoseconds.unwrap_or(0));
        self.throttled_nanoseconds = self.throttled_nanoseconds.saturating_add(used.throttled_nanoseconds);
        self.refused = self.refused.saturating_add(used.refused);
        self.peak_bytes = self.peak_bytes.max(used.peak_bytes.unwrap_or(0));
        self.memory_seconds = self.memory_seconds.saturating_add(memory_seconds(lease, deeds));
    }

    fn gibibyte_hours(&self) -> f64 {
        Duration::from_secs(self.memory_seconds).as_secs_f64() / 1024.0 / 3600.0
    }
}

/// The memory that a lease granted times the time for which it did, in MiB seconds.
fn memory_seconds(lease: &PastLease, deeds: &Deeds) -> u64 {
    // Until when there was another size, and which.
    let before = deeds.of(lease).filter_map(|deed| match deed.what {
        Done::Resized { mebibytes, .. } => Some((deed.at, mebibytes)),
        _ => None,
    });
    let last: u64 = lease.shares.iter().map(|grant| grant.memory.bytes() >> 20).sum();
    let (mut sum, mut from) = (0_u64, lease.granted_at);
    for (until, mebibytes) in before.chain([(lease.released_at, last)]) {
        sum = sum.saturating_add(mebibytes.saturating_mul(until.saturating_sub(from)));
        from = from.max(until);
    }
    sum
}

/// Prints what these leases cost together: past ones, or living as if they ended now, with what each used.
pub fn print<'a>(
    by: By,
    leases: impl Iterator<Item = (&'a PastLease, Used)>,
    deeds: &Deeds,
    names: &GpuNames,
    format: Format,
    is_narrowed: bool,
) -> io::Result<()> {
    let mut sums = BTreeMap::<String, Sum>::new();
    leases.for_each(|(lease, used)| {
        sums.entry(key(by, lease, names)).or_default().add(lease, &used, deeds);
    });
    let [word, heading] = match by {
        By::Name => ["name", "NAME"],
        By::Image => ["image", "IMAGE"],
        By::Namespace => ["namespace", "NAMESPACE"],
        By::Project => ["project", "PROJECT"],
        By::Gpu => ["gpu", "GPU"],
    };
    let seconds = |nanoseconds: u64| Duration::from_nanos(nanoseconds).as_secs_f64();
    match format {
        Format::Json => {
            let total = |(key, sum): (&String, &Sum)| Total {
                of: key.clone(),
                shares: sum.shares,
                held_seconds: sum.held_seconds,
                gpu_seconds: seconds(sum.gpu_nanoseconds),
                throttled_seconds: seconds(sum.throttled_nanoseconds),
                allocations_refused: sum.refused,
                peak_bytes: sum.peak_bytes,
                memory_gibibyte_hours: sum.gibibyte_hours(),
            };
            answer::print(Sums { by: word, sums: sums.iter().map(total).collect() })
        }
        Format::Csv => {
            let columns = [
                word,
                "shares",
                "held_seconds",
                "gpu_seconds",
                "throttled_seconds",
                "allocations_refused",
                "peak_bytes",
                "memory_gibibyte_hours",
            ];
            table::csv(
                &columns,
                sums.iter().map(|(key, sum)| {
                    vec![
                        key.clone(),
                        sum.shares.to_string(),
                        sum.held_seconds.to_string(),
                        format!("{:.3}", seconds(sum.gpu_nanoseconds)),
                        format!("{:.3}", seconds(sum.throttled_nanoseconds)),
                        sum.refused.to_string(),
                        sum.peak_bytes.to_string(),
                        format!("{:.3}", sum.gibibyte_hours()),
                    ]
                }),
            )
        }
        Format::Table if sums.is_empty() => table::line(match is_narrowed {
            false => "no share was given yet",
            true => "no share fits",
        }),
        Format::Table => {
            let rows = sums.iter().map(|(key, sum)| {
                [
                    key.clone(),
                    sum.shares.to_string(),
                    span(Duration::from_secs(sum.held_seconds)),
                    format!("{:.1}s", seconds(sum.gpu_nanoseconds)),
                    format!("{:.1}s", seconds(sum.throttled_nanoseconds)),
                    sum.refused.to_string(),
                    DeviceMemory::from_bytes(sum.peak_bytes).to_string(),
                    format!("{:.2}", sum.gibibyte_hours()),
                ]
            });
            let rest = ["SHARES", "HELD", "GPU TIME", "THROTTLED", "OOM", "PEAK", "GIB HOURS"];
            let [a, b, c, d, e, f, g] = rest;
            table::print([heading, a, b, c, d, e, f, g], rows)
        }
    }
}

/// A lease as if it ended now.
pub fn living_as_past(lease: &Lease) -> PastLease {
    let member = &lease.member;
    PastLease {
        key: member.key.clone(),
        others: lease.others.iter().map(|other| other.key.container.clone()).collect(),
        grants: String::new(),
        granted_at: lease.granted_at,
        released_at: table::now(),
        reason: "held".to_owned(),
        name: member.name.clone(),
        called: member.called.clone(),
        shares: lease.grants.clone(),
        used: None,
    }
}

#[cfg(test)]
mod tests {
    use gpushare_inventory::GpuUuid;
    use gpushare_quota::{Called, Deed, Grant, LeaseKey};

    use super::*;

    fn lease() -> PastLease {
        let gpu = GpuUuid::from_bytes([1; 16]);
        PastLease {
            key: LeaseKey { root: String::new(), container: "web".to_owned() },
            others: Vec::new(),
            grants: String::new(),
            granted_at: 1000,
            released_at: 1100,
            reason: "ended".to_owned(),
            name: None,
            called: Called::default(),
            shares: vec![Grant { gpu, card: None, memory: DeviceMemory::from_bytes(8 << 30), cores: None }],
            used: None,
        }
    }

    fn resized(at: u64, container: &str, gibibytes: u64) -> Deed {
        let what = Done::Resized { before: String::new(), after: String::new(), mebibytes: gibibytes << 10 };
        Deed { at, lease: 1, container: container.to_owned(), what }
    }

    #[test]
    fn each_size_counts_for_as_long_as_it_was_granted() {
        let gib_seconds = |deeds: &[Deed]| memory_seconds(&lease(), &deeds.iter().cloned().collect()) >> 10;
        assert_eq!(gib_seconds(&[]), 800);
        // Others are not its own, nor those of an earlier lease.
        let deeds = [resized(1090, "web", 2), resized(1040, "web", 4), resized(1050, "db", 99)];
        assert_eq!(gib_seconds(&deeds), 40 * 4 + 50 * 2 + 10 * 8);
        assert_eq!(gib_seconds(&[resized(900, "web", 99), resized(1200, "web", 99)]), 800);
        let ended = Deed { what: Done::Ended { why: String::new() }, ..resized(1050, "web", 0) };
        assert_eq!(gib_seconds(&[ended]), 800);
    }
}
