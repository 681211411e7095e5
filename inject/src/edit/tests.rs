mod driver;
mod golden;
mod handed;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use gpushare_inventory::{DeviceMemory, DeviceNode, Gpu, GpuUuid};
use gpushare_region::path as inner;
use gpushare_request::{Container, Interceptor, Kept, Policy};
use oci_spec::runtime::{
    HookBuilder, LinuxDeviceBuilder, LinuxDeviceCgroupBuilder, LinuxDeviceType, MountBuilder,
};

use super::*;
use crate::outside_plan::OutsidePlan;
use crate::plan::CacheChange;

fn plan() -> Plan {
    let hook = |stage: &str| {
        let args = ["gpushare-hook", stage, "--id", "c"].map(str::to_owned).to_vec();
        HookBuilder::default().path("/opt/gpushare-hook").args(args).build().unwrap()
    };
    let mount = |source: &str, destination: &str| {
        let options = vec!["ro".to_owned(), "rbind".to_owned()];
        MountBuilder::default()
            .source(source)
            .destination(destination)
            .typ("bind")
            .options(options)
            .build()
            .unwrap()
    };
    let rule = |minor| {
        let rule =
            LinuxDeviceCgroupBuilder::default().allow(true).typ(LinuxDeviceType::C).major(195).access("rw");
        rule.minor(minor).build().unwrap()
    };
    let device = |path: &str, minor| {
        let device = LinuxDeviceBuilder::default().path(path).typ(LinuxDeviceType::C).major(195);
        device.minor(minor).file_mode(0o666u32).uid(0u32).gid(0u32).build().unwrap()
    };
    Plan {
        devices: vec![device("/dev/nvidia0", 0), device("/dev/nvidiactl", 255)],
        device_mounts: vec![mount("/dev/nvidia0", "/dev/nvidia0")],
        device_rules: vec![rule(0), rule(255)],
        mounts: vec![mount("/host/libcuda.so.1", "/usr/lib/libcuda.so.1")],
        prestart: hook("prestart"),
        poststop: Some(hook("poststop")),
        additional_gids: vec![],
        told: Vec::new(),
        variables: Vec::new(),
        kept: Kept::default(),
        handed: BTreeSet::new(),
        handed_capabilities: BTreeSet::new(),
        denies_user_namespaces: false,
        limiter: None,
        supervised: None,
        loader_cache: CacheChange::None,
        interpreters: Vec::new(),
        folders: BTreeSet::new(),
        outside: OutsidePlan::default(),
    }
}

/// A plan whose hook names its lease, as the wrapper's does.
fn leased() -> Plan {
    let args = ["gpushare-hook", "prestart", "--lease", "7"].map(str::to_owned).to_vec();
    let prestart = HookBuilder::default().path("/opt/gpushare-hook").args(args).build().unwrap();
    Plan { prestart, ..plan() }
}

fn fixtures() -> Vec<(PathBuf, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let bundles = files.filter(|path| path.extension().is_some_and(|end| end == "json"));
    // The bundle device-cgroup-rule asks for all GPUs by a device rule, which a share refuses.
    let left_out = |path: &PathBuf| {
        ["exec-process", "device-cgroup-rule"].iter().any(|n| path.to_str().unwrap().contains(n))
    };
    let bundles = bundles.filter(|path| !left_out(path));
    let read: Vec<_> = bundles.map(|path| (path.clone(), std::fs::read_to_string(path).unwrap())).collect();
    assert!(read.len() > 35, "{}", read.len());
    read
}

fn edited(text: &str, plan: &Plan) -> Result<Value, EditError> {
    let mut json = serde_json::from_str(text).unwrap();
    apply(&mut json, plan).map(|()| json)
}

/// Every leaf of `before`, with its place, that `after` lacks.
fn lost(before: &Value, after: &Value, place: &str, lost_places: &mut Vec<String>) {
    match (before, after) {
        (Value::Object(before), Value::Object(after)) => {
            for (key, value) in before {
                match after.get(key) {
                    Some(other) => lost(value, other, &format!("{place}/{key}"), lost_places),
                    None => lost_places.push(format!("{place}/{key}")),
                }
            }
        }
        (Value::Array(before), Value::Array(after)) => {
            lost_places.extend(
                before.iter().filter(|entry| !after.contains(entry)).map(|entry| format!("{place}: {entry}")),
            );
        }
        _ if before == after => {}
        _ => lost_places.push(place.to_owned()),
    }
}

#[test]
fn every_engines_bundle_keeps_all_its_parts_and_takes_ours() {
    for (path, text) in fixtures() {
        let after = edited(&text, &plan()).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let before: Value = serde_json::from_str(&text).unwrap();
        let mut places = Vec::new();
        lost(&before, &after, "", &mut places);
        // NVIDIA's hook, and duplicate or NVIDIA variables, are the parts that go.
        places.retain(|place| {
            let hook = ["nvidia-container-runtime-hook", "nvidia-container-cli"];
            !hook.iter().any(|name| place.contains(name)) && !place.contains("VISIBLE_DEVICES")
        });
        assert_eq!(places, Vec::<String>::new(), "{}", path.display());
        let rules = after.pointer("/linux/resources/devices").unwrap().as_array().unwrap();
        assert_eq!(rules.last().unwrap()["minor"], json!(255), "{}", path.display());
        assert!(after.pointer("/hooks/poststop/0").is_some(), "{}", path.display());
    }
}

#[test]
fn applying_a_plan_twice_is_applying_it_once() {
    for (path, text) in fixtures() {
        let once = edited(&text, &leased()).unwrap();
        let twice = edited(&once.to_string(), &leased()).unwrap();
        assert_eq!(once.to_string(), twice.to_string(), "{}", path.display());
    }
}

#[test]
fn unknown_fields_key_order_and_number_texts_survive() {
    let text = r#"{"z":1e+2,"a":18446744073709551616,"b":1.0,"linux":{"future":{"y":0.10,"x":-0}},"process":{"env":["A=1"]}}"#;
    let after = edited(text, &plan()).unwrap().to_string();
    let start =
        r#"{"z":1e+2,"a":18446744073709551616,"b":1.0,"linux":{"future":{"y":0.10,"x":-0},"devices":["#;
    assert!(after.starts_with(start), "{after}");
}

#[test]
fn a_list_that_is_none_is_an_error_not_a_panic() {
    for (text, field) in [
        (r#"{"linux":[]}"#, "linux"),
        (r#"{"linux":{"devices":{}}}"#, "linux.devices"),
        (r#"{"linux":{"resources":1}}"#, "linux.resources"),
        (r#"{"mounts":"x"}"#, "mounts"),
        (r#"{"hooks":{"poststop":1}}"#, "hooks.poststop"),
        (r#"{"process":{"env":1}}"#, "process.env"),
        ("[]", "config.json"),
    ] {
        let error = edited(text, &plan()).unwrap_err();
        assert!(matches!(error, EditError::Kind { field: found, .. } if found == field), "{text}: {error}");
    }
    assert!(edited(r#"{"linux":null,"mounts":null,"hooks":null}"#, &plan()).is_ok());
}

#[test]
fn rules_come_last_and_never_stand_alone() {
    let after = edited("{}", &plan()).unwrap();
    let rules = after.pointer("/linux/resources/devices").unwrap();
    let ours = |minor| json!({"allow": true, "type": "c", "major": 195, "minor": minor, "access": "rw"});
    assert_eq!(*rules, json!([{"allow": false, "access": "rwm"}, ours(0), ours(255)]));
}

#[test]
fn a_rule_for_gpus_beside_the_share_is_refused() {
    let bundle =
        |rule: &str| format!(r#"{{"linux":{{"resources":{{"devices":[{{"allow":false}},{rule}]}}}}}}"#);
    for rule in [
        r#"{"allow":true,"type":"c","major":195,"minor":-1,"access":"rwm"}"#,
        r#"{"allow":true,"type":"c","major":195,"access":"r"}"#,
        r#"{"allow":true,"type":"c","major":195,"minor":1}"#,
    ] {
        assert!(matches!(edited(&bundle(rule), &plan()), Err(EditError::OtherGpu { .. })), "{rule}");
    }
    for rule in [
        r#"{"allow":true,"type":"c","major":195,"access":"m"}"#,
        r#"{"allow":true,"type":"c","major":195,"minor":0,"access":"rw"}"#,
        r#"{"allow":true,"type":"c","major":195,"minor":255,"access":"rwm"}"#,
        r#"{"allow":true,"type":"c","access":"m"}"#,
        r#"{"allow":false,"type":"c","major":195}"#,
    ] {
        assert!(edited(&bundle(rule), &plan()).is_ok(), "{rule}");
        assert!(!is_privileged(&serde_json::from_str(&bundle(rule)).unwrap()), "{rule}");
    }
    let every = bundle(r#"{"allow":true,"type":"c","access":"rwm"}"#);
    assert!(is_privileged(&serde_json::from_str(&every).unwrap()));
}

/// The plan's GPU on a node that has another one, with a render node, and MIG.
fn one_of_two() -> Plan {
    let outside = OutsidePlan {
        other_nodes: vec![(195, 1), (226, 129)],
        display_nodes: vec![(0, (226, 128)), (1, (226, 129))],
        mig_major: Some(237),
        sources: vec![],
    };
    Plan { outside, ..plan() }
}

#[test]
fn a_rule_without_a_major_number_is_for_nvidias_too() {
    let bundle = |rule: &str| format!(r#"{{"linux":{{"resources":{{"devices":[{rule}]}}}}}}"#);
    for (rule, refused) in [
        (r#"{"allow":true,"type":"c","minor":1,"access":"rw"}"#, true),
        (r#"{"allow":true,"type":"c","major":-1,"minor":1,"access":"r"}"#, true),
        (r#"{"allow":true,"major":-1,"minor":7,"access":"rw"}"#, true),
        (r#"{"allow":true,"type":"c","minor":0,"access":"rw"}"#, false),
        (r#"{"allow":true,"type":"c","major":-1,"minor":1,"access":"m"}"#, false),
        (r#"{"allow":true,"type":"b","minor":1,"access":"rw"}"#, false),
    ] {
        let done = edited(&bundle(rule), &plan());
        assert_eq!(matches!(done, Err(EditError::OtherGpu { .. })), refused, "{rule}: {done:?}");
    }
}

#[test]
fn every_kind_of_node_of_another_gpu_is_refused_as_device_and_as_rule() {
    for (major, minor, refused) in [
        ("226", "129", true),
        ("226", "-1", true),
        ("226", "128", false),
        ("195", "1", true),
        ("237", "1", true),
        ("237", "-1", true),
        ("10", "229", false),
    ] {
        let numbers = format!(r#""type":"c","major":{major},"minor":{minor}"#);
        let rule = format!(
            r#"{{"linux":{{"resources":{{"devices":[{{"allow":true,{numbers},"access":"rw"}}]}}}}}}"#
        );
        assert_eq!(edited(&rule, &one_of_two()).is_err(), refused, "rule {major}:{minor}");
        if minor != "-1" {
            let device = format!(r#"{{"linux":{{"devices":[{{"path":"/dev/x",{numbers}}}]}}}}"#);
            assert_eq!(edited(&device, &one_of_two()).is_err(), refused, "device {major}:{minor}");
            let block = device.replace(r#""type":"c""#, r#""type":"b""#);
            assert!(edited(&block, &one_of_two()).is_ok(), "block device {major}:{minor}");
        }
    }
    let mut with_card = one_of_two();
    let card = json!({"path": "/dev/dri/card1", "type": "c", "major": 226, "minor": 1});
    with_card.devices.push(serde_json::from_value(card).unwrap());
    let other = r#"{"linux":{"resources":{"devices":[{"allow":true,"type":"c","major":195,"minor":1}]}}}"#;
    assert!(edited(other, &with_card).is_err(), "a minor of another driver's grants nothing");
}

#[test]
fn files_of_a_whole_card_go_when_the_bundle_asks_for_a_share() {
    let mounted = |source: &str, target: &str| {
        let options = READ_ONLY.map(str::to_owned).to_vec();
        let mount = MountBuilder::default().source(source).destination(target).typ("bind");
        mount.options(options).build().unwrap()
    };
    let outside =
        OutsidePlan { sources: vec!["/driver/lib".into(), "/cache".into()], ..OutsidePlan::default() };
    let share = Plan { outside, ..plan() };
    let mut whole = share.clone();
    whole.mounts.push(mounted("/driver/lib/libnvidia-opencl.so.535", "/usr/lib/libnvidia-opencl.so.1"));
    whole.mounts.push(mounted("/cache/fitted-libcuda.so.1", "/opt/libcuda.so"));
    let users = json!({"mounts": [
        {"destination": "/data", "type": "bind", "source": "/driver/lib", "options": ["rbind", "ro"]},
        {"destination": "/more", "type": "bind", "source": "/driver/library", "options": READ_ONLY},
    ]});
    let again = edited(&edited(&users.to_string(), &whole).unwrap().to_string(), &share).unwrap();
    assert_eq!(again["mounts"], edited(&users.to_string(), &share).unwrap()["mounts"]);
}

#[test]
fn everything_is_denied_first_whatever_the_bundle_says_after() {
    let text = r#"{"linux":{"resources":{"devices":[{"allow":true,"type":"c","major":1,"minor":3,"access":"rwm"}]}}}"#;
    let after = edited(text, &plan()).unwrap();
    assert_eq!(after.pointer("/linux/resources/devices/0"), Some(&json!({"allow": false, "access": "rwm"})));
}

#[test]
fn a_bundle_that_ran_before_keeps_nothing_of_its_old_share() {
    let once = edited("{}", &leased()).unwrap();
    let mut other = leased();
    other.devices[0] = LinuxDeviceBuilder::default()
        .path("/dev/nvidia1")
        .typ(LinuxDeviceType::C)
        .major(195)
        .minor(1)
        .build()
        .unwrap();
    other.device_rules[0] = LinuxDeviceCgroupBuilder::default()
        .allow(true)
        .typ(LinuxDeviceType::C)
        .major(195)
        .minor(1)
        .build()
        .unwrap();
    let again = edited(&once.to_string(), &other).unwrap();
    assert!(!again.to_string().contains("/dev/nvidia0"), "{again}");
    assert_eq!(again, edited("{}", &other).unwrap());
}

#[test]
fn what_others_put_beside_our_places_stays_however_often_a_bundle_runs() {
    let text = r#"{"mounts":[{"destination":"/dev/nvidia-shm","type":"tmpfs"},
        {"destination":"/usr/lib/gpushare/notes","type":"bind","source":"/x","options":["rbind","ro"]}],
        "linux":{"devices":[{"path":"/dev/nvidia-modeset","type":"c","major":195,"minor":254}]}}"#;
    let once = edited(text, &leased()).unwrap();
    assert_eq!(once["mounts"].as_array().unwrap().len(), 3);
    assert_eq!(edited(&once.to_string(), &leased()).unwrap(), once);
    let every = r#""resources":{"devices":[{"allow":false,"access":"rwm"},{"allow":true,"access":"rwm"}]}"#;
    let null = r#"{"path":"/dev/null","type":"c","major":1,"minor":3}"#;
    let other = format!(r#"{{"path":"/dev/nvidia1","type":"c","major":195,"minor":1}},{null}"#);
    let privileged = edited(&format!(r#"{{"linux":{{"devices":[{other}],{every}}}}}"#), &leased()).unwrap();
    assert_eq!(edited(&privileged.to_string(), &leased()).unwrap(), privileged);
}

#[test]
fn our_mounts_lie_on_top_of_a_volume_that_comes_after_an_imitation() {
    let text =
        r#"{"mounts":[{"destination":"/usr/lib/libcuda.so.1","source":"/evil"},{"destination":"/x"}]}"#;
    let after = edited(text, &plan()).unwrap();
    let targets: Vec<_> =
        after["mounts"].as_array().unwrap().iter().map(|mount| &mount["destination"]).collect();
    assert_eq!(targets, ["/x", "/usr/lib/libcuda.so.1"]);
}

#[test]
fn the_hooks_of_a_cdi_device_of_ours_give_way_to_the_wrappers() {
    let ours = |stage| json!({"path": "/opt/gpushare-hook", "args": ["gpushare-hook", stage], "timeout": 10});
    let other = json!({"path": "/x/hook", "args": ["hook", "createRuntime"]});
    let text =
        json!({"hooks": {"createRuntime": [ours("createRuntime"), other], "poststop": [ours("poststop")]}});
    let after = edited(&text.to_string(), &plan()).unwrap();
    assert_eq!(after["hooks"]["createRuntime"], json!([other]));
    assert_eq!(after["hooks"]["poststop"], value(&[plan().poststop.unwrap()]).unwrap());
}

#[test]
fn a_container_that_is_deleted_through_us_has_no_poststop_hook_of_ours() {
    let deleted = Plan { poststop: None, ..plan() };
    let other = json!({"path": "/x/hook", "args": ["hook", "poststop"]});
    let imitated = json!({"path": "/x/gpushare-hook", "args": ["gpushare-hook", "poststop"]});
    // As an earlier `run` in the same bundle left it.
    let first = edited(&json!({"hooks": {"poststop": [other, imitated]}}).to_string(), &plan()).unwrap();
    assert_eq!(first["hooks"]["poststop"].as_array().unwrap().len(), 3);
    let second = edited(&first.to_string(), &deleted).unwrap();
    assert_eq!(second["hooks"]["poststop"], json!([other, imitated]));
    assert_eq!(second["hooks"]["prestart"], first["hooks"]["prestart"]);
    assert_eq!(edited("{}", &deleted).unwrap()["hooks"].get("poststop"), None);
}

#[test]
fn the_drivers_own_libraries_beside_a_share_are_refused() {
    let mount = |target: &str| json!({"mounts": [{"destination": target, "source": "/x"}]}).to_string();
    let mut share = plan();
    let limits = inner::LIMITS.to_str().unwrap();
    share.mounts.push(MountBuilder::default().source("/l").destination(limits).build().unwrap());
    for target in
        ["/usr/lib64/libcuda.so.535.309.01", "/x/libcuda.so", "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"]
    {
        let refused = edited(&mount(target), &share);
        assert_eq!(refused, Err(EditError::Driver { target: target.to_owned() }));
        assert!(edited(&mount(target), &plan()).is_ok(), "{target} beside a whole card");
    }
    for target in ["/usr/lib/libcuda.so.1", "/usr/lib/libcudart.so.12", "/libcuda.so.1/x"] {
        assert!(edited(&mount(target), &share).is_ok(), "{target}");
    }
}

#[test]
fn nodes_of_an_earlier_plan_go_with_it_and_those_of_others_stay() {
    let mut earlier = leased();
    let render = json!({"path": "/dev/dri/renderD128", "type": "c", "major": 226, "minor": 128});
    let rule = json!({"allow": true, "type": "c", "major": 226, "minor": 128, "access": "rw"});
    earlier.devices.push(serde_json::from_value(render).unwrap());
    earlier.device_rules.push(serde_json::from_value(rule).unwrap());
    let fuse = r#"{"linux":{"devices":[{"path":"/dev/fuse","type":"c","major":10,"minor":229}]}}"#;
    let again = edited(&edited(fuse, &earlier).unwrap().to_string(), &leased()).unwrap();
    assert_eq!(again.to_string(), edited(fuse, &leased()).unwrap().to_string());
}

#[test]
fn a_user_namespace_gets_its_nodes_as_mounts() {
    let after = edited(r#"{"linux":{"uidMappings":[{"hostID":1}]}}"#, &plan()).unwrap();
    assert_eq!(after.pointer("/linux/devices"), None);
    let mounts = after["mounts"].as_array().unwrap();
    assert!(mounts.iter().any(|mount| mount["destination"] == "/dev/nvidia0"));
    assert!(after.pointer("/linux/resources/devices/1").is_some());
}

#[test]
fn the_requests_variables_stay_once_and_nvidias_list_becomes_void() {
    let text = r#"{"process":{"env":["GPUSHARE_MEMORY=4GiB","A=1","GPUSHARE_MEMORY=4GiB","NVIDIA_VISIBLE_DEVICES=3",
        "NVIDIA_VISIBLE_DEVICES=all","A=2"]}}"#;
    let after = edited(text, &plan()).unwrap();
    let want = json!(["GPUSHARE_MEMORY=4GiB", "A=1", "NVIDIA_VISIBLE_DEVICES=void", "A=2"]);
    assert_eq!(after["process"]["env"], want);
}

#[test]
fn eighty_thousand_mounts_take_a_plan_of_many_mounts_in_no_time() {
    let many = |folder: &str, count: u32| {
        let mount =
            |number| json!({"destination": format!("/{folder}/{number}"), "type": "bind", "source": "/x"});
        (0..count).map(mount).collect::<Vec<Value>>()
    };
    let ours = many("copies", 400).into_iter().map(|mount| serde_json::from_value(mount).unwrap()).collect();
    let plan = Plan { mounts: ours, ..plan() };
    let mut json = json!({"mounts": many("data", 80_000)});
    let start = Instant::now();
    apply(&mut json, &plan).unwrap();
    assert_eq!(json["mounts"].as_array().unwrap().len(), 80_400);
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

/// Two GPUs, of which the plan gives the first.
fn two_gpus() -> Vec<Gpu> {
    let gpu = |index: u8| {
        let path = PathBuf::from(format!("/dev/nvidia{index}"));
        let minor = index.into();
        let host_path = path.clone();
        Gpu {
            index: minor,
            uuid: GpuUuid::from_bytes([index; 16]),
            minor,
            model: "Tesla T4".to_owned(),
            memory: Some(DeviceMemory::from_bytes(16 << 30)),
            node: DeviceNode { path, host_path, major: 195, minor, mode: 0o666, uid: 0, gid: 0 },
            place: gpushare_inventory::Place::default(),
            instance: None,
        }
    };
    vec![gpu(0), gpu(1)]
}

#[test]
fn a_bundle_that_runs_again_asks_for_what_it_asked_before() {
    let asks = |json: &Value| {
        gpushare_request::read(&Container::from_json(json), &Policy::default(), &two_gpus()).unwrap()
    };
    for env in [
        &["GPUSHARE_MEMORY=4GiB", "NVIDIA_VISIBLE_DEVICES=1"][..],
        &["GPUSHARE_MEMORY=4GiB", "NVIDIA_VISIBLE_DEVICES=all"],
        &["GPUSHARE_MEMORY=4GiB", "NVIDIA_VISIBLE_DEVICES=void"],
        &["NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_VISIBLE_DEVICES=1"],
        &["NVIDIA_VISIBLE_DEVICES=gpushare.io/share=4GiB,1"],
        &["NVIDIA_VISIBLE_DEVICES=gpushare.io/gpu=1"],
    ] {
        let before = json!({"process": {"env": env}});
        let once = edited(&before.to_string(), &leased()).unwrap();
        assert_eq!(asks(&once), asks(&before), "{env:?}");
        assert_eq!(
            once.pointer("/process/env").unwrap().as_array().unwrap().last().unwrap(),
            "NVIDIA_VISIBLE_DEVICES=void"
        );
        assert_eq!(edited(&once.to_string(), &leased()).unwrap(), once, "{env:?}");
        let mut imitated = once.clone();
        imitated.as_object_mut().unwrap().remove("hooks");
        imitated["process"]["env"] = json!(["GPUSHARE_MEMORY=4GiB", "NVIDIA_VISIBLE_DEVICES=void"]);
        let mut unmarked = imitated.clone();
        unmarked.as_object_mut().unwrap().remove("annotations");
        assert_eq!(asks(&imitated), asks(&unmarked), "the annotation alone says nothing: {env:?}");
        let mut changed = once;
        changed["process"]["env"] = json!(["GPUSHARE_MEMORY=5GiB", "NVIDIA_VISIBLE_DEVICES=1"]);
        let written = json!({"process": changed["process"]});
        assert_eq!(asks(&changed), asks(&written), "what a user wrote since counts: {env:?}");
    }
}

#[test]
fn a_pods_word_for_a_kept_list_does_not_outlive_the_first_run() {
    for env in [json!(["NVIDIA_VISIBLE_DEVICES=void"]), json!(["NVIDIA_VISIBLE_DEVICES="]), json!([])] {
        let forged = json!({"annotations": {GRANTED_LIST: "0,1", "a": "b"}, "process": {"env": env}});
        let once = edited(&forged.to_string(), &leased()).unwrap();
        assert_eq!(once["annotations"], json!({"a": "b"}), "{env}");
    }
}

#[test]
fn another_systems_bundle_that_runs_again_means_no_more_than_was_granted() {
    let asks = |json: &Value| {
        gpushare_request::read(&Container::from_json(json), &Policy::default(), &two_gpus()).unwrap().unwrap()
    };
    for (annotations, env) in [
        (json!({}), &["NVIDIA_VISIBLE_DEVICES=1", "CUDA_DEVICE_MEMORY_LIMIT=1g"][..]),
        // Two lists. The second one alone would be wider.
        (
            json!({"io.kubernetes.cri.container-type": "container"}),
            &["NVIDIA_VISIBLE_DEVICES=1", "NVIDIA_VISIBLE_DEVICES=0,1", "CUDA_DEVICE_MEMORY_LIMIT=1g"],
        ),
        (json!({}), &["NVIDIA_VISIBLE_DEVICES=gpushare.io/share=512MiB,1", "CUDA_DEVICE_MEMORY_LIMIT=1g"]),
        // A plain list of the plugin, and a wider one of the image.
        (
            json!({"io.kubernetes.cri.container-type": "container"}),
            &["NVIDIA_VISIBLE_DEVICES=1", "NVIDIA_VISIBLE_DEVICES=all"],
        ),
    ] {
        let before = json!({"annotations": annotations, "process": {"env": env}});
        let asked = asks(&before);
        let mut plan = Plan { variables: asked.variables.clone(), ..leased() };
        plan.kept = asked.kept();
        let once = edited(&before.to_string(), &plan).unwrap();
        assert_eq!(asks(&once).devices, asked.devices, "{env:?}");
        assert_eq!(asks(&once).memory, asked.memory, "{env:?}");
        assert_eq!(edited(&once.to_string(), &plan).unwrap(), once, "{env:?}");
    }
}

#[test]
fn a_bundle_whose_limits_would_change_their_gpus_is_not_run_again() {
    let env = ["NVIDIA_VISIBLE_DEVICES=0,1", "CUDA_DEVICE_MEMORY_LIMIT_0=2g", "CUDA_DEVICE_MEMORY_LIMIT=1g"];
    for (devices, again) in [("1", false), ("0,1", true)] {
        let annotations = json!({"gpushare.io/devices": devices});
        let before = json!({"annotations": annotations, "process": {"env": env}});
        let asks = |json: &Value| {
            gpushare_request::read(&Container::from_json(json), &Policy::default(), &two_gpus())
        };
        let asked = asks(&before).unwrap().unwrap();
        let plan = Plan { variables: asked.variables.clone(), kept: asked.kept(), ..leased() };
        let once = edited(&before.to_string(), &plan).unwrap();
        match asks(&once) {
            Ok(second) => assert!(again && second == Some(asked), "{devices}: {second:?}"),
            Err(error) => assert!(!again && error.to_string().contains("write the bundle anew"), "{error}"),
        }
    }
}

#[test]
fn groups_are_added_once() {
    let plan = Plan { additional_gids: vec![44], ..leased() };
    let once = edited(r#"{"process":{"user":{"uid":0,"additionalGids":[10]}}}"#, &plan).unwrap();
    assert_eq!(once["process"]["user"]["additionalGids"], json!([10, 44]));
    assert_eq!(edited(&once.to_string(), &plan).unwrap(), once);
}

#[test]
fn another_systems_library_is_taken_out_and_nothing_else() {
    let mut json = json!({
        "mounts": [{"destination": "/usr/local/vgpu/libvgpu.so"}, {"destination": "/data"}],
        "process": {"env": ["LD_PRELOAD=/usr/local/vgpu/libvgpu.so", "LD_PRELOAD=/a.so:/usr/local/vgpu/libvgpu.so", "A=b"]},
    });
    let found = Interceptor {
        mounts: vec!["/usr/local/vgpu/libvgpu.so".to_owned()],
        preloads: vec!["/usr/local/vgpu/libvgpu.so".to_owned()],
    };
    take_out_interceptor(&mut json, &found);
    let left = json!({"mounts": [{"destination": "/data"}], "process": {"env": ["LD_PRELOAD=/a.so", "A=b"]}});
    assert_eq!(json, left);
}

#[test]
fn variables_of_another_systems_request_stand_once_and_with_what_was_granted() {
    let plan =
        Plan { variables: vec![("CUDA_DEVICE_MEMORY_LIMIT_0".to_owned(), "3000m".to_owned())], ..plan() };
    let mut json = json!({"process": {"env": [
        "CUDA_DEVICE_MEMORY_LIMIT_0=999g", "PATH=/bin", "CUDA_DEVICE_MEMORY_LIMIT_0=3000m",
    ]}});
    apply(&mut json, &plan).unwrap();
    assert_eq!(json["process"]["env"], json!(["CUDA_DEVICE_MEMORY_LIMIT_0=3000m", "PATH=/bin"]));
}
