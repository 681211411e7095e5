//! Where engines' settings name a program of gpushare, whatever it is called there, for the scripts that take the
//! programs away: an engine whose runtime is gone starts and stops no container, and podman leaves out a hook that is
//! gone without a word.

use std::io::{self, Write};
use std::path::Path;

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
/// podman's list of names; those of programs there name none.
const NAMES_ALONE: &str = "runtime_supports_json";

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
        let mut files = target::all_usual(engine);
        for named in
            daemons.iter().filter(|daemon| daemon.engine == engine).filter_map(|daemon| daemon.named.clone())
        {
            match engine {
                // It is made anew from files that are looked at.
                Engine::Containerd if target::is_of_distribution(&named) => {}
                Engine::Containerd => files.extend(target::with_imports(&named)),
                _ => files.push(named),
            }
        }
        files.sort();
        files.dedup();
        files.into_iter().flat_map(move |file| of_file(engine, &file))
    });
    let of_slurm = OF_SLURM.iter().flat_map(|path| of_words("slurm", Path::new(path), WRAPPER));
    let hooks =
        OF_HOOKS.iter().flat_map(|folder| target::sorted(Path::new(folder), |name| name.ends_with(".json")));
    let of_hooks = hooks.flat_map(|path| of_words("podman", &path, HOOK));
    in_files.chain(daemons.iter().flat_map(of_flags)).chain(of_slurm).chain(of_hooks).collect()
}

/// What a file names that has the program's path between blanks or quotes, outside of comments.
fn of_words(engine: &'static str, path: &Path, program: &str) -> Vec<Registration> {
    let Ok(Some(text)) = file::read(path) else { return vec![] };
    let lines = text.lines().filter(|line| !line.trim_start().starts_with('#'));
    let words = lines.flat_map(|line| line.split([' ', '\t', '"', '\'', '=', ',']));
    let found = words.filter(|word| word.rsplit('/').next() == Some(program)).map(str::to_owned);
    let remedy = format!("take it out of {}", in_shell(&path.to_string_lossy()));
    found.take(1).map(|found| Registration { engine, program: Some(found), remedy: remedy.clone() }).collect()
}

/// What a file's settings name.
fn of_file(engine: Engine, path: &Path) -> Vec<Registration> {
    let unknown = |why: String| Registration {
        engine: engine.name(),
        program: None,
        remedy: format!(
            "look into {}, which cannot be understood ({why})",
            in_shell(&path.to_string_lossy())
        ),
    };
    let text = match file::read(path) {
        Ok(Some(text)) if text.contains(WRAPPER) => text,
        Ok(_) => return vec![],
        Err(error) => return vec![unknown(format!("{error:#}"))],
    };
    let values = match engine {
        Engine::Docker => serde_json::from_str(&text).map_err(|error| error.to_string()),
        _ => toml_text::values(&text)
            .map_err(|mistake| mistake.to_string())
            .and_then(|values| serde_json::to_value(values).map_err(|error| error.to_string())),
    };
    match values {
        Err(_) if is_comment_alone(&text) => vec![],
        Err(why) => vec![unknown(why)],
        Ok(values) => {
            let named = programs(&values, &mut vec![]);
            named.into_iter().map(|(name, program)| of_entry(engine, path, &text, &name, program)).collect()
        }
    }
}

/// Whether a text that is no TOML, as a template, names the program in comments alone.
fn is_comment_alone(text: &str) -> bool {
    text.lines().filter(|line| line.contains(WRAPPER)).all(|line| line.trim_start().starts_with('#'))
}

/// The program's paths in `values`, each with the key that stands for the runtime's name.
pub fn programs(values: &Value, way: &mut Vec<String>) -> Vec<(Option<String>, String)> {
    match values {
        Value::String(text) if text.rsplit('/').next() == Some(WRAPPER) => {
            let name = way.iter().rposition(|key| key == "runtimes").and_then(|at| way.get(at + 1));
            vec![(name.cloned(), text.clone())]
        }
        Value::Array(list) => list.iter().flat_map(|value| programs(value, way)).collect(),
        Value::Object(fields) => {
            let mut found = Vec::new();
            for (key, value) in fields.iter().filter(|(key, _)| *key != NAMES_ALONE) {
                way.push(key.clone());
                found.extend(programs(value, way));
                way.pop();
            }
            found
        }
        _ => vec![],
    }
}

fn of_entry(engine: Engine, path: &Path, text: &str, name: &Option<String>, program: String) -> Registration {
    let in_file = in_shell(&path.to_string_lossy());
    let remedy = match name.as_deref().filter(|name| is_ours(engine, path, text, name)) {
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

/// What a flag of an engine that runs names.
fn of_flags(daemon: &Daemon) -> Option<Registration> {
    let program = daemon.flags.iter().map(|flag| flag.rsplit('=').next().unwrap_or(flag));
    let program = program.into_iter().find(|value| value.rsplit('/').next() == Some(WRAPPER))?.to_owned();
    let remedy =
        format!("take {} out of the flags of the {} that runs", in_shell(&program), daemon.engine.program());
    Some(Registration { engine: daemon.engine.name(), program: Some(program), remedy })
}

#[cfg(test)]
mod tests {
    use std::fs;

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
        let list = "[engine]\nruntime_supports_json = ['gpushare-runtime']\n[engine.runtimes]\na = ['/a/gpushare-runtime']\n";
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
    fn command_lines_and_hooks_name_it_too() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        for (text, program, want) in [
            ("RunTimeRun=\"/usr/bin/gpushare-runtime run %n\"\n", WRAPPER, Some("/usr/bin/gpushare-runtime")),
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
    fn what_cannot_be_understood_may_name_it() {
        let found = of(Engine::Containerd, "{{ template }}\nBinaryName = '/usr/bin/gpushare-runtime\n");
        assert!(found[0].0.is_none() && found[0].1.starts_with("look into FILE, which"), "{found:?}");
        let folder = tempfile::tempdir().unwrap();
        assert!(of_file(Engine::Docker, folder.path())[0].program.is_none());
        assert_eq!(of_file(Engine::Docker, &folder.path().join("none")), []);
    }
}
