//! How far each source is trusted: the table of `docs/trust.md` is what the code does with each channel.

use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

use gpushare_inventory::DeviceMemory;
use gpushare_request::{Container, Devices, MemoryRequest, Policy, Request, RequestError, read};

use super::golden::{gpus, granted};
use super::sets::{Set, UUIDS};

/// A place in which a source can state a request. `put` states 2 GiB there, or GPU-a.
struct Channel {
    place: &'static str,
    writers: &'static str,
    put: fn(&mut Set),
    /// Whether the settings say that CRI-O is the engine.
    crio: bool,
}

const OWN: &str = "alloc.gpushare.io/memory";

/// The channels, from the most trusted to the least.
const CHANNELS: [Channel; 6] = [
    Channel {
        place: "device nodes, driver files and mounts that CDI or a device plugin put in",
        writers: "the plugin through kubelet; with docker, podman and ctr the engine's caller",
        put: |set| {
            set.engine = "cri".into();
            set.nodes.push("/dev/nvidia1 195:1".into());
        },
        crio: false,
    },
    Channel {
        place: "annotations of `request.trusted_annotations`, under containerd and docker",
        writers: "device plugins (containerd's `container_annotations`); the engine's caller",
        put: |set| {
            set.engine = "cri".into();
            set.annotations.insert(OWN.into(), "2GiB".into());
        },
        crio: false,
    },
    Channel {
        place: "the same under CRI-O, with `request.crio`, where it lists them as the container's own",
        writers: "device plugins",
        put: |set| {
            set.engine = "cri-o".into();
            set.annotations.insert(OWN.into(), "2GiB".into());
            let own = format!(r#"{{"{OWN}":"2GiB"}}"#);
            set.annotations.insert("io.kubernetes.cri-o.Annotations".into(), own);
        },
        crio: true,
    },
    Channel {
        place: "every other annotation",
        writers: "schedulers, and the pod's author",
        put: |set| {
            set.engine = "cri".into();
            set.annotations.insert("gpushare.io/trainer.memory".into(), "2GiB".into());
        },
        crio: false,
    },
    Channel {
        place: "variables, `NVIDIA_VISIBLE_DEVICES` among them",
        writers: "plugins, pods' authors and images' authors, in one list",
        put: |set| set.env.push("GPUSHARE_MEMORY=2GiB".into()),
        crio: false,
    },
    Channel {
        place: "every annotation under podman",
        writers: "the caller, and the image's author, whose annotations podman passes",
        put: |set| {
            set.engine = "podman".into();
            set.annotations.insert(OWN.into(), "2GiB".into());
        },
        crio: false,
    },
];

/// Another source, which asks for more than any channel above states.
type More = fn(&mut Set);

const VARIABLE: More = |set| {
    set.env.extend(["CUDA_DEVICE_MEMORY_LIMIT=4g".to_owned(), "NVIDIA_VISIBLE_DEVICES=0,1".to_owned()]);
};
const POD: More = |set| {
    set.annotations.insert("gpushare.io/memory".into(), "4GiB".into());
    set.annotations.insert("gpushare.io/devices".into(), UUIDS[1].into());
};

impl Channel {
    fn asked(&self, more: Option<More>, policy: &Policy) -> Result<Option<Request>, RequestError> {
        let mut set = Set::default();
        (self.put)(&mut set);
        if let Some(more) = more {
            more(&mut set);
        }
        let policy = Policy { crio: self.crio, ..policy.clone() };
        read(&Container::from_json(&set.bundle()), &policy, &gpus(15360))
    }

    /// What the channel grants by itself on a strict node.
    fn alone(&self) -> &'static str {
        let ask = Some(MemoryRequest::Bytes(DeviceMemory::from_bytes(1 << 30)));
        let strict = Policy { strict: true, ..Policy::default() };
        let (mut pod, mut env) = (strict.clone(), strict.clone());
        (pod.ceilings.pod, env.ceilings.env) = (ask, ask);
        let nothing = |policy| matches!(self.asked(None, policy), Err(RequestError::Untrusted { .. }));
        let held = |policy| matches!(self.asked(None, policy), Err(RequestError::AboveCeiling { .. }));
        match () {
            () if matches!(self.asked(None, &strict), Ok(Some(_))) => "what it says",
            () if nothing(&strict) && held(&pod) && nothing(&env) => {
                "at most `request.pod_ceiling`, else nothing"
            }
            () if nothing(&strict) && held(&env) && nothing(&pod) => {
                "at most `request.env_ceiling`, else nothing"
            }
            () => "something else",
        }
    }

    /// What becomes of the channel's request beside another source that asks for more.
    fn beside(&self, more: More) -> &'static str {
        let alone = self.asked(None, &Policy::default()).unwrap().unwrap();
        let strict = Policy { strict: true, ..Policy::default() };
        let kept = |outcome: Result<Option<Request>, RequestError>| match outcome {
            Err(_) => "refused",
            Ok(Some(request)) if is_within(&request, &alone) => "cut",
            Ok(_) => "MORE",
        };
        match [&Policy::default(), &strict].map(|policy| kept(self.asked(Some(more), policy))) {
            ["refused", "refused"] => "refused",
            ["cut", "refused"] => "cut; refused on a strict node",
            ["cut", "cut"] => "cut",
            _ => "MORE",
        }
    }
}

/// Whether `request` asks for no more memory than `bound`, and for no other GPUs where `bound` names some.
fn is_within(request: &Request, bound: &Request) -> bool {
    let gpus = match &bound.devices {
        Devices::Any(_) | Devices::Among(..) => true,
        _ => granted(request).iter().zip(granted(bound)).all(|(a, b)| a[..40] == b[..40]),
    };
    gpus && (bound.memory == MemoryRequest::Rest || request.memory == bound.memory)
}

fn table() -> String {
    let mut table = "| a word that stands in | which can be written by | grants on a strict node | a variable that says more than it is | a \
                     pod's annotation of ours that says more is |\n|---|---|---|---|---|\n"
        .to_owned();
    for channel in &CHANNELS {
        let Channel { place, writers, .. } = channel;
        let cells = [*place, *writers, channel.alone(), channel.beside(VARIABLE), channel.beside(POD)];
        let _ = writeln!(table, "| {} |", cells.join(" | "));
    }
    table
}

#[test]
fn the_page_of_trust_is_what_comes_of_each_channel() {
    const BEGIN: &str =
        "<!-- Written by GPUSHARE_UPDATE_DOCS=1 cargo test -p gpushare-tests --test dialects -->\n";
    const END: &str = "<!-- Until here. -->\n";
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/trust.md");
    let text = fs::read_to_string(&path).unwrap();
    let (head, rest) = text.split_once(BEGIN).expect("the page has its mark");
    let (found, tail) = rest.split_once(END).expect("the page has its second mark");
    let wanted = table();
    if env::var_os("GPUSHARE_UPDATE_DOCS").is_some() {
        fs::write(&path, format!("{head}{BEGIN}{wanted}{END}{tail}")).unwrap();
        return;
    }
    assert_eq!(
        found, wanted,
        "docs/trust.md differs; if the code is as it should be: GPUSHARE_UPDATE_DOCS=1"
    );
}
