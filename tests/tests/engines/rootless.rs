//! podman of an ordinary user. Its runtime is root in a user namespace only and cannot see what root granted
//! to others, so that a request has to be refused.

use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};

use gpushare_tests::command::{self, Outcome};
use gpushare_tests::image::{self, IMAGE};
use gpushare_tests::leases::leases;
use gpushare_tests::podman::{EVERY, PODMAN, runtime_script, storage};
use gpushare_tests::scratch::Scratch;
use gpushare_tests::view;

use crate::engine::USER;
use crate::place::Place;

/// The user's own podman.
pub struct Podman {
    scratch: Scratch,
    runtime: PathBuf,
}

impl Podman {
    /// Sets up a home, a storage and subordinate ids for the user, and loads the image.
    pub fn start(wrapper: &Path, config: &Path) -> Self {
        let scratch = Scratch::new("rootless");
        let runtime = runtime_script(&scratch, wrapper, config);
        scratch.file("ids", "tester:200000:65536\n");
        scratch.file("passwd", format!("root:x:0:0::/root:/bin/sh\ntester:x:{USER}:{USER}::/:/bin/sh\n"));
        scratch.file("group", format!("root:x:0:\ntester:x:{USER}:\n"));
        let archive = image::archive(&scratch);
        for folder in ["root", "run", "tmp", "home", "session"] {
            chown(scratch.folder(folder), Some(USER), Some(USER)).expect("root can give a folder away");
        }
        let podman = Self { scratch, runtime };
        let _ = podman
            .call(&["load", "--quiet", "--input", &archive.to_string_lossy()])
            .expect_success("podman load");
        podman
    }

    /// `podman ARGS...` of the user, on a machine where the user exists.
    fn call(&self, args: &[&str]) -> Outcome {
        let base = self.scratch.path().display();
        let bind = |from: &str, to: &str| format!("mount --bind '{base}/{from}' /etc/{to}");
        let script =
            [bind("ids", "subuid"), bind("ids", "subgid"), bind("passwd", "passwd"), bind("group", "group")]
                .join(" && ");
        let mut command = view::prepared(&script, "/usr/bin/setpriv".as_ref());
        let user = USER.to_string();
        command.args(["--reuid", &user, "--regid", &user, "--clear-groups", "--inh-caps=-all", PODMAN]);
        storage(&mut command, &self.scratch);
        command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        command.env("HOME", self.scratch.path().join("home"));
        command.env("XDG_RUNTIME_DIR", self.scratch.path().join("session"));
        command::run(command.args(args).current_dir("/"))
    }

    fn run(&self, flags: &[&str], args: &[&str]) -> Outcome {
        let runtime = format!("--runtime={}", self.runtime.display());
        self.call(&[&[runtime.as_str(), "run", "--rm"], &EVERY[..], flags, &[IMAGE], args].concat())
    }
}

/// The request is refused with the reason, and a container without a request runs.
pub fn is_told_in_one_line(podman: &Podman, place: &Place) {
    let plain = podman.run(&[], &["id", "-u"]).expect_success("podman run without a request");
    assert_eq!(plain.stdout, "0\n");
    let refused = podman.run(&["--env=GPUSHARE_MEMORY=4GiB"], &["true"]);
    assert!(!refused.success(), "{refused:?}");
    let line = refused.stderr.lines().find(|line| line.contains("gpushare-runtime:"));
    let line = line.unwrap_or_else(|| panic!("no line of ours: {}", refused.stderr));
    assert!(line.contains("cannot lease a GPU") && line.contains("rootless engine"), "{line}");
    assert_eq!(leases(&place.config), []);
}
