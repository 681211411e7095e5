//! A13 to A21: what is asked for, by whom, and in which words.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use gpushare_tests::artifacts;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::command::{self, Outcome};
use gpushare_tests::leases::{cli, leases, leases_of, sweep};
use gpushare_tests::needs::met;
use gpushare_tests::node::{MODEL, SimulatedNode};
use gpushare_tests::regions;
use gpushare_tests::runtime::{LowLevel, Runtime};
use gpushare_tests::scratch::Scratch;
use serde_json::{Value, json};

use crate::{NEEDS, idle_config, on_both, outside, share, tree};

#[test]
#[ignore = "needs root, runc and crun: would run containers"]
fn a13_the_environment_of_an_image_grants_at_most_what_the_node_gives_to_all() {
    if !met(NEEDS) {
        return;
    }
    let image = || {
        [
            "NVIDIA_VISIBLE_DEVICES=all",
            "GPUSHARE_MEMORY=80GiB",
            "GPUSHARE_DEVICES=all",
            "GPUSHARE_MODE=exclusive",
        ]
    };
    on_both(|node, _, low_level| {
        let with = |name: &str, request: &str| {
            let settings = format!("{}\n[request]\n{request}", low_level.settings());
            Runtime::with_config(low_level, &node.config_with(name, &settings))
        };
        let asks = |variables: &[&str]| {
            let split =
                |entry: &&str| entry.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
            let pairs = variables.iter().filter_map(split);
            pairs.fold(Bundle::small(), |bundle, (name, value)| bundle.env(&name, &value))
        };
        // Where an image's variables grant nothing, it gets nothing.
        let strict = with("strict", "strict = true");
        for variables in [&image()[..1], &image()[1..2], &image()[2..], &image()[..3]] {
            let refusal = strict.create(&asks(variables)).map(drop).expect_err("nobody trusted asked");
            assert!(refusal.line().contains("request.strict"), "{low_level:?}: {}", refusal.line());
            assert_eq!(leases(strict.config()), []);
        }
        // Where variables are not read, NVIDIA's list in the image gets the node's default share, and a
        // request for more is refused.
        let deaf = with("deaf", "env = false\ndefault_memory = \"8GiB\"");
        let bundle = asks(&image()[..1]);
        let container = deaf.run(&bundle);
        assert_eq!(leases(deaf.config())[0].memory, [8 << 30], "{low_level:?}");
        drop(container);
        let ignoring = with("ignoring", "env = false\nnvidia = \"ignore\"");
        for (runtime, variables) in [(&deaf, &image()[..]), (&ignoring, &image()), (&ignoring, &image()[1..])]
        {
            let refusal = runtime.create(&asks(variables)).map(drop).expect_err("nobody reads it");
            assert!(refusal.line().contains("request.env"), "{low_level:?}: {}", refusal.line());
            assert_eq!(leases(runtime.config()), []);
        }
        let bundle = asks(&image()[..1]);
        let written = bundle.write();
        let container = ignoring.run(&bundle);
        assert_eq!(leases(ignoring.config()), []);
        assert_eq!(bundle.config_bytes(), written);
        drop(container);
    });
}

#[test]
#[ignore = "needs root, runc and crun: would run containers"]
fn a14_one_key_with_two_values_is_a_conflict_that_names_both() {
    if !met(NEEDS) {
        return;
    }
    on_both(|_, runtime, low_level| {
        let cri = "io.kubernetes.cri.container-type";
        // A node that is not strict takes the GPUs that both lists name. On a node with one GPU, both name
        // it.
        let two = SimulatedNode::create(2, MODEL, "80GiB");
        let strict = "[request]\nstrict = true\nenv_ceiling = \"100%\"";
        let config = two.config_with("strict", &format!("{}\n{strict}", low_level.settings()));
        let strict = Runtime::with_config(low_level, &config);
        for (runtime, bundle, parts) in [
            (runtime, share().env("GPUSHARE_MEMORY", "80GiB"), ["GPUSHARE_MEMORY", "4GiB", "80GiB"]),
            (
                runtime,
                share().annotation("gpushare.io/memory", "2GiB"),
                ["gpushare.io/memory", "4GiB", "2GiB"],
            ),
            (
                runtime,
                share().annotation("alloc.gpushare.io/memory", "2GiB"),
                ["alloc.gpushare.io/memory", "4GiB", "2GiB"],
            ),
            (
                &strict,
                Bundle::small()
                    .annotation(cri, "container")
                    .env("NVIDIA_VISIBLE_DEVICES", "0")
                    .env("NVIDIA_VISIBLE_DEVICES", "all"),
                ["NVIDIA_VISIBLE_DEVICES", "\"0\"", "\"all\""],
            ),
        ] {
            let line = runtime.create(&bundle).map(drop).expect_err("two values").line();
            for part in parts {
                assert!(line.contains(part), "{low_level:?}: no {part} in: {line}");
            }
        }
        assert_eq!(leases(runtime.config()), []);
    });
}

/// The wrapper in front of a runtime that does nothing, with 256 MiB of memory and 10 seconds of processor
/// time.
fn bounded(config: &Path, bundle: &Bundle) -> Outcome {
    let mut create = Command::new("/usr/bin/prlimit");
    create.args(["--as=268435456", "--cpu=10"]).arg(artifacts::wrapper());
    create.args(["create", "--bundle"]).arg(bundle.path()).arg(bundle.id()).env("GPUSHARE_CONFIG", config);
    command::run(&mut create)
}

#[test]
#[ignore = "needs the release build: runs the wrapper"]
fn a15_a_number_that_is_none_is_refused_in_its_own_words() {
    let scratch = Scratch::new("idle");
    let node = SimulatedNode::one_gpu();
    let settings = format!("[runtime]\ncandidates = [\"{}\"]\n", crate::idle_runtime(&scratch).display());
    let config = node.config_with("idle", &settings);
    let long = "9".repeat(1 << 20);
    let values = [
        "",
        " ",
        "0",
        "-1",
        "+1",
        "18446744073709551616",
        "18446744073709551616GiB",
        "1e999",
        "1e3GiB",
        "0x10",
        "0x10GiB",
        "010",
        "010GiB",
        "4 GiB",
        " 4GiB",
        "4GiB ",
        "100.5%",
        "0%",
        "101%",
        "٤GiB",
        "４GiB",
        "4GiB\0",
        "4\u{200b}GiB",
        "NaN",
        "inf",
        "no-gpu-has-8MiB-to-run",
        "true",
        "null",
        "4GiB,8GiB",
        "$(id)",
        "\u{1b}[31m",
        &long,
    ];
    for key in
        ["GPUSHARE_MEMORY", "GPUSHARE_CORES", "GPUSHARE_COUNT", "GPUSHARE_DEVICES", "GPUSHARE_PRIORITY"]
    {
        let mut words = std::collections::BTreeSet::new();
        for value in values {
            if matches!((key, value), ("GPUSHARE_DEVICES" | "GPUSHARE_PRIORITY", "0")) {
                continue; // here it is one
            }
            let bundle = Bundle::small().env(key, value);
            let written = bundle.write();
            let outcome = bounded(&config, &bundle);
            let line = outcome.stderr.trim_end();
            assert!(!outcome.success() && outcome.stdout.is_empty(), "{key}={value:.40}: {outcome:?}");
            assert!(line.contains(key) && !line.contains(bundle.id()), "{key}={value:.40}: {line}");
            assert!(line.len() < 1000 && !line.contains(char::is_control), "{key}={value:.40}: {line}");
            assert!(bundle.config_bytes() == written, "{key}={value:.40}");
            words.insert(line.rsplit("\": ").next().unwrap_or_default().to_owned());
        }
        assert!(!words.is_empty() && words.iter().all(|word| !word.is_empty()), "{key}: {words:?}");
    }
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a16_switches_of_other_systems_switch_nothing_off_and_are_logged() {
    if !met(NEEDS) {
        return;
    }
    on_both(|node, _, low_level| {
        let log = node.root().join("log");
        let settings = format!("{}\n[log]\nfile = \"{}\"", low_level.settings(), log.display());
        let runtime = Runtime::with_config(low_level, &node.config_with("logging", &settings));
        let switches = [
            ("CUDA_DISABLE_CONTROL", "true"),
            ("CGPU_DISABLE", "1"),
            ("DISABLE_VGPU_CONTROL", "enabled"),
            ("GPU_CORE_UTILIZATION_POLICY", "disable"),
            ("CUDA_OVERSUBSCRIBE", "true"),
        ];
        let bundle = switches.iter().fold(share(), |bundle, (name, value)| bundle.env(name, value));
        let container = runtime.run(&bundle);
        assert_eq!(leases(runtime.config())[0].memory, [4 << 30], "{low_level:?}");
        drop(container);
        let text = fs::read_to_string(&log).expect("the log can be read");
        for (name, _) in switches {
            let told = text.lines().filter(|line| line.contains("WARN") && line.contains(name)).count();
            assert_eq!(told, 1, "{low_level:?}: {name}: {text}");
        }
    });
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a17_what_looks_like_our_own_notes_is_not_believed() {
    if !met(NEEDS) {
        return;
    }
    on_both(|node, runtime, low_level| {
        for (key, value) in [
            ("gpushare.io/lease", "1"),
            ("gpushare.io/state", "active"),
            ("gpushare.io/granted", "GPU-0"),
            ("alloc.gpushare.io/lease", "1"),
        ] {
            let line = runtime.create(&share().annotation(key, value)).map(drop).expect_err(key).line();
            assert!(line.contains(key), "{low_level:?}: {line}");
        }
        for name in ["GPUSHARE_HOOK", "GPUSHARE_LEASE", "GPUSHARE_DONE"] {
            let line = runtime.create(&share().env(name, "1")).map(drop).expect_err(name).line();
            assert!(line.contains(name), "{low_level:?}: {line}");
        }
        assert_eq!(leases(runtime.config()), []);
        // The host's environment says where settings and simulator are, not the container's.
        let elsewhere = Scratch::new("elsewhere");
        let bundle = share()
            .env("GPUSHARE_CONFIG", &elsewhere.path().to_string_lossy())
            .env("GPUSHARE_SIMULATOR", "/tmp/evil")
            .annotation("example.org/gpushare.io/memory", "80GiB");
        // The bundle has a hook that pretends to be ours and acts on the lease of another container.
        let neighbour = share();
        let other = runtime.run(&neighbour);
        let state = node.state().to_string_lossy().into_owned();
        let lease = regions::ids(&node.state()).pop().expect("the neighbour has one");
        let root = fs::canonicalize(runtime.root()).expect("the runtime made its root");
        let imitation = |stage: &str| {
            json!({
                "path": artifacts::hook(),
                "args": ["gpushare-hook", stage, "--state", state, "--lease", lease, "--root", root, "--id", other.id()],
                "env": ["PATH=/bin", "GPUSHARE_HOOK=1"]
            })
        };
        let hooks = json!({"prestart": [imitation("prestart")], "poststop": [imitation("poststop")]});
        let bundle = bundle.edit(|spec| spec["hooks"] = hooks);
        let container = runtime.run(&bundle);
        let held = |bundle: &Bundle| {
            let pid = u64::try_from(bundle.pid()).ok();
            leases_of(runtime.config(), bundle.id())
                .iter()
                .any(|lease| lease.state == "active" && lease.pid == pid)
        };
        assert!(held(&bundle) && held(&neighbour), "{low_level:?}: {:?}", leases(runtime.config()));
        drop(container);
        assert!(held(&neighbour), "{low_level:?}: the neighbour's lease is gone");
        drop(other);
        assert_eq!(leases(runtime.config()), [], "{low_level:?}");
        assert_eq!(tree(elsewhere.path()).len(), 1);
    });
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a18_a_whole_gpu_beside_a_share_is_refused_or_taken_out() {
    if !met(NEEDS) {
        return;
    }
    for low_level in LowLevel::ALL {
        let node = SimulatedNode::create(2, MODEL, "80GiB");
        let runtime = Runtime::wrapped(low_level, &node);
        let share = || share().env("GPUSHARE_DEVICES", "0");
        let other = json!({"path": "/dev/nvidia1", "type": "c", "major": 195, "minor": 1});
        let rule =
            |minor: Value| json!({"allow": true, "type": "c", "major": 195, "minor": minor, "access": "rwm"});
        let add = |spec: &mut Value, pointer: &str, entry: Value| {
            let list = spec.pointer_mut(pointer).and_then(Value::as_array_mut).expect("a list");
            list.push(entry);
        };
        let rules = "/linux/resources/devices";
        for (what, bundle) in [
            ("--device", share().edit(|spec| spec["linux"]["devices"] = json!([other]))),
            ("--device-cgroup-rule", share().edit(|spec| add(spec, rules, rule(json!(-1))))),
            ("a rule for another", share().edit(|spec| add(spec, rules, rule(json!(1))))),
            ("volume mounts", share().env("NVIDIA_VISIBLE_DEVICES", "/var/run/nvidia-container-devices")),
            ("a device of CDI", share().env("NVIDIA_VISIBLE_DEVICES", "nvidia.com/gpu=1")),
        ] {
            let line = runtime.create(&bundle).map(drop).expect_err(what).line();
            assert!(
                line.contains("GPUSHARE_DEVICES") || line.contains("NVIDIA_VISIBLE_DEVICES"),
                "{what}: {line}"
            );
            assert_eq!(leases(runtime.config()), [], "{low_level:?}: {what}");
        }
        // NVIDIA's hook of `--gpus all` is removed, and `all` gives no more than the share.
        let scratch = Scratch::new("nvidia");
        let marker = scratch.path().join("marker");
        let hook =
            scratch.file("nvidia-container-runtime-hook", format!("#!/bin/sh\n: >{}\n", marker.display()));
        fs::set_permissions(&hook, fs::Permissions::from_mode(0o755)).expect("a mode can be set");
        let bundle = share()
            .env("NVIDIA_VISIBLE_DEVICES", "all")
            .edit(|spec| spec["hooks"] = json!({"prestart": [{"path": hook, "args": ["x", "prestart"]}]}))
            .mount(json!({
                "destination": "/var/volume", "type": "bind", "source": node.root().join("dev"), "options": ["rbind"]
            }));
        let container = runtime.run(&bundle);
        assert!(!marker.exists(), "{low_level:?}: NVIDIA's hook ran");
        let open = "cat /var/volume/nvidia1; busybox mknod /tmp/x c 195 1 && cat /tmp/x; cat /dev/nvidia0";
        let told = container.exec(&["/bin/sh", "-c", open]).stderr;
        let words = |word| told.lines().filter(|line| line.contains(word)).count();
        assert_eq!(words("Operation not permitted"), 2, "{low_level:?}: {told}");
        assert_eq!(words("No such device"), 1, "{low_level:?}: {told}");
        drop(container);
    }
}

#[test]
#[ignore = "needs root, runc and crun: would run containers"]
fn a19_an_id_that_is_no_name_is_refused_before_a_path_is_built() {
    if !met(NEEDS) {
        return;
    }
    on_both(|node, runtime, low_level| {
        drop(runtime.run(&share()));
        // The note of refusals is written there, so it is left out.
        let files = || -> Vec<_> {
            tree(&node.state()).into_keys().filter(|path| !path.ends_with("refusals")).collect()
        };
        let before = files();
        // The runtime behind the wrapper does nothing. Without our refusal a low-level runtime would use such
        // an id.
        let scratch = Scratch::new("idle");
        let idle = Runtime::with_config(low_level, &idle_config(node, &scratch));
        let long = "a".repeat(4096);
        let absolute = scratch.path().join("x");
        for id in [
            "..",
            ".",
            "../x",
            "a/b",
            absolute.to_str().expect("paths are UTF-8"),
            "a\nb",
            "\u{1b}[31mred",
            "a b",
            "",
            ".hidden",
            "ä",
            "a\\b",
            &long,
        ] {
            let bundle = share();
            let log = bundle.path().join("log.json");
            let mut create = idle.command(&log, ["create", "--bundle"]);
            let outcome = command::run(create.arg(bundle.path()).arg(id));
            let line = outcome.stderr.trim_end();
            assert!(
                !outcome.success() && line.contains("container id"),
                "{low_level:?}: {id:.20?}: {outcome:?}"
            );
            assert!(!line.contains(char::is_control) && line.len() < 400, "{low_level:?}: {line:?}");
        }
        // crun would delete the folder that such an id leads to, whatever it holds. Only a folder of this
        // test may stand here, since without our refusal it is deleted.
        let victim = outside();
        let kept = tree(victim.path());
        let id = victim.path().to_str().expect("paths are UTF-8");
        let log = victim.path().with_extension("log");
        let outcome = command::run(runtime.command(&log, ["delete", "--force"]).arg(id));
        // The log may not have been made.
        let _ = fs::remove_file(&log);
        assert!(!outcome.success() && outcome.stderr.contains("container id"), "{low_level:?}: {outcome:?}");
        assert_eq!(tree(victim.path()), kept, "{low_level:?}");
        assert_eq!(files(), before, "{low_level:?}");
        assert_eq!(leases(runtime.config()), []);
    });
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a20_a_name_with_escapes_and_newlines_stays_one_line_wherever_it_is_shown() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let scratch = Scratch::new("odd");
    for (format, name) in [("text", "log"), ("json", "log.json")] {
        let log = node.root().join(name);
        let settings = format!(
            "{}\n[log]\nfile = \"{}\"\nformat = \"{format}\"",
            LowLevel::Runc.settings(),
            log.display()
        );
        let runtime = Runtime::with_config(LowLevel::Runc, &node.config_with(format, &settings));
        let odd = scratch.folder("a\u{1b}[2Jb\nc\"d'e\r\u{9b}31mf");
        let bundle = share().env("CGPU_DISABLE", "\u{1b}[31m\n");
        let with_root = |args: &[&str]| {
            let mut call = runtime.command(&bundle.path().join("log.json"), ["--root"]);
            call.arg(&odd).args(args);
            call
        };
        let folder = bundle.path().to_string_lossy().into_owned();
        let mut create = with_root(&["create", "--bundle", &folder, bundle.id()]);
        let _ = command::run_with_output_in(&mut create, bundle.path()).expect_success("create");
        let verbs: [&[&str]; 5] = [
            &["ps"],
            &["ps", "--json"],
            &["history"],
            &["devices"],
            &["release", "--root", "/\u{1b}[31m\nx", "y"],
        ];
        for verb in verbs {
            let outcome = cli(runtime.config(), verb);
            let shown = [outcome.stdout.as_str(), outcome.stderr.as_str()].concat();
            let raw = shown.chars().find(|letter| letter.is_control() && *letter != '\n');
            assert_eq!(raw, None, "{verb:?}: {shown:?}");
        }
        // One row for the heading, one for the container.
        assert_eq!(cli(runtime.config(), &["ps"]).stdout.lines().count(), 2);
        let _ = command::run(&mut with_root(&["delete", "--force", bundle.id()])).expect_success("delete");
        assert_eq!(leases(runtime.config()), []);
        // The refusal quotes what was asked for.
        let asked = "4GiB\u{1b}[2J\n\u{9b}31mforged";
        let line =
            runtime.create(&Bundle::small().env("GPUSHARE_MEMORY", asked)).map(drop).expect_err("odd").line();
        assert!(!line.contains(char::is_control), "{line:?}");
        let text = fs::read_to_string(&log).expect("the log can be read");
        let raw = text.chars().find(|letter| letter.is_control() && *letter != '\n');
        assert_eq!(raw, None, "{text:?}");
        assert!(!text.lines().any(|line| line.starts_with("c\"d") || line.starts_with("forged")), "{text}");
    }
}

#[test]
#[ignore = "needs root and runc: asks for shares"]
fn a21_a_huge_or_deep_configuration_costs_little_and_crashes_nothing() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    drop(Runtime::wrapped(LowLevel::Runc, &node).run(&share())); // reads the node's inventory
    let scratch = Scratch::new("idle");
    let config = idle_config(&node, &scratch);
    let many = |count: usize, make: &dyn Fn(usize) -> String| -> Vec<Value> {
        (0..count).map(|number| json!(make(number))).collect()
    };
    let env = |spec: &mut Value, entries: Vec<Value>| {
        let list = spec.pointer_mut("/process/env").and_then(Value::as_array_mut).expect("a list");
        list.extend(entries);
    };
    let path = "/a".repeat(1 << 20);
    let bundles: Vec<(&str, Bundle)> = vec![
        (
            "10 MiB of environment",
            share().edit(|spec| env(spec, many(1000, &|n| format!("A{n}={}", "x".repeat(10_000))))),
        ),
        ("100,000 variables", share().edit(|spec| env(spec, many(100_000, &|n| format!("V{n}=x"))))),
        (
            "150,000 variables of ours",
            share().edit(|spec| env(spec, many(150_000, &|n| format!("GPUSHARE_CONFIG{n}=x")))),
        ),
        (
            "200,000 equal variables",
            share().edit(|spec| env(spec, many(200_000, &|_| "GPUSHARE_MEMORY=4GiB".into()))),
        ),
        (
            "100,000 annotations",
            share().edit(|spec| {
                let list = spec["annotations"].as_object_mut().expect("an object");
                list.extend((0..100_000).map(|n| (format!("example.org/{n}"), json!("x"))));
            }),
        ),
        (
            "mounts at endless paths",
            share().edit(|spec| {
                let list = spec["mounts"].as_array_mut().expect("a list");
                list.push(
                    json!({"destination": path, "type": "bind", "source": "/tmp", "options": ["rbind"]}),
                );
            }),
        ),
        (
            "20,000 volumes",
            share().edit(|spec| {
                let list = spec["mounts"].as_array_mut().expect("a list");
                list.extend(
                    (0..20_000)
                        .map(|n| json!({"destination": format!("/v/{n}"), "type": "bind", "source": "/tmp"})),
                );
            }),
        ),
    ];
    for (what, bundle) in &bundles {
        let start = Instant::now();
        let outcome = bounded(&config, bundle);
        assert!(outcome.status.code().is_some(), "{what}: it was killed: {outcome:?}");
        assert!(outcome.success() || outcome.stderr.lines().count() == 1, "{what}: {outcome:?}");
        assert!(start.elapsed() < Duration::from_secs(10), "{what}: {:?}", start.elapsed());
        sweep(&config);
    }
    for (what, text) in [
        ("nesting", format!("{{\"x\":{}{}}}", "[".repeat(10_000), "]".repeat(10_000))),
        ("nested objects", format!("{}1{}", "{\"process\":".repeat(10_000), "}".repeat(10_000))),
        ("an open end", "[".repeat(1 << 20)),
        ("a file beyond any", format!("\"{}\"", "x".repeat(17 << 20))),
    ] {
        let bundle = Bundle::small();
        fs::write(bundle.config_path(), &text).expect("config.json can be written");
        let outcome = bounded(&config, &bundle);
        let line = outcome.stderr.trim_end();
        assert_eq!(outcome.status.code(), Some(1), "{what}: {outcome:?}");
        assert!(line.contains("config.json") && line.lines().count() == 1, "{what}: {line}");
    }
    // Of a key that stands twice, runc takes the last one and crun the first.
    let bundle = Bundle::small();
    let text = String::from_utf8(bundle.config_bytes()).expect("JSON is UTF-8");
    let twice = text.replacen(
        "\"annotations\":{}",
        "\"annotations\":{\"gpushare.io/memory\":\"80GiB\"},\"annotations\":{}",
        1,
    );
    assert_ne!(twice, text);
    fs::write(bundle.config_path(), &twice).expect("config.json can be written");
    let outcome = bounded(&config, &bundle);
    assert!(!outcome.success() && outcome.stderr.contains("annotations"), "{outcome:?}");
    assert_eq!(bundle.config_bytes(), twice.as_bytes(), "nothing was changed");
    assert_eq!(leases(&config), []);
}
