//! A private docker: a containerd and a dockerd of their own, with all their files in a temporary folder. Only what was started
//! here is stopped; a docker that serves this machine is never touched.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;

use crate::command::{self, Outcome};
use crate::scratch::Scratch;

/// Where Debian's dockerd is, then docker's own.
pub const DOCKERD: &[&str] = &["/usr/sbin/dockerd", "/usr/bin/dockerd"];
/// The image that [`Docker::start`] imports.
pub const IMAGE: &str = "gpushare-test:1";
const STARTS_WITHIN: Duration = Duration::from_secs(60);

/// A running private docker; stopped on drop, with every container that it ran.
#[derive(Debug)]
pub struct Docker {
    // The order is that of dropping: dockerd stops before containerd, and their folder goes last.
    dockerd: Daemon,
    containerd: Daemon,
    scratch: Scratch,
}

impl Docker {
    /// Starts containerd and dockerd with `wrapper` as the runtime `gpushare`, working under the settings file `config`, and imports
    /// [`IMAGE`], which has the CUDA client. With `by_default`, gpushare is the default runtime too.
    ///
    /// # Panics
    /// When a daemon does not come up; its log is in the message.
    #[must_use]
    pub fn start(wrapper: &Path, config: &Path, by_default: bool) -> Self {
        let scratch = Scratch::new("docker");
        let containerd = start_containerd(&scratch, config);
        let dockerd = start_dockerd(&scratch, wrapper, config, by_default);
        let docker = Self { dockerd, containerd, scratch };
        docker.import_image();
        docker
    }

    fn import_image(&self) {
        self.import(IMAGE, crate::image::with_probe, &["ENV PATH=/bin"]);
    }

    /// Imports the root that `fill` lays out as the image `name`, with `changes` in the words of a Dockerfile.
    ///
    /// # Panics
    /// When docker refuses it.
    pub fn import(&self, name: &str, fill: impl FnOnce(&Path), changes: &[&str]) {
        let root = tempfile::tempdir_in(self.scratch.path()).expect("a folder for the image can be made");
        fill(root.path());
        let archive = self.scratch.path().join("image.tar");
        let _ =
            command::run(Command::new("tar").arg("-C").arg(root.path()).arg("-cf").arg(&archive).arg("."))
                .expect_success("tar of the image");
        let archive = archive.to_string_lossy().into_owned();
        let changes: Vec<&str> = changes.iter().flat_map(|change| ["--change", *change]).collect();
        let words = [&["import"], &changes[..], &[&archive, name]].concat();
        let _ = self.call(&words).expect_success("docker import");
    }

    /// `docker ARGS...`, to its end.
    ///
    /// # Panics
    /// When it does not end.
    #[must_use]
    pub fn call(&self, args: &[&str]) -> Outcome {
        let mut docker = Command::new("/usr/bin/docker");
        docker.arg("--host").arg(address(&self.scratch)).args(args);
        // The user's contexts and credentials are none of ours.
        docker
            .env("DOCKER_CONFIG", self.scratch.path())
            .env_remove("DOCKER_HOST")
            .env_remove("DOCKER_CONTEXT");
        command::run(&mut docker)
    }

    /// `docker run FLAGS... IMAGE ARGS...` without a network.
    ///
    /// # Panics
    /// When it does not end.
    #[must_use]
    pub fn run(&self, flags: &[&str], args: &[&str]) -> Outcome {
        let words = [&["run", "--network", "none"], flags, &[IMAGE], args].concat();
        self.call(&words)
    }

    /// The process id of a running container's init on the host.
    ///
    /// # Panics
    /// When docker does not know it.
    #[must_use]
    pub fn pid(&self, container: &str) -> i32 {
        self.inspect(container, "{{.State.Pid}}").parse().expect("docker tells the process id")
    }

    /// One field of `docker inspect`, by a template.
    ///
    /// # Panics
    /// When docker does not know the container.
    #[must_use]
    pub fn inspect(&self, container: &str, template: &str) -> String {
        let outcome =
            self.call(&["inspect", "--format", template, container]).expect_success("docker inspect");
        outcome.stdout.trim().to_owned()
    }

    /// The folder of all files of this docker.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.scratch.path()
    }

    /// The shims of this docker's containerd.
    #[must_use]
    pub fn shims(&self) -> Vec<i32> {
        processes_naming(&socket(&self.scratch), "containerd-shim")
    }
}

impl Drop for Docker {
    fn drop(&mut self) {
        let listing = self.call(&["ps", "--all", "--quiet"]).stdout;
        let containers: Vec<&str> = listing.split_whitespace().collect();
        if !containers.is_empty() {
            let _ = self.call(&[&["rm", "--force"], &containers[..]].concat());
        }
        self.dockerd.stop();
        self.containerd.stop();
        for shim in self.shims() {
            // A shim outlives its containerd by design; it may just have ended.
            let _ = kill(Pid::from_raw(shim), Signal::SIGKILL);
        }
    }
}

/// A daemon started here; stopped on drop.
#[derive(Debug)]
struct Daemon(Child);

impl Daemon {
    fn stop(&mut self) {
        let Ok(pid) = i32::try_from(self.0.id()) else { return };
        if self.0.try_wait().is_ok_and(|status| status.is_some()) {
            return;
        }
        // It may have ended since.
        let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
        if command::wait(&mut self.0, Duration::from_secs(20)).is_none() {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.stop();
    }
}

fn socket(scratch: &Scratch) -> PathBuf {
    scratch.path().join("containerd.sock")
}

fn address(scratch: &Scratch) -> String {
    format!("unix://{}", scratch.path().join("docker.sock").display())
}

/// A daemon's command with an environment in which it finds its parts, and the runtime its settings.
fn daemon(program: &str, config: &Path) -> Command {
    let mut command = Command::new(program);
    command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("GPUSHARE_CONFIG", config);
    command
}

fn start_containerd(scratch: &Scratch, config: &Path) -> Daemon {
    let base = scratch.path().display();
    let settings = format!(
        "version = 2\nroot = \"{base}/containerd-root\"\nstate = \"{base}/containerd-state\"\n\
         disabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n\
         [grpc]\naddress = \"{base}/containerd.sock\"\n\
         [plugins.\"io.containerd.internal.v1.opt\"]\npath = \"{base}/opt\"\n"
    );
    let settings = scratch.file("containerd.toml", settings);
    let logs = scratch.folder("containerd-log");
    let mut containerd = daemon("/usr/bin/containerd", config);
    let child = command::spawn(containerd.arg("--config").arg(settings), &logs);
    let socket = socket(scratch);
    assert!(command::eventually(STARTS_WITHIN, || socket.exists()), "containerd: {}", log(&logs));
    Daemon(child)
}

fn start_dockerd(scratch: &Scratch, wrapper: &Path, config: &Path, by_default: bool) -> Daemon {
    let mut settings = json!({"runtimes": {"gpushare": {"path": wrapper}}});
    if by_default {
        settings["default-runtime"] = json!("gpushare");
    }
    let settings = scratch.file("daemon.json", settings.to_string());
    let logs = scratch.folder("dockerd-log");
    let program =
        DOCKERD.iter().find(|path| Path::new(path).exists()).expect("dockerd was looked for before");
    let mut dockerd = daemon(program, config);
    dockerd.arg("--config-file").arg(settings).arg("--host").arg(address(scratch));
    for (flag, name) in [("--data-root", "data"), ("--exec-root", "exec"), ("--pidfile", "docker.pid")] {
        dockerd.arg(flag).arg(scratch.path().join(name));
    }
    dockerd.arg("--containerd").arg(socket(scratch));
    dockerd.args(["--iptables=false", "--ip6tables=false", "--bridge=none", "--storage-driver", "vfs"]);
    let mut child = command::spawn(&mut dockerd, &logs);
    let mut client = Command::new("/usr/bin/docker");
    client.arg("--host").arg(address(scratch)).arg("version").env("DOCKER_CONFIG", scratch.path());
    let answers = command::eventually(STARTS_WITHIN, || {
        command::run(&mut client).success() || child.try_wait().is_ok_and(|status| status.is_some())
    });
    let alive = child.try_wait().is_ok_and(|status| status.is_none());
    let daemon = Daemon(child);
    assert!(answers && alive, "dockerd: {}", log(&logs));
    daemon
}

fn log(folder: &Path) -> String {
    fs::read_to_string(folder.join("stderr")).unwrap_or_default()
}

/// The processes whose command line holds `path` and whose program's name starts with `program`.
fn processes_naming(path: &Path, program: &str) -> Vec<i32> {
    let wanted = path.as_os_str().as_encoded_bytes();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid: &i32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let mut words = line.split(|&byte| byte == 0);
            let named = words.next().is_some_and(|first| String::from_utf8_lossy(first).contains(program));
            named && words.any(|word| word.starts_with(wanted))
        })
        .collect()
}
