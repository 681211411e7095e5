//! `create` and `run`: reads the request, gets a lease, edits the bundle, then becomes the low-level runtime.
//! `restore`: passes the call on, or refuses a container with a share.

use std::convert::Infallible;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use gpushare_config::{Config, ConfigError, ENVIRONMENT};
use gpushare_inject::{Bundle, BundleError, REFUSAL, Requester, grant, refuse_previous_plan};
use gpushare_quota::{LeaseKey, note_made};
use gpushare_request::{Container, Policy, is_request};
use serde_json::Value;

use crate::args::{Args, Command};
use crate::exec;
use crate::supervised::{self, Filter, Starting, around_bystander};

const NO_RESTORE: &str = "a container with a share cannot be restored from a checkpoint, since its limits \
                          would not be applied; start it anew";

/// Grants the bundle's request and becomes the low-level runtime. A bundle without a request is not changed.
/// `began` is the start time of this process.
pub fn create(args: &Args, config: &Config, began: Instant) -> Result<Infallible> {
    let runtime = exec::find(config)?;
    let bundle = open(args)?;
    let json = bundle.json()?;
    let container = config.container(&json);
    if !is_request(&container, &config.request) {
        tracing::info!(container = args.id.as_deref(), "no request: it starts without a GPU of gpushare's");
        return pass_on(&json, config, runtime, around_bystander(&json, config)).context(REFUSAL);
    }
    let key = key(args)?;
    // After `create` the engine calls `delete`, which releases the share. A hook would be one more process in
    // the life of every container.
    let needs_poststop = args.command == Command::Run;
    let requester =
        Requester { container: &container, key: &key, bundle: &bundle, json, is_read: false, needs_poststop };
    let settings = config.settings(std::env::var_os(ENVIRONMENT).map(PathBuf::from));
    // The reservation lasts until execve replaces this process. On any failure it is released.
    grant(requester, &settings, |plan, reservation, json| {
        let start = |supervised| supervised::start(supervised, reservation.lease(), &key, config);
        let supervisor = plan.supervised.as_ref().map(start).transpose()?;
        let edited = bundle.edit(plan, json)?;
        let filter = supervisor.map_or(Ok(Filter::None), Starting::ready)?;
        edited.put_in_place()?;
        note_made(settings.programs.state, began.elapsed());
        exec::low_level_under(runtime, filter)
    })
    .context(REFUSAL)
}

/// Becomes the low-level runtime for `restore`. Refuses a container with a share, because a restored one gets
/// neither hooks nor mounts.
pub fn restore(args: &Args, config: &Config) -> Result<Infallible> {
    let json = open(args)?.json()?;
    if is_request(&config.container(&json), &config.request) {
        return Err(anyhow!(NO_RESTORE)).context(REFUSAL);
    }
    pass_on(&json, config, exec::find(config)?, Filter::None).context(REFUSAL)
}

/// `create` and `restore` with unusable settings. A bundle with a request gets the error `slip`; any other
/// needs no settings. `config` has the settings that could be salvaged.
pub fn without_settings(args: &Args, config: &Config, slip: ConfigError) -> Result<Infallible> {
    let json = open(args)?.json()?;
    if may_ask(&config.container(&json)) {
        return Err(slip.into());
    }
    pass_on(&json, config, exec::find(config)?, Filter::None)
}

/// Whether some settings would find a request, valid or not, in this container. The default ones read every
/// source.
fn may_ask(container: &Container) -> bool {
    is_request(container, &Policy::default())
}

/// Becomes the low-level runtime for a bundle without a request. Refuses a bundle that still has the edits of
/// an earlier grant.
fn pass_on(json: &Value, config: &Config, runtime: &Path, filter: Filter) -> Result<Infallible> {
    refuse_previous_plan(json, &config.paths.hook)?;
    exec::low_level_under(runtime, filter)
}

fn open(args: &Args) -> Result<Bundle, BundleError> {
    Bundle::open(&args.bundle, args.config.as_deref())
}

/// The lease's key: runtime root and container id. Checks the id before any path or argument is built from
/// it.
pub fn key(args: &Args) -> Result<LeaseKey> {
    let container = args.id.clone().context("the command line names no container id")?;
    let root = args.root.as_deref().map(canonical).unwrap_or_default();
    Ok(LeaseKey::new(root.to_string_lossy().into_owned(), container)?)
}

/// The absolute path with the links of its existing part resolved. It is the same before and after the
/// low-level runtime creates the folder.
fn canonical(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    let existing = path.ancestors().find_map(|folder| Some((folder, fs::canonicalize(folder).ok()?)));
    match existing {
        // Collect from components, because joining an empty path adds a slash, which would make another key.
        Some((folder, real)) => {
            real.join(path.strip_prefix(folder).unwrap_or(Path::new(""))).components().collect()
        }
        None => path,
    }
}

#[cfg(test)]
mod tests {
    use std::env;

    use super::*;

    #[test]
    fn a_runtime_root_is_the_same_before_and_after_it_is_made() {
        let root = env::temp_dir().join(format!("gpushare-runtime-root-{}", std::process::id()));
        let before = canonical(&root);
        fs::create_dir(&root).unwrap();
        let after = canonical(&root);
        fs::remove_dir(&root).unwrap();
        assert_eq!(before.as_os_str(), after.as_os_str());
    }
}
