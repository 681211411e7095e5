//! An error as the one line that an engine passes on to its user.

use std::error::Error;
use std::io;

use nix::errno::Errno;

/// The beginning of every refusal, which names the container.
pub fn refusal(id: &str) -> String {
    // Engines' ids have 64 digits, of which people use the first 12.
    let hexadecimal = id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    let short: String = id.chars().take(if hexadecimal { 12 } else { 64 }).collect();
    format!("cannot lease a GPU for {}", short.escape_debug())
}

/// The error and its causes in one line, without control characters.
///
/// Causes from the system appear by their symbol (ENOENT): docker reads the usual words ("no such file or
/// directory", "permission denied") as a failure of the container's own command and answers with another exit code.
pub fn one_line(error: &(dyn Error + 'static)) -> String {
    let mut line = String::new();
    let mut cause = Some(error);
    while let Some(error) = cause {
        let text = match error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error) {
            Some(number) => format!("{:?}", Errno::from_raw(number)),
            None => error.to_string(),
        };
        if !line.ends_with(&text) {
            line.push_str(if line.is_empty() { "" } else { ": " });
            line.push_str(&text);
        }
        cause = error.source();
    }
    let mut line: String = line.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    for (words, symbol) in [
        ("no such file or directory", "ENOENT"),
        ("permission denied", "EACCES"),
        ("executable file not found", "ENOENT"),
    ] {
        // Libraries write these words into their own messages.
        while let Some(at) = line.to_ascii_lowercase().find(words) {
            line.replace_range(at..at + words.len(), symbol);
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("cannot read\n/x")]
    struct Outer(#[source] io::Error);

    #[test]
    fn causes_follow_and_the_system_speaks_in_symbols() {
        let error = Outer(io::Error::from_raw_os_error(2));
        assert_eq!(one_line(&error), "cannot read /x: ENOENT");
        let error = io::Error::other("libx.so: cannot open: No such file or directory");
        assert_eq!(one_line(&error), "libx.so: cannot open: ENOENT");
    }
}
