//! `gpushare-kube webhook`: what the API server asks when pods are made (admission.k8s.io/v1). `/mutate`
//! completes pods that ask for GPUs ([`complete`]), and `/validate` refuses keys by which a pod would grant
//! itself something ([`forbidden`]). It knows nothing of the cluster: the same pod gets the same answer.

mod complete;
mod forbidden;

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Result;
use gpushare_config::Config;
use gpushare_inventory::DeviceMemory;
use http::{Method, StatusCode};
use hyper::body::Bytes;
use kube::core::DynamicObject;
use kube::core::admission::{AdmissionRequest, AdmissionResponse, AdmissionReview};
use serde_json::Value;
use tokio::runtime;

use crate::api::until_signalled;
use crate::serve::{self, Answer, Callers};

/// Bytes of a call at most: the API server takes objects of 3 MiB, and sends an old one beside a new one.
const LARGEST: usize = 8 << 20;

/// Where the API server calls, and what is done to pods.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// Where the API server calls it.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9848")]
    address: SocketAddr,
    #[command(flatten)]
    tls: serve::Certificates,
    /// The runtime class of pods that ask for GPUs and name none.
    #[arg(long, value_name = "NAME", default_value = "gpushare")]
    runtime_class: String,
    /// The scheduler of such pods, where they name no other than the cluster's default; without it they keep
    /// theirs.
    #[arg(long, value_name = "NAME")]
    scheduler_name: Option<String>,
    /// A resource that gpushare serves in this cluster although another plugin may have its name
    /// (nvidia.com/gpu, nvidia.com/gpu.shared); once for each.
    #[arg(long = "resource", value_name = "NAME")]
    resources: Vec<String>,
    /// Have kubelet and schedulers count what pods ask for by gpushare.io annotations, as
    /// gpushare.io/gpu-memory and gpushare.io/gpu-core.
    #[arg(long)]
    count_annotations: bool,
    /// What one gpushare.io/gpu-memory is: kubernetes.memory_granule of the nodes.
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = granule)]
    memory_granule: DeviceMemory,
}

fn granule(text: &str) -> Result<DeviceMemory, String> {
    let memory: gpushare_request::MemoryRequest = text.parse().map_err(|error| format!("{error}"))?;
    match memory {
        gpushare_request::MemoryRequest::Bytes(memory) if memory.bytes() >= 1 << 20 => Ok(memory),
        _ => Err("write an amount of memory, as 256MiB".to_owned()),
    }
}

/// Runs the webhook until SIGTERM or SIGINT.
///
/// # Errors
/// When nothing can listen at the address.
pub fn run(options: &Options) -> Result<()> {
    Config::load()?.log.start_on(std::io::stderr);
    let asked = Arc::new(options.clone());
    let answer = move |method, path: String, body: Bytes| {
        let answer = answer(&asked, &method, &path, &body);
        async move { answer }
    };
    runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let end = async { drop(until_signalled().await) };
        serve::serve(options.address, &options.tls, Callers::Anyone, LARGEST, answer, end).await
    })
}

fn answer(options: &Options, method: &Method, path: &str, body: &[u8]) -> Answer {
    let review = || -> Option<AdmissionRequest<DynamicObject>> {
        let review: AdmissionReview<DynamicObject> = serde_json::from_slice(body).ok()?;
        // It keeps the version of the review, which the answer has to have.
        review.try_into().ok()
    };
    let decide: fn(&Options, &AdmissionRequest<DynamicObject>, &Value) -> AdmissionResponse =
        match (method, path) {
            (&Method::GET, "/healthz" | "/readyz") => return Answer::text(StatusCode::OK, "ok\n"),
            (&Method::POST, "/mutate") => mutate,
            (&Method::POST, "/validate") => validate,
            _ => {
                return Answer::text(
                    StatusCode::NOT_FOUND,
                    "there are POST mutate and validate, and GET healthz\n",
                );
            }
        };
    let Some(request) = review() else {
        return Answer::text(StatusCode::BAD_REQUEST, "no AdmissionReview of admission.k8s.io/v1\n");
    };
    // As it was sent: what a typed pod does not know must not be lost.
    let raw: Value = serde_json::from_slice(body).unwrap_or_default();
    Answer::json(StatusCode::OK, &decide(options, &request, &raw["request"]).into_review())
}

fn mutate(options: &Options, request: &AdmissionRequest<DynamicObject>, raw: &Value) -> AdmissionResponse {
    let response = AdmissionResponse::from(request);
    let before = &raw["object"];
    match complete::completed(options, before) {
        Ok(after) if after == *before => response,
        Ok(after) => match response.with_patch(json_patch::diff(before, &after)) {
            Ok(response) => response,
            Err(error) => AdmissionResponse::from(request).deny(error.to_string()),
        },
        Err(why) => response.deny(why),
    }
}

fn validate(_: &Options, request: &AdmissionRequest<DynamicObject>, raw: &Value) -> AdmissionResponse {
    let response = AdmissionResponse::from(request);
    match forbidden::first(&raw["object"], &raw["oldObject"]) {
        None => response,
        Some(why) => {
            tracing::info!(namespace = request.namespace, name = request.name, why, "a pod is refused");
            response.deny(why)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_answer_is_a_review_of_the_version_that_was_asked_with() {
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [
            {"name": "main", "resources": {"limits": {"aliyun.com/gpu-mem": "3"}}}]}});
        let kind = json!({"group": "", "version": "v1", "kind": "Pod"});
        let resource = json!({"group": "", "version": "v1", "resource": "pods"});
        let review = json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
            "uid": "7", "kind": kind, "resource": resource, "name": "p", "namespace": "team",
            "operation": "CREATE", "userInfo": {}, "object": pod, "oldObject": null, "dryRun": false}});
        let options = complete::tests::options(false, &[]);
        let told = answer(&options, &Method::POST, "/mutate", review.to_string().as_bytes());
        let told: Value = serde_json::from_slice(&told.body).unwrap();
        assert_eq!(
            (&told["apiVersion"], &told["kind"]),
            (&json!("admission.k8s.io/v1"), &json!("AdmissionReview"))
        );
        assert_eq!((&told["response"]["uid"], &told["response"]["allowed"]), (&json!("7"), &json!(true)));
        assert_eq!(told["response"]["patchType"], "JSONPatch");
        let told = answer(&options, &Method::POST, "/validate", review.to_string().as_bytes());
        let told: Value = serde_json::from_slice(&told.body).unwrap();
        assert_eq!(told["response"]["allowed"], true);
        assert_eq!(answer(&options, &Method::POST, "/mutate", b"x").status, StatusCode::BAD_REQUEST);
        assert_eq!(answer(&options, &Method::GET, "/mutate", b"").status, StatusCode::NOT_FOUND);
    }
}
