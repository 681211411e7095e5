//! A private docker: a containerd and a dockerd of their own, with all their files in a temporary folder.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use crate::command::{self, Outcome};
use crate::containerd::{Containerd, WITHOUT_CRI};
use crate::daemon::Daemon;
pub use crate::image::IMAGE;
use crate::scratch::Scratch;
use crate::view::View;

/// Where Debian's dockerd is, then docker's own.
pub const DOCKERD: &[&str] = &["/usr/sbin/dockerd", "/usr/bin/dockerd"];
/// The host's user and group ids of a container's root under `userns-remap`.
pub const REMAPPED: u32 = 300_000;
/// The user that owns these ids. Its group has the same name, as docker wants it, and it runs nothing.
const REMAPPED_USER: &str = "daemon";

/// The file in [`Docker::folder`] that the stand-in for NVIDIA's hook makes when it is run.
pub const NVIDIA_HOOK_RAN: &str = "nvidia-hook-ran";

/// What a private docker is configured with beside its runtime.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Whether gpushare is the default runtime too.
    pub by_default: bool,
    /// Whether every container has a user namespace (`userns-remap`).
    pub remapped: bool,
    /// The cgroups that its runtimes find.
    pub view: View,
    /// gpushare's hook, where it stands in the place of NVIDIA's.
    pub hook: Option<PathBuf>,
}

impl Default for Settings {
    fn default() -> Self {
        Self { by_default: false, remapped: false, view: View::AsItIs, hook: None }
    }
}

/// A running private docker; stopped on drop, with every container that it ran.
#[derive(Debug)]
pub struct Docker {
    // The order is that of dropping: dockerd stops before containerd, whose folder holds all files.
    dockerd: Daemon,
    settings: Settings,
    containerd: Containerd,
}

impl Docker {
    /// Starts containerd and dockerd with `wrapper` as the runtime `gpushare`, working under the settings
    /// file `config`, and loads [`IMAGE`], which has the CUDA client. With `by_default` the runtime is the
    /// default one too.
    ///
    /// # Panics
    /// When a daemon does not come up; its log is in the message.
    #[must_use]
    pub fn start(wrapper: &Path, config: &Path, by_default: bool) -> Self {
        Self::with(wrapper, config, Settings { by_default, ..Settings::default() })
    }

    /// As [`Docker::start`], with further settings.
    ///
    /// # Panics
    /// As [`Docker::start`].
    #[must_use]
    pub fn with(wrapper: &Path, config: &Path, settings: Settings) -> Self {
        let containerd = Containerd::start(config, settings.view, WITHOUT_CRI);
        let scratch = containerd.scratch();
        // Containers must outlive the daemon for a test to see how it finds them again; user namespaces
        // exclude that.
        let mut daemon =
            json!({"runtimes": {"gpushare": {"path": wrapper}}, "live-restore": !settings.remapped});
        if settings.by_default {
            daemon["default-runtime"] = json!("gpushare");
        }
        scratch.file("daemon.json", daemon.to_string());
        scratch.file("subordinate", format!("{REMAPPED_USER}:{REMAPPED}:65536\n"));
        nvidias_hook(scratch, settings.hook.as_deref());
        let dockerd = start_dockerd(&containerd, &settings);
        let archive = crate::image::archive(scratch);
        let docker = Self { dockerd, settings, containerd };
        let _ = docker.call(&["load", "--input", &archive.to_string_lossy()]).expect_success("docker load");
        docker
    }

    /// Imports the root that `fill` lays out as the image `name`, with `changes` in the words of a
    /// Dockerfile.
    ///
    /// # Panics
    /// When docker refuses it.
    pub fn import(&self, name: &str, fill: impl FnOnce(&Path), changes: &[&str]) {
        let root = tempfile::tempdir_in(self.folder()).expect("a folder for the image can be made");
        fill(root.path());
        let archive = self.folder().join("image.tar");
        let _ =
            command::run(Command::new("tar").arg("-C").arg(root.path()).arg("-cf").arg(&archive).arg("."))
                .expect_success("tar of the image");
        let archive = archive.to_string_lossy().into_owned();
        let changes: Vec<&str> = changes.iter().flat_map(|change| ["--change", *change]).collect();
        let words = [&["import"], &changes[..], &[&archive, name]].concat();
        let _ = self.call(&words).expect_success("docker import");
    }

    /// The folder of all files of this docker.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.containerd.scratch().path()
    }

    /// The address of its daemon, as `DOCKER_HOST` takes it.
    #[must_use]
    pub fn address(&self) -> String {
        address(&self.containerd)
    }

    /// The containerd below it.
    #[must_use]
    pub fn containerd(&self) -> &Containerd {
        &self.containerd
    }

    /// `docker ARGS...`, to its end.
    ///
    /// # Panics
    /// When it does not end.
    #[must_use]
    pub fn call(&self, args: &[&str]) -> Outcome {
        command::run(client(&self.containerd).args(args))
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

    /// The shims of this docker's containerd.
    #[must_use]
    pub fn shims(&self) -> Vec<i32> {
        self.containerd.shims()
    }

    /// SIGKILL to dockerd; its containers go on, since it is told `live-restore`.
    pub fn kill_daemon(&mut self) {
        self.dockerd.kill();
        // A killed dockerd leaves its pid file, and another process may have that pid by now.
        let _ = fs::remove_file(self.folder().join("docker.pid"));
    }

    /// Starts dockerd again after [`Docker::kill_daemon`], on the state that it left.
    ///
    /// # Panics
    /// When it does not come up; its log is in the message.
    pub fn start_daemon_again(&mut self) {
        self.dockerd = start_dockerd(&self.containerd, &self.settings);
    }
}

impl Drop for Docker {
    fn drop(&mut self) {
        let listing = self.call(&["ps", "--all", "--quiet"]).stdout;
        let containers: Vec<&str> = listing.split_whitespace().collect();
        if !containers.is_empty() {
            let _ = self.call(&[&["rm", "--force"], &containers[..]].concat());
        }
    }
}

fn address(containerd: &Containerd) -> String {
    format!("unix://{}", containerd.scratch().path().join("docker.sock").display())
}

fn client(containerd: &Containerd) -> Command {
    let mut docker = Command::new("/usr/bin/docker");
    docker.arg("--host").arg(address(containerd));
    // The user's own contexts and credentials must not be used.
    docker
        .env("DOCKER_CONFIG", containerd.scratch().path())
        .env_remove("DOCKER_HOST")
        .env_remove("DOCKER_CONTEXT");
    docker
}

fn start_dockerd(containerd: &Containerd, settings: &Settings) -> Daemon {
    let scratch = containerd.scratch();
    let program =
        DOCKERD.iter().find(|path| Path::new(path).exists()).expect("dockerd was looked for before");
    let mut dockerd =
        if settings.remapped { remapped(containerd, program) } else { containerd.beside(program) };
    // docker offers --gpus only if it finds NVIDIA's hook when it starts.
    let hooks = scratch.path().join("hooks");
    dockerd.env("PATH", format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", hooks.display()));
    dockerd.arg("--config-file").arg(scratch.path().join("daemon.json"));
    dockerd.arg("--host").arg(address(containerd));
    for (flag, name) in [("--data-root", "data"), ("--exec-root", "exec"), ("--pidfile", "docker.pid")] {
        dockerd.arg(flag).arg(scratch.path().join(name));
    }
    dockerd.arg("--containerd").arg(containerd.socket());
    dockerd.args(["--iptables=false", "--ip6tables=false", "--bridge=none", "--storage-driver", "vfs"]);
    let mut version = client(containerd);
    version.arg("version");
    Daemon::start(&mut dockerd, &scratch.folder("dockerd-log"), || command::run(&mut version).success())
}

/// Puts a file with the name of NVIDIA's hook into a folder: a link to `ours`, or a stand-in that leaves a
/// mark when it runs.
fn nvidias_hook(scratch: &Scratch, ours: Option<&Path>) {
    let hook = scratch.folder("hooks").join("nvidia-container-runtime-hook");
    if let Some(ours) = ours {
        return symlink(ours, hook).expect("a link can be made in one's own folder");
    }
    let text = format!("#!/bin/sh\n: >'{}'\n", scratch.path().join(NVIDIA_HOOK_RAN).display());
    fs::write(&hook, text).expect("a file of one's own folder can be written");
    fs::set_permissions(hook, fs::Permissions::from_mode(0o755))
        .expect("the mode of one's own file can be set");
}

/// A dockerd that maps the containers' users to those of [`REMAPPED_USER`]; the machine's own lists stay as
/// they are.
fn remapped(containerd: &Containerd, program: &str) -> Command {
    let list: PathBuf = containerd.scratch().path().join("subordinate");
    let bind = format!(
        "mount --bind '{0}' /etc/subuid && mount --bind '{0}' /etc/subgid && exec \"$@\"",
        list.display()
    );
    let mut command = containerd.beside("/usr/bin/unshare");
    command.args(["--mount", "--propagation", "private", "/bin/sh", "-c", &bind, "sh", program]);
    command.arg(format!("--userns-remap={REMAPPED_USER}"));
    command
}
