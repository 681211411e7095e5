//! A real Prometheus reads the meter's figures: every panel and every alert that is shipped finds what the
//! simulated node was told to be.

use std::collections::BTreeMap;
use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use gpushare_tests::artifacts;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::command::{eventually, run};
use gpushare_tests::daemon::Daemon;
use gpushare_tests::leases::cli;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::{MODEL, SimulatedNode};
use gpushare_tests::runtime::{LowLevel, Runtime};
use gpushare_tests::scratch::Scratch;
use gpushare_tests::service::{Service, free_address};
use serde_json::Value;

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Busybox, Need::Curl, Need::Prometheus];

fn shipped(name: &str) -> PathBuf {
    artifacts::checkout().join("packaging/prometheus").join(name)
}

fn curl(url: &str, more: &[&str]) -> String {
    let mut command = Command::new("/usr/bin/curl");
    command.args(["--silent", "--show-error", "--max-time", "20"]).args(more).arg(url);
    run(&mut command).expect_success(url).stdout
}

/// What Prometheus answers to a query: the value by the labels of each series.
fn query(prometheus: &str, text: &str) -> Vec<(BTreeMap<String, String>, f64)> {
    let query = format!("query={text}");
    let url = format!("http://{prometheus}/api/v1/query");
    let told = curl(&url, &["--get", "--data-urlencode", &query]);
    let told: Value = serde_json::from_str(&told).expect("JSON");
    assert_eq!(told["status"], "success", "{text}: {told}");
    let series = told["data"]["result"].as_array().expect("a vector").iter().map(|series| {
        let labels = serde_json::from_value(series["metric"].clone()).expect("labels");
        let value = series["value"][1].as_str().and_then(|value| value.parse().ok());
        (labels, value.expect("a number"))
    });
    series.collect()
}

/// A Prometheus that scrapes `target` every second, under the shipped rules.
fn prometheus(scratch: &Scratch, target: &str, address: &str) -> Daemon {
    let config = format!(
        "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: [{:?}]\nscrape_configs:\n\
         - job_name: gpushare\n  static_configs: [{{targets: [{target:?}]}}]\n",
        shipped("gpushare.rules.yml")
    );
    let file = scratch.path().join("prometheus.yml");
    fs::write(&file, config).expect("settings can be written");
    let mut command = Command::new("/usr/bin/prometheus");
    command.arg(format!("--config.file={}", file.display()));
    command.arg(format!("--storage.tsdb.path={}", scratch.path().join("data").display()));
    command.arg(format!("--web.listen-address={address}"));
    let ready = format!("http://{address}/-/ready");
    let mut asks = Command::new("/usr/bin/curl");
    asks.args(["--silent", "--fail", &ready]);
    Daemon::start(&mut command, scratch.path(), || run(&mut asks).success())
}

fn checked(command: &mut Command) {
    let _ = run(command).expect_success("promtool");
}

#[test]
#[ignore = "needs root, runc and Prometheus: runs containers and daemons"]
fn every_panel_and_alert_finds_the_figures_of_a_node_with_shares() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::create(2, MODEL, "80GiB");
    let (target, address) = (free_address(), free_address());
    let meter = Service::start(&["meter", "--listen", &target], node.config(), "meter started");
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let share = |memory: &str| Bundle::with_probe().env("GPUSHARE_MEMORY", memory);
    let script = "exec gpushare-simulator probe --allocate 1GiB --allocate 4GiB --hold 600";
    let busy = share("4GiB").env("GPUSHARE_CORES", "30").args(&["/bin/busybox", "sh", "-c", script]);
    let busy_runs = runtime.run(&busy);
    let idle = share("2GiB").env("GPUSHARE_DEVICES", "1");
    let idle_runs = runtime.run(&idle);
    let refused = share("90GiB");
    let _ = runtime.create(&refused).expect_err("no GPU has as much");

    let scratch = Scratch::new("prometheus");
    checked(Command::new("/usr/bin/promtool").args(["check", "rules"]).arg(shipped("gpushare.rules.yml")));
    let figures = scratch.path().join("figures");
    fs::write(&figures, curl(&format!("http://{target}/metrics"), &[])).expect("a file can be written");
    let check = "exec /usr/bin/promtool check metrics <\"$0\"";
    let told = run(Command::new("/bin/sh").args(["-c", check]).arg(&figures));
    // The labels UUID and modelName are called as DCGM's exporter calls them.
    let is_dcgms =
        |line: &&str| line.ends_with("label names should be written in 'snake_case' not 'camelCase'");
    let others: Vec<&str> = told.stderr.lines().filter(|line| !is_dcgms(line)).collect();
    assert_eq!(others, [""; 0]);

    let _prometheus = prometheus(&scratch, &target, &address);
    let value = |text: &str| -> f64 { query(&address, text).iter().map(|(_, value)| value).sum() };
    let gib = f64::from(1 << 30);
    let of = |id: &str| format!("{{container={id:?}}}");
    let used = format!("gpushare_container_memory_used_bytes{}", of(busy.id()));
    assert!(eventually(Duration::from_secs(30), || value(&used) >= gib), "{}", value(&used));
    for (text, want) in [
        ("sum(gpushare_leases)".to_owned(), 2.0),
        ("sum(gpushare_gpu_memory_bytes)".to_owned(), 160.0 * gib),
        ("sum(gpushare_gpu_memory_granted_bytes)".to_owned(), 6.0 * gib),
        (format!("gpushare_container_memory_granted_bytes{}", of(busy.id())), 4.0 * gib),
        (format!("gpushare_container_memory_limit_bytes{}", of(idle.id())), 2.0 * gib),
        (format!("gpushare_container_compute_limit_ratio{}", of(busy.id())), 0.3),
        (format!("gpushare_container_allocations_refused_total{}", of(busy.id())), 1.0),
        ("gpushare_refusals_total{reason=\"request\"}".to_owned(), 1.0),
        ("sum(gpushare_refusals_total)".to_owned(), 1.0),
        ("sum(gpushare_releases_total)".to_owned(), 0.0),
        ("gpushare_make_seconds_count".to_owned(), 2.0),
        ("sum(gpushare_violations_total)".to_owned(), 0.0),
        ("sum(gpushare_gpu_healthy)".to_owned(), 2.0),
        (
            "gpushare_container_memory_used_bytes and on (UUID) gpushare_gpu_memory_bytes".to_owned(),
            value(&used),
        ),
    ] {
        let found = query(&address, &text);
        assert!((value(&text) - want).abs() < 1e-6, "{text}: {found:?} is not {want}; {}", meter.log());
    }
    // What is shipped asks for figures that are there.
    let panels = fs::read_to_string(shipped("grafana-dashboard.json")).expect("it is shipped");
    let panels: Value = serde_json::from_str(&panels).expect("JSON");
    let panels = panels["panels"].as_array().expect("panels");
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().expect("targets"));
    let mut asked = 0;
    for target in targets {
        let text = target["expr"].as_str().expect("a query");
        let text = text.replace("$instance", ".*").replace("$__rate_interval", "10s");
        let answers = || !query(&address, &text).is_empty();
        assert!(eventually(Duration::from_secs(20), answers), "{text} finds nothing");
        asked += 1;
    }
    assert!(asked >= 15, "{asked}");
    let firing = || query(&address, "ALERTS{alertstate=\"firing\"}");
    let is_firing = |name: &str| firing().iter().any(|(labels, _)| labels["alertname"] == name);
    let _ = runtime.create(&share("91GiB")).expect_err("no GPU has as much");
    assert!(eventually(Duration::from_secs(20), || is_firing("GpushareContainerRefused")), "{:?}", firing());
    assert!(!is_firing("GpushareGpuOutOfService"));
    drop((busy_runs, idle_runs));
    assert!(eventually(Duration::from_secs(20), || value("gpushare_leases").abs() < 0.5));
    assert!(eventually(Duration::from_secs(20), || value("gpushare_releases_total{reason=\"ended\"}") > 1.5));
}

#[test]
#[ignore = "needs root: starts a meter"]
fn the_page_and_the_figures_are_for_those_who_may_see_them() {
    if !met(&[Need::Root, Need::Curl]) {
        return;
    }
    let node = SimulatedNode::create(1, MODEL, "80GiB");
    let target = free_address();
    let token = node.root().join("token");
    fs::write(&token, "0123456789abcdef0123").expect("a file can be written");
    let refused = start_fails(&node, &["meter", "--listen", "0.0.0.0:0"]);
    assert!(refused.contains("give --token-file"), "{refused}");
    let words = ["meter", "--listen", &target, "--token-file", &token.to_string_lossy()];
    let refused = start_fails(&node, &words);
    assert!(refused.contains("chmod 600"), "{refused}");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    fs::set_permissions(&token, mode).expect("its mode can be set");
    let file = node.root().join("gpushare.prom");
    let path = file.to_string_lossy();
    let words = [&words[..], &["--textfile", &path]].concat();
    // Nothing is written through what lies in the folder of the figures.
    let victim = node.root().join("victim");
    fs::write(&victim, "mine").expect("a file can be written");
    std::os::unix::fs::symlink(&victim, node.root().join("gpushare.prom.new")).expect("a link can be made");
    // Who has the port keeps nobody from measuring.
    let taken = TcpListener::bind(&target).expect("the port is free");
    let meter = Service::start(&words, node.config(), "meter started");
    assert!(eventually(Duration::from_secs(20), || meter.log().contains("nobody is answered")));
    drop(taken);
    assert!(eventually(Duration::from_secs(20), || meter.log().contains("answering")), "{}", meter.log());
    let url = |path: &str| format!("http://{target}{path}");
    let status = |path: &str, more: &[&str]| {
        let code = ["--output", "/dev/null", "--write-out", "%{http_code}"];
        curl(&url(path), &[&code[..], more].concat())
    };
    let bearer = ["--header", "Authorization: Bearer 0123456789abcdef0123"];
    let basic = ["--user", "me:0123456789abcdef0123"];
    for (path, more, want) in [
        ("/metrics", &[][..], "401"),
        ("/", &["--user", "me:wrong"], "401"),
        ("/metrics", &bearer, "200"),
        ("/", &basic, "200"),
        ("/page.css", &basic, "200"),
        ("/../../etc/passwd", &basic, "404"),
        ("/", &[&basic[..], &["--header", "Host: evil.example"]].concat(), "421"),
        ("/", &[&basic[..], &["--request", "POST"]].concat(), "405"),
    ] {
        assert_eq!(status(path, more), want, "{path} {more:?}");
    }
    // Callers that say nothing keep nobody away.
    let silent: Vec<TcpStream> = (0..200).filter_map(|_| TcpStream::connect(&target).ok()).collect();
    assert_eq!((silent.len(), &*status("/metrics", &bearer)), (200, "200"));
    let page = curl(&url("/"), &basic);
    assert!(page.contains("GPU 0") && page.contains("No container holds a share"), "{page}");
    assert!(eventually(Duration::from_secs(20), || is_written(&file)), "no {}", file.display());
    assert_eq!(fs::read_to_string(&victim).expect("it is there"), "mine");
    // The last GPU that fails is told, too.
    let devices = cli(node.config(), &["devices", "--json"]).expect_success("devices").stdout;
    let devices: Value = serde_json::from_str(&devices).expect("JSON");
    let faults = node.state().join("faults");
    fs::create_dir_all(&faults).expect("a folder can be made");
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("the boot's id");
    let fault = faults.join(devices["gpus"][0]["uuid"].as_str().expect("a UUID"));
    fs::write(fault, format!("{boot}Xid 79\n")).expect("a fault can be noted");
    let healthy = || {
        curl(&url("/metrics"), &bearer)
            .lines()
            .any(|line| line.starts_with("gpushare_gpu_healthy") && line.ends_with("} 0"))
    };
    assert!(eventually(Duration::from_secs(40), healthy), "{}", curl(&url("/metrics"), &bearer));
}

fn is_written(file: &Path) -> bool {
    fs::read_to_string(file).is_ok_and(|text| text.contains("gpushare_gpu_memory_bytes{"))
}

/// What a meter that does not start says.
fn start_fails(node: &SimulatedNode, words: &[&str]) -> String {
    let mut command = Command::new("/usr/bin/timeout");
    command.arg("20").arg(artifacts::cli()).args(words).env("GPUSHARE_CONFIG", node.config());
    let told = run(&mut command);
    assert!(!told.success(), "{told:?}");
    told.stderr
}
