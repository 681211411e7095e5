//! Asks the engine itself about its settings: about a copy before they are written, and about the real ones
//! afterwards.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, Result, bail, ensure};
use toml::Table;

use super::target::{self, Target};
use super::toml_text;
use super::{Engine, Runtime, containerd, crio};
use crate::program;

/// Where engines are installed. They are searched instead of the caller's PATH, which may name other folders.
/// What an administrator installed comes before what the distribution has.
const FOLDERS: [&str; 6] = ["/usr/local/bin", "/usr/local/sbin", "/opt/bin", "/usr/bin", "/usr/sbin", "/bin"];

/// What an engine said of settings that it took.
#[derive(Default)]
pub struct Checked {
    /// By which command it checked them, or why only their syntax was checked, in words for the user.
    pub by: String,
    /// The default runtime that they name and nothing in them describes: the engine starts no container with
    /// them. Only looked for where no runtime of ours has to be found.
    pub unknown_default: Option<String>,
}

impl Checked {
    fn by(by: impl Into<String>) -> Self {
        Self { by: by.into(), unknown_default: None }
    }
}

/// Asks the engine about `text` as its settings, before anything is written. `runtime` has to be found in
/// them; `None` after it was taken out.
pub fn before(checker: &Checker, target: &Target, text: &str, runtime: Option<&Runtime>) -> Result<Checked> {
    let Checker { engine, program } = checker;
    let Some(program) = program else {
        return Ok(Checked::by(format!("syntax only: no {} here to ask", engine.program())));
    };
    if containerd::is_template(&target.file) {
        return Ok(Checked::by("syntax only: the file is a template"));
    }
    let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
    let staged = |name: &str, text: &str| -> Result<PathBuf> {
        let path = folder.path().join(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(path)
    };
    match engine {
        Engine::Docker => docker(program, &staged("daemon.json", text)?).map(Checked::by),
        Engine::Containerd => {
            let file = staged("config.toml", text)?;
            let main = staged("main.toml", &with_imports(target, &file)?)?;
            merged_containerd(program, &main, runtime)
        }
        Engine::Crio => {
            let file = staged("crio.conf", text)?;
            merged_crio(program, target, &file, folder.path(), runtime)
        }
        Engine::Podman => {
            podman(program, Some(&staged("containers.conf", text)?), folder.path(), runtime).map(Checked::by)
        }
    }
}

/// Asks the engine whether the runtime is in the settings that it reads now.
pub fn after(checker: &Checker, target: &Target, runtime: &Runtime) -> Result<()> {
    let Checker { engine, program } = checker;
    let Some(program) = program.as_ref().filter(|_| !containerd::is_template(&target.file)) else {
        return Ok(());
    };
    let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
    match engine {
        Engine::Containerd => merged_containerd(program, &target.main, Some(runtime)).map(drop),
        Engine::Podman if target.usual => podman(program, None, folder.path(), Some(runtime)).map(drop),
        Engine::Crio if target.usual => {
            merged_crio(program, target, &target.file, folder.path(), Some(runtime)).map(drop)
        }
        // dockerd reads only the file that was checked before.
        _ => Ok(()),
    }
}

/// An engine, and the program that is asked about its settings.
pub struct Checker {
    pub engine: Engine,
    /// `None` where none is installed.
    pub program: Option<PathBuf>,
}

impl Checker {
    /// `named` is the program that the caller chose.
    pub fn new(engine: Engine, named: Option<&Path>) -> Result<Self> {
        if let Some(named) = named {
            ensure!(
                named.is_absolute() && named.is_file(),
                "{} is no program of {engine}; name it by its absolute path",
                named.display()
            );
        }
        let program = named.map(Path::to_path_buf).or_else(|| program(engine));
        Ok(Self { engine, program })
    }
}

/// The engine's program. Of several that are installed it is the one that runs, since it will read the
/// settings; else it is the first.
pub fn program(engine: Engine) -> Option<PathBuf> {
    let named = FOLDERS.iter().map(|folder| Path::new(folder).join(engine.program()));
    chosen(named.filter(|path| path.is_file()).collect(), running)
}

/// Chooses one of `installed`. A running process only chooses among them and adds no program: anybody may run
/// a program of an engine's name.
fn chosen(installed: Vec<PathBuf>, runs: impl Fn(&Path) -> bool) -> Option<PathBuf> {
    let running = installed.iter().position(|program| installed.len() > 1 && runs(program));
    installed.into_iter().nth(running.unwrap_or(0))
}

/// Whether a process of this machine runs `program`.
fn running(program: &Path) -> bool {
    let identity = |path: &Path| fs::metadata(path).ok().map(|file| (file.dev(), file.ino()));
    let ours = identity(program);
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    ours.is_some() && processes.map(|process| process.path().join("exe")).any(|exe| identity(&exe) == ours)
}

fn output(command: &mut Command) -> Result<Output> {
    let path = FOLDERS.join(":");
    program::output(command.env("PATH", path))
        .with_context(|| format!("cannot run {}", Path::new(command.get_program()).display()))
}

/// The last line of a program's stderr, which names the cause.
fn complaint(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    let line = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("no reason given");
    line.trim().to_owned()
}

fn docker(program: &Path, file: &Path) -> Result<String> {
    let output = output(Command::new(program).arg("--validate").arg("--config-file").arg(file))?;
    if output.status.success() {
        return Ok("dockerd --validate".to_owned());
    }
    if String::from_utf8_lossy(&output.stderr).contains("unknown flag: --validate") {
        return Ok("syntax only: this dockerd has no --validate (docker 23 and later have it)".to_owned());
    }
    bail!("dockerd would not take the new settings: {}", complaint(&output))
}

/// The main file's text as containerd would read it, with the new file in its place.
fn with_imports(target: &Target, file: &Path) -> Result<String> {
    let main = if target.main == target.file { file } else { &target.main };
    let text = fs::read_to_string(main).with_context(|| format!("cannot read {}", main.display()))?;
    let mut document: toml_edit::DocumentMut =
        text.parse().with_context(|| format!("cannot read {}", main.display()))?;
    let imports = target::imports(&target.main)?;
    let mut files: Vec<PathBuf> = imports.iter().flat_map(target::Import::files).collect();
    if imports.iter().any(|import| import.holds(&target.file)) {
        files.retain(|path| *path != target.file);
        let at = files.partition_point(|path| *path < target.file);
        files.insert(at, file.to_path_buf());
    }
    if !imports.is_empty() {
        let list: toml_edit::Array = files.iter().map(|path| path.to_string_lossy().into_owned()).collect();
        document["imports"] = toml_edit::value(list);
    }
    Ok(document.to_string())
}

fn merged_containerd(program: &Path, main: &Path, runtime: Option<&Runtime>) -> Result<Checked> {
    let output = output(Command::new(program).arg("--config").arg(main).args(["config", "dump"]))?;
    ensure!(output.status.success(), "containerd would not take the new settings: {}", complaint(&output));
    let merged = merged(&output)?;
    if let Some(runtime) = runtime {
        containerd::refuse_disabled_cri("", &merged).map_err(|mistake| anyhow::anyhow!(mistake.message))?;
        refuse(program, containerd::fault(&merged, runtime))?;
    }
    let unknown_default = runtime.map_or_else(|| containerd::unknown_default(&merged), |_| None);
    Ok(Checked { by: "containerd config dump".to_owned(), unknown_default })
}

fn merged(output: &Output) -> Result<Table> {
    toml_text::values(&String::from_utf8_lossy(&output.stdout))
        .map_err(|mistake| anyhow::anyhow!("cannot read what the engine made of its settings: {mistake}"))
}

fn refuse(program: &Path, fault: Option<String>) -> Result<()> {
    match fault {
        None => Ok(()),
        Some(fault) => bail!(
            "{fault}: another file that it reads decides; look for `imports` and drop-ins, and name the file that \
             counts with --config; {} was asked: where another one reads the file, name it with --engine-path",
            program.display()
        ),
    }
}

fn merged_crio(
    program: &Path,
    target: &Target,
    file: &Path,
    scratch: &Path,
    runtime: Option<&Runtime>,
) -> Result<Checked> {
    let folder = target
        .file
        .parent()
        .filter(|_| target.file != target.main)
        .unwrap_or(Path::new("/etc/crio/crio.conf.d"));
    let drop_ins = scratch.join("crio.conf.d");
    fs::create_dir(&drop_ins).context("cannot make a temporary folder")?;
    for entry in fs::read_dir(folder).into_iter().flatten().flatten().filter(|entry| entry.path().is_file()) {
        fs::copy(entry.path(), drop_ins.join(entry.file_name())).context("cannot copy the drop-ins")?;
    }
    let main = if target.file == target.main {
        file
    } else {
        let name = target.file.file_name().unwrap_or_default();
        fs::copy(file, drop_ins.join(name)).context("cannot copy the drop-in")?;
        &target.main
    };
    let mut command = Command::new(program);
    if main.exists() {
        command.arg("--config").arg(main);
    }
    let output = output(command.arg("--config-dir").arg(&drop_ins).arg("config"))?;
    ensure!(output.status.success(), "CRI-O would not take the new settings: {}", complaint(&output));
    let merged = merged(&output)?;
    if let Some(runtime) = runtime {
        refuse(program, crio::fault(&merged, runtime))?;
    }
    let unknown_default = runtime.map_or_else(|| crio::unknown_default(&merged), |_| None);
    Ok(Checked { by: "crio config".to_owned(), unknown_default })
}

/// podman has no check of its own. For `info` it reads all of its settings and asks the runtime for its
/// version.
fn podman(program: &Path, file: Option<&Path>, scratch: &Path, runtime: Option<&Runtime>) -> Result<String> {
    let mut command = Command::new(program);
    if let Some(file) = file {
        command.env("CONTAINERS_CONF", file);
    }
    // The check must not touch this machine's storage.
    for (flag, name) in [("--root", "root"), ("--runroot", "run"), ("--tmpdir", "tmp")] {
        command.arg(flag).arg(scratch.join(name));
    }
    command.args(["--storage-driver", "vfs", "--events-backend", "file"]);
    if let Some(runtime) = runtime.filter(|runtime| !runtime.default) {
        command.arg("--runtime").arg(&runtime.name);
    }
    let output = output(command.args(["info", "--format", "{{.Host.OCIRuntime.Path}}"]))?;
    ensure!(output.status.success(), "podman would not take the new settings: {}", complaint(&output));
    let path = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if let Some(runtime) = runtime.filter(|runtime| runtime.path != path) {
        refuse(program, Some(format!("podman would run {path:?} for {:?}", runtime.name)))?;
    }
    Ok("podman info".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_several_programs_the_one_that_runs_is_asked() {
        let installed = ["/usr/local/bin/containerd", "/usr/bin/containerd"];
        for (runs, want) in [
            (&[][..], installed[0]),
            (&installed[..1], installed[0]),
            (&installed[1..], installed[1]),
            (&installed[..], installed[0]),
            (&["/tmp/containerd"], installed[0]),
        ] {
            let found = chosen(installed.map(PathBuf::from).to_vec(), |program| {
                runs.iter().any(|running| program == Path::new(running))
            });
            assert_eq!(found, Some(PathBuf::from(want)), "{runs:?} run");
        }
        assert_eq!(chosen(vec![], |_| true), None);
        assert!(running(Path::new("/proc/self/exe")) && !running(Path::new("/etc/hostname")));
    }

    #[test]
    fn a_program_that_is_named_is_asked_and_none_else() {
        let program = std::env::current_exe().unwrap();
        let checker = Checker::new(Engine::Containerd, Some(&program)).unwrap();
        assert_eq!(checker.program, Some(program));
        for path in ["containerd", "/no/such/containerd"] {
            assert!(Checker::new(Engine::Containerd, Some(Path::new(path))).is_err(), "{path}");
        }
    }
}
