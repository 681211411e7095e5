//! What holds for every bundle: no source of little trust raises what a more trusted one says.
//!
//! A bundle is made as its engine makes it: the entries of the image's environment, of a device plugin and of
//! a pod are merged by the rules of docker, containerd or CRI-O; annotations, device nodes and mounts are
//! added. Each trusted statement comes with the bounds that its own system means by it. The less trusted ones
//! are drawn from everything that any dialect knows. The seed is fixed; `GPUSHARE_SEED` and `GPUSHARE_CASES`
//! try others.

use std::collections::BTreeMap;
use std::env;

use gpushare_inventory::{DeviceMemory, GpuUuid};
use gpushare_request::{
    Ceilings, Container, DeviceSelector, Devices, GRANTED_LIST, HANDED, MemoryRequest, Mode, Policy, Request,
    Share, kept_list, read, switch_names,
};
use serde_json::{Value, json};

use super::golden::{gpus, granted, policy};
use super::pairs::shares;
use super::sets::{MINORS, UUIDS, all};
use super::statements::{GRANTED, HANDED_OVER, POD, Random, SOURCES, Statement, TOTAL};

const CASES: u64 = 120_000;

/// Every variable of every set, and those that a hostile author would write.
fn variables() -> Vec<String> {
    let of_sets = all().into_iter().flat_map(|sets| sets.set).flat_map(|set| set.env);
    let mut words: Vec<String> = of_sets.filter(|entry| entry.contains('=')).collect();
    let lists =
        ["all", "none", "void", "", "0", "1", "2,3", "0,1,2,3", "nvidia.com/gpu=all", "gpushare.io/gpu=all"];
    words.extend(lists.map(|list| format!("NVIDIA_VISIBLE_DEVICES={list}")));
    words.extend(UUIDS.map(|uuid| format!("NVIDIA_VISIBLE_DEVICES={uuid}")));
    for own in [
        "MEMORY=14GiB",
        "MEMORY=100%",
        "MEMORY=512m",
        "CORES=100",
        "CORES=5",
        "COUNT=4",
        "DEVICES=all",
        "DEVICES=0",
        "MODE=exclusive",
        "COMPUTE_POLICY=none",
        "COMPUTE_POLICY=burst",
        "PRIORITY=9",
        "CAPABILITIES=all",
    ] {
        words.push(format!("GPUSHARE_{own}"));
    }
    for more in [
        "CUDA_DEVICE_MEMORY_LIMIT=15g",
        "CUDA_DEVICE_MEMORY_LIMIT_0=15g",
        "CUDA_DEVICE_SM_LIMIT=100",
        "ALIYUN_COM_GPU_MEM_IDX=3",
        "GPU_PORTION=0.99",
        "SLURM_JOB_ID=1",
        "SLURM_STEP_GPUS=3",
        "LD_PRELOAD=/x/libvgpu.so",
        "MANAGER_VISIBLE_DEVICE_0=GPU-d0000000-0000-4000-8000-000000000004",
        "CUDA_MEM_LIMIT_0=15g",
        "CUDA_CORE_LIMIT_0=30",
        "CUDA_CORE_SOFT_LIMIT_0=100",
        "NVIDIA_GPU_MEMORY_LIMIT=15000",
        "CGPU_DISABLE=true",
        "CUDA_DISABLE_CONTROL=true",
        "DISABLE_VGPU_CONTROL=1",
        "GPU_CORE_UTILIZATION_POLICY=disable",
    ] {
        words.push(more.to_owned());
    }
    words.sort();
    words.dedup();
    words
}

/// Annotations that a pod's author can write, of every set.
fn annotations_of_pods() -> Vec<(String, String)> {
    let of_sets = all().into_iter().flat_map(|sets| sets.set).flat_map(|set| set.annotations);
    let is_pods = |key: &str| {
        !key.starts_with("alloc.")
            && !key.starts_with("tencent.com/vcuda-")
            && !key.contains("nvidia-device-plugin_")
            && !key.starts_with("granted.")
            && !key.starts_with("io.")
    };
    let mut pairs: Vec<(String, String)> = of_sets.filter(|(key, _)| is_pods(key)).collect();
    pairs.sort();
    pairs.dedup();
    pairs
}

/// How an engine merges three lists of variables into one environment.
#[derive(Clone, Copy, Debug)]
enum Merge {
    Docker,
    Containerd,
    CriO,
}

impl Merge {
    fn environment(self, image: &[String], plugin: &[String], pod: &[String]) -> Vec<String> {
        let name = |entry: &String| entry.split('=').next().unwrap_or_default().to_owned();
        let of_image: Vec<String> = image.iter().map(name).collect();
        let mut env = image.to_vec();
        for entry in plugin.iter().chain(pod) {
            let replaces = match self {
                // Only names that the image has are looked up.
                Self::Containerd => of_image.contains(&name(entry)),
                Self::Docker | Self::CriO => true,
            };
            match env.iter_mut().find(|other| replaces && name(other) == name(entry)) {
                Some(other) => other.clone_from(entry),
                None => env.push(entry.clone()),
            }
        }
        env
    }

    fn marks(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Docker => &[],
            Self::Containerd => &[
                ("io.kubernetes.cri.container-type", "container"),
                ("io.kubernetes.cri.container-name", "trainer"),
            ],
            Self::CriO => &[
                ("io.kubernetes.cri-o.ContainerType", "container"),
                ("io.kubernetes.container.name", "trainer"),
            ],
        }
    }
}

/// What the sources of a bundle say.
#[derive(Clone, Debug)]
struct Words {
    engine: Merge,
    trusted: Vec<Statement>,
    pods: Vec<(String, String)>,
    env: Vec<String>,
}

impl Words {
    fn bundle(&self) -> Value {
        // What a plugin wrote replaces a pod's annotation with the same key.
        let mut annotations: BTreeMap<String, String> = self.pods.iter().cloned().collect();
        let mut by_rank = self.trusted.clone();
        by_rank.sort_by_key(|statement| statement.rank);
        annotations.extend(by_rank.iter().flat_map(|statement| statement.annotations.iter().cloned()));
        if matches!(self.engine, Merge::CriO) {
            let own = by_rank.iter().filter(|statement| statement.rank == GRANTED);
            let own: BTreeMap<_, _> =
                own.flat_map(|statement| statement.annotations.iter().cloned()).collect();
            annotations.insert("io.kubernetes.cri-o.Annotations".to_owned(), json!(own).to_string());
        }
        for (key, value) in self.engine.marks() {
            annotations.insert((*key).to_owned(), (*value).to_owned());
        }
        let nodes = self.trusted.iter().flat_map(|statement| &statement.nodes);
        let nodes = nodes.map(
            |minor| json!({"path": format!("/dev/nvidia{minor}"), "type": "c", "major": 195, "minor": minor}),
        );
        let mounts = self.trusted.iter().flat_map(|statement| &statement.mounts).map(|gpu| {
            let target = format!("/var/run/nvidia-container-devices/{}", UUIDS[*gpu]);
            json!({"source": "/dev/null", "destination": target, "type": "bind"})
        });
        json!({
            "annotations": annotations,
            "process": {"env": self.env},
            "mounts": mounts.collect::<Vec<_>>(),
            "linux": {"devices": nodes.collect::<Vec<_>>()},
        })
    }
}

fn draw(random: &mut Random, variables: &[String], pods: &[(String, String)]) -> Words {
    let mut engine = *random.of(&[Merge::Docker, Merge::Containerd, Merge::CriO]);
    let mut trusted = vec![random.of(&SOURCES)(random)];
    if random.chance(30) {
        trusted.push(random.of(&SOURCES)(random));
    }
    // Two statements of one system are one source, and so is everything that was handed over.
    let is_cdi =
        |statement: &Statement| statement.annotations.iter().any(|(key, _)| key.contains("cdi.k8s.io"));
    if trusted.iter().all(|statement| statement.rank == HANDED_OVER) || trusted.iter().all(is_cdi) {
        trusted.truncate(1);
    }
    if trusted.len() == 2
        && trusted[0]
            .annotations
            .iter()
            .any(|(key, _)| trusted[1].annotations.iter().any(|(other, _)| other == key))
    {
        trusted.pop();
    }
    // Annotations that name a container of a pod apply to no other container.
    let text = |statement: &Statement| format!("{:?}", statement.annotations);
    if trusted.iter().any(|statement| text(statement).contains("trainer")) && matches!(engine, Merge::Docker)
    {
        engine = Merge::Containerd;
    }
    let mut some = |most: usize| -> Vec<String> {
        (0..random.below(most + 1)).map(|_| random.of(variables).clone()).collect()
    };
    let (image, plugin, pod) = (some(1), some(1), some(2));
    let mut env = engine.environment(&image, &plugin, &pod);
    if random.chance(10) && !env.is_empty() {
        let again = random.of(&env).clone();
        env.push(again);
    }
    let lowest = trusted.iter().map(|statement| statement.rank).min().unwrap_or(GRANTED);
    let pods = (0..if lowest > POD { random.below(3) } else { 0 }).map(|_| random.of(pods).clone()).collect();
    Words { engine, trusted, pods, env }
}

fn node_policy(random: &mut Random) -> Policy {
    let whole: Option<MemoryRequest> = Some("100%".parse().unwrap());
    let mut some = |ceiling: Option<MemoryRequest>| ceiling.filter(|_| random.chance(70));
    let ceilings = Ceilings { pod: some(whole), env: some(whole) };
    let switches = if random.chance(30) { switch_names().map(str::to_owned).collect() } else { Vec::new() };
    Policy {
        strict: random.chance(50),
        crio: true,
        ceilings,
        volume_mounts: true,
        switches,
        ignore_env: random.chance(15),
        default_memory: Some(MemoryRequest::Bytes(DeviceMemory::from_bytes(2 << 30)))
            .filter(|_| random.chance(30)),
        ..Policy::default()
    }
}

/// The GPUs that a request may get, and how many of them.
fn reach(request: &Request) -> (Vec<GpuUuid>, usize) {
    let node = gpus(TOTAL);
    let find = |selector: &DeviceSelector| gpushare_request::find_gpu(selector, &node).unwrap().uuid;
    match &request.devices {
        Devices::These(list) => (list.iter().map(find).collect(), list.len()),
        Devices::Among(count, of) => (of.clone(), (*count).into()),
        Devices::Any(count) => (node.iter().map(|gpu| gpu.uuid).collect(), (*count).into()),
        Devices::All => (node.iter().map(|gpu| gpu.uuid).collect(), 4),
    }
}

/// In which respect the request exceeds the statement; `None` where it does not.
fn exceeds(request: &Request, said: &Statement) -> Option<String> {
    let place = |gpu: &GpuUuid| UUIDS.iter().position(|uuid| *uuid == gpu.to_string()).unwrap();
    let (reached, count) = reach(request);
    let reached: Vec<usize> = reached.iter().map(place).collect();
    if said.gpus.as_ref().is_some_and(|gpus| reached.iter().any(|gpu| !gpus.contains(gpu))) {
        return Some(format!("GPUs {reached:?}"));
    }
    if said.count.is_some_and(|most| count > most) {
        return Some(format!("{count} GPUs"));
    }
    for (gpu, bytes, cores) in shares(request) {
        let place = place(&gpu);
        if said.memory.as_ref().is_some_and(|memory| bytes > memory[place] << 20) {
            return Some(format!("{bytes} bytes of GPU {place}"));
        }
        if said.cores.is_some_and(|most| cores > most) {
            return Some(format!("{cores}% of GPU {place}"));
        }
    }
    None
}

fn setting(name: &str, default: u64) -> u64 {
    env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[test]
fn no_word_makes_more_of_what_a_more_trusted_one_says() {
    let (variables, pods) = (variables(), annotations_of_pods());
    let node = gpus(TOTAL);
    let (seed, cases) = (setting("GPUSHARE_SEED", 1), setting("GPUSHARE_CASES", CASES));
    let (mut granted, mut refused) = (0_u64, 0_u64);
    for case in 0..cases {
        let mut random = Random(seed << 32 | case);
        let words = draw(&mut random, &variables, &pods);
        let policy = node_policy(&mut random);
        let outcome = read(&Container::from_json(&words.bundle()), &policy, &node);
        let told = || format!("seed {seed}, case {case}: {words:#?}\n{policy:?}\n{outcome:?}");
        match &outcome {
            Err(_) => refused += 1,
            Ok(None) => {
                let speaks = words.trusted.iter().any(|statement| statement.rank >= GRANTED);
                assert!(!speaks, "no request where a trusted word asks: {}", told());
            }
            Ok(Some(request)) => {
                granted += 1;
                for said in &words.trusted {
                    assert_eq!(exceeds(request, said), None, "{}", told());
                }
            }
        }
    }
    println!("{granted} of {cases} cases granted, {refused} refused");
    assert!(granted > cases / 20, "{granted} of {cases} granted: the cases say little");
}

/// The bundle as a grant leaves it, for a second run.
fn again(first: &Value, request: &Request) -> Value {
    let mut again = first.clone();
    let env = again["process"]["env"].as_array_mut().unwrap();
    let (mut lists, mut met) = (Vec::new(), Vec::new());
    env.retain_mut(|entry| {
        let text = entry.as_str().unwrap().to_owned();
        let (name, value) = text.split_once('=').unwrap();
        if name == "NVIDIA_VISIBLE_DEVICES" {
            lists.push(value.to_owned());
            *entry = json!("NVIDIA_VISIBLE_DEVICES=void");
        } else if let Some((_, value)) = request.variables.iter().find(|(key, _)| key == name) {
            *entry = json!(format!("{name}={value}"));
        } else if !name.starts_with("GPUSHARE_") {
            return true;
        }
        let is_new = !met.contains(&name.to_owned());
        met.push(name.to_owned());
        is_new
    });
    if let Some(list) = kept_list(&lists, Container::from_json(first).engine(), &request.kept()) {
        again["annotations"][GRANTED_LIST] = json!(list);
    }
    let handed: Vec<String> = request.handed.iter().map(ToString::to_string).collect();
    again["annotations"][HANDED] = json!(handed.join(","));
    again["linux"]["devices"] = reach(request)
        .0
        .iter()
        .map(|gpu| {
            let place = UUIDS.iter().position(|uuid| *uuid == gpu.to_string()).unwrap();
            let minor = MINORS[place];
            json!({"path": format!("/dev/nvidia{minor}"), "type": "c", "major": 195, "minor": minor})
        })
        .collect();
    again["hooks"] = json!({"prestart": [{"args": ["gpushare-hook", "--lease"]}]});
    again
}

/// The GPUs that the request may get with the share of each, how many of them, and the mode.
fn came_to(request: &Request) -> (Vec<(GpuUuid, Share)>, usize, Mode) {
    let (gpus, count) = reach(request);
    let mut shares: Vec<(GpuUuid, Share)> = gpus.into_iter().map(|gpu| (gpu, request.on(gpu))).collect();
    shares.sort_by_key(|(gpu, _)| *gpu);
    (shares, count, request.mode)
}

#[test]
fn a_bundle_said_in_another_order_or_run_twice_comes_to_the_same() {
    let (variables, pods) = (variables(), annotations_of_pods());
    let node = gpus(TOTAL);
    let mut granted = 0_u64;
    for case in 0..setting("GPUSHARE_CASES", CASES) / 6 {
        let mut random = Random(setting("GPUSHARE_SEED", 2) << 32 | case);
        let words = draw(&mut random, &variables, &pods);
        let policy = node_policy(&mut random);
        let bundle = words.bundle();
        let Ok(Some(request)) = read(&Container::from_json(&bundle), &policy, &node) else { continue };
        granted += 1;
        let told = || format!("case {case}: {words:#?}\n{policy:?}\n{request:?}");
        let twice = read(&Container::from_json(&again(&bundle, &request)), &policy, &node);
        match &twice {
            // Limits by position in a list that was narrowed cannot be told apart; this is refused with the
            // reason.
            Err(error) => assert!(request.moves_limits, "{error}: {}", told()),
            Ok(None) => panic!("no request when it is run again: {}", told()),
            Ok(Some(twice)) => assert_eq!(came_to(twice), came_to(&request), "run twice: {}", told()),
        }
        let name = |entry: &String| entry.split('=').next().unwrap().to_owned();
        let mut names: Vec<String> = words.env.iter().map(name).collect();
        names.sort();
        names.dedup();
        if names.len() == words.env.len() {
            let mut turned = words.clone();
            turned.env.reverse();
            turned.env.extend(words.env.first().cloned());
            let other = read(&Container::from_json(&turned.bundle()), &policy, &node);
            let other = other.as_ref().ok().and_then(Option::as_ref).map(came_to);
            assert_eq!(other, Some(came_to(&request)), "in another order: {}", told());
        }
    }
    assert!(granted > 100, "{granted} granted");
}

/// What a system wrote is not lost in an image that has a list and a version of its own.
#[test]
fn what_nobody_contradicts_is_granted_exactly_in_every_image_and_by_every_engine() {
    let image = [
        "PATH=/bin",
        "CUDA_VERSION=12.4.1",
        "NVIDIA_VISIBLE_DEVICES=all",
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    ]
    .map(str::to_owned);
    let mut checked = 0;
    for sets in all() {
        for set in sets.set.iter().filter(|set| !set.grants.is_empty() && set.engine != "podman") {
            let name = |entry: &String| entry.split('=').next().unwrap_or_default().to_owned();
            let lists = set.env.iter().any(|entry| name(entry) == "NVIDIA_VISIBLE_DEVICES");
            let mut names: Vec<String> = set.env.iter().map(name).collect();
            names.sort();
            names.dedup();
            // A set with an entry twice is about the engine's own merge.
            if names.len() != set.env.len() || !lists {
                continue;
            }
            for engine in [Merge::Docker, Merge::Containerd, Merge::CriO] {
                let env = engine.environment(&image, &set.env, &[]);
                let set = super::sets::Set { env, ..set.clone() };
                let told = read(
                    &Container::from_json(&set.bundle()),
                    &policy(&set, false),
                    &gpus(set.total.unwrap_or(TOTAL)),
                );
                let told = told.map(|request| request.as_ref().map(granted));
                assert_eq!(told, Ok(Some(set.grants.clone())), "{}: {} ({engine:?})", sets.dialect, set.case);
                checked += 1;
            }
        }
    }
    assert!(checked > 300, "{checked}");
}
