//! Tells users of pods and claims what became of them, as events of the API server.

use gpushare_quota::ClaimName;
use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use serde_json::json;
use tokio::sync::mpsc::{Receiver, Sender, channel};

use super::Agent;

/// Who tells it.
const COMPONENT: &str = "gpushare-kube";
/// How many events wait to be written at most.
const WAITING: usize = 64;
/// The longest message that the API server takes, in bytes.
const LONGEST: usize = 1024;

/// Something that users asked for, and hear about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    /// `Pod` or `ResourceClaim`.
    pub kind: &'static str,
    /// The version of its API.
    pub api_version: &'static str,
    /// Its Kubernetes namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
}

impl Subject {
    /// The claim of this name and UID, in its namespace.
    pub fn of_claim(name: &ClaimName) -> Self {
        let ClaimName { uid, namespace, name } = name.clone();
        Self { kind: "ResourceClaim", api_version: "resource.k8s.io/v1", namespace, name, uid }
    }
}

/// What is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// A living share was changed as asked.
    Resized,
    /// It was not.
    NotResized,
    /// The scheduler allocated a claim anew that is still prepared as it was.
    Stale,
}

impl Reason {
    const fn name(self) -> &'static str {
        match self {
            Self::Resized => "GpuShareResized",
            Self::NotResized => "GpuShareNotResized",
            Self::Stale => "GpuShareStale",
        }
    }

    const fn kind(self) -> &'static str {
        match self {
            Self::Resized => "Normal",
            Self::NotResized | Self::Stale => "Warning",
        }
    }
}

/// Takes what is to be told. Nobody waits until it is written.
#[derive(Clone, Debug)]
pub struct Events(Sender<(Subject, Reason, String)>);

/// What is to be told, in its order.
pub type Untold = Receiver<(Subject, Reason, String)>;

impl Events {
    /// Both ends of the queue.
    pub fn queue() -> (Self, Untold) {
        let (sender, receiver) = channel(WAITING);
        (Self(sender), receiver)
    }

    /// Has it told. Nothing depends on it: where too much waits, it is logged alone.
    pub fn tell(&self, subject: Subject, reason: Reason, message: String) {
        if let Err(error) = self.0.try_send((subject, reason, message)) {
            let error = error.to_string();
            tracing::warn!(reason = reason.name(), error, "an event is not written: too many wait");
        }
    }
}

/// Writes events one after the other, for as long as it is polled. The same reason for the same object is one
/// event, whose count grows. What cannot be told is logged.
pub async fn keep_telling(agent: &Agent, mut untold: Untold) {
    while let Some((subject, reason, message)) = untold.recv().await {
        if let Err(error) = try_to_tell(agent, &subject, reason, &message).await {
            let error = error.to_string();
            tracing::warn!(kind = subject.kind, name = subject.name, error, "cannot write an event");
        }
    }
}

async fn try_to_tell(
    agent: &Agent,
    subject: &Subject,
    reason: Reason,
    message: &str,
) -> Result<(), kube::Error> {
    let api = Api::<Event>::namespaced(agent.api.clone(), &subject.namespace);
    let name = name_of(subject, reason);
    let now = Time(Timestamp::now());
    let message = shortened(message);
    if let Some(known) = api.get_opt(&name).await? {
        let change = json!({
            "message": message, "lastTimestamp": now, "count": known.count.unwrap_or(1).saturating_add(1),
        });
        return api.patch(&name, &PatchParams::default(), &Patch::Merge(change)).await.map(drop);
    }
    let event = Event {
        metadata: ObjectMeta {
            name: Some(name),
            namespace: Some(subject.namespace.clone()),
            ..ObjectMeta::default()
        },
        involved_object: ObjectReference {
            api_version: Some(subject.api_version.to_owned()),
            kind: Some(subject.kind.to_owned()),
            namespace: Some(subject.namespace.clone()),
            name: Some(subject.name.clone()),
            uid: Some(subject.uid.clone()),
            ..ObjectReference::default()
        },
        type_: Some(reason.kind().to_owned()),
        reason: Some(reason.name().to_owned()),
        message: Some(message),
        first_timestamp: Some(now.clone()),
        last_timestamp: Some(now),
        count: Some(1),
        source: Some(EventSource {
            component: Some(COMPONENT.to_owned()),
            host: Some(agent.options.node_name.clone()),
        }),
        reporting_component: Some(COMPONENT.to_owned()),
        reporting_instance: Some(agent.options.node_name.clone()),
        ..Event::default()
    };
    api.create(&PostParams::default(), &event).await.map(drop)
}

/// One name for each reason and life of an object: a pod made anew under its name has another UID.
fn name_of(subject: &Subject, reason: Reason) -> String {
    // Of 253 bytes that a name may have, the object's own gets what the rest leaves.
    let own: String = subject.name.chars().take(180).collect();
    let uid: String = subject.uid.chars().filter(char::is_ascii_alphanumeric).take(36).collect();
    format!("{own}.{}.{}", uid.to_lowercase(), reason.name().to_lowercase())
}

fn shortened(message: &str) -> String {
    let mut end = message.len().min(LONGEST);
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    message[..end].to_owned()
}
