//! Reasons why settings cannot be used. Each message names the file or key and, if there is one, the remedy.

use std::error::Error;
use std::iter;
use std::path::PathBuf;

use gpushare_quota::Reason;

/// The reason why the settings are refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// `GPUSHARE_CONFIG` or `--config` names a file that does not exist.
    #[error("the settings file {path} does not exist; correct or unset GPUSHARE_CONFIG (a hook's --config)")]
    NoSuchFile {
        /// Absolute or relative path, as given.
        path: PathBuf,
    },
    /// `GPUSHARE_CONFIG` is set to an empty string.
    #[error("GPUSHARE_CONFIG is empty; let it name a settings file, or unset it")]
    NoName,
    /// A file could not be read.
    #[error("cannot read the settings file {path}")]
    Read {
        /// Path of the settings file or drop-in.
        path: PathBuf,
        /// Error of the system call.
        source: std::io::Error,
    },
    /// A file is not a regular file owned by root or the running user, or others may write to it.
    #[error(
        "the settings file {path} must be a regular file of root, not writable by others (chown root, chmod 644)"
    )]
    Unsafe {
        /// Path of the settings file or drop-in.
        path: PathBuf,
    },
    /// A folder of settings does not belong to root or the running user, or others may write to it.
    #[error("the settings folder {path} must be root's, and not writable by others (chown root, chmod 755)")]
    UnsafeFolder {
        /// Path of the folder.
        path: PathBuf,
    },
    /// A syntax error, an unknown key or a wrong value, at a known line.
    #[error("{path}:{line}: {message}")]
    Mistake {
        /// Path of the file with the mistake.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// The reason, in one line.
        message: String,
    },
    /// A value of the right type that has no meaning.
    #[error("{key} = {value:?}: {message}")]
    Value {
        /// Section and key, such as `quota.placement`.
        key: &'static str,
        /// The value as written.
        value: String,
        /// The reason, or the known values.
        message: String,
    },
    /// The path of the running program cannot be read.
    #[error("cannot tell where this program lies (is /proc mounted?)")]
    Program {
        /// Error of the system call.
        source: std::io::Error,
    },
}

/// Makes [`ConfigError::Value`].
pub(crate) fn value(key: &'static str, value: &str, message: impl ToString) -> ConfigError {
    ConfigError::Value { key, value: value.to_owned(), message: message.to_string() }
}

/// The [`Reason`] of a refusal that is reported as `error`; [`Reason::Node`] if no more specific cause is
/// known.
pub fn reason_of(error: &(dyn Error + 'static)) -> Reason {
    let is_setting =
        iter::successors(Some(error), |error| (*error).source()).any(|cause| cause.is::<ConfigError>());
    if is_setting { Reason::Settings } else { gpushare_inject::reason_of(error).unwrap_or(Reason::Node) }
}
