//! `create` and `run`: request, lease, plan, edit; then the low-level runtime takes over.

use std::convert::Infallible;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use gpushare_config::Config;
use gpushare_inject::{Bundle, Image, Plan, Programs, Region};
use gpushare_inventory::Node;
use gpushare_quota::{Holder, Lease, LeaseKey, Reservation, StateFolder, Store};
use gpushare_request::{Container, Mode, Request};
use serde_json::Value;

use crate::args::Args;
use crate::{exec, totals};

/// Grants what the bundle asks for, and becomes the low-level runtime. A bundle that asks for nothing is not touched.
pub fn create(args: &Args, config: &Config) -> Result<Infallible> {
    let runtime = exec::find(config)?;
    let bundle = Bundle::open(&args.bundle, args.config.as_deref())?;
    let json = bundle.json()?;
    let refused = || {
        let id: String = short(args.id.as_deref().unwrap_or_default()).escape_debug().collect();
        format!("cannot lease a GPU for {id}")
    };
    let container = Container::from_json(&json);
    let Some(request) = gpushare_request::read(&container, &config.request).with_context(refused)? else {
        return exec::low_level(runtime);
    };
    let key = key(args)?;
    grant(&request, &key, &bundle, json, runtime, config).with_context(refused)
}

/// On success the process is another program; on any failure lease and region are given back.
fn grant(
    request: &Request,
    key: &LeaseKey,
    bundle: &Bundle,
    json: Value,
    runtime: &Path,
    config: &Config,
) -> Result<Infallible> {
    refuse_privileged(&json, config)?;
    let root = bundle.root(&json);
    let image = Image::look(&root, &json)?;
    let state = StateFolder::open(&config.paths.state)?;
    let node = totals::known(Node::open(&config.roots)?, state.path(), config)?;
    let store = Store::open(state.path())?;
    let holder = Holder::this_process()?;
    let swept = |lease: &Lease| Region::of(state.path(), lease.id).remove();
    let reservation = store.reserve(key, request, &node.gpus, &config.quota, &holder, swept)?;
    let region = Undo(Region::of(state.path(), reservation.lease().id));
    let plan = prepare(request, &reservation, &node, &region.0, state.path(), &image, config)?;
    Image::check(&root, &json, plan.targets())?;
    bundle.apply(&plan, json)?;
    exec::low_level(runtime)
}

fn prepare(
    request: &Request,
    reservation: &Reservation,
    node: &Node,
    region: &Region,
    state: &Path,
    image: &Image,
    config: &Config,
) -> Result<Plan> {
    let programs = Programs {
        hook: &config.paths.hook,
        libraries: &config.paths.libraries,
        cache: &config.paths.cache,
        state,
        extra_mounts: &config.mounts,
    };
    let plan = Plan::new(request, reservation.lease(), node, &programs, image)?;
    // A whole card is not intercepted, so nobody would read its region.
    if reservation.lease().mode == Mode::Share {
        region.create(reservation.lease())?;
    }
    Ok(plan)
}

/// A container that may open every device is no place for a limit that a cluster relies on.
fn refuse_privileged(json: &Value, config: &Config) -> Result<()> {
    if config.request.strict && gpushare_inject::is_privileged(json) {
        bail!(
            "a privileged container can open every GPU, so this node gives it no share (request.strict); drop --privileged"
        );
    }
    Ok(())
}

/// The region of a container that is not there yet: taken away on drop, which a successful execve never reaches.
struct Undo(Region);

impl Drop for Undo {
    fn drop(&mut self) {
        self.0.remove();
    }
}

/// The lease's identity. The id is checked before any path or argument is built from it.
pub fn key(args: &Args) -> Result<LeaseKey> {
    let container = args.id.clone().context("the command line names no container id")?;
    let plain = |c: char| c.is_ascii_alphanumeric() || "_.+-".contains(c);
    if container.is_empty()
        || container.len() > 255
        || !container.chars().all(plain)
        || container.starts_with('.')
    {
        bail!("container id {:?} must be 1 to 255 of the characters A-Z a-z 0-9 _ . + -", short(&container));
    }
    let root = args.root.as_deref().map(canonical).unwrap_or_default();
    Ok(LeaseKey { root: root.to_string_lossy().into_owned(), container })
}

/// The path with the links of its existing part followed: the same before and after the low-level runtime makes it.
fn canonical(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    let existing = path.ancestors().find_map(|folder| Some((folder, fs::canonicalize(folder).ok()?)));
    match existing {
        Some((folder, real)) => real.join(path.strip_prefix(folder).unwrap_or(Path::new(""))),
        None => path,
    }
}

/// Engines' ids have 64 digits, of which people use the first 12.
fn short(id: &str) -> String {
    let hexadecimal = id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    id.chars().take(if hexadecimal { 12 } else { 64 }).collect()
}
