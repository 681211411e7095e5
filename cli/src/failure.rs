//! Why a command failed, for scripts: its exit code, and the object that stands on stderr where the answer would
//! have been JSON.

use std::ffi::OsString;
use std::fmt;
use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

use gpushare_config::reason_of;
use gpushare_inject::ChangeError;
use gpushare_quota::{Reason, UpdateError};
use gpushare_request::SelectorError;
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
    /// What a container asks for cannot be understood or met on a node like this, or its image cannot run on it.
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
    /// The command line cannot be understood.
    pub fn usage(message: impl Into<String>) -> Self {
        Self { kind: Kind::Usage, message: message.into() }
    }

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
        let message = gpushare_inject::one_line(error.as_ref());
        let is_denied = |cause: &(dyn std::error::Error + 'static)| {
            cause.downcast_ref().is_some_and(|error: &io::Error| error.kind() == ErrorKind::PermissionDenied)
        };
        match kind(error) {
            Kind::Failed if !nix::unistd::geteuid().is_root() && error.chain().any(is_denied) => {
                Self::denied(format!("{message}: use sudo"))
            }
            kind => Self { kind, message },
        }
    }

    /// Tells it on stderr, and returns the exit code.
    pub fn tell(self, as_json: bool) -> ExitCode {
        let code = ExitCode::from(self.kind as u8);
        let plain = format!("gpushare: {}", self.message);
        let json = as_json.then(|| serde_json::to_string(&answer::Versioned::of(Failed { error: self })));
        let line = json.and_then(Result::ok).map_or(plain, |json| table::shown(&json));
        // If stderr cannot be written to, the exit code has to do.
        let _ = writeln!(io::stderr(), "{line}");
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
    let said = text.lines().take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more"));
    let said: Vec<&str> = said.map(str::trim).filter(|line| !line.is_empty()).collect();
    let message = format!("{}; see --help", said.join(" ").trim_start_matches("error: "));
    Failure { kind: Kind::Usage, message }.tell(true)
}

/// Whether the command line asks for JSON, also where it cannot be understood otherwise.
pub fn wants_json(mut args: impl Iterator<Item = OsString>) -> bool {
    let mut is_format = false;
    args.any(|arg| {
        let asks = arg == "--json" || arg == "--format=json" || (is_format && arg == "json");
        is_format = arg == "--format";
        asks
    })
}

fn kind(error: &anyhow::Error) -> Kind {
    let of_cause = |cause: &(dyn std::error::Error + 'static)| {
        let of_failure = cause.downcast_ref().map(|failure: &Failure| failure.kind);
        of_failure.or_else(|| cause.is::<SelectorError>().then_some(Kind::NotFound))
    };
    if let Some(kind) = error.chain().find_map(of_cause) {
        return kind;
    }
    let of_update = |update: &UpdateError| match update {
        UpdateError::Refused(refusal) => Some(refusal.reason()),
        _ => None,
    };
    let reason = error.chain().find_map(|cause| match cause.downcast_ref() {
        Some(ChangeError::Update(update)) => of_update(update),
        _ => cause.downcast_ref().and_then(of_update),
    });
    match reason.unwrap_or_else(|| reason_of(error.as_ref())) {
        Reason::Room | Reason::Rules => Kind::Refused,
        Reason::Request | Reason::Image => Kind::Request,
        Reason::Settings => Kind::Settings,
        Reason::Node => Kind::Failed,
    }
}

#[cfg(test)]
mod tests {
    use anyhow::Context;
    use gpushare_config::ConfigError;
    use gpushare_inject::GrantError;
    use gpushare_request::RequestError;

    use super::*;

    #[test]
    fn json_is_asked_for_by_a_flag_or_a_format() {
        let asks = |line: &str| wants_json(line.split(' ').map(OsString::from));
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
        assert_eq!(below(RequestError::NoShare.into()), Kind::Refused);
        assert_eq!(below(RequestError::SeveralClaims.into()), Kind::Request);
        assert_eq!(below(ConfigError::NoName.into()), Kind::Settings);
        assert_eq!(below(anyhow::anyhow!("the disk")), Kind::Failed);
    }
}
