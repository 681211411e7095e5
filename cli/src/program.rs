//! Programs of others that are asked something, and may not answer; and how one types their words.

use std::io::{self, ErrorKind, Read};
use std::os::unix::process::CommandExt;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

/// How long a program may take. An engine that starts for the first time can take seconds.
const DEADLINE: Duration = Duration::from_secs(20);

/// Runs `command` to its end, and returns how it ended and what it said. It reads nothing.
///
/// # Errors
/// When it cannot be run, and [`ErrorKind::TimedOut`] when it has not ended or said all within 20 seconds: it is
/// killed then, with all that it has started.
pub fn output(command: &mut Command) -> io::Result<Output> {
    output_within(command, DEADLINE)
}

fn output_within(command: &mut Command, most: Duration) -> io::Result<Output> {
    let end = Instant::now() + most;
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child = command.spawn()?;
    let said = [heard(child.stdout.take()), heard(child.stderr.take())];
    let left = || end.saturating_duration_since(Instant::now());
    // Its pipes close when it ends, and what it has started with it.
    let said = said.each_ref().map(|said| said.recv_timeout(left()).ok());
    let mut status = child.try_wait()?;
    while status.is_none() && !left().is_zero() {
        thread::sleep(Duration::from_millis(2));
        status = child.try_wait()?;
    }
    if let (Some(status), [Some(stdout), Some(stderr)]) = (status, said) {
        return Ok(Output { status, stdout, stderr });
    }
    let _ = killpg(Pid::from_raw(child.id().cast_signed()), Signal::SIGKILL);
    let _ = child.try_wait();
    let message = format!("it did not answer within {} s, and was killed", most.as_secs());
    Err(io::Error::new(ErrorKind::TimedOut, message))
}

/// What comes out of a pipe until it is closed, as one piece.
fn heard(pipe: Option<impl Read + Send + 'static>) -> Receiver<Vec<u8>> {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        let mut said = Vec::new();
        if let Some(mut pipe) = pipe {
            // What came before a fault counts.
            let _ = pipe.read_to_end(&mut said);
        }
        // Nobody may wait any more.
        let _ = sender.send(said);
    });
    receiver
}

/// A word as one types it in a shell.
pub fn in_shell(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_=/.:,%+@".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_script(script: &str, most: Duration) -> io::Result<Output> {
        output_within(Command::new("/bin/sh").args(["-c", script]), most)
    }

    #[test]
    fn an_answer_is_whole_however_long_it_is() {
        let told = of_script("seq 50000; echo why >&2; exit 3", DEADLINE).unwrap();
        assert_eq!(told.status.code(), Some(3));
        assert_eq!(String::from_utf8(told.stdout).unwrap().lines().count(), 50000);
        assert_eq!(told.stderr, b"why\n");
    }

    #[test]
    fn who_does_not_answer_is_killed_with_what_he_started() {
        let most = Duration::from_millis(300);
        for script in ["exec sleep 600", "sleep 600 & echo said", "exec >&- 2>&-; exec sleep 600"] {
            let error = of_script(script, most).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::TimedOut, "{script}");
            assert!(error.to_string().starts_with("it did not answer"), "{error}");
        }
        assert_eq!(of_script("true", DEADLINE).unwrap().status.code(), Some(0));
        assert_eq!(output(&mut Command::new("/nowhere")).unwrap_err().kind(), ErrorKind::NotFound);
    }
}
