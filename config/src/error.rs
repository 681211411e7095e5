//! Why settings cannot be used.

use std::path::PathBuf;

/// Why the settings cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// `GPUSHARE_CONFIG` or `--config` names a file that is not there.
    #[error("the settings file {path} does not exist; correct or unset GPUSHARE_CONFIG (a hook's --config)")]
    NoSuchFile {
        /// The file.
        path: PathBuf,
    },
    /// `GPUSHARE_CONFIG` is set to nothing.
    #[error("GPUSHARE_CONFIG is empty; let it name a settings file, or unset it")]
    NoName,
    /// A file could not be read.
    #[error("cannot read the settings file {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Somebody else than root could change a file.
    #[error(
        "the settings file {path} must be a regular file of root, not writable by others (chown root, chmod 644)"
    )]
    Unsafe {
        /// The file.
        path: PathBuf,
    },
    /// Somebody else than root could put files there.
    #[error("the settings folder {path} must be root's, and not writable by others (chown root, chmod 755)")]
    UnsafeFolder {
        /// The folder.
        path: PathBuf,
    },
    /// A mistake, at a line.
    #[error("{path}:{line}: {message}")]
    Mistake {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// What is wrong there.
        message: String,
    },
    /// A value that is of the right kind but means nothing.
    #[error("{key} = {value:?}: {message}")]
    Value {
        /// Section and key.
        key: &'static str,
        /// The value.
        value: String,
        /// What is wrong with it.
        message: String,
    },
    /// The running program's own path is not known.
    #[error("cannot tell where this program lies (is /proc mounted?)")]
    Program {
        /// What the system said.
        source: std::io::Error,
    },
}

/// What is wrong with a value.
pub(crate) fn value(key: &'static str, value: &str, message: impl ToString) -> ConfigError {
    ConfigError::Value { key, value: value.to_owned(), message: message.to_string() }
}
