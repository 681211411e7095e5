//! One GPU's control daemon: NVIDIA's program `nvidia-cuda-mps-control`.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use gpushare_config::Config;
use gpushare_inject::MpsFolder;
use gpushare_inventory::{Capabilities, Extent, LeftOut, Node};
use gpushare_quota::Holder;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use procfs::process::Process;
use tempfile::NamedTempFile;

use super::compute_mode;

const PROGRAM: &str = "nvidia-cuda-mps-control";
/// The kernel's name of the daemon and of its servers: the first 15 bytes.
const COMM: &str = "nvidia-cuda-mps";
const PIPE: &str = "CUDA_MPS_PIPE_DIRECTORY";
/// The socket that takes root's commands, such as `quit`. It lies beside the clients' socket at first.
const PRIVILEGED: &str = "control_privileged";
/// How long the daemon may take to open its sockets. Debian's 535 takes 0.02 s.
const START: Duration = Duration::from_secs(5);
/// How long it may take to answer.
const ANSWER: Duration = Duration::from_secs(2);
/// How long it and its servers may take to end.
const END: Duration = Duration::from_secs(3);
const PAUSE: Duration = Duration::from_millis(5);
/// Bytes of a socket's path (unix(7)).
const LONGEST: usize = 107;
const NONE: Option<&str> = None;

/// A GPU's daemon, running or not.
pub struct Daemon<'a> {
    folder: MpsFolder,
    config: &'a Config,
    holder: Option<Holder>,
    /// Where it is a child of this process, which must hear of its end.
    child: Option<Child>,
}

impl<'a> Daemon<'a> {
    /// The daemon of this folder; one that an earlier process has started is taken over.
    pub fn of(folder: MpsFolder, config: &'a Config) -> Self {
        let holder = folder.daemon();
        Self { folder, config, holder, child: None }
    }

    /// Whether it runs.
    pub fn lives(&mut self) -> bool {
        if let Some(child) = &mut self.child {
            let _ = child.try_wait();
        }
        self.holder.as_ref().is_some_and(Holder::lives)
    }

    /// Starts it, with the GPU's compute mode set unless that stays. What is left of an earlier one is ended
    /// first.
    pub fn start(&mut self) -> Result<()> {
        // The first, since it also takes the reason why there is no daemon.
        DirBuilder::new().mode(0o700).recursive(true).create(self.folder.path())?;
        let node = Node::open(&self.config.roots)?;
        let program = program(&node)?;
        self.forget();
        self.make_folders(node.gpus.len())?;
        compute_mode::take(&node, &self.folder, self.config.mps_is_exclusive)?;
        self.end_processes()?;
        self.empty_pipe()?;
        let mut child = self.spawn(&program, &node)?;
        match self.opened(&mut child) {
            Ok(holder) => (self.holder, self.child) = (Some(holder), Some(child)),
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(error);
            }
        }
        tracing::info!(gpu = %self.folder.gpu(), pid = ?self.holder.as_ref().map(|holder| holder.pid), "MPS started");
        self.publish()
    }

    /// Lets containers come.
    pub fn publish(&self) -> Result<()> {
        let Some(holder) = &self.holder else { return Ok(()) };
        if self.folder.daemon().as_ref() == Some(holder) {
            return Ok(());
        }
        let mut new = NamedTempFile::new_in(self.folder.path())?;
        new.write_all(&serde_json::to_vec(holder)?)?;
        new.persist(self.folder.ready())?;
        Ok(())
    }

    /// Asks it something that it always has an answer to.
    pub fn ask(&self) -> Result<()> {
        let node = Node::open(&self.config.roots)?;
        let answer = self.command(&node, "get_default_active_thread_percentage")?;
        match answer.trim().parse::<f32>() {
            Ok(_) => Ok(()),
            Err(_) => bail!("its control daemon answers {:?}", answer.trim()),
        }
    }

    /// Ends it and its servers, and gives the GPU's compute mode back if it was set.
    pub fn end(&mut self) -> Result<()> {
        self.forget();
        let node = Node::open(&self.config.roots);
        if let Ok(node) = &node
            && self.lives()
        {
            // What it does not do by itself is done below.
            let _ = self.command(node, "quit -t 1");
        }
        // Also where the driver cannot be read: nobody has a lease any more.
        self.end_processes()?;
        let node = node?;
        compute_mode::give_back(&node, &self.folder)?;
        for place in [self.folder.run(), self.folder.shared_memory()] {
            match umount2(&place, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
                Ok(()) | Err(nix::Error::EINVAL | nix::Error::ENOENT) => {}
                Err(error) => {
                    return Err(error).with_context(|| format!("cannot unmount {}", place.display()));
                }
            }
        }
        Ok(())
    }

    /// Lets no further container come.
    fn forget(&self) {
        let _ = fs::remove_file(self.folder.ready());
    }

    /// Makes the folders and both file systems, as far as they are not there.
    fn make_folders(&self, gpus: usize) -> Result<()> {
        let longest = self.folder.pipe().join(PRIVILEGED);
        anyhow::ensure!(
            longest.as_os_str().len() <= LONGEST,
            "{} is too long for a socket's path: shorten paths.state",
            longest.display()
        );
        for (path, mode) in
            [(self.folder.users(), 0o700), (self.folder.run(), 0o755), (self.folder.shared_memory(), 0o755)]
        {
            DirBuilder::new().mode(mode).recursive(true).create(&path)?;
        }
        // What clients can make grow: the log, and a file that everybody may lock.
        mount_tmpfs(&self.folder.run(), "size=8m,nr_inodes=256,mode=0755")?;
        // As much as the kernel gives /dev/shm, over all GPUs.
        let percent = (50 / gpus.max(1)).max(1);
        let options = format!("size={percent}%,nr_inodes=100k,mode=1777");
        mount_tmpfs(&self.folder.shared_memory(), &options)?;
        for (path, mode) in
            [(self.folder.pipe(), 0o755), (self.folder.admin(), 0o700), (self.folder.log(), 0o700)]
        {
            DirBuilder::new().mode(mode).recursive(true).create(&path)?;
            fs::set_permissions(&path, Permissions::from_mode(mode))?;
        }
        Ok(())
    }

    /// Empties the pipe folder of what an earlier daemon left. The file that the daemon locks goes, too: a
    /// container that has it mounted could hold its lock, and no daemon would start.
    fn empty_pipe(&self) -> Result<()> {
        for entry in fs::read_dir(self.folder.pipe())?.chain(fs::read_dir(self.folder.admin())?) {
            fs::remove_file(entry?.path())?;
        }
        Ok(())
    }

    fn spawn(&self, program: &Path, node: &Node) -> Result<Child> {
        let log = File::create(self.folder.log().join("daemon.log"))?;
        let mut command = Command::new(program);
        command.arg("-f").env_clear().envs(environment(program, node));
        command.env(PIPE, self.folder.pipe()).env("CUDA_MPS_LOG_DIRECTORY", self.folder.log());
        command.env("CUDA_VISIBLE_DEVICES", self.folder.gpu().to_string());
        // It and its servers outlive this process, whose terminal or group may be killed.
        command.process_group(0).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let memory = self.folder.shared_memory();
        let apart = || -> io::Result<Child> {
            // Of this thread alone, which ends with the start of the daemon.
            unshare(CloneFlags::CLONE_NEWNS)?;
            // What the host unmounts later is unmounted here, too: a daemon may live for months.
            mount(NONE, "/", NONE, MsFlags::MS_SLAVE | MsFlags::MS_REC, NONE)?;
            mount(Some(&memory), "/dev/shm", NONE, MsFlags::MS_BIND, NONE)?;
            command.spawn()
        };
        let started = scope(|scope| scope.spawn(apart).join()).map_err(|_| anyhow!("a thread failed"))?;
        started.with_context(|| format!("cannot start {}", program.display()))
    }

    /// Waits until its sockets are there, and takes that for root's commands out of the clients' reach.
    fn opened(&self, child: &mut Child) -> Result<Holder> {
        let since = Instant::now();
        let socket = self.folder.pipe().join(PRIVILEGED);
        while !(socket.exists() && self.folder.pipe().join("control").exists()) {
            if let Some(status) = child.try_wait()? {
                bail!("its control daemon ended at once ({status}): {}", self.last_words());
            }
            if since.elapsed() > START {
                bail!("its control daemon opens no socket: {}", self.last_words());
            }
            sleep(PAUSE);
        }
        fs::rename(socket, self.folder.admin().join(PRIVILEGED))?;
        Ok(Holder::init(i32::try_from(child.id())?)?)
    }

    /// The last line of its log.
    fn last_words(&self) -> String {
        let log = fs::read(self.folder.log().join("daemon.log")).unwrap_or_default();
        let text = String::from_utf8_lossy(&log);
        let line = text.lines().rfind(|line| !line.trim().is_empty());
        line.unwrap_or("it says nothing").trim().to_owned()
    }

    /// Gives it one of root's commands, and returns its answer.
    fn command(&self, node: &Node, line: &str) -> Result<String> {
        let program = program(node)?;
        let mut answer = tempfile::tempfile()?;
        let mut command = Command::new(&program);
        command.env_clear().envs(environment(&program, node)).env(PIPE, self.folder.admin());
        command.stdin(Stdio::piped()).stdout(answer.try_clone()?).stderr(Stdio::null());
        let mut asking = command.spawn().with_context(|| format!("cannot start {}", program.display()))?;
        // The pipe takes a line at once, and closes here.
        let written = asking.stdin.take().map(|mut pipe| writeln!(pipe, "{line}"));
        let since = Instant::now();
        while asking.try_wait()?.is_none() {
            if since.elapsed() > ANSWER {
                let _ = asking.kill();
                let _ = asking.wait();
                bail!("its control daemon does not answer");
            }
            sleep(PAUSE);
        }
        written.transpose()?;
        let mut text = String::new();
        io::Seek::rewind(&mut answer)?;
        io::Read::read_to_string(&mut answer, &mut text)?;
        Ok(text)
    }

    /// Ends every process of this GPU's MPS, at first by a signal that lets it clean up.
    fn end_processes(&mut self) -> Result<()> {
        for signal in [Signal::SIGTERM, Signal::SIGKILL] {
            let since = Instant::now();
            while since.elapsed() < END {
                if let Some(child) = &mut self.child {
                    let _ = child.try_wait();
                }
                let left = processes(&self.folder.pipe());
                if left.is_empty() {
                    (self.holder, self.child) = (None, None);
                    return Ok(());
                }
                // Each time anew: a daemon may just have started a server.
                for pid in left {
                    let _ = kill(pid, signal);
                }
                sleep(PAUSE);
            }
        }
        bail!("its processes do not end; see the kernel log")
    }
}

/// Whether this is a living daemon or server that root runs outside of containers: name and environment
/// alone anybody can choose.
pub fn is_of_mps(process: &Process) -> bool {
    let is_named = process.stat().is_ok_and(|stat| stat.comm == COMM && !matches!(stat.state, 'Z' | 'X'));
    let of =
        |process: &Process| process.namespaces().ok()?.0.get(OsStr::new("pid")).map(|pid| pid.identifier);
    let here = Process::myself().ok().as_ref().and_then(of);
    is_named && process.uid().is_ok_and(|uid| uid == 0) && here.is_some() && of(process) == here
}

/// The daemon and the servers whose pipe folder this is.
fn processes(pipe: &Path) -> Vec<Pid> {
    let all = procfs::process::all_processes().into_iter().flatten().flatten();
    let of_mps = all.filter(is_of_mps);
    let of_pipe = of_mps.filter(|process| {
        process
            .environ()
            .is_ok_and(|all| all.get(OsStr::new(PIPE)).is_some_and(|value| value == pipe.as_os_str()))
    });
    of_pipe.map(|process| Pid::from_raw(process.pid())).collect()
}

/// The control program among the driver's files.
fn program(node: &Node) -> Result<PathBuf> {
    let files = node.driver.files(&Capabilities::default(), Extent::Whole, LeftOut::default())?;
    let found = files.into_iter().find(|file| file.container_path.ends_with(PROGRAM));
    let found = found.map(|file| file.host_path);
    found.with_context(|| {
        format!("the driver's {PROGRAM} is missing: install it (Debian and Ubuntu: nvidia-cuda-mps or nvidia-compute-utils)")
    })
}

/// The whole environment of NVIDIA's programs, but for their folders.
fn environment(program: &Path, node: &Node) -> BTreeMap<&'static str, String> {
    let folder = program.parent().unwrap_or(Path::new("/usr/bin")).display();
    let path = format!("{folder}:/usr/sbin:/usr/bin:/sbin:/bin");
    let libraries = node.driver.libcuda().ok();
    let libraries = libraries.as_deref().and_then(Path::parent).map(|folder| folder.display().to_string());
    let libraries = libraries.map(|folder| ("LD_LIBRARY_PATH", folder));
    [("PATH", path)].into_iter().chain(libraries).collect()
}

/// Mounts a file system of its own at this folder, unless one is there.
fn mount_tmpfs(folder: &Path, options: &str) -> Result<()> {
    let parent = folder.parent().ok_or(ErrorKind::InvalidInput).map_err(io::Error::from)?;
    if fs::metadata(folder)?.dev() != fs::metadata(parent)?.dev() {
        return Ok(());
    }
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("gpushare"), folder, Some("tmpfs"), flags, Some(options))
        .with_context(|| format!("cannot mount {}", folder.display()))
}
