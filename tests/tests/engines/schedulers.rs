//! Requests of other schedulers through containerd's CRI: pods and containers with the annotations and variables that the
//! systems' own node components write, under the handler as we ship it.

use gpushare_tests::artifacts::Installed;
use gpushare_tests::leases::leases;
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::runtime::LowLevel;

use crate::cri::Cri;
use crate::engine::{Engine, Wanted};
use crate::sets::{MINORS, Set, Sets, UUIDS, all, seen};

/// GPUs of this many MiB.
const TOTAL: u64 = 15360;

/// Runs each set that says something by annotations, or is a pod's, and tells what went wrong.
pub fn faults() -> (usize, Vec<String>) {
    let minors = MINORS.map(|minor| minor.to_string()).join(",");
    let more = ["--minors", &minors, "--uuids", &UUIDS.join(",")];
    let node = SimulatedNode::with(UUIDS.len(), "Tesla T4", &format!("{TOTAL}MiB"), &more);
    let config = node.config_with("schedulers", &LowLevel::Runc.settings());
    let installed = Installed::new();
    let mut cri = Cri::start(&installed.wrapper(), &config);
    let (mut count, mut faults) = (0, Vec::new());
    for Sets { dialect, set: sets, .. } in all() {
        for set in sets.iter().filter(|set| is_pods(set)) {
            count += 1;
            let told = outcome(set, &mut cri);
            cri.remove("pod");
            let left = leases(&config);
            let fault = told.err().or_else(|| (!left.is_empty()).then(|| format!("left: {left:?}")));
            faults.extend(fault.map(|fault| format!("{dialect}: {}: {fault}", set.case)));
        }
    }
    (count, faults)
}

const UNPASSED: [&str; 3] = ["granted.gpushare.io/", "cdi.k8s.io/", "nvidia.cdi.k8s.io/"];

/// A set under the shipped settings, on the usual GPUs, and of what a pod can say.
fn is_pods(set: &Set) -> bool {
    let usual =
        set.settings.is_empty() && set.total.is_none() && set.mounts.is_empty() && set.nodes.is_empty();
    let plain = set.env.iter().all(|entry| entry.contains('='));
    // The handler passes no such annotation, or containerd acts on it.
    let passed = !set.annotations.keys().any(|key| UNPASSED.iter().any(|prefix| key.starts_with(prefix)));
    usual && plain && passed && (set.engine == "cri" || set.engine.is_empty() && !set.annotations.is_empty())
}

fn outcome(set: &Set, cri: &mut Cri) -> Result<(), String> {
    // The container's name in its pod is another here.
    let named = |text: &str| text.replace("trainer", "main");
    let mut wanted = Wanted::waiting("pod");
    for entry in &set.env {
        let (name, value) = entry.split_once('=').ok_or("an entry has no =")?;
        wanted.env.push((name.to_owned().leak(), named(value)));
    }
    let mut pod = Vec::new();
    for (key, value) in &set.annotations {
        let (key, value) = (named(key), named(value));
        match crate::cri::is_containers(&key) {
            true => wanted.annotations.push((key.leak(), value)),
            false => pod.push((key, value)),
        }
    }
    let pod: Vec<(&str, &str)> = pod.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
    if let Err(said) = cri.run_under(&wanted, "gpushare", &pod) {
        let right = !set.refused.is_empty() && said.replace("\\\"", "\"").contains(&named(&set.refused));
        return if right { Ok(()) } else { Err(format!("refused: {said}")) };
    }
    if set.passes {
        return Ok(());
    }
    let report =
        cri.exec("pod", &["gpushare-simulator", "probe", "--json"]).expect_success("the CUDA client");
    let seen = seen(&report.stdout);
    if seen == set.visible() { Ok(()) } else { Err(format!("{seen:?} seen")) }
}
