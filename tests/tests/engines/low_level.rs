//! runc and crun themselves, called as people call them by hand, with the wrapper in their place.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use gpushare_tests::bundle::Bundle;
use gpushare_tests::command::{self, Outcome, eventually};
use gpushare_tests::runtime::{LowLevel, Runtime};
use gpushare_tests::view::View;
use serde_json::json;

use crate::engine::{Engine, FIRST_MAPPED, LITTLE_MEMORY, USER, Wanted, With};

/// The wrapper in front of one low-level runtime, and the bundles it ran.
pub struct Bundles {
    runtime: Runtime,
    bundles: BTreeMap<&'static str, Bundle>,
}

impl Bundles {
    /// The wrapper, which is told by `config` which low-level runtime to use, in the cgroup view `view`.
    pub fn new(low_level: LowLevel, config: &Path, view: View) -> Self {
        Self { runtime: Runtime::with_config(low_level, config).in_view(view), bundles: BTreeMap::new() }
    }

    fn call(&self, args: &[&str], name: &str) -> Outcome {
        self.runtime.call(args, &self.id(name))
    }

    fn signal(&self, name: &str, signal: &str) {
        let id = self.id(name);
        let log = self.folder().join("kill.json");
        let _ = command::run(&mut self.runtime.command(&log, ["kill", &id, signal]));
    }

    /// Sends the signal until the container has ended: a first process that has not set its trap yet ignores
    /// every signal but SIGKILL.
    fn end(&self, name: &str, signal: &str) {
        let id = self.id(name);
        let ended = eventually(Duration::from_secs(20), || {
            self.signal(name, signal);
            self.runtime.status(&id).as_deref() == Some("stopped")
        });
        assert!(ended, "{name} outlived its end: {:?}", self.runtime.status(&id));
    }

    fn start(&self, name: &str) -> Result<(), String> {
        let bundle = &self.bundles[name];
        let said = |outcome: Outcome| if outcome.success() { Ok(()) } else { Err(outcome.stderr) };
        let created = self.runtime.create(bundle).map(|container| container.leave());
        let started = created
            .map_err(|refusal| refusal.outcome.stderr)
            .and_then(|()| said(self.runtime.call(&["start"], bundle.id())));
        if started.is_err() {
            // Every engine makes this call after a failed create.
            self.runtime.delete_force(bundle.id());
        }
        started
    }
}

impl Engine for Bundles {
    fn folder(&self) -> &Path {
        self.runtime.folder()
    }

    fn run(&mut self, wanted: &Wanted) -> Result<(), String> {
        self.bundles.insert(wanted.name, bundle(wanted));
        self.start(wanted.name)
    }

    fn exec(&self, name: &str, args: &[&str]) -> Outcome {
        self.runtime.exec(&self.id(name), args)
    }

    fn id(&self, name: &str) -> String {
        self.bundles[name].id().to_owned()
    }

    fn pid(&self, name: &str) -> i32 {
        self.bundles[name].pid()
    }

    fn stop(&mut self, name: &str) {
        self.end(name, "15");
        let _ = self.call(&["delete"], name).expect_success("delete");
    }

    fn kill(&mut self, name: &str) {
        self.end(name, "9");
        let _ = self.call(&["delete"], name).expect_success("delete");
    }

    fn restart(&mut self, name: &str) {
        self.stop(name);
        self.start(name).unwrap_or_else(|said| panic!("{name} does not start again: {said}"));
    }

    fn remove(&mut self, name: &str) {
        if let Some(bundle) = self.bundles.remove(name) {
            self.runtime.delete_force(bundle.id());
        }
    }

    fn is_running(&self, name: &str) -> bool {
        self.runtime.status(&self.id(name)).as_deref() == Some("running")
    }

    fn pause(&self, name: &str) {
        let _ = self.call(&["pause"], name).expect_success("pause");
    }

    fn unpause(&self, name: &str) {
        let _ = self.call(&["resume"], name).expect_success("resume");
    }

    fn mounts_of(&self) -> u32 {
        self.runtime.mounts_of()
    }

    fn update(&self, name: &str) {
        let _ = self.call(&["update", "--cpu-share", "512"], name).expect_success("update");
    }
}

fn bundle(wanted: &Wanted) -> Bundle {
    let args: Vec<&str> = wanted.args.iter().map(String::as_str).collect();
    let bundle = Bundle::with_probe().args(&args);
    let bundle = wanted.env.iter().fold(bundle, |bundle, (name, value)| bundle.env(name, value));
    let bundle =
        wanted.annotations.iter().fold(bundle, |bundle, (name, value)| bundle.annotation(name, value));
    let bundle = wanted.with.iter().fold(bundle, |bundle, with| differs(bundle, *with));
    if wanted.has(With::UserNamespace) {
        // Engines give the image's files to the root of the user namespace.
        let mut chown = Command::new("chown");
        chown.arg("--recursive").arg(format!("{FIRST_MAPPED}:{FIRST_MAPPED}")).arg(bundle.root());
        let _ = command::run(&mut chown).expect_success("chown of the image");
    }
    bundle
}

fn differs(bundle: Bundle, with: With) -> Bundle {
    bundle.edit(|spec| match with {
        With::ReadOnlyRoot => spec["root"]["readonly"] = json!(true),
        With::User => spec["process"]["user"] = json!({"uid": USER, "gid": USER}),
        With::NoCapabilities => spec["process"]["capabilities"] = json!({}),
        With::NoNewPrivileges => spec["process"]["noNewPrivileges"] = json!(true),
        With::HostPids => {
            let namespaces = spec["linux"]["namespaces"].as_array_mut().expect("the spec has namespaces");
            namespaces.retain(|namespace| namespace["type"] != "pid");
        }
        With::Privileged => {
            spec["linux"]["resources"]["devices"] = json!([{"allow": true, "access": "rwm"}]);
        }
        With::UserNamespace => {
            let map = json!([{"containerID": 0, "hostID": FIRST_MAPPED, "size": 65536}]);
            spec["linux"]["uidMappings"] = map.clone();
            spec["linux"]["gidMappings"] = map;
            let namespaces = spec["linux"]["namespaces"].as_array_mut().expect("the spec has namespaces");
            namespaces.push(json!({"type": "user"}));
        }
        With::LittleMemory => {
            spec["linux"]["resources"]["memory"] = json!({"limit": LITTLE_MEMORY, "swap": LITTLE_MEMORY});
        }
        With::DefaultRuntime | With::PlainRunc | With::Gpus => {
            unreachable!("the table says that a low-level runtime knows nothing of {with:?}")
        }
    })
}
