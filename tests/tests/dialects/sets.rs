//! The sets of every dialect, `tests/dialects/*.toml`: what a system puts into a bundle, and what must come
//! of it.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use gpushare_tests::probe::UNUSABLE;
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// One dialect's file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sets {
    /// Name of the dialect in settings and listings.
    pub dialect: String,
    /// The systems that write it, in a few words for the conformance table.
    pub writers: String,
    /// The dialect's sets.
    pub set: Vec<Set>,
}

/// One set. Texts may say GPU-a to GPU-d for the UUIDs of the node's four GPUs.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Set {
    /// What the set is about, as a sentence.
    pub case: String,
    /// Variables as `NAME=value`, in order.
    pub env: Vec<String>,
    /// Annotations, by key.
    pub annotations: BTreeMap<String, String>,
    /// Mounts as `SOURCE TARGET`. A source that ends in `/` is a folder; one that begins with [`DRIVER`] is
    /// of the node's driver.
    pub mounts: Vec<String>,
    /// Device nodes as `PATH MAJOR:MINOR`.
    pub nodes: Vec<String>,
    /// GPUs whose CDI devices the engine has put in, as NVIDIA's parts describe them.
    pub cdi: Vec<String>,
    /// The engine whose marks the bundle has: `cri` (containerd), `cri-o`, `podman`; else docker.
    pub engine: String,
    /// Settings that differ from the shipped ones, as TOML.
    pub settings: String,
    /// Memory of each GPU in MiB, where it is not 15360.
    pub total: Option<u64>,
    /// What is granted, in the container's order: `GPU-a 3000 MiB 30%`, perhaps with `burst 60%` or
    /// `exclusive`; `rest` is all that is left on the GPU.
    pub grants: Vec<String>,
    /// The dialects' variables as they stand in the container afterwards, by name. They are not checked where
    /// this is empty.
    pub stands: Vec<String>,
    /// A part of the refusal's text.
    pub refused: String,
    /// The bundle is not a request.
    pub passes: bool,
    /// The dialects that speak, where that is not the file's dialect alone.
    pub spoken: Option<Vec<String>>,
    /// Parts of what the node says about its decisions.
    pub notes: Vec<String>,
    /// A part of the refusal on a strict node whose ceilings let every channel grant the whole GPU. Where
    /// this is empty, the outcome there is the same.
    pub strictly: String,
}

/// Begins the source of a mount of the node's driver. After it comes a library's name, or nothing for a
/// folder with all of the driver, or a folder within that one.
pub const DRIVER: &str = "driver:";

/// Every dialect's file, by name.
pub fn all() -> Vec<Sets> {
    files("dialects")
}

/// Whole bundles of programs that hand GPUs over, one file for each program. They show what else stands in
/// such bundles.
pub fn handed() -> Vec<Sets> {
    files("dialects/handed")
}

/// Bundles in which a fault was once found, whatever system wrote them.
pub fn found() -> Vec<Sets> {
    files("dialects/found")
}

fn files(folder: &str) -> Vec<Sets> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let mut paths: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.is_file());
    paths.sort();
    let read = |path: &std::path::PathBuf| {
        let text = with_uuids(&fs::read_to_string(path).unwrap());
        toml::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    paths.iter().map(read).collect()
}

/// The UUIDs that the sets call GPU-a to GPU-d.
pub const UUIDS: [&str; 4] = [
    "GPU-a0000000-0000-4000-8000-000000000001",
    "GPU-b0000000-0000-4000-8000-000000000002",
    "GPU-c0000000-0000-4000-8000-000000000003",
    "GPU-d0000000-0000-4000-8000-000000000004",
];

/// The minor number N in `/dev/nvidiaN` of each GPU. It is never the GPU's index, so that a mistake between
/// the two shows.
pub const MINORS: [u32; 4] = [1, 0, 3, 2];

fn with_uuids(text: &str) -> String {
    let mut text = text.to_owned();
    for (name, uuid) in ["GPU-a", "GPU-b", "GPU-c", "GPU-d"].iter().zip(UUIDS) {
        let mut parts = text.split(name);
        let mut whole = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            let longer = part.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '-');
            whole += if longer { name } else { uuid };
            whole += part;
        }
        text = whole;
    }
    text
}

/// What a CUDA client inside sees, by its report: UUID and memory of each GPU. Sorted, since CUDA and NVML
/// count by PCI address.
pub fn seen(text: &str) -> Vec<String> {
    let report: Value = serde_json::from_str(text.trim()).unwrap_or_else(|error| panic!("{error}: {text}"));
    let list = |name: &str| report[name].as_array().cloned().unwrap_or_default();
    // Of whole GPUs NVML shows more than CUDA, and CUDA more than can be allocated.
    let is_whole = report["nvml_total"].as_u64() > report["device_total"].as_u64();
    let more = if is_whole { UNUSABLE } else { 0 };
    let totals = list("device_totals").into_iter().map(|total| (total.as_u64().unwrap() - more) >> 20);
    let line = |(uuid, total): (&Value, u64)| format!("{} {total} MiB", uuid.as_str().unwrap());
    sorted(list("uuids").iter().zip(totals).map(line))
}

fn sorted(lines: impl Iterator<Item = String>) -> Vec<String> {
    let mut lines: Vec<String> = lines.collect();
    lines.sort();
    lines
}

/// Prefixes of annotations that the shipped handler does not pass, or on which containerd acts itself.
const UNPASSED: [&str; 3] = ["granted.gpushare.io/", "cdi.k8s.io/", "nvidia.cdi.k8s.io/"];

impl Set {
    /// Whether the set is run through containerd's CRI. It then speaks by annotations or is a pod's, and it
    /// has shipped settings, usual GPUs, and nothing that a pod cannot say.
    pub fn is_pods(&self) -> bool {
        let usual = self.settings.is_empty()
            && self.total.is_none()
            && self.mounts.is_empty()
            && self.cdi.is_empty()
            && self.nodes.is_empty();
        let plain = self.env.iter().all(|entry| entry.contains('='));
        let passed =
            !self.annotations.keys().any(|key| UNPASSED.iter().any(|prefix| key.starts_with(prefix)));
        let pods = self.engine == "cri" || self.engine.is_empty() && !self.annotations.is_empty();
        usual && plain && passed && pods
    }

    /// What [`seen`] must return. `rest` and `exclusive` are the whole GPU where nobody else uses it.
    pub fn visible(&self) -> Vec<String> {
        let total = self.total.unwrap_or(15360).to_string();
        let line = |grant: &String| {
            let mut words = grant.split(' ');
            let (gpu, memory) = (words.next().unwrap(), words.next().unwrap());
            let memory = if matches!(memory, "rest" | "exclusive") { total.as_str() } else { memory };
            format!("{gpu} {memory} MiB")
        };
        sorted(self.grants.iter().map(line))
    }

    /// Whether the bundle has device nodes of GPUs before gpushare reads it.
    pub fn was_handed_gpus(&self) -> bool {
        !self.nodes.is_empty() || !self.cdi.is_empty()
    }

    /// The device nodes of the granted GPUs, by name.
    pub fn granted_nodes(&self) -> Vec<String> {
        let minor = |grant: &String| {
            let gpu = grant.split(' ').next().unwrap();
            MINORS[UUIDS.iter().position(|uuid| *uuid == gpu).unwrap()]
        };
        sorted(self.grants.iter().map(|grant| format!("/dev/nvidia{}", minor(grant))))
    }

    /// The set as a bundle's config.json, as far as a request depends on it.
    pub fn bundle(&self) -> Value {
        let mut annotations: Map<String, Value> =
            self.annotations.iter().map(|(key, value)| (key.clone(), value.clone().into())).collect();
        let mark = |annotations: &mut Map<String, Value>, marks: &[(&str, &str)]| {
            annotations.extend(marks.iter().map(|(key, value)| ((*key).to_owned(), Value::from(*value))));
        };
        match self.engine.as_str() {
            "cri" => mark(
                &mut annotations,
                &[
                    ("io.kubernetes.cri.container-type", "container"),
                    ("io.kubernetes.cri.container-name", "trainer"),
                    ("io.kubernetes.cri.sandbox-uid", "0b5c"),
                ],
            ),
            "cri-o" => mark(
                &mut annotations,
                &[
                    ("io.kubernetes.cri-o.ContainerType", "container"),
                    ("io.kubernetes.container.name", "trainer"),
                ],
            ),
            "podman" => mark(&mut annotations, &[("io.container.manager", "libpod")]),
            "" => {}
            other => panic!("{}: no engine {other}", self.case),
        }
        let edits = Edits::of(&self.cdi);
        let mounts = self.mounts.iter().chain(&edits.mounts).map(|mount| {
            let (source, target) = mount.split_once(' ').expect("SOURCE TARGET");
            let source = if source.starts_with(DRIVER) { source } else { source.trim_end_matches('/') };
            json!({"source": source, "destination": target, "type": "bind"})
        });
        let nodes = self.nodes.iter().chain(&edits.nodes).map(|node| {
            let (path, number) = node.split_once(' ').expect("PATH MAJOR:MINOR");
            let (major, minor) = number.split_once(':').expect("MAJOR:MINOR");
            let number = |text: &str| text.parse::<i64>().expect("a number");
            json!({"path": path, "type": "c", "major": number(major), "minor": number(minor)})
        });
        let env: Vec<&String> = self.env.iter().chain(&edits.env).collect();
        json!({
            "annotations": annotations,
            "process": {"env": env},
            "mounts": mounts.collect::<Vec<_>>(),
            "hooks": {"createContainer": edits.hooks},
            "linux": {"devices": nodes.collect::<Vec<_>>()},
        })
    }
}

/// What NVIDIA's CDI devices become once an engine has applied them: the container's edits, and each GPU's.
#[derive(Default)]
struct Edits {
    env: Vec<String>,
    nodes: Vec<String>,
    mounts: Vec<String>,
    hooks: Vec<Value>,
}

impl Edits {
    fn of(gpus: &[String]) -> Self {
        if gpus.is_empty() {
            return Self::default();
        }
        let owned = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let minor =
            |gpu: &String| MINORS[UUIDS.iter().position(|uuid| uuid == gpu).expect("a GPU of the sets")];
        let mut nodes = owned(&[
            "/dev/nvidia-modeset 195:254",
            "/dev/nvidia-uvm-tools 511:1",
            "/dev/nvidia-uvm 511:0",
            "/dev/nvidiactl 195:255",
        ]);
        nodes.extend(gpus.iter().map(minor).map(|minor| format!("/dev/nvidia{minor} 195:{minor}")));
        Self {
            env: owned(&["NVIDIA_VISIBLE_DEVICES=void", "NVIDIA_CTK_LIBCUDA_DIR=/usr/lib/x86_64-linux-gnu"]),
            nodes,
            mounts: owned(&[
                "driver:libcuda.so.1 /usr/lib/x86_64-linux-gnu/libcuda.so.535.309.01",
                "driver:libnvidia-ml.so.1 /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.535.309.01",
            ]),
            hooks: HOOKS.iter().map(|words| hook(words)).collect(),
        }
    }
}

/// The hooks of the container's edits. Their program does not exist, so a bundle that keeps one does not
/// start.
const HOOKS: [&[&str]; 4] = [
    &["create-symlinks", "--link", "libcuda.so.535.309.01::/usr/lib/x86_64-linux-gnu/libcuda.so.1"],
    &["enable-cuda-compat", "--host-driver-version=535.309.01"],
    &["update-ldcache", "--folder", "/usr/lib/x86_64-linux-gnu"],
    &["disable-device-node-modification"],
];

fn hook(words: &[&str]) -> Value {
    let args = [&["nvidia-cdi-hook"], words].concat();
    json!({"path": "/usr/bin/nvidia-cdi-hook", "args": args, "env": ["NVIDIA_CTK_DEBUG=false"]})
}
