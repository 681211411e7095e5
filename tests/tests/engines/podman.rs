//! podman as root: by `--runtime`, by the default runtime of its settings, and by `--hooks-dir` over plain
//! runc.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use gpushare_tests::command::{self, Outcome};
use gpushare_tests::hooked::{When, hooks_folder};
use gpushare_tests::image::{self, IMAGE};
use gpushare_tests::podman::{EVERY, PODMAN, runtime_script, storage};
use gpushare_tests::runtime::LowLevel;
use gpushare_tests::scratch::Scratch;

use crate::docker;
use crate::engine::{Engine, FIRST_MAPPED, Wanted, With};

/// A podman with a storage of its own.
pub struct Podman {
    scratch: Scratch,
    runtime: PathBuf,
    containers_conf: PathBuf,
    hooks: Option<PathBuf>,
}

impl Podman {
    /// Sets up the storage, loads the image, and makes gpushare known. conmon gives runtimes only its own
    /// environment, so a script that names the settings file `config` stands before the wrapper.
    pub fn start(wrapper: &Path, config: &Path) -> Self {
        let scratch = Scratch::new("podman");
        let runtime = runtime_script(&scratch, wrapper, config);
        let settings = format!(
            "[engine]\nruntime = \"gpushare\"\n[engine.runtimes]\ngpushare = [\"{}\"]\n",
            runtime.display()
        );
        Self::with(scratch, runtime, &settings, None)
    }

    /// Sets up the storage, loads the image, and names gpushare's `hook` in a folder of hooks. No runtime is
    /// gpushare's.
    pub fn by_hooks(hook: &Path, config: &Path) -> Self {
        let scratch = Scratch::new("podman");
        let hooks = hooks_folder(&scratch, hook, config, When::Always);
        Self::with(scratch, LowLevel::Runc.program().into(), "", Some(hooks))
    }

    fn with(scratch: Scratch, runtime: PathBuf, settings: &str, hooks: Option<PathBuf>) -> Self {
        let containers_conf = scratch.file("containers.conf", settings);
        let podman = Self { scratch, runtime, containers_conf, hooks };
        let archive = image::archive(&podman.scratch);
        podman.done(&["load", "--quiet", "--input", &archive.to_string_lossy()]);
        podman
    }

    fn call(&self, args: &[&str]) -> Outcome {
        let mut podman = Command::new(PODMAN);
        storage(&mut podman, &self.scratch);
        podman.args(self.hooks.iter().map(|hooks| format!("--hooks-dir={}", hooks.display())));
        // conmon leaves a file called `oom` in the folder in which podman was called.
        podman.env("CONTAINERS_CONF", &self.containers_conf).current_dir(self.scratch.path());
        command::run(podman.args(args))
    }

    fn done(&self, args: &[&str]) {
        let _ = self.call(args).expect_success(&format!("podman {args:?}"));
    }

    fn inspect(&self, name: &str, template: &str) -> String {
        let outcome = self.call(&["inspect", "--format", template, name]).expect_success("podman inspect");
        outcome.stdout.trim().to_owned()
    }
}

impl Engine for Podman {
    fn folder(&self) -> &Path {
        self.scratch.path()
    }

    fn run(&mut self, wanted: &Wanted) -> Result<(), String> {
        let mut words: Vec<String> = Vec::new();
        let runtime = if wanted.has(With::PlainRunc) { OsStr::new("runc") } else { self.runtime.as_os_str() };
        if !wanted.has(With::DefaultRuntime) {
            words.push(format!("--runtime={}", runtime.to_string_lossy()));
        }
        words.extend(["run", "--detach"].map(str::to_owned));
        words.push(format!("--name={}", wanted.name));
        words.extend(EVERY.map(str::to_owned));
        words.extend(Wanted::pairs(&wanted.env, "--env"));
        words.extend(Wanted::pairs(&wanted.annotations, "--annotation"));
        words.extend(wanted.with.iter().flat_map(|with| docker::flags(*with)));
        if wanted.has(With::UserNamespace) {
            words.extend(["uidmap", "gidmap"].map(|map| format!("--{map}=0:{FIRST_MAPPED}:65536")));
        }
        words.push(IMAGE.to_owned());
        words.extend(wanted.args.clone());
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let outcome = self.call(&words);
        if outcome.success() { Ok(()) } else { Err(outcome.stderr) }
    }

    fn exec(&self, name: &str, args: &[&str]) -> Outcome {
        self.call(&[&["exec", name], args].concat())
    }

    fn id(&self, name: &str) -> String {
        self.inspect(name, "{{.Id}}")
    }

    fn pid(&self, name: &str) -> i32 {
        self.inspect(name, "{{.State.Pid}}").parse().expect("podman tells the process id")
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
        let _ = self.call(&["rm", "--force", "--time=0", name]);
    }

    fn is_running(&self, name: &str) -> bool {
        self.inspect(name, "{{.State.Status}}") == "running"
    }

    fn pause(&self, name: &str) {
        self.done(&["pause", name]);
    }

    fn unpause(&self, name: &str) {
        self.done(&["unpause", name]);
    }

    fn update(&self, name: &str) {
        self.done(&["update", "--cpu-shares=512", name]);
    }

    /// podman runs the folder's poststop hooks itself, and only for containers that have started.
    fn tells_of_a_failed_start(&self) -> bool {
        self.hooks.is_none()
    }

    fn refuses_as(&self) -> &'static str {
        if self.hooks.is_some() { "gpushare-hook" } else { "gpushare-runtime" }
    }
}
