//! What kubelet and other drivers allocated to pods, held on containers that ask for more.

use std::time::{Duration, Instant};

use gpushare_tests::bundle::Bundle;
use gpushare_tests::cluster::kubelet::{NODE, in_pod};
use gpushare_tests::cluster::{ClusterNode, SOON};
use gpushare_tests::command::eventually;
use gpushare_tests::leases::leases;
use gpushare_tests::needs::{Need, met};
use gpushare_tests::probe::{GIB, OUT_OF_MEMORY, Report, SUCCESS};
use gpushare_tests::runtime::{LowLevel, Runtime};
use serde_json::{Value, json};

const CONTAINERS: &[Need] = &[Need::Root, Need::Runc, Need::Crun, Need::Busybox];

/// A node of `gpus` GPUs that lets variables grant whole ones, and asks kubelet: `away` says what happens
/// without the agent.
fn node(gpus: usize, low_level: LowLevel, away: &str, strict: bool) -> (ClusterNode, Runtime) {
    let mut node = crate::node(gpus);
    let settings = format!("strict = {strict}\nenv_ceiling = \"100%\"\nkubelet = {away:?}");
    let config = format!("{}\n[request]\n{settings}\n", low_level.settings());
    let config = node.node.config_with(&format!("{low_level:?}-{away}-{strict}"), &config);
    node.configure(&config);
    (node, Runtime::with_config(low_level, &config).in_view(low_level.view()))
}

fn asking(pod: &str, variables: &[(&str, &str)]) -> Bundle {
    let bundle = in_pod(Bundle::with_probe(), pod, "team");
    variables.iter().fold(bundle, |bundle, (key, value)| bundle.env(key, value))
}

/// The status of a pod that kubelet has admitted.
fn admitted() -> Value {
    json!({"startTime": "2026-11-23T00:00:00Z"})
}

fn limits(limits: &Value) -> Value {
    json!({"nodeName": NODE, "containers": [{"name": "main", "resources": {"limits": limits}}]})
}

const THIEF: &[(&str, &str)] = &[("NVIDIA_VISIBLE_DEVICES", "all"), ("GPUSHARE_MEMORY", "60GiB")];

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn variables_of_a_pod_grant_only_what_kubelet_gave_it() {
    if !met(CONTAINERS) {
        return;
    }
    for low_level in LowLevel::ALL {
        let (node, runtime) = node(2, low_level, "refuse", true);
        let second = node.gpus()[1].clone();
        // The thief has no resource of a GPU, and takes none.
        node.api.pod("thief", &limits(&json!({"cpu": "1"})), &json!({}));
        let refused = runtime.create(&asking("thief", THIEF)).expect_err("it has no GPU");
        assert!(refused.line().contains("kubelet allocated none to this container"), "{}", refused.line());
        let held = leases(runtime.config());
        assert!(held.is_empty(), "{held:?}");
        // A container of an honest pod, which is created before kubelet says what it has.
        node.kubelet.devices.set_allocatable("nvidia.com/gpu", &node.gpus());
        node.api.pod("honest", &limits(&json!({"nvidia.com/gpu": 1})), &admitted());
        let honest = asking("honest", &[("NVIDIA_VISIBLE_DEVICES", &second), ("GPUSHARE_MEMORY", "60GiB")]);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(300));
                node.kubelet.devices.give("honest", "main", "nvidia.com/gpu", &[&second]);
            });
            let container = runtime.run(&honest);
            Report::of(&container, &[]).assert_size(60 * GIB);
            assert_eq!(leases(runtime.config())[0].gpus[0], second);
        });
        // Another GPU than its own is none of its.
        let other = asking("honest", &[("GPUSHARE_DEVICES", "0"), ("GPUSHARE_MEMORY", "1GiB")]);
        let refused = runtime.create(&other).expect_err("it is another's");
        assert!(refused.line().contains("nvidia.com/gpu"), "{}", refused.line());
        // One of four replicas is a quarter.
        let replicas: Vec<String> = (0..4).map(|number| format!("{second}::{number}")).collect();
        node.kubelet.devices.set_allocatable("nvidia.com/gpu.shared", &replicas);
        node.kubelet.devices.give("quarter", "main", "nvidia.com/gpu.shared", &[&replicas[2]]);
        node.api.pod("quarter", &limits(&json!({"nvidia.com/gpu.shared": 1})), &admitted());
        let quarter = asking("quarter", &[("NVIDIA_VISIBLE_DEVICES", &second)]);
        let container = runtime.run(&quarter);
        let report = Report::of(&container, &["21GiB", "19GiB"]);
        report.assert_size(20 * GIB);
        assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS]);
        let more = asking("quarter", &[("NVIDIA_VISIBLE_DEVICES", &second), ("GPUSHARE_MEMORY", "21GiB")]);
        let refused = runtime.create(&more).expect_err("it is more than a quarter");
        assert!(refused.line().contains("nvidia.com/gpu.shared"), "{}", refused.line());
        // What a pod had ends with it.
        node.kubelet.devices.forget("honest");
        node.api.forget_pod("honest");
        let noted = node.node.state().join("allocations/uid-of-honest");
        assert!(eventually(SOON, || !noted.exists()), "what its pod had is forgotten");
    }
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a_share_of_another_driver_holds_at_what_the_claims_status_says() {
    if !met(CONTAINERS) {
        return;
    }
    for (low_level, strict) in [(LowLevel::Runc, true), (LowLevel::Crun, false)] {
        let (node, runtime) = node(2, low_level, "refuse", strict);
        let gpus = node.gpus();
        let device = |number: usize| json!({"name": format!("gpu-{number}"), "attributes": {"uuid": {"string": gpus[number]}}});
        let pool = json!({"name": NODE, "generation": 1, "resourceSliceCount": 1});
        node.api.slice(
            "nvidias",
            &json!({"driver": "gpu.nvidia.com", "nodeName": NODE, "pool": pool, "devices": [device(0), device(1)]}),
        );
        let result = json!({
            "request": "gpu", "driver": "gpu.nvidia.com", "pool": NODE, "device": "gpu-1",
            "shareID": "one", "consumedCapacity": {"memory": "30Gi"},
        });
        node.api.claim("nvidias", "0b5c1f6e-8e0f-4c7d-9a51-3f6f2b8f1a10", &[result], &[]);
        let container = |name: &str| json!({"name": name, "resources": {"claims": [{"name": "gpu"}]}});
        let spec = json!({
            "nodeName": NODE, "containers": [container("main"), container("beside")],
            "resourceClaims": [{"name": "gpu", "resourceClaimName": "nvidias"}],
        });
        node.api.pod("pod", &spec, &json!({}));
        // NVIDIA's driver hands over the whole GPU by CDI.
        let listed = [("NVIDIA_VISIBLE_DEVICES", "void")];
        let minor = 1;
        let handed = |bundle: Bundle| {
            bundle.set(
                "/linux/devices",
                json!([{"path": "/dev/nvidia1", "type": "c", "major": 195, "minor": minor}]),
            )
        };
        let (first, second) = (handed(asking("pod", &listed)), handed(asking("pod", &listed)));
        let second = second.annotation("io.kubernetes.cri.container-name", "beside");
        let (first, second) = (runtime.run(&first), runtime.run(&second));
        let report = Report::of(&first, &["31GiB", "29GiB"]);
        report.assert_size(30 * GIB);
        assert_eq!(report.allocations(), [OUT_OF_MEMORY, SUCCESS], "{low_level:?}");
        Report::of(&second, &[]).assert_size(30 * GIB);
        let held = leases(runtime.config());
        assert_eq!((held.len(), &held[0].memory[..]), (1, &[30 * GIB][..]), "both hold it together");
        assert_eq!(held[0].gpus[0], gpus[1]);
    }
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn without_an_answer_nothing_is_granted_unless_the_settings_say_so() {
    if !met(CONTAINERS) {
        return;
    }
    let (mut cluster, runtime) = node(1, LowLevel::Runc, "refuse", true);
    let gpu = cluster.gpus()[0].clone();
    let asks = [("NVIDIA_VISIBLE_DEVICES", gpu.as_str()), ("GPUSHARE_MEMORY", "1GiB")];
    // PodResources does not answer: the container waits, and is refused in words.
    cluster.kubelet.devices.set_silent(true);
    cluster.api.pod("pod", &limits(&json!({"nvidia.com/gpu": 1})), &admitted());
    let began = Instant::now();
    let refused = runtime.create(&asking("pod", &asks)).expect_err("nobody knows");
    assert!(refused.line().contains("is not known after 8 seconds"), "{}", refused.line());
    assert!(began.elapsed() >= Duration::from_secs(8), "it waited");
    cluster.kubelet.devices.set_silent(false);
    cluster.kubelet.devices.give("pod", "main", "nvidia.com/gpu", &[&gpu]);
    let starts = || runtime.create(&asking("pod", &asks)).is_ok();
    assert!(eventually(SOON, starts), "kubelet answers again");
    // What was noted counts when the agent is away, and after its restart; of a new pod nothing is known.
    cluster.kill_agent();
    drop(runtime.create(&asking("pod", &asks)).expect("it is noted"));
    let refused = runtime.create(&asking("new", &asks)).expect_err("nobody can tell");
    assert!(refused.line().contains("gpushare's agent does not run"), "{}", refused.line());
    cluster.start_agent();
    drop(runtime.create(&asking("pod", &asks)).expect("it is noted"));
    // Containers outside of pods, and those that ask for nothing, do not wait for anybody.
    cluster.kill_agent();
    let outside = Bundle::with_probe().env("GPUSHARE_MEMORY", "1GiB");
    drop(runtime.create(&outside).expect("it is no pod's"));
    drop(runtime.create(&asking("new", &[])).expect("it asks for nothing"));
    drop((cluster, runtime));
    let (mut cluster, runtime) = node(1, LowLevel::Runc, "believe", true);
    cluster.kill_agent();
    drop(runtime.create(&asking("new", &[("GPUSHARE_MEMORY", "1GiB")])).expect("it is believed"));
}
