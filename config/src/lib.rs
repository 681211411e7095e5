//! The administrator's settings: read from TOML, checked, and handed down as values.
//!
//! The shipped `gpushare.toml` is embedded and is the one place of every default. A file is refused as a whole, with
//! its name and line, when it has a key that does not exist or a value of the wrong kind.
#![forbid(unsafe_code)]

mod error;
mod file;
mod locate;
mod log;
mod request;

use std::path::{Path, PathBuf};

use gpushare_inject::{Programs, Settings};
use gpushare_inventory::{DeviceMemory, Roots, cdi_devices};
use gpushare_quota::Admission;
use gpushare_request::{Container, Policy, cdi_names};

pub use error::ConfigError;
pub use locate::{DEFAULT_PATH, ENVIRONMENT};

/// The shipped settings file, with every key and its default.
pub const SHIPPED: &str = include_str!("../gpushare.toml");

/// All settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Where driver, devices and /proc are.
    pub roots: Roots,
    /// Our own files.
    pub paths: Paths,
    /// Low-level runtimes by absolute path, in order of choice.
    pub runtimes: Vec<PathBuf>,
    /// Rules for requests.
    pub request: Policy,
    /// Rules for admission.
    pub quota: Admission,
    /// Further mounts for containers with a share.
    pub mounts: Vec<gpushare_inject::ExtraMount>,
    /// Whether containers with a share may make no user namespaces.
    pub denies_user_namespaces: bool,
    /// Folders with CDI specifications, those of later ones counting first: what names of devices mean that tell no GPU.
    pub cdi_folders: Vec<PathBuf>,
    /// Names of the shares that CDI specifications offer, each as [`gpushare_request::ShareName`] reads it.
    pub cdi_shares: Vec<String>,
    /// The node's meter.
    pub meter: Meter,
    /// The log.
    pub log: Log,
}

/// Where our own files are, all absolute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paths {
    /// The state folder.
    pub state: PathBuf,
    /// The folder of the injected libraries' copies for this driver.
    pub cache: PathBuf,
    /// The hook's binary.
    pub hook: PathBuf,
    /// The CLI's binary.
    pub cli: PathBuf,
    /// The folder of the injected libraries.
    pub libraries: PathBuf,
}

/// The settings of `gpushare meter`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meter {
    /// Device memory per process that a container's books may leave unexplained.
    pub tolerance: DeviceMemory,
    /// What becomes of a container that breaks its share.
    pub on_cheating: OnCheating,
}

/// What the meter does about a container that breaks its share: one that spoils its limits, or uses more than they give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnCheating {
    /// It is told: in the log, by `gpushare ps` and `gpushare doctor`.
    Report,
    /// Its processes are stopped for as long as it lasts.
    Cap,
    /// Its processes are killed.
    End,
}

/// The log's settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Log {
    /// `None` is no log.
    pub file: Option<PathBuf>,
    /// One JSON object per line instead of text.
    pub json: bool,
    /// Least level to write.
    pub level: Level,
}

/// Levels of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Only what failed.
    Error,
    /// What a person may act on.
    Warn,
    /// One line per lease granted, refused, released.
    Info,
    /// Decisions.
    Debug,
}

impl Config {
    /// Reads the settings: the shipped ones, the file (by `GPUSHARE_CONFIG`, else the default path if it exists), and
    /// the drop-ins in the folder beside it whose name ends in `.d`.
    ///
    /// # Errors
    /// When a file cannot be read, could be written by others, or has a mistake.
    pub fn load() -> Result<Self, ConfigError> {
        Self::merged(&locate::files()?)
    }

    /// As [`Config::load`], with the settings file `path`.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn load_from(path: &Path) -> Result<Self, ConfigError> {
        Self::merged(&locate::files_of(path)?)
    }

    fn merged(files: &[PathBuf]) -> Result<Self, ConfigError> {
        let base = locate::program_folder()?;
        file::config(files, &base)
    }

    /// What a grant depends on; `file` is the settings file where it is not the default one.
    pub fn settings(&self, file: Option<PathBuf>) -> Settings<'_> {
        Settings {
            roots: &self.roots,
            programs: Programs {
                hook: &self.paths.hook,
                libraries: &self.paths.libraries,
                cache: &self.paths.cache,
                state: &self.paths.state,
                extra_mounts: &self.mounts,
                denies_user_namespaces: self.denies_user_namespaces,
                log: self.log.arguments(),
            },
            cli: &self.paths.cli,
            file,
            admission: &self.quota,
            policy: &self.request,
        }
    }

    /// The container of this config.json. The node's CDI specifications are read where it names a device of which nothing else
    /// tells the GPU.
    pub fn container(&self, json: &serde_json::Value) -> Container {
        let container = Container::from_json(json);
        let names = cdi_names(&container);
        if names.is_empty() {
            return container;
        }
        let devices = cdi_devices(&self.cdi_folders, &names);
        container.specified(devices)
    }

    /// The settings that a single file with the contents `text` would give; `name` is what messages call it, and companions
    /// lie beside a program in `programs`.
    ///
    /// # Errors
    /// When the text has a mistake.
    pub fn from_text(name: &Path, text: &str, programs: &Path) -> Result<Self, ConfigError> {
        file::merge_text(name, text)?.into_config(programs)
    }

    /// What can be saved of settings that [`Config::load`] or, with the settings file `named`, [`Config::load_from`] refuses,
    /// for calls that must go through all the same: the low-level runtimes and the state folder, everything else as shipped.
    /// `None` when a file is not even TOML: then nobody can tell which runtime made the containers, and another one's
    /// `delete` would destroy their state.
    pub fn salvaged(named: Option<&Path>) -> Option<Self> {
        let files = named.map_or_else(locate::files, locate::files_of).ok()?;
        file::salvage(&files)?.into_config(&locate::program_folder().ok()?).ok()
    }

    /// The files that [`Config::load`] reads, in order.
    ///
    /// # Errors
    /// When the named file does not exist.
    pub fn files() -> Result<Vec<PathBuf>, ConfigError> {
        locate::files()
    }

    /// The settings in force, as TOML.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn show() -> Result<String, ConfigError> {
        file::show(&locate::files()?)
    }
}
