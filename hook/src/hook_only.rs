//! Hook-only mode: a hook does the wrapper's work on a container that its runtime has already created.
//!
//! The hook uses only the container's id, its init process and its bundle from the state on standard input.
//! The state does not name the runtime root, so the lease's key has a fixed mark instead. Hooks in the bundle
//! prove nothing here; the quota store knows whether the container holds a share.

use std::path::{Path, PathBuf};
use std::time::Duration;
use std::time::Instant;

use anyhow::{Context, Error, Result, bail};
use gpushare_config::{Config, reason_of};
use gpushare_inject::{
    Bundle, Live, REFUSAL, Region, Requester, Settings, Whose, give_back, grant, measured, one_line,
    open_measured, title,
};
use gpushare_quota::{
    Holder, LeaseKey, LeaseState, Member, Reason, Release, ReleaseReason, StateFolder, Store, StoreError,
    note_made,
};
use gpushare_request::{Container, is_request};
use nix::unistd::getppid;
use serde_json::Value;

use crate::sanitise;

/// How long poststop waits for the last processes of a killed container.
const END: Duration = Duration::from_secs(2);

/// A container has a CDI device of gpushare but no request, for example a pod's sandbox.
#[derive(Debug, thiserror::Error)]
#[error(
    "it has a CDI device of gpushare's, and no request of it is read: leave the device out for a pod's sandbox (annotation \
     container-type), or ask by annotation"
)]
struct NoRequest;

/// The container, as its runtime describes it on the hook's standard input.
struct State {
    id: String,
    pid: i32,
    bundle: PathBuf,
}

/// Grants the bundle's request and adds the share to the created container. Leaves a bundle without a request
/// alone, unless the hook came with a CDI device (`cdi`): then that is an error, because the engine has
/// already added the device's nodes, and no lease would cover them.
///
/// # Errors
/// When the request cannot be read or met, or the container cannot be changed. The container must not start
/// then.
pub fn create(state: &[u8], file: Option<&Path>, cdi: bool, began: Instant) -> Result<()> {
    let state = State::parse(state)?;
    let loaded = load(file);
    // The folder for refusals is mostly known even if loading fails.
    let folder = match &loaded {
        Ok(config) => Some(config.paths.state.clone()),
        Err(_) => Config::salvaged(file).map(|config| config.paths.state),
    };
    let done = loaded.and_then(|config| {
        config.log.start();
        let bundle = Bundle::open(&state.bundle, None)?;
        let json = bundle.json()?;
        let container = config.container(&json);
        match is_request(&container, &config.request) {
            false if cdi => Err(NoRequest.into()),
            false => Ok(()),
            true => give(&state, &container, &bundle, json, &config, file, began),
        }
    });
    let done = done.context(REFUSAL);
    if let Err(error) = &done {
        let kind = if error.is::<NoRequest>() { Reason::Request } else { reason_of(error.as_ref()) };
        let reason = one_line(error.as_ref());
        tracing::info!(container = %state.id, reason, "lease refused");
        // crun does not pass on a hook's output.
        if let Some(Ok(folder)) = folder.map(|folder| StateFolder::open(&folder)) {
            folder.note_refusal(&state.id, state.title().as_deref(), kind, &reason);
        }
    }
    done
}

fn give(
    state: &State,
    container: &Container,
    bundle: &Bundle,
    json: Value,
    config: &Config,
    file: Option<&Path>,
    began: Instant,
) -> Result<()> {
    sanitise::use_capabilities()?;
    let key = LeaseKey::new(LeaseKey::HOOK_ONLY.to_owned(), state.id.clone())?;
    let newest = Holder::this_process()?.start_time;
    let live = Live::open(state.pid, newest, &bundle.root(&json))?;
    let init = Holder::init(state.pid)?;
    let settings = config.settings(file.map(Path::to_path_buf));
    if holds_already(&key.container, &init, &settings)? {
        return Ok(());
    }
    let requester = Requester { container, key: &key, bundle, json, is_read: true, needs_poststop: true };
    grant(requester, &settings, |plan, reservation, json| {
        let region = Region::of(settings.programs.state, reservation.lease().id);
        let applied = live.apply(plan, &json)?;
        if let Some(limiter) = &plan.limiter {
            limiter.limit(reservation.store(), reservation.lease().id, &key, &init)?;
        }
        reservation.hand_over(&init)?;
        applied.keep();
        // While it stays, each new container copies one more mount.
        let _ = region.hide(&key.container, state.pid);
        note_made(settings.programs.state, began.elapsed());
        Ok(())
    })
}

/// Whether this same container already holds a share or is about to get one: from the wrapper, which has
/// become the hook's parent, the runtime, or from this hook, configured twice.
fn holds_already(id: &str, init: &Holder, settings: &Settings) -> Result<bool> {
    let folder = StateFolder::open(settings.programs.state)?;
    let store = open_measured(&folder)?;
    let parent = Holder::init(getppid().as_raw()).ok();
    let same = |one: &Holder, other: &Holder| (one.pid, one.start_time) == (other.pid, other.start_time);
    for lease in store.leases_by_id(id)? {
        let Member { key, state, holder, .. } = &lease.member;
        let by_wrapper =
            *state == LeaseState::Reserved && parent.as_ref().is_some_and(|parent| same(holder, parent));
        if same(holder, init) || by_wrapper {
            return Ok(true);
        }
        // An engine that restarts a container puts the new init into the same cgroup. The lease of its
        // earlier life may still exist, because hooks that replace others have no poststop.
        let is_earlier_life =
            key.root == LeaseKey::HOOK_ONLY && holder.cgroup == init.cgroup && holder.is_gone_before(init);
        if is_earlier_life {
            give_back(&folder, &store, lease.id, key, ReleaseReason::Ended, Whose::Anyones)?;
        } else if !holder.is_gone() {
            bail!(
                "another container of this id holds a share (runtime root {:?}); a hook cannot tell the two apart: give \
                 one of them another name, or use gpushare-runtime",
                key.root
            );
        }
    }
    Ok(false)
}

/// Releases the lease once the container is proved to have ended. The call of this hook is no proof: it may
/// be for a container of the same id below another runtime root.
///
/// # Errors
/// When the quota store fails; the sweep then releases the lease.
pub fn poststop(state: &[u8], file: Option<&Path>) -> Result<()> {
    let id = text(&value(state)?, "id")?;
    // A mistake in the settings must not keep the lease from being released.
    let config = load(file).or_else(|error| Config::salvaged(file).ok_or(error))?;
    config.log.start();
    let path = &config.paths.state;
    let found = Store::find(path).map_err(|error| match error {
        StoreError::Io { .. } => {
            Error::new(error).context(format!("cannot look for shares in {}; run as root", path.display()))
        }
        error => error.into(),
    });
    let Some(store) = found?.map(measured) else { return Ok(()) };
    let key = LeaseKey::new(LeaseKey::HOOK_ONLY.to_owned(), id)?;
    let folder = StateFolder::open(path)?;
    let Some(lease) = store.lease(&key)? else { return Ok(()) };
    lease.member.holder.await_end(END);
    let left = give_back(&folder, &store, lease.id, &key, ReleaseReason::Ended, Whose::GoneOnes)?;
    if left == Release::Nothing {
        tracing::warn!(container = %key.container, "it still lives: its lease is left for the sweep");
    }
    Ok(())
}

fn load(file: Option<&Path>) -> Result<Config> {
    Ok(file.map_or_else(Config::load, Config::load_from)?)
}

impl State {
    /// The container's display name, if its bundle can be read.
    fn title(&self) -> Option<String> {
        let json = Bundle::open(&self.bundle, None).ok()?.json().ok()?;
        title(&Container::from_json(&json), &self.id, &self.bundle)
    }

    fn parse(bytes: &[u8]) -> Result<Self> {
        let state = value(bytes)?;
        let pid = state.get("pid").and_then(Value::as_i64).and_then(|pid| i32::try_from(pid).ok());
        let pid = pid.filter(|pid| *pid > 0).context("the runtime's state names no process")?;
        let bundle = PathBuf::from(text(&state, "bundle")?);
        if !bundle.is_absolute() {
            bail!("the runtime's state names no absolute bundle folder");
        }
        Ok(Self { id: text(&state, "id")?, pid, bundle })
    }
}

fn value(state: &[u8]) -> Result<Value> {
    serde_json::from_slice(state).context("the runtime handed over no container state")
}

fn text(state: &Value, field: &str) -> Result<String> {
    let text = state.get(field).and_then(Value::as_str).filter(|text| !text.is_empty());
    text.map(str::to_owned).with_context(|| format!("the runtime's state has no {field}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_needs_an_id_a_process_and_a_bundle() {
        let state =
            State::parse(br#"{"ociVersion":"9","id":"a","status":"new","pid":7,"bundle":"/b","root":"x"}"#)
                .unwrap();
        assert_eq!((state.id.as_str(), state.pid, state.bundle), ("a", 7, PathBuf::from("/b")));
        for text in [
            "",
            "[]",
            r#"{"id":"a","pid":7}"#,
            r#"{"id":"a","bundle":"/b"}"#,
            r#"{"id":"","pid":7,"bundle":"/b"}"#,
            r#"{"id":"a","pid":0,"bundle":"/b"}"#,
            r#"{"id":"a","pid":4294967297,"bundle":"/b"}"#,
            r#"{"id":"a","pid":7,"bundle":"b"}"#,
        ] {
            assert!(State::parse(text.as_bytes()).is_err(), "{text}");
        }
    }
}
