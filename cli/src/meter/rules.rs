//! Ends, or tells of, containers that hold a GPU and do not use it, or hold it for long (`[rules]` of the
//! settings).

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, sleep};
use std::time::{Duration, Instant, SystemTime};

use anyhow::Result;
use gpushare_config::{Config, Rule, Rules};
use gpushare_inject::{ending, one_line};
use gpushare_quota::{Done, Lease, LeaseState, Member};

use crate::container::containers;
use crate::node;

/// Time between two looks.
const PAUSE: Duration = Duration::from_secs(1);

/// For how long each lease has used no GPU time. One is missing while the driver tells no GPU time of its
/// GPUs.
#[derive(Clone, Debug, Default)]
pub struct LastUse(Arc<Mutex<BTreeMap<i64, Use>>>);

#[derive(Debug)]
struct Use {
    /// GPU time in nanoseconds.
    total: u64,
    /// For how long that has not changed, as far as it was looked at.
    idle: Duration,
    looked: Instant,
}

/// The most that counts between two looks: nobody was idle while nobody looked.
const BETWEEN: Duration = Duration::from_secs(3);

impl LastUse {
    /// Notes the GPU time, in nanoseconds over all GPUs, that each of these leases has used so far. Others
    /// are forgotten.
    pub fn note(&self, used: &BTreeMap<i64, u64>) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|lease, _| used.contains_key(lease));
        for (lease, total) in used {
            let now = Instant::now();
            let new = Use { total: *total, idle: Duration::ZERO, looked: now };
            let before = known.insert(*lease, new).filter(|before| before.total == *total);
            if let (Some(before), Some(new)) = (before, known.get_mut(lease)) {
                new.idle = before.idle + now.duration_since(before.looked).min(BETWEEN);
            }
        }
    }

    fn idle(&self, lease: i64) -> Option<Duration> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(&lease).map(|one| one.idle)
    }
}

/// Applies the rules for as long as this process lives. Returns at once; without a rule nothing happens.
pub fn watch(config: &Config, used: &LastUse) {
    if config.rules.idle.is_none() && config.rules.hold.is_none() {
        return;
    }
    let (config, used) = (config.clone(), used.clone());
    // It ends with the process, which waits for nothing of it. A look that fails is tried again.
    drop(thread::spawn(move || {
        let mut judge = Judge::new(config.rules.clone(), used, config.paths.state.clone());
        loop {
            if let Err(error) = judge_all(&config, &mut judge) {
                tracing::warn!(error = one_line(error.as_ref()), "the rules cannot be applied");
            }
            sleep(PAUSE);
        }
    }));
}

fn judge_all(config: &Config, judge: &mut Judge) -> Result<()> {
    let (_, store) = node::store(config)?;
    loop {
        judge.look(&store.leases()?);
        sleep(PAUSE);
    }
}

/// The containers that hold a lease now: a lease of a pod or claim outlives them.
type Holders = (i64, Vec<(i32, u64)>);

struct Judge {
    rules: Rules,
    used: LastUse,
    /// The state folder.
    state: PathBuf,
    /// When these containers were first seen, and how old their lease was then.
    seen: BTreeMap<Holders, (Instant, Duration)>,
    /// What was told already.
    told: BTreeSet<(Holders, &'static str)>,
    /// Since when they are asked to end.
    ending: BTreeMap<Holders, Instant>,
}

impl Judge {
    fn new(rules: Rules, used: LastUse, state: PathBuf) -> Self {
        let (seen, ending) = (BTreeMap::new(), BTreeMap::new());
        Self { rules, used, state, seen, told: BTreeSet::new(), ending }
    }

    fn look(&mut self, leases: &[Lease]) {
        let judged = |lease: &&Lease| lease.state() == LeaseState::Active && lease.has_containers();
        let now: Vec<(&Lease, Holders)> =
            leases.iter().filter(judged).map(|lease| (lease, holders(lease))).collect();
        let is_there = |key: &Holders| now.iter().any(|(_, other)| other == key);
        self.seen.retain(|key, _| is_there(key));
        self.told.retain(|(key, _)| is_there(key));
        self.ending.retain(|key, _| is_there(key));
        for (lease, key) in now {
            let known = age(lease, &key);
            let (first, age) = *self.seen.entry(key.clone()).or_insert_with(|| (Instant::now(), known));
            let held = age.saturating_add(first.elapsed());
            let idle = self.used.idle(lease.id).map_or(Duration::ZERO, |idle| idle.min(held));
            let (on_idle, on_hold) = (self.rules.idle, self.rules.hold);
            let is_idle = self.breaks(lease, &key, on_idle, idle, "rules.idle", "has used no GPU time");
            let is_long = self.breaks(lease, &key, on_hold, held, "rules.hold", "has held its GPU");
            if is_idle || is_long {
                let rule = if is_idle { "rules.idle" } else { "rules.hold" };
                self.end(lease, key, rule);
            } else {
                self.ending.remove(&key);
            }
        }
    }

    /// Tells of containers that break the rule. Returns whether they are to be ended.
    fn breaks(
        &mut self,
        lease: &Lease,
        key: &Holders,
        rule: Option<Rule>,
        since: Duration,
        name: &'static str,
        what: &str,
    ) -> bool {
        let Some(rule) = rule.filter(|rule| since >= rule.after) else {
            self.told.remove(&(key.clone(), name));
            return false;
        };
        if self.told.insert((key.clone(), name)) {
            let (container, seconds) = (containers(lease), since.as_secs());
            let done = if rule.ends { "it is ended" } else { "told alone" };
            tracing::warn!(%container, rule = name, seconds, "{what} for long: {done}");
        }
        rule.ends
    }

    fn end(&mut self, lease: &Lease, key: Holders, rule: &str) {
        let asked = *self.ending.entry(key).or_insert_with(|| {
            Done::Ended { why: rule.to_owned() }.note(&self.state, lease);
            ending::ask(lease);
            Instant::now()
        });
        if asked.elapsed() >= self.rules.grace {
            ending::end(lease);
        }
    }
}

fn holders(lease: &Lease) -> Holders {
    let of = |member: &Member| (member.holder.pid, member.holder.start_time);
    (lease.id, lease.members().filter(|member| !member.holder.is_agent()).map(of).collect())
}

/// How old the lease is by the wall clock; nothing if that was set back, or if others may have held it
/// before.
fn age(lease: &Lease, (_, holders): &Holders) -> Duration {
    if lease.members().count() > 1 || holders.is_empty() {
        return Duration::ZERO;
    }
    let granted = SystemTime::UNIX_EPOCH + Duration::from_secs(lease.granted_at);
    SystemTime::now().duration_since(granted).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn use_is_seen_by_what_was_added_and_forgotten_with_the_measurement() {
        let used = LastUse::default();
        assert_eq!(used.idle(1), None, "nothing is known of it");
        used.note(&BTreeMap::from([(1, 5), (2, 0)]));
        sleep(Duration::from_millis(20));
        used.note(&BTreeMap::from([(1, 6), (2, 0)]));
        assert_eq!(used.idle(1), Some(Duration::ZERO));
        assert!(used.idle(2).is_some_and(|idle| idle >= Duration::from_millis(20)));
        let before = used.idle(2);
        sleep(Duration::from_millis(20));
        assert_eq!(used.idle(2), before, "time in which nobody looked does not count yet");
        used.note(&BTreeMap::from([(1, 6)]));
        assert_eq!(used.idle(2), None);
    }
}
