//! docker, by its command line.

use std::path::Path;

use gpushare_tests::command::Outcome;
use gpushare_tests::docker::Docker;

use crate::engine::{Engine, LITTLE_MEMORY, USER, Wanted, With};

/// A private docker with gpushare as a runtime.
pub struct DockerEngine(pub Docker);

impl DockerEngine {
    fn done(&self, args: &[&str]) {
        let _ = self.0.call(args).expect_success(&format!("docker {args:?}"));
    }
}

/// The flags of `docker run` and `podman run` for what is the same in both.
pub fn flags(with: With) -> Vec<String> {
    let words: &[&str] = match with {
        With::ReadOnlyRoot => &["--read-only"],
        With::User => return vec![format!("--user={USER}:{USER}")],
        With::NoCapabilities => &["--cap-drop=ALL"],
        With::NoNewPrivileges => &["--security-opt=no-new-privileges"],
        With::HostPids => &["--pid=host"],
        With::Privileged => &["--privileged"],
        With::LittleMemory => return vec![format!("--memory={LITTLE_MEMORY}")],
        With::Gpus => &["--gpus=all"],
        // The daemon or the caller arranges these.
        With::UserNamespace | With::DefaultRuntime | With::PlainRunc => &[],
    };
    words.iter().map(|&word| word.to_owned()).collect()
}

impl Engine for DockerEngine {
    fn folder(&self) -> &Path {
        self.0.folder()
    }

    fn run(&mut self, wanted: &Wanted) -> Result<(), String> {
        let mut words = vec!["--detach".to_owned(), format!("--name={}", wanted.name)];
        if wanted.has(With::PlainRunc) {
            words.push("--runtime=runc".to_owned());
        } else if !wanted.has(With::DefaultRuntime) {
            words.push("--runtime=gpushare".to_owned());
        }
        words.extend(Wanted::pairs(&wanted.env, "--env"));
        words.extend(Wanted::pairs(&wanted.annotations, "--annotation"));
        words.extend(wanted.with.iter().flat_map(|with| flags(*with)));
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let args: Vec<&str> = wanted.args.iter().map(String::as_str).collect();
        let outcome = self.0.run(&words, &args);
        if outcome.success() { Ok(()) } else { Err(outcome.stderr) }
    }

    fn exec(&self, name: &str, args: &[&str]) -> Outcome {
        self.0.call(&[&["exec", name], args].concat())
    }

    fn id(&self, name: &str) -> String {
        self.0.inspect(name, "{{.Id}}")
    }

    fn pid(&self, name: &str) -> i32 {
        self.0.pid(name)
    }

    fn stop(&mut self, name: &str) {
        self.done(&["stop", "--time=10", name]);
    }

    fn kill(&mut self, name: &str) {
        self.done(&["kill", name]);
    }

    fn restart(&mut self, name: &str) {
        self.done(&["restart", "--time=10", name]);
    }

    fn remove(&mut self, name: &str) {
        // It may never have been made.
        let _ = self.0.call(&["rm", "--force", name]);
    }

    fn is_running(&self, name: &str) -> bool {
        self.0.inspect(name, "{{.State.Status}}") == "running"
    }

    fn pause(&self, name: &str) {
        self.done(&["pause", name]);
    }

    fn unpause(&self, name: &str) {
        self.done(&["unpause", name]);
    }

    fn update(&self, name: &str) {
        // crun takes docker's zero for memory that is not named literally, and fails.
        self.done(&["update", "--cpu-shares=512", "--memory=2g", "--memory-swap=2g", name]);
    }

    fn was_killed_for_memory(&self, name: &str) -> Option<bool> {
        Some(self.0.inspect(name, "{{.State.OOMKilled}}") == "true")
    }

    fn crash(&mut self, meanwhile: &mut dyn FnMut()) {
        self.0.kill_daemon();
        meanwhile();
        self.0.start_daemon_again();
    }

    fn mounts_of(&self) -> u32 {
        self.0.containerd().pid()
    }
}
