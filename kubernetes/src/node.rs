//! The driver `gpu.gpushare.io` for dynamic resource allocation, on one node.
//!
//! [`slice`] shows GPUs to the scheduler, [`registration`] names the driver to kubelet, [`driver`] answers
//! kubelet's calls, [`health`] tells it which GPUs work, and [`reconcile`] gives back what nobody will ask
//! for any more. [`device_plugin`] serves GPUs as countable resources instead. A claim's share is a value
//! ([`allotment`]) before anything is reserved. Of the node's [`pods`], [`allocation`] notes what kubelet and
//! other drivers gave to them, and [`resize`] changes living shares as pods and claims state them anew.

mod allocation;
mod allotment;
mod announce;
mod cdi;
mod claim;
mod consumers;
mod device_plugin;
mod driver;
mod engine;
mod events;
mod health;
mod messages;
mod metrics;
mod parameters;
mod podresources;
mod pods;
mod reconcile;
mod registration;
mod resize;
mod slice;

use std::collections::{BTreeSet, HashMap};
use std::future::Future;
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use gpushare_config::{Config, ENVIRONMENT};
use gpushare_inject::{Settings, one_line};
use gpushare_quota::{ClaimName, StateFolder};
use kube::Client;
use tokio::runtime;
use tokio::sync::{Mutex, OnceCell, watch};
use tokio::task::spawn_blocking;

use crate::api::{self, until_signalled};
use crate::resource::Resource;
use consumers::Newcomers;
use device_plugin::placements::Placements;
use driver::Turn;
use events::{Events, Untold};
use gpushare_rpc as rpc;
use metrics::Metrics;
use reconcile::Which;
use resize::claim::Stated;
use slice::Published;

pub use allocation::claims_of_pod;
pub use slice::{CORES, MEMORY};

/// The driver's name in the cluster. Device classes select by it.
pub const DRIVER: &str = "gpu.gpushare.io";

/// Where kubelet, engine and API server are.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// The name of this node in the cluster.
    #[arg(long, value_name = "NAME")]
    node_name: String,
    /// kubelet's folder, as its option --root-dir says.
    #[arg(long, value_name = "FOLDER", default_value = "/var/lib/kubelet")]
    kubelet_dir: PathBuf,
    /// The folder in which kubelet and device plugins find each other: the same whatever --root-dir says.
    #[arg(long, value_name = "FOLDER", default_value = "/var/lib/kubelet/device-plugins")]
    device_plugin_dir: PathBuf,
    /// The folder in which engines look for CDI files; one that is emptied when the node starts.
    #[arg(long, value_name = "FOLDER", default_value = "/var/run/cdi")]
    cdi_dir: PathBuf,
    /// The engine's socket, as kubelet's option --container-runtime-endpoint names it. The engine is asked
    /// whether it applies CDI devices.
    #[arg(long, value_name = "SOCKET")]
    engine_socket: Option<PathBuf>,
    /// Do not ask the engine: it is known to apply CDI devices.
    #[arg(long, conflicts_with = "engine_socket")]
    assume_cdi: bool,
    /// The namespace of gpushare's agents, in which they tell of GPUs that are counted by resources.
    #[arg(long, value_name = "NAME", default_value = "gpushare")]
    namespace: String,
    /// The folder with the pod's service account (token, ca.crt), where it is not at the usual place: in a
    /// pod that runs in the node's mount namespace. Else KUBECONFIG or the usual place names the API server.
    #[arg(long, value_name = "FOLDER")]
    service_account: Option<PathBuf>,
    /// Seconds between two looks at this node's GPUs and at claims that nobody needs any more.
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    period: u64,
    /// Where Prometheus may ask for /metrics, as 127.0.0.1:9846; nowhere without it.
    #[arg(long, value_name = "ADDRESS")]
    metrics_address: Option<SocketAddr>,
}

/// All that the driver works with.
pub struct Agent {
    config: Config,
    /// What its device plugin serves.
    resources: Vec<Resource>,
    /// The settings file, if it is not the default one.
    settings_file: Option<PathBuf>,
    state: StateFolder,
    api: Client,
    options: Options,
    /// Held while a claim's lease and its CDI file change: the two change together.
    turn: Arc<Mutex<()>>,
    /// The claims that were gone from the cluster at the last look, by UID.
    suspects: Mutex<BTreeSet<String>>,
    /// The claims that further pods may come to share.
    shareable: Mutex<Vec<ClaimName>>,
    /// What its pods ask for by resources.
    placements: Placements,
    /// Namespaces and names of claims that pods name which were not known before.
    newcomers: Newcomers,
    /// What is to be told to users.
    events: Events,
    /// The name of kubelet's engine, once it is known.
    engine: OnceCell<String>,
    /// What the annotations of claims state, by UID.
    stated: Mutex<HashMap<String, Stated>>,
    /// What was last written to the API server, and what it made of it.
    published: Mutex<Option<Published>>,
    metrics: Arc<Metrics>,
}

impl Agent {
    /// Waits for the turn to change claims. It goes into the work that it is for, since a call of kubelet's
    /// may be given up before that has ended.
    async fn turn(&self) -> Turn {
        Arc::clone(&self.turn).lock_owned().await
    }

    /// The settings that a grant reads.
    fn settings(&self) -> Settings<'_> {
        self.config.settings(self.settings_file.clone())
    }

    /// The folder of the driver's own sockets.
    fn folder(&self) -> PathBuf {
        self.options.kubelet_dir.join("plugins").join(DRIVER)
    }

    /// The socket on which kubelet calls the driver.
    fn socket(&self) -> PathBuf {
        self.folder().join("dra.sock")
    }

    /// The socket by which kubelet finds the driver.
    fn registration(&self) -> PathBuf {
        self.options.kubelet_dir.join("plugins_registry").join(format!("{DRIVER}-reg.sock"))
    }
}

/// Runs the driver until SIGTERM or SIGINT. When its settings change it ends in order, and starts anew in the
/// same process.
///
/// # Errors
/// When the settings cannot be used, no API server is named, or a socket cannot be made. Settings that cannot
/// be used any more change nothing.
pub fn run(options: Options) -> Result<()> {
    let (config, stands) = (Config::load()?, Config::show()?);
    config.log.start_on(std::io::stderr);
    let state = StateFolder::open(&config.paths.state)?;
    let settings_file = std::env::var_os(ENVIRONMENT).map(PathBuf::from);
    let resources = Resource::all(&config)?;
    let end = runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let api = api::client(options.service_account.as_deref()).await;
        let api = api.context("cannot find the cluster's API server")?;
        let (turn, suspects, shareable, placements, newcomers) = Default::default();
        let (stated, published, metrics) = Default::default();
        let (events, untold) = Events::queue();
        let agent = Arc::new(Agent {
            config,
            resources,
            settings_file,
            state,
            api,
            options,
            turn,
            suspects,
            shareable,
            placements,
            newcomers,
            events,
            engine: OnceCell::new(),
            stated,
            published,
            metrics,
        });
        serve(agent, &stands, untold).await
    })?;
    match end {
        End::Asked => Ok(()),
        End::Settings => {
            let mut arguments = std::env::args_os();
            let name = arguments.next().unwrap_or_default();
            let error = Command::new("/proc/self/exe").arg0(name).args(arguments).exec();
            Err(error).context("cannot start anew with the changed settings")
        }
    }
}

/// Why the agent ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// A signal asked for it.
    Asked,
    /// The settings are other ones now.
    Settings,
}

/// Waits until the settings are others than `stands`, and can be used.
async fn changed(stands: &str, period: Duration) {
    let mut told = String::new();
    loop {
        tokio::time::sleep(period).await;
        let read = spawn_blocking(|| {
            Resource::all(&Config::load()?)?;
            anyhow::Ok(Config::show()?)
        });
        match read.await.map(|read| read.map_err(|error| one_line(error.as_ref()))) {
            Ok(Ok(text)) if text != stands => return,
            Ok(Err(error)) if error != told => {
                tracing::error!(error, "the settings changed and cannot be used: those of before stay");
                told = error;
            }
            _ => {}
        }
    }
}

async fn serve(agent: Arc<Agent>, stands: &str, untold: Untold) -> Result<End> {
    let (stop, stopped) = watch::channel(false);
    let until_stopped = || {
        let mut stopped = stopped.clone();
        async move {
            let _ = stopped.wait_for(|stopped| *stopped).await;
        }
    };
    let calls = rpc::Services::default()
        .with(driver::Driver::of(Arc::clone(&agent)))
        .with(health::Health::of(Arc::clone(&agent), stopped.clone()));
    let socket = agent.socket();
    let driver = rpc::serve(&socket, calls, until_stopped());
    // kubelet calls the driver as soon as it finds this socket.
    let registration = async {
        let info = rpc::Services::default().with(registration::Registration::of(&agent));
        rpc::serve(&agent.registration(), info, until_stopped()).await
    };
    let period = Duration::from_secs(agent.options.period.max(1));
    let periodic = repeat(period, || periodic(&agent), until_stopped());
    let consumers = repeat(CONSUMERS, || consumers(&agent), until_stopped());
    let pods = async {
        tokio::select! {
            () = pods::keep(&agent) => {}
            () = events::keep_telling(&agent, untold) => {}
            () = until_stopped() => {}
        }
    };
    let metrics = Arc::clone(&agent.metrics);
    let metrics = metrics::serve(agent.options.metrics_address, metrics, until_stopped());
    let ended = async {
        let end = tokio::select! {
            signalled = until_signalled() => signalled.map(|()| End::Asked)?,
            () = changed(stands, period) => End::Settings,
        };
        let _ = stop.send(true);
        anyhow::Ok(end)
    };
    let plugins = device_plugin::keep(&agent, until_stopped());
    let announced = announce::keep(&agent, until_stopped());
    let repeated = async {
        tokio::join!(periodic, consumers, pods, plugins, announced);
        anyhow::Ok(())
    };
    tokio::try_join!(driver, registration, metrics, repeated, ended).map(|(.., end)| end)
}

/// How often it is looked whether pods have come that share a claim: such a pod waits as long.
const CONSUMERS: Duration = Duration::from_millis(500);

async fn consumers(agent: &Arc<Agent>) {
    let named = agent.newcomers.take();
    if named.is_empty() {
        return;
    }
    if let Err(error) = reconcile::reconcile(agent, Which::Shared(&named)).await {
        tracing::warn!(error = format!("{error:#}"), "cannot look for pods that share claims");
    }
}

/// What is done again and again: a failure is told, and the next time may succeed.
async fn periodic(agent: &Arc<Agent>) {
    if let Err(error) = slice::publish(agent).await {
        tracing::warn!(error = format!("{error:#}"), "the node's GPUs are not shown to the scheduler");
    }
    if let Err(error) = reconcile::reconcile(agent, Which::All).await {
        tracing::warn!(error = format!("{error:#}"), "cannot look for claims that nobody needs");
    }
}

async fn repeat<A: Future>(period: Duration, mut act: impl FnMut() -> A, end: impl Future) {
    tokio::pin!(end);
    loop {
        tokio::select! {
            _ = async { act().await; tokio::time::sleep(period).await } => {}
            _ = &mut end => return,
        }
    }
}
