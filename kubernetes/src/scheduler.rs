//! `gpushare-kube scheduler`: an extender of kube-scheduler for GPUs that are counted by resources. It
//! chooses nodes by what is free on single GPUs, and the GPUs of pods that it binds.
//!
//! [`follow`] learns what the API server says into [`state`], [`verbs`] answers kube-scheduler's calls
//! ([`messages`]), [`election`] says which of several extenders decides, [`quota`] what namespaces may have,
//! and [`words`] what is written to the pods.

mod election;
mod follow;
mod messages;
mod metrics;
mod quota;
mod state;
mod verbs;
mod words;

use std::collections::HashSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use gpushare_config::Config;
use gpushare_placement::{Binpack, Policy, Spread};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Client;
use tokio::runtime;
use tokio::sync::{Mutex as TurnMutex, RwLock, watch};
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::api::{self, until_signalled};
use crate::serve::{self, Callers};
use election::{Election, Outcome};
use follow::Kind;
use metrics::Metrics;
use quota::Quota;

pub use state::{State, Wanted};

/// How long to wait after an error.
const PAUSE: Duration = Duration::from_secs(1);
/// The time between two looks at the Lease.
const LEASE: Duration = Duration::from_secs(1);
/// The time between two looks at which kinds of pods there are.
const KINDS: Duration = Duration::from_secs(60);
/// Bytes of a call at most: kube-scheduler may send all nodes whole.
const LARGEST: usize = 256 << 20;

/// Where kube-scheduler calls, and how nodes are chosen.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// Where kube-scheduler calls it (urlPrefix of its extender).
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9847")]
    address: SocketAddr,
    #[command(flatten)]
    tls: serve::Certificates,
    /// The namespace of gpushare's agents, with their ConfigMaps and the Lease.
    #[arg(long, value_name = "NAME", default_value = "gpushare")]
    namespace: String,
    /// The Lease of which one extender holds it and decides.
    #[arg(long, value_name = "NAME", default_value = "gpushare-scheduler")]
    lease: String,
    /// The name of this extender among several; its host's name without it.
    #[arg(long, value_name = "NAME")]
    identity: Option<String>,
    /// Which nodes and GPUs come first of those that fit.
    #[arg(long, value_name = "POLICY", value_enum, default_value_t = Choice::Fill)]
    policy: Choice,
    /// A ConfigMap with what namespaces may have, as NAMESPACE/NAME.
    #[arg(long, value_name = "CONFIGMAP", value_parser = quota_name)]
    quota: Option<(String, String)>,
    #[command(flatten)]
    labels: quota::Labels,
    /// The folder with the pod's service account, where it is not at the usual place. Else KUBECONFIG or the
    /// usual place names the API server.
    #[arg(long, value_name = "FOLDER")]
    service_account: Option<PathBuf>,
}

/// Which nodes and GPUs come first.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Choice {
    /// Those of which a pod takes what others could use least, as the pods that come are.
    Fill,
    /// Those with the least left.
    Binpack,
    /// Those with the most left.
    Spread,
}

impl Choice {
    fn policy(self, state: Option<&State>) -> Box<dyn Policy + Send> {
        match self {
            Self::Fill => state::looking_ahead(&state.map(State::demand).unwrap_or_default()),
            Self::Binpack => Box::new(Binpack),
            Self::Spread => Box::new(Spread),
        }
    }
}

impl Options {
    /// Namespace and name of the ConfigMap with quotas.
    fn quota(&self) -> Option<(&str, &str)> {
        self.quota.as_ref().map(|(namespace, name)| (namespace.as_str(), name.as_str()))
    }
}

fn quota_name(text: &str) -> Result<(String, String), String> {
    let (namespace, name) = text.split_once('/').ok_or("write NAMESPACE/NAME")?;
    Ok((namespace.to_owned(), name.to_owned()))
}

/// Whether this extender decides now.
enum Ready {
    /// It does.
    Yes,
    /// It does not, for this reason.
    No(String),
}

/// All that the extender works with.
pub struct Extender {
    api: Client,
    options: Options,
    state: Mutex<State>,
    quota: Mutex<Quota>,
    election: Election,
    /// Held while the Lease is asked for.
    turn: TurnMutex<()>,
    /// Held for reading while the API server is asked to bind a pod, and for writing when the Lease is given
    /// up.
    bindings: Arc<RwLock<()>>,
    /// What is known, and of pods in which epoch of the election: they are listed anew in each.
    known: Mutex<HashSet<(u8, u64)>>,
    /// Whether it is about to end.
    is_stopping: AtomicBool,
    metrics: Metrics,
}

impl Extender {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All objects of a kind are known.
    fn listed(&self, kind: Kind) {
        self.listed_in(kind, 0);
    }

    fn listed_in(&self, kind: Kind, epoch: u64) {
        self.known().insert((kind as u8, epoch));
    }

    fn known(&self) -> MutexGuard<'_, HashSet<(u8, u64)>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is not known yet.
    fn unknown(&self) -> Option<Kind> {
        let epoch = self.election.epoch();
        let known = self.known();
        let of = |kind: Kind| if kind == Kind::Pods { epoch } else { 0 };
        Kind::ALL.into_iter().find(|kind| !known.contains(&(*kind as u8, of(*kind))))
    }

    /// Whether it decides: it knows all and holds the Lease, which it takes if it can.
    async fn ready(&self) -> Ready {
        if self.is_stopping.load(Ordering::Relaxed) {
            return Ready::No("this extender is about to end".to_owned());
        }
        self.election.called();
        if self.election.left().is_none() {
            match self.campaign().await {
                Ok(Outcome::Leads) => {}
                Ok(Outcome::Follows(holder)) => return Ready::No(format!("extender {holder} decides")),
                Err(error) => return Ready::No(format!("{error:#}")),
            }
        }
        self.knows_all()
    }

    fn knows_all(&self) -> Ready {
        match self.unknown() {
            None => Ready::Yes,
            Some(kind) => Ready::No(format!("not all {kind:?} are known yet").to_lowercase()),
        }
    }

    /// Whether calls are to come here: where no other extender decides.
    async fn ready_to_lead(&self) -> Ready {
        if self.election.left().is_some() {
            return self.knows_all();
        }
        match self.election.follows().await {
            Ok(None) => self.knows_all(),
            Ok(Some(holder)) => Ready::No(format!("extender {holder} decides")),
            Err(error) => Ready::No(format!("{error:#}")),
        }
    }

    async fn campaign(&self) -> Result<Outcome> {
        let _turn = self.turn.lock().await;
        // Another call may have won meanwhile.
        if self.election.left().is_some() && !self.election.is_due() {
            return Ok(Outcome::Leads);
        }
        let outcome = tokio::time::timeout(LEASE * 4, self.election.campaign()).await;
        outcome.context("the API server does not answer")?
    }

    /// Gives the Lease up, if that is still to be done when nothing else is under way: another extender
    /// decides at once then.
    async fn give_up(&self, is_still: impl Fn() -> bool) -> Result<()> {
        let _turn = self.turn.lock().await;
        // Where a binding is under way for longer, the Lease runs out by itself.
        let nothing_under_way = tokio::time::timeout(LEASE * 7, self.bindings.write()).await;
        let _nothing = nothing_under_way.context("a binding is under way")?;
        // What no watch has told yet another extender might not find.
        match is_still() && !self.state().has_assumed() {
            true => tokio::time::timeout(LEASE * 2, self.election.give_up()).await.context("no answer")?,
            false => Ok(()),
        }
    }

    fn quota(&self) -> MutexGuard<'_, Quota> {
        self.quota.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What namespaces may have from now on.
    fn learn_quota(&self, map: Option<&ConfigMap>) {
        let name = self.options.quota().map(|(namespace, name)| format!("{namespace}/{name}"));
        self.quota().learn(&name.unwrap_or_default(), map);
    }

    /// For each of these nodes why the pod's namespace may not have what it wants there.
    fn over_quota(
        &self,
        state: &State,
        namespace: &str,
        uid: &str,
        wanted: &Wanted,
        nodes: &[&str],
    ) -> Vec<Option<String>> {
        self.quota().refusals(state, &self.options.labels, namespace, uid, wanted, nodes)
    }
}

/// Runs the extender until SIGTERM or SIGINT.
///
/// # Errors
/// When no API server is named, or nothing can listen at the address.
pub fn run(options: Options) -> Result<()> {
    Config::load()?.log.start_on(std::io::stderr);
    runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?.block_on(async {
        let api = api::client(options.service_account.as_deref()).await;
        let api = api.context("cannot find the cluster's API server")?;
        let identity = options.identity.clone().unwrap_or_else(identity);
        let election = Election::new(api.clone(), &options.namespace, &options.lease, identity);
        let state = Mutex::new(State::new(options.policy.policy(None)));
        let (quota, turn, bindings, known, is_stopping, metrics) = Default::default();
        let extender = Arc::new(Extender {
            api,
            options,
            state,
            quota,
            election,
            turn,
            bindings,
            known,
            is_stopping,
            metrics,
        });
        serve(extender).await
    })
}

/// The host's name, and a number that another life of this program does not have.
fn identity() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{}-{}", host.trim(), k8s_openapi::jiff::Timestamp::now().as_microsecond())
}

async fn serve(extender: Arc<Extender>) -> Result<()> {
    // Who holds the Lease before pods are listed need not list them again. Uncalled, it is given up at once.
    let _ = extender.campaign().await;
    let mut tasks = JoinSet::new();
    for kind in Kind::ALL {
        let extender = Arc::clone(&extender);
        tasks.spawn(async move { follow::follow(&extender, kind).await });
    }
    tasks.spawn(keep_lease(Arc::clone(&extender)));
    tasks.spawn(keep_policy(Arc::clone(&extender)));
    let answering = Arc::clone(&extender);
    let answer = move |method, path, body| verbs::answer(Arc::clone(&answering), method, path, body);
    let options = extender.options.clone();
    let (stop, end) = (watch::channel(false), until_signalled());
    let until_stopped = stopped(stop.1);
    let serving = serve::serve(options.address, &options.tls, Callers::Known, LARGEST, answer, until_stopped);
    let ended = async {
        end.await?;
        extender.is_stopping.store(true, Ordering::Relaxed);
        let _ = stop.0.send(true);
        anyhow::Ok(())
    };
    tokio::try_join!(serving, ended)?;
    let settled = async {
        drop(extender.bindings.write().await);
        while extender.state().has_assumed() {
            sleep(LEASE / 20).await;
        }
    };
    let _ = tokio::time::timeout(LEASE * 7, settled).await;
    drop(tasks);
    // Another one need not wait then until the Lease has run out.
    let _ = extender.give_up(|| true).await;
    Ok(())
}

async fn stopped(mut stopped: watch::Receiver<bool>) {
    let _ = stopped.wait_for(|stopped| *stopped).await;
}

/// Renews the Lease while kube-scheduler calls, and gives it up else.
async fn keep_lease(extender: Arc<Extender>) {
    loop {
        sleep(LEASE).await;
        let election = &extender.election;
        let done: Result<()> = match (election.left().is_some(), election.is_called()) {
            (true, true) if election.is_due() => extender.campaign().await.map(drop),
            (true, false) => extender.give_up(|| !extender.election.is_called()).await,
            _ => Ok(()),
        };
        if let Err(error) = done {
            tracing::warn!(error = format!("{error:#}"), "the Lease cannot be kept");
        }
    }
}

/// Has the policy look ahead by the pods that there are. Nodes are judged by it before any pod waits for
/// that.
async fn keep_policy(extender: Arc<Extender>) {
    if extender.options.policy != Choice::Fill {
        return std::future::pending().await;
    }
    let mut demand = Vec::new();
    loop {
        sleep(if demand.is_empty() { PAUSE } else { KINDS }).await;
        let now = extender.state().demand();
        if extender.unknown().is_some() || differ_little(&demand, &now) {
            continue;
        }
        demand = now;
        let policy = state::looking_ahead(&demand);
        extender.state().judge_by(policy);
        warm(&extender).await;
    }
}

/// Whether two mixtures of pods are nearly the same: fewer than one pod in ten is of another kind.
fn differ_little(one: &gpushare_placement::Demand, other: &gpushare_placement::Demand) -> bool {
    let total =
        |demand: &gpushare_placement::Demand| demand.iter().map(|(_, weight)| weight).sum::<f64>().max(1.0);
    let part = |demand: &gpushare_placement::Demand, task| {
        let its = demand.iter().find(|(known, _)| known == task);
        its.map_or(0.0, |(_, weight)| weight / total(demand))
    };
    let mut tasks: Vec<_> = one.iter().chain(other).map(|(task, _)| *task).collect();
    tasks.sort_unstable();
    tasks.dedup();
    let apart: f64 = tasks.iter().map(|task| (part(one, task) - part(other, task)).abs()).sum();
    !one.is_empty() && apart < 0.2
}

/// Judges all nodes for the kinds of pods that there are, a few at a time.
async fn warm(extender: &Arc<Extender>) {
    /// Nodes that are judged at once: a pod waits as long at most.
    const NODES: usize = 25;
    /// Time in between.
    const REST: Duration = Duration::from_millis(1);
    /// Kinds of pods.
    const MOST: usize = 100;
    let (wanted, nodes) = {
        let state = extender.state();
        let mut seen = HashSet::new();
        let pods = state.pods().filter(|(_, pod)| !pod.asking.is_empty());
        let kinds = pods.map(|(_, pod)| Wanted { asking: pod.asking.clone(), cpu: pod.cpu });
        let wanted: Vec<Wanted> =
            kinds.filter(|wanted| seen.insert((wanted.asking.clone(), wanted.cpu))).take(MOST).collect();
        (wanted, state.nodes_with_gpus().map(str::to_owned).collect::<Vec<_>>())
    };
    for wanted in wanted {
        for some in nodes.chunks(NODES) {
            let names: Vec<&str> = some.iter().map(String::as_str).collect();
            drop(extender.state().worths(&wanted, &names));
            sleep(REST).await;
        }
    }
}
