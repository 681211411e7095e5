//! Runs gpushare's CLI for what a static program cannot do: NVML has to be loaded.

use std::io::{self, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Without persistence mode NVML can take seconds, and the engine waits as long.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

/// How the child ended.
pub(crate) enum Ended {
    /// With success.
    Well,
    /// With a failure; this is the last line of its standard error.
    Failed(String),
    /// It did not, and was killed at the deadline.
    NoAnswer,
}

/// Runs `command` to its end, or to the deadline. The child gets the environment that `command` sets, and
/// nothing of the caller's but that; nor any of its descriptors.
///
/// # Errors
/// When it cannot be started or waited for.
pub(crate) fn run(mut command: Command) -> io::Result<Ended> {
    let own: Vec<_> =
        command.get_envs().filter_map(|(name, value)| Some((name.to_owned(), value?.to_owned()))).collect();
    command.env_clear().envs(own).env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").current_dir("/");
    let (answer, writer) = io::pipe()?;
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(writer);
    let mut child = command.spawn()?;
    let program = command.get_program().to_string_lossy().into_owned();
    drop(command); // our copy of the writing end
    match wait(&mut child)? {
        None => Ok(Ended::NoAnswer),
        Some(status) if status.success() => Ok(Ended::Well),
        Some(_) => {
            let mut text = String::new();
            let _ = answer.take(4096).read_to_string(&mut text);
            let last = text.lines().last().map(str::to_owned);
            Ok(Ended::Failed(last.unwrap_or_else(|| format!("{program} ended without a word"))))
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
