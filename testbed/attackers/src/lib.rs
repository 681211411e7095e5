//! A place for programs that call a resource manager: a simulated one that the kernel reaches like a driver,
//! and supervisors for its users.

pub mod world;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use gpushare_simulated_manager::{Gpu, Manager, mount};
use gpushare_supervisor::abi::Era;
use gpushare_supervisor::budget::Page;
use gpushare_supervisor::plan::Plan;

/// The UUID of its GPU.
pub const UUID: [u8; 16] = [1; 16];
/// Memory of that GPU in bytes.
const MEMORY: u64 = 80 << 30;

/// Lists the PIDs of the keepers and workers that have `word` in their command line.
///
/// # Errors
/// If /proc cannot be read.
pub fn supervisors(word: &Path) -> Result<Vec<i32>> {
    Ok([pids_of("keeper", word)?, pids_of("worker", word)?].concat())
}

/// Lists the PIDs of the processes of a role, `keeper` or `worker`, that have `word` in their command line.
///
/// # Errors
/// If /proc cannot be read.
pub fn pids_of(role: &str, word: &Path) -> Result<Vec<i32>> {
    let (name, word) = (format!("gpushare-{role}"), word.to_string_lossy());
    let is_its = |pid: &i32| {
        let read = |file: &str| fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
        String::from_utf8_lossy(&read("comm")).trim() == name
            && String::from_utf8_lossy(&read("cmdline")).contains(&*word)
    };
    let processes = fs::read_dir("/proc").context("/proc")?.flatten();
    Ok(processes.filter_map(|one| one.file_name().to_str()?.parse().ok()).filter(is_its).collect())
}

/// A resource manager with one GPU, in a directory.
pub struct Place {
    // Dropped first, so that it is unmounted before the directory is removed.
    _session: Box<dyn Send>,
    folder: PathBuf,
    driver: String,
}

impl Place {
    /// Mounts a resource manager of this driver in `folder`.
    ///
    /// # Errors
    /// If the driver is unknown, or the mount fails.
    pub fn new(folder: &Path, driver: &str) -> Result<Self> {
        let era = driver.parse().ok().and_then(Era::for_version);
        let era = era.with_context(|| format!("driver {driver} is not known"))?;
        let dev = folder.join("dev");
        fs::create_dir(&dev)?;
        let manager = Manager::new(era, vec![Gpu { uuid: UUID, memory: MEMORY }]);
        let session = mount(manager, 1, &dev).context("only root may mount")?;
        Ok(Self { _session: Box::new(session), folder: folder.to_owned(), driver: driver.to_owned() })
    }

    /// Creates plain files in place of the device files, without a resource manager: calls that a supervisor
    /// lets through fail at once.
    ///
    /// # Errors
    /// If they cannot be created.
    pub fn of_plain_files(folder: &Path, driver: &str) -> Result<Self> {
        let dev = folder.join("dev");
        fs::create_dir(&dev)?;
        ["nvidiactl", "nvidia-uvm", "nvidia0"]
            .into_iter()
            .try_for_each(|name| fs::write(dev.join(name), ""))?;
        Ok(Self { _session: Box::new(()), folder: folder.to_owned(), driver: driver.to_owned() })
    }

    /// Returns the directory of its device files.
    pub fn dev(&self) -> PathBuf {
        self.folder.join("dev")
    }

    /// Returns its figures as text.
    ///
    /// # Errors
    /// If it does not answer.
    pub fn figures(&self) -> Result<String> {
        Ok(fs::read_to_string(self.dev().join("figures"))?)
    }

    /// Starts a supervisor, `program`, for a container that may use `limit` bytes of the GPU. Returns the
    /// socket at which it accepts listeners. A place has one supervisor at a time.
    ///
    /// # Errors
    /// If it does not start.
    pub fn start_supervisor(&self, program: &Path, limit: u64) -> Result<PathBuf> {
        self.supervise(program, "", 1, limit, None)
    }

    /// Starts the supervisor of a lease that may use `limit` bytes of the GPU and shares its time by this
    /// plan. The names of its files begin with `name`.
    ///
    /// # Errors
    /// If it does not start.
    pub fn supervise(
        &self,
        program: &Path,
        name: &str,
        lease: i64,
        limit: u64,
        plan: Option<&Plan>,
    ) -> Result<PathBuf> {
        let [socket, budget, limits] =
            ["socket", "budget", "limits"].map(|file| self.folder.join(format!("{name}{file}")));
        let _ = fs::remove_file(&socket); // left by an earlier one
        let page = Page::new();
        page.grant(0, &UUID, limit);
        page.set_lease(lease);
        page.set_plan(0, plan);
        File::create(&budget)?.write_all_at(page.as_bytes(), 0)?;
        fs::write(&limits, [0; 4096])?;
        let dev = self.dev();
        let mut start = Command::new(program);
        start.arg("start").args(["--driver", &self.driver]);
        for (flag, path) in
            [("--budget-path", &budget), ("--limits-path", &limits), ("--socket-path", &socket)]
        {
            start.arg(flag).arg(path);
        }
        start.arg("--boards").arg(&self.folder);
        for (flag, name) in [("--control", "nvidiactl"), ("--uvm", "nvidia-uvm"), ("--gpu", "nvidia0")] {
            start.arg(flag).arg(dev.join(name));
        }
        let status = start.status()?;
        if !status.success() {
            bail!("the supervisor did not start: {status}");
        }
        Ok(socket)
    }
}
