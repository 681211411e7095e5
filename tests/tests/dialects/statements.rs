//! What trusted sources say, each as its own system means it, drawn at random.

use serde_json::json;

use super::sets::{MINORS, UUIDS};

/// Memory of each GPU in MiB.
pub const TOTAL: u64 = 15360;

/// SplitMix64, which gives the same numbers on every machine.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % u64::try_from(end).unwrap()).unwrap()
    }

    pub fn of<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        let place = self.below(all.len());
        &all[place]
    }

    pub fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }
}

/// What one trusted source says, as its system means it.
#[derive(Clone, Debug, Default)]
pub struct Statement {
    pub rank: u8,
    pub annotations: Vec<(String, String)>,
    /// Minor numbers of the device nodes.
    pub nodes: Vec<u32>,
    /// GPUs that mounts name, by index.
    pub mounts: Vec<usize>,
    /// The GPUs that it names, by index.
    pub gpus: Option<Vec<usize>>,
    pub count: Option<usize>,
    /// Memory in MiB on each GPU.
    pub memory: Option<Vec<u64>>,
    /// Compute in percent, idle time included.
    pub cores: Option<u8>,
}

pub const GRANTED: u8 = 3;
pub const POD: u8 = 2;
pub const HANDED_OVER: u8 = 4;

fn several(random: &mut Random) -> Vec<usize> {
    let first = random.below(4);
    let second = (first + 1 + random.below(3)) % 4;
    if random.chance(40) { vec![first, second] } else { vec![first] }
}

fn uuids(gpus: &[usize]) -> String {
    gpus.iter().map(|gpu| UUIDS[*gpu]).collect::<Vec<_>>().join(",")
}

fn annotated(rank: u8, pairs: &[(&str, String)]) -> Statement {
    let annotations = pairs.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect();
    Statement { rank, annotations, ..Statement::default() }
}

fn alloc(random: &mut Random) -> Statement {
    let mebibytes = 1024 * (1 + random.next() % 8);
    let gpus = several(random);
    let cores = u8::try_from(10 + random.below(80)).unwrap();
    let mut pairs = vec![("alloc.gpushare.io/memory", format!("{mebibytes}MiB"))];
    let mut told = Statement { memory: Some(vec![mebibytes; 4]), ..Statement::default() };
    if random.chance(60) {
        pairs.push(("alloc.gpushare.io/devices", uuids(&gpus)));
        told.gpus = Some(gpus.clone());
        told.count = Some(gpus.len());
    } else if random.chance(50) {
        pairs.push(("alloc.gpushare.io/count", gpus.len().to_string()));
        told.count = Some(gpus.len());
    }
    if random.chance(50) {
        pairs.push(("alloc.gpushare.io/cores", cores.to_string()));
        told.cores = Some(cores);
    }
    Statement { annotations: annotated(GRANTED, &pairs).annotations, rank: GRANTED, ..told }
}

fn own_of_pod(random: &mut Random) -> Statement {
    let said = alloc(random);
    let rename = |(key, value): (String, String)| (key.replace("alloc.gpushare.io", "gpushare.io"), value);
    Statement { rank: POD, annotations: said.annotations.into_iter().map(rename).collect(), ..said }
}

fn vcuda(random: &mut Random) -> Statement {
    let gpu = random.below(4);
    let (cores, blocks) = (10 + random.below(80), 1 + random.next() % 40);
    let pairs = [
        ("tencent.com/vcuda-core", cores.to_string()),
        ("tencent.com/vcuda-memory", (blocks << 28).to_string()),
        ("tencent.com/vcuda-device", format!("/dev/nvidia{}", MINORS[gpu])),
    ];
    Statement {
        gpus: Some(vec![gpu]),
        count: Some(1),
        memory: Some(vec![blocks << 8; 4]),
        cores: u8::try_from(cores).ok(),
        ..annotated(GRANTED, &pairs)
    }
}

fn cdi_annotation(random: &mut Random) -> Statement {
    let gpus = several(random);
    let names: Vec<String> =
        gpus.iter().map(|gpu| format!("k8s.device-plugin.nvidia.com/gpu={}", UUIDS[*gpu])).collect();
    let key = *random.of(&["cdi.k8s.io/nvidia-device-plugin_7", "nvidia.cdi.k8s.io/nvidia-device-plugin_7"]);
    Statement { gpus: Some(gpus), ..annotated(GRANTED, &[(key, names.join(","))]) }
}

fn nodes(random: &mut Random) -> Statement {
    let gpus = several(random);
    let nodes = gpus.iter().map(|gpu| MINORS[*gpu]).collect();
    Statement { rank: HANDED_OVER, nodes, gpus: Some(gpus), ..Statement::default() }
}

fn mounts(random: &mut Random) -> Statement {
    let gpus = several(random);
    Statement { rank: HANDED_OVER, mounts: gpus.clone(), gpus: Some(gpus), ..Statement::default() }
}

fn hami(random: &mut Random) -> Statement {
    let containers = 1 + random.below(2);
    let mut note = String::new();
    let (mut union, mut memory, mut cores) = (Vec::new(), vec![0; 4], 0);
    for _ in 0..containers {
        for gpu in several(random) {
            let (mebibytes, percent) = (1000 * (1 + random.next() % 8), 10 + random.below(80));
            note += &format!("{},NVIDIA,{mebibytes},{percent}:", UUIDS[gpu]);
            memory[gpu] = mebibytes.max(memory[gpu]);
            cores = percent.max(cores);
            union.push(gpu);
        }
        note += ";";
    }
    Statement {
        gpus: Some(union),
        memory: Some(memory),
        cores: u8::try_from(cores).ok(),
        ..annotated(POD, &[("hami.io/vgpu-devices-allocated", note)])
    }
}

fn koordinator(random: &mut Random) -> Statement {
    let gpus = several(random);
    let (mebibytes, percent) = (1024 * (1 + random.next() % 8), 10 + random.below(80));
    let device = |gpu: &usize| {
        json!({"minor": MINORS[*gpu], "resources": {
            "koordinator.sh/gpu-memory": format!("{mebibytes}Mi"),
            "koordinator.sh/gpu-core": percent.to_string(),
        }})
    };
    let note = json!({"gpu": gpus.iter().map(device).collect::<Vec<_>>()}).to_string();
    Statement {
        gpus: Some(gpus),
        memory: Some(vec![mebibytes; 4]),
        cores: u8::try_from(percent).ok(),
        ..annotated(POD, &[("scheduling.koordinator.sh/device-allocated", note)])
    }
}

fn kai(random: &mut Random) -> Statement {
    let mebibytes = 1000 + random.next() % 9000;
    let count = 1 + random.below(2);
    let pairs = [("gpu-memory", mebibytes.to_string()), ("gpu-fraction-num-devices", count.to_string())];
    let named = ("gpu-fraction-container-name", "trainer".to_owned());
    let pairs: Vec<(&str, String)> = pairs.into_iter().chain([named]).collect();
    Statement { count: Some(count), memory: Some(vec![mebibytes; 4]), ..annotated(POD, &pairs) }
}

fn vgpu_manager(random: &mut Random) -> Statement {
    let gpus = several(random);
    let (mebibytes, percent) = (1000 * (1 + random.next() % 8), 10 + random.below(80));
    let entry: Vec<String> =
        gpus.iter().map(|gpu| format!("{gpu}_{}_{percent}_{mebibytes}", UUIDS[*gpu])).collect();
    Statement {
        gpus: Some(gpus),
        memory: Some(vec![mebibytes; 4]),
        // Variables that may grant say how much idle time the container may use.
        cores: None,
        ..annotated(POD, &[("nvidia.com/real-allocated", format!("trainer[{}]", entry.join(",")))])
    }
}

fn nvfractions(random: &mut Random) -> Statement {
    let gpu = random.below(4);
    let mebibytes = 1024 * (1 + random.next() % 8);
    let pairs = [
        ("nvidia.com/container.trainer.gpu-memory.limit", format!("{mebibytes}Mi")),
        ("nvidia.com/container.trainer.gpus.devices", UUIDS[gpu].to_owned()),
    ];
    Statement { gpus: Some(vec![gpu]), memory: Some(vec![mebibytes; 4]), ..annotated(POD, &pairs) }
}

pub type Source = fn(&mut Random) -> Statement;
pub const SOURCES: [Source; 11] = [
    alloc,
    own_of_pod,
    vcuda,
    cdi_annotation,
    nodes,
    mounts,
    hami,
    koordinator,
    kai,
    vgpu_manager,
    nvfractions,
];
