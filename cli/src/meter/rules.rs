//! Ends, or tells of, containers that hold a GPU and do not use it, or hold it for long (`[rules]` of the settings).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, sleep};
use std::time::{Duration, Instant, SystemTime};

use anyhow::Result;
use gpushare_config::{Config, Rule, Rules};
use gpushare_inject::{ending, one_line};
use gpushare_quota::{Lease, LeaseState};

use crate::container::containers;
use crate::node;

/// Time between two looks.
const PAUSE: Duration = Duration::from_secs(1);

/// When each lease was last seen to use GPU time. One is missing while the driver tells no GPU time of its GPUs.
#[derive(Clone, Debug, Default)]
pub struct LastUse(Arc<Mutex<BTreeMap<i64, (Instant, u64)>>>);

impl LastUse {
    /// Notes the GPU time, in nanoseconds over all GPUs, that each of these leases has used so far. Others are
    /// forgotten.
    pub fn note(&self, used: &BTreeMap<i64, u64>) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|lease, _| used.contains_key(lease));
        for (lease, used) in used {
            let entry = known.entry(*lease).or_insert_with(|| (Instant::now(), *used));
            if entry.1 != *used {
                *entry = (Instant::now(), *used);
            }
        }
    }

    fn idle(&self, lease: i64) -> Option<Duration> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(&lease).map(|(last, _)| last.elapsed())
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
        let mut judge = Judge::new(config.rules.clone(), used);
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

struct Judge {
    rules: Rules,
    used: LastUse,
    /// When each lease was first seen, and how old it was then.
    seen: BTreeMap<i64, (Instant, Duration)>,
    /// What was told already.
    told: BTreeSet<(i64, &'static str)>,
    /// Since when each lease is asked to end.
    ending: BTreeMap<i64, Instant>,
}

impl Judge {
    const fn new(rules: Rules, used: LastUse) -> Self {
        Self { rules, used, seen: BTreeMap::new(), told: BTreeSet::new(), ending: BTreeMap::new() }
    }

    fn look(&mut self, leases: &[Lease]) {
        let is_there = |id: &i64| leases.iter().any(|lease| lease.id == *id);
        self.seen.retain(|id, _| is_there(id));
        self.told.retain(|(id, _)| is_there(id));
        self.ending.retain(|id, _| is_there(id));
        for lease in
            leases.iter().filter(|lease| lease.state() == LeaseState::Active && lease.has_containers())
        {
            let (first, age) = *self.seen.entry(lease.id).or_insert_with(|| (Instant::now(), age(lease)));
            let held = age.saturating_add(first.elapsed());
            let (idle, hold) = (self.rules.idle, self.rules.hold);
            if let Some(idle_for) = self.used.idle(lease.id) {
                self.apply(lease, idle, idle_for, "rules.idle", "has used no GPU time");
            }
            self.apply(lease, hold, held, "rules.hold", "has held its GPU");
        }
    }

    fn apply(&mut self, lease: &Lease, rule: Option<Rule>, since: Duration, name: &'static str, what: &str) {
        let Some(rule) = rule.filter(|rule| since >= rule.after) else { return };
        if self.told.insert((lease.id, name)) {
            let (container, seconds) = (containers(lease), since.as_secs());
            let done = if rule.ends { "it is ended" } else { "told alone" };
            tracing::warn!(%container, rule = name, seconds, "{what} for long: {done}");
        }
        if !rule.ends {
            return;
        }
        let asked = *self.ending.entry(lease.id).or_insert_with(|| {
            ending::ask(lease);
            Instant::now()
        });
        if asked.elapsed() >= self.rules.grace {
            ending::end(lease);
        }
    }
}

/// How old the lease is by the wall clock; nothing if that was set back.
fn age(lease: &Lease) -> Duration {
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
        let (first, second) = (used.idle(1).unwrap(), used.idle(2).unwrap());
        assert!(first < second && second >= Duration::from_millis(20), "{first:?} {second:?}");
        used.note(&BTreeMap::from([(1, 6)]));
        assert_eq!(used.idle(2), None);
    }
}
