//! One container of the demo: a bundle as an engine would write it, driven through gpushare-runtime.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use gpushare_inventory::DeviceMemory;
use serde_json::{Value, json};

use super::{Stage, image};

/// How long the client may take to answer: a real driver's first context takes seconds.
const PATIENCE: Duration = Duration::from_secs(60);
/// Seconds for which the client keeps its memory, unless it is ended before.
const HOLD_SECONDS: &str = "600";

/// A container that runs the CUDA client.
pub struct Container<'a> {
    stage: &'a Stage,
    /// The container's id.
    pub id: &'a str,
    /// Memory that it asks for.
    pub size: DeviceMemory,
    bundle: PathBuf,
}

/// What the client inside reported.
pub struct Seen {
    /// cuDeviceTotalMem.
    pub device_total: DeviceMemory,
    /// cuMemGetInfo's total.
    pub memory_total: DeviceMemory,
    /// NVML's total.
    pub nvml_total: DeviceMemory,
    /// Name of CUDA's result of allocating [`Container::within`].
    pub within: String,
    /// Name of CUDA's result of allocating [`Container::beyond`] as well.
    pub beyond: String,
}

impl<'a> Container<'a> {
    /// Writes the bundle; nothing runs yet.
    pub fn make(stage: &'a Stage, id: &'a str, size: DeviceMemory) -> Result<Self> {
        let bundle = stage.folder.path().join(id);
        image::fill(&bundle.join("rootfs"), &stage.programs.join("gpushare-simulator"))?;
        let container = Self { stage, id, size, bundle };
        container.write_config()?;
        Ok(container)
    }

    /// Three quarters of the share.
    pub fn within(&self) -> DeviceMemory {
        DeviceMemory::from_bytes(self.size.bytes() / 4 * 3)
    }

    /// Half of the share: too much once three quarters are taken.
    pub fn beyond(&self) -> DeviceMemory {
        DeviceMemory::from_bytes(self.size.bytes() / 2)
    }

    /// Calls the runtime's `create` and `start`.
    ///
    /// # Errors
    /// When the runtime fails; the error is its own line.
    pub fn start(&self) -> Result<()> {
        self.write_config()?; // engines write it anew at each start
        let answer = File::create(self.answer())?;
        let bundle = self.bundle.to_string_lossy();
        self.call(&["create", "--bundle", &bundle, self.id], Stdio::from(answer))?;
        self.call(&["start", self.id], Stdio::null())
    }

    /// Waits for the client's answer.
    pub fn seen(&self) -> Result<Seen> {
        let start = Instant::now();
        let answer = loop {
            match serde_json::from_slice::<Value>(&fs::read(self.answer())?) {
                Ok(answer) => break answer,
                Err(_) if start.elapsed() < PATIENCE => thread::sleep(Duration::from_millis(20)),
                Err(_) => bail!("the client in {} gave no answer: {}", self.id, self.complaint()),
            }
        };
        let size = |key: &str| {
            let bytes = answer.get(key).and_then(Value::as_u64);
            bytes
                .map(DeviceMemory::from_bytes)
                .with_context(|| format!("the client in {} tells no {key}: {answer}", self.id))
        };
        let result = |index: usize| {
            let result = answer.pointer(&format!("/allocate/{index}/result")).and_then(Value::as_str);
            result.unwrap_or("no answer").to_owned()
        };
        Ok(Seen {
            device_total: size("device_total")?,
            memory_total: size("memory_total")?,
            nvml_total: size("nvml_total")?,
            within: result(0),
            beyond: result(1),
        })
    }

    /// What nvidia-smi prints inside; nothing where the image does not have it.
    pub fn nvidia_smi(&self) -> Result<String> {
        const PROGRAM: &str = "/usr/bin/nvidia-smi";
        if !self.bundle.join(format!("rootfs{PROGRAM}")).exists() {
            return Ok(String::new());
        }
        let query = [PROGRAM, "--query-gpu=name,memory.total,memory.used", "--format=csv"];
        let output = self.runtime().args(["exec", self.id]).args(query).output()?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        ensure!(output.status.success(), "{PROGRAM}: {} {}", text(&output.stdout), text(&output.stderr));
        Ok(text(&output.stdout))
    }

    /// Calls the runtime's `kill` and `delete`.
    pub fn end(&self) -> Result<()> {
        self.call(&["kill", self.id, "KILL"], Stdio::null())?;
        let start = Instant::now();
        while self.call(&["delete", self.id], Stdio::null()).is_err() {
            ensure!(start.elapsed() < PATIENCE, "container {} does not end", self.id);
            thread::sleep(Duration::from_millis(20)); // the kill takes a moment
        }
        Ok(())
    }

    fn call(&self, arguments: &[&str], stdout: Stdio) -> Result<()> {
        let complaint = File::create(self.bundle.join("stderr"))?;
        let mut command = self.runtime();
        command.args(arguments).stdin(Stdio::null()).stdout(stdout).stderr(complaint);
        let status =
            command.status().context("cannot run gpushare-runtime; is it installed beside gpushare?")?;
        ensure!(status.success(), "{}", self.complaint());
        Ok(())
    }

    fn complaint(&self) -> String {
        fs::read_to_string(self.bundle.join("stderr")).unwrap_or_default().trim().to_owned()
    }

    /// The runtime. The low-level runtime's state is beside the bundles, apart from any engine's.
    fn runtime(&self) -> Command {
        let mut command = self.stage.command("gpushare-runtime");
        command.arg("--root").arg(self.bundle.with_file_name("runtime-root"));
        command
    }

    fn answer(&self) -> PathBuf {
        self.bundle.join("stdout")
    }

    fn write_config(&self) -> Result<()> {
        let [within, beyond] =
            [self.within(), self.beyond()].map(|size| format!("{}MiB", size.bytes() >> 20));
        let mount = |destination: &str, kind: &str, options: &[&str]| json!({"destination": destination, "type": kind, "source": kind, "options": options});
        let config = json!({
            "ociVersion": "1.0.2",
            "process": {
                "user": {"uid": 0, "gid": 0},
                "args": ["/bin/client", "probe", "--json", "--allocate", within, "--allocate", beyond, "--hold", HOLD_SECONDS],
                "env": ["PATH=/usr/bin:/bin", format!("GPUSHARE_MEMORY={}MiB", self.size.bytes() >> 20)],
                "cwd": "/",
            },
            "root": {"path": "rootfs"},
            "hostname": self.id,
            "mounts": [
                mount("/proc", "proc", &["nosuid", "noexec", "nodev"]),
                mount("/dev", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=64k"]),
                mount("/tmp", "tmpfs", &["nosuid", "nodev"]),
            ],
            "linux": {
                "cgroupsPath": format!("/gpushare-{}-{}", self.id, std::process::id()),
                "resources": {"devices": [{"allow": false, "access": "rwm"}]},
                "namespaces": [
                    {"type": "pid"}, {"type": "network"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"},
                ],
            },
        });
        Ok(fs::write(self.bundle.join("config.json"), serde_json::to_vec_pretty(&config)?)?)
    }
}

impl Drop for Container<'_> {
    /// Deletes the container, so that nothing is left running after an error of the demo.
    fn drop(&mut self) {
        let _ = self.call(&["delete", "--force", self.id], Stdio::null());
    }
}
