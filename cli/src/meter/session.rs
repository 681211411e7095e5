//! The meter's work while containers hold shares.

use std::collections::HashMap;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};

use anyhow::Result;
use gpushare_config::Config;
use gpushare_inject::{Region, UsageError, one_line};
use gpushare_inventory::{DeviceMemory, GpuUuid};
use gpushare_quota::{Lease, Running, Store};
use gpushare_region::Measurement;
use nvml_wrapper::Nvml;

use super::account::Account;
use super::audit::{Audit, Held, mend};
use super::driver::Gpu;
use super::owner::Owners;
use super::shares;
use crate::clock::Clock;
use crate::leases::ids;

/// How often samples are asked for while somebody has a compute share: they have to reach the libraries 50 ms after the
/// driver has them.
const FAST: Duration = Duration::from_millis(25);
/// How often the store's time stamp is looked at otherwise.
const SLOW: Duration = Duration::from_millis(100);
/// How often memory is looked at, and all that a container might have changed.
const LOOK: Duration = Duration::from_secs(1);
/// A line is written at least this often: libraries take one that is a second old for that of a dead meter.
const REFRESH: Duration = Duration::from_millis(250);
/// A container that was held back within this time wants more, in nanoseconds.
const HELD_BACK: u64 = 400_000_000;

/// Measures until nobody holds a share.
pub fn run(nvml: &Nvml, state: &Path, store: &Store, config: &Config) -> Result<()> {
    let mut session = Session {
        nvml,
        state,
        store,
        tolerance: config.meter.tolerance,
        change: None,
        leases: Vec::new(),
        gpus: HashMap::new(),
        owners: Owners::default(),
        audit: Audit::default(),
        looked: None,
    };
    loop {
        let look = session.looked.is_none_or(|looked| looked.elapsed() >= LOOK);
        session.reload(look)?;
        if session.leases.is_empty() {
            return Ok(());
        }
        if look {
            session.look();
        }
        session.measure();
        sleep(if session.gpus.values().any(|gpu| gpu.account.is_limited()) { FAST } else { SLOW });
    }
}

struct Session<'a> {
    nvml: &'a Nvml,
    state: &'a Path,
    store: &'a Store,
    tolerance: DeviceMemory,
    change: Option<SystemTime>,
    leases: Vec<Lease>,
    gpus: HashMap<GpuUuid, Metered<'a>>,
    owners: Owners,
    audit: Audit,
    looked: Option<Instant>,
}

/// One GPU that somebody holds a share of.
struct Metered<'a> {
    gpu: Gpu<'a>,
    account: Account,
    written: Option<Instant>,
}

impl<'a> Session<'a> {
    /// Reads the leases if they may have changed.
    fn reload(&mut self, anyway: bool) -> Result<()> {
        let change = self.store.last_change();
        if !anyway && change.is_some() && change == self.change {
            return Ok(());
        }
        self.change = change;
        let leases = shares(self.store)?;
        if leases != self.leases {
            self.leases = leases;
            self.admit();
        }
        Ok(())
    }

    /// Brings the books of all GPUs in line with the leases.
    fn admit(&mut self) {
        let (clock, leases) = (Clock::now(), std::mem::take(&mut self.leases));
        let known: HashMap<i64, _> = leases
            .iter()
            .filter_map(|lease| Some((lease.id, Region::of(self.state, lease.id).measured().ok()?)))
            .collect();
        let grants = || {
            leases.iter().flat_map(|lease| lease.grants.iter().enumerate().map(move |(l, g)| (lease, l, g)))
        };
        let of =
            |lease: &Lease, line: usize| known.get(&lease.id).map_or(Measurement::default(), |all| all[line]);
        for (_, _, grant) in grants() {
            if self.gpus.contains_key(&grant.gpu) {
                continue;
            }
            let before: Vec<Measurement> = grants()
                .filter(|(_, _, other)| other.gpu == grant.gpu)
                .map(|(lease, line, _)| of(lease, line))
                .collect();
            match self.nvml.device_by_uuid(grant.gpu.to_string()) {
                Ok(device) => {
                    let gpu = Gpu::new(device, grant.gpu);
                    let account = Account::new(&before, gpu.period(), clock);
                    self.gpus.insert(grant.gpu, Metered { gpu, account, written: None });
                }
                Err(error) => tracing::warn!(gpu = %grant.gpu, %error, "NVML cannot open a GPU"),
            }
        }
        for (lease, line, grant) in grants() {
            if let Some(metered) = self.gpus.get_mut(&grant.gpu) {
                metered.account.admit(lease, line, grant, &of(lease, line), clock);
                metered.written = None;
            }
        }
        let holds = |gpu: GpuUuid| {
            let leases = &leases;
            move |id: i64| {
                leases.iter().any(|lease| lease.id == id && lease.grants.iter().any(|g| g.gpu == gpu))
            }
        };
        self.gpus.iter_mut().for_each(|(gpu, metered)| metered.account.retain(holds(*gpu)));
        self.gpus.retain(|_, metered| !metered.account.is_empty());
        self.audit.retain(|id| leases.iter().any(|lease| lease.id == id));
        self.leases = leases;
    }

    /// Asks for new samples, decides, and publishes.
    fn measure(&mut self) {
        for metered in self.gpus.values_mut() {
            let clock = Clock::now();
            let mut ended = false;
            if metered.account.is_limited() {
                // A short process may have ended by the time of its first sample.
                metered.gpu.processes().for_each(|pid| self.owners.note(pid, &self.leases));
            }
            if metered.account.is_limited()
                && let Some(samples) = metered.gpu.samples(metered.account.ask_from(clock))
            {
                ended = metered.account.count(samples, clock, |pid| self.owners.of(pid, &self.leases));
            }
            if ended {
                let state = self.state;
                metered.account.decide(|lease, line| held_back(&Region::of(state, lease), line, clock));
            }
            if ended || metered.written.is_none_or(|written| written.elapsed() >= REFRESH) {
                metered.written = Some(Instant::now());
                publish(self.state, &metered.account, clock);
            }
        }
    }

    /// The slow look: memory by the driver's count, and what a container may have changed.
    fn look(&mut self) {
        self.looked = Some(Instant::now());
        self.owners.forget();
        for lease in &self.leases {
            let container = ids(lease).join(", ");
            match mend(self.store, &Region::of(self.state, lease.id), lease) {
                Ok(false) => {}
                Ok(true) => {
                    tracing::warn!(%container, "limits file differed from the lease (changed from inside?): rewritten")
                }
                Err(error) => {
                    tracing::warn!(%container, error = %one_line(error.as_ref()), "limits file not mended")
                }
            }
        }
        let running = Running::default();
        for metered in self.gpus.values_mut() {
            let Some(memory) = metered.gpu.memory() else { continue };
            let mut held: HashMap<i64, Held> = HashMap::new();
            for (pid, bytes) in memory {
                if let Some(lease) = self.owners.of(pid, &self.leases) {
                    let held = held.entry(lease).or_default();
                    held.bytes = held.bytes.saturating_add(bytes);
                    held.processes += 1;
                }
            }
            for (id, member) in metered.account.members() {
                member.held = held.get(&id).copied().unwrap_or_default();
                let Some(lease) = self.leases.iter().find(|lease| lease.id == id) else { continue };
                match Region::of(self.state, id).read_usage(&running) {
                    Ok(books) => {
                        member.unbooked =
                            self.audit.compare(lease, member.line, &member.held, &books, self.tolerance);
                    }
                    Err(UsageError::Damaged(_)) => self.audit.damaged(lease),
                    Err(UsageError::Io(_)) => {}
                }
            }
        }
    }
}

/// Whether the container says that it wanted more a moment ago.
fn held_back(region: &Region, line: usize, clock: Clock) -> bool {
    let words = region.read_throttles().ok().and_then(|all| all.get(line).copied()).unwrap_or_default();
    // A time that has not come yet is no time.
    clock.monotonic.checked_sub(words.held_back).is_some_and(|ago| ago < HELD_BACK)
}

/// A region that is going away with its container is no trouble; the next look finds its lease gone.
fn publish(state: &Path, account: &Account, clock: Clock) {
    for (lease, line, value) in account.measurements(clock) {
        if let Err(error) = Region::of(state, lease).set_measured([(line, value)]) {
            tracing::debug!(lease, %error, "limits file not written");
        }
    }
}
