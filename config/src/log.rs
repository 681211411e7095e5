//! The log file of the settings. Nothing is ever logged to stdout or stderr: they are the container's.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Mutex;

use nix::fcntl::OFlag;
use tracing_subscriber::filter::LevelFilter;

use crate::{Level, Log};

impl Log {
    /// Starts logging if the settings name a file; one that cannot be written is no reason to fail a container.
    pub fn start(&self) {
        let Some(path) = &self.file else { return };
        // O_NONBLOCK: a FIFO without a reader must not hang the engine.
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
