//! `gpushare configure`: adds the runtime to an engine's settings, and removes it, without harm to the
//! engine's file.
//!
//! `docker`, `containerd`, `crio` and `podman` turn text into text. `toml_text` and `json_text` edit text
//! without loss. `target` finds the file, `check` asks the engine, and only `file` writes.

mod check;
mod containerd;
mod crio;
pub mod default_share;
mod docker;
mod environment;
mod json_text;
mod known;
mod podman;
mod registered;
mod target;
#[cfg(test)]
mod tests;
mod toml_text;

use std::ffi::OsString;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use schemars::JsonSchema;
use serde::Serialize;
use similar::TextDiff;
use toml::{Table, Value};

use crate::file::{self, FileChange};
use crate::{Output, answer};
use check::Checker;
use default_share::DefaultShare;
pub use known::{Known, docker_lacks_the_runtime, engines};
pub use registered::print as print_registrations;
use target::Target;
use toml_text::Mistake;

/// The runtime's program, which is installed beside this one.
const WRAPPER: &str = "gpushare-runtime";

/// What to write, and for which engine.
#[derive(clap::Args)]
pub struct Configure {
    /// The engine.
    engine: Engine,
    /// Make it the engine's default runtime. Variables then grant no GPU, since an image may set them.
    #[arg(long, conflicts_with = "remove")]
    default: bool,
    /// What a container gets that names no size: a share as 8GiB or 25%, `rest` (all that is left, so the
    /// next one gets none), or `refuse`. It is the same for all engines, and stays until it is changed.
    #[arg(long, value_name = "SHARE", conflicts_with = "remove")]
    default_share: Option<DefaultShare>,
    /// Print the difference and change nothing.
    #[arg(long)]
    dry_run: bool,
    /// Take the runtime out again: the file is as it was before, but for what others changed since.
    #[arg(long)]
    remove: bool,
    /// The file to edit, where it is not the engine's usual one.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The runtime's program; else gpushare-runtime beside this program.
    #[arg(long, value_name = "PATH", conflicts_with = "remove")]
    runtime_path: Option<PathBuf>,
    /// The engine's program, which is asked about the file; else the one that runs, else the first one
    /// installed.
    #[arg(long, value_name = "PATH")]
    engine_path: Option<PathBuf>,
    /// What the runtime is called.
    #[arg(long, default_value = "gpushare", value_parser = name)]
    name: String,
    #[command(flatten)]
    output: Output,
}

/// An engine that can be told of a runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Engine {
    /// docker's daemon.json.
    Docker,
    /// containerd's config.toml, for Kubernetes.
    Containerd,
    /// A drop-in for CRI-O.
    Crio,
    /// A drop-in for podman.
    Podman,
}

impl Engine {
    const fn name(self) -> &'static str {
        match self {
            Self::Docker => "docker",
            Self::Containerd => "containerd",
            Self::Crio => "crio",
            Self::Podman => "podman",
        }
    }

    const fn program(self) -> &'static str {
        match self {
            Self::Docker => "dockerd",
            other => other.name(),
        }
    }
}

impl std::fmt::Display for Engine {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.name())
    }
}

/// A runtime as an engine's settings name it.
#[derive(Clone, Debug)]
struct Runtime {
    name: String,
    path: String,
    default: bool,
}

/// Checks a runtime's name: a DNS label, which means the same to every engine and to a RuntimeClass.
fn name(text: &str) -> Result<String, String> {
    let letter = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let sound = (1..=63).contains(&text.len())
        && text.bytes().all(letter)
        && !(text.starts_with('-') || text.ends_with('-'));
    match (sound, text) {
        (true, "runc" | "crun") => Err("this name is taken by the low-level runtime".to_owned()),
        (true, _) => Ok(text.to_owned()),
        (false, _) => Err("lower-case letters, digits and `-`, as in gpushare".to_owned()),
    }
}

/// What would be written, and what the user is told of it.
struct Planned {
    changes: Vec<FileChange>,
    notes: Vec<String>,
    /// How the settings were checked; `None` where they did not change.
    checked: Option<String>,
}

/// Edits the engine's file, or prints how it would be edited.
pub fn configure(asked: &Configure) -> Result<()> {
    let target = target::find(asked.engine, asked.config.as_deref())?;
    let checker = Checker::new(asked.engine, asked.engine_path.as_deref())?;
    let _turn = (!asked.dry_run).then(file::turn);
    let (planned, runtime) = match asked.remove {
        true => (remove(asked, &checker, &target)?, None),
        false => {
            let runtime = runtime(asked, &target)?;
            let mut planned = add(&checker, &target, &runtime)?;
            match &asked.default_share {
                Some(share) => {
                    let (change, note) = default_share::change(share)?;
                    // Before the engine's own file: no container starts under the old answer.
                    planned.changes.insert(0, change);
                    planned.notes.extend(note);
                }
                None => planned.notes.extend(default_share::undecided()?),
            }
            (planned, Some(runtime))
        }
    };
    let mut notes = planned.notes;
    let changed = planned.changes.iter().any(FileChange::changes);
    if changed && !asked.dry_run {
        write(&planned.changes, || match &runtime {
            Some(runtime) => check::after(&checker, &target, runtime),
            None => Ok(()),
        })?;
        if runtime.is_some_and(|runtime| runtime.default) && environment::grants()? {
            notes.push(
                "settings that are read later turn [request] env on again: any image can ask for a GPU"
                    .to_owned(),
            );
        }
    }
    if let Some(share) = asked.default_share.as_ref().filter(|_| !asked.dry_run) {
        notes.extend(default_share::overridden(share)?);
    }
    tell(asked, &target, &planned.changes, planned.checked.as_deref(), &notes)
}

/// Writes `changes`, and takes them back if `confirm` does not find them in force.
fn write(changes: &[FileChange], confirm: impl FnOnce() -> Result<()>) -> Result<()> {
    file::apply(changes)?;
    let Err(error) = confirm() else { return Ok(()) };
    file::revert(changes)
        .with_context(|| format!("{error:#}; and the old settings could not be brought back"))?;
    Err(error.context("the old settings stand"))
}

fn runtime(asked: &Configure, target: &Target) -> Result<Runtime> {
    let path = match &asked.runtime_path {
        Some(path) => path.clone(),
        None => {
            let program = std::env::current_exe().context("cannot tell where this program is")?;
            program.parent().unwrap_or(Path::new("/")).join(WRAPPER)
        }
    };
    ensure!(path.is_absolute(), "the runtime's path must be absolute: {}", path.display());
    let executable =
        path.metadata().is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0);
    ensure!(
        executable,
        "{} is not a program: install gpushare completely, or name it with --runtime-path",
        path.display()
    );
    let Some(path) = path.to_str().map(str::to_owned) else { bail!("the runtime's path is not UTF-8") };
    // A runtime that is the default stays it until --remove.
    let default = asked.default || is_default(asked.engine, target, &asked.name)?;
    Ok(Runtime { name: asked.name.clone(), path, default })
}

fn is_default(engine: Engine, target: &Target, name: &str) -> Result<bool> {
    let Some(text) = file::read(&target.file)? else { return Ok(false) };
    Ok(match engine {
        Engine::Docker => docker::is_default(&docker::Files { settings: Some(text), record: None }, name),
        Engine::Containerd => containerd::is_default(&text, name),
        Engine::Crio => crio::is_default(&text, name),
        Engine::Podman => podman::is_default(&text, name),
    })
}

fn add(checker: &Checker, target: &Target, runtime: &Runtime) -> Result<Planned> {
    let (file, others) = (&target.file, &target.others);
    let before = file::read(file)?;
    let text_or = |head| before.as_deref().unwrap_or(head);
    let mut changes = Vec::new();
    let mut notes = Vec::new();
    let after = match checker.engine {
        Engine::Docker => {
            let (record, files) = docker_files(target, before.clone())?;
            let new = at(file, docker::with(&files, runtime))?;
            changes.push(FileChange { path: record, before: files.record, after: new.record });
            new.settings.unwrap_or_default()
        }
        Engine::Containerd => at(file, containerd::with(text_or(containerd::head(file)), file, runtime))?,
        Engine::Crio => {
            not_taken(others, &crio::entry(&runtime.name), runtime)?;
            at(file, crio::with(text_or(crio::HEAD), others, runtime))?
        }
        Engine::Podman => {
            not_taken(others, &podman::entry(&runtime.name), runtime)?;
            at(file, podman::with(text_or(podman::HEAD), others, runtime))?
        }
    };
    if runtime.default {
        let grants = environment::off(checker.engine)?;
        changes.push(grants.change);
        notes.extend(grants.note);
    }
    if checker.engine == Engine::Docker && runtime.default {
        known::may_name_default(file)?;
    }
    let checked = check::before(checker, target, &after, Some(runtime))
        .with_context(|| format!("{} stays as it is", file.display()))?;
    // The engine's own file is written last: variables are off before the first image runs by default.
    changes.push(FileChange { path: file.clone(), before, after: Some(after) });
    Ok(Planned { changes, notes, checked: Some(checked.by) })
}

/// Refuses a name that is another program's in the settings which the engine reads before the file: the last
/// one counts, so it would be lost.
fn not_taken(others: &[Table], entry: &[String], runtime: &Runtime) -> Result<()> {
    let is_ours = |path: &str| Path::new(path).file_name() == Path::new(&runtime.path).file_name();
    let found = others.iter().rev().find_map(|values| toml_text::value(values, entry));
    let paths: Vec<&str> = match found {
        None => return Ok(()),
        Some(Value::Array(paths)) => paths.iter().filter_map(Value::as_str).collect(),
        Some(of_crio) => of_crio.get("runtime_path").and_then(Value::as_str).into_iter().collect(),
    };
    ensure!(
        paths.iter().any(|path| is_ours(path)),
        "the runtime {:?} is {} already, by a file that is read before: take it out there, or choose another name \
         (--name)",
        runtime.name,
        paths.first().unwrap_or(&"another program")
    );
    Ok(())
}

fn not_put_back(engine: Engine, gone: &str) -> String {
    format!("the default runtime before, {gone}, is not put back: {engine} does not know it any more")
}

fn remove(asked: &Configure, checker: &Checker, target: &Target) -> Result<Planned> {
    let (engine, name) = (asked.engine, &asked.name);
    let before = file::read(&target.file)?;
    let was_default = is_default(engine, target, name)?;
    let (mut changes, mut notes) = (Vec::new(), Vec::new());
    let mut after = match (&before, engine) {
        (None, _) => None,
        (Some(_), Engine::Docker) => {
            let (record, files) = docker_files(target, before.clone())?;
            let (new, gone) = at(&target.file, docker::without(&files, name))?;
            notes.extend(gone.map(|gone| not_put_back(engine, &gone)));
            changes.push(FileChange { path: record, before: files.record, after: new.record });
            new.settings
        }
        (Some(text), Engine::Containerd) => at(&target.file, containerd::removed(text, name))?,
        (Some(text), Engine::Crio) => at(&target.file, crio::removed(text, name))?,
        (Some(text), Engine::Podman) => at(&target.file, podman::removed(text, name))?,
    };
    let check = |text: &str| {
        check::before(checker, target, text, None)
            .with_context(|| format!("{} stays as it is", target.file.display()))
    };
    let mut checked = after.as_deref().filter(|_| after != before).map(check).transpose()?;
    if let (true, Some(text), Some(gone)) =
        (was_default, &after, checked.as_ref().and_then(|checked| checked.unknown_default.clone()))
    {
        let without = match engine {
            Engine::Crio => crio::without_default(text),
            _ => containerd::without_default(text),
        };
        checked = Some(check(&without)?);
        after = Some(without);
        notes.push(not_put_back(engine, &gone));
    }
    let checked = checked.map(|checked| checked.by);
    // A runtime of ours by another name may be the default.
    let stays = match (&after, engine) {
        (None, _) => false,
        (Some(text), Engine::Docker) => docker::has_our_default(text),
        (Some(text), _) => !was_default && text.contains(WRAPPER),
    };
    // The engine's own file is written first: variables grant again only when no image runs by default.
    changes.insert(0, FileChange { path: target.file.clone(), before, after });
    let grants = environment::as_before(engine)?;
    if !stays && (was_default || grants.change.changes()) {
        notes.extend(grants.note);
        changes.push(grants.change);
    }
    notes.extend(default_share::kept());
    Ok(Planned { changes, notes, checked })
}

/// Path and text of the file beside daemon.json, with daemon.json's `settings`.
fn docker_files(target: &Target, settings: Option<String>) -> Result<(PathBuf, docker::Files)> {
    let mut path = OsString::from(&target.file);
    path.push(".before-gpushare");
    let path = PathBuf::from(path);
    let linked = path.symlink_metadata().is_ok_and(|file| !file.is_file());
    ensure!(!linked, "{} is not a regular file: delete it", path.display());
    let record = file::read(&path)?;
    Ok((path, docker::Files { settings, record }))
}

fn at<T>(path: &Path, edited: Result<T, Mistake>) -> Result<T> {
    edited.map_err(|mistake| anyhow::anyhow!("{}, {mistake}", path.display()))
}

/// What was changed in an engine's settings.
#[derive(Serialize, JsonSchema)]
pub struct Configured {
    engine: &'static str,
    /// The name that the runtime has there.
    runtime: String,
    /// The engine's settings file.
    config: String,
    changed: bool,
    /// Whether nothing was written.
    dry_run: bool,
    files: Vec<ChangedFile>,
    /// The engine's program that read the new settings; null where none could.
    checked_by: Option<String>,
    /// What makes the engine read them.
    restart: Option<&'static str>,
    notes: Vec<String>,
}

/// A file that was changed.
#[derive(Serialize, JsonSchema)]
struct ChangedFile {
    path: String,
    /// As `diff -u` shows it.
    diff: String,
}

fn tell(
    asked: &Configure,
    target: &Target,
    changes: &[FileChange],
    checked: Option<&str>,
    notes: &[String],
) -> Result<()> {
    let changed: Vec<&FileChange> = changes.iter().filter(|change| change.changes()).collect();
    let restart = match (asked.engine, asked.remove) {
        _ if changed.is_empty() => None,
        // On a reload dockerd 20.10 keeps a runtime that its file no longer names.
        (Engine::Docker, true) => Some("systemctl restart docker"),
        _ => target.restart,
    };
    if asked.output.json {
        let file = |change: &&FileChange| ChangedFile {
            path: change.path.to_string_lossy().into_owned(),
            diff: difference(change),
        };
        return Ok(answer::print(Configured {
            engine: asked.engine.name(),
            runtime: asked.name.clone(),
            config: target.file.to_string_lossy().into_owned(),
            changed: !changed.is_empty(),
            dry_run: asked.dry_run,
            files: changed.iter().map(file).collect(),
            checked_by: checked.map(str::to_owned),
            restart,
            notes: notes.to_vec(),
        })?);
    }
    let mut out = io::stdout().lock();
    if changed.is_empty() {
        let state = if asked.remove { "is not configured" } else { "is already configured" };
        writeln!(out, "{} {state} in {}", asked.name, target.file.display())?;
    }
    for change in &changed {
        if asked.dry_run {
            write!(out, "{}", difference(change))?;
            continue;
        }
        let deed = if change.after.is_none() { "deleted" } else { "wrote" };
        writeln!(out, "{deed:<9} {}", change.path.display())?;
    }
    if let Some(checked) = checked {
        writeln!(out, "{:<9} {checked}", "checked")?;
    }
    if let Some(restart) = restart {
        writeln!(out, "{:<9} {restart}", "next")?;
    }
    for note in notes {
        writeln!(out, "{:<9} {note}", "note")?;
    }
    Ok(())
}

fn difference(change: &FileChange) -> String {
    let name = |text: &Option<String>| match text {
        Some(_) => change.path.display().to_string(),
        None => "/dev/null".to_owned(),
    };
    let [before, after] = [&change.before, &change.after].map(|text| text.as_deref().unwrap_or_default());
    TextDiff::from_lines(before, after)
        .unified_diff()
        .header(&name(&change.before), &name(&change.after))
        .to_string()
}
