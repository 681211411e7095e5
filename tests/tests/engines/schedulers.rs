//! Requests of other schedulers through containerd's CRI: pods and containers with the annotations and
//! variables that the systems' own node components write, under the handler as we ship it.

use std::path::PathBuf;

use gpushare_tests::artifacts::Installed;
use gpushare_tests::leases::leases;
use gpushare_tests::node::SimulatedNode;
use gpushare_tests::runtime::LowLevel;

use crate::cri::Cri;
use crate::engine::{Engine, Wanted};
use crate::sets::{MINORS, Set, Sets, UUIDS, all, seen};

/// Memory of each GPU in MiB.
const TOTAL: u64 = 15360;

/// A node with its containerd, whose pods other systems have scheduled.
pub struct Cluster {
    cri: Cri,
    config: PathBuf,
    _installed: Installed,
    _node: SimulatedNode,
}

impl Cluster {
    /// A node without containers.
    pub fn start() -> Self {
        let minors = MINORS.map(|minor| minor.to_string()).join(",");
        let more = ["--minors", &minors, "--uuids", &UUIDS.join(",")];
        let node = SimulatedNode::with(UUIDS.len(), "Tesla T4", &format!("{TOTAL}MiB"), &more);
        let config = node.config_with("schedulers", &LowLevel::Runc.settings());
        let installed = Installed::new();
        let cri = Cri::start(&installed.wrapper(), &config);
        Self { cri, config, _installed: installed, _node: node }
    }

    /// Runs each set that speaks by annotations or is a pod's. Returns how many there were, and what went
    /// wrong.
    pub fn faults(&mut self) -> (usize, Vec<String>) {
        let (mut count, mut faults) = (0, Vec::new());
        for Sets { dialect, set: sets, .. } in all() {
            for set in sets.iter().filter(|set| set.is_pods()) {
                count += 1;
                let told = self.outcome(set);
                self.cri.remove("pod");
                let left = leases(&self.config);
                let fault = told.err().or_else(|| (!left.is_empty()).then(|| format!("left: {left:?}")));
                faults.extend(fault.map(|fault| format!("{dialect}: {}: {fault}", set.case)));
            }
        }
        (count, faults)
    }

    fn outcome(&mut self, set: &Set) -> Result<(), String> {
        if let Err(said) = self.run("pod", set) {
            let right = !set.refused.is_empty() && said.replace("\\\"", "\"").contains(&in_pod(&set.refused));
            return if right { Ok(()) } else { Err(format!("refused: {said}")) };
        }
        if set.passes {
            return Ok(());
        }
        let seen = self.seen("pod");
        if seen == set.visible() { Ok(()) } else { Err(format!("{seen:?} seen")) }
    }

    /// Runs a pod whose container has the set's annotations and variables.
    fn run(&mut self, name: &'static str, set: &Set) -> Result<(), String> {
        let mut wanted = Wanted::waiting(name);
        for entry in &set.env {
            let (name, value) = entry.split_once('=').ok_or("an entry has no =")?;
            wanted.env.push((name.to_owned().leak(), in_pod(value)));
        }
        let mut pod = Vec::new();
        for (key, value) in &set.annotations {
            let (key, value) = (in_pod(key), in_pod(value));
            match crate::cri::is_containers(&key) {
                true => wanted.annotations.push((key.leak(), value)),
                false => pod.push((key, value)),
            }
        }
        let pod: Vec<(&str, &str)> = pod.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        self.cri.run_under(&wanted, "gpushare", &pod)
    }

    /// What a CUDA client in the pod sees.
    fn seen(&self, name: &str) -> Vec<String> {
        let probe = ["gpushare-simulator", "probe", "--json"];
        seen(&self.cri.exec(name, &probe).expect_success("the CUDA client").stdout)
    }

    /// Three systems place one pod each on one GPU. The third asks for more than is left.
    pub fn three_systems_on_one_gpu(&mut self) {
        let env = |entries: &[&str]| Set {
            env: entries.iter().map(|entry| (*entry).to_owned()).collect(),
            ..Set::default()
        };
        let card = UUIDS[0];
        let hami = env(&[&format!("NVIDIA_VISIBLE_DEVICES={card}"), "CUDA_DEVICE_MEMORY_LIMIT_0=8000m"]);
        let aliyun = env(&[
            &format!("NVIDIA_VISIBLE_DEVICES={}", MINORS[0]),
            &format!("ALIYUN_COM_GPU_MEM_IDX={}", MINORS[0]),
            "ALIYUN_COM_GPU_MEM_DEV=15",
            "ALIYUN_COM_GPU_MEM_CONTAINER=6",
        ]);
        let tencent = Set {
            annotations: [
                ("tencent.com/vcuda-core", "10".to_owned()),
                ("tencent.com/vcuda-memory", (2_u64 << 30).to_string()),
                ("tencent.com/vcuda-device", format!("/dev/nvidia{}", MINORS[0])),
            ]
            .map(|(key, value)| (key.to_owned(), value))
            .into(),
            ..Set::default()
        };
        self.run("hami", &hami).expect("8000 MiB of 15360");
        self.run("aliyun", &aliyun).expect("6144 MiB of 7360");
        let refused = self.run("tencent", &tencent).expect_err("2048 MiB of 1216");
        assert!(refused.contains("2 GiB requested, 1216 MiB free on GPU 0"), "{refused}");
        let memory = |cluster: &Self| -> Vec<u64> {
            leases(&cluster.config).iter().flat_map(|lease| lease.memory.clone()).map(|of| of >> 20).collect()
        };
        assert_eq!(memory(self), [8000, 6144]);
        assert_eq!(self.seen("hami"), [format!("{card} 8000 MiB")]);
        assert_eq!(self.seen("aliyun"), [format!("{card} 6144 MiB")]);
        // Only the sum was the reason for the refusal.
        self.cri.remove("hami");
        self.cri.remove("tencent");
        self.run("tencent", &tencent).expect("2048 MiB of 9216");
        assert_eq!(self.seen("tencent"), [format!("{card} 2048 MiB")]);
        assert_eq!(memory(self), [6144, 2048]);
        self.cri.remove("aliyun");
        self.cri.remove("tencent");
        assert!(memory(self).is_empty());
    }
}

/// The sets call their container `trainer`; here the pod's container has another name.
fn in_pod(text: &str) -> String {
    text.replace("trainer", "main")
}
