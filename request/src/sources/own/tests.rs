//! Tests of gpushare's own keys, read together with lists of GPUs and under the node's settings.

mod modes;

use std::collections::BTreeMap;

use gpushare_inventory::DeviceMemory;

use gpushare_claims::{
    Ceilings, ComputePolicy, Container, Cores, DeviceSelector, Devices, MemoryRequest, Mode, NvidiaPolicy,
    Policy, Request, RequestError, Scope, four,
};

fn container(annotations: &[(&str, &str)], env: &[&str]) -> Container {
    let annotations: BTreeMap<_, _> =
        annotations.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
    Container::new(annotations, env.iter().map(|entry| entry.to_string()).collect())
}

fn read(annotations: &[(&str, &str)], env: &[&str]) -> Result<Option<Request>, RequestError> {
    crate::read::read(&container(annotations, env), &Policy::default(), &four())
}

fn strict(annotations: &[(&str, &str)], env: &[&str]) -> Result<Option<Request>, RequestError> {
    crate::read::read(&container(annotations, env), &Policy { strict: true, ..Policy::default() }, &four())
}

const GIB: u64 = 1 << 30;

fn gib(count: u64) -> MemoryRequest {
    MemoryRequest::Bytes(DeviceMemory::from_bytes(count * GIB))
}

#[test]
fn no_key_is_no_request() {
    for env in
        [&[][..], &["PATH=/bin", "NVIDIA_DRIVER_CAPABILITIES=nonsense"], &["NVIDIA_VISIBLE_DEVICES=void"]]
    {
        assert_eq!(read(&[("io.x/y", "z")], env), Ok(None), "{env:?}");
    }
    assert_eq!(read(&[], &["NVIDIA_VISIBLE_DEVICES=none,0"]), Ok(None));
    assert_eq!(read(&[], &["GPUSHARE_CONFIG=/etc/x", "GPUSHARE_MEMORY"]), Ok(None));
}

#[test]
fn every_key_of_the_own_dialect_is_read_from_both_channels() {
    let by_env = read(
        &[],
        &[
            "GPUSHARE_MEMORY=4GiB",
            "GPUSHARE_CORES=30%",
            "GPUSHARE_DEVICES=1",
            "GPUSHARE_MODEL=H100*",
            "GPUSHARE_MODE=share",
            "GPUSHARE_COMPUTE_POLICY=burst",
            "GPUSHARE_CAPABILITIES=compute",
            "GPUSHARE_PRIORITY=9",
            "GPUSHARE_SUPERVISOR=required",
        ],
    );
    let by_annotation = read(
        &[
            ("gpushare.io/memory", "4GiB"),
            ("gpushare.io/cores", "30%"),
            ("gpushare.io/devices", "1"),
            ("gpushare.io/model", "H100*"),
            ("gpushare.io/mode", "share"),
            ("gpushare.io/compute-policy", "burst"),
            ("gpushare.io/capabilities", "compute"),
            ("gpushare.io/priority", "9"),
            ("gpushare.io/supervisor", "required"),
        ],
        &[],
    );
    let request = by_env.unwrap().unwrap();
    assert!(request.needs_supervisor);
    let told = read(&[], &["GPUSHARE_SUPERVISOR=off"]).unwrap_err().to_string();
    assert!(told.contains("GPUSHARE_SUPERVISOR") && told.contains("the only one is required"), "{told}");
    assert_eq!(request.memory, gib(4));
    assert_eq!(request.devices, Devices::These(vec![DeviceSelector::Uuid(four()[1].uuid)]));
    assert_eq!(request.capabilities.to_string(), "compute");
    assert_eq!(by_annotation.unwrap().unwrap(), request);
}

#[test]
fn an_unknown_key_under_our_prefix_is_refused() {
    for (annotations, env) in [
        (&[("gpushare.io/mem", "4GiB")][..], &[][..]),
        (&[], &["GPUSHARE_MEM=4GiB"][..]),
        (&[], &["GPUSHARE_memory=4GiB"]),
        (&[], &["GPUSHARE_=4GiB"]),
    ] {
        let error = read(annotations, env).unwrap_err();
        assert!(matches!(error, RequestError::UnknownKey { .. }), "{error}");
    }
}

#[test]
fn an_unknown_key_is_told_the_one_that_was_probably_meant() {
    for (key, meant) in [
        ("GPUSHARE_MEMROY", Some("GPUSHARE_MEMORY")),
        ("GPUSHARE_memory", Some("GPUSHARE_MEMORY")),
        ("GPUSHARE_MEM", Some("GPUSHARE_MEMORY")),
        ("GPUSHARE_CORE", Some("GPUSHARE_CORES")),
        ("GPUSHARE_COMPUTE-POLICY", Some("GPUSHARE_COMPUTE_POLICY")),
        ("GPUSHARE_COMPUTEPOLICY", Some("GPUSHARE_COMPUTE_POLICY")),
        ("GPUSHARE_", None),
        ("GPUSHARE_MO", None),
        ("GPUSHARE_TOKEN", None),
    ] {
        let told = read(&[], &[&format!("{key}=4GiB")]).unwrap_err().to_string();
        let want = meant.map(|meant| format!("did you mean {meant}?"));
        assert_eq!(want.as_ref().is_some_and(|want| told.contains(want)), meant.is_some(), "{told}");
        assert!(meant.is_some() || !told.contains("did you mean"), "{told}");
    }
    for key in ["gpushare.io/Memory", "gpushare.io/web.memroy", "alloc.gpushare.io/memori"] {
        let pod = [
            ("io.kubernetes.cri.container-type", "container"),
            ("io.kubernetes.cri.container-name", "web"),
            (key, "4GiB"),
        ];
        let told = read(&pod, &[]).unwrap_err().to_string();
        let (before, _) = key.rsplit_once(['/', '.']).unwrap();
        assert!(told.contains(&format!("did you mean {before}")) && told.contains("memory?"), "{told}");
    }
    let told = read(&[], &["GPUSHARE_MEMORY=4gib"]).unwrap_err().to_string();
    assert!(told.contains("case counts"), "{told}");
}

#[test]
fn differing_duplicates_are_a_conflict_and_equal_ones_are_not() {
    let error = read(&[], &["GPUSHARE_MEMORY=4GiB", "GPUSHARE_MEMORY=8GiB"]).unwrap_err();
    assert_eq!(
        error.to_string(),
        r#"GPUSHARE_MEMORY="4GiB" and GPUSHARE_MEMORY="8GiB" contradict each other: remove one of them"#
    );
    assert!(read(&[], &["GPUSHARE_MEMORY=4GiB", "GPUSHARE_MEMORY=4GiB"]).is_ok());
    for (key, value, same) in [
        ("GPUSHARE_MEMORY", "4Gi", true),
        ("GPUSHARE_MEMORY", "4096MiB", true),
        ("GPUSHARE_MEMORY", "4g", true),
        ("GPUSHARE_MEMORY", "4G", true), // less: every channel may lower
        ("GPUSHARE_MEMORY", "25%", true),
        ("GPUSHARE_MEMORY", "5G", false),
        ("GPUSHARE_MEMORY", "30%", false),
        ("GPUSHARE_CORES", "30", true),
        ("GPUSHARE_CORES", "31", false),
    ] {
        let other = [("gpushare.io/memory", "4GiB"), ("gpushare.io/cores", "30%")];
        assert_eq!(read(&other, &[&format!("{key}={value}")]).is_ok(), same, "{key}={value}");
    }
    assert!(read(&[("gpushare.io/memory", "4GiB")], &["GPUSHARE_MEMORY=8GiB"]).is_err());
    assert!(read(&[], &["GPUSHARE_COUNT=2", "GPUSHARE_DEVICES=0"]).is_err());
    assert!(read(&[], &["GPUSHARE_COUNT=2", "GPUSHARE_DEVICES=0,1"]).is_ok());
    assert!(read(&[], &["GPUSHARE_MODE=exclusive", "GPUSHARE_MEMORY=4GiB"]).is_err());
    assert!(read(&[], &["GPUSHARE_MODE=exclusive", "GPUSHARE_CORES=30"]).is_err());
}

#[test]
fn a_malformed_value_names_key_value_and_the_forms() {
    let text = read(&[], &["GPUSHARE_MEMORY=4096"]).unwrap_err().to_string();
    assert_eq!(
        text,
        r#"GPUSHARE_MEMORY="4096": a size needs a unit: write 4GiB, 4Gi, 4096MiB, 4G (10^9 bytes) or 25%"#
    );
    let long = format!("GPUSHARE_MEMORY={}\n\x1b[31m", "9".repeat(1 << 20));
    let text = read(&[], &[&long]).unwrap_err().to_string();
    assert!(text.len() < 400 && !text.contains('\n') && !text.contains('\x1b'), "{text}");
    let name = "x".repeat(1 << 20);
    let pod = [
        ("io.kubernetes.cri.container-type", "container"),
        ("io.kubernetes.cri.container-name", name.as_str()),
    ];
    for (key, more) in [("memory", "4096"), ("memory", "4GiB"), ("priority", "11")] {
        let key = format!("gpushare.io/{name}.{key}");
        let text = read(&[pod[0], pod[1], (&key, more)], &["GPUSHARE_MEMORY=8GiB"]).unwrap_err().to_string();
        assert!(text.len() < 400, "{} bytes", text.len());
    }
}

#[test]
fn a_pods_annotation_is_for_all_its_containers_unless_it_names_one() {
    let cri = |name, extra: &[(&'static str, &'static str)]| {
        let mut all = vec![
            ("io.kubernetes.cri.container-type", "container"),
            ("io.kubernetes.cri.container-name", name),
            ("gpushare.io/memory", "8GiB"),
        ];
        all.extend_from_slice(extra);
        read(&all, &[]).unwrap().map(|request| request.memory)
    };
    assert_eq!(cri("train", &[]), Some(gib(8)));
    assert_eq!(cri("train", &[("gpushare.io/train.memory", "2GiB")]), Some(gib(2)));
    assert_eq!(cri("sidecar", &[("gpushare.io/train.memory", "2GiB")]), Some(gib(8)));
    assert_eq!(cri("sidecar", &[("gpushare.io/containers", "train, other")]), None);
    assert_eq!(cri("train", &[("gpushare.io/containers", "train, other")]), Some(gib(8)));
    let sandbox = [("io.kubernetes.cri.container-type", "sandbox"), ("gpushare.io/memory", "nonsense")];
    assert_eq!(read(&sandbox, &[]), Ok(None));
}

#[test]
fn a_pod_of_cri_o_cannot_pass_for_another_container_or_for_a_sandbox() {
    let crio = [
        ("io.kubernetes.cri-o.ContainerType", "container"),
        ("io.kubernetes.container.name", "web"),
        ("alloc.gpushare.io/memory", "8GiB"),
        ("alloc.gpushare.io/web.memory", "8GiB"),
        (
            "io.kubernetes.cri-o.Annotations",
            r#"{"alloc.gpushare.io/memory":"8GiB","alloc.gpushare.io/web.memory":"8GiB"}"#,
        ),
    ];
    let policy = Policy { strict: true, crio: true, ..Policy::default() };
    for pods in [("io.kubernetes.cri.container-name", "other"), ("x.org/y", "z")] {
        let all = [&crio[..], &[pods, ("gpushare.io/web.memory", "1GiB")]].concat();
        let request = crate::read::read(&container(&all, &[]), &policy, &[]).unwrap();
        assert_eq!(request.map(|request| request.memory), Some(gib(1)), "{pods:?}");
        assert!(strict(&all, &[]).is_err(), "believed without the setting");
    }
    for (engine, mark) in
        [("cri-o.ContainerType", "cri.container-type"), ("cri.container-type", "cri-o.ContainerType")]
    {
        let keys = [engine, mark].map(|key| format!("io.kubernetes.{key}"));
        let marks = [(keys[0].as_str(), "container"), (keys[1].as_str(), "sandbox")];
        let told = read(&[&marks[..], &[("gpushare.io/memory", "1GiB")]].concat(), &[]);
        assert!(matches!(told, Err(RequestError::Conflict { .. })), "{told:?}");
        assert_eq!(read(&marks, &[]), Ok(None), "it asks for nothing");
    }
    let sandbox = [("io.kubernetes.cri-o.ContainerType", "sandbox"), ("gpushare.io/memory", "nonsense")];
    assert_eq!(read(&sandbox, &[]), Ok(None));
}

#[test]
fn nvidias_variables_fill_in_and_never_contradict_in_silence() {
    let devices = |env: &[&str]| read(&[], env).map(|request| request.unwrap().devices);
    let these = |list: &[usize]| {
        Ok(Devices::These(list.iter().map(|i| DeviceSelector::Uuid(four()[*i].uuid)).collect()))
    };
    assert_eq!(devices(&["GPUSHARE_MEMORY=4GiB", "NVIDIA_VISIBLE_DEVICES=all"]), Ok(Devices::Any(1)));
    assert_eq!(devices(&["GPUSHARE_MEMORY=4GiB", "NVIDIA_VISIBLE_DEVICES=1,2"]), these(&[1, 2]));
    assert_eq!(devices(&["GPUSHARE_DEVICES=1", "NVIDIA_VISIBLE_DEVICES=1"]), these(&[1]));
    assert!(devices(&["GPUSHARE_DEVICES=1", "NVIDIA_VISIBLE_DEVICES=2"]).is_err());
    assert!(devices(&["GPUSHARE_COUNT=1", "NVIDIA_VISIBLE_DEVICES=1,2"]).is_err());
    for nothing in ["void", "", "void,none", "none, void"] {
        let list = format!("NVIDIA_VISIBLE_DEVICES={nothing}");
        assert_eq!(devices(&["GPUSHARE_MEMORY=4GiB", &list]), Ok(Devices::Any(1)), "{nothing:?}");
    }
    for nothing in ["none", "0,none", "none,all"] {
        let list = format!("NVIDIA_VISIBLE_DEVICES={nothing}");
        let told = devices(&["GPUSHARE_MEMORY=4GiB", &list]).unwrap_err().to_string();
        assert!(told.contains("GPUSHARE_MEMORY") && told.contains("none"), "{told}");
    }
    // docker appends its own entry last. Under CRI two differing entries may be the plugin's and the pod's.
    let uuids = |list: &[usize]| {
        Ok(Devices::These(list.iter().map(|i| DeviceSelector::Uuid(four()[*i].uuid)).collect()))
    };
    let twice = ["NVIDIA_VISIBLE_DEVICES=3", "NVIDIA_VISIBLE_DEVICES=all"];
    assert_eq!(devices(&twice), uuids(&[0, 1, 2, 3]));
    let cri = [("io.kubernetes.cri.container-type", "container")];
    assert_eq!(read(&cri, &twice).map(|request| request.unwrap().devices), uuids(&[3]));
    let beside = ["GPUSHARE_MEMORY=4GiB", twice[0], twice[1]];
    assert_eq!(devices(&beside), Ok(Devices::Any(1)));
    assert_eq!(read(&cri, &beside).map(|request| request.unwrap().devices), uuids(&[3]));
    let error = read(&[], &["NVIDIA_VISIBLE_DEVICES=no-gpu-has-8MiB-to-run"]).unwrap_err();
    assert!(matches!(error, RequestError::Malformed { .. }), "{error}");
}

#[test]
fn a_plain_nvidia_request_follows_the_nodes_policy() {
    let container = container(&[], &["NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_DRIVER_CAPABILITIES=utility"]);
    let read = |nvidia, default_memory| {
        crate::read::read(&container, &Policy { nvidia, default_memory, ..Policy::default() }, &four())
    };
    assert_eq!(read(NvidiaPolicy::DefaultShare, None).unwrap().unwrap().memory, MemoryRequest::Rest);
    let share = read(NvidiaPolicy::DefaultShare, Some(gib(1))).unwrap().unwrap();
    assert_eq!((share.memory, share.capabilities.to_string().as_str()), (gib(1), "utility"));
    assert_eq!(read(NvidiaPolicy::Ignore, None), Ok(None));
    let foreign = super::tests::container(&[], &["NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=0"]);
    let ignore = Policy { nvidia: NvidiaPolicy::Ignore, ..Policy::default() };
    assert_eq!(
        crate::read::read(&foreign, &ignore, &[]),
        Ok(None),
        "a list that nobody acts on need not be understood"
    );
    assert_eq!(read(NvidiaPolicy::Refuse, None), Err(RequestError::NoShare));
}

#[test]
fn gpus_by_mounts_are_those_of_a_share_where_the_settings_have_them_read() {
    let json = serde_json::json!({
        "process": {"env": ["GPUSHARE_MEMORY=4GiB", "NVIDIA_VISIBLE_DEVICES=/var/run/nvidia-container-devices"]},
        "mounts": [{"destination": "/var/run/nvidia-container-devices/2", "source": "/dev/null"}],
    });
    let read = |volume_mounts| {
        let policy = Policy { volume_mounts, ..Policy::default() };
        crate::read::read(&Container::from_json(&json), &policy, &four())
            .map(|request| request.unwrap().devices)
    };
    assert_eq!(read(true), Ok(Devices::These(vec![DeviceSelector::Uuid(four()[2].uuid)])));
    let told = read(false).unwrap_err().to_string();
    assert!(told.contains("request.volume_mounts = true"), "{told}");
}

#[test]
fn a_node_that_gives_few_capabilities_refuses_only_what_was_chosen() {
    let few = Policy { capabilities: "compute".parse().ok(), ..Policy::default() };
    let capabilities = |env: &[&str]| {
        let read = crate::read::read(&container(&[], env), &few, &four());
        read.map(|request| request.unwrap().capabilities.to_string())
    };
    for env in [
        &["GPUSHARE_MEMORY=4GiB"][..],
        &["NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_DRIVER_CAPABILITIES=compute,graphics"],
        &["GPUSHARE_MEMORY=4GiB", "NVIDIA_DRIVER_CAPABILITIES=all"],
        &["GPUSHARE_MEMORY=4GiB", "GPUSHARE_CAPABILITIES=all"],
    ] {
        assert_eq!(capabilities(env).as_deref(), Ok("compute"), "{env:?}");
    }
    for env in [
        &["GPUSHARE_MEMORY=4GiB", "GPUSHARE_CAPABILITIES=compute,utility"][..],
        &["NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_DRIVER_CAPABILITIES=graphics"],
    ] {
        let told = capabilities(env).unwrap_err().to_string();
        assert!(told.contains("request.capabilities") && told.contains("GPUSHARE_CAPABILITIES"), "{told}");
    }
}

#[test]
fn under_strict_only_trusted_annotations_grant_and_others_only_lower() {
    let trusted = ("alloc.gpushare.io/memory", "8GiB");
    let memory =
        |request: Result<Option<Request>, RequestError>| request.map(|request| request.unwrap().memory);
    assert_eq!(memory(strict(&[trusted], &[])), Ok(gib(8)));
    assert_eq!(memory(strict(&[trusted], &["GPUSHARE_MEMORY=4GiB"])), Ok(gib(4)));
    assert!(matches!(strict(&[trusted], &["GPUSHARE_MEMORY=9GiB"]), Err(RequestError::Raised { .. })));
    assert_eq!(memory(strict(&[trusted], &["GPUSHARE_MEMORY=10%"])), Ok(MemoryRequest::Percent(10)));
    assert!(matches!(strict(&[trusted], &["GPUSHARE_MEMORY=60%"]), Err(RequestError::Raised { .. })));
    let limited = [trusted, ("alloc.gpushare.io/cores", "30")];
    for env in [
        "GPUSHARE_COUNT=4",
        "GPUSHARE_PRIORITY=9",
        "GPUSHARE_COMPUTE_POLICY=none",
        "GPUSHARE_CAPABILITIES=all",
        "GPUSHARE_MODE=exclusive",
        "GPUSHARE_MODE=time-slice",
    ] {
        let told = strict(&limited, &[env]);
        assert!(
            matches!(told, Err(RequestError::AboveDefault { .. } | RequestError::Raised { .. })),
            "{env}: {told:?}"
        );
    }
    assert!(matches!(strict(&limited, &["GPUSHARE_CORES=31"]), Err(RequestError::Raised { .. })));
    let wide =
        strict(&[trusted], &["NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_DRIVER_CAPABILITIES=all"]).unwrap().unwrap();
    let first = Devices::These(vec![DeviceSelector::Uuid(four()[0].uuid)]);
    assert_eq!((wide.capabilities.to_string().as_str(), wide.devices), ("compute,utility", first));
    let defaults = Policy {
        strict: true,
        default_memory: Some(gib(8)),
        default_cores: "50%".parse().ok(),
        ..Policy::default()
    };
    for (env, lowers) in [
        ("GPUSHARE_MEMORY=80GiB", false),
        ("GPUSHARE_MEMORY=4GiB", true),
        ("GPUSHARE_CORES=100", false),
        ("GPUSHARE_CORES=10", true),
    ] {
        let asked =
            crate::read::read(&container(&[("alloc.gpushare.io/count", "1")], &[env]), &defaults, &four());
        assert_eq!(asked.is_ok(), lowers, "{env}");
    }
    assert!(matches!(strict(&[], &["GPUSHARE_MEMORY=1GiB"]), Err(RequestError::Untrusted { .. })));
    assert!(matches!(strict(&[("gpushare.io/memory", "1GiB")], &[]), Err(RequestError::Untrusted { .. })));
    assert!(matches!(strict(&[], &["NVIDIA_VISIBLE_DEVICES=all"]), Err(RequestError::Untrusted { .. })));
}

#[test]
fn a_channel_with_a_ceiling_grants_up_to_it_and_the_others_only_lower() {
    let policy = |pod: &str, env: &str, strict| Policy {
        strict,
        ceilings: Ceilings { pod: pod.parse().ok(), env: env.parse().ok() },
        ..Policy::default()
    };
    let pod = |value| ("gpushare.io/memory", value);
    let cards = four();
    let read = |annotations: &[(&str, &str)], env: &[&str], policy: &Policy| {
        let asked = crate::read::read(&container(annotations, env), policy, &cards)?.unwrap();
        Ok(asked.on(cards[0].uuid).memory)
    };
    // The GPU has 15 GiB.
    for (annotations, env, ceilings, want) in [
        (&[][..], &["GPUSHARE_MEMORY=4GiB"][..], ("", "4GiB"), Some(gib(4))),
        (&[], &["GPUSHARE_MEMORY=5GiB"], ("", "4GiB"), None),
        (&[], &["GPUSHARE_MEMORY=6GiB"], ("", "50%"), Some(gib(6))),
        (&[], &["GPUSHARE_MEMORY=8GiB"], ("", "50%"), None),
        (&[], &["GPUSHARE_MEMORY=30%"], ("", "4GiB"), None),
        (&[], &["GPUSHARE_CORES=30"], ("", "4GiB"), Some(gib(4))),
        (&[], &["GPUSHARE_CORES=30"], ("", "100%"), Some(MemoryRequest::Rest)),
        (&[], &["GPUSHARE_MODE=exclusive"], ("", "99%"), None),
        (&[], &["GPUSHARE_MODE=time-slice"], ("", "99%"), None),
        (&[], &["GPUSHARE_MODE=time-slice", "GPUSHARE_MEMORY=2GiB"], ("", "100%"), None),
        (&[], &["GPUSHARE_MODE=time-slice"], ("", "100%"), Some(MemoryRequest::Rest)),
        (&[pod("4GiB")], &["GPUSHARE_MODE=time-slice"], ("4GiB", "100%"), None),
        (&[], &["GPUSHARE_MODE=exclusive"], ("", "100%"), Some("100%".parse().unwrap())),
        (&[], &["GPUSHARE_MEMORY=5GiB", "GPUSHARE_DEVICES=2"], ("", "4GiB"), None),
        (&[pod("4GiB")], &[], ("4GiB", ""), Some(gib(4))),
        (&[pod("4GiB")], &["GPUSHARE_MEMORY=2GiB"], ("4GiB", ""), Some(gib(2))),
        (&[pod("2GiB")], &["GPUSHARE_MEMORY=4GiB"], ("4GiB", "8GiB"), None),
        (&[("gpushare.io/cores", "30")], &["GPUSHARE_MEMORY=8GiB"], ("4GiB", ""), None),
        (&[pod("5GiB")], &[], ("4GiB", "8GiB"), None),
        // Only the variables may grant, but not more than the pod states.
        (&[pod("2GiB")], &["GPUSHARE_MEMORY=4GiB"], ("", "4GiB"), None),
        (&[pod("2GiB")], &["GPUSHARE_MEMORY=2GiB"], ("", "4GiB"), Some(gib(2))),
        (&[pod("4GiB")], &["GPUSHARE_MEMORY=2GiB"], ("", "4GiB"), Some(gib(2))),
        (&[pod("8GiB")], &["GPUSHARE_MEMORY=5GiB"], ("", "4GiB"), None),
    ] {
        let told = read(annotations, env, &policy(ceilings.0, ceilings.1, true));
        assert_eq!(told.as_ref().ok(), want.as_ref(), "{annotations:?} {env:?} {ceilings:?}: {told:?}");
    }
    let told = |env: &str, strict| {
        read(&[], &[env], &policy("", "4GiB", strict)).map_err(|error: RequestError| error.to_string())
    };
    for strict in [true, false] {
        let told = told("GPUSHARE_MEMORY=5GiB", strict).unwrap_err();
        assert!(told.contains("GPUSHARE_MEMORY=\"5GiB\" asks for more than 4 GiB"), "{told}");
        assert!(told.contains("change request.env_ceiling"), "{told}");
    }
    assert_eq!(told("GPUSHARE_CORES=5", false), Ok(gib(4)));
    let bounded = container(&[], &["GPUSHARE_CORES=5"]);
    let request = crate::read::read(&bounded, &policy("", "4GiB", false), &cards).unwrap().unwrap();
    assert_eq!(request.notes, ["no memory was asked for: 4 GiB counts (request.env_ceiling)"]);
    assert!(matches!(
        read(&[pod("1GiB")], &[], &policy("", "4GiB", true)),
        Err(RequestError::Untrusted { .. })
    ));
}

#[test]
fn where_variables_grant_nothing_an_images_list_makes_no_more_of_an_annotation() {
    let policy = Policy { ignore_env: true, ..Policy::default() };
    let devices = |list: &str| {
        let container =
            container(&[("gpushare.io/memory", "4GiB")], &[&format!("NVIDIA_VISIBLE_DEVICES={list}")]);
        crate::read::read(&container, &policy, &four()).unwrap().unwrap().devices
    };
    assert_eq!(devices("0,1,2,3"), Devices::Any(1));
    assert_eq!(devices("2"), Devices::These(vec![DeviceSelector::Uuid(four()[2].uuid)]));
}

#[test]
fn a_pods_other_key_lifts_no_ceiling_of_the_variables() {
    let ceilings = Ceilings { env: "4GiB".parse().ok(), ..Ceilings::default() };
    let policy = Policy { ceilings, ..Policy::default() };
    for key in ["gpushare.io/mode", "gpushare.io/priority"] {
        let value = if key.ends_with("mode") { "share" } else { "5" };
        let container = container(&[(key, value)], &["GPUSHARE_MEMORY=8GiB"]);
        let told = crate::read::read(&container, &policy, &four());
        assert!(matches!(told, Err(RequestError::AboveCeiling { .. })), "{key}: {told:?}");
    }
}

#[test]
fn no_variable_lifts_the_cap_of_a_plugin() {
    let granted = [("alloc.gpushare.io/memory", "4GiB"), ("alloc.gpushare.io/cores", "30")];
    for policy in ["none", "burst", "latency"] {
        let told = read(&granted, &[&format!("GPUSHARE_COMPUTE_POLICY={policy}")]);
        assert!(matches!(told, Err(RequestError::Conflict { .. })), "{policy}: {told:?}");
        let plugins = [&granted[..], &[("alloc.gpushare.io/compute-policy", policy)]].concat();
        assert!(read(&plugins, &[]).is_ok(), "{policy}");
    }
    assert!(read(&granted, &["GPUSHARE_COMPUTE_POLICY=fixed"]).is_ok());
}

#[test]
fn who_is_answered_before_others_has_a_share_and_the_right_to_say_so() {
    let asked = ["GPUSHARE_MEMORY=4GiB", "GPUSHARE_COMPUTE_POLICY=latency", "GPUSHARE_CORES=30"];
    let found = read(&[], &asked).unwrap().unwrap();
    assert_eq!((found.compute_policy, found.cores), (ComputePolicy::Latency, Cores::new(30)));
    let told = read(&[], &asked[..2]);
    assert!(matches!(told, Err(RequestError::LatencyWithoutCores { .. })), "{told:?}");
    // Another word with a ceiling below the whole: the share bursts up to that, and no further.
    let told = read(&[("alloc.gpushare.io/cores", "30")], &asked);
    assert!(told.is_err() || told.unwrap().unwrap().compute_policy != ComputePolicy::Latency);
    // Variables may only lower what annotations granted.
    let strict = Policy { strict: true, ..Policy::default() };
    let container = container(&[], &asked);
    assert!(!matches!(crate::read::read(&container, &strict, &four()), Ok(Some(_))));
}

#[test]
fn a_pods_memory_is_the_pods_share_in_one_key() {
    let pod = [("io.kubernetes.cri.container-type", "container"), ("io.kubernetes.cri.sandbox-id", "pod")];
    let with = |keys: &[(&str, &str)]| read(&[&pod[..], keys].concat(), &[]);
    let one = with(&[("gpushare.io/pod-memory", "8GiB")]);
    assert_eq!(one, with(&[("gpushare.io/memory", "8GiB"), ("gpushare.io/scope", "pod")]));
    assert_eq!(one, with(&[("gpushare.io/pod-memory", "8Gi"), ("gpushare.io/scope", "pod")]));
    let request = one.unwrap().unwrap();
    assert_eq!((request.memory, request.scope), (gib(8), Scope::Pod));
    for other in [
        ("gpushare.io/memory", "4GiB"),
        ("gpushare.io/scope", "container"),
        ("gpushare.io/mode", "exclusive"),
        ("alloc.gpushare.io/pod-memory", "4GiB"),
    ] {
        let told = with(&[("gpushare.io/pod-memory", "8GiB"), other]).unwrap_err();
        assert!(told.to_string().contains(other.0), "{other:?}: {told}");
    }
    assert!(read(&[("gpushare.io/pod-memory", "8GiB")], &[]).is_err(), "no pod");
    let told = read(&pod, &["GPUSHARE_POD_MEMORY=8GiB"]).unwrap_err().to_string();
    assert!(told.contains("annotate it with gpushare.io/pod-memory"), "{told}");
}

#[test]
fn a_plugins_words_for_programs_ask_for_nothing_whoever_writes_them() {
    use gpushare_claims::Told;
    let alloc = [
        ("io.kubernetes.cri.container-type", "container"),
        ("alloc.gpushare.io/memory", "8GiB"),
        ("alloc.gpushare.io/devices", "0"),
    ];
    let with = |words: &'static str| [&alloc[..], &[("alloc.gpushare.io/words", words)]].concat();
    let theirs = ["ALIYUN_COM_GPU_MEM_CONTAINER=60", "ALIYUN_COM_GPU_MEM_DEV=80", "ALIYUN_COM_GPU_MEM_IDX=3"];
    let request = strict(&with("aliyun"), &theirs).unwrap().unwrap();
    assert_eq!((request.memory, request.told), (gib(8), Some(Told::Aliyun { unit: GIB })));
    let hami = ["CUDA_DEVICE_MEMORY_LIMIT_0=60g", "CUDA_DEVICE_SM_LIMIT=90"];
    let request = strict(&with("hami"), &hami).unwrap().unwrap();
    assert_eq!((request.memory, request.cores, request.told), (gib(8), None, Some(Told::Hami)));
    // Only the words of the named system are hidden; the others still contradict.
    assert!(strict(&with("hami"), &theirs).is_err());
    assert!(strict(&alloc, &theirs).is_err());
    assert_eq!(strict(&with("other"), &[]).unwrap().unwrap().told, None);
    // If the key does not come from a plugin, it hides nothing.
    let policy = Policy {
        trusted_annotations: gpushare_claims::KeyPatterns::new(Vec::new()),
        strict: true,
        ..Policy::default()
    };
    let told = crate::read::read(&container(&with("hami"), &hami), &policy, &four());
    assert!(told.is_err() || told.unwrap().is_none_or(|request| request.told.is_none()));
}

#[test]
fn whole_gpus_of_a_plugin_are_whole_whatever_is_said_of_memory_beside_them() {
    use gpushare_claims::Mode;
    let alloc = [
        ("io.kubernetes.cri.container-type", "container"),
        ("alloc.gpushare.io/whole-devices", "1,2"),
        ("alloc.gpushare.io/memory", "8GiB"),
        ("alloc.gpushare.io/devices", "3"),
    ];
    let request = strict(&alloc, &[]).unwrap().unwrap();
    assert_eq!(request.mode, Mode::Exclusive);
    let Devices::These(devices) = &request.devices else { panic!("{:?}", request.devices) };
    assert_eq!(devices.len(), 2);
    assert!(read(&[("gpushare.io/whole-devices", "1")], &[]).is_err(), "no pod may say so");
}
