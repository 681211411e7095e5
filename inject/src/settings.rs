//! The administrator's settings that a share depends on.

use std::path::{Path, PathBuf};
use std::time::Duration;

use gpushare_inventory::{LeftOut, Roots};
use gpushare_quota::Admission;
use gpushare_request::Policy;

use crate::driver_limit::DriverLimits;
use crate::supervision::SupervisorSettings;

/// The environment variable that names a settings file in place of the default one.
pub const SETTINGS_VARIABLE: &str = "GPUSHARE_CONFIG";

/// Everything of the settings file that a grant reads.
#[derive(Clone, Debug)]
pub struct Settings<'a> {
    /// Where the driver, its devices and /proc are on this node.
    pub roots: &'a Roots,
    /// Our own files. `state` is the path as it is written in the settings.
    pub programs: Programs<'a>,
    /// The folder of the history, which outlives a boot.
    pub history: &'a Path,
    /// Rules for admission.
    pub admission: &'a Admission,
    /// Rules for requests.
    pub policy: &'a Policy,
    /// How long containers of lower priority have to end for one that finds no room; `None`: they go on.
    pub preemption: Option<Duration>,
}

/// Where our own programs and libraries are, and what they are told.
#[derive(Clone, Debug)]
pub struct Programs<'a> {
    /// Path of the hook's binary.
    pub hook: &'a Path,
    /// The folder with the interception libraries.
    pub libraries: &'a Path,
    /// The folder with the copies of them that are fitted to this driver.
    pub cache: &'a Path,
    /// The folder with quota store, regions and cached inventory.
    pub state: &'a Path,
    /// The administrator's own mounts (`inject.mounts`).
    pub extra_mounts: &'a [ExtraMount],
    /// Files of the driver that containers do not get (`inject.leave_out`).
    pub left_out: LeftOut<'a>,
    /// Whether containers with a share may make no user namespaces (`inject.user_namespaces`).
    pub denies_user_namespaces: bool,
    /// Arguments that tell the hooks where and how to log.
    pub log: Vec<String>,
    /// Path of the CLI's binary, which does what needs NVML.
    pub cli: &'a Path,
    /// Path of the settings file, if it is not the default one. The CLI is told to read the same file.
    pub settings: Option<PathBuf>,
    /// Whether supervisors hold containers, and what of them.
    pub supervisor: SupervisorSettings<'a>,
    /// Whether the driver limits containers too (`inject.driver_limit`).
    pub driver_limits: DriverLimits,
}

/// A mount that the administrator adds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExtraMount {
    /// Path on the host.
    pub source: PathBuf,
    /// Path in the container.
    pub destination: PathBuf,
    /// Whether the container may write there.
    pub writable: bool,
}
