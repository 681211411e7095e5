//! Writes the log file that the settings name. Only the meter logs to stderr: elsewhere stdout and stderr
//! belong to the container.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Mutex;

use nix::fcntl::OFlag;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::MakeWriter;

use crate::Log;
use crate::word::meaning;

const FLAGS: [&str; 3] = ["--log", "--log-format", "--log-level"];

/// Whether a log format in the settings is JSON.
pub(crate) const FORMATS: [(&str, bool); 2] = [("text", false), ("json", true)];

/// The levels in the settings, most severe first. [`LevelFilter`] displays as the same word.
pub(crate) const LEVELS: [(&str, LevelFilter); 4] = [
    ("error", LevelFilter::ERROR),
    ("warn", LevelFilter::WARN),
    ("info", LevelFilter::INFO),
    ("debug", LevelFilter::DEBUG),
];

impl Log {
    /// The log settings as command-line arguments for the wrapper's hooks, which read no settings. Empty
    /// without a log.
    pub fn arguments(&self) -> Vec<String> {
        let Some(file) = self.file.as_ref().and_then(|file| file.to_str()) else { return Vec::new() };
        let format = if self.json { "json" } else { "text" };
        let values = [file.to_owned(), format.to_owned(), self.level.to_string()];
        FLAGS.iter().zip(values).flat_map(|(flag, value)| [(*flag).to_owned(), value]).collect()
    }

    /// Reads what [`Log::arguments`] wrote; `None` for any other words.
    pub fn from_arguments(words: &[String]) -> Option<Self> {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let [log, file, format, kind, least, level] = words[..] else {
            return words.is_empty().then_some(Self { file: None, json: false, level: LevelFilter::INFO });
        };
        let (json, level) = (meaning(kind, &FORMATS)?, meaning(level, &LEVELS)?);
        let file = PathBuf::from(file);
        let sound = [log, format, least] == FLAGS && file.is_absolute();
        sound.then_some(Self { file: Some(file), json, level })
    }

    /// Starts logging if the settings name a file. Ignores a file that cannot be opened: no container may
    /// fail because of its log.
    pub fn start(&self) {
        let Some(path) = &self.file else { return };
        // O_NONBLOCK: a FIFO without a reader must not block the engine.
        let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
        let file =
            OpenOptions::new().append(true).create(true).mode(0o600).custom_flags(flags.bits()).open(path);
        if let Ok(file) = file {
            self.start_on(Mutex::new(file));
        }
    }

    /// Starts logging to `writer`, regardless of the file in the settings.
    pub fn start_on(&self, writer: impl for<'a> MakeWriter<'a> + Send + Sync + 'static) {
        let lines = tracing_subscriber::fmt().with_max_level(self.level).with_ansi(false).with_writer(writer);
        let _ = if self.json { lines.json().try_init() } else { lines.try_init() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_tell_the_whole_log_and_nothing_else_is_taken_for_them() {
        let none = Log { file: None, json: false, level: LevelFilter::INFO };
        assert!(none.arguments().is_empty());
        assert_eq!(Log::from_arguments(&[]), Some(none));
        for (_, level) in LEVELS {
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
