//! Bad input through the real wrapper: one line with the remedy on stderr and in the runtime's log, a
//! non-zero exit, no lease left, and config.json unchanged.

use std::fs;
use std::path::Path;

use gpushare_tests::artifacts;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::leases::{cli, leases, told};
use gpushare_tests::needs::{Need, met};
use gpushare_tests::node::{MODEL, SimulatedNode};
use gpushare_tests::runtime::{LowLevel, Runtime};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use serde_json::{Value, json};

const NEEDS: &[Need] = &[Need::Root, Need::Runc, Need::Busybox];

/// Creates `bundle`, expects a refusal that leaves config.json alone, and returns its line.
fn refused(runtime: &Runtime, bundle: &Bundle) -> String {
    let written = bundle.write();
    let refusal = match runtime.create_as_it_is(bundle) {
        Ok(_) => panic!("{} was created from what should be refused", bundle.id()),
        Err(refusal) => refusal,
    };
    assert!(bundle.config_bytes() == written, "config.json was changed: {refusal:?}");
    let line = refusal.line();
    for word in ["permission denied", "no such file or directory", "executable file not found"] {
        assert!(!line.to_lowercase().contains(word), "docker takes {word:?} for an error of its own: {line}");
    }
    line
}

#[test]
#[ignore = "needs root and runc: would run containers"]
fn a_request_that_cannot_be_understood_or_met_is_refused_in_one_line() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let mut wrong = Vec::new();
    for (requests, parts) in [
        (vec![("GPUSHARE_MEMORY", "4")], vec!["4", "GiB"]),
        (vec![("GPUSHARE_MEMORY", "4XiB")], vec!["4XiB", "GiB"]),
        (vec![("GPUSHARE_MEMORY", "plenty")], vec!["plenty", "GiB"]),
        (vec![("GPUSHARE_MEMORY", "")], vec!["MEMORY"]),
        (vec![("GPUSHARE_MEMORY", "0GiB")], vec!["0GiB"]),
        (vec![("GPUSHARE_MEMORY", "-1GiB")], vec!["-1GiB"]),
        (vec![("GPUSHARE_MEMORY", "0%")], vec!["0%"]),
        (vec![("GPUSHARE_MEMORY", "101%")], vec!["101%"]),
        (vec![("GPUSHARE_MEMORY", "99999999999999999999GiB")], vec!["99999999999999999999GiB"]),
        (vec![("GPUSHARE_MEMORY", "17179869184GiB")], vec!["17179869184GiB"]),
        (vec![("GPUSHARE_MEMORY", "4GiB\n8GiB")], vec!["MEMORY"]),
        (vec![("GPUSHARE_MEMORY", "81GiB")], vec!["81 GiB", "80 GiB"]),
        (vec![("GPUSHARE_MEMORY", "4GiB"), ("GPUSHARE_MEMORY", "8GiB")], vec!["4GiB", "8GiB"]),
        (vec![("GPUSHARE_CORES", "0")], vec!["0", "100"]),
        (vec![("GPUSHARE_CORES", "101")], vec!["101", "100"]),
        (vec![("GPUSHARE_CORES", "-5")], vec!["-5"]),
        (vec![("GPUSHARE_COUNT", "0")], vec!["0"]),
        (vec![("GPUSHARE_COUNT", "2")], vec!["2", "1"]),
        (vec![("GPUSHARE_COUNT", "18446744073709551616")], vec!["18446744073709551616"]),
        (vec![("GPUSHARE_DEVICES", "7")], vec!["7"]),
        (vec![("GPUSHARE_DEVICES", "GPU-ffffffff-0000")], vec!["ffffffff-0000"]),
        (vec![("GPUSHARE_DEVICES", "0"), ("GPUSHARE_COUNT", "2")], vec!["2"]),
        (vec![("GPUSHARE_MODEL", "A100*")], vec!["H100"]),
        (vec![("GPUSHARE_MEMROY", "4GiB")], vec!["GPUSHARE_MEMROY", "memory"]),
        (vec![("GPUSHARE_MODE", "fast")], vec!["fast", "share"]),
        (vec![("GPUSHARE_MODE", "exclusive"), ("GPUSHARE_MEMORY", "4GiB")], vec!["exclusive"]),
        (vec![("GPUSHARE_PRIORITY", "10"), ("GPUSHARE_MEMORY", "4GiB")], vec!["10", "9"]),
        (vec![("GPUSHARE_COMPUTE_POLICY", "greedy"), ("GPUSHARE_MEMORY", "4GiB")], vec!["greedy", "fixed"]),
        (vec![("NVIDIA_VISIBLE_DEVICES", "7")], vec!["7"]),
    ] {
        let bundle = requests.iter().fold(Bundle::small(), |bundle, (name, value)| bundle.env(name, value));
        let line = refused(&runtime, &bundle);
        let lacks = |part: &&str| !line.contains(*part);
        let missing = parts.into_iter().find(lacks);
        wrong.extend(missing.map(|part| format!("{requests:?}: no {part:?} in: {line}")));
        assert_eq!(leases(runtime.config()), [], "{requests:?}");
        // The engine's next call is no error.
        runtime.delete_force(bundle.id());
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
#[ignore = "needs root and runc: would run containers"]
fn a_variable_above_an_annotation_is_a_conflict() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let bundle = Bundle::small().env("GPUSHARE_MEMORY", "8GiB").annotation("gpushare.io/memory", "4GiB");
    let line = refused(&runtime, &bundle);
    for part in ["4GiB", "8GiB"] {
        assert!(line.contains(part), "{part:?} is not in: {line}");
    }
    assert_eq!(leases(runtime.config()), []);
}

#[test]
#[ignore = "needs root and runc: would run containers"]
fn a_node_without_a_usable_driver_says_so_and_still_runs_other_containers() {
    if !met(NEEDS) {
        return;
    }
    type Damage = fn(&SimulatedNode);
    let damages: [(&str, Damage); 4] = [
        ("no driver", |node| fs::remove_dir_all(node.proc_driver()).expect("the tree can be removed")),
        ("no version", |node| write(&node.proc_driver().join("version"), "NVRM version: none\n")),
        ("another version", |node| {
            let version =
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\n";
            write(&node.proc_driver().join("version"), version);
        }),
        ("no libraries", |node| {
            fs::remove_dir_all(node.root().join("driver/usr/lib")).expect("the tree can be removed")
        }),
    ];
    for (name, damage) in damages {
        let node = SimulatedNode::one_gpu();
        damage(&node);
        let runtime = Runtime::wrapped(LowLevel::Runc, &node);
        let bundle = Bundle::small().env("GPUSHARE_MEMORY", "4GiB");
        let line = refused(&runtime, &bundle);
        assert!(line.contains("driver") && !line.contains(bundle.id()), "{name}: {line}");
        assert_eq!(leases(runtime.config()), [], "{name}");
        let other = Bundle::small();
        assert_eq!(runtime.run(&other).status().as_deref(), Some("running"), "{name}");
    }
}

#[test]
#[ignore = "needs root and runc: makes device nodes"]
fn a_device_node_of_another_number_than_the_kernels_is_refused() {
    if !met(NEEDS) {
        return;
    }
    for (name, number, wanted) in [
        ("nvidia0", (195, 1), "195:0"),
        ("nvidiactl", (195, 254), "195:255"),
        ("nvidia-uvm", (1, 1), "511:0"),
        ("nvidia-modeset", (195, 0), "195:254"),
    ] {
        let node = SimulatedNode::one_gpu();
        let path = node.root().join("dev").join(name);
        let _ = fs::remove_file(&path);
        mknod(&path, SFlag::S_IFCHR, Mode::S_IRUSR, makedev(number.0, number.1)).expect("a node can be made");
        let runtime = Runtime::wrapped(LowLevel::Runc, &node);
        let line = refused(&runtime, &Bundle::small().env("GPUSHARE_MEMORY", "4GiB"));
        let parts = [name, &format!("{}:{}", number.0, number.1), wanted, "gpushare system nodes"];
        assert_eq!(parts.iter().find(|part| !line.contains(*part)), None, "{line}");
        assert_eq!(leases(runtime.config()), [], "{name}");
    }
}

#[test]
#[ignore = "needs root and runc: would run containers"]
fn a_strict_node_gives_no_share_to_a_container_with_a_right_over_its_limit() {
    if !met(NEEDS) {
        return;
    }
    type Change = fn(&mut Value);
    let node = SimulatedNode::one_gpu();
    let strict =
        node.config_with("strict", &format!("{}\n[request]\nstrict = true", LowLevel::Runc.settings()));
    let runtime = Runtime::with_config(LowLevel::Runc, &strict);
    let admin: Change = |spec| spec["process"]["capabilities"]["bounding"] = json!(["CAP_SYS_ADMIN"]);
    let host_pid: Change = |spec| {
        let namespaces = spec["linux"]["namespaces"].as_array_mut().expect("the bundle has namespaces");
        namespaces.retain(|namespace| namespace["type"] != "pid");
    };
    for (part, change) in [("CAP_SYS_ADMIN", admin), ("the host's pid namespace", host_pid)] {
        let bundle = Bundle::small().annotation("alloc.gpushare.io/memory", "4GiB");
        let mut spec: Value = serde_json::from_slice(&bundle.write()).expect("config.json is JSON");
        change(&mut spec);
        write(&bundle.config_path(), &spec.to_string());
        let line = runtime.create_as_it_is(&bundle).expect_err("its root could take the limit away").line();
        let folder = bundle.path().to_str().expect("a path in UTF-8");
        let planned = cli(runtime.config(), &["plan", "--bundle", folder]).stderr;
        for told in [line, planned] {
            assert!(told.contains(part) && told.contains("request.strict"), "{told}");
        }
        assert_eq!(leases(runtime.config()), []);
    }
    let plain = Bundle::small().annotation("alloc.gpushare.io/memory", "4GiB");
    assert_eq!(runtime.run(&plain).status().as_deref(), Some("running"));
}

#[test]
#[ignore = "needs root and runc: would run a container"]
fn a_setting_that_does_not_exist_is_named_with_its_file_and_line() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let config = node.config_with("misspelt", &format!("{}\ncandidate = 1", LowLevel::Runc.settings()));
    let lines = fs::read_to_string(&config).expect("the settings can be read").lines().count();
    let bundle = Bundle::small().env("GPUSHARE_MEMORY", "4GiB");
    let runtime = Runtime::with_config(LowLevel::Runc, &config);
    let line = refused(&runtime, &bundle);
    let number = format!(":{lines}:");
    for part in ["misspelt.toml", "candidate", &number] {
        assert!(line.contains(part), "{part:?} is not in: {line}");
    }
}

#[test]
#[ignore = "needs root and runc: mounts a small tmpfs"]
fn a_quota_store_without_room_grants_nothing() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let settled = Bundle::small().env("GPUSHARE_MEMORY", "1GiB");
    drop(runtime.run(&settled));
    let state = node.state();
    fs::create_dir_all(&state).expect("the state folder can be made");
    let full = nix::mount::MsFlags::empty();
    nix::mount::mount(Some("tmpfs"), &state, Some("tmpfs"), full, Some("size=8k"))
        .expect("a tmpfs can be mounted");
    // The write takes all the room there is and then fails, as the test needs it.
    let _ = fs::write(state.join("litter"), vec![0; 1 << 16]);

    let bundle = Bundle::small().env("GPUSHARE_MEMORY", "4GiB");
    let line = refused(&runtime, &bundle);
    assert!(line.contains("cannot lease a GPU: ") && !line.contains(bundle.id()), "{line}");
    assert!(line.contains(&*state.to_string_lossy()), "the line names the folder: {line}");
    nix::mount::umount(&state).expect("the tmpfs can be unmounted");
    assert_eq!(leases(runtime.config()), []);
    assert_eq!(runtime.run(&bundle).status().as_deref(), Some("running"));
}

#[test]
#[ignore = "needs root and runc: would run a container"]
fn a_damaged_quota_store_grants_nothing_and_is_named() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let bundle = Bundle::small().env("GPUSHARE_MEMORY", "4GiB");
    drop(runtime.run(&bundle));
    for garbage in [vec![0x5a; 20_000], b"gpushare leases, version 1: and no more".to_vec()] {
        fs::write(node.ledger(), garbage).expect("the ledger can be overwritten");
        let line = refused(&runtime, &bundle);
        assert!(line.contains(&*node.ledger().to_string_lossy()), "{line}");
    }
}

#[test]
#[ignore = "needs root and runc: would run a container"]
fn a_bundle_that_is_no_bundle_is_refused() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    for contents in ["", "{", "{\"process\": 7}", "{\"ociVersion\":\"1.0.2\",\"process\":{\"env\":[7]}}"] {
        let bundle = Bundle::small();
        write(&bundle.config_path(), contents);
        let refusal = runtime.create_as_it_is(&bundle).expect_err("config.json is none");
        // JSON that asks for nothing is refused by the low-level runtime, in its own words.
        let asks_nothing = contents.ends_with('}');
        assert!(asks_nothing || refusal.line().contains("config.json"), "{contents:?}: {}", refusal.line());
        assert_eq!(bundle.config_bytes(), contents.as_bytes());
        assert_eq!(leases(runtime.config()), [], "{contents:?}");
    }
    let empty = Bundle::small();
    fs::remove_file(empty.config_path()).expect("config.json can be removed");
    let line = runtime.create_as_it_is(&empty).expect_err("there is no config.json").line();
    assert!(line.contains("config.json"), "{line}");
}

#[test]
#[ignore = "needs root and runc: runs a container"]
fn a_bundle_that_holds_an_earlier_share_and_asks_for_none_is_named() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let bundle = Bundle::small().annotation("gpushare.io/memory", "4GiB");
    drop(runtime.run(&bundle));
    let mut spec: Value = serde_json::from_slice(&bundle.config_bytes()).expect("config.json is JSON");
    spec["annotations"] = json!({});
    write(&bundle.config_path(), &spec.to_string());
    let line = runtime.create_as_it_is(&bundle).expect_err("its mounts went with its lease").line();
    let folder = bundle.path().to_str().expect("a path in UTF-8");
    let planned = cli(runtime.config(), &["plan", "--bundle", folder]).stderr;
    for told in [&line, &planned] {
        assert!(told.contains("an earlier start") && told.contains("write it anew"), "{told}");
    }
    assert!(line.contains("cannot lease a GPU: ") && !line.contains(bundle.id()), "{line}");
    assert_eq!(bundle.config_bytes(), spec.to_string().as_bytes());
    assert_eq!(leases(runtime.config()), []);
}

#[test]
#[ignore = "needs root and runc: would run a container"]
fn a_container_that_the_low_level_runtime_refuses_keeps_no_lease() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let bundle = Bundle::small().env("GPUSHARE_MEMORY", "4GiB").args(&["/bin/no-such-program"]);
    let refused = runtime.create(&bundle).is_err();
    if refused {
        runtime.delete_force(bundle.id());
        assert_eq!(leases(runtime.config()), []);
    }
    let broken = Bundle::small().env("GPUSHARE_MEMORY", "4GiB");
    fs::remove_dir_all(broken.root()).expect("the root can be removed");
    assert!(runtime.create(&broken).is_err(), "there is no root file system");
    runtime.delete_force(broken.id());
    assert_eq!(leases(runtime.config()), []);
}

fn write(path: &Path, text: &str) {
    fs::write(path, text).expect("a file of the test can be written");
}

#[test]
#[ignore = "needs root, runc and crun: would run containers"]
fn each_refusal_is_noted_by_its_kind_also_beside_a_gpu_out_of_service() {
    if !met(NEEDS) || !met(&[Need::Crun]) {
        return;
    }
    let node = SimulatedNode::with(2, MODEL, "80GiB", &[]);
    let runtime_of = |name: &str, more: &str| {
        let settings = format!("{}\n{more}\n", LowLevel::Runc.settings());
        Runtime::with_config(LowLevel::Runc, &node.config_with(name, &settings))
    };
    let (plain, strict) = (runtime_of("plain", ""), runtime_of("strict", "[request]\nstrict = true"));
    let asks = |memory: &str| Bundle::small().env("GPUSHARE_MEMORY", memory);
    let holder = asks("60GiB").env("GPUSHARE_DEVICES", "0");
    let _holder = plain.run(&holder);
    let on_first = || asks("60GiB").env("GPUSHARE_DEVICES", "0");
    let noted = |bundle: &Bundle| {
        let history = told(node.config(), &["history", "--json"]);
        let all = history["refusals"].as_array().expect("a list").clone();
        let of_it = |one: &&Value| one["id"] == bundle.id();
        all.iter().find(of_it).map(|one| one["kind"].as_str().unwrap_or_default().to_owned())
    };
    for state in ["well", "a GPU is out of service"] {
        for (runtime, bundle, want) in [
            (&plain, asks("much"), "request"),
            (&plain, asks("900GiB"), "request"),
            (&plain, on_first(), "room"),
            (&plain, asks("1GiB").env("NVIDIA_REQUIRE_CUDA", "cuda>=99.0"), "image"),
            (&plain, asks("1GiB").env("GPUSHARE_MODE", "mps"), "rules"),
            (&strict, asks("1GiB"), "rules"),
        ] {
            let refusal =
                runtime.create(&bundle).err().unwrap_or_else(|| panic!("{state}: {want} was created"));
            assert_eq!(noted(&bundle).as_deref(), Some(want), "{state}: {refusal:?}");
        }
        fs::rename(node.root().join("dev/nvidia1"), node.root().join("dev/away1")).ok();
    }
    // A hook that cannot even read its settings.
    let wrong = node.config_with("wrong", "[quota]\nmemory = 4");
    let flags = ["createRuntime", "--config", &wrong.to_string_lossy()];
    let hooked = asks("1GiB").hook("createRuntime", &artifacts::hook(), &flags);
    assert!(Runtime::bare(LowLevel::Crun).create(&hooked).is_err());
    assert_eq!(noted(&hooked).as_deref(), Some("settings"));
}
