//! Puts a container's processes under its supervisor: `create` starts the supervisor, and each filter's
//! listener is passed to it.

use std::convert::Infallible;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use gpushare_config::Config;
use gpushare_inject::{Bundle, Record, Supervised, is_bystander};
use gpushare_quota::{Lease, LeaseKey};
use gpushare_supervisor::abi::Era;
use gpushare_supervisor::filter::{denied, reported};
use gpushare_supervisor::handover::{connect_to, hand_over};
use gpushare_supervisor::sys::{install_with_listener, install_without_listener};
use nix::errno::Errno;
use serde_json::Value;

use crate::args::Args;
use crate::{create, exec, inherited};

/// A seccomp filter around the low-level runtime, and so around all processes of the container.
pub enum Filter {
    /// No filter.
    None,
    /// Driver calls that allocate memory are reported to a supervisor.
    Reported {
        /// The driver's interface.
        era: &'static Era,
        /// The socket on which the supervisor accepts listeners.
        socket: PathBuf,
        /// Whether the calls fail if the supervisor cannot be reached. Otherwise the process does not start.
        or_denied: bool,
    },
    /// The calls fail.
    Denied,
    /// The calls fail, if the kernel lets this process install the filter: for a container without a request.
    DeniedIfPossible,
}

impl Filter {
    /// Puts it around this process, which has one thread. The filter cannot be removed.
    ///
    /// # Errors
    /// When the kernel refuses it, or the supervisor does not accept the listener.
    pub fn put_around_this_process(self) -> Result<()> {
        match self {
            Self::None => Ok(()),
            Self::Denied => install_without_listener(&mut denied())
                .map_err(io::Error::from)
                .context("cannot deny the driver's calls"),
            Self::DeniedIfPossible => {
                let _ = install_without_listener(&mut denied()); // a plain user may not, and has no files of others
                Ok(())
            }
            Self::Reported { era, socket, or_denied } => {
                let supervisor = match connect_to(&socket) {
                    Err(error) if or_denied => {
                        tracing::warn!(%error, "the container's supervisor cannot be reached: an added process gets no GPU memory");
                        return Self::Denied.put_around_this_process();
                    }
                    found => found.context("the supervisor does not listen")?,
                };
                let listener = match install_with_listener(&mut reported(era)) {
                    Err(Errno::EBUSY) => bail!(
                        "this engine runs under a seccomp listener itself (sysbox, or a container with a share), beside which \
                         no supervisor can hold a share; go without one here (supervisor.mode = \"off\", no GPUSHARE_SUPERVISOR)"
                    ),
                    done => done.map_err(io::Error::from).context("cannot report the driver's calls")?,
                };
                hand_over(&supervisor, listener).context("the supervisor does not take the listener")
            }
        }
    }
}

/// A container's supervisor that is starting.
pub struct Starting {
    process: gpushare_inject::Starting,
    era: &'static Era,
    socket: PathBuf,
}

/// Starts the supervisor of a container with this lease.
///
/// # Errors
/// When it cannot be started.
pub fn start(supervised: &Supervised, lease: &Lease, key: &LeaseKey, config: &Config) -> Result<Starting> {
    const NO_RECORD: &str = "cannot keep a record of the supervisor";
    let (state, driver) = (&config.paths.state, &supervised.driver);
    let era = era(driver)?;
    let record = Record::prepare(state, key, lease.id, driver).context(NO_RECORD)?;
    inherited::await_children();
    let process = supervised.start(&record.socket)?;
    record.write(key).context(NO_RECORD)?;
    Ok(Starting { process, era, socket: record.socket })
}

impl Starting {
    /// Waits until it is ready, and returns the filter that reports to it.
    ///
    /// # Errors
    /// When it failed to start.
    pub fn ready(self) -> Result<Filter> {
        let Self { process, era, socket } = self;
        process.ready()?;
        Ok(Filter::Reported { era, socket, or_denied: false })
    }
}

fn era(driver: &str) -> Result<&'static Era> {
    let era = driver.parse().ok().and_then(Era::for_version);
    era.with_context(|| format!("the supervisor does not know driver {driver}"))
}

/// The filter around a container without a request.
pub fn around_bystander(json: &Value, config: &Config) -> Filter {
    let denies = config.denies_bystanders && is_bystander(json, &config.roots);
    if denies { Filter::DeniedIfPossible } else { Filter::None }
}

/// `exec`: a process that is added to a supervised container gets the same supervisor. If that fails, it gets
/// no GPU memory.
pub fn exec(args: &Args, config: &Config) -> Result<Infallible> {
    let filter = filter_of(args, config);
    if matches!(filter, Filter::Reported { .. } | Filter::Denied) {
        config.log.start();
    }
    if matches!(filter, Filter::Denied) {
        tracing::warn!(
            container = args.id.as_deref(),
            "it is not certain whether a supervisor holds the container: an added process gets no GPU memory"
        );
    }
    exec::low_level_under(exec::find(config)?, filter)
}

fn filter_of(args: &Args, config: &Config) -> Filter {
    let state = &config.paths.state;
    let others = || if Record::any(state, None) { Filter::Denied } else { of_bystander(args, config) };
    // Runtimes may parse such a command line differently, or take such an id for a path.
    let Some(Ok(key)) = args.id.as_ref().map(|_| create::key(args)) else { return others() };
    match Record::of(state, &key) {
        Ok(Some(record)) => match era(&record.driver) {
            Ok(era) => Filter::Reported { era, socket: record.socket, or_denied: true },
            Err(_) => Filter::Denied,
        },
        // A container with this id is supervised below another root, which may be another name of this root.
        Ok(None) if Record::any(state, Some(&[&key.container])) => {
            let is_there = !key.root.is_empty() && Path::new(&key.root).join(&key.container).exists();
            if is_there && !Record::is_at(state, &key) { of_bystander(args, config) } else { Filter::Denied }
        }
        Ok(None) => of_bystander(args, config),
        Err(_) => Filter::Denied,
    }
}

/// The filter around a process that is added to an unsupervised container. There is no record of such a
/// container: the runtime has its bundle.
fn of_bystander(args: &Args, config: &Config) -> Filter {
    if !config.denies_bystanders {
        return Filter::None;
    }
    let bundle = exec::find(config).ok().and_then(|runtime| exec::bundle_of(runtime, args));
    let json = bundle.and_then(|bundle| Bundle::open(&bundle, None).ok()?.json().ok());
    json.map_or(Filter::DeniedIfPossible, |json| around_bystander(&json, config))
}

/// `checkpoint`: passed on, unless the container is supervised: a checkpoint does not preserve the filter.
pub fn checkpoint(args: &Args, config: &Config) -> Result<Infallible> {
    let words: Vec<&str> = args.maybe_ids.iter().map(String::as_str).collect();
    // A word with a slash would be a path, and is not an id.
    let ids: Vec<&str> =
        words.into_iter().filter(|word| LeaseKey::new(String::new(), (*word).to_owned()).is_ok()).collect();
    if Record::any(&config.paths.state, Some(&ids)) {
        bail!(
            "a container with a share that a supervisor holds cannot be checkpointed: its filter would be lost"
        );
    }
    exec::low_level(exec::find(config)?)
}
