//! Facts of the node that a creation only looks up, and that the CLI prepares: GPU memory sizes, and our
//! libraries' copies for the driver. NVML tells the sizes, and a static program cannot ask NVML.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use gpushare_inventory::{Node, ProcError, Totals, boot_id};

use crate::child::{self, Ended};
use crate::fitted::Fitted;
use crate::settings::{Programs, SETTINGS_VARIABLE, Settings};

/// Why the node's GPUs are not known.
#[derive(Debug, thiserror::Error)]
pub enum NodeFactsError {
    /// The id of the running boot cannot be read.
    #[error(transparent)]
    Boot(#[from] ProcError),
    /// The CLI is not where it was installed, or cannot be run.
    #[error("cannot take stock of the node: cannot run {path}; install gpushare completely")]
    Run {
        /// Path of the CLI's binary.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The CLI did not end before the deadline: NVML hangs.
    #[error(
        "cannot take stock of the node: NVML gave no answer for {} seconds; turn on persistence mode (nvidia-smi -pm 1)",
        child::DEADLINE.as_secs()
    )]
    NoAnswer,
    /// The CLI failed; this is the last line of its standard error.
    #[error("cannot take stock of the node: {0}")]
    Refused(String),
    /// The cached inventory does not fit the GPUs in /proc, not even after a refresh.
    #[error("NVML and /proc/driver/nvidia name different GPUs; see `gpushare doctor`")]
    Differs,
}

/// The cached facts, if they are of this boot, driver and set of GPUs.
pub(crate) fn load(node: &Node, state: &Path) -> Result<Option<Totals>, NodeFactsError> {
    let boot = boot_id()?;
    let totals = Totals::load(&Totals::path(state));
    Ok(totals.filter(|totals| totals.fits(&boot, node)))
}

/// Whether each of our libraries has a copy that is fitted to this driver.
pub(crate) fn are_libraries_fitted(node: &Node, state: &Path, programs: &Programs) -> bool {
    let Programs { cache, libraries, .. } = *programs;
    Fitted { cache, libraries, driver: &node.driver, state }.is_complete()
}

/// Runs `gpushare inventory refresh` within a deadline. The CLI gets nothing of the caller's environment, and
/// none of its descriptors.
pub(crate) fn refresh(settings: &Settings) -> Result<(), NodeFactsError> {
    let mut command = Command::new(settings.programs.cli);
    command.args(["inventory", "refresh"]);
    if let Some(file) = &settings.programs.settings {
        // The child runs in /, so a relative path would name another file.
        command.env(SETTINGS_VARIABLE, std::path::absolute(file).unwrap_or_else(|_| file.clone()));
    }
    let run = |source| NodeFactsError::Run { path: settings.programs.cli.into(), source };
    match child::run(command).map_err(run)? {
        Ended::Well => Ok(()),
        Ended::Failed(line) => Err(NodeFactsError::Refused(line)),
        Ended::NoAnswer => Err(NodeFactsError::NoAnswer),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use gpushare_inventory::{LeftOut, Roots};
    use gpushare_quota::Admission;

    use super::*;
    use crate::driver_limit::DriverLimits;
    use crate::supervision::SupervisorSettings;

    #[test]
    fn the_child_reads_the_settings_that_a_relative_path_names() {
        let folder = tempfile::tempdir().unwrap();
        let cli = folder.path().join("cli");
        fs::write(
            &cli,
            "#!/bin/sh\ntest -f \"$GPUSHARE_CONFIG\" || { echo \"no $GPUSHARE_CONFIG\" >&2; exit 1; }\n",
        )
        .unwrap();
        fs::set_permissions(&cli, fs::Permissions::from_mode(0o755)).unwrap();
        let none = Path::new("");
        let (roots, admission) = (Roots::default(), Admission::default());
        let policy = gpushare_request::Policy::default();
        let settings = |file: &str| Settings {
            roots: &roots,
            programs: Programs {
                hook: none,
                libraries: none,
                cache: none,
                state: none,
                extra_mounts: &[],
                left_out: LeftOut::default(),
                denies_user_namespaces: false,
                log: Vec::new(),
                cli: &cli,
                settings: Some(file.into()),
                supervisor: SupervisorSettings::off(),
                driver_limits: DriverLimits::Off,
            },
            history: none,
            admission: &admission,
            policy: &policy,
            preemption: None,
        };
        assert!(refresh(&settings("Cargo.toml")).is_ok(), "a test's working folder is its crate's");
        assert!(matches!(refresh(&settings("none.toml")), Err(NodeFactsError::Refused(_))));
    }
}
