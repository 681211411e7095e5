//! The command line, read as far as it concerns us: runc's, crun's and youki's differ, and what we do not know must
//! reach them unchanged.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Global flags that take a value as the next word.
const GLOBAL_VALUES: [&str; 9] = [
    "--log",
    "--log-format",
    "--log-level",
    "--root",
    "--criu",
    "--rootless",
    "--cgroup-manager",
    "-l",
    "-r",
];
/// Flags of `create`, `run` and `delete` that take a value as the next word.
const COMMAND_VALUES: [&str; 8] = [
    "--bundle",
    "-b",
    "--console-socket",
    "--pid-file",
    "--preserve-fds",
    "--config",
    "-f",
    "--pidfd-socket",
];

/// Which call this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// `create` and `run`: the container comes into being.
    Create,
    /// `delete`: it goes.
    Delete,
    /// Everything else, `--version` and unknown words included.
    Other,
}

/// What we need of the command line.
#[derive(Debug, PartialEq, Eq)]
pub struct Args {
    /// Which call this is.
    pub command: Command,
    /// `--root` as given.
    pub root: Option<PathBuf>,
    /// `--log`.
    pub log: Option<PathBuf>,
    /// Whether `--log-format` is json.
    pub log_json: bool,
    /// `--bundle`, else the working directory.
    pub bundle: PathBuf,
    /// crun's `--config`: another file in place of config.json.
    pub config: Option<PathBuf>,
    /// `--force` of `delete`.
    pub force: bool,
    /// The container's id.
    pub id: Option<String>,
}

impl Args {
    /// Reads the words behind the program's name.
    pub fn parse(words: Vec<OsString>) -> Self {
        let (global, rest) = flags(&words, &GLOBAL_VALUES);
        let command = match rest.first().map(|word| word.as_bytes()) {
            Some(b"create" | b"run") => Command::Create,
            Some(b"delete") => Command::Delete,
            _ => Command::Other,
        };
        let behind = rest.get(1..).unwrap_or_default();
        // `delete -f` is a switch, `create -f FILE` crun's other name of config.json.
        let values = if command == Command::Delete { &COMMAND_VALUES[..0] } else { &COMMAND_VALUES[..] };
        let (own, positional) = flags(behind, values);
        let path = |flags: &[(OsString, OsString)], names: &[&str]| {
            let found = flags.iter().rev().find(|(name, _)| names.iter().any(|known| name == known));
            found.map(|(_, value)| PathBuf::from(value))
        };
        Self {
            command,
            root: path(&global, &["--root", "-r"]),
            log: path(&global, &["--log", "-l"]),
            log_json: path(&global, &["--log-format"]).is_some_and(|format| format == Path::new("json")),
            bundle: path(&own, &["--bundle", "-b"]).unwrap_or_else(|| PathBuf::from(".")),
            config: path(&own, &["--config", "-f"]),
            force: command == Command::Delete && behind.iter().any(|word| word == "--force" || word == "-f"),
            id: positional.first().map(|id| id.to_string_lossy().into_owned()),
        }
    }
}

type Flags = Vec<(OsString, OsString)>;

/// The flags before the first word that is neither a flag nor a flag's value, and the words from there on.
fn flags<'a>(words: &'a [OsString], values: &[&str]) -> (Flags, &'a [OsString]) {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(word) = words.get(at) {
        if !word.as_bytes().starts_with(b"-") || word.len() < 2 {
            break;
        }
        at += 1;
        if word == "--" {
            break;
        }
        let (name, value) = split(word);
        let name = two_dashes(name);
        match value {
            Some(value) => found.push((name, value)),
            None if values.iter().any(|known| name == *known) => {
                found.push((name, words.get(at).cloned().unwrap_or_default()));
                at += 1;
            }
            None => {}
        }
    }
    (found, words.get(at..).unwrap_or_default())
}

fn split(word: &OsStr) -> (&OsStr, Option<OsString>) {
    let bytes = word.as_bytes();
    match bytes.iter().position(|byte| *byte == b'=') {
        Some(at) => (OsStr::from_bytes(&bytes[..at]), Some(OsStr::from_bytes(&bytes[at + 1..]).to_owned())),
        None => (word, None),
    }
}

/// runc's command line, as every Go program's, takes `-root` for `--root`.
fn two_dashes(name: &OsStr) -> OsString {
    let bytes = name.as_bytes();
    if bytes.starts_with(b"--") || bytes.len() <= 2 {
        return name.to_owned();
    }
    OsStr::from_bytes(&[b"-", bytes].concat()).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Args {
        Args::parse(line.split_whitespace().map(OsString::from).collect())
    }

    #[test]
    fn calls_are_read_as_the_engines_write_them() {
        let args = parse(
            "--root /var/run/docker/runtime-runc/moby --log /b/log.json --log-format json --systemd-cgroup create \
             --bundle /b --pid-file /b/init.pid --console-socket /s abc",
        );
        assert_eq!(args.command, Command::Create);
        assert_eq!(args.root.unwrap(), Path::new("/var/run/docker/runtime-runc/moby"));
        assert_eq!((args.log.unwrap(), args.log_json), (PathBuf::from("/b/log.json"), true));
        assert_eq!((args.bundle, args.id.unwrap()), (PathBuf::from("/b"), "abc".to_owned()));
        let podman = parse("--log-format=json --log /l create --bundle /b --pid-file /p abc");
        assert_eq!((podman.command, podman.log_json, podman.root), (Command::Create, true, None));
        let delete = parse("--root /r --log /l --log-format json delete --force abc");
        assert_eq!(
            (delete.command, delete.force, delete.id.unwrap()),
            (Command::Delete, true, "abc".to_owned())
        );
        assert!(parse("delete -f abc").force && !parse("delete abc").force);
        assert_eq!(parse("delete -f abc").id.unwrap(), "abc");
        assert_eq!(parse("--debug run -d --keep abc").id.unwrap(), "abc");
        assert_eq!(parse("--debug run abc").bundle, Path::new("."));
        let single = parse("-root /r -log=/l create -bundle /b abc");
        assert_eq!((single.command, single.root.unwrap()), (Command::Create, PathBuf::from("/r")));
        assert_eq!((single.log.unwrap(), single.bundle), (PathBuf::from("/l"), PathBuf::from("/b")));
        assert_eq!(parse("create -f other.json abc").config.unwrap(), Path::new("other.json"));
    }

    #[test]
    fn everything_else_is_passed_on() {
        for line in
            ["--version", "features", "", "state abc", "--root", "--root create", "exec -- create", "-"]
        {
            assert_eq!(parse(line).command, Command::Other, "{line}");
        }
    }
}
