//! Reads the part of the command line that runc, crun and youki all parse alike.
//!
//! The runtimes differ in flags after the id, short forms, abbreviations and single dashes. A call that opens
//! a bundle or ends a container is refused if they could parse it differently. Otherwise the wrapper might
//! check one bundle and the low-level runtime start another. Other calls are passed on unread.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// The flags of the whole program or of one command, in full. Includes flags that only one runtime knows: the
/// other runtimes fail on them.
struct Flags {
    /// Flags that take a value.
    values: &'static [&'static str],
    /// Flags that take no value.
    switches: &'static [&'static str],
    /// True for global flags: the first word that is not a flag ends them, and a switch may be written as
    /// `--debug=true`.
    before_command: bool,
}

const GLOBAL: Flags = Flags {
    values: &[
        "--cgroup-manager",
        "--criu",
        "--log",
        "--log-format",
        "--log-level",
        "--root",
        "--rootless",
        "-l",
        "-r",
    ],
    switches: &["--debug", "--systemd-cgroup", "-s"],
    before_command: true,
};

const CREATE: Flags = Flags {
    values: &[
        "--bundle",
        "--config",
        "--console-socket",
        "--pid-file",
        "--pidfd-socket",
        "--preserve-fds",
        "-b",
        "-f",
    ],
    switches: &["--detach", "--keep", "--no-new-keyring", "--no-pivot", "--no-subreaper", "-d"],
    before_command: false,
};

const RESTORE: Flags = Flags {
    values: &[
        "--bundle",
        "--console-socket",
        "--empty-ns",
        "--image-path",
        "--lsm-mount-context",
        "--lsm-profile",
        "--manage-cgroups-mode",
        "--pid-file",
        "--work-path",
        "-b",
    ],
    switches: &[
        "--auto-dedup",
        "--detach",
        "--ext-unix-sk",
        "--file-locks",
        "--lazy-pages",
        "--no-pivot",
        "--no-subreaper",
        "--shell-job",
        "--tcp-established",
        "-d",
    ],
    before_command: false,
};

const DELETE: Flags =
    Flags { values: &[], switches: &["--force", "--regex", "-f", "-r"], before_command: false };

/// Flags of `exec`, up to the container's id. The words after it belong to the program.
const EXEC: Flags = Flags {
    values: &[
        "--additional-gids",
        "--apparmor",
        "--cap",
        "--cgroup",
        "--console-socket",
        "--cwd",
        "--env",
        "--pid-file",
        "--pidfd-socket",
        "--preserve-fds",
        "--process",
        "--process-label",
        "--user",
        "-c",
        "-e",
        "-g",
        "-p",
        "-u",
    ],
    switches: &["--detach", "--ignore-paused", "--no-new-privs", "--tty", "-d", "-t"],
    before_command: true,
};

/// With one of these flags a runtime only prints something and exits. `--help=false` is not one of them.
const HELP: [&str; 7] = ["--help", "--usage", "--version", "-?", "-V", "-h", "-v"];

const ROOT: [&str; 2] = ["--root", "-r"];

/// The command that the engine calls.
#[derive(Debug, PartialEq, Eq)]
pub enum Command {
    /// `create`: the engine deletes the container later, by another call.
    Create,
    /// `run`: one call for the container's whole life.
    Run,
    /// `restore`: the container continues from a checkpoint.
    Restore,
    /// `delete`: the container is removed.
    Delete,
    /// `exec`: a further process in the container. A call that cannot be parsed has no id.
    Exec,
    /// `checkpoint`: the container is written into files. Collects all words that could be its id.
    Checkpoint,
    /// Every other command, help and unknown words.
    Other,
    /// One of the first three, in a form that runtimes could parse in different ways.
    Unclear(Unclear),
}

/// Why a call is refused as unclear.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unclear {
    /// An abbreviation, a long flag with a single dash, a short flag joined with its value, or an unknown
    /// flag.
    #[error(
        "runtimes could read {word} in different ways; write each flag in full and by itself, as --flag VALUE"
    )]
    Flag {
        /// The word, escaped and quoted.
        word: String,
    },
    /// A flag whose value is missing, is empty or begins with a dash.
    #[error(
        "{flag} has no value that all runtimes read alike; write {flag} VALUE, not empty, with no dash before it"
    )]
    Value {
        /// The flag's name as written.
        flag: String,
    },
    /// No container id, more than one, or an id that is not UTF-8.
    #[error("the command line names {count} container ids where one is needed; write COMMAND [FLAGS] ID")]
    Ids {
        /// The number of words that are neither flags nor values.
        count: usize,
    },
    /// crun resolves it in the bundle for some calls and in the caller's folder for others.
    #[error("a relative --root is another folder in each call; write its absolute path")]
    RelativeRoot,
    /// `--rootless` without a `--root` after it. crun 1.8 falls through from this flag to the next one of its
    /// table, which is the root, and takes the value for both.
    #[error("crun could take the value of --rootless for its root; write --root DIR behind it")]
    Rootless,
    /// A relative path, and the working folder cannot be read.
    #[error("the working folder cannot be told; name {flag} by its absolute path")]
    Folder {
        /// The flag's name.
        flag: &'static str,
    },
}

/// The parts of the command line that the wrapper uses.
#[derive(Debug, PartialEq, Eq)]
pub struct Args {
    /// The command that the engine calls.
    pub command: Command,
    /// Value of `--root`; absolute unless the call is refused.
    pub root: Option<PathBuf>,
    /// Value of `--log`, the engine's log file.
    pub log: Option<PathBuf>,
    /// Whether `--log-format` is `json`.
    pub log_json: bool,
    /// Value of `--bundle`; the working folder by default.
    pub bundle: PathBuf,
    /// Absolute path of crun's `--config`, a file that replaces config.json.
    pub config: Option<PathBuf>,
    /// Whether `delete` has `--force`.
    pub force: bool,
    /// The container's id; `None` if the call is another command's or unclear.
    pub id: Option<String>,
    /// The words after `checkpoint`, one of which is the id.
    pub maybe_ids: Vec<String>,
}

impl Args {
    /// Parses the words after the program's name.
    pub fn parse(words: &[OsString]) -> Self {
        let mut global = Line::default();
        let read = global.read(words, &GLOBAL);
        let mut args = Self {
            command: Command::Other,
            root: None,
            log: global.last(&["--log", "-l"]).filter(|log| !log.is_empty()).map(PathBuf::from),
            log_json: global.last(&["--log-format"]).is_some_and(|format| format == "json"),
            bundle: PathBuf::from("."),
            config: None,
            force: false,
            id: None,
            maybe_ids: Vec::new(),
        };
        args.command = match read {
            Ok(()) => args.command(&global).unwrap_or_else(Command::Unclear),
            // The start of the command is unclear. If none of the words is a command of the wrapper, it is
            // another call.
            Err(why) if words.iter().any(|word| flags_of(word).is_some()) => Command::Unclear(why),
            Err(_) if words.iter().any(|word| word == "exec") => Command::Exec,
            Err(_) if words.iter().any(|word| word == "checkpoint") => args.checkpoint(words),
            Err(_) => Command::Other,
        };
        args
    }

    /// Parses the command after the global flags and sets its values.
    fn command(&mut self, global: &Line) -> Result<Command, Unclear> {
        let Some((word, words)) = global.others.split_first() else { return Ok(Command::Other) };
        match word.as_bytes() {
            b"exec" if !global.help => return Ok(self.exec(global, words)),
            b"checkpoint" if !global.help => return Ok(self.checkpoint(words)),
            _ => {}
        }
        let Some(flags) = flags_of(word) else { return Ok(Command::Other) };
        let mut line = Line::default();
        line.read(words, flags)?;
        if global.help || line.help {
            return Ok(Command::Other);
        }
        self.root = global.path(&ROOT)?;
        if self.root.as_ref().is_some_and(|root| !root.is_absolute()) {
            return Err(Unclear::RelativeRoot);
        }
        if global.place(&["--rootless"]) > global.place(&ROOT) {
            return Err(Unclear::Rootless);
        }
        self.bundle = line.path(&["--bundle", "-b"])?.unwrap_or_else(|| PathBuf::from("."));
        self.id = Some(line.id()?);
        Ok(match word.as_bytes() {
            b"restore" => Command::Restore,
            b"delete" => {
                self.force = line.last(&["--force", "-f"]).is_some();
                Command::Delete
            }
            _ => {
                self.config = line.path(&["--config", "-f"])?.map(config).transpose()?.flatten();
                if word == "run" { Command::Run } else { Command::Create }
            }
        })
    }
}

impl Args {
    /// Parses `exec`. Unlike the commands that open a bundle, it is never refused: a call that cannot be
    /// parsed has no id.
    fn exec(&mut self, global: &Line, words: &[OsString]) -> Command {
        let mut line = Line::default();
        let read = line.read(words, &EXEC);
        if line.help {
            return Command::Other;
        }
        let root = global.path(&ROOT).ok().filter(|root| root.as_ref().is_none_or(|root| root.is_absolute()));
        let is_clear = read.is_ok() && global.place(&["--rootless"]) <= global.place(&ROOT);
        if let Some(root) = root.filter(|_| is_clear) {
            self.root = root;
            self.id = line.others.first().and_then(|id| id.to_str()).map(str::to_owned);
        }
        Command::Exec
    }

    fn checkpoint(&mut self, words: &[OsString]) -> Command {
        self.maybe_ids = words.iter().filter_map(|word| word.to_str().map(str::to_owned)).collect();
        Command::Checkpoint
    }
}

/// The flags of a command that the wrapper handles; `None` for any other command.
fn flags_of(word: &OsStr) -> Option<&'static Flags> {
    match word.as_bytes() {
        b"create" | b"run" => Some(&CREATE),
        b"restore" => Some(&RESTORE),
        b"delete" => Some(&DELETE),
        _ => None,
    }
}

/// The value of `--config` as crun reads it. A relative path starts in the caller's folder, but the default
/// name `config.json` itself means the bundle's file (`None`).
fn config(path: PathBuf) -> Result<Option<PathBuf>, Unclear> {
    if path.as_os_str() == "config.json" {
        return Ok(None);
    }
    let absolute: io::Result<PathBuf> = std::path::absolute(path);
    absolute.map(Some).map_err(|_| Unclear::Folder { flag: "--config" })
}

/// The flags and words of the whole program or of one command.
#[derive(Debug, Default)]
struct Line<'a> {
    /// Flags and their values in order; a switch has an empty value.
    flags: Vec<(&'a OsStr, &'a OsStr)>,
    /// Words that are neither flags nor values.
    others: Vec<OsString>,
    /// Whether a flag of [`HELP`] was found: the runtime would only print.
    help: bool,
}

impl<'a> Line<'a> {
    /// Splits `words` into flags and others. On an error, keeps the words parsed so far.
    fn read(&mut self, words: &'a [OsString], known: &Flags) -> Result<(), Unclear> {
        let mut words = words.iter();
        while let Some(word) = words.next() {
            let bytes = word.as_bytes();
            if word == "--" {
                self.others.extend(words.by_ref().cloned());
            } else if !bytes.starts_with(b"-") || word == "-" {
                self.others.push(word.clone());
                if known.before_command {
                    self.others.extend(words.by_ref().cloned());
                }
            } else {
                self.flag(word, known, || words.next().map(OsString::as_os_str))?;
            }
        }
        Ok(())
    }

    fn flag(
        &mut self,
        word: &'a OsStr,
        known: &Flags,
        next: impl FnOnce() -> Option<&'a OsStr>,
    ) -> Result<(), Unclear> {
        let (name, value) = split(word);
        let is_in = |flags: &[&str]| flags.iter().any(|flag| name == *flag);
        match value {
            None if is_in(&HELP) => self.help = true,
            None if is_in(known.switches) => self.flags.push((name, OsStr::new(""))),
            None if is_in(known.values) => {
                let value = next().filter(|value| !value.as_bytes().starts_with(b"-"));
                self.flags.push((name, value.ok_or_else(|| unclear_value(name))?));
            }
            Some(value) if is_in(known.values) => self.flags.push((name, value)),
            Some(_) if known.before_command && is_in(known.switches) => {}
            _ => return Err(Unclear::Flag { word: format!("{:?}", word.to_string_lossy()) }),
        }
        Ok(())
    }

    /// The value of the last flag with one of these names.
    fn last(&self, names: &[&str]) -> Option<&'a OsStr> {
        self.place(names).map(|place| self.flags[place].1)
    }

    fn place(&self, names: &[&str]) -> Option<usize> {
        self.flags.iter().rposition(|(name, _)| names.iter().any(|known| name == known))
    }

    /// The value of the last such flag as a path. An empty path is refused: some runtimes take it for the
    /// working folder, others for an error.
    fn path(&self, names: &[&str]) -> Result<Option<PathBuf>, Unclear> {
        match self.last(names) {
            Some(value) if value.is_empty() => Err(unclear_value(OsStr::new(names[0]))),
            value => Ok(value.map(PathBuf::from)),
        }
    }

    fn id(&self) -> Result<String, Unclear> {
        let unclear = || Unclear::Ids { count: self.others.len() };
        let [id] = &self.others[..] else { return Err(unclear()) };
        id.to_str().map(str::to_owned).ok_or_else(unclear)
    }
}

fn unclear_value(flag: &OsStr) -> Unclear {
    Unclear::Value { flag: flag.to_string_lossy().into_owned() }
}

/// Splits `--flag=VALUE` into name and value. A word with a single dash is not split.
fn split(word: &OsStr) -> (&OsStr, Option<&OsStr>) {
    let bytes = word.as_bytes();
    match bytes.iter().position(|byte| *byte == b'=') {
        Some(at) if bytes.starts_with(b"--") => {
            (OsStr::from_bytes(&bytes[..at]), Some(OsStr::from_bytes(&bytes[at + 1..])))
        }
        _ => (word, None),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn parse(line: &str) -> Args {
        let words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
        Args::parse(&words)
    }

    #[test]
    fn calls_are_read_as_the_engines_write_them() {
        let args = parse(
            "--root /var/run/docker/runtime-runc/moby --log /b/log.json --log-format json --systemd-cgroup \
             create --bundle /b --pid-file /b/init.pid --console-socket /s abc",
        );
        assert_eq!(args.command, Command::Create);
        assert_eq!(args.root.unwrap(), Path::new("/var/run/docker/runtime-runc/moby"));
        assert_eq!((args.log.unwrap(), args.log_json), (PathBuf::from("/b/log.json"), true));
        assert_eq!((args.bundle, args.id.unwrap()), (PathBuf::from("/b"), "abc".to_owned()));
        let delete = parse("--root /r --log /l --log-format json delete --force abc");
        assert_eq!(
            (delete.command, delete.force, delete.id.unwrap()),
            (Command::Delete, true, "abc".to_owned())
        );
        assert!(parse("delete -f abc").force && !parse("delete abc").force);
        for (line, bundle) in [
            ("--log-format=json --log /l create --bundle /b --pid-file /p abc", "/b"),
            ("--rootless=true --root=/run/user/0/ create --bundle=/b abc", "/b"),
            ("create abc --bundle /b", "/b"),
            ("create abc -b /b --no-pivot", "/b"),
            ("create --bundle /a --bundle=/b -- abc", "/b"),
            ("--debug=true --systemd-cgroup=false run -d --keep abc", "."),
            ("--cgroup-manager systemd run --preserve-fds 3 abc", "."),
        ] {
            let args = parse(line);
            let command = if line.contains(" run ") { Command::Run } else { Command::Create };
            assert_eq!((args.command, args.bundle), (command, PathBuf::from(bundle)), "{line}");
            assert_eq!(args.id.as_deref(), Some("abc"), "{line}");
        }
        let restore = parse("restore --image-path /i --work-path /w --bundle /b --detach abc");
        assert_eq!((restore.command, restore.bundle), (Command::Restore, PathBuf::from("/b")));
    }

    #[test]
    fn another_name_of_the_configuration_starts_where_crun_starts_it() {
        let here = std::env::current_dir().unwrap();
        for (line, config) in [
            ("create --config config.json abc", None),
            ("create -f other.json abc", Some(here.join("other.json"))),
            ("create -f ./config.json -b /b abc", Some(here.join("config.json"))),
            ("create --config=/c/other.json abc", Some(PathBuf::from("/c/other.json"))),
        ] {
            assert_eq!(parse(line).config, config, "{line}");
        }
    }

    #[test]
    fn everything_else_is_passed_on() {
        for line in [
            "--version",
            "features",
            "",
            "state abc",
            "--root",
            "--root create",
            "-",
            "--unheard-of state abc",
            "--version create --bundle /b abc",
            "create --help",
            "run -h",
            "restore --bundle /b --help abc",
        ] {
            assert_eq!(parse(line).command, Command::Other, "{line}");
        }
    }

    #[test]
    fn an_exec_tells_its_container_or_nothing_and_is_never_refused() {
        for (line, root, id) in [
            ("--root /r --log /l exec --process /p --detach --pid-file /f abc", Some("/r"), Some("abc")),
            ("exec -t -e A=B -u 0:0 abc sh -c --tty", None, Some("abc")),
            ("exec --tty=true --cwd=/x abc create", None, Some("abc")),
            ("exec -- abc", None, Some("abc")),
            ("exec abc --help", None, Some("abc")),
            ("exec -it abc sh", None, None),
            ("exec --unheard-of abc sh", None, None),
            ("--root run exec abc sh", None, None),
            ("--root= exec abc sh", None, None),
            ("--rootless true exec abc sh", None, None),
            ("--unheard-of exec abc", None, None),
            ("exec", None, None),
        ] {
            let args = parse(line);
            assert_eq!(args.command, Command::Exec, "{line}");
            assert_eq!((args.root.as_deref(), args.id.as_deref()), (root.map(Path::new), id), "{line}");
        }
        assert_eq!(parse("exec --help").command, Command::Other);
        let checkpoint = parse("--root /r checkpoint --image-path /i --leave-running abc");
        assert_eq!(checkpoint.command, Command::Checkpoint);
        assert!(checkpoint.maybe_ids.contains(&"abc".to_owned()));
    }

    #[test]
    fn what_runtimes_could_read_in_different_ways_is_refused_with_the_word() {
        for (line, part) in [
            ("create --bund /b abc", "--bund\""),
            ("create -bundle /b abc", "-bundle"),
            ("create -b=/b abc", "-b=/b"),
            ("create -b/b abc", "-b/b"),
            ("create --unheard-of /b abc", "--unheard-of"),
            ("create --no-pivot=true --bundle /b abc", "--no-pivot=true"),
            ("create --help=false --bundle /b abc", "--help=false"),
            ("create --help --bund /b abc", "--bund\""),
            ("create --bundle --pid-file abc", "--bundle has no value"),
            ("create abc --bundle", "--bundle has no value"),
            ("create --bundle= abc", "--bundle has no value"),
            ("--root= create abc", "--root has no value"),
            ("create", "0 container ids"),
            ("create abc /b", "2 container ids"),
            ("create abc -- --bundle /b", "3 container ids"),
            ("--unheard-of /r create abc", "--unheard-of"),
            ("-root /r create abc", "-root"),
            ("--root --log create --bundle /b abc", "--root has no value"),
            ("--root /r --rootless=true create abc", "value of --rootless"),
            ("--rootless true delete abc", "value of --rootless"),
            ("--root run delete abc", "a relative --root"),
            ("restore --config /c abc", "--config"),
            ("delete --forc abc", "--forc\""),
            ("delete abc def", "2 container ids"),
        ] {
            let Command::Unclear(why) = parse(line).command else { panic!("{line}") };
            assert!(why.to_string().contains(part), "{line}: {why}");
        }
        assert_eq!(parse("--log /l --log-format json create --bund /b abc").log, Some(PathBuf::from("/l")));
        let odd = [OsString::from("create"), OsStr::from_bytes(b"\xff").to_owned()];
        assert!(matches!(Args::parse(&odd).command, Command::Unclear(Unclear::Ids { count: 1 })));
    }
}
