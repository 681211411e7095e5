//! Tests of rules that hold for any combination of dialects.

use gpushare_inventory::DeviceMemory;
use serde_json::{Value, json};

use super::*;
use gpushare_claims::four;

const GIB: u64 = 1 << 30;

fn strict(env: &str, pod: &str) -> Policy {
    let ceilings = Ceilings { env: env.parse().ok(), pod: pod.parse().ok() };
    Policy { strict: true, ceilings, ..Policy::default() }
}

/// A node that gives each container 1 GiB and a quarter of compute and that does not check images.
fn unchecked() -> Policy {
    let (default_memory, default_cores) =
        (Some(MemoryRequest::Bytes(DeviceMemory::from_bytes(GIB))), Cores::new(25));
    Policy { ignore_env: true, default_memory, default_cores, ..Policy::default() }
}

fn bundle(annotations: &[(&str, &str)], env: &[&str]) -> Value {
    let annotations: serde_json::Map<_, _> =
        annotations.iter().map(|&(key, value)| (key.to_owned(), json!(value))).collect();
    json!({"annotations": annotations, "process": {"env": env}})
}

fn is_of_one_gpu(request: &Request) -> bool {
    match &request.devices {
        Devices::Any(count) | Devices::Among(count, _) => *count == 1,
        Devices::These(list) => list.len() == 1,
        Devices::All => false,
    }
}

fn of(bundle: &Value, policy: &Policy) -> Result<Request, RequestError> {
    read(&Container::from_json(bundle), policy, &four()).map(Option::unwrap)
}

#[test]
fn no_variable_of_another_system_makes_more_gpus_of_an_annotation() {
    for policy in [strict("1GiB", "100%"), unchecked()] {
        for key in ["gpushare.io/memory", "gpushare.io/mode", "alloc.gpushare.io/memory"] {
            let value = if key.ends_with("mode") { "exclusive" } else { "4GiB" };
            for beside in ["CUDA_DEVICE_SM_LIMIT=0", "CUDA_MPS_PIPE_DIRECTORY=/x"] {
                let told = of(&bundle(&[(key, value)], &["NVIDIA_VISIBLE_DEVICES=all", beside]), &policy);
                assert!(told.as_ref().map_or(true, is_of_one_gpu), "{key} {beside}: {told:?}");
            }
        }
        let counted = [("gpushare.io/memory", "1GiB"), ("gpushare.io/count", "2")];
        let told =
            of(&bundle(&counted, &["NVIDIA_VISIBLE_DEVICES=0,1", "CUDA_MPS_PIPE_DIRECTORY=/x"]), &policy);
        assert!(told.is_ok(), "{told:?}");
    }
}

#[test]
fn as_many_gpus_as_a_more_trusted_word_counts_are_its_own() {
    let list = format!("NVIDIA_VISIBLE_DEVICES={},{}", four()[0].uuid, four()[1].uuid);
    let kai = [("gpu-fraction", "0.5"), ("gpu-fraction-num-devices", "2")];
    let told = of(&bundle(&kai, &[&list, "GPU_PORTION=0.5", "RUNAI_NUM_OF_GPUS=0.5"]), &unchecked());
    assert!(told.is_ok(), "{told:?}");
    for ours in ["gpushare.io", "alloc.gpushare.io"] {
        let [memory, count] = ["memory", "count"].map(|name| format!("{ours}/{name}"));
        let asks = [(memory.as_str(), "4GiB"), (count.as_str(), "2")];
        for policy in [unchecked(), strict("1GiB", "100%")] {
            let told = of(&bundle(&asks, &[&list, "CUDA_MPS_PIPE_DIRECTORY=/x"]), &policy);
            assert!(told.is_ok(), "{ours}: {told:?}");
            let told = of(&bundle(&asks[..1], &[&list, "CUDA_MPS_PIPE_DIRECTORY=/x"]), &policy);
            assert!(told.as_ref().map_or(true, is_of_one_gpu), "{ours} without a count: {told:?}");
        }
    }
}

#[test]
fn no_list_of_an_unchecked_image_takes_a_compute_policy_to_more_gpus() {
    for list in ["0", "0,1", "all"] {
        for lifting in ["none", "burst"] {
            let env = [&format!("NVIDIA_VISIBLE_DEVICES={list}"), "CUDA_MPS_PIPE_DIRECTORY=/x"];
            let told = of(&bundle(&[("gpushare.io/compute-policy", lifting)], &env), &unchecked());
            assert!(told.as_ref().is_ok_and(is_of_one_gpu), "{list} {lifting}: {told:?}");
            let counted = [("gpushare.io/compute-policy", lifting), ("gpushare.io/count", "2")];
            let told = of(&bundle(&counted, &env), &unchecked());
            assert_eq!(told.is_ok(), list != "0", "{list} {lifting}, two counted: {told:?}");
        }
    }
}

#[test]
fn what_podman_passes_of_an_image_that_nobody_checked_is_within_the_nodes_defaults() {
    let libpod = ("io.container.manager", "libpod");
    for (key, value, stays) in [
        ("gpushare.io/memory", "14GiB", false),
        ("gpushare.io/memory", "512MiB", true),
        ("alloc.gpushare.io/memory", "14GiB", false),
        ("gpushare.io/mode", "exclusive", false),
        ("gpushare.io/cores", "26", false),
        ("gpushare.io/cores", "25", true),
        ("gpushare.io/compute-policy", "none", false),
        ("cdi.k8s.io/x", "gpushare.io/gpu=all", false),
        ("cdi.k8s.io/x", "gpushare.io/share=14GiB", false),
    ] {
        let asks = bundle(&[libpod, (key, value)], &[]);
        let told = of(&asks, &unchecked());
        assert_eq!(told.is_ok(), stays, "{key}={value}: {told:?}");
        let beside =
            bundle(&[libpod, (key, value)], &["NVIDIA_VISIBLE_DEVICES=0", "CUDA_DEVICE_MEMORY_LIMIT=512m"]);
        let told = of(&beside, &unchecked());
        assert!(told.as_ref().map_or(!stays, within), "{key}={value} beside: {told:?}");
        let refuse = Policy { nvidia: NvidiaPolicy::Refuse, ..unchecked() };
        assert!(matches!(of(&asks, &refuse), Err(RequestError::Unread { .. })), "{key}={value}");
    }
    let docker = of(&bundle(&[("gpushare.io/memory", "14GiB")], &[]), &unchecked());
    assert!(docker.is_ok(), "{docker:?}");
}

fn within(request: &Request) -> bool {
    let MemoryRequest::Bytes(memory) = request.memory else { return false };
    let cores = request.cores.is_some_and(|cores| cores.percent() <= 25);
    memory.bytes() <= GIB && cores && request.compute_policy == ComputePolicy::Fixed
}

#[test]
fn an_honoured_switch_gives_no_more_compute_than_images_may_have() {
    let policy =
        Policy { switches: vec!["CUDA_DISABLE_CONTROL".to_owned()], default_memory: None, ..unchecked() };
    let env = ["NVIDIA_VISIBLE_DEVICES=0", "CUDA_DEVICE_MEMORY_LIMIT=1g", "CUDA_DISABLE_CONTROL=true"];
    let told = of(&bundle(&[], &env), &policy);
    assert!(matches!(told, Err(RequestError::AboveCeiling { .. })), "{told:?}");
}

#[test]
fn no_variable_takes_slurms_limit_for_another_systems() {
    let slurm = [
        "SLURM_JOB_ID=7",
        "SLURM_STEP_GPUS=2",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25",
        "SLURM_STEP_ID=0",
        "SLURM_GTIDS=0,1,2,3,4",
    ];
    let dialects = DialectSettings { slurm_mps_memory: true, ..DialectSettings::default() };
    for policy in [Policy::default(), strict("100%", "0")] {
        let policy = Policy { dialects: dialects.clone(), ..policy };
        let alone = of(&bundle(&[], &slurm), &policy).unwrap();
        let third = Devices::These(vec![DeviceSelector::Uuid(four()[2].uuid)]);
        assert_eq!((alone.cores, alone.devices), (Cores::new(5), third));
        let more = [&slurm[..], &["NVIDIA_GPU_MEMORY_LIMIT=15360", "NVIDIA_VISIBLE_DEVICES=0"]].concat();
        let told = of(&bundle(&[], &more), &policy);
        assert!(matches!(told, Err(RequestError::Conflict { .. })), "{told:?}");
    }
}

#[test]
fn words_for_mps_ask_for_it_where_the_node_says_so() {
    let by_mps =
        Policy { dialects: DialectSettings { mps: true, ..DialectSettings::default() }, ..Policy::default() };
    let plugin = [
        "NVIDIA_VISIBLE_DEVICES=0",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1G",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30",
    ];
    let pipe = ["NVIDIA_VISIBLE_DEVICES=0", "CUDA_MPS_PIPE_DIRECTORY=/mps/nvidia.com/gpu/pipe"];
    let slurm = ["SLURM_JOB_ID=7", "SLURM_STEP_GPUS=2", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25"];
    for env in [&plugin[..], &pipe, &slurm] {
        let mode = |policy: &Policy| of(&bundle(&[], env), policy).unwrap().mode;
        assert_eq!((mode(&by_mps), mode(&Policy::default())), (Mode::Mps, Mode::Share), "{env:?}");
    }
    let own = [&plugin[..], &["GPUSHARE_MODE=share"]].concat();
    assert_eq!(of(&bundle(&[], &own), &by_mps).unwrap().mode, Mode::Share, "the person's own word is less");
    let two = ["NVIDIA_VISIBLE_DEVICES=0,1", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1G,1=1G"];
    let told = of(&bundle(&[], &two), &by_mps);
    assert!(matches!(told, Err(RequestError::SeveralUnderMps { .. })), "{told:?}");
    let plain = ["NVIDIA_VISIBLE_DEVICES=0", "CUDA_DEVICE_MEMORY_LIMIT=1g"];
    assert_eq!(
        of(&bundle(&[], &plain), &by_mps).unwrap().mode,
        Mode::Share,
        "other words mean what they did"
    );
}

#[test]
fn a_library_is_left_the_limit_only_where_it_is_told_what_was_granted() {
    let gpu = four()[0].uuid;
    let same = format!("{gpu},NVIDIA,3000,60:;");
    let less = format!("{gpu},NVIDIA,1,1:;");
    let policy = Policy { interceptor: InterceptorPolicy::StandDown, ..Policy::default() };
    let libpod = ("io.container.manager", "libpod");
    let allocated = |text| ("hami.io/vgpu-devices-allocated", text);
    for (annotations, more, stays) in [
        (&[][..], &[][..], true),
        (&[allocated(same.as_str())], &[], true),
        (&[allocated(less.as_str())], &[], false),
        (&[allocated(less.as_str()), libpod], &[], false),
        (&[], &["GPU_CORE_UTILIZATION_POLICY=disable"], false),
        (&[], &["GPU_CORE_UTILIZATION_POLICY=default", "GPU_CORE_UTILIZATION_POLICY=disable"], false),
        (&[], &["CUDA_OVERSUBSCRIBE=true"], false),
        (&[], &["CUDA_OVERSUBSCRIBE=false"], true),
    ] {
        let list = format!("NVIDIA_VISIBLE_DEVICES={gpu}");
        let mut env = vec![list.as_str(), "CUDA_DEVICE_MEMORY_LIMIT_0=3000m", "CUDA_DEVICE_SM_LIMIT=60"];
        env.extend(more);
        let mut bundle = bundle(annotations, &env);
        bundle["mounts"] = json!([
            {"source": "/usr/local/vgpu/libvgpu.so", "destination": "/usr/local/vgpu/libvgpu.so"},
            {"source": "/usr/local/vgpu/ld.so.preload", "destination": "/etc/ld.so.preload"},
        ]);
        let (_, ruled) = of(&bundle, &policy).unwrap().interceptor.unwrap();
        assert_eq!(ruled == InterceptorPolicy::StandDown, stays, "{annotations:?} {more:?}");
    }
}

#[test]
fn no_variable_without_an_amount_undoes_the_refusal_of_whoever_names_no_share() {
    let policy = Policy { strict: true, nvidia: NvidiaPolicy::Refuse, ..Policy::default() };
    for env in [&[][..], &["GPUSHARE_PRIORITY=0"], &["GPUSHARE_COUNT=1"], &["GPUSHARE_MODE=share"]] {
        let mut bundle = bundle(&[("io.kubernetes.cri.container-type", "container")], env);
        bundle["linux"] =
            json!({"devices": [{"path": "/dev/nvidia1", "type": "c", "major": 195, "minor": 1}]});
        let told = read(&Container::from_json(&bundle), &policy, &four());
        assert_eq!(told, Err(RequestError::NoShare), "{env:?}");
    }
}

fn named(list: &str) -> Value {
    json!(format!("NVIDIA_VISIBLE_DEVICES={list}"))
}

/// The bundle `first` as its grant leaves it; `written` was its list of GPUs.
fn again(first: &Value, written: &str, granted: &Request) -> Value {
    let mut again = first.clone();
    let env = again["process"]["env"].as_array_mut().unwrap();
    env.retain(|entry| !entry.as_str().unwrap().starts_with("NVIDIA_VISIBLE_DEVICES="));
    env.push(named("void"));
    let engine = Container::from_json(first).engine();
    again["annotations"][GRANTED_LIST] = json!(kept_list(&[written.to_owned()], engine, &granted.kept()));
    again["hooks"] = json!({"prestart": [{"args": ["gpushare-hook", "--lease"]}]});
    again
}

#[test]
fn a_bundle_that_is_run_again_gains_nothing_by_words_that_are_gone() {
    let [a, b, ..] = [0, 1, 2, 3].map(|index| four()[index].uuid);
    let cri = ("io.kubernetes.cri.container-type", "container");
    let folder = "/var/run/nvidia-container-devices";
    let volumes = Policy { volume_mounts: true, ..Policy::default() };
    let lists = [format!("NVIDIA_VISIBLE_DEVICES={a}"), format!("NVIDIA_VISIBLE_DEVICES={folder}")];
    let mut first = bundle(&[cri], &lists.each_ref().map(String::as_str));
    let mount = |gpu| json!({"source": "/dev/null", "destination": format!("{folder}/{gpu}")});
    first["mounts"] = json!([mount(a), mount(b)]);
    let granted = of(&first, &volumes).unwrap();
    assert_eq!(granted.devices, Devices::These(vec![DeviceSelector::Uuid(a)]));
    let told = of(&again(&first, folder, &granted), &volumes);
    assert!(told.is_err(), "the plugin's list is gone: {told:?}");

    // Read as minors, the list names one GPU twice, so it is unclear to which GPU the limit at a position
    // belongs.
    let list = format!("0,{b}");
    let env = [named(&list), json!("CUDA_DEVICE_MEMORY_LIMIT_0=8g"), json!("CUDA_DEVICE_MEMORY_LIMIT=1g")];
    let env: Vec<&str> = env.iter().filter_map(Value::as_str).collect();
    let first = bundle(&[cri, ("gpushare.io/devices", "1")], &env);
    let granted = of(&first, &Policy::default()).unwrap();
    assert_eq!(granted.memory, MemoryRequest::Bytes(DeviceMemory::from_bytes(GIB)));
    let told = of(&again(&first, &list, &granted), &Policy::default());
    assert!(told.is_err(), "{told:?}");
}

#[test]
fn a_bundle_that_is_run_again_gets_the_same_gpu() {
    let gpu = four()[1].uuid;
    let folder = "/var/run/nvidia-container-devices";
    let volumes = Policy { volume_mounts: true, ..Policy::default() };
    let mount = json!([{"source": "/dev/null", "destination": format!("{folder}/{gpu}")}]);
    let aliyun = ["ALIYUN_COM_GPU_MEM_IDX=0", "ALIYUN_COM_GPU_MEM_DEV=15", "ALIYUN_COM_GPU_MEM_CONTAINER=3"];
    for (list, env, mounts) in
        [(folder, &[][..], &mount), (folder, &["GPUSHARE_MEMORY=1GiB"], &mount), ("all", &aliyun, &json!([]))]
    {
        let mut first = bundle(&[], env);
        first["mounts"] = mounts.clone();
        first["process"]["env"].as_array_mut().unwrap().push(named(list));
        let granted = of(&first, &volumes).unwrap();
        let again = again(&first, list, &granted);
        assert_eq!(of(&again, &volumes).map(|again| again.devices), Ok(granted.devices), "{list} {env:?}");
    }
}
