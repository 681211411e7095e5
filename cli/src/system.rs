//! `gpushare system`: the driver's device nodes, where nobody else makes them, the links by which systemd
//! finds them, and the driver's own limits.
//!
//! All can be run again at any time, and at every boot: what is right stays as it is.

mod driver_limit;
mod links;
mod nodes;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Subcommand;
use gpushare_config::Config;
use gpushare_inject::Limit;
use gpushare_inventory::{DeviceFile, Roots};
use gpushare_quota::StateFolder;
use schemars::JsonSchema;
use serde::Serialize;

use crate::{Output, answer, node, table};

/// What to look after.
#[derive(Subcommand)]
pub enum System {
    /// Makes the device nodes that the loaded driver wants, as nvidia-modprobe does.
    Nodes(Options),
    /// Makes the links /dev/char/MAJOR:MINOR of the device nodes, which systemd's device rules need.
    DevChar(Options),
    /// Limits a cgroup's memory on GPUs by the driver itself (615 and newer), as gpushare does for each
    /// container where inject.driver_limit says so.
    DriverLimit {
        /// The cgroup's folder below /sys/fs/cgroup.
        cgroup: PathBuf,
        /// A GPU by its UUID, and the most memory in bytes: GPU-…=4294967296.
        #[arg(required = true)]
        limits: Vec<Limit>,
    },
}

/// How to go about it.
#[derive(clap::Args)]
pub struct Options {
    /// Only tell what would be done.
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    output: Output,
}

/// One device node or link under /dev.
pub struct Item {
    /// Path of the device node or link on this machine.
    pub path: PathBuf,
    /// Its device number, mode and owner, or the link's target.
    pub what: String,
    /// How it was found.
    pub state: State,
}

/// Device nodes or links under /dev.
#[derive(Serialize, JsonSchema)]
pub struct Items {
    items: Vec<ToldItem>,
}

/// A device node or link, and what was done about it.
#[derive(Serialize, JsonSchema)]
struct ToldItem {
    path: PathBuf,
    /// Its device number, mode and owner, or the link's target.
    what: String,
    /// `right`, `made`, `mended`, `to do` or `failed`.
    state: String,
    /// Why it could not be mended.
    error: Option<String>,
}

/// How a device node or link was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// It is as it should be.
    Right,
    /// It is missing.
    Missing,
    /// It exists and is wrong.
    Wrong,
    /// Only somebody else can put it right. The text says what is wrong and what to do.
    Stuck(String),
}

/// Looks at all items, mends what is missing or wrong, and tells. An item that cannot be mended does not stop
/// the others.
pub fn system(command: &System) -> Result<ExitCode> {
    match command {
        System::Nodes(options) => {
            look_after(options, |roots| tell(options, nodes::look(roots)?, nodes::mend))
        }
        System::DevChar(options) => {
            look_after(options, |roots| tell(options, links::look(roots)?, links::mend))
        }
        System::DriverLimit { cgroup, limits } => {
            driver_limit::set(cgroup, limits)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn look_after(options: &Options, act: impl FnOnce(&Roots) -> Result<ExitCode>) -> Result<ExitCode> {
    let config = Config::load()?;
    let _turn = (!options.dry_run).then(|| turn(&config)).transpose()?;
    act(&config.roots)
}

/// Takes the lock that lets one run work at a time, until it is dropped: udev starts a run for each of the
/// driver's devices, and the administrator may start another.
fn turn(config: &Config) -> Result<File> {
    let path = StateFolder::open(&config.paths.state)?.path().join("system.lock");
    let open = || OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&path);
    let locked = open().and_then(|file| file.lock().map(|()| file));
    locked.with_context(|| format!("cannot lock {}", path.display()))
}

/// What is wrong with the device nodes under /dev, one short text each, for `gpushare doctor`. Nodes of MIG
/// count only while MIG is on: until then nothing needs them.
pub fn wrong_nodes(config: &Config) -> Result<Vec<String>> {
    let has_mig = has_mig(config);
    let is_needed = |file: &Option<DeviceFile>| has_mig || file.as_ref().is_none_or(|file| !file.is_of_mig);
    let nodes = nodes::look(&config.roots)?;
    Ok(nodes.iter().filter(|(_, file)| is_needed(file)).filter_map(|(item, _)| wrong(item)).collect())
}

/// The links that are missing or wrong, for `gpushare doctor`. Of the folders below /dev, containers get
/// nodes of `nvidia-caps` alone, and only while MIG is on.
pub fn wrong_links(config: &Config) -> Result<Vec<String>> {
    let has_mig = has_mig(config);
    let is_needed = |target: &Path| {
        let folder = target.parent().unwrap_or(target);
        folder == Path::new("..") || has_mig && folder.ends_with("nvidia-caps")
    };
    let links = links::look(&config.roots)?;
    Ok(links.iter().filter(|(_, target)| is_needed(target)).filter_map(|(item, _)| wrong(item)).collect())
}

/// Whether a GPU of the node is in MIG mode, as far as /proc and the inventory's cache tell.
fn has_mig(config: &Config) -> bool {
    node::shown(config).is_ok_and(|node| node.has_mig())
}

fn wrong(item: &Item) -> Option<String> {
    let path = item.path.display();
    match &item.state {
        State::Right => None,
        State::Missing => Some(format!("{path} is missing")),
        State::Wrong => Some(format!("{path} is wrong")),
        State::Stuck(why) => Some(format!("{path}: {why}")),
    }
}

fn tell<T>(options: &Options, items: Vec<(Item, T)>, mend: fn(&Path, &T) -> Result<()>) -> Result<ExitCode> {
    let mut done = Vec::new();
    for (item, wanted) in items {
        let (word, error) = match &item.state {
            State::Right => ("right", None),
            State::Stuck(why) => ("FAILED", Some(why.clone())),
            State::Missing | State::Wrong if options.dry_run => ("to do", None),
            state => match mend(&item.path, &wanted) {
                Ok(()) => (if *state == State::Missing { "made" } else { "mended" }, None),
                Err(error) => ("FAILED", Some(gpushare_inject::one_line(error.as_ref()))),
            },
        };
        done.push((item, word, error));
    }
    let failed = done.iter().any(|(_, _, error)| error.is_some());
    if options.output.json {
        let items = done.into_iter().map(|(item, word, error)| ToldItem {
            path: item.path,
            what: item.what,
            state: word.to_lowercase(),
            error,
        });
        answer::print(Items { items: items.collect() })?;
    } else {
        let rows = done.into_iter().map(|(item, word, error)| {
            let what = error.map_or_else(|| item.what.clone(), |error| format!("{}: {error}", item.what));
            [word.to_owned(), item.path.display().to_string(), what]
        });
        table::print(["", "PATH", ""], rows)?;
    }
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
