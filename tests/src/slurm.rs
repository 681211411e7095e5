//! A private Slurm: munged, slurmctld and slurmd of this machine's packages, with all their files in a
//! temporary folder and in a network of their own. Its one machine is a simulated node, and containers run
//! there as `packaging/oci.conf` says.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::artifacts::{self, Installed};
use crate::bundle::Bundle;
use crate::command::{self, DEADLINE, Outcome, eventually};
use crate::daemon::{Daemon, environment};
use crate::image::BUSYBOX;
use crate::node::SimulatedNode;
use crate::scratch::Scratch;

const MUNGED: &str = "/usr/sbin/munged";
const SLURMCTLD: &str = "/usr/sbin/slurmctld";
const SLURMD: &str = "/usr/sbin/slurmd";

/// The programs that must be there.
pub const PROGRAMS: &[&str] = &[MUNGED, SLURMCTLD, SLURMD, "/usr/bin/srun"];

/// The name that the machine has in Slurm.
pub const HOST: &str = "gpu-node";

/// How gres.conf divides the GPUs, with the number of parts of one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// `mps`.
    Mps(usize),
    /// `shard`.
    Shard(usize),
}

impl Sharing {
    fn name(self) -> &'static str {
        match self {
            Self::Mps(_) => "mps",
            Self::Shard(_) => "shard",
        }
    }

    fn parts(self) -> usize {
        let (Self::Mps(parts) | Self::Shard(parts)) = self;
        parts
    }
}

/// A running private Slurm; stopped on drop, with every step that it ran.
#[derive(Debug)]
pub struct Slurm {
    slurmd: Daemon,
    slurmctld: Daemon,
    munged: Daemon,
    place: Place,
}

impl Slurm {
    /// Starts the daemons on `node`. Steps with a bundle run under the gpushare that is `installed`, which
    /// works under the settings file `config`.
    ///
    /// # Panics
    /// When a daemon does not come up; its log is in the message.
    #[must_use]
    pub fn start(installed: &Installed, config: &Path, node: &SimulatedNode, sharing: Sharing) -> Self {
        let place =
            Place { network: Network::new(), scratch: Scratch::new("slurm"), config: config.to_owned() };
        place.write_settings(node, sharing);
        place.write_runtime(installed);
        let file = |name: &str| place.file(name);

        let mut munged = place.daemon(MUNGED);
        munged.arg("--foreground").arg("--socket").arg(file("munge.socket"));
        for (flag, name) in
            [("key", "munge.key"), ("log", "munge.log"), ("pid", "munge.pid"), ("seed", "munge.seed")]
        {
            munged.arg(format!("--{flag}-file={}", file(name).display()));
        }
        let munged = place.started("munged", munged, || file("munge.socket").exists());

        let slurm = |program| {
            let mut command = place.daemon(program);
            command.arg("-D").arg("-f").arg(file("slurm.conf"));
            command
        };
        let told = |program, args: &[&str]| command::run(place.client(program).args(args)).stdout;
        let slurmctld =
            place.started("slurmctld", slurm(SLURMCTLD), || told("scontrol", &["ping"]).contains("is UP"));
        let slurmd = place.started("slurmd", slurm(SLURMD), || place.is_idle());
        Self { slurmd, slurmctld, munged, place }
    }

    /// Waits until no job holds the machine, so that the next one is not queued. `srun --uid` needs that: it
    /// changes its user only once it has the machine, and cannot decode what Slurm tells that user before.
    ///
    /// # Panics
    /// When a job stays.
    pub fn wait_until_idle(&self) {
        assert!(eventually(DEADLINE, || self.place.is_idle()), "a job stays: {}", self.log());
    }

    /// `PROGRAM ARGS...`, one of Slurm's clients, to its end.
    ///
    /// # Panics
    /// When it does not end.
    #[must_use]
    pub fn call(&self, program: &str, args: &[&str]) -> Outcome {
        command::run(self.place.client(program).args(args))
    }

    /// `srun FLAGS... --container=BUNDLE ARGS...`, not yet started; what its environment has goes to the
    /// step.
    #[must_use]
    pub fn srun(&self, flags: &[&str], bundle: &Bundle, args: &[&str]) -> Command {
        let mut srun = self.place.client("srun");
        srun.args(flags).arg(container(bundle)).args(args);
        srun
    }

    /// `srun FLAGS... --container=BUNDLE sleep`, which goes on.
    ///
    /// # Panics
    /// When it cannot be started.
    #[must_use]
    pub fn sleeper(&self, flags: &[&str], bundle: &Bundle) -> Step {
        Step::start(&mut self.srun(flags, bundle, &["sleep", "1000"]))
    }

    /// `srun FLAGS... sleep` without a container, which goes on: it holds what `flags` ask for.
    ///
    /// # Panics
    /// When it cannot be started.
    #[must_use]
    pub fn holder(&self, flags: &[&str]) -> Step {
        let mut srun = self.place.client("srun");
        Step::start(srun.args(flags).args(["sleep", "1000"]))
    }

    /// A batch job with `flags` in which `srun --container=BUNDLE ARGS...` runs, to its end; its output,
    /// errors included.
    ///
    /// # Panics
    /// When it does not end.
    #[must_use]
    pub fn batch(&self, flags: &[&str], bundle: &Bundle, args: &[&str]) -> Outcome {
        let flags = [&["--wait"], flags].concat();
        let srun = format!("exec srun {} {}", container(bundle), args.join(" "));
        self.sbatch(&flags, &srun)
    }

    /// As [`Slurm::batch`], of a step that sleeps; the job goes on.
    ///
    /// # Panics
    /// When it is not accepted.
    pub fn batch_sleeper(&self, flags: &[&str], bundle: &Bundle) {
        let srun = format!("exec srun {} sleep 1000", container(bundle));
        let _ = self.sbatch(flags, &srun).expect_success("sbatch");
    }

    /// A batch job that is itself in the container, to its end: `sbatch FLAGS... --container=BUNDLE` with one
    /// line for the container's shell; its output, errors included.
    ///
    /// # Panics
    /// When it does not end.
    #[must_use]
    pub fn batch_inside(&self, flags: &[&str], bundle: &Bundle, line: &str) -> Outcome {
        self.sbatch(&[&["--wait", &container(bundle)], flags].concat(), line)
    }

    fn sbatch(&self, flags: &[&str], line: &str) -> Outcome {
        let script = self.place.scratch.file("job.sh", format!("#!/bin/sh\n{line}\n"));
        let output = self.place.file("job.out");
        let mut sbatch = self.place.client("sbatch");
        sbatch.arg("--output").arg(&output).args(flags).arg(script);
        let outcome = command::run(&mut sbatch);
        Outcome { stdout: fs::read_to_string(output).unwrap_or_default(), ..outcome }
    }

    /// Types `lines` into root's shell on the machine, in the folder `at`, of which each must succeed.
    ///
    /// # Panics
    /// When it does not end.
    #[must_use]
    pub fn type_in(&self, at: &Path, lines: &str) -> Outcome {
        // A namespace of mounts is entered at its root.
        let before = format!(
            "cd '{}'; sudo() {{ \"$@\"; }}; gpushare() {{ GPUSHARE_CONFIG='{}' '{}' \"$@\"; }}",
            at.display(),
            self.place.config.display(),
            artifacts::cli().display()
        );
        command::run(self.place.client("bash").arg("-ec").arg(format!("{before}\n{lines}")))
    }

    /// Year and month of its release.
    ///
    /// # Panics
    /// When srun does not tell it.
    #[must_use]
    pub fn version(&self) -> (u32, u32) {
        // "slurm-wlm 22.05.8"
        let told = self.call("srun", &["--version"]).stdout;
        let mut numbers = told.split([' ', '.']).skip(1).map_while(|number| number.parse().ok());
        numbers.next().zip(numbers.next()).unwrap_or_else(|| panic!("srun --version: {told}"))
    }

    /// What slurmd and the steps have logged.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.place.file("slurmd.log")).unwrap_or_default()
    }
}

impl Drop for Slurm {
    fn drop(&mut self) {
        let _ = self.call("scancel", &["--user=root"]);
        let _ = eventually(Duration::from_secs(30), || self.call("squeue", &["-h"]).stdout.is_empty());
        for daemon in [&mut self.slurmd, &mut self.slurmctld, &mut self.munged] {
            daemon.stop();
        }
        // A step outlives its slurmd by design.
        self.place.network.clear();
    }
}

fn container(bundle: &Bundle) -> String {
    format!("--container={}", bundle.path().display())
}

/// A step that was started and not waited for.
#[derive(Debug)]
pub struct Step {
    child: Child,
    scratch: Scratch,
}

impl Step {
    fn start(srun: &mut Command) -> Self {
        let scratch = Scratch::new("step");
        Self { child: command::spawn(srun, scratch.path()), scratch }
    }

    /// Waits for its end, which must come by itself.
    ///
    /// # Panics
    /// When it does not.
    pub fn wait(mut self) {
        let ended = command::wait(&mut self.child, DEADLINE);
        assert!(ended.is_some(), "srun goes on: {}", self.errors());
    }

    /// What srun has printed as errors so far.
    #[must_use]
    pub fn errors(&self) -> String {
        fs::read_to_string(self.scratch.path().join("stderr")).unwrap_or_default()
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Where a Slurm's files and processes are.
#[derive(Debug)]
struct Place {
    network: Network,
    scratch: Scratch,
    config: PathBuf,
}

impl Place {
    fn file(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn daemon(&self, program: &str) -> Command {
        let mut command = self.network.command(program);
        environment(&mut command, &self.config);
        command
    }

    /// A client has nothing of gpushare's in its environment, which would become the step's.
    fn client(&self, program: &str) -> Command {
        let mut command = self.network.command(&format!("/usr/bin/{program}"));
        command.env_clear().env("PATH", "/usr/bin:/bin").env("HOME", "/root");
        command.env("SLURM_CONF", self.file("slurm.conf")).current_dir("/");
        command
    }

    fn is_idle(&self) -> bool {
        let state = command::run(self.client("sinfo").args(["-h", "-o", "%t"])).stdout;
        state.trim() == "idle"
    }

    fn started(&self, name: &str, mut command: Command, answers: impl FnMut() -> bool) -> Daemon {
        Daemon::start(&mut command, &self.scratch.folder(&format!("{name}-log")), answers)
    }

    fn write_settings(&self, node: &SimulatedNode, sharing: Sharing) {
        let base = self.scratch.path().display();
        let (name, parts) = (sharing.name(), sharing.parts());
        let gpus = gpus(node);
        let gres: String = gpus
            .iter()
            .map(|gpu| format!("Name=gpu File={0}\nName={name} Count={parts} File={0}\n", gpu.display()))
            .collect();
        self.scratch.file("gres.conf", gres);
        // Slurm always loads a cgroup plugin. This is the only one that touches no cgroup, whatever this
        // machine has.
        self.scratch.file("cgroup.conf", "CgroupPlugin=cgroup/v1\n");
        let settings = format!(
            "ClusterName=tests\nSlurmctldHost={HOST}(127.0.0.1)\nSlurmUser=root\n\
             AuthType=auth/munge\nCredType=cred/munge\nAuthInfo=socket={base}/munge.socket\n\
             StateSaveLocation={base}/state\nSlurmdSpoolDir={base}/spool\nSlurmdLogFile={base}/slurmd.log\n\
             SlurmctldPidFile={base}/slurmctld.pid\nSlurmdPidFile={base}/slurmd.pid\nSlurmdDebug=debug\n\
             ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nJobAcctGatherType=jobacct_gather/none\n\
             MpiDefault=none\nSelectType=select/cons_tres\nSelectTypeParameters=CR_Core\nGresTypes=gpu,{name}\n\
             KillWait=2\nReturnToService=2\nSlurmdParameters=config_overrides\n\
             NodeName={HOST} NodeAddr=127.0.0.1 CPUs=8 Gres=gpu:{count},{name}:{all} State=UNKNOWN\n\
             PartitionName=all Nodes={HOST} Default=YES State=UP\n",
            count = gpus.len(),
            all = parts * gpus.len(),
        );
        self.scratch.file("slurm.conf", settings);
        let mut key = [0; 128];
        let read = File::open("/dev/urandom").and_then(|mut random| random.read_exact(&mut key));
        read.expect("random bytes can be read");
        let key = self.scratch.file("munge.key", key);
        fs::set_permissions(key, fs::Permissions::from_mode(0o600)).expect("the key can be made private");
    }

    /// Writes the shipped oci.conf, with the paths of this test.
    fn write_runtime(&self, installed: &Installed) {
        let shipped = installed.root().join("usr/local/share/gpushare/oci.conf");
        let text = fs::read_to_string(shipped).expect("oci.conf is installed");
        let root = format!("--root={}", self.file("containers").display());
        let placed = text
            .replace("/usr/local", &installed.root().join("usr/local").to_string_lossy())
            .replace("--root=/run/slurm/gpushare", &root);
        assert!(placed.contains(&root), "another runtime root: {text}");
        self.scratch.file("oci.conf", placed);
    }
}

/// The device nodes of the node's GPUs, in order.
fn gpus(node: &SimulatedNode) -> Vec<PathBuf> {
    let path = |index: usize| node.root().join(format!("dev/nvidia{index}"));
    (0..).map(path).take_while(|path| path.exists()).collect()
}

/// A network, a host name and mounts that end with this value.
#[derive(Debug)]
struct Network(Child);

impl Network {
    fn new() -> Self {
        // Slurm resolves names only where an address other than 127.0.0.1 is up.
        let script = format!(
            "set -e; {BUSYBOX} hostname {HOST}; {BUSYBOX} ip link set lo up; \
             {BUSYBOX} ip address add 127.0.0.2/8 dev lo; exec /bin/cat"
        );
        let mut holder = Command::new("/usr/bin/unshare");
        holder.args(["--mount", "--net", "--uts", "--propagation", "private", "/bin/sh", "-c", &script]);
        // It waits for the end of its input, which comes with the end of this process at the latest.
        let holder = holder.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().expect("unshare can be run");
        let network = Self(holder);
        let cmdline = format!("/proc/{}/cmdline", network.0.id());
        let made = eventually(Duration::from_secs(20), || {
            fs::read(&cmdline).is_ok_and(|line| line == b"/bin/cat\0")
        });
        assert!(made, "no network of one's own");
        network
    }

    /// A command that runs `program` there. The process id stays.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new("/usr/bin/nsenter");
        let of = format!("/proc/{}/ns", self.0.id());
        command.args([format!("--mount={of}/mnt"), format!("--net={of}/net"), format!("--uts={of}/uts")]);
        command.arg(program);
        command
    }

    /// Ends what still runs there.
    fn clear(&self) {
        let network = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/net")).ok();
        let holder = self.0.id().to_string();
        let Some(own) = network(&holder).filter(|own| network("self").as_ref() != Some(own)) else { return };
        for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
            let Some(pid) = entry.file_name().to_str().map(str::to_owned) else { continue };
            if let (Ok(number), true) = (pid.parse(), pid != holder && network(&pid).as_ref() == Some(&own)) {
                // The process may have ended meanwhile.
                let _ = kill(Pid::from_raw(number), Signal::SIGKILL);
            }
        }
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
