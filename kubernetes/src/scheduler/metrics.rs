//! What the extender tells Prometheus, in the OpenMetrics text format.

use std::time::{Duration, Instant};

use http::StatusCode;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::serve::{Answer, OPEN_METRICS};

/// Upper bounds of the histogram's buckets, in seconds.
const SECONDS: [f64; 8] = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.2];

/// How long decisions took, and how many pods were bound.
pub struct Metrics {
    registry: Registry,
    bound: Family<[(&'static str, &'static str); 1], Counter>,
    deciding: Histogram,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("gpushare_scheduler");
        let (bound, deciding) = (Family::default(), Histogram::new(SECONDS));
        registry.register("pods_bound", "Pods that kube-scheduler had bound", Family::clone(&bound));
        let help = "Time of a decision: filter, prioritize or preempt";
        registry.register_with_unit("decision", help, Unit::Seconds, Histogram::clone(&deciding));
        Self { registry, bound, deciding }
    }
}

impl Metrics {
    /// A decision begins.
    pub fn started(&self) -> Instant {
        Instant::now()
    }

    /// It ends.
    pub fn decided(&self, started: Instant) {
        self.deciding.observe(started.elapsed().max(Duration::from_nanos(1)).as_secs_f64());
    }

    /// kube-scheduler had a pod bound.
    pub fn bound(&self, is_done: bool) {
        let result = if is_done { "done" } else { "refused" };
        self.bound.get_or_create(&[("result", result)]).inc();
    }

    /// All figures.
    pub fn answer(&self) -> Answer {
        let mut text = String::new();
        match encode(&mut text, &self.registry) {
            Ok(()) => Answer { status: StatusCode::OK, kind: OPEN_METRICS, body: text.into_bytes() },
            Err(_) => Answer::text(StatusCode::INTERNAL_SERVER_ERROR, ""),
        }
    }
}
