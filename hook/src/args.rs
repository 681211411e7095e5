//! Reads the hook's arguments. The wrapper writes them into the bundle, and the hook uses nothing else: the
//! state on its standard input does not name the runtime root and may be unusable at poststop. A hook that an
//! administrator configured has only a stage, and works without the wrapper.

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use gpushare_config::Log;
use gpushare_inject::DriverLimiter;
use gpushare_quota::LeaseKey;

/// The point in the container's life at which the hook runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Before the container's program starts.
    Prestart,
    /// After the container was deleted.
    Poststop,
}

/// The two ways to configure this hook.
#[derive(Debug)]
pub enum Call {
    /// Configured by the wrapper, for a lease that it granted.
    Wrapper(Args),
    /// Configured by an administrator, in the engine's hooks: hook-only mode.
    HookOnly {
        /// The point in the container's life at which the hook runs.
        stage: Stage,
        /// Path of the settings file if it is not the default one.
        config: Option<PathBuf>,
        /// Whether a CDI device of gpushare added the hook. It may also have added a GPU's nodes.
        cdi: bool,
    },
}

impl Call {
    /// Parses `STAGE [--cdi] [--config FILE]`, or the arguments of [`Args::parse`].
    ///
    /// # Errors
    /// When the arguments have any other form.
    pub fn parse(words: impl Iterator<Item = OsString>) -> Result<Self> {
        let words: Vec<OsString> = words.collect();
        let word = |at: usize| words.get(at).and_then(|word| word.to_str());
        let stage = match word(0) {
            Some("createRuntime" | "prestart") => Stage::Prestart,
            Some("poststop") => Stage::Poststop,
            _ => return Args::parse(words.into_iter()).map(Self::Wrapper),
        };
        let cdi = word(1) == Some("--cdi");
        let config = match &words[1 + usize::from(cdi)..] {
            [] => None,
            [flag, file] if flag == "--config" => Some(PathBuf::from(file)),
            _ => return Args::parse(words.into_iter()).map(Self::Wrapper),
        };
        Ok(Self::HookOnly { stage, config, cdi })
    }

    /// The point in the container's life at which the hook runs.
    pub fn stage(&self) -> Stage {
        match self {
            Self::Wrapper(args) => args.stage,
            Self::HookOnly { stage, .. } => *stage,
        }
    }
}

/// The arguments that the wrapper wrote.
#[derive(Debug)]
pub struct Args {
    /// The point in the container's life at which the hook runs.
    pub stage: Stage,
    /// Absolute path of the state folder.
    pub state: PathBuf,
    /// Number of the lease. A later lease of the same container has another number.
    pub lease: i64,
    /// Runtime root and id of the container that holds the lease.
    pub key: LeaseKey,
    /// The log that gets a line when the lease is released.
    pub log: Log,
    /// The component that sets the driver's own limit, if the container gets one.
    pub limiter: Option<DriverLimiter>,
}

impl Args {
    /// Parses `STAGE --state DIR --lease NUMBER --root ROOT --id ID`, and the arguments that
    /// [`Log::arguments`] and [`DriverLimiter::arguments`] add.
    ///
    /// # Errors
    /// When the arguments have any other form: a wrapper of another version wrote them.
    pub fn parse(mut words: impl Iterator<Item = OsString>) -> Result<Self> {
        let stage = words.next().unwrap_or_default();
        let stage = match stage.to_str() {
            Some("prestart") => Stage::Prestart,
            Some("poststop") => Stage::Poststop,
            _ => bail!("unknown stage {stage:?} in version {}; {REMEDY}", env!("CARGO_PKG_VERSION")),
        };
        let mut value = |flag: &str| -> Result<String> {
            match (words.next(), words.next()) {
                (Some(name), Some(value)) if name == flag => {
                    value.into_string().ok().with_context(|| format!("{flag} is not UTF-8"))
                }
                _ => bail!("{flag} is missing; {REMEDY}"),
            }
        };
        let state = PathBuf::from(value("--state")?);
        let lease = value("--lease")?.parse().context("--lease is no number")?;
        let key = LeaseKey { root: value("--root")?, container: value("--id")? };
        let rest: Option<Vec<String>> = words.map(|word| word.into_string().ok()).collect();
        let further = rest.and_then(|rest| {
            let of_log = rest.iter().position(|word| word == DriverLimiter::FLAG).unwrap_or(rest.len());
            let (log, limiter) = rest.split_at(of_log);
            let limiter =
                if limiter.is_empty() { None } else { Some(DriverLimiter::from_arguments(limiter)?) };
            Some((Log::from_arguments(log)?, limiter))
        });
        match further.filter(|_| state.is_absolute() && !key.container.is_empty()) {
            Some((log, limiter)) => Ok(Self { stage, state, lease, key, log, limiter }),
            None => bail!("unexpected arguments; {REMEDY}"),
        }
    }
}

const REMEDY: &str =
    "this hook is run by container runtimes: gpushare-runtime and gpushare-hook must be of one version";

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Args> {
        Args::parse(line.split(' ').map(|word| if word == "''" { OsString::new() } else { word.into() }))
    }

    #[test]
    fn a_stage_alone_is_hook_only_mode() {
        for (line, want, file, of_cdi) in [
            ("createRuntime", Stage::Prestart, None, false),
            ("prestart", Stage::Prestart, None, false),
            ("poststop --config /etc/x.toml", Stage::Poststop, Some("/etc/x.toml"), false),
            ("createRuntime --cdi", Stage::Prestart, None, true),
            ("poststop --cdi --config /etc/x.toml", Stage::Poststop, Some("/etc/x.toml"), true),
        ] {
            let call = Call::parse(line.split(' ').map(OsString::from)).unwrap();
            assert_eq!(call.stage(), want, "{line}");
            assert!(
                matches!(call, Call::HookOnly { config, cdi, .. } if config == file.map(PathBuf::from) && cdi == of_cdi),
                "{line}"
            );
        }
        let wrapper = "prestart --state /s --lease 7 --root /r --id a";
        assert!(matches!(Call::parse(wrapper.split(' ').map(OsString::from)), Ok(Call::Wrapper(_))));
        for line in [
            "",
            "createContainer",
            "poststart",
            "prestart --config",
            "prestart --config /a b",
            "prestart x",
            "prestart --cdi x",
        ] {
            assert!(Call::parse(line.split(' ').map(OsString::from)).is_err(), "{line}");
        }
    }

    #[test]
    fn arguments_are_exactly_those_that_the_wrapper_writes() {
        let args = parse("poststop --state /run/gpushare --lease 7 --root '' --id abc").unwrap();
        assert_eq!((args.stage, args.lease, args.key.root.as_str()), (Stage::Poststop, 7, ""));
        assert_eq!((args.key.container.as_str(), args.log.file), ("abc", None));
        let logged =
            "poststop --state /s --lease 7 --root /r --id a --log /l --log-format json --log-level warn";
        assert_eq!(parse(logged).unwrap().log.file, Some("/l".into()));
        let limited = "prestart --state /s --lease 7 --root /r --id a --driver-limit require /bin/gpushare";
        assert!(parse(limited).unwrap().limiter.is_some_and(|limiter| limiter.is_required));
        assert!(parse(logged).unwrap().limiter.is_none());
        for line in [
            "",
            "createContainer --state /s --lease 7 --root /r --id a",
            "prestart --state s --lease 7 --root /r --id a",
            "prestart --state /s --lease x --root /r --id a",
            "prestart --state /s --root /r --id a",
            "prestart --state /s --lease 7 --root /r --id ''",
            "prestart --state /s --lease 7 --root /r --id a more",
            "poststop --state /s --lease 7 --root /r --id a --log /l",
            "prestart --state /s --lease 7 --root /r --id a --driver-limit require",
            "prestart --state /s --lease 7 --root /r --id a --driver-limit on /bin/gpushare",
            "prestart --root /r --state /s --id a",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
