//! Reads the administrator's settings from TOML, checks them and returns them as values.
//!
//! The shipped `gpushare.toml` is embedded, and defaults are written only there. A file with an unknown key
//! or a wrong value is refused as a whole; the error names file and line.
#![forbid(unsafe_code)]

mod error;
mod file;
mod locate;
mod log;
mod request;
mod word;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use gpushare_inject::{DriverLimits, Programs, Settings, SupervisorMode, SupervisorSettings};
use gpushare_inventory::{DeviceMemory, GpuUuid, LeftOut, Roots, cdi_devices};
use gpushare_quota::Admission;
use gpushare_request::{Container, Policy, cdi_names};
use tracing_subscriber::filter::LevelFilter;

pub use error::{ConfigError, reason_of};
pub use locate::{DEFAULT_PATH, ENVIRONMENT};

/// The shipped settings file, with every key and its default.
pub const SHIPPED: &str = include_str!("../gpushare.toml");

/// All settings, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Roots of the driver's files, of /dev and of /proc.
    pub roots: Roots,
    /// Where gpushare's own files are.
    pub paths: Paths,
    /// Absolute paths of low-level runtimes; the first that exists is used.
    pub runtimes: Vec<PathBuf>,
    /// Rules for requests: sections `request` and `dialects`.
    pub request: Policy,
    /// Rules for admission: placement, reserve and overcommitment (section `quota`).
    pub quota: Admission,
    /// Rules for containers that block GPUs for others.
    pub rules: Rules,
    /// The cordoned GPUs that a command has cordoned.
    pub cordoned_by_command: BTreeSet<GpuUuid>,
    /// Mounts that every container with a share gets besides the driver's files.
    pub mounts: Vec<gpushare_inject::ExtraMount>,
    /// Names of the driver's files that containers do not get.
    pub left_out: Vec<String>,
    /// Whether containers with a share are prevented from creating user namespaces.
    pub denies_user_namespaces: bool,
    /// Whether supervisors hold the memory of containers with a share.
    pub supervisor_mode: SupervisorMode,
    /// Whether supervisors hold compute, too.
    pub supervisor_holds_compute: bool,
    /// Whether driver calls fail in containers that ask for no share and have no NVIDIA device.
    pub denies_bystanders: bool,
    /// Whether the driver limits containers with a share, too.
    pub driver_limits: DriverLimits,
    /// Whether `gpushare mps serve` sets a card's compute mode while MPS has it, so that the driver refuses
    /// every process except the MPS server. Otherwise it leaves the mode alone.
    pub mps_is_exclusive: bool,
    /// Absolute paths of folders with CDI files; later folders take precedence. They are read for CDI names
    /// that do not identify a GPU.
    pub cdi_folders: Vec<PathBuf>,
    /// Names of the shares that gpushare's CDI files offer, each in the form of
    /// [`gpushare_request::ShareName`].
    pub cdi_shares: Vec<String>,
    /// Settings of the agent on a cluster's node.
    pub kubernetes: Kubernetes,
    /// Settings of the node's meter.
    pub meter: Meter,
    /// Settings of the log file.
    pub log: Log,
}

/// Absolute paths of gpushare's own files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paths {
    /// The state folder: quota store, regions and the inventory's cache.
    pub state: PathBuf,
    /// The folder of the history, which outlives a boot.
    pub history: PathBuf,
    /// The folder with copies of the injected libraries that are adapted to this driver.
    pub cache: PathBuf,
    /// The program `gpushare-hook`.
    pub hook: PathBuf,
    /// The program `gpushare`.
    pub cli: PathBuf,
    /// The program `gpushare-supervisor`.
    pub supervisor: PathBuf,
    /// The folder of the injected libraries as installed.
    pub libraries: PathBuf,
}

/// The settings of `gpushare-kube node`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kubernetes {
    /// Names of the resources that the device plugin serves. If there are none, the agent publishes GPUs to
    /// the scheduler in a ResourceSlice. The agent knows the valid names.
    pub resources: Vec<String>,
    /// The size of one `gpushare.io/gpu-memory`, in bytes: at least 1 MiB.
    pub memory_granule: DeviceMemory,
    /// The most shares on a GPU if shares are counted (`nvidia.com/gpu`), 1 to 100.
    pub slots: u16,
}

/// Rules that end containers which block GPUs for others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    /// For containers that use no GPU time.
    pub idle: Option<Rule>,
    /// For containers that hold a GPU for long.
    pub hold: Option<Rule>,
    /// How long an ended container has before it is killed.
    pub grace: Duration,
    /// Whether containers that find no room end others of lower priority.
    pub preempts: bool,
}

/// The action on a container after a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// The time, at least a second.
    pub after: Duration,
    /// Whether to end the container; otherwise only the log reports it.
    pub ends: bool,
}

/// The settings of `gpushare meter`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meter {
    /// Device memory per process, in bytes, that may be in use beyond what the container's region accounts
    /// for.
    pub tolerance: DeviceMemory,
    /// The reaction to a container that breaks its share.
    pub on_cheating: OnCheating,
    /// Numbers of the driver's errors (Xid) that take a GPU out of service.
    pub xids: BTreeSet<u32>,
    /// The device files from which to read the GPUs' own records of context switches; `None`: GPU time comes
    /// from NVML's samples.
    pub record: Option<RecordFiles>,
}

/// Device files from which the meter reads the GPUs' records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordFiles {
    /// The node's files.
    OfNode,
    /// The files in this folder.
    In(PathBuf),
}

/// The meter's reaction to a container that breaks its share: it tampers with its limits, or uses more than
/// they allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnCheating {
    /// Reports it in the log, in `gpushare ps` and in `gpushare doctor`.
    Report,
    /// Same as `Report`. In an earlier version it stopped the container's processes.
    Cap,
    /// Kills the container's processes.
    End,
}

/// The log's settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Log {
    /// Absolute path; `None` writes no log.
    pub file: Option<PathBuf>,
    /// One JSON object per line instead of text.
    pub json: bool,
    /// The least severe level that is written. Error: something failed. Warning: someone may have to act.
    /// Info: a lease was granted, refused or released, one line each. Debug: single decisions, for
    /// troubleshooting.
    pub level: LevelFilter,
}

impl Config {
    /// Reads the settings: the shipped ones, then the file that `GPUSHARE_CONFIG` names (else the default
    /// path, if it exists), then the drop-ins in the folder of the same name with `.d` at its end.
    ///
    /// # Errors
    /// When a file is missing or cannot be read, others may write to it, or it has a mistake.
    pub fn load() -> Result<Self, ConfigError> {
        Self::merged(&locate::files()?)
    }

    /// Like [`Config::load`], with the settings file `path`.
    ///
    /// # Errors
    /// Same as [`Config::load`].
    pub fn load_from(path: &Path) -> Result<Self, ConfigError> {
        Self::merged(&locate::files_of(path)?)
    }

    fn merged(files: &[PathBuf]) -> Result<Self, ConfigError> {
        let base = locate::program_folder()?;
        file::config(files, &base)
    }

    /// The part of the settings that a grant needs. `file` is the settings file if it is not the default one.
    pub fn settings(&self, file: Option<PathBuf>) -> Settings<'_> {
        Settings {
            roots: &self.roots,
            programs: self.programs(&self.paths.state, file),
            history: &self.paths.history,
            admission: &self.quota,
            policy: &self.request,
            preemption: Some(self.rules.grace).filter(|_| self.rules.preempts),
        }
    }

    /// Our own files, with `state` as the state folder. `file` is the settings file if it is not the default
    /// one.
    pub fn programs<'a>(&'a self, state: &'a Path, file: Option<PathBuf>) -> Programs<'a> {
        Programs {
            hook: &self.paths.hook,
            libraries: &self.paths.libraries,
            cache: &self.paths.cache,
            state,
            extra_mounts: &self.mounts,
            left_out: LeftOut(&self.left_out),
            denies_user_namespaces: self.denies_user_namespaces,
            log: self.log.arguments(),
            cli: &self.paths.cli,
            settings: file,
            supervisor: self.supervisor(),
            driver_limits: self.driver_limits,
        }
    }

    /// The settings of supervisors.
    pub fn supervisor(&self) -> SupervisorSettings<'_> {
        SupervisorSettings {
            mode: self.supervisor_mode,
            program: &self.paths.supervisor,
            holds_compute: self.supervisor_holds_compute,
        }
    }

    /// Reads the container from a config.json. Also reads the node's CDI files if the container names a CDI
    /// device whose name does not identify the GPU.
    pub fn container(&self, json: &serde_json::Value) -> Container {
        let container = Container::from_json(json);
        let names = cdi_names(&container);
        if names.is_empty() {
            return container;
        }
        let devices = cdi_devices(&self.cdi_folders, &names);
        container.specified(devices)
    }

    /// The settings that a single file with the contents `text` would give. `name` stands for it in messages,
    /// and `programs` is the folder of gpushare's programs.
    ///
    /// # Errors
    /// If the text has a mistake.
    pub fn from_text(name: &Path, text: &str, programs: &Path) -> Result<Self, ConfigError> {
        file::merge_text(name, text)?.into_config(programs)
    }

    /// The usable part of settings that [`Config::load`] refuses, or [`Config::load_from`] for the settings
    /// file `named`. It is for calls that must not fail: the low-level runtimes and the state folder come
    /// from the files, everything else is as shipped.
    ///
    /// `None` if a file is so far from valid TOML that these may be lost. The runtime that made the
    /// containers is unknown then, and another runtime's `delete` would destroy their state.
    pub fn salvaged(named: Option<&Path>) -> Option<Self> {
        let files = named.map_or_else(locate::files, locate::files_of).ok()?;
        file::salvage(&files)?.into_config(&locate::program_folder().ok()?).ok()
    }

    /// The existing files that [`Config::load`] reads, in order.
    ///
    /// # Errors
    /// When the named file does not exist, or a folder is unsafe or cannot be read.
    pub fn files() -> Result<Vec<PathBuf>, ConfigError> {
        locate::files()
    }

    /// The settings that would be in force if the settings file `path`, which may not exist yet, contained
    /// `text`.
    ///
    /// # Errors
    /// When the text or another file has a mistake.
    pub fn tried(path: &Path, text: &str) -> Result<toml::Table, ConfigError> {
        // The settings file that the environment names may not exist yet.
        let files = match locate::files() {
            Err(ConfigError::NoSuchFile { path: missing }) if missing == path => Vec::new(),
            files => files?,
        };
        file::tried(&files, path, text, &locate::program_folder()?)
    }

    /// The settings as shipped, with every key.
    ///
    /// # Errors
    /// None in practice: tests parse the shipped file.
    pub fn shipped() -> Result<toml::Table, ConfigError> {
        file::shipped()
    }

    /// The file and line that set a key such as `quota.reserve`; `None` if it has the shipped value.
    ///
    /// # Errors
    /// Same as [`Config::files`].
    pub fn origin(key: &str) -> Result<Option<(PathBuf, usize)>, ConfigError> {
        Ok(file::origin(&locate::files()?, key))
    }

    /// The settings in force, as the text of a TOML file.
    ///
    /// # Errors
    /// When a file is missing, unsafe, unreadable or has a mistake.
    pub fn show() -> Result<String, ConfigError> {
        file::show(&locate::files()?)
    }
}
