//! The administrator's settings, as far as a share depends on them.

use std::path::{Path, PathBuf};

use gpushare_inventory::Roots;
use gpushare_quota::Admission;
use gpushare_request::Policy;

/// The environment variable that names a settings file in place of the default one.
pub const SETTINGS_VARIABLE: &str = "GPUSHARE_CONFIG";

/// The administrator's settings, as far as a grant depends on them.
#[derive(Clone, Debug)]
pub struct Settings<'a> {
    /// Where driver, devices and /proc are.
    pub roots: &'a Roots,
    /// Our own files; the state folder as it is written in the settings.
    pub programs: Programs<'a>,
    /// The CLI's binary, which takes stock of the node.
    pub cli: &'a Path,
    /// The settings file, where it is not the default one: the CLI reads the same.
    pub file: Option<PathBuf>,
    /// Rules for admission.
    pub admission: &'a Admission,
    /// Rules for requests.
    pub policy: &'a Policy,
}

/// Where our own programs and libraries are, and what they are told.
#[derive(Clone, Debug)]
pub struct Programs<'a> {
    /// The hook's binary.
    pub hook: &'a Path,
    /// The folder with the interception libraries.
    pub libraries: &'a Path,
    /// The folder with their copies for this driver.
    pub cache: &'a Path,
    /// The state folder.
    pub state: &'a Path,
    /// The administrator's own mounts.
    pub extra_mounts: &'a [ExtraMount],
    /// Whether containers with a share may make no user namespaces.
    pub denies_user_namespaces: bool,
    /// What the hooks are told of the log, as arguments.
    pub log: Vec<String>,
}

/// A mount that the administrator adds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExtraMount {
    /// On the host.
    pub source: PathBuf,
    /// In the container.
    pub destination: PathBuf,
    /// Whether the container may write there.
    pub writable: bool,
}
