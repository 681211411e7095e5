//! Why a command failed, for scripts: its exit code, and the object that stands on stderr where the answer would
//! have been JSON.

use std::fmt;
use std::process::ExitCode;

use gpushare_config::ConfigError;
use gpushare_inject::{ChangeError, GrantError};
use gpushare_quota::{Reason, Refusal, ReserveError, UpdateError};
use gpushare_request::{RequestError, SelectorError};
use schemars::JsonSchema;
use serde::Serialize;

use crate::{answer, table};

/// Kinds of failures. Each has an exit code of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Everything else: the driver, files, the system.
    Failed = 1,
    /// The command line cannot be understood.
    Usage = 2,
    /// What was named is not there, or several fit.
    NotFound = 3,
    /// The node has no room for it, or its rules forbid it.
    Refused = 4,
    /// It takes root.
    Denied = 5,
    /// The settings have a mistake.
    Settings = 6,
    /// What a container asks for cannot be understood or met on any node like this.
    Request = 7,
}

/// A failure as JSON.
#[derive(Serialize, JsonSchema)]
pub struct Failed {
    /// What failed.
    error: Failure,
}

/// A failure of a known kind.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Failure {
    kind: Kind,
    /// What, where, and the remedy, in one line.
    message: String,
}

impl Failure {
    /// What was named is not there, or several fit.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self { kind: Kind::NotFound, message: message.into() }
    }

    /// It takes root.
    pub fn denied(message: impl Into<String>) -> Self {
        Self { kind: Kind::Denied, message: message.into() }
    }

    /// The node's state forbids it.
    pub fn refused(message: impl Into<String>) -> Self {
        Self { kind: Kind::Refused, message: message.into() }
    }

    /// The failure that `error` is.
    pub fn of(error: &anyhow::Error) -> Self {
        Self { kind: kind(error), message: gpushare_inject::one_line(error.as_ref()) }
    }

    /// Tells it on stderr, and returns the exit code.
    pub fn tell(self, as_json: bool) -> ExitCode {
        let code = ExitCode::from(self.kind as u8);
        if as_json {
            match serde_json::to_string(&answer::Versioned::of(Failed { error: self })) {
                Ok(text) => eprintln!("{}", table::shown(&text)),
                Err(error) => eprintln!("gpushare: {error}"),
            }
        } else {
            eprintln!("gpushare: {}", self.message);
        }
        code
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

/// A command line that clap refuses: as it prints it, or as JSON in one line.
pub fn of_usage(error: &clap::Error, as_json: bool) -> ExitCode {
    if !error.use_stderr() || !as_json {
        // What cannot be written here cannot be told at all.
        let _ = error.print();
        return if error.use_stderr() { ExitCode::from(Kind::Usage as u8) } else { ExitCode::SUCCESS };
    }
    let text = error.to_string();
    let first = text.lines().next().unwrap_or_default();
    let message = format!("{}; see --help", first.trim_start_matches("error: "));
    Failure { kind: Kind::Usage, message }.tell(true)
}

/// Whether the command line asks for JSON, also where it cannot be understood otherwise.
pub fn wants_json(mut args: impl Iterator<Item = String>) -> bool {
    let mut is_format = false;
    args.any(|arg| {
        let asks = arg == "--json" || arg == "--format=json" || (is_format && arg == "json");
        is_format = arg == "--format";
        asks
    })
}

fn kind(error: &anyhow::Error) -> Kind {
    error.chain().find_map(of_cause).unwrap_or(Kind::Failed)
}

fn of_cause(cause: &(dyn std::error::Error + 'static)) -> Option<Kind> {
    let of_reason = |reason: Reason| match reason {
        Reason::Room | Reason::Rules => Kind::Refused,
        Reason::Request | Reason::Image => Kind::Request,
        Reason::Settings => Kind::Settings,
        Reason::Node => Kind::Failed,
    };
    if let Some(failure) = cause.downcast_ref::<Failure>() {
        return Some(failure.kind);
    }
    if cause.is::<ConfigError>() {
        return Some(Kind::Settings);
    }
    if let Some(error) = cause.downcast_ref::<GrantError>() {
        return Some(of_reason(error.reason()));
    }
    if let Some(error) = cause.downcast_ref::<ReserveError>() {
        return Some(of_reason(error.reason()));
    }
    if cause.is::<RequestError>() {
        return Some(Kind::Request);
    }
    if cause.is::<SelectorError>() {
        return Some(Kind::NotFound);
    }
    let is_of_room = cause.is::<Refusal>()
        || matches!(cause.downcast_ref::<UpdateError>(), Some(UpdateError::Refused(_)))
        || matches!(cause.downcast_ref::<ChangeError>(), Some(ChangeError::Update(UpdateError::Refused(_))));
    is_of_room.then_some(Kind::Refused)
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn json_is_asked_for_by_a_flag_or_a_format() {
        let asks = |line: &str| wants_json(line.split(' ').map(str::to_owned));
        for line in ["ps --json", "ps --format=json", "history --format json --by name"] {
            assert!(asks(line), "{line}");
        }
        for line in ["ps", "history --format csv", "describe json", "history --format table json"] {
            assert!(!asks(line), "{line}");
        }
    }

    #[test]
    fn a_failure_keeps_its_kind_below_what_was_said_about_it() {
        let below = |error: anyhow::Error| kind(&Err::<(), _>(error).context("cannot do it").unwrap_err());
        assert_eq!(below(Failure::not_found("no such thing").into()), Kind::NotFound);
        assert_eq!(below(GrantError::Privileged.into()), Kind::Refused);
        assert_eq!(below(RequestError::NoShare.into()), Kind::Request);
        assert_eq!(below(ConfigError::NoName.into()), Kind::Settings);
        assert_eq!(below(anyhow::anyhow!("the disk")), Kind::Failed);
    }
}
