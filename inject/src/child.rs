//! Runs our other programs to their end: the CLI for what a static program cannot do, since NVML has to be
//! loaded, and the supervisor's start.

use std::io::{self, ErrorKind, Read};
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

/// Without persistence mode NVML can take seconds, and the engine waits as long.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);
/// How long a killed child may take to end. One that a driver holds in the kernel does not end at all.
const DYING: Duration = Duration::from_secs(1);
/// How long it may say nothing before somebody looks whether it has ended, in milliseconds.
const PAUSE: u8 = 2;
/// How much of what it says is kept: the end, in bytes.
const KEPT: usize = 4096;

/// How the child ended.
pub(crate) enum Ended {
    /// With success.
    Well,
    /// With a failure; this is the last line of its standard error.
    Failed(String),
    /// It did not, and was killed at the deadline with all that it had started.
    NoAnswer,
}

/// Runs `command` to its end, or to the deadline, as [`Running`].
///
/// # Errors
/// When it cannot be started or waited for.
pub(crate) fn run(command: Command) -> io::Result<Ended> {
    Running::start(command)?.end(DEADLINE)
}

/// A child at work. It gets the environment that its command sets, and nothing of the caller's but that; nor
/// any of its descriptors. One that nobody waits for is killed with all that it has started.
#[derive(Debug)]
pub(crate) struct Running {
    child: Child,
    answer: io::PipeReader,
    program: String,
    since: Instant,
    has_ended: bool,
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.has_ended {
            let _ = self.kill();
        }
    }
}

impl Running {
    /// Starts it.
    ///
    /// # Errors
    /// When it cannot be started.
    pub(crate) fn start(mut command: Command) -> io::Result<Self> {
        let since = Instant::now();
        let own: Vec<_> = command
            .get_envs()
            .filter_map(|(name, value)| Some((name.to_owned(), value?.to_owned())))
            .collect();
        command.env_clear().envs(own).env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").current_dir("/");
        let (answer, writer) = io::pipe()?;
        fcntl(answer.as_fd(), FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(writer).process_group(0);
        let child = command.spawn()?;
        let program = command.get_program().to_string_lossy().into_owned();
        Ok(Self { child, answer, program, since, has_ended: false }) // our copy of the writing end goes with the command
    }

    /// Waits for its end, or until it has had this long.
    ///
    /// # Errors
    /// When it cannot be waited for.
    pub(crate) fn end(mut self, most: Duration) -> io::Result<Ended> {
        let Self { child, answer, program, since, has_ended } = &mut self;
        let mut said = Vec::new();
        let hear_more = || {
            hear(answer, &mut said);
            // A child that ends closes the pipe a moment before.
            match poll(&mut [PollFd::new(answer.as_fd(), PollFlags::POLLIN)], PAUSE) {
                Ok(0) => {}
                _ => thread::sleep(Duration::from_micros(100)),
            }
        };
        let Some(status) = wait(child, *since + most, hear_more)? else {
            self.kill()?;
            return Ok(Ended::NoAnswer);
        };
        *has_ended = true;
        if status.success() {
            return Ok(Ended::Well);
        }
        hear(answer, &mut said);
        let said = String::from_utf8_lossy(&said);
        let last = said.lines().rfind(|line| !line.trim().is_empty());
        // Its own name stands before the caller's words already.
        let last = last.map(|line| line.strip_prefix("gpushare: ").unwrap_or(line).to_owned());
        Ok(Ended::Failed(last.unwrap_or_else(|| match status.signal() {
            Some(signal) => format!("{program} was ended by signal {signal}"),
            None => format!("{program} ended without a word"),
        })))
    }

    fn kill(&mut self) -> io::Result<()> {
        self.has_ended = true;
        let _ = killpg(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGKILL);
        wait(&mut self.child, Instant::now() + DYING, || thread::sleep(Duration::from_millis(2)))?;
        Ok(())
    }
}

/// Takes what is there to be read, and keeps the end of it. A pipe that is full would hold the child up.
fn hear(answer: &mut io::PipeReader, said: &mut Vec<u8>) {
    let mut part = [0; KEPT];
    loop {
        match answer.read(&mut part) {
            Ok(0) => return,
            Ok(read) => {
                said.extend(part.get(..read).unwrap_or_default());
                said.drain(..said.len().saturating_sub(KEPT));
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

/// The child's status; `None` when it has not ended `until` then. `meanwhile` passes some time.
fn wait(child: &mut Child, until: Instant, mut meanwhile: impl FnMut()) -> io::Result<Option<ExitStatus>> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() > until {
            return Ok(None);
        }
        meanwhile();
    }
}

#[cfg(test)]
mod tests {
    use nix::errno::Errno;
    use nix::sys::signal::kill;

    use super::*;

    fn run_script(script: &str, most: Duration) -> Ended {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        Running::start(command).unwrap().end(most).unwrap()
    }

    fn failure(script: &str) -> String {
        match run_script(script, DEADLINE) {
            Ended::Failed(line) => line,
            Ended::Well => "it went well".to_owned(),
            Ended::NoAnswer => "no answer".to_owned(),
        }
    }

    #[test]
    fn a_failure_is_told_by_the_last_line_however_much_was_said() {
        assert!(matches!(run_script("true", DEADLINE), Ended::Well));
        for (script, want) in [
            ("echo one >&2; echo 'gpushare: NVML says no' >&2; exit 1", "NVML says no"),
            (
                "i=0; while [ $i -lt 3000 ]; do echo 'a line of 40 characters and some more' >&2; i=$((i+1)); done; \
              echo last >&2; exit 1",
                "last",
            ),
            ("printf 'no \\377 text\\n\\n' >&2; exit 1", "no \u{fffd} text"),
            ("exit 1", "/bin/sh ended without a word"),
            ("kill -SEGV $$", "/bin/sh was ended by signal 11"),
        ] {
            assert_eq!(failure(script), want, "{script}");
        }
    }

    #[test]
    fn a_child_that_nobody_waits_for_is_killed() {
        let mut command = Command::new("/bin/sleep");
        command.arg("60");
        let running = Running::start(command).unwrap();
        let pid = Pid::from_raw(running.child.id().cast_signed());
        drop(running);
        assert_eq!(kill(pid, None), Err(Errno::ESRCH));
    }

    #[test]
    fn neither_a_child_that_hangs_nor_what_it_has_started_is_waited_for() {
        let start = Instant::now();
        assert!(matches!(run_script("exec sleep 60", Duration::from_millis(300)), Ended::NoAnswer));
        // Who keeps the pipe open is not waited for.
        assert!(matches!(run_script("sleep 61 & exit 0", DEADLINE), Ended::Well));
        assert_eq!(failure("sleep 62 & echo no >&2; exit 1"), "no");
        assert!(start.elapsed() < Duration::from_secs(55));
    }
}
