//! Where engines' settings name a program of gpushare, whatever it is called there, for the scripts that take
//! the programs away: an engine whose runtime is gone starts and stops no container, and podman leaves out a
//! hook that is gone without a word.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Result;
use serde_json::Value;

use super::known::{self, Daemon};
use super::target;
use super::{Engine, WRAPPER, containerd, crio, docker, docker_files, file, podman, toml_text};
use crate::program::in_shell;

/// Engines whose settings may name the runtime.
const ENGINES: [Engine; 4] = [Engine::Docker, Engine::Containerd, Engine::Crio, Engine::Podman];
/// The hook's program, which files of podman and CRI-O name.
const HOOK: &str = "gpushare-hook";
/// Files of Slurm that name the runtime in command lines.
const OF_SLURM: [&str; 2] = ["/etc/slurm/oci.conf", "/etc/slurm-llnl/oci.conf"];
/// Folders of the files that name hooks.
const OF_HOOKS: [&str; 2] = ["/usr/share/containers/oci/hooks.d", "/etc/containers/oci/hooks.d"];
/// What the runtime is called where nobody chose another name.
const USUAL_NAME: &str = "gpushare";

/// A place that names the program.
#[derive(Debug, PartialEq, Eq)]
struct Registration {
    engine: &'static str,
    /// The program's path there; `None` where it is not known, since the file cannot be understood.
    program: Option<String>,
    /// What takes it out.
    remedy: String,
}

/// Prints a line for each: the program or `-`, the engine, and what takes it out, with tabs between them.
///
/// # Errors
/// When nobody reads it.
pub fn print() -> Result<()> {
    let word = |text: &str| text.replace(char::is_control, "?");
    let mut out = io::stdout().lock();
    for found in registrations() {
        let program = found.program.as_deref().unwrap_or("-");
        writeln!(out, "{}\t{}\t{}", word(program), found.engine, word(&found.remedy))?;
    }
    Ok(())
}

fn registrations() -> Vec<Registration> {
    let daemons = known::daemons();
    let in_files = ENGINES.into_iter().flat_map(|engine| {
        let of_daemons = daemons.iter().filter(|daemon| daemon.engine == engine).flat_map(files_of);
        let files: BTreeSet<PathBuf> = target::all_usual(engine).into_iter().chain(of_daemons).collect();
        files.into_iter().flat_map(move |file| of_file(engine, &file))
    });
    let of_slurm = OF_SLURM.iter().flat_map(|path| of_words("slurm", Path::new(path), WRAPPER));
    let hooks =
        OF_HOOKS.iter().flat_map(|folder| target::sorted(Path::new(folder), |name| name.ends_with(".json")));
    let of_hooks = hooks.flat_map(|path| of_words("podman", &path, HOOK));
    in_files.chain(daemons.iter().flat_map(of_flags)).chain(of_slurm).chain(of_hooks).collect()
}

/// The settings that the flags of an engine name.
fn files_of(daemon: &Daemon) -> Vec<PathBuf> {
    let named = daemon.named.iter().flat_map(|named| match daemon.engine {
        // It is made anew from files that are looked at.
        Engine::Containerd if target::is_of_distribution(named) => vec![],
        Engine::Containerd => target::with_imports(named),
        _ => vec![named.clone()],
    });
    let drop_ins = daemon.drop_ins().map(|folder| target::sorted(folder, |name| name.ends_with(".conf")));
    named.chain(drop_ins.into_iter().flatten()).collect()
}

/// What a file names that has the program's path between blanks or quotes, outside of comments.
fn of_words(engine: &'static str, path: &Path, program: &str) -> Vec<Registration> {
    let text = match file::read(path) {
        Ok(text) => text.unwrap_or_default(),
        Err(error) => return vec![unknown(engine, path, &format!("{error:#}"))],
    };
    let lines = text.lines().filter(|line| !line.trim_start().starts_with('#'));
    let words = lines.flat_map(|line| line.split([' ', '\t', '"', '\'', '=', ',']));
    let found: BTreeSet<&str> = words.filter(|word| is_path_of(word, program)).collect();
    let remedy = format!("take it out of {}", in_shell(&path.to_string_lossy()));
    let of = |found: &str| Registration { engine, program: Some(found.to_owned()), remedy: remedy.clone() };
    found.into_iter().map(of).collect()
}

fn is_path_of(word: &str, program: &str) -> bool {
    word.rsplit_once('/').is_some_and(|(_, name)| name == program)
}

/// A file of which nobody can tell what it names.
fn unknown(engine: &'static str, path: &Path, why: &str) -> Registration {
    let path = in_shell(&path.to_string_lossy());
    Registration {
        engine,
        program: None,
        remedy: format!("look into {path}, which cannot be understood ({why})"),
    }
}

/// What a file's settings name.
fn of_file(engine: Engine, path: &Path) -> Vec<Registration> {
    let text = match file::read(path) {
        Ok(Some(text)) => text,
        Ok(None) => return vec![],
        Err(error) => return vec![unknown(engine.name(), path, &format!("{error:#}"))],
    };
    match values(engine, &text) {
        Err(_) if is_silent(&text) => vec![],
        Err(why) => vec![unknown(engine.name(), path, &format!("{why:#}"))],
        Ok(values) => {
            let named = programs(&values);
            named
                .into_iter()
                .map(|(name, program)| of_entry(engine, path, &text, name.as_deref(), program))
                .collect()
        }
    }
}

/// Whether a text that cannot be understood names the program nowhere but in comments.
fn is_silent(text: &str) -> bool {
    text.lines().filter(|line| line.contains(WRAPPER)).all(|line| line.trim_start().starts_with('#'))
}

/// An engine's settings, of its own form.
///
/// # Errors
/// When the text is not of that form.
pub fn values(engine: Engine, text: &str) -> Result<Value> {
    let text = text.trim_start_matches('\u{feff}');
    match engine {
        Engine::Docker => Ok(serde_json::from_str(text)?),
        _ => Ok(serde_json::to_value(toml_text::values(text)?)?),
    }
}

/// The program's paths in `values`, each with the key that stands for the runtime's name.
pub fn programs(values: &Value) -> Vec<(Option<String>, String)> {
    programs_below(values, &mut vec![])
}

/// The same for the values at the end of the keys `way`.
fn programs_below(values: &Value, way: &mut Vec<String>) -> Vec<(Option<String>, String)> {
    match values {
        Value::String(text) => {
            let is_named = is_path_of(text, WRAPPER) || is_found_in_path(text, way);
            let program = if is_named { Some(text.clone()) } else { behind_link(text) };
            let name = way.iter().rposition(|key| key == "runtimes").and_then(|at| way.get(at + 1));
            program.map(|program| (name.cloned(), program)).into_iter().collect()
        }
        Value::Array(list) => list.iter().flat_map(|value| programs_below(value, way)).collect(),
        Value::Object(fields) => {
            let mut found = Vec::new();
            for (key, value) in fields {
                way.push(key.clone());
                found.extend(programs_below(value, way));
                way.pop();
            }
            found
        }
        _ => vec![],
    }
}

/// The program to which a path of another name leads.
fn behind_link(path: &str) -> Option<String> {
    let real = Path::new(path).is_absolute().then(|| fs::canonicalize(path).ok())??;
    real.file_name().is_some_and(|name| name == WRAPPER).then(|| real.to_string_lossy().into_owned())
}

/// Whether a word that is no path names the program: an engine looks for that in its PATH. Elsewhere, as in
/// podman's lists of what runtimes can, it is a runtime's name.
fn is_found_in_path(word: &str, way: &[String]) -> bool {
    const PROGRAM: [&str; 3] = ["path", "BinaryName", "runtime_path"];
    word == WRAPPER && way.last().is_some_and(|key| PROGRAM.contains(&key.as_str()))
}

fn of_entry(engine: Engine, path: &Path, text: &str, name: Option<&str>, program: String) -> Registration {
    let in_file = in_shell(&path.to_string_lossy());
    let remedy = match name.filter(|name| is_ours(engine, path, text, name)) {
        None => format!("take {} out of {in_file}", in_shell(&program)),
        Some(name) => {
            let mut command = format!("gpushare configure {engine} --remove");
            if name != USUAL_NAME {
                command += &format!(" --name {}", in_shell(name));
            }
            if !target::find(engine, None).is_ok_and(|target| target.file == path) {
                command += &format!(" --config {in_file}");
            }
            format!("run `{command}`")
        }
    };
    Registration { engine: engine.name(), program: Some(program), remedy }
}

/// Whether `gpushare configure --remove` takes the runtime out of this file.
fn is_ours(engine: Engine, path: &Path, text: &str, name: &str) -> bool {
    let without = match engine {
        Engine::Docker => target::find(engine, Some(path)).ok().and_then(|target| {
            let (_, files) = docker_files(&target, Some(text.to_owned())).ok()?;
            Some(docker::without(&files, name).ok()?.0.settings)
        }),
        Engine::Containerd => containerd::removed(text, name).ok(),
        Engine::Crio => crio::removed(text, name).ok(),
        Engine::Podman => podman::removed(text, name).ok(),
    };
    without.is_some_and(|rest| rest.as_deref() != Some(text))
}

/// What the flags of an engine that runs name.
fn of_flags(daemon: &Daemon) -> Vec<Registration> {
    let values = daemon.flags.iter().map(|flag| flag.rsplit('=').next().unwrap_or(flag));
    let found: BTreeSet<&str> = values.filter(|value| is_path_of(value, WRAPPER)).collect();
    let of = |program: &str| {
        let engine = daemon.engine;
        let remedy =
            format!("take {} out of the flags of the {} that runs", in_shell(program), engine.program());
        Registration { engine: engine.name(), program: Some(program.to_owned()), remedy }
    };
    found.into_iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(engine: Engine, text: &str) -> Vec<(Option<String>, String)> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("settings");
        fs::write(&path, text).unwrap();
        let short = |text: String| text.replace(&*path.to_string_lossy(), "FILE");
        of_file(engine, &path).into_iter().map(|found| (found.program, short(found.remedy))).collect()
    }

    #[test]
    fn every_place_that_names_the_program_is_told_with_what_takes_it_out() {
        let one = |program: &str, remedy: &str| vec![(Some(program.to_owned()), remedy.to_owned())];
        let docker =
            r#"{"runtimes": {"gpu": {"path": "/usr/bin/gpushare-runtime"}, "b": {"path": "/usr/bin/crun"}}}"#;
        let remedy = "run `gpushare configure docker --remove --name gpu --config FILE`";
        assert_eq!(of(Engine::Docker, docker), one("/usr/bin/gpushare-runtime", remedy));
        let by_hand = "[plugins.x.containerd.runtimes.mine.options]\nBinaryName = '/opt/gpushare-runtime'\n";
        assert_eq!(
            of(Engine::Containerd, by_hand),
            one("/opt/gpushare-runtime", "take /opt/gpushare-runtime out of FILE")
        );
        let list = "[engine]\nruntime_supports_json = ['gpushare-runtime']\n\
                    [engine.runtimes]\na = ['/a/gpushare-runtime']\n";
        assert_eq!(
            of(Engine::Podman, list),
            one("/a/gpushare-runtime", "run `gpushare configure podman --remove --name a --config FILE`")
        );
        for (engine, text) in [
            (Engine::Docker, ""),
            (Engine::Docker, "{\"runtimes\": null}"),
            (Engine::Docker, "{\"debug\": true, \"debug\": false} x"),
            (Engine::Containerd, "# /usr/bin/gpushare-runtime\n{{ template }}\n"),
            (Engine::Containerd, "{{ template }}\n"),
        ] {
            assert_eq!(of(engine, text), [], "{text}");
        }
    }

    #[test]
    fn a_link_of_another_name_is_the_program_behind_it() {
        let folder = tempfile::tempdir().unwrap();
        let [program, link] = [WRAPPER, "other name"].map(|name| folder.path().join(name));
        fs::write(&program, "").unwrap();
        std::os::unix::fs::symlink(&program, &link).unwrap();
        let text = serde_json::json!({"runtimes": {"gpushare": {"path": link}}}).to_string();
        let real = fs::canonicalize(&program).unwrap().to_string_lossy().into_owned();
        assert_eq!(of(Engine::Docker, &text)[0].0, Some(real));
    }

    #[test]
    fn command_lines_and_hooks_name_it_too() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        for (text, program, want) in [
            ("RunTimeRun=\"/usr/bin/gpushare-runtime run %n\"\n", WRAPPER, Some("/usr/bin/gpushare-runtime")),
            (
                "RunTimeQuery=/opt/x\nRunTimeRun=\"/usr/bin/gpushare-runtime run\"\n",
                WRAPPER,
                Some("/usr/bin/gpushare-runtime"),
            ),
            ("#RunTimeRun=\"/usr/bin/gpushare-runtime run %n\"\n", WRAPPER, None),
            (r#"{"hook": {"path": "/usr/bin/gpushare-hook"}}"#, HOOK, Some("/usr/bin/gpushare-hook")),
            (r#"{"hook": {"path": "/usr/bin/other"}}"#, HOOK, None),
        ] {
            fs::write(&path, text).unwrap();
            let found = of_words("slurm", &path, program);
            assert_eq!(found.first().and_then(|found| found.program.as_deref()), want, "{text}");
        }
    }

    #[test]
    fn each_of_several_programs_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let text = "RunTimeQuery=/opt/x/gpushare-runtime state\nRunTimeRun=/usr/bin/gpushare-runtime run\n";
        fs::write(&path, text).unwrap();
        assert_eq!(of_words("slurm", &path, WRAPPER).len(), 2);
        fs::write(&path, b"# \xff\nRunTimeRun=/usr/bin/gpushare-runtime run\n").unwrap();
        assert!(of_words("slurm", &path, WRAPPER)[0].program.is_none(), "nobody can tell");
    }

    #[test]
    fn what_cannot_be_understood_may_name_it() {
        let found = of(Engine::Containerd, "{{ template }}\nBinaryName = '/usr/bin/gpushare-runtime\n");
        assert!(found[0].0.is_none() && found[0].1.starts_with("look into FILE, which"), "{found:?}");
        let folder = tempfile::tempdir().unwrap();
        assert!(of_file(Engine::Docker, folder.path())[0].program.is_none());
        assert_eq!(of_file(Engine::Docker, &folder.path().join("none")), []);
    }
}
