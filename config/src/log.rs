//! Writes the log file that the settings name. Nothing is logged to stdout or stderr: they belong to the
//! container.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Mutex;

use nix::fcntl::OFlag;
use tracing_subscriber::filter::LevelFilter;

use crate::{Level, Log};

const FLAGS: [&str; 3] = ["--log", "--log-format", "--log-level"];

impl Level {
    const ALL: [Self; 4] = [Self::Error, Self::Warn, Self::Info, Self::Debug];

    /// The name in the settings.
    const fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
        }
    }

    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|level| level.name() == name)
    }
}

impl Log {
    /// The log settings as command-line arguments for the wrapper's hooks, which read no settings. Empty
    /// without a log.
    pub fn arguments(&self) -> Vec<String> {
        let Some(file) = self.file.as_ref().and_then(|file| file.to_str()) else { return Vec::new() };
        let values = [file, if self.json { "json" } else { "text" }, self.level.name()];
        FLAGS.iter().zip(values).flat_map(|(flag, value)| [(*flag).to_owned(), value.to_owned()]).collect()
    }

    /// Reads what [`Log::arguments`] wrote; `None` for any other words.
    pub fn from_arguments(words: &[String]) -> Option<Self> {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let [log, file, format, kind, least, level] = words[..] else {
            return words.is_empty().then_some(Self { file: None, json: false, level: Level::Info });
        };
        let json = match kind {
            "text" => false,
            "json" => true,
            _ => return None,
        };
        let file = PathBuf::from(file);
        let sound = [log, format, least] == FLAGS && file.is_absolute();
        Level::named(level).filter(|_| sound).map(|level| Self { file: Some(file), json, level })
    }

    /// Starts logging if the settings name a file. A file that cannot be opened is ignored: no container
    /// fails for its log.
    pub fn start(&self) {
        let Some(path) = &self.file else { return };
        // O_NONBLOCK: a FIFO without a reader must not block the engine.
        let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
        let file =
            OpenOptions::new().append(true).create(true).mode(0o600).custom_flags(flags.bits()).open(path);
        let Ok(file) = file else { return };
        let level = match self.level {
            Level::Error => LevelFilter::ERROR,
            Level::Warn => LevelFilter::WARN,
            Level::Info => LevelFilter::INFO,
            Level::Debug => LevelFilter::DEBUG,
        };
        let lines =
            tracing_subscriber::fmt().with_max_level(level).with_ansi(false).with_writer(Mutex::new(file));
        if self.json {
            let _ = lines.json().try_init();
        } else {
            let _ = lines.try_init();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_tell_the_whole_log_and_nothing_else_is_taken_for_them() {
        let none = Log { file: None, json: false, level: Level::Info };
        assert!(none.arguments().is_empty());
        assert_eq!(Log::from_arguments(&[]), Some(none));
        for level in Level::ALL {
            for json in [false, true] {
                let log = Log { file: Some("/var/log/a b".into()), json, level };
                assert_eq!(Log::from_arguments(&log.arguments()), Some(log));
            }
        }
        for line in [
            "--log /l",
            "--log l --log-format text --log-level info",
            "--log /l --log-format xml --log-level info",
            "--log /l --log-format text --log-level loud",
            "--log-format text --log /l --log-level info",
            "--log /l --log-format text --log-level info more",
        ] {
            let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
            assert_eq!(Log::from_arguments(&words), None, "{line}");
        }
    }
}
