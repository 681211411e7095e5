//! OCI bundles as an engine would hand them over: a root file system and a config.json with docker's default
//! rights, all devices denied, and a cgroup of its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use nix::mount::{MsFlags, mount};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::artifacts;
use crate::command::eventually;
use crate::image;
use crate::scratch::Scratch;

/// A bundle in a temporary folder.
#[derive(Debug)]
pub struct Bundle {
    scratch: Scratch,
    id: String,
    spec: Value,
}

impl Bundle {
    /// A bundle whose image is one static busybox: it starts quickly and has no C library.
    #[must_use]
    pub fn small() -> Self {
        Self::of(image::static_only)
    }

    /// A bundle whose image has the C library and the simulator's CUDA client.
    #[must_use]
    pub fn with_probe() -> Self {
        Self::of(image::with_probe)
    }

    /// A bundle whose image has the simulator's CUDA client and the one that launches kernels.
    #[must_use]
    pub fn with_client() -> Self {
        Self::of(image::with_client)
    }

    /// A bundle whose root is this machine's own, below an overlay: its whole user land without a copy, and
    /// nothing that the container writes is left. The checkout is there, read-only; `/tmp` is empty.
    ///
    /// # Panics
    /// When the overlay cannot be mounted.
    #[must_use]
    pub fn host_root() -> Self {
        let mut bundle = Self::over(Path::new("/"), "upper");
        let checkout = artifacts::checkout();
        bundle.add_mount(json!({"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev"]}));
        bundle.add_mount(json!({
            "destination": checkout, "type": "bind", "source": checkout, "options": ["rbind", "ro", "nosuid", "nodev"]
        }));
        bundle
    }

    /// A bundle whose root is the folder `lower` below a layer of its own, as containerd's snapshotter lays it
    /// out. What is written there stays until the bundle goes.
    ///
    /// # Panics
    /// As [`Bundle::host_root`].
    #[must_use]
    pub fn engines_layer(lower: &Path) -> Self {
        Self::over(lower, "io.containerd.snapshotter.v1.overlayfs/snapshots/7/fs")
    }

    /// A bundle whose root is `lower` below the layer `upper`, a path in a folder of the bundle's.
    ///
    /// # Panics
    /// As [`Bundle::host_root`].
    #[must_use]
    pub fn over(lower: &Path, upper: &str) -> Self {
        let bundle = Self::of(|_| ());
        // The upper layer cannot lie in the lower one, so it is a file system of its own.
        let layer = bundle.scratch.folder("layer");
        mount(Some("tmpfs"), &layer, Some("tmpfs"), MsFlags::empty(), Some("mode=755"))
            .expect("a tmpfs can be mounted");
        let (upper, work) = (bundle.layer(upper), bundle.layer("work"));
        let options =
            format!("lowerdir={},upperdir={},workdir={}", lower.display(), upper.display(), work.display());
        mount(Some("overlay"), &bundle.root(), Some("overlay"), MsFlags::empty(), Some(options.as_str()))
            .expect("an overlay can be mounted");
        bundle
    }

    fn layer(&self, name: &str) -> PathBuf {
        self.scratch.folder(&format!("layer/{name}"))
    }

    /// A bundle whose root `fill` lays out.
    #[must_use]
    pub fn of(fill: impl FnOnce(&Path)) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let id = format!("gps-{}-{}", process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let scratch = Scratch::new("bundle");
        fill(&scratch.folder("rootfs"));
        let spec = plain_spec(&scratch.path().join("rootfs"), &format!("/{id}"));
        let bundle = Self { scratch, id, spec };
        bundle.write();
        bundle
    }

    /// The container's id, unique on this machine while the test runs.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The process id of the container's init on the host, as `create` wrote it.
    ///
    /// # Panics
    /// When the runtime did not write it.
    #[must_use]
    pub fn pid(&self) -> i32 {
        let text = fs::read_to_string(self.path().join("init.pid")).expect("create wrote the pid file");
        text.trim().parse().expect("the pid file holds a number")
    }

    /// The bundle's folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.scratch.path()
    }

    /// The container's root file system, as the host sees it.
    #[must_use]
    pub fn root(&self) -> PathBuf {
        self.path().join("rootfs")
    }

    /// Adds a variable to the process's environment.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.list("/process/env").push(json!(format!("{name}={value}")));
        self.written()
    }

    /// Adds an annotation.
    #[must_use]
    pub fn annotation(mut self, name: &str, value: &str) -> Self {
        self.spec["annotations"][name] = json!(value);
        self.written()
    }

    /// Sets the process's arguments; without them it sleeps.
    #[must_use]
    pub fn args(mut self, args: &[&str]) -> Self {
        self.spec["process"]["args"] = json!(args);
        self.written()
    }

    /// Makes the root read-only for the container, as `docker run --read-only` does.
    #[must_use]
    pub fn read_only(mut self) -> Self {
        self.spec["root"]["readonly"] = json!(true);
        self.written()
    }

    /// Adds a mount.
    #[must_use]
    pub fn mount(mut self, mount: Value) -> Self {
        self.add_mount(mount);
        self.written()
    }

    /// Adds a hook, as an engine's hooks.d puts it there: `path ARGS...` with the name of the program before
    /// them.
    #[must_use]
    pub fn hook(mut self, stage: &str, path: &Path, args: &[&str]) -> Self {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let args: Vec<&str> = [name].into_iter().chain(args.iter().copied()).collect();
        let hook =
            json!({"path": path, "args": args, "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOOKS_D=1"]});
        let hooks = &mut self.spec["hooks"][stage];
        match hooks.as_array_mut() {
            Some(hooks) => hooks.push(hook),
            None => *hooks = json!([hook]),
        }
        self.written()
    }

    /// Sets the value at a JSON pointer of config.json whose parent is there.
    ///
    /// # Panics
    /// When the parent is not there.
    #[must_use]
    pub fn set(mut self, pointer: &str, value: Value) -> Self {
        let (parent, name) = pointer.rsplit_once('/').expect("a pointer begins with a slash");
        self.spec.pointer_mut(parent).expect("the spec has the parent")[name] = value;
        self.written()
    }

    /// Changes anything else of config.json.
    #[must_use]
    pub fn edit(mut self, change: impl FnOnce(&mut Value)) -> Self {
        change(&mut self.spec);
        self.written()
    }

    fn add_mount(&mut self, mount: Value) {
        self.list("/mounts").push(mount);
        self.write();
    }

    fn list(&mut self, pointer: &str) -> &mut Vec<Value> {
        self.spec.pointer_mut(pointer).and_then(Value::as_array_mut).expect("the spec has this list")
    }

    fn written(self) -> Self {
        self.write();
        self
    }

    /// Writes config.json anew, as engines do before every start, and returns its bytes.
    ///
    /// # Panics
    /// When it cannot be written.
    pub fn write(&self) -> Vec<u8> {
        let bytes = serde_json::to_vec(&self.spec).expect("a value can be written as JSON");
        fs::write(self.config_path(), &bytes).expect("config.json can be written");
        bytes
    }

    /// The path of config.json.
    #[must_use]
    pub fn config_path(&self) -> PathBuf {
        self.path().join("config.json")
    }

    /// The bytes of config.json as they are now.
    ///
    /// # Panics
    /// When it cannot be read.
    #[must_use]
    pub fn config_bytes(&self) -> Vec<u8> {
        fs::read(self.config_path()).expect("config.json can be read")
    }
}

impl Bundle {
    /// The container's cgroups, in every hierarchy that has one.
    fn cgroups(&self) -> impl Iterator<Item = PathBuf> {
        let hierarchies =
            fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten().map(|entry| entry.path());
        let all = hierarchies.chain([PathBuf::from("/sys/fs/cgroup")]);
        all.map(|hierarchy| hierarchy.join(&self.id)).filter(|cgroup| cgroup.is_dir())
    }

    /// The processes in a cgroup, by their ids; 0 for one of another pid namespace.
    fn pids(cgroup: &Path) -> Vec<i32> {
        let listing = fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
        listing.lines().filter_map(|pid| pid.parse().ok()).collect()
    }

    /// How many processes are in the container's cgroup.
    #[must_use]
    pub fn processes(&self) -> usize {
        self.cgroups().map(|cgroup| Self::pids(&cgroup).len()).max().unwrap_or(0)
    }

    /// Kills what still runs in the container's cgroups, and removes them. A runtime that was killed in
    /// `create` leaves both, and its own `delete --force` does not know of them.
    pub fn kill_orphans(&self) {
        let gone = || {
            for cgroup in self.cgroups() {
                // kill(2) takes 0 for our own group.
                for pid in Self::pids(&cgroup).into_iter().filter(|pid| *pid > 0) {
                    // The process may have ended meanwhile.
                    let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
                }
                // Busy until the last process has gone.
                let _ = fs::remove_dir(cgroup);
            }
            self.cgroups().next().is_none()
        };
        if !eventually(Duration::from_secs(2), gone) {
            eprintln!("a cgroup of {} is left", self.id);
        }
    }
}

impl Drop for Bundle {
    fn drop(&mut self) {
        self.kill_orphans();
    }
}

const CAPABILITIES: &[&str] = &[
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_MKNOD",
    "CAP_NET_BIND_SERVICE",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
];

/// A container without a request; docker's default capabilities, no terminal, no limits.
fn plain_spec(root: &Path, cgroup: &str) -> Value {
    json!({
        "ociVersion": "1.0.2",
        "process": {
            "terminal": false,
            "user": {"uid": 0, "gid": 0},
            "args": ["/bin/sleep", "1000"],
            "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"],
            "cwd": "/",
            "capabilities": {"bounding": CAPABILITIES, "effective": CAPABILITIES, "permitted": CAPABILITIES},
            "noNewPrivileges": true
        },
        "root": {"path": root, "readonly": false},
        "hostname": "gpushare-test",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "noexec", "nodev"]},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs",
             "options": ["nosuid", "strictatime", "mode=755", "size=65536k"]},
            {"destination": "/dev/shm", "type": "tmpfs", "source": "shm",
             "options": ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"]},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"]}
        ],
        "annotations": {},
        "linux": {
            "cgroupsPath": cgroup,
            "resources": {"devices": [{"allow": false, "access": "rwm"}]},
            "namespaces": [
                {"type": "pid"}, {"type": "network"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}
            ]
        }
    })
}
