//! A44 to A46, A48 and A49: the administrator's files, the driver's, keys of config.json, the engine's log,
//! and which program runs.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use gpushare_tests::artifacts;
use gpushare_tests::bundle::Bundle;
use gpushare_tests::command;
use gpushare_tests::leases::leases;
use gpushare_tests::needs::met;
use gpushare_tests::node::{SimulatedNode, driver_version};
use gpushare_tests::runtime::{LowLevel, Runtime};
use gpushare_tests::scratch::Scratch;
use nix::sys::stat::Mode;
use nix::unistd::{Uid, chown, mkfifo};

use crate::{NEEDS, on_both, outside, share, tree};

fn mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("a mode can be set");
}

#[test]
#[ignore = "needs root, runc and crun: would run containers"]
fn a44_settings_that_others_may_write_or_that_hold_a_slip_are_refused() {
    if !met(NEEDS) {
        return;
    }
    on_both(|node, _, low_level| {
        type Spoil = fn(&Path, &Path);
        let slips: [(&str, Spoil, &str); 7] = [
            (
                "a folder of drop-ins that is none",
                |_, drop_ins| {
                    fs::remove_dir(drop_ins).expect("it can be removed");
                    fs::write(drop_ins, "").expect("a file can be written");
                },
                ".toml.d",
            ),
            ("group-writable", |file, _| mode(file, 0o664), ".toml"),
            (
                "another user's",
                |file, _| chown(file, Some(Uid::from_raw(65534)), None).expect("it can be given away"),
                ".toml",
            ),
            (
                "a linked drop-in",
                |_, drop_ins| {
                    symlink("/etc/hostname", drop_ins.join("a.toml")).expect("a link can be made");
                },
                "a.toml",
            ),
            (
                "a writable drop-in",
                |_, drop_ins| {
                    fs::write(drop_ins.join("a.toml"), "").expect("a file can be written");
                    mode(&drop_ins.join("a.toml"), 0o666);
                },
                "a.toml",
            ),
            (
                "an unknown key",
                |_, drop_ins| {
                    fs::write(drop_ins.join("a.toml"), "[request]\n\nstrickt = true\n")
                        .expect("a file can be written");
                },
                "a.toml:3:",
            ),
            (
                "a wrong type",
                |_, drop_ins| {
                    fs::write(drop_ins.join("a.toml"), "[request]\nstrict = 1\n")
                        .expect("a file can be written");
                },
                "a.toml:2:",
            ),
        ];
        for (number, (what, spoil, part)) in slips.into_iter().enumerate() {
            let file = node.config_with(&format!("slip{number}"), &low_level.settings());
            let drop_ins = file.with_extension("toml.d");
            fs::create_dir(&drop_ins).expect("a folder can be made");
            spoil(&file, &drop_ins);
            let runtime = Runtime::with_config(low_level, &file);
            let line = runtime.create(&share()).map(drop).expect_err(what).line();
            assert!(line.contains(part), "{low_level:?}: {what}: {line}");
        }
    });
}

#[test]
#[ignore = "needs root, runc and crun: would run containers"]
fn a45_driver_files_that_others_could_change_are_not_mounted() {
    if !met(NEEDS) {
        return;
    }
    on_both(|_, _, low_level| {
        type Spoil = fn(&Path, &Path);
        let spoilt: [(&str, Spoil); 4] = [
            ("a writable folder", |folder, _| mode(folder, 0o777)),
            ("a writable file", |_, file| mode(file, 0o666)),
            ("another user's file", |_, file| {
                chown(file, Some(Uid::from_raw(65534)), None).expect("it can be given away")
            }),
            ("a link that leads outside", |folder, file| {
                // The library itself is as good as the one within the driver root. Only its place is wrong.
                let node = folder.ancestors().nth(4).expect("the driver root has a folder");
                fs::rename(file, node.join("elsewhere")).expect("it can be moved");
                symlink("../../../../elsewhere", file).expect("a link can be made");
            }),
        ];
        for (what, spoil) in spoilt {
            let node = SimulatedNode::one_gpu();
            let runtime = Runtime::wrapped(low_level, &node);
            drop(runtime.run(&share())); // on a sound node
            spoil(&node.libraries(), &node.libraries().join(format!("libcuda.so.{}", driver_version())));
            let line = runtime.create(&share()).map(drop).expect_err(what).line();
            assert!(
                line.contains("libcuda.so") || line.contains(&*node.libraries().to_string_lossy()),
                "{what}: {line}"
            );
            assert_eq!(leases(runtime.config()), [], "{low_level:?}: {what}");
        }
    });
}

#[test]
#[ignore = "needs root, runc and crun: would run containers"]
fn a46_a_key_that_runtimes_read_in_different_ways_is_refused() {
    if !met(NEEDS) {
        return;
    }
    // The text that is put at the beginning of config.json, and the key that the refusal names.
    let node = r#"{"path":"/dev/nvidia1","type":"c","major":195,"minor":1}"#;
    let rule = r#"{"allow":true,"type":"c","major":195,"access":"rw"}"#;
    let insertions = [
        (format!(r#""Linux":{{"devices":[{node}]}}"#), "Linux"),
        (format!(r#""LINUX":{{"resources":{{"devices":[{rule}]}}}}"#), "LINUX"),
        (r#""Process":{"capabilities":{"bounding":["CAP_SYS_ADMIN"]}}"#.to_owned(), "Process"),
        (r#""proce\u017fs":{"capabilities":{"bounding":["CAP_SYS_ADMIN"]}}"#.to_owned(), "process"),
        (r#""Hooks":{"prestart":[]}"#.to_owned(), "Hooks"),
        (r#""hoo\u212as":{"prestart":[]}"#.to_owned(), "hooks"),
        (
            r#""Mounts":[{"destination":"/host","type":"bind","source":"/","options":["rbind"]}]"#.to_owned(),
            "Mounts",
        ),
        (r#""Annotations":{"gpushare.io/memory":"80GiB"}"#.to_owned(), "Annotations"),
        (r#""Root":{"path":"/"}"#.to_owned(), "Root"),
        (format!(r#""linux":{{"devices":[{node}]}}"#), "linux"),
        (format!(r#""linux\u0000":{{"devices":[{node}]}}"#), "linux"),
    ];
    on_both(|simulated, runtime, low_level| {
        let strict =
            simulated.config_with("strict", &format!("{}\n[request]\nstrict = true", low_level.settings()));
        let strict = Runtime::with_config(low_level, &strict);
        for (insertion, key) in &insertions {
            for (runtime, bundle) in [(runtime, share()), (runtime, Bundle::small()), (&strict, share())] {
                let text = String::from_utf8(bundle.write()).expect("JSON is UTF-8");
                let text = text.replacen('{', &format!("{{{insertion},"), 1);
                fs::write(bundle.config_path(), &text).expect("config.json can be written");
                let line = runtime.create_as_it_is(&bundle).map(drop).expect_err(insertion).line();
                assert!(line.contains(key), "{low_level:?}: {insertion}: {line}");
                assert_eq!(bundle.config_bytes(), text.as_bytes(), "{low_level:?}: {insertion}");
                assert_eq!(runtime.status(bundle.id()), None, "{low_level:?}: {insertion}");
                assert_eq!(leases(runtime.config()), [], "{low_level:?}: {insertion}");
            }
        }
    });
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a48_a_log_that_cannot_be_written_neither_hangs_nor_leads_elsewhere() {
    if !met(NEEDS) {
        return;
    }
    on_both(|_, runtime, low_level| {
        let outside = outside();
        let before = tree(outside.path());
        let scratch = Scratch::new("logs");
        let fifo = scratch.path().join("fifo");
        mkfifo(&fifo, Mode::S_IRWXU).expect("a FIFO can be made");
        symlink(outside.path().join("kept"), scratch.path().join("link")).expect("a link can be made");
        symlink(outside.path().join("new"), scratch.path().join("dangling")).expect("a link can be made");
        for name in ["fifo", "link", "dangling", "no/such/folder", "."] {
            let bundle = Bundle::small().env("GPUSHARE_MEMORY", "garbage");
            let start = Instant::now();
            let mut create = runtime.command(&scratch.path().join(name), ["create", "--bundle"]);
            let outcome = command::run(create.arg(bundle.path()).arg(bundle.id()));
            assert!(
                !outcome.success() && outcome.stderr.contains("garbage"),
                "{low_level:?}: {name}: {outcome:?}"
            );
            assert!(start.elapsed() < Duration::from_secs(5), "{low_level:?}: {name}");
            assert_eq!(tree(outside.path()), before, "{low_level:?}: {name}");
        }
        // gpushare must start a container where the low-level runtime itself does.
        let bare = Runtime::bare(low_level);
        for name in ["link", "no/such/folder"] {
            let run = |runtime: &Runtime, bundle: &Bundle| {
                let mut create = runtime.command(&scratch.path().join(name), ["create", "--bundle"]);
                create.arg(bundle.path()).arg(bundle.id());
                let outcome = command::run_with_output_in(&mut create, bundle.path());
                runtime.delete_force(bundle.id());
                outcome.success()
            };
            assert_eq!(run(runtime, &share()), run(&bare, &Bundle::small()), "{low_level:?}: {name}");
        }
    });
}

#[test]
#[ignore = "needs root and runc: runs containers"]
fn a49_the_settings_alone_choose_the_program_that_runs() {
    if !met(NEEDS) {
        return;
    }
    let node = SimulatedNode::one_gpu();
    let runtime = Runtime::wrapped(LowLevel::Runc, &node);
    let scratch = Scratch::new("false");
    let marker = scratch.path().join("marker");
    for name in ["runc", "crun", "gpushare", "gpushare-hook", "sh"] {
        let path = scratch.file(name, format!("#!/bin/busybox sh\n: >{}\n", marker.display()));
        mode(&path, 0o755);
    }
    let paths = [None, Some(String::new()), Some(scratch.path().display().to_string()), Some(".".to_owned())];
    for path in paths {
        let bundle = share();
        let mut create = runtime.command(&bundle.path().join("log.json"), ["create", "--bundle"]);
        create.arg(bundle.path()).arg(bundle.id()).current_dir(scratch.path());
        match &path {
            Some(path) => create.env("PATH", path),
            None => create.env_remove("PATH"),
        };
        let outcome = command::run_with_output_in(&mut create, bundle.path());
        assert!(outcome.success(), "{path:?}: {outcome:?}");
        runtime.delete_force(bundle.id());
        assert!(!marker.exists(), "{path:?}");
        assert_eq!(leases(runtime.config()), []);
    }
    // The wrapper is named as its own low-level runtime, by its own path or by another. It says so and does
    // not call itself for ever.
    let link = scratch.path().join("runtime");
    symlink(artifacts::wrapper(), &link).expect("a link can be made");
    for (number, program) in [artifacts::wrapper(), link].into_iter().enumerate() {
        let settings = format!("[runtime]\ncandidates = [\"{}\"]", program.display());
        let config = node.config_with(&format!("itself{number}"), &settings);
        for args in [&["state", "x"][..], &["create", "x"], &["delete", "x"], &["--version"]] {
            let mut call = Command::new(artifacts::wrapper());
            let outcome = command::run(call.args(args).env_clear().env("GPUSHARE_CONFIG", &config));
            let told = outcome.stderr.contains("runtime.candidates names gpushare-runtime itself");
            assert!(!outcome.success() && told, "{args:?}: {outcome:?}");
        }
    }
}
