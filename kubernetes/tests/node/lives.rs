//! Many pods' lives, while the agent is killed and the API server goes away at random moments. Each claim
//! holds what the scheduler allotted and no more, and at the end nothing is left.
//!
//! `GPUSHARE_KUBE_KILLS=2000` and `GPUSHARE_KUBE_PODS=500` make the long run.

use std::collections::BTreeMap;
use std::env;
use std::path::Path;
use std::thread;
use std::time::Duration;

use gpushare_tests::bundle::Bundle;
use gpushare_tests::cluster::{ClusterNode, SOON};
use gpushare_tests::command::eventually;
use gpushare_tests::leases::leases;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::probe::GIB;
use gpushare_tests::runtime::{LowLevel, Runtime};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Busybox];

/// Numbers that look random and are the same in each run (Vigna, splitmix64).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut number = self.0;
        number = (number ^ (number >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        number = (number ^ (number >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (number ^ (number >> 31)) % bound
    }
}

fn wanted(variable: &str, default: u64) -> u64 {
    env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// What happens during a call.
enum Blow {
    /// The API server is away.
    Away,
    /// The agent is killed.
    Kill(thread::JoinHandle<()>),
}

struct Trial {
    node: ClusterNode,
    numbers: Numbers,
    kills: u64,
    done: u64,
}

impl Trial {
    /// Makes a call of kubelet's until it succeeds, as kubelet does. While kills are left the agent may be
    /// killed during it, or the API server go away.
    fn insist<T>(&mut self, call: impl Fn(&ClusterNode) -> Result<T, String>) -> T {
        for _ in 0..200 {
            let blow = self.blow();
            let answer = call(&self.node);
            self.recover(blow);
            if let Ok(answer) = answer {
                return answer;
            }
        }
        panic!("kubelet never succeeds");
    }

    /// A blow that falls in a moment; `None` where none is due.
    fn blow(&mut self) -> Option<Blow> {
        if self.done == self.kills || self.numbers.below(3) == 0 {
            return None;
        }
        self.done += 1;
        let moment = Duration::from_micros(self.numbers.below(12_000));
        if self.done.is_multiple_of(4) {
            thread::sleep(moment / 4);
            self.node.api.set_away(true);
            return Some(Blow::Away);
        }
        let agent = self.node.pid();
        Some(Blow::Kill(thread::spawn(move || {
            thread::sleep(moment);
            let _ = kill(Pid::from_raw(agent), Signal::SIGKILL);
        })))
    }

    fn recover(&mut self, blow: Option<Blow>) {
        match blow {
            None => {}
            Some(Blow::Away) => self.node.api.set_away(false),
            Some(Blow::Kill(killer)) => {
                killer.join().expect("it falls");
                self.node.start_agent();
            }
        }
    }

    /// Each claim that was prepared, and no other, holds exactly what the scheduler allotted: pod to GPU and
    /// GiB.
    fn check(&self, config: &Path, allotted: &BTreeMap<u64, (usize, u64)>) {
        let held: BTreeMap<String, Vec<u64>> =
            leases(config).into_iter().map(|lease| (lease.id, lease.memory)).collect();
        let want = allotted.iter().map(|(pod, (_, size))| (format!("uid-{pod}"), vec![size * GIB]));
        assert_eq!(held, want.collect());
    }
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn nothing_is_left_of_many_pods_whatever_is_killed_meanwhile() {
    if !met(NEEDS) {
        return;
    }
    let (kills, pods) = (wanted("GPUSHARE_KUBE_KILLS", 40), wanted("GPUSHARE_KUBE_PODS", 24));
    let mut trial = Trial { node: crate::node(2), numbers: Numbers(7), kills, done: 0 };
    let runtime = Runtime::wrapped(LowLevel::Runc, &trial.node.node);
    let config = runtime.config().to_owned();
    // What the scheduler allotted: pod to GPU and GiB.
    let mut allotted: BTreeMap<u64, (usize, u64)> = BTreeMap::new();
    let mut begun = 0;
    while begun < pods || !allotted.is_empty() || trial.done < trial.kills {
        let (gpu, size) = (usize::from(trial.numbers.below(2) == 1), 1 + trial.numbers.below(39));
        let taken: u64 = allotted.values().filter(|(other, _)| *other == gpu).map(|(_, size)| size).sum();
        if taken + size <= 80 && (begun < pods || trial.done < trial.kills) && allotted.len() < 6 {
            begun += 1;
            let (name, uid) = (format!("pod-{begun}"), format!("uid-{begun}"));
            let share = trial.node.share("gpu", gpu, &format!("{size}Gi"), "0");
            trial.node.api.claim(&name, &uid, &[share], &[]);
            let devices = trial.insist(|node| node.kubelet.prepare(&name, &uid));
            allotted.insert(begun, (gpu, size));
            trial.check(&config, &allotted);
            if begun % 8 == 0 {
                let bundle = trial.node.kubelet.bundle(Bundle::small(), "pod", &devices, false);
                drop(runtime.run(&bundle));
            }
            continue;
        }
        let ended = allotted.keys().next().copied();
        let Some((pod, _)) = ended.and_then(|pod| Some((pod, allotted.remove(&pod)?))) else { continue };
        let (name, uid) = (format!("pod-{pod}"), format!("uid-{pod}"));
        // Every seventh time kubelet has lost its notes and calls nobody.
        if pod % 7 != 0 {
            trial.insist(|node| node.kubelet.unprepare(&name, &uid));
        }
        trial.node.api.forget_claim(&name);
        if pod % 7 == 0 {
            let is_gone = || !leases(&config).iter().any(|lease| lease.id == uid);
            assert!(eventually(SOON, is_gone), "{uid} stays");
        }
        trial.check(&config, &allotted);
    }
    assert!(eventually(SOON, || trial.node.left() == (0, 0, 0)), "{:?}", trial.node.left());
    println!("{begun} pods, {} kills: nothing is left", trial.done);
}
