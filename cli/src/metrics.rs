//! An [`Overview`] in Prometheus' text format. Names and units follow Prometheus' conventions; the labels `gpu`,
//! `UUID`, `modelName`, `container`, `pod` and `namespace` are those of NVIDIA's DCGM exporter, so that both can
//! be joined. Series are bounded by the GPUs and the living leases.

use std::io;
use std::time::Duration;

use gpushare_quota::{Reason, ReleaseReason};
use prometheus::proto::{Bucket, Counter, Gauge, Histogram, LabelPair, Metric, MetricFamily, MetricType};
use prometheus::{Encoder, TextEncoder};

use crate::overview::{GpuView, Overview, PartView, ShareView};
use crate::violation::Kind;

/// The type of the text.
pub const TEXT: &str = prometheus::TEXT_FORMAT;

/// What is counted while the meter runs.
#[derive(Clone, Debug, Default)]
pub struct Totals {
    /// Leases that were granted.
    pub grants: u64,
    /// Containers that were refused, by [`REASONS`].
    refusals: [u64; REASONS],
    /// Leases that ended, by [`ReleaseReason::ALL`].
    releases: [u64; ReleaseReason::ALL.len()],
    /// What was found to be done against shares, by [`Kind::ALL`].
    violations: [u64; Kind::ALL.len()],
    /// How long shares took to make.
    pub makes: Makes,
}

/// How many reasons there are.
const REASONS: usize = Reason::ALL.len();

impl Totals {
    /// Counts a container that was refused.
    pub fn count_refusal(&mut self, kind: Option<Reason>) {
        let kind = kind.unwrap_or(Reason::Node);
        count(&mut self.refusals, Reason::ALL.iter().position(|one| *one == kind));
    }

    /// Counts a lease that ended, by [`ReleaseReason::name`].
    pub fn count_release(&mut self, reason: &str) {
        count(&mut self.releases, ReleaseReason::ALL.iter().position(|one| one.name() == reason));
    }

    /// Counts what was found, by [`Kind::name`].
    pub fn count_violation(&mut self, kind: &str) {
        count(&mut self.violations, Kind::ALL.iter().position(|one| one.name() == kind));
    }
}

fn count(numbers: &mut [u64], index: Option<usize>) {
    if let Some(number) = index.and_then(|index| numbers.get_mut(index)) {
        *number += 1;
    }
}

/// Upper bounds of the histogram of how long shares took to make, in milliseconds.
const BOUNDS: [u64; 11] = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000];

/// How long shares took to make, in ranges.
#[derive(Clone, Debug, Default)]
pub struct Makes {
    /// How many took at most each of [`BOUNDS`].
    within: [u64; BOUNDS.len()],
    count: u64,
    sum: Duration,
}

impl Makes {
    /// Counts one.
    pub fn add(&mut self, took: Duration) {
        self.count += 1;
        self.sum = self.sum.saturating_add(took);
        for (bound, number) in BOUNDS.iter().zip(&mut self.within) {
            *number += u64::from(took <= Duration::from_millis(*bound));
        }
    }

    fn family(&self) -> MetricFamily {
        let mut histogram = Histogram::default();
        histogram.set_sample_count(self.count);
        histogram.set_sample_sum(self.sum.as_secs_f64());
        let bucket = |(bound, number): (&u64, &u64)| {
            let mut bucket = Bucket::default();
            bucket.set_upper_bound(Duration::from_millis(*bound).as_secs_f64());
            bucket.set_cumulative_count(*number);
            bucket
        };
        histogram.set_bucket(BOUNDS.iter().zip(&self.within).map(bucket).collect());
        let mut metric = Metric::from_label(Vec::new());
        metric.set_histogram(histogram);
        let mut family = MetricFamily::default();
        family.set_name("gpushare_make_seconds".to_owned());
        family.set_help("Time that gpushare took to make a container's share.".to_owned());
        family.set_field_type(MetricType::HISTOGRAM);
        family.set_metric(vec![metric]);
        family
    }
}

/// The text of all figures.
///
/// # Errors
/// When one of them cannot be encoded.
pub fn text(overview: &Overview, totals: &Totals) -> io::Result<Vec<u8>> {
    let mut families = node(overview, totals);
    families.extend(gpus(&overview.gpus));
    families.extend(shares(&overview.shares));
    families.retain(|family| !family.get_metric().is_empty());
    let mut text = Vec::new();
    TextEncoder::new().encode(&families, &mut text).map_err(io::Error::other)?;
    Ok(text)
}

/// A value with its labels.
type Series = (Vec<LabelPair>, f64);

fn family(kind: MetricType, name: &str, help: &str, series: impl Iterator<Item = Series>) -> MetricFamily {
    let metric = |(labels, value): Series| {
        let mut metric = Metric::from_label(labels);
        if kind == MetricType::COUNTER {
            let mut counter = Counter::default();
            counter.set_value(value);
            metric.set_counter(counter);
        } else {
            let mut gauge = Gauge::default();
            gauge.set_value(value);
            metric.set_gauge(gauge);
        }
        metric
    };
    let mut family = MetricFamily::default();
    family.set_name(format!("gpushare_{name}"));
    family.set_help(help.to_owned());
    family.set_field_type(kind);
    family.set_metric(series.map(metric).collect());
    family
}

fn label(name: &str, value: &str) -> LabelPair {
    let mut label = LabelPair::default();
    label.set_name(name.to_owned());
    label.set_value(value.to_owned());
    label
}

#[expect(clippy::cast_precision_loss, reason = "Prometheus' values are floating-point numbers")]
fn float(value: u64) -> f64 {
    value as f64
}

fn seconds(nanoseconds: u64) -> f64 {
    Duration::from_nanos(nanoseconds).as_secs_f64()
}

fn node(overview: &Overview, totals: &Totals) -> Vec<MetricFamily> {
    let one = |value: f64| std::iter::once((Vec::new(), value));
    let kinds = Kind::ALL.iter().map(|kind| {
        let count = overview.violations.iter().filter(|found| found.kind == kind.name()).count();
        (vec![label("kind", kind.name())], float(count as u64))
    });
    let series = |name: &'static str, words: Vec<&'static str>, numbers: &[u64]| {
        let one = move |(word, number): (&'static str, u64)| (vec![label(name, word)], float(number));
        words.into_iter().zip(numbers.to_vec()).map(one)
    };
    let refusals = series("reason", Reason::ALL.map(Reason::name).to_vec(), &totals.refusals);
    let releases = series("reason", ReleaseReason::ALL.map(ReleaseReason::name).to_vec(), &totals.releases);
    let found = series("kind", Kind::ALL.map(Kind::name).to_vec(), &totals.violations);
    let version = label("version", env!("CARGO_PKG_VERSION"));
    let build = std::iter::once((vec![version, label("driver", &overview.driver)], 1.0));
    vec![
        family(MetricType::GAUGE, "build_info", "Versions of gpushare and of the driver.", build),
        family(
            MetricType::GAUGE,
            "leases",
            "Leases that are held.",
            one(float(overview.shares.len() as u64)),
        ),
        family(MetricType::COUNTER, "grants_total", "Leases granted.", one(float(totals.grants))),
        family(MetricType::COUNTER, "refusals_total", "Containers refused, by reason.", refusals),
        family(MetricType::COUNTER, "releases_total", "Leases that ended, by reason.", releases),
        totals.makes.family(),
        family(MetricType::GAUGE, "violations", "What is done against shares now, by kind.", kinds),
        family(MetricType::COUNTER, "violations_total", "What was done against shares, by kind.", found),
    ]
}

fn gpus(gpus: &[GpuView]) -> Vec<MetricFamily> {
    let labels = |gpu: &GpuView| {
        vec![label("gpu", &gpu.number), label("UUID", &gpu.uuid), label("modelName", &gpu.model)]
    };
    let of = |name: &str, help: &str, value: &dyn Fn(&GpuView) -> Option<f64>| {
        let series = gpus.iter().filter_map(|gpu| Some((labels(gpu), value(gpu)?)));
        family(MetricType::GAUGE, &format!("gpu_{name}"), help, series)
    };
    let truth = |is_so: bool| Some(f64::from(u8::from(is_so)));
    let well = |gpu: &GpuView| gpu.fault.is_none();
    vec![
        of("memory_bytes", "Memory of the GPU.", &|gpu| gpu.memory_bytes.map(float)),
        of("memory_granted_bytes", "Memory that leases hold.", &|gpu| {
            well(gpu).then(|| float(gpu.granted_bytes))
        }),
        of("memory_used_bytes", "Memory in use, by the driver's count where it tells.", &|gpu| {
            well(gpu).then(|| float(gpu.used_bytes))
        }),
        of("compute_granted_ratio", "Compute that leases hold, 1 for the whole GPU.", &|gpu| {
            well(gpu).then(|| float(gpu.granted_cores) / 100.0)
        }),
        of("utilization_ratio", "Part of the time in which the GPU had work.", &|gpu| {
            gpu.utilisation_percent.map(|percent| f64::from(percent) / 100.0)
        }),
        of("temperature_celsius", "Temperature of the GPU.", &|gpu| gpu.celsius.map(f64::from)),
        of("power_watts", "What the GPU draws.", &|gpu| gpu.watts),
        of("leases", "Leases on the GPU.", &|gpu| well(gpu).then(|| float(gpu.shares))),
        of("healthy", "1 while the GPU is in service.", &|gpu| truth(well(gpu))),
        of("cordoned", "1 while the GPU takes no new shares.", &|gpu| truth(gpu.is_cordoned)),
    ]
}

fn shares(shares: &[ShareView]) -> Vec<MetricFamily> {
    let names = |share: &ShareView| {
        vec![
            label("lease", &share.lease.to_string()),
            label("container", &share.container),
            label("pod", &share.pod),
            label("namespace", &share.namespace),
        ]
    };
    let labels = |share: &ShareView, part: &PartView| {
        let gpu = [label("gpu", &part.gpu), label("UUID", &part.uuid), label("modelName", &part.model)];
        [gpu.to_vec(), names(share)].concat()
    };
    let of = |kind: MetricType, name: &str, help: &str, value: &dyn Fn(&PartView) -> Option<f64>| {
        let parts = shares.iter().flat_map(|share| share.parts.iter().map(move |part| (share, part)));
        let series = parts.filter_map(|(share, part)| Some((labels(share, part), value(part)?)));
        family(kind, &format!("container_{name}"), help, series)
    };
    let (gauge, counter) = (MetricType::GAUGE, MetricType::COUNTER);
    let whole = |kind: MetricType, name: &str, help: &str, value: &dyn Fn(&ShareView) -> Option<f64>| {
        let series = shares.iter().filter_map(|share| Some((names(share), value(share)?)));
        family(kind, &format!("container_{name}"), help, series)
    };
    let about = |share: &ShareView| {
        [names(share), vec![label("mode", share.mode), label("held_by", share.held_by)]].concat()
    };
    let kinds = shares.iter().map(|share| (about(share), 1.0));
    vec![
        family(gauge, "container_info", "How a share is given, and who holds its memory.", kinds),
        of(gauge, "memory_granted_bytes", "Memory that is granted on the GPU.", &|part| {
            part.memory_bytes.map(float)
        }),
        of(gauge, "memory_limit_bytes", "Memory that the grant may grow to.", &|part| {
            part.limit_bytes.map(float)
        }),
        of(gauge, "memory_used_bytes", "Memory in use, by the driver's count where it tells.", &|part| {
            Some(float(part.used_bytes))
        }),
        of(
            gauge,
            "memory_context_bytes",
            "What contexts and their code take of the memory in use.",
            &|part| part.context_bytes.map(float),
        ),
        of(gauge, "memory_unbooked_bytes", "Memory in use that the container's books lack.", &|part| {
            Some(float(part.unbooked_bytes))
        }),
        of(gauge, "compute_limit_ratio", "Compute share, 1 for the whole GPU.", &|part| {
            part.cores.map(|percent| f64::from(percent) / 100.0)
        }),
        of(counter, "gpu_seconds_total", "GPU time used.", &|part| part.gpu_nanoseconds.map(seconds)),
        of(counter, "throttled_seconds_total", "Time for which launches were held back.", &|part| {
            Some(seconds(part.throttled_nanoseconds))
        }),
        whole(gauge, "memory_peak_bytes", "The most memory seen in use over all GPUs.", &|share| {
            share.peak_bytes.map(float)
        }),
        whole(gauge, "host_memory_used_bytes", "Host memory in place of GPUs'.", &|share| {
            (share.host_memory_bytes > 0).then(|| float(share.host_used_bytes))
        }),
        whole(counter, "allocations_refused_total", "Allocations that the limit refused.", &|share| {
            Some(float(share.allocations_refused))
        }),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn overview(container: &str) -> Overview {
        let part = PartView {
            gpu: "0".to_owned(),
            uuid: "GPU-1".to_owned(),
            memory_bytes: Some(4 << 30),
            gpu_nanoseconds: Some(1_500_000_000),
            ..PartView::default()
        };
        let share = ShareView {
            lease: 7,
            container: container.to_owned(),
            mode: "share",
            held_by: "supervisor",
            parts: vec![part],
            ..ShareView::default()
        };
        let gpu = GpuView { number: "0".to_owned(), uuid: "GPU-1".to_owned(), ..GpuView::default() };
        Overview { gpus: vec![gpu], shares: vec![share], ..Overview::default() }
    }

    fn lines(container: &str) -> Vec<String> {
        let mut totals = Totals { grants: 9, ..Totals::default() };
        [Some(Reason::Room), Some(Reason::Room), None]
            .into_iter()
            .for_each(|kind| totals.count_refusal(kind));
        totals.count_release(ReleaseReason::Swept.name());
        [3, 7, 6000].into_iter().for_each(|took| totals.makes.add(Duration::from_millis(took)));
        let text = text(&overview(container), &totals).unwrap();
        String::from_utf8(text).unwrap().lines().map(str::to_owned).collect()
    }

    #[test]
    fn figures_are_in_base_units_and_have_the_labels_of_dcgms_exporter() {
        let lines = lines("web");
        let labels = r#"gpu="0",UUID="GPU-1",modelName="",lease="7",container="web",pod="",namespace="""#;
        for want in [
            format!("gpushare_container_memory_granted_bytes{{{labels}}} 4294967296"),
            format!("gpushare_container_gpu_seconds_total{{{labels}}} 1.5"),
            r#"gpushare_container_info{lease="7",container="web",pod="",namespace="",mode="share",held_by="supervisor"} 1"#
                .to_owned(),
            "gpushare_grants_total 9".to_owned(),
            r#"gpushare_refusals_total{reason="room"} 2"#.to_owned(),
            r#"gpushare_refusals_total{reason="node"} 1"#.to_owned(),
            r#"gpushare_releases_total{reason="swept"} 1"#.to_owned(),
            r#"gpushare_make_seconds_bucket{le="0.005"} 1"#.to_owned(),
            r#"gpushare_make_seconds_bucket{le="5"} 2"#.to_owned(),
            r#"gpushare_make_seconds_bucket{le="+Inf"} 3"#.to_owned(),
            "gpushare_make_seconds_count 3".to_owned(),
            r#"gpushare_gpu_healthy{gpu="0",UUID="GPU-1",modelName=""} 1"#.to_owned(),
            r#"gpushare_violations{kind="stranger"} 0"#.to_owned(),
        ] {
            assert!(lines.contains(&want), "{want}: {lines:#?}");
        }
        // What is not limited or not known has no series.
        assert!(!lines.iter().any(|line| line.contains("_memory_limit_bytes")), "{lines:#?}");
    }

    #[test]
    fn a_name_is_one_label_whatever_it_holds() {
        let lines = lines("a\"} 1\nevil{x=\"\\");
        let found = lines.iter().filter(|line| line.contains("evil"));
        assert!(found.clone().count() > 0);
        for line in found {
            assert!(line.contains(r#"container="a\"} 1\nevil{x=\"\\""#), "{line}");
        }
    }
}
