//! An error as the one line that an engine passes on to its user.

use std::error::Error;
use std::io;

use gpushare_inventory::SickGpu;
use nix::errno::Errno;

/// The beginning of every refusal. Only the log has the container's id: engines name the container
/// themselves, and Kubernetes counts equal events as one.
pub const REFUSAL: &str = "cannot lease a GPU";

/// Characters of a line at most. Longer lines help nobody, and rewording them takes time.
const LONGEST: usize = 4096;

/// Words of the system, and what a user reads instead. docker takes the system's words for a failure of the
/// container's own command, and exits with another code (126 or 127).
const WORDS: [(&str, &str); 4] = [
    ("no such file or directory", NOT_THERE),
    ("executable file not found", NOT_THERE),
    ("permission denied", DENIED),
    ("not a directory", NO_FOLDER),
];
const NOT_THERE: &str = "it does not exist";
const DENIED: &str = "access is denied";
const NO_FOLDER: &str = "a part of its path is no folder";

/// The error and its causes in one line, without control characters: what went wrong, why, and after a
/// semicolon what to do about it.
pub fn one_line(error: &(dyn Error + 'static)) -> String {
    let told = told(error);
    let mut line: String = told.chars().take(LONGEST).map(|c| if c.is_control() { ' ' } else { c }).collect();
    if line.len() < told.len() {
        line.push('…');
    }
    reworded(&line)
}

/// Which GPU is out of service, and why, in one line.
pub fn out_of_service(gpu: &SickGpu) -> String {
    format!("GPU {} at {} is out of service: {}", gpu.index, gpu.address, one_line(&gpu.why))
}

/// The error with its causes, which stand before the remedy that its text names.
fn told(error: &(dyn Error + 'static)) -> String {
    let text = match error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error) {
        Some(number) => system_error(Errno::from_raw(number)),
        None => error.to_string(),
    };
    let Some(cause) = error.source().map(told) else { return text };
    match text.rsplit_once("; ") {
        _ if text.ends_with(&cause) => text,
        Some((what, remedy)) => format!("{what}: {cause}; {remedy}"),
        None => format!("{text}: {cause}"),
    }
}

fn system_error(error: Errno) -> String {
    let plain = match error {
        Errno::ENOENT => NOT_THERE,
        Errno::EACCES => DENIED,
        Errno::EPERM => "it is not permitted",
        Errno::ENOTDIR => NO_FOLDER,
        Errno::EISDIR => "it is a folder",
        Errno::ELOOP => "a link stands in its place",
        Errno::EEXIST => "it exists already",
        Errno::EROFS => "its file system is read-only",
        Errno::ENOSPC => "its file system is full",
        Errno::EAGAIN => {
            "another process has a lease on it (F_SETLEASE), or nothing more of it can be had now"
        }
        Errno::EFBIG => "this process may write no file of that size (ulimit -f)",
        other => return format!("the system answers {other:?}"),
    };
    plain.to_owned()
}

/// Replaces the system's words wherever they stand: libraries write them into messages of their own.
fn reworded(line: &str) -> String {
    let lower = line.to_ascii_lowercase(); // byte for byte as long
    let mut reworded = String::new();
    let mut rest = line;
    while let Some(first) = rest.chars().next() {
        let at = line.len() - rest.len();
        let found = WORDS.iter().find(|(words, _)| lower[at..].starts_with(words));
        let length = found.map_or(first.len_utf8(), |(words, _)| words.len());
        match found {
            Some((_, plain)) => reworded.push_str(plain),
            None => reworded.push(first),
        }
        rest = &rest[length..];
    }
    reworded
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("cannot read\n/x")]
    struct Outer(#[source] io::Error);

    #[derive(Debug, thiserror::Error)]
    #[error("{0} cannot be opened; see --bundle")]
    struct WithRemedy(String, #[source] io::Error);

    #[test]
    fn causes_follow_in_plain_words_that_docker_takes_for_no_failure_of_a_command() {
        for (number, want) in [
            (2, "cannot read /x: it does not exist"),
            (13, "cannot read /x: access is denied"),
            (20, "cannot read /x: a part of its path is no folder"),
            (6, "cannot read /x: the system answers ENXIO"),
        ] {
            assert_eq!(one_line(&Outer(io::Error::from_raw_os_error(number))), want);
        }
        let error = io::Error::other("libx.so: cannot open: No such file or directory, é Permission denied");
        assert_eq!(one_line(&error), "libx.so: cannot open: it does not exist, é access is denied");
    }

    #[test]
    fn a_cause_stands_before_the_remedy() {
        let error = WithRemedy("config.json".into(), io::Error::from_raw_os_error(2));
        assert_eq!(one_line(&error), "config.json cannot be opened: it does not exist; see --bundle");
    }

    #[test]
    fn a_line_has_an_end_whatever_an_error_holds() {
        let start = Instant::now();
        let error = WithRemedy("Permission denied ".repeat(100_000), io::Error::from_raw_os_error(2));
        let line = one_line(&error);
        assert!(line.len() < 2 * LONGEST && line.ends_with('…') && !line.contains("ermission denied"));
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    }
}
