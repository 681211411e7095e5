//! Tells kubelet which GPUs work (pkg/apis/dra-health/v1alpha1/api.proto). kubelet writes it into the status of
//! the pods that hold a share of them, where its feature ResourceHealthStatus is on.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use gpushare_inject::{GrantError, known_node, one_line, out_of_service};
use gpushare_inventory::{GpuUuid, Node, Totals, boot_id};
use http::Request;
use tokio::sync::{mpsc, watch};
use tokio::task::spawn_blocking;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use tonic::body::Body;

use super::Agent;
use super::slice::device_name;
use gpushare_rpc::{self as rpc, Answer, Calls};

/// The time between two reports at most. kubelet takes a device that was not told of for 30 s for unknown.
const REPORTS: Duration = Duration::from_secs(10);

/// The health of the node's GPUs, as kubelet asks for it.
#[derive(Clone)]
pub struct Health {
    agent: Arc<Agent>,
    stopped: watch::Receiver<bool>,
}

impl Health {
    /// The GPUs of this agent's node, until it is `stopped`.
    pub fn of(agent: Arc<Agent>, stopped: watch::Receiver<bool>) -> Self {
        Self { agent, stopped }
    }

    /// Reports now and again until kubelet or the agent ends.
    fn reports(self) -> impl Stream<Item = Result<Report, Status>> + Send + use<> {
        let (sender, reports) = mpsc::channel(1);
        let Self { agent, mut stopped } = self;
        let period = Duration::from_secs(agent.options.period.max(1)).min(REPORTS);
        tokio::spawn(async move {
            let reporting = async {
                loop {
                    let looked = Arc::clone(&agent);
                    let report = spawn_blocking(move || report(&looked)).await;
                    let report = report.map_err(|error| Status::internal(error.to_string()));
                    if sender.send(report).await.is_err() {
                        return;
                    }
                    tokio::select! {
                        () = tokio::time::sleep(period) => {}
                        () = sender.closed() => return,
                    }
                }
            };
            tokio::select! {
                () = reporting => {}
                _ = stopped.wait_for(|stopped| *stopped) => {}
            }
        });
        ReceiverStream::new(reports)
    }
}

impl Calls for Health {
    const NAME: &'static str = "v1alpha1.DRAResourceHealth";

    fn call(self, method: &str, request: Request<Body>) -> Answer {
        match method {
            "NodeWatchResources" => rpc::answers(request, |_: Watch| self.reports()),
            _ => rpc::unknown(),
        }
    }
}

/// The GPUs that were seen in this boot, whether or not they can be given now.
pub fn seen(agent: &Agent, known: Result<&Node, &GrantError>) -> Vec<GpuUuid> {
    let cached = || Totals::load(&Totals::path(agent.state.path())).filter(is_of_this_boot);
    let totals = match known {
        Ok(node) => node.totals.clone(),
        Err(_) => cached(),
    };
    totals.iter().flat_map(|totals| &totals.gpus).filter_map(|gpu| gpu.uuid.parse().ok()).collect()
}

/// What the node shows now of each GPU that was seen in this boot.
fn report(agent: &Agent) -> Report {
    let known = known_node(&agent.state, &agent.settings());
    let since = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs());
    let devices = seen(agent, known.as_ref()).into_iter().map(|gpu| {
        let (health, message) = match &known {
            Ok(node) => of_gpu(gpu, node),
            Err(error @ GrantError::Node(_)) => (State::Unhealthy, one_line(error)),
            Err(error) => (State::Unknown, one_line(error)),
        };
        let device = Identifier { pool_name: agent.options.node_name.clone(), device_name: device_name(gpu) };
        Device {
            device: Some(device),
            health: health.into(),
            last_updated_time: i64::try_from(since).unwrap_or(i64::MAX),
            message,
        }
    });
    Report { devices: devices.collect() }
}

fn is_of_this_boot(totals: &Totals) -> bool {
    boot_id().is_ok_and(|boot| boot == totals.boot_id)
}

/// The driver does not tell the UUID of a GPU that it cannot wake: what it tells of all such GPUs is said.
fn of_gpu(gpu: GpuUuid, node: &Node) -> (State, String) {
    if node.gpus.iter().any(|shown| shown.uuid == gpu) {
        return (State::Healthy, String::new());
    }
    let sick: Vec<String> = node.sick.iter().map(out_of_service).collect();
    let gone = || "the driver does not show this GPU any more; see the kernel log for Xid".to_owned();
    (State::Unhealthy, if sick.is_empty() { gone() } else { sick.join("; ") })
}

#[derive(Clone, PartialEq, prost::Message)]
struct Watch {}

/// The health of all devices.
#[derive(Clone, PartialEq, prost::Message)]
struct Report {
    #[prost(message, repeated, tag = "1")]
    devices: Vec<Device>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Device {
    #[prost(message, optional, tag = "1")]
    device: Option<Identifier>,
    #[prost(enumeration = "State", tag = "2")]
    health: i32,
    /// Seconds since 1970.
    #[prost(int64, tag = "3")]
    last_updated_time: i64,
    #[prost(string, tag = "5")]
    message: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Identifier {
    #[prost(string, tag = "1")]
    pool_name: String,
    #[prost(string, tag = "2")]
    device_name: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
#[repr(i32)]
enum State {
    Unknown = 0,
    Healthy = 1,
    Unhealthy = 2,
}
