//! Looks at shares that libraries hold, where no supervisor does: device memory beside their books, GPU time
//! beside their share, and what their contexts take.

mod audit;
mod overhead;

use std::collections::HashMap;
use std::io::ErrorKind;
use std::path::Path;
use std::time::{Duration, Instant};

use gpushare_inject::{ContextCosts, Measuring, Region, UsageError};
use gpushare_inventory::{DeviceMemory, GpuUuid};
use gpushare_quota::{Enforcement, HeldBy, Lease, Running};
use gpushare_region::{DeviceUsage, Usage};

use self::audit::Audit;
use self::overhead::{Figure, Overheads};
use super::account::{Held, Member};
use super::kept::Kept;
use super::metered::Metered;
use super::session::publish_into;
use crate::clock::Clock;
use crate::violation::{Kind, Violation};

/// How often what contexts take is looked at. The libraries use a figure for a second, and it takes two
/// looks.
const CONTEXTS: Duration = Duration::from_millis(280);
/// How long a list of the machine's processes counts.
const LISTED: Duration = Duration::from_secs(1);

/// What the driver counts by lease; `None` where it does not report the memory of one of its processes.
pub type HeldByLease = HashMap<i64, Option<Held>>;

/// What earlier looks found.
pub struct Fallback<'a> {
    state: &'a Path,
    tolerance: DeviceMemory,
    audit: Audit,
    overheads: Overheads,
    /// Measured cost of contexts on this node.
    costs: ContextCosts,
    has_news: bool,
    /// When what contexts take was last looked at.
    weighed: Instant,
    /// The machine's processes, and since when: whoever began later may run all the same.
    running: (Running, Instant),
}

impl<'a> Fallback<'a> {
    /// For a node with this driver, where each process may hold `tolerance` that no books explain.
    pub fn new(state: &'a Path, driver: &str, tolerance: DeviceMemory) -> Self {
        let (audit, overheads, costs) =
            (Audit::default(), Overheads::default(), ContextCosts::load(state, driver));
        Self {
            state,
            tolerance,
            audit,
            overheads,
            costs,
            has_news: false,
            weighed: Instant::now(),
            running: (Running::default(), Instant::now()),
        }
    }

    /// Forgets leases that ended.
    pub fn retain(&mut self, living: impl Fn(i64) -> bool) {
        self.audit.retain(&living);
        self.overheads.retain(&living);
    }

    /// Compares what the driver counts of one container with its books and its share. `until` is the end of
    /// what was counted of its time, in microseconds since 1970; `None` where samples do not tell it.
    pub fn look(
        &mut self,
        lease: &Lease,
        member: &mut Member,
        kept: &Kept,
        until: Option<u64>,
    ) -> Vec<Violation> {
        let mut found = Vec::new();
        if !lease.enforcement.is_supervised() {
            found.extend(self.look_at_memory(lease, member, kept));
        }
        if lease.compute_held_by() != HeldBy::Supervisor {
            let now = until.map(|micros| micros.saturating_mul(1000));
            let excess = now.and_then(|now| self.audit.excess(lease, member.line, member.own, now));
            found.extend(excess.map(|excess| beyond_share(lease, excess)));
        }
        found
    }

    fn look_at_memory(&mut self, lease: &Lease, member: &mut Member, kept: &Kept) -> Vec<Violation> {
        let mut found = Vec::new();
        self.list_processes();
        let books = read_books(kept, self.state, lease, &self.running.0);
        let fails = matches!(&books, Err(error @ UsageError::Io(_)) if fault(error).is_some());
        let is_unread = self.audit.is_unread(lease.id, member.line, fails);
        let books = books.or_else(|error| {
            let fault = fault(&error).filter(|_| !fails || is_unread);
            found.extend(fault.map(|text| Violation::by(lease, None, Kind::Unreadable, text)));
            match error {
                // Who spoils the books has none, and explains nothing by them.
                UsageError::Damaged(_) => Ok(Usage::default()),
                // So has who keeps others from them by a lease of the file.
                UsageError::Io(error) if error.kind() == ErrorKind::WouldBlock => Ok(Usage::default()),
                UsageError::Io(_) => Err(()),
            }
        });
        if let Ok(books) = books {
            let booked = books.devices.get(member.line).map_or(0, |device| device.bytes);
            member.unbooked = self.audit.compare(lease, member.line, &member.held, booked, self.tolerance);
            if member.unbooked > 0 {
                let is_proof =
                    self.audit.is_beyond_limit(lease.id, member.line, &member.held, self.tolerance);
                found.push(Violation { is_hint: !is_proof, ..beyond_books(lease, member) });
            }
        }
        found
    }

    /// Has the machine's processes listed anew, once a second at most.
    fn list_processes(&mut self) {
        if self.running.1.elapsed() >= LISTED {
            self.running = (Running::default(), Instant::now());
        }
    }

    /// Whether contexts are to be weighed now.
    pub fn begin_weighing(&mut self) -> bool {
        let is_due = self.weighed.elapsed() >= CONTEXTS;
        if is_due {
            self.weighed = Instant::now();
            self.list_processes();
        }
        is_due
    }

    /// The books of containers on a GPU, before the driver is asked: lease, line and what they say.
    pub fn books_before(
        &self,
        metered: &mut Metered<'_>,
        kept: &Kept,
        leases: &[Lease],
    ) -> Vec<(i64, usize, DeviceUsage)> {
        // A supervisor knows what contexts take.
        let books = |(id, member): (i64, &mut Member)| {
            let lease = held_by_books(leases, id)?;
            let usage = read_books(kept, self.state, lease, &self.running.0).ok()?;
            Some((id, member.line, *usage.devices.get(member.line)?))
        };
        metered.account.members().filter_map(books).collect()
    }

    /// Works out what contexts take, by the books `before` and after the driver told what is `held`, and
    /// publishes it.
    pub fn weigh(
        &mut self,
        gpu: GpuUuid,
        before: Vec<(i64, usize, DeviceUsage)>,
        held: Option<&HeldByLease>,
        (kept, leases, limits): (&Kept, &[Lease], &mut HashMap<i64, Measuring>),
    ) {
        for (id, line, before) in before {
            let Some(lease) = held_by_books(leases, id) else { continue };
            let Some(after) = read_books(kept, self.state, lease, &self.running.0)
                .ok()
                .and_then(|usage| usage.devices.get(line).copied())
            else {
                continue;
            };
            // Under MPS the server may have the contexts.
            let is_told = lease.enforcement.terms().is_intercepted && lease.enforcement != Enforcement::Mps;
            let held = held.filter(|_| is_told);
            let held = held.and_then(|held| held.get(&id).copied().unwrap_or(Some(Held::default())));
            let figure = self.overheads.poll((id, line), &before, held, &after);
            if let (Figure::Is(Some(overhead)), Some(Held { processes: 1, .. })) = (figure, held) {
                self.has_news |= self.costs.note(gpu, id, overhead.of(after.context_bytes));
            }
            let (cost, now) = (self.costs.of(gpu), Clock::now().monotonic);
            publish_into(self.state, id, limits, |file| {
                file.set_context_cost(line, cost)?;
                match figure {
                    Figure::Is(overhead) => file.set_overhead(line, overhead, now),
                    Figure::Unknown => Ok(()),
                }
            });
        }
    }

    /// Writes down what contexts cost, where that is new.
    pub fn end_weighing(&mut self) {
        if std::mem::take(&mut self.has_news)
            && let Err(error) = self.costs.store(self.state)
        {
            tracing::warn!(%error, "what contexts cost cannot be written down");
        }
    }
}

fn held_by_books(leases: &[Lease], id: i64) -> Option<&Lease> {
    leases.iter().find(|lease| lease.id == id).filter(|lease| lease.enforcement.terms().is_held_by_books)
}

/// What is wrong with a usage file; `None` for one of a container that has ended or is being created.
fn fault(error: &UsageError) -> Option<String> {
    match error {
        UsageError::Damaged(_) => Some("its usage file is damaged".to_owned()),
        UsageError::Io(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        UsageError::Io(error) => Some(format!("its usage file cannot be read: {error}")),
    }
}

fn beyond_books(lease: &Lease, member: &Member) -> Violation {
    let [held, beyond] = [member.held.bytes, member.unbooked].map(DeviceMemory::from_bytes);
    let text = format!("its processes hold {held} of device memory, {beyond} more than its books explain");
    Violation::by(lease, None, Kind::Memory, text)
}

fn beyond_share(lease: &Lease, excess: u64) -> Violation {
    let seconds = excess / 1_000_000_000;
    let text = format!("it used at least {seconds} s of GPU time more than its share");
    Violation::by(lease, None, Kind::Compute, text)
}

/// The books of a lease's containers.
fn read_books(kept: &Kept, state: &Path, lease: &Lease, running: &Running) -> Result<Usage, UsageError> {
    match kept.usage(lease.id) {
        Some(file) => Region::usage_in(file, running, lease.grants.len()),
        None => Region::of(state, lease.id).read_usage(running, lease.grants.len()),
    }
}
