//! What the agent tells Prometheus, in the OpenMetrics text format.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use http::StatusCode;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::serve::{self, Answer, Callers, OPEN_METRICS};

/// Labels of a counter, by name and value.
type Labels = [(&'static str, &'static str); 1];

/// The figures, and how they are written.
pub struct Metrics {
    registry: Registry,
    prepared: Family<Labels, Counter>,
    unprepared: Family<Labels, Counter>,
    resized: Family<Labels, Counter>,
    /// Seconds of a call that prepares a claim.
    preparing: Histogram,
    /// Claims that hold a share here.
    pub claims: Gauge,
    /// Pods of which is noted what kubelet allocated.
    pub noted: Gauge,
    /// Pods of which it is not known yet.
    pub waiting: Gauge,
    /// GPUs that are shown to the scheduler.
    pub gpus: Gauge,
}

/// Upper bounds of the histogram's buckets, in seconds.
const SECONDS: [f64; 9] = [0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 2.0, 10.0];

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("gpushare_agent");
        let (prepared, unprepared, resized) = (Family::default(), Family::default(), Family::default());
        let preparing = Histogram::new(SECONDS);
        let (claims, noted, waiting, gpus) = Default::default();
        registry.register("claims_prepared", "Claims that kubelet had prepared", Family::clone(&prepared));
        registry.register(
            "claims_unprepared",
            "Claims that kubelet had unprepared",
            Family::clone(&unprepared),
        );
        let help = "Living shares that were to change as pods and claims state them anew";
        registry.register("shares_resized", help, Family::clone(&resized));
        let help = "Time of a call that prepares a claim";
        registry.register_with_unit("prepare", help, Unit::Seconds, preparing.clone());
        for (name, help, gauge) in [
            ("claims", "Claims that hold a share here", &claims),
            ("pods_noted", "Pods of which is noted what kubelet allocated", &noted),
            ("pods_waiting", "Pods of which it is not known yet what kubelet allocated", &waiting),
            ("gpus", "GPUs that are shown to the scheduler", &gpus),
        ] {
            registry.register(name, help, Gauge::clone(gauge));
        }
        Self { registry, prepared, unprepared, resized, preparing, claims, noted, waiting, gpus }
    }
}

impl Metrics {
    /// Counts a claim that kubelet had prepared, and the time that it took.
    pub fn prepared(&self, is_done: bool, took: Duration) {
        self.prepared.get_or_create(&result(is_done)).inc();
        self.preparing.observe(took.as_secs_f64());
    }

    /// Counts a claim that kubelet had unprepared.
    pub fn unprepared(&self, is_done: bool) {
        self.unprepared.get_or_create(&result(is_done)).inc();
    }

    /// Counts a living share that was changed, or a reason why not.
    pub fn resized(&self, is_done: bool) {
        self.resized.get_or_create(&result(is_done)).inc();
    }

    /// The answer to a call of this path.
    fn answer(&self, path: &str) -> Answer {
        match (path, self.text()) {
            ("/metrics", Ok(text)) => {
                Answer { status: StatusCode::OK, kind: OPEN_METRICS, body: text.into_bytes() }
            }
            ("/metrics", Err(_)) => Answer::text(StatusCode::INTERNAL_SERVER_ERROR, ""),
            _ => Answer::text(StatusCode::NOT_FOUND, "there is /metrics alone\n"),
        }
    }

    fn text(&self) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry).map(|()| text)
    }
}

fn result(is_done: bool) -> Labels {
    [("result", if is_done { "done" } else { "refused" })]
}

/// A number for a gauge.
pub fn number(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// Answers `GET /metrics` at the address until `end` is over; does nothing without an address. It is plain
/// HTTP: the figures name no pod.
///
/// # Errors
/// When nothing can listen there.
pub async fn serve(
    address: Option<SocketAddr>,
    metrics: Arc<Metrics>,
    end: impl Future<Output = ()>,
) -> Result<()> {
    let Some(address) = address else {
        end.await;
        return Ok(());
    };
    let answer = move |_, path: String, _| {
        let answer = metrics.answer(&path);
        async move { answer }
    };
    let plain = serve::Certificates::default();
    serve::serve(address, &plain, Callers::AlsoPlain, 0, answer, end).await.context("--metrics-address")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_written_with_their_names_and_results() {
        let metrics = Metrics::default();
        metrics.prepared(true, Duration::from_millis(3));
        metrics.prepared(false, Duration::from_secs(60));
        metrics.unprepared(true);
        metrics.claims.set(7);
        let text = metrics.text().unwrap();
        for line in [
            "gpushare_agent_claims_prepared_total{result=\"done\"} 1",
            "gpushare_agent_claims_prepared_total{result=\"refused\"} 1",
            "gpushare_agent_claims_unprepared_total{result=\"done\"} 1",
            "gpushare_agent_prepare_seconds_bucket{le=\"0.002\"} 0",
            "gpushare_agent_prepare_seconds_bucket{le=\"0.005\"} 1",
            "gpushare_agent_prepare_seconds_bucket{le=\"+Inf\"} 2",
            "gpushare_agent_claims 7",
            "gpushare_agent_pods_noted 0",
            "# EOF",
        ] {
            assert!(text.lines().any(|written| written == line), "{line}: {text}");
        }
    }
}
