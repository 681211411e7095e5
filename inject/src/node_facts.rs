//! Facts of the node that a creation only looks up, and that the CLI prepares: GPU memory sizes, and our
//! libraries' copies for the driver. NVML tells the sizes, and a static program cannot ask NVML.

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use gpushare_inventory::{Node, ProcError, Totals, boot_id};

use crate::fitted::Fitted;
use crate::settings::{Programs, SETTINGS_VARIABLE, Settings};

/// Without persistence mode NVML can take seconds, and the engine waits as long.
const DEADLINE: Duration = Duration::from_secs(20);

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
        DEADLINE.as_secs()
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
    let run = |source| NodeFactsError::Run { path: settings.cli.into(), source };
    let mut command = Command::new(settings.cli);
    command.args(["inventory", "refresh"]).env_clear().current_dir("/");
    command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    if let Some(file) = &settings.file {
        // The child runs in /, so a relative path would name another file.
        command.env(SETTINGS_VARIABLE, std::path::absolute(file).unwrap_or_else(|_| file.clone()));
    }
    let (answer, writer) = io::pipe().map_err(run)?;
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(writer);
    let mut child = command.spawn().map_err(run)?;
    drop(command); // our copy of the writing end
    match wait(&mut child).map_err(run)? {
        None => Err(NodeFactsError::NoAnswer),
        Some(status) if status.success() => Ok(()),
        Some(_) => {
            let mut text = String::new();
            let _ = answer.take(4096).read_to_string(&mut text);
            let last = text.lines().last().unwrap_or("gpushare inventory refresh ended without a word");
            Err(NodeFactsError::Refused(last.to_owned()))
        }
    }
}

/// The child's status; `None` when it had to be killed at the deadline.
fn wait(child: &mut Child) -> io::Result<Option<ExitStatus>> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if start.elapsed() > DEADLINE {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(Duration::from_millis(2));
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use gpushare_inventory::Roots;
    use gpushare_quota::Admission;

    use super::*;

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
                denies_user_namespaces: false,
                log: Vec::new(),
            },
            cli: &cli,
            file: Some(file.into()),
            admission: &admission,
            policy: &policy,
            preemption: None,
        };
        assert!(refresh(&settings("Cargo.toml")).is_ok(), "a test's working folder is its crate's");
        assert!(matches!(refresh(&settings("none.toml")), Err(NodeFactsError::Refused(_))));
    }
}
