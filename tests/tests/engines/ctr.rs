//! containerd, by its own command line `ctr`.

use std::path::Path;
use std::time::Duration;

use gpushare_tests::command::{Outcome, eventually};
use gpushare_tests::containerd::{Containerd, WITHOUT_CRI};
use gpushare_tests::image::{self, IMAGE};
use gpushare_tests::view::View;

use crate::engine::{Engine, LITTLE_MEMORY, Wanted, With};

const NAMESPACE: &str = "gpushare-tests";

/// A private containerd whose containers are run with gpushare in runc's place.
pub struct Ctr {
    containerd: Containerd,
    wrapper: String,
}

impl Ctr {
    /// Starts containerd and loads the image.
    pub fn start(wrapper: &Path, config: &Path) -> Self {
        let containerd = Containerd::start(config, View::AsItIs, WITHOUT_CRI);
        let archive = image::archive(containerd.scratch());
        let import = ["image", "import", &archive.to_string_lossy()].map(str::to_owned);
        let ctr = Self { containerd, wrapper: wrapper.to_string_lossy().into_owned() };
        ctr.done(&import.each_ref().map(String::as_str));
        ctr
    }

    fn call(&self, args: &[&str]) -> Outcome {
        self.containerd.ctr(NAMESPACE, args)
    }

    fn done(&self, args: &[&str]) {
        let _ = self.call(args).expect_success(&format!("ctr {args:?}"));
    }

    /// Pid and state in the line of `ctr task ls` about `name`.
    fn task(&self, name: &str) -> Option<(i32, String)> {
        let listing = self.call(&["task", "ls"]).stdout;
        let line = listing.lines().find(|line| line.split_whitespace().next() == Some(name))?;
        let mut fields = line.split_whitespace().skip(1);
        Some((fields.next()?.parse().ok()?, fields.next()?.to_owned()))
    }

    fn end(&self, name: &str, signal: &str) {
        self.done(&["task", "kill", "--signal", signal, name]);
        let ended = || self.task(name).is_none_or(|(_, state)| state == "STOPPED");
        assert!(eventually(Duration::from_secs(20), ended), "{name} outlived {signal}");
        // With --detach only the caller removes the ended task.
        self.done(&["task", "rm", name]);
    }
}

fn flags(with: With) -> Vec<String> {
    let words: &[&str] = match with {
        With::ReadOnlyRoot => &["--read-only"],
        With::NoCapabilities => {
            return DEFAULT_CAPABILITIES.iter().map(|name| format!("--cap-drop=CAP_{name}")).collect();
        }
        // ctr has this by default.
        With::NoNewPrivileges => &[],
        // This process's pid namespace, which is the host's: not every root may look at that of process 1.
        With::HostPids => return vec![format!("--with-ns=pid:/proc/{}/ns/pid", std::process::id())],
        With::Privileged => &["--privileged"],
        With::LittleMemory => return vec![format!("--memory-limit={LITTLE_MEMORY}")],
        With::User | With::UserNamespace | With::DefaultRuntime | With::PlainRunc | With::Gpus => {
            unreachable!("the table says that ctr has no {with:?}")
        }
    };
    words.iter().map(|&word| word.to_owned()).collect()
}

const DEFAULT_CAPABILITIES: [&str; 14] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "FSETID",
    "FOWNER",
    "MKNOD",
    "NET_RAW",
    "SETGID",
    "SETUID",
    "SETFCAP",
    "SETPCAP",
    "NET_BIND_SERVICE",
    "SYS_CHROOT",
    "KILL",
    "AUDIT_WRITE",
];

impl Engine for Ctr {
    fn folder(&self) -> &Path {
        self.containerd.scratch().path()
    }

    fn run(&mut self, wanted: &Wanted) -> Result<(), String> {
        let mut words = vec!["--null-io".to_owned(), "--detach".to_owned()];
        words.extend(["--snapshotter=native".to_owned(), format!("--runc-binary={}", self.wrapper)]);
        words.extend(Wanted::pairs(&wanted.env, "--env"));
        words.extend(Wanted::pairs(&wanted.annotations, "--annotation"));
        words.extend(wanted.with.iter().flat_map(|with| flags(*with)));
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let args: Vec<&str> = wanted.args.iter().map(String::as_str).collect();
        let outcome = self.call(&[&["run"], &words[..], &[IMAGE, wanted.name], &args].concat());
        if outcome.success() { Ok(()) } else { Err(outcome.stderr) }
    }

    fn exec(&self, name: &str, args: &[&str]) -> Outcome {
        self.call(&[&["task", "exec", "--exec-id", "again", name], args].concat())
    }

    fn id(&self, name: &str) -> String {
        name.to_owned()
    }

    fn pid(&self, name: &str) -> i32 {
        self.task(name).unwrap_or_else(|| panic!("ctr knows no task {name}")).0
    }

    fn stop(&mut self, name: &str) {
        self.end(name, "SIGTERM");
    }

    fn kill(&mut self, name: &str) {
        self.end(name, "SIGKILL");
    }

    fn restart(&mut self, name: &str) {
        self.end(name, "SIGTERM");
        self.done(&["task", "start", "--null-io", "--detach", name]);
    }

    fn remove(&mut self, name: &str) {
        // The task or the container may not exist.
        let _ = self.call(&["task", "rm", "--force", name]);
        let _ = self.call(&["container", "rm", name]);
    }

    fn is_running(&self, name: &str) -> bool {
        self.task(name).is_some_and(|(_, state)| state == "RUNNING")
    }

    fn pause(&self, name: &str) {
        self.done(&["task", "pause", name]);
    }

    fn unpause(&self, name: &str) {
        self.done(&["task", "resume", name]);
    }

    fn crash(&mut self, meanwhile: &mut dyn FnMut()) {
        self.containerd.kill();
        meanwhile();
        self.containerd.start_again();
    }
}
