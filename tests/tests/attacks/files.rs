//! A46, A47 and A50: config.json as a file, and the files that ship.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::process::Command;
use std::time::Duration;

use gpushare_tests::artifacts::{self, Installed};
use gpushare_tests::bundle::Bundle;
use gpushare_tests::command;
use gpushare_tests::leases::{leases, sweep};
use gpushare_tests::needs::met;
use gpushare_tests::scratch::Scratch;
use nix::mount::{MsFlags, mount, umount};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::{Value, json};

use crate::{NEEDS, on_both, rounds, share, tree};

#[test]
#[ignore = "needs root, runc and crun: would run containers"]
fn a46_a_config_that_is_no_plain_file_is_refused_and_kept() {
    if !met(NEEDS) {
        return;
    }
    type Replace = fn(&Bundle);
    let odd: [(&str, Replace); 4] = [
        ("a link", |bundle| {
            fs::rename(bundle.config_path(), bundle.path().join("other")).expect("it can be renamed");
            symlink("other", bundle.config_path()).expect("a link can be made");
        }),
        ("a FIFO", |bundle| {
            fs::remove_file(bundle.config_path()).expect("it can be removed");
            mkfifo(&bundle.config_path(), Mode::S_IRWXU).expect("a FIFO can be made");
        }),
        ("a hard link", |bundle| {
            fs::hard_link(bundle.config_path(), bundle.path().join("other"))
                .expect("a hard link can be made");
        }),
        ("a folder", |bundle| {
            fs::remove_file(bundle.config_path()).expect("it can be removed");
            fs::create_dir(bundle.config_path()).expect("a folder can be made");
        }),
    ];
    on_both(|_, runtime, low_level| {
        for (what, replace) in odd {
            let bundle = share();
            replace(&bundle);
            let files = |bundle: &Bundle| {
                let names = ["config.json", "other"].map(|name| bundle.path().join(name));
                names.map(|path| {
                    (
                        tree(&path),
                        fs::metadata(&path).ok().filter(fs::Metadata::is_file).map(|_| fs::read(&path).ok()),
                    )
                })
            };
            let before = files(&bundle);
            let line = runtime.create_as_it_is(&bundle).map(drop).expect_err(what).line();
            assert!(line.contains("config.json"), "{low_level:?}: {what}: {line}");
            assert_eq!(files(&bundle), before, "{low_level:?}: {what}");
        }
        // A bundle on a read-only file system. Its image lies on a writable one.
        let bundle = share();
        let none: Option<&str> = None;
        for folder in [bundle.path(), &bundle.root()] {
            mount(Some(folder), folder, none, MsFlags::MS_BIND, none).expect("a bind mount can be made");
        }
        let read_only = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY;
        mount(none, bundle.path(), none, read_only, none).expect("it can be made read-only");
        let scratch = Scratch::new("log");
        let mut create = runtime.command(&scratch.path().join("log.json"), ["create", "--bundle"]);
        let outcome = command::run(create.arg(bundle.path()).arg(bundle.id()));
        for folder in [&bundle.root(), bundle.path()] {
            umount(folder).expect("it can be unmounted");
        }
        assert!(!outcome.success() && outcome.stderr.contains("config.json"), "{low_level:?}: {outcome:?}");
        assert_eq!(leases(runtime.config()), [], "{low_level:?}");
    });
}

#[test]
#[ignore = "needs root, runc and crun: runs containers"]
fn a46_fields_that_nobody_knows_and_texts_of_numbers_arrive_unchanged() {
    if !met(NEEDS) {
        return;
    }
    on_both(|_, runtime, low_level| {
        let bundle = share().edit(|spec| spec["process"]["rlimits"] = json!([]));
        let text = String::from_utf8(bundle.write()).expect("JSON is UTF-8");
        let odd = r#""x-future":{"a":1.0,"b":1e+2,"c":18446744073709551616,"d":-0,"é":"\u00e9"},"#;
        let text = text.replacen('{', &format!("{{{odd}"), 1);
        fs::write(bundle.config_path(), &text).expect("config.json can be written");
        let before = fs::metadata(bundle.config_path()).expect("it is there");
        let container = runtime.create_as_it_is(&bundle).expect("a field of the future hurts nobody");
        let after = String::from_utf8(bundle.config_bytes()).expect("JSON is UTF-8");
        let want = r#"{"x-future":{"a":1.0,"b":1e+2,"c":18446744073709551616,"d":-0,"é":"é"},"#;
        assert!(after.starts_with(want), "{low_level:?}: {after:.200}");
        let now = fs::metadata(bundle.config_path()).expect("it is there");
        assert_eq!((before.mode(), before.uid(), before.gid()), (now.mode(), now.uid(), now.gid()));
        drop(container);
    });
}

#[test]
#[ignore = "needs root, runc and crun: kills the wrapper while it creates"]
fn a47_a_config_is_whole_whenever_the_wrapper_is_killed() {
    if !met(NEEDS) {
        return;
    }
    on_both(|_, runtime, low_level| {
        drop(runtime.run(&share()));
        let (mut original, mut edited) = (0, 0);
        for round in 0..rounds(50) as u64 {
            // The configuration is large, so that writing it takes a while.
            let bundle = share().env("LARGE", &"x".repeat(120_000));
            let written = bundle.write();
            let mut create = runtime.spawn_create(&bundle);
            std::thread::sleep(Duration::from_micros(1500 + round % 50 * 600));
            // It may have ended before.
            let _ = create.kill();
            let _ = create.wait();
            let now = bundle.config_bytes();
            if now == written {
                original += 1;
            } else {
                let json: Value = serde_json::from_slice(&now)
                    .unwrap_or_else(|error| panic!("{low_level:?}: half a file: {error}"));
                assert!(json["hooks"]["prestart"].is_array(), "{low_level:?}: edited by halves");
                edited += 1;
            }
            runtime.delete_force(bundle.id());
            bundle.kill_orphans();
        }
        assert!(original > 0 && edited > 0, "{low_level:?}: {original} as they were, {edited} edited");
        assert!(command::eventually(Duration::from_secs(5), || {
            sweep(runtime.config());
            leases(runtime.config()).is_empty()
        }));
    });
}

#[test]
#[ignore = "needs root, runc and crun: would run containers"]
fn a47_a_config_is_whole_when_its_writing_is_cut_short() {
    if !met(NEEDS) {
        return;
    }
    on_both(|_, runtime, low_level| {
        drop(runtime.run(&share()));
        // Only the write of config.json reaches the limit, in the middle of the file, since nothing else is
        // as long.
        for limit in [500_000, 700_000, 1_000_000] {
            let bundle = share().env("LARGE", &"x".repeat(1 << 20));
            let written = bundle.write();
            let scratch = Scratch::new("log");
            let create = runtime.command(&scratch.path().join("log.json"), ["create", "--bundle"]);
            let mut limited = Command::new("/usr/bin/prlimit");
            limited.arg(format!("--fsize={limit}")).arg("--core=0").arg(create.get_program());
            limited.args(create.get_args()).arg(bundle.path()).arg(bundle.id()).env_clear();
            limited.envs(create.get_envs().filter_map(|(name, value)| Some((name, value?))));
            let outcome = command::run(&mut limited);
            assert_eq!(outcome.status.code(), Some(1), "{low_level:?}: {limit}: {outcome:?}");
            assert!(outcome.stderr.contains("ulimit -f"), "{low_level:?}: {limit}: {outcome:?}");
            assert!(bundle.config_bytes() == written, "{low_level:?}: {limit}: the original is gone");
            sweep(runtime.config());
            assert_eq!(leases(runtime.config()), [], "{low_level:?}: {limit}");
        }
    });
}

#[test]
#[ignore = "needs root, runc and crun: mounts a small tmpfs"]
fn a47_a_bundle_without_room_keeps_its_config() {
    if !met(NEEDS) {
        return;
    }
    on_both(|_, runtime, low_level| {
        let bundle = share();
        let text = bundle.write();
        mount(Some("tmpfs"), bundle.path(), Some("tmpfs"), MsFlags::empty(), Some("size=16k"))
            .expect("a tmpfs can be mounted");
        fs::create_dir(bundle.root()).expect("a folder can be made");
        fs::write(bundle.config_path(), &text).expect("config.json fits");
        // The write takes all the room there is and then fails, as the test needs it.
        let _ = fs::write(bundle.path().join("litter"), vec![0; 1 << 16]);
        let scratch = Scratch::new("log");
        let mut create = runtime.command(&scratch.path().join("log.json"), ["create", "--bundle"]);
        let outcome = command::run(create.arg(bundle.path()).arg(bundle.id()));
        let (now, names) = (bundle.config_bytes(), fs::read_dir(bundle.path()).expect("a folder").count());
        umount(bundle.path()).expect("it can be unmounted");
        assert!(
            !outcome.success() && outcome.stderr.contains("cannot write config.json"),
            "{low_level:?}: {outcome:?}"
        );
        assert!(now == text, "{low_level:?}: the original is gone");
        assert_eq!(names, 3, "{low_level:?}: no half file is left");
        assert_eq!(leases(runtime.config()), [], "{low_level:?}");
    });
}

#[test]
#[ignore = "needs the release build: reads its files"]
fn a50_what_ships_is_static_and_has_no_special_rights() {
    let installed = Installed::new();
    for (path, _) in tree(installed.root()) {
        let metadata = fs::symlink_metadata(&path).expect("it is there");
        let mode = metadata.permissions().mode();
        assert!(metadata.is_symlink() || mode & 0o6022 == 0, "{}: {mode:o}", path.display());
    }
    for program in [artifacts::wrapper(), artifacts::hook()] {
        let mut readelf = Command::new("readelf");
        let told = command::run(readelf.args(["--wide", "--program-headers", "--dynamic"]).arg(&program))
            .expect_success("readelf")
            .stdout;
        assert!(!told.contains("INTERP") && !told.contains("(NEEDED)"), "{}", program.display());
        assert!(!told.contains("RWE"), "{} has memory that is written and run", program.display());
    }
}
