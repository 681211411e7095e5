//! Which of several extenders decides: the one that holds a Lease (coordination.k8s.io/v1).
//!
//! Each kube-scheduler may have an extender beside it, and only one of them calls. So the Lease follows the
//! calls: an extender takes it when it is called, keeps it while it is called, and gives it up when it has
//! not been for a while. Who holds it binds only while its time, by its own clock and with a margin, is not
//! over.

use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::Instant;

/// How long a Lease holds after its holder has renewed it.
const HOLDS: Duration = Duration::from_secs(15);
/// What the holder takes off: nothing that it asked for before is done after that.
const MARGIN: Duration = Duration::from_secs(5);
/// Age at which it is renewed.
const RENEWED: Duration = Duration::from_secs(4);
/// How long after the last call it is given up.
const IDLE: Duration = Duration::from_secs(10);

/// One extender's part in it.
pub struct Election {
    api: Api<Lease>,
    name: String,
    identity: String,
    state: Mutex<Held>,
    /// Counts how often another extender may have decided.
    epoch: watch::Sender<u64>,
}

#[derive(Clone, Debug, Default)]
struct Held {
    /// When the holder, this extender, began to ask for the renewal that was granted last.
    since: Option<Instant>,
    /// When it was last called.
    called: Option<Instant>,
    /// The version of the Lease at the first sight of it as it is, and when that was: a holder's clock may be
    /// another one.
    seen: Option<(String, Instant)>,
    /// The Lease's UID, and how often it had changed hands when it was this extender's last.
    last: Option<(String, i32)>,
}

/// What came of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It holds the Lease; in a new epoch where another one may have decided meanwhile.
    Leads,
    /// Another one holds it.
    Follows(String),
}

impl Election {
    /// The election by the Lease `name`.
    pub fn new(client: Client, namespace: &str, name: &str, identity: String) -> Self {
        let (state, (epoch, _)) = (Mutex::default(), watch::channel(0));
        Self { api: Api::namespaced(client, namespace), name: name.to_owned(), identity, state, epoch }
    }

    /// How often another extender may have decided: what was decided in an earlier epoch is to be decided
    /// again.
    pub fn epoch(&self) -> u64 {
        *self.epoch.borrow()
    }

    /// Waits until another extender may have decided since this epoch.
    pub async fn next_epoch(&self, epoch: u64) {
        let mut epochs = self.epoch.subscribe();
        let _ = epochs.wait_for(|now| *now != epoch).await;
    }

    /// How long it may still decide; `None` where it may not.
    pub fn left(&self) -> Option<Duration> {
        let since = self.held().since?;
        (HOLDS - MARGIN).checked_sub(since.elapsed()).filter(|left| !left.is_zero())
    }

    /// Notes that a scheduler calls this extender.
    pub fn called(&self) {
        self.held().called = Some(Instant::now());
    }

    /// Whether it is called at present.
    pub fn is_called(&self) -> bool {
        self.held().called.is_some_and(|called| called.elapsed() < IDLE)
    }

    /// Whether the Lease is to be renewed.
    pub fn is_due(&self) -> bool {
        self.held().since.is_none_or(|since| since.elapsed() >= RENEWED)
    }

    fn held(&self) -> std::sync::MutexGuard<'_, Held> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Takes the Lease, or renews it.
    ///
    /// # Errors
    /// When the API server does not answer, or refuses.
    pub async fn campaign(&self) -> Result<Outcome> {
        let began = Instant::now();
        let Some(known) = self.api.get_opt(&self.name).await.context("the Lease cannot be read")? else {
            let metadata = ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() };
            let lease = Lease { metadata, spec: Some(self.spec(None, 0)) };
            return match self.api.create(&PostParams::default(), &lease).await {
                Ok(made) => Ok(self.won(began, made.metadata.uid.unwrap_or_default(), 0)),
                Err(kube::Error::Api(status)) if status.code == 409 => {
                    Ok(Outcome::Follows("another".to_owned()))
                }
                Err(error) => Err(error).context("the Lease cannot be made"),
            };
        };
        let spec = known.spec.clone().unwrap_or_default();
        let holder = spec.holder_identity.clone().unwrap_or_default();
        let is_mine = holder == self.identity;
        if !is_mine && !holder.is_empty() && !self.has_run_out(&known) {
            self.held().since = None;
            return Ok(Outcome::Follows(holder));
        }
        let before = spec.lease_transitions.unwrap_or(0);
        let transitions = if is_mine { before } else { before.saturating_add(1) };
        let acquired = spec.acquire_time.clone().filter(|_| is_mine);
        let uid = known.metadata.uid.clone().unwrap_or_default();
        let lease = Lease { metadata: known.metadata, spec: Some(self.spec(acquired, transitions)) };
        match self.api.replace(&self.name, &PostParams::default(), &lease).await {
            Ok(_) => Ok(self.won(began, uid, transitions)),
            Err(kube::Error::Api(status)) if status.code == 409 => {
                self.held().since = None;
                Ok(Outcome::Follows("another".to_owned()))
            }
            Err(error) => Err(error).context("the Lease cannot be written"),
        }
    }

    /// Another extender that decides now.
    ///
    /// # Errors
    /// When the API server does not answer.
    pub async fn follows(&self) -> Result<Option<String>> {
        let Some(known) = self.api.get_opt(&self.name).await.context("the Lease cannot be read")? else {
            return Ok(None);
        };
        let holder = known.spec.as_ref().and_then(|spec| spec.holder_identity.clone()).unwrap_or_default();
        let is_free = holder.is_empty() || holder == self.identity || self.has_run_out(&known);
        Ok(Some(holder).filter(|_| !is_free))
    }

    fn won(&self, began: Instant, uid: String, transitions: i32) -> Outcome {
        let mut held = self.held();
        // Whoever takes it from another, or after it was given up, counts one up.
        let since = held
            .last
            .as_ref()
            .filter(|(its, _)| *its == uid)
            .map(|(_, last)| transitions.wrapping_sub(*last));
        let is_kept = matches!(since, Some(0 | 1));
        if !is_kept {
            tracing::info!("this extender decides now, after another one or for the first time");
            // Before anyone sees that it decides.
            self.epoch.send_modify(|epoch| *epoch += 1);
        }
        held.since = Some(began);
        held.last = Some((uid, transitions));
        Outcome::Leads
    }

    /// Whether the Lease's time is over: it has stood as it is for as long, by this program's own clock.
    fn has_run_out(&self, lease: &Lease) -> bool {
        let version = lease.metadata.resource_version.clone().unwrap_or_default();
        let spec = lease.spec.as_ref();
        let seconds = spec.and_then(|spec| spec.lease_duration_seconds).unwrap_or(0);
        let holds = u64::try_from(seconds).map_or(HOLDS, Duration::from_secs);
        let mut held = self.held();
        match &held.seen {
            Some((seen, at)) if *seen == version => at.elapsed() > holds,
            _ => {
                held.seen = Some((version, Instant::now()));
                false
            }
        }
    }

    /// Gives the Lease up.
    ///
    /// # Errors
    /// When the API server does not answer: it runs out by itself then.
    pub async fn give_up(&self) -> Result<()> {
        let was_mine = self.held().since.take().is_some();
        let Some(known) = self.api.get_opt(&self.name).await?.filter(|_| was_mine) else { return Ok(()) };
        let Some(spec) =
            known.spec.clone().filter(|spec| spec.holder_identity.as_ref() == Some(&self.identity))
        else {
            return Ok(());
        };
        let spec = LeaseSpec { holder_identity: Some(String::new()), ..spec };
        let lease = Lease { metadata: known.metadata, spec: Some(spec) };
        self.api.replace(&self.name, &PostParams::default(), &lease).await?;
        Ok(())
    }

    fn spec(&self, acquired: Option<MicroTime>, transitions: i32) -> LeaseSpec {
        let now = MicroTime(Timestamp::now());
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            acquire_time: Some(acquired.unwrap_or_else(|| now.clone())),
            renew_time: Some(now),
            lease_duration_seconds: i32::try_from(HOLDS.as_secs()).ok(),
            lease_transitions: Some(transitions),
            ..LeaseSpec::default()
        }
    }
}
