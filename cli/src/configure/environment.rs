//! The node's own settings while gpushare is a default runtime. Every image then runs under it, and a bundle
//! does not say which variable came from an image and which from its user. So no variable may grant.

use std::path::PathBuf;

use anyhow::Result;
use gpushare_config::Config;

use super::Engine;
use crate::file::{self, FileChange};

/// What `--default` and `--remove` change in the settings, and what the user is told of it.
pub struct Grants {
    /// The change of the settings' drop-in.
    pub change: FileChange,
    /// The message to the user.
    pub note: Option<String>,
}

/// Turns grants by environment off while `engine` has gpushare as its default.
pub fn off(engine: Engine) -> Result<Grants> {
    let path = drop_in(engine);
    let before = file::read(&path)?;
    let text = text(engine, Config::load()?.request.default_memory.is_some());
    if before.as_ref().is_some_and(|there| *there != text) {
        return Ok(kept(path, before, "stays as it is"));
    }
    let note = format!(
        "variables grant no GPU while gpushare is the default runtime, since an image may set them, and a container \
         with GPUSHARE_* is refused: ask by annotation (docker run --annotation, from docker 24 on), or set [request] env in a \
         settings file read after {}",
        path.display()
    );
    Ok(Grants { change: FileChange { path, before, after: Some(text) }, note: Some(note) })
}

/// Takes the drop-in of `engine` away, unless somebody changed it.
pub fn as_before(engine: Engine) -> Result<Grants> {
    let path = drop_in(engine);
    let before = file::read(&path)?;
    if before.as_ref().is_none_or(|there| [true, false].map(|share| text(engine, share)).contains(there)) {
        return Ok(Grants { change: FileChange { path, before, after: None }, note: None });
    }
    Ok(kept(path, before, "stays: delete it if nothing needs it"))
}

/// A drop-in that somebody changed stays; `what` tells the user so.
fn kept(path: PathBuf, before: Option<String>, what: &str) -> Grants {
    let note = format!("{} was changed by hand and {what}", path.display());
    Grants { change: FileChange { path, before: before.clone(), after: before }, note: Some(note) }
}

/// Whether the settings, as they are read now, let variables grant.
pub fn grants() -> Result<bool> {
    Ok(!Config::load()?.request.ignore_env)
}

fn drop_in(engine: Engine) -> PathBuf {
    file::drop_in(&format!("90-default-runtime-of-{}.toml", engine.name()))
}

/// The drop-in's text. An image's NVIDIA_VISIBLE_DEVICES gets at most the default share that the
/// administrator set, and nothing where none is set.
fn text(engine: Engine, default_share: bool) -> String {
    let nvidia = if default_share { "" } else { "nvidia = \"ignore\"\n" };
    format!(
        "# Made by `gpushare configure {} --default`; goes with --remove. Every image runs under gpushare, and what an image\n\
         # sets cannot be told from what its user sets: variables grant nothing.\n[request]\nenv = false\n{nvidia}",
        engine.name()
    )
}
