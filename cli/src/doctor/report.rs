//! `gpushare doctor --report`: what a bug report needs, in one text that its sender can look through. Names that
//! users gave to containers, images, pods and projects are replaced.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::process::Command;

use anyhow::Result;
use gpushare_config::Config;
use gpushare_inject::one_line;
use gpushare_quota::{Called, Lease, PastLease, PodContainer, Refused, StateFolder, Store};
use toml::{Table, Value};

use super::{Finding, examine};
use crate::container::short;
use crate::table::escaped;
use crate::{program, ps};

/// Programs whose versions matter, where they are installed.
const PROGRAMS: [&str; 8] =
    ["runc", "crun", "docker", "dockerd", "containerd", "crio", "podman", "nvidia-smi"];
/// How many refusals and past leases are told.
const LAST: usize = 20;

/// The report.
pub fn report() -> Result<String> {
    let mut text = String::from(
        "# Report of gpushare\n\nNames of containers, images, pods and projects are replaced. Look through it before you send it.\n",
    );
    let mut section = |title: &str, lines: Vec<String>| {
        let _ = write!(text, "\n## {title}\n\n");
        for line in lines {
            let _ = writeln!(text, "    {}", escaped(&line));
        }
    };
    section("Machine", machine());
    section("Programs", programs());
    let config = Config::load();
    section("Settings that are not as shipped", settings());
    section("Findings", examine().iter().map(told).collect());
    let Ok(config) = config else { return Ok(text) };
    if let Ok(state) = StateFolder::open(&config.paths.state) {
        let (leases, past) = match Store::open(state.path()) {
            Ok(store) => (store.leases().unwrap_or_default(), store.history()),
            Err(_) => (Vec::new(), Vec::new()),
        };
        let refusals = state.refusals();
        let names = Names::of(&leases, &past, &refusals);
        section("Leases", leases.iter().map(|lease| names.hidden(&held(state.path(), lease))).collect());
        let ended = past.iter().take(LAST);
        section(
            "Last leases",
            ended.map(|lease| names.hidden(&format!("{}: {}", lease.grants, lease.reason))).collect(),
        );
        let refused = refusals.iter().take(LAST);
        section("Last refusals", refused.map(|refused| names.hidden(&refused.reason)).collect());
    }
    Ok(text)
}

fn told(finding: &Finding) -> String {
    format!("{:<8} {}: {}", finding.verdict.name(), finding.check, finding.text)
}

fn held(state: &Path, lease: &Lease) -> String {
    let word = ps::state(lease, ps::is_paused(state, lease));
    format!("{word} {} {}", lease.enforcement.terms().company.mode().name(), lease.summary())
}

fn machine() -> Vec<String> {
    let first = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let name = release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME=")).unwrap_or("unknown");
    let version_2 = Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
    vec![
        format!("system: {}", name.trim_matches('"')),
        format!("kernel: {} {}", first("/proc/sys/kernel/osrelease"), std::env::consts::ARCH),
        format!("cgroup: {}", if version_2 { "v2" } else { "v1 or hybrid" }),
        format!("systemd: {}", if super::has_systemd() { "runs" } else { "does not run" }),
        format!("security modules: {}", first("/sys/kernel/security/lsm")),
        format!("NVIDIA: {}", first("/proc/driver/nvidia/version").lines().next().unwrap_or("no driver")),
    ]
}

fn programs() -> Vec<String> {
    let mut lines = vec![format!("gpushare: {}", env!("CARGO_PKG_VERSION"))];
    for name in PROGRAMS {
        let told = match program::output(Command::new(name).arg("--version").env("LC_ALL", "C")) {
            Ok(told) => String::from_utf8_lossy(&told.stdout).into_owned(),
            Err(error) if error.kind() == ErrorKind::TimedOut => "does not answer".to_owned(),
            Err(_) => continue,
        };
        lines.push(format!("{name}: {}", told.lines().next().unwrap_or("tells no version")));
    }
    lines
}

/// The settings that differ from the shipped ones, with the file that decides each.
fn settings() -> Vec<String> {
    let shown = Config::show().map_err(|error| one_line(&error));
    let all =
        shown.and_then(|text| toml::from_str::<Table>(&text).map_err(|error| error.message().to_owned()));
    let (all, shipped) = match (all, Config::shipped()) {
        (Ok(all), Ok(shipped)) => (all, shipped),
        (Err(why), _) => return vec![why],
        (_, Err(error)) => return vec![one_line(&error)],
    };
    let mut lines = Vec::new();
    differing(&all, &shipped, "", &mut lines);
    lines
}

fn differing(all: &Table, shipped: &Table, section: &str, lines: &mut Vec<String>) {
    for (name, value) in all {
        let key = if section.is_empty() { name.clone() } else { format!("{section}.{name}") };
        match (value, shipped.get(name)) {
            (Value::Table(inner), Some(Value::Table(of_shipped))) => {
                differing(inner, of_shipped, &key, lines)
            }
            (value, shipped) if Some(value) != shipped => {
                let origin = Config::origin(&key).ok().flatten();
                let from =
                    origin.map_or_else(String::new, |(path, line)| format!(" ({}:{line})", path.display()));
                lines.push(format!("{key} = {value}{from}"));
            }
            _ => {}
        }
    }
}

/// What users called things, longest first, with what stands for each.
struct Names(Vec<(String, String)>);

impl Names {
    fn of(leases: &[Lease], past: &[PastLease], refusals: &[Refused]) -> Self {
        let living = leases.iter().flat_map(Lease::members);
        let living = living.map(|member| (&member.called, member.name.as_ref(), &member.key.container));
        let ended = past.iter().map(|lease| (&lease.called, lease.name.as_ref(), &lease.key.container));
        let refused =
            refusals.iter().flat_map(|one| [Some(one.container.clone()), one.name.clone()]).flatten();
        let of_leases = living.chain(ended).flat_map(|(called, pod, id)| words(called, pod, id));
        let names: BTreeSet<String> = of_leases.chain(refused).collect();
        let mut names: Vec<String> = names.into_iter().filter(|name| !name.is_empty()).collect();
        names.sort_by_key(|name| std::cmp::Reverse(name.len()));
        let numbered = names.into_iter().enumerate();
        Self(numbered.map(|(number, name)| (name, format!("NAME{number}"))).collect())
    }

    fn hidden(&self, text: &str) -> String {
        let hidden = |text: String, (name, word): &(String, String)| replaced(&text, name, word);
        self.0.iter().fold(text.to_owned(), hidden)
    }
}

fn words(called: &Called, pod: Option<&PodContainer>, id: &str) -> Vec<String> {
    let of_engine = [&called.name, &called.image, &called.project].into_iter().flatten().cloned();
    let of_pod =
        pod.into_iter().flat_map(|pod| [&pod.namespace, &pod.pod, &pod.container, &pod.uid]).cloned();
    of_engine.chain(of_pod).chain([id.to_owned(), short(id)]).collect()
}

/// `text` with `word` where `name` stands by itself, and not within a longer word.
fn replaced(text: &str, name: &str, word: &str) -> String {
    let is_inner = |c: char| c.is_alphanumeric() || c == '_';
    let (mut left, mut done) = (text, String::new());
    while let Some(at) = left.find(name) {
        let (before, rest) = left.split_at(at);
        let after = &rest[name.len()..];
        let within =
            before.chars().next_back().is_some_and(is_inner) || after.chars().next().is_some_and(is_inner);
        done += before;
        done += if within { name } else { word };
        left = after;
    }
    done + left
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_replaced_where_it_stands_by_itself() {
        for (text, want) in [
            ("web holds 4 GiB, web-1 and (web) too", "X holds 4 GiB, X-1 and (X) too"),
            ("a website, _web", "a website, _web"),
            ("web", "X"),
            ("", ""),
        ] {
            assert_eq!(replaced(text, "web", "X"), want);
        }
    }
}
