//! Which engines of this machine know the runtime, by their settings and the flags of those that run; for
//! `gpushare doctor`.

use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use procfs::process::Process;
use serde_json::Value;
use toml::Table;

use super::registered::{programs, values};
use super::target::{self, Target};
use super::{Engine, WRAPPER, check, file};
use crate::program;

/// Engines that know runtimes by their settings; podman takes one by its path as well.
const ENGINES: [Engine; 3] = [Engine::Docker, Engine::Containerd, Engine::Crio];
/// Settings that dockerd writes for a containerd of its own.
const OF_DOCKER: &str = "docker/containerd/containerd.toml";
/// Programs that run pods by containerd or CRI-O, with the kubelet in them.
const KUBELETS: [&str; 2] = ["kubelet", "kubelite"];

/// An engine of this machine.
pub struct Known {
    pub engine: Engine,
    /// The settings that it reads, where a flag names them.
    pub named: Option<PathBuf>,
    /// Whether its settings name our program as a runtime; else why nobody can tell.
    pub knows: Result<bool>,
}

impl Known {
    /// The command that makes the engine know the runtime.
    pub fn remedy(&self) -> String {
        match &self.named {
            None => format!("gpushare configure {}", self.engine),
            Some(file) => {
                let edited = target::edited_for(self.engine, file);
                format!("gpushare configure {} --config {edited}", self.engine)
            }
        }
    }
}

/// The engines that run or are installed on this machine. Left out is containerd where docker alone uses it.
pub fn engines() -> Vec<Known> {
    let daemons = daemons();
    let has_docker = check::program(Engine::Docker).is_some();
    let serves_pods = host_processes().any(|process| runs_one_of(&process, &KUBELETS));
    let of_docker_alone = |known: &Known| {
        known.engine == Engine::Containerd && known.named.is_none() && has_docker && !serves_pods
    };
    let known = ENGINES.iter().flat_map(|engine| of(*engine, &daemons));
    known.filter(|known| matches!(known.knows, Ok(true)) || !of_docker_alone(known)).collect()
}

/// The engines that run, but for a containerd that docker has of its own.
pub fn daemons() -> Vec<Daemon> {
    host_processes().filter_map(|process| Daemon::of(&process)).collect()
}

/// Refuses a default runtime in the file of a dockerd that has one by a flag: it would not start again.
pub fn may_name_default(file: &Path) -> Result<()> {
    const FLAG: &str = "--default-runtime";
    let reads = |daemon: &Daemon| {
        let read = daemon.named.as_deref().unwrap_or(target::usual(Engine::Docker));
        daemon.engine == Engine::Docker && file::resolve(read).is_ok_and(|read| read == file)
    };
    let has = |flag: &String| flag.split('=').next() == Some(FLAG);
    let found = daemons().into_iter().find(|daemon| reads(daemon) && daemon.flags.iter().any(has));
    ensure!(
        found.is_none(),
        "the dockerd that runs has the flag {FLAG}, and would not start again beside a default runtime in {}: \
         take the flag out of its unit and restart it first",
        file.display()
    );
    Ok(())
}

/// Whether a running docker says that it has no runtime of ours, by whatever name.
pub fn docker_lacks_the_runtime() -> bool {
    let mut info = Command::new(Engine::Docker.program());
    program::output(info.args(["info", "--format", "{{json .Runtimes}}"])).is_ok_and(|output| {
        let runtimes = String::from_utf8_lossy(&output.stdout);
        runtimes.trim_start().starts_with('{') && !runtimes.contains(WRAPPER)
    })
}

/// The engine as it runs, once for each of its settings, else as it would.
fn of(engine: Engine, daemons: &[Daemon]) -> Vec<Known> {
    let installed = Daemon { engine, named: None, flags: vec![] };
    let mut running: Vec<&Daemon> = daemons.iter().filter(|daemon| daemon.engine == engine).collect();
    if running.is_empty() && check::program(engine).is_some() {
        running.push(&installed);
    }
    running.into_iter().map(Daemon::known).collect()
}

/// An engine that runs.
#[derive(Debug, PartialEq, Eq)]
pub struct Daemon {
    pub engine: Engine,
    /// Its settings file, where a flag names one.
    pub named: Option<PathBuf>,
    /// Its words on the command line.
    pub flags: Vec<String>,
}

impl Daemon {
    /// The folder of drop-ins that a flag of CRI-O names.
    pub fn drop_ins(&self) -> Option<&Path> {
        let is_crio = self.engine == Engine::Crio;
        is_crio.then(|| value_of(&self.flags, &["--config-dir", "-d"]))?.map(Path::new)
    }

    fn of(process: &Process) -> Option<Self> {
        let arguments = process.cmdline().ok()?;
        let (program, flags) = arguments.split_first()?;
        let engine = ENGINES.into_iter().find(|engine| is_named(program, engine.program()))?;
        let named = config(engine, flags).map(|path| match process.cwd() {
            Ok(folder) => folder.join(path),
            Err(_) => PathBuf::from(path),
        });
        let of_docker = named.as_ref().is_some_and(|path| path.ends_with(OF_DOCKER));
        (!of_docker).then(|| Self { engine, named, flags: flags.to_vec() })
    }

    fn known(&self) -> Known {
        let knows = || {
            let target = match self.engine {
                // Where one would write is another question.
                Engine::Containerd => {
                    target::read(self.named.as_deref().unwrap_or(target::usual(self.engine)))
                }
                _ => target::find(self.engine, self.named.as_deref())?,
            };
            let is_ours = |flag: &String| is_named(flag.rsplit('=').next().unwrap_or(flag), WRAPPER);
            Ok(self.flags.iter().any(is_ours) || knows(self.engine, &target)?)
        };
        Known { engine: self.engine, named: self.named.clone(), knows: knows() }
    }
}

/// The file that an engine's flags name as its settings, where it is another than its usual one.
fn config(engine: Engine, flags: &[String]) -> Option<&str> {
    let path = value_of(
        flags,
        match engine {
            Engine::Docker => &["--config-file"],
            _ => &["--config", "-config", "-c"],
        },
    )?;
    (Path::new(path) != target::usual(engine)).then_some(path)
}

/// The value of the first flag of one of these names.
fn value_of<'a>(flags: &'a [String], names: &[&str]) -> Option<&'a str> {
    let mut flags = flags.iter();
    let value = flags.find_map(|flag| match flag.split_once('=') {
        Some((name, value)) => names.contains(&name).then_some(Some(value)),
        None => names.contains(&flag.as_str()).then_some(None),
    })?;
    value.or_else(|| flags.next().map(String::as_str))
}

/// Running engines and kubelets that belong to root and are in no container. A program of another user can
/// take any name, and so can a set-user-id program; neither counts.
fn host_processes() -> impl Iterator<Item = Process> {
    let here = Process::myself().ok().and_then(|process| place(&process));
    let pids = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    // Reading the name first keeps this fast on a machine with thousands of processes.
    let named = pids.filter(|pid| {
        let name = std::fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
        let mut wanted = ENGINES.iter().map(|engine| engine.program()).chain(KUBELETS);
        wanted.any(|program| name.trim_ascii_end() == program.as_bytes())
    });
    named
        .filter_map(|pid| Process::new(pid).ok())
        .filter(move |process| is_of_root(process) && here.is_some() && place(process) == here)
}

fn is_of_root(process: &Process) -> bool {
    const SET_USER_ID: u32 = 0o4000;
    let program = std::fs::metadata(format!("/proc/{}/exe", process.pid()));
    let users = process.status().map(|status| [status.ruid, status.euid, status.suid, status.fuid]);
    users.is_ok_and(|users| users == [0; 4]) && program.is_ok_and(|file| file.mode() & SET_USER_ID == 0)
}

/// What tells a host's process from a container's: the pid and user namespaces, and the root folder.
fn place(process: &Process) -> Option<[u64; 4]> {
    let namespaces = process.namespaces().ok()?.0;
    let of = |name: &str| namespaces.get(OsStr::new(name)).map(|namespace| namespace.identifier);
    let root = std::fs::metadata(format!("/proc/{}/root/", process.pid())).ok()?;
    Some([of("pid")?, of("user")?, root.dev(), root.ino()])
}

fn runs_one_of(process: &Process, programs: &[&str]) -> bool {
    let arguments = process.cmdline().unwrap_or_default();
    arguments.first().is_some_and(|first| programs.iter().any(|program| is_named(first, program)))
}

fn is_named(path: &str, program: &str) -> bool {
    path.rsplit('/').next() == Some(program)
}

/// Whether the settings name our program as a runtime.
fn knows(engine: Engine, target: &Target) -> Result<bool> {
    let mut paths = vec![target.file.clone(), target.main.clone()];
    if engine == Engine::Containerd {
        paths.extend(target::imports(&target.main)?.iter().flat_map(target::Import::files));
    }
    let mut settings: Vec<Value> = target.others.iter().map(json).collect::<Result<_>>()?;
    for path in paths {
        let Some(text) = file::read(&path)? else { continue };
        let values = values(engine, &text);
        settings.push(values.with_context(|| format!("{} cannot be understood", path.display()))?);
    }
    Ok(settings.iter().any(|values| !programs(values).is_empty()))
}

fn json(values: &Table) -> Result<Value> {
    Ok(serde_json::to_value(values)?)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn an_engine_knows_the_runtime_when_its_settings_name_our_program() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("settings");
        let target = target::find(Engine::Docker, Some(&path)).unwrap();
        assert!(!knows(Engine::Docker, &target).unwrap(), "no file");
        for (engine, text, want) in [
            (
                Engine::Docker,
                r#"{"runtimes": {"gpushare": {"path": "/usr/bin/gpushare-runtime"}}}"#,
                Some(true),
            ),
            (Engine::Docker, r#"{"runtimes": {"gpushare-runtime": {"path": "/usr/bin/crun"}}}"#, Some(false)),
            (Engine::Docker, "{", None),
            (Engine::Docker, "{}", Some(false)),
            (Engine::Docker, "\u{feff}{}", Some(false)),
            (Engine::Containerd, "[a.options]\nBinaryName = '/usr/bin/gpushare-runtime'\n", Some(true)),
            (Engine::Containerd, "# /usr/bin/gpushare-runtime\nversion = 2\n", Some(false)),
        ] {
            fs::write(&path, text).unwrap();
            assert_eq!(knows(engine, &target).ok(), want, "{text}");
        }
    }

    #[test]
    fn what_containerd_imports_counts() {
        let folder = tempfile::tempdir().unwrap();
        let main = folder.path().join("config.toml");
        fs::write(&main, "imports = ['conf.d/*.toml']\nversion = 2\n").unwrap();
        assert!(!knows(Engine::Containerd, &target::read(&main)).unwrap());
        fs::create_dir(folder.path().join("conf.d")).unwrap();
        fs::write(folder.path().join("conf.d/a.toml"), "[a]\nb = '/opt/gpushare-runtime'\n").unwrap();
        assert!(knows(Engine::Containerd, &target::read(&main)).unwrap());
    }

    #[test]
    fn the_settings_of_an_engine_that_runs_are_those_its_flags_name() {
        for (engine, flags, want) in [
            (Engine::Docker, "-H fd:// --containerd=/run/containerd/containerd.sock", None),
            (Engine::Docker, "--config-file /srv/daemon.json --debug", Some("/srv/daemon.json")),
            (Engine::Docker, "--config-file=daemon.json", Some("daemon.json")),
            (Engine::Docker, "--config-file", None),
            (Engine::Docker, "--config-file /etc/docker/daemon.json", None),
            (Engine::Containerd, "-c /etc/k0s/containerd.toml -l info", Some("/etc/k0s/containerd.toml")),
            (Engine::Containerd, "--config=/etc/containerd/config.toml", None),
            (Engine::Crio, "--config /srv/crio.conf", Some("/srv/crio.conf")),
        ] {
            let flags: Vec<String> = flags.split(' ').map(str::to_owned).collect();
            assert_eq!(config(engine, &flags), want, "{flags:?}");
        }
    }

    #[test]
    fn the_remedy_names_the_file_that_lasts() {
        let known =
            |engine, named: Option<&str>| Known { engine, named: named.map(PathBuf::from), knows: Ok(false) };
        for (known, want) in [
            (known(Engine::Docker, None), "gpushare configure docker"),
            (known(Engine::Docker, Some("/srv/d.json")), "gpushare configure docker --config /srv/d.json"),
            (
                known(Engine::Containerd, Some("/var/lib/rancher/k3s/agent/etc/containerd/config.toml")),
                "gpushare configure containerd --config /var/lib/rancher/k3s/agent/etc/containerd/\
                 config.toml.tmpl (config-v3.toml.tmpl for containerd 2)",
            ),
        ] {
            assert_eq!(known.remedy(), want);
        }
    }
}
