//! The actions of the wrapper's two hooks on the lease.

use anyhow::{Context, Result, bail};
use gpushare_inject::{Region, give_back_ended, one_line, open_measured};
use gpushare_quota::{Holder, Reason, StateFolder};
use oci_spec::runtime::State;

use crate::args::Args;
use crate::sanitise;

/// Makes the container's init the holder of the lease, instead of the runtime's process.
///
/// # Errors
/// When the state is another container's, or the lease is gone. The container must not start without a lease.
pub fn prestart(args: &Args, state: &[u8]) -> Result<()> {
    let done = hand_over(args, state);
    if let Err(error) = &done {
        // crun does not pass on a hook's output.
        if let Ok(folder) = StateFolder::open(&args.state) {
            folder.note_refusal(&args.key.container, None, Reason::Node, &one_line(error.as_ref()));
        }
    }
    done
}

fn hand_over(args: &Args, state: &[u8]) -> Result<()> {
    let container = &args.key.container;
    let state: State = serde_json::from_slice(state).context("the runtime handed over no container state")?;
    if state.id() != container {
        bail!(
            "the runtime's state is of container {:?}, the hook's arguments are of {container}",
            state.id()
        );
    }
    let pid = state.pid().filter(|pid| *pid > 0).context("the runtime's state names no process")?;
    let holder = Holder::init(pid)?;
    let folder = StateFolder::open(&args.state)?;
    let store = open_measured(&folder)?;
    if !store.activate(args.lease, &args.key, &holder)? {
        bail!("container {container} holds no share (any more); start it anew");
    }
    if let Some(limiter) = &args.limiter {
        args.log.start();
        let set = || limiter.limit(&store, args.lease, &args.key, &holder);
        sanitise::use_capabilities().and_then(|()| Ok(set()?))?;
    }
    // While it stays, each new container copies one more mount; `delete` removes it at the latest.
    let region = Region::of(folder.path(), args.lease);
    let _ = sanitise::use_capabilities().and_then(|()| Ok(region.hide(container, pid)?));
    Ok(())
}

/// Releases the lease. A lease that is already gone is not an error: `delete` may have released it.
///
/// # Errors
/// When the quota store fails; the sweep then releases the lease.
pub fn poststop(args: &Args) -> Result<()> {
    args.log.start();
    let folder = StateFolder::open(&args.state)?;
    Ok(give_back_ended(&folder, args.lease, &args.key)?)
}
